"""Whole small programs, before and after. `make accept` rewrites the expected text: read the diff."""

import torch
from expecttest import assert_expected_inline
from torch import nn

from programs import Op, claim_aten, consolidated, export, native
from torch_batchnorm import SwitchMode, freeze, render


class ConvBnRelu(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4, **options)

    def forward(self, input):  # `input` shadows a builtin, which torch renames when it copies a graph
        return self.bn(self.conv(input)).relu()


X = torch.randn(2, 3, 6, 6)


def test_training_ir_train():
    program = export(ConvBnRelu(), X)
    assert_expected_inline(
        render(program),
        """\
p_conv_weight: f32[4, 3, 3, 3] = placeholder
p_bn_weight: f32[4] = placeholder
p_bn_bias: f32[4] = placeholder
b_bn_running_mean: f32[4] = placeholder
b_bn_running_var: f32[4] = placeholder
b_bn_num_batches_tracked: i64[] = placeholder
input: f32[2, 3, 6, 6] = placeholder
conv2d: f32[2, 4, 4, 4] = aten.conv2d.default(input, p_conv_weight)
add_: i64[] = aten.add_.Tensor(b_bn_num_batches_tracked, 1)
batch_norm: f32[2, 4, 4, 4] = aten.batch_norm.default(conv2d, p_bn_weight, p_bn_bias, b_bn_running_mean, b_bn_running_var, True, 0.1, 1e-05, False)
relu: f32[2, 4, 4, 4] = aten.relu.default(batch_norm)
return (relu)""",
    )
    assert_expected_inline(
        render(consolidated(program).program),
        """\
p_conv_weight: f32[4, 3, 3, 3] = placeholder
p_bn_weight: f32[4] = placeholder
p_bn_bias: f32[4] = placeholder
b_bn_running_mean: f32[4] = placeholder
b_bn_running_var: f32[4] = placeholder
b_bn_num_batches_tracked: i64[] = placeholder
input: f32[2, 3, 6, 6] = placeholder
conv2d: f32[2, 4, 4, 4] = aten.conv2d.default(input, p_conv_weight)
add_: i64[] = aten.add_.Tensor(b_bn_num_batches_tracked, 1)
_batch_norm_with_update: (f32[2, 4, 4, 4], f32[4], f32[4], u8[0]) = aten._batch_norm_with_update.default(conv2d, p_bn_weight, p_bn_bias, b_bn_running_mean, b_bn_running_var, 0.1, 1e-05)
batch_norm: f32[2, 4, 4, 4] = getitem(_batch_norm_with_update, 0)
relu: f32[2, 4, 4, 4] = aten.relu.default(batch_norm)
return (relu)""",
    )


def test_training_ir_eval():
    program = export(ConvBnRelu().eval(), X)
    assert_expected_inline(
        render(consolidated(program).program),
        """\
p_conv_weight: f32[4, 3, 3, 3] = placeholder
p_bn_weight: f32[4] = placeholder
p_bn_bias: f32[4] = placeholder
b_bn_running_mean: f32[4] = placeholder
b_bn_running_var: f32[4] = placeholder
b_bn_num_batches_tracked: i64[] = placeholder
input: f32[2, 3, 6, 6] = placeholder
conv2d: f32[2, 4, 4, 4] = aten.conv2d.default(input, p_conv_weight)
_batch_norm_no_update: (f32[2, 4, 4, 4], f32[0], f32[0], u8[0]) = aten._batch_norm_no_update.default(conv2d, p_bn_weight, p_bn_bias, b_bn_running_mean, b_bn_running_var, 0.1, 1e-05)
batch_norm: f32[2, 4, 4, 4] = getitem(_batch_norm_no_update, 0)
relu: f32[2, 4, 4, 4] = aten.relu.default(batch_norm)
return (relu)""",
    )


