"""Recalibrate: running statistics estimated anew over batches, all of them at once instead of the latest ones."""

from __future__ import annotations

import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch.export import ExportedProgram

from ...decomps.forms import BatchNorm, Form
from ...errors import InvalidBatchNorm, InvalidChoice
from ..graph.draft import Draft, with_tensors
from ..graph.nest import state_names
from ..graph.options import NO_FLAG, Command, Keeps, flag
from ..graph.result import Log, Program, Result, top_module
from ..rewriting.site import Site, find_sites
from ..rewriting.tracked import root_of
from ..rewriting.trains import find_random, is_frozen, is_training

aten = torch.ops.aten

METHODS = ("pooled", "cumulative")

Progress = Callable[[Iterable[Any]], Iterable[Any]]


@dataclass
class Tally:
    """What is known of one running mean and variance so far, in float64.

    count: values a channel. mean: of all of them. squares: the sum of squared distances from it. batches: how many
    there were. average: the means of the batches' means and unbiased variances. moved: both, moved by momentum.
    """

    count: int = 0
    mean: Any = None
    squares: Any = None
    batches: int = 0
    average: Any = None
    moved: Any = None
    sites: list[Site] = field(default_factory=list)

    def add(self, x: torch.Tensor, before: tuple[torch.Tensor, torch.Tensor], momentum: float | None) -> None:
        """Takes in one batch, [N, C, *]. Source: Chan, Golub, LeVeque 1979, which loses nothing to a far mean."""
        values = x.detach().transpose(0, 1).flatten(1).double()
        count = values.shape[1]
        if not count:  # an empty batch: its mean would be NaN, and would stay in all that follows
            return
        mean = values.mean(1)
        squares = (values - mean[:, None]).square().sum(1)
        if self.mean is None:
            self.mean, self.squares = mean, squares
        else:
            apart, total = mean - self.mean, self.count + count
            self.mean = self.mean + apart * (count / total)
            self.squares = self.squares + squares + apart.square() * (self.count * count / total)
        self.count += count
        self.batches += 1
        # of one value there is no unbiased variance: it counts as 0, and not as the NaN that the kernel gives
        latest = torch.stack([mean, squares / max(count - 1, 1)])
        self.average = latest if self.average is None else self.average + (latest - self.average) / self.batches
        if momentum is not None:
            # the buffers stay as they are until the end: from the second batch on, what was moved is here alone
            old = torch.stack([t.double() for t in before]) if self.moved is None else self.moved
            self.moved = old + momentum * (latest - old)

    def statistics(self, method: str, momentum: float | None) -> tuple[torch.Tensor, torch.Tensor]:
        """The running mean and variance."""
        if momentum is not None:
            return self.moved[0], self.moved[1]
        if method == "cumulative":
            return self.average[0], self.average[1]
        return self.mean, self.squares / (self.count - 1)


