"""FORMS and GRADIENTS: one row for each ATen overload of batch norm, and the records every row reads and writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

aten = torch.ops.aten


class Mode(Enum):
    """Which statistics normalise the input: the batch's, the running ones, or whichever an argument says."""

    TRAIN = "train"
    EVAL = "eval"
    FLAG = "by flag"


class Statistics(Enum):
    """How an overload hands on the running statistics it updates in training."""

    IN_PLACE = "written in place"
    OUTPUTS = "returned"
    NONE = "not updated"


class Dialect(Enum):
    """Who emits the overload."""

    FAMILY = "family"
    CORE = "core ATen"
    COMPOSITE = "composite"
    VENDOR = "vendor"


# Output roles, in the order that ATen returns them.
OUT = ("out",)
SAVED = ("out", "save_mean", "save_invstd")
RESERVED = (*SAVED, "reserve")
UPDATED = ("new_running_mean", "new_running_var")
GRADS = ("grad_input", "grad_weight", "grad_bias")


# Computed in float32.
HALF = (torch.float16, torch.bfloat16)


FIELDS = ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps")


# cuDNN's and MIOpen's schemas call two fields by their own names; every other argument is named as its field.
VENDOR_NAMES = MappingProxyType({"exponential_average_factor": "momentum", "epsilon": "eps"})


@dataclass(frozen=True, slots=True)
class BatchNorm:
    """One batch norm, whatever its overload: what it reads and how.

    input: [N, C, *]; weight, bias, running_mean, running_var: [C] or None. Inside a graph these are nodes.
    training: True normalises with batch statistics (biased variance) and updates the running ones (unbiased variance).
    momentum: the weight of the new batch. eps: added to the variance, so that save_invstd is 1/sqrt(var + eps).
    out: the destination tensors of an `.out` overload by role, else empty. extras: what the call was given besides, by
    schema name, which a form that knows it writes again.
    """

    input: Any
    weight: Any
    bias: Any
    running_mean: Any
    running_var: Any
    training: Any
    momentum: Any
    eps: Any
    out: Mapping[str, Any] = field(default_factory=dict)
    extras: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tensors(self) -> tuple[Any, Any, Any, Any, Any]:
        """What a backend is selected by: input, weight, bias, running_mean, running_var."""
        return (self.input, self.weight, self.bias, self.running_mean, self.running_var)

    @property
    def missing(self) -> tuple[str, ...]:
        """The tensors this batch norm does without: any of weight, bias, running_mean, running_var."""
        return tuple(name for name in FIELDS[1:5] if getattr(self, name) is None)


@dataclass(frozen=True, slots=True)
class Gradient:
    """The gradient of one batch norm, whatever its overload. Inside a graph the tensors are nodes.

    grad_out, input: [N, C, *]. training: whether the forward normalised with the batch's statistics, which are then
    save_mean and save_invstd = 1/sqrt(var + eps): [C]; else the running ones are used. output_mask: which of the
    gradients of input, weight and bias are asked for. reserve: what the forward returned as such, None when not kept.
    """

    grad_out: Any
    input: Any
    weight: Any
    running_mean: Any
    running_var: Any
    save_mean: Any
    save_invstd: Any
    training: Any
    eps: Any
    output_mask: Any
    reserve: Any
    out: Mapping[str, Any] = field(default_factory=dict)
    extras: Mapping[str, Any] = field(default_factory=dict)


# The arguments that every form spells; `out` and `extras` are read by what the form says of them.
_RECORDED = {record: tuple(f.name for f in fields(record))[:-2] for record in (BatchNorm, Gradient)}


