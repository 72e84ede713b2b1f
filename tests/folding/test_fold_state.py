"""The options of Fold, and what it leaves in the state, the signature and the metadata."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import torch_batchnorm as tbn
from folds import (
    DIALECTS,
    FORMS,
    IMAGE,
    LAYERS,
    Pair,
    checked,
    decomposed,
    distance,
    distances,
    edited,
    exported,
    folded,
    in_form,
    made,
    net,
    outputs,
    plain,
    same_weight,
    shared,
    sites,
    swamp,
)
from programs import aten, export, nodes, same, saved_and_loaded

# The options.

SHARED = {
    "a producer that is read elsewhere": (lambda m, x: (y := m.conv(x), m.bn(y), y.relu())[1:], 1),
    "a producer that is returned": (lambda m, x: (y := m.conv(x), m.bn(y), y)[1:], 1),
    "two batch norms of one output": (lambda m, x: (y := m.conv(x), m.bn(y), m.second(y))[1:], 2),
    "two batch norms of one output, and a relu": (
        lambda m, x: (y := m.conv(x), m.bn(y), m.second(y), y.relu())[1:],
        2,
    ),
    "one batch norm of one output, twice": (lambda m, x: (y := m.conv(x), m.bn(y) * m.bn(y))[1], 2),
}
TIED = {
    "one convolution of two inputs": (lambda m, x: (m.bn(m.conv(x)), m.conv(x * 2)), 1, 2),
    "one convolution, two batch norms": (lambda m, x: (m.bn(m.conv(x)), m.second(m.conv(x * 2))), 2, 2),
    "one convolution, two batch norms and one without": (
        lambda m, x: (m.bn(m.conv(x)), m.second(m.conv(x * 2)), m.conv(x * 3)),
        2,
        3,
    ),
    "one convolution, three times the one and once the other batch norm": (
        lambda m, x: [m.bn(m.conv(x * i)) for i in (1, 2, 3)] + [m.second(m.conv(x))],
        4,
        2,
    ),
    "a weight that something else reads": (lambda m, x: (m.bn(m.conv(x)), m.conv.weight.square().sum()), 1, 2),
    "a bias that something else reads": (lambda m, x: (m.bn(m.conv(x)), m.conv.bias * 2), 1, 1),
}


def _weights(program):
    """The values of the 4-D parameters that the program's graph reads."""
    signature = program.graph_signature
    used = {n.name for n in program.graph.find_nodes(op="placeholder") if n.users}
    names = [s.target for s in signature.input_specs if s.target and s.arg.name in used]
    return [n for n in names if program.state_dict[n].dim() == 4]


@pytest.mark.parametrize("form", DIALECTS)
@pytest.mark.parametrize("name", SHARED)
def test_clone_calls_gives_a_batch_norm_a_call_of_its_own(name, form):
    function, edits = SHARED[name]
    program, x = shared(function, form)
    assert checked(program, x).modified is False
    assert checked(program, x, clone_weights=True).modified is False
    folded(program, x, edits=edits, clone_calls=True)


ONCE = {
    "a batch norm that is read by another and by the caller": lambda m, x: (z := m.bn(m.conv(x)), m.second(z))[:2],
    "the layer and the batch norm too": lambda m, x: (y := m.conv(x), z := m.bn(y), m.second(z))[:3],
    "the layer and each of two batch norms": lambda m, x: (y := m.conv(x), m.second(m.bn(y)), m.bn(y))[:3],
    "a batch norm, scaled and not": lambda m, x: (z := m.bn(m.conv(x)), m.second(z * 2), z)[1:],
    "a batch norm before and behind a layer": lambda m, x: (z := m.bn(m.conv(x)), m.second(m.last(z)), z)[1:],
}


@pytest.mark.parametrize("form", DIALECTS)
@pytest.mark.parametrize("name", ONCE)
def test_what_clone_calls_leaves_it_leaves_the_second_time_too(name, form):
    make = net(ONCE[name], second=lambda: nn.BatchNorm2d(6), last=lambda: nn.Conv2d(6, 6, 1))
    program, x = in_form(make, IMAGE, form=form)
    for clone_weights in (False, True):
        checked(program, x, clone_calls=True, clone_weights=clone_weights)


@pytest.mark.parametrize("form", DIALECTS)
@pytest.mark.parametrize("name", TIED)
def test_clone_weights_gives_a_call_a_weight_of_its_own(name, form):
    function, edits, weights = TIED[name]
    program, x = shared(function, form)
    result = folded(program, x, edits=edits, clone_weights=True)
    assert len(_weights(result.program)) == weights


@pytest.mark.parametrize("form", DIALECTS)
def test_only_a_bias_that_is_shared_is_not_overwritten(form):
    """Its convolution may be folded: the bias that something else reads is another tensor from then on."""
    program, x = shared(TIED["a bias that something else reads"][0], form)
    checked(program, x)
    checked(program, x, clone_calls=True)


