"""A journal of edits as plain, reversible data: nodes taken out of a draft, and put back from what was noted."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cached_property
from typing import Any

import torch
from torch.fx import Graph, Node

from .draft import Draft
from .meta import empty_val

aten = torch.ops.aten

Entry = dict[str, Any]


def is_text(value: Any) -> bool:
    """Whether it is text."""
    return isinstance(value, str)


def is_name(value: Any) -> bool:
    """Whether a node can be called so."""
    return isinstance(value, str) and value.isidentifier()


def is_count(value: Any) -> bool:
    """Whether it is a number of things."""
    return type(value) is int and value >= 0


def one_of(*values: Any) -> Callable[[Any], bool]:
    """Whether it is one of these."""
    return lambda value: value in values


def fits(value: Any, shape: Any) -> bool:
    """Whether plain data has a shape: a predicate, a list of one shape, or a dict of them, where `key?` may be absent.

    >>> fits({"name": "add_1"}, ENTRY), fits({"name": "add_1", "listed": "x"}, ENTRY), fits("add_1", ENTRY)
    (True, False, False)
    """
    if isinstance(shape, dict):
        return isinstance(value, dict) and all(
            fits(value[name], inner) if (name := key.removesuffix("?")) in value else key.endswith("?")
            for key, inner in shape.items()
        )
    if isinstance(shape, list):
        return isinstance(value, list | tuple) and all(fits(item, shape[0]) for item in value)
    return bool(shape(value))


# What a node taken out remembers of its metadata: what saving keeps, so that it can be saved. What only tracing knows
# of it (seq_nr, original_aten, tensor_meta) is lost.
_KEPT = {
    "stack_trace": lambda value: value is None or is_text(value),
    "torch_fn": [is_text],
    "custom": lambda value: True,
}

# A node taken out: its name, its overload, behind which node it stood (where that is not plain from another), its place
# among the mutations that the signature listed, and the nodes that wrote its value back into its place.
_NODE = {
    "name": is_name,
    "op?": is_text,
    "after?": is_text,
    "listed?": is_count,
    **{f"{k}?": s for k, s in _KEPT.items()},
}
ENTRY: dict[str, Any] = {**_NODE, "copies?": [_NODE]}


class Journal:
    """Nodes taken out of a draft as entries, which are plain data, and made again: under their name, at their place,
    with their origin.

    An entry says behind which node its node stood. So what is taken last has to be put back first. Entries may be old,
    and the graph another one by now: what they name and is not there, or not before the node, does not count.
    """

    def __init__(self, draft: Draft) -> None:
        self.draft = draft
        self._named: dict[Graph, dict[str, Node]] = {}

    @cached_property
    def _listed(self) -> dict[Node, int]:
        """The place of each value among the mutations that the signature lists."""
        return {value: place for place, (_, value) in enumerate(self.draft.listing.mutations())}

    def _names(self, graph: Graph) -> dict[str, Node]:
        if graph not in self._named:
            self._named[graph] = {node.name: node for node in graph.nodes}
        return self._named[graph]

    def find(self, graph: Graph, name: str) -> Node | None:
        """The node of this name, None when it is gone."""
        node = self._names(graph).get(name)
        return None if node is None or node._erased else node

    def take(self, node: Node, before: Node | None = None, like: Node | None = None) -> Entry:
        """Takes a node without users out. Its place is not noted when it is right before `before`, and of its origin
        only what another node does not tell too.
        """
        entry: Entry = {"name": node.name}
        meta, told = node.meta, {} if like is None else like.meta
        if before is None or node.next is not before:
            entry["after"] = node.prev.name
        for key in _KEPT:
            if key in meta and (like is None or told.get(key) != meta[key]):
                entry[key] = meta[key]
        node.graph.erase_node(node)
        return entry

    def put(self, graph: Graph, entry: Entry, overload: Any, args: tuple[Any, ...], before: Node) -> Node:
        """Makes the node of an entry again: at its place if that is still known and behind its operands, else right
        before `before`.
        """
        anchor = self._anchor(graph, entry.get("after"), args)
        with graph.inserting_before(before) if anchor is None else graph.inserting_after(anchor):
            node = graph.create_node("call_function", overload, args, name=entry["name"])
        self.name(node, entry["name"])
        for key in _KEPT:
            if key in entry:
                # saved as JSON, a tuple is a list when it is read
                node.meta[key] = tuple(entry[key]) if key == "torch_fn" else entry[key]
        return node

    def _anchor(self, graph: Graph, name: str | None, args: tuple[Any, ...]) -> Node | None:
        """The node to stand behind, None when it is gone, or an operand comes later."""
        anchor = None if name is None else self.find(graph, name)
        # never between placeholders, which come first: their order is the signature's
        while anchor is not None and anchor.op == "placeholder" and anchor.next.op == "placeholder":
            anchor = anchor.next
        late = anchor is not None and any(isinstance(a, Node) and a > anchor for a in args)
        return None if late or (anchor is not None and anchor.op == "output") else anchor

    def name(self, node: Node, name: str) -> None:
        """Gives a new node this name if no other has it. The graph itself never gives a name twice, erased or not."""
        if node.name != name and self.find(node.graph, name) is None:
            node.name = name
        self._names(node.graph)[node.name] = node

    def take_update(self, node: Node, value: Node, place: Node, before: Node | None, like: Node | None = None) -> Entry:
        """Takes out a node that makes a new value of what a place holds: its readers read the value that it was made
        of, and nothing writes it back.
        """
        entry: Entry = {} if (listed := self._listed.get(node)) is None else {"listed": listed}
        if node.users:
            # the last one first, as each says what it stood behind, which has to be there again when it is put back
            copies = (u for u in node.users if u.target is aten.copy_.default and u.args[:2] == (place, node))
            taken = [self.take(copy) for copy in sorted((c for c in copies if not c.users), reverse=True)]
            if taken:
                entry["copies"] = taken
            node.replace_all_uses_with(value)
        return {**self.take(node, before, like), **entry}

    def update(self, entry: Entry, node: Node, value: Node, place: Node, after: Node) -> None:
        """From `after` on, the value of a place is what a node put back makes of it: undoes `take_update`."""
        self.draft.listing.place(place, entry.get("listed"))
        self.draft.mutate(value, after, node)
        for copy in reversed(entry.get("copies", ())):  # how a functional graph becomes a module
            self.put(node.graph, copy, aten.copy_.default, (place, node), node.graph.output_node())

    def take_operand(self, operand: Node, through: Collection[Any]) -> Entry:
        """Takes out what brought an operand in, from its last reader back to the lifted constant; a reader elsewhere
        ends it.
        """
        wraps = []
        while operand.target in through and not operand.users and operand.all_input_nodes == [*operand.args]:
            source: Any = operand.args[0]
            wraps.append({"op": str(operand.target), **self.take(operand)})
            operand = source
        name = operand.name
        dropped = self.draft.drop_constant(operand)
        if dropped is None:
            return {"wraps": wraps, "node": name}
        place, target = dropped
        constants: Any = self.draft.program.constants  # whose names are those of the lifted: torch checks it
        dtype = str(constants[target].dtype).removeprefix("torch.")
        return {"wraps": wraps, "constant": {"name": name, "place": place, "target": target, "dtype": dtype}}

    def put_operand(
        self, graph: Graph, entry: Entry, through: Collection[Any], value: int, meta: dict[str, Any]
    ) -> Node | None:
        """Makes an operand again, a constant of this value; None where what it was made of is gone.

        meta: what the nodes on the way are told of themselves beside what the entry says.
        """
        overloads = {str(op): op for op in through}
        # what a note names is called only if it is one of these: a note is data that anybody can write
        if any(wrap["op"] not in overloads for wrap in entry["wraps"]):
            return None
        constant = entry.get("constant")
        node = self.find(graph, entry.get("node", "")) if constant is None else self._constant(graph, constant, value)
        if node is None:
            return None
        for wrap in reversed(entry["wraps"]):
            val = node.meta.get("val")
            node = self.put(graph, wrap, overloads[wrap["op"]], (node,), node.next)
            node.meta = {**meta, **node.meta, **({} if val is None else {"val": val})}
        return node

    def _constant(self, graph: Graph, entry: Entry, value: int) -> Node | None:
        placeholders = self.draft.graphs[0][1].find_nodes(op="placeholder")
        if graph is not self.draft.graphs[0][1] or entry["target"] in map(self.draft.listing.target_of, placeholders):
            return None  # another tensor is called so by now
        # any input's will do: what counts is the fake mode, as torch refuses a program with values of two
        like: Any = next((node.meta["val"] for node in placeholders if "val" in node.meta), None)
        tensor = torch.tensor(value, dtype=getattr(torch, entry["dtype"]))
        val = None if like is None else empty_val(like, (), tensor.dtype)
        node = self.draft.add_constant(entry["name"], entry["place"], entry["target"], tensor, val)
        self._names(node.graph)[node.name] = node
        return node
