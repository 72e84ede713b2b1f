"""The counter of a batch norm, `num_batches_tracked`: its add is taken out for eval and put back for training."""

from __future__ import annotations

from collections import defaultdict
from functools import cached_property
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Graph, Node

from ..graph.draft import Draft
from ..graph.journal import Removals
from ..graph.meta import empty_val, set_val
from ..graph.nest import ONCE, callers_of, graphs_of, state_names
from ..graph.signature import tensors_of
from ..rewriting.site import Site
from ..rewriting.tracked import COUNTER, counter_beside, root_of

aten = torch.ops.aten


_ADDS = (aten.add_.Tensor, aten.add.Tensor)


# What a constant passes through between its place in the state and the add.
_WRAPS = (
    aten.lift_fresh_copy.default,
    aten.lift_fresh.default,
    aten.detach.default,
    aten.detach_.default,
    aten.clone.default,
)


_FILLS = (aten.new_ones.default, aten.new_zeros.default, aten.full.default, aten.sym_size.int)


class Counters:
    """The counters of a draft's batch norms, found by name beside the running mean; nested graphs included."""

    def __init__(self, draft: Draft, removals: Removals) -> None:
        self.draft, self.removals = draft, removals
        program = draft.program
        paths = {id(graph): path for path, graph in (graphs_of(program) if not draft.inplace else draft.graphs)}
        self.names: dict[str, dict[str, str]] = defaultdict(dict)  # path -> node name -> name outside
        self.holders: dict[str, dict[str, str]] = defaultdict(dict)  # path -> name outside -> node name
        for node, name in state_names(program).items():
            path = paths[id(node.graph)]
            self.names[path][node.name] = name
            self.holders[path].setdefault(name, node.name)
        self.graphs = dict(draft.graphs)
        self.callers = callers_of(draft.top, dict(draft.graphs))
        self.adds: dict[str, list[Node]] = {}
        self.written: dict[Node, list[Node]] = defaultdict(list)
        for target, value in draft.mutations():
            self.written[target].append(value)

    @cached_property
    def state(self) -> dict[str, torch.Tensor]:
        """Buffers and constants by name."""
        return tensors_of(self.draft.program)

    def of(self, site: Site) -> str | None:
        """The name of the site's counter in the state, None when it has none."""
        mean = self.names[site.path].get(root_of(site.norm.running_mean).name, "")
        name = counter_beside(mean)
        return name if mean and (name in self.holders[site.path] or name in self.state) else None

    def pair(self, sites: list[Site]) -> dict[Node, Node | str | None]:
        """For each training site the add of its counter, None when it has none, a reason when they cannot be paired."""
        by_counter: dict[str, list[Site]] = defaultdict(list)
        paired: dict[Node, Node | str | None] = dict.fromkeys(site.node for site in sites)
        for site in sites:
            if (name := self.of(site)) is not None:
                by_counter[name].append(site)
        for name, counted in by_counter.items():
            adds = self._adds_of(name)
            if adds and len(adds) != len(counted):
                found = f"{name} is added to {len(adds)} times for {len(counted)} batch norms"
                reason = f"{found}: which add is whose is not known"
                paired.update((site.node, reason) for site in counted)
            elif adds:
                paired.update(zip((site.node for site in counted), adds, strict=True))
        return paired

    def _adds_of(self, name: str) -> list[Node]:
        """Every add of one to this counter, in the order of the graphs and in each as they run."""
        found = []
        for path, graph in self.draft.graphs:
            held = self.holders[path].get(name)
            if held is not None:
                counter = self.removals.node(graph, held)
                found += _chain(counter, self.written.get(counter, []), self.is_one)
        return found

    def _value_before(self, counter: Node, name: str, node: Node) -> Node:
        """What the counter is called right before a node."""
        if name not in self.adds:
            self.adds[name] = self._adds_of(name)
        adds = (add for add in self.adds[name] if add.graph is node.graph and add < node)
        return max(adds, default=counter)

    def is_one(self, value: Any) -> bool:
        """Whether an operand is 1: a literal, or a constant of the program, as lifting makes of it."""
        if not isinstance(value, Node):
            return bool(value == 1)
        tensor = self.state.get(self.names[""].get(_unwrapped(value).name, ""))
        return tensor is not None and tensor.numel() == 1 and not tensor.is_floating_point() and bool(tensor == 1)

    def remove(self, site: Site, add: Node | None, listed: dict[Node, int]) -> dict[str, Any] | None:
        """Takes an add out, and the constant it added where nothing else reads it; returns what `restore` needs."""
        if add is None:
            return None
        removals = self.removals
        counter: Any = add.args[0]
        note: dict[str, Any] = {"op": str(add.target), "listed": listed.get(add)}
        if add.users:
            note["copies"] = removals.take_copies(add, root_of(counter))
            add.replace_all_uses_with(counter)
        one: Any = add.args[1]
        before = _first_for(site.node) if add.graph is site.node.graph else None
        note |= removals.take(add, before)
        note["one"] = self._remove_one(one) if isinstance(one, Node) else None
        return {key: value for key, value in note.items() if value not in (None, [], "")}

    def _remove_one(self, one: Node) -> dict[str, Any]:
        """Takes out what brought the 1 in, from the add back to the constant; a reader elsewhere ends it."""
        taken: list[dict[str, Any]] = []
        constant: dict[str, Any] = {}
        while one.target in _WRAPS and not one.users:
            source: Any = one.args[0]
            taken.append({"op": str(one.target), **self.removals.take(one)})
            one = source
        if one.op == "placeholder" and not one.users and self.names[""].get(one.name, "") in self.state:
            name, tensor = one.name, self.state[self.names[""][one.name]]
            found = self.draft.drop_constant(one)
            if found is not None:
                dtype = str(tensor.dtype).removeprefix("torch.")
                constant = {"name": name, "place": found[0], "target": found[1], "dtype": dtype}
                return {"wraps": taken, "constant": constant}
        return {"wraps": taken, "node": one.name}

    def restore(self, site: Site, note: dict[str, Any] | None) -> None:
        """Puts an add where it was, or where torch.export writes it: right before the batch norm."""
        name = self.of(site)
        if name is None:
            return
        note = self._of_this_dialect(note or {})
        found = self._place(site, name)
        if found is None:
            return
        counter, before = found
        graph = counter.graph
        value = self._value_before(counter, name, before)
        one = self._restored_one(note["one"], site) if note.get("one") else 1
        functional = self.draft.functional and not note
        overload = aten.add.Tensor if functional or note.get("op") == str(aten.add.Tensor) else aten.add_.Tensor
        if isinstance(one, Node) and one > before:
            before = one.next
        add = self.removals.put(graph, note or {"name": overload._schema.name.removeprefix("aten::")}, before)(
            overload, (value, one)
        )
        add.meta = {**_described(site.node), **add.meta}
        set_val(add, counter.meta.get("val"), site.node)
        self.draft.place(counter, note.get("listed"))
        self.draft.mutate(value, add, add)
        self.adds[name].append(add)
        self.removals.put_copies(note.get("copies") or [], root_of(counter), add)

    def _of_this_dialect(self, note: dict[str, Any]) -> dict[str, Any]:
        """The note of an add, unless the program's dialect changed since: then it is written as this one has it."""
        in_place = note.get("op") == str(aten.add_.Tensor)
        exported = isinstance(self.draft.program, ExportedProgram) and "op" in note and "copies" not in note
        return {} if exported and in_place is self.draft.functional else note

    def ambiguous(self, site: Site) -> str:
        """Why it cannot be told which counter a site adds to, empty when it can: statistics and module agree."""
        tensors = (site.norm.running_mean, site.norm.running_var)
        named = [self.names[site.path].get(root_of(t).name, "") for t in tensors]
        owners = {name.rpartition(".")[0] for name in named if name} | ({site.owner} if site.owner else set())
        counters = {owner: self.state.get(f"{owner}.{COUNTER}" if owner else COUNTER) for owner in sorted(owners)}
        known = {owner: counter for owner, counter in counters.items() if counter is not None}
        if len({counter.data_ptr() for counter in known.values()}) < 2:
            return ""
        return f"its statistics are shared by {', '.join(known)}: whose counter it adds to is not known"

    def _restored_one(self, note: dict[str, Any], site: Site) -> Node | int:
        constant, graph = note.get("constant"), self.draft.graphs[0][1]
        if constant is not None:
            like: Any = next((n.meta["val"] for n in graph.find_nodes(op="placeholder") if "val" in n.meta), None)
            value = torch.tensor(1, dtype=getattr(torch, constant["dtype"]))
            val = None if like is None else empty_val(like, (), value.dtype)
            name = constant["name"]
            node = self.draft.add_constant(name, constant["place"], constant["target"], value, val)
            self.names[""][node.name] = constant["target"]
            self.state[constant["target"]] = value
            self.removals.known(node)
        else:
            held = self.removals.node_or_none(graph, note["node"])
            if held is None:
                return 1
            node = held
        for wrap in reversed(note["wraps"]):
            overload = next(op for op in _WRAPS if str(op) == wrap["op"])
            val = node.meta.get("val")
            node = self.removals.put(graph, wrap, node.next)(overload, (node,))
            node.meta = {**_described(site.node), **node.meta}
            if val is not None:
                node.meta["val"] = val
        return node

    def _place(self, site: Site, name: str) -> tuple[Node, Node] | None:
        """The node that holds the counter, and the one to add before: in the site's graph, else around its call."""
        path, node = site.path, site.node
        while True:
            graph = self.graphs[path]
            held = self.holders[path].get(name)
            counter = None if held is None else self.removals.node_or_none(graph, held)
            if counter is not None:
                return counter, _first_for(node)
            if not path and not isinstance(self.draft.program, ExportedProgram):
                return self._get(graph, name), _first_for(node)
            if path not in self.callers:
                return None
            path, node = self.callers[path][0]

    def _get(self, graph: Graph, name: str) -> Node:
        with graph.inserting_before(next(iter(graph.nodes))):
            node = graph.get_attr(name)
        self.holders[""][name], self.names[""][node.name] = node.name, name
        self.removals.known(node)
        return node

    def stuck(self, site: Site) -> str:
        """Why a nested site cannot train, empty when it can: its graph does not run just once for each call."""
        path = site.path
        while path:
            calls = self.callers.get(path, [])
            kinds = {node.op if node.op == "call_module" else getattr(node.target, "__name__", "") for _, node in calls}
            if len(calls) != 1 or not kinds <= {*ONCE, "call_module"}:
                found = ", ".join(sorted(kinds)) or "nothing"
                return f"its graph {path} is called by {found}, which may not run it once for each batch"
            path = calls[0][0]
        return ""


def _unwrapped(node: Node) -> Node:
    while node.target in _WRAPS and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _chain(counter: Node, written: list[Node], is_one: Any) -> list[Node]:
    """Every add of one that updates a counter, in order: in place, or towards the value that is written to it. What
    else adds one to it reads it, and is no update.
    """
    found, reached = [], [counter]
    while reached:
        held = reached.pop()
        adds = [u for u in held.users if u.target is aten.add_.Tensor and u.args[0] is held and is_one(u.args[1])]
        found += adds
        reached += adds
    for value in (*written, *(u.args[1] for u in counter.users if u.target is aten.copy_.default)):
        while isinstance(value, Node) and value.target is aten.add.Tensor and is_one(value.args[1]):
            found.append(value)
            value = value.args[0]
    return sorted(dict.fromkeys(found))


def _first_for(node: Node) -> Node:
    """The node, or the first of what was filled in for it right before."""
    while node.prev.target in _FILLS:
        node = node.prev
    return node


def _described(node: Node) -> dict[str, Any]:
    """The metadata of a node that belongs to the same module."""
    kept = ("nn_module_stack", "stack_trace", "from_node", "source_fn_stack")
    return {key: node.meta[key] for key in kept if key in node.meta}
