"""The two dialects of an exported program, without retracing: mutations listed as outputs, or written in place."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Node

from torch_batchnorm.decomps.forms import BY_TARGET, UPDATED, Statistics, family_form
from torch_batchnorm.passes.mutation import Inputs, may_alias
from torch_batchnorm.passes.program import Draft, Edit
from torch_batchnorm.passes.rewriting import write_site
from torch_batchnorm.passes.site import find_sites

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
    if _functional_twin(node) is None:
        return f"{node.name} ({node.target}) writes in place and has no functional twin"
    written: Any = node.args[0]
    reason = inputs.shared(written, writers)
    return f"{node.name} ({node.target}): {reason}" if reason else ""
