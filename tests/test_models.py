"""Real models with random weights: every batch norm is rewritten, and nothing else about the model changes, to the bit.

Each is as narrow and as shallow as its class allows, and runs both as it is exported and decomposed to ATen. All the
tests of a model share its programs, which no pass touches: they run on one worker.
"""

import copy
import functools
import math
import re
from unittest import mock

import pytest
import torch
import transformers as hf
from monai.networks import nets as monai
from torch import nn
from torch.nn import functional

import torch_batchnorm as tbn
from programs import consolidated, export, fingerprint, legacy_left, nodes, same, saved_and_loaded, state_of, step

RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1]}
DENSENET = {"in_channels": 1, "out_channels": 3, "init_features": 8, "growth_rate": 4, "block_config": (2, 2, 2, 2)}

# The shape of the input, and the model. The dearest come first, so that parallel workers end together.
MODELS = {
    "MobileNetV2": (
        (2, 3, 64, 64),
        lambda: hf.MobileNetV2ForImageClassification(hf.MobileNetV2Config(depth_multiplier=0.25)),
    ),
    "monai EfficientNet": (
        (2, 3, 64, 64),
        lambda: monai.EfficientNet(["r1_k3_s11_e1_i32_o16_se0.25", "r2_k3_s22_e6_i16_o24_se0.25"], image_size=64),
    ),
    "MobileNetV1": (
        (2, 3, 64, 64),
        lambda: hf.MobileNetV1ForImageClassification(hf.MobileNetV1Config(depth_multiplier=0.25)),
    ),
    "MobileViTV2": (
        (2, 3, 64, 64),
        lambda: hf.MobileViTV2ForImageClassification(
            hf.MobileViTV2Config(width_multiplier=0.25, n_attn_blocks=[1, 1, 1])
        ),
    ),
    "EfficientNet": (
        (2, 3, 64, 64),
        lambda: hf.EfficientNetForImageClassification(
            hf.EfficientNetConfig(width_coefficient=0.25, depth_coefficient=0.1, hidden_dim=320)
        ),
    ),
    "monai DenseNet in 2-D": ((2, 1, 32, 32), lambda: monai.DenseNet121(spatial_dims=2, **DENSENET)),
    "monai DenseNet in 3-D": ((2, 1, 32, 32, 32), lambda: monai.DenseNet121(spatial_dims=3, **DENSENET)),
    "LeViT": (
        (2, 3, 64, 64),
        lambda: hf.LevitForImageClassification(
            hf.LevitConfig(image_size=64, hidden_sizes=[16, 24, 32], num_attention_heads=[2, 3, 4], depths=[1, 1, 1])
        ),
    ),
    "CvT": (
        (2, 3, 32, 32),
        lambda: hf.CvtForImageClassification(
            hf.CvtConfig(embed_dim=[8, 16], num_heads=[1, 2], depth=[1, 2], cls_token=[False, True])
        ),
    ),
    "Wav2Vec2Conformer": (
        (2, 4000),
        lambda: hf.Wav2Vec2ConformerModel(
            hf.Wav2Vec2ConformerConfig(
                hidden_size=16,
                num_hidden_layers=1,
                num_attention_heads=2,
                intermediate_size=32,
                conv_dim=[8] * 7,
                num_conv_pos_embeddings=8,
                num_conv_pos_embedding_groups=2,
                layerdrop=0.0,
                apply_spec_augment=False,
            )
        ),
    ),
    "UperNet on ResNet": (
        (2, 3, 64, 64),
        lambda: hf.UperNetForSemanticSegmentation(
            hf.UperNetConfig(
                backbone_config=hf.ResNetConfig(**RESNET, out_features=["stage1", "stage2", "stage3", "stage4"]),
                hidden_size=16,
                auxiliary_channels=8,
            )
        ),
    ),
    "VitMatte on ViTDet": (
        (2, 4, 64, 64),
        lambda: hf.VitMatteForImageMatting(
            hf.VitMatteConfig(
                backbone_config=hf.VitDetConfig(
                    hidden_size=16,
                    num_hidden_layers=1,
                    num_attention_heads=2,
                    num_channels=4,
                    image_size=64,
                    pretrain_image_size=64,
                    out_features=["stage1"],
                ),
                hidden_size=16,
                convstream_hidden_sizes=[8, 8, 16],
                fusion_hidden_sizes=[16, 8, 8, 8],
            )
        ),
    ),
    "RegNet": ((2, 3, 64, 64), lambda: hf.RegNetForImageClassification(hf.RegNetConfig(**RESNET, groups_width=8))),
    "ResNet": ((2, 3, 64, 64), lambda: hf.ResNetForImageClassification(hf.ResNetConfig(**RESNET))),
    "PatchTSMixer": (
        (2, 32, 3),
        lambda: hf.PatchTSMixerForPrediction(
            hf.PatchTSMixerConfig(num_input_channels=3, norm_mlp="BatchNorm", num_layers=1)
        ),
    ),
    "monai SegResNet in 3-D": (
        (2, 1, 16, 16, 16),
        lambda: monai.SegResNet(3, dropout_prob=0.2, norm="batch", blocks_down=(1, 1, 1), blocks_up=(1, 1)),
    ),
    "monai UNet in 3-D": (
        (2, 1, 16, 16, 16),
        lambda: monai.UNet(3, 1, 2, channels=(8, 16, 32), strides=(2, 2), num_res_units=2, norm="batch", dropout=0.1),
    ),
    # Has instance norms too, which decomposing turns into batch norms.
    "monai AttentionUnet": (
        (2, 1, 32, 32),
        lambda: monai.AttentionUnet(2, 1, 2, channels=(8, 16, 32), strides=(2, 2)),
    ),
}


