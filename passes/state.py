"""State: the parameters, buffers and constants of a draft, by the nodes that read them; replaced, added, dropped."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.fx import Node

from torch_batchnorm.passes.counting import COUNTER, ONCE, callers_of
from torch_batchnorm.passes.mutation import writes_to
from torch_batchnorm.passes.program import Draft, Program, empty_val
from torch_batchnorm.passes.removal import set_val
from torch_batchnorm.passes.values import cast_of, val_of

aten = torch.ops.aten

_VIEWS = {
    aten.alias.default,
    aten.detach.default,
    aten.t.default,
    aten.transpose.int,
    aten.permute.default,
    aten.view.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
}
_COPIES = {
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.clone.default,
    aten.contiguous.default,
    aten.lift_fresh_copy.default,
}


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
            found = node.target(found, *node.args[1:], **node.kwargs)  # type: ignore[operator]
        return found

    def view(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """A tensor like the one in the state, as the operand reads it but for casts: its own memory, or None."""
        for node in self.chain:
            if cast_of(node) is not None:
                continue
            if node.target not in _VIEWS:
                return None
            tensor = node.target(tensor, *node.args[1:], **node.kwargs)
        return tensor


class State:
    """What a draft's program holds, by name and by the nodes that bring it in; nested graphs included, where a graph
    runs once for each call.
    """

    def __init__(self, draft: Draft) -> None:
        self.draft = draft
        self.tensors = _tensors(draft.program)
        self.names: dict[Node, str] = {}
        self.roots: dict[str, list[Node]] = defaultdict(list)
        self._bound: dict[Node, tuple[Node, Node]] = {}  # placeholder of a nested graph -> its caller, the operand
        self._shared: dict[int, list[str]] = defaultdict(list)
        self._known: dict[Node, Constant | str] = {}
        self._fixed: dict[str, str] = {}
        self._mutated = {target for target, _ in draft.mutations()}
        self._dead: dict[str, Node] = {}
        self._callers: set[Node] = set()
        self._latest: dict[Node, Node] = {}  # the last new parameter beside a node
        self._find()

    def _find(self) -> None:
        callers = callers_of(self.draft)
        for path, graph in self.draft.graphs:
            for node in graph.find_nodes(op="placeholder") if not path else ():
                self._name(node, self.draft.input_target(node))
            for node in graph.find_nodes(op="get_attr"):
                self._name(node, f"{path}.{node.target}" if path else str(node.target))
            if path and len(callers.get(path, ())) == 1:
                self._bind(graph.find_nodes(op="placeholder"), callers[path][0][1])
        for name, tensor in self.tensors.items():
            if type(tensor) in _PLAIN and tensor.device.type != "meta":
                self._shared[tensor.untyped_storage()._cdata].append(name)

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
                self._name(placeholder, self.names[operand])  # type: ignore[index]

    def constant(self, operand: Node) -> Constant | str:
        """What an operand is, or why that is not known."""
        if operand not in self._known:
            self._known[operand] = self._constant(operand)
        return self._known[operand]

    def _constant(self, operand: Node) -> Constant | str:
        node, chain = operand, []
        while node not in self.names:
            reads = node.target in _VIEWS or node.target in _COPIES or cast_of(node) is not None
            if not reads or node.all_input_nodes != [node.args[0]]:
                what = "an input" if node.op == "placeholder" else f"computed by {node.target}"
                return f"{operand.name} is no constant of the program: {node.name} is {what}{quantization(node)}"
            chain.append(node)
            node = node.args[0]  # type: ignore[assignment]
        name = self.names[node]
        tensor = self.tensors[name]
        if type(tensor) not in _PLAIN or tensor.device.type == "meta":
            kind = "has no values (fake, or on the meta device)" if _empty(tensor) else f"is a {type(tensor).__name__}"
            return f"{name} {kind}, expected a plain tensor"
        if name not in self._fixed:
            self._fixed[name] = self._writer(name)
        return self._fixed[name] or Constant(name, node, tensor, tuple(reversed(chain)))

    def _writer(self, name: str) -> str:
        """Why a tensor is no constant: who writes to it or to memory that it shares."""
        for other in self.sharing(name):
            for root in self.roots[other]:
                if root in self._mutated:
                    return f"{name} is no constant of the program, which lists a mutation of {root.name}"
                for reader, operand in self._users(root):
                    if writes_to(reader, operand):
                        return f"{name} is no constant of the program: {reader.name} writes to {root.name}"
                    if not self.draft.functional and runs_graphs(reader):
                        return f"{name} is handed to {reader.name} ({reader.target}), which may write to it"
        return ""

    def sharing(self, name: str) -> list[str]:
        """The names of everything in the same memory, its own too."""
        return self._shared[self.tensors[name].untyped_storage()._cdata]

    def readers(self, name: str) -> set[Node]:
        """Every node that reads a tensor, or memory that it shares, through views and casts."""
        return {r for other in self.sharing(name) for root in self.roots[other] for r, _ in self._users(root)}

    def _users(self, root: Node) -> Iterator[tuple[Node, Node]]:
        """Who reads a root, each with the operand it reads: not views and casts, nor calls of graphs that run once."""
        work = [root]
        while work:
            operand = work.pop()
            for user in operand.users:
                if user.target in _VIEWS or user.target in _COPIES or cast_of(user) is not None:
                    work.append(user)
                elif user not in self._callers or not self._handed(user, operand):
                    yield user, operand

    def _handed(self, caller: Node, operand: Node) -> bool:
        """Whether a call hands an operand to a graph whose placeholder has its name."""
        return any(bound == (caller, operand) for bound in self._bound.values())

    def replace(self, name: str, tensor: torch.Tensor) -> None:
        """Another tensor in the place of one, under all the names it has."""
        old = self.tensors[name]
        for other in self.sharing(name):
            if self.tensors[other] is old:
                self.draft.hold(other, _like(tensor, old))

    def add(self, beside: Constant, leaf: str, tensor: torch.Tensor, requires_grad: bool | None = None) -> Node:
        """A new parameter beside another tensor of the state, called as that one with another last part; its node."""
        owner = beside.name.rpartition(".")[0]
        name = fresh = f"{owner}.{leaf}" if owner else leaf
        number = 0
        while fresh in self.tensors:
            number += 1
            fresh = f"{name}_{number}"
        learns = beside.tensor.requires_grad if requires_grad is None else requires_grad
        held = torch.nn.Parameter(tensor, requires_grad=learns)
        self.tensors[fresh] = held
        self.draft.hold(fresh, held, beside.name)
        return self._node(beside.root, fresh, held)

    def _node(self, beside: Node, name: str, tensor: torch.Tensor) -> Node:
        """A node for a new parameter in the graph of another one; a nested graph is handed it."""
        graph, after = beside.graph, self._latest.get(beside, beside)
        if beside in self._bound:
            caller, operand = self._bound[beside]
            outer = self._node(operand, name, tensor)
            last = graph.find_nodes(op="placeholder")[-1]
            with graph.inserting_after(last):
                node = graph.placeholder(outer.name)
            caller.args = (*caller.args, outer)
            self._bound[node] = caller, outer
        elif beside.op == "placeholder":
            node = self.draft.add_parameter("p_" + name.replace(".", "_"), name, after)
        else:
            depth = str(beside.target).count(".")
            with graph.inserting_after(after):
                node = graph.get_attr(".".join(name.split(".")[-1 - depth :]))
        self._latest[beside] = node
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
            self._dead[self.names[node]] = node
            if node not in self._bound:
                return
            caller, operand = self._bound.pop(node)
            placeholders = node.graph.find_nodes(op="placeholder")
            place = len(caller.args) - len(placeholders) + placeholders.index(node)
            caller.args = (*caller.args[:place], *caller.args[place + 1 :])
            operands = [operand]
            node.graph.erase_node(node)
        elif node.op == "call_function":
            node.graph.erase_node(node)
        for operand in operands:
            self.prune(operand)

    def counter(self, mean: Node) -> None:
        """Notes that the counter beside a running mean, known as a constant, is not needed."""
        found = self._known[mean]
        assert isinstance(found, Constant)
        owner = found.name.rpartition(".")[0]
        self._dead_if_unread(f"{owner}.{COUNTER}" if owner else COUNTER)

    def _dead_if_unread(self, name: str) -> None:
        for root in self.roots.get(name, ()):
            if not root._erased and not root.users:
                self._dead[name] = root

    def drop(self) -> None:
        """Takes everything dead out of the state and the signature, under all the names that nothing reads."""
        for name in list(self._dead):
            tensor = self.tensors[name]
            for other in self.sharing(name):
                if self.tensors[other] is tensor and other not in self._dead:
                    self._dead_if_unread(other)
            if not self.roots[name]:
                self._dead.pop(name)
        gone = {n for n in self._dead if all(root._erased or not root.users for root in self.roots[n])}
        self.draft.drop_state(gone, [root for name in gone for root in self.roots[name] if not root._erased])


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _empty(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, FakeTensor) or tensor.device.type == "meta"


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


def runs_graphs(node: Node) -> bool:
    """Whether a node calls a nested graph, or a module that is not seen through."""
    if node.op == "call_module":
        return node.target != "_guards_fn"  # torch.export's, which reads
    return any(n.op == "get_attr" and val_of(n) is None for n in node.all_input_nodes)


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


def _tensors(program: Program) -> dict[str, torch.Tensor]:
    """Everything that a program holds, by name."""
    if isinstance(program, ExportedProgram):
        state: dict[str, Any] = {**program.constants, **program.state_dict}
    else:
        state = dict(program.named_parameters(remove_duplicate=False))
        state |= dict(program.named_buffers(remove_duplicate=False))
        targets = (str(n.target) for n in program.graph.find_nodes(op="get_attr"))
        state |= {t: getattr(program, t) for t in targets if "." not in t and t not in state}
    return {name: tensor for name, tensor in state.items() if isinstance(tensor, torch.Tensor)}
