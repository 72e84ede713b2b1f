"""What a node does with memory: whose it shares, whom it writes to, what it only hands on."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.fx import Graph, Node

from ...decomps.ops import OP_BY_TARGET, Kind, Memory, kind_of, memory_of, written_by
from .meta import channel_axis, val_of
from .nest import Nest


def cast_of(node: Node) -> Node | None:
    """What a node casts to another dtype, None when it is no cast."""
    if kind_of(node.target) is not Kind.CAST or not node.args:
        return None
    source, before, after = node.args[0], val_of(node.args[0]), val_of(node)
    # one kind of op casts and moves, by its arguments: the values tell, and what lies on another device is no cast
    known = before is not None and after is not None and before.device == after.device
    return source if known and isinstance(source, Node) else None


def transparent(node: Node) -> Node | None:
    """The operand whose value a node hands on: of an alias, a cast to the same dtype, a view of one value a channel."""
    kind = kind_of(node.target)  # most nodes are of none: whoever walks a graph asks of every node
    if kind not in (Kind.ALIAS, Kind.RESHAPE, Kind.CAST) or not isinstance(source := next(iter(node.args), None), Node):
        return None
    if kind is Kind.ALIAS:  # whatever its metadata says, which graphs made by hand do not have
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


def detaches(node: Node) -> bool:
    """Whether a node is an alias that no gradient goes through: the same values, and another node for autograd."""
    row = OP_BY_TARGET.get(node.target)
    return row is not None and row.cuts


def source_of(node: Any, casts: bool = False, detached: bool = True) -> Any:
    """The first node that had the value, before lossless casts too if asked. A literal is its own source.

    detached: whether to look through a detach, as one may once autograd is done.
    """
    while isinstance(node, Node) and (detached or not detaches(node)):
        before = transparent(node) or (widened(node) if casts else None)
        if before is None:
            break
        node = before
    return node


def may_alias(node: Node) -> bool:
    """Whether a node's result may share memory with one of its inputs: unless the op is known to make its own."""
    if node.op == "output":
        return False
    # one of several results, or a row of a tensor, which is a view of it
    if node.target is operator.getitem and isinstance(node.args[0], Node):
        return isinstance(node.args[0].meta.get("val"), torch.Tensor) or may_alias(node.args[0])
    return memory_of(node.target) is not Memory.OWN


def writes_to(user: Node, node: Node) -> bool:
    """Whether a call writes to what it is given as a node."""
    return any(value is node for value in written_by(user.target, user.args, user.kwargs))


