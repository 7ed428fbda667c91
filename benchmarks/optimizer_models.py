"""Models of transformers, torchvision and timm, and parallel forms, on real ranks with a slow link.

    python benchmarks/optimizer_models.py [--ranks 2 4] [--backends shm gloo] [--links ...]
                                          [--only PROGRAM ...] [--out FILE] [--record NAME]

Needs transformers, torchvision and timm (`make bench-optimizer` has them); weights are random,
sizes small. The list was written before anything was measured with it, and programs are not changed
because of what comes out: five models with an all_reduce per gradient, four with sharded weights
that are gathered where they are used, tensor parallelism with sequences in parts, uneven exchanges
of experts, ring attention, and with four ranks a mesh of two dimensions.

Computation is real. Collectives are real, too, and besides each takes as long as a link says that
all groups take turns on: a timer that costs no processor time, as two busy cores hide nothing.
Three links, by rule: what they send takes as long as the rank computes (balanced), three times
that (bandwidth), or the same in latency alone (latency).

Peers take turns in one run: the graph as it is (none), torch's own pass (overlap_scheduling with
buckets, given this cost model), ours, and for two programs a schedule by hand: gradients in buckets
from hooks, as DDP has it, and gathers three weights ahead, as FSDP has it. Where buckets change how
sums are rounded (gloo), which torch's pass and DDP take for granted, ours is run with
numerics="rounding", and with the same bits as the graph beside it (bitwise).

What the passes are told is measured on the graph as it is, on all ranks: nodes and calls under each
link; calibrate() measures what a call takes of a computation beside it.

One file, for it is one list of programs, and what runs them all alike.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import logging
import operator
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from benchmarks import _history, optimizer_programs
from benchmarks._measure import Median, ratio
from benchmarks._report import TARGETS, Table, machine
from benchmarks.optimizer import torch_scheduled
from torch_c10d_ext import Compute, Link, calibrate
from torch_c10d_ext._groups import group_size, sums_in_rank_order
from torch_c10d_ext._op_info import op_info
from torch_c10d_ext.functional import wait_tensor
from torch_c10d_ext.optimizer import Settings, optimize_and_report
from torch_c10d_ext.optimizer._bounds import lower_bound
from torch_c10d_ext.optimizer._collectives import op_of, value_of, wire_bytes
from torch_c10d_ext.optimizer._decide import bucket_keys, problem_of
from torch_c10d_ext.optimizer._settings import Optimization
from torch_c10d_ext.optimizer._simulate import serial_seconds, simulate

ext = torch.ops.c10d_ext
BATCH, TOKENS = 4, 64
ROUNDS = 9
# For nodes that the optimizer makes, which nobody has timed.
UNTIMED = Compute(memory_bandwidth=5e9, flops=2e10)

Step = tuple[Callable[..., Any], list[Any]]


def _group() -> str:
    return str(dist.group.WORLD.group_name)  # type: ignore[union-attr]


# --- models --------------------------------------------------------------------------------------


def _ids(batch: int = BATCH) -> Tensor:
    return torch.randint(3, 256, (batch, TOKENS))


def _causal() -> Tensor:
    return torch.full((TOKENS, TOKENS), -1e9).triu(1)[None, None]


def _decoder(config: Any, kind: Any, batch: int) -> tuple[torch.nn.Module, dict[str, Any]]:
    inputs = {"input_ids": _ids(batch), "attention_mask": _causal(), "use_cache": False}
    return kind(config), {**inputs, "position_ids": torch.arange(TOKENS)[None]}


def llama() -> tuple[torch.nn.Module, dict[str, Any]]:
    import transformers as t

    config = t.LlamaConfig(
        **dict(vocab_size=256, hidden_size=128, intermediate_size=352, num_hidden_layers=4),
        **dict(num_attention_heads=4, num_key_value_heads=2, attn_implementation="eager"),
    )
    return _decoder(config, t.LlamaForCausalLM, BATCH)


def qwen_moe() -> tuple[torch.nn.Module, dict[str, Any]]:
    import transformers as t

    config = t.Qwen2MoeConfig(
        **dict(vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=3),
        **dict(moe_intermediate_size=32, shared_expert_intermediate_size=128, num_experts=4),
        **dict(num_experts_per_tok=2, num_attention_heads=4, num_key_value_heads=2),
        **dict(attn_implementation="eager", experts_implementation="batched_mm"),
    )
    return _decoder(config, t.Qwen2MoeForCausalLM, 1)


def t5() -> tuple[torch.nn.Module, dict[str, Any]]:
    import transformers as t

    config = t.T5Config(
        **dict(vocab_size=256, d_model=128, d_kv=32, d_ff=256, num_layers=2, num_heads=4),
        dropout_rate=0.0,
    )
    inputs = {"input_ids": _ids(), "decoder_input_ids": _ids(), "use_cache": False}
    return t.T5ForConditionalGeneration(config), inputs


def bert() -> tuple[torch.nn.Module, dict[str, Any]]:
    import transformers as t

    config = t.BertConfig(
        **dict(vocab_size=256, hidden_size=128, num_hidden_layers=4, num_attention_heads=4),
        **dict(intermediate_size=512, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0),
        **dict(attn_implementation="eager", tie_word_embeddings=False),
    )
    return t.BertForMaskedLM(config), {"input_ids": _ids()}


def whisper() -> tuple[torch.nn.Module, dict[str, Any]]:
    import transformers as t

    config = t.WhisperConfig(
        **dict(vocab_size=256, d_model=96, encoder_layers=2, decoder_layers=2, dropout=0.0),
        **dict(encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=256),
        **dict(decoder_ffn_dim=256, num_mel_bins=16, max_source_positions=64),
        **dict(max_target_positions=64, pad_token_id=0, bos_token_id=1, eos_token_id=2),
        **dict(decoder_start_token_id=1, attn_implementation="eager"),
    )
    inputs = {"input_features": torch.randn(BATCH, 16, 128), "decoder_input_ids": _ids()}
    inputs |= {"decoder_attention_mask": _causal(), "use_cache": False}
    return t.WhisperForConditionalGeneration(config), inputs


def _torchvision_without_library() -> None:
    """torchvision's wheel may be for CUDA: its library does not load here, and no model needs it.

    Its import gives two of the library's ops a fake kernel, so the two must exist.
    """
    boxes = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            torch.library.define(f"torchvision::{name}", boxes)


def resnet() -> tuple[torch.nn.Module, dict[str, Any]]:
    from torchvision.models import resnet18  # type: ignore[import-not-found]

    # Statistics of batches are written, which is not what is measured.
    return resnet18(num_classes=10).eval(), {"x": torch.randn(BATCH, 3, 64, 64)}


def vit() -> tuple[torch.nn.Module, dict[str, Any]]:
    import timm  # type: ignore[import-not-found]

    model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=4, num_classes=10)
    return model, {"x": torch.randn(BATCH, 3, 64, 64)}


def convnext() -> tuple[torch.nn.Module, dict[str, Any]]:
    import timm

    return timm.create_model("convnext_atto", num_classes=10), {"x": torch.randn(2, 3, 64, 64)}


def _loss(model: torch.nn.Module, weights: dict[str, Tensor], inputs: dict[str, Any]) -> Tensor:
    inputs = dict(inputs)
    positional = (inputs.pop("x"),) if "x" in inputs else ()
    result = torch.func.functional_call(model, weights, positional, inputs)
    logits = result if isinstance(result, Tensor) else result.logits
    return logits.float().square().mean()


# --- forms of data parallelism -------------------------------------------------------------------


def replicated(make: Callable[[], Any], by_hand: bool = False) -> Step:
    """An all_reduce per gradient; by hand in buckets of a quarter of all, started from hooks."""
    model, inputs = make()
    names = [name for name, _ in model.named_parameters()]
    weights = [p.detach() for p in model.parameters()]
    whole = sum(w.numel() for w in weights)

    def step(*given: Tensor) -> list[Tensor]:
        leaves = [w.detach().requires_grad_() for w in given]
        started: list[tuple[Tensor, list[int]]] = []
        ready: list[tuple[int, Tensor]] = []

        def launch() -> None:
            flat = torch.cat([g.reshape(-1) for _, g in ready])
            started.append((ext.all_reduce(flat, "avg", _group()), [k for k, _ in ready]))
            ready.clear()

        def collect(k: int, g: Tensor) -> None:
            ready.append((k, g))
            if sum(g.numel() for _, g in ready) >= whole / 4:
                launch()

        if by_hand:
            for k, leaf in enumerate(leaves):
                leaf.register_hook(lambda g, k=k: collect(k, g))
        loss = _loss(model, dict(zip(names, leaves, strict=True)), inputs)
        gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
        if not by_hand:
            used = [g for g in gradients if g is not None]
            return [wait_tensor(ext.all_reduce(g, "avg", _group())) for g in used]
        if ready:
            launch()
        results: dict[int, Tensor] = {}
        for flat, members in started:
            sizes = [leaves[k].numel() for k in members]
            parts = wait_tensor(flat).split(sizes)
            for k, part in zip(members, parts, strict=True):
                results[k] = part.view(leaves[k].shape)
        return [results[k] for k in sorted(results)]

    return step, weights


class _Gathered(torch.nn.Module):
    """A parametrization: the weight of a shard, gathered where the weight is used."""

    def __init__(self, shape: torch.Size, gather: Callable[[Tensor, torch.Size], Tensor]) -> None:
        super().__init__()
        self.shape, self.gather = shape, gather

    def forward(self, shard: Tensor) -> Tensor:
        return self.gather(shard, self.shape)

    def right_inverse(self, weight: Tensor) -> Tensor:
        n = dist.get_world_size()
        flat = F.pad(weight.detach().reshape(-1), (0, -weight.numel() % n))
        return flat.chunk(n)[dist.get_rank()].clone()


def sharded(make: Callable[[], Any], by_hand: bool = False) -> Step:
    """Weights are gathered where they are used; by hand three ahead, gradients from hooks."""
    model, inputs = make()
    n = dist.get_world_size()
    order: list[int] = []  # shards by their first use
    started: dict[int, Tensor] = {}
    leaves: dict[int, Tensor] = {}
    shards: list[Tensor] = []
    sums: dict[int, Tensor] = {}

    def start(k: int) -> None:
        if k not in started:
            started[k] = ext.all_gather_into_tensor(shards[k], n, _group())

    def gather(shard: Tensor, shape: torch.Size) -> Tensor:
        if not by_hand:
            whole = wait_tensor(ext.all_gather_into_tensor(shard, n, _group()))
            return whole[: shape.numel()].view(shape)
        k = next((k for k, each in enumerate(shards) if each is shard), -1)
        if k < 0:  # while it is being made
            return shard.repeat(n)[: shape.numel()].view(shape)
        if k in leaves:
            return leaves[k]
        if k not in order:
            order.append(k)
        for ahead in order[order.index(k) :][:4]:
            start(ahead)
        whole = wait_tensor(started[k])[: shape.numel()].view(shape)
        leaves[k] = leaf = whole.detach().requires_grad_()

        def scatter(g: Tensor) -> None:
            flat = F.pad(g.reshape(-1), (0, n * shard.numel() - g.numel()))
            sums[k] = ext.reduce_scatter_tensor(flat, "sum", n, _group())

        leaf.register_hook(scatter)
        return leaf

    for name, parameter in list(model.named_parameters()):
        owner, _, last = name.rpartition(".")
        module = model.get_submodule(owner)
        made = _Gathered(parameter.shape, gather)
        torch.nn.utils.parametrize.register_parametrization(module, last, made, unsafe=True)
    names = [name for name, _ in model.named_parameters()]
    weights = [p.detach() for p in model.parameters()]

    def step(*given: Tensor) -> list[Tensor]:
        shards[:] = [w.detach().requires_grad_() for w in given]
        loss = _loss(model, dict(zip(names, shards, strict=True)), inputs)
        if not by_hand:
            found = torch.autograd.grad(loss, shards, allow_unused=True)
            return [g for g in found if g is not None]
        torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        return [wait_tensor(sums[k]) for k in sorted(sums)]

    if by_hand:  # the order of uses, once
        make_fx(step)(*weights)

    def fresh(*given: Tensor) -> list[Tensor]:
        for each in (started, leaves, sums):
            each.clear()
        return step(*given)

    return (fresh if by_hand else step), weights


# --- parallel forms ------------------------------------------------------------------------------


def _of_programs(program: Callable[..., Any]) -> Step:
    optimizer_programs.WIDTH, optimizer_programs.TOKENS = 128, 256
    step, inputs = program(dist.get_world_size(), _group())
    flat = [t for each in inputs for t in (each if isinstance(each, list) else [each])]
    kinds = [isinstance(each, list) for each in inputs]

    def call(*given: Tensor) -> Any:
        single = list(given[: kinds.count(False)])
        return step(*single, list(given[len(single) :])) if any(kinds) else step(*single)

    return call, [torch.randn_like(t) / t.shape[-1] ** 0.5 for t in flat]


def experts() -> Step:
    """Tokens travel to experts in uneven parts, and back, beside a dense branch; with gradients."""
    n, rank, width = dist.get_world_size(), dist.get_rank(), 128

    def exchange(x: Tensor, taken: list[int], given: list[int]) -> Tensor:
        return wait_tensor(ext.all_to_all_single(x, taken, given, _group()))

    def step(x: Tensor, *ws: Tensor) -> list[Tensor]:
        leaves = [w.detach().requires_grad_() for w in ws]
        # Rank r sends 32 rows and 16 more for each rank that it is away from the receiver.
        given = [32 + 16 * abs(rank - r) for r in range(n)]
        taken = [32 + 16 * abs(rank - r) for r in range(n)]
        for k in range(0, len(leaves), 4):
            a, b, c, d = leaves[k : k + 4]
            sent = exchange(x[: sum(given)], taken, given)
            back = exchange(F.gelu(sent @ a) @ b, given, taken)
            x = x + F.gelu(x @ c) @ d
            x = torch.cat([x[: sum(given)] + back, x[sum(given) :]])
        gradients = torch.autograd.grad(x.square().mean(), leaves)
        return [wait_tensor(ext.all_reduce(g, "avg", _group())) for g in gradients]

    shapes = [(width, 2 * width), (2 * width, width)] * 8
    return step, [torch.randn(512, width), *(torch.randn(s) / 16 for s in shapes)]


_MESH: dict[str, str] = {}


def mesh() -> Step:
    """Two ranks split each layer, and two such pairs the batch."""
    if not _MESH:
        size = dist.get_world_size() // 2
        for name, groups in (
            ("tp", [[size * k + r for r in range(size)] for k in range(2)]),
            ("dp", [[r, r + size] for r in range(size)]),
        ):
            for ranks in groups:
                made = dist.new_group(ranks)
                if dist.get_rank() in ranks:
                    _MESH[name] = made.group_name
    n = dist.get_world_size() // 2

    def step(x: Tensor, *ws: Tensor) -> list[Tensor]:
        leaves = [w.detach().requires_grad_() for w in ws]
        for k in range(0, len(leaves), 2):
            h = F.gelu(F.layer_norm(x, x.shape[-1:]) @ leaves[k]) @ leaves[k + 1]
            x = x + wait_tensor(ext.all_reduce(h, "sum", _MESH["tp"]))
        gradients = torch.autograd.grad(x.square().mean(), leaves)
        return [wait_tensor(ext.all_reduce(g, "avg", _MESH["dp"])) for g in gradients]

    shapes = [(128, 512 // n), (512 // n, 128)] * 6
    return step, [torch.randn(256, 128), *(torch.randn(s) / 16 for s in shapes)]


PROGRAMS: dict[str, Callable[[], Step]] = {
    "llama, replicated": lambda: replicated(llama),
    "qwen-moe, replicated": lambda: replicated(qwen_moe),
    "t5, replicated": lambda: replicated(t5),
    "whisper, replicated": lambda: replicated(whisper),
    "resnet18, replicated": lambda: replicated(resnet),
    "llama, sharded": lambda: sharded(llama),
    "bert, sharded": lambda: sharded(bert),
    "vit, sharded": lambda: sharded(vit),
    "convnext, sharded": lambda: sharded(convnext),
    "sequence parallel": lambda: _of_programs(optimizer_programs.sequence_parallel),
    "tensor parallel": lambda: _of_programs(optimizer_programs.tp_step),
    "uneven experts": experts,
    "ring attention": lambda: _of_programs(optimizer_programs.ring_attention),
    "2-D mesh": mesh,
}
BY_HAND: dict[str, Callable[[], Step]] = {
    "llama, replicated": lambda: replicated(llama, by_hand=True),
    "bert, sharded": lambda: sharded(bert, by_hand=True),
}


# --- runs ----------------------------------------------------------------------------------------


def _key(node: Node) -> str:
    def of(value: Any) -> str:
        if isinstance(value, Tensor):
            return f"{tuple(value.shape)}{value.dtype}{tuple(value.stride())}"
        return ",".join(of(v) for v in value) if isinstance(value, list | tuple) else ""

    return f"{node.target} {[of(value_of(n)) for n in node.all_input_nodes]} {of(value_of(node))}"


class Runner:
    """Runs a graph node by node; collectives land when the link has had its time, too."""

    def __init__(self, graph: GraphModule, link: Link | None) -> None:
        self.module, self.nodes = graph, list(graph.graph.nodes)
        self.taken: dict[Node, float] = {}
        self.slept: dict[Node, float] = {}  # of it, while the link was busy
        self.wire: dict[Node, float] = {}  # bytes
        self.sends: dict[Node, float] = {}
        self.waits: set[Node] = set()
        last: dict[Node, Node] = {}
        for node in self.nodes:
            for given in node.all_input_nodes:
                last[given] = node
            op = op_of(node)
            form = op_info(op) if op is not None else None
            if form is None:
                continue
            if form.kind == "wait_tensor":
                self.waits.add(node)
                continue
            ranks, self.wire[node] = _wire(node, form)
            if link is not None:
                self.sends[node] = link.seconds(form.kind, ranks, self.wire[node])
        self.dead: dict[Node, list[Node]] = {}
        for node, user in last.items():
            self.dead.setdefault(user, []).append(node)

    def run(self, inputs: list[Any], timed: bool = False) -> float:
        values: dict[Node, Any] = {}
        lands: dict[Node, float] = {}
        given = iter(inputs)
        free = 0.0
        clock = time.perf_counter
        began = clock()
        for node in self.nodes:
            at = clock() if timed else 0.0
            if node.op == "placeholder":
                values[node] = next(given)
            elif node.op == "get_attr":
                values[node] = operator.attrgetter(str(node.target))(self.module)
            elif node.op == "output":
                break
            else:
                if node in self.waits:  # until when the link is busy
                    self.slept[node] = max(0.0, lands.get(node.args[0], 0.0) - clock())
                args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: values[n])
                values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
                if node in self.sends:
                    lands[node] = free = max(clock(), free) + self.sends[node]
                elif node.target is operator.getitem and node.args[0] in lands:
                    lands[node] = lands[node.args[0]]
                elif node in self.waits:
                    left = lands.get(node.args[0], 0.0) - clock()
                    if left > 0:
                        time.sleep(left)
            if timed:
                self.taken[node] = clock() - at
            for dead in self.dead.get(node, ()):
                values.pop(dead, None)
        return clock() - began


def _wire(node: Node, form: Any) -> tuple[int, float]:
    """The ranks of a collective, and its bytes on the wire."""
    arguments = form.named(node.args, node.kwargs)
    ranks = group_size(arguments["group_name"])
    out = node.kwargs.get("out")
    given = [n for n in node.all_input_nodes if n is not out]

    def size(value: Any) -> float:
        if isinstance(value, list | tuple):
            return sum(size(v) for v in value)
        return value.numel() * value.dtype.itemsize if isinstance(value, Tensor) else 0.0

    wire = wire_bytes(form.kind, ranks, sum(size(value_of(n)) for n in given), size(value_of(node)))
    return ranks, wire


@dataclass(frozen=True)
class Profile:
    """What the program as it is takes, in the middle three of five runs; the mean of the ranks.

    Attributes:
        cost: seconds of a node, by op and shapes, which some rank has; views count at what uses
            them.
        per_call: seconds that a collective keeps the rank on average, but for the link.
    """

    cost: Callable[[Node], float]
    per_call: float


def _profile(graph: GraphModule, inputs: list[Any], link: Link | None) -> Profile:
    runner = Runner(graph, link)
    turns: list[tuple[float, dict[str, list[float]], float]] = []
    for turn in range(6):
        dist.barrier()
        runner.run(inputs, timed=True)
        samples: dict[str, list[float]] = {}
        computing = communicating = 0.0
        for node, seconds in runner.taken.items():
            samples.setdefault(_key(node), []).append(seconds)
            if node in runner.wire or node in runner.waits:
                communicating += seconds - runner.slept.get(node, 0.0)
            else:
                computing += seconds
        if turn:
            turns.append((computing, samples, communicating))
    turns = sorted(turns, key=lambda turn: turn[0])[1:4]
    table: dict[str, float] = {}
    for key in turns[0][1]:
        found = [seconds for _, samples, _ in turns for seconds in samples[key]]
        table[key] = sum(found) / len(found)
    per_call = sum(each for _, _, each in turns) / 3 / len(runner.wire)
    profiles: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(profiles, (table, per_call))
    # Ranks may have other shapes, and must not have other costs.
    table = {
        key: statistics.mean(each[key] for each, _ in profiles if key in each)
        for key in sorted({key for each, _ in profiles for key in each})
    }
    per_call = statistics.mean(each for _, each in profiles)
    other = Settings.of(None, None, compute=UNTIMED).costs()

    def own(node: Node) -> float:
        found = table.get(_key(node))
        return found if found is not None else 5e-6 + other.seconds(node, op_of(node))

    def is_view(node: Node) -> bool:
        op = op_of(node)
        return node.target is operator.getitem or (
            op is not None and op_info(op) is None and op.is_view
        )

    def cost(node: Node) -> float:
        total = own(node)
        todo = list(node.all_input_nodes)
        while todo:
            given = todo.pop()
            if given.op == "call_function" and is_view(given):
                total += own(given) / max(1, len(given.users))
                if len(given.users) == 1:
                    todo += given.all_input_nodes
        return total

    return Profile(cost, per_call)


def _known(link: Link, real: Link, per_call: float, runner: Runner) -> Link:
    """What the passes are told: the timer's link, and what the backend's calls take of a rank."""
    wire = sum(runner.wire.values()) / len(runner.wire)
    return replace(
        link,
        latency=max(link.latency, real.latency),
        bandwidth=min(link.bandwidth, real.bandwidth),
        overhead=max(0.0, per_call - wire * real.overhead_per_byte),
        overhead_per_byte=real.overhead_per_byte,
    )


def _exact_sleeps() -> None:
    """Linux wakes a sleeper up to 50 us late; here within about a microsecond."""
    set_timer_slack = 29
    ctypes.CDLL(None).prctl(set_timer_slack, 1000, 0, 0, 0)


def _links(p: Any) -> dict[str, Link]:
    busy = sum(p.seconds)
    count = len(p.collectives)
    costs = Settings.of(None, None, link=Link(0.0, 1.0)).costs()
    wire = sum(
        wire_bytes(
            c.kind,
            c.ranks,
            costs.bytes_of([value_of(n) for n in c.inputs]),
            costs.bytes_of(value_of(c.node)),
        )
        for c in p.collectives.values()
    )
    return {
        "latency": Link(busy / count, wire / busy * 20, shared="wire"),
        "balanced": Link(busy / count / 20, wire / busy, shared="wire"),
        "bandwidth": Link(busy / count / 20, wire / busy / 3, shared="wire"),
    }


def _fewest(p: Any, keys: dict[int, Any], sizes: dict[int, float], cap: float) -> int:
    """No order has fewer launches: chains of one key's members, or their bytes by the cap."""
    depth: list[dict[Any, int]] = []
    longest: dict[Any, int] = {}
    held: dict[Any, float] = {}
    alone = 0
    for i, follows in enumerate(p.follows):
        mine: dict[Any, int] = {}
        for j in follows:
            for key, count in depth[j].items():
                mine[key] = max(mine.get(key, 0), count)
        key = keys.get(i)
        if key is not None:
            mine[key] = mine.get(key, 0) + 1
            longest[key] = max(longest.get(key, 0), mine[key])
            held[key] = held.get(key, 0.0) + sizes[i]
        elif i in p.collectives:
            alone += 1
        depth.append(mine)
    return alone + sum(max(count, -(-int(held[key]) // int(cap))) for key, count in longest.items())


def _with_one_mode(graph: GraphModule, inputs: list[Any]) -> GraphModule:
    """The graph with fake tensors of one mode, as torch's pass asks for."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    FakeTensorProp(graph, mode).propagate(*inputs)
    return graph


def _same_on_all_ranks(graph: GraphModule | None) -> bool:
    """Whether all ranks start the same collectives in one order, and sums of the same sizes."""
    order = []
    for node in graph.graph.nodes if graph is not None else ():
        op = op_of(node)
        form = op_info(op) if op is not None else None
        if form is not None and form.kind != "wait_tensor":
            size = _wire(node, form)[1] if form.kind == "all_reduce" else 0.0
            order.append((form.kind, size))
    orders: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(orders, order)
    return all(each == orders[0] for each in orders)


def measure(name: str, kinds: list[str], backend: str) -> list[dict[str, Any]]:
    """One program with some links; a row each."""
    step, inputs = PROGRAMS[name]()
    graph = _with_one_mode(make_fx(step)(*inputs), inputs)
    hand = None
    if name in BY_HAND:
        step, same = BY_HAND[name]()
        hand = make_fx(step)(*same)
    rows = []
    with torch.no_grad():
        costs = Settings.of(None, None, compute=_profile(graph, inputs, None).cost).costs()
        links = _links(problem_of(graph.graph, costs))
        real = calibrate(sizes=(8, 4 << 10, 256 << 10, 4 << 20))
        for kind in kinds:
            link = links[kind]
            profile = _profile(graph, inputs, link)
            compute = profile.cost
            known = _known(link, real, profile.per_call, Runner(graph, link))
            exact = Settings.of(None, None, link=known, compute=compute)
            settings = (
                exact if sums_in_rank_order(_group()) else replace(exact, numerics="rounding")
            )
            began = time.process_time()
            new, about = optimize_and_report(graph, settings)
            took = time.process_time() - began
            p = problem_of(graph.graph, settings.costs())
            keys, sizes = bucket_keys(p, settings, settings.costs(), Optimization(), True)
            graphs = {"none": graph, "ours": new}
            if settings is not exact:
                graphs["bitwise"] = optimize_and_report(graph, exact)[0]
            theirs, why_not = None, ""
            try:
                theirs = torch_scheduled(graph, known, compute)
            except Exception as error:
                why_not = f"raises {error!r:.200}"
            if not _same_on_all_ranks(theirs):
                why_not = why_not or "gives ranks different orders"
            if theirs is not None and not why_not:
                graphs["torch"] = theirs
            elif dist.get_rank() == 0:
                print(f"{name}, {kind}: torch's pass {why_not}", flush=True)
            if hand is not None:
                graphs["hand"] = hand
            runners = {peer: Runner(each, link) for peer, each in graphs.items()}
            times: dict[str, list[float]] = {peer: [] for peer in runners}
            order = list(runners)
            for turn in range(ROUNDS + 1):
                order = order[1:] + order[:1]
                for peer in order:
                    dist.barrier()
                    seconds = runners[peer].run(inputs)
                    if turn:
                        times[peer].append(seconds)
            medians = {peer: statistics.median(found) for peer, found in times.items()}
            own = simulate(p, list(range(len(p.nodes) - 1)))
            expected = {}
            for peer, each in graphs.items():
                q = problem_of(each.graph, settings.costs())
                timing = simulate(q, list(range(len(q.nodes) - 1)))
                expected[peer] = [timing.total, timing.launches]
            rows.append(
                {
                    "program": name,
                    "ranks": dist.get_world_size(),
                    "backend": backend,
                    "link": kind,
                    "timer": [link.latency, link.bandwidth],
                    "known": asdict(known),
                    "nodes": len(p.nodes),
                    "hidden": about.hidden,
                    "launches": [len(p.collectives), about.launches],
                    "fewest": _fewest(p, keys, sizes, settings.bucket_bytes),
                    "predicted": [own.total, about.seconds],
                    "expected": expected,
                    "serial": serial_seconds(p),
                    "bound": lower_bound(p, keys),
                    "peak": [about.peak_before, about.peak],
                    "pass": took,
                    "times": times,
                    "medians": medians,
                    "done": about.done,
                    "missed": about.missed,
                    "reason": about.reason,
                }
            )
            if dist.get_rank() == 0:
                print("  ".join(_cells(rows[-1])), flush=True)
    return rows


def _times_ours(row: dict[str, Any], peer: str) -> Median:
    """How many times as long a peer takes as ours."""
    return ratio(row["times"][peer], row["times"]["ours"])


def _ratio(row: dict[str, Any], peer: str) -> float:
    return _times_ours(row, peer).value


def _best(row: dict[str, Any]) -> str:
    """The faster of torch's own pass and none, whose user goes without where it loses."""
    peers = [peer for peer in ("none", "torch") if peer in row["medians"]]
    return min(peers, key=lambda peer: row["medians"][peer])


def _cells(row: dict[str, Any]) -> list[str]:
    m = row["medians"]

    def of(peer: str) -> str:
        return f"{m[peer] * 1e3:.1f}" if peer in m else "-"

    return [
        row["program"],
        f"{row['ranks']} on {row['backend']}, {row['link']}",
        f"{row['hidden']:.2f}",
        f"{row['launches'][0]} to {row['launches'][1]} ({row['fewest']})",
        *map(of, ("none", "torch", "hand", "bitwise", "ours")),
        f"{_ratio(row, _best(row)):.2f}",
        f"{m['ours'] / row['predicted'][1]:.2f}",
        f"{row['peak'][1] / (1.1 * row['peak'][0]):.2f}",
        f"{row['pass']:.1f}",
    ]


HEAD = ["program", "ranks, backend, link", "hidden", "launches (fewest)"]
HEAD += ["none ms", "torch ms", "by hand ms", "bitwise ms", "ours ms", "best of torch / ours"]
HEAD += ["measured / predicted", "peak / budget", "pass s"]


def _by_program(rows: list[dict[str, Any]]) -> Table:
    """The ratio of each program in each setting."""
    settings = list(dict.fromkeys((row["ranks"], row["backend"], row["link"]) for row in rows))
    ratios: dict[str, dict[Any, str]] = {}
    for row in rows:
        setting = row["ranks"], row["backend"], row["link"]
        ratios.setdefault(row["program"], {})[setting] = f"{_ratio(row, _best(row)):.2f}"
    return Table(
        "The better of torch's pass and none, over ours, by program",
        "",
        ["program", *(f"{ranks} {backend} {link}" for ranks, backend, link in settings)],
        1,
        [[name, *(each.get(s, "-") for s in settings)] for name, each in ratios.items()],
    )


def tables(rows: list[dict[str, Any]]) -> list[Table]:
    """All rows, and what they say of the targets."""
    speed = [_ratio(row, _best(row)) for row in rows]
    alone = [_times_ours(row, "none") for row in rows]
    slower = sum(each.high < 1 for each in alone)  # of all rounds
    hand = [_ratio(row, "hand") for row in rows if "hand" in row["medians"]]
    hidden = [row["hidden"] for row in rows]
    off = [abs(row["medians"]["ours"] / row["predicted"][1] - 1) for row in rows]
    launches = [row["launches"][1] / row["fewest"] for row in rows]
    median = statistics.median
    found = [
        (
            "hidden share, by the cost model",
            "median >= 0.95, worst >= 0.8",
            f"{median(hidden):.2f}, {max(0.0, min(hidden)):.2f}",
            median(hidden) >= 0.95 and min(hidden) >= 0.8,
        ),
        (
            "the better of torch's pass and none, over ours",
            ">= 1.3 times",
            f"median {median(speed):.2f}, {min(speed):.2f} to {max(speed):.2f}",
            median(speed) >= 1.3,
        ),
        (
            "no pass over ours",
            ">= 1 times beyond noise",
            f"{slower} of {len(rows)} rows below, worst median {min(a.value for a in alone):.2f}",
            slower == 0,
        ),
        (
            "a schedule by hand over ours",
            ">= 1 times",
            f"median {median(hand):.2f}, worst {min(hand):.2f}" if hand else "not run",
            bool(hand) and min(hand) >= 1,
        ),
        (
            "step against what was predicted",
            "within 5 %",
            f"median {median(off):.0%} off, worst {max(off):.0%}",
            max(off) <= 0.05,
        ),
        (
            "launches over the fewest under cap and dependencies",
            "<= 1.1 times",
            f"median {median(launches):.1f}, worst {max(launches):.1f}",
            max(launches) <= 1.1,
        ),
    ]
    outcomes = [[*row[:3], "met" if row[3] else "missed"] for row in found]
    return [
        Table("The optimizer on models and parallel forms", "", HEAD, 2, [*map(_cells, rows)]),
        _by_program(rows),
        Table(
            f"{TARGETS}: optimizer on models",
            "",
            ["", "target", "measured", "outcome"],
            4,
            outcomes,
        ),
    ]


def _rank(rank: int, options: Any, world: int, backend: str, store: str, out: str) -> None:
    torch.set_num_threads(1)
    _exact_sleeps()
    _torchvision_without_library()
    for name in ("torch", "torch_c10d_ext"):
        logging.getLogger(name).setLevel(logging.ERROR)
    dist.init_process_group(
        backend, store=dist.FileStore(store, world), rank=rank, world_size=world
    )
    for name in options.only or PROGRAMS:
        if name == "2-D mesh" and world < 4:
            continue
        torch.manual_seed(0)  # one model on all ranks
        found = measure(name, options.links, backend)
        if rank == 0:
            # After each program, so that a run that is cut short has what it measured.
            with Path(out).open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in found)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--backends", nargs="+", default=["shm", "gloo"])
    parser.add_argument("--links", nargs="+", default=["latency", "balanced", "bandwidth"])
    parser.add_argument("--only", nargs="+", choices=PROGRAMS)
    parser.add_argument("--out", help="a file, to which a row of JSON per line is added")
    _history.add_option(parser)
    options = parser.parse_args()
    heading = machine("cpu")
    with tempfile.TemporaryDirectory() as folder:
        out = options.out or f"{folder}/rows"
        for world in options.ranks:
            for backend in options.backends:
                arguments = (options, world, backend, f"{folder}/{world}{backend}", out)
                mp.spawn(_rank, arguments, nprocs=world)
        rows = [json.loads(line) for line in Path(out).read_text().splitlines()]
    made = tables(rows)
    for table in made:
        print(table.text())
    if options.record:
        command = " ".join(["python", "benchmarks/optimizer_models.py", *sys.argv[1:]])
        _history.record(options.record, heading, command, made)


if __name__ == "__main__":
    main()
