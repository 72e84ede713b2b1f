"""Raise: batch norm that was decomposed into elementary operations becomes the op family again."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

import torch
from torch.fx import Graph, Node

from ...decomps.counterparts import nearest, row_in
from ...decomps.forms import GRADIENT_BY_TARGET, GRADS, UPDATED, BatchNorm, Dialect, Form, Gradient, Statistics
from ...decomps.outputs import returned
from ..graph.draft import Draft
from ..graph.effects import Effects, cast_of, transparent
from ..graph.meta import empty_val, val_of
from ..graph.nest import graphs_of
from ..graph.options import NO_FLAG, Command, Keeps
from ..graph.result import Declined, Edit, Program, Result
from ..rewriting.site import module_of, read_gradient, read_site
from ..rewriting.writing import wire_reserve, write_gradient, write_site
from .chains import Chain, hold, live
from .recognition import Candidate, find_forwards, find_gradients
from .reference import WHOLE, References

aten = torch.ops.aten


ELEMENTARY = "elementary operations"


_GRADIENT = GRADIENT_BY_TARGET[aten.batch_norm_backward.default][0]


_NATIVE_GRADIENT = GRADIENT_BY_TARGET[aten.native_batch_norm_backward.default][0]


@dataclass(frozen=True)
class RaiseDecomposed:
    """Rewrites decomposed batch norm into `_batch_norm_with_update_functional` or `_batch_norm_no_update`, its gradient
    into `batch_norm_backward`, with the reserve of its forward when that is in the graph.

    inplace: edit the given program instead of a copy that shares its weights.

    Raised is what torch's decompositions emit, Inductor's table among them, and `legalize(program, "math")`, in any
    spelling of views, casts and the order of factors. A chain is held against a trace of the decomposition, operation
    for operation: literals, dimensions, dtypes and the updates of the running statistics. What differs, or has inner
    values that something else reads, is declined with a reason. Results are equal up to rounding: another kernel runs.
    Source: torch/_decomp/decompositions.py, native_batch_norm_helper and native_batch_norm_backward.
    """

    command: ClassVar[Command] = Command("raise", "-o raised.pt2 --report", Keeps.ROUNDING)

    inplace: bool = field(default=False, metadata=NO_FLAG)

    def __call__(self, program: Program) -> Result:
        """Raises what is decomposed in an ExportedProgram or a GraphModule, nested graphs included.

        Raises: InvalidProgram for anything else.
        """
        if not any(True for _, graph in graphs_of(program) for _ in _candidates(graph)):
            return Result(program)
        draft = Draft(program, self.inplace)
        edits: list[Edit] = []
        declined: list[Declined] = []
        references = References()
        for path, graph in draft.graphs:
            unwired: list[tuple[Node, Gradient]] = []
            before = -1
            while before < len(edits):  # again, until nothing is left: one chain raised may free another
                before = len(edits)
                left = _raise_all(draft, path, graph, references, edits, unwired)
            declined += left
            for call, norm in unwired:
                wire_reserve(draft, call, replace(norm, save_invstd=_saved(norm.save_invstd)))
        return Result(draft.build() if edits else program, tuple(edits), tuple(declined))


def raise_decomposed(program: Any, *, inplace: bool = False) -> Any:
    """Returns the program with every decomposed batch norm, forward and gradient, as the op family.

    program: an ExportedProgram or a GraphModule; nested graphs are included. The result shares its weights; unless
    `inplace`, the input is left as it was. A program that has nothing to raise is returned as it is.
    `RaiseDecomposed()(program)` also tells what was raised and what was declined, and why.

    Raises: InvalidProgram when program is neither.

    >>> from torch_batchnorm.passes.rewriting.legalization import legalize
    >>> exported = torch.export.export(torch.nn.BatchNorm1d(3).eval(), (torch.randn(2, 3),))
    >>> [n.name for n in raise_decomposed(legalize(exported, "math")).graph.nodes if "batch_norm" in str(n.target)]
    ['_batch_norm_no_update']
    """
    return RaiseDecomposed(inplace=inplace)(program).program


def _raise_all(
    draft: Draft,
    path: str,
    graph: Graph,
    references: References,
    edits: list[Edit],
    unwired: list[tuple[Node, Gradient]],
) -> list[Declined]:
    """Raises what can be raised in a graph as it is, and returns what cannot. Gradients have no reserve yet."""
    declined = []
    for candidate in _candidates(graph):
        plan = _plan(candidate, references)
        if isinstance(plan, str):
            name = f"{path}.{candidate.node.name}" if path else candidate.node.name
            declined.append(Declined(name, module_of(candidate.node), ELEMENTARY, plan))
        elif isinstance(plan.norm, BatchNorm):
            edits.append(_raise_forward(draft, plan, path))
        else:
            edit, call, norm = _raise_gradient(draft, plan, path)
            edits.append(edit)
            unwired.append((call, norm))
    return declined


def _candidates(graph: Graph) -> Iterator[Candidate]:
    """Gradients ahead of the forwards: a gradient may normalise its input anew, which is a forward without weights."""
    yield from find_gradients(graph)
    yield from find_forwards(graph)


def _saved(node: Any) -> Any:
    """What a saved statistic was before it was viewed or rounded: on CPU the decomposition rounds what it saves."""
    while isinstance(node, Node) and (before := transparent(node) or cast_of(node)) is not None:
        node = before
    return node


# Plan.


def _plan(candidate: Candidate, references: References) -> Chain | str:
    """The chain of the first guess that holds, of a gradient the one that explains most; or why the first does not."""
    best: Chain | None = None
    reason = candidate.reason
    for norm in candidate.guesses:
        held = _undefined(norm) or hold(norm, references.of(norm, candidate.emitter))
        found = held if isinstance(held, str) else _misplaced(held)
        if isinstance(held, str) or found:
            reason = reason or found
        elif best is None or len(held.outputs) > len(best.outputs):
            best = held
        if best is not None and isinstance(norm, BatchNorm):
            break
    return best or reason


def _undefined(norm: BatchNorm | Gradient) -> str:
    """Why a record has no reference, empty when it has one."""
    named = {f.name: getattr(norm, f.name) for f in fields(norm) if isinstance(getattr(norm, f.name), Node)}
    unknown = [node.name for node in named.values() if val_of(node) is None]
    if unknown:
        return f"the shape of {unknown[0]} is not known"
    twice = [node.name for node in named.values() if sum(node is other for other in named.values()) > 1]
    if twice:
        return f"{twice[0]} is two of its operands"
    val = named["input"].meta["val"]
    for name, node in named.items():
        size = node.meta["val"].numel()
        if name not in WHOLE and type(val.shape[1]) is int and size != val.shape[1]:
            return f"{name} has {size} elements, expected {val.shape[1]}, one for each channel of the input"
    if all(type(size) is int for size in val.shape) and norm.training and val.numel() <= val.shape[1]:
        return "it has one value a channel or none, which the family refuses in training"
    if isinstance(norm, BatchNorm) and (norm.running_mean is None) is not (norm.running_var is None):
        updated = "running_var" if norm.running_mean is None else "running_mean"
        return f"it updates its {updated} alone"
    return ""


def _misplaced(chain: Chain) -> str:
    """Why one call cannot stand where the chain is, empty when it can."""
    place, last = _place(chain)
    for node in chain.results:
        early = next((user for user in node.users if user not in chain.nodes and user <= last), None)
        if last >= place and early is not None:
            return f"its {node.name} is read by {early.name}, before {last.name} is computed"
    at = max(place, last)
    for operand in chain.operands.values():
        reads, writes = Effects().accesses(operand)
        for read in (node for node in reads if node in chain.nodes):
            write = next((w for w in writes if min(at, read) < w < max(at, read)), None)
            if write is not None:
                return f"{operand.name} is written by {write.name} ({write.target}) in the midst of it"
    return ""


def _place(chain: Chain) -> tuple[Node, Node]:
    """The first result, ahead of which the call goes, and the last operand, behind which it goes if it is later."""
    return min(chain.results), max(chain.operands.values())


# Apply.


def _raise_forward(draft: Draft, chain: Chain, path: str) -> Edit:
    norm: Any = chain.norm
    statistics = Statistics.NONE if norm.running_mean is None else Statistics.OUTPUTS
    form = nearest(Dialect.CORE, norm.training, statistics, out=False)  # it does without weights and statistics
    input = norm.input.meta["val"]
    saved = empty_val(input, (input.shape[1],), returned(norm, "save_mean", val_of)[1])
    vals = {"out": chain.outputs["out"][0].meta["val"], "save_mean": saved, "save_invstd": saved}
    for role, statistic in zip(UPDATED, (norm.running_mean, norm.running_var), strict=True):
        vals[role] = None if statistic is None else empty_val(input, (input.shape[1],), statistic.meta["val"].dtype)
    name = chain.outputs["out"][0].name
    call = _write(chain, form, [vals[role] for role in form.roles])
    site = read_site(call, path)
    target = row_in(Dialect.FAMILY, form, site.norm, draft.functional)
    write_site(draft, site, site.norm, target)
    return Edit(f"{path}.{name}" if path else name, site.module, ELEMENTARY, target.name)


def _raise_gradient(draft: Draft, chain: Chain, path: str) -> tuple[Edit, Node, Gradient]:
    norm: Any = chain.norm
    mask = [role in chain.outputs for role in GRADS]
    vals = [chain.outputs[role][0].meta["val"] if asked else None for role, asked in zip(GRADS, mask, strict=True)]
    name = min(chain.results).name
    call = _write(replace(chain, norm=replace(norm, output_mask=mask)), _NATIVE_GRADIENT, vals)
    site = read_gradient(call, path)
    written = write_gradient(draft, site, site.norm, _GRADIENT)
    edit = Edit(f"{path}.{name}" if path else name, site.module, ELEMENTARY, _GRADIENT.name)
    return edit, written, site.norm


def _write(chain: Chain, form: Form, vals: list[Any]) -> Node:
    """Writes one call for the chain; what held its results reads them from the call, and the rest is erased."""
    norm: Any = chain.norm
    place, last = _place(chain)
    graph, results = place.graph, sorted(chain.results)
    origin = chain.outputs["out"][0] if "out" in chain.outputs else place
    carried = {key: value for key, value in origin.meta.items() if key not in ("val", "tensor_meta")}
    with graph.inserting_after(last) if last >= place else graph.inserting_before(place):
        call = graph.create_node("call_function", form.overload, (), name=form.overload.overloadpacket.__name__)
    call.meta = {**carried, "val": tuple(vals)}
    with graph.inserting_before(call):
        operands = {field: _flat(field, node) for field, node in chain.operands.items()}
    call.args = form.write(replace(norm, **operands))[0]
    if last >= place:
        for result in reversed(results):
            call.append(result)
    for role, nodes in chain.outputs.items():
        index = form.roles.index(role)
        _hold(call, index, vals[index], nodes)
    _sweep(chain.nodes)
    return call


def _flat(field: str, operand: Node) -> Node:
    """The operand as the ops take it: [C] for all but what has the input's shape."""
    if field in WHOLE or operand.meta["val"].ndim == 1:
        return operand
    val = operand.meta["val"]
    flat = operand.graph.call_function(aten.view.default, (operand, [-1]))
    flat.meta = {**operand.meta, "val": empty_val(val, (val.numel(),), val.dtype)}
    return flat


