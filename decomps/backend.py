"""Which kernel runs a batch norm: select it, explain it, force it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.overrides import TorchFunctionMode

from torch_batchnorm.decomps.forms import BY_TARGET, GRADIENT_BY_TARGET, HALF, Dialect
from torch_batchnorm.decomps.kernels import run_pinned
from torch_batchnorm.errors import InvalidChoice


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
_ASSUMED = {"cuda": Build(cudnn=90000, miopen=None, enabled=True), "hip": Build(None, miopen=30400, enabled=True)}


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


@dataclass(frozen=True)
class Explanation:
    """The backend of one batch norm, and the rules that decide it.

    rules: every rule that was asked, in order. note: where the answer is not what this PyTorch says of itself, why.
    """

    backend: Backend
    rules: tuple[Verdict, ...]
    note: str = ""

    @property
    def deciding(self) -> tuple[Verdict, ...]:
        """The rules that did not hold; all of them when all hold."""
        return tuple(rule for rule in self.rules if not rule.holds) or self.rules

    @property
    def reason(self) -> str:
        """In words, why it is this backend."""
        failed = [str(rule) for rule in self.rules if not rule.holds]
        if self.backend in (Backend.CUDNN, Backend.MIOPEN):
            dynamic = [rule for rule in self.rules if rule.found.endswith(_DYNAMIC)]
            said = "".join(f"; {rule.rule} is {rule.found}, limit: {rule.limit}" for rule in dynamic)
            return f"every rule of {self.backend.value} holds{said}"
        return "; ".join(failed or map(str, self.rules))

    def __str__(self) -> str:
        return f"{self.backend.value}: {self.reason}" + (f" ({self.note})" if self.note else "")


_DYNAMIC = ", dynamic: decided when it runs"
_INT_MAX = 2**31 - 1


def _within(value: Any, limit: int) -> bool:
    """Whether a size is at most the limit: true of a symbolic one that may be."""
    return not statically_known_true(value > limit)


def _size(value: Any, limit: int, where: str = "") -> str:
    known = type(value) is int or statically_known_true(value <= limit) or statically_known_true(value > limit)
    return f"{value}{where}" if known else f"{value}{where}{_DYNAMIC}"


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


def explain_backend(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    eps: float,
    *,
    device: str | torch.device | None = None,
) -> Explanation:
    """The backend that the family picks for these tensors when it runs, and the rules that decide it, in words.

    input: [N, C, *], real, fake or meta; weight, bias, running_mean, running_var: [C] or None. training: batch
    statistics. device: where it is to run ("cuda", "hip", "cpu"), the input's device by default.

    For a device that this PyTorch is not built for, the answer is what a current build for it does, and `note` says
    so. MIOpen's rules differ between ROCm releases, and are not tested here. A symbolic size is taken to be within a
    limit that it may keep.

    Source: _select_batch_norm_backend in aten/src/ATen/native/Normalization.cpp.

    >>> c = torch.ones(3)
    >>> print(explain_backend(torch.ones(2, 3, 4), c, c, c, c, True, 1e-6, device="cuda").backend)
    Backend.NATIVE
    """
    place = torch.device(input.device if device is None else device).type
    if place not in ("cuda", "hip"):
        kind = Backend.CPU if place == "cpu" else Backend.NATIVE
        return Explanation(kind, (Verdict("device", place, "cuda, for cuDNN or MIOpen", False),))
    here = Build.here()
    built = torch.version.hip if place == "hip" else torch.version.cuda or torch.version.hip
    build = here if built else _ASSUMED[place]
    call = Call(input, weight, bias, running_mean, running_var, training, eps, build)
    vendor = Backend.MIOPEN if build.miopen is not None else Backend.CUDNN
    verdicts = choose(call, MIOPEN_RULES if vendor is Backend.MIOPEN else CUDNN_RULES)
    backend = vendor if all(verdict.holds for verdict in verdicts) else Backend.NATIVE
    notes = []
    if not built:
        library = "MIOpen" if vendor is Backend.MIOPEN else "cuDNN"
        notes.append(
            f"PyTorch {torch.__version__} is not built for {place} and would say native: this is a build with {library}"
        )
    if vendor is Backend.MIOPEN:
        notes.append("MIOpen's rules differ between ROCm releases")
    return Explanation(backend, verdicts, "; ".join(notes))


def select_backend(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    eps: float,
) -> Backend:
    """The backend that the family picks for these tensors when it runs. Arguments as `explain_backend`, which says why.

    >>> c = torch.ones(3)
    >>> select_backend(torch.ones(2, 3, 4), c, c, c, c, True, 1e-5)
    <Backend.CPU: 'cpu'>
    """
    return explain_backend(input, weight, bias, running_mean, running_var, training, eps).backend


class _Forced(TorchFunctionMode):
    """Sends every call of the family in this thread to one library's own op, above autograd: whatever thread the
    backward runs in, and whether the block is over by then, it is that op's.
    """

    def __init__(self, backend: Backend | None) -> None:
        super().__init__()
        self.backend = backend

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling() or _blocks.innermost[-1] is not self:
            return func(*args, **kwargs)
        rows = BY_TARGET.get(func) or GRADIENT_BY_TARGET.get(func)
        if self.backend is None or rows is None or rows[0].dialect is not Dialect.FAMILY:
            return func(*args, **kwargs)
        form = rows[0]
        record = form.read(args, kwargs)
        traced = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)
        if traced or isinstance(record.input, torch._subclasses.FakeTensor) or record.input.is_meta:
            return func(*args, **kwargs)  # a graph keeps its choice for when it runs
        if form in BY_TARGET.get(func, ()):
            self._refuse_unless_possible(form.name, record)
        return run_pinned(self.backend.value, form, record)

    def _refuse_unless_possible(self, name: str, norm: Any) -> None:
        if self.backend is Backend.NATIVE:
            return
        tensors = (norm.input, norm.weight, norm.bias, norm.running_mean, norm.running_var)
        why = explain_backend(*tensors, norm.training, norm.eps)
        if why.backend is not self.backend:
            wanted = self.backend.value if self.backend else "auto"
            raise InvalidChoice(f"{name} cannot run on {wanted}, which was asked for: {why}")


@contextmanager
def backend(choice: str | Backend) -> Iterator[None]:
    """Within the block, batch norms of the op family run on one backend, for this thread alone.

    choice: "native", "cudnn", "miopen" or "auto" (PyTorch's own choice, also inside another block). It holds for
    consolidated programs, graph modules and `tbn.ops` as they run in Python, for their backward wherever that runs, and
    for no other op: convolutions keep cuDNN. Nothing is pinned in a graph that is traced inside the block. What is
    compiled (Inductor, AOTInductor) has its kernels already and is not affected. A program that AOTAutograd compiled
    for another backend runs its backward as a graph of its own: run that inside the block too.

    Raises: InvalidChoice for an unknown choice, for a library that this PyTorch does not have, and at a batch norm
    that the library cannot run, with the rule.

    >>> with backend("native"):
    ...     out = torch.ops.aten._batch_norm_no_update(torch.ones(2, 3), *[torch.ones(3)] * 4, 0.1, 1e-5)
    """
    names = [*(member.value for member in _FORCEABLE), "auto"]
    name = choice.value if isinstance(choice, Backend) else choice
    if name not in names:
        raise InvalidChoice(f"found backend {name!r}, expected one of {', '.join(names)}")
    build, chosen = Build.here(), None if name == "auto" else Backend(name)
    installed = {Backend.CUDNN: build.cudnn, Backend.MIOPEN: build.miopen}
    if chosen in installed and installed[chosen] is None:
        raise InvalidChoice(
            f"backend {name} was asked for, and PyTorch {torch.__version__} is built without it: "
            "install a build that has it, or ask for native or auto"
        )
    mode = _Forced(chosen)
    _blocks.innermost.append(mode)
    try:
        with mode:
            yield
    finally:
        _blocks.innermost.pop()


class _Blocks(threading.local):
    """The blocks that this thread is in: the innermost one decides."""

    def __init__(self) -> None:
        self.innermost: list[_Forced] = []


_blocks = _Blocks()
_FORCEABLE = (Backend.NATIVE, Backend.CUDNN, Backend.MIOPEN)
