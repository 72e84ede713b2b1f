"""`tbn.ops`: the family made total. Against PyTorch's own samples, the formula in float64, and every former crash."""

import subprocess
import sys

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import torch_batchnorm as tbn
from programs import export, same
from samples import DTYPES, NAMES, OPINFOS, every_sample, samples
from torch_batchnorm import ops

aten = torch.ops.aten
TAIL = (0.1, 1e-5)


def formula(x, w, b, mean, var, training, momentum, eps):
    """Batch norm by its formula in float64: output and the new statistics."""
    x, w, b, mean, var = (None if t is None else t.double() for t in (x, w, b, mean, var))
    dims = [d for d in range(x.ndim) if d != 1]
    shape = [1, -1, *[1] * (x.ndim - 2)]
    m, v = (x.mean(dims), x.var(dims, unbiased=False)) if training else (mean, var)
    y = (x - m.view(shape)) / torch.sqrt(v.view(shape) + eps)
    y = y if w is None else y * w.view(shape)
    y = y if b is None else y + b.view(shape)
    if training and mean is not None:
        mean, var = (1 - momentum) * mean + momentum * m, (1 - momentum) * var + momentum * x.var(dims, unbiased=True)
    return y, mean, var


TOLERANCES = {torch.float16: 5e-3, torch.bfloat16: 4e-2, torch.float32: 2e-5, torch.float64: 1e-12}


def test_the_samples_are_pytorchs_own():
    assert sorted(OPINFOS) == sorted(NAMES)


@pytest.mark.parametrize(("name", "dtype"), DTYPES, ids=str)
def test_samples_of_lower_rank_are_refused(name, dtype):
    for x, w, b, mean, var, _, *tail in every_sample(name, dtype):
        if x.ndim < 2:  # ATen takes an empty one; [N, C] is what we ask for
            with pytest.raises(tbn.InvalidBatchNorm, match=r"expected \[N, C, "):
                ops.batch_norm_no_update(x, w, b, mean, var, *tail)


@pytest.mark.parametrize(("name", "dtype"), DTYPES, ids=str)
def test_samples_of_pytorch_equal_the_formula(name, dtype):
    compared = 0
    for x, w, b, mean, var, training, *tail in samples(name, dtype):
        y, new_mean, new_var = formula(x, w, b, mean, var, training, *tail)
        op = ops.batch_norm_with_update if training else ops.batch_norm_no_update
        stats = [None if t is None else t.clone() for t in (mean, var)]
        found = op(x, w, b, *stats, *tail)
        tolerance = {"atol": TOLERANCES[dtype] * max(1, y.abs().max()), "rtol": TOLERANCES[dtype]}
        torch.testing.assert_close(found[0].double(), y, **tolerance)
        assert found[0].dtype == dtype
        assert [tuple(t.shape) for t in found[1:3]] == [(x.shape[1],)] * 2
        if mean is not None:
            for s, expected in zip(stats, (new_mean, new_var), strict=True):
                torch.testing.assert_close(s.double(), expected, **tolerance)
        if training:
            functional = ops.batch_norm_with_update_functional(x, w, b, mean, var, *tail)
            assert same(functional[:3], found[:3])
            assert same(list(functional[4:]), stats)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            faked = [t if t is None else mode.from_tensor(t) for t in (x, w, b, mean, var)]
            fakes = op(*faked, *tail)
        metas = op(*(t if t is None else t.to("meta") for t in (x, w, b, mean, var)), *tail)
        for told in (fakes, metas):
            assert [t.shape for t in told[:3]] == [t.shape for t in found[:3]]
            assert told[0].dtype == found[0].dtype
        compared += 1
    assert compared > 0


def _double(n=4, size=(2,)):
    torch.manual_seed(0)
    x = torch.randn(n, 3, *size, dtype=torch.double)
    return x, torch.rand(3, dtype=torch.double) + 0.5, torch.randn(3, dtype=torch.double)


STATS = torch.zeros(3, dtype=torch.double), torch.ones(3, dtype=torch.double) * 2
OPS = {
    "with_update": lambda x, w, b: ops.batch_norm_with_update(x, w, b, STATS[0].clone(), STATS[1].clone(), *TAIL)[0],
    "functional": lambda x, w, b: ops.batch_norm_with_update_functional(x, w, b, *STATS, *TAIL)[0],
    "no statistics": lambda x, w, b: ops.batch_norm_with_update(x, w, b, None, None, *TAIL)[0],
    "no_update": lambda x, w, b: ops.batch_norm_no_update(x, w, b, *STATS, *TAIL)[0],
}
ABSENT = {"affine": (1, 1), "no weight": (0, 1), "no bias": (1, 0), "neither": (0, 0)}


