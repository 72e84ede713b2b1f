"""The two dialects of an exported program, without retracing: mutations listed as outputs, or written in place."""

from __future__ import annotations

import operator
from itertools import chain
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Node
from torch.fx.node import map_arg

from ...decomps.counterparts import nearest
from ...decomps.forms import BY_TARGET, UPDATED, Dialect, Statistics
from ..graph.draft import Draft
from ..graph.effects import detaches, may_alias
from ..graph.meta import val_of
from ..graph.result import Log, Reason
from .site import Site, find_sites
from .updates import Inputs
from .writing import write_site

aten = torch.ops.aten


def to_training(draft: Draft, log: Log) -> Reason:
    """Makes a functional program one that trains: batch norm writes its statistics where it runs, as its gradient
    expects, everything else is written at the end, and the signature lists no mutation.

    Returns why that cannot be done exactly, empty when it was. Nothing is changed then.
    """
    pairs = draft.listing.mutations()
    output = draft.graphs[0][1].output_node()
    returned: list[Any] = list(output.args[0])[len(pairs) :]  # type: ignore[arg-type]
    if reason := _refuse_training(pairs, output, returned):
        return reason
    # first: the output reads what is listed, and statistics that are written in place are no node that could be listed
    draft.listing.drop_mutations()
    mutated = {placeholder for placeholder, _ in pairs}
    for site in find_sites(draft.graphs):
        if _ends_with_its_update(site, mutated, returned):
            target = nearest(Dialect.FAMILY, True, Statistics.IN_PLACE, out=False)
            log.edit(site, site.form.name, target.name)
            write_site(draft, site, target)
    # what is left is written at the end, where nothing reads the old value any more; of a counter, where it is added to
    for placeholder, value in pairs:
        _write(draft, placeholder, value, output)
    draft.become(functional=False)
    return Reason()


def _refuse_training(pairs: list[tuple[Node, Node]], output: Node, returned: list[Any]) -> Reason:
    """Why mutations cannot be written into their inputs: something sees what an input was before."""
    for placeholder, _ in pairs:
        readers = [output] if placeholder in returned else [u for u in placeholder.users if may_alias(u)]
        if readers:
            return Reason(f"{placeholder.name} is mutated, and {readers[0].name} may hand out the memory it had before")
    mutated = {placeholder for placeholder, _ in pairs}
    for placeholder, value in pairs:
        if value in mutated and value is not placeholder:
            return Reason(f"{placeholder.name} becomes {value.name}, as it was before it is mutated itself")
    return Reason()


def _ends_with_its_update(site: Site, mutated: set[Node], returned: list[Any]) -> bool:
    """Whether a batch norm that returns its new statistics may write them: nothing reads the old ones after it."""
    if site.problem or not site.norm.training or site.form.statistics is not Statistics.OUTPUTS:
        return False
    statistics = (site.norm.running_mean, site.norm.running_var)
    new = [holder for role in UPDATED for holder in site.outputs.get(role, ())]
    last = all(s in mutated and all(user <= site.node for user in s.users) for s in statistics)
    return last and not any(holder in returned for holder in new)


def _write(draft: Draft, placeholder: Node, value: Node, output: Node) -> None:
    """Writes a value that was listed as a mutation into its placeholder, unless its batch norm did."""
    if value is placeholder or value._erased or value.graph is not output.graph:
        return
    # A program that lists its mutations hands a value out, and no gradient comes back by it. Written as it is, the
    # value would leave its history in the buffer: the next step would go back through this one, whose memory is freed,
    # and batch norm refuses statistics that require a gradient. A caller's own tensor gets its history, as in eager.
    learns = draft.listing.target_of(placeholder) is not None and _may_learn(value, placeholder)
    counts = value.target is aten.add.Tensor and value.args[0] is placeholder and not value.users
    if counts and not learns and all(user <= value for user in placeholder.users):
        value.target = aten.add_.Tensor
        return
    described: dict[str, Any] = {
        key: value.meta[key] for key in ("val", "stack_trace", "nn_module_stack") if key in value.meta
    }
    with output.graph.inserting_before(output):
        if learns:
            value = output.graph.create_node("call_function", aten.detach.default, (value,), name="detach")
            value.meta = {**described}
        written = output.graph.create_node("call_function", aten.copy_.default, (placeholder, value), name="copy_")
    written.meta = described