@pytest.mark.parametrize("form", FORMS)
def test_a_module_of_both_called_twice_folds_into_one_weight(form):
    make = net(lambda m, x: m.pair(m.pair(x)), pair=lambda: nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)))
    program, x = in_form(make, IMAGE, form=form)
    result = folded(program, x, edits=2)
    if form in DIALECTS:
        assert _weights(result.program) == ["pair.0.weight"]


@pytest.mark.parametrize("form", DIALECTS)
def test_a_module_called_twice_where_one_call_cannot_be_folded(form):
    def function(m, x):
        y = m.conv(x)
        return m.bn(y) + y.sum(), m.bn(m.conv(x * 2))

    program, x = shared(function, form)
    assert checked(program, x).modified is False
    folded(program, x, edits=2, clone_calls=True, clone_weights=True)


@pytest.mark.parametrize("form", DIALECTS)
def test_force_folds_what_loses_precision(form):
    program, x = exported(edited(plain, edit=swamp, dtype=torch.float32), form)
    result = tbn.Fold(force=True)(program)
    assert (len(result.edits), result.declined, tbn.verify(result.program)) == (1, (), ())
    assert all(t.isfinite().all() for t in outputs(result.program, x))


@pytest.mark.parametrize("form", DIALECTS)
def test_what_loses_precision_in_float32_folds_in_float64(form):
    program, x = exported(edited(plain, edit=swamp), form)
    folded(program, x, tolerance=1e-8)


@pytest.mark.parametrize("form", FORMS)
def test_inplace_edits_the_given_program(form):
    program, x = in_form(net(plain), IMAGE, form=form)
    want = outputs(program, x)
    result = tbn.Fold(inplace=True)(program)
    assert (result.program is program, len(result.edits), sites(program)) == (True, 1, 0)
    assert (max(distances(outputs(program, x), want)) < 1e-12, tbn.verify(program)) == (True, ())


@pytest.mark.parametrize("form", DIALECTS)
def test_inplace_gives_the_program_that_a_copy_gives(form):
    program, _ = in_form(net(plain), IMAGE, form=form)
    copied = tbn.fold(program)
    assert nodes(tbn.fold(program, inplace=True)) == nodes(copied)
    assert program.state_dict.keys() == copied.state_dict.keys()


def test_the_pass_is_a_value():
    assert tbn.Fold() == tbn.Fold()
    assert hash(tbn.Fold(clone_calls=True)) == hash(tbn.Fold(clone_calls=True))
    with pytest.raises(AttributeError):
        tbn.Fold().force = True


def test_fold_returns_the_program_of_the_pass():
    program, _ = in_form(net(lambda m, x: (y := m.conv(x), m.bn(y), y)[1:]), IMAGE)
    assert nodes(tbn.fold(program, clone_calls=True)) == nodes(tbn.Fold(clone_calls=True)(program).program)
    assert tbn.fold(program) is program


def test_a_choice_that_does_not_exist_is_one_clear_error():
    program, _ = in_form(net(plain), IMAGE)
    with pytest.raises(tbn.InvalidChoice, match="alone"):
        tbn.fold(program, alone="relu")
    with pytest.raises(tbn.InvalidProgram):
        tbn.fold(nn.ReLU())


# The state.

