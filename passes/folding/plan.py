"""Which batch norm goes into which layer: planned on the graph as it is, so that a site can be declined at no cost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx import Node

from ...decomps.affine import Affine
from ...decomps.forms import FIELDS, HALF
from ..graph.calls import measures
from ..graph.constants import Constant
from ..graph.meta import format_of, same_sizes, val_of
from ..graph.result import Reason
from ..graph.state import State
from ..rewriting.site import Site
from .channels import Place, Scales, readers, transfer_of
from .walk import Walk
from .weights import Target, alike, refuse_loss, refuse_range, refuse_sharing

if TYPE_CHECKING:
    from .fold import Fold


@dataclass(frozen=True)
class Reach:
    """A site with the scales and shifts behind it: what they compute, of which of its constants, the nodes between, and
    those that hold the result.
    """

    affine: Affine
    constants: dict[str, Constant]
    tail: list[Node]
    ends: tuple[Node, ...]


@dataclass(eq=False)
class Decision:
    """Where a site goes: direction "up", "down" or "alone"; the layers that take it in.

    scaled: the constant scales and shifts on the way up, which go too, each with what it scaled. affine: what is left
    to be computed, alone.
    """

    site: Site
    reach: Reach
    direction: str
    targets: list[Target] = field(default_factory=list)
    scaled: dict[Node, Node] = field(default_factory=dict)
    affine: Affine | None = None

    def convolves(self, alone: str) -> bool:
        """Whether the site, alone, becomes a convolution."""
        val = val_of(self.site.norm.input)
        return alone == "depthwise" and val is not None and 3 <= val.ndim <= 5 and format_of(val) is not None


@dataclass(frozen=True)
class Group:
    """Layers that get the same new weights: these, the bias as [out] in float64."""

    targets: list[Target]
    weight: Tensor
    bias: Tensor


class Plan:
    """Every site with what is decided in `decided`, or the reason why it has none in `refused`; the new weights.

    First up, into the layers that make a site's input, from the first site to the last; then down, into those that read
    its output, from the last to the first, so that a row of batch norms goes as one; then alone. Which weights are
    shared, what is lost and what overflows shows only when all is decided: a site that fails is blocked in that
    direction, and the plan is made anew. A site over a concatenation goes into all of its branches or none.
    """

    def __init__(self, state: State, sites: list[Site], options: Fold) -> None:
        self.state, self.options = state, options
        reached = {site: _reach(state, site) for site in sites}
        self.reaches = {site: reach for site, reach in reached.items() if isinstance(reach, Reach)}
        self.refused = {site: reason for site, reason in reached.items() if isinstance(reason, Reason)}
        blocked: dict[tuple[Site, str], Reason] = {}
        while True:  # it ends: each time more is blocked
            self.walk = Walk(state, options.clone_calls)
            self.decided: dict[Site, Decision] = {}
            self.groups: list[Group] = []
            self._alone_at: dict[Node, Decision] = {}  # what is alone, by the node that holds it
            refused = self._decide_all(blocked)
            conflicts = dict(self._conflicts())
            if not conflicts:
                break
            blocked |= conflicts
        self.refused |= refused

    def _decide_all(self, blocked: dict[tuple[Site, str], Reason]) -> dict[Site, Reason]:
        """Decides where sites go, and says why the others go nowhere."""
        why: dict[Site, list[Reason]] = {site: [] for site in self.reaches}
        for direction, sites in (("up", list(why)), ("down", list(why)[::-1]), ("alone", list(why))):
            for site in sites:
                if site not in self.decided:
                    reason = blocked.get((site, direction)) or self._decide(site, direction)
                    why[site] += [reason] if reason else []
        return {site: _joined(reasons) for site, reasons in why.items() if site not in self.decided}

    def _decide(self, site: Site, direction: str) -> Reason:
        """Decides that a site goes there, or says why it cannot."""
        reach, up = self.reaches[site], direction == "up"
        decision = Decision(site, reach, direction)
        if reason := _refuse_layout(site, reach):
            return reason
        if direction == "alone":
            return self._alone(decision, reach.affine)
        if site.norm.out and not up:  # who reads that memory is not in the graph's edges
            return Reason("its output is an out argument too")
        if not up and (reason := self.walk.refuse_late_read(site.norm.input, site.node)):
            return reason
        # up, whatever reads the batch norm is left alone; down, all of its readers have to take it in
        start = [Place(site.norm.input, site.node, 1, reach.affine)] if up else readers(reach.ends, 1, reach.affine)
        found = self.walk.go(start, up)
        if isinstance(found, Reason):
            return found
        layers, decision.scaled = found
        for target, affine in layers:
            target = self.walk.targets.setdefault((target.call, target.reader), target)
            self.walk.cloned |= {target.call} if target.reader is not None else set()
            decision.targets.append(target)
            # the last one that goes down comes first of all that happens to the input
            target.folds[direction].insert(len(target.folds["up"]) if up else 0, (site, affine))
        self._note(decision)
        return Reason()

    def _note(self, decision: Decision) -> None:
        """Notes what is decided, and where walks go on behind the nodes that go."""
        site, reach, past = decision.site, decision.reach, self.walk.past
        self.decided[site] = decision
        # a later site walks up through what is gone by then
        past |= {(node, True): [(source, node)] for node, source in decision.scaled.items()}
        if _has_one_end(decision):
            past |= {(node, True): [(site.norm.input, site.node)] for node in (*reach.tail, *site.outputs["out"])}
        if decision.direction == "down":
            past[site.node, False] = [
                (user, end) for end in reach.ends for user in end.users if not measures(user, end)
            ]

    def _alone(self, decision: Decision, affine: Affine) -> Reason:
        """Decides that a site is computed on its own, or with the one alone whose output it reads, or says why not."""
        source = decision.site.norm.input
        val: Any = self.state.known(source, like=decision.site.norm.running_mean)
        if self.options.alone == "leave":
            return Reason()
        wide = val.dtype in HALF and not decision.convolves(self.options.alone)
        dtype = torch.float32 if wide else val.dtype
        # a row of batch norms alone is one multiply-add, where the dtype holds what they are together
        before = self._alone_at.get(source) if len(source.users) == 1 else None
        if before is not None and self._refuse_alone(before.affine, affine, dtype):
            before = None
        if before is None and (reason := self._refuse_alone(None, affine, dtype)):
            return reason
        self._note(decision)
        made = before or decision
        made.affine = affine if made.affine is None else made.affine.then(affine)
        if _has_one_end(decision):
            self._alone_at[decision.reach.ends[0]] = made
        return Reason()

    def _refuse_alone(self, first: Affine | None, affine: Affine, dtype: torch.dtype) -> Reason:
        """Why a dtype cannot hold what a site computes, behind another one or alone."""
        both = affine if first is None else first.then(affine)
        # behind another one, its input is shifted: that is what cancels
        bias = 0.0 if first is None else first.shift
        reason = refuse_range(both, dtype)
        return reason or (Reason() if self.options.force else refuse_loss(affine.lost(bias, dtype), dtype))

    def _conflicts(self) -> Iterator[tuple[tuple[Site, str], Reason]]:
        """The sites and directions that do not work after all; makes the new weights of the others."""
        groups: list[list[Target]] = []
        for targets in self._by_memory():
            # losses of each layer by itself, before layers alike are one
            for target in () if self.options.force else targets:
                yield from target.losses()
            own = [target for target in targets if target.reader is None]  # the others have weights of their own anyway
            reason = refuse_sharing(self.state, own)
            if reason and not self.options.clone_weights:
                for target in own:
                    yield from target.blocked(reason)
                targets = [target for target in targets if target.reader is not None]
            for target in targets:
                target.fresh = target.reader is not None or bool(reason)
            groups += alike(targets)
        for group in groups:
            yield from self._computed(group)

    def _computed(self, group: list[Target]) -> Iterator[tuple[tuple[Site, str], Reason]]:
        """Makes the new weights of layers that fold alike; the sites that their dtype does not hold."""
        made = group[0].computed(self.options.float32_above, self.options.force)
        if not isinstance(made, Reason):
            self.groups.append(Group(group, *made))
            return
        for target in group:  # what is ahead of the layer first: without it, the rest may fit
            yield from target.blocked(made, "down" if target.folds["down"] else "up")

    def _by_memory(self) -> list[list[Target]]:
        """The layers that read the same weight."""
        found: dict[tuple[str, ...], list[Target]] = {}
        for target in self.walk.targets.values():
            # by memory, not by name: tied weights and views of one storage are one
            found.setdefault(tuple(self.state.storages.sharing(target.weight.name)), []).append(target)
        return list(found.values())

    def told(self, site: Site) -> str:
        """What became of a site, for its edit."""
        decision = self.decided[site]
        if decision.direction == "alone":
            return "a 1x1 depthwise convolution" if decision.convolves(self.options.alone) else "a multiply-add"
        calls = [f"{'a copy of ' if t.reader else ''}{t.call.name} ({t.call.target})" for t in decision.targets]
        return "folded into " + ", ".join(calls)


def _reach(state: State, site: Site) -> Reach | Reason:
    """The site's affine and those of the scales and shifts behind it, or why it has none."""
    constants: dict[str, Constant] = {}
    for name in FIELDS[1:5]:
        if (operand := getattr(site.norm, name)) is not None:
            constant = state.constant(operand)
            if isinstance(constant, Reason):
                return constant
            constants[name] = constant
    values: dict[str, Any] = {name: constant.value() for name, constant in constants.items()}
    affine = Affine.of(replace(site.norm, **values))
    # a negative running_var, or weights that ran away: NaN now would be NaN in weights
    if not affine.finite:
        return Reason("its statistics, weight or bias are not finite, or running_var + eps is not positive")
    tail: list[Node] = []
    ends = tuple(head for head in site.outputs["out"] if head.users)
    # What scales its output, and is all that reads it, is a part of it: a layer scale, a number times it.
    while len(ends) == 1 and len(ends[0].users) == 1 and not site.norm.out:
        (reader,) = ends[0].users
        row = transfer_of(reader)
        step = row.step(state, reader, ends[0], 1, affine.scale.numel()) if isinstance(row, Scales) else None
        if step is None or not reader.users or not affine.after(*step).finite:
            break
        affine, ends = affine.after(*step), (reader,)
        tail.append(reader)
    return Reach(affine, constants, tail, ends)


def _has_one_end(decision: Decision) -> bool:
    """Whether one node holds its output, and no out argument: who reads that node reads all there is of it."""
    return len(decision.reach.ends) == 1 and not decision.site.norm.out


def _refuse_layout(site: Site, reach: Reach) -> Reason:
    """Why what stands for the site cannot lie in memory as its output does, copied or not."""
    have, want = val_of(site.norm.input), val_of(reach.ends[0]) if reach.ends else None
    # clone takes a memory format, not strides: what lies otherwise in memory cannot be made
    if have is None or want is None or site.norm.out or same_sizes(have.stride(), want.stride()) or format_of(want):
        return Reason()
    return Reason(f"its output has strides {tuple(want.stride())} and its input {tuple(have.stride())}")


def _joined(reasons: list[Reason]) -> Reason:
    remedies = dict.fromkeys(reason.remedy for reason in reasons if reason.remedy)
    return Reason("; ".join(dict.fromkeys(reasons)), "; ".join(remedies))
