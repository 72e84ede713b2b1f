"""Programs and results as text: one line a node for people and snapshots, tables for what was edited and declined."""

from __future__ import annotations

from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from torch_batchnorm.passes.graph.nest import graphs_of
from torch_batchnorm.passes.graph.result import Program

# As MLIR and Rust call them: a line holds two shapes more. Others keep torch's name.
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
    # Names, types and order alone, no addresses or paths: snapshots have to be the same everywhere.
    blocks = []
    for path, graph in graphs_of(program):
        lines = [_node(node) for node in graph.nodes]
        blocks.append(
            "\n".join([f"{path}:" if path else "", *(f"  {line}" if path else line for line in lines)]).strip()
        )
    if isinstance(program, ExportedProgram):
        # a user output has no target, and is in the return line already
        listed = [s for s in program.graph_signature.output_specs if s.target is not None]
        blocks.extend(f"{getattr(s.arg, 'name', s.arg)} -> {s.kind.name} {s.target}" for s in listed)
    return "\n".join(blocks)


def _node(node: Node) -> str:
    if node.op == "output":
        return f"return {_argument(node.args[0])}"
    if node.op == "placeholder":
        return f"{node.name}{_type(node)} = placeholder"
    # no type: a submodule or a constant that is not lifted has no val
    if node.op == "get_attr":
        return f"{node.name} = self.{node.target}"
    given = [*map(_argument, node.args), *(f"{k}={_argument(v)}" for k, v in node.kwargs.items())]
    return f"{node.name}{_type(node)} = {target_of(node)}({', '.join(given)})"


def target_of(node: Node) -> str:
    """What a node calls: an ATen overload in full, anything else by its bare name."""
    # str of a function would hold its address
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
