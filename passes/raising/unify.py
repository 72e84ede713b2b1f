"""Unification: what stands for the operands and literals of a traced reference in a chain of operations.

Reference and graph are walked together from a characteristic operation, down to the operands and up to the outputs,
through views and casts, factors in either order. What is bound then is a guess, which chains.py holds against the exact
reference, operation for operation. So that it can say what differs, unification is generous: an operand is bound where
it is met first, a literal is whatever is there, and what is there in place of a mean is let pass.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch.fx import Node

from ..graph.calls import arguments_of, op_of
from ..graph.effects import cast_of, transparent
from ..graph.meta import channel_axis, val_of
from .numbering import COMMUTE
from .reference import LITERALS, OPTIONAL, Pattern

# The node that stands for each of a pattern's, under their names the literals, and the number of conflicts: how often
# another operand was met than the one that is bound, or another mean. No chain with any is exact.
Binding = Mapping[Any, Any]


def unify(pattern: Pattern, anchor: Node) -> list[Binding]:
    """The bindings of a pattern whose anchor is this node, the longest chain first."""
    found = _least(_down(pattern, pattern.anchor, anchor, {"conflicts": 0}))
    # the output last: it is the longest way up, and what else is bound by then shortens it
    first, *others = pattern.roles.values()
    for root in others:
        found = [_least([*_reached(pattern, root, part), part])[0] for part in found]
    found = [whole for part in found for whole in _reached(pattern, first, part) or [part]]
    return _least(binding for binding in found if pattern.needed <= binding.keys())


def _least(found: Iterable[Binding]) -> list[Binding]:
    """The bindings with the fewest conflicts."""
    kept = list(found)
    least = min((binding["conflicts"] for binding in kept), default=0)
    return [binding for binding in kept if binding["conflicts"] == least]


def _reached(pattern: Pattern, root: Node, binding: Binding) -> list[Binding]:
    """The bindings that reach an output, where that tells of an operand which is not bound yet."""
    # going up costs most, so only for what is still asked: weight, bias, running statistics
    unbound = pattern.leaves.keys() - binding.keys()
    return list(_up(pattern, root, binding)) if unbound & pattern.behind[root] else []


def _up(pattern: Pattern, root: Node, binding: Binding) -> Iterator[Binding]:
    """The bindings that reach an output, from the last of the values behind it that is bound."""
    behind = pattern.behind[root]
    term = max(behind & binding.keys())
    if term is root:
        yield binding
        return
    parent, readers = max(behind & term.users.keys()), [*_readers(bare(binding[term]))]
    # steps that look like the pattern's come first; only without any, something else may stand in their place
    alike = [reader for reader in readers if _called(reader) == _called(parent)]
    found = [deeper for reader in alike for deeper in _operands(pattern, parent, reader, binding)]
    for deeper in found:
        yield from _up(pattern, root, deeper)
    for reader in () if found else readers:
        if weighed := _weighed(pattern, binding, reader):
            yield from _up(pattern, root, {**_conflicting(binding), **weighed, term: reader})
    # affine=False: there is no product with a weight, no sum with a bias
    if _left_out(pattern, parent) is term:
        yield from _up(pattern, root, {**binding, parent: binding[term]})


def _weighed(pattern: Pattern, binding: Binding, reader: Node) -> Binding:
    """The weight of a reader that multiplies by it elsewhere than the pattern, which the exact check tells."""
    weights = [leaf for leaf, field in pattern.leaves.items() if field == "weight" and leaf not in binding]
    channels = [part for part in reader.args if op_of(reader) == "mul" and channel_axis(val_of(part)) is not None]
    return {weights[0]: channels[-1]} if weights and len(channels) == 2 else {}


def _down(pattern: Pattern, term: Any, value: Any, binding: Binding) -> Iterator[Binding]:
    """The bindings in which a value is what a term of the reference is: a node of it, or a literal."""
    node = bare(value)
    if not isinstance(term, Node):
        yield from _literal(term, value, binding)
    # x is read twice, by the mean and by the difference: both have to be one tensor
    elif term in binding and bare(binding[term]) is node:
        yield binding
    elif term in pattern.leaves:
        if val_of(value) is not None:
            yield _conflicting(binding) if term in binding else {**binding, term: value}
    elif isinstance(node, Node):
        found = list(_operands(pattern, term, node, binding)) if _called(node) == _called(term) else []
        if not found and (rest := _left_out(pattern, term)) is not None:
            found = [{**deeper, term: node} for deeper in _down(pattern, rest, node, binding)]
        yield from found or ([_conflicting(binding)] if term is pattern.roles.get("save_mean") else [])


def _conflicting(binding: Binding) -> Binding:
    return {**binding, "conflicts": binding["conflicts"] + 1}


def _operands(pattern: Pattern, term: Node, node: Node, binding: Binding) -> Iterator[Binding]:
    """The bindings in which two calls of an op have the same operands, in either order where they commute."""
    asked, given = arguments_of(term), arguments_of(node)
    # x * x is the same in both orders, and would give each binding twice
    commutes = op_of(term) in COMMUTE and given[0] is not given[1]
    for order in (given, given[1::-1]) if commutes else (given,):
        found: list[Binding] = [{**binding, term: node}]
        for part, value in zip(asked, order, strict=False):
            found = [deeper for sofar in found for deeper in _down(pattern, part, value, sofar)]
        yield from found


def _literal(term: Any, value: Any, binding: Binding) -> Iterator[Binding]:
    """A literal that has a name is bound, even an eps that is a tensor; of any other there may be another."""
    name = LITERALS.get(term) if type(term) is float else None
    if name is None:
        if type(term) not in (int, float) or val_of(value) is None:
            yield binding
    elif name == "eps" or type(value) in (int, float):
        yield {name: value, **binding}


def _left_out(pattern: Pattern, term: Node) -> Node | None:
    """What a step hands on where it may be missing: what is beside a weight, a bias or a number."""
    # var + eps and momentum * batch are never left out
    if op_of(term) not in COMMUTE or any(type(part) is float and part in LITERALS for part in term.args):
        return None
    rest = [part for part in term.args if isinstance(part, Node) and pattern.leaves.get(part) not in OPTIONAL]
    return rest[0] if len(rest) == 1 else None


def _called(node: Node) -> Any:
    """What a node computes as far as its operands do not say."""
    return ("getitem", node.args[1]) if node.target is operator.getitem else op_of(node) or node


def bare(node: Any) -> Any:
    """What a node is before any views and casts, lossless or not."""
    while isinstance(node, Node) and (before := transparent(node) or cast_of(node)) is not None:
        node = before
    return node


def _readers(node: Node) -> Iterator[Node]:
    """The users of a value, however it is viewed and cast."""
    for user in node.users:
        yield from (user,) if bare(user) is user else _readers(user)
