"""One walk for folding: up from a batch norm to the layers that make its input, or down to those that read its output,
through what passes its channels on.
"""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

from torch.fx import Node

from ...decomps.affine import Affine
from ...decomps.layers import LAYER_BY_TARGET
from ..graph.calls import measures
from ..graph.constants import State, quantization
from ..graph.draft import Draft
from ..graph.effects import accesses, bases_of
from ..graph.result import Reason
from .channels import Onward, Place, Scales, readers, transfer_of
from .weights import Target, listed, target_of

# What a walk makes of an op: where it goes on, the layer at its end, or why it cannot go on. What it finds in the end.
Step = list[Place] | tuple[Target, Affine] | Reason
Found = tuple[list[tuple[Target, Affine]], dict[Node, Node]]


class Walk:
    """Walks through a graph as it is, past what goes according to the folds that are decided so far.

    targets: the layers that take something in, by call and by the reader that is to have a call of its own. cloned: the
    layers that are called once more. gone: nodes that a decided fold takes out, for walks up, each with what stands for
    it and who reads that. handed: the batch norms that go down, for walks down, each with what holds its output.
    """

    def __init__(self, draft: Draft, state: State, clone_calls: bool) -> None:
        self.draft, self.state, self.clone_calls = draft, state, clone_calls
        self.targets: dict[tuple[Node, Node | None], Target] = {}
        self.cloned: set[Node] = set()
        self.gone: dict[Node, tuple[Node, Node]] = {}
        self.handed: dict[Node, tuple[Node, ...]] = {}

    def go(self, start: list[Place] | Reason, up: bool) -> Found | Reason:
        """The layers at the ends of all ways, each with what it is to take in, in its own channels, and the constant
        scales and shifts that are passed, each with what it scales; or why there is something else at an end.
        """
        if isinstance(start, Reason):
            return start
        layers: list[tuple[Target, Affine]] = []
        scaled: dict[Node, Node] = {}
        work = start[::-1]
        while work:
            at = work.pop()
            onward = self._up(at) if up else self._down(at)
            if isinstance(onward, Reason):
                return Reason(at.within + onward, onward.remedy)
            if isinstance(onward, tuple):
                layers.append(onward)
                continue
            work += onward[::-1]
            if at.node not in self.gone and isinstance(transfer_of(at.node), Scales):
                scaled[at.node] = onward[0].node
        return layers, scaled

    def _up(self, at: Place) -> Step:
        node = at.node
        others = [user for user in node.users if user is not at.came and not measures(user, node)]
        if node.target in LAYER_BY_TARGET:
            return self._behind(at, others)
        if node in self.gone:
            stands, reader = self.gone[node]
            onward: Onward = [replace(at, node=stands, came=reader)]
        else:
            onward = self._passed(at, up=True)
        if onward is None:
            return _refuse_foreign(node)
        return Reason(f"{node.name} is read by {listed(others)} too") if others else onward

    def _down(self, at: Place) -> Step:
        node = at.node
        if node.target in LAYER_BY_TARGET:
            return self._ahead(at)
        if node in self.handed:
            return readers(self.handed[node], at.axis, at.affine)
        foreign = f"its output is read by {node.name} ({node.target}), which is no convolution or linear map"
        onward = self._passed(at, up=False)
        return Reason(foreign) if onward is None else onward

    def _passed(self, at: Place, up: bool) -> Onward:
        row = transfer_of(at.node)
        return None if row is None else row.onward(self.state, at, up)

    def _behind(self, at: Place, others: list[Node]) -> Step:
        """A layer takes in what comes behind it; if others read its output, a call of its own does."""
        call = at.node
        if others and not self.clone_calls:
            return Reason(f"{call.name} is read by {listed(others)} too", "clone_calls=True calls it once more")
        if others and (late := self.refuse_late_read(call, call)):
            return late
        target = self._target(call, at.came if others else None)
        if isinstance(target, Reason):
            return target
        if at.axis != target.axis(call) or at.affine.scale.numel() != target.width(out=True):
            return Reason(f"its channels are not those that {call.name} ({call.target}) makes")
        return target, at.affine

    def _ahead(self, at: Place) -> Step:
        """A layer takes in what comes ahead of it."""
        call, target = at.node, self._target(at.node, None)
        if isinstance(target, Reason):
            return target
        if target.layer.input is not at.came or call in self.cloned:
            return Reason(f"its output is more than the input of {call.name}")
        if at.axis != target.axis(at.came) or at.affine.scale.numel() != target.width(out=False):
            return Reason(f"its channels are not those that {call.name} ({call.target}) reads")
        if not target.layer.uniform and bool(at.affine.shift.any()):
            named = f"{call.name} ({call.target})"
            return Reason(f"{named} pads with zeros, or spreads its input out, and so sees its shift unevenly")
        return target, at.affine

    def _target(self, call: Node, reader: Node | None) -> Target | Reason:
        return self.targets.get((call, reader)) or target_of(self.state, call, reader)

    def refuse_late_read(self, value: Node, node: Node) -> Reason:
        """Why a value may be another one by the time that something behind a node reads it, as far as one can tell:
        inputs of the program that share memory when it is called are taken to be written together.
        """
        if self.draft.functional:
            return Reason()
        bases = bases_of(value)
        for base in list(bases):
            if base in self.state.names:
                names = self.state.sharing(self.state.names[base])
                bases += [root for name in names for root in self.state.roots[name] if root.graph is value.graph]
            elif base.op == "placeholder":
                bases += [node for node in value.graph.find_nodes(op="placeholder") if node not in self.state.names]
        written: list[Node] = []
        for base in dict.fromkeys(bases):
            reads, writes = accesses(base)
            written += [*writes, *filter(self.state.runs_graph, reads)]
        late = {user for user in written if user > node}
        return Reason(f"{value.name} may be written to by {listed(late)}") if late else Reason()


def _refuse_foreign(value: Node) -> Reason:
    made: Any = value.args[0] if value.target is operator.getitem else value
    what = "an input" if value.op == "placeholder" else made.target
    return Reason(f"its input {value.name} ({what}) is made by no convolution or linear map{quantization(value)}")