DEAD = {f"bn.{name}" for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")}


def _signed(program):
    """The parameters and buffers of a signature."""
    return {spec.target for spec in program.graph_signature.input_specs if spec.target is not None}


@pytest.mark.parametrize("form", DIALECTS)
@pytest.mark.parametrize("bias", [True, False], ids=("bias", "no bias"))
@pytest.mark.parametrize("kind", LAYERS)
def test_the_weights_keep_their_names_and_the_dead_leave(kind, bias, form):
    make, bn, shape = LAYERS[kind]
    program, x = in_form(lambda: Pair(make(4, 6, bias=bias), bn(6)), shape, form=form)
    found = folded(program, x).program
    names = {"producer.weight", "producer.bias"}
    assert set(found.state_dict) == set(found.graph_signature.parameters) == _signed(found) == names
    for name in names:
        assert isinstance(found.state_dict[name], nn.Parameter)
        assert found.state_dict[name].requires_grad
        assert found.state_dict[name] is not program.state_dict.get(name)
    assert set(dict(found.module().named_parameters())) == names
    assert set(saved_and_loaded(found).state_dict) == names


def test_the_weights_of_a_module_keep_their_names():
    program, x = in_form(net(plain), IMAGE, form="module")
    found = folded(program, x).program
    assert set(dict(found.named_parameters())) == set(found.state_dict()) == {"conv.weight", "conv.bias"}


@pytest.mark.parametrize("form", DIALECTS)
@pytest.mark.parametrize("frozen", [False, True], ids=("learns", "frozen"))
def test_a_weight_learns_when_it_did(frozen, form):
    module, x = made(net(plain), IMAGE)
    module.conv.requires_grad_(not frozen)
    found = folded(FORMS[form](export(module, x)), x).program
    assert [found.state_dict[f"conv.{name}"].requires_grad for name in ("weight", "bias")] == [not frozen] * 2


@pytest.mark.parametrize("form", DIALECTS)
def test_keep_state_keeps_every_name(form):
    program, x = in_form(net(plain, lambda: nn.Conv2d(4, 6, 3, bias=False)), IMAGE, form=form)
    found = folded(program, x, keep_state=True).program
    assert set(found.state_dict) == set(program.state_dict) | {"conv.bias"}
    assert all(found.state_dict[name] is program.state_dict[name] for name in DEAD)
    assert set(saved_and_loaded(found).state_dict) == set(found.state_dict)


@pytest.mark.parametrize("form", DIALECTS)
def test_what_others_read_stays(form):
    program, x = in_form(net(lambda m, x: (m.bn(m.conv(x)), m.bn.weight * 2, m.bn.running_mean + 1)), IMAGE, form=form)
    found = folded(program, x).program
    assert set(found.state_dict) >= {"conv.weight", "conv.bias", "bn.weight", "bn.running_mean"}
    assert not {"bn.bias", "bn.running_var"} & set(found.state_dict)


@pytest.mark.parametrize("form", DIALECTS)
def test_parameters_of_a_batch_norm_that_another_shares_stay_with_it(form):
    def tie(m):
        m.second.weight, m.second.bias = m.bn.weight, m.bn.bias

    program, x = exported(
        edited(lambda m, x: (m.bn(m.conv(x)), m.second(m.conv(x).relu())), second=lambda: nn.BatchNorm2d(6), edit=tie),
        form=form,
    )
    result = checked(program, x, clone_weights=True)
    assert (len(result.edits), len(result.declined), sites(result.program)) == (1, 1, 1)


@pytest.mark.parametrize("form", DIALECTS)
def test_a_tied_weight_stays_for_the_other(form):
    program, x = exported(same_weight(lambda m, x: (m.bn(m.conv(x)), m.other(x))), form)
    found = folded(program, x, clone_weights=True).program
    kept = [t for t in found.state_dict.values() if same(t.detach(), program.state_dict["conv.weight"].detach())]
    assert len({id(t) for t in kept}) == 1
    assert len(_weights(found)) == 2


@pytest.mark.parametrize("form", DIALECTS)
def test_weights_that_are_buffers_or_constants_fold_too(form):
    class Constants(nn.Module):
        def __init__(self):
            super().__init__()
            self.bn = nn.BatchNorm2d(6)
            self.register_buffer("weight", torch.randn(6, 4, 3, 3))
            self.register_buffer("bias", torch.randn(6), persistent=False)
            self.constant = torch.randn(6, 6, 1, 1, dtype=torch.float64)

        def forward(self, x):
            x = self.bn(functional.conv2d(x, self.weight, self.bias))
            return self.bn(functional.conv2d(x, self.constant))

    program, x = in_form(Constants, IMAGE, form=form)
    found = folded(program, x, edits=2).program
    assert same(outputs(saved_and_loaded(found), x), outputs(found, x))
    assert "weight" in found.state_dict


@pytest.mark.parametrize("form", DIALECTS)
def test_a_tensor_made_in_forward_is_a_constant_too(form):
    ones = torch.ones(6, dtype=torch.float64) * 0.5
    make = net(lambda m, x: functional.batch_norm(m.conv(x), ones, ones * 3, ones, ones))
    checked(*in_form(make, IMAGE, form=form))


def test_gradients_flow_to_the_folded_weights():
    """A folded program still learns: its gradient by the input is that of the original."""
    program, x = in_form(net(plain), IMAGE)
    found = folded(program, x).program.module()
    gradients = []
    for module in (program.module(), found):
        leaf = x.clone().requires_grad_()
        module(leaf).square().sum().backward()
        gradients.append(leaf.grad)
    assert distance(gradients[1], gradients[0]) < 1e-12
    assert all(p.grad is not None for p in found.parameters())


def test_the_metadata_of_the_producer_stays():
    program, _ = in_form(net(plain), IMAGE)
    (conv,) = (n for n in tbn.fold(program).graph.nodes if n.op == "call_function")
    (was,) = program.graph.find_nodes(op="call_function", target=aten.conv2d.default)
    assert conv.name == was.name
    assert conv.meta["nn_module_stack"] == was.meta["nn_module_stack"]
    assert conv.meta["val"].shape == was.meta["val"].shape
    assert conv.meta["stack_trace"] == was.meta["stack_trace"]


def test_the_edits_say_what_went_where():
    program, _ = in_form(net(plain), IMAGE)
    (edit,) = tbn.Fold()(program).edits
    assert (edit.site, edit.module, edit.before) == ("batch_norm", "bn", "aten.batch_norm.default")
    assert "conv2d" in edit.after


def test_a_folded_program_is_exported_decomposed_and_consolidated_as_any_other():
    program, x = in_form(net(lambda m, x: m.last(m.bn(m.conv(x)).relu()), last=lambda: nn.BatchNorm2d(6)), IMAGE)
    found = checked(program, x).program
    want = outputs(program, x)
    for changed in (decomposed(found), tbn.consolidate(found), tbn.switch_mode(found, "eval")):
        assert max(distances(outputs(changed, x), want)) < 1e-12
    assert tbn.Fold()(decomposed(found)).modified is False