@dataclass(frozen=True)
class Recalibrate:
    """Estimates the running statistics of every batch norm that is not frozen anew (PreciseBN).

    momentum: None for an estimate from the batches alone; a number moves what is there by each batch, as training does.
    method: "pooled" for the mean and the unbiased variance of all values, every value alike whatever its batch, or
    "cumulative" for the averages of the batches' own, as `torch.optim.swa_utils.update_bn`. progress: what shows how
    many batches have run, given them and handing them on, such as `tqdm`. inplace: write into the given program's
    buffers.

    Each batch runs as in training: batch norms use its statistics, so that a layer is measured behind layers that
    normalise. Dropout and all else stay in the program's own mode: switch it to eval for neither. Nothing but the
    running statistics changes, `num_batches_tracked` neither; and they change at the end, all at once.
    Source: Wu, Johnson 2021 (arXiv:2105.07576).
    """

    command: ClassVar[Command] = Command("recalibrate", "--data inputs.npz -o precise.pt2", Keeps.MEANING, data=True)

    momentum: float | None = None
    method: str = field(default="pooled", metadata=flag(choices=METHODS))
    progress: Progress | bool | None = field(default=None, metadata=NO_FLAG)
    inplace: bool = field(default=False, metadata=NO_FLAG)

    def __call__(self, program: Program, batches: Iterable[Any]) -> Result:
        """Recalibrates an ExportedProgram or a GraphModule, nested graphs included.

        batches: each a tensor, a tuple of arguments, a dict by name, or a pair of both.

        Raises: InvalidChoice for an unknown method, no batch, or one that the program does not take; InvalidBatchNorm
        when a batch norm saw less than two values a channel, or one that is not finite; InvalidProgram for anything
        else than a program.
        """
        self._check()
        top_module(program)  # refuses what is no program, in our words
        if not isinstance(batches, Iterable) or isinstance(batches, str):
            found = type(batches).__name__
            raise InvalidChoice(f"found {found} as batches, expected an iterable of them, such as a list")
        # an exported program's own graph takes its state as inputs, its module by the names that functional_call needs
        module: Any = program.module() if isinstance(program, ExportedProgram) else program
        log = Log()
        tallies, measuring = self._measuring(module, log)
        if not tallies:
            return log.result(program)
        # tied buffers are there under each of their names, as nothing is tied while it runs
        state = {name: buffer.clone() for name, buffer in module.named_buffers(remove_duplicate=False)}
        self._run(program, measuring, state, batches)
        for names in [names for names, tally in tallies.items() if not tally.count]:
            _decline(log, tallies.pop(names).sites, "no batch reached it")
        tensors: dict[str, torch.Tensor] = {}
        for names, tally in tallies.items():
            tensors |= self._estimated(names, tally, state)
        # a second run over the same batches gives the same numbers: nothing was modified then
        if all(torch.equal(state[name].to(t.device), t) for name, t in tensors.items()):
            return log.result(program)
        for tally in tallies.values():
            for site in tally.sites:
                log.edit(site, site.form.name, f"statistics of {tally.count} values a channel")
        return log.result(with_tensors(program, tensors, self.inplace))

    def _check(self) -> None:
        if self.method not in METHODS:
            raise InvalidChoice(f"found method {self.method!r}, expected one of {', '.join(METHODS)}")
        if self.momentum is not None and not 0 < self.momentum <= 1:
            raise InvalidChoice(f"found momentum {self.momentum}, expected None, or more than 0 and at most 1")

    def _measuring(self, module: Any, log: Log) -> tuple[dict[tuple[str, str], Tally], Program]:
        """What to count by the names of mean and variance, and a copy of the module that counts."""
        draft, buffers = Draft(module), {name for name, _ in module.named_buffers(remove_duplicate=False)}
        names, sites = state_names(draft.program, draft.graphs), list(find_sites(draft.graphs))
        trains = is_training(sites, find_random(draft.graphs))
        tallies: dict[tuple[str, str], Tally] = defaultdict(Tally)
        for site in sites:  # all of them before the first one changes: a second call's statistics are the first one's
            norm = site.norm
            if not site.tracks or (norm.training is False and is_frozen(site.node, trains)):
                continue
            mean, var = (names.get(root_of(t), "") for t in (norm.running_mean, norm.running_var))
            if reason := site.problem or ("" if {mean, var} <= buffers else "its running statistics are not buffers"):
                log.decline(site, reason)
            else:
                tallies[mean, var].sites.append(site)
        _decline_half_shared(log, tallies)
        for tally in tallies.values():
            # a function is as good a target as an op, in a module that is run and never saved
            for site in tally.sites:
                site.node.target = _recorder(site.form, tally, self.momentum)
        return tallies, draft.build()

    def _run(self, program: Program, measuring: Any, state: dict[str, torch.Tensor], batches: Iterable[Any]) -> None:
        """Runs the batches on state of their own, so that nothing the program writes is seen outside."""
        number = 0
        with torch.no_grad():
            for number, batch in enumerate(self.progress(batches) if callable(self.progress) else batches, 1):
                args, kwargs = arguments(program, batch, number)
                try:
                    torch.func.functional_call(measuring, state, args, kwargs, tie_weights=False)
                # what kernels, the module's input guards and its code raise of arguments that do not fit
                except (RuntimeError, ValueError, TypeError, AssertionError, AttributeError, LookupError) as error:
                    said = " ".join(str(error).split())[:300] or type(error).__name__
                    found = f"batch {number}: found one that the program does not take ({said})"
                    raise InvalidChoice(found) from error
        if not number:
            raise InvalidChoice("found no batch, expected at least one: is the iterable used up?")

    def _estimated(
        self, names: tuple[str, str], tally: Tally, state: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        where = tally.sites[0].module or tally.sites[0].name
        if tally.count < 2:
            found = f"{tally.count} values a channel over all batches"
            raise InvalidBatchNorm(where, "its input", found, "two or more: a variance needs them")
        values = tally.statistics(self.method, self.momentum)
        if not all(bool(value.isfinite().all()) for value in values):
            raise InvalidBatchNorm(where, "its input", "not finite somewhere", "finite values: check the batches")
        return {name: value.to(state[name]) for name, value in zip(names, values, strict=True)}


def recalibrate(
    program: Any,
    batches: Iterable[Any],
    momentum: float | None = None,
    *,
    method: str = "pooled",
    progress: Progress | bool | None = None,
    inplace: bool = False,
) -> Any:
    """Returns the program with running statistics estimated over the batches; arguments as `Recalibrate`.

    progress: True and False, as 0.1.0 took them, show nothing.

    Raises: InvalidChoice, InvalidBatchNorm, InvalidProgram, as `Recalibrate` does; the program then is as it was.

    >>> exported = torch.export.export(torch.nn.BatchNorm1d(1), (torch.randn(2, 1),))
    >>> batches = [torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [6.0]])]
    >>> recalibrate(exported, batches).state_dict["running_mean"]
    tensor([3.])
    """
    return Recalibrate(momentum, method, progress, inplace)(program, batches).program


def _decline_half_shared(log: Log, tallies: dict[tuple[str, str], Tally]) -> None:
    """Takes out the batch norms that share a mean or a variance with one that has another one of the other."""
    shared = Counter(name for key in tallies for name in key)
    for key in [key for key in tallies if any(shared[name] > 1 for name in key)]:
        reason = f"it shares one of {', '.join(key)} with a batch norm that does not share the other"
        _decline(log, tallies.pop(key).sites, reason)


def _decline(log: Log, sites: Iterable[Site], reason: str) -> None:
    for site in sites:
        log.decline(site, reason)


def _recorder(form: Form, tally: Tally, momentum: float | None) -> Callable[..., Any]:
    """A function that stands for a batch norm: it counts its input, and normalises with the batch's statistics."""

    def record(*args: Any, **kwargs: Any) -> Any:
        norm: BatchNorm = form.read(args, kwargs)
        tally.add(norm.input, (norm.running_mean, norm.running_var), momentum)
        # Clones, as the kernel writes to them. A kernel that every device has, whichever overload stood here: a pinned
        # one may not be in this build, and takes no norm that breaks its rules.
        tensors = (norm.input, norm.weight, norm.bias, norm.running_mean.clone(), norm.running_var.clone())
        if norm.input.numel():
            out, mean, invstd = aten.native_batch_norm(*tensors, True, 0.0, norm.eps)
        else:  # which says nothing, and the kernel refuses
            out, mean, invstd = norm.input.clone(), norm.running_mean.clone(), norm.running_var.clone()
        made = {"out": out, "save_mean": mean, "save_invstd": invstd, "impl_index": 0}
        made |= {"new_running_mean": norm.running_mean, "new_running_var": norm.running_var}
        # what a gradient alone reads is there in kind: no gradient runs
        made["reserve"] = out.new_empty(0, dtype=torch.uint8)
        for role, place in norm.out.items():
            made[role] = place.resize_(made[role].shape).copy_(made[role])
        return out if len(form.roles) == 1 else tuple(made[role] for role in form.roles)

    return record


def arguments(program: Program, batch: Any, number: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A batch as arguments of the program: (args, kwargs).

    Raises: InvalidChoice when a dict names other inputs than the program's.
    """
    if isinstance(batch, tuple | list):
        pair = len(batch) == 2 and isinstance(batch[0], tuple | list) and isinstance(batch[1], dict)
        return (tuple(batch[0]), dict(batch[1])) if pair else (tuple(batch), {})
    if not isinstance(batch, dict):
        return (batch,), {}
    keywords, positional = _inputs(program)
    # A dict may be arguments by name, or the one argument itself: names decide, and only what fits neither is refused.
    if batch.keys() == set(keywords) and not positional:
        return (), dict(batch)
    if batch.keys() == {*keywords, *positional}:
        return tuple(batch[name] for name in positional), {name: batch[name] for name in keywords}
    if len(positional) == 1 and not keywords:
        return (batch,), {}
    expected = ", ".join((*positional, *keywords)) or "no input"
    raise InvalidChoice(f"batch {number}: found a dict of {', '.join(map(str, batch))}, expected {expected}")


def _inputs(program: Program) -> tuple[list[str], list[str]]:
    """The names of what a program takes by keyword, and by position, one for each argument."""
    if not isinstance(program, ExportedProgram):
        return [], [str(node.target) for node in program.graph.find_nodes(op="placeholder")]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the new name is not there in torch 2.9
        by_position, by_keyword = program.call_spec.in_spec.children_specs
        arguments = by_position.children_specs
    names: list[str] = []
    inputs = list(program.graph_signature.user_inputs)
    for spec in arguments:
        names.append(str(inputs[0]) if spec.num_leaves == 1 and inputs else f"argument {len(names)}")
        inputs = inputs[spec.num_leaves :]
    return list(by_keyword.context or []), names
