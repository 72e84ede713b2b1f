"""Copies of graphs and of the modules that hold them, under the same names, sharing tensors."""

from __future__ import annotations

import copy
from types import MethodType
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node


def copy_module(module: Any, graphs: dict[int, Graph], made: dict[int, torch.nn.Module]) -> Any:
    """A module with the new graphs in place of the old: what holds no graph is shared, what holds one is rebuilt.

    torch's own deep copy of a GraphModule loses hooks, attributes, tied names and which buffers are persistent, and
    fails on what cannot be copied. Here only the containers of a module's state are new.

    graphs: the new graph by the id of the old. made: the copies so far, by the id of the original.
    """
    if not any(isinstance(nested, GraphModule) for nested in module.modules()):
        return module
    # one module under two paths stays one: tied tensors, and calls by either name, go by it
    if id(module) in made:
        return made[id(module)]
    kind: Any = type(module)
    new = kind.__new__(kind)  # a class of its own for each graph module, which holds its forward
    made[id(module)] = new
    new.__class__.__name__ = kind.__name__
    for name, value in module.__dict__.items():
        # the `train` and `eval` of an unlifted program are such: those of the original would act on the original
        if isinstance(value, MethodType) and value.__self__ is module:
            value = MethodType(value.__func__, new)
        new.__dict__[name] = copy.copy(value) if isinstance(value, dict | set | list) else value
    for name, child in module._modules.items():
        new._modules[name] = None if child is None else copy_module(child, graphs, made)
    if isinstance(new, GraphModule):
        new.graph = graphs[id(module.graph)]  # which compiles it
    return new


def copy_graph(graph: Graph) -> Graph:
    """A copy of the graph under the same node names, metadata shared node by node.

    torch's own copy renames what shadows a builtin (`input` becomes `input_1`), which breaks every signature.
    """
    nodes: dict[Node, Node] = {}
    copied = Graph(tracer_cls=graph._tracer_cls)
    returned: Any = copied.graph_copy(graph, nodes, return_output_node=True)
    copied._codegen = copy.copy(graph._codegen)  # not part of a graph's copy: how arguments are flattened
    if returned is not None:
        value, end = returned
        nodes[end] = copied.output(value, type_expr=end.type)
        nodes[end].meta = copy.copy(end.meta)
    for old, new in nodes.items():
        if old.name != new.name:
            new.name = old.name
    return copied
