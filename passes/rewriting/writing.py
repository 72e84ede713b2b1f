"""Writing a site as another form: one new call, and the nodes that held the old call's outputs read from it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.fx import Graph, Node

from ...decomps.forms import BY_TARGET, OUT, UPDATED, BatchNorm, Dialect, Form, Gradient, Statistics
from ...decomps.outputs import fill, like_of, returned
from ..graph.draft import Draft
from ..graph.journal import ORIGIN, note_of
from ..graph.meta import carried, empty_val, val_of
from ..graph.result import Log
from .site import Site

aten = torch.ops.aten


def rewrite(
    log: Log, sites: Iterable[Site], plan: Callable[[Site], Form | str], write: Callable[[Site, Form], object]
) -> None:
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


def write_site(draft: Draft, site: Site, norm: BatchNorm, target: Form) -> None:
    """Replaces the call of a forward by `norm` spelled as `target`.

    Every output keeps its node: name, users and metadata. A form that returns one tensor turns into a read of the new
    call, and back; the new call takes the old one's place and metadata. What the target cannot do without is filled in,
    what it does not return is rebuilt. Statistics that were written in place and now are returned are handed on, in a
    functional program as mutation outputs; returned ones that are written in place now are read there.
    """
    node = site.node
    with node.graph.inserting_before(node):
        filled: dict[str, Any] = {name: _fill(norm, node, name) for name in norm.missing if name in target.required}
        spelled = (
            replace(norm, **filled, out=_destinations(norm, node, target)) if filled or target.destinations else norm
        )
        args, kwargs = target.write(spelled)
        call = _placed(site, target, args, kwargs)
    call.meta = _meta(draft, site, call, spelled, target, tuple(filled))
    read = roles_kept(site.form, norm, target)
    last = call
    for role, holders in site.outputs.items():
        for holder in holders:
            if holder is call:
                continue
            if role in read and target.roles == OUT:
                draft.replace(holder, call)
                node.graph.erase_node(holder)
            elif role in read:
                _become(holder, operator.getitem, (call, target.roles.index(role)))
            elif role in UPDATED and norm.training:
                written = norm.running_mean if role == UPDATED[0] else norm.running_var
                draft.replace(holder, written)
                node.graph.erase_node(holder)
            elif holder.users:
                last.append(holder)  # to right behind the call: there the statistics still are what it read
                last = holder
                REBUILT[role](holder, spelled)
            else:
                node.graph.erase_node(holder)
    if node is not call and node.target is not operator.getitem:
        # only the family has anything filled in for it
        _erase(node) if site.form.dialect is Dialect.FAMILY else node.graph.erase_node(node)
    writes = site.form.statistics is Statistics.IN_PLACE and norm.running_mean is not None
    if writes and norm.training and target.statistics is Statistics.OUTPUTS:
        _list_updates(draft, call, norm, target)


def write_gradient(draft: Draft, site: Site, norm: Gradient, target: Form) -> Node:
    """Replaces the call of a gradient by `norm` spelled as `target`, and returns the new call.

    A missing weight is filled in where the target asks for one; a missing reserve is left for `wire_reserve`.
    """
    node = site.node
    with node.graph.inserting_before(node):
        filled = norm.weight is None and "weight" in target.required
        weight = _fill(norm, node, "weight") if filled else norm.weight
        args, kwargs = target.write(replace(norm, weight=weight, out={}))
        call = _call(node.graph, target.overload, args, kwargs)
    call.meta = dict(node.meta)
    custom = {key: value for key, value in (call.meta.get("custom") or {}).items() if key != ORIGIN}
    if filled:
        custom[ORIGIN] = {"form": site.form.name, "filled": ["weight"]}
    if custom or "custom" in call.meta:
        call.meta["custom"] = custom
    for role, place in norm.out.items():
        _copied_out(site, call, target.roles.index(role), role, place)
    for holders in site.outputs.values() if not norm.out else ():
        for holder in holders:
            holder.args = (call, holder.args[1])
    _erase(node)
    return call


def _copied_out(site: Site, call: Node, index: int, role: str, place: Node) -> None:
    """Copies a gradient to where an `.out` call wrote it, which whoever held that output now reads."""
    with call.graph.inserting_before(site.node):
        grad = call.graph.call_function(operator.getitem, (call, index))
        copied = _call(call.graph, aten.copy_.default, (place, grad))
    grad.meta = carried(call, _empty_like(place))
    copied.meta = carried(call, val_of(place))
    for holder in site.outputs.get(role, ()):
        holder.replace_all_uses_with(copied)
        call.graph.erase_node(holder)


_FILLS = (aten.new_ones.default, aten.new_zeros.default, aten.full.default, aten.new_empty.default, aten.sym_size.int)


def _erase(node: Node) -> None:
    """Erases a node, and what had been filled in for it alone."""
    operands = node.all_input_nodes
    node.graph.erase_node(node)
    for operand in operands:
        if not operand.users and operand.target in _FILLS:
            _erase(operand)


def forward_of(norm: Gradient) -> Node | None:
    """The batch norm that saved the statistics of a gradient, when it is in the graph."""
    source = norm.save_invstd
    while getattr(source, "target", None) in (aten.detach.default, aten.alias.default):
        source = source.args[0]
    made = source.args[0] if getattr(source, "target", None) is operator.getitem else None
    return made if getattr(made, "target", None) in BY_TARGET else None


def wire_reserve(draft: Draft, call: Node, norm: Gradient) -> None:
    """Hands a gradient of the family the reserve of its forward when that is of the family too, else an empty one."""
    made = forward_of(norm)
    forward = None if made is None else BY_TARGET[made.target][0]  # type: ignore[index]
    if made is not None and forward is not None and forward.dialect is Dialect.FAMILY:
        index = forward.roles.index("reserve")
        held = [n for n in made.users if n.target is operator.getitem and n.args[1] == index]
        if not held:
            with call.graph.inserting_after(made):
                held = [call.graph.call_function(operator.getitem, (made, index))]
            vals = made.meta.get("val")
            held[0].meta = carried(made, None if vals is None else vals[index])
        reserve = held[0]
    else:
        with call.graph.inserting_before(call):
            reserve = _call(call.graph, aten.new_empty.default, (norm.input, [0]), {"dtype": torch.uint8})
        val = val_of(norm.input)
        reserve.meta = carried(call, None if val is None else draft.fake(val, 0, torch.uint8))
    call.args = (*call.args[:-1], reserve)


def roles_kept(form: Form, norm: BatchNorm, target: Form) -> tuple[str, ...]:
    """The outputs of a form that a call of the target returns as they are.

    What the family saves in eval has another shape on CPU than elsewhere: there a legacy form's are rebuilt in one.
    """
    if not norm.training and not target.destinations and target.dialect is Dialect.FAMILY is not form.dialect:
        return ("out", "reserve")
    return target.roles


def _placed(site: Site, target: Form, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Node:
    """The new call, in the old one's place. A target that returns one tensor takes over the node that held it."""
    node = site.node
    holders = site.outputs.get("out", []) if len(site.form.roles) > 1 else []
    if target.roles != OUT or not holders:
        return _call(node.graph, target.overload, args, kwargs)
    node.prepend(holders[0])
    _become(holders[0], target.overload, args)
    holders[0].kwargs = kwargs
    return holders[0]


