"""Programs and results as text: one line a node for people and snapshots, tables for what was edited and declined."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch.export import ExportedProgram
from torch.fx import Node

from torch_batchnorm.passes.program import Program, Result, graphs_of

_SHORT = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.uint8: "u8",
    torch.bool: "b8",
}


def render(program: Program) -> str:
    """The program as text: a line a node, nested graphs after the graph they are called from, then the mutations.

    program: an ExportedProgram or a GraphModule.

    Raises: InvalidProgram for anything else.
    """
    blocks = []
    for path, graph in graphs_of(program):
        lines = [_node(node) for node in graph.nodes]
        blocks.append(
            "\n".join([f"{path}:" if path else "", *(f"  {line}" if path else line for line in lines)]).strip()
        )
    if isinstance(program, ExportedProgram):
        listed = [s for s in program.graph_signature.output_specs if s.target is not None]
        blocks.extend(f"{getattr(s.arg, 'name', s.arg)} -> {s.kind.name} {s.target}" for s in listed)
    return "\n".join(blocks)


def _node(node: Node) -> str:
    if node.op == "output":
        return f"return {_argument(node.args[0])}"
    if node.op == "placeholder":
        return f"{node.name}{_type(node)} = placeholder"
    if node.op == "get_attr":
        return f"{node.name} = self.{node.target}"
    given = [*map(_argument, node.args), *(f"{k}={_argument(v)}" for k, v in node.kwargs.items())]
    return f"{node.name}{_type(node)} = {target_of(node)}({', '.join(given)})"


def target_of(node: Node) -> str:
    """What a node calls: an ATen overload in full, anything else by its bare name."""
    if isinstance(node.target, str | torch._ops.OpOverload):
        return str(node.target)
    return str(getattr(node.target, "__name__", node.target))


def _type(node: Node) -> str:
    val = node.meta.get("val")
    return "" if val is None else f": {type_of(val)}"


def type_of(val: Any) -> str:
    """A value's dtype and shape, as `f32[2, 3]`; a tuple's one by one.

    >>> type_of(torch.zeros(2, 3))
    'f32[2, 3]'
    """
    if isinstance(val, torch.Tensor):
        dtype = _SHORT.get(val.dtype, str(val.dtype).removeprefix("torch."))
        return f"{dtype}[{', '.join(map(str, val.shape))}]"
    if isinstance(val, tuple | list):
        return f"({', '.join(map(type_of, val))})"
    return type(val).__name__


def _argument(value: Any) -> str:
    if isinstance(value, Node):
        return value.name
    if isinstance(value, tuple | list):
        inner = ", ".join(map(_argument, value))
        return f"({inner})" if isinstance(value, tuple) else f"[{inner}]"
    return str(value)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """A rich table, in ASCII that pastes into an issue as Markdown; None shows as a dash."""
    made = Table(title=title, title_justify="left", title_style="bold", box=box.MARKDOWN, min_width=len(title) + 2)
    for column in columns:
        made.add_column(column, overflow="fold")
    for row in rows:
        made.add_row(*("-" if cell is None else str(cell) for cell in row))
    return made


def text_of(*parts: object, width: int = 160) -> str:
    """Rich renderables as plain text of a fixed width, for `print` and for files."""
    console = Console(width=width, color_system=None, force_terminal=False)
    with console.capture() as capture:
        for part in parts:
            console.print(part, highlight=False)
    return "\n".join(line.rstrip() for line in capture.get().splitlines()).strip("\n")


def result_tables(result: Result) -> Iterator[Table]:
    """What a pass edited and what it declined, a table each; nothing for an empty one."""
    if result.edits:
        rows = [(e.site, e.module or None, e.before, e.after) for e in result.edits]
        yield table(f"{len(result.edits)} rewritten", ("site", "module", "was", "is"), rows)
    if result.declined:
        rows = [(d.site, d.module or None, d.form, d.reason) for d in result.declined]
        yield table(f"{len(result.declined)} declined", ("site", "module", "form", "reason"), rows)
