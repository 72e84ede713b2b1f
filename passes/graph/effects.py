"""What a node does with memory: whose it shares, whom it writes to, what it only hands on."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Node

from ...decomps.forms import BY_TARGET, FIELDS, Mode, Statistics, form_of
from .meta import channel_axis, val_of

aten, prims = torch.ops.aten, torch.ops.prims


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


# Composite ops that make their own result, whatever their arguments.
_FRESH = {
    overload
    for name in ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "linear")
    for overload in (getattr(getattr(aten, name), o) for o in getattr(aten, name).overloads())
}


def may_alias(node: Node) -> bool:
    """Whether a node's result may share memory with one of its inputs: unless the op is known to make its own."""
    if node.op == "output" or node.target in BY_TARGET:
        return False
    if node.target is operator.getitem and isinstance(node.args[0], Node):
        return isinstance(node.args[0].meta.get("val"), torch.Tensor) or may_alias(node.args[0])
    if not isinstance(node.target, OpOverload):
        return True
    declared = any(returned.alias_info is not None for returned in node.target._schema.returns)
    if node.target in _FRESH:
        return False
    # A composite op may return its input without saying so: type_as, dropout in eval.
    return declared or torch._C._dispatch_has_kernel_for_dispatch_key(_name(node.target), "CompositeImplicitAutograd")


def _name(overload: Any) -> str:
    return str(overload.name())


def bases_of(node: Node) -> list[Node]:
    """The first nodes whose memory a node may share: those that make their own result, or bring it in."""
    found, seen, work = [], {node}, [node]
    while work:
        held = work.pop()
        sources = held.all_input_nodes if held.op == "call_function" and may_alias(held) else []
        found += [] if sources else [held]
        work += [source for source in sources if source not in seen]
        seen |= set(sources)
    return found


def accesses(node: Node, through: Callable[[Node], bool] = may_alias) -> tuple[list[Node], list[Node]]:
    """Who reads the memory of a node's result and who writes it, through aliases too, as far as schemas say.

    through: whether a call's result may share the memory that it is given.
    """
    reads: list[Node] = []
    writes: list[Node] = []
    work = bases_of(node)
    seen = set(work)
    while work:
        alias = work.pop()
        for user in alias.users:
            if writes_to(user, alias):  # whatever else it reads of the same memory
                writes.append(user)
            elif user not in seen:
                reads.append(user)
            if user not in seen and user.op == "call_function" and through(user):
                work.append(user)
            seen.add(user)
    return [read for read in reads if read not in writes], list(dict.fromkeys(writes))


def writes_to(user: Node, node: Node) -> bool:
    """Whether a call writes to what it is given as a node."""
    if user.target in BY_TARGET:
        form = form_of(user.target, user.args, user.kwargs)  # type: ignore[arg-type]
        given = form.given(user.args, user.kwargs)
        evaluates = form.mode is Mode.EVAL or given.get("training") is False
        written = [] if evaluates or form.statistics is not Statistics.IN_PLACE else [*FIELDS[3:5]]
        return node in [given.get(name) for name in (*written, *form.destinations.values())]
    if not isinstance(user.target, OpOverload):
        return False
    arguments = user.target._schema.arguments
    given = {**dict(zip((a.name for a in arguments), user.args, strict=False)), **user.kwargs}
    written = [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    return any(given.get(name) is node for name in written)