def test_aten_dialect_train():
    program = export(ConvBnRelu(), X).run_decompositions()
    assert_expected_inline(
        render(program),
        """\
p_conv_weight: f32[4, 3, 3, 3] = placeholder
p_bn_weight: f32[4] = placeholder
p_bn_bias: f32[4] = placeholder
b_bn_running_mean: f32[4] = placeholder
b_bn_running_var: f32[4] = placeholder
b_bn_num_batches_tracked: i64[] = placeholder
input: f32[2, 3, 6, 6] = placeholder
convolution: f32[2, 4, 4, 4] = aten.convolution.default(input, p_conv_weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
add: i64[] = aten.add.Tensor(b_bn_num_batches_tracked, 1)
_native_batch_norm_legit_functional: (f32[2, 4, 4, 4], f32[4], f32[4], f32[4], f32[4]) = aten._native_batch_norm_legit_functional.default(convolution, p_bn_weight, p_bn_bias, b_bn_running_mean, b_bn_running_var, True, 0.1, 1e-05)
getitem: f32[2, 4, 4, 4] = getitem(_native_batch_norm_legit_functional, 0)
getitem_3: f32[4] = getitem(_native_batch_norm_legit_functional, 3)
getitem_4: f32[4] = getitem(_native_batch_norm_legit_functional, 4)
relu: f32[2, 4, 4, 4] = aten.relu.default(getitem)
return (getitem_3, getitem_4, add, relu)
getitem_3 -> BUFFER_MUTATION bn.running_mean
getitem_4 -> BUFFER_MUTATION bn.running_var
add -> BUFFER_MUTATION bn.num_batches_tracked""",
    )
    assert_expected_inline(
        render(consolidated(program).program),
        """\
p_conv_weight: f32[4, 3, 3, 3] = placeholder
p_bn_weight: f32[4] = placeholder
p_bn_bias: f32[4] = placeholder
b_bn_running_mean: f32[4] = placeholder
b_bn_running_var: f32[4] = placeholder
b_bn_num_batches_tracked: i64[] = placeholder
input: f32[2, 3, 6, 6] = placeholder
convolution: f32[2, 4, 4, 4] = aten.convolution.default(input, p_conv_weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
add: i64[] = aten.add.Tensor(b_bn_num_batches_tracked, 1)
_batch_norm_with_update_functional: (f32[2, 4, 4, 4], f32[4], f32[4], u8[0], f32[4], f32[4]) = aten._batch_norm_with_update_functional.default(convolution, p_bn_weight, p_bn_bias, b_bn_running_mean, b_bn_running_var, 0.1, 1e-05)
getitem: f32[2, 4, 4, 4] = getitem(_batch_norm_with_update_functional, 0)
getitem_3: f32[4] = getitem(_batch_norm_with_update_functional, 4)
getitem_4: f32[4] = getitem(_batch_norm_with_update_functional, 5)
relu: f32[2, 4, 4, 4] = aten.relu.default(getitem)
return (getitem_3, getitem_4, add, relu)
getitem_3 -> BUFFER_MUTATION bn.running_mean
getitem_4 -> BUFFER_MUTATION bn.running_var
add -> BUFFER_MUTATION bn.num_batches_tracked""",
    )


def test_aten_dialect_eval():
    program = export(ConvBnRelu().eval(), X).run_decompositions()
    assert_expected_inline(
        render(consolidated(program).program),
        """\
p_conv_weight: f32[4, 3, 3, 3] = placeholder
p_bn_weight: f32[4] = placeholder
p_bn_bias: f32[4] = placeholder
b_bn_running_mean: f32[4] = placeholder
b_bn_running_var: f32[4] = placeholder
b_bn_num_batches_tracked: i64[] = placeholder
input: f32[2, 3, 6, 6] = placeholder
convolution: f32[2, 4, 4, 4] = aten.convolution.default(input, p_conv_weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
_batch_norm_no_update: (f32[2, 4, 4, 4], f32[0], f32[0], u8[0]) = aten._batch_norm_no_update.default(convolution, p_bn_weight, p_bn_bias, b_bn_running_mean, b_bn_running_var, 0.1, 1e-05)
getitem: f32[2, 4, 4, 4] = getitem(_batch_norm_no_update, 0)
relu: f32[2, 4, 4, 4] = aten.relu.default(getitem)
return (relu)""",
    )


