"""The signature of an exported program: what it takes, what it returns and mutates, how modules were called."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.export import ExportedProgram, ModuleCallEntry
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    TensorArgument,
)
from torch.fx import Graph, Node

from .result import Program

# The inputs whose mutation a signature can list, and as what.
MUTATIONS = {
    InputKind.BUFFER: OutputKind.BUFFER_MUTATION,
    InputKind.USER_INPUT: OutputKind.USER_INPUT_MUTATION,
}


# What else may be listed as mutated: a parameter, by torch newer than 2.9.
MUTATED = {*MUTATIONS.values(), getattr(OutputKind, "PARAMETER_MUTATION", OutputKind.BUFFER_MUTATION)}


def is_functional(program: Program) -> bool:
    """Whether the program's dialect lists its mutations as outputs and allows no op that writes (ATEN, EDGE)."""
    return isinstance(program, ExportedProgram) and program.dialect != "TRAINING"


def input_specs(program: Program) -> dict[str, InputSpec]:
    """What an exported program's signature says of each placeholder by name; empty for a GraphModule."""
    if not isinstance(program, ExportedProgram):
        return {}
    return {spec.arg.name: spec for spec in program.graph_signature.input_specs if hasattr(spec.arg, "name")}


class Listing:
    """What an exported program's signature lists, edited beside the top graph and written once; a graph module has
    none.

    inputs: what is said of each placeholder by its name; their order is the graph's. changed: whether torch has to
    validate what `write` makes.
    """

    def __init__(self, program: Program, graph: Graph) -> None:
        self.graph, self.changed = graph, False
        self._moved = False  # whether there are other inputs than there were
        self.inputs = input_specs(program)
        self._found = program.graph_signature if isinstance(program, ExportedProgram) else None
        self._outputs = [] if self._found is None else list(self._found.output_specs)  # by the values returned
        self._listed = {(spec.kind, spec.target) for spec in self._outputs}
        self._new: dict[Node, OutputSpec] = {}  # the mutations to list, by their value
        self._places: dict[str | None, int | None] = {}

    def target_of(self, node: Node) -> str | None:
        """The FQN of the parameter, buffer or constant that a placeholder of the top graph brings in."""
        spec = self.inputs.get(node.name)
        return None if spec is None else spec.target

    def add_input(self, node: Node, kind: InputKind, target: str) -> None:
        """A new placeholder brings in what the state holds under this name."""
        self.inputs[node.name] = InputSpec(kind, TensorArgument(node.name), target)
        self.changed = self._moved = True

    def drop_input(self, node: Node) -> None:
        """A placeholder goes."""
        if self._is_input(node) and self.inputs.pop(node.name, None) is not None:
            self.changed = self._moved = True

    def mutate(self, target: Node, value: Node) -> None:
        """What an input, or its latest value, becomes. An input that is listed already keeps its entry."""
        # batch norms on one buffer chain: what the last makes of it is listed, not what it was made of
        mutation = self._new.pop(target, None) or self._mutation_of(target)
        if mutation is not None:
            self._new[value] = mutation
            self.changed = True

    def place(self, target: Node, place: int | None) -> None:
        """Where the new mutation of an input goes among the listed ones; None: in the order of the inputs, which is
        torch.export's. Without it, it goes last.
        """
        mutation = self._mutation_of(target)
        if mutation is not None:
            self._places[mutation.target] = place

    def _mutation_of(self, node: Node) -> OutputSpec | None:
        """How a mutation of this placeholder is listed, None when it is already, or cannot be."""
        spec = self.inputs.get(node.name) if self._is_input(node) else None
        if spec is None or spec.kind not in MUTATIONS:
            return None
        mutated = str(spec.target if spec.kind is InputKind.BUFFER else node.name)
        made = OutputSpec(MUTATIONS[spec.kind], TensorArgument(node.name), mutated)
        return None if (made.kind, made.target) in self._listed else made

    def _is_input(self, node: Node) -> bool:
        return node.op == "placeholder" and node.graph is self.graph

    def _returned(self) -> list[tuple[OutputSpec, Any]]:
        """What is listed of each value that the graph returns."""
        values: Any = self.graph.output_node().args[0] if self._outputs else ()
        return list(zip(self._outputs, values, strict=True))

    def mutations(self) -> list[tuple[Node, Node]]:
        """What is listed as mutations: the placeholder, and the node of its new value."""
        placeholders = {node.name: node for node in self.graph.find_nodes(op="placeholder")}
        named = {str(spec.target): placeholders[name] for name, spec in self.inputs.items() if spec.target}
        pairs = [(spec, value) for spec, value in self._returned() if spec.kind in MUTATED]
        return [(named.get(str(spec.target)) or placeholders[str(spec.target)], value) for spec, value in pairs]

    def drop_mutations(self, unchanged: bool = False) -> None:
        """Takes mutation outputs out, or only those whose new value is the input itself: nothing is written."""
        stay = iter([unchanged and target is not value for target, value in self.mutations()])
        pairs = self._returned()
        kept = [pair for pair in pairs if pair[0].kind not in MUTATED or next(stay)]
        if len(kept) < len(pairs):
            self._set(kept)

    def _set(self, pairs: list[tuple[OutputSpec, Any]]) -> None:
        self._outputs = [spec for spec, _ in pairs]
        self.graph.output_node().args = (tuple(value for _, value in pairs),)
        self._listed, self.changed = {(spec.kind, spec.target) for spec in self._outputs}, True

    def write(self) -> ExportGraphSignature | None:
        """Returns the new mutations from the graph too, and what the signature then says; None of a graph module."""
        if self._found is None:
            return None
        if self._new:
            self._set(self._merged())
        output, pairs = self.graph.output_node(), self._returned()
        if "val" in output.meta and self.changed:  # a loaded program's has
            output.meta["val"] = tuple(v.meta.get("val") if isinstance(v, Node) else v for _, v in pairs)
        # torch pairs specs and placeholders by their order in the graph, which is not that in which nodes were made
        inputs = list(self._found.input_specs)
        if self._moved:
            inputs = [self.inputs[node.name] for node in sorted(self.graph.find_nodes(op="placeholder"))]
        return ExportGraphSignature(inputs, [renamed_spec(spec, value) for spec, value in pairs])

    def _merged(self) -> list[tuple[OutputSpec, Any]]:
        """What the graph returns, with the new mutations among the listed ones."""
        new = [(spec, value) for value, spec in self._new.items()]
        pairs = self._returned()
        # torch tells the outputs apart by counting: tokens, then mutations, then what the caller gets
        begin = sum(spec.kind is OutputKind.TOKEN for spec, _ in pairs)
        end = begin + sum(spec.kind in MUTATED for spec, _ in pairs)
        listed = pairs[begin:end] + [pair for pair in new if pair[0].target not in self._places]
        given = [(place, pair) for pair in new if (place := self._places.get(pair[0].target)) is not None]
        # ascending: each place counts the mutations that are there by then, as it did when they were taken out
        for place, pair in sorted(given, key=lambda item: item[0]):
            listed.insert(place, pair)
        free = [pair for pair in new if self._places.get(pair[0].target, 0) is None]
        return [*pairs[:begin], *(self._in_order(listed, free) if free else listed), *pairs[end:]]

    def _in_order(
        self, listed: list[tuple[OutputSpec, Any]], free: list[tuple[OutputSpec, Any]]
    ) -> list[tuple[OutputSpec, Any]]:
        """Puts each free mutation ahead of the first listed one of a later input."""
        names = [node.name for node in sorted(self.graph.find_nodes(op="placeholder"))]
        # a buffer is listed by its name in the state, a user input by that of its placeholder
        order = {str(self.inputs[name].target or name): place for place, name in enumerate(names)}
        waiting = sorted(free, key=lambda pair: order[str(pair[0].target)], reverse=True)
        merged = []
        for pair in listed:
            while waiting and order[str(waiting[-1][0].target)] < order.get(str(pair[0].target), -1):
                merged.append(waiting.pop())
            merged.append(pair)
        return merged + waiting[::-1]


