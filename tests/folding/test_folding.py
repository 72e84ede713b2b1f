"""What a fold may lose, who takes the result, and the calls that only other tools write."""

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn
from torch.export.passes import move_to_device_pass

import torch_batchnorm as tbn
from programs import export, saved_and_loaded
from torch_batchnorm import Fold
from torch_batchnorm.decomps.affine import LIMITS
from torch_batchnorm.decomps.forms import HALF

aten = torch.ops.aten
X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm = nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4)
        self.head, self.last = nn.Linear(4, 5), nn.BatchNorm1d(5)
        for bn in (self.norm, self.last):
            bn.running_mean.normal_(std=0.5)
            bn.running_var.uniform_(0.5, 1.5)
        self.eval()

    def forward(self, x):
        return self.last(self.head(self.norm(self.conv(x)).relu().mean((2, 3))))


def test_a_folded_program_in_training_ir():
    assert_expected_inline(
        tbn.render(tbn.fold(export(Net(), X))),
        """\
p_conv_weight: f32[4, 3, 3, 3] = placeholder
p_conv_bias: f32[4] = placeholder
p_head_weight: f32[5, 4] = placeholder
p_head_bias: f32[5] = placeholder
x: f32[2, 3, 8, 8] = placeholder
conv2d: f32[2, 4, 6, 6] = aten.conv2d.default(x, p_conv_weight, p_conv_bias)
relu: f32[2, 4, 6, 6] = aten.relu.default(conv2d)
mean: f32[2, 4] = aten.mean.dim(relu, [2, 3])
linear: f32[2, 5] = aten.linear.default(mean, p_head_weight, p_head_bias)
return (linear)""",
    )


def test_a_folded_program_in_the_aten_dialect():
    assert_expected_inline(
        tbn.render(tbn.fold(export(Net(), X).run_decompositions())),
        """\
p_conv_weight: f32[4, 3, 3, 3] = placeholder
p_conv_bias: f32[4] = placeholder
p_head_weight: f32[5, 4] = placeholder
p_head_bias: f32[5] = placeholder
x: f32[2, 3, 8, 8] = placeholder
convolution: f32[2, 4, 6, 6] = aten.convolution.default(x, p_conv_weight, p_conv_bias, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
relu: f32[2, 4, 6, 6] = aten.relu.default(convolution)
mean: f32[2, 4] = aten.mean.dim(relu, [2, 3])
permute: f32[4, 5] = aten.permute.default(p_head_weight, [1, 0])
addmm: f32[2, 5] = aten.addmm.default(p_head_bias, mean, permute)
return (addmm)""",
    )


def test_batch_norm_alone_in_the_aten_dialect():
    program = export(nn.Sequential(nn.ReLU(), nn.BatchNorm2d(3)).eval(), X).run_decompositions()
    assert_expected_inline(
        tbn.render(tbn.fold(program, alone="multiply_add")),
        """\
p_1_scale: f32[3] = placeholder
p_1_shift: f32[3] = placeholder
input: f32[2, 3, 8, 8] = placeholder
relu: f32[2, 3, 8, 8] = aten.relu.default(input)
view: f32[3, 1, 1] = aten.view.default(p_1_scale, [3, 1, 1])
view_1: f32[3, 1, 1] = aten.view.default(p_1_shift, [3, 1, 1])
mul: f32[2, 3, 8, 8] = aten.mul.Tensor(relu, view)
add: f32[2, 3, 8, 8] = aten.add.Tensor(mul, view_1)
return (add)""",
    )
    assert_expected_inline(
        tbn.render(tbn.fold(program, alone="depthwise")),
        """\
p_1_scale: f32[3, 1, 1, 1] = placeholder
p_1_shift: f32[3] = placeholder
input: f32[2, 3, 8, 8] = placeholder
relu: f32[2, 3, 8, 8] = aten.relu.default(input)
convolution: f32[2, 3, 8, 8] = aten.convolution.default(relu, p_1_scale, p_1_shift, [1, 1], [0, 0], [1, 1], False, [0, 0], 3)
return (convolution)""",
    )


# What is lost: a layer whose outputs have this mean for one standard deviation.