def test_no_affine_no_statistics_in_training_ir():
    program = export(ConvBnRelu(affine=False, track_running_stats=False), X)
    assert_expected_inline(
        render(consolidated(program).program),
        """\
p_conv_weight: f32[4, 3, 3, 3] = placeholder
input: f32[2, 3, 6, 6] = placeholder
conv2d: f32[2, 4, 4, 4] = aten.conv2d.default(input, p_conv_weight)
new_ones: f32[4] = aten.new_ones.default(conv2d, [4])
new_zeros: f32[4] = aten.new_zeros.default(conv2d, [4])
new_zeros_1: f32[4] = aten.new_zeros.default(conv2d, [4])
new_ones_1: f32[4] = aten.new_ones.default(conv2d, [4])
_batch_norm_with_update_functional: (f32[2, 4, 4, 4], f32[4], f32[4], u8[0], f32[4], f32[4]) = aten._batch_norm_with_update_functional.default(conv2d, new_ones, new_zeros, new_zeros_1, new_ones_1, 0.1, 1e-05)
batch_norm: f32[2, 4, 4, 4] = getitem(_batch_norm_with_update_functional, 0)
relu: f32[2, 4, 4, 4] = aten.relu.default(batch_norm)
return (relu)""",
    )


def test_dynamic_batch_in_training_ir():
    program = export(ConvBnRelu(affine=False), X, dynamic=({0: torch.export.Dim("batch", min=2)},))
    assert_expected_inline(
        render(consolidated(program).program),
        """\
p_conv_weight: f32[4, 3, 3, 3] = placeholder
b_bn_running_mean: f32[4] = placeholder
b_bn_running_var: f32[4] = placeholder
b_bn_num_batches_tracked: i64[] = placeholder
input: f32[s31, 3, 6, 6] = placeholder
conv2d: f32[s31, 4, 4, 4] = aten.conv2d.default(input, p_conv_weight)
add_: i64[] = aten.add_.Tensor(b_bn_num_batches_tracked, 1)
new_ones: f32[4] = aten.new_ones.default(b_bn_running_mean, [4])
new_zeros: f32[4] = aten.new_zeros.default(b_bn_running_mean, [4])
_batch_norm_with_update: (f32[s31, 4, 4, 4], f32[4], f32[4], u8[0]) = aten._batch_norm_with_update.default(conv2d, new_ones, new_zeros, b_bn_running_mean, b_bn_running_var, 0.1, 1e-05)
batch_norm: f32[s31, 4, 4, 4] = getitem(_batch_norm_with_update, 0)
relu: f32[s31, 4, 4, 4] = aten.relu.default(batch_norm)
return (relu)""",
    )


def test_one_module_called_twice_in_training_ir():
    bn = nn.BatchNorm1d(3)
    program = export(nn.Sequential(bn, nn.ReLU(), bn), torch.randn(4, 3))
    assert_expected_inline(
        render(consolidated(program).program),
        """\
p_0_weight: f32[3] = placeholder
p_0_bias: f32[3] = placeholder
p_2_weight: f32[3] = placeholder
p_2_bias: f32[3] = placeholder
b_0_running_mean: f32[3] = placeholder
b_0_running_var: f32[3] = placeholder
b_0_num_batches_tracked: i64[] = placeholder
b_2_running_mean: f32[3] = placeholder
b_2_running_var: f32[3] = placeholder
b_2_num_batches_tracked: i64[] = placeholder
input: f32[4, 3] = placeholder
add_: i64[] = aten.add_.Tensor(b_2_num_batches_tracked, 1)
_batch_norm_with_update: (f32[4, 3], f32[3], f32[3], u8[0]) = aten._batch_norm_with_update.default(input, p_2_weight, p_2_bias, b_2_running_mean, b_2_running_var, 0.1, 1e-05)
batch_norm: f32[4, 3] = getitem(_batch_norm_with_update, 0)
relu: f32[4, 3] = aten.relu.default(batch_norm)
add__1: i64[] = aten.add_.Tensor(add_, 1)
_batch_norm_with_update_1: (f32[4, 3], f32[3], f32[3], u8[0]) = aten._batch_norm_with_update.default(relu, p_2_weight, p_2_bias, b_2_running_mean, b_2_running_var, 0.1, 1e-05)
batch_norm_1: f32[4, 3] = getitem(_batch_norm_with_update_1, 0)
return (batch_norm_1)""",
    )


