"""Reading decomposed batch norm: what record a chain of elementary operations looks like, from an anchor in it.

What is read here is a guess: the record names the operands and the literals, and raising.py holds the chain against the
reference of that record, operation for operation.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch.fx import Graph, Node

from ...decomps.forms import BY_TARGET, BatchNorm, Gradient
from ..graph.calls import op_of
from ..graph.effects import cast_of, source_of, transparent
from ..graph.meta import channel_axis, val_of
from ..rewriting.site import read_site

aten = torch.ops.aten


_REDUCTIONS = ("var_mean", "mean", "sum", "var", "amax", "amin", "norm")


_RESHAPES = {aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.clone.default}


# torch.nn's defaults, for what the operations do not say because nothing reads it.
_MOMENTUM, _EPS = 0.1, 1e-5


@dataclass(frozen=True)
class Candidate:
    """A chain that looks like batch norm. node: the anchor. emitter: whose it looks like. guesses: records, best first.
    reason: why it is none after all, as far as can be told without the reference.
    """

    node: Node
    emitter: str
    guesses: tuple[BatchNorm | Gradient, ...] = ()
    reason: str = ""


def find_forwards(graph: Graph) -> Iterator[Candidate]:
    """What looks like a batch norm's forward, anchored at its 1/sqrt(var + eps).

    Each is read when it is reached, so that the graph may be edited meanwhile.
    """
    for target in (aten.rsqrt.default, aten.sqrt.default):
        for node in sorted(graph.find_nodes(op="call_function", target=target)):
            if not node._erased and (candidate := _forward(node)) is not None:
                yield candidate


def find_gradients(graph: Graph) -> Iterator[Candidate]:
    """What looks like a batch norm's gradient, anchored at its sum of grad_out * (input - mean)."""
    for node in sorted(graph.find_nodes(op="call_function", target=aten.sum.dim_IntList)):
        if not node._erased and (candidate := _gradient(node)) is not None:
            yield candidate


def readers(node: Node, op: str, casts: bool = False) -> Iterator[tuple[Node, Any]]:
    """The calls of a binary op on a value, however it is viewed, each with its other argument."""
    for user in node.users:
        if transparent(user) is node or (casts and cast_of(user) is node):
            yield from readers(user, op, casts)
        elif op_of(user) == op and len(user.args) == 2:
            yield user, user.args[user.args[0] is node]


def _forward(anchor: Node) -> Candidate | None:
    shifted = source_of(anchor.args[0])
    if op_of(shifted) != "add" or len(shifted.args) != 2:
        return None
    var, eps = source_of(shifted.args[0]), shifted.args[1]
    training, mean, reduced = _statistics(var)
    if reduced is not None and (reason := _other_dimensions(anchor, mean, reduced)) is not None:
        return Candidate(anchor, "", (), reason) if reason else None
    chains = [chain for inverse in _inverses(anchor) for chain in _affine(inverse)]
    if not chains or _regrouped(chains[0].input):
        return None
    if reduced is None and any(_reduction(source_of(n, casts=True)) for n in (var, chains[0].mean)):
        return None
    if reduced is not None and reduced.correction not in (0, 0.0):
        return Candidate(anchor, "", (), f"its correction is {reduced.correction}, expected 0: the biased variance")
    if type(eps) not in (int, float):
        return Candidate(anchor, "", (), f"its eps is {eps}, not a literal number")
    torchs = anchor.target is aten.sqrt.default or op_of(getattr(reduced, "node", None)) == "var_mean"
    record = BatchNorm(None, None, None, None, None, training, _MOMENTUM, eps)
    record = _updates(record, mean, var) if training else replace(record, running_var=source_of(var, casts=True))
    guesses = []
    for chain, casts in product(chains, (False,) if torchs else (True, False)):  # the formula casts its operands
        given = {f: source_of(getattr(chain, f), casts) for f in ("input", "weight", "bias")}
        if not training:
            given["running_mean"] = source_of(chain.mean, casts=True)
        guesses.append(replace(record, **given))
    return Candidate(anchor, "torch" if torchs else "formula", tuple(guesses))


@dataclass(frozen=True)
class _Reduced:
    """The reduction that a variance is of."""

    node: Node
    dims: Any
    correction: Any


def _statistics(var: Any) -> tuple[bool, Any, _Reduced | None]:
    """Whether a variance is a batch's, the mean that was found with it, and how it was reduced."""
    made: Any = var.args[0] if getattr(var, "target", None) is operator.getitem else None
    if op_of(made) == "var_mean" and made.target is aten.var_mean.correction and var.args[1] == 0:
        mean = next((n for n in made.users if n.target is operator.getitem and n.args[1] == 1), None)
        dims = made.args[1] if len(made.args) > 1 else made.kwargs.get("dim")
        correction = made.kwargs.get("correction")
        return True, mean, _Reduced(made, dims or [], 1 if correction is None else correction)
    squared: Any = source_of(var.args[0]) if op_of(var) == "mean" and len(var.args) > 1 else None
    if op_of(squared) == "mul" and squared.args[0] is squared.args[1]:
        centered = source_of(squared.args[0])
        if op_of(centered) == "sub":
            return True, source_of(centered.args[1]), _Reduced(var, var.args[1], 0)
    return False, None, None


