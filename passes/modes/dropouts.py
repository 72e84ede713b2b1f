"""Dropout and the like: what else of a program depends on its mode, and the argument of each op that says so."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node

from ..graph.journal import forget, note_of, write_note

aten = torch.ops.aten


# Ops that ask for the mode, and the argument that holds it; `dropout_p` holds a probability, 0 in eval.
_ROWS = (
    ("dropout dropout_ feature_dropout feature_dropout_ native_dropout", "train"),
    ("alpha_dropout alpha_dropout_ feature_alpha_dropout feature_alpha_dropout_", "train"),
    ("rrelu rrelu_ rrelu_with_noise rrelu_with_noise_ rrelu_with_noise_functional", "training"),
    # Between the layers of a recurrent net; its weights are no batch norm's, its mode is.
    ("lstm gru rnn_tanh rnn_relu mkldnn_rnn_layer _cudnn_rnn miopen_rnn", "train"),
    ("scaled_dot_product_attention _scaled_dot_product_flash_attention_for_cpu", "dropout_p"),
    ("_scaled_dot_product_attention_math _scaled_dot_product_flash_attention", "dropout_p"),
    ("_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention", "dropout_p"),
)


def _overloads() -> dict[OpOverload, str]:
    found = {}
    for names, argument in _ROWS:
        for packet in (getattr(aten, name) for name in names.split() if hasattr(aten, name)):
            for overload in (getattr(packet, name) for name in packet.overloads()):
                if any(a.name == argument for a in overload._schema.arguments):
                    found[overload] = argument
    return found


FLAGS = _overloads()


_BERNOULLI = (aten.bernoulli.p, aten.bernoulli_.float)


_DIVISIONS = (aten.div.Scalar, aten.div.Tensor, aten.div_.Scalar, aten.div_.Tensor)


_RANDOM = (*_BERNOULLI, aten.bernoulli.default, aten.rand.default, aten.rand_like.default)


@dataclass(frozen=True, eq=False)
class Random:
    """One op that draws random numbers in training.

    node: the call. name: as messages call it. problem: why its mode cannot be changed, empty when it can.
    training: whether it draws now. kind: "flag" (an argument says so), "mask" (a kept share that is drawn, divided by
    itself and multiplied with: decomposed dropout), "depth" (stochastic depth by `floor(keep + rand)`).
    """

    node: Node
    name: str
    kind: str
    training: bool | None
    problem: str = ""

    @property
    def spelling(self) -> str:
        """The overload, as graphs print it."""
        return str(self.node.target)

    @property
    def frozen(self) -> bool:
        return bool(note_of(self.node).get("frozen"))

    @property
    def noted(self) -> bool:
        return "train" in note_of(self.node)

    @property
    def module(self) -> str:
        stack = self.node.meta.get("nn_module_stack")
        return str(list(stack.values())[-1][0]) if stack else ""


def find_random(graphs: Iterable[tuple[str, Graph]]) -> Iterator[Random]:
    """Every op of the graphs whose randomness depends on the mode, in each graph in the order in which they run."""
    for path, graph in graphs:
        found = [node for target in FLAGS for node in graph.find_nodes(op="call_function", target=target)]
        found += [node for target in _RANDOM for node in graph.find_nodes(op="call_function", target=target)]
        for node in sorted(found):
            yield _read(node, f"{path}.{node.name}" if path else node.name)


def _read(node: Node, name: str) -> Random:
    if node.target in FLAGS:
        value = _argument(node, FLAGS[node.target])
        literal = value is None or isinstance(value, bool | int | float)
        problem = "" if literal else f"its {FLAGS[node.target]} is no literal: its mode is not known"
        drawing = (value is None or bool(value)) if literal else None
        return Random(node, name, "flag", drawing, problem)
    if node.target in _BERNOULLI and (keep := _kept(node)) is not None:
        return Random(node, name, "mask", keep != 1.0)
    if "depth" in note_of(node):
        return Random(node, name, "depth", False)
    if _depth(node) is not None:
        return Random(node, name, "depth", True)
    reason = "it draws random numbers, and what stands in its place in the other mode is not in the program"
    return Random(node, name, "unknown", None, reason)


def _argument(node: Node, name: str) -> Any:
    """An argument of a call by its schema's name, its default where it is not given."""
    arguments = node.target._schema.arguments  # type: ignore[union-attr]
    index = next(i for i, a in enumerate(arguments) if a.name == name)
    if name in node.kwargs:
        return node.kwargs[name]
    return node.args[index] if index < len(node.args) else arguments[index].default_value


