"""How ops pass the channels of a batch norm on: which entry is which channel, and TRANSFERS, a row for all that do it
alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ...decomps.affine import Affine, wide
from ...decomps.ops import OP_BY_TARGET, Kind, kind_of
from ..graph.calls import arguments_of, measures, op_of
from ..graph.effects import cast_of
from ..graph.meta import same_sizes, sizes_of, val_of
from ..graph.result import Reason
from ..graph.state import State

aten = torch.ops.aten


class Place(NamedTuple):
    """Where a walk is: at an op, which is asked how it passes the channels on.

    came: where the walk comes from, up a reader of the op's result, down its operand. axis: the dimension of the value
    between the two along which the channels lie. affine: what is to be folded, in these channels. within: of which
    concatenations this is a branch, for reasons.
    """

    node: Node
    came: Node
    axis: int
    affine: Affine
    within: str = ""


# Where a walk goes on, why it does not, or None where an op passes no channels on at all.
Onward = list[Place] | Reason | None


def readers(values: Iterable[Node], axis: int, affine: Affine) -> list[Place] | Reason:
    """The places below some values."""
    found = [Place(user, value, axis, affine) for value in values for user in value.users if not measures(user, value)]
    return found or Reason("its output is returned as it is")


@dataclass(frozen=True)
class Moves:
    """Ops that hand on the entries of their first operand as they are, in other places, some of them repeated.

    ops: their kinds in OPS, which says where axes go, too, or overloads that keep the order. when: which calls are
    such, of their arguments in the order of the schema.
    """

    ops: tuple[Any, ...]
    when: Callable[[Node, list[Any]], bool] = lambda node, args: True

    def onward(self, state: State, at: Place, up: bool) -> Onward:
        """From the result to the operand, or back."""
        node, args, moved = at.node, arguments_of(at.node), OP_BY_TARGET.get(at.node.target)
        # the rank tells which dimension is which; without a val nothing does
        before, after = val_of(args[0] if args else None), val_of(node)
        if before is None or after is None or not self.when(node, args):
            return None
        channels = at.affine.scale.numel()
        if moved is not None and moved.axes is not None:
            found = permuted(moved.axes(args, after.ndim), at.axis, channels, up)
        else:
            found = aligned(after if up else before, at.axis, channels, before if up else after)
        if found is None:
            return Reason(f"{node.name} ({node.target}) mixes its channels with other dimensions")
        axis, affine = found[0], at.affine.take(found[1])
        return [Place(args[0], node, axis, affine, at.within)] if up else readers([node], axis, affine)


@dataclass(frozen=True)
class Joins:
    """Concatenations: up, every operand takes its part of the channels. Down, each would have to be folded as well."""

    ops: tuple[Any, ...]

    def onward(self, state: State, at: Place, up: bool) -> Onward:
        """Up, every operand."""
        if not up:
            return None
        node, args = at.node, arguments_of(at.node)
        tensors, dim = args[0], args[1] if len(args) > 1 else 0
        known = [val for val in map(val_of, tensors) if val is not None and val.ndim > at.axis]
        if len(known) < len(tensors) or dim % known[0].ndim != at.axis:
            return Reason(f"{node.name} does not concatenate along its channels")
        # folded once for each place, it would be scaled twice
        if len(set(tensors)) < len(tensors):
            return Reason(f"{node.name} concatenates a tensor with itself")
        sizes = [sizes_of(val.shape)[at.axis] for val in known]
        if any(type(size) is not int for size in sizes):
            return Reason(f"{node.name} concatenates numbers of channels that are not known")
        found, begin, within = [], 0, f"{at.within}of {node.name}, "
        for tensor, size in zip(tensors, sizes, strict=True):
            part = at.affine.take(slice(begin, begin + size))
            found.append(Place(tensor, node, at.axis, part, within))
            begin += size
        return found


Algebra = Callable[[Any, Any], tuple[Any, Any]]


@dataclass(frozen=True)
class Scales:
    """Ops that apply a constant scale and shift to each channel of one operand, given the other one and alpha.

    first, second: the scale and the shift, where the value is the first operand, and the second one.
    """

    ops: tuple[str, ...]
    first: Algebra
    second: Algebra | None = None

    def onward(self, state: State, at: Place, up: bool) -> Onward:
        """Up, the operand that is scaled; down, a scale right behind a batch norm is a part of it already."""
        for source in (node for node in at.node.all_input_nodes if up and node in at.node.args):
            step = self.step(state, at.node, source, at.axis, at.affine.scale.numel())
            if step is not None:
                affine = at.affine.behind(*step)
                if not affine.finite:
                    return Reason(f"with {at.node.name} before it, its scale is not finite")
                return [Place(source, at.node, at.axis, affine, at.within)]
        return None

    def step(self, state: State, node: Node, value: Node, axis: int, channels: int) -> tuple[Tensor, Tensor] | None:
        """The scale and the shift, [C] in float64, that a node applies to a value, None when it is another function."""
        before, after, args = val_of(value), val_of(node), arguments_of(node)
        # a promoted result is computed in another dtype, with another rounding; x + x is no constant beside x
        if before is None or after is None or before.dtype != after.dtype or args[0] in args[1:2]:
            return None
        # a constant that broadcasts the value repeats it: no scale of its channels
        if not (same_sizes(before.shape, after.shape) and same_sizes(before.stride(), after.stride())):
            return None
        algebra = self.first if args[0] is value else self.second
        other = args[1 if args[0] is value else 0] if len(args) > 1 else 0
        rate = args[2] if len(args) > 2 else 1
        number = _channelwise(state, other, before.ndim - 1 - axis, channels)
        if algebra is None or number is None or type(rate) not in (int, float):
            return None
        one = torch.ones(channels, dtype=torch.float64, device="cpu")
        scale, shift = algebra(number, rate)
        return scale * one, shift * one


def _channelwise(state: State, other: Any, axis: int, channels: int) -> Tensor | None:
    """A number, or a constant of one value a channel, as [C] in float64. The axis counts from the right."""
    if type(other) in (int, float):
        return torch.full((channels,), float(other), dtype=torch.float64, device="cpu")
    val = val_of(other)
    # float64, in which scales are computed, holds no complex number
    if val is None or val.is_complex():
        return None
    long = [(val.ndim - 1 - i, size) for i, size in enumerate(sizes_of(val.shape)) if size != 1]
    constant = state.constant(other) if long in ([], [(axis, channels)]) else ""
    return None if isinstance(constant, str) else wide(constant.value()).reshape(-1).expand(channels)


def permuted(axes: Sequence[int], axis: int, channels: int, up: bool) -> tuple[int, Tensor] | None:
    """As `aligned`, for what moves whole dimensions: axes holds, for each dimension of the result, that of its operand;
    the last ones are left out where their entries are repeated. up: from the result to the operand.
    """
    if axis not in (range(len(axes)) if up else axes):
        return None
    return axes[axis] if up else axes.index(axis), _range(channels)


def aligned(have: Tensor, axis: int, channels: int, want: Tensor) -> tuple[int, Tensor] | None:
    """The dimension of `want`, the same entries in another shape, along which the channels of `have` lie, and the
    channel of each entry along it; None when no one dimension tells them apart.

    An entry's channel is (place // entries to the right of the axis) % channels; along an axis of `want` with fewer
    entries to its right that is known when the axis covers whole rounds of the channels.
    """
    inner, sizes = sizes_of(have.shape[axis + 1 :]), sizes_of(want.shape)
    found = []
    for at, size in enumerate(sizes):
        repeat = _quotient(inner, sizes[at + 1 :])
        if type(size) is int and repeat is not None and size and size % (repeat * channels) == 0:
            found.append((repeat, at != axis, at, size))  # sizes of one leave a choice
    if not found:
        return None
    # the fewest repetitions, then where it was: [N, C, 1, 1] has its channels in dimension 1
    repeat, _, at, size = min(found)
    return at, _range(size) // repeat % channels


def _range(size: int) -> Tensor:
    return torch.arange(size, device="cpu")  # whatever the default device is


def _quotient(many: Sequence[Any], few: Sequence[Any]) -> int | None:
    """How many times the product of some sizes is that of others, None when that is no whole number or not known."""
    if all(type(size) is int for size in (*many, *few)):
        whole, part = math.prod(many), math.prod(few)
        return None if part == 0 or whole % part or whole == 0 else whole // part
    return 1 if statically_known_true(math.prod(many) == math.prod(few)) else None


# How an op passes channels on, by its kind in OPS, by its name where that is SCALING, by overload where it has none.
# x: the operand; c: the other one, a constant.
TRANSFERS: tuple[Moves | Joins | Scales, ...] = (
    Moves((Kind.ALIAS, Kind.RESHAPE, Kind.PERMUTE)),
    Moves((Kind.CAST,), lambda node, args: cast_of(node) is not None and _dtype(args[0]) == _dtype(node)),
    # What drops nothing in eval hands its operand on.
    Moves((Kind.DRAW,), lambda node, args: OP_BY_TARGET[node.target].idle and args[2:3] == [False]),
    # Repeated entries are in the channel that they were in; zeros are in none.
    Moves((Kind.PAD,), lambda node, args: node.target is not aten.pad.default or args[2:3] not in ([], ["constant"])),
    Joins((aten.cat.default, aten.concat.default, aten.concatenate.default)),
    Scales(("add",), lambda c, alpha: (1, alpha * c), lambda c, alpha: (alpha, c)),  # x + alpha * c, c + alpha * x
    Scales(("sub",), lambda c, alpha: (1, -alpha * c), lambda c, alpha: (-alpha, c)),  # x - alpha * c, c - alpha * x
    Scales(("rsub",), lambda c, alpha: (-alpha, c)),  # c - alpha * x
    Scales(("neg",), lambda c, alpha: (-1, 0)),
    Scales(("mul",), lambda c, alpha: (c, 0), lambda c, alpha: (c, 0)),
    Scales(("div",), lambda c, alpha: (1 / c, 0)),  # x / c; c / x is no such function
)


def _dtype(node: Node) -> torch.dtype:
    return node.meta["val"].dtype  # type: ignore[no-any-return]


def _by_op() -> dict[Any, Moves | Joins | Scales]:
    # a later row would win without a word
    found: dict[Any, Moves | Joins | Scales] = {}
    for row in TRANSFERS:
        for op in row.ops:
            if op in found:
                raise ValueError(f"two rows of TRANSFERS describe {op}: {found[op]} and {row}")
            found[op] = row
    return found


_BY_OP = _by_op()


def transfer_of(node: Node) -> Moves | Joins | Scales | None:
    """The row of what a node calls, None where it passes no channels on."""
    kind = kind_of(node.target)
    if kind is Kind.SCALING:
        return _BY_OP[op_of(node)]
    return _BY_OP.get(kind) if kind is not None else _BY_OP.get(node.target) if node.op == "call_function" else None
