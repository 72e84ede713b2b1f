"""Freeze and Unfreeze: chosen batch norms use their running statistics for good, whatever the program's mode."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, ClassVar

from torch.fx import Node

from ...errors import InvalidChoice
from ..graph.draft import Draft
from ..graph.nest import graphs_of, state_names
from ..graph.options import NO_FLAG, Command, Keeps, flag
from ..graph.result import Log, Program, Reason, Result
from ..rewriting.notes import forget, note_of, write_note
from ..rewriting.site import Site, find_sites, read_site
from ..rewriting.tracked import root_of
from ..rewriting.trains import find_random, is_frozen, is_training
from .flipping import Switch, attach, detach, learning


@dataclass(frozen=True)
class Freeze:
    """Puts the batch norms of chosen modules in eval, where they stay: `SwitchMode` leaves them out.

    modules: a glob on the module path, or several: `*` is any text, dots too. affine: also stop the gradients of weight
    and bias, which else still learn. inplace: edit the given program.
    """

    command: ClassVar[Command] = Command("freeze", "--modules 'backbone.*' -o frozen.pt2", Keeps.MEANING)

    modules: str | Sequence[str] = field(default="*", metadata=flag("--modules", "-m"))
    affine: bool = False
    inplace: bool = field(default=False, metadata=NO_FLAG)

    def __call__(self, program: Program) -> Result:
        """Freezes in an ExportedProgram or a GraphModule, nested graphs included.

        Raises: InvalidChoice when a glob matches no batch norm with running statistics, InvalidProgram for anything
        else than a program.
        """
        # By name, as the nodes of a draft are copies under the same names. A draft copies the graphs: whether there is
        # anything to do is told from the program itself.
        names = chosen_sites(program, self.modules)
        if not any(self._wanted(site) for site in find_sites(graphs_of(program)) if site.name in names):
            return Result(program)
        draft, log = Draft(program, self.inplace), Log()
        switch, sites = Switch(draft), list(find_sites(draft.graphs))
        chosen = [site for site in sites if site.name in names and self._wanted(site)]
        # ahead of the switch, so that a site that cannot have all that was asked for is left in training
        refused = {s.node: reason for s in chosen if (reason := self._refuse_affine(switch, s))}
        # all sites, not the chosen ones: which add is whose counter is told by their order
        refused |= switch.to_eval(sites, {site.node for site in chosen if site.node not in refused})
        for site in chosen:
            if reason := refused.get(site.node, Reason()):
                log.decline(site, reason)
            else:
                self._freeze(site, log)
        return log.result(draft.build() if log.edits else program)

    def _freeze(self, site: Site, log: Log) -> None:
        # behind the switch, which drops this mark; its other note stays, and says how the site trains when unfrozen
        write_note(site.node, frozen="asked")
        # read anew: the switch may have made it a call of another overload
        stopped = self.affine and detach(read_site(site.node, site.path))
        what = "frozen, weight and bias too" if stopped else "frozen"
        log.edit(site, site.form.name, f"{site.node.target} ({what})")

    def _wanted(self, site: Site) -> bool:
        # found frozen ("exported") is so only until the program trains again: then it has to be asked for
        asked = note_of(site.node).get("frozen") == "asked"
        return not asked or site.norm.training is True or (self.affine and bool(learning(site)))

    def _refuse_affine(self, switch: Switch, site: Site) -> Reason:
        """Why weight and bias cannot be cut off from their gradients, empty when they can, or need not."""
        # in a joint graph they were computed when it was traced: a detach would stop nothing
        if self.affine and switch.gradients.get(site.node):
            text = "the gradients of its weight and bias are in the graph, which hands them out"
            return Reason(text, "freeze it without affine")
        return Reason()


@dataclass(frozen=True)
class Unfreeze:
    """Lets the batch norms of chosen modules follow the program's mode again, and their weights learn.

    modules: a glob on the module path, or several, as in `Freeze`. inplace: edit the given program.

    In a program that trains they train from now on.
    """

    command: ClassVar[Command] = Command("unfreeze", "--modules 'backbone.*' -o model.pt2", Keeps.MEANING)

    modules: str | Sequence[str] = field(default="*", metadata=flag("--modules", "-m"))
    inplace: bool = field(default=False, metadata=NO_FLAG)

    def __call__(self, program: Program) -> Result:
        """Unfreezes in an ExportedProgram or a GraphModule, nested graphs included.

        Raises: InvalidChoice when a glob matches no batch norm with running statistics, InvalidProgram for anything
        else than a program.
        """
        names = chosen_sites(program, self.modules)
        # asked of the untouched program: what is unfrozen first would answer for the others
        trains = _trains(program, names)
        sites = (site for site in find_sites(graphs_of(program)) if site.name in names)
        wanted = {s.name for s in sites if s.norm.training is False and is_frozen(s.node, trains)}
        if not wanted:
            return Result(program)
        draft, log = Draft(program, self.inplace), Log()
        switch = Switch(draft)
        # the first one first, each read when it is reached: see Switch
        for site in find_sites(draft.graphs):
            if site.name not in wanted:
                continue
            if reason := switch.to_train(site) if trains else "":
                log.decline(site, reason)
                continue
            attach(read_site(site.node, site.path))
            forget(site.node, "frozen")
            log.edit(site, f"{site.form.name} (frozen)", f"{site.node.target} ({'train' if trains else 'eval'})")
        return log.result(draft.build() if log.edits else program)


def freeze(program: Any, modules: str | Sequence[str] = "*", *, affine: bool = False, inplace: bool = False) -> Any:
    """Returns the program with the chosen batch norms on their running statistics for good; arguments as `Freeze`.

    Raises: InvalidChoice, naming those that come close, when a glob matches none; InvalidProgram for anything else
    than a program.

    >>> net = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.BatchNorm1d(3))
    >>> frozen = freeze(torch.export.export(net, (torch.randn(2, 3),)), modules="0")
    >>> [n.args[5] for n in frozen.graph.nodes if "batch_norm" in str(n.target)]
    [False, True]
    """
    return Freeze(modules, affine, inplace)(program).program


def unfreeze(program: Any, modules: str | Sequence[str] = "*", *, inplace: bool = False) -> Any:
    """Returns the program with the chosen batch norms in its own mode again; arguments as `Unfreeze`.

    Raises: InvalidChoice, naming those that come close, when a glob matches none; InvalidProgram for anything else
    than a program.

    >>> exported = torch.export.export(torch.nn.BatchNorm1d(3), (torch.randn(2, 3),))
    >>> [n.args[5] for n in unfreeze(freeze(exported)).graph.nodes if "batch_norm" in str(n.target)]
    [True]
    """
    return Unfreeze(modules, inplace)(program).program


def chosen_sites(program: Program, modules: str | Sequence[str]) -> set[str]:
    """The names of the sites whose module a glob matches, among those with running statistics.

    Raises: InvalidChoice when a glob matches none.
    """
    if not isinstance(modules, Iterable) or not all(isinstance(glob, str) for glob in modules):
        raise InvalidChoice(f"found modules={modules!r}, expected a glob of module paths, or several")
    # text is an iterable of text as well, each letter a glob
    globs = [modules] if isinstance(modules, str) else list(modules)
    outside = state_names(program)
    paths = {s.name: _paths(s, outside) for s in find_sites(graphs_of(program)) if s.tracks}
    found: set[str] = set()
    for glob in globs:
        # not fnmatch(), which folds case on some systems: a glob means the same modules everywhere
        matching = {name for name, known in paths.items() if any(fnmatchcase(path, glob) for path in known)}
        if not matching:
            raise InvalidChoice(_unmatched(glob, paths.values()))
        found |= matching
    return found


def _paths(site: Site, outside: dict[Node, str]) -> set[str]:
    """The module paths of a site: as it was traced, and where its statistics live."""
    # Joint graphs and graphs written by hand do not say of a node which module it is of: their state has names.
    state = outside.get(root_of(site.norm.running_mean), "").rpartition(".")[0]
    return {site.owner, state} - {""} or {""}  # of a batch norm that is the program itself: "*" matches it


def _unmatched(glob: str, paths: Iterable[set[str]]) -> str:
    known = sorted({path for several in paths for path in several})
    close = get_close_matches(glob, known, n=5, cutoff=0.4) or known[:5]
    listed = ", ".join(close) + (", ..." if len(known) > len(close) else "")
    expected = f"expected a glob of module paths such as {listed}" if known else "and the program has none"
    return f"found modules={glob!r}, which matches no batch norm with running statistics, {expected}"


def _trains(program: Program, names: set[str]) -> bool:
    """Whether the program trains, by what is not chosen; where there is nothing else, by what the chosen ones did."""
    graphs = graphs_of(program)
    sites = [site for site in find_sites(graphs) if site.tracks]
    # others that nobody froze, and what draws, are in the program's own mode: they tell it, whichever it is
    others = [s for s in sites if s.name not in names and "frozen" not in note_of(s.node)]
    random = [r for r in find_random(graphs) if r.training is not None]
    if (trains := is_training(sites, random)) or others or random:
        return trains
    return any("train" in note_of(site.node) for site in sites if site.name in names)
