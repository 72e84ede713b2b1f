"""Decomposition tables, derived from FORMS and GRADIENTS: batch norm to the op family in every tracing front end."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx.experimental.symbolic_shapes import guard_or_false
from torch.utils.weak import WeakIdKeyDictionary

from .counterparts import nearest
from .family import written
from .forms import FORMS, GRADIENTS, BatchNorm, Dialect, Form, Statistics
from .outputs import fill

aten = torch.ops.aten


Decomposition = Callable[..., Any]


# The memory of a saved statistic -> the reserve that the family returned with it: autograd hands a gradient that very
# tensor, or a detached view of it.
Reserves = WeakIdKeyDictionary


def decomposition_table() -> dict[OpOverload, Decomposition]:
    """A decomposition table that lowers every batch norm to the op family, and its gradient with it.

    It is honoured by `ExportedProgram.run_decompositions` (alone, or merged into
    `torch.export.default_decompositions()`), `make_fx` with and without `pre_dispatch`, `aot_function`,
    `aot_export_module` and any `torch.compile` backend that takes `decompositions`: it has a key for each overload that
    one of them asks for. The result is what `consolidate` makes of the same program. In a joint graph the reserve goes
    from the forward to its gradient; a table knows the forwards of its own traces, so take a new one for each. A
    gradient whose forward was not traced gets an empty one.

    What `consolidate` declines stays as it is: half a pair of statistics, eval without any, an empty batch in training,
    and `_batch_norm_impl_index`, whose fifth output names a kernel.

    Source: pytorch#116092; torch.fx.experimental.proxy_tensor for how a table is asked.

    >>> program = torch.export.export(torch.nn.BatchNorm1d(3), (torch.randn(2, 3),))
    >>> program = program.run_decompositions(decomposition_table())
    >>> [n.name for n in program.graph.nodes if "batch_norm" in n.name]
    ['_batch_norm_with_update_functional']
    """
    reserves = Reserves(ref_type=weakref.ref)
    table: dict[OpOverload, Decomposition] = {}
    for form in FORMS:
        # The family stays as it is, or a trace would ask for its decomposition for ever.
        if form.dialect is not Dialect.FAMILY and "impl_index" not in form.roles:
            table[form.overload] = _forward(form, reserves)
    for form in GRADIENTS:
        if form.dialect is not Dialect.FAMILY:
            table[form.overload] = _gradient(form, reserves)
    return table


def _forward(form: Form, reserves: Reserves) -> Decomposition:
    def lowered(*args: Any, **kwargs: Any) -> Any:
        norm = form.read(args, kwargs)
        # NotImplemented: whoever asks the table keeps the op, or takes its next decomposition.
        stats = norm.running_mean is not None
        empty = norm.training and guard_or_false(norm.input.numel() == 0)
        if stats is not (norm.running_var is not None) or not (stats or norm.training) or empty:
            return NotImplemented
        # what eval saves stays as the family has it, (0,) on CPU: a table cannot know whether anything reads it
        found = _family(norm, in_place=stats and form.statistics is Statistics.IN_PLACE)
        reserves[found["save_invstd"].untyped_storage()] = found["reserve"]
        # copies, as a functional op hands out no memory that it was given
        if not norm.training and form.statistics is Statistics.OUTPUTS:
            found |= {"new_running_mean": norm.running_mean.clone(), "new_running_var": norm.running_var.clone()}
        for role, place in norm.out.items():
            found[role] = written(place, found[role])
        results = tuple(found[role] for role in form.roles)
        return results if len(results) > 1 else results[0]

    return lowered


def _family(norm: BatchNorm, in_place: bool) -> dict[str, Any]:
    """The family's outputs by role. What it cannot do without is filled in, in the dtype of what is there."""
    # The family crashes without statistics, and its gradient without a weight.
    filled = {name: fill(norm, name, norm.input.shape[1]) for name in norm.missing}
    statistics = Statistics.IN_PLACE if in_place else Statistics.OUTPUTS
    target = nearest(Dialect.FAMILY, norm.training, statistics, out=False)
    args, _ = target.write(replace(norm, **filled, out={}))
    return dict(zip(target.roles, target.overload(*args), strict=True))


def _gradient(form: Form, reserves: Reserves) -> Decomposition:
    def lowered(*args: Any, **kwargs: Any) -> Any:
        norm = form.read(args, kwargs)
        reserve = norm.reserve
        if reserve is None and norm.training and norm.save_invstd is not None:
            reserve = reserves.get(norm.save_invstd.untyped_storage())  # type: ignore[no-untyped-call]
        if guard_or_false(norm.input.numel() == 0):
            return NotImplemented
        if reserve is None:  # native saved what cuDNN would, and `register` sees to a gradient that lacks cuDNN's
            reserve = norm.input.new_empty((0,), dtype=torch.uint8)
        # weight=None fails in the family's gradient, and under FakeTensor
        weight = norm.weight if norm.weight is not None else fill(norm, "weight", norm.input.shape[1])
        # in eval the running statistics are read: what was saved is (0,) on CPU, [C] elsewhere
        saved = {} if norm.training else {"save_mean": None, "save_invstd": None}
        norm = replace(norm, weight=weight, reserve=reserve, **saved)
        args, _ = _TARGET.write(norm)
        grads: Sequence[Any] = _TARGET.overload(*args)
        return tuple(
            written(norm.out[role], grad) if role in norm.out else grad
            for role, grad in zip(_TARGET.roles, grads, strict=True)
        )

    return lowered


_TARGET = next(form for form in GRADIENTS if form.dialect is Dialect.FAMILY)
