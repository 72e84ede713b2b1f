"""The two passes that keep a batch norm whole through Inductor: it is marked before autograd, and called after it."""

from __future__ import annotations

import hashlib
import logging
import operator
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import version
from importlib.resources import files
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._ops import OpOverload
from torch.fx import Graph, Node
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ...decomps.counterparts import nearest
from ...decomps.forms import BY_TARGET, UPDATED, BatchNorm, Dialect, Statistics, form_of
from ...decomps.outputs import NEUTRAL, fill
from ..graph.result import Reason
from ..rewriting.site import Site, read_site
from .marks import kept

aten = torch.ops.aten


log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MarkKept(CustomGraphPass):
    """Before autograd: the batch norms to keep become ops that Inductor's tables do not decompose.

    keep: what was asked for, in words or as a function. chosen: whether it says so of a batch norm.
    """

    keep: str | Callable[[BatchNorm], bool]
    chosen: Callable[[BatchNorm], bool]

    def __call__(self, graph: Graph) -> None:
        found = _nodes(graph)
        transformed = bool(found) and any(map(_transforms, graph.nodes))
        for node in found:
            site = _called(node) if node.target in _CALLED else read_site(node)  # as earlier ones left it
            reason = "it is under a transform of torch.func" if transformed else _refuse_keeping(site)
            if not reason and not self.chosen(_values(site.norm)):
                reason = f"as keep={self.keep!r} says"
            log.info("%s is %s", site.node.name, f"left to Inductor: {reason}" if reason else "kept")
            if not reason:
                _write(site)

    def uuid(self) -> str | None:
        if not callable(self.keep):
            return _identity(self.keep)
        # None tells Inductor to cache nothing: what a function decides by cannot be seen from here
        own = getattr(self.keep, "uuid", None)
        return None if own is None else _identity(f"predicate {own()}")


@dataclass(frozen=True)
class CallKernels(CustomGraphPass):
    """In the joint graph, or the only one: what was marked becomes calls of the family."""

    def __call__(self, graph: Graph) -> None:
        for family, mark in kept().items():
            for node in graph.find_nodes(op="call_function", target=mark):
                _lower(family)
                node.target = family  # of the same schema: arguments and results stay

    def uuid(self) -> str:
        return _identity("")


@cache
def _identity(options: str) -> str:
    """What compiled code depends on besides its graph: the options, and this library to the letter.

    The files are found from the package's root, however deep this one lies: a search that finds none would say nothing.
    """
    package = str(files(__package__.partition(".")[0]))
    found = hashlib.sha256(f"{version('torch-batchnorm')} {options}".encode())
    folders = os.walk(package, followlinks=True)  # in a checkout, decomps and passes are links
    sources = sorted(Path(folder, name) for folder, _, names in folders for name in names if name.endswith(".py"))
    for source in sources:
        found.update(str(source.relative_to(package)).encode() + source.read_bytes())
    return found.hexdigest()


# The decision falls on this graph, which has shapes, layouts and modes: later, what is not kept would already have been
# opaque to Inductor. So a site that is not kept is never touched.
#
# Marking, in a graph that Dynamo or torch.export made: in place, not normalised, its values under either of two names.

_COMPOSITE = BY_TARGET[aten.batch_norm.default][0]


_FUNCTION = signature(torch.nn.functional.batch_norm)


_CALLED = (torch.nn.functional.batch_norm, torch.batch_norm)


def _nodes(graph: Graph) -> list[Node]:
    """The call of every batch norm, those that only Python knows by name too."""
    targets = (*_CALLED, *BY_TARGET)
    return [node for target in targets for node in graph.find_nodes(op="call_function", target=target)]


def _called(node: Node) -> Site:
    """The site of a call of `torch.nn.functional.batch_norm` or `torch.batch_norm`, read as `aten.batch_norm`."""
    if node.target is torch.batch_norm:
        norm = _COMPOSITE.read(node.args, node.kwargs)
    else:
        given = _FUNCTION.bind(*node.args, **node.kwargs)
        given.apply_defaults()
        norm = BatchNorm(**given.arguments)
    return Site(node, "", _COMPOSITE, norm, {"out": [node]})


def _transforms(node: Node) -> bool:
    """Whether a call is one of torch.func's, which asks for rules (vmap's, jvp's) that only ATen's own ops have."""
    # Dynamo writes them into the graph as calls of Python functions, around everything that is transformed
    return "_functorch" in (getattr(node.target, "__module__", None) or "")


