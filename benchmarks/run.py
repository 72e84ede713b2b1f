"""Measures every claim of the README in one run, by ratio: a table, and benchmarks/results.json.

Usage: python benchmarks/run.py [--quick] [NAME ...]. Exit code 1 when a bar is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import json
import math
import operator
import os
import random
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, replace_pattern
from torch.fx.experimental.optimization import fuse
from torch.fx.proxy import TraceError
from transformers import (
    MobileNetV2Config,
    MobileNetV2ForImageClassification,
    ResNetConfig,
    ResNetForImageClassification,
)

import torch_batchnorm as tbn
from torch_batchnorm.tables import table

aten = torch.ops.aten
LEGIT = aten._native_batch_norm_legit_functional.default
FAMILY = aten._batch_norm_with_update_functional.default
LEGIT_EVAL = aten._native_batch_norm_legit_no_training.default
FAMILY_EVAL = aten._batch_norm_no_update.default
RESULTS = Path(__file__).parent / "results.json"


@dataclass(frozen=True)
class Bar:
    """A claim: what was measured, the value, and the range it has to lie in."""

    claim: str
    value: float
    low: float
    high: float
    detail: str

    @property
    def met(self) -> bool:
        return self.low <= self.value <= self.high


def chain(sites: int, training: bool = True) -> GraphModule:
    """`sites` batch norms in ten times as many nodes, as run_decompositions() writes them."""
    mode = FakeTensorMode()
    with mode:
        activation, channel = torch.empty(2, 4, 3, 3), torch.empty(4)
    graph = Graph()

    def add(kind: str, *args: Any, val: Any) -> Any:
        node = graph.placeholder(args[0]) if kind == "placeholder" else graph.call_function(args[0], args[1:])
        node.meta["val"] = val
        return node

    x = add("placeholder", "x", val=activation)
    tensors = [add("placeholder", name, val=channel) for name in ("weight", "bias", "mean", "var")]
    op, given, read = (LEGIT, (True, 0.1, 1e-5), (0, 3, 4)) if training else (LEGIT_EVAL, (0.1, 1e-5), (0,))
    for _ in range(sites):
        saved = (activation, channel, channel, channel, channel)
        call = add("call", op, x, *tensors, *given, val=saved[: max(read) + 1 if training else 3])
        x, *updated = (add("call", operator.getitem, call, i, val=saved[i]) for i in read)
        for _ in range(9 - len(read)):
            x = add("call", aten.relu.default, x, val=activation)
    graph.output((*updated, x))
    return GraphModule({}, graph)


def seconds(run: Callable[[], object], setup: Callable[[], object] | None = None, repeat: int = 5) -> float:
    """The least of `repeat` timings: what a run costs when nothing else is in its way."""
    found = []
    for _ in range(repeat):
        if setup is not None:
            setup()
        gc.collect()
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return min(found)


def paired(ours: Callable[[], object], theirs: Callable[[], object], turns: int) -> tuple[float, float]:
    """Medians of both, in turns, so that a machine that slows down slows down both."""
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(turns + 3):
        for which, run in ((0, ours), (1, theirs))[:: 1 if turn % 2 else -1]:
            gc.collect()
            start = time.perf_counter()
            run()
            if turn > 2:  # the first ones warm up
                times[which].append(time.perf_counter() - start)
    return statistics.median(times[0]), statistics.median(times[1])


@contextlib.contextmanager
def no_recompile() -> Iterator[None]:
    """Graph modules keep their old code: for what is compared apart from the compilation that both sides pay."""
    with patch.object(GraphModule, "recompile", lambda self: None):
        yield


def resnet50(training: bool) -> torch.export.ExportedProgram:
    torch.manual_seed(0)
    model = ResNetForImageClassification(ResNetConfig()).train(training)
    return torch.export.export(model, (torch.randn(2, 3, 64, 64),))


def recompiled(program: torch.export.ExportedProgram) -> GraphModule:
    """A copy of the program's graph, compiled: what a pass that is not in place costs at least."""
    return GraphModule(program.graph_module, copy.deepcopy(program.graph))


