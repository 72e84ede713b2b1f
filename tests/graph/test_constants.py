"""What operands are: tensors of the state, through views and what is computed of them, in nested graphs too."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from folds import DIALECTS, IMAGE, checked, edited, exported, folded, in_form, net, vector
from programs import export, same
from torch_batchnorm import Fold
from torch_batchnorm.passes.graph.constants import Constant, Constants
from torch_batchnorm.passes.graph.draft import Draft
from torch_batchnorm.passes.rewriting.site import find_sites


def norm(**given):
    """A batch norm of the convolution's output, of whose operands some are computed."""

    def forward(m, x):
        operands = {name: getattr(m.bn, name) for name in ("running_mean", "running_var", "weight", "bias")}
        operands |= {name: make(m) for name, make in given.items()}
        return functional.batch_norm(m.conv(x), **operands)

    return forward


def stacked(count):
    return nn.Buffer(torch.rand(count, 6, dtype=torch.float64) + 0.5)


COMPUTED = {
    "statistics times a number": (norm(running_mean=lambda m: m.bn.running_mean * 2), {}),
    "the exponential of a weight": (norm(weight=lambda m: m.bn.weight.exp()), {}),
    "the absolute value of a weight plus eps": (norm(weight=lambda m: m.bn.weight.abs() + 1e-3), {}),
    "of two tensors": (norm(bias=lambda m: m.bn.bias - m.bn.running_mean * m.bn.weight), {}),
    "weight norm": (
        norm(weight=lambda m: torch._weight_norm(m.v, m.g, 0).view(-1)),
        {"v": lambda: vector(6, 1), "g": lambda: vector(6, 1)},
    ),
    "one of several rows": (norm(running_mean=lambda m: m.all[1]), {"all": lambda: stacked(3)}),
    "one of several parts": (norm(running_var=lambda m: m.all.unbind(0)[2]), {"all": lambda: stacked(3)}),
    "a part of a chunk": (norm(running_var=lambda m: m.all.chunk(3)[0].squeeze(0)), {"all": lambda: stacked(3)}),
    "ones like the statistics": (norm(weight=lambda m: torch.ones_like(m.bn.running_var)), {}),
    "a copy that nothing writes to": (norm(weight=lambda m: m.bn.weight.clone()), {}),
    "a scale by hand behind it": (
        lambda m, x: m.bn(m.conv(x)) * (m.s * torch.rsqrt(m.bn.running_var + 1e-5)).view(1, 6, 1, 1),
        {"s": lambda: vector(6)},
    ),
}


@pytest.mark.parametrize("form", DIALECTS)
@pytest.mark.parametrize("name", COMPUTED)
def test_what_is_computed_from_constants_is_one(name, form):
    function, members = COMPUTED[name]
    program, x = in_form(net(function, **members), IMAGE, form=form)
    result = folded(program, x)
    assert not [n for n in result.program.graph.nodes if "mul" in n.name or "exp" in n.name]


VARYING = {
    "at random": (norm(weight=lambda m: m.bn.weight + torch.rand_like(m.bn.weight)), "computed by aten.add"),
    "in a copy that is written to": (norm(weight=lambda m: m.bn.weight.clone().add_(1)), "computed by aten.add"),
    "in a result that is written to": (norm(weight=lambda m: write(m.bn.weight * 2)), "computed by aten.add_"),
    "in a view of a result that is written to": (norm(weight=lambda m: write((m.bn.weight * 2), 1)), "writes to it"),
}


def write(tensor, part=None):
    (tensor if part is None else tensor[part:]).add_(1)
    return tensor


@pytest.mark.parametrize("name", VARYING)
def test_what_is_computed_of_more_than_constants_is_none(name):
    function, reason = VARYING[name]
    program, _ = exported(edited(function))
    (declined,) = Fold()(program).declined
    assert reason in declined.reason


