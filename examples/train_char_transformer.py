"""Train a small character-level transformer with tensor, sequence and data parallelism.

    python -m torch.distributed.run --standalone --nproc-per-node 2 \
        examples/train_char_transformer.py

The text is the prose of Python's own language reference (``pydoc_data.topics``). The ranks form a
2-D mesh (dp, tp): 2 ranks are 1 x 2, 4 ranks are 2 x 2, and 1 rank trains alone. Every collective
is a call of ``torch_c10d_ext.functional``, so the same code runs eagerly and, under
``torch.compile(fullgraph=True)``, becomes one forward and one backward graph with the
communication inside.

How the model is split over the ``tp`` ranks (Megatron-LM, arXiv:1909.08053 and 2205.05198), where
B is the batch, T the sequence length, D the width and N the number of tp ranks:

    residual stream   (B, T/N, D)  each rank owns a piece of the sequence; embedding, norms and the
                                   loss see only that piece ("sequence parallel")
         | all_gather over T       backward: reduce_scatter
    attention, MLP    (B, T, D)    each rank owns D/N of the heads / hidden units:
                                   first matrix split by output rows ("column parallel"),
                                   second by input columns ("row parallel"): a partial sum
         | reduce_scatter over T   backward: all_gather; adds up the partial sums
    residual stream   (B, T/N, D)

Expected output: a falling loss, the same losses (to a printed tolerance) from the compiled run, an
eager run and a 1-rank model that never communicates, the collectives in the compiled graphs,
tokens per second, and a sentence written by the trained model. The last line reads "All checks
passed".
"""

import argparse
import math
import re
import textwrap
import time
from dataclasses import dataclass
from datetime import timedelta
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
import torch.nn.functional as F
from reporting import CollectiveRecorder, Report
from torch.distributed.device_mesh import init_device_mesh

import torch_c10d_ext.functional as fc

Params = dict[str, torch.Tensor]

TOLERANCE = 1e-5  # on a loss near 4, after at most --compared steps


@dataclass(frozen=True)
class Config:
    """Sizes of the model and of the run; ``batch`` counts sequences over all dp ranks."""

    vocab: int
    steps: int
    width: int = 128
    heads: int = 4
    layers: int = 2
    length: int = 64
    batch: int = 20
    lr: float = 5e-3
    seed: int = 20


@dataclass(frozen=True)
class Parallel:
    """The groups this rank belongs to, by name; a group of one rank is None: nothing to send."""

    tp: str | None = None
    dp: str | None = None
    tp_rank: int = 0
    tp_size: int = 1
    dp_rank: int = 0
    dp_size: int = 1


# --- The text -----------------------------------------------------------------------------------


def load_text() -> str:
    """Return the prose paragraphs of Python's language reference, one per line, ASCII only."""
    paragraphs = []
    for name in sorted(topics):
        for block in re.split(r"\n\s*\n", topics[name]):
            line = re.sub(r"[^ -~]|[_*]", "", " ".join(block.split()))
            plain = sum(c.isalpha() or c in " ,." for c in line)
            if len(line) > 80 and line.endswith(".") and plain > 0.95 * len(line):
                paragraphs.append(line)
    return "\n".join(dict.fromkeys(paragraphs))


def batches(data: torch.Tensor, cfg: Config):
    """Yield the same endless sequence of (batch, length + 1) token blocks on every rank."""
    generator = torch.Generator().manual_seed(cfg.seed)
    window = torch.arange(cfg.length + 1)
    while True:
        start = torch.randint(len(data) - cfg.length - 1, (cfg.batch, 1), generator=generator)
        yield data[start + window]


def my_piece(block: torch.Tensor, par: Parallel) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut this rank's (inputs, targets) out of a block: rows by dp rank, positions by tp rank."""
    rows = block.chunk(par.dp_size)[par.dp_rank]
    inputs, targets = rows[:, :-1], rows[:, 1:]
    return tuple(t.chunk(par.tp_size, 1)[par.tp_rank].contiguous() for t in (inputs, targets))


# --- The model: plain functions of a dict of weights --------------------------------------------


def split_dim(name: str) -> int | None:
    """The dimension along which a weight is split over tp; None: every rank holds all of it."""
    by_kind = {"qkv": 1, "up": 0, "proj": 1, "down": 1}
    return by_kind.get(name.split(".")[-1])


