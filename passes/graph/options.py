"""What a pass says of itself, from its class alone: a command, what it keeps, and an option for each field.

The command line, the reference page and the contract tests are made from this.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from enum import Enum
from typing import Any, ClassVar, Protocol, get_type_hints

from .result import Result


class Keeps(Enum):
    """What a pass leaves of the numbers that a program computes."""

    BITS = "kept to the bit"
    ROUNDING = "kept up to rounding"
    MEANING = "changed with the mode or the statistics"


@dataclass(frozen=True)
class Command:
    """How a pass is called on the command line.

    name: the command's. example: what follows the input file. keeps: what it leaves of the numbers. data: whether a
    call takes data beside the program, so that its command is written by hand.
    """

    name: str
    example: str
    keeps: Keeps
    data: bool = False


class Pass(Protocol):
    """A frozen dataclass whose fields are its options, called on a program and, where its command says so, data."""

    command: ClassVar[Command]
    __dataclass_fields__: ClassVar[dict[str, Any]]

    def __call__(self, program: Any, *data: Any) -> Result: ...


# The metadata of a field that is for Python alone, such as `inplace`: a command writes another file.
NO_FLAG: Mapping[str, Any] = {"flags": ()}


def flag(*names: str, choices: Mapping[str, str] | Iterable[str] = ()) -> Mapping[str, Any]:
    """The metadata of a field: its flags, where they are not made of its name; and the values that it takes, with their
    meanings where those are to be told.
    """
    told = choices if isinstance(choices, Mapping) else dict.fromkeys(choices, "")
    return {"choices": told, **({"flags": names} if names else {})}


@dataclass(frozen=True)
class Option:
    """A field of a pass as an option: what it is called in Python and as flags, none of which is for Python alone.

    type: its annotation. default: MISSING where it has to be given. help: its part of the docstring, and its choices.
    """

    name: str
    flags: tuple[str, ...]
    type: Any
    default: Any
    choices: Mapping[str, str]
    help: str


def options_of(made: type[Pass]) -> tuple[Option, ...]:
    """The options of a pass, a field each: `clone_calls` is `--clone-calls`, and what is on by default has a `--no-`.

    Raises: KeyError naming a field that the docstring does not describe.
    """
    types, described = get_type_hints(made), _described(made)  # fields hold annotations as text
    found = []
    for field in fields(made):
        dashed, choices = field.name.replace("_", "-"), field.metadata.get("choices", {})
        # typer cannot turn an option off that is on by default unless it is told the flag for it
        flags = field.metadata.get("flags", (f"--{dashed}/--no-{dashed}" if field.default is True else f"--{dashed}",))
        listed = ", ".join(f"{name} ({meaning})" if meaning else name for name, meaning in choices.items())
        # a KeyError here is meant: an option that nobody describes would be one without help
        text = described[field.name] + (f" One of {listed}." if any(choices.values()) else "")
        default = field.default if field.default_factory is MISSING else field.default_factory()
        found.append(Option(field.name, tuple(flags), types[field.name], default, choices, text))
    return tuple(found)


def summary_of(made: type[Pass]) -> str:
    """What a pass does: the first paragraph of its docstring."""
    return _paragraphs(made)[0]


def notes_of(made: type[Pass]) -> list[str]:
    """What else there is to know of a pass: the paragraphs that describe no field."""
    return [told for told in _paragraphs(made)[1:] if told.partition(": ")[0] not in made.__dataclass_fields__]


def verb_of(made: type[Pass]) -> str:
    """The function that applies a pass: named as its class, in words, and beside it.

    >>> from torch_batchnorm.passes.modes.switching import SwitchMode
    >>> verb_of(SwitchMode)
    'switch_mode'
    """
    return re.sub(r"(?<!^)(?=[A-Z])", "_", made.__name__).lower()


def _described(made: type[Pass]) -> dict[str, str]:
    """What the docstring says of each field, in the paragraphs that begin with one: `target: the consumer. ...`"""
    names = "|".join(field.name for field in fields(made))
    found: dict[str, str] = {}
    for paragraph in _paragraphs(made):
        # a paragraph may tell of several fields; one that begins with none is about the pass
        before, *parts = re.split(rf"(?:^| )({names}): ", paragraph)
        if not before:
            found |= {name: text[:1].upper() + text[1:] for name, text in zip(parts[::2], parts[1::2], strict=True)}
    return found


def _paragraphs(made: type[Pass]) -> list[str]:
    """The docstring of a pass, a line a paragraph."""
    return [" ".join(paragraph.split()) for paragraph in (inspect.getdoc(made) or "").split("\n\n")]
