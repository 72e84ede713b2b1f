"""Batch norm and its gradient by their formulas, in elementary operations, for consumers that have neither."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .forms import GRADS, HALF, BatchNorm, Gradient


def _computed(input: Tensor) -> torch.dtype:
    """The dtype to compute in: float32 for half types."""
    return torch.float32 if input.dtype in HALF else input.dtype


def _reduced(input: Tensor) -> tuple[list[int], list[int]]:
    """The dimensions that a channel is taken over, and the shape of a channel's tensor beside the input."""
    return [d for d in range(input.ndim) if d != 1], [1, -1, *[1] * (input.ndim - 2)]


def forward(norm: BatchNorm) -> dict[str, Tensor]:
    """The outputs by role: (input - mean) / sqrt(var + eps) * weight + bias.

    In training mean and var are the batch's, var the biased one, and the new running statistics are
    (1 - momentum) * running + momentum * batch, with the unbiased variance. No gradient goes through them, or through
    what is saved. Statistics of a half input are float32.
    """
    dtype, (dims, shape) = _computed(norm.input), _reduced(norm.input)
    x = norm.input.to(dtype)
    found: dict[str, Tensor] = {}
    if norm.training:
        mean = x.mean(dims)
        centered = x - mean.view(shape)
        # not E[x^2] - E[x]^2, which cancels where the mean is large
        var = (centered * centered).mean(dims)
        if norm.running_mean is not None:
            # n values a channel: var normalises, var * n / (n - 1) is tracked. One value a channel divides by zero.
            count = norm.input.numel() // norm.input.shape[1]
            unbiased = var * (count / (count - 1))
            for role, old, new in (
                ("new_running_mean", norm.running_mean, mean),
                ("new_running_var", norm.running_var, unbiased),
            ):
                # in the dtype of the statistics, which may be float32 beside a half input
                found[role] = old * (1 - norm.momentum) + new.detach().to(old.dtype) * norm.momentum
    else:
        mean, var = norm.running_mean.to(dtype), norm.running_var.to(dtype)
        centered = x - mean.view(shape)
    invstd = torch.rsqrt(var + norm.eps)
    scale = invstd if norm.weight is None else invstd * norm.weight.to(dtype)
    # one product for each value: the weight goes into the factor of its channel first
    out = centered * scale.view(shape)
    out = out if norm.bias is None else out + norm.bias.to(dtype).view(shape)
    # a gradient goes through `out` alone: what is saved is for that gradient to read
    return {"out": out.to(norm.input.dtype), "save_mean": mean.detach(), "save_invstd": invstd.detach(), **found}


def gradient(norm: Gradient) -> dict[str, Tensor]:
    """The gradients by role, of those that output_mask asks for.

    Of bias: the sum of grad_out. Of weight: the sum of grad_out * x_hat, with x_hat the normalised input. Of input:
    weight / sqrt(var + eps) * (grad_out - mean(grad_out) - x_hat * mean(grad_out * x_hat)), in eval its first factor
    times grad_out.
    """
    dtype, (dims, shape) = _computed(norm.input), _reduced(norm.input)
    x, g = norm.input.to(dtype), norm.grad_out.to(dtype)
    if norm.training:
        mean, invstd = norm.save_mean.to(dtype), norm.save_invstd.to(dtype)
    else:
        mean, invstd = norm.running_mean.to(dtype), torch.rsqrt(norm.running_var.to(dtype) + norm.eps)
    # computed anew: no forward keeps it
    x_hat = (x - mean.view(shape)) * invstd.view(shape)
    scale = invstd if norm.weight is None else invstd * norm.weight.to(dtype)
    # of the bias too, which no gradient's overload is given
    parameter = norm.input.dtype if norm.weight is None else norm.weight.dtype
    found: dict[str, Any] = {}
    wanted = dict(zip(GRADS, norm.output_mask, strict=True))
    if wanted["grad_input"]:
        centered = g
        if norm.training:
            centered = g - g.mean(dims).view(shape) - x_hat * (g * x_hat).mean(dims).view(shape)
        found["grad_input"] = (centered * scale.view(shape)).to(norm.input.dtype)
    if wanted["grad_weight"]:
        found["grad_weight"] = (g * x_hat).sum(dims).to(parameter)
    if wanted["grad_bias"]:
        found["grad_bias"] = g.sum(dims).to(parameter)
    return found