def _other_dimensions(anchor: Node, mean: Any, reduced: _Reduced) -> str | None:
    """None for a reduction over all dimensions but the channels'. Of another the reason why it is none of batch norm;
    empty where there is none to give: a layer, a group, an instance or a weight is normalised.
    """
    val = val_of(reduced.node.args[0])
    if val is None:
        return ""
    found, expected = sorted(d % val.ndim for d in reduced.dims), [d for d in range(val.ndim) if d != 1]
    if val.ndim > 1 and found == expected:
        return None
    if 0 not in found or 1 in found:
        return ""
    normalised = [o for _, other in readers(anchor, "mul") if op_of(o := source_of(other)) == "sub" and mean in o.args]
    return f"it reduces over dimensions {found}, expected {expected}" if normalised else ""


def _reduction(node: Any) -> bool:
    made = node.args[0] if getattr(node, "target", None) is operator.getitem else node
    return op_of(made) in _REDUCTIONS


def _regrouped(input: Node) -> bool:
    """Whether the batch was made part of the channels: instance norm, which is decomposed into batch norm of one."""
    node: Any = source_of(input, casts=True)
    val = val_of(node)
    if val is None or type(val.shape[0]) is not int or val.shape[0] != 1:
        return False
    while getattr(node, "target", None) in _RESHAPES:
        node = source_of(node.args[0], casts=True)
    before = val_of(node)
    return before is not None and before.shape[:1] != val.shape[:1]


def _inverses(anchor: Node) -> Iterator[Node]:
    """The nodes that hold 1/sqrt(var + eps): rsqrt itself, or the reciprocal of sqrt, which torch multiplies by one."""
    if anchor.target is aten.rsqrt.default:
        yield anchor
        return
    for reciprocal in anchor.users:
        if op_of(reciprocal) == "reciprocal":
            yield from (node for node, other in readers(reciprocal, "mul") if other == 1)
            yield reciprocal


@dataclass(frozen=True)
class _Chain:
    """(input - mean) * inverse * weight + bias, as far as it was followed."""

    input: Node
    mean: Node
    weight: Any = None
    bias: Any = None


def _affine(inverse: Node) -> Iterator[_Chain]:
    """What an inverse deviation scales, and what is multiplied and added then, the longest chain first."""
    for scaled, other in readers(inverse, "mul"):
        if (centered := _centered(other)) is not None:
            yield from _tails(scaled, centered)
        elif channel_axis(val_of(other)) is not None and source_of(other) is not inverse:
            for weighed, centre in readers(scaled, "mul"):
                if (centered := _centered(centre)) is not None:
                    weighted = replace(centered, weight=other)
                    yield from (replace(weighted, bias=bias) for bias in _beside(weighed, "add", centered))
                    yield weighted


def _tails(scaled: Node, chain: _Chain) -> Iterator[_Chain]:
    for weighed, weight in readers(scaled, "mul"):
        if _of_channels(weight, chain.input):
            weighted = replace(chain, weight=weight)
            yield from (replace(weighted, bias=bias) for bias in _beside(weighed, "add", chain))
            yield weighted
    yield from (replace(chain, bias=bias) for bias in _beside(scaled, "add", chain))
    yield chain


def _beside(node: Node, op: str, chain: _Chain) -> list[Node]:
    return [other for _, other in readers(node, op) if _of_channels(other, chain.input)]


def _centered(node: Any) -> _Chain | None:
    """(input - mean), of an input [N, C, *] and a mean of one value a channel."""
    node = source_of(node)
    if op_of(node) != "sub" or len(node.args) != 2:
        return None
    input, mean = node.args
    return _Chain(input, mean) if _of_channels(mean, input) else None


def _of_channels(node: Any, input: Any) -> bool:
    """Whether a tensor has one value for each channel of an input, and broadcasts along its dimension 1."""
    val, whole = val_of(node), val_of(input)
    if val is None or whole is None or whole.ndim < 2:
        return False
    axis = channel_axis(val)
    if axis is None or (axis != whole.ndim - 2 and not (axis == -1 and whole.shape[1] == 1)):
        return False
    return axis == -1 or val.shape[val.ndim - 1 - axis] == whole.shape[1]


def _updates(record: BatchNorm, mean: Any, var: Any) -> BatchNorm:
    """The record with the running statistics that mean and variance are averaged into, and with which momentum."""
    averaged = _averaged(mean) if mean is not None else None
    spread = _averaged(var) or next((a for n, _ in readers(var, "mul") if (a := _averaged(n)) is not None), None)
    momentum = (averaged or spread or (_MOMENTUM, None))[0]
    return replace(
        record,
        momentum=momentum,
        running_mean=averaged and averaged[1],
        running_var=spread and spread[1],
    )