def _growth(
    what: str, run: Callable[[GraphModule], object], make: Callable[[int], GraphModule], sizes: tuple[int, ...]
) -> Bar:
    """What a batch norm costs in the longest graph over what it costs in the shortest, compilation excluded."""
    per_site = {}
    for sites in sizes:
        held: list[GraphModule] = []
        with no_recompile():
            taken = seconds(
                lambda held=held: run(held[-1]),
                lambda held=held, n=sites: held.append(make(n)),
                repeat=3 if sites > 1000 else 7,
            )
        per_site[sites] = taken / sites * 1e6
    detail = ", ".join(f"{n:,} BN {us:.1f} us a BN" for n, us in per_site.items())
    ratio = per_site[max(per_site)] / per_site[min(per_site)]
    return Bar(f"{what} is linear: time per BN, longest chain over shortest", ratio, 0, 2, detail)


def linear(quick: bool) -> Iterator[Bar]:
    """Cost grows with the batch norms."""
    sizes = (100, 1000, 2000 if quick else 10000)
    yield _growth("cost", tbn.Consolidate(inplace=True), chain, sizes)


def floor(quick: bool) -> Iterator[Bar]:
    """Everything included, against copying the graph and compiling the copy without an edit."""
    program = resnet50(True)
    for name, ep in {"training IR": program, "ATEN": program.run_decompositions()}.items():
        taken, least = paired(lambda ep=ep: tbn.consolidate(ep), lambda ep=ep: recompiled(ep), 10 if quick else 30)
        detail = f"consolidate {taken * 1e3:.1f} ms, floor {least * 1e3:.1f} ms"
        yield Bar(f"consolidate(ResNet-50, {name}) over copy and recompile", taken / least, 0, 1.5, detail)


def inplace(quick: bool) -> Iterator[Bar]:
    """In place, everything included, against torch.fx's own recompile of the same graph: in turns, on graphs as new."""
    sites, ratios, ours = 200 if quick else 1000, [], []
    for turn in range(5 if quick else 13):
        modules = {way: chain(sites) for way in ("consolidate", "recompile")}
        runs = {"consolidate": tbn.Consolidate(inplace=True), "recompile": GraphModule.recompile}
        taken = {}
        for way in list(modules)[:: 1 if turn % 2 else -1]:
            gc.collect()
            start = time.perf_counter()
            runs[way](modules[way])
            taken[way] = time.perf_counter() - start
        if turn > 1:  # the first ones warm up
            ratios.append(taken["consolidate"] / taken["recompile"])
            ours.append(taken["consolidate"])
    detail = f"median of {len(ratios)}, {sites:,} BN in {10 * sites:,} nodes; consolidate {min(ours) * 1e3:.0f} ms"
    yield Bar("consolidate in place over fx's recompile alone", statistics.median(ratios), 0, 1.15, detail)


def _pattern(x: Any, weight: Any, bias: Any, mean: Any, var: Any) -> Any:
    out = LEGIT(x, weight, bias, mean, var, True, 0.1, 1e-5)
    return out[0], out[3], out[4]


def _replacement(x: Any, weight: Any, bias: Any, mean: Any, var: Any) -> Any:
    out = FAMILY(x, weight, bias, mean, var, 0.1, 1e-5)
    return out[0], out[4], out[5]


def _eval_pattern(x: Any, weight: Any, bias: Any, mean: Any, var: Any) -> Any:
    return LEGIT_EVAL(x, weight, bias, mean, var, 0.1, 1e-5)[0]


def _eval_replacement(x: Any, weight: Any, bias: Any, mean: Any, var: Any) -> Any:
    return FAMILY_EVAL(x, weight, bias, mean, var, 0.1, 1e-5)[0]


def pattern(quick: bool) -> Iterator[Bar]:
    """The same rewrite by torch.fx.replace_pattern, compilation excluded: medians, in turns, on graphs as new."""
    sites = 200 if quick else 1000
    rows = {
        "": (True, _pattern, _replacement, FAMILY, 30),
        " on the eval pattern": (False, _eval_pattern, _eval_replacement, FAMILY_EVAL, 20),
    }
    for which, (training, found, put, op, least) in rows.items():
        theirs, ours = [], []
        for _ in range(2 if quick else 3):
            graphs = [chain(sites, training), chain(sites, training)]
            with no_recompile():
                theirs.append(seconds(lambda g=graphs, p=(found, put): replace_pattern(g[0], *p), repeat=1))
                ours.append(seconds(lambda g=graphs: tbn.Consolidate(inplace=True)(g[1]), repeat=1))
            counts = [len(g.graph.find_nodes(op="call_function", target=op)) for g in graphs]
            assert counts == [sites, sites], counts
        slow, fast = statistics.median(theirs), statistics.median(ours)
        detail = f"replace_pattern {slow:.2f} s, consolidate {fast * 1e3:.0f} ms, {sites:,} BN"
        yield Bar(f"faster than replace_pattern{which}, times", slow / fast, least, math.inf, detail)


