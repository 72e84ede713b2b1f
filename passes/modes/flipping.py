"""One site in the other mode: the same node, another flag or overload, its updates taken out or put back."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Collection, Container, Iterable
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from ...decomps.counterparts import in_eval, in_training
from ...decomps.forms import BY_NAME, UPDATED, BatchNorm, Form, Mode, Statistics
from ...decomps.ops import Kind, kind_of
from ..graph.draft import Draft
from ..graph.journal import Entry, Journal
from ..graph.meta import carried, empty_val, set_val, val_of
from ..graph.result import Reason
from ..rewriting.completion import set_args
from ..rewriting.notes import forget, note_of, write_note
from ..rewriting.site import GradientSite, Site, find_gradients
from ..rewriting.tracked import root_of
from ..rewriting.updates import Inputs
from ..rewriting.writing import forward_of, output_val
from .counters import Counters

aten = torch.ops.aten

# Most sites are refused nothing: one empty reason does for all of them.
_NONE = Reason()

# What a gradient alone may read of a site that changes its mode.
_SAVED = ("save_mean", "save_invstd", "reserve", "impl_index")


class Switch:
    """Switches the sites of one draft, each by itself: to eval the last ones first, to train the first ones first, so
    that every place that was noted is there when it is looked for.
    """

    def __init__(self, draft: Draft) -> None:
        self.draft, self.journal = draft, Journal(draft)
        self.counters = Counters(draft, self.journal)
        self.inputs = Inputs(draft.program) if draft.functional and isinstance(draft.program, ExportedProgram) else None
        # a gradient says the mode in an argument of its own, which has to follow that of its forward
        self.gradients: dict[Node, list[GradientSite]] = defaultdict(list)
        for gradient in find_gradients(draft.graphs):
            made = forward_of(gradient.norm)
            if made is not None:
                self.gradients[made].append(gradient)

    def to_eval(self, sites: Iterable[Site], chosen: Container[Node] | None = None) -> dict[Node, Reason]:
        """Switches every training site to eval, or those that are chosen; returns why a site was declined, empty where
        it was not. All sites of the draft are asked for: their counters are told apart by their order.
        """
        training = [s for s in sites if s.tracks and s.norm.training is True]
        adds = self.counters.pair(training)
        told = {site.node: _NONE for site in training if chosen is None or site.node in chosen}
        # the last one first: where two are on one buffer, the later one reads what the earlier one made of it, and
        # hands that on when its own update goes
        for site in reversed(training):
            if site.node in told:
                add = adds.get(site.node)
                unpaired = add if isinstance(add, Reason) else _NONE
                reason = self._refuse_switch(site) or unpaired or self._refuse_eval(site)
                told[site.node] = reason
                if not reason:
                    self._to_eval(site, add if isinstance(add, Node) else None)
        self.draft.listing.drop_mutations(unchanged=True)
        return told

    def _refuse_switch(self, site: Site) -> Reason:
        """Why a site cannot change its mode, in either direction, empty when it can."""
        # ahead of all else: of what cannot be read there is no record that could be asked
        if site.problem:
            return Reason(site.problem)
        gradients = self.gradients.get(site.node, ())
        for gradient in gradients:
            if reason := _refuse_gradient(gradient):
                return reason
        reason = _refuse_readers(site, {gradient.node for gradient in gradients})
        return reason or (_refuse_places(site) if site.form.destinations else _NONE)

    def _refuse_eval(self, site: Site) -> Reason:
        """Why a training site cannot be switched to eval and back, empty when it can."""
        try:
            in_eval(site.form)
        except LookupError as absent:
            return Reason(str(absent))
        made = root_of(site.norm.running_mean)
        if kind_of(made.target) is Kind.FILL:
            text = f"its statistics start from {made.name} in each batch, as exportable writes momentum=None"
            return Reason(text, "export in eval")
        if site.form.statistics is Statistics.OUTPUTS:
            # Old and new statistics are two values here, and one in eval. On the way back every reader behind the call
            # takes the new one, so that one that took the old one would come back wrong. A copy_ is the write-back of a
            # functional graph that was made a module.
            gradients = {gradient.node for gradient in self.gradients.get(site.node, ())}
            for statistic in (site.norm.running_mean, site.norm.running_var):
                later = (u for u in statistic.users if u > site.node and u.target is not aten.copy_.default)
                if (reader := next((u for u in later if u not in gradients), None)) is not None:
                    found = f"{reader.name} reads {statistic.name} as it was before the update"
                    return Reason(f"{found}: in eval there is no other")
        return _NONE

    def _to_eval(self, site: Site, add: Node | None) -> None:
        node, norm, form = site.node, site.norm, site.form
        note: Entry = {"form": form.name}
        if form.statistics is Statistics.OUTPUTS:
            statistics = dict(zip(UPDATED, (norm.running_mean, norm.running_var), strict=True))
            held = [(role, holder) for role in UPDATED for holder in sorted(site.outputs.get(role, ()))]
            taken = [{"role": role, **self._take_update(holder, statistics[role])} for role, holder in reversed(held)]
            if taken:
                note["updates"] = taken[::-1]  # put back in the order in which they stood, each behind the one before
        if (entry := self.counters.remove(site, add)) is not None:
            note["counter"] = entry
        self._retarget(site, in_eval(form), training=False)
        # a mark of frozen goes: the site is in eval because it was switched, and will be switched back
        write_note(node, train=note, frozen=None)

    def _take_update(self, holder: Node, statistic: Node) -> Entry:
        """Takes out a new running statistic: whoever read it reads the statistic."""
        call: Any = holder.args[0]
        # right behind the call and its other outputs is where torch puts it: that place need not be noted
        behind = holder.prev is call or (holder.prev.target is operator.getitem and holder.prev.args[0] is call)
        before = holder.next if behind else None
        return self.journal.take_update(holder, statistic, root_of(statistic), before, like=call)

    def to_train(self, site: Site) -> Reason:
        """Switches an eval site to training; returns why that cannot be done, empty when it was."""
        note = note_of(site.node).get("train")
        try:
            target = in_training(site.form, self._statistics(note or {}), (note or {}).get("form", ""))
        except LookupError as absent:
            return Reason(str(absent))
        reason = self._refuse_switch(site) or self._refuse_train(site, target, note)
        if reason:
            return reason
        attach(site)
        # exported in eval: it gets what torch.export writes of one that trains, the add of its counter too
        note = {"counter": {}} if note is None else note
        if "counter" in note:
            self.counters.restore(site, note["counter"])
        self._retarget(site, target, training=True)
        if target.statistics is Statistics.OUTPUTS:
            self._put_updates(site, target, note.get("updates"))
        forget(site.node, "train", "frozen")
        return reason

    def _statistics(self, note: Entry) -> Statistics:
        """How a site hands on its statistics in training: as it did, if it did, and the program still allows it."""
        if self.draft.functional:
            return Statistics.OUTPUTS
        copied = any(update.get("copies") for update in note.get("updates", ()))
        if isinstance(self.draft.program, ExportedProgram) and not copied:
            return Statistics.IN_PLACE  # what was listed as a mutation then, was so in the other dialect
        was = BY_NAME.get(note.get("form", ""))
        return Statistics.IN_PLACE if was is None else was.statistics

    def _refuse_train(self, site: Site, target: Form, note: Entry | None) -> Reason:
        """Why an eval site cannot train, empty when it can."""
        # the legacy ops write behind their schema, so torch lets one stand in a functional program: what stood there
        # comes back, but none is put there
        writes = target.statistics is Statistics.IN_PLACE and self.draft.functional
        if writes and (note or {}).get("form") != target.name:
            text = f"{target.name} writes its statistics, which a functional program may not"
            return Reason(text, "legalize it to core_aten")
        # nn.BatchNorm passes 0.0 for momentum=None, and 1 / n only while it trains: which it was is not in the graph
        if note is None and site.norm.momentum == 0:
            text = "its momentum is 0, as torch writes momentum=None in eval"
            return Reason(text, "export in training, with tbn.exportable")
        unknown = _NONE if note is not None else self.counters.refuse_shared(site)
        if reason := unknown or _refuse_single(site):
            return reason
        listed = self.inputs if target.statistics is Statistics.OUTPUTS else None
        told = _NONE if listed is None else listed.refuse_update(site)
        return told or self.counters.refuse_nested(site)

    def _put_updates(self, site: Site, target: Form, entries: list[Entry] | None) -> None:
        """Reads the new running statistics from the call, and hands them on."""
        node = site.node
        fresh: list[Entry] = [{"role": role, "name": "getitem"} for role in UPDATED]
        for entry in fresh if entries is None else entries:
            norm: BatchNorm = target.read(node.args, node.kwargs)
            role = entry["role"]
            statistic = norm.running_mean if role == UPDATED[0] else norm.running_var
            behind = node.next  # torch has the outputs of a call right behind it
            while behind.target is operator.getitem and behind.args[0] is node:
                behind = behind.next
            index = target.roles.index(role)
            holder = self.journal.put(node.graph, entry, operator.getitem, (node, index), behind)
            vals = node.meta.get("val")
            holder.meta = {**carried(node, None), **holder.meta}
            set_val(holder, None if vals is None else vals[index], node)
            # the call's note came along with its metadata; it stays only where loading gave one to the other reads too
            if not any(note_of(reader) for reader in node.users if reader is not holder):
                write_note(holder, form=None, filled=None, train=None)
            self.journal.update(entry, holder, statistic, root_of(statistic), node)
            for gradient in self.gradients.get(node, ()):  # which goes by the statistics that its forward was given
                set_field(gradient.node, gradient.form, role.removeprefix("new_"), statistic)

    def _retarget(self, site: Site, target: Form, training: bool) -> None:
        """Changes the mode of a call, and of its gradients, whatever their overload."""
        if target is site.form:
            set_field(site.node, target, "training", training)
        else:
            _respell(site.node, site.form, target, training)
            self._reread(site, target)
        for gradient in self.gradients.get(site.node, ()):
            set_field(gradient.node, gradient.form, "training", training)

    def _reread(self, site: Site, target: Form) -> None:
        """Reads the outputs of a call that was respelled where they are now, with the values that they have now."""
        node, known = site.node, _known(site)
        if known:
            spelled = target.read(node.args, node.kwargs)
            vals = tuple(output_val(self.draft, known, spelled, role) for role in target.roles)
            set_val(node, vals, node)
        single = len(site.form.roles) == 1
        held = [(r, h) for r in target.roles for h in site.outputs.get(r, ()) if not single and not h._erased]
        for role, holder in held:
            index = target.roles.index(role)
            if holder.args[1] != index:
                holder.args = (node, index)
            if role != "out" and "val" in holder.meta and known:
                set_val(holder, node.meta["val"][index], holder)


def _known(site: Site) -> dict[str, Any]:
    """The value of a site's output by role, empty when the graph keeps none."""
    val = site.node.meta.get("val")
    out = val[0] if isinstance(val, tuple | list) and val else val
    return {"out": out} if isinstance(out, torch.Tensor) else {}


