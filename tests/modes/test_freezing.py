"""freeze, unfreeze: chosen batch norms keep to their running statistics, through every switch of the mode."""

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import torch_batchnorm as tbn
from programs import export, fingerprint, nodes, same, saved_and_loaded, step
from torch_batchnorm import Freeze, SwitchMode, Unfreeze

X = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 3, 2), nn.BatchNorm2d(3), nn.BatchNorm2d(3))
        self.head = nn.BatchNorm2d(3)

    def forward(self, x):
        return self.head(self.backbone(x))


def made():
    torch.manual_seed(0)
    net = Net()
    for bn in (m for m in net.modules() if isinstance(m, nn.BatchNorm2d)):
        bn.running_mean.normal_(std=0.1)
    return net


def eager(affine=False):
    """The model as a user freezes it by hand."""
    net = made()
    net.backbone.eval()
    for bn in net.backbone[1:] if affine else ():
        bn.requires_grad_(False)
    return net


FORMS = {
    "training IR": lambda net: export(net, X),
    "family": lambda net: tbn.consolidate(export(net, X)),
    "module": lambda net: export(net, X).module(),
}


def run(program):
    return step(program if isinstance(program, nn.Module) else program.module(), X)


@pytest.mark.parametrize("affine", [False, True], ids=("weights learn", "affine too"))
@pytest.mark.parametrize("form", FORMS)
def test_frozen_as_by_hand(form, affine):
    program = FORMS[form](made())
    before = fingerprint(program)
    result = Freeze("backbone.*", affine)(program)
    assert (len(result.edits), result.declined, fingerprint(program)) == (2, (), before)
    assert Freeze("backbone.*", affine)(result.program).modified is False
    assert tbn.verify(result.program) == ()
    want = step(eager(affine), X)
    found = run(result.program)
    assert same(found, want)
    assert [g is None for g in found[2]] == [g is None for g in want[2]]
    assert sum(g is None for g in found[2]) == (4 if affine else 0)
    back = tbn.unfreeze(result.program, "backbone.*")
    assert nodes(back) == nodes(program)


def test_frozen_in_the_aten_dialect_is_saved_and_loaded():
    program = export(made(), X).run_decompositions()
    frozen = tbn.freeze(program, "backbone.*", affine=True)
    frozen.validate()
    with torch.no_grad():
        for found in (frozen, saved_and_loaded(frozen)):
            assert same(step(found.module(), X)[:2], step(eager(), X)[:2])
    assert nodes(tbn.unfreeze(frozen)) == nodes(program)


@pytest.mark.parametrize("saved", [False, True], ids=("in memory", "saved"))
@pytest.mark.parametrize("start", ["train", "eval"])
def test_what_is_frozen_stays_so_through_every_switch(start, saved):
    program = tbn.switch_mode(export(made(), X), start)
    program = tbn.freeze(program, "backbone.*")
    for to in ("eval", "train", "eval", "train"):
        program = tbn.switch_mode(program, to)
        program = saved_and_loaded(program) if saved else program
        assert [e.mode for e in tbn.inspect(program).entries] == ["eval", "eval", to]
    assert same(step(program.module(), X), step(eager(), X))
    thawed = tbn.switch_mode(program, "train", include_frozen=True)
    assert [e.mode for e in tbn.inspect(thawed).entries] == ["train"] * 3


@pytest.mark.parametrize("to", ["train", "eval"])
def test_unfreezing_follows_the_program(to):
    program = tbn.switch_mode(tbn.freeze(export(made(), X), "backbone.*"), to)
    result = Unfreeze("backbone.1")(program)
    assert [e.mode for e in tbn.inspect(result.program).entries] == [to, "eval", to]
    assert len(result.edits) == 1
    assert Unfreeze("backbone.1")(result.program).modified is False
    everything = tbn.unfreeze(result.program)
    assert [e.mode for e in tbn.inspect(tbn.switch_mode(everything, "train")).entries] == ["train"] * 3


def test_unfreezing_everything_after_freezing_everything():
    program = export(made(), X)
    assert nodes(tbn.unfreeze(tbn.freeze(program, affine=True))) == nodes(program)