@dataclass(frozen=True, eq=False)
class Form:
    """How one overload spells a `BatchNorm` or a `Gradient`: arguments by schema name, outputs by role.

    roles: what each output is. mode: TRAIN or EVAL when the overload fixes it, FLAG when `training` says.
    statistics: how the update of the running statistics leaves the op. names: schema name -> field, where they differ.
    extras: the arguments that are no field of the record, each with what is written where none was read.
    """

    overload: OpOverload
    roles: tuple[str, ...]
    mode: Mode
    statistics: Statistics
    dialect: Dialect
    names: Mapping[str, str] = field(default_factory=dict)
    extras: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def name(self) -> str:
        """The overload as graphs print it.

        >>> FORMS[0].name
        'aten._batch_norm_with_update.default'
        """
        return str(self.overload)

    @cached_property
    def record(self) -> type[Any]:
        """What its calls are read as."""
        return Gradient if self.roles == GRADS else BatchNorm

    @cached_property
    def arguments(self) -> tuple[str, ...]:
        """The field that each positional schema argument holds, in schema order."""
        return tuple(self.names.get(a.name, a.name) for a in self.overload._schema.arguments if not a.is_out)

    @cached_property
    def schema_names(self) -> tuple[str, ...]:
        """What the schema calls those fields."""
        return tuple(a.name for a in self.overload._schema.arguments if not a.is_out)

    @cached_property
    def destinations(self) -> Mapping[str, str]:
        """Output role -> schema name of the `out=` argument that receives it; empty for a functional overload."""
        outs = [a.name for a in self.overload._schema.arguments if a.is_out]
        return dict(zip(self.roles, outs, strict=True)) if outs else {}

    @cached_property
    def required(self) -> frozenset[str]:
        """The tensors that a call cannot do without: those that the schema asks for, and all of the family's, which
        crashes or cannot be traced without.
        """
        arguments = {self.names.get(a.name, a.name): str(a.type) for a in self.overload._schema.arguments}
        tensors = [f for f in FIELDS[1:5] if f in arguments]
        return frozenset(f for f in tensors if self.dialect is Dialect.FAMILY or arguments[f] == "Tensor")

    @cached_property
    def hides_update(self) -> bool:
        """Whether the op writes its running statistics while its schema says that it does not."""
        written = [a.name for a in self.overload._schema.arguments if a.alias_info and a.alias_info.is_write]
        return self.statistics is Statistics.IN_PLACE and "running_mean" not in written

    def given(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a call by field, `out=` destinations by schema name, known to the overload or not."""
        # by field, not by place: an argument that torch inserts moves the others
        given = dict(zip(self.arguments, args, strict=False))
        given.update({self.names.get(k, k): v for k, v in kwargs.items()} if kwargs else ())
        return given

    def takes(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether a call of the op, no overload named, is a call of this one."""
        return len(args) <= len(self.arguments) and self.given(args, kwargs).keys() == self._asked

    @cached_property
    def _asked(self) -> frozenset[str]:
        return frozenset((*self.arguments, *self.destinations.values()))

    def read(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The record that a call of this overload spells, arguments given by position or by keyword.

        Raises: KeyError naming the schema argument that the call leaves out.
        """
        given = self.given(args, kwargs)
        if not given.keys() >= self._asked:
            raise KeyError(next(a for a in (*self.arguments, *self.destinations.values()) if a not in given))
        if self.mode is not Mode.FLAG:
            given["training"] = self.mode is Mode.TRAIN
        # cuDNN's and MIOpen's gradients have no mask: they make all three
        given.setdefault("output_mask", [True, True, True])
        out = {role: given[name] for role, name in self.destinations.items()}
        extras = {name: given[name] for name in self.extras}
        return self.record(*map(given.get, _RECORDED[self.record]), out, extras)

    def write(self, norm: BatchNorm | Gradient) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments that spell `norm` as this overload: (args, kwargs)."""
        # what was read wins over the row's own
        extras = {**self.extras, **norm.extras} if self.extras else {}
        args = tuple(extras[name] if name in extras else getattr(norm, name) for name in self.arguments)
        return args, {name: norm.out[role] for role, name in self.destinations.items()}


_FAMILY, _CORE, _COMPOSITE, _VENDOR = Dialect.FAMILY, Dialect.CORE, Dialect.COMPOSITE, Dialect.VENDOR
_TRAIN, _EVAL, _FLAG = Mode.TRAIN, Mode.EVAL, Mode.FLAG
_IN_PLACE, _OUTPUTS, _NONE = Statistics.IN_PLACE, Statistics.OUTPUTS, Statistics.NONE


# `batch_norm` takes the switch torch.backends.cudnn.enabled as an argument, on by default as that is.
_SWITCH = MappingProxyType({"cudnn_enabled": True})


# Every row's schema: aten/src/ATen/native/native_functions.yaml. Rows of one kernel stand together: `in_eval`, in
# counterparts.py, takes the closest.
FORMS: tuple[Form, ...] = (
    # The family: the kernel is picked when the op runs. pytorch#116092.
    Form(aten._batch_norm_with_update.default, RESERVED, _TRAIN, _IN_PLACE, _FAMILY),
    Form(aten._batch_norm_with_update.out, RESERVED, _TRAIN, _IN_PLACE, _FAMILY),
    Form(aten._batch_norm_with_update_functional.default, RESERVED + UPDATED, _TRAIN, _OUTPUTS, _FAMILY),
    Form(aten._batch_norm_no_update.default, RESERVED, _EVAL, _NONE, _FAMILY),
    Form(aten._batch_norm_no_update.out, RESERVED, _EVAL, _NONE, _FAMILY),
    # Composite: what a user calls, and what torch.export writes with cudnn_enabled=False, which pins the kernel.
    Form(aten.batch_norm.default, OUT, _FLAG, _IN_PLACE, _COMPOSITE, extras=_SWITCH),
    # ... what `batch_norm` becomes inside autograd; impl_index says which kernel ran, and so which backward to call.
    Form(aten._batch_norm_impl_index.default, (*RESERVED, "impl_index"), _FLAG, _IN_PLACE, _COMPOSITE, extras=_SWITCH),
    # Native: the non-cuDNN kernel. Its schema hides the write to the statistics; that of the legit ones says it.
    Form(aten.native_batch_norm.default, SAVED, _FLAG, _IN_PLACE, _VENDOR),
    Form(aten.native_batch_norm.out, SAVED, _FLAG, _IN_PLACE, _VENDOR),
    Form(aten._native_batch_norm_legit.default, SAVED, _FLAG, _IN_PLACE, _CORE),
    Form(aten._native_batch_norm_legit.out, SAVED, _FLAG, _IN_PLACE, _CORE),
    # ... without running statistics at all: the batch's own, or nothing is defined.
    Form(aten._native_batch_norm_legit.no_stats, SAVED, _FLAG, _NONE, _CORE),
    Form(aten._native_batch_norm_legit.no_stats_out, SAVED, _FLAG, _NONE, _CORE),
    # ... what run_decompositions() emits, train and eval. pytorch#88697.
    Form(aten._native_batch_norm_legit_functional.default, SAVED + UPDATED, _FLAG, _OUTPUTS, _CORE),
    Form(aten._native_batch_norm_legit_no_training.default, SAVED, _EVAL, _NONE, _CORE),
    Form(aten._native_batch_norm_legit_no_training.out, SAVED, _EVAL, _NONE, _CORE),
    # One vendor's kernel, pinned by overload. cuDNN's "save_var" is 1/sqrt(var + eps) too. Both hide the write.
    Form(aten.cudnn_batch_norm.default, RESERVED, _FLAG, _IN_PLACE, _VENDOR, VENDOR_NAMES),
    Form(aten.cudnn_batch_norm.out, RESERVED, _FLAG, _IN_PLACE, _VENDOR, VENDOR_NAMES),
    Form(aten.miopen_batch_norm.default, SAVED, _FLAG, _IN_PLACE, _VENDOR, VENDOR_NAMES),
    Form(aten.miopen_batch_norm.out, SAVED, _FLAG, _IN_PLACE, _VENDOR, VENDOR_NAMES),
)


# The gradients, under their forward's dialect. Each schema calls the saved statistics and the mode by other names.
_SAVES = {"save_var": "save_invstd", "save_var_transform": "save_invstd", "train": "training", "update": "training"}


_GRADIENT = MappingProxyType(
    {**VENDOR_NAMES, **_SAVES, "grad_output": "grad_out"} | dict.fromkeys(("reserveSpace", "reservedSpace"), "reserve")
)


GRADIENTS: tuple[Form, ...] = (
    # The family's picks its kernel when it runs, and reads the reserve that its forward returned.
    Form(aten.batch_norm_backward.default, GRADS, _FLAG, _NONE, _FAMILY, _GRADIENT),
    # Native, in both modes: what autograd calls for native and legit forwards, and for any forward in eval.
    Form(aten.native_batch_norm_backward.default, GRADS, _FLAG, _NONE, _CORE, _GRADIENT),
    Form(aten.native_batch_norm_backward.out, GRADS, _FLAG, _NONE, _CORE, _GRADIENT),
    # What TorchScript calls: impl_index says which kernel ran forward.
    Form(aten._batch_norm_impl_index_backward.default, GRADS, _FLAG, _NONE, _COMPOSITE, _GRADIENT, {"impl_index": 0}),
    # The vendors', of batch statistics only.
    Form(aten.cudnn_batch_norm_backward.default, GRADS, _TRAIN, _NONE, _VENDOR, _GRADIENT),
    Form(aten.cudnn_batch_norm_backward.out, GRADS, _TRAIN, _NONE, _VENDOR, _GRADIENT),
    Form(aten.miopen_batch_norm_backward.default, GRADS, _TRAIN, _NONE, _VENDOR, _GRADIENT),
    Form(aten.miopen_batch_norm_backward.out, GRADS, _TRAIN, _NONE, _VENDOR, _GRADIENT),
)


def _by_target(forms: tuple[Form, ...]) -> Mapping[OpOverload | OpOverloadPacket, tuple[Form, ...]]:
    """The rows that a call can be of, by what it calls: one for an overload, all of an op's for its packet, which
    graphs built by hand call. A duplicate row or an argument that no record holds is a mistake in the table, said at
    import.
    """
    found: dict[OpOverload | OpOverloadPacket, tuple[Form, ...]] = {}
    for number, form in enumerate(forms):
        if form.overload in found:
            first = forms.index(found[form.overload][0])
            raise ValueError(f"FORMS rows {first} and {number} both describe {form.name}: keep one")
        known = {*_RECORDED[form.record], *form.extras}
        if unknown := [name for name in form.arguments if name not in known]:
            raise ValueError(f"FORMS row {number}, {form.name}: {unknown[0]} is no field of a record: an extra")
        found[form.overload] = (form,)
        packet = form.overload.overloadpacket
        found[packet] = (*found.get(packet, ()), form)
    return MappingProxyType(found)


BY_TARGET = _by_target(FORMS)


GRADIENT_BY_TARGET = _by_target(GRADIENTS)


def form_of(target: OpOverload | OpOverloadPacket, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Form:
    """The row of a call of a target in BY_TARGET or GRADIENT_BY_TARGET."""
    rows = BY_TARGET.get(target) or GRADIENT_BY_TARGET[target]
    return rows[0] if len(rows) == 1 else next((form for form in rows if form.takes(args, kwargs)), rows[0])


BY_NAME = MappingProxyType({form.name: form for form in FORMS})
