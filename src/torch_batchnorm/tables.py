"""Tables for people: what was edited, what was declined, in ASCII that pastes as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from torch_batchnorm.passes.graph.result import Declined, Result


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """A rich table, in ASCII that pastes into an issue as Markdown; None shows as a dash."""
    # rich wraps a title to the width of the table: a short table would break it
    made = Table(title=title, title_justify="left", title_style="bold", box=box.MARKDOWN, min_width=len(title) + 2)
    for column in columns:
        # never an ellipsis: names are there to be copied
        made.add_column(column, overflow="fold")
    for row in rows:
        made.add_row(*("-" if cell is None else str(cell) for cell in row))
    return made


def text_of(*parts: object, width: int = 160) -> str:
    """Rich renderables as plain text of a fixed width, for `print` and for files."""
    # the same text in a terminal, a pipe and a test
    console = Console(width=width, color_system=None, force_terminal=False)
    with console.capture() as capture:
        for part in parts:
            console.print(part, highlight=False)
    return "\n".join(line.rstrip() for line in capture.get().splitlines()).strip("\n")


def why(declined: Declined) -> str:
    """Why a site was left as it was and, where there is something, what to do about it."""
    return f"{declined.reason}: {declined.remedy}" if declined.remedy else declined.reason


def result_tables(result: Result) -> Iterator[Table]:
    """What a pass edited and what it declined, a table each; nothing for an empty one."""
    if result.edits:
        rows = [(e.site, e.module or None, e.before, e.after) for e in result.edits]
        yield table(f"{len(result.edits)} rewritten", ("site", "module", "was", "is"), rows)
    if result.declined:
        rows = [(d.site, d.module or None, d.form, why(d)) for d in result.declined]
        yield table(f"{len(result.declined)} declined", ("site", "module", "form", "reason"), rows)
