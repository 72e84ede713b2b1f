"""The op family as total functions: ATen's results where ATen works, and defined results where it does not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._prims_common.wrappers import _maybe_resize_out, _safe_copy_out
from torch.fx.experimental.symbolic_shapes import guard_or_false

from ..errors import InvalidBatchNorm
from .forms import HALF, BatchNorm
from .outputs import NEUTRAL, fill

aten = torch.ops.aten


T = TypeVar("T", bound=tuple[Any, ...])


Four = tuple[Tensor, Tensor, Tensor, Tensor]


def batch_norm_with_update(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    *,
    out: Sequence[Tensor] | None = None,
) -> Four:
    """Batch norm in training: normalises with the batch's statistics and updates the running ones in place.

    input: [N, C, *], floating point. weight, bias, running_mean, running_var: [C] in the input's dtype, or float32
    beside a half input; weight and bias may each be None, the statistics both. momentum: the weight of the new batch.
    Returns (out, save_mean, save_invstd, reserve): out as input, save_mean and save_invstd = 1/sqrt(var + eps): [C],
    reserve: uint8, opaque, for the backward. `out`: four tensors to write these to, resized as ATen resizes.

    An empty batch gives an empty output, zero gradients and unchanged statistics; what it saves are zeros.

    Raises: InvalidBatchNorm naming argument, found and expected; also for one value a channel, whose variance is NaN.
    Source: aten::_batch_norm_with_update, pytorch#116092.

    >>> x, mean, var = torch.ones(2, 3), torch.zeros(3), torch.ones(3)
    >>> batch_norm_with_update(x, None, None, mean, var, 0.1, 1e-5)[0].abs().max(), mean
    (tensor(0.), tensor([0.1000, 0.1000, 0.1000]))
    """
    norm = BatchNorm(input, weight, bias, running_mean, running_var, True, momentum, eps)
    results: Four = _computed("batch_norm_with_update", aten._batch_norm_with_update.default, norm)
    return _into(out, results)


def batch_norm_with_update_functional(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    *,
    out: Sequence[Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """`batch_norm_with_update` that writes nothing: the new running_mean and running_var come fifth and sixth, as new
    tensors, None when there are no statistics.

    Raises: InvalidBatchNorm as `batch_norm_with_update`. Source: aten::_batch_norm_with_update_functional.
    """
    norm = BatchNorm(input, weight, bias, running_mean, running_var, True, momentum, eps)
    results = _computed("batch_norm_with_update_functional", aten._batch_norm_with_update_functional.default, norm)
    # what was filled in for statistics is nobody's to have
    if running_mean is None or running_var is None:
        return (*_into(out, results[:4]), None, None)
    # an empty batch updates nothing, and what is returned is new memory all the same
    return _into(out, results if results[4:] else (*results, running_mean.clone(), running_var.clone()))


def batch_norm_no_update(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    *,
    out: Sequence[Tensor] | None = None,
) -> Four:
    """Batch norm in eval: normalises with the running statistics. Arguments and results as `batch_norm_with_update`.

    save_mean, save_invstd: [C] on every device, of the running statistics. momentum is not used.

    Raises: InvalidBatchNorm as `batch_norm_with_update`, and when there are no running statistics.
    Source: aten::_batch_norm_no_update; the saved statistics, pytorch#100985.
    """
    norm = BatchNorm(input, weight, bias, running_mean, running_var, False, momentum, eps)
    result, _, _, reserve = _computed("batch_norm_no_update", aten._batch_norm_no_update.default, norm)
    # not the kernel's own: on CPU those have no elements. pytorch#100985.
    return _into(out, (result, norm.running_mean.clone(), torch.rsqrt(norm.running_var + eps), reserve))


def batch_norm_backward(
    grad_out: Tensor,
    input: Tensor,
    weight: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    save_mean: Tensor | None,
    save_var: Tensor | None,
    update: bool,
    eps: float,
    output_mask: Sequence[bool],
    reserve: Tensor,
    *,
    out: Sequence[Tensor] | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of the family: of input, weight and bias, as asked for by output_mask; None where not asked for.

    grad_out: as input. update: whether the forward normalised with the batch's statistics, which are then save_mean and
    save_var = 1/sqrt(var + eps): [C]; else the running ones are used. reserve: what the forward returned as such.
    `out`: a tensor for each gradient that is asked for.

    Raises: InvalidBatchNorm naming argument, found and expected. Source: aten::batch_norm_backward.
    """
    norm = BatchNorm(input, weight, None, running_mean, running_var, update, None, eps)
    _check("batch_norm_backward", norm)
    _check_saved(grad_out, input, {"save_mean": save_mean, "save_var": save_var} if update else {})
    weight = fill(norm, "weight", input.shape[1], wide=True) if weight is None else weight
    # The CPU kernel of an empty batch ends the process: it divides by the number of values.
    found: Sequence[Tensor | None]
    if guard_or_false(input.numel() == 0):
        grads = (torch.zeros_like(input), torch.zeros_like(weight), torch.zeros_like(weight))
        found = [grad if asked else None for grad, asked in zip(grads, output_mask, strict=True)]
    else:
        saves = (running_mean, running_var, save_mean, save_var)
        tail = (update, eps, list(output_mask), reserve)
        found = aten.batch_norm_backward.default(grad_out, input, weight, *saves, *tail)
    if out is not None:
        _into(out, tuple(grad for grad in found if grad is not None))
    return found[0], found[1], found[2]


