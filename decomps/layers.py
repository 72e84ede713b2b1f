"""LAYERS: one row for each overload of a convolution or a linear map, the ops that batch norm folds into."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Layer:
    """One convolution or linear map, whatever its overload: what it reads and how. Inside a graph tensors are nodes.

    weight: [out, in / groups, *kernel], or with `input_first` [in, out / groups, *kernel]; a linear map has no kernel.
    bias: [out] or None. uniform: whether every output reads all of the kernel and nothing that was padded, so that a
    constant added to an input channel adds the same everywhere.
    """

    input: Any
    weight: Any
    bias: Any
    groups: int
    input_first: bool
    uniform: bool

    def grouped(self, weight: Tensor) -> Tensor:
        """The weight as [groups, out / groups, in / groups, *kernel], a view."""
        # groups are the outermost part of the first dimension, whichever that is; so transposed ones are right with Cin
        # = Cout too
        split = weight.view(self.groups, weight.shape[0] // self.groups, *weight.shape[1:])
        return split.transpose(1, 2) if self.input_first else split


@dataclass(frozen=True, eq=False)
class LayerForm:
    """How one overload spells a `Layer`: which argument is which, read through the schema.

    bias: None when the op has none; biased is then the same op with one, None when there is no such op.
    input_first: whether the weight has the input's channels first. kernel: whether it has a kernel.
    """

    overload: OpOverload
    input: str
    weight: str
    bias: str | None
    input_first: bool = False
    kernel: bool = True
    biased: OpOverload | None = None

    @cached_property
    def defaults(self) -> dict[str, Any]:
        """The arguments by name, at their defaults."""
        return {a.name: a.default_value for a in self.overload._schema.arguments}

    def given(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Every argument of a call by name."""
        return {**self.defaults, **dict(zip(self.defaults, args, strict=False)), **kwargs}

    def read(self, args: Sequence[Any], kwargs: Mapping[str, Any], kernel: Sequence[int]) -> Layer:
        """The record that a call of this overload spells, whose weight has this kernel."""
        given = self.given(args, kwargs)
        # `convolution` says it in an argument, others are of one kind
        first = bool(given.get("transposed", self.input_first))
        bias = None if self.bias is None else given[self.bias]
        # a linear map reads all of its input for each output, and pads nothing
        uniform = not self.kernel or _is_uniform(given, kernel, first)
        return Layer(given[self.input], given[self.weight], bias, given.get("groups", 1), first, uniform)

    def plain(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether the call adds its bias and its product as they are."""
        given = self.given(args, kwargs)
        # addmm computes beta * self + alpha * mat1 @ mat2
        return bool(given.get("beta", 1) == 1 and given.get("alpha", 1) == 1)


def _is_uniform(given: Mapping[str, Any], kernel: Sequence[int], transposed: bool) -> bool:
    """Whether every output reads the whole kernel: nothing is padded, and nothing is spread out by a transposed one."""
    # a transposed kernel of several taps reads fewer of them at the border
    one = all(size == 1 for size in kernel)
    if transposed:
        return one and _all(given["stride"], 1) and _all(given["output_padding"], 0)
    padding = given["padding"]
    if isinstance(padding, str):
        return padding == "valid" or one
    return _all(padding, 0)


def _all(value: Any, wanted: int) -> bool:
    values = value if isinstance(value, list | tuple) else [value]
    # a symbolic stride may be another one when the program runs
    return all(type(v) is int and v == wanted for v in values)


def _convolutions() -> tuple[LayerForm, ...]:
    named = ("input", "weight", "bias")
    plain = [getattr(getattr(aten, f"conv{n}d"), o) for n in (1, 2, 3) for o in ("default", "padding")]
    transposed = [aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input]
    return (
        *(LayerForm(overload, *named) for overload in plain),
        *(LayerForm(overload, *named, input_first=True) for overload in transposed),
    )


LAYERS: tuple[LayerForm, ...] = (
    # What torch.export writes: a convolution by its rank.
    *_convolutions(),
    # What run_decompositions() makes of all of them; `transposed` is an argument. The other is what tracing leaves.
    LayerForm(aten.convolution.default, "input", "weight", "bias"),
    LayerForm(aten._convolution.default, "input", "weight", "bias"),
    # Linear maps: the weight as torch.nn.Linear holds it, and as a matrix, [in, out].
    LayerForm(aten.linear.default, "input", "weight", "bias", kernel=False),
    LayerForm(aten.addmm.default, "mat1", "mat2", "self", input_first=True, kernel=False),
    LayerForm(aten.mm.default, "self", "mat2", None, input_first=True, kernel=False, biased=aten.addmm.default),
    LayerForm(aten.matmul.default, "self", "other", None, input_first=True, kernel=False),
)


LAYER_BY_TARGET: Mapping[Any, LayerForm] = MappingProxyType({form.overload: form for form in LAYERS})