def _refuse_gradient(gradient: GradientSite) -> Reason:
    """Why a gradient cannot follow its forward into the other mode, empty when it can."""
    if gradient.problem:
        return Reason(f"its gradient {gradient.name} cannot be read: {gradient.problem}")
    norm = gradient.norm
    if gradient.form.mode is not Mode.FLAG or norm.running_mean is None or norm.running_var is None:
        return Reason(f"its gradient {gradient.name} ({gradient.form.name}) knows batch statistics alone")
    return _NONE


def _refuse_readers(site: Site, gradients: Collection[Node]) -> Reason:
    """Why what reads a saved statistic stands against another mode, empty when nothing does but a gradient."""
    for role in _SAVED if len(site.outputs) > 1 else ():
        for holder in site.outputs.get(role, ()):
            if other := next((u for u in _readers(holder) if u not in gradients), None):
                read = f"its {role} is read by {other.name} ({other.target})"
                return Reason(f"{read}, and is another value in the other mode")
    return _NONE


def _readers(holder: Node) -> list[Node]:
    """Who reads a saved statistic, also through the aliases that autograd makes of it."""
    found = []
    for user in holder.users:
        found += _readers(user) if kind_of(user.target) is Kind.ALIAS else [user]
    return found


def _refuse_places(site: Site) -> Reason:
    """Why the out arguments of a call stand against another mode, empty when its saved statistics are read nowhere."""
    places = [site.norm.out[role] for role in ("save_mean", "save_invstd") if role in site.norm.out]
    if any(user > site.node for place in places for user in place.users):
        return Reason(f"the out arguments of {site.form.name} that hold its saved statistics are read later")
    return _NONE


