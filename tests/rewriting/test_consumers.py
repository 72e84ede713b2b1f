"""Real consumers take a legalized program: ONNX, torchao, AOTInductor, torch.compile."""

import copy
import warnings
from unittest import mock

import pytest
import torch
from torch import nn

import torch_batchnorm as tbn
from programs import export, same, state_of
from torch_batchnorm import Legalize

aten = torch.ops.aten
X = torch.randn(4, 3, 10, 10, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(
            nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 3), nn.BatchNorm2d(4, eps=1e-3), nn.ReLU()
        )
        self.head = nn.Linear(4, 2)
        for bn in (self.body[1], self.body[4]):
            bn.running_mean.normal_()
            bn.running_var.uniform_(0.5, 1.5)

    def forward(self, x):
        return self.head(self.body(x).mean((2, 3)))


class Small(nn.Module):
    """One convolution and batch norm, whose statistics are an output too."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.bn = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x):
        return self.bn(self.conv(x)).relu()


class Tells(Small):
    def forward(self, x):
        return super().forward(x), self.bn.running_mean + 0, self.bn.running_var + 0


FORMS = {
    "training IR": lambda p: p,
    "consolidated": tbn.consolidate,
    "decomposed": lambda p: p.run_decompositions(),
    "decomposed, consolidated": lambda p: tbn.consolidate(p.run_decompositions()),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", FORMS)
def test_onnx_runs_it_and_holds_one_batch_normalization_a_site(form):
    import onnxruntime

    model = Net().eval()
    program = tbn.legalize(FORMS[form](export(model, X)), "core_aten")
    exported = torch.onnx.export(program, dynamo=True, verbose=False, optimize=False)  # which folds them
    ops = [node.op_type for node in exported.model.graph]
    assert ops.count("BatchNormalization") == 2
    session = onnxruntime.InferenceSession(exported.model_proto.SerializeToString())
    (found,) = session.run(None, {session.get_inputs()[0].name: X.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), model(X), atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_torchao_qat_gives_what_it_gives_on_the_original():
    from torchao.quantization.pt2e import qat_utils
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_qat_pt2e
    from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import (
        X86InductorQuantizer,
        get_default_x86_inductor_quantization_config,
    )

    patterns, capture = [], qat_utils._get_aten_graph_module_for_pattern

    def quantized(program):
        captured = []

        def once(function, *args, **kwargs):
            """Of the 108 patterns that torchao captures for every program, the one whose turn it is."""
            if len(captured) == len(patterns):
                patterns.append((function.fn.__code__, capture(function, *args, **kwargs)))
            code, pattern = patterns[len(captured)]
            assert code is function.fn.__code__
            captured.append(copy.deepcopy(pattern))
            return captured[-1]

        with mock.patch.object(qat_utils, "_get_aten_graph_module_for_pattern", once):
            found = trained_and_converted(program)
        assert len(captured) == len(patterns) > 0
        return found

    def trained_and_converted(program):
        quantizer = X86InductorQuantizer().set_global(get_default_x86_inductor_quantization_config(is_qat=True))
        prepared = prepare_qat_pt2e(program.module(), quantizer)
        optimizer = torch.optim.SGD(prepared.parameters(), lr=0.05)
        losses = []
        for _ in range(2):
            loss = prepared(X).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, convert_pt2e(prepared)(X)

    program = export(Small(), X)
    legalized = tbn.legalize(tbn.consolidate(export(Small(), X)), "composite", cudnn_enabled=False)
    assert same(quantized(legalized), quantized(program))


TAKEN = {
    "family": tbn.consolidate,
    "core_aten": lambda p: tbn.legalize(tbn.consolidate(p), "core_aten"),
    "functional": lambda p: tbn.legalize(p, "functional"),
}


@pytest.mark.parametrize("name", TAKEN)
def test_a_packaged_train_program_moves_the_statistics_at_every_call(name, tmp_path):
    reference = Tells()
    program = TAKEN[name](export(copy.deepcopy(reference), X))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "net.pt2"))
        loaded = torch._inductor.aoti_load_package(package)
    for _ in range(3):
        with torch.no_grad():
            expected, found = reference(X), loaded(X)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", TAKEN)
def test_torch_compile_of_a_train_program(name):
    torch._dynamo.reset()
    reference = Net()
    module = TAKEN[name](export(copy.deepcopy(reference), X)).module()
    compiled = torch.compile(module)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(compiled(X), reference(X), atol=1e-5, rtol=1e-5)
    for key, value in state_of(reference).items():
        torch.testing.assert_close(module.state_dict()[key], value, atol=1e-5, rtol=1e-5)


def test_the_functional_target_declines_nothing_here():
    assert Legalize("functional")(export(Net(), X)).declined == ()
