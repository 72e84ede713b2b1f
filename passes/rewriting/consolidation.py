"""Consolidate: every legacy batch-norm node becomes the op family whose kernel is chosen when the program runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain
from typing import Any, ClassVar

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from ...decomps.forms import GRADIENT_BY_TARGET, BatchNorm, Dialect, Form, Gradient, Statistics, family_form
from ..graph.draft import Draft
from ..graph.nest import graphs_of
from ..graph.options import NO_FLAG, Command, Keeps
from ..graph.result import Declined, Edit, Program, Result
from ..graph.signature import is_functional
from .site import Site, find_gradients, find_sites
from .updates import Inputs
from .writing import wire_reserve, write_gradient, write_site

aten = torch.ops.aten


@dataclass(frozen=True)
class Consolidate:
    """Rewrites every batch norm into `_batch_norm_with_update(_functional)` or `_batch_norm_no_update`, its gradient
    into `batch_norm_backward`, with the reserve of its forward when that is in the graph.

    inplace: edit the given program instead of a copy that shares its weights.

    Outputs, statistics, gradients, signature and metadata stay as they are; a site for which that cannot be promised
    is declined with a reason. What the family itself refuses, the rewritten program refuses too: an empty batch in
    training (a dynamic batch may be one), `torch.func.vmap` over an op that writes in place. The saved statistics of
    an eval site, where something reads them, get the shape [C] that they have everywhere but on CPU (pytorch#100985).
    Source: pytorch#116092.
    """

    command: ClassVar[Command] = Command("consolidate", "-o consolidated.pt2 --report", Keeps.BITS)

    inplace: bool = field(default=False, metadata=NO_FLAG)

    def __call__(self, program: Program) -> Result:
        """Consolidates an ExportedProgram (training IR or ATEN dialect) or a GraphModule, nested graphs included.

        Raises: InvalidProgram for anything else.
        """
        inputs = Inputs(program) if isinstance(program, ExportedProgram) and is_functional(program) else None
        graphs = graphs_of(program)
        if all(site.form.dialect is Dialect.FAMILY for site in chain(find_sites(graphs), find_gradients(graphs))):
            return Result(program)
        draft = Draft(program, self.inplace)
        edits: list[Edit] = []
        declined: list[Declined] = []
        gradients = _gradients(draft, edits, declined)
        for site in find_sites(draft.graphs):
            plan = _plan(site, inputs)
            if isinstance(plan, Edit) and site.norm is not None:
                edits.append(plan)
                write_site(draft, site, site.norm, family_target(site.form, site.norm, draft.functional))
            elif isinstance(plan, Declined):
                declined.append(plan)
        for call, norm in gradients:
            wire_reserve(draft, call, norm)
        return Result(draft.build() if edits else program, tuple(edits), tuple(declined))


def consolidate(program: Any, *, inplace: bool = False) -> Any:
    """Returns the program with every legacy batch-norm node rewritten into the op family.

    program: an ExportedProgram in training IR or ATEN dialect, or a GraphModule; nested graphs are included. The
    result shares its weights; unless `inplace`, the input is left as it was. A program that has nothing to rewrite is
    returned as it is. `Consolidate()(program)` also tells what was edited and what was declined, and why.

    Raises: InvalidProgram when program is neither.

    >>> exported = torch.export.export(torch.nn.BatchNorm1d(3), (torch.randn(2, 3),))
    >>> [n.name for n in consolidate(exported).graph.nodes if "batch_norm" in str(n.target)]
    ['_batch_norm_with_update']
    """
    return Consolidate(inplace=inplace)(program).program


def _gradients(draft: Draft, edits: list[Edit], declined: list[Declined]) -> list[tuple[Node, Gradient]]:
    """Rewrites every gradient, ahead of the forwards, whose impl_index and vendor's reserve then are free; returns
    those that have no reserve yet.
    """
    unwired = []
    for site in find_gradients(draft.graphs):
        if site.form.dialect is Dialect.FAMILY:
            continue
        reason = site.problem or _unwritable(site, draft.functional)
        if reason or site.norm is None:
            declined.append(Declined(site.name, site.module, site.form.name, reason))
            continue
        edits.append(Edit(site.name, site.module, site.form.name, _GRADIENT.name))
        call = write_gradient(draft, site, site.norm, _GRADIENT)
        if site.norm.reserve is None:
            unwired.append((call, site.norm))
    return unwired


def _unwritable(site: Site, functional: bool) -> str:
    """Why the out arguments of a gradient cannot be copied to, empty when they can, or there are none."""
    if site.norm is None or not site.norm.out:
        return ""
    if functional:
        return f"{site.form.name} writes to its out arguments, which a functional program does not allow"
    if not all(site.norm.output_mask):
        return "its output_mask leaves out arguments unwritten"
    shapes = [_shape(site.norm.input), *[(_shape(site.norm.input) or (None, None))[1:2]] * 2]
    if None in shapes or [_shape(place) for place in site.norm.out.values()] != shapes:
        return "its out arguments may be resized, and into which layout differs by form: allocate them in full"
    return ""


_GRADIENT = GRADIENT_BY_TARGET[aten.batch_norm_backward.default][0]


# Plan: what becomes of each site.


def _plan(site: Site, inputs: Inputs | None) -> Edit | Declined | None:
    """An Edit, a Declined, or None for a site that is the family's already.

    inputs: what the program takes when it is functional, else None.
    """
    if site.form.dialect is Dialect.FAMILY:
        return None
    reason = site.problem or _obstacle(site, inputs)
    if reason or site.norm is None:
        return Declined(site.name, site.module, site.form.name, reason)
    target = family_target(site.form, site.norm, inputs is not None)
    return Edit(site.name, site.module, site.form.name, target.name)


def family_target(form: Form, norm: BatchNorm, functional: bool) -> Form:
    """The family's row for a record: in place where the form writes and the program may, else functional."""
    out = bool(form.destinations)
    if not norm.training:
        return family_form(False, Statistics.NONE, out)
    writes = norm.running_mean is not None and form.statistics is Statistics.IN_PLACE and not functional
    return family_form(True, Statistics.IN_PLACE if writes or out else Statistics.OUTPUTS, out)


def _obstacle(site: Site, inputs: Inputs | None) -> str:
    """Why a site that can be read cannot be rewritten exactly, empty when it can."""
    norm, form = site.norm, site.form
    if norm is None:
        return ""
    if site.used("impl_index"):
        return "its impl_index is in use: it names a kernel, and the family picks one only when the program runs"
    for reader in (user for holder in site.outputs.get("reserve", ()) for user in holder.users):
        if reader.target is not aten.batch_norm_backward.default:
            return f"its reserve is read by {reader.name} ({reader.target}), which expects {form.name}'s own layout"
    if norm.training and 0 in (_shape(norm.input) or ()):
        return "its batch is empty, which the family refuses in training"
    if form.destinations and inputs is not None:
        return f"{form.name} writes to its out arguments, which a functional program does not allow"
    if form.destinations and not norm.training:
        if site.used("save_mean") or site.used("save_invstd"):
            return "its saved statistics are read back from an out argument, whose shape in eval differs by device"
        if _shape(norm.out["out"]) is None or _shape(norm.out["out"]) != _shape(norm.input):
            return "its out argument may be resized, and into which layout differs by form: allocate it in full"
    writes = norm.training and norm.running_mean is not None and form.statistics is Statistics.IN_PLACE
    if inputs is not None and writes:
        return inputs.unlistable_update(site)
    return ""


def _shape(node: Node) -> torch.Size | None:
    val = node.meta.get("val")
    return val.shape if isinstance(val, torch.Tensor) else None