def _to_family(x: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float) -> Any:
    out = FAMILY(x, weight, bias, mean, var, momentum, eps)
    return out[0], out[1], out[2], out[4], out[5]


def decompositions(quick: bool) -> Iterator[Bar]:
    """The same graph by run_decompositions with a table that maps the legacy op to the family."""
    program = resnet50(True).run_decompositions()
    found = [program.run_decompositions({LEGIT: _to_family}), tbn.consolidate(program)]
    kinds = [[str(n.target) for n in p.graph.nodes if n.op == "call_function"] for p in found]
    assert kinds[0] == kinds[1], "the two do not reach the same graph"
    theirs = seconds(lambda: program.run_decompositions({LEGIT: _to_family}), repeat=2)
    ours = seconds(lambda: tbn.consolidate(program), repeat=7)
    detail = f"run_decompositions {theirs:.2f} s, consolidate {ours * 1e3:.1f} ms"
    yield Bar("faster than run_decompositions(table) on ResNet-50, times", theirs / ours, 20, math.inf, detail)


def runtime(quick: bool) -> Iterator[Bar]:
    """The consolidated program runs as fast as the legacy one: interleaved, ratio of the medians, on one thread."""
    x = torch.randn(2, 3, 64, 64)
    torch.set_num_threads(1)  # two threads wait for each other whenever anything else runs on the machine
    for name, training in (("train, forward and backward", True), ("eval, forward", False)):
        program = resnet50(training)
        modules = [program.module(), tbn.consolidate(program).module()]

        def run(module: Any, training: bool = training) -> None:
            if training:
                module(x).logits.square().mean().backward()
            else:
                with torch.no_grad():
                    module(x)

        turns = 20 if quick else 80
        ours, legacy = paired(lambda m=modules: run(m[1]), lambda m=modules: run(m[0]), turns)
        detail = f"medians of {turns}: consolidated {ours * 1e3:.1f} ms, legacy {legacy * 1e3:.1f} ms"
        yield Bar(f"ResNet-50 runs at the legacy speed ({name})", ours / legacy, 0.97, 1.03, detail)


def ops(quick: bool) -> Iterator[Bar]:
    """`tbn.ops.batch_norm_with_update` against the bare ATen call, on one thread."""
    torch.set_num_threads(1)
    for shape, limit, calls in (((8, 64, 4, 4), 2, 200), ((32, 64, 56, 56), 1.02, 1)):
        x, ones, zeros = torch.randn(shape), torch.ones(shape[1]), torch.zeros(shape[1])
        args = (x, ones, zeros, zeros.clone(), ones.clone(), 0.1, 1e-5)

        def run(op: Any, args: Any = args, calls: int = calls) -> None:
            for _ in range(calls):
                op(*args)

        pair = [lambda r=run, op=op: r(op) for op in (tbn.ops.batch_norm_with_update, aten._batch_norm_with_update)]
        ours, theirs = paired(*pair, 20 if quick else 100)
        detail = f"tbn.ops {ours / calls * 1e6:.1f} us, ATen {theirs / calls * 1e6:.1f} us"
        yield Bar(f"tbn.ops.batch_norm_with_update over ATen, {shape}", ours / theirs, 0, limit, detail)


def legalization(quick: bool) -> Iterator[Bar]:
    """To core ATen, against `run_decompositions()`; and its cost grows with the batch norms."""
    program = tbn.consolidate(resnet50(True).run_decompositions())
    theirs = seconds(lambda: program.run_decompositions(), repeat=2)
    ours = seconds(lambda: tbn.legalize(program, "core_aten"), repeat=7)
    detail = f"run_decompositions {theirs:.2f} s, legalize {ours * 1e3:.1f} ms"
    yield Bar(
        "legalize(ResNet-50, core_aten) faster than run_decompositions, times", theirs / ours, 20, math.inf, detail
    )
    sizes = (100, 1000 if quick else 10000)
    legalize = tbn.Legalize("core_aten", inplace=True)
    yield _growth("legalize", legalize, lambda n: tbn.consolidate(chain(n)), sizes)


