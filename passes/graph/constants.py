"""State: the parameters, buffers and constants of a draft, by the nodes that read them; replaced, added, dropped."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Node
from torch.utils import _pytree as pytree

from ...decomps.ops import Kind, Memory, kind_of, memory_of
from .calls import arguments_of, measures
from .draft import Draft
from .effects import accesses, cast_of, may_alias
from .meta import empty_val, set_val, val_of
from .nest import ONCE, called_by, callers_of
from .signature import tensors_of

# What a chain from the state to an operand may be of; and what of it leaves every entry in its place in memory.
_LINKS = (Kind.ALIAS, Kind.RESHAPE, Kind.PERMUTE, Kind.PART)


_WHOLE = (Kind.ALIAS, Kind.RESHAPE, Kind.PERMUTE)


@dataclass(frozen=True)
class Constant:
    """A tensor of the state, as an operand reads it.

    name: its FQN. root: the placeholder or get_attr node of the operand's graph. chain: the views and casts between.
    """

    name: str
    root: Node
    tensor: torch.Tensor
    chain: tuple[Node, ...]

    def value(self) -> torch.Tensor:
        """What the operand is."""
        found = self.tensor.detach()
        for node in self.chain:
            found = _again(node, found)
        return found

    def view(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """A tensor like the one in the state, as the operand reads it but for casts: its own memory, or None."""
        for node in self.chain:
            if cast_of(node) is not None:
                continue
            if kind_of(node.target) not in _WHOLE or memory_of(node.target) is not Memory.SHARED:
                return None
            tensor = _again(node, tensor)
        return tensor

    @property
    def read(self) -> tuple[Any, ...]:
        """Which tensor it is and how it is read."""
        return self.name, *((str(node.target), str(arguments_of(node)[1:])) for node in self.chain)


def _again(node: Node, tensor: torch.Tensor) -> torch.Tensor:
    """What a view, a copy or a cast makes of a tensor."""
    keywords = {key: value for key, value in node.kwargs.items() if not isinstance(value, Node)}
    found: torch.Tensor = node.target(tensor, *node.args[1:], **keywords)  # type: ignore[operator]
    return found


class State:
    """What a draft's program holds, by name and by the nodes that bring it in; nested graphs included, where a graph
    runs once for each call.

    unchanged: new values that are known to be the old ones, so that listing them as mutations writes nothing.
    """

    def __init__(self, draft: Draft, unchanged: Collection[Node] = ()) -> None:
        self.draft = draft
        self.tensors = tensors_of(draft.program)
        self.names: dict[Node, str] = {}
        self.roots: dict[str, list[Node]] = defaultdict(list)
        self._bound: dict[Node, tuple[Node, Node]] = {}  # placeholder of a nested graph -> its caller, the operand
        self._known: dict[Node, Constant | str] = {}
        self._fixed: dict[str, str] = {}
        self._mutated = {target for target, value in draft.mutations() if value not in unchanged}
        self._dead: set[str] = set()
        self._callers: set[Node] = set()
        self._handed: set[tuple[Node, Node]] = set()  # the calls with the operands that they hand on by name
        self._opaque: dict[str, Node] = {}  # what a module that is no graph holds -> who calls it
        self._made: dict[tuple[Node, str], Node] = {}  # new parameters: a root beside it, its name -> its node
        self._latest: dict[Node, Node] = {}  # the last new parameter beside a node
        self._odd: dict[str, str] = {}  # why a tensor cannot be read or written as it lies in memory
        self._shared: dict[int, list[tuple[int, int, str]]] = defaultdict(list)
        for name in self.tensors:
            self._shares(name)
        self._taken = {prefix for name in self.tensors for prefix in accumulate(name.split("."), "{}.{}".format)}
        self._find()

    def _find(self) -> None:
        callers = callers_of(self.draft.top, dict(self.draft.graphs))
        for path, graph in self.draft.graphs:
            for node in graph.find_nodes(op="placeholder") if not path else ():
                self._name(node, self.draft.input_target(node))
            for node in graph.find_nodes(op="get_attr"):
                self._name(node, f"{path}.{node.target}" if path else str(node.target))
            if path and len(callers.get(path, ())) == 1:
                self._bind(graph.find_nodes(op="placeholder"), callers[path][0][1])
            for node in graph.find_nodes(op="call_module"):
                held = f"{path}.{node.target}." if path else f"{node.target}."
                if not called_by(self.draft.module_of(graph), node):
                    self._opaque |= {name: node for name in self.tensors if name.startswith(held)}

    def _shares(self, name: str) -> None:
        """Notes which memory a tensor takes up, from its first to behind its last entry."""
        tensor = self.tensors[name]
        self._odd[name] = _obstacle(tensor)
        if self._odd[name]:
            return
        size = tensor.element_size()
        begin = tensor.storage_offset() * size
        last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
        end = begin + (last + 1) * size if tensor.numel() else begin
        self._shared[tensor.untyped_storage()._cdata].append((int(begin), int(end), name))

    def _name(self, node: Node, name: str | None) -> None:
        if name is not None and name in self.tensors:
            self.names[node] = name
            self.roots[name].append(node)

    def _bind(self, placeholders: list[Node], caller: Node) -> None:
        """Names the placeholders of a nested graph after the operands, which every such call takes last."""
        if caller.op != "call_module" and getattr(caller.target, "__name__", "") not in ONCE:
            return
        if caller.kwargs or len(caller.args) < len(placeholders):
            return
        self._callers.add(caller)
        for placeholder, operand in zip(placeholders, caller.args[len(caller.args) - len(placeholders) :], strict=True):
            if operand in self.names:
                self._bound[placeholder] = caller, operand  # type: ignore[assignment]
                self._handed.add((caller, operand))  # type: ignore[arg-type]
                self._name(placeholder, self.names[operand])  # type: ignore[index]

    def constant(self, operand: Node) -> Constant | str:
        """What an operand is, or why that is not known."""
        if operand not in self._known:
            self._known[operand] = self._constant(operand)
        return self._known[operand]

    def _constant(self, operand: Node) -> Constant | str:
        node, chain = operand, []
        while node not in self.names:
            if not _hands_on(node) or not node.args or node.all_input_nodes != [node.args[0]]:
                what = "an input" if node.op == "placeholder" else f"computed by {node.target}"
                return f"{operand.name} is no constant of the program: {node.name} is {what}{quantization(node)}"
            chain.append(node)
            node = node.args[0]  # type: ignore[assignment]
        name = self.names[node]
        tensor = self.tensors[name]
        if self._odd[name]:
            return f"{name} {self._odd[name]}, expected a plain tensor"
        if name not in self._fixed:
            self._fixed[name] = self._writer(name)
        return self._fixed[name] or Constant(name, node, tensor, tuple(reversed(chain)))

    def _writer(self, name: str) -> str:
        """Why a tensor is no constant: who writes to it or to memory that it shares."""
        for other in self.sharing(name):
            if other in self._opaque:
                return f"{name} belongs to {self._opaque[other].target}, a module that is called and is no graph"
            for root in self.roots[other]:
                if root in self._mutated:
                    return f"{name} is no constant of the program, which lists a mutation of {root.name}"
                reads, writes = accesses(root, lambda node: node not in self._callers and may_alias(node))
                if writes:
                    return f"{name} is no constant of the program: {writes[0].name} writes to {root.name}"
                for reader in () if self.draft.functional else reads:
                    if reader not in self._callers and self.runs_graph(reader):
                        return f"{name} is handed to {reader.name} ({reader.target}), which may write to it"
                    if reader.op == "output" and root in self._bound:
                        return f"{name} is returned by a nested graph, behind which it may be written to"
        return ""

    def runs_graph(self, node: Node) -> bool:
        """Whether a node calls a nested graph, or a module, other than torch.export's of guards, which reads."""
        if node.op == "call_module":
            return node.target != "_guards_fn"
        return len(self.draft.graphs) > 1 and bool(called_by(self.draft.module_of(node.graph), node))

    def sharing(self, name: str) -> list[str]:
        """The names of everything in the same memory, or in a part of it; its own too."""
        if self._odd[name]:
            return [name]
        held = self._shared[self.tensors[name].untyped_storage()._cdata]
        if len(held) == 1:
            return [name]
        begin, end = next((b, e) for b, e, other in held if other == name)
        return [other for b, e, other in held if other == name or (b < end and begin < e)]

    def readers(self, name: str) -> list[Node]:
        """Every node that reads a tensor, or memory that it shares, through views and casts; once for each operand."""
        reads = ((r, o) for other in self.sharing(name) for root in self.roots[other] for r, o in self._users(root))
        return [r for r, operand in reads for a in pytree.tree_leaves((r.args, r.kwargs)) if a is operand]

    def _users(self, root: Node) -> Iterator[tuple[Node, Node]]:
        """Who reads a root, each with the operand it reads: not views and casts, nor calls of graphs that run once."""
        work = [root]
        while work:
            operand = work.pop()
            for user in operand.users:
                if measures(user, operand) or (user, operand) in self._handed:
                    continue
                if _hands_on(user):
                    work.append(user)
                else:
                    yield user, operand

    def replace(self, name: str, tensor: torch.Tensor) -> None:
        """Another tensor in the place of one, under all the names it has."""
        old = self.tensors[name]
        for other in self.sharing(name):
            if self.tensors[other] is old:
                self.draft.hold(other, _like(tensor, old))

    def add(self, beside: Constant, leaf: str, tensor: torch.Tensor, learns: bool) -> str:
        """A new parameter beside another tensor of the state, called as that one with another last part; its name."""
        owner = beside.name.rpartition(".")[0]
        name = fresh = f"{owner}.{leaf}" if owner else leaf
        number = 0
        while fresh in self._taken or self.draft.has_attribute(fresh):
            number += 1
            fresh = f"{name}_{number}"
        held = torch.nn.Parameter(tensor, requires_grad=learns)
        self._taken.add(fresh)
        self.tensors[fresh] = held
        self._shares(fresh)
        self.draft.hold(fresh, held, beside.name)
        return fresh

    def node(self, beside: Node, name: str) -> Node:
        """A node for a new parameter beside a root, in its graph; a nested graph is handed it."""
        if (beside, name) in self._made:
            return self._made[beside, name]
        graph, after, tensor = beside.graph, self._latest.get(beside, beside), self.tensors[name]
        if beside in self._bound:
            caller, operand = self._bound[beside]
            outer = self.node(operand, name)
            last = graph.find_nodes(op="placeholder")[-1]
            with graph.inserting_after(last):
                node = graph.placeholder(outer.name)
            caller.args = (*caller.args, outer)
            self._bound[node] = caller, outer
            self._handed.add((caller, outer))
        elif beside.op == "placeholder":
            node = self.draft.add_parameter("p_" + name.replace(".", "_"), name, after)
        else:
            depth = str(beside.target).count(".")
            with graph.inserting_after(after):
                node = graph.get_attr(".".join(name.split(".")[-1 - depth :]))
        self._made[beside, name] = self._latest[beside] = node
        val = val_of(beside)
        set_val(node, None if val is None else _val_like(val, tensor), beside)
        self._name(node, name)
        return node

    def prune(self, node: Node) -> None:
        """Takes a node that nothing reads out, and what was there for it alone; state is dropped by `drop`."""
        if node._erased or node.users or node.op == "output":
            return
        operands = node.all_input_nodes
        if node in self.names:
            self._dead.add(self.names[node])
            if node not in self._bound:
                return
            caller, operand = self._bound.pop(node)
            placeholders = node.graph.find_nodes(op="placeholder")
            place = len(caller.args) - len(placeholders) + placeholders.index(node)
            caller.args = (*caller.args[:place], *caller.args[place + 1 :])
            operands = [operand]
            node.graph.erase_node(node)
        elif node.op == "call_function":
            self.draft.leave(node)
            node.graph.erase_node(node)
        for operand in operands:
            self.prune(operand)

    def drop(self, beside: Callable[[str], Iterable[str]]) -> None:
        """Takes everything dead out of the state and the signature, under all its names, and what `beside` says goes
        with it.
        """
        for name in list(self._dead):
            self._dead |= {other for other in self.sharing(name) if self.tensors[other] is self.tensors[name]}
        gone = {name for name in self._dead if self._free(name)}
        counters = (name for held in gone for name in beside(held))
        gone |= {name for name in counters if name in self.tensors and self._free(name)}
        self.draft.drop_state(gone, [root for name in gone for root in self.roots[name] if not root._erased])

    def _free(self, name: str) -> bool:
        """Whether nothing reads a tensor."""
        return name not in self._opaque and all(root._erased or not root.users for root in self.roots[name])


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _obstacle(tensor: torch.Tensor) -> str:
    """Why a tensor's entries cannot be read and written as they lie in memory, empty when they can."""
    if isinstance(tensor, FakeTensor) or tensor.device.type == "meta":
        return "has no values (fake, or on the meta device)"
    if type(tensor) not in _PLAIN:
        return f"is a {type(tensor).__name__}"
    plain = tensor.layout is torch.strided and not tensor.is_quantized
    return "" if plain else f"is a {tensor.layout} tensor" if not tensor.is_quantized else "is quantized"


def _hands_on(node: Node) -> bool:
    """Whether a node makes a view, a copy or a cast of a constant."""
    return kind_of(node.target) in _LINKS or cast_of(node) is not None


def _like(tensor: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """The tensor as what the old one was: a parameter, or a buffer."""
    if isinstance(old, torch.nn.Parameter):
        return torch.nn.Parameter(tensor, requires_grad=old.requires_grad)
    return tensor.requires_grad_(old.requires_grad)


def _val_like(val: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """A `val` for a new tensor, given that of another one."""
    if val.shape == tensor.shape and val.dtype == tensor.dtype:
        return val
    return empty_val(val, tensor.shape, tensor.dtype).requires_grad_(val.requires_grad)


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
