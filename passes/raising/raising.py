"""Raise: batch norm that was decomposed into elementary operations becomes the op family again."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

import torch
from torch.fx import Graph, Node

from ...decomps.counterparts import nearest, row_in
from ...decomps.forms import GRADIENT_BY_TARGET, GRADS, BatchNorm, Dialect, Form, Gradient, Statistics
from ...decomps.outputs import returned
from ..graph.draft import Draft
from ..graph.effects import Effects
from ..graph.meta import carried, empty_val, val_of
from ..graph.nest import graphs_of
from ..graph.options import NO_FLAG, Command, Keeps
from ..graph.result import Log, Program, Reason, Result, Subject
from ..rewriting.site import module_of, read_gradient, read_site
from ..rewriting.writing import wire_reserve, write_gradient, write_site
from .chains import Chain, hold, live
from .recognition import Candidate, find_candidates
from .reference import WHOLE, References
from .unify import bare

aten = torch.ops.aten


ELEMENTARY = "elementary operations"


_GRADIENT = GRADIENT_BY_TARGET[aten.batch_norm_backward.default][0]


# A gradient is written as this one first: it does without a reserve, a weight and running statistics.
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
        # a program without any is not copied
        if not any(True for _, graph in graphs_of(program) for _ in find_candidates(graph)):
            return Result(program)
        draft, log, references = Draft(program, self.inplace), Log(), References()
        # references are of shapes and dtypes, not of a graph: one trace serves all of them
        for path, graph in draft.graphs:
            _raise_all(draft, path, graph, references, log)
        return log.result(draft.build() if log.edits else program)


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


def _subject(node: Node, path: str) -> Subject:
    """What the log says of a chain, by one of its nodes."""
    name = f"{path}.{node.name}" if path else node.name
    return Subject(name, module_of(node), ELEMENTARY)


def _raise_all(draft: Draft, path: str, graph: Graph, references: References, log: Log) -> None:
    """Raises what can be raised in a graph, again until nothing is left: one chain raised may free another."""
    gradients: list[tuple[Node, Gradient]] = []
    refused: dict[Node, Reason] | None = None
    while refused is None:
        # reasons of the last round alone count: what was refused before may have been raised since
        edits, refused = len(log.edits), {}
        for candidate in find_candidates(graph):
            plan = _plan(candidate, references)
            if isinstance(plan, Reason):
                refused[candidate.node] = plan
            elif isinstance(plan.norm, BatchNorm):
                _raise_forward(draft, plan, path, log)
            else:
                gradients.append(_raise_gradient(draft, plan, path, log))
        refused = refused if len(log.edits) == edits else None
    for node, reason in refused.items():
        log.decline(_subject(node, path), reason)
    for call, norm in gradients:  # once every forward is there. On CPU the decomposition rounds what it saves.
        wire_reserve(draft, call, replace(norm, save_invstd=bare(norm.save_invstd)))


# Plan.


def _plan(candidate: Candidate, references: References) -> Chain | Reason:
    """The chain of the first guess that holds, of a gradient the one that explains most; or why the first does not."""
    best: Chain | None = None
    reason = candidate.reason
    for norm, emitter in candidate.guesses:
        held = _refuse_operands(norm) or hold(norm, references.of(norm, emitter))
        refusal = held if isinstance(held, Reason) else _refuse_place(held)
        reason = reason or refusal
        if isinstance(held, Chain) and not refusal and (best is None or len(held.outputs) > len(best.outputs)):
            best = held
        # one spelling of a forward is as good as another; a gradient may be part of a longer one
        if best is not None and isinstance(norm, BatchNorm):
            break
    return best or reason


def _refuse_operands(norm: BatchNorm | Gradient) -> Reason:
    """Why a record has no reference."""
    named = {f.name: node for f in fields(norm) if isinstance(node := getattr(norm, f.name), Node)}
    nodes = [*named.values()]
    # a tensor in two roles would have two numbers, and a value numbering gives it one
    if twice := next((node for node in nodes if nodes.count(node) > 1), None):
        return Reason(f"{twice.name} is two of its operands")
    updated = named.keys() & {"running_mean", "running_var"}
    # no overload takes one statistic of the two
    if isinstance(norm, BatchNorm) and len(updated) == 1:
        return Reason(f"it updates its {updated.pop()} alone")
    return _refuse_shapes({name: node.meta["val"] for name, node in named.items()}, norm.training)


def _refuse_shapes(vals: Mapping[str, torch.Tensor], training: bool) -> Reason:
    """Why batch norm does not take operands of these shapes."""
    shape = vals["input"].shape
    for name, val in vals.items():
        if name not in WHOLE and type(shape[1]) is int and val.numel() != shape[1]:
            return Reason(f"{name} has {val.numel()} elements, expected {shape[1]}, one for each channel of the input")
    if training and all(type(size) is int for size in shape) and shape.numel() <= shape[1]:
        return Reason("it has one value a channel or none, which the family refuses in training")
    return Reason()


def _refuse_place(chain: Chain) -> Reason:
    """Why one call cannot stand where the chain is."""
    place, last = _place(chain)
    for node in chain.results if last >= place else ():
        if early := next((user for user in node.users if user not in chain.nodes and user <= last), None):
            return Reason(f"its {node.name} is read by {early.name}, before {last.name} is computed")
    at = max(place, last)
    for operand in chain.operands.values():
        # the call reads all of its operands in one place, where the chain read them one by one
        reads, writes = Effects().accesses(operand)
        for read in chain.nodes & {*reads}:
            if write := next((w for w in writes if min(at, read) < w < max(at, read)), None):
                return Reason(f"{operand.name} is written by {write.name} ({write.target}) in the midst of it")
    return Reason()


def _place(chain: Chain) -> tuple[Node, Node]:
    """The first result, ahead of which the call goes, and the last operand, behind which it goes if it is later."""
    return min(chain.results), max(chain.operands.values())


# Apply.


def _raise_forward(draft: Draft, chain: Chain, path: str, log: Log) -> None:
    norm: Any = chain.norm
    statistics = Statistics.NONE if norm.running_mean is None else Statistics.OUTPUTS
    form = nearest(Dialect.CORE, norm.training, statistics, out=False)  # it does without weights and statistics
    raised = _subject(chain.outputs["out"][0], path)
    # By way of core ATen: write_site then fills in what the family needs, as consolidate does.
    site = read_site(_write(chain, form), path)
    target = row_in(Dialect.FAMILY, form, site.norm, draft.functional)
    write_site(draft, site, target)
    log.edit(raised, ELEMENTARY, target.name)


def _raise_gradient(draft: Draft, chain: Chain, path: str, log: Log) -> tuple[Node, Gradient]:
    """The gradient's call and record: its reserve is still to be wired."""
    norm: Any = chain.norm
    log.edit(_subject(min(chain.results), path), ELEMENTARY, _GRADIENT.name)
    # what nothing reads is not asked for: kernels skip it
    masked = replace(chain, norm=replace(norm, output_mask=[role in chain.outputs for role in GRADS]))
    site = read_gradient(_write(masked, _NATIVE_GRADIENT), path)
    return write_gradient(draft, site, _GRADIENT), site.norm


