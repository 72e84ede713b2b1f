"""benchmarks/gpu_check.py: what it can check without a GPU, and that it says so."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torch_batchnorm as tbn

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
import gpu_check  # noqa: E402


@pytest.mark.skipif(torch.cuda.is_available(), reason="for a machine without CUDA")
def test_without_a_gpu_it_says_so_compares_on_the_cpu_and_exits_0(tmp_path):
    out = tmp_path / "report.json"
    command = [sys.executable, ROOT / "benchmarks" / "gpu_check.py", "--out", out]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    report = json.loads(ran.stdout)
    assert report == json.loads(out.read_text())
    assert report["note"].startswith("no GPU here")
    assert report["device"] is None
    assert report["wrong"] == []
    assert report["moved"]["consolidated, train"] == report["moved"]["consolidated, eval"] == 0


@pytest.mark.parametrize("dtype", gpu_check.DTYPES, ids=str)
@pytest.mark.parametrize("training", [True, False], ids=("train", "eval"))
@pytest.mark.parametrize("layout", gpu_check.LAYOUTS)
def test_its_formula_and_calls_agree(layout, training, dtype):
    given = gpu_check.tensors((4, 8, 5, 5), dtype, gpu_check.LAYOUTS[layout], "cpu")
    exact = gpu_check.formula(*given, training)
    error = (gpu_check.call(given, training).double() - exact).abs().max()
    assert error < {torch.float32: 1e-5, torch.bfloat16: 0.1, torch.float16: 0.02}[dtype]
    expected = "cudnn" if dtype is not torch.bfloat16 else "native"
    assert tbn.explain_backend(*given, training, 1e-5, device="cuda").backend.value == expected


def test_its_loss_curves_start_alike_and_are_timed():
    found = gpu_check.curves(gpu_check.Net, torch.randn(4, 16, 6, 6), steps=3)
    assert list(found) == ["eager", "inductor", "kept"]
    assert found["eager"]["far_from_eager"] == 0
    assert all(way["far_from_eager"] < 1e-4 and way["seconds_a_step"] > 0 for way in found.values())
