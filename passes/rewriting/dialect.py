"""The two dialects of an exported program, without retracing: mutations listed as outputs, or written in place."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Node
from torch.fx.node import map_arg

from ...decomps.forms import BY_TARGET, UPDATED, Statistics, family_form
from ..graph.draft import Draft
from ..graph.effects import may_alias
from ..graph.result import Edit
from .site import find_sites
from .updates import Inputs
from .writing import write_site

aten = torch.ops.aten


def to_training(draft: Draft, edits: list[Edit]) -> str:
    """Makes a functional program one that trains: batch norm writes its statistics where it runs, as its gradient
    expects, everything else is written at the end, and the signature lists no mutation.

    Returns why that cannot be done exactly, empty when it was. Nothing is changed then.
    """
    pairs = draft.mutations()
    output = draft.graphs[0][1].output_node()
    returned: list[Any] = list(output.args[0])[len(pairs) :]  # type: ignore[arg-type]
    for placeholder, _ in pairs:
        readers = [output] if placeholder in returned else [u for u in placeholder.users if may_alias(u)]
        if readers:
            return f"{placeholder.name} is mutated, and {readers[0].name} may hand out the memory it had before"
    mutated = {placeholder for placeholder, _ in pairs}
    for placeholder, value in pairs:
        if value in mutated and value is not placeholder:
            return f"{placeholder.name} becomes {value.name}, as it was before it is mutated itself"
    draft.drop_mutations()
    for site in find_sites(draft.graphs):
        norm = site.norm
        statistics = () if norm is None else (norm.running_mean, norm.running_var)
        if site.problem or norm is None or not norm.training or site.form.statistics is not Statistics.OUTPUTS:
            continue
        new = [holder for role in UPDATED for holder in site.outputs.get(role, ())]
        last = all(s in mutated and all(u <= site.node for u in s.users) for s in statistics)
        if last and not any(holder in returned for holder in new):
            target = family_form(True, Statistics.IN_PLACE, out=False)
            edits.append(Edit(site.name, site.module, site.form.name, target.name))
            write_site(draft, site, norm, target)
    for placeholder, value in pairs:
        _write(placeholder, value, output, draft)
    draft.become(functional=False)
    return ""


def _write(placeholder: Node, value: Node, output: Node, draft: Draft) -> None:
    """Writes a value that was listed as a mutation into its placeholder, unless its batch norm did."""
    if value is placeholder or value._erased or value.graph is not output.graph:
        return
    counts = value.target is aten.add.Tensor and value.args[0] is placeholder and not value.users
    if counts and all(user <= value for user in placeholder.users):
        value.target = aten.add_.Tensor
        return
    with output.graph.inserting_before(output):
        written = output.graph.create_node("call_function", aten.copy_.default, (placeholder, value), name="copy_")
    written.meta = {key: value.meta[key] for key in ("val", "stack_trace", "nn_module_stack") if key in value.meta}


def to_functional(draft: Draft, inputs: Inputs) -> str:
    """Makes a training program a functional one: what is written in place becomes a new value, and the signature lists
    those of buffers and user inputs.

    Returns why that cannot be done exactly, empty when it was. Nothing is changed then.
    """
    writers = [node for _, graph in draft.graphs for node in graph.nodes if _writes(node)]
    for number, node in enumerate(writers):
        if reason := _stuck(draft, inputs, node, writers[: number + 1]):
            return reason
    for site in find_sites(draft.graphs):
        norm = site.norm
        if site.form.statistics is not Statistics.IN_PLACE or (norm is not None and norm.training is False):
            continue
        reason = site.problem or ("" if norm is not None else f"{site.name} cannot be read")
        if not reason and norm is not None and norm.running_mean is not None:
            reason = inputs.unlistable_update(site)
        if reason:
            return f"{site.name} ({site.form.name}): {reason}"
    draft.become(functional=True)
    for node in writers:
        if node.target not in BY_TARGET:
            twin, written = _functional_twin(node), node.args[0]
            if twin is not None and isinstance(written, Node):
                node.target = twin
                draft.mutate(written, node, node)
    return ""


def _writes(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable and node.target not in BY_TARGET


def _functional_twin(node: Node) -> OpOverload | None:
    """The overload that returns what this one writes into its first argument."""
    target: Any = node.target
    name = target._schema.name.removeprefix("aten::")
    packet = getattr(aten, name.removesuffix("_"), None) if name.endswith("_") else None
    return getattr(packet, target._overloadname, None)


def _stuck(draft: Draft, inputs: Inputs, node: Node, writers: list[Node]) -> str:
    """Why a node that writes cannot be replaced by one that returns a new value, empty when it can."""
    if node.graph is not draft.graphs[0][1]:
        return f"{node.name} ({node.target}) writes in a nested graph, which cannot hand the new value out"
    twin, written = _functional_twin(node), node.args[0] if node.args else None
    places = [a for a in node.target._schema.arguments if a.alias_info and a.alias_info.is_write]  # type: ignore[union-attr]
    if twin is None or len(places) != 1 or not isinstance(written, Node):
        return f"{node.name} ({node.target}) writes in place and has no functional twin"
    if not _alike(node, twin, written):
        return f"{node.name} ({node.target}) casts to what it writes to, and {twin} does not"
    reason = inputs.shared(written, writers)
    return f"{node.name} ({node.target}): {reason}" if reason else ""


def _alike(node: Node, twin: OpOverload, written: Node) -> bool:
    """Whether the twin returns what the op writes: the same dtype and shape."""
    place = written.meta.get("val")
    args, kwargs = map_arg((node.args, node.kwargs), lambda operand: operand.meta.get("val"))
    if not isinstance(place, torch.Tensor):
        return False
    with torch.no_grad():
        result = twin(*args, **kwargs)
    return bool(result.dtype == place.dtype and result.shape == place.shape)