def init_params(cfg: Config) -> Params:
    """The full weights, the same on every rank."""
    g = torch.Generator().manual_seed(cfg.seed)
    d = cfg.width

    def normal(*shape, std=0.02):
        return torch.randn(shape, generator=g) * std

    params = {"token": normal(cfg.vocab, d, std=1.0)}
    for i in range(cfg.layers):
        params[f"{i}.norm1"] = torch.ones(d)
        params[f"{i}.qkv"] = normal(3, d, d, std=d**-0.5)
        params[f"{i}.proj"] = normal(d, d, std=d**-0.5 / cfg.layers)
        params[f"{i}.norm2"] = torch.ones(d)
        params[f"{i}.up"] = normal(4 * d, d, std=d**-0.5)
        params[f"{i}.down"] = normal(d, 4 * d, std=(4 * d) ** -0.5 / cfg.layers)
    params["norm"] = torch.ones(d)
    params["head"] = normal(cfg.vocab, d)
    return params


def shard(full: Params, par: Parallel) -> Params:
    """This rank's slice of every weight, as trainable leaves."""
    mine = {}
    for name, w in full.items():
        dim = split_dim(name)
        piece = w if dim is None else w.chunk(par.tp_size, dim)[par.tp_rank]
        mine[name] = piece.clone(memory_format=torch.contiguous_format).requires_grad_()
    return mine


def unshard(mine: Params, par: Parallel) -> Params:
    """The inverse of shard: gather the slices back into full weights."""
    full = {name: w.detach() for name, w in mine.items()}
    for name, w in full.items():
        dim = split_dim(name)
        if par.tp and dim is not None:
            full[name] = fc.wait_tensor(fc.all_gather_single(w, dim, par.tp))
    return full


def gather_sequence(x: torch.Tensor, par: Parallel) -> torch.Tensor:
    """(B, T/N, D) -> (B, T, D). The gradient is reduce-scattered back."""
    return fc.all_gather_single(x, 1, par.tp) if par.tp else x


def scatter_sequence(x: torch.Tensor, par: Parallel) -> torch.Tensor:
    """(B, T, D) partial sums -> (B, T/N, D) sums. The gradient is all-gathered back."""
    return fc.reduce_scatter_single(x, "sum", 1, par.tp) if par.tp else x


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding (arXiv:2104.09864) of (B, heads, T, head_dim)."""
    half = x.size(-1) // 2
    angle = torch.arange(x.size(2))[:, None] * 10000.0 ** (-torch.arange(half) / half)
    a, b = x.chunk(2, -1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


def attention(x: torch.Tensor, qkv: torch.Tensor, proj: torch.Tensor, head_dim: int):
    """Causal attention over the heads this rank owns: (B, T, D) -> (B, T, D), a partial sum."""
    q, k, v = F.linear(x, qkv.flatten(0, 1)).unflatten(-1, (3, -1, head_dim)).unbind(2)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    out = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
    return F.linear(out.transpose(1, 2).flatten(2), proj)


def mlp(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """The hidden units this rank owns: (B, T, D) -> (B, T, D), a partial sum."""
    return F.linear(F.gelu(F.linear(x, up)), down)


def logits_of(p: Params, tokens: torch.Tensor, cfg: Config, par: Parallel) -> torch.Tensor:
    """(B, T/N) tokens -> (B, T/N, vocab) scores of the next character."""
    d = cfg.width
    x = p["token"][tokens]
    for i in range(cfg.layers):
        h = gather_sequence(F.rms_norm(x, (d,), p[f"{i}.norm1"]), par)
        h = attention(h, p[f"{i}.qkv"], p[f"{i}.proj"], d // cfg.heads)
        x = x + scatter_sequence(h, par)
        h = gather_sequence(F.rms_norm(x, (d,), p[f"{i}.norm2"]), par)
        x = x + scatter_sequence(mlp(h, p[f"{i}.up"], p[f"{i}.down"]), par)
    return F.linear(F.rms_norm(x, (d,), p["norm"]), p["head"])


class SyncGradients(torch.autograd.Function):
    """Identity on the weights whose backward makes their gradients agree between the ranks.

    A weight that every tp rank holds in full has seen only this rank's piece of the sequence, so
    its gradient is summed over tp. Each dp rank has seen other rows, so all are averaged over dp.
    Both are one coalesced collective, and both are part of the compiled backward graph.
    """

    @staticmethod
    def forward(ctx, par: Parallel, shared: tuple[bool, ...], *weights):
        ctx.par, ctx.shared = par, shared
        return tuple(w.view_as(w) for w in weights)

    @staticmethod
    def backward(ctx, *of_weights):
        par, grads = ctx.par, list(of_weights)
        if par.tp:
            where = [i for i, whole in enumerate(ctx.shared) if whole]
            summed = fc.all_reduce_coalesced([grads[i] for i in where], "sum", par.tp)
            for i, g in zip(where, summed, strict=True):
                grads[i] = fc.wait_tensor(g)
        if par.dp:
            grads = [fc.wait_tensor(g) for g in fc.all_reduce_coalesced(grads, "avg", par.dp)]
        return None, None, *grads


def loss_of(p: Params, tokens, targets, cfg: Config, par: Parallel):
    """Return (loss to differentiate, loss to report): this dp rank's mean, and the global mean."""
    if par.tp or par.dp:
        shared = tuple(split_dim(name) is None for name in p)
        p = dict(zip(p, SyncGradients.apply(par, shared, *p.values()), strict=True))
    logits = logits_of(p, tokens, cfg, par)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten()) / par.tp_size
    if par.tp:  # sum of the pieces; identity in backward: each rank differentiates its own piece
        loss = fc.reduce_from_group(loss, par.tp)
    mean = fc.all_reduce(loss.detach(), "avg", par.dp) if par.dp else loss.detach()
    return loss, mean