def _built(name, training):
    """The model, statistics not those of a new one, and its input."""
    torch.manual_seed(0)
    shape, make = MODELS[name]
    module = make().train(training)
    for bn in module.modules():
        if isinstance(bn, nn.modules.batchnorm._BatchNorm):
            bn.running_mean.normal_(std=0.1)
            bn.running_var.uniform_(0.5, 1.5)
    return module, torch.randn(shape)


@functools.cache
def _programs(name, training):
    """The model, its input, its program as it is exported and in ATen, and how many batch norms the model runs by its
    own account: made once, so what runs them puts their state back as it was."""
    module, x = _built(name, training)
    before = state_of(module)
    with mock.patch.object(functional, "batch_norm", wraps=functional.batch_norm) as batch_norm, torch.no_grad():
        module(x)
    module.load_state_dict(before)
    exported = export(module, x)
    return module, x, exported, exported.run_decompositions(), batch_norm.call_count


by_model = pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.xdist_group(n)) for n in MODELS])


def _outcome(program, x):
    """Outputs, state and gradients of a step that drops the same units each time."""
    torch.manual_seed(0)
    return step(program.module(), x)


def _statistics(state):
    return {k: v for k, v in state.items() if k.endswith(("running_mean", "running_var"))}


@pytest.mark.parametrize("training", [True, False], ids=("train", "eval"))
@by_model
def test_every_batch_norm_of_a_model_is_rewritten_to_the_bit(name, training):
    _, x, exported, decomposed, calls = _programs(name, training)
    # only here: decomposing drops what nothing reads, and turns instance norms into batch norms
    assert len(legacy_left(exported)) == calls > 0
    for program in (exported, decomposed):
        result = consolidated(program)
        assert (result.declined, legacy_left(result.program)) == ((), [])
        assert len(result.edits) == len(legacy_left(program)) > 0
        # torch cannot differentiate a train program that is decomposed, consolidated or not
        with torch.set_grad_enabled(program is exported):
            outputs, state, _ = expected = _outcome(program, x)
            assert same(_outcome(result.program, x), expected)
            assert same(_outcome(saved_and_loaded(result.program), x), expected)
        assert outputs
        assert all(t.isfinite().all() for t in outputs)
        assert same(_statistics(state), _statistics(program.state_dict)) is not training


