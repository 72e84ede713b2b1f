"""Tracing formulas on the values of a graph."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor


def in_one_mode(values: list[Any]) -> list[Any]:
    """The values as fake tensors of one mode: a graph that was traced from real tensors has one for each."""
    modes = [value.fake_mode for value in values if isinstance(value, FakeTensor)]
    if all(mode is modes[0] for mode in modes):
        return values
    with modes[0]:
        return [torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device) for v in values]
