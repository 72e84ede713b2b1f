"""The command line: what the library does, on .pt2 files."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from torch_batchnorm.errors import BatchNormError
from torch_batchnorm.files import check_output, load, load_batches, save
from torch_batchnorm.inspection import diff, inspect
from torch_batchnorm.passes.folding.fold import Fold
from torch_batchnorm.passes.graph.result import Program, Result
from torch_batchnorm.passes.modes.freezing import Freeze, Unfreeze
from torch_batchnorm.passes.modes.recalibration import Recalibrate
from torch_batchnorm.passes.modes.switching import SwitchMode
from torch_batchnorm.passes.rewriting.consolidation import Consolidate
from torch_batchnorm.passes.rewriting.legalization import Legalize
from torch_batchnorm.passes.rewriting.targets import TARGETS
from torch_batchnorm.tables import result_tables

app = typer.Typer(
    help="Batch norm in exported PyTorch programs (.pt2). Exit code: 0 done, 1 a site was declined under --strict "
    "or two programs differ, "
    "2 bad input.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


_progress = Console(stderr=True)


def _out() -> Console:
    """Standard output, wide enough for a table when it is not a terminal."""
    return Console(width=None if sys.stdout.isatty() else 160, highlight=False)


@contextmanager
def _step(doing: str) -> Iterator[None]:
    """Shows what is being done, if anything is said; a mistake of the user's ends the program with one line and exit
    code 2.
    """
    try:
        with _progress.status(escape(doing)) if doing else nullcontext():
            yield
    except BatchNormError as error:
        typer.echo(f"torch-batchnorm: {error}", err=True)
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
    """List every batch norm of a program: form, mode, shape, state, neighbours."""
    with _step(f"Loading {source}"):
        report = inspect(load(source).program, device)
    if json:
        typer.echo(report.to_json())
    else:
        _out().print(report.table() if report.entries else report.summary())


Output = Annotated[Path, typer.Option("--output", "-o", metavar="OUT.pt2", help="Where to save the result.")]


ShowReport = Annotated[bool, typer.Option("--report", help="Print what was rewritten and what was declined.")]


Strict = Annotated[bool, typer.Option("--strict", help="Exit 1, saving nothing, when a site is declined.")]


def _rewrite(
    source: Path, output: Path, report: bool, strict: bool, doing: str, rewriting: Callable[[Program], Result]
) -> None:
    """Loads a program, runs a pass, tells what it did, saves the result."""
    with _step(f"Loading {source}"):
        check_output(source, output)
        loaded = load(source)
    with _step(doing):
        result = rewriting(loaded.program)
    if report:
        for table in result_tables(result):
            _out().print(table)
    if strict and result.declined:
        first = result.declined[0]
        typer.echo(f"torch-batchnorm: {len(result.declined)} declined: {first.site}: {first.reason}", err=True)
        raise typer.Exit(1)
    with _step(f"Saving {output}"):
        save(replace(loaded, program=result.program), output)  # type: ignore[arg-type]
    typer.echo(f"{len(result.edits)} rewritten, {len(result.declined)} declined: {output}")


@app.command("consolidate", epilog="Example: torch-batchnorm consolidate model.pt2 -o consolidated.pt2 --report")
def _consolidate(source: Source, output: Output, report: ShowReport = False, strict: Strict = False) -> None:
    """Rewrite every batch norm into the op family whose kernel is chosen when the program runs."""
    _rewrite(source, output, report, strict, "Consolidating", Consolidate())


@app.command("legalize", epilog="Example: torch-batchnorm legalize model.pt2 --to core_aten -o core.pt2")
def _legalize(
    source: Source,
    output: Output,
    to: Annotated[str, typer.Option(help="; ".join(f"{name}: {t.meaning}" for name, t in TARGETS.items()))],
    cudnn_enabled: Annotated[bool, typer.Option(help="The argument that composite writes.")] = True,
    report: ShowReport = False,
    strict: Strict = False,
) -> None:
    """Rewrite every batch norm as one consumer takes it."""
    _rewrite(source, output, report, strict, f"Legalizing to {to}", Legalize(to, cudnn_enabled))


@app.command("mode", epilog="Example: torch-batchnorm mode model.pt2 --to eval -o eval.pt2")
def _mode(
    source: Source,
    output: Output,
    to: Annotated[str, typer.Option(help="eval or train.")],
    dropout: Annotated[bool, typer.Option(help="Switch dropout and the like too.")] = True,
    include_frozen: Annotated[bool, typer.Option("--include-frozen", help="To train also what is frozen.")] = False,
    report: ShowReport = False,
    strict: Strict = False,
) -> None:
    """Switch every batch norm and dropout to eval or to training, exactly."""
    _rewrite(source, output, report, strict, f"Switching to {to}", SwitchMode(to, dropout, include_frozen))


@app.command("fold", epilog="Example: torch-batchnorm fold model.pt2 -o folded.pt2 --report")
def _fold(
    source: Source,
    output: Output,
    alone: Annotated[
        str, typer.Option(help="What becomes of one without a layer to fold into: leave, multiply_add or depthwise.")
    ] = "leave",
    clone_calls: Annotated[
        bool, typer.Option("--clone-calls", help="Call a layer once more whose output something else reads.")
    ] = False,
    clone_weights: Annotated[
        bool, typer.Option("--clone-weights", help="Copy a weight that several calls read.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Fold also where rounding loses more than the limit, and what is frozen.")
    ] = False,
    keep_state: Annotated[
        bool, typer.Option("--keep-state", help="Leave the batch norms' own parameters and buffers in the program.")
    ] = False,
    float32_above: Annotated[
        int | None, typer.Option(min=0, help="Multiply weights of more elements in float32 instead of float64.")
    ] = None,
    report: ShowReport = False,
    strict: Strict = False,
) -> None:
    """Fold every batch norm in eval into the convolutions and linear maps beside it."""
    folding = Fold(clone_calls, clone_weights, alone, force, keep_state, float32_above)
    _rewrite(source, output, report, strict, "Folding", folding)


Modules = Annotated[
    list[str], typer.Option("--modules", "-m", help="A glob on module paths, '*' is any text; may be repeated.")
]


@app.command("freeze", epilog="Example: torch-batchnorm freeze model.pt2 --modules 'backbone.*' -o frozen.pt2")
def _freeze(
    source: Source,
    output: Output,
    modules: Modules,
    affine: Annotated[bool, typer.Option("--affine", help="Also stop the gradients of weight and bias.")] = False,
    report: ShowReport = False,
    strict: Strict = False,
) -> None:
    """Keep chosen batch norms on their running statistics, in training too."""
    _rewrite(source, output, report, strict, "Freezing", Freeze(modules, affine))


@app.command("unfreeze", epilog="Example: torch-batchnorm unfreeze frozen.pt2 --modules 'backbone.*' -o model.pt2")
def _unfreeze(
    source: Source, output: Output, modules: Modules, report: ShowReport = False, strict: Strict = False
) -> None:
    """Let chosen batch norms follow the program's mode again."""
    _rewrite(source, output, report, strict, "Unfreezing", Unfreeze(modules))


