"""The tracked statistics of a batch norm: the state they are, and the counter beside them."""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
from torch.fx import Node

from ...decomps.forms import BY_TARGET, UPDATED, form_of

aten = torch.ops.aten

COUNTER = "num_batches_tracked"
_ADDS = (aten.add_.Tensor, aten.add.Tensor)


def counter_beside(statistic: str) -> str:
    """What the counter is called beside a running statistic of this name."""
    owner = statistic.rpartition(".")[0]
    return f"{owner}.{COUNTER}" if owner else COUNTER


def counters_beside(statistic: str) -> Iterator[str]:
    """The counter that goes when a running mean of this name goes."""
    # once for both statistics: the mean alone answers for the counter
    if statistic.rpartition(".")[2] == "running_mean":
        yield counter_beside(statistic)


def root_of(tensor: Node) -> Node:
    """The state that a running statistic is, or is the update of."""
    # Two calls of one module chain in a functional graph: the second one's statistic is what the first one returned.
    # The add of a counter chains the same way.
    while tensor.op == "call_function" and (operands := tensor.all_input_nodes):
        before = operands[0]
        if tensor.target is operator.getitem and before.target in BY_TARGET:
            form = form_of(before.target, before.args, before.kwargs)  # type: ignore[arg-type]
            role, norm = form.roles[tensor.args[1]], form.read(before.args, before.kwargs)  # type: ignore[index]
            if role not in UPDATED:
                break
            tensor = norm.running_mean if role == UPDATED[0] else norm.running_var
        elif tensor.target in _ADDS:
            tensor = before
        else:
            break
    return tensor
