"""What a program that trains is, and what is frozen in one: its batch norms, and what draws random numbers in it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from ...decomps.ops import OP_BY_TARGET, Kind, named
from .notes import note_of
from .site import Site, module_of

aten = torch.ops.aten

# The ops that draw as an argument says, with that argument (`dropout_p` holds a probability, 0 in eval), and those that
# draw in every mode: what decomposed dropout and stochastic depth are made of.
_DRAWS: dict[Any, str] = {overload: row.mode for overload, row in OP_BY_TARGET.items() if row.kind is Kind.DRAW}
FLAGS = {overload: argument for overload, argument in _DRAWS.items() if argument}

_BERNOULLI = (aten.bernoulli.p, aten.bernoulli_.float)
_DIVISIONS = (aten.div.Scalar, aten.div.Tensor, aten.div_.Scalar, aten.div_.Tensor)


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
    def module(self) -> str:
        """Dotted path of the module that it was traced from, empty when the graph does not say."""
        return module_of(self.node)


def is_training(sites: Iterable[Site], random: Iterable[Random]) -> bool:
    """Whether a program trains: a batch norm with running statistics does, or something draws random numbers.

    A batch norm whose mode is no literal may train, and what is in eval beside it is so in either mode. What draws in
    every mode (`torch.rand` in a model) says nothing of it.
    """
    return any(site.tracks and site.norm.training is not False for site in sites) or any(r.training for r in random)


def is_frozen(node: Node, training: bool) -> bool:
    """Whether a node in eval stays so: that was asked for, or it is in eval inside a program that trains, which is not
    because its own mode was switched.
    """
    note = note_of(node)
    return "frozen" in note or (training and "train" not in note)


def find_random(graphs: Iterable[tuple[str, Graph]]) -> Iterator[Random]:
    """Every op of the graphs whose randomness depends on the mode, in each graph in the order in which they run."""
    # by target: a look-up in fx's side table for each op, whatever the size of the graph
    for path, graph in graphs:
        found = [n for target in _DRAWS for n in graph.find_nodes(op="call_function", target=target)]
        for node in sorted(found):
            yield _read(node, f"{path}.{node.name}" if path else node.name)


def _read(node: Node, name: str) -> Random:
    if node.target in FLAGS:
        # native_dropout takes None for its mode, and drops then
        value = named(node.target, node.args, node.kwargs)[FLAGS[node.target]]  # type: ignore[arg-type]
        literal = value is None or isinstance(value, bool | int | float)
        problem = "" if literal else f"its {FLAGS[node.target]} is no literal: its mode is not known"
        drawing = (value is None or bool(value)) if literal else None
        return Random(node, name, "flag", drawing, problem)
    # Decomposing writes dropout out, each time in the same few ops. They are taken for one only when nothing else reads
    # what is between: else the same numbers drawn mean something besides.
    if node.target in _BERNOULLI and (keep := _kept(node)) is not None:
        return Random(node, name, "mask", keep != 1.0)
    if stochastic_depth(node) is not None:
        return Random(node, name, "depth", True)
    # stopped, it is not recognized by its readers any more, as its product reads the input alone
    if "depth" in note_of(node):
        return Random(node, name, "depth", False)
    reason = "it draws random numbers, and what stands in its place in the other mode is not in the program"
    return Random(node, name, "unknown", None, reason)


def _kept(node: Node) -> float | None:
    """The share that a mask keeps, if it is one: `x * (bernoulli(keep) / keep)`, which is `x` when all is kept."""
    keep = node.args[1] if len(node.args) > 1 else None
    division = _only_reader(node, _DIVISIONS)
    if not isinstance(keep, float | int) or division is None or division.args[1] != keep:
        return None
    scaled = _only_reader(division, (aten.mul.Tensor,))
    return None if scaled is None or division not in scaled.args else keep


def stochastic_depth(node: Node) -> tuple[Node, Node] | None:
    """The product and its input, when a random node makes stochastic depth: `x / keep * floor(keep + rand)`."""
    shifted = _only_reader(node, (aten.add.Tensor, aten.add_.Tensor))
    floored = _only_reader(shifted, (aten.floor.default, aten.floor_.default))
    product = _only_reader(floored, (aten.mul.Tensor,))
    if shifted is None or product is None:
        return None
    keep = next((a for a in shifted.args if not isinstance(a, Node)), None)
    scaled = next((a for a in product.args if isinstance(a, Node) and a is not floored), None)
    if keep is None or scaled is None or _only_reader(scaled, (product.target,)) is None:
        return None
    if scaled.target not in _DIVISIONS[:2] or scaled.args[1] != keep:
        return None
    source = scaled.args[0]
    return (product, source) if isinstance(source, Node) and _same_dtype(product, source) else None


def _same_dtype(product: Node, source: Node) -> bool:
    # x * 1 has the dtype of x: where the product promotes, eval would be another dtype than it was
    dtypes = [getattr(n.meta.get("val"), "dtype", None) for n in (product, source)]
    return dtypes[0] is not None and dtypes[0] == dtypes[1]


def _only_reader(node: Node | None, targets: tuple[Any, ...]) -> Node | None:
    """The one reader of a node, None when there is none, several, or another op."""
    readers = () if node is None else tuple(node.users)
    return readers[0] if len(readers) == 1 and readers[0].target in targets else None
