"""Writing a site in the other mode: the same node, another flag or overload, its updates taken out or put back."""

from __future__ import annotations

import operator
import re
from collections import defaultdict
from collections.abc import Container, Iterable
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from ...decomps.forms import BY_NAME, UPDATED, BatchNorm, Form, Mode, Statistics, in_eval, in_training
from ..graph.draft import Draft
from ..graph.journal import Removals, forget, note_of, write_note
from ..graph.meta import carried, empty_val, set_val
from ..rewriting.site import GradientSite, Site, find_gradients
from ..rewriting.tracked import root_of
from ..rewriting.updates import Inputs
from ..rewriting.writing import forward_of, output_val
from .counters import Counters

aten = torch.ops.aten


# What a tensor that is no state begins with.
_MADE = re.compile(r"aten\.(new_)?(zeros|ones|full|empty)")


class Switch:
    """Switches the sites of one draft, each by itself: to eval the last ones first, to train the first ones first."""

    def __init__(self, draft: Draft) -> None:
        self.draft = draft
        self.removals = Removals()
        self.counters = Counters(draft, self.removals)
        self.inputs = Inputs(draft.program) if draft.functional and isinstance(draft.program, ExportedProgram) else None
        self.listed = {value: place for place, (_, value) in enumerate(draft.mutations())}
        self.gradients: dict[Node, list[GradientSite]] = defaultdict(list)
        for gradient in find_gradients(draft.graphs):
            made = forward_of(gradient.norm)
            if made is not None:
                self.gradients[made].append(gradient)
        self.adds: dict[Node, Node | str | None] = {}

    def to_eval(self, sites: Iterable[Site], chosen: Container[Node] | None = None) -> list[tuple[Site, str]]:
        """Switches every training site to eval, or those that are chosen; returns each with why it was declined, empty
        where it was not. All sites of the draft are asked for: their counters are told apart by their order.
        """
        training = [s for s in sites if s.tracks and s.norm.training is True]
        self.adds = self.counters.pair(training)
        told = []
        for site in reversed([s for s in training if chosen is None or s.node in chosen]):
            reason = site.problem or self._untouchable(site) or self._unevaluable(site)
            told.append((site, reason))
            if not reason:
                self._to_eval(site)
        self.draft.drop_unchanged()
        return told[::-1]

    def _untouchable(self, site: Site) -> str:
        """Why a site cannot change its mode, in either direction, empty when it can."""
        gradients = self.gradients.get(site.node, ())
        for gradient in gradients:
            norm = gradient.norm
            if gradient.problem:
                return f"its gradient {gradient.name} cannot be read: {gradient.problem}"
            if gradient.form.mode is not Mode.FLAG or norm.running_mean is None or norm.running_var is None:
                return f"its gradient {gradient.name} ({gradient.form.name}) knows batch statistics alone"
        nodes = {gradient.node for gradient in gradients}
        for role in ("save_mean", "save_invstd", "reserve", "impl_index"):
            for holder in site.outputs.get(role, ()):
                if other := next((u for u in _readers(holder) if u not in nodes), None):
                    return (
                        f"its {role} is read by {other.name} ({other.target}), and is another value in the other mode"
                    )
        if site.form.destinations:
            places = [site.norm.out[r] for r in ("save_mean", "save_invstd") if r in site.norm.out]
            if any(user > site.node for place in places for user in place.users):
                return f"the out arguments of {site.form.name} that hold its saved statistics are read later"
        return ""

    def _unevaluable(self, site: Site) -> str:
        """Why a training site cannot be switched to eval and back, empty when it can."""
        try:
            in_eval(site.form)
        except LookupError as absent:
            return str(absent)
        if isinstance(reason := self.adds.get(site.node), str):
            return reason
        if _MADE.match(str(root_of(site.norm.running_mean).target)):
            made = root_of(site.norm.running_mean).name
            return f"its statistics start from {made} in each batch, as exportable writes momentum=None: export in eval"
        if site.form.statistics is Statistics.OUTPUTS:
            gradients = {gradient.node for gradient in self.gradients.get(site.node, ())}
            for statistic in (site.norm.running_mean, site.norm.running_var):
                later = (u for u in statistic.users if u > site.node and u.target is not aten.copy_.default)
                if (reader := next((u for u in later if u not in gradients), None)) is not None:
                    return (
                        f"{reader.name} reads {statistic.name} as it was before the update: in eval there is no other"
                    )
        return ""

    def _to_eval(self, site: Site) -> None:
        node, norm, form = site.node, site.norm, site.form
        note: dict[str, Any] = {"form": form.name}
        if form.statistics is Statistics.OUTPUTS:
            held = [(role, holder) for role in UPDATED for holder in sorted(site.outputs.get(role, ()))]
            statistics = dict(zip(UPDATED, (norm.running_mean, norm.running_var), strict=True))
            note["updates"] = [self._take_update(r, h, statistics[r]) for r, h in reversed(held)][::-1]
        note["counter"] = self.counters.remove(site, self.adds.get(node), self.listed)  # type: ignore[arg-type]
        self._retarget(site, in_eval(form), training=False)
        write_note(node, train={key: value for key, value in note.items() if value}, frozen=None)

    def _take_update(self, role: str, holder: Node, statistic: Node) -> dict[str, Any]:
        """Takes out a new running statistic: whoever read it reads the statistic."""
        call: Any = holder.args[0]
        note: dict[str, Any] = {"role": role, "listed": self.listed.get(holder)}
        note["copies"] = self.removals.take_copies(holder, root_of(statistic))
        holder.replace_all_uses_with(statistic)
        behind = holder.prev.target is operator.getitem and holder.prev.args[0] is call
        behind = behind or holder.prev is call
        note |= self.removals.take(holder, holder.next if behind else None, like=call)
        return {key: value for key, value in note.items() if value not in (None, [])}

    def to_train(self, site: Site) -> str:
        """Switches an eval site to training; returns why that cannot be done, empty when it was."""
        note = note_of(site.node).get("train")
        statistics = self._statistics(site, note)
        try:
            target = in_training(site.form, statistics, (note or {}).get("form", ""))
        except LookupError as absent:
            return str(absent)
        reason = site.problem or self._untouchable(site) or self._untrainable(site, target, note)
        if reason:
            return reason
        attach(site)
        note = note or {"counter": {}}
        if "counter" in note:
            self.counters.restore(site, note["counter"])
        self._retarget(site, target, training=True)
        if target.statistics is Statistics.OUTPUTS:
            self._put_updates(site, target, note.get("updates"))
        forget(site.node, "train", "frozen")
        return ""

    def _statistics(self, site: Site, note: dict[str, Any] | None) -> Statistics:
        """How a site hands on its statistics in training: as it did, if it did, and the program still allows it."""
        if self.draft.functional:
            return Statistics.OUTPUTS
        note = note or {}
        copied = any(update.get("copies") for update in note.get("updates") or [])
        if isinstance(self.draft.program, ExportedProgram) and not copied:
            return Statistics.IN_PLACE  # what was listed as a mutation then, was so in the other dialect
        was = BY_NAME.get(note.get("form", ""))
        return Statistics.IN_PLACE if was is None else was.statistics

    def _untrainable(self, site: Site, target: Form, note: dict[str, Any] | None) -> str:
        """Why an eval site cannot train, empty when it can."""
        if (
            target.statistics is Statistics.IN_PLACE
            and self.draft.functional
            and (note or {}).get("form") != target.name
        ):
            return f"{target.name} writes its statistics, which a functional program may not: legalize it to core_aten"
        if note is None and site.norm.momentum == 0:
            return "its momentum is 0, as torch writes momentum=None in eval: export in training, with tbn.exportable"
        if note is None and (reason := self.counters.ambiguous(site)):
            return reason
        val = getattr(site.norm.input, "meta", {}).get("val")
        if isinstance(val, torch.Tensor) and all(type(size) is int for size in val.shape):
            single = val.numel() == val.shape[1] > 0
            if single:
                return f"its input {list(val.shape)} has one value a channel: batch statistics are not defined"
        if self.inputs is not None and target.statistics is Statistics.OUTPUTS:
            return self.inputs.unlistable_update(site)
        return self.counters.stuck(site)

    def _put_updates(self, site: Site, target: Form, notes: list[dict[str, Any]] | None) -> None:
        """Reads the new running statistics from the call, and hands them on."""
        node = site.node
        new: list[dict[str, Any]] = (
            notes if notes is not None else [{"role": role, "name": "getitem"} for role in UPDATED]
        )
        for note in new:
            norm: BatchNorm = target.read(node.args, node.kwargs)
            role = note["role"]
            statistic = norm.running_mean if role == UPDATED[0] else norm.running_var
            behind = node.next
            while behind.target is operator.getitem and behind.args[0] is node:
                behind = behind.next
            index = target.roles.index(role)
            holder = self.removals.put(node.graph, note, behind)(operator.getitem, (node, index))
            vals = node.meta.get("val")
            holder.meta = {**carried(node, None), **holder.meta}
            set_val(holder, None if vals is None else vals[index], node)
            if not any(note_of(reader) for reader in node.users if reader is not holder):
                write_note(holder, form=None, filled=None, train=None)
            self.draft.place(root_of(statistic), note.get("listed"))
            self.draft.mutate(statistic, node, holder)
            for gradient in self.gradients.get(node, ()):  # which goes by the statistics that its forward was given
                set_field(gradient.node, gradient.form, role.removeprefix("new_"), statistic)
            self.removals.put_copies(note.get("copies") or [], root_of(statistic), holder)

    def _retarget(self, site: Site, target: Form, training: bool) -> None:
        """Changes the mode of a call, and of its gradients, whatever their overload."""
        node, form = site.node, site.form
        if target is form:
            set_field(node, form, "training", training)
        else:
            _respell(node, form, target, training)
            known = _known(site, form)
            if known:
                spelled = target.read(node.args, node.kwargs)
                vals = tuple(output_val(self.draft, known, spelled, target, role) for role in target.roles)
                set_val(node, vals, node)
            for role, holders in site.outputs.items():
                for holder in holders if role in target.roles and len(form.roles) > 1 else ():
                    index = target.roles.index(role)
                    if not holder._erased and holder.args[1] != index:
                        holder.args = (node, index)
                    if not holder._erased and role != "out" and "val" in holder.meta and known:
                        set_val(holder, node.meta["val"][index], holder)
        for gradient in self.gradients.get(node, ()):
            set_field(gradient.node, gradient.form, "training", training)


