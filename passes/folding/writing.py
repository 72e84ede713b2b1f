"""Writes a plan: new weights into the state, layers that read them, and the batch norms out of the graph."""

from __future__ import annotations

from itertools import takewhile
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from ...decomps.affine import Affine
from ...decomps.forms import HALF, UPDATED
from ..graph.constants import Constant
from ..graph.meta import format_of, same_sizes, val_of
from ..graph.state import State
from ..graph.tracing import in_one_mode
from ..rewriting.elementary import metadata_for
from ..rewriting.site import Site
from ..rewriting.tracked import counters_beside
from .plan import Decision, Group, Plan
from .weights import Target

aten = torch.ops.aten


class Writing:
    """One plan being written."""

    def __init__(self, state: State, plan: Plan) -> None:
        self.draft, self.state, self.plan = state.draft, state, plan

    def write(self) -> None:
        """Layers first, then what they make superfluous."""
        decisions = sorted(self.plan.decided.values(), key=lambda decision: decision.site.node)
        # before any call is changed: what was planned names nodes
        scaled = {node: node.args.index(source) for made in decisions for node, source in made.scaled.items()}
        dead = list(scaled)
        for group in self.plan.groups:
            self._group(group)
            dead += [target.call for target in group.targets if target.reader is not None]
        for node, place in scaled.items():  # by place: the operand may be another call of the same layer by now
            stands: Any = node.args[place]
            self.draft.replace(node, stands)
        for decision in decisions:
            dead += self._stand_in(decision)
        # decomposed, a batch norm returns the statistics that it did not write, and the signature lists them as written
        self.draft.listing.drop_mutations(unchanged=True)
        for node in sorted(dead, reverse=True):  # readers first
            self.state.prune(node)
        if not self.plan.options.keep_state:
            self.state.drop(counters_beside)

    def _group(self, group: Group) -> None:
        """Gives layers that fold alike their weights."""
        first = group.targets[0]
        weight, fresh = first.weight, None
        leaf = weight.name.rpartition(".")[2].removesuffix("_folded")
        # tied names stay tied: what is replaced is replaced under each of them
        if first.fresh:
            fresh = self.state.add(weight, f"{leaf}_folded", group.weight, weight.tensor.requires_grad)
        else:
            self.state.replace(weight.name, group.weight)
        bias = self._bias(group, leaf.replace("weight", "bias") if "weight" in leaf else f"{leaf}_bias")
        for target in group.targets:
            self._call(target, fresh, bias)

    def _bias(self, group: Group, leaf: str) -> str | None:
        """Puts their bias where the old one is; or adds one beside their weight and returns its name.

        One that was not there is added where it is zero, too, so that which names there are does not depend on values;
        but for the shift of what is ahead of a layer.
        """
        first = group.targets[0]
        weight, held = first.weight, first.bias
        if held is not None and self._replaces(held, group.targets):
            new = torch.empty_like(held.tensor.detach())
            view: Any = held.view(new)
            view.copy_(group.bias.view(view.shape))
            self.state.replace(held.name, new)
            return None
        if held is None and not first.folds["up"] and not bool(group.bias.any()):
            return None
        made: Any = self.state.known(first.call, like=first.layer.weight)
        dtype = made.dtype if first.form.bias is None else (held or weight).value().dtype
        bias = group.bias.to(dtype).to(weight.tensor.device)
        # a new bias learns if its weight does, or a shift that is in it
        sites = (site for target in group.targets for folds in target.folds.values() for site, _ in folds)
        learns = weight.tensor.requires_grad or any(self._learns(site, "weight", "bias") for site in sites)
        return self.state.add(weight, f"{leaf}_folded" if first.fresh else leaf, bias, learns)

    def _replaces(self, held: Constant, targets: list[Target]) -> bool:
        """Whether a new bias can take the place of the old one: nothing else reads that, and it is as fine."""
        first, read = targets[0], held.value().dtype
        readers = self.state.readers(held.name)
        own = len(readers) == len(targets) and {*readers} == {target.call for target in targets} and not first.fresh
        new = held.view(held.tensor.detach())
        fine = torch.promote_types(read, held.tensor.dtype) == held.tensor.dtype
        return own and fine and new is not None and new.numel() == held.tensor.numel() == first.width(out=True)

    def _learns(self, site: Site, *fields: str) -> bool:
        """Whether one of these fields of a batch norm learns."""
        constants = self.plan.reaches[site].constants
        return any(constants[field].learns for field in fields if field in constants)

    def _call(self, target: Target, weight: str | None, bias: str | None) -> None:
        """Makes a call read its new weights, a call of its own if something else reads the old one."""
        call, form, root = target.call, target.form, target.weight.root
        if target.reader is not None:
            with call.graph.inserting_after(call):
                cloned = call.graph.node_copy(call)
            target.reader.replace_input_with(call, cloned)
            # torch.export.unflatten would look for the one call that the module's signature tells of
            self.draft.calls.leave(call, otherwise=True)
            call = cloned
        changed = {}
        if weight is not None:
            changed[form.weight] = self._chained(target.weight, self.state.node(root, weight), call)
        if bias is not None:
            shift = self.state.node(root, bias)
            if form.bias is not None:
                changed[form.bias] = shift
            elif form.biased is not None:
                given = {**form.given(call.args, call.kwargs), **changed}
                call.target, call.args, call.kwargs = form.biased, (shift, given[form.input], given[form.weight]), {}
                return
            else:
                self._added(call, shift)
        _set(call, changed)

    def _chained(self, weight: Constant, root: Node, call: Node) -> Node:
        """What a call reads of a new weight: through the same views and casts as the old one."""
        for link in weight.chain:
            with call.graph.inserting_before(call):
                copied = call.graph.node_copy(link)
            # a weight that is transposed or cast on its way stays so, and `state_dict` keeps its layout
            copied.args = (root, *link.args[1:])
            root = copied
        return root

    def _added(self, call: Node, bias: Node) -> None:
        """Adds a bias to what a call makes, in its last dimension."""
        with call.graph.inserting_after(call):
            node = call.graph.call_function(aten.add.Tensor, (call, bias))
        node.meta = dict(call.meta)
        # the sum itself reads the call
        call.replace_all_uses_with(node, delete_user_cb=lambda user: user is not node)

    def _stand_in(self, decision: Decision) -> list[Node]:
        """Puts what stands for a site in its place; returns what is dead then."""
        site, ends = decision.site, decision.reach.ends
        # read again: an earlier fold may have put another node there
        stands = site.form.given(site.node.args, site.node.kwargs)["input"]
        if decision.affine is not None:
            stands = self._alone(decision, decision.affine, stands)
        have, want = val_of(stands), val_of(ends[0]) if ends else None
        # readers may rely on strides (view does): what stands for the site has its own, or is copied
        if have is not None and want is not None and not site.norm.out and not same_sizes(have.stride(), want.stride()):
            stands = self._new(site.node, aten.clone.default, (stands,), {"memory_format": format_of(want)})
            stands.meta["val"] = want
        if site.norm.out:
            stands = self._new(site.node, aten.copy_.default, (site.norm.out["out"], stands))
        for end in ends:
            end.replace_all_uses_with(stands)
        for holder, statistic in returned_as_they_are(site).items():
            self.draft.replace(holder, statistic)
        for node in (*decision.reach.tail, *site.outputs["out"]):
            self.draft.rename(node, stands)
        return [*decision.reach.tail, *(holder for held in site.outputs.values() for holder in held), site.node]

    def _alone(self, decision: Decision, affine: Affine, source: Node) -> Node:
        """One multiply-add, or one convolution, that computes what a site did: its last node."""
        site = decision.site
        val = self.state.known(source, like=site.norm.running_mean)
        assert val is not None
        # [C] broadcasts along the last dimension, and channels are in dimension 1
        channels, spatial = affine.scale.numel(), val.ndim - 2
        folded, ones, zeros = decision.convolves(self.plan.options.alone), [1] * spatial, [0] * spatial
        half = val.dtype in HALF and not folded
        dtype = torch.float32 if half else val.dtype
        weight = affine.scale.view(channels, 1, *ones) if folded else affine.scale
        scale, shift = (
            self._held(site, leaf, tensor.to(dtype), field)
            for leaf, tensor, field in (("scale", weight, "weight"), ("shift", affine.shift, "bias"))
        )
        if folded:
            args = (source, scale, shift, ones, zeros, ones, False, zeros, channels)
            return self._new(site.node, aten.convolution.default, args)
        if half:  # as the kernels do, which compute in float32 and round once
            source = self._new(site.node, aten._to_copy.default, (source,), {"dtype": dtype})
        if spatial:
            scale, shift = (self._new(site.node, aten.view.default, (t, [channels, *ones])) for t in (scale, shift))
        scaled = self._new(site.node, aten.mul.Tensor, (source, scale))
        made = self._new(site.node, aten.add.Tensor, (scaled, shift))
        return self._new(site.node, aten._to_copy.default, (made,), {"dtype": val.dtype}) if half else made

    def _held(self, site: Site, leaf: str, tensor: Tensor, field: str) -> Node:
        """A new parameter beside the running mean of a site, that learns if a field of it does."""
        mean = self.plan.reaches[site].constants["running_mean"]
        name = self.state.add(mean, leaf, tensor.to(mean.tensor.device), self._learns(site, field))
        return self.state.node(mean.root, name)

    def _new(self, node: Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Node:
        """A call ahead of a node that it stands for, with its metadata and the value that it makes."""
        name = target.overloadpacket.__name__
        with node.graph.inserting_before(node):
            made = node.graph.create_node("call_function", target, args, kwargs or {}, name=name)
        operands = made.all_input_nodes
        values = dict(zip(operands, in_one_mode([val_of(operand) for operand in operands]), strict=True))
        # torch refuses fake tensors of two modes in one call
        read = [values.get(a, a) if isinstance(a, Node) else a for a in args]
        made.meta = {**metadata_for(node), "val": target(*read, **(kwargs or {}))}
        return made


def returned_as_they_are(site: Site) -> dict[Node, Node]:
    """The nodes that hold the running statistics that a site in eval returns, each with what it is."""
    if not site.tracks or site.norm.training is not False:
        return {}
    statistics = zip(UPDATED, (site.norm.running_mean, site.norm.running_var), strict=True)
    return {holder: statistic for role, statistic in statistics for holder in site.outputs.get(role, ())}


def _set(call: Node, changed: dict[str, Node]) -> None:
    """Gives a call other operands, by position as far as it has all of those before."""
    schema = call.target._schema.arguments  # type: ignore[union-attr]
    names = [argument.name for argument in schema if not argument.kwarg_only]
    given = {**dict(zip(names, call.args, strict=False)), **call.kwargs, **changed}
    call.args = tuple(given.pop(name) for name in [*takewhile(given.__contains__, names)])
    call.kwargs = given
