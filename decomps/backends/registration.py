"""One library's kernel by overload, and the two that PyTorch's family lacks on devices other than the CPU."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch._decomp import decomposition_table, meta_table
from torch._decomp.decompositions import _get_batch_norm_reserve_tensor
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_impls import register_op_impl

from ..forms import BY_TARGET, GRADIENT_BY_TARGET, BatchNorm, Gradient
from ..outputs import returned
from .pinned import run_pinned
from .rules import KERNELS, NATIVE

aten = torch.ops.aten


# PyTorch's `_batch_norm_no_update` has one kernel, for the CPU, and refuses any other tensor; its `batch_norm_backward`
# on CUDA picks cuDNN for running statistics too, whose gradient cuDNN does not have, and after a forward that left no
# reserve. All of that is put right here.

_NO_UPDATE = BY_TARGET[aten._batch_norm_no_update.default][0]


_BACKWARD = GRADIENT_BY_TARGET[aten.batch_norm_backward.default][0]


def no_update(*args: Any) -> Any:
    """`_batch_norm_no_update` on a device other than the CPU: by the op that eager PyTorch picks there in eval."""
    norm = _NO_UPDATE.read(args, {})
    chosen = torch._C._select_batch_norm_backend(*norm.tensors, False, norm.eps)
    return run_pinned(KERNELS[chosen.name.lower()], _NO_UPDATE, norm)


def _backward_on_cuda(original: Any) -> Any:
    """`batch_norm_backward` on CUDA: PyTorch's own, but for what cuDNN cannot do."""

    def backward(keys: Any, *args: Any) -> Any:
        gradient = _BACKWARD.read(args, {})
        if not gradient.training or _lacks_reserve(gradient):
            return run_pinned(NATIVE, _BACKWARD, gradient)
        # the kernel that was there, by its handle: calling the op again would end up here
        return original.call_boxed(keys, *args)

    return backward


def _lacks_reserve(gradient: Gradient) -> bool:
    """Whether cuDNN would be picked and has no reserve to read, as after a native forward, which saves the same."""
    # a reserve that is there was left by cuDNN's forward: its backward is right
    if gradient.reserve.numel():
        return False
    x, w, statistics = gradient.input, gradient.weight, (gradient.running_mean, gradient.running_var)
    if None in statistics:
        statistics = (w, w)  # the selection looks at whether they are there, and two are as good as none
    bindings: Any = torch._C
    chosen = bindings._select_batch_norm_backend(x, w, w, *statistics, True, gradient.eps)
    return chosen.name == "Cudnn" and bool(bindings._get_cudnn_batch_norm_reserve_space_size(x, True))


# Fake tensors. What PyTorch says of the family is what its decompositions return: other dtypes and strides than the
# kernels', which a compiler that calls the kernels reads wrongly. On CUDA it also asks the driver how large cuDNN's
# reserve is, which fails where there is no driver, and compares a dynamic batch with cuDNN's limit, which pins it.


def _fake(fake_mode: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
    """What the kernel of a forward of the family returns. The size of the reserve, which only the driver knows, is [0]
    when there is none to ask or a size is dynamic.
    """
    form = BY_TARGET[func][0]
    norm = form.read(args, kwargs)
    with fake_mode:
        return tuple(_made(norm, role) for role in form.roles)


def _made(norm: BatchNorm | Gradient, role: str) -> Any:
    """A fake of one output: activations in the memory format that the input is in, or nearly in, as kernels allocate
    them; everything else as `returned` says.
    """
    if role in ("out", "grad_input"):
        return torch.empty_like(norm.input, memory_format=suggest_memory_format(norm.input))
    if role == "reserve" and isinstance(norm, BatchNorm):
        return _reserve(norm)
    # contiguous, as [C] is in any layout
    shape, dtype = returned(norm, role)
    return norm.input.new_empty(shape, dtype=dtype)


def _reserve(norm: BatchNorm) -> Any:
    asked = norm.input.device.type == "cuda" and torch.cuda.is_available()
    if not asked or any(type(size) is not int for size in norm.input.shape):
        return norm.input.new_empty((0,), dtype=torch.uint8)
    return _get_batch_norm_reserve_tensor(*norm.tensors, norm.eps, norm.training)


def _fake_gradient(fake_mode: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
    gradient = _BACKWARD.read(args, kwargs)
    with fake_mode:
        asked = zip(_BACKWARD.roles, gradient.output_mask, strict=True)
        return tuple(_made(gradient, role) if wanted else None for role, wanted in asked)


@cache
def register() -> None:
    """Puts the missing kernels into PyTorch's dispatcher, once. A PyTorch that has its own keeps it."""
    # a registration lives as long as its library, and this one as long as the process
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    _libraries.append(library)
    # the keys of real devices alone, below tracing: no graph changes
    for key in ("CUDA", "MPS", "XPU"):
        if not _has_kernel("_batch_norm_no_update", key):
            library.impl("_batch_norm_no_update", no_update, key)
    if _has_kernel("batch_norm_backward", "CUDA") and torch.version.cuda:
        original = torch.library.get_kernel("aten::batch_norm_backward", "CUDA")
        library.impl("batch_norm_backward", _backward_on_cuda(original), "CUDA", with_keyset=True)
    for op, fake in (
        (aten._batch_norm_with_update.default, _fake),
        (aten._batch_norm_with_update_functional.default, _fake),
        (aten._batch_norm_no_update.default, _fake),
        (aten.batch_norm_backward.default, _fake_gradient),
    ):
        meta_table[op] = decomposition_table[op]  # a fake tensor asks a decomposition first, unless there is a meta
        register_op_impl(op)(fake)


_libraries: list[Any] = []


def _has_kernel(op: str, key: str) -> bool:
    """Whether an op of ATen has a kernel of its own for a device: one for any device does not count."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{op}", key))