@pytest.mark.parametrize("affine", ABSENT)
@pytest.mark.parametrize("name", OPS)
def test_gradients_to_second_order_and_forward_mode(name, affine):
    x, w, b = _double()
    present = [t.requires_grad_() for t, there in zip((x, w, b), (1, *ABSENT[affine]), strict=True) if there]

    def call(*given):
        given = iter(given)
        return OPS[name](next(given), *(next(given) if there else None for there in ABSENT[affine]))

    assert torch.autograd.gradcheck(call, present, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(call, present)


@pytest.mark.filterwarnings("ignore:There is a performance drop because we have not yet implemented the batching rule")
@pytest.mark.parametrize("name", ["functional", "no statistics functional", "no_update"])
def test_vmap_of_the_forms_that_write_nothing(name):
    _, w, b = _double()
    x = torch.randn(5, 4, 3, 2, dtype=torch.double)
    stats = (None, None) if name.startswith("no stat") else STATS
    op = ops.batch_norm_no_update if name == "no_update" else ops.batch_norm_with_update_functional
    found = torch.func.vmap(lambda x: op(x, w, b, *stats, *TAIL)[0])(x)
    torch.testing.assert_close(found, torch.stack([op(x, w, b, *stats, *TAIL)[0] for x in x]))


@pytest.mark.parametrize("training", [True, False], ids=("train", "eval"))
def test_backward_equals_autograd_of_the_formula_in_double(training):
    x, w, b = (t.requires_grad_() for t in _double(6))
    x.data.mul_(3)
    y, *_ = formula(x, w, b, *STATS, training, *TAIL)
    g = torch.randn_like(y)
    expected = torch.autograd.grad(y, (x, w, b), g)
    op = ops.batch_norm_with_update_functional if training else ops.batch_norm_no_update
    with torch.no_grad():
        saved = op(x, w, b, *STATS, *TAIL)
        found = ops.batch_norm_backward(g, x, w, *STATS, *saved[1:3], training, 1e-5, [True] * 3, saved[3])
        torch.testing.assert_close(
            saved[2], 1 / torch.sqrt((x.var((0, 2), unbiased=False) if training else STATS[1]) + 1e-5)
        )
        torch.testing.assert_close(found, expected, atol=1e-10, rtol=1e-10)
        some = ops.batch_norm_backward(g, x, w, *STATS, *saved[1:3], training, 1e-5, [True, False, False], saved[3])
        assert (some[1:], same(some[0], found[0])) == ((None, None), True)
        out = [torch.empty(0, dtype=torch.double) for _ in range(3)]
        ops.batch_norm_backward(g, x, w, *STATS, *saved[1:3], training, 1e-5, [True] * 3, saved[3], out=out)
        assert same(out, list(found))
        unweighted = ops.batch_norm_backward(g, x, None, *STATS, *saved[1:3], training, 1e-5, [True] * 3, saved[3])
        ones = ops.batch_norm_backward(
            g, x, torch.ones_like(w), *STATS, *saved[1:3], training, 1e-5, [True] * 3, saved[3]
        )
        assert same(unweighted, ones)


def test_eval_backward_is_weight_times_rsqrt_of_the_running_variance():
    x, w, b = (t.requires_grad_() for t in _double())
    g = torch.randn_like(x)
    (found,) = torch.autograd.grad(OPS["no_update"](x, w, b), x, g)
    torch.testing.assert_close(found, (w * torch.rsqrt(STATS[1] + 1e-5)).view(1, 3, 1) * g)


@pytest.mark.parametrize("shape", [(0, 3), (0, 3, 4, 4), (2, 3, 0, 4)], ids=str)
@pytest.mark.parametrize("affine", [True, False], ids=("affine", "affine off"))
@pytest.mark.parametrize("name", ["with_update", "functional", "no statistics", "no_update"])
def test_an_empty_batch_gives_an_empty_output_zero_gradients_and_unchanged_statistics(name, affine, shape):
    x = torch.empty(shape, requires_grad=True)
    w, b = (torch.rand(3, requires_grad=True) for _ in range(2)) if affine else (None, None)
    stats = (None, None) if name == "no statistics" else (torch.rand(3), torch.rand(3))
    before = [None if s is None else s.clone() for s in stats]
    call = {"functional": ops.batch_norm_with_update_functional, "no_update": ops.batch_norm_no_update}
    found = call.get(name, ops.batch_norm_with_update)(x, w, b, *stats, *TAIL)
    assert (found[0].shape, [tuple(t.shape) for t in found[1:3]]) == (torch.Size(shape), [(3,), (3,)])
    assert same(list(stats), before)
    assert name != "functional" or same(list(found[4:]), before)
    found[0].sum().backward()
    assert x.grad.shape == x.shape
    assert all(t is None or same(t.grad, torch.zeros(3)) for t in (w, b))


def test_backward_of_an_empty_batch_is_zero():
    x, w = torch.empty(0, 3, 2), torch.rand(3)
    saved = ops.batch_norm_with_update(x, w, None, None, None, *TAIL)
    found = ops.batch_norm_backward(x, x, w, None, None, *saved[1:3], True, 1e-5, [True, True, False], saved[3])
    assert same(found, (x, torch.zeros(3), None))


BF16 = torch.tensor([[[1.3047, 0.8789]]], dtype=torch.bfloat16)


def test_half_statistics_are_float32_with_one_cast_at_the_end():
    found = ops.batch_norm_with_update(BF16, None, None, None, None, *TAIL)
    assert same(found[0], torch.tensor([[[1.0, -1.0]]], dtype=torch.bfloat16))
    assert found[1].dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_input_with_float32_weight_and_statistics(dtype):
    x, stats = torch.randn(4, 3, 5).to(dtype), (torch.zeros(3), torch.ones(3))
    found = ops.batch_norm_with_update(x, torch.ones(3), torch.zeros(3), *stats, *TAIL)
    assert (found[0].dtype, stats[0].dtype, found[2].dtype) == (dtype, torch.float32, torch.float32)


@pytest.mark.parametrize("format", [torch.channels_last, torch.contiguous_format], ids=str)
def test_layout_is_kept_forward_and_backward(format):
    x = torch.randn(2, 3, 4, 5).contiguous(memory_format=format).requires_grad_()
    for op, stats in (
        (ops.batch_norm_with_update, (None, None)),
        (ops.batch_norm_no_update, (torch.zeros(3), torch.ones(3))),
    ):
        found = op(x, None, None, *stats, *TAIL)[0]
        (grad,) = torch.autograd.grad(found, x, torch.randn_like(found))
        assert (found.is_contiguous(memory_format=format), grad.is_contiguous(memory_format=format)) == (True, True)


GOOD = {
    "input": torch.randn(4, 3, 5),
    "weight": torch.ones(3),
    "bias": torch.zeros(3),
    "running_mean": torch.zeros(3),
    "running_var": torch.ones(3),
}
TRAIN, EVAL = "batch_norm_with_update", "batch_norm_no_update"
BAD = {
    "rank 1": (TRAIN, {"input": torch.randn(3)}, "input is float32[3], expected [N, C, *]"),
    "integers": (
        EVAL,
        {"input": torch.ones(4, 3, dtype=torch.int64)},
        "input is int64[4, 3], expected a floating point dtype",
    ),
    "running_var alone": (
        TRAIN,
        {"running_mean": None},
        "running_mean is None, expected a tensor, as running_var is one; or None for both",
    ),
    "running_mean alone": (
        EVAL,
        {"running_var": None},
        "running_var is None, expected a tensor, as running_mean is one; or None for both",
    ),
    "eval without statistics": (
        EVAL,
        {"running_mean": None, "running_var": None},
        "running_mean is None, expected a tensor: without running statistics",
    ),
    "running_var of no elements": (
        EVAL,
        {"running_var": torch.ones(0)},
        "running_var is float32[0], expected [3], one value for each channel of input float32[4, 3, 5]",
    ),
    "running_var too short": (TRAIN, {"running_var": torch.ones(2)}, "running_var is float32[2], expected [3]"),
    "weight too long": (TRAIN, {"weight": torch.ones(4)}, "weight is float32[4], expected [3]"),
    "weight of two dimensions": (EVAL, {"weight": torch.ones(3, 1)}, "weight is float32[3, 1], expected [3]"),
    "half statistics": (
        TRAIN,
        {"running_mean": torch.zeros(3).half()},
        "running_mean is float16[3], expected dtype float32 beside input float32[4, 3, 5]",
    ),
    "double weight": (EVAL, {"weight": torch.ones(3).double()}, "weight is float64[3], expected dtype float32"),
    "mixed beside half": (
        TRAIN,
        {"input": torch.randn(4, 3).half(), "bias": torch.zeros(3).half()},
        "bias is float16[3], expected dtype float32 beside input float16[4, 3]",
    ),
    "one value a channel": (
        TRAIN,
        {"input": torch.randn(1, 3)},
        "input is float32[1, 3], expected more than one value for each channel in training",
    ),
    "another device": (
        EVAL,
        {"bias": torch.zeros(3, device="meta")},
        "bias is device meta, expected device cpu, which input is on",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_an_error_that_names_argument_found_and_expected(name):
    op, changed, message = BAD[name]
    given = GOOD | changed
    before = given["running_var"] if given["running_var"] is None else given["running_var"].clone()

    def call(tensors):
        with pytest.raises(tbn.InvalidBatchNorm) as raised:
            getattr(ops, op)(*tensors, *TAIL)
        assert isinstance(raised.value, ValueError)
        assert (raised.value.op, f"{raised.value.argument} is {raised.value.found}") == (
            op,
            message.partition(", expected")[0],
        )
        return str(raised.value)

    said = call(given.values())
    assert said.startswith(f"{op}: {message}")
    assert same(given["running_var"], before)
    with FakeTensorMode() as mode:
        assert call([t if t is None else mode.from_tensor(t) for t in given.values()]) == said
    if name != "another device":
        assert call([t if t is None else t.to("meta") for t in given.values()]) == said


def test_backward_refuses_what_does_not_belong_together():
    x, w = torch.randn(4, 3, 5), torch.ones(3)
    saved = ops.batch_norm_with_update(x, w, None, None, None, *TAIL)
    tail = (True, 1e-5, [True] * 3, saved[3])
    with pytest.raises(tbn.InvalidBatchNorm, match=r"grad_out is float32\[4, 3\], expected the shape of input"):
        ops.batch_norm_backward(x[..., 0], x, w, None, None, *saved[1:3], *tail)
    with pytest.raises(
        tbn.InvalidBatchNorm, match=r"save_var is float32\[0\], expected \[3\], as the forward saved it"
    ):
        ops.batch_norm_backward(x, x, w, None, None, saved[1], torch.ones(0), *tail)
    with pytest.raises(tbn.InvalidBatchNorm, match="save_mean is None"):
        ops.batch_norm_backward(x, x, w, None, None, None, None, *tail)


CRASHES = {
    "statistics None in eval": "ops.batch_norm_no_update(torch.randn(2, 3), None, None, None, None, 0.1, 1e-5)",
    "running_var too short": "ops.batch_norm_with_update(torch.randn(2, 3), None, None, torch.zeros(3), torch.ones(0), 0.1, 1e-5)",
    "running_var too short in eval": "ops.batch_norm_no_update(torch.randn(2, 64), None, None, torch.zeros(64), torch.ones(0), 0.1, 1e-5)",
}


@pytest.mark.parametrize("name", CRASHES)
def test_what_crashed_the_process_is_our_error(name):
    code = f"import torch\nfrom torch_batchnorm import ops\n{CRASHES[name]}"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.returncode == 1  # an exception, not a signal
    assert "torch_batchnorm.errors.InvalidBatchNorm" in ran.stderr


OUTS = {
    TRAIN: [torch.float32, torch.float32, torch.float32, torch.uint8],
    EVAL: [torch.float32, torch.float32, torch.float32, torch.uint8],
    "batch_norm_with_update_functional": [torch.float32] * 3 + [torch.uint8] + [torch.float32] * 2,
}


@pytest.mark.parametrize("name", OUTS)
def test_out_is_resized_cast_and_returned_by_atens_rules(name):
    def call(out=None):
        return getattr(ops, name)(*(t.clone() for t in GOOD.values()), *TAIL, out=out)

    expected, empty = call(), [torch.empty(0, dtype=d) for d in OUTS[name]]
    found = call(empty)
    assert all(a is b for a, b in zip(found, empty, strict=True))
    assert same(list(found), list(expected))
    wide = [torch.empty(0, dtype=torch.double if d.is_floating_point else d) for d in OUTS[name]]
    assert same(call(wide)[0], expected[0].double())
    with pytest.raises(RuntimeError, match="dtype"):
        call([torch.empty(0, dtype=torch.int64), *empty[1:]])
    with pytest.raises(tbn.InvalidBatchNorm, match=f"out is 1 tensors, expected {len(empty)}"):
        call(empty[:1])
    with pytest.warns(UserWarning, match="resized"):
        call([torch.empty(7), *empty[1:]])


class Calls(nn.Module):
    def __init__(self, op, affine=True, stats=True):
        super().__init__()
        self.op = op
        self.weight = nn.Parameter(torch.ones(3)) if affine else None
        self.register_buffer("mean", torch.zeros(3) if stats else None)
        self.register_buffer("var", torch.ones(3) if stats else None)

    def forward(self, x):
        return self.op(x, self.weight, None, self.mean, self.var, *TAIL)[0]


@pytest.mark.parametrize("stats", [True, False], ids=("statistics", "no statistics"))
@pytest.mark.parametrize("affine", [True, False], ids=("weight", "no weight"))
@pytest.mark.parametrize("op", [TRAIN, "batch_norm_with_update_functional", EVAL])
def test_the_ops_trace_to_aten_in_every_front_end(op, affine, stats):
    if op == EVAL and not stats:
        return
    module, x = Calls(getattr(ops, op), affine, stats), torch.randn(4, 3, 5)
    expected = module(x)
    module.load_state_dict(Calls(None, affine, stats).state_dict())
    dynamic = export(module, x, dynamic=({0: torch.export.Dim("n", min=2)},))
    traced = make_fx(module, tracing_mode="symbolic", _allow_non_fake_inputs=True)(x)
    for graph in (dynamic.graph, traced.graph):
        called = [
            n.target for n in graph.nodes if n.op == "call_function" and isinstance(n.target, torch._ops.OpOverload)
        ]
        assert all(t.namespace == "aten" for t in called)
        assert sum(getattr(aten, f"_{op}").default is t for t in called) == 1
    with torch.no_grad():
        assert same(dynamic.module()(x), expected)
    torch._dynamo.reset()  # every case compiles the same `forward`, and dynamo counts
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), expected)


def test_a_full_call_leaves_one_node_and_nothing_else():
    def call(x, w, b, m, v):
        return ops.batch_norm_with_update_functional(x, w, b, m, v, *TAIL)[0]

    graph = make_fx(call)(*GOOD.values())
    assert_expected_inline(
        tbn.render(graph),
        """\
x_1: f32[4, 3, 5] = placeholder
w_1: f32[3] = placeholder
b_1: f32[3] = placeholder
m_1: f32[3] = placeholder
v_1: f32[3] = placeholder
_batch_norm_with_update_functional: (f32[4, 3, 5], f32[3], f32[3], u8[0], f32[3], f32[3]) = aten._batch_norm_with_update_functional.default(x_1, w_1, b_1, m_1, v_1, 0.1, 1e-05)
getitem: f32[4, 3, 5] = getitem(_batch_norm_with_update_functional, 0)
getitem_1: f32[3] = getitem(_batch_norm_with_update_functional, 1)
getitem_2: f32[3] = getitem(_batch_norm_with_update_functional, 2)
getitem_3: u8[0] = getitem(_batch_norm_with_update_functional, 3)
getitem_4: f32[3] = getitem(_batch_norm_with_update_functional, 4)
getitem_5: f32[3] = getitem(_batch_norm_with_update_functional, 5)
return getitem""",
    )


@pytest.mark.parametrize("scale", [1, 1e2, 1e4], ids=lambda s: f"mean {s:g} times the deviation")
def test_float32_accuracy_is_that_of_atens_own_kernel(scale):
    torch.manual_seed(0)
    x = torch.randn(16, 8, 12, 12) + scale
    exact = formula(x, None, None, None, None, True, *TAIL)[0]
    ours = (ops.batch_norm_with_update(x, None, None, None, None, *TAIL)[0].double() - exact).abs().max()
    theirs = (nn.functional.batch_norm(x, None, None, training=True).double() - exact).abs().max()
    assert ours <= 2 * theirs
