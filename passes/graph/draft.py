"""The one edit surface: a `Draft` of an ExportedProgram or GraphModule, edited as graphs and built once."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch._export.verifier import TrainingIRVerifier, Verifier
from torch.export import ExportedProgram, ModuleCallEntry
from torch.export.exported_program import _create_graph_module_for_export
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    TensorArgument,
)
from torch.fx import Graph, GraphModule, Node

from .copying import copy_graph, copy_module, keep_attributes, lint_all
from .meta import empty_val
from .nest import attribute, graph_modules
from .result import Program, top_module
from .signature import (
    BEFORE_RESULTS,
    MUTATED,
    MUTATIONS,
    copy_entry,
    input_specs,
    insert_mutations,
    is_functional,
    modules_of,
    named_in,
    renamed_spec,
    tensors_of,
)

if hasattr(OutputKind, "PARAMETER_MUTATION"):  # newer than torch 2.9
    MUTATED.add(OutputKind.PARAMETER_MUTATION)


class Draft:
    """A program being edited: change `graphs`, then `build()`.

    Unless `inplace`, the graphs are copies under the same node names, and `build()` returns a new program that shares
    every parameter, buffer and constant with the one it came from. Each graph is compiled once, after the edits.
    """

    def __init__(self, program: Program, inplace: bool = False) -> None:
        self.program = program
        self.inplace = inplace
        self.top = top_module(program)
        self.functional = is_functional(program)
        self.signature = program.graph_signature if isinstance(program, ExportedProgram) else None
        self._modules = modules = list(graph_modules(self.top))
        self._graphs = {id(m.graph): m.graph if inplace else copy_graph(m.graph) for _, m in modules}
        self.graphs = [(path, self._graphs[id(module.graph)]) for path, module in modules]
        self._inputs = input_specs(program)
        self._listed = set() if self.signature is None else {(o.kind, o.target) for o in self.signature.output_specs}
        self._unlisted: dict[Node, tuple[OutputKind, str]] = {}
        self._places: dict[str, int | None] = {}  # target of a new mutation -> its place among the mutations
        self._dropped = False  # whether an input or a mutation left the signature
        self._lost: set[str] = set()  # state that nothing reads any more
        self._gained: dict[str, torch.Tensor] = {}  # new tensors, some of them under names that were there
        self._behind: dict[str, list[str]] = defaultdict(list)  # the names of new tensors, by the one they come after
        self._beside: dict[str, list[InputSpec]] = defaultdict(list)  # new inputs, by the one they come after
        self._unread: set[str] = set()  # the inputs that go
        self.verifiers = list(program._verifiers) if isinstance(program, ExportedProgram) else []
        self.renamed: dict[str, str] = {}  # nodes that others stand for now, for the signatures of module calls
        self._left: dict[str, bool] = {}  # modules that nodes were taken out of; whether they are called otherwise now
        self._unchecked = False  # whether the dialect or the signature's mutations changed
        self._fakes: dict[tuple[Any, ...], torch.Tensor] = {}

    def fake(self, like: torch.Tensor, size: int | torch.SymInt, dtype: torch.dtype) -> torch.Tensor:
        """A `val` of shape [size] on the device of `like` for an output that nothing reads; made once."""
        key = (str(size), dtype, like.device)
        if key not in self._fakes:
            self._fakes[key] = empty_val(like, (size,), dtype)
        return self._fakes[key]

    def mutate(self, target: Node, after: Node, value: Node) -> None:
        """From `after` on, `target` is `value`; when `target` is a program input, the signature says so.

        An input that the signature lists already keeps its entry: what is written last stays last.
        """
        target.replace_all_uses_with(value, delete_user_cb=lambda user: user > after and user is not value)
        mutation = self._unlisted.pop(target, None) or self._mutation_of(target)
        if mutation is not None:
            self._unlisted[value] = mutation

    def place(self, target: Node, place: int | None) -> None:
        """Where the new mutation of a program input goes among the listed ones; None: in the order of the inputs, which
        is torch.export's. Without it, it goes last.
        """
        mutation = self._mutation_of(target)
        if mutation is not None:
            self._places[mutation[1]] = place

    def _mutation_of(self, node: Node) -> tuple[OutputKind, str] | None:
        """The output a mutation of this placeholder is listed as, None when it is listed already or is no input."""
        at_top = node.op == "placeholder" and node.graph is self.graphs[0][1]
        spec = self._inputs.get(node.name) if at_top else None
        if spec is None or self.signature is None or not self.functional or spec.kind not in MUTATIONS:
            return None
        mutation = MUTATIONS[spec.kind], str(spec.target if spec.kind is InputKind.BUFFER else node.name)
        return None if mutation in self._listed else mutation

    def become(self, functional: bool) -> None:
        """Changes the dialect: to functional (ATEN), which lists mutations, or to training IR, which has none."""
        self.functional, self.verifiers = functional, [Verifier if functional else TrainingIRVerifier]
        self._unchecked = True

    def mutations(self) -> list[tuple[Node, Node]]:
        """What the signature lists as mutations: the placeholder, and the node of its new value."""
        if self.signature is None:
            return []
        graph = self.graphs[0][1]
        placeholders = {node.name: node for node in graph.find_nodes(op="placeholder")}
        named = {spec.target: placeholders[name] for name, spec in self._inputs.items() if spec.target}
        values: Any = graph.output_node().args[0]
        pairs = zip(self.signature.output_specs, values, strict=True)
        return [(named.get(s.target) or placeholders[str(s.target)], v) for s, v in pairs if s.kind in MUTATED]

    def drop_mutations(self) -> None:
        """Takes the mutation outputs out of the graph and the signature."""
        if self.signature is None:
            return
        output = self.graphs[0][1].output_node()
        values: Any = output.args[0]
        kept = [(s, v) for s, v in zip(self.signature.output_specs, values, strict=True) if s.kind not in MUTATED]
        output.args = (tuple(v for _, v in kept),)
        self.signature = ExportGraphSignature(list(self.signature.input_specs), [s for s, _ in kept])
        self._listed = set()

    def drop_unchanged(self) -> None:
        """Takes out the mutation outputs whose new value is the input itself: nothing is written."""
        if self.signature is None:
            return
        unchanged = {value for target, value in self.mutations() if target is value}
        output = self.graphs[0][1].output_node()
        values: Any = output.args[0]
        pairs = list(zip(self.signature.output_specs, values, strict=True))
        kept = [(s, v) for s, v in pairs if s.kind not in MUTATED or v not in unchanged]
        if len(kept) == len(pairs):
            return
        output.args = (tuple(v for _, v in kept),)
        self.signature = ExportGraphSignature(list(self.signature.input_specs), [s for s, _ in kept])
        self._listed = {(o.kind, o.target) for o in self.signature.output_specs}
        self._dropped = True

    def drop_constant(self, node: Node) -> tuple[int, str] | None:
        """Takes a lifted constant that nothing reads out of graph and signature; returns its place among the inputs and
        its name in the state, None for any other node.
        """
        spec = self._inputs.get(node.name) if node.graph is self.graphs[0][1] else None
        if spec is None or self.signature is None or spec.kind is not InputKind.CONSTANT_TENSOR or node.users:
            return None
        specs = list(self.signature.input_specs)
        place = next(i for i, s in enumerate(specs) if getattr(s.arg, "name", None) == node.name)
        del specs[place], self._inputs[node.name]
        node.graph.erase_node(node)
        self.signature = ExportGraphSignature(specs, list(self.signature.output_specs))
        if all(s.target != spec.target for s in specs):
            self._lost.add(str(spec.target))
        self._dropped = True
        return place, str(spec.target)

    def add_constant(self, name: str, place: int, target: str, value: torch.Tensor, val: Any) -> Node:
        """A new lifted constant at this place among the inputs: its placeholder."""
        graph = self.graphs[0][1]
        placeholders = graph.find_nodes(op="placeholder")
        at = placeholders[place] if place < len(placeholders) else placeholders[-1].next
        with graph.inserting_before(at):
            node = graph.create_node("placeholder", name, name=name)
        node.meta["val"] = val
        if self.signature is not None:
            spec = InputSpec(InputKind.CONSTANT_TENSOR, TensorArgument(node.name), target)
            specs = list(self.signature.input_specs)
            self.signature = ExportGraphSignature(
                [*specs[:place], spec, *specs[place:]], list(self.signature.output_specs)
            )
            self._inputs[node.name] = spec
            self._gained[target] = value
            self._dropped = True
        return node

    def module_of(self, graph: Graph) -> GraphModule:
        """The module that holds a graph of the draft in the program it was made from."""
        return next(module for _, module in self._modules if self._graphs[id(module.graph)] is graph)

    def has_attribute(self, name: str) -> bool:
        """Whether a module of a graph module has an attribute of this dotted name."""
        return self.signature is None and attribute(self.top, name) is not None

    def input_target(self, node: Node) -> str | None:
        """The FQN of the parameter, buffer or constant that a placeholder of the top graph brings in."""
        spec = self._inputs.get(node.name)
        return None if spec is None else spec.target

    def hold(self, name: str, tensor: torch.Tensor, beside: str = "") -> None:
        """The state has this tensor under this name, new or not, from `build` on; a new one right behind another."""
        self._gained[name] = tensor
        if beside:
            self._behind[beside].append(name)

    def add_parameter(self, name: str, target: str, beside: Node) -> Node:
        """A new parameter, right after another input: its placeholder. `hold` gives it its value."""
        with beside.graph.inserting_after(beside):
            node = beside.graph.create_node("placeholder", name, name=name)
        node.target = node.name
        spec = InputSpec(InputKind.PARAMETER, TensorArgument(node.name), target)
        self._inputs[node.name] = spec
        self._beside[beside.name].append(spec)
        return node

    def drop_state(self, names: set[str], nodes: Sequence[Node]) -> None:
        """Takes tensors out of the state, and the nodes that brought them in, which nothing reads, out of the graph."""
        self._lost |= names
        self._unread |= {node.name for node in nodes if node.op == "placeholder"}
        for node in nodes:
            node.graph.erase_node(node)

    def _list_inputs(self) -> None:
        """Writes new inputs into the signature, and takes those that went out of it."""
        if self.signature is None or not (self._beside or self._unread):
            return
        specs: list[InputSpec] = []
        work = list(reversed(self.signature.input_specs))
        while work:
            spec = work.pop()
            name = getattr(spec.arg, "name", "")
            specs += [] if name in self._unread else [spec]
            work += self._beside.get(name, ())  # the latest comes first, as in the graph
        self.signature = ExportGraphSignature(specs, list(self.signature.output_specs))
        self._dropped = True

    def _list_mutations(self) -> None:
        """Writes the new mutations into output node and signature, before what the program returns."""
        if self.signature is None:
            return
        output = self.graphs[0][1].output_node()
        values: list[Any] = list(output.args[0])  # type: ignore[arg-type]
        specs = list(self.signature.output_specs)
        place = next((i for i, spec in enumerate(specs) if spec.kind not in BEFORE_RESULTS), len(specs))
        new = {v: OutputSpec(k, TensorArgument(v.name), name) for v, (k, name) in self._unlisted.items()}
        placed = {v: spec for v, spec in new.items() if spec.target in self._places}
        last = [v for v in new if v not in placed]
        values[place:place] = last
        specs[place:place] = [new[v] for v in last]
        if placed:
            insert_mutations(values, specs, placed, self._places, self._order)
        if self._unlisted:
            output.args = (tuple(values),)
        if "val" in output.meta and (self._unlisted or self._dropped):  # a loaded program's has
            output.meta["val"] = tuple(v.meta.get("val") if isinstance(v, Node) else v for v in values)
        specs = [renamed_spec(spec, value) for spec, value in zip(specs, values, strict=True)]
        self.signature = ExportGraphSignature(list(self.signature.input_specs), specs)

    @property
    def _order(self) -> dict[str, int]:
        """The place of each input by what a mutation of it is called."""
        assert self.signature is not None
        return {
            str(spec.target or getattr(spec.arg, "name", "")): i for i, spec in enumerate(self.signature.input_specs)
        }

    def build(self, lint: bool = True) -> Program:
        """The edited program: linted, compiled and, when its signature changed, validated.

        lint: False for edits in place that cannot put a node before what it reads, as lint costs a walk of the graph.

        torch's constructor validates every program, which costs more than the whole pass (it is quadratic in buffers).
        Where the signature is the original's and every name it refers to was kept, there is nothing for it to find.
        """
        self._list_inputs()
        self._list_mutations()
        built = self._built_inplace(lint) if self.inplace else self._built_copy()
        if (self._unlisted or self._unchecked or self._dropped) and isinstance(built, ExportedProgram):
            built.validate()  # type: ignore[no-untyped-call]
        return built

    def _built_inplace(self, lint: bool) -> Program:
        if isinstance(self.program, GraphModule):
            keep_attributes(self.program, self._gained, self._lost, shared=False)
        for _, module in self._modules:
            if lint:
                module.graph.lint()
            module.recompile()
        if isinstance(self.program, ExportedProgram):
            self.program._graph_signature = self.signature  # type: ignore[assignment]
            self.program._verifiers = self.verifiers
            self.program._module_call_graph = self._entries()
            self._keep_state(self.program)
        return self.program

    def _keep_state(self, program: ExportedProgram) -> None:
        """Puts the new tensors into the state, each in its place, and takes out what is lost."""
        state, constants = program._state_dict, program._constants
        old, gained = dict(state), self._gained
        if gained or self._lost:
            state.clear()
        for name, tensor in old.items() if gained or self._lost else ():
            if name in gained or name not in self._lost:
                state[name] = gained.get(name, tensor)
            state.update((new, gained[new]) for new in self._behind.get(name, ()))
        for name in self._lost - gained.keys():
            constants.pop(name, None)
        for name, tensor in gained.items():
            if name not in state:
                (state if isinstance(tensor, torch.nn.Parameter) else constants)[name] = tensor

    def _built_copy(self) -> Program:
        made: dict[int, torch.nn.Module] = {}
        if not isinstance(self.program, ExportedProgram):
            copied: Any = copy_module(self.top, self._graphs, made)
            keep_attributes(copied, self._gained, self._lost, shared=True)
            lint_all(made)
            return copied  # type: ignore[no-any-return]
        holder, graph = torch.nn.Module(), self.graphs[0][1]
        for name in {str(node.target).partition(".")[0] for node in graph.find_nodes(op="get_attr")}:
            value = getattr(self.top, name)
            nested = isinstance(value, torch.nn.Module)
            setattr(holder, name, copy_module(value, self._graphs, made) if nested else value)
        lint_all(made)
        graph.lint()
        program = copy.copy(self.program)
        program._graph_module = _create_graph_module_for_export(holder, graph)  # type: ignore[no-untyped-call]
        program._graph_module.meta.update(self.top.meta)
        program._graph_signature = self.signature  # type: ignore[assignment]
        program._verifiers = self.verifiers
        program._state_dict = copy.copy(self.program.state_dict)
        program._constants = copy.copy(self.program.constants)
        program._range_constraints = copy.copy(self.program.range_constraints)
        program._module_call_graph = self._entries()
        self._keep_state(program)
        return program

    def _entries(self) -> list[ModuleCallEntry]:
        """The module call graph, by the names that its arguments have now."""
        if not isinstance(self.program, ExportedProgram):
            return []
        entries = list(map(copy_entry, self.program.module_call_graph))
        for signature in (entry.signature for entry in entries if entry.signature is not None):
            for argument in (*signature.inputs, *signature.outputs):
                name = getattr(argument, "name", None)
                while name in self.renamed:
                    name = self.renamed[name]
                    argument.name = name
        if not any(entry.signature is not None for entry in entries) or not self._left:
            return entries
        nodes = {node.name: node for node in self.graphs[0][1].nodes}
        there = {path for _, graph in self.graphs for node in graph.nodes for path in modules_of(node)}
        gone = {path for path, forgotten in self._left.items() if forgotten or path not in there}
        return [
            e if not e.fqn or (e.fqn not in gone and named_in(e) <= nodes.keys()) else ModuleCallEntry(e.fqn)
            for e in entries
        ]

    def rename(self, node: Node, stands: Node) -> None:
        """Another node stands for one of the top graph from now on, in the signatures of module calls too."""
        if node.graph is self.graphs[0][1] and node.name != stands.name:
            self.renamed[node.name] = stands.name

    def replace(self, node: Node, stands: Node) -> None:
        """Whatever reads a node reads another one from now on, which stands for it."""
        node.replace_all_uses_with(stands)
        self.rename(node, stands)

    def leave(self, node: Node) -> None:
        """A node goes: a module that has none left has no call signature."""
        for path in modules_of(node):
            self._left.setdefault(path, False)

    def forget_signatures(self, node: Node) -> None:
        """The modules that a node belongs to are called otherwise than their call signatures say."""
        self._left |= dict.fromkeys(modules_of(node), True)


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
    tied = {id(held[name]): value for name, value in tensors.items()}
    tensors = {name: tied[id(tensor)] for name, tensor in held.items() if id(tensor) in tied}
    made = Draft(program).build()
    if isinstance(made, ExportedProgram):
        for name, value in tensors.items():
            (made._state_dict if name in made._state_dict else made._constants)[name] = value
        return made
    keep_attributes(made, tensors, (), shared=True)
    return made