def _refuse_single(site: Site) -> Reason:
    """Why an input has no batch statistics, empty when it has, or may have."""
    # F.batch_norm refuses it in Python, which leaves nothing in the graph, and the kernel writes NaN into running_var.
    # What a dynamic batch has is known when it runs.
    val = val_of(site.norm.input)
    if val is not None and all(type(size) is int for size in val.shape) and val.numel() == val.shape[1] > 0:
        return Reason(f"its input {list(val.shape)} has one value a channel: batch statistics are not defined")
    return _NONE


def learning(site: Site) -> dict[str, Node]:
    """The weight and bias of a site that gradients reach."""
    tensors = {field: getattr(site.norm, field) for field in ("weight", "bias")}
    return {f: t for f, t in tensors.items() if t is not None and t.target is not aten.detach.default}


def detach(site: Site) -> bool:
    """Cuts the site's weight and bias off from their gradients; returns whether there was one to cut off."""
    node, cut = site.node, learning(site)
    for field, tensor in cut.items():
        with node.graph.inserting_before(node):
            # named as torch.export names it: fx would call it detach_default
            held = node.graph.create_node("call_function", aten.detach.default, (tensor,), name="detach")
        held.meta = {key: node.meta[key] for key in ("nn_module_stack", "stack_trace") if key in node.meta}
        val = val_of(tensor)
        set_val(held, None if val is None else empty_val(val, val.shape, val.dtype), node)
        set_field(node, site.form, field, held)
    if cut:
        write_note(node, detached=[*cut])
    return bool(cut)