def _computed(name: str, overload: OpOverload, norm: BatchNorm) -> Any:
    """What the kernel returns; of an empty batch, which it refuses in training, the first four that are defined."""
    _check(name, norm)  # not taken from the overload: Dynamo, which traces this, cannot read its name
    # A size that may be zero is not guarded on: a graph then keeps the kernel, for every batch.
    if guard_or_false(norm.input.numel() == 0):
        return _empty(norm)
    return overload(norm.input, *_filled(norm), norm.momentum, norm.eps)


def _filled(norm: BatchNorm) -> list[Tensor]:
    """Weight, bias and statistics for a kernel, which needs all of them."""
    channels, given = norm.input.shape[1], {name: getattr(norm, name) for name in NEUTRAL}
    return [fill(norm, name, channels, wide=True) if tensor is None else tensor for name, tensor in given.items()]


def _empty(norm: BatchNorm) -> Four:
    """What an empty batch gives: an output that is differentiable like any other, to gradients of zero."""
    input, (weight, bias, *_) = norm.input, _filled(norm)
    shape = [1, -1, *[1] * (input.ndim - 2)]
    # half by float32 is float32, which the output is not
    out = (input * weight.view(shape) + bias.view(shape)).to(input.dtype)
    saved = torch.zeros_like(weight).detach()
    return out, saved, saved.clone(), input.new_empty((0,), dtype=torch.uint8)


def written(place: Tensor, result: Tensor) -> Any:
    """The place, with the result written to it by ATen's rules for resizing and casting."""
    # with a warning where it was not empty, and an error where a cast would lose the kind of number
    _maybe_resize_out(place, result.shape)
    return _safe_copy_out(copy_from=result, copy_to=place)


def _into(out: Sequence[Tensor] | None, results: T) -> T:
    """The results, written to `out` by ATen's rules for resizing and casting when it is given."""
    if out is None:
        return results
    found: tuple[Tensor, ...] = tuple(results)
    if len(out) != len(found):
        _refuse("out", "out", f"{len(out)} tensors", f"{len(found)}, one for each result")
    for result, place in zip(found, out, strict=True):
        written(place, result)
    return tuple(out)  # type: ignore[return-value]


def _check(name: str, norm: BatchNorm) -> None:
    """Raises InvalidBatchNorm for what a kernel would crash on, or answer with NaN."""
    input: Tensor = norm.input
    if input.ndim < 2:
        _refuse(name, "input", _shown(input), "[N, C, *]")
    if not input.dtype.is_floating_point:
        _refuse(name, "input", _shown(input), "a floating point dtype")
    # A kernel that gets one statistic of the two reads memory that is not there: it crashes. pytorch#194014.
    mean, var = norm.running_mean, norm.running_var
    if (mean is None) is not (var is None):
        absent, given = ("running_mean", "running_var") if mean is None else ("running_var", "running_mean")
        _refuse(name, absent, "None", f"a tensor, as {given} is one; or None for both")
    if mean is None and not norm.training:
        _refuse(name, "running_mean", "None", "a tensor: without running statistics there is nothing to normalise with")
    # Kernels ask for one dtype of weight, bias and statistics: that of the first that is there.
    first = None
    for argument in NEUTRAL:
        tensor = getattr(norm, argument)
        if tensor is not None:
            first = tensor if first is None else first
            _check_channels(name, argument, tensor, first, input)
    # n / (n - 1) of the unbiased variance: NaN in running_var, for good. An empty batch is no such case. pytorch#7716.
    if norm.training and guard_or_false(input.numel() == input.shape[1]):
        wanted = "more than one value for each channel in training: the variance is undefined"
        _refuse(name, "input", _shown(input), wanted)


def _check_channels(name: str, argument: str, tensor: Tensor, first: Tensor, input: Tensor) -> None:
    """Raises for a parameter or statistic that is not [C], not of a dtype beside the input's, or on another device."""
    # Source: check_mixed_data_type in aten/src/ATen/native/cpu/mixed_data_type.h.
    kinds = (input.dtype, torch.float32) if input.dtype in HALF else (input.dtype,)
    # a shorter running_var is read past its end: a crash, not an error
    if tensor.shape != input.shape[1:2]:
        wanted = f"[{input.shape[1]}], one value for each channel of input {_shown(input)}"
        _refuse(name, argument, _shown(tensor), wanted)
    if tensor.dtype not in kinds or tensor.dtype != first.dtype:
        _refuse(name, argument, _shown(tensor), f"dtype {_dtypes(kinds, first)} beside input {_shown(input)}")
    if tensor.device != input.device:
        _refuse(name, argument, f"device {tensor.device}", f"device {input.device}, which input is on")


def _check_saved(grad_out: Tensor, input: Tensor, saved: Mapping[str, Tensor | None]) -> None:
    """Raises for what a gradient reads that is not as its forward left it."""
    name = "batch_norm_backward"
    if grad_out.shape != input.shape:
        _refuse(name, "grad_out", _shown(grad_out), f"the shape of input, {_shown(input)}")
    for argument, tensor in saved.items():
        if tensor is None or tensor.shape != input.shape[1:2]:
            _refuse(name, argument, _shown(tensor), f"[{input.shape[1]}], as the forward saved it")


def _dtypes(kinds: Sequence[torch.dtype], first: Tensor) -> str:
    """The dtypes that a parameter or statistic may have: one of two beside a half input, and all four the same."""
    allowed = kinds if first.dtype not in kinds else (first.dtype,)
    return " or ".join(str(kind).removeprefix("torch.") for kind in allowed)


def _shown(tensor: Tensor | None) -> str:
    return "None" if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _refuse(name: str, argument: str, found: str, expected: str) -> NoReturn:
    raise InvalidBatchNorm(name, argument, found, expected)