# --- Training -----------------------------------------------------------------------------------


def train(step_loss, params: Params, data, cfg: Config, par: Parallel, steps: int, each=None):
    """Run ``steps`` steps; return every step's loss and the median seconds of a step."""
    optimizer = torch.optim.AdamW(params.values(), lr=cfg.lr, weight_decay=0.01, fused=True)
    losses, seconds = [], []
    for step, block in zip(range(steps), batches(data, cfg), strict=False):
        begin = time.perf_counter()
        warm, done = min(1.0, (step + 1) / 20), step / cfg.steps
        optimizer.param_groups[0]["lr"] = cfg.lr * warm * (0.55 + 0.45 * math.cos(math.pi * done))
        loss, mean = step_loss(params, *my_piece(block, par), cfg, par)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(mean.item())
        seconds.append(time.perf_counter() - begin)
        if each:
            each(step, losses[-1])
    return losses, sorted(seconds)[len(seconds) // 2]


@torch.no_grad()
def sample(full: Params, chars: str, cfg: Config, prompt: str, length: int) -> str:
    """Continue ``prompt`` with the 1-rank model and the full weights."""
    generator = torch.Generator().manual_seed(cfg.seed + 1)
    ids = [chars.index(c) for c in prompt]
    for _ in range(length):
        scores = logits_of(full, torch.tensor([ids[-cfg.length :]]), cfg, Parallel())[0, -1]
        chance = torch.softmax(scores / 0.5, -1)
        ids.append(int(torch.multinomial(chance, 1, generator=generator)))
    return "".join(chars[i] for i in ids)


def check(ok: bool, what: str):
    """Fail the run on every rank with a message naming what did not hold."""
    if not ok:
        raise SystemExit(f"check failed: {what}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400, help="training steps (default 400)")
    parser.add_argument("--compared", type=int, default=20, help="steps to repeat (default 20)")
    parser.add_argument("--quick", action="store_true", help="a tiny model, for tests")
    args = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    try:
        run(args)
    finally:
        dist.destroy_process_group()


def run(args):
    began = time.perf_counter()
    world, rank = dist.get_world_size(), dist.get_rank()
    tp_size = 2 if world % 2 == 0 else 1
    mesh = init_device_mesh("cpu", (world // tp_size, tp_size), mesh_dim_names=("dp", "tp"))
    names = {dim: mesh.get_group(dim).group_name for dim in mesh.mesh_dim_names}
    par = Parallel(
        tp=names["tp"] if tp_size > 1 else None,
        dp=names["dp"] if world > tp_size else None,
        tp_rank=mesh.get_local_rank("tp"),
        tp_size=tp_size,
        dp_rank=mesh.get_local_rank("dp"),
        dp_size=world // tp_size,
    )
    say = Report(rank)

    text = load_text()
    chars = "".join(sorted(set(text)))
    data = torch.tensor([chars.index(c) for c in text])
    small = dict(width=32, layers=1, length=32, batch=8) if args.quick else {}
    cfg = Config(vocab=len(chars), steps=args.steps, **small)
    check(cfg.batch % par.dp_size == 0, f"batch {cfg.batch} divides over {par.dp_size} dp ranks")
    full = init_params(cfg)
    mine, alone = shard(full, par), Parallel()
    total, local = (sum(w.numel() for w in p.values()) for p in (full, mine))
    tokens = cfg.batch * cfg.length

    say.section("A character-level transformer, tensor-parallel")
    say.line(f"text    {len(text):,} characters of pydoc_data.topics, {len(chars)} distinct")
    say.line(f"model   {cfg.layers} layers, width {cfg.width}, {total:,} weights")
    say.line(f"ranks   {world} = {par.dp_size} dp x {par.tp_size} tp, {local:,} weights on each")
    say.line(f"torch   {torch.__version__}, gloo, one thread per rank")

    say.section(f"Training: {cfg.steps} steps of {tokens:,} tokens")
    say.line("torch.compile(fullgraph=True) makes a forward and a backward graph of the loss, all")
    say.line("communication inside, gradient averaging too; loss.backward() runs the second one.")
    say.line("The optimizer, a fused AdamW on this rank's shards, is not part of the graphs.")
    recorder = CollectiveRecorder()
    options = {"post_grad_custom_post_pass": recorder}
    compiled = torch.compile(loss_of, fullgraph=True, options=options)
    say.progress(0, cfg.steps, "compiling")
    start = time.perf_counter()

    def redraw(step: int, loss: float):
        nonlocal start
        if step == 0:
            say.line(f"compiled in {time.perf_counter() - start:.1f} s")
            start = time.perf_counter()
        rate = tokens * step / (time.perf_counter() - start)
        text = f"step {step + 1:{len(str(cfg.steps))}}/{cfg.steps}  loss {loss:.3f}"
        say.progress(step + 1, cfg.steps, f"{text}  {rate:7,.0f} tokens/s")

    losses, fast = train(compiled, mine, data, cfg, par, cfg.steps, redraw)
    check(len(recorder.graphs) == 2, f"2 graphs, got {len(recorder.graphs)}: one each way")

    steps = min(args.compared, args.steps)
    say.section(f"The same first {steps} steps, computed three ways")
    eager, slow = train(loss_of, shard(full, par), data, cfg, par, steps)
    reference, _ = train(loss_of, shard(full, alone), data, cfg, alone, steps)
    runs = list(zip(losses, eager, reference, strict=False))
    spread = [max(three) - min(three) for three in runs]
    shown = sorted({*range(0, steps, max(1, steps // 5)), steps - 1})
    rows = [[i + 1, *(f"{x:.6f}" for x in runs[i]), f"{spread[i]:.1e}"] for i in shown]
    say.table(["step", "compiled", "eager", "1 rank, no collectives", "spread"], rows, left=0)
    say.line(f"largest spread {max(spread):.1e}, tolerance {TOLERANCE:.0e}")
    check(max(spread) <= TOLERANCE, f"losses agree to {TOLERANCE}, got {max(spread)}")

    say.section("Collectives in the compiled graphs, per step and rank")
    dims = {name: dim for dim, name in names.items()}
    rows = [
        [phase, op, reduce_op, dims[group], shape, dtype, count, f"{count * size:,}"]
        for phase, graph in zip(("forward", "backward"), recorder.graphs, strict=True)
        for (op, reduce_op, group, shape, dtype, size), count in graph.items()
    ]
    head = ["graph", "op", "reduce", "group", "input", "dtype", "count", "input bytes"]
    say.table(head, rows, left=6)

    say.section("Speed")
    rows = [
        [run, f"{seconds * 1e3:.1f}", f"{tokens / seconds:,.0f}", f"{slow / seconds:.2f}"]
        for run, seconds in (("compiled", fast), ("eager", slow))
    ]
    say.table(["run", "ms per step (median)", "tokens/s", "times eager"], rows, left=1)

    say.section("Written by the trained model")
    trained = unshard(mine, par)  # a collective: every rank takes part
    if rank == 0:
        written = sample(trained, chars, cfg, "The ", 300)
        sentences = written[: written.rfind(".") + 1] or written
        for line in textwrap.wrap(sentences, 88):
            say.line(line)

    first, last = losses[0], sum(losses[-10:]) / len(losses[-10:])
    check(last < first - 0.3, f"the loss falls by 0.3, got {first:.3f} -> {last:.3f}")
    say.section("Done")
    say.line(f"loss {first:.3f} -> {last:.3f}, {time.perf_counter() - began:.0f} s in all")
    say.line("All checks passed")


if __name__ == "__main__":
    main()
