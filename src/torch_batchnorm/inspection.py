"""`inspect`: every batch norm of a program, what it computes and what it is connected to."""

from __future__ import annotations

import json
import operator
from collections import Counter
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from difflib import SequenceMatcher
from itertools import zip_longest
from typing import Any

import torch
from torch.fx import Node

from torch_batchnorm.decomps.backends.selection import explain_backend
from torch_batchnorm.decomps.forms import FIELDS
from torch_batchnorm.errors import InvalidChoice
from torch_batchnorm.passes.graph.nest import graphs_of, state_names
from torch_batchnorm.passes.graph.result import Program
from torch_batchnorm.passes.graph.signature import tensors_of
from torch_batchnorm.passes.rewriting.site import Site, find_sites
from torch_batchnorm.render import target_of, type_of
from torch_batchnorm.tables import table, text_of


@dataclass(frozen=True)
class Entry:
    """One batch norm.

    node: the call's name. graph: dotted path of its nested graph, empty at the top. module: path of the module it was
    traced from. form: its overload. mode: "train" (batch statistics) or "eval" (running statistics).
    channels: C of the input [N, C, *]; rank: its number of dimensions; dtype, device: the input's.
    affine: which of weight and bias it has. stats: "running", or "batch" when it has no running statistics.
    weight, bias, running_mean, running_var, counter: the FQN (or node name) of each, None when absent; the counter is
    `num_batches_tracked`. producer, consumers: what makes its input, what reads its output.
    problem: why it cannot be read, empty when it can; what is not known is None.
    """

    node: str
    graph: str
    module: str
    form: str
    mode: str | None = None
    input: str | None = None
    channels: int | str | None = None
    rank: int | None = None
    dtype: str | None = None
    device: str | None = None
    eps: float | str | None = None
    momentum: float | str | None = None
    affine: str | None = None
    stats: str | None = None
    weight: str | None = None
    bias: str | None = None
    running_mean: str | None = None
    running_var: str | None = None
    counter: str | None = None
    producer: str | None = None
    consumers: tuple[str, ...] = ()
    backend: str | None = None
    why: str | None = None
    problem: str = ""


@dataclass(frozen=True)
class Report:
    """The batch norms of a program, in the order in which they run: `print` it, or take it as data."""

    entries: tuple[Entry, ...]

    def to_dict(self) -> dict[str, Any]:
        """`{"batch_norms": [...]}`: a dict an entry, values that JSON knows."""
        return {"batch_norms": [{**asdict(entry), "consumers": list(entry.consumers)} for entry in self.entries]}

    def to_json(self) -> str:
        """The same as JSON text."""
        return json.dumps(self.to_dict(), indent=2)

    def summary(self) -> str:
        """One line: how many there are, by form and mode."""
        if not self.entries:
            return "no batch norm"
        kinds = Counter((entry.form, entry.mode or "unreadable") for entry in self.entries)
        listed = ", ".join(f"{count} x {form} ({mode})" for (form, mode), count in kinds.most_common())
        return f"{len(self.entries)} batch norm{'s' if len(self.entries) > 1 else ''}: {listed}"

    def table(self) -> Any:
        """A rich table of the entries."""
        columns = ("node", "module", "form", "mode", "input", "eps", "momentum", "affine", "stats", "from", "to")
        asked = any(entry.backend for entry in self.entries)
        rows = [(*_row(entry), *((entry.backend, entry.why) if asked else ())) for entry in self.entries]
        return table(self.summary(), (*columns, *(("backend", "why") if asked else ())), rows)

    def __str__(self) -> str:
        return text_of(self.table()) if self.entries else self.summary()


# What two sites are compared by: all that is computed, and what it is spelled as.
COMPARED = ("form", "mode", "channels", "rank", "dtype", "eps", "momentum", "affine", "stats")


@dataclass(frozen=True)
class Difference:
    """Two reports side by side, their sites aligned by module: (module, left, right, fields that differ) a row."""

    rows: tuple[tuple[str, Entry | None, Entry | None, tuple[str, ...]], ...]

    @property
    def differing(self) -> int:
        """How many rows differ."""
        return sum(bool(fields) for *_, fields in self.rows)

    def table(self) -> Any:
        """A rich table, a row a site."""
        title = f"{len(self.rows)} sites, {self.differing} different"
        columns = ("module", "left", "right", "different in")
        return table(title, columns, [(m, _brief(a), _brief(b), ", ".join(f) or None) for m, a, b, f in self.rows])


def _brief(entry: Entry | None) -> str | None:
    if entry is None:
        return None
    return f"{_short(entry.form)} ({entry.mode}) {entry.input or ''} eps={entry.eps} momentum={entry.momentum}"


def diff(left: Report, right: Report) -> Difference:
    """The batch norms of two programs side by side, aligned by the module that each was traced from.

    >>> report = inspect(torch.export.export(torch.nn.BatchNorm1d(3).eval(), (torch.randn(2, 3),)))
    >>> diff(report, report).differing
    0
    """
    # nodes are renamed by what rewrites them, modules are not
    modules = [[entry.module for entry in report.entries] for report in (left, right)]
    rows = []
    # autojunk drops what is frequent, and a module that is called often is no junk
    for _, a, b, c, d in SequenceMatcher(a=modules[0], b=modules[1], autojunk=False).get_opcodes():
        for mine, other in zip_longest(left.entries[a:b], right.entries[c:d]):
            known = mine or other
            if mine is None or other is None:
                fields: tuple[str, ...] = ("only on one side",)
            else:
                fields = tuple(f for f in (*COMPARED, "module") if getattr(mine, f) != getattr(other, f))
            rows.append((known.module if known else "", mine, other, fields))
    return Difference(tuple(rows))


