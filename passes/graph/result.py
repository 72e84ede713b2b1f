"""What a pass takes and gives: a program, what it edited, what it declined and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch.export import ExportedProgram
from torch.fx import GraphModule

from ...errors import InvalidProgram

Program = ExportedProgram | GraphModule


@dataclass(frozen=True)
class Edit:
    """One rewritten site: its name, its module path, the overload it was and the one it is."""

    site: str
    module: str
    before: str
    after: str


@dataclass(frozen=True)
class Declined:
    """One site left as it was: its name, module path, overload, the reason, and what the user can do about it."""

    site: str
    module: str
    form: str
    reason: str
    remedy: str = ""


class Reason(str):
    """Why something is refused, empty where it is not. remedy: what the user can do about it, empty where nothing."""

    # a str, so that the first of several refusals is `a or b`, and a plain sentence is one that advises nothing
    remedy: str

    def __new__(cls, text: str = "", remedy: str = "") -> Reason:
        made = super().__new__(cls, text)
        made.remedy = remedy
        return made

    def inside(self, wider: str) -> Reason:
        """The same refusal in a wider sentence, which says `{}` where this one goes."""
        # the text is put in, never formatted: names of nodes and reprs may have braces
        return Reason(wider.format(str(self)), self.remedy)


class Named(Protocol):
    """What an edit or a refusal is of: its name in the graph, its module, and what it is spelled as."""

    @property
    def name(self) -> str: ...
    @property
    def module(self) -> str: ...
    @property
    def spelling(self) -> str: ...


class Subject(NamedTuple):
    """What a report is about where it is no site: the program as a whole, or what is not a batch norm yet."""

    name: str
    module: str = ""
    spelling: str = ""


PROGRAM = Subject("program")


class Log:
    """What a pass did and declined, in the order in which it said so."""

    def __init__(self) -> None:
        self.edits: list[Edit] = []
        self.declined: list[Declined] = []

    def edit(self, site: Named, before: str, after: str) -> None:
        """Something was rewritten."""
        self.edits.append(Edit(site.name, site.module, before, after))

    def decline(self, site: Named, reason: str) -> None:
        """Something was left as it was."""
        remedy = reason.remedy if isinstance(reason, Reason) else ""
        self.declined.append(Declined(site.name, site.module, site.spelling, str(reason), remedy))

    def result(self, program: Program) -> Result:
        """The result, with the program that came of it."""
        return Result(program, tuple(self.edits), tuple(self.declined))


@dataclass(frozen=True)
class Result:
    """What a pass did. It answers as torch.fx's PassResult too, so that a pass drops into a PassManager."""

    program: Program
    edits: tuple[Edit, ...] = ()
    declined: tuple[Declined, ...] = ()

    @property
    def modified(self) -> bool:
        """Whether anything changed: a second run of the same pass says False."""
        return bool(self.edits)  # by it torch's PassManager runs its passes again, up to its steps

    @property
    def graph_module(self) -> GraphModule:
        """The program's top graph module."""
        return top_module(self.program)


def top_module(program: Program) -> GraphModule:
    """The program's top graph module.

    Raises: InvalidProgram for anything but an ExportedProgram or a GraphModule.
    """
    # checked here though it is typed, as callers of a library hand in modules, paths, what they have
    top: Any = program.graph_module if isinstance(program, ExportedProgram) else program
    if isinstance(top, GraphModule):
        return top
    found = f"{type(program).__module__}.{type(program).__qualname__}"
    raise InvalidProgram(
        f"found a {found}, expected an ExportedProgram or a GraphModule: export it first (torch.export.export)"
    )
