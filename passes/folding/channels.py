"""Channels through a graph: which channel of a batch norm is which entry of a tensor before or behind it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ...decomps.affine import wide
from ..graph.calls import arguments_of
from ..graph.constants import State
from ..graph.effects import cast_of
from ..graph.meta import sizes_of, val_of

aten = torch.ops.aten


_MOVES = {aten.permute.default, aten.transpose.int, aten.t.default}


# These reshape, or do nothing at all: entries stay in their order.
_ORDERED = {
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.flatten.using_ints,
    aten.unflatten.int,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.contiguous.default,
    aten.clone.default,
    aten.alias.default,
    aten.detach.default,
}


# These repeat entries of the last dimensions, as many as their second argument has pairs.
_PADS = {getattr(aten, f"{kind}_pad{n}d").default for kind in ("reflection", "replication") for n in (1, 2, 3)}


_DROPOUTS = {aten.dropout.default, aten.feature_dropout.default}


_SCALINGS = {
    aten.add.Tensor: "add",
    aten.add.Scalar: "add",
    aten.sub.Tensor: "sub",
    aten.sub.Scalar: "sub",
    aten.mul.Tensor: "mul",
    aten.mul.Scalar: "mul",
    aten.div.Tensor: "div",
    aten.div.Scalar: "div",
    aten.rsub.Scalar: "rsub",
    aten.neg.default: "neg",
}


def moved(node: Node) -> Node | None:
    """The operand whose entries a node hands on, each one as it is, None for any other node."""
    args = arguments_of(node)
    source = args[0] if args else None
    before, after = val_of(source), val_of(node)
    if before is None or after is None:
        return None
    if node.target in _DROPOUTS:
        return source if args[2:3] == [False] else None
    if node.target is aten.pad.default:
        return source if len(args) > 2 and args[2] != "constant" else None
    same = cast_of(node) is not None and before.dtype == after.dtype
    return source if same or node.target in _MOVES | _ORDERED | _PADS else None


def upstream(node: Node, axis: int, channels: int) -> tuple[int, torch.Tensor] | None:
    """Where the channels along an axis of a moved tensor lie in its operand: the axis there, and the channel of each
    entry along it. None when no one axis tells them apart.
    """
    moves = _axes(node)
    if moves is not None:
        return (moves[axis], _range(channels)) if axis < len(moves) else None
    return _aligned(val_of(node), axis, channels, val_of(arguments_of(node)[0]))


def downstream(node: Node, axis: int, channels: int) -> tuple[int, torch.Tensor] | None:
    """As `upstream`, from the operand to the moved tensor."""
    moves = _axes(node)
    if moves is not None:
        return (moves.index(axis), _range(channels)) if axis in moves else None
    return _aligned(val_of(arguments_of(node)[0]), axis, channels, val_of(node))


def _range(size: int) -> torch.Tensor:
    return torch.arange(size, device="cpu")


def _axes(node: Node) -> list[int] | None:
    """For each axis of a permuted tensor the one of its operand, of a padded tensor those that are not padded; None for
    what keeps the order of the entries.
    """
    args, ndim = arguments_of(node), node.meta["val"].ndim
    axes: list[int] = list(range(ndim))
    if node.target in _PADS or node.target is aten.pad.default:
        return axes[: ndim - len(args[1]) // 2]
    if node.target not in _MOVES:
        return None
    if node.target is aten.permute.default:
        return [d % ndim for d in args[1]]
    if node.target is aten.t.default:
        return axes[::-1]
    a, b = (d % ndim for d in args[1:3])
    axes[a], axes[b] = axes[b], axes[a]
    return axes


def _aligned(have: Any, axis: int, channels: int, want: Any) -> tuple[int, torch.Tensor] | None:
    """The axis of `want`, the same entries in another shape, along which the channels of `have` lie.

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
    repeat, _, at, size = min(found)
    return at, _range(size) // repeat % channels


def _quotient(many: Any, few: Any) -> int | None:
    """How many times the product of some sizes is that of others, None when that is no whole number or not known."""
    if all(type(size) is int for size in (*many, *few)):
        whole, part = math.prod(many), math.prod(few)
        return None if part == 0 or whole % part or whole == 0 else whole // part
    return 1 if statically_known_true(math.prod(many) == math.prod(few)) else None


def same_sizes(a: Any, b: Any) -> bool:
    """Whether two shapes, or strides, are known to be equal, without a guard on what is dynamic."""
    if len(a) != len(b):
        return False
    pairs = zip(a, b, strict=True)
    return all(x == y if type(x) is type(y) is int else statically_known_true(x == y) for x, y in pairs)


def format_of(val: torch.Tensor) -> torch.memory_format | None:
    """The memory format that a tensor lies in, dense; None when it is another layout."""
    formats: dict[torch.memory_format, tuple[int, ...]] = {torch.contiguous_format: tuple(range(val.ndim))}
    if val.ndim in (4, 5):
        last = torch.channels_last if val.ndim == 4 else torch.channels_last_3d
        formats[last] = (0, *range(2, val.ndim), 1)
    for kind, order in formats.items():
        dense: list[Any] = [1]
        for dim in reversed(order):
            dense.append(dense[-1] * val.shape[dim])
        if same_sizes([val.stride()[dim] for dim in reversed(order)], dense[:-1]):
            return kind
    return None


def scaling(
    state: State, node: Node, value: Node, axis: int, channels: int
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The scale and the shift, [C] in float64, that a node applies to a value channel by channel, else None."""
    kind = _SCALINGS.get(node.target)  # type: ignore[call-overload]
    before, after = val_of(value), val_of(node)
    if kind is None or before is None or after is None:
        return None
    alike = same_sizes(before.shape, after.shape) and same_sizes(before.stride(), after.stride())
    args = arguments_of(node) if kind != "neg" else [0, *arguments_of(node)]
    if before.dtype != after.dtype or not alike or args[0] is args[1]:
        return None
    left, rate = args[0] is value, args[2] if len(args) > 2 else 1
    number = _channelwise(state, args[1 if left else 0], before.ndim - 1 - axis, channels)
    if number is None or type(rate) not in (int, float) or (kind == "div" and not left):
        return None
    one = torch.ones(channels, dtype=torch.float64, device="cpu")
    if kind in ("mul", "div"):
        return (number if kind == "mul" else one / number), 0 * one
    if kind == "rsub":  # number - rate * value
        return -rate * one, number
    sign = 1 if kind == "add" else -1
    return (one, sign * rate * number) if left else (sign * rate * one, number)


def _channelwise(state: State, other: Any, axis: int, channels: int) -> torch.Tensor | None:
    """A number, or a constant of one value a channel, as [C] in float64. The axis counts from the right."""
    if type(other) in (int, float):
        return torch.full((channels,), float(other), dtype=torch.float64, device="cpu")
    val = val_of(other)
    if val is None or val.is_complex():
        return None
    long = [(val.ndim - 1 - i, size) for i, size in enumerate(sizes_of(val.shape)) if size != 1]
    if long not in ([], [(axis, channels)]):
        return None
    constant = state.constant(other)
    if isinstance(constant, str):
        return None
    return wide(constant.value()).reshape(-1).expand(channels)