class Residual(nn.Module):
    """Two convolutions with their batch norms, and a way around them."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.a, self.b = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norm_a, self.norm_b = (nn.BatchNorm2d(channels) for _ in range(2))

    def forward(self, x: Any) -> Any:
        return torch.relu(self.norm_b(self.b(torch.relu(self.norm_a(self.a(x))))) + x)


# What a model is compiled with; None: not at all.
WAYS = {
    "eager": None,
    "inductor": {},
    "auto": tbn.inductor_options("auto"),
    "train": tbn.inductor_options("train"),
}


def compiled(make: Callable[[], nn.Module], way: str) -> Any:
    torch.manual_seed(0)
    model, options = make(), WAYS[way]
    return model if options is None else torch.compile(model, options=options or None)


def inductor(quick: bool) -> Iterator[Bar]:
    """A train step of residual blocks with and without kept batch norms, interleaved, on two threads."""
    torch.set_num_threads(2)
    for channels, side in ((64, 28), (256, 14)):
        for layout, memory in (("NCHW", torch.contiguous_format), ("NHWC", torch.channels_last)):
            x = torch.randn(16, channels, side, side).contiguous(memory_format=memory)

            def make(channels: int = channels, memory: Any = memory) -> nn.Module:
                return nn.Sequential(*(Residual(channels) for _ in range(3))).to(memory_format=memory)

            def step(model: Any, x: Any = x) -> None:
                model(x).square().mean().backward()

            models = {way: compiled(make, way) for way in WAYS}
            taken: dict[str, list[float]] = {way: [] for way in WAYS}
            for turn in range(3 + (9 if quick else 41)):
                for way in list(WAYS)[:: 1 if turn % 2 else -1]:
                    start = time.perf_counter()
                    step(models[way])
                    taken[way] += [time.perf_counter() - start] if turn > 2 else []  # the first ones compile
            ms = {way: statistics.median(times) * 1e3 for way, times in taken.items()}
            detail = ", ".join(f"{way} {t:.0f} ms" for way, t in ms.items())
            best = min(ms["eager"], ms["inductor"])
            for way, limit in (("auto", 1.05), ("train", 1.08)):
                claim = (
                    f"train step, keep={way}, over the faster of eager and Inductor, {channels}x{side}x{side} {layout}"
                )
                yield Bar(claim, ms[way] / best, 0, limit, detail)
            torch._dynamo.reset()


def curves(quick: bool) -> Iterator[Bar]:
    """How closely twenty steps of a ResNet-18 follow the eager losses, with convolutions left in the model's layout."""
    config = ResNetConfig(layer_type="basic", depths=[2, 2, 2, 2], hidden_sizes=[64, 128, 256, 512])
    x, labels = torch.randn(8, 3, 64, 64, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 2

    def losses(options: dict[str, Any] | None, memory: torch.memory_format) -> Any:
        torch.manual_seed(0)
        model = ResNetForImageClassification(config).to(memory_format=memory)
        run = model if options is None else torch.compile(model, options=options)
        optimizer, found = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9), []
        for _ in range(20):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(run(x.contiguous(memory_format=memory)).logits, labels)
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        torch._dynamo.reset()
        return torch.tensor(found, dtype=torch.float64)

    stay = {"layout_optimization": False}
    for layout, memory in (("NCHW", torch.contiguous_format), ("NHWC", torch.channels_last)):
        eager = losses(None, memory)
        stock, kept = (
            (losses(options, memory) - eager).abs().max().item()
            for options in (stay, tbn.inductor_options("train", stay))
        )
        detail = f"largest difference over 20 steps: Inductor {stock:.2e}, kept {kept:.2e}"
        yield Bar(f"distance from the eager losses, keep=train over Inductor, {layout}", kept / stock, 0, 0.1, detail)


def compilation(quick: bool) -> Iterator[Bar]:
    """The time to compile a ResNet-50 train step, from cold caches, in turns; and what of it our passes take."""
    x, taken = torch.randn(2, 3, 64, 64), {"inductor": [], "train": []}
    for turn in range(1 if quick else 2):
        for way in list(taken)[:: 1 if turn % 2 else -1]:
            with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, {"TORCHINDUCTOR_CACHE_DIR": folder}):
                model = compiled(lambda: ResNetForImageClassification(ResNetConfig()), way)
                start = time.perf_counter()
                model(x).logits.square().mean().backward()
                taken[way].append(time.perf_counter() - start)
                torch._dynamo.reset()
    ours, stock = min(taken["train"]), min(taken["inductor"])
    yield Bar("compile time of ResNet-50, keep=train over stock", ours / stock, 0, 1.03, f"{taken}")


