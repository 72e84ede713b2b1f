"""Consolidate a real ResNet-50: export, rewrite, train beside eager, decompose, save, load, run again.

Usage: python examples/quickstart.py (about half a minute on two cores). Exit code 1 when any comparison fails.
"""

from __future__ import annotations

import copy
import logging
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

import torch_batchnorm as tbn
from torch_batchnorm.tables import table

logging.disable(logging.WARNING)  # what transformers imports logs about its own optional parts
from transformers import ResNetConfig, ResNetForImageClassification  # noqa: E402

STEPS, BATCH, SHOWN = 6, 8, 4
console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
failures: list[str] = []


def show(title: str, rows: list[tuple[str, bool]]) -> None:
    """A table of comparisons, each of which has to hold to the bit."""
    failures.extend(what for what, holds in rows if not holds)
    console.print(table(title, ("compared", "equal to the bit"), [(w, "yes" if holds else "NO") for w, holds in rows]))


def same(a: Any, b: Any) -> bool:
    """Whether two dicts of tensors, or two tensors, are equal to the bit."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return a.dtype == b.dtype and torch.equal(a, b)


class Training:
    """A module that learns two classes of noise by SGD, a step at a time."""

    def __init__(self, module: Any, x: torch.Tensor, labels: torch.Tensor) -> None:
        self.module, self.x, self.labels = copy.deepcopy(module), x, labels
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.00002, momentum=0.9)
        self.losses: list[torch.Tensor] = []
        self.seconds: list[float] = []

    def step(self) -> None:
        start = time.perf_counter()
        self.optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(self.module(self.x).logits, self.labels)
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.detach())
        self.seconds.append(time.perf_counter() - start)

    @property
    def found(self) -> dict[str, Any]:
        """The losses, the gradients of the last step, and the statistics after it."""
        gradients = {n: p.grad for n, p in self.module.named_parameters() if p.grad is not None}
        buffers = dict(self.module.named_buffers())
        return {"losses": torch.stack(self.losses), "gradients": gradients, "running statistics": buffers}

    @property
    def row(self) -> tuple[str, str]:
        """The losses, and the time of a step: the first one warms up."""
        losses = " ".join(f"{loss:.4f}" for loss in self.losses)
        return losses, f"{1000 * statistics.median(self.seconds[1:]):.0f} ms"


def main() -> int:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:

        def step(doing: str, run: Callable[[], Any]) -> Any:
            task, start = progress.add_task(doing, total=1), time.perf_counter()
            result = run()
            progress.update(task, completed=1)
            console.print(f"{doing}: {time.perf_counter() - start:.2f} s")
            return result

        model = step("Building ResNet-50, random weights", lambda: ResNetForImageClassification(ResNetConfig()).train())
        labels = torch.arange(BATCH) % 2
        x = torch.randn(BATCH, 3, 64, 64)
        program = step("Exporting it in train mode", lambda: torch.export.export(model, (x,)))
        result = step("Consolidating", lambda: tbn.Consolidate()(program))

        before, after = (tbn.inspect(p) for p in (program, result.program))
        pairs = list(zip(before.entries, after.entries, strict=True))
        rows = [(_short(a.module), a.input, _short(a.form), _short(b.form)) for a, b in pairs[:SHOWN]]
        title = f"{len(pairs)} batch norms, the first {SHOWN}"
        console.print(table(title, ("module", "input", "was", "is"), rows))

        # A program shares its weights with the model it was exported from: each trains on a copy of its own. They take
        # turns, so that whatever else the machine does falls on all of them.
        modules = {"eager model": model, "exported": program.module(), "consolidated": result.program.module()}
        trained = {name: Training(module, x, labels) for name, module in modules.items()}
        step(f"{STEPS} SGD steps of each", lambda: [run.step() for _ in range(STEPS) for run in trained.values()])
        rows = [(name, *run.row) for name, run in trained.items()]
        console.print(table(f"{STEPS} SGD steps", ("", "losses", "a step"), rows))
        ours = trained["consolidated"].found
        for name in ("eager model", "exported"):
            theirs = trained[name].found
            show(f"Consolidated and {name}, after {STEPS} steps", [(k, same(ours[k], theirs[k])) for k in ours])

        decomposed = step("Decomposing (run_decompositions)", program.run_decompositions)
        functional = step("Consolidating that", lambda: tbn.consolidate(decomposed))
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "resnet50.pt2"
            step("Saving", lambda: torch.export.save(functional, file))
            loaded = step("Loading", lambda: torch.export.load(file))
        outputs = [_ran(p, x) for p in (decomposed, loaded)]
        console.print(f"loaded: {tbn.inspect(loaded).summary()}")
        show("Loaded and consolidated, and decomposed", [("logits and running statistics", same(*outputs))])
    return 1 if failures else 0


def _short(name: str) -> str:
    """A module's path or an overload without what all of them have in common."""
    return name.removeprefix("resnet.").removeprefix("aten.").removesuffix(".normalization").removesuffix(".default")


def _ran(program: torch.export.ExportedProgram, x: torch.Tensor) -> dict[str, Any]:
    """The logits and the running statistics of one batch, from the same state for every program."""
    module = copy.deepcopy(program.module())
    with torch.no_grad():
        logits = module(x).logits
    return {"logits": logits, **dict(module.named_buffers())}


if __name__ == "__main__":
    sys.exit(main())
