"""What the examples print with: sections and tables from rank 0, a progress bar, lines by rank.

Also the Inductor pass that notes the collectives of a compiled graph.
"""

import shutil
import sys

import torch
import torch.distributed as dist
from torch._inductor.custom_graph_pass import CustomGraphPass


def print_by_rank(text: str):
    """Print ``[rank r] text`` of every rank, in rank order, without lines running together."""
    lines = [None] * dist.get_world_size()
    dist.all_gather_object(lines, text)
    if dist.get_rank() == 0:
        for rank, line in enumerate(lines):
            print(f"[rank {rank}] {line}")
        sys.stdout.flush()


class Report:
    """Sections, tables and a progress bar; silent on every rank but 0."""

    def __init__(self, rank: int):
        self.quiet = rank != 0
        self.tty = sys.stdout.isatty()
        self.drawing = False  # the cursor stands at the end of a progress bar

    def line(self, text: str = ""):
        if not self.quiet:
            print("\r\033[K" * self.drawing + f"   {text}".rstrip(), flush=True)
            self.drawing = False

    def section(self, title: str):
        if not self.quiet:
            bold, plain = ("\033[1m", "\033[0m") if self.tty else ("", "")
            print(f"\n{bold}-- {title} {'-' * (92 - len(title))}{plain}", flush=True)

    def table(self, head: list[str], rows: list[list], left: int):
        """Align columns: the first ``left`` of them to the left, the others to the right."""
        cells = [[str(cell) for cell in row] for row in [head, *rows]]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        cells.insert(1, ["-" * width for width in widths])
        for row in cells:
            pairs = list(zip(row, widths, strict=True))
            start, end = pairs[:left], pairs[left:]
            self.line("   ".join([c.ljust(w) for c, w in start] + [c.rjust(w) for c, w in end]))

    def progress(self, done: int, total: int, text: str):
        """One line redrawn in place on a terminal; ten plain lines in a log."""
        tenth = done * 10 // total != (done - 1) * 10 // total
        if self.quiet or not (self.tty or tenth):
            return
        room = max(0, min(40, shutil.get_terminal_size().columns - len(text) - 14))
        full = done * room // total
        bar = f"   [{'#' * full}{'.' * (room - full)}] {done / total:4.0%}  {text}"
        print("\r\033[K" * self.drawing + bar, end="" if self.tty else "\n", flush=True)
        self.drawing = self.tty
        if done == total and self.tty:
            print()
            self.drawing = False


class CollectiveRecorder(CustomGraphPass):
    """An Inductor pass that changes nothing and notes the collectives of each graph it is given.

    Hand it to ``torch.compile(options={"post_grad_custom_post_pass": recorder})``. Inductor calls
    it with the forward graph, then with the backward graph, before generating code for them.
    """

    def __init__(self):
        #: For each graph, how often it has (op, reduce op, group, input shape, dtype, input bytes).
        self.graphs: list[dict[tuple, int]] = []

    def uuid(self):
        return None  # never answer from Inductor's cache: that would skip the recording

    def __call__(self, graph: torch.fx.Graph):
        counts: dict[tuple, int] = {}
        for call in graph.nodes:
            op = call.target
            if not isinstance(op, torch._ops.OpOverload) or "c10d" not in op.namespace:
                continue
            args = {a.name: v for a, v in zip(op._schema.arguments, call.args, strict=False)}
            if "group_name" not in args:  # wait_tensor
                continue
            first = call.args[0]
            nodes = first if isinstance(first, list | tuple) else [first]
            inputs = [node.meta["val"] for node in nodes]
            shape = f"{tuple(inputs[0].shape)}" if len(inputs) == 1 else f"{len(inputs)} tensors"
            dtype = str(inputs[0].dtype).removeprefix("torch.")
            size = sum(t.numel() * t.element_size() for t in inputs)
            name = op._schema.name.split("::")[1]
            key = (name, args.get("reduce_op", ""), args["group_name"], shape, dtype, size)
            counts[key] = counts.get(key, 0) + 1
        self.graphs.append(counts)
