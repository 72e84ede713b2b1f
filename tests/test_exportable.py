"""exportable: momentum=None in train is captured, averages cumulatively, and leaves its model alone."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import torch_batchnorm as tbn
from programs import export, same, saved_and_loaded, step

BATCHES = torch.randn(5, 6, 3, 4, 4, generator=torch.Generator().manual_seed(1)) + 3


def made():
    torch.manual_seed(0)
    return nn.Sequential(nn.BatchNorm2d(3, momentum=None), nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3, momentum=None))


def captured(net, **options):
    with tbn.exportable(net) as model:
        assert model is net
        return torch.export.export(model, (BATCHES[0],), **options)


DIALECTS = {
    "training IR": lambda program: program,
    "family": tbn.consolidate,
    "saved": saved_and_loaded,
    "ATEN": lambda program: program.run_decompositions(),
    "ATEN, family": lambda program: tbn.consolidate(program.run_decompositions()),
}


def test_without_it_export_fails():
    with pytest.raises(Exception, match=r"(?i)data-dependent|item"):
        export(made(), BATCHES[0])


@pytest.mark.parametrize("name", DIALECTS)
def test_statistics_are_the_means_of_the_batches(name):
    net = made()
    program = DIALECTS[name](captured(copy.deepcopy(net)))
    module = program.module()
    with torch.no_grad():
        for batch in BATCHES:
            assert same(module(batch), net(batch))
    flat = BATCHES.transpose(1, 2).flatten(2)
    state = dict(module.named_buffers())
    assert torch.allclose(state["0.running_mean"], flat.mean(2).mean(0), atol=1e-6)
    assert torch.allclose(state["0.running_var"], flat.var(2).mean(0), atol=1e-6)
    assert state["0.num_batches_tracked"] == 5
    assert all(torch.allclose(state[k], v, rtol=1e-5) for k, v in net.named_buffers())


def test_it_trains_as_the_eager_model():
    net = made()
    found = step(captured(copy.deepcopy(net)).module(), BATCHES[0])
    want = step(net, BATCHES[0])
    assert same(found[0], want[0])
    assert same(found[2], want[2])


def test_the_model_is_untouched():
    net = made()
    state, attributes = copy.deepcopy(net.state_dict()), [set(m.__dict__) for m in net.modules()]
    captured(net)
    assert same(dict(net.state_dict()), dict(state))
    assert [set(m.__dict__) for m in net.modules()] == attributes
    with pytest.raises(RuntimeError), tbn.exportable(net):
        torch.export.export(net, (torch.randn(2, 5, 4, 4),))
    assert same(dict(net.state_dict()), dict(state))
    assert [set(m.__dict__) for m in net.modules()] == attributes


def test_in_eval_and_with_a_momentum_nothing_is_different():
    for net in (made().eval(), nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1))):
        assert tbn.render(captured(net)) == tbn.render(export(net, BATCHES[0]))


def test_a_dynamic_batch():
    program = captured(made(), dynamic_shapes=({0: torch.export.Dim("batch", min=2)},))
    assert program.module()(BATCHES[0, :3]).shape[0] == 3


def test_a_forward_of_its_own_is_refused():
    class Own(nn.BatchNorm2d):
        def forward(self, x):
            return super().forward(x) + 1

    net = nn.Sequential(Own(3, momentum=None))
    with pytest.raises(tbn.InvalidBatchNorm, match="0: momentum is None in a Own, whose forward is its own"):
        captured(net)
    assert "forward" not in net[0].__dict__


def _closure():
    mean, var = torch.zeros(3), torch.ones(3)

    class Closure(nn.Module):
        def forward(self, x):
            return functional.batch_norm(x, mean, var, training=True)

    return Closure()


class Attribute(nn.Module):
    def __init__(self):
        super().__init__()
        self.mean, self.var = torch.zeros(3), torch.ones(3)

    def forward(self, x):
        return functional.batch_norm(x, self.mean, self.var, training=True)


@pytest.mark.parametrize("make", [_closure, Attribute], ids=("closure", "attribute"))
def test_statistics_that_are_no_buffers_are_one_early_error(make):
    with pytest.raises(tbn.InvalidBatchNorm, match=r"running_mean is a tensor of shape \[3\] that no module holds"):
        captured(make())


def test_its_mode_is_switched_by_exporting_again():
    result = tbn.SwitchMode("eval")(captured(nn.BatchNorm2d(3, momentum=None)))
    assert ["as exportable writes momentum=None" in d.reason for d in result.declined] == [True]
    assert result.modified is False
