"""Draws the pictures of docs/design.md: ``python tools/draw_design.py``.

    python tools/draw_design.py            # writes docs/design-*.svg
    python tools/draw_design.py --check    # whether they are what this script draws

Plain SVG, made here, so that a drawing changes in the commit that changes what it shows.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"

# Fill and border of a box, by what it stands for.
KINDS = {
    "user": ("#f3f3f3", "#888888"),
    "torch": ("#fdebd8", "#c77d2e"),
    "python": ("#fff8cf", "#b59b00"),
    "ours": ("#e3eefb", "#3a6ea5"),
    "backend": ("#e2f3e4", "#3c8a48"),
    "shared": ("#f3e6f7", "#8a4a9e"),
    "fault": ("#fde4e4", "#b83a3a"),
    "plain": ("#ffffff", "#555555"),
}
FONT, LINE = 13, 17


class Drawing:
    """An SVG document; positions in pixels from the upper left."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.size, self.title = (width, height), title
        self.parts: list[str] = []

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: int = FONT,
        anchor: str = "start",
        weight: str = "normal",
        color: str = "#222222",
    ) -> None:
        """Lines of text; ``y`` is the middle of the first one."""
        for index, line in enumerate(text.split("\n")):
            self.parts.append(
                f'<text x="{x:g}" y="{y + index * (size + 4) + size * 0.36:g}" font-size="{size}" '
                f'text-anchor="{anchor}" font-weight="{weight}" fill="{color}">'
                f"{escape(line)}</text>"
            )

    def box(
        self,
        x: float,
        y: float,
        w: float,
        h: float,
        text: str = "",
        kind: str = "plain",
        **how: str,
    ) -> None:
        """A rectangle with its text in the middle; a first line ending in ``:`` is a heading."""
        fill, stroke = KINDS[kind]
        dash = ' stroke-dasharray="5 4"' if how.get("line") == "dashed" else ""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="4" fill="{fill}" '
            f'stroke="{stroke}" stroke-width="1.3"{dash}/>'
        )
        lines = text.split("\n")
        if how.get("align") == "top":
            middle = y + 14
        else:
            middle = y + h / 2 - (len(lines) - 1) * LINE / 2
        for index, line in enumerate(lines):
            heading = line.endswith(":") and index == 0 and len(lines) > 1
            self.text(
                x + w / 2,
                middle + index * LINE,
                line.removesuffix(":") if heading else line,
                size=FONT if heading or len(lines) == 1 else FONT - 1,
                anchor="middle",
                weight="bold" if heading else "normal",
            )

    def arrow(
        self,
        x1: float,
        y1: float,
        x2: float,
        y2: float,
        text: str = "",
        *,
        dashed: bool = False,
        color: str = "#444444",
        side: float = -8,
    ) -> None:
        """From one point to another; the text beside its middle."""
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.parts.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{color}" '
            f'stroke-width="1.3" marker-end="url(#head)"{dash}/>'
        )
        if text and x1 == x2:
            self.text(x1 + 7, (y1 + y2) / 2, text, size=FONT - 2, color=color)
        elif text:
            self.text(
                (x1 + x2) / 2,
                (y1 + y2) / 2 + side,
                text,
                size=FONT - 2,
                anchor="middle",
                color=color,
            )

    def line(self, x1: float, y1: float, x2: float, y2: float, color: str = "#bbbbbb") -> None:
        """A thin dashed line without a head."""
        self.parts.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{color}" '
            'stroke-dasharray="3 3"/>'
        )

    def svg(self) -> str:
        """The document."""
        width, height = self.size
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" font-family="Helvetica, Arial, sans-serif">'
        )
        marker = (
            '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" '
            'markerHeight="7" orient="auto-start-reverse">'
            '<path d="M 0 0 L 10 5 L 0 10 z" fill="#444444"/></marker></defs>'
        )
        paper = f'<rect width="{width}" height="{height}" fill="#ffffff"/>'
        title = f"<title>{escape(self.title)}</title>"
        return "\n".join([head, title, marker, paper, *self.parts, "</svg>\n"])


