"""Which kernel runs a batch norm: select it, explain it, force it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .rules import DYNAMIC, VENDORS, Backend, Build, Call, Verdict, choose, vendor_of


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
        # every rule that fails, not the first: who mends that one would run into the next
        if failed := [str(rule) for rule in self.rules if not rule.holds]:
            return "; ".join(failed)
        # what is decided when the program runs may be decided otherwise then
        dynamic = [rule for rule in self.rules if rule.found.endswith(DYNAMIC)]
        said = "".join(f"; {rule.rule} is {rule.found}, limit: {rule.limit}" for rule in dynamic)
        return f"every rule of {self.backend.value} holds{said}"

    def __str__(self) -> str:
        return f"{self.backend.value}: {self.reason}" + (f" ({self.note})" if self.note else "")


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
    vendor = vendor_of(place)
    if vendor is None:
        libraries = " or ".join(row.title for row in VENDORS)
        # MPS, XPU and others have kernels of their own, which PyTorch calls native
        kind = Backend.CPU if place == "cpu" else Backend.NATIVE
        return Explanation(kind, (Verdict("device", place, f"cuda, for {libraries}", False),))
    built = vendor.built()
    build = Build.here(vendor) if built else Build.assumed(vendor)
    verdicts = choose(Call(input, weight, bias, running_mean, running_var, training, eps, build), vendor.rules)
    backend = vendor.backend if all(verdict.holds for verdict in verdicts) else Backend.NATIVE
    stock = f"PyTorch {torch.__version__} is not built for {place} and would say native"
    notes = ("" if built else f"{stock}: this is a build with {vendor.title}", vendor.note)
    return Explanation(backend, verdicts, "; ".join(filter(None, notes)))


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