@app.command("recalibrate", epilog="Example: torch-batchnorm recalibrate model.pt2 --data inputs.npz -o precise.pt2")
def _recalibrate(
    source: Source,
    output: Output,
    data: Annotated[Path, typer.Option(help="Inputs by name: a .pt, .npz or .safetensors file.")],
    batch_size: Annotated[int | None, typer.Option(min=1, help="Split the inputs along their first dimension.")] = None,
    momentum: Annotated[float | None, typer.Option(help="Move the statistics by each batch, as training does.")] = None,
    method: Annotated[
        str, typer.Option(help="pooled: all values alike; cumulative: the mean of the batches' own statistics.")
    ] = "pooled",
    report: ShowReport = False,
    strict: Strict = False,
) -> None:
    """Estimate the running statistics anew over a file of inputs."""
    with _step(f"Loading {data}"):
        check_output(data, output)
        batches = load_batches(data, batch_size)

    def run(program: Program) -> Result:
        return Recalibrate(momentum, method)(program, batches)

    _rewrite(source, output, report, strict, "", run)


@app.command("diff", epilog="Example: torch-batchnorm diff model.pt2 consolidated.pt2")
def _diff(
    left: Source,
    right: Annotated[Path, typer.Argument(metavar="OTHER.pt2", help="The program to compare it with.")],
) -> None:
    """Show the batch norms of two programs side by side; exit 1 when they differ."""
    reports = []
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