def layers() -> Drawing:
    """What a call passes through, top to bottom."""
    d = Drawing(900, 560, "Layers of torch_c10d_ext")
    d.box(20, 15, 200, 44, "user code, DDP, DTensor, …", "user")
    d.box(240, 15, 200, 44, "torch.compile, export, LTC", "user")
    d.box(460, 15, 420, 44, "torch.distributed: groups, stores, ranks, DeviceMesh", "torch")
    d.box(
        20,
        95,
        200,
        62,
        "functional:\nAsyncCollectiveTensor\nin eager, graph nodes traced",
        "python",
    )
    d.box(
        240,
        95,
        200,
        62,
        "distributed:\ndrop-in: in place, async_op,\ncoalescing, messages",
        "python",
    )
    d.box(
        460,
        95,
        420,
        62,
        "torch_c10d_ext/ops/<stem>.py:\ndocstring, vmap rule, Inductor lowering",
        "python",
    )
    d.box(
        20,
        190,
        860,
        40,
        "torch.ops.c10d_ext.*   one schema per collective, plain data only",
        "torch",
    )
    d.box(
        20,
        262,
        860,
        62,
        "csrc/ops/<stem>.cpp:\nschema · checks · kernel for CPU, CUDA, Meta · derivative · "
        "functionalization · registrations",
        "ours",
    )
    d.box(
        20,
        356,
        420,
        62,
        "request:\none collective: its tensors, op type, reduction, sizes,\nand its fingerprint",
        "ours",
    )
    d.box(
        460,
        356,
        420,
        62,
        "work:\nqueued, running, done, failed; a table from\na result's storage to its work",
        "ours",
    )
    backends = {
        "shm": "ranks of one\nmachine over\nshared memory",
        "adapter": "any c10d::Backend,\nwith a table of\nwhat it can do",
        "checked": "agreement before\ndata and liveness,\naround a backend",
        "mpi": "an MPI library,\nopened at\nrun time",
        "hierarchical": "several hosts: shm\ninside, another\nbackend between",
    }
    d.box(452, 442, 288, 106, line="dashed")
    for index, (name, job) in enumerate(backends.items()):
        d.box(20 + 146 * index, 450, 130, 90, f"{name}:\n{job}", "backend")
    d.box(750, 450, 130, 90, "control:\nrendezvous,\nconnections,\nliveness", "shared")
    for x in (120, 340, 670):
        d.arrow(x, 59, x, 93)
        d.arrow(x, 157, x, 188)
    d.arrow(450, 230, 450, 260)
    d.arrow(230, 324, 230, 354, "submit")
    d.arrow(670, 324, 670, 354, "attach to the result's storage")
    for x in (85, 231, 377):
        d.arrow(x, 418, x, 448)
    d.arrow(440, 387, 458, 387)
    # checked is put around either of the next two, or around gloo.
    d.arrow(442, 495, 450, 495)
    return d


def calls() -> Drawing:
    """One all_reduce in eager and in a compiled graph."""
    d = Drawing(900, 545, "Life of an eager and of a compiled call")
    lanes = {"Python": 95, "dispatcher": 265, "kernel": 430, "backend": 600, "other ranks": 790}
    for top, title in (
        (20, "eager: y = functional.all_reduce(x, 'sum', group)"),
        (310, "compiled: the same line under torch.compile"),
    ):
        d.text(20, top, title, weight="bold")
        for name, x in lanes.items():
            d.box(x - 65, top + 16, 130, 26, name, "user" if name == "Python" else "plain")
            d.line(x, top + 42, x, top + 230 + (40 if top < 200 else 0))

    def steps(top: float, entries: Sequence[tuple[str, str, str, bool]]) -> None:
        names = list(lanes)
        for index, (start, end, text, dashed) in enumerate(entries):
            y = top + 62 + index * 27
            x1, x2 = lanes[start], lanes[end]
            if start == end:
                d.box(x1 - 78, y - 11, 156, 22, "", "ours" if start == "kernel" else "python")
                d.text(x1, y, text, size=FONT - 2, anchor="middle")
            else:
                direction = 1 if names.index(end) > names.index(start) else -1
                d.arrow(x1, y, x2 - 2 * direction, y, text, dashed=dashed)

    steps(
        20,
        [
            ("Python", "dispatcher", "fast call, no boxing", False),
            ("dispatcher", "kernel", "autograd, then CPU", False),
            ("kernel", "kernel", "check, allocate, snapshot x", False),
            ("kernel", "backend", "submit(request)", False),
            ("backend", "other ranks", "header, then data", False),
            ("backend", "kernel", "work of y's storage", True),
            ("kernel", "Python", "y: AsyncCollectiveTensor with its history, at once", True),
            (
                "Python",
                "backend",
                "y + 1, the first use, waits: the calling thread drives the collective itself",
                False,
            ),
        ],
    )
    steps(
        310,
        [
            ("Python", "dispatcher", "Dynamo: op, wait", False),
            ("dispatcher", "kernel", "Meta: the same checks", False),
            ("dispatcher", "Python", "AOTAutograd: graphs", True),
            ("Python", "Python", "Inductor: places waits", False),
            ("Python", "dispatcher", "each run: the op", False),
            (
                "dispatcher",
                "backend",
                "as in eager; the graph holds the wait, so no subclass",
                False,
            ),
        ],
    )
    return d


