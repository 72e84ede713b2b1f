"""Holding a chain of elementary operations against the reference of a batch norm, operation for operation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from ...decomps.forms import HALF, UPDATED, BatchNorm, Gradient
from ...decomps.outputs import NEUTRAL
from ..graph.effects import detaches, transparent
from ..graph.meta import val_of
from ..graph.result import Reason
from .numbering import behind, numbers
from .reference import WHOLE, Reference, saved_dtype


@dataclass(frozen=True)
class Chain:
    """A record that a chain of nodes computes exactly.

    outputs: for each output role in use, the nodes that hold it. nodes: the chain, the outputs included. operands: the
    node of each operand, in the dtype that the kernels take.
    """

    norm: BatchNorm | Gradient
    outputs: Mapping[str, list[Node]]
    nodes: Set[Node]
    operands: Mapping[str, Node]

    @property
    def results(self) -> list[Node]:
        """The nodes that hold an output."""
        return [node for nodes in self.outputs.values() for node in nodes]


_Holders = Mapping[Node, Sequence[Node]]  # the nodes that hold the value of each number, in order


def hold(norm: BatchNorm | Gradient, reference: Reference) -> Chain | Reason:
    """The chain that computes the record, or why none does exactly."""
    number = numbers(reference.table, {getattr(norm, field): leaf for field, leaf in reference.leaves.items()})
    holders: dict[Node, list[Node]] = defaultdict(list)
    # in graph order, so that messages and edits do not depend on how the graph was walked
    for node in sorted(number):
        holders[number[node]].append(node)
    if reason := _refuse_dtypes(norm) or _refuse_without(norm, reference, holders):
        return reason
    inner = number.keys() - {getattr(norm, field) for field in reference.leaves}
    cut = _cut(reference, holders, inner)
    if cut and cut.keys() == {*holders[reference.roles["out"]]}:
        detach = min(cut.values())
        return Reason(f"its {detach.name} ({detach.target}) passes no gradient on, and batch norm does")
    chain, found = _chain(norm, reference, holders, inner - cut.keys()), _operands(norm, reference, holders)
    shareable = {node for node in chain.nodes if reference.shareable(number[node])}
    if reason := _refuse_readers(chain, shareable) or _refuse_outputs(chain):
        return reason
    return found if isinstance(found, Reason) else replace(chain, operands=found)


def _cut(reference: Reference, holders: _Holders, inner: Set[Node]) -> dict[Node, Node]:
    """What holds the normalised input and passes no gradient on, with the detach that it comes of: it stays.

    Nothing else that a forward returns has a gradient, and no gradient has one: there a detach is an alias.
    """
    held = holders.get(reference.roles["out"], ()) if "out" in reference.roles else ()
    return {node: before for node in held for before in behind(node, inner=inner) if detaches(before)}


def _chain(norm: BatchNorm | Gradient, reference: Reference, holders: _Holders, inner: Set[Node]) -> Chain:
    """The inner nodes that compute those outputs which something else reads."""
    ends = {role: inner & {*holders.get(number, ())} for role, number in reference.roles.items()}
    # an output that nothing reads is not returned, and what computes it alone stays out of the chain
    read = {node for held in ends.values() for node in held if _reader(node, inner)}
    nodes = behind(*(_whole(node, inner) for node in read), inner=inner)
    outputs = {role: [n for n in sorted(held & nodes) if _reader(n, nodes)] for role, held in ends.items()}
    return Chain(norm, {role: held for role, held in outputs.items() if held}, nodes, {})


def _refuse_dtypes(norm: BatchNorm | Gradient) -> Reason:
    """Why the family's kernels refuse the dtypes of a record."""
    input = norm.input.meta["val"].dtype
    parameters = {f: val.dtype for f in NEUTRAL if (val := val_of(getattr(norm, f, None))) is not None}
    found = {*parameters.values()}
    # Source: check_mixed_data_type in aten/src/ATen/native/cpu/mixed_data_type.h.
    if found <= {input} or (input in HALF and found == {torch.float32}):
        return Reason()
    known = ", ".join(f"{field} {dtype}" for field, dtype in parameters.items())
    return Reason(f"its input is {input}, its {known}: no kernel of batch norm takes these together")


