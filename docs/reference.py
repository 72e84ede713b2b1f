"""Writes docs/REFERENCE.md from the rows, the passes and their docstrings: `make docs`."""

import inspect
from collections.abc import Iterable, Iterator
from dataclasses import MISSING
from pathlib import Path
from typing import Any

import typer

import torch_batchnorm as tbn
from torch_batchnorm.cli import app
from torch_batchnorm.decomps.forms import GRADIENTS
from torch_batchnorm.decomps.layers import LAYERS
from torch_batchnorm.passes import PASSES
from torch_batchnorm.passes.graph.options import Option, Pass, notes_of, options_of, summary_of, verb_of

PAGE = Path(__file__).parent / "REFERENCE.md"


def page() -> str:
    """The whole page."""
    parts = [
        ["# Reference", "Made from the code by `make docs`; a test compares it. `import torch_batchnorm as tbn`."],
        [
            "## Passes",
            "A verb returns the program; its pass, a frozen dataclass, also tells what was edited and declined.",
        ],
        *(_pass(made) for made in PASSES),
        ["## Commands", *_commands()],
        ["## Targets", "What `legalize` writes.", *_targets()],
        [
            "## Batch norms",
            "One row of `FORMS` for each overload that is read and written, then the gradients.",
            *_forms(),
        ],
        [
            "## Layers",
            "What a batch norm is folded into.",
            *_table(["overload"], [[f"`{f.overload}`"] for f in LAYERS]),
        ],
        ["## Everything else", *_names()],
    ]
    return "\n\n".join("\n\n".join(part) for part in parts) + "\n"


def _pass(made: type[Pass]) -> Iterator[str]:
    verb, command = verb_of(made), made.command
    yield f"### {verb}"
    yield summary_of(made)
    yield (
        f"`tbn.{verb}`, `tbn.{made.__name__}`, `torch-batchnorm {command.name} model.pt2 {command.example}`. "
        f"Numbers are {command.keeps.value}."
    )
    rows = [[f"`{o.name}`", _flags(o), _default(o), o.help] for o in options_of(made)]
    yield from _table(["option", "flag", "default", "meaning"], rows)
    yield from notes_of(made)


def _flags(option: Option) -> str:
    return ", ".join(f"`{flag}`" for flag in option.flags) or "-"


def _default(option: Option) -> str:
    return "required" if option.default is MISSING else f"`{option.default!r}`"


def _commands() -> Iterator[str]:
    commands = typer.main.get_command(app).commands.items()  # type: ignore[attr-defined]
    rows = [
        [f"`{name}`", _line(command.help), f"`{_line(command.epilog).partition(': ')[2]}`"]
        for name, command in commands
    ]
    yield from _table(["command", "what it does", "example"], rows)


def _targets() -> Iterator[str]:
    rows = [[f"`{name}`", target.meaning, target.dialect or "as it was"] for name, target in tbn.TARGETS.items()]
    yield from _table(["target", "for", "dialect of the program"], rows)


def _forms() -> Iterator[str]:
    rows = [
        [f"`{form.name}`", form.dialect.value, form.mode.value, form.statistics.value]
        for form in (*tbn.FORMS, *GRADIENTS)
    ]
    yield from _table(["overload", "dialect", "mode", "running statistics"], rows)


def _names() -> Iterator[str]:
    taken = {name for made in PASSES for name in (made.__name__, verb_of(made))}
    public = [name for name, value in vars(tbn).items() if not name.startswith("_") and name not in taken]
    shown = [name for name in sorted(public) if _is_ours(getattr(tbn, name))]
    yield from _table(
        ["name", "what it is"], [[f"`tbn.{name}`", _line(inspect.getdoc(getattr(tbn, name)))] for name in shown]
    )


def _is_ours(value: Any) -> bool:
    """Whether a public name is a class or a function, which says what it is."""
    return inspect.isclass(value) or inspect.isfunction(value)


def _line(text: str | None) -> str:
    """The first paragraph of a docstring in one line."""
    return " ".join((text or "").split("\n\n")[0].split())


def _table(columns: list[str], rows: Iterable[list[str]]) -> Iterator[str]:
    lines = [columns, ["---"] * len(columns), *rows]
    yield "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


if __name__ == "__main__":
    PAGE.write_text(page())
