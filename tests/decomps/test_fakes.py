"""What the family says of fake tensors is what its kernels return: dtype, shape and strides, for compilers go by it."""

import itertools

import pytest
import torch
from torch._subclasses import FakeTensorMode

import torch_batchnorm  # noqa: F401

aten = torch.ops.aten
WITH_UPDATE = aten._batch_norm_with_update_functional.default
NO_UPDATE = aten._batch_norm_no_update.default
BACKWARD = aten.batch_norm_backward.default

# The dtypes of input, weight and statistics that the kernels take.
DTYPES = {
    "float32": (torch.float32,) * 3,
    "float64": (torch.float64,) * 3,
    "bfloat16": (torch.bfloat16,) * 3,
    "float16": (torch.float16,) * 3,
    "bfloat16 with float32 parameters": (torch.bfloat16, torch.float32, torch.float32),
    "float16 with float32 parameters": (torch.float16, torch.float32, torch.float32),
}
LAYOUTS = {
    "contiguous": lambda: torch.randn(2, 3, 4, 5),
    "channels last": lambda: torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "permuted": lambda: torch.randn(5, 2, 3, 4).permute(1, 2, 3, 0),
    "expanded": lambda: torch.randn(2, 3, 1, 1).expand(2, 3, 4, 5),
    "sliced": lambda: torch.randn(2, 3, 4, 10)[..., ::2],
    "channels last, sliced": lambda: torch.randn(2, 6, 4, 5).contiguous(memory_format=torch.channels_last)[:, ::2],
}


def _said(tensors):
    return [(t.dtype, t.shape, t.stride()) for t in tensors]


def _compared(op, *args):
    real = op(*args)
    with FakeTensorMode() as mode:
        fake = op(*(mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args))
    assert _said(fake) == _said(real)
    return real


@pytest.mark.parametrize("training", [True, False], ids=("train", "eval"))
@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
def test_fakes_have_the_kernels_dtypes(dtypes, training):
    x, weight, mean, var = (
        t.to(d) for t, d in zip((torch.randn(4, 3, 5, 5), *[torch.ones(3)] * 3), (*dtypes, dtypes[2]), strict=True)
    )
    found = _compared(WITH_UPDATE if training else NO_UPDATE, x, weight, weight, mean, var, 0.1, 1e-5)
    saved = (found[1], found[2]) if training else (None, None)
    _compared(BACKWARD, x, x, weight, mean, var, *saved, training, 1e-5, [True] * 3, found[3])


@pytest.mark.parametrize("training", [True, False], ids=("train", "eval"))
@pytest.mark.parametrize(("input", "grad"), list(itertools.product(LAYOUTS, LAYOUTS)))
def test_fakes_have_the_kernels_strides(input, grad, training):
    x, g, weight, mean, var = LAYOUTS[input](), LAYOUTS[grad](), torch.ones(3), torch.zeros(3), torch.ones(3)
    found = _compared(WITH_UPDATE if training else NO_UPDATE, x, weight, weight, mean, var, 0.1, 1e-5)
    saved = (found[1], found[2]) if training else (None, None)
    _compared(BACKWARD, g, x, weight, mean, var, *saved, training, 1e-5, [True] * 3, found[3])
