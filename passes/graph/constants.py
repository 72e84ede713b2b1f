"""Constants: what operands of a draft are, in the tensors of the state; of what is not constant, why."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from ...decomps.ops import Kind, Memory, kind_of, memory_of
from .calls import arguments_of, measures
from .draft import Draft
from .effects import Effects, Storages, cast_of
from .meta import empty_val, val_of
from .nest import Call, Nest
from .result import Reason
from .signature import tensors_of

# What a chain from the state to an operand may be of; and what of it leaves every entry in its place in memory.
_LINKS = (Kind.ALIAS, Kind.RESHAPE, Kind.PERMUTE, Kind.PART)
_WHOLE = (Kind.ALIAS, Kind.RESHAPE, Kind.PERMUTE)


# A value computed by more than this is taken to be computed from an input: what looks for it stays cheap.
_FEW = 64


@dataclass(frozen=True)
class Constant:
    """A tensor of the state, as an operand reads it, or what is computed from several.

    name: its FQN. root: the placeholder or get_attr node of the operand's graph. chain: the nodes between, in order:
    views and casts, or any pure op. others: the roots and tensors of a computed one beside the first.
    """

    name: str
    root: Node
    tensor: torch.Tensor
    chain: tuple[Node, ...]
    others: dict[Node, torch.Tensor] = field(default_factory=dict)

    @property
    def maker(self) -> Node | None:
        """The last node that computes it, None where a tensor is only viewed, copied or cast."""
        computes = (n for n in reversed(self.chain) if not hands_on(n) or len(n.all_input_nodes) > 1)
        return next(computes, None)

    @property
    def learns(self) -> bool:
        """Whether a tensor that it is made of does."""
        return any(tensor.requires_grad for tensor in (self.tensor, *self.others.values()))

    def value(self) -> torch.Tensor:
        """What the operand is."""
        # the state may learn, what a pass computes of it is a new tensor without a history
        leaves = {root: tensor.detach() for root, tensor in ((self.root, self.tensor), *self.others.items())}
        found: torch.Tensor = run(self.chain, leaves) if self.chain else leaves[self.root]
        return found

    def view(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """A tensor like the one in the state, as the operand reads it but for casts: its own memory, or None."""
        if self.others:
            return None
        for node in self.chain:
            if cast_of(node) is not None:  # the state keeps its dtype, whatever the operand is read in
                continue
            if kind_of(node.target) not in _WHOLE or memory_of(node.target) is not Memory.SHARED:
                return None
            tensor = node.target(tensor, *node.args[1:], **node.kwargs)  # type: ignore[operator]
        return tensor

    @property
    def read(self) -> tuple[Any, ...]:
        """Which tensors it is and how they are read."""
        if self.maker is not None:
            return self.name, self.chain[-1]
        return self.name, *((str(node.target), str(arguments_of(node)[1:])) for node in self.chain)


def run(steps: Sequence[Node], leaves: Mapping[Node, torch.Tensor]) -> Any:
    """What the last of some nodes, which run in order, makes of the values that the rest of the graph gives them."""
    values: dict[Node, Any] = dict(leaves)
    for node in steps:
        args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
        values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    return values[steps[-1]]


class Constants:
    """What a draft's program holds, by name and by the nodes that bring it in; nested graphs included, where a graph
    runs once for each call.

    unchanged: new values that are known to be the old ones, so that listing them as mutations writes nothing.
    """

    def __init__(self, draft: Draft, unchanged: Collection[Node] = ()) -> None:
        self.draft = draft
        self.nest = Nest(draft.top, draft.graphs)
        self.effects = Effects(self.nest, draft.functional)
        self.tensors = tensors_of(draft.program)
        self.storages = Storages(self.tensors)
        self.roots: dict[str, list[Node]] = defaultdict(list)
        self.bound: dict[Node, tuple[Call, Node]] = {}  # a named placeholder of a nested graph -> its call, the operand
        found = self.nest.names(draft.listing.target_of, self._only)
        self.names = {node: name for node, name in found.items() if name in self.tensors}
        for node, name in self.names.items():
            self.roots[name].append(node)
            if node.op == "placeholder" and (calls := self.nest.callers(self.nest.paths[node.graph])):
                self.bound[node] = calls[0], calls[0].bound[node]  # the only one, or it had no name: see _only
        self.handed = {(call.node, operand) for call, operand in self.bound.values()}  # what calls hand on by name
        # every reader asks again, and an answer takes a walk up to the state and one down to who writes to it
        self._known: dict[Node, Constant | Reason] = {}
        self._foreign: set[Node] = set()  # what is computed of more than the state, as far as was asked
        self._read: dict[Node, torch.Tensor | None] = {}
        self._fixed: dict[str, Reason] = {}
        self._fakes = FakeTensorMode()  # one for all: an operation on fake tensors of two modes raises
        self._mutated = {target for target, value in draft.listing.mutations() if value not in unchanged}

    def _only(self, call: Call) -> bool:
        """Whether what a call binds is what its graph is always given."""
        # a second call may hand in another tensor, and so does each round of a loop, which is no `once`
        return call.once and call.spread and len(self.nest.callers(call.nested)) == 1

    @cached_property
    def opaque(self) -> dict[str, Node]:
        """What a module that is no graph holds, by name, each with who calls it."""
        # what its forward does with them no graph says: it may write, or replace them
        found: dict[str, Node] = {}
        for path, graph in self.nest.graphs.items():
            for node in graph.find_nodes(op="call_module"):
                held = f"{path}.{node.target}." if path else f"{node.target}."
                if not self.nest.calls(node):
                    found |= {name: node for name in self.tensors if name.startswith(held)}
        return found

    def constant(self, operand: Node) -> Constant | Reason:
        """What an operand is, or why that is not known."""
        if operand not in self._known:
            self._known[operand] = self._constant(operand)
        return self._known[operand]

    def known(self, node: Any, like: Any = None) -> torch.Tensor | None:
        """A tensor of the shape, dtype and device that a node makes, None where that is not known.

        What is read from the state is as the state is; anything else as its own `val` says, which may be stale: a
        module is moved by `to` and its graph is not. like: an operand of the state that has its dtype, and tells so.
        """
        val = val_of(node)
        if not isinstance(node, Node):
            return None
        if node not in self._read:
            self._read[node] = self._as_read(node)
        found, stale, true = self._read[node], val_of(like), self.known(like) if like is not None else None
        if found is not None or val is None or stale is None or true is None or val.dtype != stale.dtype:
            return val if found is None else found
        return val if true.dtype == stale.dtype else empty_val(val, val.shape, true.dtype)

    def _as_read(self, node: Node) -> torch.Tensor | None:
        """A node's tensor in the state, fake where it is a view or is computed, None for what is read elsewhere."""
        # the tensor itself: nothing is run for what the state holds as it is read, which is nearly all
        if node in self.names:
            return self.tensors[self.names[node]]
        steps = self._steps(node)
        if steps is None:
            return None
        leaves = {n: self._fakes.from_tensor(self.tensors[self.names[n]].detach()) for n in steps if n in self.names}
        with self._fakes:
            found = run([n for n in steps if n not in leaves], leaves)
        return found if isinstance(found, torch.Tensor) else None

    def _constant(self, operand: Node) -> Constant | Reason:
        steps = self._steps(operand)
        if steps is None:
            return self._refuse_computed(operand)
        tensors = {node: self.tensors[self.names[node]] for node in steps if node in self.names}
        chain = tuple(node for node in steps if node not in tensors)
        refused = next(filter(None, map(self._refuse_state, tensors)), None) or self._refuse_overwritten(chain)
        first = next(iter(tensors))
        return refused or Constant(self.names[first], first, tensors.pop(first), chain, tensors)

    def _refuse_computed(self, operand: Node) -> Reason:
        """What an operand is that is not computed from the state alone."""
        node = operand
        while node not in self.names and hands_on(node) and node.all_input_nodes == [node.args[0]]:
            node = node.args[0]  # type: ignore[assignment]
        what = "an input" if node.op == "placeholder" else f"computed by {node.target}"
        return Reason(f"{operand.name} is no constant of the program: {node.name} is {what}{quantization(node)}")

    def _refuse_state(self, root: Node) -> Reason:
        """Why a tensor of the state is no constant, by a node that brings it in."""
        name = self.names[root]
        if name not in self._fixed:
            self._fixed[name] = refuse_entries(name, self.tensors[name]) or self._refuse_written(name)
        return self._fixed[name]

    def _steps(self, operand: Node) -> list[Node] | None:
        """The state that an operand is computed from and the nodes that compute it, in order, None where something
        else than pure operations on state does.
        """
        found: dict[Node, None] = {}
        work = [operand]
        while work:
            node = work[-1]
            inputs = [] if node in self.names else [n for n in node.all_input_nodes if n not in found]
            # what waits counts too, so that a wide computation ends the search as early as a long one
            few = len(found) + len(work) <= _FEW and node not in self._foreign
            if node not in self.names and not (few and self._pure(node)):
                # nor is what is computed of it: activations are asked one behind the other, each by what it is made of
                self._foreign |= {node, operand} if few else {operand}
                return None
            if inputs:
                work += inputs
                continue
            found[work.pop()] = None
        return list(found) if any(node in self.names for node in found) else None

    def _pure(self, node: Node) -> bool:
        """Whether a node computes its result from its operands alone, the same wherever it is run."""
        if hands_on(node):
            return True
        if node.op != "call_function" or not _is_pure(node.target):
            return False
        # autocast decides by op in which dtype it runs, which evaluating it out here would not
        return not any(call.kind == "wrap_with_autocast" for call in self._around(node))

    def _around(self, node: Node) -> Iterator[Call]:
        """The calls inside which a node runs."""
        work = [node]
        while work:
            for call in self.nest.callers(self.nest.paths[work.pop().graph]):
                yield call
                work.append(call.node)

    def _refuse_overwritten(self, chain: tuple[Node, ...]) -> Reason:
        """Why what is computed is another value by the time that it is read: who writes to a copy on the way."""
        for node in chain:
            if writes := self.effects.accesses(node)[1]:
                return Reason(f"{node.name} is no constant of the program: {writes[0].name} writes to it")
        return Reason()

    def _refuse_written(self, name: str) -> Reason:
        """Why a tensor is no constant: who writes to it or to memory that it shares."""
        for other in self.storages.sharing(name):
            if other in self.opaque:
                what = "a module that is called and is no graph"
                return Reason(f"{name} belongs to {self.opaque[other].target}, {what}")
            for root in self.roots[other]:
                if root in self._mutated:
                    return Reason(f"{name} is no constant of the program, which lists a mutation of {root.name}")
                # a nested placeholder is followed into from its root outside, and need not be again
                writes = [] if root in self.bound else self.effects.accesses(root)[1]
                if writes and self.nest.runs(writes[0]):
                    what = f"{writes[0].name} ({writes[0].target})"
                    return Reason(f"{name} is handed to {what}, which may write to it")
                if writes:
                    return Reason(f"{name} is no constant of the program: {writes[0].name} writes to {root.name}")
        return Reason()

    def late_writes(self, value: Node, node: Node) -> set[Node]:
        """Who may write to a value's memory behind a node of its graph, as far as one can tell: inputs of the program
        that share memory when it is called are taken to be written together.
        """
        if self.draft.functional:  # its mutations are written when the program is through
            return set()
        bases = self.effects.bases(value)
        for base in list(bases):
            if base in self.names:
                bases += [root for name in self.storages.sharing(self.names[base]) for root in self.roots[name]]
            elif base.op == "placeholder":
                bases += [n for n in base.graph.find_nodes(op="placeholder") if n not in self.names]
        writes = (write for base in dict.fromkeys(bases) for write in self.effects.accesses(base)[1])
        return {at for write in writes for at in self.nest.lifted(write, value.graph) if at > node}

    def readers(self, name: str) -> list[Node]:
        """Every node that reads a tensor, or memory that it shares, through views and casts; once for each operand."""
        roots = (root for other in self.storages.sharing(name) for root in self.roots[other])
        reads = ((reader, operand) for root in roots for reader, operand in self._users(root))
        return [r for r, operand in reads for a in pytree.tree_leaves((r.args, r.kwargs)) if a is operand]

    def _users(self, root: Node) -> Iterator[tuple[Node, Node]]:
        """Who reads a root, each with the operand it reads: not views and casts, nor calls that hand it on by name."""
        work = [root]
        while work:
            operand = work.pop()
            for user in operand.users:
                if measures(user, operand) or (user, operand) in self.handed:
                    continue
                if hands_on(user):
                    work.append(user)
                else:
                    yield user, operand


