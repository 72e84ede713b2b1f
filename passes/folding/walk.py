"""One walk for folding: up from a batch norm to the layers that make its input, or down to those that read its output,
through what passes its channels on.
"""

from __future__ import annotations

import operator
from typing import Any

from torch.fx import Node

from ...decomps.affine import Affine
from ...decomps.layers import LAYER_BY_TARGET
from ..graph.calls import measures
from ..graph.constants import quantization
from ..graph.result import Reason
from ..graph.state import State
from .channels import Onward, Place, Scales, transfer_of
from .weights import Target, listed, target_of

# What a walk makes of an op: where it goes on, the layer at its end, or why it cannot go on. What it finds in the end.
Step = list[Place] | tuple[Target, Affine] | Reason
Found = tuple[list[tuple[Target, Affine]], dict[Node, Node]]


class Walk:
    """Walks through a graph as it is, past what goes according to the folds that are decided so far.

    targets: the layers that take something in, by call and by the reader that is to have a call of its own. cloned: the
    layers that are called once more. past: the nodes that go and where a walk goes on behind them, by direction (up or
    not): the next node, and the one that it is asked from.
    """

    def __init__(self, state: State, clone_calls: bool) -> None:
        self.state, self.clone_calls = state, clone_calls
        self.targets: dict[tuple[Node, Node | None], Target] = {}
        self.cloned: set[Node] = set()
        self.past: dict[tuple[Node, bool], list[tuple[Node, Node]]] = {}

    def go(self, start: list[Place] | Reason, up: bool) -> Found | Reason:
        """The layers at the ends of all ways, each with what it is to take in, in its own channels, and the constant
        scales and shifts that are passed, each with what it scales; or why there is something else at an end.
        """
        if isinstance(start, Reason):
            return start
        # A list of what is left, not a recursion: programs have longer rows of batch norms than Python's stack is deep.
        layers: list[tuple[Target, Affine]] = []
        scaled: dict[Node, Node] = {}
        work = start[::-1]
        while work:
            at = work.pop()
            onward = self._step(at, up)
            if isinstance(onward, Reason):
                return Reason(at.within + onward, onward.remedy)
            if isinstance(onward, tuple):
                layers.append(onward)
                continue
            work += onward[::-1]
            if (at.node, up) not in self.past and isinstance(transfer_of(at.node), Scales):
                scaled[at.node] = onward[0].node
        return layers, scaled

    def _step(self, at: Place, up: bool) -> Step:
        node, others = at.node, []
        if up:  # who else reads it would read something else after the fold; down, every reader is walked to
            others = [user for user in node.users if user is not at.came and not measures(user, node)]
        if node.target in LAYER_BY_TARGET:
            return self._refuse_clone(node, others) or self._end(at, up, at.came if others else None)
        past = self.past.get((node, up))
        row = None if past else transfer_of(node)
        onward: Onward = None if row is None else row.onward(self.state, at, up)
        if past:
            onward = [Place(further, came, at.axis, at.affine, at.within) for further, came in past]
        if onward is None:
            return _refuse_foreign(node, up)
        return Reason(f"{node.name} is read by {listed(others)} too") if others else onward

    def _refuse_clone(self, call: Node, others: list[Node]) -> Reason:
        """Why a layer whose output others read too cannot be called once more."""
        if others and not self.clone_calls:
            return Reason(f"{call.name} is read by {listed(others)} too", "clone_calls=True calls it once more")
        return self.refuse_late_read(call, call) if others else Reason()

    def _end(self, at: Place, up: bool, reader: Node | None) -> Step:
        """A layer takes in what comes behind it, or ahead of it. reader: None, or who gets a call of its own."""
        call, named = at.node, f"{at.node.name} ({at.node.target})"
        # one record of a layer, however many walks end at it: what it takes in adds up
        target = self.targets.get((call, reader)) or target_of(self.state, call, reader)
        if isinstance(target, Reason):
            return target
        # as its weight or its bias, it is no input that a scale could be moved out of
        if not up and (target.layer.input is not at.came or call in self.cloned):
            return Reason(f"its output is more than the input of {call.name}")
        # linear maps have channels last: behind one of [N, L, C], batch norm over dimension 1 is another axis
        if (at.axis, at.affine.scale.numel()) != target.channels(call if up else at.came, out=up):
            return Reason(f"its channels are not those that {named} {'makes' if up else 'reads'}")
        # a zero that a convolution pads with would have to become the shift
        if not up and not target.layer.uniform and bool(at.affine.shift.any()):
            return Reason(f"{named} pads with zeros, or spreads its input out, and so sees its shift unevenly")
        return target, at.affine

    def refuse_late_read(self, value: Node, node: Node) -> Reason:
        """Why a value may be another one by the time that something behind a node reads it."""
        late = self.state.late_writes(value, node)
        return Reason(f"{value.name} may be written to by {listed(late)}") if late else Reason()


def _refuse_foreign(node: Node, up: bool) -> Reason:
    """Why a walk ends at a node that is no layer and passes no channels on."""
    if not up:
        return Reason(f"its output is read by {node.name} ({node.target}), which is no convolution or linear map")
    made: Any = node.args[0] if node.target is operator.getitem else node
    # parameters are placeholders too
    what = "an input" if node.op == "placeholder" else made.target
    return Reason(f"its input {node.name} ({what}) is made by no convolution or linear map{quantization(node)}")
