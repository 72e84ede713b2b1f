"""Which batch norm goes into which layer: planned on the graph as it is, so that a site can be declined at no cost."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from ...decomps.affine import Affine
from ...decomps.forms import FIELDS, HALF
from ...decomps.layers import LAYER_BY_TARGET
from ..graph.calls import arguments_of, measures
from ..graph.constants import State, quantization
from ..graph.draft import Draft
from ..graph.effects import accesses, bases_of
from ..graph.meta import sizes_of, val_of
from ..rewriting.site import Site
from .channels import downstream, format_of, moved, same_sizes, scaling, upstream
from .weights import Target, fits, lossy, target_of

aten = torch.ops.aten


_CONCATS = {aten.cat.default, aten.concat.default, aten.concatenate.default}


@dataclass(frozen=True)
class Options:
    """What `Fold` was asked for."""

    clone_calls: bool
    clone_weights: bool
    alone: str
    force: bool
    float32_above: int | None


@dataclass(eq=False)
class Fate:
    """What becomes of a site: direction "up", "down" or "alone"; the layers.

    scaled: the constant scales and shifts on the way up, which go too, each with what it scaled. affine: what is left
    to be computed, alone.
    """

    site: Site
    direction: str
    targets: list[Target]
    scaled: dict[Node, Node]
    affine: Affine | None


@dataclass(frozen=True)
class Reach:
    """A site with the scales and shifts behind it: what they compute, the nodes between, and those that hold it."""

    affine: Affine
    tail: tuple[Node, ...]
    ends: tuple[Node, ...]


class Plan:
    """Every site with its fate, or the reason why it has none in `refused`."""

    def __init__(self, draft: Draft, state: State, sites: list[Site], options: Options) -> None:
        self.draft, self.state, self.sites, self.options = draft, state, sites, options
        self.blocked: dict[tuple[Node, str], str] = {}  # what turned out, by site and direction
        self._reaches = {site.node: self._reach(site) for site in sites}
        while True:
            self.targets: dict[tuple[Node, Node | None], Target] = {}
            self.cloned: set[Node] = set()
            self.gone: dict[Node, tuple[Node, Node]] = {}
            self.fates: dict[Node, Fate] = {}
            self._alone_by: dict[Node, Fate] = {}  # what is alone, by the nodes that hold it
            self.refused: dict[Node, str] = {}
            self._decide()
            found = dict(self._conflicts())
            if not found:
                break
            self.blocked |= found

    def reach(self, site: Site) -> Reach:
        """What is known of a site that has a fate."""
        reach: Any = self._reaches[site.node]
        return reach  # type: ignore[no-any-return]

    # What is decided, from the first site to the last, and then back.

    def _decide(self) -> None:
        why: dict[Node, list[str]] = {site.node: [] for site in self.sites}
        reached = [site for site in self.sites if isinstance(self._reaches[site.node], Reach)]
        for direction, sites in (("up", reached), ("down", reached[::-1]), ("alone", reached)):
            for site in sites:
                if site.node not in self.fates:
                    reason = self.blocked.get((site.node, direction)) or self._settle(site, direction)
                    why[site.node] += [reason] if reason else []
        for site in self.sites:
            reach = self._reaches[site.node]
            if site.node not in self.fates:
                self.refused[site.node] = reach if isinstance(reach, str) else "; ".join(dict.fromkeys(why[site.node]))

    def _settle(self, site: Site, direction: str) -> str:
        """Decides a site's fate, or says why it cannot be this one."""
        reach: Any = self._reaches[site.node]
        source, reason = site.norm.input, "" if site.norm.out else self._layout(site, reach)
        if reason:
            return reason
        fate = Fate(site, direction, [], {}, reach.affine if direction == "alone" else None)
        if direction == "alone":
            return self._alone(fate)
        if direction == "up":
            found = self._up(source, site.node, reach.affine, 1, fate)
        else:
            found = self._written(source, site.node) or self._down(reach.ends, reach.affine, 1)
            found = "its output is an out argument too" if site.norm.out else found
        if isinstance(found, str):
            return found
        for target, affine in found:
            target = self.targets.setdefault((target.call, target.reader), target)
            self.cloned |= {target.call} if target.reader is not None else set()
            fate.targets.append(target)
            if direction == "up":
                target.outs.append((site, affine))
            else:
                target.intos.insert(0, (site, affine))
        self._settled(fate)
        return ""

    def _settled(self, fate: Fate) -> None:
        """Notes a fate, and what stands for the nodes that go: another one, and who read that."""
        site, nodes = fate.site, (*self.reach(fate.site).tail, *fate.site.outputs["out"])
        self.fates[site.node] = fate
        self.gone |= {node: (source, node) for node, source in fate.scaled.items()}
        if self._one_end(site):
            self.gone |= dict.fromkeys(nodes, (site.norm.input, site.node))

    def _one_end(self, site: Site) -> bool:
        """Whether one node holds its output, and no out argument: who reads that node reads all there is of it."""
        return len(self.reach(site).ends) == 1 and not site.norm.out

    def _reach(self, site: Site) -> Reach | str:
        """The site's affine and those of the scales and shifts behind it, or why it has none."""
        values: dict[str, Any] = {}
        for name in FIELDS[1:5]:
            operand = getattr(site.norm, name)
            constant = None if operand is None else self.state.constant(operand)
            if isinstance(constant, str):
                return constant
            values[name] = None if constant is None else constant.value()
        affine = Affine.of(replace(site.norm, **values))
        if not affine.finite:
            return "its statistics, weight or bias are not finite, or running_var + eps is not positive"
        tail: list[Node] = []
        ends = tuple(head for head in site.outputs["out"] if head.users)
        channels = affine.scale.numel()
        while len(ends) == 1 and len(ends[0].users) == 1 and not site.norm.out:
            (reader,) = ends[0].users
            step = scaling(self.state, reader, ends[0], 1, channels)
            if step is None or not reader.users or not affine.after(*step).finite:
                break
            affine, ends = affine.after(*step), (reader,)
            tail.append(reader)
        return Reach(affine, tuple(tail), ends)

    def _layout(self, site: Site, reach: Reach) -> str:
        """Why what stands for the site cannot lie in memory as its output does, empty when it can, copied or not."""
        have, want = val_of(site.norm.input), val_of(reach.ends[0]) if reach.ends else None
        if have is None or want is None or same_sizes(have.stride(), want.stride()) or format_of(want):
            return ""
        return f"its output has strides {tuple(want.stride())} and its input {tuple(have.stride())}"

    # Up: into what makes the input.

    def _up(
        self, value: Node, reader: Node, affine: Affine, axis: int, fate: Fate
    ) -> list[tuple[Target, Affine]] | str:
        """The layers that make a value, each with its part of the affine, or why it is not made by layers alone."""
        while True:
            others = [user for user in value.users if user is not reader and not measures(user, value)]
            if value.target in LAYER_BY_TARGET:
                if others and not self.options.clone_calls:
                    return f"{value.name} is read by {_listed(others)} too (clone_calls=True calls it once more)"
                if others and (written := self._written(value, value)):
                    return written
                return self._behind(value, reader if others else None, affine, axis)
            scaled = self._scaled(value, affine, axis)
            if not (value in self.gone or moved(value) or value.target in _CONCATS or scaled):
                return _foreign(value)
            if others:
                return f"{value.name} is read by {_listed(others)} too"
            if value in self.gone:
                value, reader = self.gone[value]
            elif value.target in _CONCATS:
                return self._branches(value, affine, axis, fate)
            elif scaled is not None:
                source, step = scaled
                affine = affine.behind(*step)
                if not affine.finite:
                    return f"with {value.name} before it, its scale is not finite"
                fate.scaled[value] = source
                value, reader = source, value
            else:
                found = upstream(value, axis, affine.scale.numel())
                if found is None:
                    return f"{value.name} ({value.target}) mixes its channels with other dimensions"
                axis, affine = found[0], affine.take(found[1])
                value, reader = arguments_of(value)[0], value

    def _scaled(self, value: Node, affine: Affine, axis: int) -> tuple[Node, tuple[Tensor, Tensor]] | None:
        """What a value is a constant scale and shift of, and these."""
        for source in (node for node in value.all_input_nodes if node in value.args):
            step = scaling(self.state, value, source, axis, affine.scale.numel())
            if step is not None:
                return source, step
        return None

    def _branches(self, concat: Node, affine: Affine, axis: int, fate: Fate) -> list[tuple[Target, Affine]] | str:
        """Every tensor of a concatenation along the channels takes its part."""
        args = arguments_of(concat)
        tensors, dim = args[0], args[1] if len(args) > 1 else 0
        known = [val for val in map(val_of, tensors) if val is not None and val.ndim > axis]
        if len(known) < len(tensors) or dim % known[0].ndim != axis:
            return f"{concat.name} does not concatenate along its channels"
        if len(set(tensors)) < len(tensors):
            return f"{concat.name} concatenates a tensor with itself"
        sizes = [sizes_of(val.shape)[axis] for val in known]
        if any(type(size) is not int for size in sizes):
            return f"{concat.name} concatenates numbers of channels that are not known"
        found: list[tuple[Target, Affine]] = []
        begin = 0
        for tensor, size in zip(tensors, sizes, strict=True):
            part = self._up(tensor, concat, affine.take(slice(begin, begin + size)), axis, fate)
            if isinstance(part, str):
                return f"of {concat.name}, {part}"
            found += part
            begin += size
        return found

    def _behind(self, call: Node, reader: Node | None, affine: Affine, axis: int) -> list[tuple[Target, Affine]] | str:
        """A layer takes in what comes behind it."""
        target = self.targets.get((call, reader)) or target_of(self.state, call, reader)
        if isinstance(target, str):
            return target
        if axis != target.axis(call) or affine.scale.numel() != target.width(out=True):
            return f"its channels are not those that {call.name} ({call.target}) makes"
        return [(target, affine)]

    # Down: into what reads the output.

    def _down(self, ends: Iterable[Node], affine: Affine, axis: int) -> list[tuple[Target, Affine]] | str:
        """The layers that read a value, each with the affine in its channels, or why it is not read by layers alone."""
        found: list[tuple[Target, Affine]] = []
        for value, user in ((end, user) for end in ends for user in end.users if not measures(user, end)):
            fate = self.fates.get(user)
            if user.target in LAYER_BY_TARGET:
                part = self._ahead(user, value, affine, axis)
            elif fate is not None and fate.direction == "down":
                reach: Any = self._reaches[user]
                part = self._down(reach.ends, affine, axis)
            elif moved(user) is not None:
                place = downstream(user, axis, affine.scale.numel())
                if place is None:
                    return f"{user.name} ({user.target}) mixes its channels with other dimensions"
                part = self._down([user], affine.take(place[1]), place[0])
            else:
                part = f"its output is read by {user.name} ({user.target}), which is no convolution or linear map"
            if isinstance(part, str):
                return part
            found += part
        return found or "its output is returned as it is"

    def _ahead(self, call: Node, value: Node, affine: Affine, axis: int) -> list[tuple[Target, Affine]] | str:
        """A layer takes in what comes ahead of it."""
        target = self.targets.get((call, None)) or target_of(self.state, call, None)
        if isinstance(target, str):
            return target
        if target.layer.input is not value or call in self.cloned:
            return f"its output is more than the input of {call.name}"
        if axis != target.axis(value) or affine.scale.numel() != target.width(out=False):
            return f"its channels are not those that {call.name} ({call.target}) reads"
        if not target.layer.uniform and bool(affine.shift.any()):
            return (
                f"{call.name} ({call.target}) pads with zeros, or spreads its input out, and so sees its shift unevenly"
            )
        return [(target, affine)]

    def _written(self, value: Node, node: Node) -> str:
        """Why a value may be another one by the time that something behind a node reads it, as far as one can tell:
        inputs of the program that share memory when it is called are taken to be written together.
        """
        if self.draft.functional:
            return ""
        bases = bases_of(value)
        for base in list(bases):
            if base in self.state.names:
                names = self.state.sharing(self.state.names[base])
                bases += [root for name in names for root in self.state.roots[name] if root.graph is value.graph]
            elif base.op == "placeholder":
                bases += [node for node in value.graph.find_nodes(op="placeholder") if node not in self.state.names]
        written: list[Node] = []
        for base in dict.fromkeys(bases):
            reads, writes = accesses(base)
            written += [*writes, *filter(self.state.runs_graph, reads)]
        late = {user for user in written if user > node}
        return f"{value.name} may be written to by {_listed(late)}" if late else ""

    # Alone: on its own.

    def _alone(self, fate: Fate) -> str:
        site, affine = fate.site, fate.affine
        assert affine is not None
        if self.options.alone == "leave":
            return ""
        source = site.norm.input
        val: Any = val_of(source)
        dtype = torch.float32 if val.dtype in HALF and not self.convolves(fate) else val.dtype
        before = self._alone_by.get(source) if len(source.users) == 1 else None
        reason = "" if before is None else self._unheld(before.affine, affine, dtype)
        if reason:
            before = None
        if before is None and (reason := self._unheld(None, affine, dtype)):
            return reason
        self._settled(fate)
        if before is not None and before.affine is not None:
            before.affine, fate.affine = before.affine.then(affine), None
        if self._one_end(site):
            self._alone_by[self.reach(site).ends[0]] = before or fate
        return ""

    def _unheld(self, first: Affine | None, affine: Affine, dtype: torch.dtype) -> str:
        """Why a dtype cannot hold what a site computes, behind another one or alone."""
        both = affine if first is None else first.then(affine)
        if not (fits(both.scale, dtype) and fits(both.shift, dtype)):
            return f"its scale and its shift are out of the range of {dtype}"
        bias = torch.zeros((), device="cpu") if first is None else first.shift
        return "" if self.options.force else lossy(affine.lost(bias, dtype), dtype)

    def convolves(self, fate: Fate) -> bool:
        """Whether a site alone becomes a convolution."""
        val = val_of(fate.site.norm.input)
        usual = val is not None and 3 <= val.ndim <= 5 and format_of(val) is not None
        return self.options.alone == "depthwise" and usual

    # What only shows when all is decided.

    def _conflicts(self) -> Iterator[tuple[tuple[Node, str], str]]:
        """Sites and directions that do not work after all."""
        shared: set[int] = set()
        for targets in self._by_memory():
            for target in () if self.options.force else targets:
                yield from (((site.node, direction), why) for site, direction, why in target.losses())
            for target, reason in self._sharing(targets):
                shared.add(id(target))
                yield from _blocked(target.outs, target.intos, reason)
        self.weights: dict[int, tuple[Tensor, Tensor]] = {}
        for group in self.groups():
            if id(group[0]) not in shared:
                made = group[0].computed(self.options.float32_above, self.options.force)
                if isinstance(made, str):  # what is ahead of the layer first: without it, the rest may fit
                    for target in group:
                        yield from _blocked([] if target.intos else target.outs, target.intos, made)
                else:
                    self.weights |= {id(target): made for target in group}

    def _by_memory(self) -> list[list[Target]]:
        """The layers that read the same weight."""
        found: dict[tuple[str, ...], list[Target]] = {}
        for target in self.targets.values():
            found.setdefault(tuple(self.state.sharing(target.weight.name)), []).append(target)
        return list(found.values())

    def groups(self) -> list[list[Target]]:
        """The layers that get the same new weights."""
        found: list[list[Target]] = []
        for targets in self._by_memory():
            alike: list[list[Target]] = []
            for target in targets:
                group = next((g for g in alike if g[0].fresh is target.fresh and g[0].same(target)), None)
                if group is None:
                    alike.append([target])
                else:
                    group.append(target)
            found += alike
        return found

    def _sharing(self, targets: list[Target]) -> Iterator[tuple[Target, str]]:
        """The layers whose weight is somebody else's too, unless they may have copies, which are noted."""
        own = [target for target in targets if target.reader is None]
        for target in targets:
            target.fresh = target.reader is not None
        if not own:
            return
        name, calls = own[0].weight.name, [target.call for target in own]
        readers = self.state.readers(name)
        others = [reader for reader in readers if reader not in calls]
        if len(readers) == len(calls) and not others and all(own[0].same(target) for target in own):
            return
        if self.options.clone_weights:
            for target in own:
                target.fresh = True
            return
        if others:
            reason = f"{name} is read by {_listed(others)} too"
        elif len(readers) > len(calls):
            reason = f"{name} is more than the weight of {_listed(calls)}"
        else:
            reason = f"{name} would differ between {_listed(calls)}"
        for target in own:
            yield target, f"{reason} (clone_weights=True copies it)"

    def told(self, site: Site) -> str:
        """What became of a site, for its edit."""
        fate = self.fates[site.node]
        if fate.direction == "alone":
            return "a 1x1 depthwise convolution" if self.convolves(fate) else "a multiply-add"
        calls = [f"{'a copy of ' if t.reader else ''}{t.call.name} ({t.call.target})" for t in fate.targets]
        return "folded into " + ", ".join(calls)


def _blocked(
    outs: list[tuple[Site, Affine]], intos: list[tuple[Site, Affine]], reason: str
) -> Iterator[tuple[tuple[Node, str], str]]:
    """Sites with the direction in which they do not fold, and why."""
    yield from (((site.node, "down"), reason) for site, _ in intos)
    yield from (((site.node, "up"), reason) for site, _ in outs)


def _listed(nodes: Iterable[Node]) -> str:
    names = sorted({node.name for node in nodes})
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _foreign(value: Node) -> str:
    made: Any = value.args[0] if value.target is operator.getitem else value
    what = "an input" if value.op == "placeholder" else made.target
    return f"its input {value.name} ({what}) is made by no convolution or linear map{quantization(value)}"