def _hold(call: Node, index: int, val: torch.Tensor, nodes: list[Node]) -> None:
    """Turns the nodes that held a result into reads of the call, those of another shape into views of such a read."""
    read = [node for node in nodes if node.meta["val"].ndim == val.ndim]
    viewed = [node for node in nodes if node not in read]
    for node in read:
        node.target, node.args, node.kwargs = operator.getitem, (call, index), {}
    if viewed and (not read or viewed[0] < read[0]):
        with call.graph.inserting_after(call):
            read.insert(0, call.graph.call_function(operator.getitem, (call, index)))
        read[0].meta = {**viewed[0].meta, "val": val}
    for node in viewed:
        shape = [1 if type(size) is int and size == 1 else -1 for size in node.meta["val"].shape]
        node.target, node.args, node.kwargs = aten.view.default, (read[0], shape), {}


def _sweep(nodes: Iterable[Node]) -> None:
    """Erases those of the nodes that nothing reads, with their unread views and the sizes read for them alone."""
    work = sorted(nodes)
    while work:
        node = work.pop()
        if node._erased or node.op != "call_function" or node.is_impure():
            continue
        dead = [user for user in node.users if not live(user)]
        if dead:
            work += [node, *dead]
        elif not node.users:
            work += [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.SymInt | torch.SymFloat)]
            node.graph.erase_node(node)
