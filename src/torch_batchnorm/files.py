"""Reading and writing .pt2 files: every mistake is one clear error, and nothing is lost on the way."""

from __future__ import annotations

import logging
import os
import tempfile
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.export import ExportedProgram

from torch_batchnorm.errors import InvalidOutput, InvalidProgram


def load(path: Path) -> ExportedProgram:
    """The exported program in a .pt2 file.

    Raises: InvalidProgram when the file is missing, is no .pt2 archive, or its content cannot be read as a program.
    """
    if not path.is_file():
        found = "a folder" if path.is_dir() else "nothing"
        raise InvalidProgram(f"{path}: found {found}, expected a .pt2 file written by torch.export.save")
    if not zipfile.is_zipfile(path):
        raise InvalidProgram(f"{path}: found no archive, expected a .pt2 file written by torch.export.save")
    with _quiet():
        try:
            loaded = torch.export.load(path)
        except Exception as error:  # torch raises whatever it trips over: zip, pickle, schema, key, runtime errors
            said = (str(error).strip().splitlines() or ["no message"])[0][:200]
            raise InvalidProgram(
                f"{path}: found an archive that torch.export.load cannot read ({type(error).__name__}: {said}), "
                "expected a .pt2 file written by torch.export.save: export and save it again"
            ) from error
    return loaded


def check_output(source: Path, path: Path) -> None:
    """Raises InvalidOutput, before any work is done, when `path` cannot be written or is the file that was read."""
    if path.exists() and source.exists() and path.samefile(source):
        raise InvalidOutput(f"{path}: the output is the input, expected another path: nothing is overwritten")
    if path.is_dir():
        raise InvalidOutput(f"{path}: found a folder, expected the path of a file to write")
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise InvalidOutput(f"{path}: its folder does not exist or cannot be written: create it, or choose another")


def save(program: ExportedProgram, path: Path) -> None:
    """Saves a program under `path`: written to a temporary file beside it, then moved into place.

    Raises: InvalidOutput when the file cannot be written; what was there before is then untouched.
    """
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.stem}-", suffix=".pt2", dir=path.parent)
        os.close(handle)
        try:
            with _quiet():
                torch.export.save(program, name)
            os.chmod(name, 0o666 & ~_umask())
            os.replace(name, path)
        finally:
            Path(name).unlink(missing_ok=True)
    except OSError as error:
        raise InvalidOutput(f"{path}: cannot be written ({error.strerror or error}): choose another path") from error


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


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