def _refuse_keeping(site: Site) -> str:
    """Why a site cannot be kept, empty when it can."""
    norm, form = site.norm, site.form
    if site.problem:
        return site.problem
    if form.destinations:
        return Reason("it writes to its out arguments")
    if type(norm.training) is not bool or not {type(norm.momentum), type(norm.eps)} <= {float, int}:
        return Reason("its mode, momentum or eps is computed")
    if reason := _refuse_tensors(norm):
        return reason
    # what the family returns of it is another value, or means something to the legacy op's own gradient
    unkept = ["impl_index"] if norm.training else ["impl_index", *("save_mean", "save_invstd"), *UPDATED]
    unkept += [] if form.dialect is Dialect.FAMILY else ["reserve"]
    return Reason(next((f"its {role} is read" for role in unkept if site.used(role)), ""))


def _refuse_tensors(norm: BatchNorm) -> Reason:
    """Why the family cannot be called with the tensors of a record, as far as the graph knows them."""
    values = _values(norm)
    tensors = [getattr(values, name) for name in ("input", *NEUTRAL) if name not in norm.missing]
    if not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
        return Reason("the shape of one of its tensors is not known")
    if any(map(is_traceable_wrapper_subclass, tensors)):
        return Reason("one of its tensors is of a subclass, whose rules are for ATen's own ops")
    if norm.missing and type(_channels(norm)) is not int:
        return Reason(f"its channel count is dynamic, and its {norm.missing[0]} has to be filled in")
    return Reason("its batch is empty, which the family refuses in training" if 0 in values.input.shape else "")


def _value(node: Any) -> Any:
    """A node's value as torch.export or Dynamo noted it."""
    return node.meta.get("val", node.meta.get("example_value")) if isinstance(node, Node) else node


def _values(norm: BatchNorm) -> BatchNorm:
    return replace(norm, **{name: _value(getattr(norm, name)) for name in ("input", *NEUTRAL)})


def _write(site: Site) -> None:
    """Replaces the call by the marked op. That returns the new statistics, which go where the call wrote them."""
    node, norm, graph = site.node, site.norm, site.node.graph
    target = nearest(Dialect.FAMILY, norm.training, Statistics.OUTPUTS, out=False)
    with graph.inserting_before(node):
        filled = {name: fill(norm, name, _channels(norm), graph.call_function) for name in norm.missing}
        args, _ = target.write(replace(norm, **filled))
        call = graph.call_function(kept()[target.overload], args)
        # the values were the legacy call's: of another number of outputs
        call.meta = {key: value for key, value in node.meta.items() if key not in ("val", "example_value")}

        def output(role: str) -> Node:
            return graph.call_function(operator.getitem, (call, target.roles.index(role)))

        for role, holders in site.outputs.items():
            for holder in holders:
                held = output(role)
                held.meta = dict(holder.meta)
                holder.replace_all_uses_with(held)
        for role, statistic in zip(UPDATED, (norm.running_mean, norm.running_var), strict=True) if site.writes else ():
            graph.call_function(aten.copy_.default, (statistic, output(role)))
    for dead in {holder: None for holders in site.outputs.values() for holder in holders} | {node: None}:
        graph.erase_node(dead)


def _channels(norm: BatchNorm) -> Any:
    """How many channels there are: what is [C] may say it where the input's shape is dynamic."""
    # one is enough here, as Dynamo and torch.export noted these values just now: none is stale
    sizes = (_value(getattr(norm, name)).shape[0] for name in NEUTRAL if getattr(norm, name) is not None)
    return next(sizes, _value(norm.input).shape[1])


# Calling.


@cache
def _lower(family: OpOverload) -> None:
    """Lets Inductor call an op of the family. It has no lowering for one, as its own graphs never hold any."""
    from torch._inductor.lowering import lowerings, make_fallback

    if family not in lowerings:
        fallback: Any = make_fallback  # untyped
        fallback(family, layout_constraint=_one_layout, warn=False, override_decomp=True)


def _one_layout(node: Node, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """Hands a kernel its input in a memory format, the one that it has or nearly has, and grad_out in the same: then
    its results have it too, and no kernel takes its slow path.
    """
    from torch._inductor.ir import NHWC_STRIDE_ORDER, NHWDC_STRIDE_ORDER, ExternKernel

    fields = form_of(node.target, args, kwargs).arguments  # type: ignore[arg-type]
    input = args[fields.index("input")]
    rank = len(input.get_size())
    order = list(reversed(range(rank)))
    last = {4: NHWC_STRIDE_ORDER, 5: NHWDC_STRIDE_ORDER}.get(rank)
    layout = input.maybe_get_layout()
    if last and layout is not None and not layout.is_stride_ordered(order) and layout.is_stride_ordered(last):
        order = last
    given = [
        ExternKernel.require_stride_order(value, order) if field in ("input", "grad_out") else value
        for field, value in zip(fields, args, strict=True)
    ]
    return tuple(given), kwargs
