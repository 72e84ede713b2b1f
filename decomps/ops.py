"""OPS: what any op that is no batch norm does to what it is given: one row for an overload, or for several alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

from .forms import BY_TARGET, FIELDS, Mode, Statistics, form_of
from .layers import LAYER_BY_TARGET


class Kind(Enum):
    """What the entries of a result are, given those of the first operand."""

    ALIAS = "the same tensor"
    RESHAPE = "the same entries in the same order, in another shape or layout"
    PERMUTE = "the same entries, their axes in another order"
    PART = "some of the entries, or some of them several times"
    PAD = "the entries with some of them repeated around, along the last axes"
    CAST = "the entries in another dtype or on another device"
    SCALING = "each entry scaled or shifted by the other operand"
    DRAW = "random: of the entries, or new ones"
    FILL = "one value, or none: of the operand the shape, dtype and device alone are read"
    MEASURE = "no tensor: a size, a stride, a check of these"
    FRESH = "others, in memory of their own"


class Memory(Enum):
    """Whose memory a result lies in."""

    SHARED = "an operand's"
    EITHER = "an operand's where that can be, else its own"
    OWN = "its own"


Axes = Callable[[Sequence[Any], int], list[int]]


@dataclass(frozen=True, eq=False)
class Op:
    """What some overloads do.

    names: as in "add.Tensor view": one overload, or of an op all that have no out argument (that have the `mode`).
    axes: for each axis of a permuted result the one of its operand, of a padded one those that are not padded; given
    the arguments and the rank. value: what a FILL fills in; the argument that says so, "" where its memory is left as
    it is. mode: the argument that says whether it trains (a probability where it is `dropout_p`, 0 in eval).
    idle: whether it hands its operand on where it does not train. like: whether the second operand gives its shape
    alone. cuts: whether no gradient goes through it, so that it is an alias only once autograd is done.
    writes: the arguments that it writes to while it trains and its schema says that it does not.
    """

    names: str
    kind: Kind
    axes: Axes | None = None
    value: int | str = ""
    mode: str = ""
    idle: bool = False
    like: bool = False
    cuts: bool = False
    writes: tuple[str, ...] = ()

    def overloads(self) -> Iterator[OpOverload]:
        """The overloads that this torch has of them."""
        for name in self.names.split():
            space, _, rest = name.rpartition("::")
            packet, _, one = rest.partition(".")
            found = getattr(getattr(torch.ops, space or "aten"), packet, None)
            # an op of a later torch, or of a domain that is not loaded: its row has no overload then
            for overload in () if found is None else (one,) if one else found.overloads():
                if (held := getattr(found, overload, None)) is not None and (one or self._is_of(held)):
                    yield held

    def _is_of(self, overload: OpOverload) -> bool:
        arguments = overload._schema.arguments
        return self.mode in [a.name for a in arguments] if self.mode else not any(a.is_out for a in arguments)


def _permuted(args: Sequence[Any], ndim: int) -> list[int]:
    return [axis % ndim for axis in args[1]]


def _swapped(args: Sequence[Any], ndim: int) -> list[int]:
    # a permutation of two is its own inverse: up and down alike
    axes, (a, b) = list(range(ndim)), (axis % ndim for axis in args[1:3])
    axes[a], axes[b] = axes[b], axes[a]
    return axes


def _reversed(args: Sequence[Any], ndim: int) -> list[int]:
    return list(range(ndim))[::-1]


def _unpadded(args: Sequence[Any], ndim: int) -> list[int]:
    return list(range(ndim - len(args[1]) // 2))  # pads come in pairs, from the last axis on


_ALIAS, _RESHAPE, _PERMUTE, _PART, _PAD, _CAST, _SCALING, _DRAW, _FILL, _MEASURE, _FRESH = Kind


OPS: tuple[Op, ...] = (
    Op("alias lift_fresh", _ALIAS),
    Op("detach detach_", _ALIAS, cuts=True),
    # Whether a reshape shares memory is for its schema to say; `_unsafe_view` promises that nobody will look.
    Op("view.default _unsafe_view reshape _reshape_alias flatten.using_ints unflatten.int", _RESHAPE),
    Op("unsqueeze squeeze clone contiguous lift_fresh_copy", _RESHAPE),
    Op("view_as reshape_as", _RESHAPE, like=True),
    Op("permute", _PERMUTE, axes=_permuted),
    Op("transpose.int", _PERMUTE, axes=_swapped),
    Op("t", _PERMUTE, axes=_reversed),
    Op("slice.Tensor select.int narrow split.Tensor split_with_sizes chunk unbind.int expand", _PART),
    Op("expand_as", _PART, like=True),
    # `pad` pads with a constant too, which is for the reader to tell by its arguments.
    Op("pad reflection_pad1d reflection_pad2d reflection_pad3d", _PAD, axes=_unpadded),
    Op("replication_pad1d replication_pad2d replication_pad3d", _PAD, axes=_unpadded),
    Op("_to_copy to.dtype to.device to.dtype_layout prims::convert_element_type", _CAST),
    Op("to.other type_as", _CAST, like=True),
    # self op alpha * other, and rsub the other way round. The op's name says which.
    Op("add.Tensor add.Scalar sub.Tensor sub.Scalar rsub.Scalar neg.default", _SCALING),
    Op("mul.Tensor mul.Scalar div.Tensor div.Scalar", _SCALING),
    Op("dropout dropout_ feature_dropout feature_dropout_", _DRAW, mode="train", idle=True),
    Op("alpha_dropout alpha_dropout_ feature_alpha_dropout feature_alpha_dropout_", _DRAW, mode="train", idle=True),
    Op("native_dropout", _DRAW, mode="train"),
    Op("rrelu rrelu_ rrelu_with_noise rrelu_with_noise_ rrelu_with_noise_functional", _DRAW, mode="training"),
    # Between the layers of a recurrent net; its weights are no batch norm's, its mode is.
    Op("lstm gru rnn_tanh rnn_relu mkldnn_rnn_layer _cudnn_rnn miopen_rnn", _DRAW, mode="train"),
    Op("scaled_dot_product_attention _scaled_dot_product_flash_attention_for_cpu", _DRAW, mode="dropout_p"),
    Op("_scaled_dot_product_attention_math _scaled_dot_product_flash_attention", _DRAW, mode="dropout_p"),
    Op("_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention", _DRAW, mode="dropout_p"),
    # These draw in every mode: what decomposed dropout and stochastic depth are made of.
    Op("bernoulli.p bernoulli_.float bernoulli.default rand.default rand_like.default", _DRAW),
    Op("zeros.default zeros_like new_zeros", _FILL, value=0),
    Op("ones.default ones_like new_ones", _FILL, value=1),
    Op("full.default full_like new_full", _FILL, value="fill_value"),
    Op("empty.memory_format empty_like new_empty new_empty_strided empty_strided", _FILL),
    Op("sym_size.int sym_numel sym_stride.int sym_storage_offset _assert_tensor_metadata", _MEASURE),
    # Composite ops may hand out what they were given without a word in their schema. These make their own.
    Op("layer_norm group_norm softmax.int log_softmax.int max_pool1d max_pool2d max_pool3d avg_pool1d", _FRESH),
    Op("adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d", _FRESH),
    Op("instance_norm", _FRESH, mode="use_input_stats", writes=("running_mean", "running_var")),
)


def _by_overload(rows: tuple[Op, ...]) -> Mapping[Any, Op]:
    """The row of each overload. A duplicate is a mistake in the table, said at import."""
    found: dict[Any, Op] = {}
    for number, row in enumerate(rows):
        for overload in row.overloads():
            if overload in found:
                raise ValueError(
                    f"OPS rows {rows.index(found[overload])} and {number} both describe {overload}: keep one"
                )
            found[overload] = row
    return MappingProxyType(found)


OP_BY_TARGET = _by_overload(OPS)


def kind_of(target: Any) -> Kind | None:
    """What a call's result is, None for what no row describes.

    >>> kind_of(torch.ops.aten.view.default).name, kind_of(torch.ops.aten.relu.default)
    ('RESHAPE', None)
    """
    row = OP_BY_TARGET.get(target)
    return None if row is None else row.kind


@cache  # asked of every reader of a tensor, and the dispatcher takes longest to answer
def memory_of(target: Any) -> Memory:
    """Whose memory a call's result lies in. Layers and batch norms make their own, whatever dispatches them.

    >>> aten = torch.ops.aten
    >>> [memory_of(op).name for op in (aten.view.default, aten.reshape.default, aten.conv2d.default)]
    ['SHARED', 'EITHER', 'OWN']
    """
    if target in BY_TARGET or target in LAYER_BY_TARGET or kind_of(target) in (Kind.FRESH, Kind.MEASURE):
        return Memory.OWN
    if not isinstance(target, OpOverload):
        return Memory.EITHER
    # A composite op may return its input without saying so: type_as, dropout in eval.
    name: Any = target.name()  # type: ignore[no-untyped-call]
    if torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd"):
        return Memory.EITHER
    declared = any(returned.alias_info is not None for returned in target._schema.returns)
    return Memory.SHARED if declared else Memory.OWN


def named(overload: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Every argument of a call by name, in the order of the schema, at its default where it is not given."""
    schema = overload._schema.arguments
    given = {**dict(zip((a.name for a in schema), args, strict=False)), **kwargs}
    return {a.name: given.get(a.name, a.default_value) for a in schema}


