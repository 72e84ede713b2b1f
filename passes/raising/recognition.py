"""Candidates: the records that a chain of operations may compute, as unification binds them."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import chain
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node

from ...decomps.forms import BY_TARGET, BatchNorm, Gradient
from ...decomps.ops import Kind, kind_of
from ..graph.calls import op_of
from ..graph.effects import source_of
from ..graph.meta import channel_axis, val_of
from ..graph.result import Reason
from ..rewriting.site import read_site
from .numbering import dims_of
from .reference import LITERALS, OPTIONAL, WHOLE, Pattern, patterns
from .unify import Binding, bare, unify

# torch.nn's defaults, for what the operations do not say because nothing reads it.
_MOMENTUM, _EPS = 0.1, 1e-5


@dataclass(frozen=True)
class Candidate:
    """A chain that looks like batch norm. node: its anchor. guesses: records, best first, each with the emitter that it
    is spelled as; made as they are asked for. reason: why it is none after all, as far as can be told without the
    reference.
    """

    node: Node
    guesses: Iterable[tuple[BatchNorm | Gradient, str]]
    reason: Reason


def find_candidates(graph: Graph) -> Iterator[Candidate]:
    """Gradients ahead of the forwards: a gradient may normalise its input anew, which is a forward without weights.

    Each is read when it is reached, so that the graph may be edited meanwhile.
    """
    for kind, read in ((Gradient, _gradient), (BatchNorm, _forward)):
        for target in dict.fromkeys(pattern.anchor.target for pattern in patterns(kind)):
            anchored = [pattern for pattern in patterns(kind) if pattern.anchor.target is target]
            for node in graph.find_nodes(op="call_function", target=target):
                # a chain that was raised meanwhile took its other nodes of this target along
                if not node._erased and (candidate := read(node, anchored)) is not None:
                    yield candidate


@dataclass(frozen=True)
class _Match:
    """A pattern, and what is bound to its nodes."""

    pattern: Pattern
    binding: Binding

    @property
    def operands(self) -> dict[str, Node]:
        """What is bound to the leaves, by field."""
        return {field: self.binding[leaf] for leaf, field in self.pattern.leaves.items() if leaf in self.binding}

    def source(self, field: str, casts: bool = True) -> Any:
        """An operand before its views, and before lossless casts if asked; None where there is none.

        What a forward reads of a detached tensor has no gradient: there the detached one is the operand.
        """
        return source_of(self.operands.get(field), casts, detached=self.pattern.kind is Gradient)

    def fits(self) -> bool:
        """Whether the operands have the shapes that batch norm takes."""
        operands = self.operands
        whole: list[Any] = [val_of(node) for field, node in operands.items() if field in WHOLE]
        channels = [channel_axis(val_of(node)) for field, node in operands.items() if field not in WHOLE]
        mean = operands.get("save_mean" if self.pattern.training else "running_mean")
        # of layer norm and group norm the statistics lie along other dimensions
        beside = mean is None or _of_channels(mean, operands["input"])
        return None not in channels and all(v.ndim > 1 and v.shape == whole[0].shape for v in whole) and beside

    def records(self, **defaults: Any) -> Iterator[tuple[Any, str]]:
        """The records that it may be of, and the emitter. Casts may be the reference's, which computes half types in
        float32, or what is cast is the operand.
        """
        kind = self.pattern.kind
        literals = {name: self.binding[name] for name in LITERALS.values() if name in self.binding}
        given = dict.fromkeys(f.name for f in fields(kind) if f.name != "out") | defaults | literals
        # half inputs are cast to float32 by the decomposition, and may have been cast by the user
        for casts in (True, False):
            operands = {f: self.source(f, casts or f not in (*WHOLE, *OPTIONAL)) for f in self.operands}
            yield kind(**{**given, **operands, "training": self.pattern.training}), self.pattern.emitter


def _matches(node: Node, anchored: Iterable[Pattern]) -> Iterator[_Match]:
    """What patterns bind, anchored at a node, one by one: the first one nearly always is the chain."""
    found = (_Match(pattern, binding) for pattern in anchored for binding in unify(pattern, node))
    return (match for match in found if match.fits())


def _of_channels(node: Node, input: Node) -> bool:
    """Whether a tensor has one value for each channel of an input, and broadcasts along its dimension 1."""
    val, whole = val_of(node), val_of(input)
    axis = channel_axis(val)
    if val is None or whole is None or axis is None or whole.ndim < 2:
        return False
    # counted from the right: dimension 1 of [N, C, *] is at ndim - 2, and a [C] that is not viewed is at 0
    return whole.shape[1] == 1 if axis == -1 else axis == whole.ndim - 2 and val.shape[-1 - axis] == whole.shape[1]


def _distinct(guesses: Iterable[Any]) -> Iterator[Any]:
    seen: list[Any] = []
    for guess in guesses:
        if guess not in seen:
            seen.append(guess)
            yield guess


# Forwards.


def _forward(anchor: Node, anchored: Sequence[Pattern]) -> Candidate | None:
    # training first: to a pattern of eval, the statistics of the batch are an operand like any other
    matches = _matches(anchor, sorted(anchored, key=lambda pattern: not pattern.training))
    first = next(matches, None)
    reason = None if first is None else _refuse_statistics(first)
    if first is None or reason is None or _regrouped(first.source("input")):
        return None
    eps = first.binding["eps"]
    if not reason and type(eps) not in (int, float):
        reason = Reason(f"its eps is {eps}, not a literal number")
    alike = (match for match in matches if match.pattern.training is first.pattern.training)
    guesses = (guess for match in chain([first], alike) for guess in match.records(momentum=_MOMENTUM))
    return Candidate(anchor, () if reason else _distinct(guesses), reason)


def _refuse_statistics(match: _Match) -> Reason | None:
    """Why the statistics of a forward are none of batch norm's, None where it is another norm for sure: of a layer, a
    group, an instance or a weight.
    """
    training, statistics = match.pattern.training, _statistics(match)
    for node in filter(_reduces, map(_maker, statistics)):
        found, expected = _dims(node)
        # batch norm reduces over the batch, and never over channels
        if 0 not in found or 1 in found:
            return None
        if training and found != expected:
            return Reason(f"it reduces over dimensions {found}, expected {expected}")
        given = node.kwargs.get("correction")
        # torch's default is Bessel's, 1; batch norm normalises with the biased variance
        correction = 0 if op_of(node) != "var_mean" else 1 if given is None else given
        if training and correction != 0:
            return Reason(f"its correction is {correction}, expected 0: the biased variance")
    for node in () if training else statistics:
        if (made := _computed(node)) is not None:
            return Reason(
                f"its {node.name} is computed in the graph, by {made.name} ({made.target}): it is not tracked"
            )
    return Reason()


def _statistics(match: _Match) -> list[Node]:
    """What normalises: what is reduced behind the anchor, in eval the running statistics."""
    if match.pattern.training:
        behind = match.pattern.behind[match.pattern.anchor] - match.pattern.leaves.keys()
        return [match.binding[term] for term in sorted(behind) if _reduces(term)]
    return [match.source(field) for field in ("running_mean", "running_var")]


def _maker(node: Any) -> Any:
    """The call that a node is one of the results of."""
    return node.args[0] if getattr(node, "target", None) is operator.getitem else node


def _reduces(node: Any) -> bool:
    target = getattr(node, "target", None)
    return isinstance(target, OpOverload) and any(argument.name == "keepdim" for argument in target._schema.arguments)


def _dims(node: Node) -> tuple[list[int], list[int]]:
    """The dimensions that a reduction is over, and those that batch norm's are over; none of what is not known."""
    val = val_of(node.args[0])
    return ([], []) if val is None else ([*dims_of(node)], [d for d in range(val.ndim) if d != 1])


