"""Values of a graph by what they compute, however it is spelled: the same number for the same value."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Node

aten, prims = torch.ops.aten, torch.ops.prims

Key = Hashable

_CASTS = {aten._to_copy.default, aten.to.dtype, prims.convert_element_type.default}
_ALIASES = {aten.alias.default, aten.detach.default}
# These change the shape of a tensor of one value a channel, and nothing else.
_VIEWS = {
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.clone.default,
}
_COMMUTE = ("add", "mul")
_REDUCE = ("var_mean", "mean", "sum")
_POINTWISE = ("add", "sub", "mul", "div", "rsqrt", "sqrt", "reciprocal")


def val_of(node: Any) -> torch.Tensor | None:
    """The tensor that a node is known to make, None when it is not known or no tensor."""
    val = node.meta.get("val") if isinstance(node, Node) else None
    return val if isinstance(val, torch.Tensor) else None


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


def sizes_of(sizes: Iterable[Any]) -> tuple[Any, ...]:
    """Sizes as plain numbers where they are known, a dynamic one that is constant too."""
    return tuple(size if type(size) is int else _plain(size) for size in sizes)


def _plain(size: Any) -> Any:
    known = size.node.maybe_as_int() if isinstance(size, torch.SymInt) else None
    return size if known is None else known


# What takes the shape of its second operand, and what reads nothing but the shape, dtype and layout of its first.
_LIKE = {aten.reshape_as.default, aten.view_as.default, aten.expand_as.default}
_MEASURES = {aten.sym_size.int, aten.sym_numel.default, aten.sym_stride.int, aten._assert_tensor_metadata.default} | {
    getattr(aten, name).default
    for name in ("empty_like", "zeros_like", "ones_like", "full_like", "new_empty", "new_zeros", "new_ones", "new_full")
}


def measures(user: Node, value: Node) -> bool:
    """Whether a node reads the shape, dtype and layout of a value alone, none of its entries."""
    return user.target in _MEASURES or (user.target in _LIKE and arguments_of(user)[0] is not value)


def channel_axis(val: torch.Tensor | None) -> int | None:
    """Where a tensor of one value a channel has its channels, counted from the right; None for any other tensor.

    A tensor of one value has them anywhere: -1.

    >>> channel_axis(torch.ones(1, 3, 1, 1)), channel_axis(torch.ones(3)), channel_axis(torch.ones(2, 3))
    (2, 0, None)
    """
    if val is None:
        return None
    wide = [i for i, size in enumerate(val.shape) if type(size) is not int or size != 1]
    if len(wide) > 1:
        return None
    return val.ndim - 1 - wide[0] if wide else -1


def cast_of(node: Node) -> Node | None:
    """What a node casts to another dtype, None when it is no cast."""
    if node.target not in _CASTS or not node.args:
        return None
    source, before, after = node.args[0], val_of(node.args[0]), val_of(node)
    known = before is not None and after is not None and before.device == after.device
    return source if known and isinstance(source, Node) else None


def transparent(node: Node) -> Node | None:
    """The operand whose value a node hands on: of an alias, a cast to the same dtype, a view of one value a channel."""
    source = node.args[0] if node.args and isinstance(node.args[0], Node) else None
    if source is None or node.target in _ALIASES:
        return source if node.target in _ALIASES else None
    before, after = val_of(source), val_of(node)
    if before is None or after is None or before.dtype != after.dtype or before.device != after.device:
        return None
    if channel_axis(before) is None or channel_axis(after) is None or before.numel() != after.numel():
        return None
    return source if node.target in _VIEWS or node.target in _CASTS else None


def widened(node: Node) -> Node | None:
    """What a node casts without a loss, None when it is no such cast: what was rounded is another value."""
    source = cast_of(node)
    if source is None:
        return None
    before, after = source.meta["val"].dtype, node.meta["val"].dtype
    return source if torch.promote_types(before, after) == after else None


def source_of(node: Any, casts: bool = False) -> Any:
    """The first node that had the value, before lossless casts too if asked. A literal is its own source."""
    while isinstance(node, Node):
        before = transparent(node) or (widened(node) if casts else None)
        if before is None:
            break
        node = before
    return node


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
