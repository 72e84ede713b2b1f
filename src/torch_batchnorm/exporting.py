"""exportable: lets torch.export capture what it cannot, batch norms that average cumulatively (momentum=None)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from torch_batchnorm.errors import InvalidBatchNorm

Model = TypeVar("Model", bound=nn.Module)


@contextmanager
def exportable(model: Model) -> Iterator[Model]:
    """The model, inside a block in which `torch.export.export` captures its batch norms with momentum=None in training.

    PyTorch computes their factor, 1/num_batches_tracked, as a Python float, which no graph can hold. Here it stays a
    tensor: after k batches running_mean is the mean of the batch means, running_var that of the unbiased variances.
    After the block the model is as it was, also when export failed; its weights and buffers are never written.

    Raises: InvalidBatchNorm for a momentum=None module whose class has a forward of its own, and, while exporting, for
    running statistics that are no buffers (from a closure, a global, a plain attribute): export would trip over the
    write to them later.
    Source: pytorch#194504, pytorch#197096.

    >>> model = torch.nn.BatchNorm1d(3, momentum=None)
    >>> with exportable(model):
    ...     program = torch.export.export(model, (torch.randn(4, 3),))
    >>> _ = program.module()(torch.ones(4, 3))
    >>> program.state_dict["running_mean"]
    tensor([1., 1., 1.])
    """
    averaging = [(name, m) for name, m in model.named_modules() if isinstance(m, _BatchNorm) and m.momentum is None]
    for name, module in averaging:
        if module.training and module.track_running_stats and type(module).forward is not _BatchNorm.forward:
            found = f"None in a {type(module).__name__}, whose forward is its own"
            raise InvalidBatchNorm(name or type(model).__name__, "momentum", found, "a number, or a torch.nn.BatchNorm")
    # an instance may have a forward of its own already, set by hooks or wrappers
    held = [(module, module.__dict__.get("forward")) for _, module in averaging]
    try:
        for _, module in averaging:
            module.__dict__["forward"] = MethodType(_forward, module)  # seen before the class's
        with _Statistics():
            yield model
    finally:
        for module, forward in held:
            if forward is None:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = forward


def _forward(self: _BatchNorm, input: torch.Tensor) -> torch.Tensor:
    """What a cumulative batch norm computes, in operations that a graph can hold."""
    mean, var, counter = self.running_mean, self.running_var, self.num_batches_tracked
    if not self.training or mean is None or var is None or counter is None:
        return _BatchNorm.forward(self, input)
    self._check_input_dim(input)  # type: ignore[no-untyped-call]
    # first, as torch does: the factor is 1/k at the k-th batch
    counter.add_(1)
    # The batch's own statistics, as the kernel computes them: it gets nothing to average them with. The buffers are
    # not the kernel's to write, because autograd would find them changed again before the gradient.
    latest = torch.zeros_like(mean), torch.ones_like(var)
    out = functional.batch_norm(input, *latest, self.weight, self.bias, True, 1.0, self.eps)
    count = counter.to(mean.dtype)
    for running, batch in zip((mean, var), latest, strict=True):
        running.add_((batch - running.detach()) / count)
    return out


class _Statistics(TorchFunctionMode):
    """Refuses, while a model is exported, running statistics that are not its buffers."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # functional.batch_norm is what modules of every kind end in
        given = dict(kwargs or {})
        if func is functional.batch_norm:
            given = dict(zip(("input", "running_mean", "running_var"), args, strict=False)) | given
            for name in ("running_mean", "running_var"):
                tensor = given.get(name)
                # what export knows is fake by now
                if tensor is not None and _fake(given["input"]) and not _fake(tensor):
                    found = f"a tensor of shape {list(tensor.shape)} that no module holds as a buffer"
                    raise InvalidBatchNorm("batch_norm", name, found, "a buffer: register_buffer it, and export again")
        return func(*args, **(kwargs or {}))


def _fake(tensor: Any) -> bool:
    # export wraps fake tensors for functionalization, twice in nested regions
    while torch._is_functional_tensor(tensor):
        tensor = torch._from_functional_tensor(tensor)
    inner = getattr(tensor, "elem", tensor)
    return isinstance(tensor, FakeTensor) or isinstance(inner, FakeTensor) or torch._is_functional_tensor(inner)
