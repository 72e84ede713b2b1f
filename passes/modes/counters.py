"""The counter of a batch norm, `num_batches_tracked`: its add is taken out for eval and put back for training."""

from __future__ import annotations

from collections import defaultdict
from functools import cached_property
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Graph, Node

from ...decomps.ops import OP_BY_TARGET, Kind
from ..graph.draft import Draft
from ..graph.journal import Entry, Journal
from ..graph.meta import set_val
from ..graph.nest import ONCE, Nest, state_names
from ..graph.result import Reason
from ..graph.signature import tensors_of
from ..rewriting.site import Site
from ..rewriting.tracked import COUNTER, counter_beside, root_of

aten = torch.ops.aten

_ADD, _ADD_IN_PLACE = aten.add.Tensor, aten.add_.Tensor

# What a constant passes through between its place in the state and the add.
_WRAPS = (
    *(o for o, row in OP_BY_TARGET.items() if row.kind is Kind.ALIAS),
    aten.lift_fresh_copy.default,
    aten.clone.default,
)

# What is filled in for a batch norm stands right before it, and a counter's add before that: so torch.export writes it.
_FILLS = {o for o, row in OP_BY_TARGET.items() if row.kind is Kind.FILL} | {aten.sym_size.int}


class Counters:
    """The counters of a draft's batch norms, found by name beside the running mean; nested graphs included."""

    def __init__(self, draft: Draft, journal: Journal) -> None:
        self.draft, self.journal = draft, journal
        self.names = state_names(draft.program, draft.graphs)
        self.holders: dict[str, dict[Graph, Node]] = defaultdict(dict)  # the first of each graph, by name
        for node, name in self.names.items():
            if name.endswith(COUNTER):
                self.holders[name].setdefault(node.graph, node)
        self.graphs = dict(draft.graphs)
        self.adds: dict[str, list[Node]] = {}
        # a functional program adds and lists: the adds that count are those that lead to what is listed
        self.written: dict[Node, list[Node]] = defaultdict(list)
        for target, value in draft.listing.mutations():
            self.written[target].append(value)

    @cached_property
    def state(self) -> dict[str, torch.Tensor]:
        """Buffers and constants by name."""
        return tensors_of(self.draft.program)

    @cached_property
    def nest(self) -> Nest:
        """The calls between the graphs."""
        return Nest(self.draft.top, self.draft.graphs)

    def of(self, site: Site) -> str | None:
        """The name of the site's counter in the state, None when it has none."""
        mean = self.names.get(root_of(site.norm.running_mean))
        if not mean:
            return None
        name = counter_beside(mean)
        # a counter that no node brings in is there all the same: exported in eval, nothing reads it
        return name if name in self.holders or name in self.state else None

    def pair(self, sites: list[Site]) -> dict[Node, Node | Reason]:
        """For each training site the add of its counter, if it has one; a reason when they cannot be paired.

        As many adds as batch norms: they are paired in the order in which they run.
        """
        by_counter: dict[str, list[Site]] = defaultdict(list)
        for site in sites:
            if (name := self.of(site)) is not None:
                by_counter[name].append(site)
        paired: dict[Node, Node | Reason] = {}
        for name, counted in by_counter.items():
            # no add at all is no refusal: whoever writes a graph by hand may count nothing
            adds = self._adds_of(name)
            if adds and len(adds) != len(counted):
                found = f"{name} is added to {len(adds)} times for {len(counted)} batch norms"
                reason = Reason(f"{found}: which add is whose is not known")
                paired.update((site.node, reason) for site in counted)
            elif adds:
                for site, add in zip(counted, adds, strict=True):
                    paired[site.node] = add
        return paired

    def _adds_of(self, name: str) -> list[Node]:
        """Every add of one to this counter, in the order of the graphs and in each as they run."""
        held = self.holders.get(name, {})
        if len(held) == 1:
            return self._updates_of(*held.values())
        return [add for _, graph in self.draft.graphs if graph in held for add in self._updates_of(held[graph])]

    def _updates_of(self, counter: Node) -> list[Node]:
        """Every add of one that updates a counter, in order: in place, or towards the value that is written to it. What
        else adds one to it reads it, and is no update.
        """
        found, reached = [], [counter]
        written: list[Any] = [*self.written.get(counter, ())]
        while reached:
            held = reached.pop()
            for user in held.users:
                if user.target is _ADD_IN_PLACE and user.args[0] is held and self._is_one(user.args[1]):
                    found.append(user)
                    reached.append(user)
                elif user.target is aten.copy_.default and held is counter:
                    written.append(user.args[1])
        for value in written:
            while isinstance(value, Node) and value.target is _ADD and self._is_one(value.args[1]):
                found.append(value)
                value = value.args[0]
        return sorted(dict.fromkeys(found)) if len(found) > 1 else found

    def _is_one(self, value: Any) -> bool:
        """Whether an operand is 1: a literal, or a constant of the program, as lifting makes of it."""
        if not isinstance(value, Node):
            return bool(value == 1)
        # torch.export lifts a tensor that the model's code makes into a constant of the program
        while value.target in _WRAPS and value.all_input_nodes:
            value = value.all_input_nodes[0]
        tensor = self.state.get(self.names.get(value, ""))
        return tensor is not None and tensor.numel() == 1 and not tensor.is_floating_point() and bool(tensor == 1)

    def remove(self, site: Site, add: Node | None) -> Entry | None:
        """Takes an add out, and the constant it added where nothing else reads it; returns what `restore` needs."""
        if add is None:
            return None
        counter: Any = add.args[0]
        one = add.args[1]
        before = _first_for(site.node) if add.graph is site.node.graph else None
        # where its value is written back is asked only where something reads it, which an add in place has seldom
        place = root_of(counter) if add.users else counter
        entry = {"op": str(add.target), **self.journal.take_update(add, counter, place, before)}
        if isinstance(one, Node):
            entry["one"] = self.journal.take_operand(one, _WRAPS)
        return entry

    def restore(self, site: Site, entry: Entry) -> None:
        """Puts an add where it was, or where torch.export writes it: right before the batch norm."""
        name = self.of(site)
        found = None if name is None else self._place(site, name)
        if name is None or found is None:
            return
        counter, before = found
        entry = self._of_this_dialect(entry)
        value, one = self._value_before(counter, name, before), self._restored_one(entry, site, counter.graph)
        # an operand that was put back at its own place may stand later than where the add goes by default
        if isinstance(one, Node) and one > before:
            before = one.next
        functional = entry["op"] == str(_ADD) if "op" in entry else self.draft.functional
        overload = _ADD if functional else _ADD_IN_PLACE
        entry = {"name": overload._schema.name.removeprefix("aten::"), **entry}
        add = self.journal.put(counter.graph, entry, overload, (value, one), before)
        add.meta = {**_described(site.node), **add.meta}
        set_val(add, counter.meta.get("val"), site.node)
        self.journal.update(entry, add, value, counter, add)
        self.adds[name].append(add)

    def _of_this_dialect(self, entry: Entry) -> Entry:
        """The entry of an add, unless the program's dialect changed since: then it is written as this one has it."""
        in_place = entry.get("op") == str(_ADD_IN_PLACE)
        exported = isinstance(self.draft.program, ExportedProgram) and "op" in entry and "copies" not in entry
        return {} if exported and in_place is self.draft.functional else entry

    def _value_before(self, counter: Node, name: str, node: Node) -> Node:
        """What the counter is called right before a node."""
        # two calls of one module count on: the second add reads what the first one made
        if name not in self.adds:
            self.adds[name] = self._adds_of(name)
        adds = (add for add in self.adds[name] if add.graph is node.graph and add < node)
        return max(adds, default=counter)

    def _restored_one(self, entry: Entry, site: Site, graph: Graph) -> Node | int:
        if "one" not in entry:
            return 1
        node = self.journal.put_operand(graph, entry["one"], _WRAPS, 1, _described(site.node))
        if node is not None and "constant" in entry["one"]:
            source = node
            while source.op != "placeholder":
                source = source.all_input_nodes[0]
            self.names[source] = entry["one"]["constant"]["target"]
            self.state[self.names[source]] = torch.tensor(1)
        return 1 if node is None else node

    def _place(self, site: Site, name: str) -> tuple[Node, Node] | None:
        """The node that holds the counter, and the one to add before: in the site's graph, else around its call, as
        torch hands no counter into a graph that does not use it.
        """
        path, node = site.path, site.node
        while True:
            counter = self.holders[name].get(self.graphs[path])
            if counter is not None and not counter._erased:
                return counter, _first_for(node)
            if not path and not isinstance(self.draft.program, ExportedProgram):
                return self._get(name), _first_for(node)
            if not (calls := self.nest.callers(path)):
                return None
            path, node = calls[0].path, calls[0].node

    def _get(self, name: str) -> Node:
        graph = self.graphs[""]
        # ahead of everything: whichever add is put back first, all of them may read it
        with graph.inserting_before(next(iter(graph.nodes))):
            node = graph.get_attr(name)
        self.holders[name][graph], self.names[node] = node, name
        self.journal.name(node, node.name)
        return node

    def refuse_shared(self, site: Site) -> Reason:
        """Why it cannot be told which counter a site adds to, empty when it can: statistics and module agree."""
        named = (self.names.get(root_of(t), "") for t in (site.norm.running_mean, site.norm.running_var))
        owners = {name.rpartition(".")[0] for name in named if name} | ({site.owner} if site.owner else set())
        counters = {owner: self.state.get(f"{owner}.{COUNTER}" if owner else COUNTER) for owner in sorted(owners)}
        known = {owner: counter for owner, counter in counters.items() if counter is not None}
        # by memory: two names of one tensor are one counter, and either will do
        if len({counter.data_ptr() for counter in known.values()}) < 2:
            return Reason()
        return Reason(f"its statistics are shared by {', '.join(known)}: whose counter it adds to is not known")

    def refuse_nested(self, site: Site) -> Reason:
        """Why a nested site cannot train, empty when it can: its graph does not run just once for each call."""
        path = site.path
        while path:
            calls = self.nest.callers(path)
            kinds = {call.kind for call in calls}  # cond and while_loop run a graph as often as they find
            if len(calls) != 1 or not kinds <= {*ONCE, "call_module"}:
                found = ", ".join(sorted(kinds)) or "nothing"
                return Reason(f"its graph {path} is called by {found}, which may not run it once for each batch")
            path = calls[0].path
        return Reason()


def _first_for(node: Node) -> Node:
    """The node, or the first of what was filled in for it right before."""
    while node.prev.target in _FILLS:
        node = node.prev
    return node


def _described(node: Node) -> dict[str, Any]:
    """The metadata of a node that belongs to the same module."""
    kept = ("nn_module_stack", "stack_trace", "from_node", "source_fn_stack")
    return {key: node.meta[key] for key in kept if key in node.meta}