def _known(site: Site, form: Form) -> dict[str, Any]:
    """The value of a site's output by role, empty when the graph keeps none."""
    val = site.node.meta.get("val")
    out = val[0] if isinstance(val, tuple | list) and val else val
    return {"out": out} if isinstance(out, torch.Tensor) else {}


def _readers(holder: Node) -> list[Node]:
    """Who reads a saved statistic, also through the aliases that autograd makes of it."""
    found = []
    for user in holder.users:
        through = user.target in (aten.detach.default, aten.alias.default)
        found += _readers(user) if through else [user]
    return found


def detach(site: Site) -> bool:
    """Cuts the site's weight and bias off from their gradients; returns whether there was one to cut off."""
    node, form = site.node, site.form
    cut = False
    for field in ("weight", "bias"):
        tensor = getattr(site.norm, field)
        if tensor is None or tensor.target is aten.detach.default:
            continue
        with node.graph.inserting_before(node):
            held = node.graph.create_node("call_function", aten.detach.default, (tensor,), name="detach")
        held.meta = {key: node.meta[key] for key in ("nn_module_stack", "stack_trace") if key in node.meta}
        val = tensor.meta.get("val")
        set_val(held, None if val is None else empty_val(val, val.shape, val.dtype), node)
        set_field(node, form, field, held)
        cut = True
    if cut:
        write_note(node, detached=True)
    return cut