@pytest.mark.parametrize("form", DIALECTS)
def test_statistics_computed_of_an_input_are_none(form):
    row = edited(lambda m, x, w: functional.batch_norm(m.conv(x), m.bn.running_mean * w, m.bn.running_var), IMAGE, (6,))
    program, *inputs = exported(row, form)
    (declined,) = checked(program, *inputs).declined
    assert "computed by aten.mul" in declined.reason


def test_what_autocast_computes_is_none():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.bn = nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6)

        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                mean = (
                    self.bn.running_mean.unsqueeze(0).mm(torch.ones_like(self.conv.weight.view(6, -1)[:, :6])).view(6)
                )
                return functional.batch_norm(self.conv(x), mean.float(), self.bn.running_var) + 1

    program = export(Net().eval(), torch.randn(IMAGE))
    (site,) = find_sites((draft := Draft(program)).graphs)
    assert site.path
    found = Constants(draft).constant(site.norm.running_mean)
    assert "computed by aten.mm" in found


def constants_of(program):
    draft = Draft(program)
    (site,) = find_sites(draft.graphs)
    return Constants(draft), site


class Writes(nn.Module):
    """A batch norm in a region of its own, and something that writes to a statistic elsewhere."""

    def __init__(self, write):
        super().__init__()
        self.write, self.bn = write, nn.BatchNorm2d(4)

    def forward(self, x):
        with torch.no_grad():
            y = self.bn(x)
        with torch.no_grad():
            self.write(self.bn)
            return y + 1


WRITES = {
    "nobody": (lambda bn: None, False),
    "a region beside it": (lambda bn: bn.running_mean.add_(1), True),
    "a region beside it, through a slice": (lambda bn: bn.running_mean[1:].mul_(2), True),
    "a region beside it, to another": (lambda bn: bn.running_var.add_(1), False),
}


@pytest.mark.parametrize("name", WRITES)
def test_writes_are_seen_across_nested_graphs(name):
    write, written = WRITES[name]
    constants, site = constants_of(export(Writes(write).eval(), torch.randn(IMAGE)))
    assert site.path
    found = constants.constant(site.norm.running_mean)
    assert isinstance(found, str) is written, found
    assert not written or "writes to" in found


class HandedOut(nn.Module):
    """A view of a statistic that a region returns, and perhaps somebody writes to."""

    def __init__(self, write):
        super().__init__()
        self.write, self.conv, self.bn = write, nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6)

    def forward(self, x):
        with torch.no_grad():
            y, part = self.conv(x) * 1, self.bn.running_mean[2:]
        if self.write:
            part.add_(1)
        return self.bn(y) + part.sum()


@pytest.mark.parametrize("write", [False, True])
def test_a_write_is_seen_behind_the_region_that_hands_the_memory_out(write):
    constants, site = constants_of(export(HandedOut(write).eval(), torch.randn(IMAGE)))
    found = constants.constant(site.norm.running_mean)
    assert isinstance(found, str) is write, found


def test_a_constant_of_a_nested_graph_is_what_the_call_binds():
    program = export(Writes(lambda bn: None).eval(), torch.randn(IMAGE))
    constants, site = constants_of(program)
    found = constants.constant(site.norm.running_var)
    assert isinstance(found, Constant)
    assert (found.name, found.root.op) == ("bn.running_var", "placeholder")
    assert same(found.value(), program.state_dict["bn.running_var"])


def test_a_constant_that_something_else_is_computed_of_stays_one():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.rand(6))

        def forward(self, x):
            scale = self.scale.abs()
            return torch.bernoulli(scale) * x, scale

    draft = Draft(export(Net().eval(), torch.randn(2, 6)))
    constants, graph = Constants(draft), draft.graphs[0][1]
    named = {node.name: node for node in graph.nodes}
    # asked first of what is no constant: that is remembered of it, and not of what it is made of
    assert not any(isinstance(constants.constant(node), Constant) for node in (named["mul"], named["bernoulli"]))
    assert isinstance(constants.constant(named["abs_1"]), Constant)
