"""Reading and writing .pt2 files, reading inputs: every mistake is one clear error, and nothing is lost on the way."""

from __future__ import annotations

import logging
import os
import re
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.utils._pytree import tree_flatten, tree_unflatten

from torch_batchnorm.errors import InvalidChoice, InvalidOutput, InvalidProgram


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
            # torch.export.load fills in those extra files alone that it is asked for by name
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


def load_batches(path: Path, batch_size: int | None = None) -> list[Any]:
    """The inputs of a program in a file: one batch, or several.

    path: a .pt file of a tensor, a tuple of them, a dict by input name or a list of batches; a .npz or .safetensors
    file, whose names are the inputs' (`arr_0`, ... go by position). batch_size: split every batch along its first
    dimension.

    Raises: InvalidChoice when the file cannot be read as that, or a batch cannot be split.
    """
    if not path.is_file():
        raise InvalidChoice(f"{path}: found no file, expected one of inputs: .pt, .npz or .safetensors")
    # by suffix, not by content: a .pt and a .npz are both zip archives
    if path.suffix not in _READERS:
        raise InvalidChoice(f"{path}: found {path.suffix or 'no suffix'}, expected {', '.join(_READERS)}")
    try:
        found = _READERS[path.suffix](path)
    except ImportError as error:
        raise InvalidChoice(f"{path}: found no {error.name}, which reads it: install it, or save a .pt") from error
    except Exception as error:  # torch, numpy and safetensors each raise their own
        said = (str(error).strip().splitlines() or ["no message"])[0][:200]
        raise InvalidChoice(f"{path}: found a file that cannot be read as inputs ({said})") from error
    batches = found if isinstance(found, list) else [found]
    if batch_size is None:
        return batches
    return [part for batch in batches for part in _split(batch, batch_size, path)]


def _read_npz(path: Path) -> Any:
    # here, as neither is a dependency: who has no such files needs no such package
    import numpy

    with numpy.load(path) as archive:
        tensors = {name: torch.from_numpy(archive[name]) for name in archive.files}
    unnamed = all(re.fullmatch(r"arr_\d+", name) for name in tensors)
    return tuple(tensors.values()) if unnamed else tensors


def _read_safetensors(path: Path) -> Any:
    from safetensors.torch import load_file

    return load_file(path)


_READERS: dict[str, Callable[[Path], Any]] = {
    # pickles run code; tensors and containers of them do not need one
    ".pt": lambda path: torch.load(path, weights_only=True, map_location="cpu"),
    ".npz": _read_npz,
    ".safetensors": _read_safetensors,
}


def _split(batch: Any, size: int, path: Path) -> list[Any]:
    """A batch as batches of this size along the first dimension of each tensor; the last one may be smaller."""
    leaves, spec = tree_flatten(batch)
    lengths = {leaf.shape[0] for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.ndim}
    dense = all(isinstance(leaf, torch.Tensor) and leaf.ndim and leaf.layout is torch.strided for leaf in leaves)
    if len(lengths) != 1 or not dense or size < 1:
        found = f"lengths {sorted(lengths)}" if lengths else "no tensor to split"
        raise InvalidChoice(f"{path}: found {found}, expected tensors of one length to split into batches of {size}")
    (length,) = lengths
    starts = range(0, length, size)
    return [tree_unflatten([leaf[start : start + size] for leaf in leaves], spec) for start in starts]


def check_output(source: Path, path: Path) -> None:
    """Raises InvalidOutput, before any work is done, when `path` cannot be written or is the file that was read."""
    # samefile: links and relative paths are the same file under other names
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
    # os.replace would replace the link itself
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
    # `disable` is the one switch for all of torch's loggers, which have levels of their own
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
