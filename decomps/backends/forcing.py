"""Forcing one backend at run time, for batch norm alone and for this thread alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ...errors import InvalidChoice
from ..forms import BY_TARGET, GRADIENT_BY_TARGET, BatchNorm, Dialect
from .pinned import run_pinned
from .rules import KERNELS, NATIVE, Backend, Build, Vendor
from .selection import explain_backend


class _Forced(TorchFunctionMode):
    """Sends every call of the family in this thread to one library's own op, above autograd: whatever thread the
    backward runs in, and whether the block is over by then, it is that op's. PyTorch's own switches would take the
    convolutions along.
    """

    def __init__(self, library: Vendor | None) -> None:
        super().__init__()
        self.library = library

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # A block inside this one decides; modes nest, so the call comes by here after it.
        if torch.compiler.is_compiling() or _blocks.innermost[-1] is not self:
            return func(*args, **kwargs)
        # packets are found too: torch.ops.aten._batch_norm_no_update(...) names no overload
        rows = BY_TARGET.get(func) or GRADIENT_BY_TARGET.get(func)
        if self.library is None or rows is None or rows[0].dialect is not Dialect.FAMILY:
            return func(*args, **kwargs)
        form = rows[0]
        record = form.read(args, kwargs)
        # make_fx runs its function under this mode, with tensors that may be real
        traced = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)
        if traced or isinstance(record.input, torch._subclasses.FakeTensor) or record.input.is_meta:
            return func(*args, **kwargs)  # a graph keeps its choice for when it runs
        if form in BY_TARGET.get(func, ()):
            _refuse_unless_possible(self.library, form.name, record)
        return run_pinned(self.library, form, record)


def _refuse_unless_possible(library: Vendor, name: str, norm: BatchNorm) -> None:
    if library is NATIVE:
        return
    # Asked ahead of the call: the library's own error would name no rule.
    why = explain_backend(*norm.tensors, norm.training, norm.eps)
    if why.backend is not library.backend:
        raise InvalidChoice(f"{name} cannot run on {library.name}, which was asked for: {why}")


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
    names = [*KERNELS, "auto"]
    name = choice.value if isinstance(choice, Backend) else choice
    if name not in names:
        raise InvalidChoice(f"found backend {name!r}, expected one of {', '.join(names)}")
    library = KERNELS.get(name)
    if library is not None and Build.here(library).version is None:
        raise InvalidChoice(
            f"backend {name} was asked for, and PyTorch {torch.__version__} is built without it: "
            "install a build that has it, or ask for native or auto"
        )
    # `auto` is a block too: it has to hide the ones around it
    mode = _Forced(library)
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
