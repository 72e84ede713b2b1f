"""The signature of an exported program: what it takes, what it returns and mutates, how modules were called."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
from torch.export import ExportedProgram, ModuleCallEntry
from torch.export.graph_signature import InputKind, InputSpec, OutputKind, OutputSpec, TensorArgument
from torch.fx import Node

from .result import Program

# The inputs whose mutation a signature can list, and as what.
MUTATIONS = {
    InputKind.BUFFER: OutputKind.BUFFER_MUTATION,
    InputKind.USER_INPUT: OutputKind.USER_INPUT_MUTATION,
}


MUTATED = set(MUTATIONS.values())


BEFORE_RESULTS = {*MUTATED, OutputKind.TOKEN}


def is_functional(program: Program) -> bool:
    """Whether the program's dialect lists its mutations as outputs and allows no op that writes (ATEN, EDGE)."""
    return isinstance(program, ExportedProgram) and program.dialect != "TRAINING"


def input_specs(program: Program) -> dict[str, InputSpec]:
    """What an exported program's signature says of each placeholder by name; empty for a GraphModule."""
    if not isinstance(program, ExportedProgram):
        return {}
    return {spec.arg.name: spec for spec in program.graph_signature.input_specs if hasattr(spec.arg, "name")}


def modules_of(node: Node) -> list[str]:
    """The paths of the modules that a node was traced in, but for the whole program."""
    return [path for path, _ in (node.meta.get("nn_module_stack") or {}).values() if path]


def named_in(entry: ModuleCallEntry) -> set[str]:
    """The nodes that a module's call signature names."""
    signature = entry.signature
    arguments = () if signature is None else (*signature.inputs, *signature.outputs)
    return {argument.name for argument in arguments if isinstance(argument, TensorArgument)}


def insert_mutations(
    values: list[Any],
    specs: list[OutputSpec],
    placed: dict[Node, OutputSpec],
    places: dict[str, int | None],
    order: dict[str, int],
) -> None:
    """Puts new mutations among the listed ones: at the place given, those without one in the order of the inputs."""
    listed = [(spec, value) for spec, value in zip(specs, values, strict=True) if spec.kind in MUTATED]
    begin = next((i for i, spec in enumerate(specs) if spec.kind in MUTATED), None)
    if begin is None:
        begin = next((i for i, spec in enumerate(specs) if spec.kind not in BEFORE_RESULTS), len(specs))
    end = begin + len(listed)
    given = {v: places[str(spec.target)] for v, spec in placed.items()}
    for value, place in sorted(given.items(), key=lambda pair: -1 if pair[1] is None else pair[1]):
        if place is not None:
            listed.insert(place, (placed[value], value))
    free = sorted((v for v, place in given.items() if place is None), key=lambda v: order[str(placed[v].target)])
    merged, rest = [], list(reversed(free))
    for spec, value in listed:
        while rest and order[str(placed[rest[-1]].target)] < order.get(str(spec.target), -1):
            merged.append((placed[rest[-1]], rest.pop()))
        merged.append((spec, value))
    merged += [(placed[value], value) for value in reversed(rest)]
    specs[begin:end] = [spec for spec, _ in merged]
    values[begin:end] = [value for _, value in merged]


def renamed_spec(spec: OutputSpec, value: Any) -> OutputSpec:
    """The output's spec under the name of the node that the graph now returns for it."""
    if not isinstance(value, Node) or getattr(spec.arg, "name", value.name) == value.name:
        return spec
    return dataclasses.replace(spec, arg=type(spec.arg)(value.name))  # type: ignore[call-arg]


def copy_entry(entry: ModuleCallEntry) -> ModuleCallEntry:
    """An entry whose argument names can be changed without changing the original's."""
    if entry.signature is None:
        return ModuleCallEntry(entry.fqn)
    inputs, outputs = (list(map(copy.copy, a)) for a in (entry.signature.inputs, entry.signature.outputs))
    return dataclasses.replace(entry, signature=dataclasses.replace(entry.signature, inputs=inputs, outputs=outputs))


def tensors_of(program: Program) -> dict[str, torch.Tensor]:
    """Everything that a program holds, by name: parameters, buffers, constants; what is tied under each name."""
    if isinstance(program, ExportedProgram):
        state: dict[str, Any] = {**program.constants, **program.state_dict}
    else:
        state = dict(program.named_parameters(remove_duplicate=False))
        state |= dict(program.named_buffers(remove_duplicate=False))
        targets = (str(node.target) for node in program.graph.find_nodes(op="get_attr"))
        state |= {t: getattr(program, t) for t in targets if "." not in t and t not in state}
    return {name: tensor for name, tensor in state.items() if isinstance(tensor, torch.Tensor)}