def attach(site: Site) -> None:
    """Undoes `detach`."""
    fields = note_of(site.node).get("detached", ())
    for field in ("weight", "bias") if fields is True else fields:  # 0.1.0 did not say which
        held = site.form.given(site.node.args, site.node.kwargs).get(field)
        if isinstance(held, Node) and held.target is aten.detach.default:
            set_field(site.node, site.form, field, held.args[0])
            if not held.users:
                held.graph.erase_node(held)
    if fields:
        forget(site.node, "detached")


def set_field(node: Node, form: Form, field: str, value: Any) -> None:
    """Sets one argument of a call, by position or by keyword as it was given."""
    index = form.arguments.index(field)
    if index < len(node.args):
        set_args(node, (*node.args[:index], value, *node.args[index + 1 :]))
    else:
        node.kwargs = {**node.kwargs, form.schema_names[index]: value}


def _respell(node: Node, form: Form, target: Form, training: bool) -> None:
    """Writes a call as another overload; what was given by keyword stays so."""
    raw = form.given(node.args, node.kwargs)
    values = [training if n == "training" else raw.get(n, target.extras.get(n)) for n in target.arguments]
    outs = {name: raw[form.destinations[role]] for role, name in target.destinations.items()}
    by_position = {*form.arguments[: len(node.args)]}
    # the overloads of eval alone have momentum where the others have training first: what follows it stays by position
    if "momentum" in by_position:
        by_position.add("training")
    count = next((i for i, name in enumerate(target.arguments) if name not in by_position), len(values))
    keywords = dict(zip(target.arguments[count:], values[count:], strict=True))
    # graphs written by hand call the packet, which picks the overload by its arguments
    packet = isinstance(node.target, torch._ops.OpOverloadPacket)
    node.target = target.overload.overloadpacket if packet else target.overload
    node.args, node.kwargs = tuple(values[:count]), {**keywords, **outs}
