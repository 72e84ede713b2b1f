"""Tracing formulas on the values of a graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx


@dataclass(frozen=True)
class Traced:
    """A function as a graph. leaves: the placeholder of each operand by name; results: the node of each result."""

    graph: Graph
    leaves: Mapping[str, Node]
    results: Mapping[str, Node]

    def inline(self, before: Node, operands: Mapping[str, Node], meta: Mapping[str, Any]) -> dict[str, Node]:
        """Copies the operations ahead of a node, reading these operands; returns the node of each result by name."""
        copied = {leaf: operands[name] for name, leaf in self.leaves.items()}
        with before.graph.inserting_before(before):
            for inner in self.graph.nodes:
                if inner.op == "call_function":
                    copied[inner] = before.graph.node_copy(inner, copied.__getitem__)
                    copied[inner].meta = {**meta, "val": inner.meta["val"]}
        return {name: copied[node] for name, node in self.results.items()}


def trace(
    function: Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]], values: Mapping[str, torch.Tensor]
) -> Traced:
    """The operations by which a function of tensors by name makes tensors by name, on values like these."""
    named: list[str] = []

    def traced(*tensors: torch.Tensor) -> list[torch.Tensor]:
        found = function(dict(zip(values, tensors, strict=True)))
        named[:] = found  # which results there are is known once it has run: a graph returns them by place
        return list(found.values())

    with torch.no_grad():  # a gradient of the formula is not asked for, and would be traced with it
        graph = make_fx(traced, _allow_non_fake_inputs=True)(*in_one_mode(list(values.values()))).graph
    leaves = dict(zip(values, graph.find_nodes(op="placeholder"), strict=True))
    returned: Any = graph.output_node().args[0]
    return Traced(graph, leaves, dict(zip(named, returned, strict=True)))


def in_one_mode(values: Sequence[Any]) -> list[Any]:
    """The values as fake tensors of one mode: a graph that was traced from real tensors has one for each."""
    modes = [value.fake_mode for value in values if isinstance(value, FakeTensor)]
    if all(mode is modes[0] for mode in modes):
        return list(values)
    with modes[0]:
        return [torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device) for v in values]
