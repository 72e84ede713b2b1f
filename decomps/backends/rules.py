"""VENDORS: one row for each library whose kernel may run a batch norm: how to find it, what it asks for, its ops."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ..forms import HALF

aten = torch.ops.aten


class Backend(Enum):
    """Whose kernel runs: cuDNN's, MIOpen's, PyTorch's own for the device, or PyTorch's on CPU."""

    CUDNN = "cudnn"
    MIOPEN = "miopen"
    NATIVE = "native"
    CPU = "cpu"

    @classmethod
    def _missing_(cls, value: object) -> Backend | None:
        """The member of a vendor that has a row and no name here."""
        # a vendor's row is enough: the enum needs no second edit
        if not any(vendor.name == value for vendor in VENDORS):
            return None
        member = object.__new__(cls)
        member._name_, member._value_ = str(value).upper(), str(value)
        return cls._value2member_map_.setdefault(value, member)  # type: ignore[return-value]


@dataclass(frozen=True)
class Build:
    """What a PyTorch has of one vendor's library: its version, None when it is not built in, and whether
    `torch.backends.cudnn.enabled`, the one switch for all of them, is on.
    """

    version: int | None
    enabled: bool

    @classmethod
    def here(cls, vendor: Vendor) -> Build:
        """This PyTorch."""
        return cls(vendor.version(), bool(torch.backends.cudnn.enabled))

    @classmethod
    def assumed(cls, vendor: Vendor) -> Build:
        """A current PyTorch for the vendor's device, where this one is not built for it."""
        return cls(vendor.current, True)


@dataclass(frozen=True)
class Call:
    """What the rules look at: the tensors, the mode and the build."""

    input: Tensor
    weight: Tensor | None
    bias: Tensor | None
    running_mean: Tensor | None
    running_var: Tensor | None
    training: bool
    eps: float
    build: Build


@dataclass(frozen=True)
class Rule:
    """One condition that a library's kernel puts: its name, what is looked at, the limit in words, the condition."""

    name: str
    found: Callable[[Call], object]
    limit: str
    holds: Callable[[Call], Any]


@dataclass(frozen=True)
class Verdict:
    """A rule applied: its name, what was found, what it asks for, and whether that holds."""

    rule: str
    found: str
    limit: str
    holds: bool

    def __str__(self) -> str:
        return f"{self.rule} is {self.found}, {'within' if self.holds else 'outside'} the limit: {self.limit}"


DYNAMIC = ", dynamic: decided when it runs"


_INT_MAX = 2**31 - 1


def _within(value: Any, limit: int) -> bool:
    """Whether a size is at most the limit: true of a symbolic one that may be."""
    # never a guard: it would pin the dynamic batch to one side of the limit
    return not statically_known_true(value > limit)


def _size(value: Any, limit: int, where: str = "") -> str:
    known = type(value) is int or statically_known_true(value <= limit) or statically_known_true(value > limit)
    return f"{value}{where}" if known else f"{value}{where}{DYNAMIC}"


def _dtypes(call: Call) -> str:
    weight = "no weight" if call.weight is None else f"a {_short(call.weight.dtype)} weight"
    return f"{_short(call.input.dtype)} with {weight}"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _given(call: Call, *names: str) -> str:
    present = [name for name in names if getattr(call, name) is not None]
    return " and ".join(present) or "none of them"


def _batch_limit(call: Call) -> int:
    return 880801 if call.training else 65535


def _cudnn_dtypes(call: Call) -> bool:
    kinds = [call.input.dtype] + ([] if call.weight is None else [call.weight.dtype])
    half = call.input.dtype is torch.float16
    return torch.bfloat16 not in kinds and (not half or kinds[-1] is torch.float32)


def _nhwc_allowed() -> bool:
    return os.environ.get("PYTORCH_MIOPEN_SUGGEST_NHWC_BATCHNORM", "0") not in ("0", "", "false", "off")


def _channels_last(call: Call) -> bool:
    # PyTorch gives MIOpen NHWC where the environment asks for it alone. pytorch#160529.
    return torch._prims_common.suggest_memory_format(call.input) is not torch.contiguous_format


def _present(call: Call) -> bool:
    return call.weight is not None and call.bias is not None


def _statistics(call: Call) -> bool:
    given = (call.running_mean is not None, call.running_var is not None)
    return given == (True, True) or (given == (False, False) and call.training)


# What every library asks for.
_SHARED = (
    Rule("the switch torch.backends.cudnn.enabled", lambda c: c.build.enabled, "on", lambda c: c.build.enabled),
    Rule("weight and bias", lambda c: _given(c, "weight", "bias"), "both given", _present),
    Rule(
        "running statistics",
        lambda c: _given(c, "running_mean", "running_var"),
        "both given, or neither in training",
        _statistics,
    ),
)


def _version(call: Call) -> object:
    return call.build.version or "not built in"


