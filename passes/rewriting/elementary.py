"""Writing a site as elementary operations: its formula, traced on the values of the graph and put in its place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import torch
from torch.fx import Node

from ...decomps import formula
from ...decomps.forms import GRADS, UPDATED, BatchNorm, Gradient
from ..graph.draft import Draft
from ..graph.meta import carried, val_of
from ..graph.result import Reason
from ..graph.tracing import trace
from .notes import with_note
from .site import Call, GradientSite

aten = torch.ops.aten


def refuse_elementary(site: Call) -> Reason:
    """Why a site cannot be written as elementary operations, empty when it can."""
    norm = site.norm
    # dtypes and ranks decide which operations the formula is: halves are widened, [C] is viewed as the input asks
    unknown = [node.name for node in _operands(norm).values() if val_of(node) is None]
    if unknown:
        told = f"the shape of {unknown[0]} is not known, and its formula is traced with it"
        return Reason(told, "trace the program with fake tensors")
    if site.form.destinations:
        return Reason("it writes to its out arguments")
    return _refuse_gradient(site) if isinstance(site, GradientSite) else _refuse_forward(site)


def _refuse_forward(site: Call) -> Reason:
    for role in ("reserve", "impl_index"):
        if site.used(role):
            return Reason(f"its {role} is read, which elementary operations do not have")
    val = site.norm.input.meta["val"]
    few = all(type(size) is int for size in val.shape) and val.numel() <= val.shape[1]
    # n / (n - 1) of one value; how many a dynamic batch has is only known when it runs
    single = site.norm.training and few
    return Reason("it has one value a channel or none: its unbiased variance is undefined" if single else "")


def _refuse_gradient(site: GradientSite) -> Reason:
    masked = (role for role, asked in zip(GRADS, site.norm.output_mask, strict=True) if site.used(role) and not asked)
    role = next(masked, None)
    return Reason("" if role is None else f"its {role} is read, which its output_mask leaves out")


def write_elementary(draft: Draft, site: Call) -> None:
    """Replaces the site's call by the operations of its formula; every output that is read is one of them."""
    node, norm = site.node, site.norm
    made = _inline(site)
    # in eval a form may return the statistics that it was given as the new ones
    if site.writes:
        _update(draft, site, made)
    elif isinstance(norm, BatchNorm) and not norm.training:
        made |= dict(zip(UPDATED, (norm.running_mean, norm.running_var), strict=True))
    for role, holders in site.outputs.items():
        for holder in holders:
            if holder.users:
                draft.replace(holder, made[role])
            if holder is not node:  # of a form that returns one tensor the call itself holds it, and goes last
                node.graph.erase_node(holder)
    node.graph.erase_node(node)


def _inline(site: Call) -> dict[str, Node]:
    """The operations of a site's formula ahead of it: the node of each output that is read, and of what it writes."""
    norm: Any = site.norm
    of: Any = formula.forward if isinstance(norm, BatchNorm) else formula.gradient
    wanted = {role for role in site.outputs if site.used(role)} | (set(UPDATED) if site.writes else set())

    # what nobody reads would be dead operations in the graph
    def computed(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {role: tensor for role, tensor in of(replace(norm, **tensors)).items() if role in wanted}

    operands = _operands(norm)
    traced = trace(computed, {name: node.meta["val"] for name, node in operands.items()})
    return traced.inline(site.node, operands, metadata_for(site.node))


def _update(draft: Draft, site: Call, made: Mapping[str, Node]) -> None:
    """Hands on the new running statistics: as mutations of a functional program, else written where the site was."""
    last = site.node
    for role, statistic in zip(UPDATED, (site.norm.running_mean, site.norm.running_var), strict=True):
        if draft.functional:
            draft.mutate(statistic, last, made[role])
            continue
        # behind the call, and so behind all operations of the formula, which read what the statistics were
        with last.graph.inserting_after(last):
            last = last.graph.call_function(aten.copy_.default, (statistic, made[role]))
        last.meta = {**metadata_for(site.node), **{key: val for key, val in statistic.meta.items() if key == "val"}}


def _operands(norm: BatchNorm | Gradient) -> dict[str, Node]:
    """The nodes that a record reads, by field."""
    return {f.name: node for f in fields(norm) if isinstance(node := getattr(norm, f.name), Node)}


def metadata_for(node: Node) -> dict[str, Any]:
    """The metadata of a site for the nodes that stand for it, which have values of their own."""
    kept = carried(node, None)
    # our note is of a call that is gone, and would be read as one of these nodes' own; what others wrote there stays
    if "custom" in kept:
        kept["custom"] = with_note(kept["custom"], {})
    return kept
