"""SwitchMode: a program as its model would be after `model.eval()` or `model.train()`, exactly, and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch_batchnorm.errors import InvalidChoice
from torch_batchnorm.passes.program import Declined, Draft, Edit, Program, Result, graphs_of
from torch_batchnorm.passes.randomness import Random, find_random, start, stop
from torch_batchnorm.passes.site import Site, find_sites, forget, note_of, write_note
from torch_batchnorm.passes.switching import Switch

MODES = ("eval", "train")


@dataclass(frozen=True)
class SwitchMode:
    """Switches every batch norm and every dropout to eval or to training.

    to: "eval" or "train". dropout: switch dropout and the like too. include_frozen: to train also what is frozen.
    inplace: edit the given program.

    A batch norm without running statistics means the batch's own, and stays. What is in eval inside a program that
    trains is frozen: it stays in eval, through a round trip, saving and loading too.
    Source: pytorch#151726, pytorch#103681, ao#4107.
    """

    to: str
    dropout: bool = True
    include_frozen: bool = False
    inplace: bool = False

    def __call__(self, program: Program) -> Result:
        """Switches an ExportedProgram or a GraphModule, nested graphs included.

        Raises: InvalidChoice for another mode, InvalidProgram for anything else than a program.
        """
        if self.to not in MODES:
            raise InvalidChoice(f"found mode {self.to!r}, expected one of {', '.join(MODES)}")
        declined, wanted = self._plan(program)
        if not wanted:
            return Result(program, (), tuple(declined))
        draft = Draft(program, self.inplace)
        edits: list[Edit] = []
        if self.to == "eval":
            self._stop(draft, edits, declined)
        else:
            self._start(draft, edits, declined)
        return Result(draft.build() if edits else program, tuple(edits), tuple(declined))

    def _plan(self, program: Program) -> tuple[list[Declined], bool]:
        """What cannot be read, and whether anything else is in the other mode."""
        sites, random = list(find_sites(graphs_of(program))), self._random(graphs_of(program))
        declined = [_declined(s, s.problem) for s in sites if _unknown(s)]
        declined += [Declined(r.name, r.module, str(r.node.target), r.problem) for r in random if r.problem]
        if self.to == "eval":
            wanted = any(map(_trains, sites)) or any(r.training for r in random)
        else:
            trains = is_training(sites, random)
            wanted = any(self._starts(s.node, trains) for s in sites if _evaluates(s))
            wanted = wanted or any(self._starts(r.node, trains) for r in random if r.training is False)
        return declined, wanted

    def _random(self, graphs: Any) -> list[Random]:
        return list(find_random(graphs)) if self.dropout else []

    def _stop(self, draft: Draft, edits: list[Edit], declined: list[Declined]) -> None:
        sites, random = list(find_sites(draft.graphs)), self._random(draft.graphs)
        for found in (*filter(_evaluates, sites), *(r for r in random if r.training is False)):
            if "train" not in (note := note_of(found.node)) and "frozen" not in note:
                write_note(found.node, frozen="exported")
        before = {site.node: _spelled(site) for site in sites}
        for site, reason in Switch(draft).to_eval(filter(_trains, sites)):
            if reason:
                declined.append(_declined(site, reason))
            else:
                edits.append(Edit(site.name, site.module, before[site.node], f"{site.node.target} (eval)"))
        for drawing in random:
            if drawing.training:
                stop(drawing)
                edits.append(Edit(drawing.name, drawing.module, *_modes(drawing, "train", "eval")))

    def _start(self, draft: Draft, edits: list[Edit], declined: list[Declined]) -> None:
        random, switch = self._random(draft.graphs), Switch(draft)
        trains = is_training(list(find_sites(draft.graphs)), random)
        for site in find_sites(draft.graphs):
            if not _evaluates(site) or not self._starts(site.node, trains):
                continue
            before = _spelled(site)
            if reason := switch.to_train(site):
                declined.append(_declined(site, reason))
            else:
                edits.append(Edit(site.name, site.module, before, f"{site.node.target} (train)"))
        for quiet in random:
            if quiet.training is not False or not self._starts(quiet.node, trains):
                continue
            if reason := start(quiet, quiet.node.graph):
                declined.append(Declined(quiet.name, quiet.module, str(quiet.node.target), reason))
            else:
                edits.append(Edit(quiet.name, quiet.module, *_modes(quiet, "eval", "train")))
        if edits:  # what is in eval now is so inside a program that trains, which says it all
            _forget(draft)

    def _starts(self, node: Any, trains: bool) -> bool:
        """Whether a node in eval is to train: not when it is frozen, said so or by being alone."""
        note = note_of(node)
        frozen = "frozen" in note or (trains and "train" not in note)
        return self.include_frozen or not frozen


def switch_mode(
    program: Any, to: str, *, dropout: bool = True, include_frozen: bool = False, inplace: bool = False
) -> Any:
    """Returns the program as it would have been exported from `model.eval()` or `model.train()`. Arguments as
    `SwitchMode`, which also tells what was edited and declined.

    eps, momentum, names and metadata stay; the counter of a batch norm goes and comes with its training, its mutation
    outputs too. To eval and back to train gives the graph it was, node for node, also when it was saved in between.

    Raises: InvalidChoice for another mode, InvalidProgram for anything else than a program.

    >>> exported = torch.export.export(torch.nn.BatchNorm1d(3, eps=1e-3), (torch.randn(2, 3),))
    >>> [str(n.args[5:8]) for n in switch_mode(exported, "eval").graph.nodes if "batch_norm" in str(n.target)]
    ['(False, 0.1, 0.001)']
    """
    return SwitchMode(to, dropout, include_frozen, inplace)(program).program


def is_training(sites: list[Site], random: list[Random]) -> bool:
    """Whether a program trains: a batch norm with running statistics does, or something draws random numbers."""
    return any(map(_trains, sites)) or any(r.training for r in random)


def _tracks(site: Site) -> bool:
    return site.norm is not None and site.norm.running_mean is not None


def _trains(site: Site) -> bool:
    return _tracks(site) and site.norm.training is True


def _evaluates(site: Site) -> bool:
    return _tracks(site) and site.norm.training is False


def _unknown(site: Site) -> bool:
    return bool(site.problem) and not (_trains(site) or _evaluates(site))


def _declined(site: Site, reason: str) -> Declined:
    return Declined(site.name, site.module, site.form.name, reason)


def _spelled(site: Site) -> str:
    return f"{site.form.name} ({'train' if site.norm is not None and site.norm.training is True else 'eval'})"


def _modes(random: Random, before: str, after: str) -> tuple[str, str]:
    return f"{random.node.target} ({before})", f"{random.node.target} ({after})"


def _forget(draft: Draft) -> None:
    """Drops the marks of what was found frozen; those that were asked for stay."""
    for found in (*find_sites(draft.graphs), *find_random(draft.graphs)):
        if note_of(found.node).get("frozen") == "exported":
            forget(found.node, "frozen")
