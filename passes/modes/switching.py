"""SwitchMode: a program as its model would be after `model.eval()` or `model.train()`, exactly, and back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, ClassVar

from torch.fx import Graph, Node

from ...decomps.counterparts import in_eval
from ...errors import InvalidChoice
from ..graph.draft import Draft
from ..graph.nest import graphs_of
from ..graph.options import NO_FLAG, Command, Keeps, flag
from ..graph.result import Log, Program, Result
from ..rewriting.notes import forget, note_of, write_note
from ..rewriting.site import Site, find_nodes, find_sites
from ..rewriting.trains import Random, find_random, is_frozen, is_training
from .dropouts import start, stop
from .flipping import Switch

MODES = ("eval", "train")

Graphs = list[tuple[str, Graph]]


@dataclass(frozen=True)
class SwitchMode:
    """Switches every batch norm and every dropout to eval or to training.

    to: "eval" or "train". dropout: switch dropout and the like too. include_frozen: to train also what is frozen.
    inplace: edit the given program.

    A batch norm without running statistics means the batch's own, and stays. What is in eval inside a program that
    trains is frozen: it stays in eval, through a round trip, saving and loading too.
    Source: pytorch#151726, pytorch#103681, ao#4107.
    """

    command: ClassVar[Command] = Command("mode", "--to eval -o eval.pt2", Keeps.MEANING)

    to: str = field(metadata=flag(choices=MODES))
    dropout: bool = True
    include_frozen: bool = False
    inplace: bool = field(default=False, metadata=NO_FLAG)

    def __call__(self, program: Program) -> Result:
        """Switches an ExportedProgram or a GraphModule, nested graphs included.

        Raises: InvalidChoice for another mode, InvalidProgram for anything else than a program.
        """
        if self.to not in MODES:
            raise InvalidChoice(f"found mode {self.to!r}, expected one of {', '.join(MODES)}")
        graphs, log = graphs_of(program), Log()
        # told from the program itself, as a draft copies its graphs
        if not self._wanted(graphs):
            _decline_unreadable(log, find_sites(graphs), self._random(graphs))
            return log.result(program)
        draft = Draft(program, self.inplace)
        (self._stop if self.to == "eval" else self._start)(draft, log)
        lint = self.to == "train"  # to eval, nodes only go, and their readers read what they were made of
        return log.result(draft.build(lint) if log.edits else program)

    def _wanted(self, graphs: Graphs) -> bool:
        """Whether anything is in the other mode: the first one found is enough."""
        if self.to == "eval":
            return any(map(_trains, find_sites(graphs))) or any(r.training for r in self._random(graphs))
        # dropout that is not to be switched says nothing of the batch norms either
        trains = is_training(find_sites(graphs), self._random(graphs))
        nodes = (site.node for site in find_sites(graphs) if _evaluates(site))
        quiet = (random.node for random in self._random(graphs) if random.training is False)
        return any(self._starts(node, trains) for node in chain(nodes, quiet))

    def _random(self, graphs: Graphs) -> list[Random]:
        return list(find_random(graphs)) if self.dropout else []

    def _stop(self, draft: Draft, log: Log) -> None:
        sites, random = list(find_sites(draft.graphs)), self._random(draft.graphs)
        _decline_unreadable(log, sites, random)
        refused = Switch(draft).to_eval(sites)
        for site in filter(_trains, sites):
            if reason := refused[site.node]:
                log.decline(site, reason)
            else:
                log.edit(site, f"{site.form.name} (train)", f"{in_eval(site.form).name} (eval)")
        for drawing in (r for r in random if r.training):
            stop(drawing)
            log.edit(drawing, f"{drawing.spelling} (train)", f"{drawing.spelling} (eval)")
        quiet = [site.node for site in sites if _evaluates(site)] + [r.node for r in random if r.training is False]
        # What was in eval while the program trained: when all is in eval, only a note tells it apart. An explicit
        # freeze has its own, and what was switched before says how it trains.
        for node in quiet if log.edits else ():
            if "train" not in (note := note_of(node)) and "frozen" not in note:
                write_note(node, frozen="exported")

    def _start(self, draft: Draft, log: Log) -> None:
        random, switch = self._random(draft.graphs), Switch(draft)
        _decline_unreadable(log, (), random)
        # asked before the first edit: what is started would make the rest frozen in a program that trains
        trains = is_training(find_sites(draft.graphs), random)
        # each read when it is reached: a site on the same buffer as an earlier one reads what that one now returns
        for site in find_sites(draft.graphs):
            _decline_unreadable(log, (site,), ())
            if not _evaluates(site) or not self._starts(site.node, trains):
                continue
            if reason := switch.to_train(site):
                log.decline(site, reason)
            else:
                log.edit(site, f"{site.form.name} (eval)", f"{site.node.target} (train)")
        for quiet in random:
            if quiet.training is not False or not self._starts(quiet.node, trains):
                continue
            if reason := start(quiet):
                log.decline(quiet, reason)
            else:
                log.edit(quiet, f"{quiet.spelling} (eval)", f"{quiet.spelling} (train)")
        if log.edits:  # what is in eval now is so inside a program that trains, which says it all
            _forget_exported(draft)

    def _starts(self, node: Node, trains: bool) -> bool:
        """Whether a node in eval is to train."""
        return self.include_frozen or not is_frozen(node, trains)


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


def _trains(site: Site) -> bool:
    return site.tracks and site.norm.training is True


def _evaluates(site: Site) -> bool:
    return site.tracks and site.norm.training is False


def _decline_unreadable(log: Log, sites: Iterable[Site], random: Iterable[Random]) -> None:
    """Declines what has no mode that could be told."""
    for site in sites:
        if site.problem and not _trains(site) and not _evaluates(site):
            log.decline(site, site.problem)
    # what draws in every mode is among them: eval leaves it drawing, and says so
    for draws in random:
        if draws.problem:
            log.decline(draws, draws.problem)


def _forget_exported(draft: Draft) -> None:
    """Drops the marks of what was found frozen; those that were asked for stay."""
    nodes = (*find_nodes(draft.graphs), *(random.node for random in find_random(draft.graphs)))
    for node in nodes:
        if note_of(node).get("frozen") == "exported":
            forget(node, "frozen")
