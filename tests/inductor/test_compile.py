"""Compilers take a consolidated program as they took the legacy one."""

import pytest
import torch
from torch import nn

from programs import consolidated, export


def _net():
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.BatchNorm2d(4, affine=False)
    )
    for bn in (net[1], net[4]):
        bn.running_mean.normal_()
        bn.running_var.uniform_(0.5, 1.5)
    return net


X = torch.randn(2, 3, 12, 12)


@pytest.mark.parametrize("decomposed", [False, True], ids=("training IR", "ATEN"))
def test_torch_compile_of_an_eval_program(decomposed):
    net = _net().eval()
    program = export(net, X)
    program = consolidated(program.run_decompositions() if decomposed else program).program
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(program.module())(X), net(X), atol=1e-5, rtol=1e-5)


def test_torch_compile_of_a_train_program_moves_the_statistics():
    net, compiled = _net(), torch.compile(consolidated(export(_net(), X)).program.module())
    for _ in range(2):
        compiled(X).square().mean().backward()
        net(X).square().mean().backward()
    for expected, found in zip(net.buffers(), compiled._orig_mod.buffers(), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    for expected, found in zip(net.parameters(), compiled._orig_mod.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, atol=1e-4, rtol=1e-4)


def test_aot_inductor_of_an_eval_program(tmp_path):
    net = _net().eval()
    program = consolidated(export(net, X)).program
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "net.pt2"))
    with torch.no_grad():
        torch.testing.assert_close(torch._inductor.aoti_load_package(package)(X), net(X), atol=1e-5, rtol=1e-5)