@by_model
def test_a_model_to_eval_and_back(name):
    """To eval: the eager model in eval, to the bit. Back to train: the graph that it was."""
    _, x, program, decomposed, _ = _programs(name, True)
    module, _, _, decomposed_eval, _ = _programs(name, False)  # of the same state
    found = tbn.SwitchMode("eval")(program)
    assert (found.modified, found.declined, tbn.verify(found.program)) == (True, (), ())
    with torch.no_grad():
        assert same(_tensors(found.program.module()(x)), _tensors(module(x)))
    assert nodes(tbn.switch_mode(found.program, "train")) == nodes(program)
    found = tbn.SwitchMode("eval")(decomposed)
    assert (found.modified, found.declined, tbn.verify(found.program)) == (True, (), ())
    with torch.no_grad():  # decomposing changes the rounding of other ops, in eval as it does here
        assert same(_tensors(found.program.module()(x)), _tensors(decomposed_eval.module()(x)))
    assert nodes(tbn.switch_mode(found.program, "train")) == nodes(decomposed)


def _tensors(outputs):
    return [t for t in torch.utils._pytree.tree_leaves(outputs) if isinstance(t, torch.Tensor)]


# Why a batch norm of these models may be left as it is.
LEFT = re.compile(
    r"it has no running statistics|its input \S+ \(.*\) is made by no convolution or linear map"
    r"|(of \S+, )?\S+ is read by .* too|its output is read by .*, which is no convolution or linear map"
)


@by_model
def test_the_batch_norms_of_a_model_are_folded(name):
    """All those of a convolution of their own, by a count that is not the pass's, and what is left has its reason."""
    module, x, *programs, _ = _programs(name, False)
    with torch.no_grad():
        want = _tensors(module(x))
    for program in programs:
        before = fingerprint(program)
        result = tbn.Fold()(program)
        pairs, folded = _pairs(program), {edit.site for edit in result.edits}
        assert len(pairs & folded) >= 0.95 * len(pairs)
        assert [d for d in result.declined if not LEFT.match(d.reason)] == []
        assert (fingerprint(program), tbn.verify(result.program)) == (before, ())
        assert tbn.Fold()(result.program).modified is False
        with torch.no_grad():
            found = _tensors(result.program.module()(x))
        assert max(_distance(a, b) for a, b in zip(found, want, strict=True)) < 1e-4


def _pairs(program):
    """The batch norms of a convolution's output that nothing else reads, nor its weight."""
    calls = [n for n in program.graph.nodes if n.op == "call_function" and n.args]
    found = [(n, n.args[0]) for n in calls if "batch_norm" in str(n.target)]
    convolved = [(n, conv) for n, conv in found if conv.op == "call_function" and "aten.conv" in str(conv.target)]
    return {
        n.name
        for n, conv in convolved
        if len(conv.users) == len(conv.args[1].users) == 1 and conv.args[1].op == "placeholder"
    }


def _distance(found, want):
    """The largest error, relative to the largest value."""
    return ((found - want).abs().max() / want.abs().max()).item()


def test_a_decomposed_resnet_50_trains_again_as_the_eager_model_does():
    """Ten steps of SGD: the losses are the eager model's to the bit."""
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    model = hf.ResNetForImageClassification(hf.ResNetConfig())
    program = export(copy.deepcopy(model), x).run_decompositions()
    losses = []
    for module in (model, tbn.legalize(program, "training").module()):
        optimizer = torch.optim.SGD(module.parameters(), lr=1e-4)
        losses.append([])
        for _ in range(10):
            optimizer.zero_grad()
            loss = module(x).logits.square().mean()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert losses[0] == losses[1]
    assert all(map(math.isfinite, losses[0]))