def test_hidden_writes_become_mutation_outputs_of_a_functional_program():
    program = claim_aten(export(Op(native, calls=2), torch.randn(4, 3)))
    assert_expected_inline(
        render(program),
        """\
p_weight: f32[3] = placeholder
p_bias: f32[3] = placeholder
b_running_mean: f32[3] = placeholder
b_running_var: f32[3] = placeholder
x: f32[4, 3] = placeholder
native_batch_norm: (f32[4, 3], f32[3], f32[3]) = aten.native_batch_norm.default(x, p_weight, p_bias, b_running_mean, b_running_var, True, 0.1, 1e-05)
getitem: f32[4, 3] = getitem(native_batch_norm, 0)
getitem_1: f32[3] = getitem(native_batch_norm, 1)
getitem_2: f32[3] = getitem(native_batch_norm, 2)
native_batch_norm_1: (f32[4, 3], f32[3], f32[3]) = aten.native_batch_norm.default(getitem, p_weight, p_bias, b_running_mean, b_running_var, True, 0.1, 1e-05)
getitem_3: f32[4, 3] = getitem(native_batch_norm_1, 0)
getitem_4: f32[3] = getitem(native_batch_norm_1, 1)
getitem_5: f32[3] = getitem(native_batch_norm_1, 2)
mul: f32[3] = aten.mul.Tensor(b_running_mean, 2)
return (getitem_3, mul)""",
    )
    assert_expected_inline(
        render(consolidated(program).program),
        """\
p_weight: f32[3] = placeholder
p_bias: f32[3] = placeholder
b_running_mean: f32[3] = placeholder
b_running_var: f32[3] = placeholder
x: f32[4, 3] = placeholder
_batch_norm_with_update_functional: (f32[4, 3], f32[3], f32[3], u8[0], f32[3], f32[3]) = aten._batch_norm_with_update_functional.default(x, p_weight, p_bias, b_running_mean, b_running_var, 0.1, 1e-05)
getitem_6: f32[3] = getitem(_batch_norm_with_update_functional, 4)
getitem_7: f32[3] = getitem(_batch_norm_with_update_functional, 5)
getitem: f32[4, 3] = getitem(_batch_norm_with_update_functional, 0)
getitem_1: f32[3] = getitem(_batch_norm_with_update_functional, 1)
getitem_2: f32[3] = getitem(_batch_norm_with_update_functional, 2)
_batch_norm_with_update_functional_1: (f32[4, 3], f32[3], f32[3], u8[0], f32[3], f32[3]) = aten._batch_norm_with_update_functional.default(getitem, p_weight, p_bias, getitem_6, getitem_7, 0.1, 1e-05)
getitem_8: f32[3] = getitem(_batch_norm_with_update_functional_1, 4)
getitem_9: f32[3] = getitem(_batch_norm_with_update_functional_1, 5)
getitem_3: f32[4, 3] = getitem(_batch_norm_with_update_functional_1, 0)
getitem_4: f32[3] = getitem(_batch_norm_with_update_functional_1, 1)
getitem_5: f32[3] = getitem(_batch_norm_with_update_functional_1, 2)
mul: f32[3] = aten.mul.Tensor(getitem_8, 2)
return (getitem_8, getitem_9, getitem_3, mul)
getitem_8 -> BUFFER_MUTATION running_mean
getitem_9 -> BUFFER_MUTATION running_var""",
    )


def test_hidden_write_to_user_inputs_becomes_user_input_mutations():
    class OnInputs(nn.Module):
        def forward(self, x, mean, var):
            return native(x, None, None, mean, var)

    program = claim_aten(export(OnInputs(), torch.randn(4, 3), torch.zeros(3), torch.ones(3)))
    assert_expected_inline(
        render(consolidated(program).program),
        """\
x: f32[4, 3] = placeholder
mean: f32[3] = placeholder
var: f32[3] = placeholder
new_ones: f32[3] = aten.new_ones.default(mean, [3])
new_zeros: f32[3] = aten.new_zeros.default(mean, [3])
_batch_norm_with_update_functional: (f32[4, 3], f32[3], f32[3], u8[0], f32[3], f32[3]) = aten._batch_norm_with_update_functional.default(x, new_ones, new_zeros, mean, var, 0.1, 1e-05)
getitem_3: f32[3] = getitem(_batch_norm_with_update_functional, 4)
getitem_4: f32[3] = getitem(_batch_norm_with_update_functional, 5)
getitem: f32[4, 3] = getitem(_batch_norm_with_update_functional, 0)
getitem_1: f32[3] = getitem(_batch_norm_with_update_functional, 1)
getitem_2: f32[3] = getitem(_batch_norm_with_update_functional, 2)
return (getitem_3, getitem_4, getitem)
getitem_3 -> USER_INPUT_MUTATION mean
getitem_4 -> USER_INPUT_MUTATION var""",
    )