# aten/src/ATen/native/Normalization.cpp, _select_batch_norm_backend.
_CUDNN_RULES = (
    Rule("cuDNN", _version, "5110 or newer", lambda c: (c.build.version or 0) >= 5110),
    *_SHARED,
    Rule("dtype", _dtypes, "float32, float64, or float16 with a float32 weight; no bfloat16", _cudnn_dtypes),
    Rule("rank", lambda c: c.input.ndim, "3 or more", lambda c: c.input.ndim >= 3),
    Rule(
        "batch",
        lambda c: _size(c.input.shape[0], _batch_limit(c), " in training" if c.training else " in eval"),
        "at most 880801 in training, 65535 in eval",
        lambda c: _within(c.input.shape[0], _batch_limit(c)),
    ),
    Rule(
        "number of elements",
        lambda c: _size(c.input.numel(), _INT_MAX - 1),
        "less than 2147483647, for 32-bit indexing",
        lambda c: _within(c.input.numel(), _INT_MAX - 1),
    ),
    Rule("eps", lambda c: c.eps, "1e-05 or more, CUDNN_BN_MIN_EPSILON", lambda c: c.eps >= 1e-5),
)


_MIOPEN_RULES = (
    Rule("MIOpen", _version, "any", lambda c: c.build.version is not None),
    *_SHARED,
    Rule(
        "dtype",
        _dtypes,
        "float32, or float16 or bfloat16 with a float32 weight",
        lambda c: c.input.dtype in (torch.float32, *HALF) and c.weight is not None and c.weight.dtype is torch.float32,
    ),
    Rule("rank", lambda c: c.input.ndim, "3 to 5", lambda c: 3 <= c.input.ndim <= 5),
    Rule(
        "layout",
        lambda c: "channels_last" if _channels_last(c) else "contiguous",
        "contiguous, unless PYTORCH_MIOPEN_SUGGEST_NHWC_BATCHNORM=1",
        lambda c: not _channels_last(c) or _nhwc_allowed(),
    ),
)


def choose(call: Call, rules: Sequence[Rule]) -> tuple[Verdict, ...]:
    """Every rule applied to a call. What a rule looks at may be symbolic: such a rule holds unless it cannot."""
    return tuple(Verdict(r.name, str(r.found(call)), r.limit, bool(r.holds(call))) for r in rules)


def _library_version() -> int | None:
    """What is built in under the name of cuDNN: that, or MIOpen in a build for ROCm."""
    return torch.backends.cudnn.version() if torch._C._has_cudnn else None  # type: ignore[no-untyped-call]


def _cudnn_version() -> int | None:
    return None if torch.version.hip else _library_version()


def _miopen_version() -> int | None:
    return None if torch.version.hip is None else _library_version() or 0


@dataclass(frozen=True)
class Vendor:
    """A library that has a batch norm of its own.

    name: as a backend, and as a target of `legalize`. title: in words. forward, backward: the overloads that are its
    kernel. devices: what PyTorch calls its devices, the name that is its alone first. built: whether this PyTorch is
    for them. version: of the library in this PyTorch, None when it is not built in. current: that of a current PyTorch
    for its device. rules: what it asks for, in the order in which PyTorch asks. note: what to know of every answer.
    """

    name: str
    title: str
    forward: OpOverload
    backward: OpOverload
    devices: tuple[str, ...] = ()
    built: Callable[[], bool] = lambda: True
    version: Callable[[], int | None] = lambda: 0
    current: int = 0
    rules: tuple[Rule, ...] = ()
    note: str = ""

    @property
    def backend(self) -> Backend:
        """What `select_backend` calls it."""
        return Backend(self.name)


VENDORS: tuple[Vendor, ...] = (
    Vendor(
        "cudnn",
        "cuDNN",
        aten.cudnn_batch_norm.default,
        aten.cudnn_batch_norm_backward.default,
        devices=("cuda",),
        built=lambda: torch.version.cuda is not None,
        version=_cudnn_version,
        current=90000,
        rules=_CUDNN_RULES,
    ),
    # A ROCm build calls its device "cuda" too.
    Vendor(
        "miopen",
        "MIOpen",
        aten.miopen_batch_norm.default,
        aten.miopen_batch_norm_backward.default,
        devices=("hip", "cuda"),
        built=lambda: torch.version.hip is not None,
        version=_miopen_version,
        current=30400,
        rules=_MIOPEN_RULES,
        note="MIOpen's rules differ between ROCm releases",
    ),
)


# PyTorch's own kernel: of every device, and without a rule.
NATIVE = Vendor("native", "PyTorch", aten.native_batch_norm.default, aten.native_batch_norm_backward.default)


# What a batch norm can be pinned to.
KERNELS = MappingProxyType({vendor.name: vendor for vendor in (NATIVE, *VENDORS)})


def vendor_of(device: str) -> Vendor | None:
    """The vendor for a device type: of this PyTorch when it is built for one, else the first; None when there is none.

    >>> vendor_of("hip").title
    'MIOpen'
    """
    # "cuda" is a device of both: which one, the build tells
    there = [vendor for vendor in VENDORS if device in vendor.devices]
    return next((vendor for vendor in there if vendor.built()), there[0] if there else None)
