"""Dropout and the like, stopped for eval and started again for training."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from ...decomps.ops import named
from ..graph.result import Reason
from ..rewriting.notes import forget, note_of, write_note
from ..rewriting.trains import FLAGS, Random, stochastic_depth

aten = torch.ops.aten

_EXPORT = "export the program in training"


def stop(random: Random) -> None:
    """Makes a drawing op pass its input on, as in eval; it remembers how it drew."""
    node = random.node
    if random.kind == "flag":
        argument = FLAGS[node.target]
        was = named(node.target, node.args, node.kwargs)[argument]  # type: ignore[arg-type]
        write_note(node, train={"was": was}, frozen=None)
        # attention has a probability in place of a flag
        _set_argument(node, argument, 0.0 if argument == "dropout_p" else False)
    elif random.kind == "mask":  # 1.0 divided by 1.0 is exact
        write_note(node, train={"was": node.args[1]}, frozen=None)
        _keep(node, 1.0)
    else:  # what drew stays behind, as dead nodes
        found = stochastic_depth(node)
        assert found is not None
        product, source = found
        operands = [operand.name for operand in product.all_input_nodes]
        write_note(node, depth=[product.name, *operands], train={"was": source.name}, frozen=None)
        product.args = (source, 1)  # which is its input, to the bit


def start(random: Random) -> Reason:
    """Makes an op draw again, or for the first time; returns why it cannot be told how, empty when it did."""
    node = random.node
    was = note_of(node).get("train", {}).get("was")
    reason = _STARTS[random.kind](node, was)
    if not reason:
        forget(node, "train", "frozen", "depth")
    return reason


def _start_flag(node: Node, was: Any) -> Reason:
    argument = FLAGS[node.target]
    if argument != "dropout_p":
        _set_argument(node, argument, was if isinstance(was, bool) else True)
    elif isinstance(was, float):
        _set_argument(node, argument, was)
    else:
        return Reason("with which probability it drops in training is not in the program", _EXPORT)
    return Reason()


def _start_mask(node: Node, was: Any) -> Reason:
    if not isinstance(was, float | int) or not was:
        return Reason("which share it keeps in training is not in the program", _EXPORT)
    _keep(node, was)
    return Reason()


def _start_depth(node: Node, was: Any) -> Reason:
    # by name, as what is noted has to be plain data: the nodes may be gone, or others called so by now
    names = note_of(node)["depth"]
    nodes = {n.name: n for n in node.graph.nodes if n.name in names}
    product, *operands = (nodes.get(name) for name in names)
    there = product is not None and product.target is aten.mul.Tensor and product.args[1:] == (1,)
    if not there or not all(operand is not None and operand < product for operand in operands):
        return Reason("the nodes that it was made of are not in the graph any more", _EXPORT)
    product.args = tuple(operands)  # type: ignore[union-attr]
    return Reason()


_STARTS = {"flag": _start_flag, "mask": _start_mask, "depth": _start_depth}


def _keep(node: Node, share: float) -> None:
    # the mask is divided by the share that it keeps: both are one number, in two nodes
    division = next(iter(node.users))
    node.args = (node.args[0], share, *node.args[2:])
    division.args = (division.args[0], share)


def _set_argument(node: Node, name: str, value: Any) -> None:
    arguments = node.target._schema.arguments  # type: ignore[union-attr]
    index = next(i for i, a in enumerate(arguments) if a.name == name)
    if name in node.kwargs or arguments[index].kwarg_only:
        node.kwargs = {**node.kwargs, name: value}
        return
    absent = [a.default_value for a in arguments[len(node.args) : index]]
    node.args = (*node.args[:index], *absent, value, *node.args[index + 1 :])