def test_training_program_to_eval():
    program = SwitchMode("eval")(export(nn.Sequential(ConvBnRelu(eps=1e-3), nn.Dropout()), X)).program
    assert_expected_inline(
        render(program),
        """\
p_0_conv_weight: f32[4, 3, 3, 3] = placeholder
p_0_bn_weight: f32[4] = placeholder
p_0_bn_bias: f32[4] = placeholder
b_0_bn_running_mean: f32[4] = placeholder
b_0_bn_running_var: f32[4] = placeholder
b_0_bn_num_batches_tracked: i64[] = placeholder
input: f32[2, 3, 6, 6] = placeholder
conv2d: f32[2, 4, 4, 4] = aten.conv2d.default(input, p_0_conv_weight)
batch_norm: f32[2, 4, 4, 4] = aten.batch_norm.default(conv2d, p_0_bn_weight, p_0_bn_bias, b_0_bn_running_mean, b_0_bn_running_var, False, 0.1, 0.001, False)
relu: f32[2, 4, 4, 4] = aten.relu.default(batch_norm)
dropout: f32[2, 4, 4, 4] = aten.dropout.default(relu, 0.5, False)
return (dropout)""",
    )


def test_aten_dialect_to_eval():
    program = export(nn.Sequential(ConvBnRelu(), nn.Dropout()), X).run_decompositions()
    assert_expected_inline(
        render(SwitchMode("eval")(program).program),
        """\
p_0_conv_weight: f32[4, 3, 3, 3] = placeholder
p_0_bn_weight: f32[4] = placeholder
p_0_bn_bias: f32[4] = placeholder
b_0_bn_running_mean: f32[4] = placeholder
b_0_bn_running_var: f32[4] = placeholder
b_0_bn_num_batches_tracked: i64[] = placeholder
input: f32[2, 3, 6, 6] = placeholder
convolution: f32[2, 4, 4, 4] = aten.convolution.default(input, p_0_conv_weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
_native_batch_norm_legit_functional: (f32[2, 4, 4, 4], f32[0], f32[0]) = aten._native_batch_norm_legit_no_training.default(convolution, p_0_bn_weight, p_0_bn_bias, b_0_bn_running_mean, b_0_bn_running_var, 0.1, 1e-05)
getitem: f32[2, 4, 4, 4] = getitem(_native_batch_norm_legit_functional, 0)
relu: f32[2, 4, 4, 4] = aten.relu.default(getitem)
native_dropout: (f32[2, 4, 4, 4], b8[2, 4, 4, 4]) = aten.native_dropout.default(relu, 0.5, False)
getitem_5: f32[2, 4, 4, 4] = getitem(native_dropout, 0)
return (getitem_5)""",
    )


def test_eval_export_to_train_in_the_aten_dialect():
    program = export(ConvBnRelu().eval(), X).run_decompositions()
    assert_expected_inline(
        render(SwitchMode("train")(program).program),
        """\
p_conv_weight: f32[4, 3, 3, 3] = placeholder
p_bn_weight: f32[4] = placeholder
p_bn_bias: f32[4] = placeholder
b_bn_running_mean: f32[4] = placeholder
b_bn_running_var: f32[4] = placeholder
b_bn_num_batches_tracked: i64[] = placeholder
input: f32[2, 3, 6, 6] = placeholder
convolution: f32[2, 4, 4, 4] = aten.convolution.default(input, p_conv_weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
add: i64[] = aten.add.Tensor(b_bn_num_batches_tracked, 1)
_native_batch_norm_legit_no_training: (f32[2, 4, 4, 4], f32[4], f32[4], f32[4], f32[4]) = aten._native_batch_norm_legit_functional.default(convolution, p_bn_weight, p_bn_bias, b_bn_running_mean, b_bn_running_var, True, 0.1, 1e-05)
getitem: f32[2, 4, 4, 4] = getitem(_native_batch_norm_legit_no_training, 0)
getitem_1: f32[4] = getitem(_native_batch_norm_legit_no_training, 3)
getitem_2: f32[4] = getitem(_native_batch_norm_legit_no_training, 4)
relu: f32[2, 4, 4, 4] = aten.relu.default(getitem)
return (getitem_1, getitem_2, add, relu)
getitem_1 -> BUFFER_MUTATION bn.running_mean
getitem_2 -> BUFFER_MUTATION bn.running_var
add -> BUFFER_MUTATION bn.num_batches_tracked""",
    )