def memory() -> Drawing:
    """Where things lie in the mapping of a group."""
    d = Drawing(900, 430, "Shared memory of an shm group")
    d.text(
        20,
        18,
        "one sealed memfd per group, mapped by every rank; below, the part of one rank",
        weight="bold",
    )
    d.box(20, 38, 130, 48, "header:\npoison", "fault")
    for index, x in enumerate((150, 400, 650)):
        name = f"rank {index}" if index < 2 else "… rank N-1"
        d.box(x, 38, 250 if index < 2 else 150, 48, f"{name}'s part", "shared")
    d.box(800, 38, 80, 48, "pulses:\nliveness", "fault")
    d.line(150, 86, 20, 128)
    d.line(400, 86, 880, 128)
    parts = [
        ("control:\nstage · core\nbell · sleepers\nleft", 130, "ours"),
        ("tables:\nsizes of parts,\neven and odd\ncollective", 130, "ours"),
        ("header + eager:\n64 B + up to\n128 KiB; even, odd", 170, "backend"),
        ("mailboxes:\none per peer:\nenvelopes, counters,\ntwo halves", 190, "python"),
        ("bulk:\nthe arena for everything\nlarger, in chunks", 240, "backend"),
    ]
    at = 20.0
    for text, width, kind in parts:
        d.box(at, 128, width, 92, text, kind)
        at += width
    notes = {
        "control": "stage: (collective number << 24) | step. One writer, only grows. Peers poll "
        "it, then sleep on their own bell (futex).",
        "header": "what the rank has entered: op, dtype, reduce op, root, bytes, shapes. Peers "
        "copy it and compare it with their own\nbefore they touch data. Nothing that a peer "
        "writes is used as a bound or an index.",
        "eager": "small payloads, written before the collective is announced. Two ranks swap "
        "places each time: a rank writes\nthe cache lines that it has just read.",
        "bulk": "free from the moment that every rank has entered: larger payloads, in chunks.",
        "mailbox": "the sender announces an envelope, the receiver grants it, the data flows "
        "through two halves. One writer per counter.",
        "poison": "the first abort or timeout, which one rank makes every rank's.",
        "pulse": "a robust futex that each rank's watcher owns: the kernel marks it when the "
        "process begins to end.",
    }
    y = 246.0
    for name, text in notes.items():
        d.text(24, y, name, size=12, weight="bold")
        d.text(96, y, text, size=12)
        y += 20 + 16 * text.count("\n")
    return d


