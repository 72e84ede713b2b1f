"""Writing a site as another form: one call in the place of the old one; the nodes that held outputs read from it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch.fx import Node

from ...decomps.forms import BY_TARGET, OUT, UPDATED, BatchNorm, Dialect, Form, Gradient, Statistics
from ...decomps.ops import Kind, kind_of
from ...decomps.outputs import returned
from ..graph.draft import Draft
from ..graph.meta import carried, val_of
from ..graph.result import Log
from .completion import REBUILT, become, destinations, empty_like, fill_in, name_of, new_call, reserve
from .notes import note_of, write_note
from .site import Call, GradientSite, Site

S = TypeVar("S", bound=Call)

aten = torch.ops.aten


def rewrite(log: Log, sites: Iterable[S], plan: Callable[[S], Form | str], write: Callable[[S, Form], object]) -> None:
    """Writes each site as the row that is planned for it, and logs that, or the reason that is planned instead.

    Sites are read one at a time, when they are reached, so that an edit sees what earlier ones made of a later site:
    that is how two batch norms on one buffer chain in a functional program.
    """
    for site in sites:
        planned = plan(site)
        if isinstance(planned, str):
            log.decline(site, planned)
        elif planned is not site.form:
            log.edit(site, site.form.name, planned.name)
            write(site, planned)


def write_site(draft: Draft, site: Site, target: Form) -> None:
    """Replaces the call of a forward by the same batch norm spelled as `target`.

    Every output keeps its node: name, users and metadata. A form that returns one tensor turns into a read of the new
    call, and back. What the target cannot do without is filled in, what it does not return is rebuilt. Statistics that
    were written in place and now are returned are handed on, in a functional program as mutation outputs; returned ones
    that are written in place now are read there.
    """
    node, norm, operands = site.node, site.norm, site.node.all_input_nodes
    filled: dict[str, Any] = {name: fill_in(norm, node, name) for name in norm.missing if name in target.required}
    spelled = replace(norm, **filled) if filled else norm
    if target.destinations:
        spelled = replace(spelled, out=destinations(draft, norm, node, target))
    vals = _vals(draft, site, spelled, target)
    call = _place(site, target)
    become(call, target.overload, *target.write(spelled))
    _describe(call, site, target, vals, filled)
    # Who holds an output is not replaced, but becomes a read of the call: so every name that a signature, a module call
    # graph or a person refers to is still there with its metadata, and an edit costs the same in any graph.
    kept, last = roles_kept(site.form, norm, target), call
    for role, holder in [(role, holder) for role, holders in site.outputs.items() for holder in holders]:
        if holder is not call and not _handed(draft, call, norm, target, kept, role, holder):
            last.append(holder)  # to right behind the call: there the statistics still are what it read
            last = holder
            REBUILT[role](holder, spelled)
    if call is not node and site.form.roles != OUT:
        node.graph.erase_node(node)
    _erase_fills(operands if site.form.dialect is Dialect.FAMILY else ())
    if site.writes and target.statistics is Statistics.OUTPUTS:
        _list_updates(draft, call, norm, target)


def write_gradient(draft: Draft, site: GradientSite, target: Form) -> Node:
    """Replaces the call of a gradient by the same one spelled as `target`, and returns it.

    A missing weight is filled in where the target asks for one; a missing reserve is left for `wire_reserve`.
    """
    call, norm, operands = site.node, site.norm, site.node.all_input_nodes
    lacking = ["weight"] if norm.weight is None and "weight" in target.required else []
    filled: dict[str, Any] = {name: fill_in(norm, call, name) for name in lacking}
    call._rename(name_of(target.overload))
    become(call, target.overload, *target.write(replace(norm, **filled, out={})))
    _note(call, site, target, filled)
    last = call
    for role, place in norm.out.items():
        last = _copied_out(site, last, target.roles.index(role), role, place)
    _erase_fills(operands)
    return call


def _place(site: Call, target: Form) -> Node:
    """The node that becomes the call, where the old one was: that one itself, but the node that held the output where
    several outputs become one tensor, and a new one where one tensor becomes several.
    """
    node, held = site.node, site.outputs.get("out", ())
    if site.form.roles == OUT and target.roles != OUT:
        # the old node holds the output, which a signature or a user may name: it becomes the read of it
        with node.graph.inserting_before(node):
            call = new_call(node.graph, target.overload, ())
        call.meta.update(carried(node, None))
        return call
    if target.roles == OUT and site.form.roles != OUT and held:
        node.prepend(held[0])
        if not held[0].meta:  # a getitem that was made by hand says nothing of its origin
            held[0].meta.update(node.meta)
        return held[0]
    if site.form.roles != OUT:  # what is an output keeps its name, which a signature may refer to
        node._rename(name_of(target.overload))
    return node


def _vals(draft: Draft, site: Site, spelled: BatchNorm, target: Form) -> Any:
    """The `val` of the new call, from that of the old one; None where it has none."""
    old = site.node.meta.get("val")
    known = dict(zip(site.form.roles, old if isinstance(old, tuple | list) else (old,), strict=False))
    out = known.get("out")
    if out is None:
        return None
    if not spelled.training:  # what is saved in eval has another shape on CPU in another form: only the output stays
        known = {"out": out}
    vals = tuple(output_val(draft, known, spelled, role) for role in target.roles)
    return vals[0] if target.roles == OUT else vals


def output_val(draft: Draft, known: dict[str, Any], spelled: BatchNorm, role: str) -> torch.Tensor:
    """The `val` of one output of the target, given those of the old call by role; "out" has to be there."""
    if role in known:
        return known[role]  # type: ignore[no-any-return]
    out = known["out"]
    (size,), dtype = returned(spelled, role, lambda node: out if node is spelled.input else val_of(node))
    return draft.fake(out, size, dtype)


def _describe(call: Node, site: Call, target: Form, vals: Any, filled: dict[str, Node]) -> None:
    """The call's metadata: the old node's, the values of the new outputs, and what was filled in, for the way back."""
    call.meta.pop("tensor_meta", None)
    call.meta.pop("val", None)
    if vals is not None:
        call.meta["val"] = vals
    _note(call, site, target, filled)


def _note(call: Node, site: Call, target: Form, filled: dict[str, Node]) -> None:
    """Notes what was filled in for the family. `custom`, where notes are, is the one key of the metadata that torch
    saves, loads and carries through a retrace.
    """
    if filled or "custom" in call.meta or "custom" in site.node.meta:
        noted = {
            **dict.fromkeys((*note_of(call), "form", "filled")),
            **note_of(site.node),
            "form": None,
            "filled": None,
        }
        if filled and target.dialect is Dialect.FAMILY:
            noted |= {"form": site.form.name, "filled": list(filled)}
        write_note(call, **noted)


def roles_kept(form: Form, norm: BatchNorm, target: Form) -> tuple[str, ...]:
    """The outputs of a form that a call of the target returns as they are.

    What the family saves in eval has another shape on CPU than elsewhere: there a legacy form's are rebuilt in one.
    """
    if not norm.training and not target.destinations and target.dialect is Dialect.FAMILY is not form.dialect:
        return ("out", "reserve")
    return target.roles


def _handed(
    draft: Draft, call: Node, norm: BatchNorm, target: Form, kept: Sequence[str], role: str, holder: Node
) -> bool:
    """Whether who held an output has it now, or is gone: False where the output has to be rebuilt."""
    if role in kept and target.roles != OUT:
        index = target.roles.index(role)
        # a getitem of the same place is left alone: setting its arguments makes fx look for their users anew
        if holder.target is not operator.getitem or holder.args != (call, index):
            become(holder, operator.getitem, (call, index))
        return True
    # written in place now, and read there
    updated = role in UPDATED and norm.training and norm.running_mean is not None
    if role not in kept and not updated and holder.users:
        return False
    if role in kept:
        draft.replace(holder, call)
    elif updated:
        draft.replace(holder, norm.running_mean if role == UPDATED[0] else norm.running_var)
    holder.graph.erase_node(holder)
    return True


def _copied_out(site: GradientSite, last: Node, index: int, role: str, place: Node) -> Node:
    """Copies a gradient to where an `.out` call wrote it, which whoever held that output now reads."""
    call = site.node
    grad = _read(call, index, last, empty_like(place))
    with call.graph.inserting_after(grad):
        copied = new_call(call.graph, aten.copy_.default, (place, grad))
    copied.meta = carried(call, val_of(place))
    for holder in site.outputs.get(role, ()):
        holder.replace_all_uses_with(copied)
        call.graph.erase_node(holder)
    return copied


def _read(call: Node, index: int, behind: Node, val: Any) -> Node:
    """A new read of one output of a call, right behind another node."""
    with call.graph.inserting_after(behind):
        holder = call.graph.call_function(operator.getitem, (call, index))
    holder.meta = carried(call, val)
    return holder


def _erase_fills(operands: Iterable[Node]) -> None:
    """Erases what had been filled in for a call alone, which was one of the family."""
    for operand in operands:
        if not operand.users and kind_of(operand.target) in (Kind.FILL, Kind.MEASURE):
            inner = operand.all_input_nodes
            operand.graph.erase_node(operand)
            _erase_fills(inner)


def forward_of(norm: Gradient) -> Node | None:
    """The batch norm that saved the statistics of a gradient, when it is in the graph."""
    # autograd saves a detached alias of an output: the gradient in a joint graph reads that
    source = norm.save_invstd
    while isinstance(source, Node) and kind_of(source.target) is Kind.ALIAS:
        source = source.args[0]
    made = source.args[0] if getattr(source, "target", None) is operator.getitem else None
    return made if getattr(made, "target", None) in BY_TARGET else None


def wire_reserve(draft: Draft, call: Node, norm: Gradient) -> None:
    """Hands a gradient of the family the reserve of its forward when that is of the family too, else an empty one."""
    made = forward_of(norm)
    forward = None if made is None else BY_TARGET[made.target][0]  # type: ignore[index]
    # What is saved means the same in every kernel. With an empty reserve ours takes the native gradient on CUDA.
    if made is None or forward is None or forward.dialect is not Dialect.FAMILY:
        call.args = (*call.args[:-1], reserve(draft, call, norm.input))
        return
    index = forward.roles.index("reserve")
    held = [n for n in made.users if n.target is operator.getitem and n.args[1] == index]
    if not held:
        vals = made.meta.get("val")
        held = [_read(made, index, made, None if vals is None else vals[index])]
    call.args = (*call.args[:-1], held[0])


def _list_updates(draft: Draft, call: Node, norm: BatchNorm, target: Form) -> None:
    """Hands on the new running statistics that a form in a functional program wrote behind its schema."""
    vals, after = call.meta.get("val"), call
    for role, statistic in zip(UPDATED, (norm.running_mean, norm.running_var), strict=True):
        val = None if vals is None else empty_like(statistic, (vals[0].shape[1],))
        after = _read(call, target.roles.index(role), after, val)
        draft.mutate(statistic, call, after)
