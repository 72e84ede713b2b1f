"""verify: the invariants of a program with batch norm, every violation named."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.export import ExportedProgram

from ...decomps.forms import Dialect
from ..graph.nest import graphs_of
from ..graph.result import Program
from ..graph.signature import MUTATED, is_functional
from .site import Call, find_gradients, find_sites


def verify(program: Program) -> tuple[str, ...]:
    """What is wrong with a program, one sentence each, empty when nothing is.

    Checked: every graph passes lint; the names in the signature exist, and their targets in the state; mutation outputs
    are new values of what they mutate; no batch norm writes in place what the signature lists as a mutation; every
    batch norm can be read and has a value where the graph keeps values; torch's own validation.

    Raises: InvalidProgram for anything but a program.
    """
    found = [f"graph {path or 'top'}: {error}" for path, graph in graphs_of(program) if (error := _lint(graph))]
    found += _sites(program)
    if isinstance(program, ExportedProgram):
        found += _signature(program)
        try:
            copy.copy(program).validate()  # type: ignore[no-untyped-call]
        except Exception as error:  # verifiers raise what they meet: SpecViolationError, AssertionError, AttributeError
            found.append(f"torch's validation: {error}")
    return tuple(found)


def _lint(graph: torch.fx.Graph) -> str:
    # an error is a finding, and the next graph is looked at: lint raises at the first one
    try:
        graph.lint()
    except RuntimeError as error:
        return str(error)
    return ""


def _sites(program: Program) -> list[str]:
    """Batch norms that cannot be read, have no value, or write where the program may not."""
    found = []
    graphs = graphs_of(program)
    # graphs traced without fake tensors have no values at all: there a node without one is no finding
    valued = any("val" in node.meta for _, graph in graphs for node in graph.find_nodes(op="placeholder"))
    sites: list[Call] = [*find_sites(graphs), *find_gradients(graphs)]
    for site in sites:
        if site.problem:
            found.append(f"{site.name}: {site.problem}")
        if valued and "val" not in site.node.meta:
            found.append(f"{site.name}: it has no val, which saving needs")
        # a legacy op that hides its write may stand in a functional program of torch's own making
        if site.writes and is_functional(program) and site.form.dialect is Dialect.FAMILY:
            found.append(
                f"{site.name}: it writes {site.norm.running_mean} in place, and a functional program lists mutations"
            )
    return found


def _signature(program: ExportedProgram) -> list[str]:
    """Names of the signature that are not there, and outputs that do not match the graph's."""
    found = []
    signature, graph = program.graph_signature, program.graph
    placeholders = [node.name for node in graph.find_nodes(op="placeholder")]
    named = [getattr(spec.arg, "name", None) for spec in signature.input_specs]
    if named != placeholders:
        found.append(f"the signature's inputs are {named}, the graph's {placeholders}")
    values: Any = graph.output_node().args[0]
    if len(values) != len(signature.output_specs):
        found.append(f"the signature lists {len(signature.output_specs)} outputs, the graph returns {len(values)}")
    state = {*program.state_dict, *program.constants, *signature.user_inputs}
    for spec, value in zip(signature.output_specs, values, strict=False):  # other lengths were found above
        name = getattr(spec.arg, "name", None)
        if isinstance(value, torch.fx.Node) and name != value.name:
            found.append(f"the signature calls an output {name}, the graph {value.name}")
        if spec.kind not in MUTATED:
            continue
        if program.dialect == "TRAINING":
            found.append(f"{spec.target}: a mutation is listed in a training program, which writes in place")
        if spec.target not in state:
            found.append(f"{spec.target}: it is listed as mutated, and is neither state nor an input")
    found += [
        f"{spec.target}: an input that the state does not hold"
        for spec in signature.input_specs
        if spec.target is not None and spec.target not in state
    ]
    return found
