"""Consolidate a real ResNet-50: export, rewrite, train beside eager, decompose, save, load, run again.

Usage: python examples/quickstart.py (about a minute on two cores). Exit code 1 when any comparison fails.
"""

from __future__ import annotations

import copy
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
from transformers import ResNetConfig, ResNetForImageClassification

import torch_batchnorm as tbn
from torch_batchnorm.tables import table

STEPS, BATCH = 3, 4
console = Console(width=None if sys.stdout.isatty() else 200, highlight=False)
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


def train(module: Any, batches: list[torch.Tensor], labels: torch.Tensor) -> dict[str, Any]:
    """Three SGD steps: the losses, the gradients of the last one, and the state after it."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(module(batch).logits, labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    gradients = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
    return {"losses": torch.stack(losses), "gradients": gradients, "running statistics": dict(module.named_buffers())}


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
        batches = [torch.randn(BATCH, 3, 64, 64) for _ in range(STEPS)]
        labels = torch.randint(0, 2, (BATCH,))
        program = step("Exporting it in train mode", lambda: torch.export.export(model, (batches[0],)))
        result = step("Consolidating", lambda: tbn.Consolidate()(program))

        rows = [("before", tbn.inspect(program).summary()), ("after", tbn.inspect(result.program).summary())]
        console.print(table("Batch norms of the program", ("", "report"), rows))
        first = tbn.inspect(result.program)
        console.print(tbn.Report(first.entries[:3]).table(), f"... and {len(first.entries) - 3} more", sep="\n")

        # A program shares its weights with the model it was exported from: each trains on a copy of its own.
        candidates = {
            "eager model": model,
            "unconsolidated program": program.module(),
            "consolidated program": result.program.module(),
        }
        trained = {
            name: step(f"{STEPS} SGD steps, {name}", lambda m=module: train(copy.deepcopy(m), batches, labels))
            for name, module in candidates.items()
        }
        ours = trained.pop("consolidated program")
        for name, theirs in trained.items():
            show(f"Consolidated program and {name}, {STEPS} steps", [(k, same(ours[k], theirs[k])) for k in ours])
        console.print("losses: " + ", ".join(f"{loss:.6f}" for loss in ours["losses"].tolist()))

        decomposed = step("Decomposing (run_decompositions)", program.run_decompositions)
        functional = step("Consolidating that", lambda: tbn.consolidate(decomposed))
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "resnet50.pt2"
            step("Saving", lambda: torch.export.save(functional, file))
            loaded = step("Loading", lambda: torch.export.load(file))
        with torch.no_grad():
            pairs = [(p.module(), copy.deepcopy(p.module().state_dict())) for p in (decomposed, loaded)]
            outputs = []
            for module, state in pairs:
                module.load_state_dict(state)
                logits = module(batches[0]).logits
                outputs.append({"logits": logits, **copy.deepcopy(dict(module.named_buffers()))})
                module.load_state_dict(state)
        console.print("loaded: " + tbn.inspect(loaded).summary())
        show("Loaded consolidated program and decomposed program", [("logits and running statistics", same(*outputs))])
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
