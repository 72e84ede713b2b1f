"""Finding the batch norms of a graph: one `Site` a forward, one `GradientSite` a gradient, each read as its record."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

from torch.fx import Graph, Node

from ...decomps.forms import (
    BY_TARGET,
    GRADIENT_BY_TARGET,
    UPDATED,
    BatchNorm,
    Dialect,
    Form,
    Gradient,
    Statistics,
    form_of,
)
from ...decomps.ops import filled_with
from ...decomps.outputs import NEUTRAL, channels_of
from ..graph.meta import val_of
from .notes import note_of

Graphs = Iterable[tuple[str, Graph]]


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a batch norm, forward or gradient.

    node: the call. path: dotted path of the nested graph it lies in, empty at the top.
    form, norm: the row it was read by, and the record that it says; a record of nothing where an argument is missing.
    outputs: for each output role in use, the nodes that hold that output (the node itself when the op returns one
    tensor). problem: why the record does not say what is computed, empty when it does.
    """

    node: Node
    path: str
    form: Form
    norm: BatchNorm | Gradient
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
        return module_of(self.node)

    @property
    def owner(self) -> str:
        """The module, whichever call of it: torch.export names the second one of `bn` `bn@1`."""
        return re.sub(r"@\d+$", "", self.module)

    @property
    def writes(self) -> bool:
        """Whether its call writes its running statistics, whatever its schema says of that."""
        # the form says it, and not the schema: the legacy ops declare no write, and Python never sees one
        tracks = self.norm.running_mean is not None
        return tracks and self.form.statistics is Statistics.IN_PLACE and self.norm.training is True

    def used(self, role: str) -> bool:
        """Whether something reads this output."""
        return any(holder.users for holder in self.outputs.get(role, ()))


@dataclass(frozen=True, eq=False)
class Site(Call):
    """A forward."""

    norm: BatchNorm

    @property
    def tracks(self) -> bool:
        """Whether it can be read and has running statistics, which constants are not that are there for this call
        alone and whose update nothing reads: `decomposition_table()` fills them in, and can leave no note."""
        mean, var = self.norm.running_mean, self.norm.running_var
        # nearly always state, which is told at once; passes ask this of every site several times
        if mean is None or not (is_fill(mean, NEUTRAL["running_mean"]) and is_fill(var, NEUTRAL["running_var"])):
            return mean is not None
        if self.norm.training is not True or any(map(self.used, UPDATED)):
            return True
        return any({*constant.users} != {self.node} for constant in (mean, var))


@dataclass(frozen=True, eq=False)
class GradientSite(Call):
    """A gradient."""

    norm: Gradient


def module_of(node: Node) -> str:
    """Dotted path of the module that a node was traced from, empty when the graph does not say."""
    stack = node.meta.get("nn_module_stack")
    return str(list(stack.values())[-1][0]) if stack else ""


S = TypeVar("S", Site, GradientSite)


def find_sites(graphs: Graphs) -> Iterator[Site]:
    """Every batch norm of the graphs in the order in which it runs, each read when it is reached: a pass that edits
    while it iterates sees what its earlier edits made of a site.

    Costs a side-table look-up for each form and a sort of what is found, whatever the size of the graph.
    """
    return _found(graphs, BY_TARGET, read_site)


def find_gradients(graphs: Graphs) -> Iterator[GradientSite]:
    """Every gradient of a batch norm, as `find_sites` finds the forwards."""
    return _found(graphs, GRADIENT_BY_TARGET, read_gradient)


def find_nodes(graphs: Graphs) -> list[Node]:
    """The calls of every batch norm of the graphs, unread and in no order."""
    return [node for _, graph in graphs for node in _calls(graph, BY_TARGET)]


def _calls(graph: Graph, targets: Iterable[Any]) -> Iterator[Node]:
    # unsorted, as fx sorts what it finds of one target, and there are twenty
    return (node for target in targets for node in graph.find_nodes(op="call_function", target=target, sort=False))


def _found(graphs: Graphs, targets: Iterable[Any], read: Callable[[Node, str], S]) -> Iterator[S]:
    for path, graph in graphs:
        # fx's table has them in the order in which they were made: sorting compares places in the graph
        for node in sorted(_calls(graph, targets)):
            yield read(node, path)


def read_site(node: Node, path: str = "") -> Site:
    """The site of a call of one of the overloads in FORMS."""
    return _read(Site, node, path)


def read_gradient(node: Node, path: str = "") -> GradientSite:
    """The site of a call of one of the overloads in GRADIENTS."""
    return _read(GradientSite, node, path)


