"""Writing a site as another form: one new call, and the nodes that held the old call's outputs read from it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, Node

from torch_batchnorm.decomps.forms import UPDATED, BatchNorm, Form, Mode, Statistics
from torch_batchnorm.passes.program import Draft, empty_val
from torch_batchnorm.passes.site import NEUTRAL, ORIGIN, Site

aten = torch.ops.aten


def write_site(draft: Draft, site: Site, norm: BatchNorm, target: Form) -> None:
    """Replaces the site's call by `norm` spelled as `target`.

    Every output keeps its node: name, users and metadata. A form that returns one tensor turns into a read of the new
    call; the new call takes the old one's place and metadata. What the target cannot do without is filled in, what it
    does not return is rebuilt, and statistics that a functional program wrote in place become mutation outputs.
    """
    node = site.node
    with node.graph.inserting_before(node):
        filled = {name: _fill(norm, node, name) for name in norm.missing}
        spelled = (
            replace(norm, **filled, out=_destinations(norm, node, target)) if filled or target.destinations else norm
        )
        args, kwargs = target.write(spelled)
        call = _call(node.graph, target.overload, args, kwargs)
    call.meta = _meta(draft, site, spelled, target, tuple(filled))
    # What eval saves has another shape on CPU than elsewhere: where it is read, it is rebuilt in one.
    read = ("out", "reserve") if target.mode is Mode.EVAL and not target.destinations else target.roles
    last = call
    for role, holders in site.outputs.items():
        for holder in holders:
            if role in read:
                _become(holder, operator.getitem, (call, target.roles.index(role)))
            elif holder.users:
                last.append(holder)  # to right behind the call: there the statistics still are what it read
                last = holder
                _REBUILT[role](holder, spelled)
            else:
                node.graph.erase_node(holder)
    if node.target is not operator.getitem:
        node.graph.erase_node(node)
    hidden = site.form.statistics is Statistics.IN_PLACE and norm.running_mean is not None
    if hidden and target.statistics is Statistics.OUTPUTS:
        _list_updates(draft, call, norm, target)


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
        node.meta = _carried(node, val)


def _carried(node: Node, val: Any) -> dict[str, Any]:
    """A node's metadata for a node that stands for it and has another value."""
    kept = {key: value for key, value in node.meta.items() if key not in ("val", "tensor_meta")}
    return kept if val is None else {**kept, "val": val}


def _val(node: Node) -> torch.Tensor | None:
    val = node.meta.get("val")
    return val if isinstance(val, torch.Tensor) else None


def _empty_like(node: Node, shape: Sequence[Any] | None = None) -> torch.Tensor | None:
    """A new `val` like the node's own, of another shape if one is given; None when the node has none."""
    val = _val(node)
    return None if val is None else empty_val(val, val.shape if shape is None else shape, val.dtype)


def _fill(norm: BatchNorm, node: Node, name: str) -> Node:
    """The neutral [C] tensor for a missing weight, bias or statistic, of the dtype of those that are there."""
    like = next((t for t in (norm.weight, norm.bias, norm.running_mean) if t is not None), norm.input)
    input_val, graph = _val(norm.input), node.graph
    channels: Any = None if input_val is None else input_val.shape[1]
    size = channels
    if type(channels) is not int:
        size = _call(graph, aten.sym_size.int, (norm.input, 1))
        size.meta = _carried(node, channels)
    make = (aten.new_zeros.default, aten.new_ones.default)[NEUTRAL[name]]
    filled = _call(graph, make, (like, [size]))
    filled.meta = _carried(node, None if channels is None else _empty_like(like, (channels,)))
    return filled


def _destinations(norm: BatchNorm, node: Node, target: Form) -> dict[str, Any]:
    """Where an `.out` call writes: the old destinations, and an empty one for a reserve that the old form lacks."""
    absent = [role for role in target.destinations if role not in norm.out]
    made = {}
    for role in absent:
        made[role] = _call(node.graph, aten.new_empty.default, (norm.input, [0]), {"dtype": torch.uint8})
        val = _val(norm.input)
        made[role].meta = _carried(node, None if val is None else empty_val(val, (0,), torch.uint8))
    return {**norm.out, **made}


def _meta(draft: Draft, site: Site, spelled: BatchNorm, target: Form, filled: tuple[str, ...]) -> dict[str, Any]:
    """The call's metadata: the old node's, the values of the new outputs, and what was filled in, for the way back."""
    old = site.node.meta.get("val")
    known = dict(zip(site.form.roles, old if isinstance(old, tuple | list) else (old,), strict=False))
    vals = (
        None if known.get("out") is None else tuple(_output_val(draft, known, spelled, target, r) for r in target.roles)
    )
    meta = _carried(site.node, vals)
    if filled:
        meta["custom"] = {**(meta.get("custom") or {}), ORIGIN: {"form": site.form.name, "filled": list(filled)}}
    return meta


def _output_val(draft: Draft, known: dict[str, Any], spelled: BatchNorm, target: Form, role: str) -> torch.Tensor:
    if role in known and (target.mode is Mode.TRAIN or role == "out"):
        return known[role]  # type: ignore[no-any-return]
    out = known["out"]
    if role == "reserve":
        return draft.fake(out, 0, torch.uint8)
    statistic = _val(spelled.running_mean)
    unsaved = target.mode is Mode.EVAL and out.device.type == "cpu"
    return draft.fake(out, 0 if unsaved else out.shape[1], out.dtype if statistic is None else statistic.dtype)


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
    shifted.meta = _carried(holder, _empty_like(var))
    _become(holder, aten.rsqrt.default, (shifted,), _empty_like(var))


# Outputs that the family's eval op does not return, or not in one shape: rebuilt from the running statistics.
_REBUILT: dict[str, Callable[[Node, BatchNorm], None]] = {
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
        after.meta = _carried(call, None if vals is None else _empty_like(statistic, (vals[0].shape[1],)))
        draft.mutate(statistic, call, after)