def _may_learn(value: Node, placeholder: Node) -> bool:
    """Whether a value may require a gradient: not an integer, nor the statistics that a batch norm returns."""
    val = val_of(value)
    if val is not None and not (val.is_floating_point() or val.is_complex()):
        return False
    if value.target is operator.getitem and value.all_input_nodes[0].target in BY_TARGET:
        return False
    made_of = [value] if value.op == "placeholder" else value.all_input_nodes
    return not detaches(value) and any(node is not placeholder for node in made_of)


def to_functional(draft: Draft, inputs: Inputs) -> Reason:
    """Makes a training program a functional one: what is written in place becomes a new value, and the signature lists
    those of buffers and user inputs.

    Returns why that cannot be done exactly, empty when it was. Nothing is changed then.
    """
    writers = [node for _, graph in draft.graphs for node in graph.nodes if _writes(node)]
    # by the time that one is written as a new value, those before it are, and share nothing any more
    refused = (_refuse_write(draft, inputs, node, writers[: number + 1]) for number, node in enumerate(writers))
    updates = (_refuse_update(site, inputs) for site in find_sites(draft.graphs))
    if reason := next(filter(None, chain(refused, updates)), None):
        return reason
    # A batch norm that writes is written as one that returns its statistics by whoever asked for the dialect.
    draft.become(functional=True)
    for node in writers:
        node.target, written = _functional_of(node), node.args[0]
        draft.mutate(written, node, node)
    return Reason()


def _refuse_update(site: Site, inputs: Inputs) -> Reason:
    """Why the statistics that a batch norm writes in place cannot be listed as mutations, empty when they can."""
    if site.form.statistics is not Statistics.IN_PLACE or site.norm.training is False:
        return Reason()
    told = site.problem or (inputs.refuse_update(site) if site.tracks else "")
    return Reason(told and f"{site.name} ({site.form.name}): {told}")


def _writes(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable and node.target not in BY_TARGET


def _functional_of(node: Node) -> OpOverload | None:
    """The overload that returns what this one writes into its first argument: `f` of `f_`."""
    # by name, as torch has no other link between the two
    target: Any = node.target
    name = target._schema.name.removeprefix("aten::")
    packet = getattr(aten, name.removesuffix("_"), None) if name.endswith("_") else None
    return getattr(packet, target._overloadname, None)


def _refuse_write(draft: Draft, inputs: Inputs, node: Node, writers: list[Node]) -> Reason:
    """Why a node that writes cannot be replaced by one that returns a new value, empty when it can."""
    told = f"{node.name} ({node.target})"
    if node.graph is not draft.graphs[0][1]:
        return Reason(f"{told} writes in a nested graph, which cannot hand the new value out")
    functional, written = _functional_of(node), node.args[0] if node.args else None
    places = [a for a in node.target._schema.arguments if a.alias_info and a.alias_info.is_write]  # type: ignore[union-attr]
    if functional is None or len(places) != 1 or not isinstance(written, Node):
        return Reason(f"{told} writes in place and has no functional twin")
    if not _alike(node, functional, written):
        return Reason(f"{told} casts to what it writes to, and {functional} does not")
    reason = inputs.refuse_shared(written, writers)
    return Reason(reason and f"{told}: {reason}")


def _alike(node: Node, functional: OpOverload, written: Node) -> bool:
    """Whether the functional overload returns what the op writes: the same dtype and shape."""
    # x.add_(y) keeps the dtype of x where add promotes: told by running it on the fake values
    place = written.meta.get("val")
    args, kwargs = map_arg((node.args, node.kwargs), lambda operand: operand.meta.get("val"))
    if not isinstance(place, torch.Tensor):
        return False
    with torch.no_grad():
        result = functional(*args, **kwargs)
    return bool(result.dtype == place.dtype and result.shape == place.shape)