class ModuleCalls:
    """How an exported program's modules were called, by the nodes that their arguments and results are now."""

    def __init__(self, program: Program) -> None:
        self._found = program.module_call_graph if isinstance(program, ExportedProgram) else []
        self._stands: dict[str, str] = {}
        self._left: dict[str, bool] = {}

    def rename(self, node: Node, stands: Node) -> None:
        """Another node stands for one."""
        if node.name != stands.name:
            self._stands[node.name] = stands.name

    def leave(self, node: Node, otherwise: bool = False) -> None:
        """A node goes: a module that has none left has no call signature. Neither has one that is called otherwise
        than its signature says.
        """
        for path in modules_of(node):
            self._left[path] = otherwise or self._left.get(path, False)

    def entries(self, graphs: Sequence[Graph]) -> list[ModuleCallEntry]:
        """The module call graph, by the names that its arguments have now. graphs: the top one first."""
        entries = [copy_entry(entry, self._stands) for entry in self._found]
        if not self._left or not any(entry.signature for entry in entries):
            return entries
        names, gone = {node.name for node in graphs[0].nodes}, self._gone(graphs)
        # unflatten would look for what is not there
        lost = {e.fqn for e in entries if e.fqn and (e.fqn in gone or not named_in(e) <= names)}
        return [ModuleCallEntry(e.fqn) if e.fqn in lost else e for e in entries]

    def _gone(self, graphs: Sequence[Graph]) -> set[str]:
        """The modules that have no node left, or are called otherwise than their signatures say."""
        there = {path for graph in graphs for node in graph.nodes for path in modules_of(node)}
        return {path for path, otherwise in self._left.items() if otherwise or path not in there}