def written_by(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The operands that a call writes to: as its schema says, and those that it hides (a batch norm's statistics)."""
    if target in BY_TARGET:
        form = form_of(target, args, kwargs)
        given = form.given(args, kwargs)
        # a flag that is no literal may be True when it runs: that counts as a write
        evaluates = form.mode is Mode.EVAL or given.get("training") is False
        hidden = () if evaluates or form.statistics is not Statistics.IN_PLACE else FIELDS[3:5]
        return [given.get(name) for name in (*hidden, *form.destinations.values())]
    if isinstance(target, OpOverloadPacket):  # graphs built by hand: whichever overload it is
        overloads = [getattr(target, name) for name in target.overloads()]  # type: ignore[no-untyped-call]
    else:
        overloads = [target] if isinstance(target, OpOverload) else []
    return [value for overload in overloads for value in _written(overload, args, kwargs)]


def _written(overload: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    row, schema = OP_BY_TARGET.get(overload), overload._schema.arguments
    given = {**dict(zip((a.name for a in schema), args, strict=False)), **kwargs}
    hidden = row.writes if row is not None and given.get(row.mode) is not False else ()
    written = [a.name for a in schema if a.alias_info is not None and a.alias_info.is_write]
    return [given.get(name) for name in (*written, *hidden)]


def filled_with(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The value of every entry of what a call makes, None where it does not fill anything in.

    >>> filled_with(torch.ops.aten.full.default, ([3], 7), {})
    7
    """
    row = OP_BY_TARGET.get(target)
    # memory that is left as it is has no value that could be relied on
    if row is None or row.kind is not Kind.FILL or row.value == "":
        return None
    return named(target, args, kwargs)[row.value] if isinstance(row.value, str) else row.value
