"""Writes a plan: new weights into the state, layers that read them, and the batch norms out of the graph."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from ...decomps.forms import HALF, UPDATED
from ..graph.constants import Constant, State
from ..graph.draft import Draft
from ..graph.meta import val_of
from ..graph.tracing import in_one_mode
from ..rewriting.elementary import metadata_for
from ..rewriting.site import Site
from ..rewriting.tracked import counters_beside
from .channels import format_of, same_sizes
from .plan import Fate, Plan
from .weights import Target

aten = torch.ops.aten


class Absorbing:
    """One plan written into its draft."""

    def __init__(self, draft: Draft, state: State, plan: Plan) -> None:
        self.draft, self.state, self.plan = draft, state, plan

    def write(self, keep_state: bool) -> None:
        """Layers first, then what they make superfluous. keep_state: leave what nothing reads in the state."""
        fates = sorted(self.plan.fates.values(), key=lambda fate: fate.site.node)
        scaled = {node: node.args.index(source) for fate in fates for node, source in fate.scaled.items()}
        groups = self.plan.groups()
        for group in groups:
            self._group(group)
        dead = [target.call for group in groups for target in group if target.reader is not None]
        for node, place in scaled.items():
            dead.append(self._replace(node, node.args[place]))
        for fate in fates:
            dead += self._stand_in(fate)
        self.draft.drop_unchanged()
        for node in sorted(dead, reverse=True):
            self.state.prune(node)
        if not keep_state:
            self.state.drop(counters_beside)

    def _group(self, group: list[Target]) -> None:
        """Gives layers that fold alike their weights."""
        first = group[0]
        made, bias = self.plan.weights[id(first)]
        weight, held = first.weight, first.bias
        leaf, fresh = weight.name.rpartition(".")[2].removesuffix("_folded"), None
        if first.fresh:
            fresh = self.state.add(weight, f"{leaf}_folded", made, weight.tensor.requires_grad)
        else:
            self.state.replace(weight.name, made)
        added = None
        if held is not None and self._replaces(held, group):
            new = torch.empty_like(held.tensor.detach())
            view: Any = held.view(new)
            view.copy_(bias.view(view.shape))
            self.state.replace(held.name, new)
        elif held is not None or first.out is not None or bool(bias.any()):
            beside = first.call if first.form.bias is None else first.layer.weight if held is None else first.layer.bias
            val: Any = val_of(beside)
            leaf = leaf.replace("weight", "bias") if "weight" in leaf else f"{leaf}_bias"
            value = bias.to(val.dtype).to(weight.tensor.device)
            added = self.state.add(weight, f"{leaf}_folded" if fresh else leaf, value, self._learns(group))
        for target in group:
            self._call(target, fresh, added)

    def _replaces(self, held: Constant, group: list[Target]) -> bool:
        """Whether a new bias can take the place of the old one: nothing else reads that, and it is as fine."""
        first, val = group[0], val_of(group[0].layer.bias)
        readers = self.state.readers(held.name)
        own = len(readers) == len(group) and {*readers} == {target.call for target in group} and not first.fresh
        new = held.view(held.tensor.detach())
        fine = val is not None and torch.promote_types(val.dtype, held.tensor.dtype) == held.tensor.dtype
        return own and fine and new is not None and new.numel() == held.tensor.numel() == first.width(out=True)

    def _learns(self, group: list[Target]) -> bool:
        """Whether a new bias learns: its weight does, or a shift that is in it."""
        sites = (site for target in group for site, _ in (*target.intos, *target.outs))
        return group[0].weight.tensor.requires_grad or any(self._requires_grad(site) for site in sites)

    def _requires_grad(self, site: Site, fields: tuple[str, ...] = ("weight", "bias")) -> bool:
        """Whether the weight or bias of a batch norm learns."""
        operands = (getattr(site.norm, field) for field in fields)
        found = [self.state.constant(operand) for operand in operands if operand is not None]
        return any(isinstance(constant, Constant) and constant.tensor.requires_grad for constant in found)

    def _call(self, target: Target, weight: str | None, bias: str | None) -> None:
        """Makes a call read its new weights, a call of its own if something else reads the old one."""
        call, form, root = target.call, target.form, target.weight.root
        if target.reader is not None:
            with call.graph.inserting_after(call):
                cloned = call.graph.node_copy(call)
            target.reader.replace_input_with(call, cloned)
            self.draft.forget_signatures(call)
            call = cloned
        changed = {}
        if weight is not None:
            changed[form.weight] = self._chained(target.weight, self.state.node(root, weight), call)
        shift = None if bias is None else self.state.node(root, bias)
        if shift is not None and form.bias is not None:
            changed[form.bias] = shift
        if shift is not None and form.bias is None and form.biased is not None:
            given = {**form.given(call.args, call.kwargs), **changed}
            call.target, call.kwargs = form.biased, {}
            call.args = (shift, given[form.input], given[form.weight])
            return
        if shift is not None and form.bias is None:
            self._added(call, shift)
        _set(call, list(form.defaults), changed)

    def _chained(self, weight: Constant, root: Node, call: Node) -> Node:
        """What a call reads of a new weight: through the same views and casts as the old one."""
        for link in weight.chain:
            with call.graph.inserting_before(call):
                copied = call.graph.node_copy(link)
            copied.args = (root, *link.args[1:])
            root = copied
        return root

    def _added(self, call: Node, bias: Node) -> None:
        """Adds a bias to what a call makes, in its last dimension."""
        with call.graph.inserting_after(call):
            node = call.graph.call_function(aten.add.Tensor, (call, bias))
        node.meta = dict(call.meta)
        call.replace_all_uses_with(node, delete_user_cb=lambda user: user is not node)

    def _stand_in(self, fate: Fate) -> list[Node]:
        """Puts what stands for a site in its place; returns what is dead then."""
        site, reach = fate.site, self.plan.reach(fate.site)
        source = site.form.given(site.node.args, site.node.kwargs)["input"]
        stands = source if fate.affine is None else self._alone(fate, source)
        have, want = val_of(stands), val_of(reach.ends[0]) if reach.ends else None
        if have is not None and want is not None and not site.norm.out and not same_sizes(have.stride(), want.stride()):
            stands = self._new(site.node, aten.clone.default, (stands,), {"memory_format": format_of(want)})
            stands.meta["val"] = want
        if site.norm.out:
            stands = self._new(site.node, aten.copy_.default, (site.norm.out["out"], stands))
        for end in reach.ends:
            end.replace_all_uses_with(stands)
        for holder, statistic in returned_as_they_are(site).items():
            self._replace(holder, statistic)
        gone = [*reach.tail, *(holder for holders in site.outputs.values() for holder in holders), site.node]
        for node in (*reach.tail, *site.outputs["out"]):
            self.draft.rename(node, stands)
        return gone

    def _replace(self, node: Node, stands: Any) -> Node:
        node.replace_all_uses_with(stands)
        self.draft.rename(node, stands)
        return node

    def _alone(self, fate: Fate, source: Node) -> Node:
        """One multiply-add, or one convolution, that computes what a site did: its last node."""
        site, affine = fate.site, fate.affine
        assert affine is not None
        mean, val = self.state.constant(site.norm.running_mean), val_of(source)
        assert isinstance(mean, Constant)
        assert val is not None
        channels, spatial = affine.scale.numel(), val.ndim - 2
        folded = self.plan.convolves(fate)
        half = val.dtype in HALF and not folded
        dtype = torch.float32 if half else val.dtype
        shape = (channels, 1, *[1] * spatial) if folded else (channels,)
        device = mean.tensor.device
        parts = (("scale", affine.scale, shape, "weight"), ("shift", affine.shift, (channels,), "bias"))
        scale, shift = (
            self.state.node(
                mean.root,
                self.state.add(mean, leaf, tensor.to(dtype).view(to).to(device), self._requires_grad(site, (field,))),
            )
            for leaf, tensor, to, field in parts
        )
        if folded:
            ones, zeros = [1] * spatial, [0] * spatial
            args = (source, scale, shift, ones, zeros, ones, False, zeros, channels)
            return self._new(site.node, aten.convolution.default, args)
        wide = self._new(site.node, aten._to_copy.default, (source,), {"dtype": dtype}) if half else source
        if spatial:
            along = [channels, *[1] * spatial]
            scale, shift = (self._new(site.node, aten.view.default, (t, along)) for t in (scale, shift))
        scaled = self._new(site.node, aten.mul.Tensor, (wide, scale))
        made = self._new(site.node, aten.add.Tensor, (scaled, shift))
        return self._new(site.node, aten._to_copy.default, (made,), {"dtype": val.dtype}) if half else made

    def _new(self, node: Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Node:
        """A call ahead of a node that it stands for, with its metadata and the value that it makes."""
        name = target.overloadpacket.__name__
        with node.graph.inserting_before(node):
            made = node.graph.create_node("call_function", target, args, kwargs or {}, name=name)
        operands = made.all_input_nodes
        values = dict(zip(operands, in_one_mode([val_of(operand) for operand in operands]), strict=True))
        read = [values.get(a, a) if isinstance(a, Node) else a for a in args]
        made.meta = {**metadata_for(node), "val": target(*read, **(kwargs or {}))}
        return made


def returned_as_they_are(site: Site) -> dict[Node, Node]:
    """The nodes that hold the running statistics that a site in eval returns, each with what it is."""
    if not site.tracks or site.norm.training is not False:
        return {}
    statistics = zip(UPDATED, (site.norm.running_mean, site.norm.running_var), strict=True)
    return {holder: statistic for role, statistic in statistics for holder in site.outputs.get(role, ())}


def _set(call: Node, names: list[str], changed: dict[str, Node]) -> None:
    """Gives a call other operands, by position where it has them by position."""
    args, kwargs = list(call.args), dict(call.kwargs)
    for name, operand in changed.items():
        place = names.index(name)
        if place < len(args):
            args[place] = operand
        elif place == len(args) and name not in kwargs:
            args.append(operand)
        else:
            kwargs[name] = operand
    call.args, call.kwargs = tuple(args), kwargs
