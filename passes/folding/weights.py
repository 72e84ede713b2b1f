"""Targets: the calls of layers that batch norms go into, and the weights that come of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from ...decomps.affine import LIMITS, Affine, bias_of, write_folded
from ...decomps.forms import HALF
from ...decomps.layers import LAYER_BY_TARGET, Layer, LayerForm
from ..graph.constants import Constant, State
from ..graph.meta import val_of
from ..rewriting.site import Site

EXPECTED = f"expected one of {', '.join(map(str, LIMITS))}"


@dataclass(eq=False)
class Target:
    """A call of a layer that batch norms go into.

    reader: None, or who gets a call of its own. intos, outs: the sites ahead of it and behind it, from the first to the
    last, each with its affine in the channels of the layer. fresh: whether its weights are new ones beside the old.
    """

    call: Node
    reader: Node | None
    form: LayerForm
    layer: Layer
    weight: Constant
    bias: Constant | None
    intos: list[tuple[Site, Affine]] = field(default_factory=list)
    outs: list[tuple[Site, Affine]] = field(default_factory=list)
    fresh: bool = False

    @property
    def into(self) -> Affine | None:
        """All that happens to its input."""
        return _composed(self.intos)

    @property
    def out(self) -> Affine | None:
        """All that happens to its output."""
        return _composed(self.outs)

    @cached_property
    def dtype(self) -> torch.dtype:
        """The coarsest of what its weight, in the state and as it is read, and its output are held in."""
        vals = (self.weight.tensor, val_of(self.call), val_of(self.layer.weight))
        return max((val.dtype for val in vals if val is not None), key=lambda dtype: torch.finfo(dtype).eps)

    def axis(self, value: Node) -> int:
        """The dimension of its input, or of its output, that holds the channels."""
        weight: Any = val_of(self.layer.weight)
        val: Any = val_of(value)
        return int(val.ndim - 1 - (weight.ndim - 2))

    def width(self, out: bool) -> int:
        """How many channels it makes, or reads."""
        weight: Any = val_of(self.layer.weight)
        first, second = weight.shape[0], weight.shape[1] * self.layer.groups
        return int(first if self.layer.input_first is not out else second)

    def same(self, other: Target) -> bool:
        """Whether it gets the same weights, from tensors that are the same."""
        ours, theirs = (self.into, self.out), (other.into, other.out)
        alike = all(a.same(b) if a and b else a is b for a, b in zip(ours, theirs, strict=True))
        read = [
            (t.weight.read, t.bias and t.bias.read, t.layer.groups, t.layer.input_first, t.dtype) for t in (self, other)
        ]
        return alike and read[0] == read[1]

    def losses(self) -> Iterator[tuple[Site, str, str]]:
        """The sites that rounding makes too much of in it, where each of them is, and why."""
        lost = [(site, "down", affine.lost(torch.zeros((), device="cpu"), self.dtype)) for site, affine in self.intos]
        bias = self._bias()
        for site, affine in self.outs:
            lost.append((site, "up", affine.lost(bias, self.dtype)))
            bias = bias * affine.scale + affine.shift
        for site, direction, loss in lost:
            if reason := lossy(loss, self.dtype):
                yield site, direction, reason

    def _bias(self) -> Tensor:
        """Its bias with what its input adds to it."""
        weight: Any = self.weight.view(self.weight.tensor.detach())
        return bias_of(self.layer, weight, None if self.bias is None else self.bias.value(), self.into)

    def computed(self, float32_above: int | None, force: bool) -> tuple[Tensor, Tensor] | str:
        """The new weight, like the tensor in the state, and the new bias, [out] in float64; or why the dtype of the
        weight cannot hold them.
        """
        old, out, name = self.weight.tensor.detach(), self.out, self.weight.name
        exact = torch.float32 if float32_above is not None and old.numel() > float32_above else torch.float64
        made = self._written(torch.empty_like(old), exact)
        bias = self._bias()
        bias = bias if out is None else bias * out.scale + out.shift
        held = [tensor.to(self.dtype) for tensor in (made, bias)]
        if not all(bool(tensor.sum(dtype=torch.float32).isfinite()) for tensor in held):  # quick, and seldom not
            finite = all(bool(tensor.isfinite().all()) for tensor in held)
            if not finite and (self.intos or self._is_finite()):
                return f"its scale or its shift takes {name} out of the range of {self.dtype}"
        if self.dtype in HALF and not force:
            precise = self._written(torch.empty_like(old, dtype=torch.float64), exact)
            error, size = (self._sums(tensor) for tensor in (precise - held[0].double(), precise))
            if float((error / size.clamp_min(torch.finfo(torch.float64).tiny)).max()) > LIMITS[self.dtype]:
                return f"its scale takes {name} below the range of {self.dtype}"
        return made, bias

    def _is_finite(self) -> bool:
        """Whether the weights are finite that it had."""
        tensors = [self.weight.tensor] + ([] if self.bias is None else [self.bias.value()])
        return all(bool(tensor.isfinite().all()) for tensor in tensors)

    def _written(self, made: Tensor, dtype: torch.dtype) -> Tensor:
        read: Any = self.weight.view(self.weight.tensor.detach())
        view: Any = self.weight.view(made)
        write_folded(self.layer, read, view, self.into, self.out, dtype)
        return made

    def _sums(self, tensor: Tensor) -> Tensor:
        """The sum of the sizes of all the weights of each output."""
        view: Any = self.weight.view(tensor)
        return self.layer.grouped(view).flatten(2).abs().sum(2)


def _composed(sites: list[tuple[Site, Affine]]) -> Affine | None:
    found: Affine | None = None
    for _, affine in sites:
        found = affine if found is None else found.then(affine)
    return found


def lossy(lost: float, dtype: torch.dtype) -> str:
    """Why a loss, in standard deviations of a channel, is too much, empty when it is not."""
    if lost <= LIMITS[dtype]:
        return ""
    return (
        f"folding it loses {lost:.1e} standard deviations of a channel to rounding in {dtype}, more than "
        f"{LIMITS[dtype]:.1e} (force=True folds it)"
    )


def fits(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether a dtype holds numbers in float64 to within what a fold may lose."""
    held = tensor.to(dtype)
    off = (held.double() - tensor).abs() > LIMITS[dtype] * tensor.abs()
    return bool(held.isfinite().all()) and not bool(off.any())