def test_a_module_called_twice_is_one_module():
    class Twice(Net):
        def forward(self, x):
            return self.head(super().forward(x))

    program = export(Twice(), X)
    result = Freeze("head")(program)
    assert len(result.edits) == 2
    assert nodes(tbn.unfreeze(result.program)) == nodes(program)


@pytest.mark.parametrize("function", [tbn.freeze, tbn.unfreeze])
def test_a_glob_without_a_match_lists_what_comes_close(function):
    with pytest.raises(tbn.InvalidChoice, match=r"found modules='backbone\.bn', .* such as backbone\.2, backbone\.1"):
        function(export(made(), X), "backbone.bn")
    with pytest.raises(tbn.InvalidChoice, match="and the program has none"):
        function(export(nn.Conv2d(3, 3, 1), X))


def test_inspect_names_the_weight_of_a_frozen_site():
    entry = tbn.inspect(tbn.freeze(export(made(), X), "head", affine=True)).entries[2]
    assert (entry.weight, entry.bias, entry.affine) == ("head.weight", "head.bias", "weight and bias")


def test_a_frozen_program_is_consolidated_and_stays_frozen():
    program = tbn.consolidate(tbn.freeze(export(made(), X), "backbone.*", affine=True))
    program = tbn.switch_mode(tbn.switch_mode(program, "eval"), "train")
    assert [e.mode for e in tbn.inspect(program).entries] == ["eval", "eval", "train"]
    assert SwitchMode("train")(program).modified is False
    assert same(run(program), step(eager(True), X))


@pytest.mark.parametrize("modules", [None, 5, ["a", 1]])
def test_what_is_no_glob_is_one_clear_error(modules):
    with pytest.raises(tbn.InvalidChoice, match="expected a glob of module paths, or several"):
        tbn.freeze(export(nn.BatchNorm2d(3), torch.randn(2, 3, 4, 4)), modules)


def test_without_weights_there_is_nothing_to_cut_off():
    program = export(nn.Sequential(nn.BatchNorm2d(3, affine=False), nn.BatchNorm2d(3)), X)
    result = Freeze(affine=True)(program)
    assert [edit.after for edit in result.edits] == [
        "aten.batch_norm.default (frozen)",
        "aten.batch_norm.default (frozen, weight and bias too)",
    ]
    notes = [n.meta["custom"]["torch_batchnorm"] for n in result.program.graph.nodes if n.meta.get("custom")]
    assert ["detached" in note for note in notes] == [False, True]
    assert Freeze(affine=True)(result.program).modified is False
    assert nodes(tbn.unfreeze(result.program)) == nodes(program)


@pytest.mark.parametrize("inplace", [False, True])
def test_weights_whose_gradients_are_handed_out_are_declined_and_left_as_they_were(inplace):
    def run(x, w, b, mean, var):
        out = nn.functional.batch_norm(x, mean, var, w, b, True)
        return out, torch.autograd.grad(out.sin().sum(), [x, w, b])

    tensors = [t.requires_grad_() for t in (torch.randn(4, 3), torch.rand(3), torch.rand(3))]
    joint = make_fx(run)(*tensors, torch.rand(3), torch.rand(3))
    before = nodes(joint)
    result = Freeze(affine=True, inplace=inplace)(joint)
    assert (result.modified, nodes(joint), nodes(result.program)) == (False, before, before)
    assert [(d.reason, d.remedy) for d in result.declined] == [
        (
            "the gradients of its weight and bias are in the graph, which hands them out",
            "freeze it without affine",
        )
    ]
    assert len(Freeze()(joint).edits) == 1


class Cut(nn.BatchNorm2d):
    """Its own weight does not learn."""

    def forward(self, x):
        bias = self.bias.detach() if self.affine == "none" else self.bias
        return nn.functional.batch_norm(x, self.running_mean, self.running_var, self.weight.detach(), bias, True)


@pytest.mark.parametrize("affine", [True, "none"], ids=("bias learns", "none learns"))
def test_what_does_not_learn_by_itself_does_not_learn_again_when_it_thaws(affine):
    net = Cut(3)
    net.affine = affine
    program = export(net, X)
    result = Freeze(affine=True)(program)
    assert Freeze(affine=True)(result.program).modified is False
    assert nodes(tbn.unfreeze(result.program)) == nodes(program)