def _call(graph: Graph, overload: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Node:
    """A call named as torch.export names it, after its op and not its overload."""
    return graph.create_node("call_function", overload, args, kwargs, name=overload.overloadpacket.__name__)


def _become(node: Node, target: Callable[..., Any], args: tuple[Any, ...], val: Any = None) -> None:
    """Turns a node into another call under its old name, so that its users and the signature need no change."""
    if node.target is not target:  # each of the three is dear to set
        node.target = target
    node.args = args
    if node.kwargs:
        node.kwargs = {}
    if val is not None:
        node.meta = carried(node, val)


def _empty_like(node: Node, shape: Sequence[Any] | None = None) -> torch.Tensor | None:
    """A new `val` like the node's own, of another shape if one is given; None when the node has none."""
    val = val_of(node)
    return None if val is None else empty_val(val, val.shape if shape is None else shape, val.dtype)


def _fill(norm: BatchNorm | Gradient, node: Node, name: str) -> Node:
    """The neutral [C] tensor for a missing weight, bias or statistic, of the dtype of those that are there."""
    input_val, graph = val_of(norm.input), node.graph
    channels: Any = None if input_val is None else input_val.shape[1]
    size = channels
    if type(channels) is not int:
        size = _call(graph, aten.sym_size.int, (norm.input, 1))
        size.meta = carried(node, channels)
    filled: Node = fill(norm, name, size, partial(_call, graph))
    filled.meta = carried(node, None if channels is None else _empty_like(like_of(norm), (channels,)))
    return filled


def _destinations(norm: BatchNorm, node: Node, target: Form) -> dict[str, Any]:
    """Where an `.out` call writes: the old destinations, and an empty one for a reserve that the old form lacks."""
    absent = [role for role in target.destinations if role not in norm.out]
    made = {}
    for role in absent:
        made[role] = _call(node.graph, aten.new_empty.default, (norm.input, [0]), {"dtype": torch.uint8})
        val = val_of(norm.input)
        made[role].meta = carried(node, None if val is None else empty_val(val, (0,), torch.uint8))
    return {**norm.out, **made}


def _meta(
    draft: Draft, site: Site, call: Node, spelled: BatchNorm, target: Form, filled: tuple[str, ...]
) -> dict[str, Any]:
    """The call's metadata: the old node's, the values of the new outputs, and what was filled in, for the way back."""
    old = site.node.meta.get("val")
    known = dict(zip(site.form.roles, old if isinstance(old, tuple | list) else (old,), strict=False))
    vals: Any = None
    if known.get("out") is not None:
        vals = tuple(output_val(draft, known, spelled, target, role) for role in target.roles)
    single = target.roles == OUT and vals is not None
    meta = carried(call if target.roles == OUT and call.meta else site.node, vals[0] if single else vals)
    if filled or "custom" in meta:
        custom = {key: value for key, value in (meta.get("custom") or {}).items() if key != ORIGIN}
        note = {key: value for key, value in note_of(site.node).items() if key not in ("form", "filled")}
        if filled and target.dialect is Dialect.FAMILY:
            note |= {"form": site.form.name, "filled": list(filled)}
        if note:
            custom[ORIGIN] = note
        meta["custom"] = custom
    return meta


def output_val(draft: Draft, known: dict[str, Any], spelled: BatchNorm, target: Form, role: str) -> torch.Tensor:
    """The `val` of one output of the target, given those of the old call by role; "out" has to be there."""
    if role in known and (spelled.training or role == "out"):
        return known[role]  # type: ignore[no-any-return]
    out = known["out"]
    (size,), dtype = returned(spelled, role, lambda node: out if node is spelled.input else val_of(node))
    return draft.fake(out, size, dtype)


def _copied(field: str) -> Callable[[Node, BatchNorm], None]:
    def rebuild(holder: Node, norm: BatchNorm) -> None:
        statistic = getattr(norm, field)
        _become(holder, aten.clone.default, (statistic,), _empty_like(statistic))

    return rebuild


def _inverse_deviation(holder: Node, norm: BatchNorm) -> None:
    """1/sqrt(running_var + eps), which is what every kernel that saves it saves."""
    var = norm.running_var
    with holder.graph.inserting_before(holder):
        shifted = _call(holder.graph, aten.add.Tensor, (var, norm.eps))
    shifted.meta = carried(holder, _empty_like(var))
    _become(holder, aten.rsqrt.default, (shifted,), _empty_like(var))


# Outputs that the family's eval op does not return, or not in one shape: rebuilt from the running statistics.
REBUILT: dict[str, Callable[[Node, BatchNorm], None]] = {
    "save_mean": _copied("running_mean"),
    "save_invstd": _inverse_deviation,
    "new_running_mean": _copied("running_mean"),
    "new_running_var": _copied("running_var"),
}


def _list_updates(draft: Draft, call: Node, norm: BatchNorm, target: Form) -> None:
    """Hands on the new running statistics that a form in a functional program wrote behind its schema."""
    after = call
    for role, statistic in zip(UPDATED, (norm.running_mean, norm.running_var), strict=True):
        index = target.roles.index(role)
        with call.graph.inserting_after(after):
            after = call.graph.call_function(operator.getitem, (call, index))
        vals = call.meta.get("val")
        after.meta = carried(call, None if vals is None else _empty_like(statistic, (vals[0].shape[1],)))
        draft.mutate(statistic, call, after)
