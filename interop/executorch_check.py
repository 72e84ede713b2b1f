"""ExecuTorch takes a legalized eval program, and its portable runtime computes what the eager model computes.

Usage: python interop/executorch_check.py. Exit code 1 when it does not. `make interop` sets up its environment.
"""

from __future__ import annotations

import sys
import warnings

import torch
from executorch.exir import to_edge
from executorch.runtime import Runtime
from torch import nn

import torch_batchnorm as tbn


def main() -> int:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.BatchNorm2d(4, eps=1e-3)
    ).eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 1.5)
    x = torch.randn(2, 3, 12, 12)
    consolidated = tbn.consolidate(torch.export.export(model, (x,)).run_decompositions())
    try:
        to_edge(consolidated)
        print("the edge verifier takes the family itself: legalizing is not needed any more")
    except Exception as error:
        print(f"the family itself is refused, as expected: {type(error).__name__}")
    edge = to_edge(tbn.legalize(consolidated, "core_aten"))
    buffer = edge.to_executorch().buffer
    method = Runtime.get().load_program(buffer).load_method("forward")
    (found,) = method.execute([x])
    worst = (found - model(x)).abs().max().item()
    print(f"portable runtime against eager: {worst:.2e} (<= 1e-5)")
    return 0 if worst <= 1e-5 else 1


if __name__ == "__main__":
    sys.exit(main())
