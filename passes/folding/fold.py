"""Fold: batch norms in eval go into the weights of the convolutions and linear maps beside them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from ...decomps.affine import LIMITS
from ...decomps.forms import UPDATED
from ...errors import InvalidChoice
from ..graph.constants import quantization
from ..graph.draft import Draft
from ..graph.meta import same_sizes, sizes_of, val_of
from ..graph.nest import graphs_of
from ..graph.options import NO_FLAG, Command, Keeps, flag
from ..graph.result import Log, Program, Reason, Result
from ..graph.state import State
from ..rewriting.site import Site, find_nodes, find_sites
from ..rewriting.trains import find_random, is_training
from .plan import Plan
from .weights import EXPECTED
from .writing import Writing, returned_as_they_are

ALONE = ("leave", "multiply_add", "depthwise")


@dataclass(frozen=True)
class Fold:
    """Folds every batch norm in eval into the layer that makes its input, else into those that read its output.

    clone_calls: a layer whose output something else reads too is called once more, with weights of its own.
    clone_weights: a weight that several calls read is copied, once for each distinct fold. alone: what becomes of a
    batch norm without such a layer: "leave" it, "multiply_add", or "depthwise" for a 1x1 depthwise convolution (inputs
    of rank 3 to 5, else a multiply-add). force: fold also where rounding loses more than the limit, and what is
    frozen in a program that trains.
    keep_state: leave parameters, buffers and counters that nothing reads any more in the state. float32_above: weights
    of more elements are multiplied in float32 instead of float64, None for none. inplace: edit the given program.

    The new weights are computed in float64 on the CPU and cast once to the dtype of the old ones, whose names they
    take; a bias that was not there is called `bias` beside its weight. The outputs then differ by rounding alone. What
    that loses is counted as u * (1 + |running_mean - bias| / sqrt(running_var + eps)) standard deviations of a channel,
    u the unit roundoff of the weight's dtype; above 1e-9 in float64, 1e-3 in float32, 2**-5 in float16 or 2**-4 in
    bfloat16 a site is declined. Folding is for inference: training moves folded weights otherwise.
    """

    command: ClassVar[Command] = Command("fold", "-o folded.pt2 --report", Keeps.ROUNDING)

    clone_calls: bool = False
    clone_weights: bool = False
    alone: str = field(default="leave", metadata=flag(choices=ALONE))
    force: bool = False
    keep_state: bool = False
    float32_above: int | None = None
    inplace: bool = field(default=False, metadata=NO_FLAG)

    def __call__(self, program: Program) -> Result:
        """Folds in an ExportedProgram or a GraphModule, nested graphs included.

        Raises: InvalidChoice for an unknown `alone` or a `float32_above` that is no number of elements, InvalidProgram
        for anything else than a program.
        """
        if self.alone not in ALONE:
            raise InvalidChoice(f"found alone={self.alone!r}, expected one of {', '.join(ALONE)}")
        if self.float32_above is not None and (type(self.float32_above) is not int or self.float32_above < 0):
            raise InvalidChoice(f"found float32_above={self.float32_above!r}, expected a number of elements or None")
        if not find_nodes(graphs_of(program)):
            return Result(program)
        with torch.inference_mode(False), torch.no_grad():  # new tensors like those that the program had
            result = self._folded(program)
        calls = self.clone_calls or self.alone == "depthwise"
        # There are new calls, which those may fold into: once more, so that a second run by a user changes nothing.
        if calls and result.edits and result.declined:
            again = self(result.program)
            return Result(again.program, result.edits + again.edits, again.declined)
        return result

    def _folded(self, program: Program) -> Result:
        draft, log = Draft(program, self.inplace), Log()
        sites = list(find_sites(draft.graphs))
        state = State(draft, unchanged={node for site in sites for node in returned_as_they_are(site)})
        # dropout that drops trains, too: in such a program a batch norm in eval is frozen
        trains = is_training(sites, find_random(draft.graphs)) and not self.force
        refused = {s: _refuse_mode(s, trains) or _refuse_outputs(s) or _refuse_input(s) for s in sites}
        # planned whole ahead of the first edit, so that a decline leaves nothing half done
        plan = Plan(state, [site for site in sites if not refused[site]], self)
        for site in sites:
            if site in plan.decided:
                log.edit(site, site.spelling, plan.told(site))
            else:
                log.decline(site, refused[site] or plan.refused[site])
        if log.edits:
            Writing(state, plan).write()
        return log.result(draft.build() if log.edits else program)


def _refuse_mode(site: Site, trains: bool) -> Reason:
    """Why a site is no constant scale and shift, or is to stay one that is not folded."""
    norm = site.norm
    if site.problem:
        return Reason(site.problem + ("" if norm.input is None else quantization(norm.input)))
    if norm.training and norm.running_mean is None:
        return Reason("it has no running statistics: its batch's are its meaning")
    if norm.training:
        return Reason("it normalises with its batch's statistics", "switch the program to eval first")
    if trains:  # its outputs would be the same, what weights learn would not
        frozen = "it is frozen in a program that trains, and folding changes what weights learn"
        return Reason(frozen, "switch the program to eval first")
    return Reason()


def _refuse_outputs(site: Site) -> Reason:
    """Why something else cannot stand for what a site in eval returns."""
    # save_mean and save_invstd are read by a gradient: there is no inference then
    used = [role for role in site.outputs if role not in ("out", *UPDATED) and site.used(role)]
    if used:
        return Reason(f"its {', '.join(used)} {'is' if len(used) == 1 else 'are'} in use")
    if not site.used("out") and not site.norm.out:
        return Reason("nothing reads its output")
    return _refuse_copy(site) if site.norm.out else Reason()


def _refuse_input(site: Site) -> Reason:
    """Why the channels of a site are not known, or not in numbers that can be folded."""
    val = val_of(site.norm.input)
    if val is None or any(val_of(head) is None for head in site.outputs["out"]):
        return Reason("the graph keeps no shapes (no val)", "trace it with fake tensors")
    # scales are numbers for each channel, made now
    channels = sizes_of(val.shape)[1]
    if type(channels) is not int or not channels:
        return Reason(f"its input has {channels} channels, expected a known number")
    return Reason() if val.dtype in LIMITS else Reason(f"its input is {val.dtype}, {EXPECTED}")


def _refuse_copy(site: Site) -> Reason:
    """Why what stands for a site cannot be copied to its out argument instead."""
    saved = [place for role, place in site.norm.out.items() if role != "out"]
    # nothing will write to it any more
    if any(set(place.users) != {site.node} for place in saved):
        return Reason("its saved statistics are read back from an out argument")
    have, want = val_of(site.norm.out["out"]), val_of(site.norm.input)
    if have is None or want is None or have.dtype != want.dtype or not same_sizes(have.shape, want.shape):
        return Reason("its out argument may be resized", "allocate it in full")
    return Reason()


def fold(
    program: Any,
    *,
    clone_calls: bool = False,
    clone_weights: bool = False,
    alone: str = "leave",
    force: bool = False,
    keep_state: bool = False,
    float32_above: int | None = None,
    inplace: bool = False,
) -> Any:
    """Returns the program with its batch norms folded into the layers beside them; arguments as `Fold`.

    Raises: InvalidChoice, InvalidProgram, as `Fold` does.

    >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1, bias=False), torch.nn.BatchNorm2d(4)).eval()
    >>> list(fold(torch.export.export(net, (torch.randn(2, 3, 5, 5),))).state_dict)
    ['0.weight', '0.bias']
    """
    options = (clone_calls, clone_weights, alone, force, keep_state, float32_above)
    return Fold(*options, inplace=inplace)(program).program
