"""What a call returns, and what stands in for a missing tensor: for graphs, tables, fake tensors and eager calls."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import torch

from .forms import HALF, BatchNorm, Gradient

aten = torch.ops.aten


# What stands in for a missing tensor without changing a number.
NEUTRAL = MappingProxyType({"weight": 1, "bias": 0, "running_mean": 0, "running_var": 1})


_MAKE = (aten.new_zeros.default, aten.new_ones.default)


def like_of(norm: BatchNorm | Gradient) -> Any:
    """What a missing tensor is filled in like: the weight, bias or statistics that are there, else the input.

    A gradient without any of them is computed with the saved statistics of its batch, which are of the dtype that its
    forward had its own in. Half inputs with nothing else stay half: float32 would bring cuDNN within reach and change
    numbers, as ATen on CPU computes such statistics in the input's dtype.
    """
    # running_var is not asked: there is none without a running_mean, and a short one crashes kernels
    fields = ("weight", "bias", "running_mean", *(("save_invstd",) if norm.training else ()))
    there = (getattr(norm, field, None) for field in fields)
    return next((tensor for tensor in there if tensor is not None), norm.input)


def channels_of(norm: BatchNorm | Gradient, of: Callable[[Any], Any] = lambda tensor: tensor) -> Any:
    """How many channels there are: as many as weight, bias and statistics have entries where several agree, else as
    the input has. In a graph they are state, of which one knows, while what is noted of the input may be stale.

    of: the value of what the record holds.
    """
    given = [of(t) for name in NEUTRAL if (t := getattr(norm, name, None)) is not None]
    lengths = [tensor.numel() for tensor in given if tensor is not None]
    # a dynamic size is not compared: that would put a guard on it
    agree = len(lengths) > 1 and all(type(length) is int and length == lengths[0] for length in lengths)
    return lengths[0] if agree else of(norm.input).shape[1]


def _call(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return op(*args, **kwargs)


def fill(
    norm: BatchNorm | Gradient, name: str, channels: Any, call: Callable[..., Any] = _call, *, wide: bool = False
) -> Any:
    """The neutral [C] tensor for a missing weight, bias or statistic.

    channels: how many. call: makes the call of an op, (op, args, kwargs), for instance as a node of a graph. wide: in
    float32 beside a half input with nothing else, which only `tbn.ops` promises: no older numbers are changed there.
    """
    like = like_of(norm)
    # an input that is not half has its parameters in its own dtype alone
    float32 = wide and like is norm.input and like.dtype in HALF
    return call(_MAKE[NEUTRAL[name]], (like, [channels]), {"dtype": torch.float32} if float32 else {})


def returned(
    norm: BatchNorm | Gradient, role: str, of: Callable[[Any], torch.Tensor | None] = lambda tensor: tensor
) -> tuple[tuple[Any, ...], torch.dtype]:
    """The shape and dtype of one output of a call, as the kernel returns it on the input's device.

    of: the value of what the record holds. The size of a reserve is only known when it runs: (0,), as most have it.

    What is saved has the dtype of the parameters and statistics, on devices other than the CPU float32 for half inputs;
    in eval it has no elements on CPU. Source: batch_norm_cpu, batch_norm_cuda, pytorch#100985.
    """
    input: Any = of(norm.input)
    if role in ("out", "grad_input"):
        return tuple(input.shape), input.dtype
    # bytes for cuDNN's own use; native kernels return it empty
    if role == "reserve":
        return (0,), torch.uint8
    given = [of(t) for name in NEUTRAL if (t := getattr(norm, name, None)) is not None]
    first = next((tensor for tensor in given if tensor is not None), input)
    if role in ("save_mean", "save_invstd"):
        # Mixed half computes in float32 on accelerators, and saves what it computed with; on CPU that has the dtype of
        # the parameters.
        cpu = input.device.type == "cpu"
        shape = (0,) if cpu and not norm.training else (channels_of(norm, of),)
        return shape, first.dtype if cpu or input.dtype not in HALF else torch.float32
    # grad_weight and grad_bias like the weight; new statistics like the old
    tensor: Any = of(norm.weight if role.startswith("grad") else getattr(norm, role.removeprefix("new_")))
    return (channels_of(norm, of),), first.dtype if tensor is None else tensor.dtype
