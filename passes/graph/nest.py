"""Graphs in graphs: which there are, who calls them, and what a call binds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from .result import Program, top_module
from .signature import input_specs

# Calls that run their graph once for each call, so that a counter may as well be added to outside.
ONCE = {"wrap_with_set_grad_enabled", "wrap_with_autocast", "tag_activation_checkpoint", "invoke_subgraph"}


def callers_of(top: GraphModule, graphs: Mapping[str, Graph]) -> dict[str, list[tuple[str, Node]]]:
    """For each nested graph who calls it: the path of the calling graph, and the node there."""
    found: dict[str, list[tuple[str, Node]]] = defaultdict(list)
    if len(graphs) == 1:
        return found
    paths = {id(module): path for path, module in top.named_modules()}  # the first of several names
    for path, module in top.named_modules():
        if isinstance(module, GraphModule):
            nodes = {node.name: node for node in graphs[path].nodes}
            for caller in callers_in(module):
                for _, nested in called_by(module, caller):
                    found[paths[id(nested)]].append((path, nodes[caller.name]))
    return found


def graphs_of(program: Program) -> list[tuple[str, Graph]]:
    """The program's graphs by dotted path: the top one (path "") and those of every graph module nested in it."""
    return [(path, module.graph) for path, module in graph_modules(top_module(program))]


def graph_modules(top: torch.nn.Module) -> Iterator[tuple[str, GraphModule]]:
    return ((path, module) for path, module in top.named_modules() if isinstance(module, GraphModule))


def state_names(program: Program) -> dict[Node, str]:
    """What each node that brings in state is called outside: a parameter's or buffer's FQN, a user input's name.

    Placeholders of nested graphs are called as the operand they are bound to.
    """
    names: dict[Node, str] = {}
    inputs = input_specs(program)
    modules = list(graph_modules(top_module(program)))
    for path, module in modules:
        graph = module.graph
        for node in graph.find_nodes(op="placeholder") if not path else ():
            spec = inputs.get(node.name)
            names[node] = node.name if spec is None or spec.target is None else spec.target
        for node in graph.find_nodes(op="get_attr"):
            names[node] = f"{path}.{node.target}" if path else str(node.target)
        for node in callers_in(module) if len(modules) > 1 else ():
            for placeholder, operand in bindings(module, node):
                if operand in names:
                    names.setdefault(placeholder, names[operand])
    return names


def callers_in(module: GraphModule) -> list[Node]:
    """The nodes that call a nested graph module, in order, by `call_module` or as an operand."""
    graph, nested = module.graph, {path for path, _ in graph_modules(module) if path}
    held = [n for n in graph.find_nodes(op="get_attr") if n.target in nested] if nested else []
    return sorted({*graph.find_nodes(op="call_module"), *(user for n in held for user in n.users)})


def bindings(module: GraphModule, node: Node) -> Iterator[tuple[Node, Node]]:
    """What a call of nested graphs binds to their placeholders: as far as we know every one takes its operands last."""
    operands: list[Node] = [n for n in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(n, Node)]
    for _, nested in called_by(module, node):
        placeholders = nested.graph.find_nodes(op="placeholder")
        if len(placeholders) <= len(operands):
            yield from zip(placeholders, operands[len(operands) - len(placeholders) :], strict=True)


def called_by(module: GraphModule, node: Node) -> list[tuple[str, GraphModule]]:
    """The nested graph modules that a node calls, by the name that its module gives them."""
    called = [n for n in node.all_input_nodes if n.op == "get_attr"] if node.op != "call_module" else [node]
    found = [(str(n.target), attribute(module, str(n.target))) for n in called]
    return [(name, nested) for name, nested in found if isinstance(nested, GraphModule)]


def attribute(module: torch.nn.Module, target: str) -> Any:
    value: Any = module
    for atom in target.split("."):
        value = getattr(value, atom, None)
    return value