def drifting(dtype, mean):
    """A convolution whose weights are exact in the dtype, its batch norm, their input, and what it should make of it."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.rand(4, 16, 1, generator=generator, dtype=torch.float64) + 0.5
    x = 1 + torch.randn(8, 16, 50, generator=generator, dtype=torch.float64) / mean
    x, weight = x.to(dtype).double(), (weight / 16).to(dtype).double()
    y = nn.functional.conv1d(x, weight)
    conv, bn = nn.Conv1d(16, 4, 1, bias=False).double(), nn.BatchNorm1d(4, eps=1e-12).double()
    with torch.no_grad():
        conv.weight.copy_(weight)
        bn.running_mean.copy_(y.mean((0, 2)))
        bn.running_var.copy_(y.var((0, 2)))
        net = nn.Sequential(conv, bn).eval()
        want, apart = net(x), float((bn.running_mean / bn.running_var.sqrt()).max())
    conv.to(dtype)
    bn.to(torch.float32 if dtype in HALF else dtype)
    return net, x.to(dtype), want, torch.finfo(dtype).eps / 2 * (1 + apart)


@pytest.mark.parametrize("mean", [1, 10, 100, 1e3, 1e4, 1e5])
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_what_a_fold_loses_is_what_it_counts_and_too_much_is_declined(dtype, mean):
    net, x, want, counted = drifting(dtype, mean)
    program = export(net, x)
    result = Fold()(program)
    assert bool(result.declined) is (counted > LIMITS[dtype])
    for declined in result.declined:
        assert "to rounding" in declined.reason or "out of the range" in declined.reason
    if result.edits or dtype not in HALF:
        with torch.no_grad():
            lost = (tbn.fold(program, force=True).module()(x).double() - want).abs().max()
        assert lost < 8 * counted


def test_a_weight_out_of_the_range_of_its_dtype_is_declined_even_when_forced():
    for scale, said in ((1e6, "out of the range"), (1e-7, "below the range")):
        net = nn.Sequential(nn.Conv2d(3, 3, 1).half(), nn.BatchNorm2d(3)).eval()
        nn.init.constant_(net[1].weight, scale)
        program = export(net, X.half())
        (declined,) = Fold()(program).declined
        assert said in declined.reason or "to rounding" in declined.reason
        assert bool(Fold(force=True)(program).declined) is (scale > 1)


# Who takes it.


def test_torch_compile_sees_no_batch_norm():
    net, program = Net(), tbn.fold(export(Net(), X))
    assert tbn.inspect(program).entries == ()
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(program.module())(X), net(X), atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_onnx_sees_no_batch_normalization():
    import onnxruntime

    net = Net()
    exported = torch.onnx.export(tbn.fold(export(net, X)), dynamo=True, verbose=False, optimize=False)
    assert "BatchNormalization" not in [node.op_type for node in exported.model.graph]
    session = onnxruntime.InferenceSession(exported.model_proto.SerializeToString())
    (found,) = session.run(None, {session.get_inputs()[0].name: X.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), net(X), atol=1e-5, rtol=1e-5)


def test_a_folded_program_moves_to_another_device_and_is_loaded_without_this_library():
    program = saved_and_loaded(tbn.fold(export(Net(), X)))
    with torch.no_grad():
        torch.testing.assert_close(program.module()(X), Net()(X), atol=1e-5, rtol=1e-5)
    moved = move_to_device_pass(program, "meta")
    assert {t.device.type for t in moved.state_dict.values()} == {"meta"}


# What only other tools write.


class Written(nn.Module):
    """Batch norm into memory that is there already."""

    def __init__(self, resized=False):
        super().__init__()
        self.net, self.resized = Net(), resized

    def forward(self, x):
        bn, y = self.net.norm, self.net.conv(x)
        out, *saved = (torch.empty_like(y) if not self.resized else y.new_empty(0), y.new_empty(0), y.new_empty(0))
        tensors = (y, bn.weight, bn.bias, bn.running_mean, bn.running_var)
        found = aten.native_batch_norm.out(
            *tensors, False, 0.1, 1e-5, out=out, save_mean=saved[0], save_invstd=saved[1]
        )
        return found[0].relu(), out + 1


def test_a_call_that_writes_to_its_out_argument_still_does():
    program = export(Written().eval().requires_grad_(False), X)
    result = Fold()(program)
    assert ([e.after for e in result.edits], result.declined) == (["folded into conv2d (aten.conv2d.default)"], ())
    with torch.no_grad():
        for found, want in zip(result.program.module()(X), program.module()(X), strict=True):
            torch.testing.assert_close(found, want, atol=1e-5, rtol=1e-5)
    (declined,) = Fold()(export(Written(resized=True).eval().requires_grad_(False), X)).declined
    assert "may be resized" in declined.reason


def test_what_quantization_aware_training_left_is_reported():
    class Trained(Net):
        def forward(self, x):
            bn = self.norm
            scale = bn.weight / (bn.running_var + bn.eps).sqrt()
            weight = torch.fake_quantize_per_tensor_affine(self.conv.weight * scale[:, None, None, None], 0.1, 0, -8, 7)
            return bn(nn.functional.conv2d(x, weight) / scale[:, None, None])

    (declined,) = Fold()(export(Trained(), X)).declined
    assert "quantization-aware training left it" in declined.reason


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"alone": "keep"}, "found alone='keep', expected one of leave"),
        ({"float32_above": -1}, "found float32_above=-1"),
    ],
    ids=("alone", "float32_above"),
)
def test_an_option_that_is_none_is_one_clear_error(options, said):
    with pytest.raises(tbn.InvalidChoice, match=said):
        tbn.fold(export(Net(), X), **options)