def _row(entry: Entry) -> tuple[object, ...]:
    node = f"{entry.graph}.{entry.node}" if entry.graph else entry.node
    mode = f"unreadable: {entry.problem}" if entry.problem else entry.mode
    counted = f"{entry.stats}, counted" if entry.counter else entry.stats
    producer = entry.producer and entry.producer.partition(" ")[0]
    consumers = ", ".join(consumer.partition(" ")[0] for consumer in entry.consumers) or None
    shown = (entry.input, entry.eps, entry.momentum, entry.affine, counted, producer, consumers)
    return (node, entry.module or None, _short(entry.form), mode, *shown)


def _short(form: str) -> str:
    """An overload without what nearly all of them share: a table has room for little else."""
    return form.removeprefix("aten.").removesuffix(".default")


def inspect(program: Program, device: str | None = None) -> Report:
    """A report with one entry for each batch norm of the program, forward, nested graphs included.

    program: an ExportedProgram of any dialect, or a GraphModule. It is only read. device: also tell, for each, the
    backend that it gets there ("cuda", "hip", "cpu", ...) once it is consolidated, and why.

    Raises: InvalidProgram for any other program, InvalidChoice for a device that PyTorch does not know.

    >>> exported = torch.export.export(torch.nn.BatchNorm1d(3).eval(), (torch.randn(2, 3),))
    >>> inspect(exported).summary()
    '1 batch norm: 1 x aten.batch_norm.default (eval)'
    """
    graphs = graphs_of(program)
    names = state_names(program)
    state = tensors_of(program).keys()
    _known(device)
    return Report(tuple(replace(_entry(s, names, state), **_backend(s, device)) for s in find_sites(graphs)))


def _known(device: str | None) -> None:
    try:
        # asked once, ahead of the work: "hip" is a device to torch.device, whatever the build
        torch.device(device or "cpu")
    except RuntimeError:
        raise InvalidChoice(f"found device {device!r}, expected one that PyTorch knows: cuda, hip, cpu, ...") from None


def _backend(site: Site, device: str | None) -> dict[str, Any]:
    """What the family runs on a device, for a site that it can be asked of."""
    norm = site.norm
    if device is None or site.problem:
        return {}
    vals: dict[str, Any] = {f: getattr(getattr(norm, f), "meta", {}).get("val") for f in FIELDS[:5]}
    if not isinstance(vals["input"], torch.Tensor):
        return {"why": "the shape of its input is not known"}
    # as `consolidate` fills it in: the backend is that of the consolidated call
    like = next((v for f, v in vals.items() if f != "input" and v is not None), vals["input"])
    tensors = {f: like if v is None and f != "input" else v for f, v in vals.items()}  # what is missing is filled in
    found = explain_backend(**tensors, training=norm.training, eps=norm.eps, device=device)
    return {"backend": found.backend.value, "why": f"{found.reason} ({found.note})" if found.note else found.reason}


def _entry(site: Site, names: dict[Node, str], state: Collection[str]) -> Entry:
    entry = Entry(site.node.name, site.path, site.module, site.form.name, problem=site.problem)
    norm = site.norm
    if norm.input is None:  # nothing of it could be read
        return entry
    tensors: dict[str, Any] = {
        f: None if (t := _attached(getattr(norm, f))) is None else names.get(t, t.name) for f in FIELDS[1:5]
    }
    # torch.nn keeps it beside the running mean; no batch norm overload reads it
    counter = f"{str(tensors['running_mean']).rpartition('.')[0]}.num_batches_tracked".removeprefix(".")
    return replace(
        entry,
        # a mode that is a node is none of the two
        mode={True: "train", False: "eval"}.get(norm.training) if type(norm.training) is bool else None,
        **_shaped(norm.input.meta.get("val")),
        eps=_literal(norm.eps),
        momentum=_literal(norm.momentum),
        affine=" and ".join(f for f in ("weight", "bias") if tensors[f]) or "none",
        stats="running" if site.tracks else "batch",
        **tensors,
        counter=counter if counter in state else None,
        producer=_called(norm.input),
        consumers=tuple(_called(user) for holder in site.outputs.get("out", ()) for user in holder.users),
    )


def _shaped(val: Any) -> dict[str, Any]:
    """What an entry says of its input [N, C, *], nothing where the graph keeps no shapes."""
    if not isinstance(val, torch.Tensor) or val.ndim < 2:
        return {}
    # symbols as text: JSON knows none
    channels = val.shape[1] if type(val.shape[1]) is int else str(val.shape[1])
    dtype, device = str(val.dtype).removeprefix("torch."), str(val.device)
    return {"input": type_of(val), "channels": channels, "rank": val.ndim, "dtype": dtype, "device": device}


def _literal(value: Any) -> Any:
    return value if isinstance(value, float | int) else str(value)


def _attached(tensor: Node | None) -> Node | None:
    """A weight or bias, also when freezing cut it off from its gradient."""
    detached = tensor is not None and tensor.target is torch.ops.aten.detach.default
    return tensor.all_input_nodes[0] if tensor is not None and detached else tensor


def _called(node: Node) -> str:
    """A node and what it calls, as `conv2d (aten.conv2d.default)`; for one of several outputs, what made them."""
    # what made it is of interest, not which of its outputs it is
    if node.target is operator.getitem and isinstance(node.args[0], Node):
        return _called(node.args[0])
    if node.op == "output":
        return "output"
    return f"{node.name} ({target_of(node) if node.op == 'call_function' else node.op})"
