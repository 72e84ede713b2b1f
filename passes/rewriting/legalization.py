"""Legalize: every batch norm as one consumer takes it, from any form, the op family included."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any, ClassVar

import torch
from torch.export import ExportedProgram

from ...decomps.backends.rules import Vendor
from ...decomps.backends.selection import explain_backend
from ...decomps.forms import FIELDS, UPDATED, Form, Statistics
from ...errors import InvalidChoice
from ..graph.draft import Draft
from ..graph.meta import val_of
from ..graph.options import NO_FLAG, Command, Keeps, flag
from ..graph.result import PROGRAM, Log, Program, Reason, Result, top_module
from .completion import REBUILT
from .dialect import to_functional, to_training
from .elementary import refuse_elementary, write_elementary
from .site import Call, GradientSite, Site, find_gradients, find_sites, read_site
from .targets import NATIVE_GRADIENT, TARGETS, Target, row_of
from .updates import Inputs
from .writing import forward_of, rewrite, roles_kept, write_gradient, write_site

aten = torch.ops.aten


@dataclass(frozen=True)
class Legalize:
    """Rewrites every batch norm, of any form, into what a consumer takes.

    target: the consumer, a row of TARGETS. cudnn_enabled: the argument that "composite" writes. inplace: edit the given
    program.

    A site for which the target cannot say all that is read from it, or whose rules forbid it, is declined with a
    reason; a program whose dialect cannot be changed exactly is declined as a whole, under the name "program".
    """

    command: ClassVar[Command] = Command("legalize", "--to core_aten -o core.pt2", Keeps.ROUNDING)

    target: str = field(metadata=flag("--to", choices={name: target.meaning for name, target in TARGETS.items()}))
    cudnn_enabled: bool = True
    inplace: bool = field(default=False, metadata=NO_FLAG)

    @property
    def keeps(self) -> Keeps:
        """What this target leaves of the numbers: elementary operations round otherwise than a kernel."""
        return Keeps.ROUNDING if TARGETS[self.target].form is None else Keeps.BITS

    def __call__(self, program: Program) -> Result:
        """Legalizes an ExportedProgram or a GraphModule, nested graphs included.

        Raises: InvalidChoice for an unknown target, InvalidProgram for anything else than a program.
        """
        if self.target not in TARGETS:
            raise InvalidChoice(f"found target {self.target!r}, expected one of {', '.join(TARGETS)}")
        top_module(program)
        target = TARGETS[self.target]
        draft, log = Draft(program, self.inplace), Log()
        inputs = Inputs(program) if isinstance(program, ExportedProgram) else None
        # The dialect first, and all or nothing: which row a site is written as depends on whether mutations are listed.
        if reason := _change_dialect(draft, inputs, target, log):
            log.decline(PROGRAM, reason)
        elif target.form is None:
            _write_formulas(draft, inputs, log)
        else:
            _write_forms(draft, inputs, target, log)
        # torch.export writes False into every batch_norm, on CUDA too: cuDNN is kept out until that is set
        if self.target == "composite" and not reason:
            _set_cudnn_enabled(draft, self.cudnn_enabled, log)
        return log.result(draft.build() if log.edits else program)


def legalize(program: Any, target: str, *, cudnn_enabled: bool = True, inplace: bool = False) -> Any:
    """Returns the program with every batch norm as a consumer takes it. Arguments as `Legalize`, which also tells what
    was edited and declined.

    target: "core_aten" (the edge verifier, ONNX), "composite" (`aten.batch_norm`), "training" (a decomposed program
    made trainable again), "functional" (mutations listed, without retracing), "native", "cudnn", "miopen" (pinned
    kernels), "math" (elementary operations, equal up to rounding; everything else is exact).

    Raises: InvalidChoice listing the targets, InvalidProgram for anything else than a program.

    >>> exported = torch.export.export(torch.nn.BatchNorm1d(3).eval(), (torch.randn(2, 3),))
    >>> [n.name for n in legalize(exported, "core_aten").graph.nodes if "batch_norm" in str(n.target)]
    ['_native_batch_norm_legit_no_training']
    """
    return Legalize(target, cudnn_enabled, inplace)(program).program


def _change_dialect(draft: Draft, inputs: Inputs | None, target: Target, log: Log) -> Reason:
    """Makes the program one of the target's dialect; returns why that cannot be done."""
    wanted, found = target.dialect, "functional" if draft.functional else "training"
    # a GraphModule has no signature: nothing lists its mutations, and any target will do
    if inputs is None or wanted in (None, found):
        return Reason()
    reason = to_functional(draft, inputs) if wanted == "functional" else to_training(draft, log)
    if reason:
        return reason.inside(f"it cannot be made a {wanted} program: {{}}")
    log.edit(PROGRAM, found, str(wanted))
    return reason


def _write_formulas(draft: Draft, inputs: Inputs | None, log: Log) -> None:
    """Every gradient and every forward as elementary operations."""
    # gradients first: the reserve of a forward, which operations do not have, has no reader left then
    sites: Iterable[Call] = chain(find_gradients(draft.graphs), find_sites(draft.graphs))
    for site in sites:
        reason = site.problem or refuse_elementary(site)
        if not reason and draft.functional and inputs is not None and site.writes:
            reason = inputs.refuse_update(site)
        if reason:
            log.decline(site, reason)
        else:
            log.edit(site, site.form.name, "elementary operations")
            write_elementary(draft, site)


