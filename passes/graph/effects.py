"""What a node does with memory: whose it shares, whom it writes to, what it only hands on."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from ...decomps.ops import Kind, Memory, kind_of, memory_of, written_by
from .meta import channel_axis, val_of


def cast_of(node: Node) -> Node | None:
    """What a node casts to another dtype, None when it is no cast."""
    if kind_of(node.target) is not Kind.CAST or not node.args:
        return None
    source, before, after = node.args[0], val_of(node.args[0]), val_of(node)
    known = before is not None and after is not None and before.device == after.device
    return source if known and isinstance(source, Node) else None


def transparent(node: Node) -> Node | None:
    """The operand whose value a node hands on: of an alias, a cast to the same dtype, a view of one value a channel."""
    source, kind = node.args[0] if node.args else None, kind_of(node.target)
    if not isinstance(source, Node) or kind not in (Kind.ALIAS, Kind.RESHAPE, Kind.CAST):
        return None
    if kind is Kind.ALIAS:
        return source
    before, after = val_of(source), val_of(node)
    if before is None or after is None or before.dtype != after.dtype or before.device != after.device:
        return None
    if channel_axis(before) is None or channel_axis(after) is None or before.numel() != after.numel():
        return None
    return source


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


def may_alias(node: Node) -> bool:
    """Whether a node's result may share memory with one of its inputs: unless the op is known to make its own."""
    if node.op == "output":
        return False
    if node.target is operator.getitem and isinstance(node.args[0], Node):
        return isinstance(node.args[0].meta.get("val"), torch.Tensor) or may_alias(node.args[0])
    return memory_of(node.target) is not Memory.OWN


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
    return any(value is node for value in written_by(user.target, user.args, user.kwargs))
