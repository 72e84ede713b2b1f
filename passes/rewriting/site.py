"""Finding the batch norms of a graph: one `Site` a node, read as a `BatchNorm` record."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Graph, Node

from ...decomps.forms import BY_TARGET, GRADIENT_BY_TARGET, BatchNorm, Dialect, Form, Gradient, Statistics, form_of
from ...decomps.outputs import NEUTRAL
from ..graph.journal import note_of


@dataclass(frozen=True, eq=False)
class Site:
    """One batch-norm node, forward (`find_sites`) or gradient (`find_gradients`).

    node: the call. path: dotted path of the nested graph it lies in, empty at the top.
    form, norm: the row it was read by, and the BatchNorm or Gradient that it says; norm is None when it cannot be read.
    outputs: for each output role in use, the nodes that hold that output (the node itself when the op returns one
    tensor). problem: why the site cannot be read, empty when it can.
    """

    node: Node
    path: str
    form: Form
    norm: Any
    outputs: dict[str, list[Node]] = field(default_factory=dict)
    problem: str = ""

    @property
    def name(self) -> str:
        """How messages call it: the node's name, after the path of its nested graph."""
        return f"{self.path}.{self.node.name}" if self.path else self.node.name

    @property
    def spelling(self) -> str:
        """The overload, as graphs print it."""
        return self.form.name

    @property
    def module(self) -> str:
        """Dotted path of the module that the batch norm was traced from, empty when the graph does not say."""
        stack = self.node.meta.get("nn_module_stack")
        return str(list(stack.values())[-1][0]) if stack else ""

    @property
    def owner(self) -> str:
        """The module, whichever call of it: torch.export names the second one of `bn` `bn@1`."""
        return re.sub(r"@\d+$", "", self.module)

    @property
    def tracks(self) -> bool:
        """Whether it can be read and has running statistics."""
        return self.norm is not None and self.norm.running_mean is not None

    @property
    def writes(self) -> bool:
        """Whether its call writes its running statistics, whatever its schema says of that."""
        return self.tracks and self.form.statistics is Statistics.IN_PLACE and self.norm.training is True

    def used(self, role: str) -> bool:
        """Whether something reads this output."""
        return any(holder.users for holder in self.outputs.get(role, ()))


def find_sites(graphs: Iterable[tuple[str, Graph]]) -> Iterator[Site]:
    """Every batch norm of the graphs in the order in which it runs, each read when it is reached: a pass that edits
    while it iterates sees what its earlier edits made of a site.

    Costs a side-table look-up for each form and a sort of what is found, whatever the size of the graph.
    """
    for path, graph in graphs:
        for node in sorted(find_nodes([(path, graph)])):
            yield read_site(node, path)


def find_nodes(graphs: Iterable[tuple[str, Graph]]) -> list[Node]:
    """The calls of every batch norm of the graphs, unread and in no order."""
    return [
        node
        for _, graph in graphs
        for target in BY_TARGET
        for node in graph.find_nodes(op="call_function", target=target)
    ]


def find_gradients(graphs: Iterable[tuple[str, Graph]]) -> Iterator[Site]:
    """Every gradient of a batch norm, as `find_sites` finds the forwards."""
    for path, graph in graphs:
        found = [node for target in GRADIENT_BY_TARGET for node in graph.find_nodes(op="call_function", target=target)]
        for node in sorted(found):
            yield read_gradient(node, path)


def read_gradient(node: Node, path: str = "") -> Site:
    """The site of a call of one of the overloads in GRADIENTS."""
    form = form_of(node.target, node.args, node.kwargs)  # type: ignore[arg-type]
    try:
        norm: Gradient = form.read(node.args, node.kwargs)
    except KeyError as absent:
        return Site(node, path, form, None, problem=f"argument {absent.args[0]} is missing from the call")
    if form.dialect is Dialect.FAMILY and "weight" in _filled(node) and is_fill(norm.weight, NEUTRAL["weight"]):
        norm = replace(norm, weight=None)
    outputs, problem = _outputs(node, form)
    if type(norm.training) is not bool or type(norm.eps) not in (float, int):
        problem = problem or f"{_found(norm.training)}, {_found(norm.eps)} are its mode and eps, not literals"
    val = norm.input.meta.get("val") if isinstance(norm.input, Node) else None
    if isinstance(val, torch.Tensor) and val.ndim < 2:
        problem = problem or f"its input is of rank {val.ndim}, expected [N, C, *]"
    return Site(node, path, form, norm, outputs, problem)


