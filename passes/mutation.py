"""Hidden writes: can a statistic that an op writes behind its schema become an output of a functional program?"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Collection
from functools import cached_property
from typing import Any

import torch
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Node

from torch_batchnorm.decomps.forms import BY_TARGET, FIELDS, Mode, Statistics, form_of
from torch_batchnorm.passes.program import MUTATIONS, input_specs
from torch_batchnorm.passes.site import Site

aten = torch.ops.aten


class Inputs:
    """What a functional program takes: each placeholder's kind, and which of them share memory."""

    def __init__(self, program: ExportedProgram) -> None:
        self.program = program
        self.specs = input_specs(program)

    def unlistable_update(self, site: Site) -> str:
        """Why the update of the site's statistics cannot be listed, empty when it can."""
        return self.unlistable(site, site.norm.running_mean) or self.unlistable(site, site.norm.running_var)

    def unlistable(self, site: Site, statistic: Node) -> str:
        """Why the site's write to this statistic cannot be listed, empty when it can.

        A new value takes the place of the statistic in every later reader. So nothing else may share its memory, which
        is where the write was seen; of user inputs that cannot be known.
        """
        if site.path:
            return f"it writes to {statistic.name} inside nested graph {site.path}, which cannot hand the new value out"
        if sum(getattr(site.norm, name) is statistic for name in FIELDS[:5]) > 1:
            return f"it writes to {statistic.name}, which is another of its arguments too"
        return self.shared(statistic, (site.node,))

    def shared(self, written: Node, fresh: Collection[Node]) -> str:
        """Why a new value cannot take the place of what is written to: something else may see that memory. `fresh`:
        nodes that are known to make their own result, or will.
        """
        writes = f"it writes to {written.name}"
        readers = list(written.users)
        if written.op == "placeholder":
            kind = self.specs[written.name].kind if written.name in self.specs else InputKind.USER_INPUT
            if kind not in MUTATIONS:
                return f"{writes}, a {kind.name}, whose mutation a signature cannot list"
            if twins := self._sharing.get(written.name):
                return f"{writes}, whose memory {twins[0]} shares"
        else:
            readers.append(written)
        aliases = [node for node in readers if node not in fresh and may_alias(node)]
        return f"{writes}, whose memory {aliases[0].name} ({aliases[0].target}) may share" if aliases else ""

    @cached_property
    def _sharing(self) -> dict[str, list[str]]:
        """For each parameter, buffer or constant, the others in use whose memory it shares, by placeholder name."""
        state: dict[str, Any] = {**self.program.constants, **self.program.state_dict}
        used = {node.name for node in self.program.graph.find_nodes(op="placeholder") if node.users}
        by_memory: dict[int, list[str]] = defaultdict(list)
        for name, spec in self.specs.items():
            tensor = state.get(spec.target or "")
            if name in used and isinstance(tensor, torch.Tensor):
                by_memory[tensor.untyped_storage()._cdata].append(name)
        return {name: [n for n in names if n != name] for names in by_memory.values() for name in names}


# Composite ops that make their own result, whatever their arguments.
_FRESH = {
    overload
    for name in ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "linear")
    for overload in (getattr(getattr(aten, name), o) for o in getattr(aten, name).overloads())
}


def may_alias(node: Node) -> bool:
    """Whether a node's result may share memory with one of its inputs: unless the op is known to make its own."""
    if node.op == "output" or node.target in BY_TARGET:
        return False
    if node.target is operator.getitem and isinstance(node.args[0], Node):
        return isinstance(node.args[0].meta.get("val"), torch.Tensor) or may_alias(node.args[0])
    if not isinstance(node.target, OpOverload):
        return True
    declared = any(returned.alias_info is not None for returned in node.target._schema.returns)
    if node.target in _FRESH:
        return False
    # A composite op may return its input without saying so: type_as, dropout in eval.
    return declared or torch._C._dispatch_has_kernel_for_dispatch_key(_name(node.target), "CompositeImplicitAutograd")


def _name(overload: Any) -> str:
    return str(overload.name())


def bases_of(node: Node) -> list[Node]:
    """The first nodes whose memory a node may share: those that make their own result, or bring it in."""
    found, seen, work = [], {node}, [node]
    while work:
        held = work.pop()
        sources = held.all_input_nodes if held.op == "call_function" and may_alias(held) else []
        found += [] if sources else [held]
        work += [source for source in sources if source not in seen]
        seen |= set(sources)
    return found


def accesses(node: Node, through: Callable[[Node], bool] = may_alias) -> tuple[list[Node], list[Node]]:
    """Who reads the memory of a node's result and who writes it, through aliases too, as far as schemas say.

    through: whether a call's result may share the memory that it is given.
    """
    reads: list[Node] = []
    writes: list[Node] = []
    work = bases_of(node)
    seen = set(work)
    while work:
        alias = work.pop()
        for user in alias.users:
            if writes_to(user, alias):  # whatever else it reads of the same memory
                writes.append(user)
            elif user not in seen:
                reads.append(user)
            if user not in seen and user.op == "call_function" and through(user):
                work.append(user)
            seen.add(user)
    return [read for read in reads if read not in writes], list(dict.fromkeys(writes))


def writes_to(user: Node, node: Node) -> bool:
    """Whether a call writes to what it is given as a node."""
    if user.target in BY_TARGET:
        form = form_of(user.target, user.args, user.kwargs)  # type: ignore[arg-type]
        given = form.given(user.args, user.kwargs)
        evaluates = form.mode is Mode.EVAL or given.get("training") is False
        written = [] if evaluates or form.statistics is not Statistics.IN_PLACE else [*FIELDS[3:5]]
        return node in [given.get(name) for name in (*written, *form.destinations.values())]
    if not isinstance(user.target, OpOverload):
        return False
    arguments = user.target._schema.arguments
    given = {**dict(zip((a.name for a in arguments), user.args, strict=False)), **user.kwargs}
    written = [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    return any(given.get(name) is node for name in written)