def _computed(statistic: Node) -> Node | None:
    """The operation that a statistic comes of, None where it is state, moved, scaled or updated by a batch norm.

    What is computed of a batch, or of weights, has a gradient, which running statistics have not.
    """
    work = [statistic]
    for node in work:
        if node.op == "call_function" and node.target not in BY_TARGET:
            # an update, (1 - momentum) * old + momentum * batch, is pointwise in the state, and where it meets the
            # batch there is a reduction
            pointwise = isinstance(node.target, OpOverload) and torch.Tag.pointwise in node.target.tags
            moved = node.target is operator.getitem or kind_of(node.target) not in (None, Kind.FRESH, Kind.DRAW)
            if not moved and not pointwise:
                return node
            work += [operand for operand in node.all_input_nodes if operand not in work]
    return None


def _regrouped(node: Any) -> bool:
    """Whether the batch was made part of the channels: instance norm, which is decomposed into batch norm of one."""
    val = val_of(node)
    if val is None or type(val.shape[0]) is not int or val.shape[0] != 1:
        return False
    # instance norm views [N, C, *] as [1, N * C, *], and what it normalises then is the batch
    while kind_of(getattr(node, "target", None)) is Kind.RESHAPE:
        node = source_of(node.args[0], casts=True)
    before = val_of(node)
    return before is not None and before.shape[:1] != val.shape[:1]


# Gradients.


def _gradient(anchor: Node, anchored: Sequence[Pattern]) -> Candidate | None:
    matches, (found, expected) = [*_matches(anchor, anchored)], _dims(anchor)
    guesses = [
        guess
        for match in matches
        if found == expected and (match.pattern.training or _computed(match.source("running_var")) is None)
        for guess in match.records(output_mask=[True] * 3, eps=_saved_eps(match))
    ]
    return Candidate(anchor, [*_distinct(guesses)], Reason()) if guesses else None


def _saved_eps(match: _Match) -> float:
    """The eps of the forward that saved the statistics, when it is in the graph. No gradient of batch statistics reads
    it, but the library's kernels ask that it is not too small.
    """
    saved = bare(match.operands.get("save_invstd"))
    made = _maker(saved)
    # forwards may have been raised already, in this graph or by another pass
    if getattr(made, "target", None) in BY_TARGET:
        return float(read_site(made).norm.eps)
    shifted: Any = source_of(saved.args[0]) if op_of(saved) == "rsqrt" else None
    eps: Any = shifted.args[1] if op_of(shifted) == "add" else None
    return float(eps) if type(eps) in (int, float) else _EPS
