"""Calls of overloads: their arguments, in the order of the schema."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Node

aten, prims = torch.ops.aten, torch.ops.prims


def op_of(node: Any) -> str:
    """The name of the op that a node calls, without its overload, empty for anything else."""
    target = node.target if isinstance(node, Node) else None
    return target.overloadpacket.__name__ if isinstance(target, OpOverload) else ""


def arguments_of(node: Node) -> list[Any]:
    """The arguments of a call in the order of its schema, by position or by keyword; those by position without one."""
    if not isinstance(node.target, OpOverload) or not node.kwargs:
        return list(node.args)
    schema = node.target._schema.arguments
    given = {**dict(zip((a.name for a in schema), node.args, strict=False)), **node.kwargs}
    return [given.get(a.name, a.default_value) for a in schema]


# What takes the shape of its second operand, and what reads nothing but the shape, dtype and layout of its first.
_LIKE = {aten.reshape_as.default, aten.view_as.default, aten.expand_as.default}


_MEASURES = {aten.sym_size.int, aten.sym_numel.default, aten.sym_stride.int, aten._assert_tensor_metadata.default} | {
    getattr(aten, name).default
    for name in ("empty_like", "zeros_like", "ones_like", "full_like", "new_empty", "new_zeros", "new_ones", "new_full")
}


def measures(user: Node, value: Node) -> bool:
    """Whether a node reads the shape, dtype and layout of a value alone, none of its entries."""
    return user.target in _MEASURES or (user.target in _LIKE and arguments_of(user)[0] is not value)
