"""Writing a site as elementary operations: its formula, traced on the values of the graph and put in its place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx

from ...decomps import formula
from ...decomps.forms import GRADS, UPDATED, BatchNorm, Statistics
from ..graph.draft import Draft
from ..graph.journal import ORIGIN
from ..graph.tracing import in_one_mode
from .site import Site

aten = torch.ops.aten


def unwritable(site: Site) -> str:
    """Why a site cannot be written as elementary operations, empty when it can."""
    norm = site.norm
    known = [t for f in fields(norm) if isinstance(t := getattr(norm, f.name), Node)]
    unknown = [node.name for node in known if not isinstance(node.meta.get("val"), torch.Tensor)]
    if unknown:
        return f"the shape of {unknown[0]} is not known, and its formula is traced with it"
    if site.form.destinations:
        return "it writes to its out arguments"
    if isinstance(norm, BatchNorm):
        for role in ("reserve", "impl_index"):
            if site.used(role):
                return f"its {role} is read, which elementary operations do not have"
        val = norm.input.meta["val"]
        few = all(type(size) is int for size in val.shape) and val.numel() <= val.shape[1]
        return "it has one value a channel or none: its unbiased variance is undefined" if norm.training and few else ""
    for role, asked in zip(GRADS, norm.output_mask, strict=True):
        if site.used(role) and not asked:
            return f"its {role} is read, which its output_mask leaves out"
    return ""


def write_elementary(draft: Draft, site: Site) -> None:
    """Replaces the site's call by the operations of its formula; every output that is read is one of them."""
    node, norm = site.node, site.norm
    of = formula.forward if isinstance(norm, BatchNorm) else formula.gradient
    writes = isinstance(norm, BatchNorm) and norm.training and site.form.statistics is Statistics.IN_PLACE
    wanted = {role for role in site.outputs if site.used(role)} | (set(UPDATED) if writes else set())
    made = _inline(site, of, wanted)
    last = node
    for role, statistic in zip(UPDATED, (norm.running_mean, norm.running_var), strict=True):
        if not writes or role not in made:
            continue
        if draft.functional:
            draft.mutate(statistic, last, made[role])
            continue
        with node.graph.inserting_after(last):
            last = node.graph.call_function(aten.copy_.default, (statistic, made[role]))
        last.meta = {**metadata_for(node), **{key: value for key, value in statistic.meta.items() if key == "val"}}
    if not norm.training and isinstance(norm, BatchNorm):
        made |= dict(zip(UPDATED, (norm.running_mean, norm.running_var), strict=True))
    for role, holders in site.outputs.items():
        for holder in holders:
            if holder.users:
                holder.replace_all_uses_with(made[role])
                draft.renamed[holder.name] = made[role].name
            if holder is not node:
                node.graph.erase_node(holder)
    node.graph.erase_node(node)


def metadata_for(node: Node) -> dict[str, Any]:
    """The metadata of a site for the nodes that stand for it, which have values of their own."""
    kept = {key: value for key, value in node.meta.items() if key not in ("val", "tensor_meta")}
    if "custom" in kept:
        kept["custom"] = {key: value for key, value in kept["custom"].items() if key != ORIGIN}
    return kept


def _inline(site: Site, of: Callable[[Any], dict[str, torch.Tensor]], wanted: set[str]) -> dict[str, Node]:
    """The nodes of a formula ahead of the site, by the role of the output that each one is, of those wanted."""
    node, norm = site.node, site.norm
    names = [f.name for f in fields(norm) if isinstance(getattr(norm, f.name), Node)]
    values = in_one_mode([getattr(norm, name).meta["val"] for name in names])
    roles: list[str] = []

    def traced(*tensors: torch.Tensor) -> list[torch.Tensor]:
        found = of(replace(norm, **dict(zip(names, tensors, strict=True))))
        roles[:] = [role for role in found if role in wanted]
        return [found[role] for role in roles]

    with torch.no_grad():
        graph = make_fx(traced, _allow_non_fake_inputs=True)(*values).graph
    copied: dict[Node, Node] = dict(
        zip(graph.find_nodes(op="placeholder"), (getattr(norm, name) for name in names), strict=True)
    )
    carried = metadata_for(node)
    with node.graph.inserting_before(node):
        for inner in graph.nodes:
            if inner.op == "call_function":
                copied[inner] = node.graph.node_copy(inner, copied.__getitem__)
                copied[inner].meta = {**carried, "val": inner.meta["val"]}
    results: Any = graph.output_node().args[0]
    return {role: copied[result] for role, result in zip(roles, results, strict=True)}
