"""Hidden writes: can a statistic that an op writes behind its schema become an output of a functional program?"""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property

from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Node

from ...decomps.forms import FIELDS
from ..graph.effects import Storages, may_alias
from ..graph.result import Reason
from ..graph.signature import MUTATIONS, input_specs, tensors_of
from .site import Call


class Inputs:
    """What a functional program takes: each placeholder's kind, and which of them share memory."""

    def __init__(self, program: ExportedProgram) -> None:
        self.program = program
        self.specs = input_specs(program)

    def refuse_update(self, site: Call) -> Reason:
        """Why the update of the site's statistics cannot be listed, empty when it can.

        A new value takes the place of the statistic in every later reader. So nothing else may share its memory, which
        is where the write was seen; of user inputs that cannot be known.
        """
        for statistic in (site.norm.running_mean, site.norm.running_var):
            writes = f"it writes to {statistic.name}"
            # the signature lists what the top graph returns
            if site.path:
                return Reason(f"{writes} inside nested graph {site.path}, which cannot hand the new value out")
            # the new value would take the place of both
            if sum(getattr(site.norm, name) is statistic for name in FIELDS[:5]) > 1:
                return Reason(f"{writes}, which is another of its arguments too")
            if reason := self.refuse_shared(statistic, (site.node,)):
                return reason
        return Reason()

    def refuse_shared(self, written: Node, fresh: Collection[Node]) -> Reason:
        """Why a new value cannot take the place of what is written to: something else may see that memory. `fresh`:
        nodes that are known to make their own result, or will.
        """
        writes = f"it writes to {written.name}"
        # a view shows the write to who reads it later, but never a new value that stands for what it is a view of
        readers = list(written.users)
        if written.op == "placeholder":
            kind = self.specs[written.name].kind if written.name in self.specs else InputKind.USER_INPUT
            if kind not in MUTATIONS:
                return Reason(f"{writes}, a {kind.name}, whose mutation a signature cannot list")
            if sharing := [name for name in self._storages.sharing(written.name) if name != written.name]:
                return Reason(f"{writes}, whose memory {sharing[0]} shares")
        else:
            readers.append(written)  # what made it may have handed on an operand's memory
        aliases = [node for node in readers if node not in fresh and may_alias(node)]
        return Reason(f"{writes}, whose memory {aliases[0].name} ({aliases[0].target}) may share" if aliases else "")

    @cached_property
    def _storages(self) -> Storages:
        """Where the parameters, buffers and constants in use lie, by placeholder name."""
        state = tensors_of(self.program)
        # an input that nothing reads shows no write
        used = {node.name for node in self.program.graph.find_nodes(op="placeholder") if node.users}
        targets = {name: spec.target or "" for name, spec in self.specs.items() if name in used}
        return Storages({name: state[target] for name, target in targets.items() if target in state})
