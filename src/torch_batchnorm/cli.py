"""The command line: what the library does, on .pt2 files."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import MISSING, replace
from functools import partial
from importlib.metadata import version
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import track

from torch_batchnorm.errors import BatchNormError
from torch_batchnorm.files import check_output, load, load_batches, save
from torch_batchnorm.inspection import diff, inspect
from torch_batchnorm.passes import PASSES
from torch_batchnorm.passes.graph.options import Option, Pass, options_of, summary_of
from torch_batchnorm.passes.graph.result import Result
from torch_batchnorm.passes.modes.recalibration import Recalibrate
from torch_batchnorm.passes.rewriting.verification import verify
from torch_batchnorm.tables import result_tables, why

app = typer.Typer(
    help="Batch norm in exported PyTorch programs (.pt2). Exit code: 0 done, 1 a site was declined under --strict, "
    "verify found a violation, or two programs differ, 2 bad input.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


# Standard output is for what was asked for: it may be piped, and JSON is read from it.
_progress = Console(stderr=True)


def _out() -> Console:
    """Standard output, wide enough for a table when it is not a terminal."""
    # rich takes 80 columns where there is no terminal, and folds names in the middle
    return Console(width=None if sys.stdout.isatty() else 160, highlight=False)


@contextmanager
def _step(doing: str) -> Iterator[None]:
    """Shows what is being done, if anything is said; a mistake of the user's ends the program with one line and exit
    code 2.
    """
    try:
        # rich reads brackets as markup, and paths have some
        with _progress.status(escape(doing)) if doing else nullcontext():
            yield
    except BatchNormError as error:
        typer.echo(f"torch-batchnorm: {error}", err=True)
        # a traceback is for a mistake of ours: those are not caught
        raise typer.Exit(2) from None


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"torch-batchnorm {version('torch-batchnorm')}")
        raise typer.Exit


@app.callback()
def _main(
    shown: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None: ...


Source = Annotated[Path, typer.Argument(metavar="IN.pt2", help="A program written by torch.export.save.")]


@app.command("inspect", epilog="Example: torch-batchnorm inspect model.pt2")
def _inspect(
    source: Source,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    device: Annotated[
        str | None, typer.Option(help="Also tell the backend that each gets on this device (cuda, hip, ...), and why.")
    ] = None,
) -> None:
    """Lists every batch norm of a program: form, mode, shape, state, neighbours."""
    with _step(f"Loading {source}"):
        report = inspect(load(source).program, device)
    if json:
        # not through rich, which would wrap and colour it
        typer.echo(report.to_json())
    else:
        _out().print(report.table() if report.entries else report.summary())


Output = Annotated[Path, typer.Option("--output", "-o", metavar="OUT.pt2", help="Where to save the result.")]


ShowReport = Annotated[bool, typer.Option("--report", help="Print what was rewritten and what was declined.")]


Strict = Annotated[bool, typer.Option("--strict", help="Exit 1, saving nothing, when a site is declined.")]


def _rewrite(source: Path, output: Path, report: bool, strict: bool, doing: str, run: Callable[..., Result]) -> None:
    """Loads a program, runs a pass on it, tells what it did, saves the result."""
    with _step(f"Loading {source}"):
        check_output(source, output)
        loaded = load(source)
    with _step(doing):
        result = run(loaded.program)
    # Before a refusal under --strict, so that it can be read why.
    if report:
        for table in result_tables(result):
            _out().print(table)
    # ahead of saving, so that a script finds no file that is half of what it asked for
    if strict and result.declined:
        first = result.declined[0]
        typer.echo(f"torch-batchnorm: {len(result.declined)} declined: {first.site}: {why(first)}", err=True)
        raise typer.Exit(1)
    with _step(f"Saving {output}"):
        save(replace(loaded, program=result.program), output)  # type: ignore[arg-type]
    typer.echo(f"{len(result.edits)} rewritten, {len(result.declined)} declined: {output}")


def _parameter(option: Option) -> Parameter:
    """An option of a pass as a parameter that typer makes a flag of."""
    kind, default = option.type, ... if option.default is MISSING else option.default
    if Sequence in {get_origin(part) for part in get_args(kind)}:  # one or several in Python: a flag to repeat
        kind, default = list[str], [default]
    shown: Any = typer.Option(default, *option.flags, help=escape(option.help))
    return Parameter(option.name, Parameter.KEYWORD_ONLY, default=shown, annotation=kind)


def _command(made: type[Pass]) -> Callable[[Callable[..., None]], None]:
    """Makes a function the command of a pass. It ends in `report, strict, **options`: the fields are the options."""

    def add(function: Callable[..., None]) -> None:
        # annotations are text in this module (from __future__), and typer wants types
        *asked, report, strict, _ = signature(function, eval_str=True).parameters.values()
        asked += [*(_parameter(option) for option in options_of(made) if option.flags), report, strict]
        # typer reads what a command takes from here, and calls it with all of it by keyword
        vars(function)["__signature__"] = Signature([p.replace(kind=p.KEYWORD_ONLY) for p in asked])
        function.__annotations__ = {p.name: p.annotation for p in asked}
        command = made.command
        epilog = f"Example: torch-batchnorm {command.name} model.pt2 {command.example}"
        app.command(command.name, help=escape(summary_of(made)), epilog=escape(epilog))(function)

    return add


def _add(made: type[Pass]) -> None:
    """Adds the command of a pass that takes a program and nothing else."""

    @_command(made)
    def run(source: Source, output: Output, report: ShowReport = False, strict: Strict = False, **options: Any) -> None:
        _rewrite(source, output, report, strict, f"Running {made.command.name}", made(**options))


for _made in PASSES:
    if not _made.command.data:  # those that take data are written below
        _add(_made)


@_command(Recalibrate)
def _recalibrate(
    source: Source,
    output: Output,
    data: Annotated[Path, typer.Option(help="Inputs by name: a .pt, .npz or .safetensors file.")],
    batch_size: Annotated[int | None, typer.Option(min=1, help="Split the inputs along their first dimension.")] = None,
    report: ShowReport = False,
    strict: Strict = False,
    **options: Any,
) -> None:
    with _step(f"Loading {data}"):
        check_output(data, output)
        batches = load_batches(data, batch_size)
    quiet = not _progress.is_terminal
    shown = partial(track, description="Recalibrating", console=_progress, transient=True, disable=quiet)
    run = Recalibrate(**options, progress=shown)
    _rewrite(source, output, report, strict, "", lambda program: run(program, batches))


@app.command("verify", epilog="Example: torch-batchnorm verify model.pt2")
def _verify(source: Source) -> None:
    """Checks a program and its batch norms: prints each violation, and exits 1 when there is one."""
    with _step(f"Loading {source}"):
        found = verify(load(source).program)
    typer.echo("\n".join(found) or "no violation")
    if found:
        raise typer.Exit(1)


@app.command("diff", epilog="Example: torch-batchnorm diff model.pt2 consolidated.pt2")
def _diff(
    left: Source,
    right: Annotated[Path, typer.Argument(metavar="OTHER.pt2", help="The program to compare it with.")],
) -> None:
    """Shows the batch norms of two programs side by side; exits 1 when they differ."""
    reports = []
    # one after the other: a report holds no program, and two of them may not fit
    for path in (left, right):
        with _step(f"Loading {path}"):
            reports.append(inspect(load(path).program))
    found = diff(*reports)
    _out().print(found.table())
    if found.differing:
        raise typer.Exit(1)


def main() -> None:
    """The console script `torch-batchnorm`."""
    app()