def _write(chain: Chain, form: Form) -> Node:
    """Writes one call for the chain; what held its results reads them from the call, and the rest is erased."""
    place, last = _place(chain)
    results, vals = sorted(chain.results), [_val(chain, role) for role in form.roles]
    with place.graph.inserting_after(last) if last >= place else place.graph.inserting_before(place):
        call = place.graph.create_node("call_function", form.overload, (), name=form.overload.overloadpacket.__name__)
    # the module and the stack of what stood for the output
    call.meta = carried(chain.outputs.get("out", [place])[0], tuple(vals))
    with place.graph.inserting_before(call):
        # at the call, not at the operand: that may be a placeholder, and these come first
        operands: Any = {field: _flat(field, node) for field, node in chain.operands.items()}
    call.args = form.write(replace(chain.norm, **operands))[0]
    if last >= place:
        # those that came ahead of the last operand move behind the call
        for result in reversed(results):
            call.append(result)
    for role, nodes in chain.outputs.items():
        index = form.roles.index(role)
        _read(call, index, vals[index], nodes)
    _sweep(chain.nodes)
    return call


def _val(chain: Chain, role: str) -> Any:
    """The value of an output, as strided as the chain's own; None of a gradient that is not asked for."""
    if role in ("out", *GRADS):
        return chain.outputs[role][0].meta["val"] if role in chain.outputs else None
    return empty_val(chain.norm.input.meta["val"], *returned(chain.norm, role, val_of))


def _flat(field: str, operand: Node) -> Node:
    """The operand as the ops take it: [C] for all but what has the input's shape."""
    val = operand.meta["val"]
    if field in WHOLE or val.ndim == 1:
        return operand
    flat = operand.graph.call_function(aten.view.default, (operand, [-1]))
    flat.meta = carried(operand, empty_val(val, (val.numel(),), val.dtype))
    return flat


def _read(call: Node, index: int, val: torch.Tensor, nodes: list[Node]) -> None:
    """Turns the nodes that held a result into reads of the call, those of another shape into views of such a read."""
    read = [node for node in nodes if node.meta["val"].ndim == val.ndim]
    viewed = [node for node in nodes if node not in read]
    for node in read:
        # the node stays, as its name may be in a signature
        node.target, node.args, node.kwargs = operator.getitem, (call, index), {}
    if viewed and (not read or viewed[0] < read[0]):
        with call.graph.inserting_after(call):
            read.insert(0, call.graph.call_function(operator.getitem, (call, index)))
        read[0].meta = carried(viewed[0], val)
    for node in viewed:
        # one dimension at most is long: the channels
        shape = [1 if type(size) is int and size == 1 else -1 for size in node.meta["val"].shape]
        node.target, node.args, node.kwargs = aten.view.default, (read[0], shape), {}


def _sweep(nodes: Iterable[Node]) -> None:
    """Erases those of the nodes that nothing reads, with their unread views and the sizes read for them alone."""
    found, work = set(nodes), [*nodes]
    while work:
        node = work.pop()
        sizes = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.SymInt | torch.SymFloat)]
        # most users are of the chain: whether something comes of the others is what takes time
        more = {*sizes, *(user for user in node.users.keys() - found if not live(user))} - found
        found |= more
        work += more
    # readers first: torch refuses to erase what is read
    for node in sorted(found, reverse=True):
        if node.op == "call_function" and not node.users and not node.is_impure():
            node.graph.erase_node(node)