def trained(sites: int) -> GraphModule:
    """`sites` train batch norms with state and counters of their own, as `program.module()` holds them."""
    mode, root, graph = FakeTensorMode(), torch.nn.Module(), Graph()
    with mode:
        vals = {1: torch.empty(4), 0: torch.empty((), dtype=torch.int64), 4: torch.empty(2, 4, 3, 3)}

    def add(node: Any, rank: int) -> Any:
        node.meta["val"] = vals[rank]
        return node

    x = add(graph.placeholder("x"), 4)
    for site in range(sites):
        root.add_module(f"bn{site}", torch.nn.BatchNorm2d(4))
        names = ("weight", "bias", "running_mean", "running_var")
        tensors = [add(graph.get_attr(f"bn{site}.{name}"), 1) for name in names]
        counter = add(graph.get_attr(f"bn{site}.num_batches_tracked"), 0)
        add(graph.call_function(aten.add_.Tensor, (counter, 1)), 0)
        x = add(graph.call_function(aten.batch_norm.default, (x, *tensors, True, 0.1, 1e-5, False)), 4)
        for _ in range(3):
            x = add(graph.call_function(aten.relu.default, (x,)), 4)
    graph.output((x,))
    return GraphModule(root, graph)


def timed(run: Callable[[], object]) -> tuple[float, float]:
    """Seconds of a run, and of those the ones that went into compiling graph modules."""
    compiling, compile_ = 0.0, GraphModule.recompile

    def recompile(self: Any) -> Any:
        nonlocal compiling
        start = time.perf_counter()
        try:
            return compile_(self)
        finally:
            compiling += time.perf_counter() - start

    gc.collect()
    with patch.object(GraphModule, "recompile", recompile):
        start = time.perf_counter()
        run()
        return time.perf_counter() - start, compiling


def switching(quick: bool) -> Iterator[Bar]:
    """To eval, against torchao's switch, in place as it works; and its cost grows with the batch norms."""
    from torchao.quantization.pt2e import move_exported_model_to_eval

    sites, turns = (200, 1) if quick else (800, 3)
    pairs = []
    for _ in range(turns):
        modules = [trained(sites), trained(sites)]
        theirs = timed(lambda m=modules: move_exported_model_to_eval(m[0]))
        ours = min(
            timed(lambda m=modules: tbn.SwitchMode("eval", inplace=True)(m[1])),
            *(_again(modules[1]) for _ in range(4)),
        )
        pairs.append((theirs, ours))
        modes = [{n.args[5] for n in m.graph.find_nodes(op="call_function", target=OP)} for m in modules]
        assert modes == [{False}, {False}], modes
    theirs, ours = min(theirs for theirs, _ in pairs), min(ours for _, ours in pairs)
    compiled, apart = theirs[1], min(whole - compiling for _, (whole, compiling) in pairs)
    ratio = (theirs[0] - ours[1]) / apart  # both end with one compilation; torchao's other ones are its own
    detail = f"torchao {theirs[0]:.2f} s ({compiled * 1e3:.0f} ms compiling), switch_mode {ours[0] * 1e3:.0f} ms"
    detail += f" ({ours[1] * 1e3:.0f} ms compiling)"
    yield Bar(f"to eval faster than torchao at {sites} BN, times", theirs[0] / ours[0], 15, math.inf, detail)
    yield Bar("the same, the one compilation that both need subtracted, times", ratio, 100, math.inf, detail)
    sizes = (100, 1000 if quick else 10000)
    yield _growth("switch_mode", tbn.SwitchMode("eval", inplace=True), trained, sizes)


OP = aten.batch_norm.default
CONV = aten.conv2d.default


def _again(module: GraphModule) -> tuple[float, float]:
    tbn.SwitchMode("train", inplace=True)(module)
    return timed(lambda: tbn.SwitchMode("eval", inplace=True)(module))