def _read(kind: type[S], node: Node, path: str) -> S:
    form = form_of(node.target, node.args, node.kwargs)  # type: ignore[arg-type]
    try:
        norm = _as_it_was(node, form, form.read(node.args, node.kwargs))
    except KeyError as absent:
        # an invalid call is a site with a problem: a pass declines it, and never falls over it
        nothing = form.record(*[None] * (len(fields(form.record)) - 2))
        return kind(node, path, form, nothing, problem=f"argument {absent.args[0]} is missing from the call")
    outputs, problem = _outputs(node, form)
    return kind(node, path, form, norm, outputs, problem or _unreadable(norm))


def _as_it_was(node: Node, form: Form, norm: Any) -> Any:
    """The record without the weight, bias or statistics that were only filled in because the family needs them.

    The note of what was filled in travels with metadata, and metadata is copied freely: it counts only on a call of the
    family, and only for an operand that is the constant that was filled in.
    """
    # the dialect first, which costs nothing: a note is validated whenever it is read
    noted = note_of(node).get("filled") if form.dialect is Dialect.FAMILY else None
    if not noted:
        return norm
    absent = [name for name, value in NEUTRAL.items() if name in noted and is_fill(getattr(norm, name, None), value)]
    return replace(norm, **dict.fromkeys(absent))


def is_fill(node: Any, value: int) -> bool:
    """Whether a node makes a tensor of this value alone, as written here or as decompositions rewrite it."""
    return isinstance(node, Node) and filled_with(node.target, node.args, node.kwargs) == value


def _outputs(node: Node, form: Form) -> tuple[dict[str, list[Node]], str]:
    """Who holds which output, and why that cannot be told."""
    if len(form.roles) == 1:
        return {form.roles[0]: [node]}, ""
    held: dict[str, list[Node]] = {}
    for user in node.users:
        # Some readers take several outputs at once: a slice, or the whole tuple, returned or handed to a nested call.
        # A bool is an int to Python, and an index nobody means.
        index = user.args[1] if user.target is operator.getitem and len(user.args) == 2 else None
        if type(index) is not int or not -len(form.roles) <= index < len(form.roles):
            return held, f"its outputs are read by {user.name} ({user.target}), which is not a getitem of one output"
        held.setdefault(form.roles[index], []).append(user)
    return held, ""


def _unreadable(norm: BatchNorm | Gradient) -> str:
    """Why the record does not say what is computed, empty when it does."""
    # What is known to be wrong is refused here, once, as the kernels of the family check little of it. What is not
    # known is taken to be right.
    val = val_of(norm.input)
    if val is not None and val.ndim < 2:
        return f"its input is of rank {val.ndim}, expected [N, C, *]"
    if val is not None and (wrong := _wrong_length(norm, val.shape[1])):
        return wrong
    # the family and core ATen say the mode by which overload it is: one that is computed when it runs has none there
    if type(norm.training) is not bool:
        return f"training is {_found_as(norm.training)}, not a literal True or False: the mode is not known"
    if type(norm.eps) not in (float, int):
        return f"eps is {_found_as(norm.eps)}, not a literal number"
    return _half_given(norm) if isinstance(norm, BatchNorm) else ""  # a gradient in training does without statistics


def _wrong_length(norm: BatchNorm | Gradient, width: Any) -> str:
    """The first of weight, bias and statistics that is known not to be [C]: some kernels of the family read on.

    width: how many channels the input is said to have, which may be stale.
    """
    vals = {name: val_of(getattr(norm, name, None)) for name in NEUTRAL}
    known = [(name, val.numel()) for name, val in vals.items() if val is not None]
    # nearly always all agree, and nothing has to be decided; a dynamic size is not compared, which would guard on it
    if type(width) is int and all(type(length) is int and length == width for _, length in known):
        return ""
    channels = channels_of(norm, val_of)
    for name, length in known if type(channels) is int else ():
        if length != channels:
            return f"{name} has {length} elements, expected {channels}, one for each channel of the input"
    return ""


def _half_given(norm: BatchNorm) -> str:
    """Which running statistics are missing that there have to be."""
    if (norm.running_mean is None) is not (norm.running_var is None):
        absent, given = ("running_mean", "running_var")[:: 1 if norm.running_mean is None else -1]
        return f"{absent} is None and {given} is {_found_as(getattr(norm, given))}: pass both or neither"
    # ATen looks at neither and reads a null pointer: on CPU that is a crash of the process
    if norm.running_mean is None and not norm.training:
        return "it normalises with running statistics and has none: eval without running_mean, running_var is undefined"
    return ""


def _found_as(value: object) -> str:
    return f"the value of node {value.name}" if isinstance(value, Node) else repr(value)
