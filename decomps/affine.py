"""Batch norm in eval as what it is, a scale and a shift for each channel, and how the weights of a layer take it in."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .forms import HALF, BatchNorm
from .layers import Layer

# How much a fold may lose by its own rounding, in standard deviations of a channel, by the dtype of the weight: counted
# against exact arithmetic. Not folded, a layer loses about as much, as its output is rounded where the folded bias
# cancels: this guards against numbers that mean nothing, not against folding.
LIMITS = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 2.0**-5, torch.bfloat16: 2.0**-4}


@dataclass(frozen=True)
class Affine:
    """x -> scale * x + shift, channel by channel. All tensors are [C], float64, on the CPU.

    mean, deviation: of x, as the running statistics tell them.
    """

    scale: Tensor
    shift: Tensor
    mean: Tensor
    deviation: Tensor

    @staticmethod
    def of(norm: BatchNorm) -> Affine:
        """The batch norm of a record that holds tensors, in eval: scale = weight / sqrt(running_var + eps)."""
        mean, var = wide(norm.running_mean), wide(norm.running_var)
        # in float64 whatever the kernel computes in: rounded once, when a weight is cast
        deviation = torch.sqrt(var + norm.eps)
        scale = deviation.reciprocal() if norm.weight is None else wide(norm.weight) / deviation
        shift = -mean * scale if norm.bias is None else wide(norm.bias) - mean * scale
        return Affine(scale, shift, mean, deviation)

    def after(self, scale: Tensor, shift: Tensor) -> Affine:
        """This, and then scale * x + shift."""
        return Affine(self.scale * scale, self.shift * scale + shift, self.mean, self.deviation)

    def behind(self, scale: Tensor, shift: Tensor) -> Affine:
        """scale * x + shift, and then this."""
        # The statistics are of what this reads; ahead of scale * x + shift that is another x.
        mean, deviation = (self.mean - shift) / scale, self.deviation / scale.abs()
        return Affine(self.scale * scale, self.scale * shift + self.shift, mean, deviation)

    def then(self, later: Affine) -> Affine:
        """This, and then another one."""
        return self.after(later.scale, later.shift)

    def take(self, channels: Tensor | slice) -> Affine:
        """The same for other channels: which of these each of them is."""
        return Affine(self.scale[channels], self.shift[channels], self.mean[channels], self.deviation[channels])

    @property
    def finite(self) -> bool:
        """Whether it is finite everywhere, statistics too."""
        return bool(torch.stack([self.scale, self.shift, self.mean, self.deviation]).isfinite().all())

    def same(self, other: Affine) -> bool:
        """Whether it computes the same, to the bit."""
        return torch.equal(self.scale, other.scale) and torch.equal(self.shift, other.shift)

    def lost(self, bias: Tensor | float, dtype: torch.dtype) -> float:
        """What taking this into a layer with that bias loses by rounding, in standard deviations of the worst channel.

        Folded, the layer adds up scale * (x - bias) and a bias of scale * (bias - mean), which cancel: each of them is
        rounded to `dtype`, relative to its own size. So the loss is u * (1 + |mean - bias| / deviation), with u the
        unit roundoff. Infinite for a half type where those sums come near its largest value.
        """
        apart = (self.mean - bias).abs()
        info = torch.finfo(dtype)
        if dtype in HALF and bool(((apart + 4 * self.deviation) * self.scale.abs() > info.max / 8).any()):
            return float("inf")
        return info.eps / 2 * (1 + float((apart / self.deviation).max()))


def wide(tensor: Tensor) -> Tensor:
    """The tensor in float64 on the CPU: what is computed with."""
    return tensor.detach().to("cpu", torch.float64)


def bias_of(layer: Layer, weight: Tensor, bias: Tensor | None, into: Affine | None) -> Tensor:
    """The bias of a layer, [out] in float64, with what the shift of its input adds to every output."""
    out = math.prod(layer.grouped(weight).shape[:2])
    found = torch.zeros(out, dtype=torch.float64, device="cpu") if bias is None else wide(bias).reshape(-1).expand(out)
    if into is None or not bool(into.shift.any()):
        return found
    # a constant added to each input adds the sum of its taps to each output: what is padded must not be in it
    taps = layer.grouped(wide(weight)).flatten(3).sum(3) if weight.ndim > 2 else layer.grouped(wide(weight))
    return found + (taps @ into.shift.view(layer.groups, -1, 1)).reshape(-1)


def write_folded(
    layer: Layer, weight: Tensor, made: Tensor, into: Affine | None, out: Affine | None, dtype: torch.dtype
) -> None:
    """Writes the weight with the scale of its input and of its output in it to `made`, both as the layer reads them:
    computed in `dtype`, at least, on the CPU, and cast once.
    """
    # on the CPU, as MPS has no float64
    found, dtype = layer.grouped(weight.detach().to("cpu")), torch.promote_types(dtype, weight.dtype)
    kernel = (1,) * (found.ndim - 3)
    # [groups, out / groups, in / groups, *kernel]: outputs are scaled along 0 and 1, inputs along 0 and 2
    if out is not None:
        found = found * out.scale.to(dtype).view(layer.groups, -1, 1, *kernel)
    if into is not None:
        found = found * into.scale.to(dtype).view(layer.groups, 1, -1, *kernel)
    layer.grouped(made).copy_(found)
