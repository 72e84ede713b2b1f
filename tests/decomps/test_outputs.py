"""What a call returns, and what is filled in where a tensor is missing: one rule, which kernels, fakes and graphs keep."""

import itertools

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import torch_batchnorm as tbn
from programs import call_graph, consolidated, modes, same
from torch_batchnorm.decomps.counterparts import nearest
from torch_batchnorm.decomps.forms import FORMS, BatchNorm, Dialect, Statistics
from torch_batchnorm.decomps.outputs import NEUTRAL, fill, like_of, returned

aten = torch.ops.aten
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
ON_CPU = [
    (form, training)
    for form in FORMS
    if not form.destinations and len(form.roles) > 1 and not form.name.startswith(("aten.cudnn", "aten.miopen"))
    for training in modes(form)
    if training or "running_mean" in form.arguments  # without, eval reads memory that is not there
]
DTYPES = ((F32, F32), (BF16, BF16), (BF16, F32), (F16, F16), (F16, F32))  # of the input, of everything else


@pytest.mark.parametrize(("form", "training"), ON_CPU, ids=[f"{f.name}, {'train' if t else 'eval'}" for f, t in ON_CPU])
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_kernels_return_what_is_said(form, training, dtypes):
    for absent in ((), ("weight",), ("bias",), ("weight", "bias")):
        if set(absent) & form.required:
            continue
        tensors = {name: torch.full((3,), value, dtype=dtypes[1]) for name, value in NEUTRAL.items()}
        tensors |= dict.fromkeys((*absent, *({"running_mean", "running_var"} - {*form.arguments})))
        norm = BatchNorm(torch.randn(4, 3, 5).to(dtypes[0]), **tensors, training=training, momentum=0.1, eps=1e-5)
        args, kwargs = form.write(norm)
        found = dict(zip(form.roles, form.overload(*args, **kwargs), strict=True))
        found.pop("impl_index", None)
        assert {role: (tuple(t.shape), t.dtype) for role, t in found.items()} == {
            role: returned(norm, role) for role in found
        }


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("training", [True, False], ids=("train", "eval"))
def test_graphs_say_what_fake_kernels_return(training, dtypes, device):
    target = nearest(Dialect.FAMILY, training, Statistics.OUTPUTS, False)
    source = aten._native_batch_norm_legit_functional if training else aten._native_batch_norm_legit_no_training
    graph = call_graph(next(f for f in FORMS if f.overload is source.default), training, unread=("save_mean",))
    (call,) = graph.graph.find_nodes(op="call_function", target=source.default)
    with FakeTensorMode():
        x = torch.empty(4, 3, 5, dtype=dtypes[0], device=device)
        tensors = [x, *(torch.empty(3, dtype=dtypes[1], device=device) for _ in range(4))]
        for node, val in zip(graph.graph.find_nodes(op="placeholder"), tensors, strict=True):
            node.meta["val"] = val
        call.meta["val"] = (torch.empty_like(x),)
        expected = target.overload(*tensors, 0.1, 1e-5)
    (written,) = consolidated(graph).program.graph.find_nodes(op="call_function", target=target.overload)
    assert [(v.dtype, v.shape, v.device) for v in written.meta["val"]] == [
        (v.dtype, v.shape, v.device) for v in expected
    ]


@pytest.mark.parametrize(("device", "dtype"), [("cpu", BF16), ("cuda", F32)])
def test_saved_statistics_that_are_rebuilt_have_the_dtype_that_kernels_save(device, dtype):
    form = next(f for f in FORMS if f.overload is aten._native_batch_norm_legit_no_training.default)
    graph = call_graph(form, False)
    with FakeTensorMode():
        for node in graph.graph.find_nodes(op="placeholder"):
            shape = (4, 3, 5) if node.name == "input_1" else (3,)
            node.meta["val"] = torch.empty(shape, dtype=BF16, device=device)
        (call,) = graph.graph.find_nodes(op="call_function", target=form.overload)
        call.meta["val"] = (torch.empty(4, 3, 5, dtype=BF16, device=device),)
    rewritten = consolidated(graph).program
    (output,) = rewritten.graph.find_nodes(op="output")
    assert [node.meta["val"].dtype for node in output.args[0][1:]] == [dtype] * 2
    tensors = [torch.randn(4, 3, 5).to(BF16), *(torch.rand(3).to(BF16) for _ in range(4))]
    _, mean, invstd = rewritten(*tensors)
    assert same([mean, invstd], [tensors[3].to(dtype), torch.rsqrt(tensors[4].to(dtype) + 1e-5)])


@pytest.mark.parametrize("mask", [(True, False, False), (True, True, True)], ids=str)
def test_a_gradient_of_nothing_but_saved_statistics_is_computed_in_their_dtype(mask):
    def gradient(grad, x, mean, invstd):
        found = aten.native_batch_norm_backward(grad, x, None, None, None, mean, invstd, True, 1e-5, list(mask))
        return [grad for grad in found if grad is not None]

    torch.manual_seed(0)
    tensors = (*torch.randn(2, 6, 3, 4).to(BF16), torch.randn(3), torch.rand(3))
    rewritten = consolidated(make_fx(gradient)(*tensors)).program
    traced = make_fx(gradient, decomposition_table=tbn.decomposition_table())(*tensors)
    expected = gradient(*tensors)
    assert same(rewritten(*tensors), expected)
    assert same(traced(*tensors), expected)


MISSING = [c for n in range(1, 5) for c in itertools.combinations(NEUTRAL, n)]


@pytest.mark.parametrize("absent", MISSING, ids="+".join)
def test_what_is_missing_is_filled_in_like_what_is_there(absent):
    tensors = {name: torch.full((3,), value, dtype=F32) for name, value in NEUTRAL.items()}
    norm = BatchNorm(
        torch.randn(4, 3).to(BF16), **{**tensors, **dict.fromkeys(absent)}, training=True, momentum=0.1, eps=1e-5
    )
    alone = like_of(norm) is norm.input
    assert alone is ({"weight", "bias", "running_mean"} <= {*absent})
    for name in absent:
        assert same([fill(norm, name, 3)], [tensors[name].to(BF16 if alone else F32)])
        assert same([fill(norm, name, 3, wide=True)], [tensors[name]])
