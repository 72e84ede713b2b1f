"""TARGETS: one row for each consumer that a program can be legalized to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from ...decomps.backends.rules import VENDORS, Vendor
from ...decomps.counterparts import row_in
from ...decomps.forms import BY_TARGET, GRADIENT_BY_TARGET, Dialect, Form
from .site import Site

aten = torch.ops.aten


def row_of(overload: Any) -> Form:
    return (BY_TARGET.get(overload) or GRADIENT_BY_TARGET[overload])[0]


def _family(site: Site, functional: bool) -> Form:
    return row_in(Dialect.FAMILY, site.form, site.norm, functional, out=bool(site.form.destinations))


def _core(site: Site, functional: bool) -> Form:
    """What `run_decompositions()` emits; where the program may write in place, the op that admits its write."""
    return row_in(Dialect.CORE, site.form, site.norm, functional)


def _native(site: Site, functional: bool) -> Form:
    return _core(site, functional) if functional else row_of(aten.native_batch_norm.default)


@dataclass(frozen=True)
class Target:
    """One thing a program can be legalized to.

    form: the row a site is written as, given whether the program is functional; None for elementary operations.
    gradient: the overload of its gradients, None to leave them. dialect: "training" or "functional" where the program
    has to be one. pins: the vendor whose rules a site has to keep. meaning: for whom.
    """

    form: Callable[[Site, bool], Form] | None
    meaning: str
    gradient: Any = None
    dialect: str | None = None
    pins: Vendor | None = None


def _pinned(vendor: Vendor) -> Target:
    form = row_of(vendor.forward)
    return Target(lambda site, functional: form, f"{vendor.title}'s kernel, pinned", vendor.backward, pins=vendor)


# The gradient that PyTorch itself has for every form: with running statistics no library has one.
NATIVE_GRADIENT = aten.native_batch_norm_backward.default


TARGETS: Mapping[str, Target] = MappingProxyType(
    {
        # ... _functional, _no_training, .no_stats, and native_batch_norm_backward.
        "core_aten": Target(_core, "the edge verifier, ONNX, importers of core ATen", NATIVE_GRADIENT),
        # aten.batch_norm hides its write, so a program that lists its mutations is made a training one first.
        "composite": Target(
            lambda site, functional: row_of(aten.batch_norm.default),
            "torchao QAT, TensorRT, passes that look for aten.batch_norm",
            dialect="training",
        ),
        "training": Target(_family, "training a program that was decomposed", dialect="training"),
        "functional": Target(_family, "consumers of functional programs, without retracing", dialect="functional"),
        "native": Target(_native, "PyTorch's own kernel, pinned", NATIVE_GRADIENT),
        **{vendor.name: _pinned(vendor) for vendor in VENDORS},
        # float32 statistics for half types; the one target without a way back.
        "math": Target(None, "consumers with no batch norm at all: elementary operations"),
    }
)
