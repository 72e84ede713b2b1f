"""What a pass takes and gives: a program, what it edited, what it declined and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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
    """One site left as it was: its name, its module path, its overload and the reason."""

    site: str
    module: str
    form: str
    reason: str


@dataclass(frozen=True)
class Result:
    """What a pass did. It answers as torch.fx's PassResult too, so that a pass drops into a PassManager."""

    program: Program
    edits: tuple[Edit, ...] = ()
    declined: tuple[Declined, ...] = ()

    @property
    def modified(self) -> bool:
        """Whether anything changed: a second run of the same pass says False."""
        return bool(self.edits)

    @property
    def graph_module(self) -> GraphModule:
        """The program's top graph module."""
        return top_module(self.program)


def top_module(program: Program) -> GraphModule:
    """The program's top graph module.

    Raises: InvalidProgram for anything but an ExportedProgram or a GraphModule.
    """
    top: Any = program.graph_module if isinstance(program, ExportedProgram) else program
    if isinstance(top, GraphModule):
        return top
    found = f"{type(program).__module__}.{type(program).__qualname__}"
    raise InvalidProgram(
        f"found a {found}, expected an ExportedProgram or a GraphModule: export it first (torch.export.export)"
    )
