"""Taking nodes out of a graph so that they can be put back: under their name, at their place, with their origin."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, Node

aten = torch.ops.aten


# Under this key of node.meta["custom"] (which saving keeps) a site remembers what it was before it was consolidated
# ("form", "filled"), before it was switched to eval ("train"), and whether it stays in eval ("frozen", "detached").
ORIGIN = "torch_batchnorm"


def note_of(node: Node) -> dict[str, Any]:
    """What a node remembers about itself; metadata is copied freely, so it is for the reader to judge."""
    return (node.meta.get("custom") or {}).get(ORIGIN) or {}


def write_note(node: Node, **changes: Any) -> None:
    """Adds to what a node remembers; None makes it forget. Copies share metadata: nothing is changed in place."""
    note = {key: value for key, value in {**note_of(node), **changes}.items() if value is not None}
    custom = {key: value for key, value in (node.meta.get("custom") or {}).items() if key != ORIGIN}
    if note:
        custom[ORIGIN] = note
    if custom:
        node.meta["custom"] = custom
    else:
        node.meta.pop("custom", None)


def forget(call: Node, *keys: str) -> None:
    """Drops what a call remembers, and what loading made the reads of its outputs remember with it."""
    readers = (user for user in call.users if user.target is operator.getitem and note_of(user))
    for node in (call, *readers):
        write_note(node, **dict.fromkeys(keys))


# What a node taken out remembers of its metadata: what saving keeps, so that it can be saved.
_KEPT = ("stack_trace", "torch_fn", "custom")


class Removals:
    """Removed nodes as notes, which are plain data: `take` makes one, `put` makes the node again.

    A note says behind which node its node stood. So what is taken last has to be put back first.
    """

    def __init__(self) -> None:
        self._named: dict[Graph, dict[str, Node]] = {}

    def _names(self, graph: Graph) -> dict[str, Node]:
        if graph not in self._named:
            self._named[graph] = {node.name: node for node in graph.nodes}
        return self._named[graph]

    def node(self, graph: Graph, name: str) -> Node:
        """The node of this name."""
        return self._names(graph)[name]

    def node_or_none(self, graph: Graph, name: str) -> Node | None:
        """The node of this name, None when it is gone."""
        node = self._names(graph).get(name)
        return None if node is None or node._erased else node

    def known(self, node: Node) -> None:
        """A new node can be found by its name."""
        self._names(node.graph)[node.name] = node

    def take(self, node: Node, before: Node | None = None, like: Node | None = None) -> dict[str, Any]:
        """Takes a node without users out. Its place is not noted when it is right before `before`, and of its origin
        only what another node does not tell too.
        """
        note: dict[str, Any] = {"name": node.name}
        if before is None or node.next is not before:
            note["after"] = node.prev.name
        for key in _KEPT:
            if key in node.meta and (like is None or like.meta.get(key) != node.meta[key]):
                note[key] = node.meta[key]
        node.graph.erase_node(node)
        return note

    def put(self, graph: Graph, note: dict[str, Any], before: Node) -> Callable[..., Node]:
        """A function that makes the noted node from its overload and arguments, at its place if that is still known and
        behind its operands, else right before `before`.
        """

        def make(overload: Any, args: tuple[Any, ...]) -> Node:
            anchor = self.node_or_none(graph, note["after"]) if "after" in note else None
            if anchor is not None and any(isinstance(a, Node) and a > anchor for a in args):
                anchor = None
            with graph.inserting_after(anchor) if anchor is not None else graph.inserting_before(before):
                node = graph.create_node("call_function", overload, args, name=note["name"])
            self.call(node, note["name"])
            for key in _KEPT:
                if key in note:
                    node.meta[key] = tuple(note[key]) if key == "torch_fn" else note[key]
            return node

        return make

    def call(self, node: Node, name: str) -> None:
        """Gives a new node this name if no other has it. The graph itself never gives a name twice, erased or not."""
        names = self._names(node.graph)
        held = names.get(name)
        if node.name != name and (held is None or held._erased):
            node.name = name
        names[node.name] = node

    def take_copies(self, value: Node, place: Node) -> list[dict[str, Any]]:
        """Takes out what writes a new value back into its place: how a functional graph becomes a module."""
        copies = [
            user
            for user in value.users
            if user.target is aten.copy_.default and user.args[:2] == (place, value) and not user.users
        ]
        return [self.take(copy) for copy in sorted(copies, reverse=True)]

    def put_copies(self, notes: list[dict[str, Any]], place: Node, value: Node) -> None:
        """Writes a new value back into its place again."""
        end = value.graph.output_node()
        for note in reversed(notes):
            self.put(value.graph, note, end)(aten.copy_.default, (place, value))