def rendezvous() -> Drawing:
    """How ranks come to share memory, and how they hear of an end."""
    d = Drawing(900, 600, "Rendezvous and death")
    lanes = {"rank 0": 130, "store": 330, "rank 1": 530, "kernel": 780}
    d.text(20, 18, "making a group", weight="bold")
    for name, x in lanes.items():
        d.box(x - 60, 32, 120, 26, name, "torch" if name == "store" else "plain")
        d.line(x, 58, x, 585)

    def step(
        y: float, start: str, end: str, text: str, color: str = "#444444", dashed: bool = False
    ) -> None:
        shift = 2 if lanes[end] > lanes[start] else -2
        d.arrow(lanes[start], y, lanes[end] - shift, y, text, color=color, dashed=dashed)

    def note(y: float, where: str, text: str, kind: str = "ours", width: float = 190) -> None:
        d.box(lanes[where] - width / 2, y - 12, width, 24, "", kind)
        d.text(lanes[where], y, text, size=FONT - 2, anchor="middle")

    step(84, "rank 0", "store", "socket name, secret")
    step(110, "store", "rank 1", "the same")
    step(
        136,
        "rank 1",
        "rank 0",
        "Hello: secret, pid; read end of its pipe (abstract AF_UNIX socket)",
    )
    note(164, "rank 0", "memfd: allocated, sealed")
    step(192, "rank 0", "rank 1", "Offer: memfd and read ends of all pipes (SCM_RIGHTS)")
    note(220, "rank 1", "checks size and seals, maps")
    step(248, "rank 1", "rank 0", "Answer: mapped, or why not", dashed=True)
    step(274, "rank 0", "rank 1", "Verdict: all share memory, or all fall back, for one reason")
    d.text(20, 306, "the end of rank 0", weight="bold")
    note(330, "rank 0", "dies, or leaves", "fault")
    step(356, "rank 0", "kernel", "exit: threads are stopped", "#b83a3a")
    step(384, "kernel", "rank 1", "marks the pulse, wakes a sleeper", "#b83a3a")
    step(412, "kernel", "rank 1", "closes the pipe, memory freed", "#b83a3a")
    note(442, "rank 1", "every wait looks at both", "ours")
    note(472, "rank 1", "RankLost: rank, pid, op, seq", "fault", 210)
    d.text(20, 506, "where ranks share no memory (fall-back, checked backends)", weight="bold")
    step(532, "rank 1", "rank 0", "fingerprint of what it calls; rank 0 compares them all")
    step(
        558,
        "rank 0",
        "rank 1",
        "begin, or the mismatch; end of connection = end of rank",
        dashed=True,
    )
    return d


# What each folder of csrc is for, in the order in which tests/test_layout.py stacks them.
JOBS = {
    "python": "the module: bindings of one thing each, coalescing blocks",
    "ops": "one collective per file: schema, checks, kernel, derivative",
    "frontend": "what ops are made with: forms, autograd, lazy, async tensors, fast calls",
    "collectives": "submit(group, request); messages",
    "backends": "their interface; adapter, checked, hierarchical, mpi, shm",
    "work": "works, their table by storage, futures, snapshots of inputs",
    "control": "processes, connections, rendezvous, groups by name",
    "kernels": "copies and reductions in memory, for each instruction set",
    "base": "types, errors, fingerprints, reductions, memory",
}


def layers_of_the_tree() -> list[str]:
    """The folders of csrc, lowest first, as the layout's test has them."""
    for node in ast.parse((ROOT / "tests" / "test_layout.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "LAYERS":
            return list(ast.literal_eval(node.value))
    raise LookupError("tests/test_layout.py has no LAYERS")


def includes() -> set[tuple[str, str]]:
    """Pairs of folders of csrc: a file of the first includes one of the second."""
    csrc = ROOT / "csrc"
    found = set()
    for path in (*csrc.rglob("*.cpp"), *csrc.rglob("*.h")):
        for name in re.findall(r'^#include "([^"/]+)/', path.read_text(), re.MULTILINE):
            found.add((path.relative_to(csrc).parts[0], name))
    return found


def callers() -> Drawing:
    """Which folder includes which, read from the sources."""
    names = layers_of_the_tree()[::-1]
    edges = includes()
    d = Drawing(900, 60 + 44 * len(names), "Who may include whom")
    d.text(20, 18, "may include what is below it; filled: does", weight="bold")
    for row, name in enumerate(names):
        y = 40 + 44 * row
        d.box(20, y, 110, 34, name, "ours")
        d.text(142, y + 17, JOBS[name], size=12)
        for column, other in enumerate(names):
            x = 590 + 37 * column
            if column > row:
                d.box(x, y, 30, 34, "", "ours" if (name, other) in edges else "plain")
            elif column == row:
                d.text(x + 15, y + 17, other[:4], size=10, anchor="middle")
    return d


DRAWINGS: dict[str, Callable[[], Drawing]] = {
    "layers": layers,
    "calls": calls,
    "memory": memory,
    "rendezvous": rendezvous,
    "callers": callers,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the drawings, or compares them."""
    parser = argparse.ArgumentParser(description="the pictures of docs/design.md")
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    options = parser.parse_args(arguments)
    stale = []
    for name, draw in DRAWINGS.items():
        path, svg = DOCS / f"design-{name}.svg", draw().svg()
        if options.check:
            if not path.exists() or path.read_text() != svg:
                stale.append(path.name)
        else:
            path.write_text(svg)
    if stale:
        print(f"not what tools/draw_design.py draws: {', '.join(stale)}")
    return int(bool(stale))


if __name__ == "__main__":
    sys.exit(main())
