"""What each library's kernel asks of a batch norm: one row a rule, and the vendors that have them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ..forms import HALF


class Backend(Enum):
    """Whose kernel runs: cuDNN's, MIOpen's, PyTorch's own for the device, or PyTorch's on CPU."""

    CUDNN = "cudnn"
    MIOPEN = "miopen"
    NATIVE = "native"
    CPU = "cpu"


@dataclass(frozen=True)
class Build:
    """What a PyTorch can choose from: the versions of cuDNN and MIOpen (None: not built in), and whether
    `torch.backends.cudnn.enabled`, the one switch for both, is on.
    """

    cudnn: int | None
    miopen: int | None
    enabled: bool

    @classmethod
    def here(cls) -> Build:
        """This PyTorch."""
        has, hip = torch._C._has_cudnn, torch.version.hip is not None
        version = torch.backends.cudnn.version() if has else None  # type: ignore[no-untyped-call]
        enabled = bool(torch.backends.cudnn.enabled)
        return cls(None if hip else version, (version or 0) if hip else None, enabled)


# A current PyTorch for a device that this one is not built for.
ASSUMED = {"cuda": Build(cudnn=90000, miopen=None, enabled=True), "hip": Build(None, miopen=30400, enabled=True)}


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
    return torch._prims_common.suggest_memory_format(call.input) is not torch.contiguous_format


def _present(call: Call) -> bool:
    return call.weight is not None and call.bias is not None


def _statistics(call: Call) -> bool:
    given = (call.running_mean is not None, call.running_var is not None)
    return given == (True, True) or (given == (False, False) and call.training)


# What both libraries ask for.
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


# aten/src/ATen/native/Normalization.cpp, _select_batch_norm_backend.
CUDNN_RULES = (
    Rule("cuDNN", lambda c: c.build.cudnn or "not built in", "5110 or newer", lambda c: (c.build.cudnn or 0) >= 5110),
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


MIOPEN_RULES = (
    Rule("MIOpen", lambda c: c.build.miopen or "not built in", "any", lambda c: c.build.miopen is not None),
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
