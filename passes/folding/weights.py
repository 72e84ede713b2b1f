"""The layers that batch norms go into, and the weights that come of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, reduce
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from ...decomps.affine import LIMITS, Affine, bias_of, write_folded
from ...decomps.forms import HALF
from ...decomps.layers import LAYER_BY_TARGET, Layer, LayerForm
from ..graph.constants import Constant, quantization
from ..graph.meta import val_of
from ..graph.result import Reason
from ..graph.state import State
from ..rewriting.site import Site

EXPECTED = f"expected one of {', '.join(map(str, LIMITS))}"


@dataclass(eq=False)
class Target:
    """A call of a layer that batch norms go into.

    reader: None, or who gets a call of its own. folds: the sites that go into it, "down" those ahead of it, "up" those
    behind it, from the first to the last, each with its affine in the channels of the layer. fresh: whether its weights
    are new ones beside the old.
    """

    call: Node
    reader: Node | None
    form: LayerForm
    layer: Layer
    weight: Constant
    bias: Constant | None
    folds: dict[str, list[tuple[Site, Affine]]] = field(default_factory=lambda: {"down": [], "up": []})
    fresh: bool = False

    def composed(self, way: str) -> Affine | None:
        """All that happens to its input ("down"), or to its output ("up")."""
        affines = [affine for _, affine in self.folds[way]]
        return reduce(Affine.then, affines) if affines else None

    @cached_property
    def read(self) -> Tensor:
        """The weight as the layer reads it, but for casts: the memory of the state."""
        found: Any = self.weight.view(self.weight.tensor.detach())
        return found  # type: ignore[no-any-return]

    @cached_property
    def dtype(self) -> torch.dtype:
        """The coarsest of what its weight, in the state and as it is read, and its output are held in."""
        # autocast reads a float32 weight in float16: what overflows there overflows, whatever the state holds
        made: Any = val_of(self.call)
        dtypes: tuple[torch.dtype, ...] = (self.weight.tensor.dtype, self.weight.value().dtype, made.dtype)
        return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)

    def channels(self, value: Node, out: bool) -> tuple[int, int]:
        """The dimension of its output, or of its input, that holds the channels, and how many these are."""
        val: Any = val_of(value)
        return int(val.ndim - 1 - (self.read.ndim - 2)), self.width(out)

    def width(self, out: bool) -> int:
        """How many channels it makes, or reads."""
        # [out, in / groups, ...], transposed layers [in, out / groups, ...]
        first, second = self.read.shape[0], self.read.shape[1] * self.layer.groups
        return first if self.layer.input_first is not out else second

    def same(self, other: Target) -> bool:
        """Whether it gets the same weights, from tensors that are the same."""
        pairs = ((self.composed(way), other.composed(way)) for way in self.folds)
        # a module called twice: the same weight and the same fold, so one new weight will do
        alike = all(a.same(b) if a and b else a is b for a, b in pairs)
        read = [
            (t.weight.read, t.bias and t.bias.read, t.layer.groups, t.layer.input_first, t.dtype) for t in (self, other)
        ]
        return alike and read[0] == read[1]

    def losses(self) -> Iterator[tuple[tuple[Site, str], Reason]]:
        """The sites that rounding makes too much of in it, with their direction, and why."""
        lost = [(site, "down", affine.lost(0.0, self.dtype)) for site, affine in self.folds["down"]]
        bias = self._bias()
        for site, affine in self.folds["up"]:
            lost.append((site, "up", affine.lost(bias, self.dtype)))
            # the next one sees the output of this one
            bias = bias * affine.scale + affine.shift
        reasons = (((site, direction), refuse_loss(loss, self.dtype)) for site, direction, loss in lost)
        yield from ((place, reason) for place, reason in reasons if reason)

    def blocked(self, reason: Reason, *directions: str) -> Iterator[tuple[tuple[Site, str], Reason]]:
        """The sites that do not go into it after all, of some directions or of both."""
        yield from (((site, way), reason) for way in directions or self.folds for site, _ in self.folds[way])

    def _bias(self) -> Tensor:
        """Its bias with what its input adds to it."""
        return bias_of(self.layer, self.read, None if self.bias is None else self.bias.value(), self.composed("down"))

    def computed(self, float32_above: int | None, force: bool) -> tuple[Tensor, Tensor] | Reason:
        """The new weight, like the tensor in the state, and the new bias, [out] in float64; or why the dtype of the
        weight cannot hold them.
        """
        old, out, name = self.weight.tensor.detach(), self.composed("up"), self.weight.name
        exact = torch.float32 if float32_above is not None and old.numel() > float32_above else torch.float64
        # like the tensor in the state: it keeps its strides
        made, bias = self._written(torch.empty_like(old), exact), self._bias()
        bias = bias if out is None else bias * out.scale + out.shift
        held = [tensor.to(self.dtype) for tensor in (made, bias)]
        # weights that were not finite give outputs that were not: a fold behind them changes nothing
        before = [self.weight.tensor, *([] if self.bias is None else [self.bias.value()])]
        if not _is_finite(held) and (self.folds["down"] or _is_finite(before)):
            return Reason(f"its scale or its shift takes {name} out of the range of {self.dtype}")
        if self.dtype in HALF and not force:  # below their smallest normal number the half types lose digits, then all
            precise = self._written(torch.empty_like(old, dtype=torch.float64), exact)
            error, size = (self._sums(tensor) for tensor in (precise - held[0].double(), precise))
            if float((error / size.clamp_min(torch.finfo(torch.float64).tiny)).max()) > LIMITS[self.dtype]:
                return Reason(f"its scale takes {name} below the range of {self.dtype}")
        return made, bias

    def _written(self, made: Tensor, dtype: torch.dtype) -> Tensor:
        view: Any = self.weight.view(made)
        write_folded(self.layer, self.read, view, self.composed("down"), self.composed("up"), dtype)
        return made

    def _sums(self, tensor: Tensor) -> Tensor:
        """The sum of the sizes of all the weights of each output."""
        view: Any = self.weight.view(tensor)
        return self.layer.grouped(view).flatten(2).abs().sum(2)


def _is_finite(tensors: list[Tensor]) -> bool:
    """Whether all entries are finite. Their sum is, seldom without them, and quicker to make."""
    quick = all(bool(tensor.sum(dtype=torch.float32).isfinite()) for tensor in tensors)
    return quick or all(bool(tensor.isfinite().all()) for tensor in tensors)


def refuse_loss(lost: float, dtype: torch.dtype) -> Reason:
    """Why a loss, in standard deviations of a channel, is too much."""
    if lost <= LIMITS[dtype]:
        return Reason()
    losing = f"folding it loses {lost:.1e} standard deviations of a channel to rounding in {dtype}"
    return Reason(f"{losing}, more than {LIMITS[dtype]:.1e}", "force=True folds it")


def refuse_range(affine: Affine, dtype: torch.dtype) -> Reason:
    """Why a dtype does not hold a scale and a shift to within what a fold may lose."""
    for exact in (affine.scale, affine.shift):
        held = exact.to(dtype)
        off = (held.double() - exact).abs() > LIMITS[dtype] * exact.abs()
        if not bool(held.isfinite().all()) or bool(off.any()):
            return Reason(f"its scale and its shift are out of the range of {dtype}")
    return Reason()


def refuse_sharing(state: State, targets: list[Target]) -> Reason:
    """Why layers that read a weight of theirs cannot have new ones in its place: somebody else reads it too, or they
    fold to different ones. Sharing is seen by memory, so that tied parameters and views of one storage count.
    """
    if not targets:
        return Reason()
    # A module that is called twice is folded once where all its calls agree, to the bit.
    name, calls = targets[0].weight.name, [target.call for target in targets]
    found = state.readers(name)
    others = [reader for reader in found if reader not in calls]
    if others:
        reason = f"{name} is read by {listed(others)} too"
    elif len(found) > len(calls):
        reason = f"{name} is more than the weight of {listed(calls)}"
    elif len(found) < len(calls) or not all(targets[0].same(target) for target in targets):
        reason = f"{name} would differ between {listed(calls)}"
    else:
        return Reason()
    return Reason(reason, "clone_weights=True copies it")


def listed(nodes: Iterable[Node]) -> str:
    """The names of nodes, the first three of many."""
    names = sorted({node.name for node in nodes})
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def alike(targets: list[Target]) -> list[list[Target]]:
    """The layers that get the same new weights."""
    found: list[list[Target]] = []
    for target in targets:
        group = next((g for g in found if g[0].fresh is target.fresh and g[0].same(target)), None)
        if group is None:
            found.append(group := [])
        group.append(target)
    return found


def target_of(state: State, call: Node, reader: Node | None) -> Target | Reason:
    """A call of a layer as a target, or why its weights are not known."""
    form, named = LAYER_BY_TARGET[call.target], f"{call.name} ({call.target})"
    given = form.given(call.args, call.kwargs)
    if not isinstance(given[form.weight], Node) or val_of(call) is None:
        return Reason(f"the graph keeps no shapes (no val) for {named}", "trace it with fake tensors")
    if not form.plain(call.args, call.kwargs):
        return Reason(f"{named} scales its product or its bias (alpha, beta)")
    weight, operand = state.constant(given[form.weight]), given[form.bias] if form.bias else None
    bias = None if operand is None else state.constant(operand)
    if isinstance(weight, Reason):
        return weight
    if isinstance(bias, Reason):
        return bias
    if reason := _refuse_weight(form, weight, named):
        return reason
    layer = form.read(call.args, call.kwargs, tuple(weight.value().shape[2:]))
    target = Target(call, reader, form, layer, weight, bias)
    return _refuse_bias(target, named) or target


def _refuse_weight(form: LayerForm, weight: Constant, named: str) -> Reason:
    """Why a weight cannot be made anew. What the state holds tells its shape and dtype: a `val` may be stale."""
    if weight.maker is not None:
        return Reason(f"the weight of {named} is computed by {weight.maker.target}{quantization(weight.maker)}")
    read, held = weight.value(), weight.tensor.dtype
    if read.dtype not in LIMITS:  # integers and complex numbers have no rounding that is counted
        return Reason(f"the weight of {named} is {read.dtype}, {EXPECTED}")
    if (read.ndim == 2) is form.kernel or read.ndim < 2:  # matmul with a batch of matrices, or with a vector
        return Reason(f"the weight of {named} has {read.ndim} dimensions")
    if weight.view(weight.tensor.detach()) is None:
        return Reason(f"the weight of {named} is a copy of {weight.name} in another layout")
    return Reason() if held in LIMITS else Reason(f"{weight.name} is {held}, {EXPECTED}")


def _refuse_bias(target: Target, named: str) -> Reason:
    """Why a bias is not one of a value for each channel, in numbers whose rounding is counted."""
    bias, out = target.bias, target.width(out=True)
    if type(target.layer.groups) is not int:
        return Reason(f"{named} has {target.layer.groups} groups, expected a known number")
    if bias is not None and bias.tensor.dtype not in LIMITS:
        return Reason(f"{bias.name} is {bias.tensor.dtype}, {EXPECTED}")
    shape = (out,) if bias is None else tuple(bias.value().shape)
    # addmm broadcasts its first operand: a matrix, or a column, is no bias of one value a channel
    if shape == (1,) * (len(shape) - 1) + (out,):
        return Reason()
    return Reason(f"the bias of {named} is {list(shape)}, expected [{out}]")
