"""What elementary operations a batch norm is decomposed into: its reference, traced on the values of a graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch._decomp.decompositions import native_batch_norm_backward, native_batch_norm_helper
from torch.fx import Node

from ...decomps import formula
from ...decomps.forms import FIELDS, GRADS, SAVED, UPDATED, BatchNorm, Gradient
from ...decomps.outputs import returned
from ..graph.effects import cast_of
from ..graph.meta import val_of
from ..graph.tracing import trace
from .numbering import Key, key_of, references

PARAMETERS = ("weight", "bias", "running_mean", "running_var")


WHOLE = ("input", "grad_out")  # the operands of shape [N, C, *]; every other has one value a channel


@dataclass(frozen=True)
class Reference:
    """A decomposed batch norm as values: numbers for what each operation computes.

    table: the number of each key. leaves: of each operand, by field. roles: of each output. keys: the key of a number.
    """

    table: Mapping[Key, int]
    leaves: Mapping[str, int]
    roles: Mapping[str, int]
    keys: Mapping[int, Key]

    def behind(self, *ends: int) -> list[int]:
        """The numbers that these are computed from, themselves included, in order."""
        found: set[int] = set()
        work = list(ends)
        while work:
            number = work.pop()
            if number not in found:
                found.add(number)
                work += references(self.keys.get(number))
        return sorted(found)

    def shareable(self, number: int) -> bool:
        """Whether a value may have other readers: it costs next to nothing, and stays where it is read.

        So does what is computed of operands of one value a channel alone, and the cast of an operand.
        """
        whole = {self.leaves[name] for name in WHOLE if name in self.leaves}
        key: Any = self.keys.get(number)  # none for an operand
        cast = key is not None and key[0] == "cast" and key[1][1] in self.leaves.values()
        return key is None or cast or not whole & set(self.behind(number))


def _torch_forward(norm: BatchNorm) -> dict[str, torch.Tensor]:
    """Source: torch/_decomp/decompositions.py, which returns the running statistics unrounded."""
    found: dict[str, Any]
    helper: Any = native_batch_norm_helper
    out = helper(*[getattr(norm, field) for field in FIELDS], functional=True)
    found = dict(zip((*SAVED, *UPDATED), out, strict=True))
    if not norm.training:
        return {"out": found["out"]}
    if norm.running_mean is None:
        return {role: found[role] for role in SAVED}
    return {**found, **{role: found[role].to(norm.running_mean.dtype) for role in UPDATED}}


def _formula_forward(norm: BatchNorm) -> dict[str, torch.Tensor]:
    found = formula.forward(norm)
    return found if norm.training else {"out": found["out"]}


def _torch_gradient(norm: Gradient) -> dict[str, torch.Tensor]:
    decomposition: Any = native_batch_norm_backward
    asked = (
        "grad_out",
        "input",
        "weight",
        "running_mean",
        "running_var",
        "save_mean",
        "save_invstd",
        "training",
        "eps",
    )
    found = decomposition(*[getattr(norm, field) for field in asked], [True, True, True])
    return dict(zip(GRADS, found, strict=True))


# Who emits decomposed batch norm: torch's own tables, Inductor's among them, and this library's `legalize(_, "math")`.
EMITTERS: Mapping[str, Mapping[type, Callable[[Any], dict[str, torch.Tensor]]]] = {
    "torch": {BatchNorm: _torch_forward, Gradient: _torch_gradient},
    "formula": {BatchNorm: _formula_forward, Gradient: formula.gradient},
}


def saved_dtype(norm: BatchNorm | Gradient) -> torch.dtype:
    """The dtype of what the family saves of a record of nodes."""
    return returned(norm, "save_invstd", val_of)[1]


class References:
    """The references asked for so far: one trace for all sites of the same shapes, dtypes and literals."""

    def __init__(self) -> None:
        self._made: dict[Any, Reference] = {}

    def of(self, norm: BatchNorm | Gradient, emitter: str) -> Reference:
        """The reference of a record of nodes, whose values are known.

        Raises: ZeroDivisionError for one value a channel in training, whose unbiased variance is undefined.
        """
        spelled = [_described(getattr(norm, f.name)) for f in fields(norm)]
        key = (emitter, type(norm), *spelled)
        if key not in self._made:
            self._made[key] = _traced(norm, EMITTERS[emitter][type(norm)])
        return self._made[key]


def _described(value: Any) -> str:
    val = val_of(value)
    return repr(value) if val is None else f"{tuple(val.shape)} {val.dtype} {val.device}"


def _traced(norm: Any, emit: Callable[[Any], dict[str, torch.Tensor]]) -> Reference:
    vals = {f.name: val for f in fields(norm) if (val := val_of(getattr(norm, f.name))) is not None}
    # statistics may come as [1, C, 1, 1]: the reference takes them as [C]
    values = {name: v if name in WHOLE or v.ndim == 1 else v.reshape(-1) for name, v in vals.items()}
    traced = trace(lambda tensors: emit(replace(norm, **tensors)), values)
    number: dict[Node, int] = {node: i for i, node in enumerate(traced.leaves.values())}
    leaves = {name: number[node] for name, node in traced.leaves.items()}
    table: dict[Key, int] = {}
    for node in traced.graph.nodes:
        key = key_of(node, number)
        if key is not None:
            number[node] = key if isinstance(key, int) else table.setdefault(key, len(leaves) + len(table))
    ends = {role: number[_kept(norm, role, node)] for role, node in traced.results.items()}
    reference = Reference(table, leaves, ends, {n: key for key, n in table.items()})
    used = set(reference.behind(*ends.values()))
    return replace(reference, table={key: n for key, n in table.items() if n in used})


def _kept(norm: BatchNorm | Gradient, role: str, node: Node) -> Node:
    """The node that is an output as the family returns it: of a saved statistic, the one before it is rounded."""
    before = cast_of(node)
    if role in ("save_mean", "save_invstd") and before is not None and before.meta["val"].dtype == saved_dtype(norm):
        return before
    return node
