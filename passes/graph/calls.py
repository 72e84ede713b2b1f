"""Calls of overloads: their arguments, in the order of the schema."""

from __future__ import annotations

from typing import Any

from torch._ops import OpOverload
from torch.fx import Node

from ...decomps.ops import OP_BY_TARGET, Kind, named


def op_of(node: Any) -> str:
    """The name of the op that a node calls, without its overload, empty for anything else."""
    target = node.target if isinstance(node, Node) else None
    return target.overloadpacket.__name__ if isinstance(target, OpOverload) else ""


def arguments_of(node: Node) -> list[Any]:
    """The arguments of a call in the order of its schema, by position or by keyword; those by position without one."""
    # without keywords it is in order already, as in nearly every call that ATen's graphs hold: no walk of the schema
    if not isinstance(node.target, OpOverload) or not node.kwargs:
        return list(node.args)
    return list(named(node.target, node.args, node.kwargs).values())


def measures(user: Node, value: Node) -> bool:
    """Whether a node reads the shape, dtype and layout of a value alone, none of its entries."""
    row = OP_BY_TARGET.get(user.target)
    if row is None:
        return False
    # of `x.view_as(other)` it is `other` that is measured, while the entries are those of x
    return row.kind in (Kind.MEASURE, Kind.FILL) or (row.like and arguments_of(user)[0] is not value)
