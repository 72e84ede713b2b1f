"""Switching and freezing edit a call as it was given: by keyword or by position, with what its user had done to it."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import torch_batchnorm as tbn
from programs import Op, aten, call_graph, export, legacy_left, nodes, same

X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
TRAINS = next(form for form in tbn.FORMS if form.overload is aten.native_batch_norm.default)


def tells(x, weight, bias, mean, var):
    """A batch norm that writes its statistics, which are read afterwards."""
    return functional.batch_norm(x, mean, var, weight, bias, True), mean + 0, var + 0


class Tells(Op):
    def forward(self, x):
        return self.function(x, self.weight, self.bias, self.running_mean, self.running_var)


@pytest.mark.parametrize("consolidated", [False, True], ids=("legacy", "family"))
def test_what_read_the_new_mean_and_variance_reads_the_mean_and_the_variance_in_eval(consolidated):
    """In a functional program both are outputs of the call, and each stands for its own."""
    model = Tells(tells)
    program = export(model, X).run_decompositions()
    program = tbn.consolidate(program) if consolidated else program
    assert legacy_left(program) == [] or not consolidated
    evaluates = tbn.switch_mode(program, "eval")
    with torch.no_grad():
        out, mean, var = evaluates.module()(X)
    assert same([mean, var], [model.running_mean, model.running_var])
    assert same(out, functional.batch_norm(X, mean, var, model.weight.detach(), model.bias.detach()))
    assert nodes(tbn.switch_mode(evaluates, "train")) == nodes(program)


@pytest.mark.parametrize("keywords", [False, True], ids=("by position", "by keyword"))
def test_freezing_cuts_off_the_gradients_of_a_weight_and_a_bias_however_they_are_given(keywords):
    program = call_graph(TRAINS, True, keywords=keywords, unread=TRAINS.roles[1:])
    before = nodes(program)
    frozen = tbn.freeze(program, affine=True)
    channels = [torch.rand(3).requires_grad_() for _ in range(2)]
    statistics = torch.rand(3), torch.rand(3) + 0.5
    x = X.clone().requires_grad_()
    frozen(x, *channels, *statistics)[0].sum().backward()
    assert [t.grad is None for t in (x, *channels)] == [False, True, True]
    (site,) = frozen.graph.find_nodes(op="call_function", target=TRAINS.overload)
    assert (len(site.args), len(site.kwargs)) == ((0, 8) if keywords else (8, 0))
    assert nodes(tbn.unfreeze(frozen)) == before


# What the user has cut off already: the weight, the bias.
CUT = {
    "the weight, and there is no bias": (lambda w, b: (w.detach(), None), 0),
    "the weight": (lambda w, b: (w.detach(), b), 1),
    "both": (lambda w, b: (w.detach(), b.detach()), 0),
    "neither, and there is no weight": (lambda w, b: (None, b), 1),
}


@pytest.mark.parametrize(("cut", "more"), CUT.values(), ids=CUT)
def test_what_the_user_cut_off_stays_cut_off(cut, more):
    def function(x, weight, bias, mean, var):
        return functional.batch_norm(x, mean, var, *cut(weight, bias), True)

    program = export(Op(function), X)
    detached = [n for n in program.graph.nodes if n.target is aten.detach.default]
    frozen = tbn.freeze(program, affine=True)
    assert len([n for n in frozen.graph.nodes if n.target is aten.detach.default]) == len(detached) + more
    assert nodes(tbn.unfreeze(frozen)) == nodes(program)


def test_statistics_that_the_decomposition_table_filled_in_do_not_train():
    """The table can leave no note: they are constants that one call reads, and nothing reads their update."""
    net = nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False), nn.BatchNorm1d(3)).eval()
    program = export(net, X).run_decompositions(tbn.decomposition_table())
    assert [entry.stats for entry in tbn.inspect(program).entries] == ["batch", "running"]
    for made in (tbn.Unfreeze(), tbn.SwitchMode("eval")):
        assert made(program).modified is False, "the program does not train"
    assert len(tbn.SwitchMode("train")(program).edits) == 1
    assert len(tbn.Fold(alone="multiply_add")(program).edits) == 1
