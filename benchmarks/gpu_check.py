"""What a GPU runs, and how exactly: one script, under five minutes on one GPU, that prints JSON.

For float32, bfloat16 and float16, NCHW and NHWC, train and eval, over the batch norms of a ResNet-50: which kernels run
by the profiler's names, against `explain_backend`; the error of native and cuDNN against float64, and their times.
Then a program exported on the CPU and moved to CUDA: outputs, statistics and gradients of one step against the eager
cuDNN model, consolidated and not. Then twenty steps of a ResNet-50, eager, under Inductor and with its batch norms
kept: the losses, how far each is from eager, and the times. Without a GPU it says so, checks on the CPU what can be
checked there, and exits 0.

Usage: python benchmarks/gpu_check.py [--out FILE]. Exit code 1 when something that has to hold does not.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.export.passes import move_to_device_pass
from torch.profiler import ProfilerActivity, profile

import torch_batchnorm as tbn

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LAYOUTS = {"NCHW": torch.contiguous_format, "NHWC": torch.channels_last}
# Channels and side of the batch norms of a ResNet-50 at 224 x 224.
SHAPES = ((64, 112), (64, 56), (256, 56), (128, 28), (512, 28), (256, 14), (1024, 14), (512, 7), (2048, 7))
TAIL = (0.1, 1e-5)


def formula(x: Tensor, w: Tensor, b: Tensor, mean: Tensor, var: Tensor, training: bool) -> Tensor:
    """Batch norm in float64."""
    x, w, b, mean, var = (t.double() for t in (x, w, b, mean, var))
    if training:
        mean, var = x.mean((0, 2, 3)), x.var((0, 2, 3), unbiased=False)
    view = (1, -1, 1, 1)
    return (x - mean.view(view)) / (var.view(view) + TAIL[1]).sqrt() * w.view(view) + b.view(view)


def tensors(shape: tuple[int, ...], dtype: torch.dtype, layout: torch.memory_format, device: str) -> tuple[Tensor, ...]:
    x = torch.randn(shape, device=device).mul_(3).add_(1).to(dtype).contiguous(memory_format=layout)
    channels = [torch.rand(shape[1], device=device) + 0.5 for _ in range(4)]
    return (x, *channels)


def call(given: tuple[Tensor, ...], training: bool) -> Tensor:
    op = tbn.ops.batch_norm_with_update if training else tbn.ops.batch_norm_no_update
    return op(*given, *TAIL)[0]


def kernels_of(run: Callable[[], object]) -> list[str]:
    """The names of the CUDA kernels that run."""
    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiled:
        run()
        torch.cuda.synchronize()
    return [e.name for e in profiled.events() if e.device_type == torch.autograd.DeviceType.CUDA]


def milliseconds(run: Callable[[], object], turns: int) -> float:
    """The median time of a call on the GPU."""
    times = []
    for _ in range(turns):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[2:])


def sites(batch: int) -> tuple[list[dict[str, Any]], list[str]]:
    """Every dtype, layout, mode and shape: kernels, errors, times; and what does not hold."""
    found, wrong = [], []
    for dtype, layout, training, (c, side) in itertools.product(DTYPES, LAYOUTS, (True, False), SHAPES):
        given = tensors((batch, c, side, side), dtype, LAYOUTS[layout], "cuda")
        why = tbn.explain_backend(*given, training, TAIL[1])
        row: dict[str, Any] = {"dtype": str(dtype), "layout": layout, "training": training, "shape": [batch, c, side]}
        names = kernels_of(lambda given=given, training=training: call(given, training))
        cudnn = any("cudnn" in name.lower() or "bn_fw" in name for name in names)
        row |= {"backend": why.backend.value, "kernels": sorted(set(names)), "ran_cudnn": cudnn}
        built = torch._C._select_batch_norm_backend(*given, training, TAIL[1]).name.lower()
        if why.backend.value != built or cudnn is not (why.backend is tbn.Backend.CUDNN):
            wrong.append(f"{row}: explained as {why}, PyTorch says {built}")
        exact = formula(*given, training)
        for choice in ("native", "cudnn") if why.backend is tbn.Backend.CUDNN else ("native",):
            with tbn.backend(choice):
                error = (call(given, training).double() - exact).abs().max().item()
                row[choice] = {"error": error, "ms": milliseconds(lambda g=given, t=training: call(g, t), 7)}
        found.append(row)
    return found, wrong


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(layer for _ in range(3) for layer in (nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()))
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)  # type: ignore[no-any-return]


def one_step(module: Any, x: Tensor) -> list[Tensor]:
    """Output, statistics and gradients of one step."""
    x = x.clone().requires_grad_()
    out = module(x)
    out.double().square().mean().backward()
    buffers = [b.detach().clone() for b in module.buffers()]
    return [out.detach(), *buffers, x.grad, *(p.grad for p in module.parameters())]  # type: ignore[list-item]


def moved(device: str) -> tuple[dict[str, Any], list[str]]:
    """A program exported on the CPU and moved: how far one step is from eager, consolidated and not, train and eval."""
    found, wrong = {}, []
    for training in (True, False):
        torch.manual_seed(0)
        model, x = Net().train(training), torch.randn(8, 16, 24, 24)
        torch.backends.cudnn.deterministic = True
        eager = one_step(copy.deepcopy(model).to(device), x.to(device))
        for name, change in {"unconsolidated": lambda p: p, "consolidated": tbn.consolidate}.items():
            program = change(torch.export.export(copy.deepcopy(model), (x,)))
            step = one_step(move_to_device_pass(program, device).module(), x.to(device))
            far = max((a.double() - b.double()).abs().max().item() for a, b in zip(eager, step, strict=True))
            mode = "train" if training else "eval"
            found[f"{name}, {mode}"] = far
            if name == "consolidated" and far != 0:
                wrong.append(f"consolidated, {mode}: {far} from eager on {device}, expected the same to the bit")
    return found, wrong


# What a model is compiled with; None: not at all.
WAYS: dict[str, dict[str, Any] | None] = {"eager": None, "inductor": {}, "kept": tbn.inductor_options("train")}


def resnet50() -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    class Logits(ResNetForImageClassification):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).logits  # type: ignore[no-any-return]

    return Logits(ResNetConfig())


def curves(make: Callable[[], nn.Module], x: Tensor, steps: int = 20) -> dict[str, Any]:
    """Losses and seconds a step of each way to train one model on one batch, and the largest distance from eager."""
    found: dict[str, Any] = {}
    for way, options in WAYS.items():
        torch.manual_seed(0)
        model = make().to(x.device)
        run = model if options is None else torch.compile(model, options=options or None)
        optimizer, losses, times = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9), [], []
        for _ in range(steps):
            start = time.perf_counter()
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(run(x).flatten(1), torch.arange(len(x), device=x.device) % 2)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())  # which waits for the device
            times.append(time.perf_counter() - start)
        far = max(abs(a - b) for a, b in zip(losses, found.get("eager", {"losses": losses})["losses"], strict=True))
        found[way] = {"losses": losses, "far_from_eager": far, "seconds_a_step": statistics.median(times[steps // 4 :])}
        torch._dynamo.reset()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="also write the JSON to this file")
    parser.add_argument("--batch", type=int, default=32, help="the batch of the ResNet-50 shapes")
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    started, gpu = time.perf_counter(), torch.cuda.is_available()
    report: dict[str, Any] = {"torch": torch.__version__, "device": torch.cuda.get_device_name() if gpu else None}
    console = Console(stderr=True)
    with console.status("a program exported on the CPU, moved"):
        report["moved"], wrong = moved("cuda" if gpu else "cpu")
    if gpu:
        with console.status("kernels, errors and times"):
            report["sites"], more = sites(chosen.batch)
        wrong += more
        with console.status("twenty steps of a ResNet-50"):
            report["curves"] = curves(resnet50, torch.randn(chosen.batch, 3, 224, 224, device="cuda"))
    else:
        report["note"] = "no GPU here: only a program that stays on the CPU was compared"
    report |= {"wrong": wrong, "seconds": round(time.perf_counter() - started, 1)}
    text = json.dumps(report, indent=2)
    print(text)
    if chosen.out:
        chosen.out.write_text(text)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