def _refuse_without(norm: BatchNorm | Gradient, reference: Reference, holders: _Holders) -> Reason:
    """The first operation that is not there, of all that a forward has to compute, or of one gradient."""
    roles = reference.roles
    wanted = [number for role, number in roles.items() if role == "out" or role in UPDATED]
    if isinstance(norm, Gradient):
        # whichever of the gradients is asked for may be all that is there
        wanted = [roles["grad_input"] if roles["grad_input"] in holders else roles["grad_weight"]]
    absent = next((number for number in sorted(reference.behind(*wanted)) if number not in holders), None)
    if absent is None:
        return Reason()
    op, _, *terms = reference.keys[absent]
    return Reason(f"it has no {op}({', '.join(_text(t, holders) for t in terms)}), which batch norm computes")


def _text(term: Any, holders: _Holders) -> str:
    """A term of a key as a message says it, a value by the name of a node that holds it."""
    if isinstance(term, Node):
        return holders[term][0].name if term in holders else "..."
    return str(list(term) if isinstance(term, tuple) else term)


def _refuse_readers(chain: Chain, shareable: Set[Node]) -> Reason:
    """Why what is read of a chain is not what batch norm returns. shareable: what stays where it is read."""
    for node in sorted(chain.nodes - shareable - {*chain.results}):
        if (user := _reader(node, chain.nodes)) is not None:
            return Reason(f"its {node.name} is read by {user.name} ({user.target}), and batch norm does not return it")
    return Reason()


def _refuse_outputs(chain: Chain) -> Reason:
    """Why the outputs of a chain are not as batch norm's."""
    outputs, dtype = chain.outputs, saved_dtype(chain.norm)
    if not outputs or (isinstance(chain.norm, BatchNorm) and "out" not in outputs):
        return Reason("nothing reads what it normalises")
    for node in (*outputs.get("save_mean", ()), *outputs.get("save_invstd", ())):
        # what reads it would get another dtype, and other numbers
        if node.meta["val"].dtype != dtype:
            return Reason(f"its {node.name} is {node.meta['val'].dtype}, and batch norm saves {dtype}")
    return Reason()


def _whole(node: Node, inner: Set[Node]) -> Node:
    """The node of shape [C] that a view of it reads, where there is one: the view then stays as it is."""
    before: Node | None = node
    while before is not None and before in inner:
        if (val := val_of(before)) is not None and val.ndim == 1:
            return before
        before = transparent(before)
    return node


def _reader(node: Node, nodes: Set[Node]) -> Node | None:
    """The first user of a node that is none of these."""
    return next((user for user in node.users if user not in nodes and live(user)), None)


def live(node: Node, depth: int = 4) -> bool:
    """Whether something comes of a node: graphs that were not cleaned hold views that nothing reads."""
    if node.op != "call_function":
        return True
    # asking torch whether an op is impure takes longer than to look for readers: it comes last
    return (any(live(user, depth - 1) for user in node.users) if depth else bool(node.users)) or node.is_impure()


def _operands(norm: BatchNorm | Gradient, reference: Reference, holders: _Holders) -> dict[str, Node] | Reason:
    """The node to pass for each operand: of what was saved the one in the dtype that the gradient's kernels take."""
    found = {field: getattr(norm, field) for field in reference.leaves}
    for field, number in reference.leaves.items():
        if field in WHOLE:
            continue
        known = found[field].meta["val"].dtype
        dtype = saved_dtype(norm) if field.startswith("save") else known
        # what was saved may be there in two dtypes, before and after a cast: kernels take one of them
        cast = reference.table.get(("cast", (), number, dtype), number)
        fitting = [n for n in (*holders[number], *holders.get(cast, ())) if n.meta["val"].dtype == dtype]
        if not fitting:
            return Reason(f"{found[field].name} is {known}, and its kernels take {dtype}")
        found[field] = next((node for node in fitting if node.meta["val"].ndim == 1), fitting[0])
    return found
