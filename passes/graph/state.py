"""State: the parameters, buffers and constants of a draft as they are changed: replaced, added, dropped."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from itertools import accumulate

import torch
from torch.fx import Node

from .constants import Constant, Constants
from .draft import Draft
from .meta import empty_val, set_val, val_of
from .nest import attribute


class State(Constants):
    """The constants of a draft, and what becomes of them."""

    def __init__(self, draft: Draft, unchanged: Collection[Node] = ()) -> None:
        super().__init__(draft, unchanged)
        self._dead: set[str] = set()
        self._made: dict[tuple[Node, str], Node] = {}  # new parameters: a root beside it, its name -> its node
        self._latest: dict[Node, Node] = {}  # the last new parameter beside a node
        # a tensor cannot be called as a module: all that is ahead of a dot is taken too
        self._taken = {prefix for name in self.tensors for prefix in accumulate(name.split("."), "{}.{}".format)}

    def replace(self, name: str, tensor: torch.Tensor) -> None:
        """Another tensor in the place of one, under all the names it has."""
        old = self.tensors[name]
        for other in self.storages.sharing(name):
            if self.tensors[other] is old:  # tied: the same tensor, where a slice of its memory would be another
                self.draft.holding.hold(other, _like(tensor, old))

    def add(self, beside: Constant, leaf: str, tensor: torch.Tensor, learns: bool) -> str:
        """A new parameter beside another tensor of the state, called as that one with another last part; its name."""
        owner = beside.name.rpartition(".")[0]
        name = fresh = f"{owner}.{leaf}" if owner else leaf
        number = 0
        while fresh in self._taken or attribute(self.draft.top, fresh) is not None:
            number += 1
            fresh = f"{name}_{number}"
        held = torch.nn.Parameter(tensor, requires_grad=learns)
        self._taken.add(fresh)
        self.tensors[fresh] = held
        self.storages.add(fresh, held)
        self.draft.holding.hold(fresh, held, beside.name)
        return fresh

    def node(self, beside: Node, name: str) -> Node:
        """A node for a new parameter beside a root, in its graph; a nested graph is handed it."""
        if (beside, name) in self._made:
            return self._made[beside, name]
        graph, after, tensor = beside.graph, self._latest.get(beside, beside), self.tensors[name]
        if beside in self.bound:
            call, operand = self.bound[beside]
            outer = self.node(operand, name)
            last = graph.find_nodes(op="placeholder")[-1]  # calls take their operands in this order
            with graph.inserting_after(last):
                node = graph.placeholder(outer.name)
            call.node.args = (*call.node.args, outer)
            self.bound[node], call.bound[node] = (call, outer), outer
            self.handed.add((call.node, outer))
        elif beside.op == "placeholder":
            node = self.draft.add_parameter("p_" + name.replace(".", "_"), name, after)
        else:
            depth = str(beside.target).count(".")  # a nested module reads its tensors from where it lies itself
            with graph.inserting_after(after):
                node = graph.get_attr(".".join(name.split(".")[-1 - depth :]))
        self._made[beside, name] = self._latest[beside] = node
        val = val_of(beside)
        set_val(node, None if val is None else _val_like(val, tensor), beside)
        self.names[node] = name
        self.roots[name].append(node)
        return node

    def prune(self, node: Node) -> None:
        """Takes a node that nothing reads out, and what was there for it alone; state is dropped by `drop`."""
        if node._erased or node.users or node.op == "output":
            return
        operands = node.all_input_nodes
        if node in self.names:
            self._dead.add(self.names[node])
            if node not in self.bound:
                return
            call, operand = self.bound.pop(node)
            caller = call.node
            del call.bound[node]
            placeholders = node.graph.find_nodes(op="placeholder")
            # operands come last among the arguments: from the end it is the placeholder's place
            place = len(caller.args) - len(placeholders) + placeholders.index(node)
            caller.args = (*caller.args[:place], *caller.args[place + 1 :])
            operands = [operand]
            node.graph.erase_node(node)
        elif node.op == "call_function":
            self.draft.calls.leave(node)
            node.graph.erase_node(node)
        for operand in operands:
            self.prune(operand)

    def drop(self, beside: Callable[[str], Iterable[str]]) -> None:
        """Takes everything dead out of the state and the signature, under all its names, and what `beside` says goes
        with it.
        """
        # a tied tensor is dead under all its names, or the state would keep it alive under the others
        for name in list(self._dead):
            self._dead |= {other for other in self.storages.sharing(name) if self.tensors[other] is self.tensors[name]}
        gone = {name for name in self._dead if self._free(name)}
        counters = (name for held in gone for name in beside(held))
        gone |= {name for name in counters if name in self.tensors and self._free(name)}
        self.draft.drop_state(gone, [root for name in gone for root in self.roots[name] if not root._erased])

    def _free(self, name: str) -> bool:
        """Whether nothing reads a tensor."""
        return name not in self.opaque and all(root._erased or not root.users for root in self.roots[name])


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
