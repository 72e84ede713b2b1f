"""Keeping batch norms whole through Inductor: one kernel call of the family each, where that is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch.fx import GraphModule

from ...decomps.backends.rules import Backend
from ...decomps.backends.selection import select_backend
from ...decomps.forms import BatchNorm
from ...errors import InvalidChoice

Predicate = Callable[[BatchNorm], bool]


def _auto(norm: BatchNorm) -> bool:
    """In training, where eager mode runs a vendor's kernel: losses drift apart without it (pytorch#187444)."""
    if not norm.training:
        return False
    return select_backend(*norm.tensors, True, norm.eps) not in (Backend.NATIVE, Backend.CPU)


# What `keep` may be called by: which of the sites are kept.
KEEP: Mapping[str, Predicate] = MappingProxyType(
    {
        "auto": _auto,
        "always": lambda norm: True,
        "never": lambda norm: False,
        "train": lambda norm: bool(norm.training),
    }
)


@dataclass(frozen=True)
class InductorBatchNorm:
    """The graph passes that keep batch norms whole through Inductor, which otherwise decomposes every one.

    It is no row of PASSES: it takes no program and returns none. It makes options, and Inductor runs the passes in them
    on graphs of its own, at two moments between which autograd is traced.

    keep: which ones. "always", "never", "train" (those that normalise with batch statistics), "auto" (see
    `inductor_options`), or a function of a `BatchNorm` whose tensors are fake. Its code may do anything, so compiled
    graphs are cached only when it has a method `uuid()`, of what it depends on, as Inductor's own passes do.

    A kept site is marked before autograd, so that its gradient is the family's and gets its reserve; in the joint
    graph both become calls of the family, and from there on Inductor calls them as they are: the kernel (cuDNN,
    MIOpen, native) is chosen when the program runs. A site that is not kept is not touched at all.

    Raises: InvalidChoice for any other `keep`.
    """

    keep: str | Predicate = "auto"

    def __post_init__(self) -> None:
        if not callable(self.keep) and not (isinstance(self.keep, str) and self.keep in KEEP):
            names = ", ".join(map(repr, KEEP))
            raise InvalidChoice(f"found keep={self.keep!r}, expected one of {names}, or a function of a BatchNorm")

    def options(self, options: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """`options` with these passes in their hooks, after what they, or else Inductor's config, have there."""
        # only here, as importing Inductor takes longer than everything else together
        from torch._inductor import config

        from .marking import CallKernels, MarkKept
        from .marks import kept

        kept()  # ahead of every compilation, which may run under modes of others
        marking = MarkKept(self.keep, KEEP[self.keep] if isinstance(self.keep, str) else self.keep)
        found = dict(options or {})
        for hook, ours in (("pre_grad_custom_pass", marking), ("joint_custom_pre_pass", CallKernels())):
            there = found.get(hook, getattr(config, hook))
            there = there if isinstance(there, list | tuple) else [there]
            passes = [p for p in there if p is not None and type(p) is not type(ours)] + [ours]
            found[hook] = passes if len(passes) > 1 else ours
        return found


def inductor_options(keep: str | Predicate = "auto", options: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Returns options for `torch.compile` under which batch norms keep their kernel.

    keep: which ones, see `InductorBatchNorm`. "auto" keeps those in training for which eager mode runs a kernel of
    cuDNN or MIOpen. Those in eval are left to Inductor, which fuses them, and so are those on CPU: kept, they were
    measured to be as fast in nets whose convolutions take the time, and slower in small or memory-bound ones. options:
    others, to add to. `torch._inductor.config.patch` takes the result too, and so do the `inductor_configs` of
    `aoti_compile_and_package`.

    The passes of others in the same hooks are kept, and run first. Only compilations with these options are affected.

    Raises: InvalidChoice when `keep` is none of these.
    Source: pytorch#187444, of how training diverges without.

    >>> net = torch.compile(torch.nn.BatchNorm1d(3), options=inductor_options(keep="train"))
    """
    return InductorBatchNorm(keep).options(options)


def batchnorm_inductor(
    model: GraphModule, inputs: Sequence[Any], *, mode: str | None = None, options: Mapping[str, Any] | None = None
) -> Any:
    """The `torch.compile` backend of this name: Inductor with `inductor_options`, whose `keep` is one of its options.

    Raises: InvalidChoice when `keep` is none of its choices.
    """
    from torch._inductor import list_mode_options
    from torch._inductor.compile_fx import compile_fx

    asked = dict(options or {})
    patches = inductor_options(asked.pop("keep", "auto"), {**list_mode_options(mode), **asked} if mode else asked)
    return compile_fx(model, inputs, config_patches=patches)
