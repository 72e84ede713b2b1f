"""Value numbering: what nodes compute, however it is spelled. The number of a value is a node of a reference."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Set
from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Node

from ...decomps.ops import named
from ..graph.calls import op_of
from ..graph.effects import cast_of, transparent
from ..graph.meta import channel_axis, val_of

# The name of an op, those of its arguments, and what they are: literals, or the nodes that are values' numbers.
Key = tuple[Any, ...]


COMMUTE = ("add", "mul")


_SYMBOLS = (torch.SymInt, torch.SymFloat)


def key_of(node: Node, number: Mapping[Node, Node]) -> Key | None:
    """What a node computes from values that have numbers, None when it is not known."""
    try:
        if node.target is operator.getitem:
            return ("getitem", (), _term(node.args[0], number), node.args[1])
        if cast_of(node) is not None:
            return ("cast", (), _term(node.args[0], number), node.meta["val"].dtype)
        # views of one value a channel have no number of their own: of what broadcasts them it is asked where they lie
        if isinstance(node.target, OpOverload) and (torch.Tag.pointwise not in node.target.tags or _aligned(node)):
            return _call_key(node, node.target, number)
    except KeyError:
        pass
    return None


def _call_key(node: Node, target: OpOverload, number: Mapping[Node, Node]) -> Key:
    """A call by the arguments that are not at their defaults: literals in one spelling, what commutes in one order.

    Whether a reduction keeps its dimensions is the view of its result, and no matter.
    """
    default = _defaults(target)
    terms: dict[str, Any] = {}
    for name, value in named(target, node.args, node.kwargs).items():
        if name == "dim":
            terms[name] = dims_of(node)
        # an argument at its default may be spelled or left out; 1 is not True, though they are equal
        elif name != "keepdim" and not (type(value) is type(default[name]) and value == default[name]):
            terms[name] = _term(value, number)
    if op_of(node) in COMMUTE and [*terms] == ["self", "other"]:
        # without names: x + y and y + x are one value
        return (op_of(node), (), *sorted(terms.values(), key=lambda term: (type(term) is float, str(term))))
    return (op_of(node), tuple(terms), *terms.values())


@cache
def _defaults(target: OpOverload) -> dict[str, Any]:
    return {argument.name: argument.default_value for argument in target._schema.arguments}


def dims_of(node: Node) -> tuple[int, ...]:
    """The dimensions that a call is over, in order.

    Raises: KeyError where the rank of its operand is not known.
    """
    val = val_of(node.args[0])
    if val is None:
        raise KeyError(node)
    dim: Any = named(node.target, node.args, node.kwargs)["dim"]  # type: ignore[arg-type]
    dims = [dim] if isinstance(dim, int) else dim or range(val.ndim)
    return tuple(sorted(d % val.ndim for d in dims))


def _term(value: Any, number: Mapping[Node, Node]) -> Any:
    """An argument in a key: a number, a literal, or the expression of a symbolic one."""
    known = value.meta.get("val") if isinstance(value, Node) else value
    # the node that reads a size is made anew in each graph, the expression is the same
    if isinstance(known, _SYMBOLS):
        return str(known.node.expr)
    if isinstance(value, Node):
        return number[value]
    # 2 and 2.0 multiply alike
    if type(value) in (int, float):
        return float(value)
    return tuple(_term(v, number) for v in value) if isinstance(value, list | tuple) else value


def _aligned(node: Node) -> bool:
    """Whether what a node broadcasts lies along the channels: of all operands, or along dimension 1 of the result."""
    vals = [val_of(node), *(val_of(n) for n in node.all_input_nodes if not isinstance(n.meta.get("val"), _SYMBOLS))]
    known = [val for val in vals if val is not None]
    if len(known) < len(vals):
        return False
    of_all, *axes = map(channel_axis, known)
    axis = known[0].ndim - 2 if of_all is None else of_all
    return all(a in (axis, None, -1) for a in axes)


def numbers(table: Mapping[Any, Node], leaves: Mapping[Node, Node]) -> dict[Node, Node]:
    """The numbers that a table gives to the nodes computed from the leaves, found through their users alone."""
    number = dict(leaves)
    work = list(number)
    while work:
        # A user is met once for each operand, and numbered when the last of them has its number.
        for user in work.pop().users.keys() - number.keys():
            source = transparent(user)
            found = number.get(source) if source is not None else table.get(key_of(user, number))
            if found is not None:
                number[user] = found
                work.append(user)
    return number


def behind(*ends: Node, inner: Set[Node] | None = None) -> set[Node]:
    """What nodes are computed from, themselves included; of the inner ones alone, if these are given."""
    found: set[Node] = set()
    work = list(ends)
    while work:
        node = work.pop()
        if node not in found and (inner is None or node in inner):
            found.add(node)
            work += node.all_input_nodes
    return found
