"""`val` is a hint and the state is the truth: metadata that nobody kept up to date never decides."""

import copy

import pytest
import torch
from torch import nn

import torch_batchnorm as tbn
from programs import export, same


def moved(net, x, dtype, decomposed=False):
    """A module of an export that `to` moved to a dtype, which its graph does not say, and its input."""
    program = export(net.eval(), x)
    program = program.run_decompositions() if decomposed else program
    return program.module().to(dtype), x.to(dtype)


NETS = {
    "convolution with a bias": lambda: (nn.Sequential(nn.Conv2d(3, 4, 2), nn.BatchNorm2d(4)), torch.randn(2, 3, 5, 5)),
    "convolution without one": (
        lambda: (nn.Sequential(nn.Conv2d(3, 4, 2, bias=False), nn.BatchNorm2d(4)), torch.randn(2, 3, 5, 5))
    ),
    "linear map without one": (
        lambda: (nn.Sequential(nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4), nn.Linear(4, 2)), torch.randn(5, 3))
    ),
    "alone": lambda: (nn.Sequential(nn.BatchNorm2d(3), nn.ReLU()), torch.randn(2, 3, 5, 5)),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("decomposed", [False, True], ids=("training IR", "ATEN"))
@pytest.mark.parametrize("name", NETS)
def test_a_fold_into_a_module_that_was_moved_runs_in_its_dtype(name, decomposed, dtype):
    torch.manual_seed(0)
    module, x = moved(*NETS[name](), dtype, decomposed)
    result = tbn.Fold(alone="multiply_add")(module)
    assert (len(result.edits), result.declined) == (1, ())
    held = torch.float32 if name == "alone" and dtype is torch.bfloat16 else dtype  # as kernels compute halves
    assert {t.dtype for t in result.program.state_dict().values() if t.is_floating_point()} == {held}
    with torch.no_grad():
        want, found = module(x), result.program(x)
    assert found.dtype == dtype
    torch.testing.assert_close(found, want, rtol=2e-2 if dtype is torch.bfloat16 else 1e-9, atol=2e-2)


def test_a_channel_count_that_is_stale_is_that_of_the_statistics():
    module = export(nn.Sequential(nn.Conv2d(3, 4, 2), nn.BatchNorm2d(4)), torch.randn(2, 3, 5, 5)).module()
    conv = next(node for node in module.graph.nodes if "conv2d" in str(node.target))
    conv.meta["val"] = conv.meta["val"][:, :1]
    for run in (tbn.SwitchMode("eval"), tbn.Consolidate()):
        result = run(module)
        assert (len(result.edits), result.declined) == (1, ())


def test_a_statistic_that_is_too_short_is_declined_as_ever():
    graph = torch.fx.Graph()
    x, mean, var = (graph.placeholder(name) for name in ("x", "mean", "var"))
    for node, shape in ((x, (2, 4, 5, 5)), (mean, (4,)), (var, (2,))):
        node.meta["val"] = torch.empty(shape)
    made = graph.call_function(torch.ops.aten.batch_norm.default, (x, None, None, mean, var, False, 0.1, 1e-5, False))
    graph.output(made)
    (declined,) = tbn.Consolidate()(torch.fx.GraphModule({}, graph)).declined
    assert declined.reason == "running_var has 2 elements, expected 4, one for each channel of the input"


@pytest.mark.filterwarnings("ignore")
def test_quantization_aware_training_switches_as_torchao_does():
    pytest.importorskip("torchao")
    from torchao.quantization.pt2e import move_exported_model_to_eval
    from torchao.quantization.pt2e.quantize_pt2e import prepare_qat_pt2e
    from torchao.testing.pt2e._xnnpack_quantizer import XNNPACKQuantizer, get_symmetric_quantization_config

    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 8)
    quantizer = XNNPACKQuantizer().set_global(get_symmetric_quantization_config(is_qat=True))
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    prepared = prepare_qat_pt2e(export(net, x).module(), quantizer)
    prepared(x)
    theirs = move_exported_model_to_eval(copy.deepcopy(prepared))
    result = tbn.SwitchMode("eval")(copy.deepcopy(prepared))
    assert (len(result.edits), result.declined) == (1, ())
    consolidated = tbn.Consolidate()(copy.deepcopy(result.program))  # observers change when they run
    assert (len(consolidated.edits), consolidated.declined) == (1, ())
    with torch.no_grad():
        want = theirs(x)
        assert same(result.program(x), want)
        assert same(consolidated.program(x), want)
