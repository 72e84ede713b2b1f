"""Consolidate: every legacy batch-norm node becomes the op family whose kernel is chosen when the program runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, ClassVar

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from ...decomps.counterparts import row_in
from ...decomps.forms import GRADIENT_BY_TARGET, Dialect, Form, Gradient
from ..graph.draft import Draft
from ..graph.nest import graphs_of
from ..graph.options import NO_FLAG, Command, Keeps
from ..graph.result import Log, Program, Reason, Result
from .site import GradientSite, Site, find_gradients, find_sites
from .updates import Inputs
from .writing import rewrite, wire_reserve, write_gradient, write_site

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
        graphs = graphs_of(program)
        # told from the program itself: a draft copies its graphs, and `consolidate` is run on everything
        if all(site.form.dialect is Dialect.FAMILY for site in chain(find_sites(graphs), find_gradients(graphs))):
            return Result(program)
        draft, log = Draft(program, self.inplace), Log()
        inputs = Inputs(program) if draft.functional and isinstance(program, ExportedProgram) else None
        unwired: list[tuple[Node, Gradient]] = []

        def write_backward(site: GradientSite, target: Form) -> None:
            call = write_gradient(draft, site, target)
            if site.norm.reserve is None:
                unwired.append((call, site.norm))

        # ahead of the forwards, whose impl_index and vendor's reserve then have no reader left
        rewrite(log, find_gradients(draft.graphs), lambda site: _plan_gradient(site, draft.functional), write_backward)
        rewrite(log, find_sites(draft.graphs), lambda site: _plan_forward(site, inputs), partial(write_site, draft))
        # last: which reserve there is, is known when the forwards are of the family
        for call, norm in unwired:
            wire_reserve(draft, call, norm)
        # every call stays where the old one was, what it reads anew is ahead of it, and what is rebuilt is behind it
        return log.result(draft.build(lint=False) if log.edits else program)


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


_GRADIENT = GRADIENT_BY_TARGET[aten.batch_norm_backward.default][0]


def _plan_gradient(site: GradientSite, functional: bool) -> Form | str:
    if site.form.dialect is Dialect.FAMILY:
        return site.form
    return site.problem or _refuse_backward(site, functional) or _GRADIENT


def _refuse_backward(site: GradientSite, functional: bool) -> Reason:
    """Why the out arguments of a gradient cannot be copied to, empty when they can, or there are none."""
    norm = site.norm
    if not norm.out:
        return Reason()
    if functional:
        return Reason(f"{site.form.name} writes to its out arguments, which a functional program does not allow")
    # The results are copied to where the old call wrote them: all three have to be there, in their final shape.
    if not all(norm.output_mask):
        return Reason("its output_mask leaves out arguments unwritten")
    shapes = [_shape(norm.input), *[(_shape(norm.input) or (None, None))[1:2]] * 2]
    if None in shapes or [_shape(place) for place in norm.out.values()] != shapes:
        return Reason("its out arguments may be resized, and into which layout differs by form", _ALLOCATE)
    return Reason()


_ALLOCATE = "allocate them in full"


def _plan_forward(site: Site, inputs: Inputs | None) -> Form | str:
    """What a site becomes, or why not. inputs: what the program takes when it is functional, else None."""
    if site.form.dialect is Dialect.FAMILY:
        return site.form
    if reason := site.problem or _refuse_family(site, inputs):
        return reason
    return row_in(Dialect.FAMILY, site.form, site.norm, inputs is not None, out=bool(site.form.destinations))


def _refuse_family(site: Site, inputs: Inputs | None) -> str:
    """Why a site that can be read cannot be rewritten exactly, empty when it can."""
    norm = site.norm
    if reason := _refuse_readers(site):
        return reason
    # known to be empty: the legacy ops return an empty output. A dynamic batch, which torch.export admits from 0 by
    # default, is rewritten, and the rewritten program raises when it is empty.
    if norm.training and 0 in (_shape(norm.input) or ()):
        return Reason("its batch is empty, which the family refuses in training")
    if site.form.destinations and (reason := _refuse_destinations(site, inputs is not None)):
        return reason
    return inputs.refuse_update(site) if inputs is not None and site.writes else ""


def _refuse_readers(site: Site) -> Reason:
    """Why the family cannot return what is read of a site: it means something to that kernel alone."""
    if site.used("impl_index"):
        return Reason(
            "its impl_index is in use: it names a kernel, and the family picks one only when the program runs"
        )
    # its own gradient reads it too, and was rewritten ahead of it: then that is no reader any more
    readers = (user for holder in site.outputs.get("reserve", ()) for user in holder.users)
    reader = next((user for user in readers if user.target is not _GRADIENT.overload), None)
    if reader is None:
        return Reason()
    return Reason(
        f"its reserve is read by {reader.name} ({reader.target}), which expects {site.form.name}'s own layout"
    )


def _refuse_destinations(site: Site, functional: bool) -> Reason:
    if functional:
        return Reason(f"{site.form.name} writes to its out arguments, which a functional program does not allow")
    if site.norm.training:
        return Reason()
    if site.used("save_mean") or site.used("save_invstd"):
        return Reason("its saved statistics are read back from an out argument, whose shape in eval differs by device")
    # the family's `.out` gives a destination that it resizes another layout than the legacy one does
    place = _shape(site.norm.out["out"])
    if place is None or place != _shape(site.norm.input):
        return Reason("its out argument may be resized, and into which layout differs by form", _ALLOCATE)
    return Reason()


def _shape(node: Node) -> torch.Size | None:
    val = node.meta.get("val")
    return val.shape if isinstance(val, torch.Tensor) else None
