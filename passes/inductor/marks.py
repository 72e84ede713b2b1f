"""The functional family under names of our own, which no compiler decomposes: what keeps a batch norm whole until its
graph has been traced. No such call outlives that; it is swapped for ATen's op of the same arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

aten = torch.ops.aten


_FAMILY = (
    aten._batch_norm_with_update_functional.default,
    aten._batch_norm_no_update.default,
    aten.batch_norm_backward.default,
)


@cache
def kept() -> Mapping[OpOverload, OpOverload]:
    """ATen's op -> ours, which the first call defines: importing this file changes nothing in PyTorch."""
    library: Any = torch.library.Library("torch_batchnorm", "DEF")  # type: ignore[no-untyped-call]
    found = {family: _define(library, family) for family in _FAMILY}
    _libraries.append(library)
    for forward in _FAMILY[:2]:
        name = f"torch_batchnorm::{forward.overloadpacket.__name__}"
        torch.library.register_autograd(name, _gradient, setup_context=_saved, lib=library)
    return MappingProxyType(found)


_libraries: list[Any] = []  # what is defined lives as long as its library


def _define(library: Any, family: Any) -> OpOverload:
    """An op with the schema and the results of one of the family's, on every device and on fake tensors."""
    schema = str(family._schema).removeprefix("aten::")
    name = schema.partition("(")[0]
    library.define(schema, tags=family.tags)
    # for every device and below autograd; CompositeImplicitAutograd would be taken apart while it is traced
    library.impl(name, family, "CompositeExplicitAutograd")
    torch.library.register_fake(f"torch_batchnorm::{name}", family, lib=library)
    return getattr(torch.ops.torch_batchnorm, name).default  # type: ignore[no-any-return]


def _saved(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    input, weight, _, running_mean, running_var, _, eps = inputs
    training = len(output) > 4
    _, save_mean, save_invstd, reserve, *_ = output
    # in training the gradient reads the batch's statistics: the running ones are free to change until then
    statistics = (save_mean, save_invstd) if training else (running_mean, running_var)
    ctx.save_for_backward(input, weight, *statistics, reserve)
    ctx.training, ctx.eps = training, eps
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # an output that no gradient came by is None, and no kernel is called for it


def _gradient(ctx: Any, grad_out: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if grad_out is None:
        return (None,) * 7
    input, weight, mean, spread, reserve = ctx.saved_tensors
    statistics = (None, None, mean, spread) if ctx.training else (mean, spread, None, None)
    mask = list(ctx.needs_input_grad[:3])
    backward = kept()[aten.batch_norm_backward.default]
    grads = backward(grad_out, input, weight, *statistics, ctx.training, ctx.eps, mask, reserve)
    return (*(grad if asked else None for grad, asked in zip(grads, mask, strict=True)), None, None, None, None)
