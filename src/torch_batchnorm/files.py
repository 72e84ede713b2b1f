"""Reading and writing .pt2 files: every mistake is one clear error, and nothing is lost on the way."""

from __future__ import annotations

import logging
import os
import re
import tempfile
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram

from torch_batchnorm.errors import InvalidOutput, InvalidProgram


@dataclass(frozen=True)
class Loaded:
    """What a .pt2 file holds: the program, and the extra files that were saved beside it, by name."""

    program: ExportedProgram
    extra_files: dict[str, Any]


def load(path: Path) -> Loaded:
    """The exported program in a .pt2 file.

    Raises: InvalidProgram when the file is missing, is no .pt2 archive, its content cannot be read as a program, or it
    holds more than one program, which saving would lose.
    """
    if not path.is_file():
        found = "a folder" if path.is_dir() else "something that is no file" if path.exists() else "nothing"
        raise InvalidProgram(f"{path}: found {found}, expected a .pt2 file written by torch.export.save")
    if not zipfile.is_zipfile(path):
        raise InvalidProgram(f"{path}: found no archive, expected a .pt2 file written by torch.export.save")
    with _quiet():
        try:
            models, extra_files = _entries(path, r"models/(.+)\.json"), dict.fromkeys(_entries(path, "extra/(.+)"), "")
            if models and models != ["model"]:
                raise InvalidProgram(f"{path}: found programs named {', '.join(models)}, expected one named model")
            return Loaded(torch.export.load(path, extra_files=extra_files), extra_files)
        except InvalidProgram:
            raise
        except Exception as error:  # torch raises whatever it trips over: zip, pickle, schema, key, runtime errors
            said = (str(error).strip().splitlines() or ["no message"])[0][:200]
            raise InvalidProgram(
                f"{path}: found an archive that torch.export.load cannot read ({type(error).__name__}: {said}), "
                "expected a .pt2 file written by torch.export.save: export and save it again"
            ) from error


def check_output(source: Path, path: Path) -> None:
    """Raises InvalidOutput, before any work is done, when `path` cannot be written or is the file that was read."""
    if path.exists() and source.exists() and path.samefile(source):
        raise InvalidOutput(f"{path}: the output is the input, expected another path: nothing is overwritten")
    if path.exists() and not path.is_file():
        found = "a folder" if path.is_dir() else "a device or a pipe"
        raise InvalidOutput(f"{path}: found {found}, expected the path of a file to write")
    folder = path.resolve().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise InvalidOutput(f"{path}: its folder does not exist or cannot be written: create it, or choose another")


def save(loaded: Loaded, path: Path) -> None:
    """Saves a program under `path`: written to a temporary file beside it, then moved into place.

    A symbolic link stays, and what it points to is replaced.

    Raises: InvalidOutput when the file cannot be written; what was there before is then untouched.
    """
    place = path.resolve()
    try:
        # A folder, so that the file has its own name: torch writes it into the archive.
        with tempfile.TemporaryDirectory(prefix=".torch-batchnorm-", dir=place.parent) as folder:
            written = Path(folder) / place.name
            with _quiet():
                torch.export.save(loaded.program, written, extra_files=loaded.extra_files)
            os.replace(written, place)
    except OSError as error:
        raise InvalidOutput(f"{path}: cannot be written ({error.strerror or error}): choose another path") from error


def _entries(path: Path, pattern: str) -> list[str]:
    """The first group of every entry of an archive that matches, below the archive's own top folder."""
    with zipfile.ZipFile(path) as archive:
        found = (re.fullmatch(f"[^/]+/{pattern}", name) for name in archive.namelist())
        return [match[1] for match in found if match]


@contextmanager
def _quiet() -> Iterator[None]:
    """torch warns and logs about what is then raised, or about nothing a user of the command line can change."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
