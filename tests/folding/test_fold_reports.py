"""What others reported of folds that were silently wrong, row by row."""

import pytest
import torch
from torch import nn

from folds import (
    DIALECTS,
    FORMS,
    HALVES,
    IMAGE,
    NORMS,
    TRANSPOSED,
    Pair,
    by_hand,
    calls,
    checked,
    distance,
    folded,
    in_form,
    lively,
    made,
    net,
    outputs,
    shared,
)
from programs import export, same


@pytest.mark.parametrize("form", DIALECTS)
@pytest.mark.parametrize("both", [{}, {"clone_weights": True}], ids=("as it is", "clone_weights"))
def test_pytorch_197539_and_104593_one_convolution_with_and_without_batch_norm(both, form):
    program, x = shared(lambda m, x: (m.bn(m.conv(x)), m.conv(x * 2)), form)
    assert checked(program, x, **both).modified is bool(both)


@pytest.mark.parametrize("form", DIALECTS)
@pytest.mark.parametrize("outs", [4, 8], ids=("as many", "more"))
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_pytorch_180995_ultralytics_25364_executorch_22517_transposed_convolutions(rank, groups, outs, form):
    def make():
        return Pair(TRANSPOSED[rank](4, outs, 3, stride=2, groups=groups), NORMS[rank](outs))

    program, x = in_form(make, (2, 4, 5, 4, 3)[: rank + 2], form=form, dtype=torch.float32)
    folded(program, x, tolerance=1e-5)


@pytest.mark.parametrize("form", DIALECTS)
@pytest.mark.parametrize(("shape", "edits"), [((2, 5, 3), 0), ((7, 3), 1)], ids=("refused in 3-D", "folded in 2-D"))
def test_ao_4116_linear_whose_features_are_not_the_channels(shape, edits, form):
    result = checked(*in_form(lambda: nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5)), shape, form=form))
    assert (len(result.edits), len(result.declined)) == (edits, 1 - edits)


@pytest.mark.parametrize("form", DIALECTS)
def test_pytorch_76578_tensorrt_1450_half_convolution_float_batch_norm(form):
    torch.manual_seed(0)
    module = HALVES["but for a float32 batch norm"](lively(Pair(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6))), torch.float16)
    x = torch.randn(IMAGE, dtype=torch.float16)
    found = folded(FORMS[form](export(module, x)), x, tolerance=8 * torch.finfo(torch.float16).eps).program
    weight, bias = by_hand(module.double())
    assert same(found.state_dict["producer.weight"].detach(), weight.detach().half())
    assert same(found.state_dict["producer.bias"].detach(), bias.detach().half())


@pytest.mark.parametrize("form", DIALECTS)
@pytest.mark.parametrize("affine", [True, False], ids=("affine", "plain"))
def test_pytorch_45474_yolov3_807_the_bias_is_in_the_formula(affine, form):
    module, x = made(lambda: Pair(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6, affine=affine)), IMAGE)
    state = folded(FORMS[form](export(module, x)), x).program.state_dict
    weight, bias = by_hand(module)
    assert distance(state["producer.weight"].detach(), weight.detach()) < 1e-15
    assert distance(state["producer.bias"].detach(), bias.detach()) < 1e-15


@pytest.mark.parametrize("form", DIALECTS)
@pytest.mark.parametrize("alone", ["multiply_add", "depthwise"])
@pytest.mark.parametrize("shape", [(5, 3), (2, 3, 4), (2, 3, 4, 5), (2, 3, 2, 3, 4)], ids=str)
def test_executorch_11586_and_1501_a_batch_norm_alone(shape, alone, form):
    module = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}[len(shape)]
    folded(*in_form(lambda: module(3), shape, form=form), alone=alone)


def test_pytorch_127513_a_folded_program_compiles_with_the_fold_in_it(tmp_path):
    program, x = in_form(net(lambda m, x: m.bn(m.conv(x)).relu()), IMAGE, dtype=torch.float32)
    found = folded(program, x, tolerance=1e-5).program
    assert (calls(found), set(found.state_dict)) == (["conv2d", "relu"], {"conv.weight", "conv.bias"})
    package = torch._inductor.aoti_compile_and_package(found, package_path=str(tmp_path / "net.pt2"))
    with torch.no_grad():
        assert distance(torch._inductor.aoti_load_package(package)(x), outputs(program, x)[0]) < 1e-5