def convolved(sites: int) -> GraphModule:
    """`sites` convolutions, each with an eval batch norm and a ReLU, as `program.module()` holds them."""
    mode, root, graph = FakeTensorMode(), torch.nn.Module(), Graph()
    with mode:
        vals = {1: torch.empty(4), 0: torch.empty((), dtype=torch.int64), 4: torch.empty(2, 4, 3, 3)}
        kernel = torch.empty(4, 4, 3, 3)

    def add(node: Any, val: Any) -> Any:
        node.meta["val"] = val
        return node

    x = add(graph.placeholder("x"), vals[4])
    for site in range(sites):
        root.add_module(f"conv{site}", nn.Conv2d(4, 4, 3, padding=1, bias=False))
        root.add_module(f"bn{site}", nn.BatchNorm2d(4))
        weight = add(graph.get_attr(f"conv{site}.weight"), kernel)
        names = ("weight", "bias", "running_mean", "running_var")
        tensors = [add(graph.get_attr(f"bn{site}.{name}"), vals[1]) for name in names]
        add(graph.get_attr(f"bn{site}.num_batches_tracked"), vals[0])  # in eval nothing reads it
        x = add(graph.call_function(CONV, (x, weight, None, [1, 1], [1, 1])), vals[4])
        x = add(graph.call_function(OP, (x, *tensors, False, 0.1, 1e-5, False)), vals[4])
        x = add(graph.call_function(aten.relu.default, (x,)), vals[4])
    graph.output((x,))
    return GraphModule(root, graph)


def fused(model: nn.Module) -> tuple[nn.Module, float]:
    """The largest parts of a model that torch.fx traces, by its `optimization.fuse`; and the seconds of that."""
    start = time.perf_counter()
    try:
        return fuse(model), time.perf_counter() - start
    except (TraceError, NotImplementedError):  # control flow on a shape or a flag; a list of modules
        parts = {name: fused(part) for name, part in model._modules.items()}
    whole = copy.copy(model)
    whole._modules = {name: part for name, (part, _) in parts.items()}
    return whole, sum(taken for _, taken in parts.values())  # traces that fail are not counted


def _arithmetic(program: torch.export.ExportedProgram) -> Callable[[], object]:
    """The folded weights and biases of a program whose batch norms all follow a convolution, and nothing else."""
    signature, state = program.graph_signature, program.state_dict
    names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    sites = []
    for norm in program.graph.find_nodes(op="call_function", target=OP):
        inputs = (norm.args[0].args[1], *norm.args[1:5])
        sites.append((*(state[names[node.name]].detach() for node in inputs), norm.args[7]))

    def run() -> object:
        found = []
        for kernel, weight, bias, mean, var, eps in sites:
            scale = weight.double() / torch.sqrt(var.double() + eps)
            shift = (0 - mean.double()) * scale + bias.double()
            found.append(((kernel.double() * scale.view(-1, 1, 1, 1)).float(), shift.float()))
        return found

    return run


def folding(quick: bool) -> Iterator[Bar]:
    """Folding against torchao's, in place as it works; its cost grows with the pairs; and over its bare arithmetic."""
    from torchao.quantization.pt2e.utils import _fuse_conv_bn_

    sites, inplace = 200 if quick else 800, tbn.Fold(inplace=True)
    taken: dict[str, float] = {}
    for way, run, repeat in (("torchao", _fuse_conv_bn_, 1), ("fold", inplace, 5)):
        held: list[GraphModule] = []
        taken[way] = seconds(
            lambda run=run, held=held: run(held[-1]), lambda held=held: held.append(convolved(sites)), repeat
        )
        left = [[len(m.graph.find_nodes(op="call_function", target=op)) for op in (CONV, OP)] for m in held]
        assert left == [[sites, 0]] * repeat, (way, left)
    detail = f"torchao {taken['torchao']:.2f} s, fold {taken['fold'] * 1e3:.0f} ms"
    yield Bar(
        f"fold faster than torchao at {sites} pairs, times", taken["torchao"] / taken["fold"], 30, math.inf, detail
    )
    yield _growth("fold", inplace, convolved, (100, 1000 if quick else 10000))

    program = resnet50(False)
    arithmetic = _arithmetic(program)
    ours, least = paired(lambda: tbn.fold(program), lambda: (arithmetic(), recompiled(program)), 10 if quick else 30)
    model = ResNetForImageClassification(ResNetConfig()).eval()
    theirs = min(fused(model)[1] for _ in range(3))
    detail = f"fold {ours * 1e3:.0f} ms, floor {least * 1e3:.0f} ms; torch.fx.experimental's fuse {theirs * 1e3:.0f} ms"
    yield Bar("fold(ResNet-50) over its float64 arithmetic, copy and recompile", ours / least, 0, 2.5, detail)