def test_frozen_with_its_weights():
    assert_expected_inline(
        render(freeze(export(ConvBnRelu(), X), affine=True)),
        """\
p_conv_weight: f32[4, 3, 3, 3] = placeholder
p_bn_weight: f32[4] = placeholder
p_bn_bias: f32[4] = placeholder
b_bn_running_mean: f32[4] = placeholder
b_bn_running_var: f32[4] = placeholder
b_bn_num_batches_tracked: i64[] = placeholder
input: f32[2, 3, 6, 6] = placeholder
conv2d: f32[2, 4, 4, 4] = aten.conv2d.default(input, p_conv_weight)
detach: f32[4] = aten.detach.default(p_bn_weight)
detach_1: f32[4] = aten.detach.default(p_bn_bias)
batch_norm: f32[2, 4, 4, 4] = aten.batch_norm.default(conv2d, detach, detach_1, b_bn_running_mean, b_bn_running_var, False, 0.1, 1e-05, False)
relu: f32[2, 4, 4, 4] = aten.relu.default(batch_norm)
return (relu)""",
    )


def test_autocast_in_training_ir():
    class Autocast(ConvBnRelu):
        def forward(self, input):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return super().forward(input)

    assert_expected_inline(
        render(consolidated(export(Autocast(), X)).program),
        """\
p_conv_weight: f32[4, 3, 3, 3] = placeholder
p_bn_weight: f32[4] = placeholder
p_bn_bias: f32[4] = placeholder
b_bn_running_mean: f32[4] = placeholder
b_bn_running_var: f32[4] = placeholder
b_bn_num_batches_tracked: i64[] = placeholder
input: f32[2, 3, 6, 6] = placeholder
submod_2 = self.submod_1
relu: (bf16[2, 4, 4, 4]) = wrap_with_autocast(cpu, torch.bfloat16, True, False, submod_2, input, p_conv_weight, b_bn_num_batches_tracked, p_bn_weight, p_bn_bias, b_bn_running_mean, b_bn_running_var)
getitem: bf16[2, 4, 4, 4] = getitem(relu, 0)
return (getitem)
submod_1:
  arg6_1: f32[2, 3, 6, 6] = placeholder
  arg0_1: f32[4, 3, 3, 3] = placeholder
  arg5_1: i64[] = placeholder
  arg1_1: f32[4] = placeholder
  arg2_1: f32[4] = placeholder
  arg3_1: f32[4] = placeholder
  arg4_1: f32[4] = placeholder
  conv2d: bf16[2, 4, 4, 4] = aten.conv2d.default(arg6_1, arg0_1)
  add_: i64[] = aten.add_.Tensor(arg5_1, 1)
  _batch_norm_with_update: (bf16[2, 4, 4, 4], f32[4], f32[4], u8[0]) = aten._batch_norm_with_update.default(conv2d, arg1_1, arg2_1, arg3_1, arg4_1, 0.1, 1e-05)
  batch_norm: bf16[2, 4, 4, 4] = getitem(_batch_norm_with_update, 0)
  relu: bf16[2, 4, 4, 4] = aten.relu.default(batch_norm)
  return (relu)""",
    )


def test_saved_statistics_of_an_eval_program_that_are_used():
    def saved(x, w, b, m, v):
        return torch.ops.aten._native_batch_norm_legit_no_training.default(x, w, b, m, v, 0.1, 1e-5)[2]

    program = export(Op(saved), torch.randn(4, 3)).run_decompositions()
    assert_expected_inline(
        render(consolidated(program).program),
        """\
p_weight: f32[3] = placeholder
p_bias: f32[3] = placeholder
b_running_mean: f32[3] = placeholder
b_running_var: f32[3] = placeholder
x: f32[4, 3] = placeholder
_batch_norm_no_update: (f32[4, 3], f32[0], f32[0], u8[0]) = aten._batch_norm_no_update.default(x, p_weight, p_bias, b_running_mean, b_running_var, 0.1, 1e-05)
add: f32[3] = aten.add.Tensor(b_running_var, 1e-05)
getitem_2: f32[3] = aten.rsqrt.default(add)
mul: f32[3] = aten.mul.Tensor(b_running_mean, 2)
return (getitem_2, mul)""",
    )
