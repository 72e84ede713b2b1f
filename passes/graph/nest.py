"""Graphs in graphs: which there are, who calls them, and what a call binds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from .result import Program, top_module
from .signature import input_specs

# Calls that run their graph once for each call, so that a counter may as well be added to outside.
ONCE = {"wrap_with_set_grad_enabled", "wrap_with_autocast", "tag_activation_checkpoint", "invoke_subgraph"}


def graphs_of(program: Program) -> list[tuple[str, Graph]]:
    """The program's graphs by dotted path: the top one (path "") and those of every graph module nested in it."""
    return [(path, module.graph) for path, module in graph_modules(top_module(program))]


def graph_modules(top: torch.nn.Module) -> Iterator[tuple[str, GraphModule]]:
    return ((path, module) for path, module in top.named_modules() if isinstance(module, GraphModule))


def attribute(module: torch.nn.Module, target: str) -> Any:
    value: Any = module
    for atom in target.split("."):
        value = getattr(value, atom, None)  # None where a graph names what is not there: to say so is lint's job
    return value


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a nested graph.

    node: who calls it. path: of the graph that this lies in. nested: the path of the graph that is called.
    bound: for each placeholder of that graph the operand, as far as we know: every such call takes its operands last.
    once: whether the graph runs once for each call, on these operands, and the call returns what the graph does.
    """

    node: Node
    path: str
    nested: str
    bound: dict[Node, Any]
    once: bool

    @property
    def kind(self) -> str:
        """How it is called, as messages say it."""
        return self.node.op if self.node.op == "call_module" else getattr(self.node.target, "__name__", "")

    @property
    def spread(self) -> bool:
        """Whether its operands are its last arguments, so that one more can be appended."""
        # operands in a list, as `cond` and `map` take them, leave no place to append to
        given = self.node.args[len(self.node.args) - len(self.bound) :]
        return len(given) == len(self.bound) and all(a is b for a, b in zip(given, self.bound.values(), strict=True))


class Nest:
    """The graphs of a program by path, and the calls between them. The graphs may be copies of the modules' own."""

    def __init__(self, top: GraphModule, graphs: Iterable[tuple[str, Graph]]) -> None:
        self.graphs = dict(graphs)
        self.paths = {graph: path for path, graph in self.graphs.items()}
        self.by_path: dict[str, list[Call]] = defaultdict(list)  # the calls of a graph
        self.by_node: dict[Node, list[Call]] = defaultdict(list)  # the graphs that a node calls
        self.holders: set[Node] = set()  # the get_attr nodes that bring in a graph, which is no value
        # most programs are one graph: for them no module is visited
        modules = dict(graph_modules(top)) if len(self.graphs) > 1 else {}
        known = {id(module): path for path, module in modules.items()}  # the first of several names
        for path, module in modules.items():
            for node, nested in self._called(module, self.graphs[path]):
                if id(nested) in known:
                    self._add(node, path, known[id(nested)])

    def _called(self, module: GraphModule, graph: Graph) -> Iterator[tuple[Node, Any]]:
        """The nodes of a graph that call a nested one, each with its module, in the order in which they run."""
        found = [(node, attribute(module, str(node.target))) for node in graph.find_nodes(op="call_module")]
        for held in graph.find_nodes(op="get_attr"):
            nested = attribute(module, str(held.target))
            if isinstance(nested, GraphModule):
                self.holders.add(held)
                found += [(user, nested) for user in held.users]
        # found a kind at a time, and by find_nodes in the order in which nodes were made
        return iter(sorted(found, key=lambda pair: pair[0]))

    def _add(self, node: Node, path: str, nested: str) -> None:
        placeholders = self.graphs[nested].find_nodes(op="placeholder")
        operands = [*pytree.tree_leaves(node.args)]
        operands += [leaf for leaf in pytree.tree_leaves(node.kwargs) if isinstance(leaf, Node)]
        some = operands[len(operands) - len(placeholders) :] if len(placeholders) <= len(operands) else []
        bound = dict(zip(placeholders, some, strict=False))
        kept = len(bound) == len(placeholders) and not any(isinstance(v, Node) for v in node.kwargs.values())
        once = kept and (node.op == "call_module" or getattr(node.target, "__name__", "") in ONCE)
        call = Call(node, path, nested, bound, once)
        self.by_path[nested].append(call)
        self.by_node[node].append(call)

    def callers(self, path: str) -> list[Call]:
        """The calls of the graph at a path."""
        return self.by_path.get(path, [])

    def calls(self, node: Node) -> list[Call]:
        """The calls that a node makes: one for each graph, none for most nodes."""
        return self.by_node.get(node, [])

    def runs(self, node: Node) -> bool:
        """Whether a node runs a graph, or a module, of which no more is known: other than torch.export's of guards,
        which reads.
        """
        if node.op == "call_module" and node not in self.by_node:
            return node.target != "_guards_fn"
        # a loop, a condition, a kernel of somebody else's: what it does with its operands is not looked for
        return any(not call.once for call in self.calls(node))

    def lifted(self, node: Node, graph: Graph) -> Iterator[Node]:
        """The nodes of a graph in which a node of it, or of one nested in it, runs."""
        if node.graph is graph:
            yield node
        for call in self.callers(self.paths[node.graph]) if node.graph is not graph else ():
            yield from self.lifted(call.node, graph)

    def names(self, outside: Callable[[Node], str | None], known: Callable[[Call], bool]) -> dict[Node, str]:
        """What each node that brings in state is called outside.

        outside: the name of a placeholder of the top graph, None for one that has none. known: whether the placeholders
        of a nested graph are called as what this call binds to them; the first name counts.
        """
        inputs = ((node, outside(node)) for node in self.graphs[""].find_nodes(op="placeholder"))
        names = {node: name for node, name in inputs if name is not None}
        for path, graph in self.graphs.items():
            held = [node for node in graph.find_nodes(op="get_attr") if node not in self.holders]
            names |= {node: f"{path}.{node.target}" if path else str(node.target) for node in held}
        bound = [pair for calls in self.by_path.values() for c in calls if known(c) for pair in c.bound.items()]
        _name_bound(names, bound)
        return names


def _name_bound(names: dict[Node, str], bound: list[tuple[Node, Any]]) -> None:
    """Names placeholders of nested graphs as their operands, which may be such placeholders: until there is no more."""
    count = -1
    while count < len(names):
        count = len(names)
        for placeholder, operand in bound:
            if isinstance(operand, Node) and operand in names:
                names.setdefault(placeholder, names[operand])


def state_names(program: Program, graphs: Iterable[tuple[str, Graph]] | None = None) -> dict[Node, str]:
    """What each node that brings in state is called outside: a parameter's or buffer's FQN, a user input's name.

    Placeholders of nested graphs are called as the operand they are bound to. graphs: copies under the same names.
    """
    inputs = input_specs(program)

    def outside(node: Node) -> str:
        spec = inputs.get(node.name)
        return node.name if spec is None or spec.target is None else spec.target

    nest = Nest(top_module(program), graphs_of(program) if graphs is None else graphs)
    return nest.names(outside, lambda call: True)
