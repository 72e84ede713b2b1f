"""The one edit surface: a `Draft` of an ExportedProgram or GraphModule, edited as graphs and built once."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch
from torch._export.verifier import TrainingIRVerifier, Verifier
from torch.export import ExportedProgram
from torch.export.exported_program import _create_graph_module_for_export
from torch.export.graph_signature import InputKind
from torch.fx import Node

from .copying import copy_graph, copy_module
from .holding import Holding
from .meta import empty_val
from .nest import graph_modules
from .result import Program, top_module
from .signature import Listing, ModuleCalls, is_functional, tensors_of


class Draft:
    """A program being edited: change `graphs`, then `build()`.

    Unless `inplace`, the graphs are copies under the same node names, and `build()` returns a new program that shares
    every parameter, buffer and constant with the one it came from. Each graph is compiled once, after the edits.

    graphs: by path, the top one first, under "". functional: whether the program lists its mutations. listing: what the
    signature says. calls: how modules were called. holding: what the state gains and loses.
    """

    def __init__(self, program: Program, inplace: bool = False) -> None:
        self.program = program
        self.inplace = inplace
        self.top = top_module(program)
        self.functional = is_functional(program)
        self._modules = modules = list(graph_modules(self.top))
        # copied ahead of every edit: a pass holds nodes of several graphs, and a nested call is an edit of two
        self._graphs = {id(m.graph): m.graph if inplace else copy_graph(m.graph) for _, m in modules}
        self.graphs = [(path, self._graphs[id(module.graph)]) for path, module in modules]
        self._verifiers = list(program._verifiers) if isinstance(program, ExportedProgram) else []
        self.listing = Listing(program, self.graphs[0][1])
        self.calls = ModuleCalls(program)
        self.holding = Holding()
        self._fakes: dict[tuple[Any, ...], torch.Tensor] = {}

    def fake(self, like: torch.Tensor, size: int | torch.SymInt, dtype: torch.dtype) -> torch.Tensor:
        """A `val` of shape [size] on the device of `like` for an output that nothing reads; made once."""
        key = (size if type(size) is int else str(size), dtype, like.device)
        if key not in self._fakes:
            self._fakes[key] = empty_val(like, (size,), dtype)
        return self._fakes[key]

    # The graphs, and what the signature says of them.

    def mutate(self, target: Node, after: Node, value: Node) -> None:
        """From `after` on, `target` is `value`; when `target` is an input of a functional program, it lists that."""
        # the value itself goes on reading what it was made of, wherever it stands
        target.replace_all_uses_with(value, delete_user_cb=lambda user: user > after and user is not value)
        if self.functional:
            self.listing.mutate(target, value)

    def become(self, functional: bool) -> None:
        """Changes the dialect: to functional (ATEN), which lists mutations, or to training IR, which has none."""
        # a program's dialect is what its first verifier says, and by it torch checks which ops may write
        self.functional, self._verifiers = functional, [Verifier if functional else TrainingIRVerifier]
        self.listing.changed = True

    def replace(self, node: Node, stands: Node) -> None:
        """Whatever reads a node reads another one from now on, which stands for it."""
        node.replace_all_uses_with(stands)
        self.rename(node, stands)

    def rename(self, node: Node, stands: Node) -> None:
        """Another node stands for one from now on, in the signatures of module calls too."""
        # module calls name nodes of the top graph alone, and a nested one may be called the same
        if node.graph is self.graphs[0][1]:
            self.calls.rename(node, stands)

    # Tensors: what brings them in, and what they are.

    def add_parameter(self, name: str, target: str, beside: Node) -> Node:
        """A new parameter, right after another input: its placeholder. `holding` has its value."""
        with beside.graph.inserting_after(beside):
            node = beside.graph.create_node("placeholder", name, name=name)
        node.target = node.name  # the graph may have made another name of it: the two are one argument of its code
        self.listing.add_input(node, InputKind.PARAMETER, target)
        return node

    def drop_state(self, names: set[str], nodes: Sequence[Node]) -> None:
        """Takes tensors out of the state, and the nodes that brought them in, which nothing reads, out of the graph."""
        self.holding.lost |= names
        for node in nodes:
            self.listing.drop_input(node)
            node.graph.erase_node(node)

    def add_constant(self, name: str, place: int, target: str, value: torch.Tensor, val: Any) -> Node:
        """A new lifted constant at this place among the inputs: its placeholder."""
        graph = self.graphs[0][1]
        place = min(place, len(graph.find_nodes(op="placeholder")))
        # by the graph's own order: find_nodes gives that in which nodes were made
        with graph.inserting_before(next(islice(graph.nodes, place, None))):
            node = graph.create_node("placeholder", name, name=name)
        node.meta["val"] = val
        if isinstance(self.program, ExportedProgram):
            self.listing.add_input(node, InputKind.CONSTANT_TENSOR, target)
            self.holding.hold(target, value)
        return node

    def drop_constant(self, node: Node) -> tuple[int, str] | None:
        """Takes a lifted constant that nothing reads out of graph and signature; returns its place among the inputs and
        its name in the state, None for any other node.
        """
        inputs = self.listing.inputs
        spec = inputs.get(node.name) if node.graph is self.graphs[0][1] else None
        if spec is None or spec.kind is not InputKind.CONSTANT_TENSOR or node.users:
            return None
        place, target = next(i for i, other in enumerate(node.graph.nodes) if other is node), str(spec.target)
        self.listing.drop_input(node)
        node.graph.erase_node(node)
        # two inputs can bring in one constant
        if all(other.target != target for other in inputs.values()):
            self.holding.lost.add(target)
        return place, target

    # The program.

    def build(self, lint: bool = True) -> Program:
        """The edited program: linted, compiled and, when its signature changed, validated.

        lint: False for edits in place that cannot put a node before what it reads, as lint costs a walk of the graph.

        torch's constructor validates every program, which costs more than the whole pass (it is quadratic in buffers).
        Where the signature is the original's and every name it refers to was kept, there is nothing for it to find.
        """
        signature: Any = self.listing.write()
        built = self.program if self.inplace else self._copied()
        self.holding.write(built, shared=not self.inplace)
        for _, module in self._modules if self.inplace else ():
            module.recompile()
        for _, graph in self.graphs if lint or not self.inplace else ():
            graph.lint()  # only now: it looks for the attributes that a graph reads in the module that owns it
        if isinstance(built, ExportedProgram):
            built._graph_signature = signature
            built._verifiers = self._verifiers
            built._module_call_graph = self.calls.entries([graph for _, graph in self.graphs])
            if self.listing.changed:
                built.validate()  # type: ignore[no-untyped-call]
        return built

    def _copied(self) -> Program:
        # torch's deep copy of a graph module loses hooks, tied names and which buffers are persistent: see copy_module
        made: dict[int, torch.nn.Module] = {}
        if not isinstance(self.program, ExportedProgram):
            return copy_module(self.top, self._graphs, made)  # type: ignore[no-any-return]
        holder, graph = torch.nn.Module(), self.graphs[0][1]
        # what a graph reads as `a.b` is reached through `a`, which is copied as a whole
        for name in {str(node.target).partition(".")[0] for node in graph.find_nodes(op="get_attr")}:
            value = getattr(self.top, name)
            nested = isinstance(value, torch.nn.Module)
            setattr(holder, name, copy_module(value, self._graphs, made) if nested else value)
        program = copy.copy(self.program)
        # torch's own: where code cannot be made of a graph (of objects in memory), an interpreter still runs it
        program._graph_module = _create_graph_module_for_export(holder, graph)  # type: ignore[no-untyped-call]
        program._graph_module.meta.update(self.top.meta)
        for kept in ("_state_dict", "_constants", "_range_constraints"):
            setattr(program, kept, copy.copy(getattr(self.program, kept)))
        return program


def with_tensors(program: Program, tensors: dict[str, torch.Tensor], inplace: bool) -> Program:
    """The program with other values for some of its buffers, by name: written into them, or in a copy that shares the
    rest.
    """
    held = tensors_of(program)
    if inplace:
        with torch.no_grad():
            for name, value in tensors.items():
                held[name].copy_(value)
        return program
    draft, tied = Draft(program), {id(held[name]): value for name, value in tensors.items()}
    for name, tensor in held.items():
        if id(tensor) in tied:
            draft.holding.hold(name, tied[id(tensor)])
    return draft.build()
