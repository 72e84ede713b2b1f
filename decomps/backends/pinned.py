"""One library's kernel by overload, and calls of the family that run on it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ..family import written
from ..forms import BY_TARGET, GRADIENT_BY_TARGET, BatchNorm, Form, Gradient, Statistics
from .rules import NATIVE, Vendor


def run_pinned(library: Vendor, form: Form, record: BatchNorm | Gradient) -> Any:
    """What a call of a form of the family returns, computed by one library's op."""
    if isinstance(record, Gradient):
        # No library has a backward of running statistics but PyTorch.
        target = GRADIENT_BY_TARGET[(library if record.training else NATIVE).backward][0]
        args, _ = target.write(record)
        grads = target.overload(*args)
        return tuple(g if asked else None for g, asked in zip(grads, record.output_mask, strict=True))
    if form.statistics is Statistics.OUTPUTS:
        # libraries write in place alone: what is returned is a copy that they wrote to
        record = replace(record, running_mean=record.running_mean.clone(), running_var=record.running_var.clone())
    target = BY_TARGET[library.forward][0]
    args, _ = target.write(record)
    found = dict(zip(target.roles, target.overload(*args), strict=True))
    # cuDNN alone returns a reserve
    found.setdefault("reserve", record.input.new_empty((0,), dtype=torch.uint8))
    found |= {"new_running_mean": record.running_mean, "new_running_var": record.running_var}
    for role, place in record.out.items():
        found[role] = written(place, found[role])
    return tuple(found[role] for role in form.roles)