def _filled(node: Node) -> list[str]:
    """What the call's note says was filled in."""
    return note_of(node).get("filled") or []


def read_site(node: Node, path: str = "") -> Site:
    """The site of a call of one of the overloads in FORMS."""
    form = form_of(node.target, node.args, node.kwargs)  # type: ignore[arg-type]
    try:
        norm = _as_it_was(node, form, form.read(node.args, node.kwargs))
    except KeyError as absent:
        return Site(node, path, form, None, problem=f"argument {absent.args[0]} is missing from the call")
    outputs, problem = _outputs(node, form)
    return Site(node, path, form, norm, outputs, problem or _unreadable(norm))


def _as_it_was(node: Node, form: Form, norm: BatchNorm) -> BatchNorm:
    """The record without the weight, bias or statistics that were only filled in because the family needs them.

    The note of what was filled in travels with metadata, and metadata is copied freely: it counts only on a call of the
    family, and only for an operand that is the constant that was filled in.
    """
    noted = _filled(node) if form.dialect is Dialect.FAMILY else ()
    if not noted:
        return norm
    absent: dict[str, Any] = dict.fromkeys(f for f in noted if is_fill(getattr(norm, f), NEUTRAL[f]))
    return replace(norm, **absent)


def is_fill(node: Any, value: int) -> bool:
    """Whether a node makes a tensor of this value alone, as written here or as decompositions rewrite it."""
    op = getattr(getattr(node, "target", None), "_schema", None)
    if op is None:
        return False
    name = op.name.removeprefix("aten::")
    if name in ("full", "new_full"):
        return bool(node.args[-1] == value)
    return name in (("new_zeros", "zeros"), ("new_ones", "ones"))[value]


def _outputs(node: Node, form: Form) -> tuple[dict[str, list[Node]], str]:
    """Who holds which output, and why that cannot be told."""
    if len(form.roles) == 1:
        return {form.roles[0]: [node]}, ""
    held: dict[str, list[Node]] = {}
    for user in node.users:
        index = user.args[1] if user.target is operator.getitem and len(user.args) == 2 else None
        if type(index) is not int or not -len(form.roles) <= index < len(form.roles):
            return held, f"its outputs are read by {user.name} ({user.target}), which is not a getitem of one output"
        held.setdefault(form.roles[index], []).append(user)
    return held, ""


def _unreadable(norm: BatchNorm) -> str:
    """Why the record does not say what is computed, empty when it does."""
    val = norm.input.meta.get("val") if isinstance(norm.input, Node) else None
    if isinstance(val, torch.Tensor):
        if val.ndim < 2:
            return f"its input is of rank {val.ndim}, expected [N, C, *]"
        if wrong := _wrong_length(norm, val.shape[1]):
            return wrong
    if type(norm.training) is not bool:
        return f"training is {_found(norm.training)}, not a literal True or False: the mode is not known"
    if type(norm.eps) not in (float, int):
        return f"eps is {_found(norm.eps)}, not a literal number"
    if (norm.running_mean is None) is not (norm.running_var is None):
        absent, given = ("running_mean", "running_var")[:: 1 if norm.running_mean is None else -1]
        return f"{absent} is None and {given} is {_found(getattr(norm, given))}: pass both or neither"
    if norm.running_mean is None and not norm.training:
        return "it normalises with running statistics and has none: eval without running_mean, running_var is undefined"
    return ""


def _wrong_length(norm: BatchNorm, channels: Any) -> str:
    """The first of weight, bias and statistics that is known not to be [C]: some kernels of the family read on."""
    for name in NEUTRAL:
        val = getattr(getattr(norm, name), "meta", {}).get("val")
        if not isinstance(val, torch.Tensor) or type(channels) is not int or val.numel() == channels:
            continue
        return f"{name} has {val.numel()} elements, expected {channels}, one for each channel of the input"
    return ""


def _found(value: object) -> str:
    return f"the value of node {value.name}" if isinstance(value, Node) else repr(value)