@cache
def _is_pure(target: Any) -> bool:
    """Whether what is called writes nothing, draws nothing, and is no stage of quantization-aware training."""
    if any(word in str(target) for word in _QUANTIZES):
        return False
    if not isinstance(target, OpOverload):  # sizes are computed by Python's operators
        return target is operator.getitem or getattr(target, "__module__", "") == "_operator"
    plain = target.namespace in ("aten", "prims") and not target._schema.is_mutable
    return plain and torch.Tag.nondeterministic_seeded not in target.tags


def hands_on(node: Node) -> bool:
    """Whether a node makes a view, a copy or a cast of its operand, or of a part of it."""
    return kind_of(node.target) in _LINKS or cast_of(node) is not None


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def refuse_entries(name: str, tensor: torch.Tensor) -> Reason:
    """Why a tensor's entries cannot be read and written as they lie in memory."""
    found = ""
    if isinstance(tensor, FakeTensor) or tensor.device.type == "meta":
        found = "has no values (fake, or on the meta device)"
    elif type(tensor) not in _PLAIN:  # computes by rules of its own, as torchao's packed weights do
        found = f"is a {type(tensor).__name__}"
    elif tensor.is_quantized or tensor.layout is not torch.strided:
        found = "is quantized" if tensor.is_quantized else f"is a {tensor.layout} tensor"
    return Reason(f"{name} {found}, expected a plain tensor" if found else "")


_QUANTIZES = ("quantize", "fake_quant", "activation_post_process")


def quantization(node: Node) -> str:
    """What to say of a value where quantization-aware training left something on the way to it, else nothing."""
    seen, work = {node}, [node]
    for _ in range(5):  # as far as from its batch norm to the weight that it scales
        if any(word in str(n.target) for n in work for word in _QUANTIZES):
            return ": quantization-aware training left it, and who put it there folds it (torchao's convert_pt2e)"
        work = [n for held in work for n in held.all_input_nodes if n not in seen]
        seen |= set(work)
    return ""
