"""Legalize: every batch norm as one consumer takes it, from any form, the op family included."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch.export import ExportedProgram

from ...decomps.backends.rules import Backend
from ...decomps.backends.selection import explain_backend
from ...decomps.forms import FIELDS, Form, Statistics
from ...errors import InvalidChoice
from ..graph.draft import Draft
from ..graph.options import NO_FLAG, Command, Keeps, flag
from ..graph.result import Declined, Edit, Program, Result, top_module
from ..graph.signature import is_functional
from .dialect import to_functional, to_training
from .elementary import unwritable, write_elementary
from .site import Site, find_gradients, find_sites, read_site
from .targets import NATIVE_GRADIENT, TARGETS, Target, row_of
from .updates import Inputs
from .writing import forward_of, roles_kept, write_gradient, write_site

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
        draft = Draft(program, self.inplace)
        inputs = Inputs(program) if isinstance(program, ExportedProgram) else None
        edits: list[Edit] = []
        declined: list[Declined] = []
        if reason := self._change_dialect(draft, inputs, target, edits):
            return Result(program, (), (Declined("program", "", "", reason),))
        if target.form is None:
            _write_formulas(draft, inputs, edits, declined)
            return Result(draft.build() if edits else program, tuple(edits), tuple(declined))
        for site in find_gradients(draft.graphs):
            _apply(draft, site, target, edits, declined)
        for site in find_sites(draft.graphs):
            form = site.form if site.norm is None else target.form(site, draft.functional)
            reason = site.problem or _obstacle(site, form, draft.functional, target.pins)
            if not reason and draft.functional and inputs is not None and _hides(site, form):
                reason = inputs.unlistable_update(site)
            if reason:
                declined.append(Declined(site.name, site.module, site.form.name, reason))
            elif form is not site.form:
                edits.append(Edit(site.name, site.module, site.form.name, form.name))
                write_site(draft, site, site.norm, form)
        if self.target == "composite":
            edits += _set_cudnn_enabled(draft, self.cudnn_enabled, {edit.site for edit in edits})
        return Result(draft.build() if edits else program, tuple(edits), tuple(declined))

    def _change_dialect(self, draft: Draft, inputs: Inputs | None, target: Target, edits: list[Edit]) -> str:
        if inputs is None or target.dialect is None:
            return ""
        functional = is_functional(draft.program)
        if functional is (target.dialect == "functional"):
            return ""
        reason = to_functional(draft, inputs) if target.dialect == "functional" else to_training(draft, edits)
        if reason:
            return f"it cannot be made a {target.dialect} program: {reason}"
        before = "functional" if functional else "training"
        edits.append(Edit("program", "", before, target.dialect))
        return ""


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


def _write_formulas(draft: Draft, inputs: Inputs | None, edits: list[Edit], declined: list[Declined]) -> None:
    """Every gradient and every forward as elementary operations."""
    for find in (find_gradients, find_sites):
        for site in find(draft.graphs):
            reason = site.problem or unwritable(site)
            if not reason and draft.functional and inputs is not None and _writes(site):
                reason = inputs.unlistable_update(site)
            if reason:
                declined.append(Declined(site.name, site.module, site.form.name, reason))
                continue
            edits.append(Edit(site.name, site.module, site.form.name, "elementary operations"))
            write_elementary(draft, site)


def _hides(site: Site, form: Form) -> bool:
    """Whether a write that is not listed has to become a mutation output."""
    return _writes(site) and form.statistics is Statistics.OUTPUTS


def _writes(site: Site) -> bool:
    norm = site.norm
    return bool(norm.training and site.form.statistics is Statistics.IN_PLACE and norm.running_mean is not None)


def _gradient_form(site: Site, target: Target) -> Form:
    """The row of a gradient: the target's, but PyTorch's own for running statistics, which no library has."""
    if target.gradient is None or site.norm is None:
        return site.form
    return row_of(target.gradient if site.norm.training else NATIVE_GRADIENT)


def _apply(draft: Draft, site: Site, target: Target, edits: list[Edit], declined: list[Declined]) -> None:
    form = _gradient_form(site, target)
    if form is site.form:
        return
    reason = site.problem or ("it writes to its out arguments" if site.form.destinations else "")
    if not reason and form.name.startswith("aten.cudnn") and site.norm.reserve is None:
        reason = "it has no reserve, which cuDNN's gradient reads: its forward left none"
    if not reason and form.name.startswith(("aten.cudnn", "aten.miopen")) and not all(site.norm.output_mask):
        reason = f"{form.name} computes all three gradients, and its output_mask asks for some"
    if not reason and target.pins is not None and site.norm.training:
        reason = _unpinned(site, target, draft.functional)
    if reason:
        declined.append(Declined(site.name, site.module, site.form.name, reason))
        return
    edits.append(Edit(site.name, site.module, site.form.name, form.name))
    write_gradient(draft, site, site.norm, form)


def _unpinned(site: Site, target: Target, functional: bool) -> str:
    """Why a gradient cannot be one library's: its forward, which has to be the same one's, will not be."""
    made = forward_of(site.norm)
    if made is None or target.form is None:
        return "its forward is not in the graph, and which kernel ran it is not known"
    forward = read_site(made, site.path)
    if forward.norm is None:
        return forward.problem
    reason = _obstacle(forward, target.form(forward, functional), functional, target.pins, free=("reserve",))
    return f"its forward cannot be pinned: {reason}" if reason else ""


def _obstacle(site: Site, form: Form, functional: bool, pins: Backend | None, free: tuple[str, ...] = ()) -> str:
    """Why a site that can be read cannot be written as a row, empty when it can. `free`: outputs to overlook."""
    norm = site.norm
    if norm is None or form is site.form:
        return ""
    if site.form.destinations:
        return f"{site.form.name} writes to its out arguments, which {form.name} does not have"
    if functional and form.hides_update and norm.training and norm.running_mean is not None:
        return f"{form.name} writes its statistics, which a functional program does not allow: legalize it to training"
    kept = roles_kept(site.form, norm, form)
    rebuilt = () if norm.training else ("save_mean", "save_invstd", "new_running_mean", "new_running_var")
    moved = ("new_running_mean", "new_running_var") if form.statistics is Statistics.IN_PLACE else ()
    for role in site.outputs:
        if site.used(role) and role not in (*kept, *rebuilt, *moved, *free):
            return f"its {role} is read, which {form.name} does not return"
    if moved and norm.training and site.form.statistics is Statistics.OUTPUTS and norm.running_mean is not None:
        return f"{site.form.name} leaves its statistics as they were, and {form.name} writes them"
    if pins is not None:
        return _forbidden(site, pins)
    return ""


def _forbidden(site: Site, pins: Backend) -> str:
    """The rules of a library that a site breaks, where its shape is known, empty when none."""
    norm = site.norm
    vals: dict[str, Any] = {f: getattr(getattr(norm, f), "meta", {}).get("val") for f in FIELDS[:5]}
    if not isinstance(vals["input"], torch.Tensor):
        return f"the shape of its input is not known, and {pins.value} has rules"
    device = {Backend.CUDNN: "cuda", Backend.MIOPEN: "hip"}[pins]
    why = explain_backend(**vals, training=norm.training, eps=norm.eps, device=device)
    return "" if why.backend is pins else f"{pins.value} cannot run it: {why.reason}"


def _set_cudnn_enabled(draft: Draft, enabled: bool, written: set[str]) -> list[Edit]:
    """Sets the argument on every `aten.batch_norm`; edits of those that were not written just now."""
    edits = []
    for site in find_sites(draft.graphs):
        node, name = site.node, site.form.name
        if site.form.overload is not aten.batch_norm.default:
            continue
        given = node.kwargs["cudnn_enabled"] if "cudnn_enabled" in node.kwargs else node.args[8]
        if given is enabled:
            continue
        if "cudnn_enabled" in node.kwargs:
            node.kwargs = {**node.kwargs, "cudnn_enabled": enabled}
        else:
            node.args = (*node.args[:8], enabled)
        if site.name not in written:
            edits.append(Edit(site.name, site.module, f"{name}, cudnn_enabled={given}", f"{name}, {enabled}"))
    return edits
