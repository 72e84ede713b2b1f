"""The tracked statistics of a batch norm: the state they are, and the counter beside them."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

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
    while tensor.op == "call_function" and tensor.all_input_nodes:
        if tensor.target is operator.getitem:
            call = tensor.all_input_nodes[0]
            norm = _record(call)
            role = None if norm is None else norm[0].roles[tensor.args[1]]
            if norm is None or role not in UPDATED:
                return tensor
            tensor = norm[1].running_mean if role == UPDATED[0] else norm[1].running_var
        elif tensor.target in _ADDS:
            tensor = tensor.all_input_nodes[0]
        else:
            return tensor
    return tensor


def _record(call: Node) -> Any:
    if call.target not in BY_TARGET:
        return None
    form = form_of(call.target, call.args, call.kwargs)  # type: ignore[arg-type]
    return form, form.read(call.args, call.kwargs)
