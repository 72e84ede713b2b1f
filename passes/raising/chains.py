"""Holding a chain of elementary operations against the reference of a batch norm, operation for operation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from ...decomps.forms import HALF, UPDATED, BatchNorm, Gradient
from ..graph.effects import transparent
from ..graph.meta import val_of
from .numbering import Key, numbers
from .reference import PARAMETERS, WHOLE, Reference, saved_dtype


@dataclass(frozen=True)
class Chain:
    """A record that a chain of nodes computes exactly.

    outputs: for each output role in use, the nodes that hold it. nodes: the chain, the outputs included. operands: the
    node of each operand, in the dtype that the kernels take.
    """

    norm: BatchNorm | Gradient
    outputs: Mapping[str, list[Node]]
    nodes: frozenset[Node]
    operands: Mapping[str, Node]

    @property
    def results(self) -> list[Node]:
        """The nodes that hold an output."""
        return [node for nodes in self.outputs.values() for node in nodes]


def hold(norm: BatchNorm | Gradient, reference: Reference) -> Chain | str:
    """The chain that computes the record, or why none does exactly."""
    leaves = {field: getattr(norm, field) for field in reference.leaves}
    number = numbers(reference.table, {node: reference.leaves[field] for field, node in leaves.items()})
    holders: dict[int, list[Node]] = defaultdict(list)
    for node in sorted(number):
        holders[number[node]].append(node)
    if reason := _refused(norm) or _missing(norm, reference, holders):
        return reason
    inner = set(number) - set(leaves.values())
    ends = {n: role for role, n in reference.roles.items()}
    read = [n for n in inner if number[n] in ends and any(live(u) and u not in inner for u in n.users)]
    outputs: dict[str, list[Node]] = defaultdict(list)
    nodes = _behind({_whole(node, inner) for node in read}, inner)
    for node in sorted(nodes):
        outside = [user for user in node.users if user not in nodes and live(user)]
        if outside and number[node] in ends:
            outputs[ends[number[node]]].append(node)
        elif outside and not reference.shareable(number[node]):
            return (
                f"its {node.name} is read by {outside[0].name} ({outside[0].target}), and batch norm does not return it"
            )
    if not outputs or (isinstance(norm, BatchNorm) and "out" not in outputs):
        return "nothing reads what it normalises"
    for node in (node for role in outputs if role.startswith("save") for node in outputs[role]):
        if node.meta["val"].dtype != saved_dtype(norm):
            return f"its {node.name} is {node.meta['val'].dtype}, and batch norm saves {saved_dtype(norm)}"
    operands = _operands(norm, reference, holders)
    return operands if isinstance(operands, str) else Chain(norm, dict(outputs), frozenset(nodes), operands)


def _missing(norm: BatchNorm | Gradient, reference: Reference, holders: Mapping[int, list[Node]]) -> str:
    """The first operation of what the record has to compute that is not there; of gradients, if none is complete."""
    roles = reference.roles
    if isinstance(norm, BatchNorm):
        wanted = [n for role, n in roles.items() if role == "out" or role in UPDATED]
    else:
        wanted = [roles["grad_input"] if roles["grad_input"] in holders else roles["grad_weight"]]
    for n in reference.behind(*wanted):
        if n not in holders:
            return f"it has no {_text(reference.keys[n], holders)}, which batch norm computes"
    return ""


def _text(key: Any, holders: Mapping[int, list[Node]]) -> str:
    """A key as a message says it: by the names of the nodes that hold the values."""
    if isinstance(key, tuple) and len(key) == 2 and key[0] == "%":
        held = holders.get(key[1])
        return held[0].name if held else "..."
    if isinstance(key, tuple) and len(key) == 2 and key[0] == "sym":
        return str(key[1])
    if isinstance(key, tuple) and key and isinstance(key[0], str):
        terms = [part[1] if _named(part) else part for part in key[1:]]
        return f"{key[0]}({', '.join(_text(term, holders) for term in terms)})"
    return str(list(key) if isinstance(key, tuple) else key)


def _named(part: Key) -> bool:
    return isinstance(part, tuple) and len(part) == 2 and isinstance(part[0], str) and part[0] not in ("%", "sym")


def _whole(node: Node, inner: set[Node]) -> Node:
    """The node of shape [C] that a view of it reads, where there is one: the view then stays as it is."""
    before: Node | None = node
    while before is not None and before in inner:
        val = val_of(before)
        if val is not None and val.ndim == 1:
            return before
        before = transparent(before)
    return node


def _behind(ends: Iterable[Node], inner: set[Node]) -> set[Node]:
    """The inner nodes that these are computed from, themselves included."""
    found: set[Node] = set()
    work = list(ends)
    while work:
        node = work.pop()
        if node in inner and node not in found:
            found.add(node)
            work += node.all_input_nodes
    return found


def live(node: Node, depth: int = 4) -> bool:
    """Whether something comes of a node: graphs that were not cleaned hold views that nothing reads."""
    if node.op != "call_function" or (node.users and not depth):
        return True
    return node.is_impure() or any(live(user, depth - 1) for user in node.users)


def _operands(
    norm: BatchNorm | Gradient, reference: Reference, holders: Mapping[int, list[Node]]
) -> dict[str, Node] | str:
    """The node to pass for each operand: of what was saved the one in the dtype that the gradient's kernels take."""
    found = {field: getattr(norm, field) for field in reference.leaves}
    for field, n in reference.leaves.items():
        if field in WHOLE:
            continue
        dtype = saved_dtype(norm) if field.startswith("save") else found[field].meta["val"].dtype
        cast = reference.table.get(("cast", ("%", n), dtype))
        nodes = [node for m in (n, cast) if m is not None for node in holders.get(m, ())]
        fitting = [node for node in nodes if node.meta["val"].dtype == dtype]
        if not fitting:
            return f"{found[field].name} is {found[field].meta['val'].dtype}, and its kernels take {dtype}"
        found[field] = next((node for node in fitting if node.meta["val"].ndim == 1), fitting[0])
    return found


def _refused(norm: BatchNorm | Gradient) -> str:
    """Why the family's kernels refuse the dtypes of a record, empty when they take them."""
    input = norm.input.meta["val"].dtype
    parameters = {f: val.dtype for f in PARAMETERS if (val := val_of(getattr(norm, f, None))) is not None}
    half = input in HALF
    found = {*parameters.values()}
    if found <= {input} or (half and found == {torch.float32}):
        return ""
    known = ", ".join(f"{field} {dtype}" for field, dtype in parameters.items())
    return f"its input is {input}, its {known}: no kernel of batch norm takes these together"
