"""Values of a graph by what they compute, however it is spelled: the same number for the same value."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import torch
from torch.fx import Node

from ..graph.calls import op_of
from ..graph.effects import cast_of, transparent
from ..graph.meta import channel_axis, val_of

Key = Hashable


_COMMUTE = ("add", "mul")


_REDUCE = ("var_mean", "mean", "sum")


_POINTWISE = ("add", "sub", "mul", "div", "rsqrt", "sqrt", "reciprocal")


def key_of(node: Node, number: Mapping[Node, int]) -> Key | None:
    """What a node computes from values that have numbers: a number for one of these, None when it is not known."""
    if node.op != "call_function":
        return None
    source = transparent(node)
    if source is not None:
        return number.get(source)
    try:
        if node.target is operator.getitem:
            return ("getitem", _term(node.args[0], number), node.args[1])
        if cast_of(node) is not None:
            val = val_of(node)
            return ("cast", _term(node.args[0], number), None if val is None else val.dtype)
        return _call_key(node, number)
    except KeyError:
        return None


def _call_key(node: Node, number: Mapping[Node, int]) -> Key | None:
    """The key of an elementwise op or a reduction, literals in one spelling, arguments that commute in one order."""
    name = op_of(node)
    if name in _POINTWISE and not _aligned(node):
        return None
    if name not in (*_POINTWISE, *_REDUCE):
        return None
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    given = {**{a.name: value for a, value in zip(schema, node.args, strict=False)}, **node.kwargs}
    default = {a.name: a.default_value for a in schema if a.has_default_value()}
    terms: dict[str, Any] = {}
    for field, value in given.items():
        if field == "keepdim" or (field in default and _same(value, default[field])):
            continue
        terms[field] = _dims(value, node) if field == "dim" else _term(value, number)
    if name in _COMMUTE and terms.keys() == {"self", "other"}:
        return (name, *sorted(terms.values(), key=repr))
    return (name, *sorted(terms.items()))


def _same(value: Any, default: Any) -> bool:
    return value is default or (not isinstance(value, Node) and type(value) is type(default) and bool(value == default))


def _dims(value: Any, node: Node) -> tuple[int, ...]:
    val = val_of(node.args[0])
    if val is None:
        raise KeyError(node)
    dims = [value] if isinstance(value, int) else value
    return tuple(sorted(d % val.ndim for d in dims)) if dims else tuple(range(val.ndim))


def _term(value: Any, number: Mapping[Node, int]) -> Any:
    """A value in a key: ("%", its number), a literal, or the expression of a symbolic number."""
    if isinstance(value, Node):
        known = value.meta.get("val")
        if isinstance(known, torch.SymInt | torch.SymFloat):
            value = known
        else:
            return ("%", number[value])
    if isinstance(value, torch.SymInt | torch.SymFloat):
        return ("sym", str(value.node.expr))
    if type(value) in (int, float):
        return float(value)
    return tuple(_term(v, number) for v in value) if isinstance(value, list | tuple) else value


def _aligned(node: Node) -> bool:
    """Whether what a node broadcasts lies along the channels: of all operands, or along dimension 1 of the result."""
    val = val_of(node)
    if val is None:
        return False
    axis = channel_axis(val)
    axis = val.ndim - 2 if axis is None else axis
    operands = [
        val_of(a) for a in node.all_input_nodes if not isinstance(a.meta.get("val"), torch.SymInt | torch.SymFloat)
    ]
    if any(operand is None for operand in operands):
        return False
    axes = [channel_axis(operand) for operand in operands]
    return all(a == axis for a in axes if a is not None and a != -1)


def numbers(table: Mapping[Key, int], leaves: Mapping[Node, int]) -> dict[Node, int]:
    """The numbers that a table gives to the nodes computed from the leaves, found through their users alone."""
    number = dict(leaves)
    work = list(number)
    while work:
        for user in work.pop().users:
            key = None if user in number else key_of(user, number)
            found = key if isinstance(key, int) else table.get(key)
            if found is not None:
                number[user] = found
                work.append(user)
    return number


def references(key: Key) -> Iterable[int]:
    """The numbers that a key refers to."""
    if isinstance(key, tuple):
        if len(key) == 2 and key[0] == "%":
            yield key[1]
            return
        for part in key:
            yield from references(part)
