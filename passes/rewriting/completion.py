"""Nodes beside a call: operands that it cannot do without, outputs that it does not return."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.fx import Graph, Node

from ...decomps.forms import BatchNorm, Form, Gradient
from ...decomps.outputs import channels_of, fill, like_of, returned
from ..graph.draft import Draft
from ..graph.meta import carried, empty_val, val_of

aten = torch.ops.aten


def become(node: Node, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
    """Turns a node into another call, so that its users need no change."""
    if node.target is not target:
        node.target = target
    set_args(node, args)
    if node.kwargs or kwargs:
        node.kwargs = kwargs or {}


# What `node.args = ` does, without the look-up tables that torch.fx writes anew whenever an attribute is set, as if it
# were the target: the most that a batch norm cost.
set_args: Callable[[Node, Any], None] = vars(Node)["args"].fset


def reserve(draft: Draft, node: Node, input: Node) -> Node:
    """An empty reserve ahead of a call."""
    # the CPU's and native kernels save nothing in it either: [0] of uint8 is what they return
    with node.graph.inserting_before(node):
        made = new_call(node.graph, aten.new_empty.default, (input, [0]), {"dtype": torch.uint8})
    val = val_of(input)
    made.meta = carried(node, None if val is None else draft.fake(val, 0, torch.uint8))
    return made


def fill_in(norm: BatchNorm | Gradient, node: Node, name: str) -> Node:
    """The neutral [C] tensor for a missing weight, bias or statistic ahead of a call."""
    val = val_of(norm.input)
    # a literal size where it is known: a sym_size is one more node, which says of a static graph that it is dynamic
    channels: Any = None if val is None else channels_of(norm, val_of)
    size = channels
    with node.graph.inserting_before(node):
        if type(channels) is not int:
            size = new_call(node.graph, aten.sym_size.int, (norm.input, 1))
            size.meta = carried(node, channels)
        filled: Node = fill(norm, name, size, partial(new_call, node.graph))
    filled.meta = carried(node, None if channels is None else empty_like(like_of(norm), (channels,)))
    return filled


def destinations(draft: Draft, norm: BatchNorm, node: Node, target: Form) -> dict[str, Any]:
    """Where an `.out` call writes: the old destinations, and an empty one for a reserve that the old form lacks."""
    absent = [role for role in target.destinations if role not in norm.out]
    return {**norm.out, **{role: reserve(draft, node, norm.input) for role in absent}}


def new_call(graph: Graph, overload: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Node:
    return graph.create_node("call_function", overload, args, kwargs, name=name_of(overload))


def name_of(overload: Any) -> str:
    """What torch.export names a call: after its op, and not its overload."""
    return str(overload.overloadpacket.__name__)


def empty_like(node: Node, shape: Sequence[Any] | None = None) -> torch.Tensor | None:
    """A new `val` like the node's own, of another shape if one is given; None when the node has none."""
    val = val_of(node)
    return None if val is None else empty_val(val, val.shape if shape is None else shape, val.dtype)


def _cast(holder: Node, norm: BatchNorm, statistic: Node) -> Node:
    """A running statistic in the dtype that kernels save it in, which is a wider one for half off the CPU."""
    val, known = val_of(statistic), val_of(norm.input) is not None
    dtype = returned(norm, "save_mean", val_of)[1] if known else None
    if val is None or dtype in (None, val.dtype):
        return statistic
    with holder.graph.inserting_before(holder):
        cast = new_call(holder.graph, aten._to_copy.default, (statistic,), {"dtype": dtype})
    cast.meta = carried(holder, empty_val(val, val.shape, dtype))
    return cast


def _copied(field: str, saved: bool = False) -> Callable[[Node, BatchNorm], None]:
    def rebuild(holder: Node, norm: BatchNorm) -> None:
        statistic = getattr(norm, field)
        statistic = _cast(holder, norm, statistic) if saved else statistic
        become(holder, aten.clone.default, (statistic,))
        holder.meta = carried(holder, empty_like(statistic))

    return rebuild


def _inverse_deviation(holder: Node, norm: BatchNorm) -> None:
    """1/sqrt(running_var + eps), which is what every kernel that saves it saves."""
    # cast first, as a kernel adds eps in the dtype that it saves in
    var = _cast(holder, norm, norm.running_var)
    with holder.graph.inserting_before(holder):
        shifted = new_call(holder.graph, aten.add.Tensor, (var, norm.eps))
    shifted.meta = carried(holder, empty_like(var))
    become(holder, aten.rsqrt.default, (shifted,))
    holder.meta = carried(holder, empty_like(var))


# Outputs that the family's eval op does not return, or not in one shape: rebuilt from the running statistics.
REBUILT: dict[str, Callable[[Node, BatchNorm], None]] = {
    "save_mean": _copied("running_mean", saved=True),
    "save_invstd": _inverse_deviation,
    "new_running_mean": _copied("running_mean"),
    "new_running_var": _copied("running_var"),
}