def _write_forms(draft: Draft, inputs: Inputs | None, target: Target, log: Log) -> None:
    """Every gradient and every forward as the target's row for it."""
    functional = draft.functional

    def gradient(site: GradientSite) -> Form | str:
        form = _gradient_form(site, target)
        return form if form is site.form else _refuse_gradient(site, form, target, functional) or form

    def forward(site: Site) -> Form | str:
        if site.problem:
            return site.problem
        form = target.form(site, functional)  # type: ignore[misc]
        reason: str = _refuse_form(site, form, functional, target.pins)
        if not reason and functional and inputs is not None and site.writes and form.statistics is Statistics.OUTPUTS:
            reason = inputs.refuse_update(site)
        return reason or form

    # gradients first: whether one can be pinned is told from its forward as it was before
    rewrite(log, find_gradients(draft.graphs), gradient, partial(write_gradient, draft))
    rewrite(log, find_sites(draft.graphs), forward, partial(write_site, draft))


def _gradient_form(site: GradientSite, target: Target) -> Form:
    """The row of a gradient: the target's, but PyTorch's own for running statistics, which no library has."""
    if target.gradient is None:
        return site.form
    return row_of(target.gradient if site.norm.training else NATIVE_GRADIENT)


def _refuse_gradient(site: GradientSite, form: Form, target: Target, functional: bool) -> str:
    """Why a gradient cannot be written as a row, empty when it can."""
    if site.problem or site.form.destinations:
        return site.problem or Reason("it writes to its out arguments")
    # the gradients of libraries have no mask, and cuDNN's reads what its own forward laid aside
    if "reserve" in form.arguments and site.norm.reserve is None:
        return Reason(f"it has no reserve, which {form.name} reads: its forward left none")
    if "output_mask" not in form.arguments and not all(site.norm.output_mask):
        return Reason(f"{form.name} computes all three gradients, and its output_mask asks for some")
    return _refuse_pin(site, target, functional) if target.pins is not None and site.norm.training else ""


def _refuse_pin(site: GradientSite, target: Target, functional: bool) -> str:
    """Why a gradient cannot be one library's: its forward, which has to be the same one's, will not be."""
    # a library's gradient reads what its own forward saved: a reserve, statistics of its rounding
    made = forward_of(site.norm)
    if made is None or target.form is None:
        return Reason("its forward is not in the graph, and which kernel ran it is not known")
    forward = read_site(made, site.path)
    if forward.problem:
        return Reason(f"its forward cannot be pinned: {forward.problem}")
    reason = _refuse_form(forward, target.form(forward, functional), functional, target.pins, free=("reserve",))
    return reason and reason.inside("its forward cannot be pinned: {}")


def _refuse_form(site: Site, form: Form, functional: bool, pins: Vendor | None, free: tuple[str, ...] = ()) -> Reason:
    """Why a site that can be read cannot be written as a row, empty when it can. `free`: outputs to overlook."""
    norm = site.norm
    if form is site.form:  # as it is: no rule has a say, as nothing is changed
        return Reason()
    if site.form.destinations:
        return Reason(f"{site.form.name} writes to its out arguments, which {form.name} does not have")
    # torch's verifier does not see a write that the schema hides: the program would pass, with a mutation unlisted
    if functional and form.hides_update and norm.training and norm.running_mean is not None:
        told = f"{form.name} writes its statistics, which a functional program does not allow"
        return Reason(told, "legalize it to training")
    return _refuse_outputs(site, form, free) or (Reason() if pins is None else _refuse_library(site, pins))


def _refuse_outputs(site: Site, form: Form, free: tuple[str, ...]) -> Reason:
    """Why a row does not return what is read of a site, or writes what the site did not."""
    norm = site.norm
    moved = UPDATED if form.statistics is Statistics.IN_PLACE and norm.running_mean is not None else ()
    rebuilt = () if norm.training else REBUILT
    # new statistics are read where a form writes them, and rebuilt from the running ones where nothing changes those
    known = (*roles_kept(site.form, norm, form), *rebuilt, *moved, *free)
    lost = next((role for role in site.outputs if site.used(role) and role not in known), None)
    if lost is not None:
        return Reason(f"its {lost} is read, which {form.name} does not return")
    if moved and norm.training and site.form.statistics is Statistics.OUTPUTS:
        return Reason(f"{site.form.name} leaves its statistics as they were, and {form.name} writes them")
    return Reason()


def _refuse_library(site: Site, pins: Vendor) -> Reason:
    """The rules of a library that a site breaks, where its shape is known, empty when none."""
    norm = site.norm
    vals: dict[str, Any] = {f: val_of(getattr(norm, f)) for f in FIELDS[:5]}
    if vals["input"] is None:
        return Reason(f"the shape of its input is not known, and {pins.name} has rules")
    why = explain_backend(**vals, training=norm.training, eps=norm.eps, device=pins.devices[0])
    return Reason("" if why.backend is pins.backend else f"{pins.name} cannot run it: {why.reason}")


def _set_cudnn_enabled(draft: Draft, enabled: bool, log: Log) -> None:
    """Sets the argument on every `aten.batch_norm`; logs those that were not written just now."""
    composite, written = row_of(aten.batch_norm.default), {edit.site for edit in log.edits}
    for site in find_sites(draft.graphs):
        # a site that was written just now is one edit, whatever the argument was
        given = site.norm.extras.get("cudnn_enabled", enabled)
        if site.form is composite and given is not enabled:
            changed = replace(site.norm, extras={**site.norm.extras, "cudnn_enabled": enabled})
            site.node.args, site.node.kwargs = composite.write(changed)
            if site.name not in written:
                log.edit(site, f"{composite.name}, cudnn_enabled={given}", f"{composite.name}, {enabled}")