def attach(site: Site) -> None:
    """Undoes `detach`."""
    if not note_of(site.node).get("detached"):
        return
    for field in ("weight", "bias"):
        held = site.form.given(site.node.args, site.node.kwargs).get(field)
        if isinstance(held, Node) and held.target is aten.detach.default:
            set_field(site.node, site.form, field, held.args[0])
            if not held.users:
                held.graph.erase_node(held)
    forget(site.node, "detached")


def set_field(node: Node, form: Form, field: str, value: Any) -> None:
    """Sets one argument of a call, by position or by keyword as it was given."""
    index = form.arguments.index(field)
    if index < len(node.args):
        node.args = (*node.args[:index], value, *node.args[index + 1 :])
    else:
        node.kwargs = {**node.kwargs, form.schema_names[index]: value}


def _respell(node: Node, form: Form, target: Form, training: bool) -> None:
    """Writes a call as another overload; what was given by keyword stays so."""
    raw = form.given(node.args, node.kwargs)
    values = [training if n == "training" else raw.get(n, target.extras.get(n)) for n in target.arguments]
    outs = {name: raw[form.destinations[role]] for role, name in target.destinations.items()}
    by_position = {*form.arguments[: len(node.args)]}
    if "momentum" in by_position:
        by_position.add("training")
    count = next((i for i, name in enumerate(target.arguments) if name not in by_position), len(values))
    keywords = dict(zip(target.arguments[count:], values[count:], strict=True))
    packet = isinstance(node.target, torch._ops.OpOverloadPacket)
    node.target = target.overload.overloadpacket if packet else target.overload
    node.args, node.kwargs = tuple(values[:count]), {**keywords, **outs}