def _averaged(statistic: Node) -> tuple[float, Node] | None:
    """The momentum m and the tensor t of a m * statistic + (1 - m) * t, whatever the second factor."""
    for part, momentum in readers(statistic, "mul", casts=True):
        if type(momentum) not in (int, float):
            continue
        for _, other in readers(part, "add"):
            kept = source_of(other)
            if op_of(kept) == "mul" and type(kept.args[1]) in (int, float):
                running = source_of(kept.args[0])
                if channel_axis(val_of(running)) is not None:
                    return momentum, running
    return None


# Gradients.


def _gradient(dot: Node) -> Candidate | None:
    summed = source_of(dot.args[0])
    if op_of(summed) != "mul" or len(dot.args) < 2:
        return None
    for grad, other in (summed.args, summed.args[::-1]):
        chain, inverse, emitter = _normalised(other)
        val, grads = val_of(chain.input if chain else None), val_of(grad)
        if chain is None or val is None or grads is None or grads.shape != val.shape:
            continue
        dims: Any = dot.args[1]
        if sorted(d % val.ndim for d in dims) != [d for d in range(val.ndim) if d != 1]:
            return None
        inverse = _scale(dot) if inverse is None else inverse
        if inverse is not None:
            return Candidate(dot, emitter, tuple(_gradients(grad, chain, inverse)))
    return None


def _normalised(node: Any) -> tuple[_Chain | None, Any, str]:
    """(input - mean), which is what torch sums, or that times the inverse deviation, which is what the formula does."""
    chain = _centered(node)
    if chain is not None:
        return chain, None, "torch"
    scaled = source_of(node)
    for centered, inverse in (scaled.args, scaled.args[::-1]) if op_of(scaled) == "mul" else ():
        if (chain := _centered(centered)) is not None and _of_channels(inverse, chain.input):
            return chain, inverse, "formula"
    return None, None, ""


def _scale(dot: Node) -> Any:
    """The inverse deviation that a sum of grad_out * (input - mean) is scaled by, once or, for the input, twice."""
    for part, other in readers(dot, "mul"):
        if val_of(other) is None:
            for _, square in readers(part, "mul"):
                square = source_of(square)
                if op_of(square) == "mul" and square.args[0] is square.args[1]:
                    return square.args[0]
        elif channel_axis(val_of(other)) is not None:
            return other
    return None


def _gradients(grad: Any, chain: _Chain, inverse: Any) -> Iterator[Gradient]:
    """The records that a chain may be of: with or without a weight, of what was cast or the cast, in both modes."""
    held, mean = source_of(inverse, casts=True), source_of(chain.mean, casts=True)
    spread, eps = _shifted(held)
    running = source_of(spread, casts=True)
    saved_eps = eps if eps is not None else _forward_eps(held)
    for weight, casts in product((*_weights(held), None), (True, False)):
        whole = source_of(grad, casts), source_of(chain.input, casts)
        if eps is not None and not _reduction(running):
            yield Gradient(*whole, weight, mean, running, None, None, False, eps, [True] * 3, None)
        yield Gradient(*whole, weight, None, None, mean, held, True, saved_eps, [True] * 3, None)


def _shifted(inverse: Any) -> tuple[Any, Any]:
    """The variance and the literal eps of rsqrt(var + eps), None of anything else."""
    shifted: Any = source_of(inverse.args[0]) if op_of(inverse) == "rsqrt" else None
    if op_of(shifted) == "add" and len(shifted.args) == 2 and type(shifted.args[1]) in (int, float):
        return shifted.args[0], shifted.args[1]
    return None, None


def _forward_eps(saved: Any) -> float:
    """The eps of the forward that saved a statistic, when it is in the graph. No gradient of batch statistics reads it,
    but the library's kernels ask that it is not too small.
    """
    while isinstance(saved, Node) and (before := transparent(saved) or cast_of(saved)) is not None:
        saved = before
    made: Any = saved.args[0] if getattr(saved, "target", None) is operator.getitem else None
    if getattr(made, "target", None) in BY_TARGET:
        return float(read_site(made).norm.eps)
    eps = _shifted(saved)[1]
    return _EPS if eps is None else float(eps)


def _weights(inverse: Node) -> list[Node]:
    """What an inverse deviation is multiplied by before it scales a whole tensor."""
    found = []
    for scale, other in readers(inverse, "mul", casts=True):
        weight = source_of(other, casts=True)
        whole = [r for r, _ in readers(scale, "mul") if channel_axis(val_of(r)) is None]
        if channel_axis(val_of(other)) is not None and whole and weight is not inverse and weight not in found:
            found.append(weight)
    return found
