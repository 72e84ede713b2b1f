"""What elementary operations a batch norm is decomposed into: its emitters, their patterns, and exact references."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from typing import Any

import torch
from torch._decomp.decompositions import native_batch_norm_backward, native_batch_norm_helper
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Node

from ...decomps import formula
from ...decomps.forms import FIELDS, GRADS, SAVED, UPDATED, BatchNorm, Gradient
from ...decomps.outputs import returned
from ..graph.calls import op_of
from ..graph.effects import cast_of, transparent
from ..graph.meta import val_of
from ..graph.tracing import Traced, trace
from .numbering import Key, behind, key_of

OPTIONAL = ("weight", "bias")  # the operands that a chain may do without


WHOLE = ("grad_out", "input")  # the operands of shape [N, C, *]; every other has one value a channel


def _torch_forward(norm: BatchNorm) -> dict[str, Any]:
    """Source: torch/_decomp/decompositions.py, which returns the running statistics unrounded."""
    # called as it is, so that the reference changes with torch
    helper: Any = native_batch_norm_helper
    made = helper(*[getattr(norm, field) for field in FIELDS], functional=True)
    found = dict(zip((*SAVED, *UPDATED), made, strict=True))
    updated = UPDATED if norm.running_mean is not None else ()
    return {role: found[role] for role in SAVED} | {role: found[role].to(norm.running_mean.dtype) for role in updated}


def _torch_gradient(norm: Gradient) -> dict[str, Any]:
    decomposition: Any = native_batch_norm_backward
    found = decomposition(*[getattr(norm, f.name) for f in fields(norm)[:9]], norm.output_mask)
    return dict(zip(GRADS, found, strict=True))


# Who emits decomposed batch norm: torch's own tables, Inductor's among them, and this library's `legalize(_, "math")`.
# A row is a spelling: the outputs of a record by role. Its patterns and its references are traced from it.
EMITTERS: Mapping[str, Mapping[type, Callable[[Any], Mapping[str, Any]]]] = {
    "torch": {BatchNorm: _torch_forward, Gradient: _torch_gradient},
    "formula": {BatchNorm: formula.forward, Gradient: formula.gradient},
}


def _traced(norm: Any, emitter: str, values: Mapping[str, Any]) -> Traced:
    """The operations of a record whose tensors have these values. Eval computes nothing beside its output."""

    def spelled(tensors: Mapping[str, Any]) -> Mapping[str, Any]:
        found = EMITTERS[emitter][type(norm)](replace(norm, **tensors))
        return {"out": found["out"]} if isinstance(norm, BatchNorm) and not norm.training else found

    return trace(spelled, values)


# Patterns.

# What a pattern is traced with in place of each literal: numbers that nothing else in it is.
LITERALS = {0.015625: "eps", 0.375: "momentum"}


_EPS, _MOMENTUM = LITERALS


@dataclass(frozen=True, eq=False)
class Pattern:
    """A traced reference without its views and casts, whose operands and literals are variables.

    leaves: the operand that each placeholder is. roles: the node of each output. behind: what each node is computed
    from, itself included.
    """

    kind: type
    emitter: str
    training: bool
    leaves: Mapping[Node, str]
    roles: Mapping[str, Node]
    behind: Mapping[Node, frozenset[Node]]

    @cached_property
    def anchor(self) -> Node:
        """What it is recognised by: of a forward what reads var + eps, of a gradient the last sum of a product."""
        if self.kind is BatchNorm:
            return next(node for node in self.behind if any(_EPS in operand.args for operand in node.all_input_nodes))
        # grad_weight, and in training grad_input, hold the sum of grad_out * x_hat
        return max(node for node in self.behind if op_of(node) == "sum" and node.args[0] not in self.leaves)

    @cached_property
    def needed(self) -> frozenset[Node]:
        """What has to be bound: the output of a forward, and the operands that no chain is without."""
        # a training chain may update nothing, or be read before the update
        updated = ("running_mean", "running_var") if self.kind is BatchNorm and self.training else ()
        leaves = {leaf for leaf, field in self.leaves.items() if field not in (*OPTIONAL, *updated)}
        return frozenset(leaves | ({self.roles["out"]} if self.kind is BatchNorm else set()))


@cache
def patterns(kind: type) -> tuple[Pattern, ...]:
    """The patterns of all emitters, of forwards (BatchNorm) or gradients (Gradient) in both modes, traced once."""
    modes = (True, False) if kind is BatchNorm else (False, True)
    return tuple(_pattern(kind, emitter, training) for emitter in EMITTERS for training in modes)


def _pattern(kind: type, emitter: str, training: bool) -> Pattern:
    statistics = ("save_mean", "save_invstd") if training else ("running_mean", "running_var")
    names = FIELDS[:5] if kind is BatchNorm else (*WHOLE, "weight", *statistics)
    literals = {"training": training, "eps": _EPS, "momentum": _MOMENTUM, "output_mask": [True] * 3}
    norm = kind(**{f.name: literals.get(f.name) for f in fields(kind) if f.name != "out"})
    # no size is that of another dimension, so that none is taken for it
    with FakeTensorMode():
        values = {name: torch.empty((2, 3, 4, 5) if name in WHOLE else 3) for name in names}
    traced = _traced(norm, emitter, values)
    bare: dict[Node, Node] = {}
    behind: dict[Node, frozenset[Node]] = {}
    for node in traced.graph.nodes:
        before = transparent(node) or cast_of(node)
        bare[node] = node if before is None else bare[before]
        # Without views and casts, of which spellings differ most: the exact check asks for them again.
        node.replace_all_uses_with(bare[node])
        if before is None:
            behind[node] = frozenset({node}).union(*(behind[operand] for operand in node.all_input_nodes))
    leaves = {leaf: name for name, leaf in traced.leaves.items()}
    return Pattern(kind, emitter, training, leaves, {role: bare[n] for role, n in traced.results.items()}, behind)


# References.


@dataclass(frozen=True, eq=False)
class Reference:
    """A decomposed batch norm as values. The number of one is the node of the traced graph that computes it.

    leaves: the number of each operand, by field. roles: of each output. keys: what each but the operands computes.
    """

    leaves: Mapping[str, Node]
    roles: Mapping[str, Node]
    keys: Mapping[Node, Key]

    @cached_property
    def table(self) -> Mapping[Key, Node]:
        """The number of each key that an output is computed from."""
        used = self.behind(*self.roles.values())
        return {key: number for number, key in self.keys.items() if number in used}

    def behind(self, *ends: Node) -> set[Node]:
        """The values that these are computed from, themselves included; what sizes are is in the keys."""
        return behind(*ends, inner={*self.keys, *self.leaves.values()})

    def shareable(self, number: Node) -> bool:
        """Whether a value may have other readers: it costs next to nothing, and stays where it is read.

        So does what is computed of operands of one value a channel alone, and the cast of an operand.
        """
        if number not in self.keys or (cast_of(number) is not None and number.args[0] in self.leaves.values()):
            return True
        return not self.behind(number) & {self.leaves.get(name) for name in WHOLE}


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
        # A trace takes longer than all the rest: programs have many batch norms and few shapes.
        key = (emitter, type(norm), *[_described(getattr(norm, f.name)) for f in fields(norm)])
        if key not in self._made:
            self._made[key] = _reference(norm, emitter)
        return self._made[key]


def _described(value: Any) -> str:
    val = val_of(value)
    return repr(value) if val is None else f"{tuple(val.shape)} {val.dtype} {val.device}"


def _reference(norm: BatchNorm | Gradient, emitter: str) -> Reference:
    given = {f.name: val for f in fields(norm) if (val := val_of(getattr(norm, f.name))) is not None}
    # statistics may come as [1, C, 1, 1]: the reference takes them as [C]
    values = {name: val if name in WHOLE or val.ndim == 1 else val.reshape(-1) for name, val in given.items()}
    traced = _traced(norm, emitter, values)
    number = {leaf: leaf for leaf in traced.leaves.values()}
    table: dict[Key, Node] = {}
    for node in traced.graph.nodes:
        if (source := transparent(node)) in number:
            number[node] = number[source]
        elif (key := key_of(node, number)) is not None:
            number[node] = table.setdefault(key, node)
    # nodes of one value become one, so that a number says who computes it
    for node, value in number.items():
        node.replace_all_uses_with(value)
    roles = {role: number[_kept(norm, role, node)] for role, node in traced.results.items()}
    return Reference(traced.leaves, roles, {node: key for key, node in table.items()})


def _kept(norm: BatchNorm | Gradient, role: str, node: Node) -> Node:
    """The node that is an output as the family returns it: of a saved statistic, the one before it is rounded."""
    before = cast_of(node)
    if role in ("save_mean", "save_invstd") and before is not None and before.meta["val"].dtype == saved_dtype(norm):
        return before
    return node