class Effects:
    """Who shares, reads and writes which memory, through views, slices and casts, into nested calls and out of them.

    nest: the graphs of the program; without it, what nested graphs do is not looked at. functional: whether the
    program lists its mutations, so that no call of a graph writes.
    """

    def __init__(self, nest: Nest | None = None, functional: bool = False) -> None:
        self.nest, self.functional = nest, functional

    def bases(self, node: Node) -> list[Node]:
        """The first nodes whose memory a node may share: those that make their own result, or bring it in."""
        found, seen, work = [], {node}, [node]
        while work:
            held = work.pop()
            sources = [source for source in self._sources(held) if isinstance(source, Node)]
            found += [] if sources else [held]
            work += [source for source in sources if source not in seen]
            seen |= set(sources)
        return found

    def _sources(self, node: Node) -> Iterable[Any]:
        """What a node may share its memory with, one step up."""
        nest = self.nest
        if node.op == "placeholder":
            return [] if nest is None else _operands(nest, node)
        if node.op in ("get_attr", "output") or not may_alias(node):
            return []
        made: Any = node.args[0] if node.target is operator.getitem else node
        if nest is None or not self._hands_in(made):
            # a call of which no more is known may return any of its operands, but for the graph it is given
            return [n for n in node.all_input_nodes if nest is None or n not in nest.holders]
        return [value for call in nest.calls(made) for value in _values(nest.graphs[call.nested], made, node)]

    def accesses(self, node: Node) -> tuple[list[Node], list[Node]]:
        """Who reads the memory of a node's result and who writes it, as far as schemas say. Who runs a graph or a
        module of which no more is known may write to it. Who hands it to a graph that is known does neither.
        """
        reads: list[Node] = []
        writes: list[Node] = []
        # up to where the memory comes from, and down again from there: who writes to it may read another view of it
        work = self.bases(node)
        seen = set(work)
        while work:
            held = work.pop()
            for user in held.users:
                if self._runs(user) or writes_to(user, held):  # whatever else it reads of the same memory
                    writes.append(user)
                elif user not in seen and not self._hands_in(user):
                    reads.append(user)
                results = self._results(held, user)
                work += [made for made in results if made not in seen]
                seen |= {user, *results}
        return [read for read in reads if read not in writes], list(dict.fromkeys(writes))

    def _runs(self, user: Node) -> bool:
        return self.nest is not None and not self.functional and self.nest.runs(user)

    def _hands_in(self, user: Node) -> bool:
        calls = [] if self.nest is None else self.nest.calls(user)
        # all of them: a condition calls two graphs and runs one
        return bool(calls) and all(call.once for call in calls)

    def _results(self, held: Node, user: Node) -> list[Node]:
        """The nodes that may share memory with one, by way of who reads it."""
        nest = self.nest
        if nest is None:
            return [user] if user.op != "output" and may_alias(user) else []
        if user.op == "output":
            return [made for call in nest.callers(nest.paths[user.graph]) for made in _returned(call.node, user, held)]
        if self._hands_in(user):
            # it may be handed in twice, under two placeholders
            return [p for call in nest.calls(user) for p, operand in call.bound.items() if operand is held]
        return [user] if may_alias(user) else []


def _operands(nest: Nest, placeholder: Node) -> Iterator[Any]:
    """What the calls of a graph give a placeholder of it. Of a call that is not known, any operand may be it."""
    for call in nest.callers(nest.paths[placeholder.graph]):
        yield from [call.bound[placeholder]] if call.once else call.node.all_input_nodes


def _values(graph: Graph, call: Node, node: Node) -> list[Any]:
    """What a call of a graph returns to a node: the call itself, or the getitem of one value of it."""
    (returned,) = graph.output_node().args
    if not isinstance(returned, tuple | list):
        return [returned]
    return list(returned) if call is node else [returned[node.args[1]]]  # type: ignore[index]


def _returned(caller: Node, output: Node, held: Node) -> Iterator[Node]:
    """The nodes that hold a node's value behind the call of its graph."""
    (values,) = output.args
    if not isinstance(values, tuple | list):
        yield caller
        return
    places = [place for place, value in enumerate(values) if value is held]
    for user in caller.users:
        # who reads the results without taking them apart, as an output that hands them on, has them all
        if user.target is not operator.getitem or user.args[1] in places:
            yield user


class Storages:
    """Which tensors lie in the same memory, or in a part of it: by the bytes from their first to their last entry."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._held: dict[int, list[tuple[int, int, str]]] = defaultdict(list)
        self._places: dict[str, tuple[int, int, int]] = {}
        for name, tensor in tensors.items():
            self.add(name, tensor)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Notes where a tensor lies. What is no strided tensor shares its memory with nothing that can be seen."""
        if tensor.layout is not torch.strided:
            return
        # bytes, not storages: buffers that lie side by side in one storage do not see each other's writes
        size, storage = tensor.element_size(), int(tensor.untyped_storage()._cdata)
        begin = int(tensor.storage_offset()) * size
        last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
        end = begin + (int(last) + 1) * size if tensor.numel() else begin  # without entries it overlaps nothing
        self._held[storage].append((begin, end, name))
        self._places[name] = (storage, begin, end)

    def sharing(self, name: str) -> list[str]:
        """The names of everything in the same memory, or in a part of it; its own too."""
        if name not in self._places:
            return [name]
        storage, begin, end = self._places[name]
        return [other for b, e, other in self._held[storage] if other == name or (b < end and begin < e)]