def modules_of(node: Node) -> list[str]:
    """The paths of the modules that a node was traced in, but for the whole program."""
    return [path for path, _ in (node.meta.get("nn_module_stack") or {}).values() if path]


def named_in(entry: ModuleCallEntry) -> set[str]:
    """The nodes that a module's call signature names."""
    signature = entry.signature
    arguments = () if signature is None else (*signature.inputs, *signature.outputs)
    return {argument.name for argument in arguments if isinstance(argument, TensorArgument)}


def renamed_spec(spec: OutputSpec, value: Any) -> OutputSpec:
    """The output's spec under the name of the node that the graph now returns for it."""
    if not isinstance(value, Node) or getattr(spec.arg, "name", value.name) == value.name:
        return spec
    return dataclasses.replace(spec, arg=type(spec.arg)(value.name))  # type: ignore[call-arg]


def copy_entry(entry: ModuleCallEntry, stands: Mapping[str, str]) -> ModuleCallEntry:
    """An entry of its own, its arguments under the names of the nodes that stand for them now."""
    if entry.signature is None:
        return ModuleCallEntry(entry.fqn)
    inputs, outputs = (list(map(copy.copy, a)) for a in (entry.signature.inputs, entry.signature.outputs))
    for argument in (*inputs, *outputs):
        while getattr(argument, "name", None) in stands:  # what stands for a node may have been replaced itself
            argument.name = stands[argument.name]
    return dataclasses.replace(entry, signature=dataclasses.replace(entry.signature, inputs=inputs, outputs=outputs))


def tensors_of(program: Program) -> dict[str, torch.Tensor]:
    """Everything that a program holds, by name: parameters, buffers, constants; what is tied under each name."""
    if isinstance(program, ExportedProgram):
        # constants first: a buffer that is not persistent is among them, and state wins where a name is both
        state: dict[str, Any] = {**program.constants, **program.state_dict}
    else:
        state = dict(program.named_parameters(remove_duplicate=False))
        state |= dict(program.named_buffers(remove_duplicate=False))
        targets = (str(node.target) for node in program.graph.find_nodes(op="get_attr"))
        state |= {t: getattr(program, t) for t in targets if "." not in t and t not in state}
    return {name: tensor for name, tensor in state.items() if isinstance(tensor, torch.Tensor)}