def _settled(model: nn.Module, x: torch.Tensor) -> nn.Module:
    """The model in eval, with the statistics of `x`: at the initial ones activations fade away, down to denormals."""
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    for norm in norms:
        norm.momentum = 1.0
    with torch.no_grad():
        model.train()(x)
    return model.eval()


def folded(quick: bool) -> Iterator[Bar]:
    """Folded programs against what torch.fx.experimental's fuse leaves, and unfolded: in turns, on one thread.

    What is fused is exported too, so that the calls of eager modules do not count against it.
    """
    from monai.networks.nets import DenseNet121

    torch.set_num_threads(1)
    x, turns, order = torch.randn(1, 3, 128, 128), 20 if quick else 100, random.Random(0)
    models = {
        "ResNet-50": lambda: ResNetForImageClassification(ResNetConfig()),
        # without the padding of TensorFlow, which fuse does not trace
        "MobileNetV2": lambda: MobileNetV2ForImageClassification(MobileNetV2Config(tf_padding=False)),
        "DenseNet-121": lambda: DenseNet121(spatial_dims=2, in_channels=3, out_channels=10),
    }
    for name, make in models.items():
        torch.manual_seed(0)
        model = _settled(make(), x)
        program, fuse_ = (torch.export.export(m, (x,)) for m in (model, fused(model)[0]))
        programs = {"folded": tbn.fold(program), "fuse": fuse_, "unfolded": program}
        left = {way: len(p.graph.find_nodes(op="call_function", target=OP)) for way, p in programs.items()}
        assert left["folded"] == left["fuse"] < left["unfolded"], (name, left)
        modules = {way: p.module() for way, p in programs.items()}
        modules["again"] = modules["folded"]
        taken: dict[str, list[float]] = {way: [] for way in modules}
        for turn in range(turns + 3):
            for way in order.sample(list(modules), len(modules)):
                start = time.perf_counter()
                with torch.no_grad():
                    modules[way](x)
                taken[way] += [time.perf_counter() - start] if turn > 2 else []  # the first ones warm up
        # of each turn, so that a machine that slows down between turns does not count
        ratio = {way: statistics.median(map(operator.truediv, taken["folded"], taken[way])) for way in modules}
        detail = ", ".join(f"{way} {statistics.median(taken[way]) * 1e3:.1f} ms" for way in programs)
        detail += f"; {left['folded']} of {left['unfolded']} BN left; noise, folded over itself: {ratio['again']:.3f}"
        for way, low, high in (("fuse", 0.98, 1.02), ("unfolded", 0, 1)):
            yield Bar(f"folded {name} over {way}, eval, forward", ratio[way], low, high, detail)


MEASURES = (
    linear,
    floor,
    inplace,
    pattern,
    decompositions,
    runtime,
    ops,
    legalization,
    inductor,
    curves,
    compilation,
    switching,
    folding,
    folded,
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    names = [measure.__name__ for measure in MEASURES]
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"what to measure, of {', '.join(names)}; all by default"
    )
    parser.add_argument("--quick", action="store_true", help="smaller sizes and fewer turns, to see that it works")
    chosen = parser.parse_args()
    if unknown := set(chosen.names) - set(names):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    warnings.simplefilter("ignore")
    console, bars = Console(width=None if sys.stdout.isatty() else 200), []
    for measure in MEASURES:
        if not chosen.names or measure.__name__ in chosen.names:
            with Console(stderr=True).status(f"{measure.__name__}: {measure.__doc__}"):
                bars += measure(chosen.quick)
    rows = [(b.claim, f"{b.value:.2f}", _range(b), "yes" if b.met else "NO", b.detail) for b in bars]
    console.print(table("Bars", ("claim", "measured", "bar", "met", "detail"), rows))
    written = {"torch": torch.__version__, "threads": torch.get_num_threads(), "quick": chosen.quick}
    RESULTS.write_text(json.dumps({**written, "bars": [{**asdict(b), "met": b.met} for b in bars]}, indent=2))
    console.print(f"written to {RESULTS}")
    return 0 if all(bar.met for bar in bars) else 1


def _range(bar: Bar) -> str:
    if bar.high == math.inf:
        return f"at least {bar.low:g}"
    return f"at most {bar.high:g}" if bar.low == 0 else f"{bar.low:g} to {bar.high:g}"


if __name__ == "__main__":
    sys.exit(main())