def _set_argument(node: Node, name: str, value: Any) -> None:
    arguments = node.target._schema.arguments  # type: ignore[union-attr]
    index = next(i for i, a in enumerate(arguments) if a.name == name)
    if name in node.kwargs or arguments[index].kwarg_only:
        node.kwargs = {**node.kwargs, name: value}
        return
    absent = [a.default_value for a in arguments[len(node.args) : index]]
    node.args = (*node.args[:index], *absent, value, *node.args[index + 1 :])


def _kept(node: Node) -> float | None:
    """The share that a mask keeps, if it is one: `x * (bernoulli(keep) / keep)`, which is `x` when all is kept."""
    keep = node.args[1] if len(node.args) > 1 else None
    division = next(iter(node.users), None)
    if len(node.users) != 1 or division is None or division.target not in _DIVISIONS or division.args[1] != keep:
        return None
    readers = list(division.users)
    scales = len(readers) == 1 and readers[0].target is aten.mul.Tensor and division in readers[0].args
    return keep if scales and isinstance(keep, float | int) else None


def _depth(node: Node) -> tuple[Node, Node] | None:
    """The product and its input, when a random node makes stochastic depth: `x / keep * floor(keep + rand)`."""
    shifted = _only(node, (aten.add.Tensor, aten.add_.Tensor))
    keep = None if shifted is None else next((a for a in shifted.args if not isinstance(a, Node)), None)
    floored = None if shifted is None else _only(shifted, (aten.floor.default, aten.floor_.default))
    product = None if floored is None else _only(floored, (aten.mul.Tensor,))
    if product is None or keep is None:
        return None
    scaled = next((a for a in product.args if isinstance(a, Node) and a is not floored), None)
    if scaled is None or scaled.target not in _DIVISIONS[:2] or len(scaled.users) != 1 or scaled.args[1] != keep:
        return None
    source = scaled.args[0]
    return (product, source) if isinstance(source, Node) and _same_type(product, source) else None


def _same_type(product: Node, source: Node) -> bool:
    vals = [n.meta.get("val") for n in (product, source)]
    return all(isinstance(v, torch.Tensor) for v in vals) and vals[0].dtype == vals[1].dtype  # type: ignore[union-attr]


def _only(node: Node, targets: tuple[Any, ...]) -> Node | None:
    reader = next(iter(node.users), None)
    return reader if len(node.users) == 1 and reader is not None and reader.target in targets else None


def stop(random: Random) -> None:
    """Makes a drawing op pass its input on, as in eval; it remembers how it drew."""
    node = random.node
    if random.kind == "flag":
        argument = FLAGS[node.target]  # type: ignore[index]
        write_note(node, train={"was": _argument(node, argument)}, frozen=None)
        _set_argument(node, argument, 0.0 if argument == "dropout_p" else False)
    elif random.kind == "mask":
        write_note(node, train={"was": node.args[1]}, frozen=None)
        _keep(node, 1.0)
    else:
        found = _depth(node)
        assert found is not None
        product, source = found
        operands = [operand.name for operand in product.all_input_nodes]
        write_note(node, depth=[product.name, *operands], train={"was": source.name}, frozen=None)
        product.args = (source, 1)  # which is its input, to the bit


def start(random: Random, graph: Graph) -> str:
    """Makes an op draw again, or for the first time; returns why it cannot be told how, empty when it did."""
    node, note = random.node, note_of(random.node).get("train")
    if random.kind == "flag":
        argument = FLAGS[node.target]  # type: ignore[index]
        if argument == "dropout_p" and note is None:
            return "with which probability it drops in training is not in the program"
        _set_argument(node, argument, True if note is None else note["was"])
    elif random.kind == "mask":
        if note is None:
            return "which share it keeps in training is not in the program"
        _keep(node, note["was"])
    else:
        names = note_of(node)["depth"]
        found = {n.name: n for n in graph.nodes if n.name in names}
        if len(found) != len(names):
            return "the nodes that it was made of are not in the graph any more"
        found[names[0]].args = tuple(found[name] for name in names[1:])
    forget(node, "train", "frozen", "depth")
    return ""


def _keep(node: Node, share: float) -> None:
    division = next(iter(node.users))
    node.args = (node.args[0], share, *node.args[2:])
    division.args = (division.args[0], share)