def target_of(state: State, call: Node, reader: Node | None) -> Target | str:
    """A call of a layer as a target, or why its weights are not known."""
    form = LAYER_BY_TARGET[call.target]
    operands = form.given(call.args, call.kwargs)
    weight, val = operands[form.weight], val_of(operands[form.weight])
    named = f"{call.name} ({call.target})"
    if not isinstance(weight, Node) or val is None or val_of(call) is None:
        return f"the graph keeps no shapes (no val) for {named}: trace it with fake tensors"
    if val.dtype not in LIMITS:
        return f"the weight of {named} is {val.dtype}, {EXPECTED}"
    if (val.ndim == 2) is form.kernel or val.ndim < 2:
        return f"the weight of {named} has {val.ndim} dimensions"
    if not form.plain(call.args, call.kwargs):
        return f"{named} scales its product or its bias (alpha, beta)"
    layer = form.read(call.args, call.kwargs, tuple(val.shape[2:]))
    found, bias = state.constant(weight), None if layer.bias is None else state.constant(layer.bias)
    if isinstance(found, str) or isinstance(bias, str):
        return found if isinstance(found, str) else str(bias)
    if type(layer.groups) is not int or found.view(found.tensor.detach()) is None:
        return f"the weight of {named} is a copy of {found.name} in another layout"
    if found.tensor.dtype not in LIMITS or (bias is not None and bias.tensor.dtype not in LIMITS):
        return f"{found.name} is {found.tensor.dtype}, {EXPECTED}"
    target = Target(call, reader, form, layer, found, bias)
    shape, out = () if bias is None else tuple(bias.value().shape), target.width(out=True)
    if bias is not None and (shape[-1:] != (out,) or bias.value().numel() != out):
        return f"the bias of {named} is {list(shape)}, expected [{out}]"
    return target
