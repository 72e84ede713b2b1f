"""Which kernel runs: our rules against PyTorch's own choice, the words they are explained in, and forcing one."""

import threading
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._C import DispatchKey, DispatchKeySet
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._python_dispatch import TorchDispatchMode

import torch_batchnorm as tbn
from programs import TENSORS, consolidated, export, same, step
from rows import run_with
from torch_batchnorm import Backend, ops
from torch_batchnorm.decomps.backends import forcing, rules
from torch_batchnorm.decomps.backends import registration as kernels
from torch_batchnorm.decomps.backends.rules import KERNELS, Build, Call, choose
from torch_batchnorm.decomps.forms import FORMS, GRADIENTS, Dialect

aten = torch.ops.aten
TAIL = (0.1, 1e-5)
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
FAMILY = [form for form in FORMS if form.dialect is Dialect.FAMILY]
CUDNN, CURRENT = KERNELS["cudnn"], Build(version=90000, enabled=True)
NO_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="for a machine without CUDA")

calls = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(DTYPES),
        "weight_dtype": st.sampled_from(DTYPES),
        "rank": st.integers(2, 5),
        "training": st.booleans(),
        "eps": st.sampled_from([1e-5, 1e-3, 1e-6, 0.0]),
        "device": st.sampled_from(["cpu", "cuda"]),
    }
)


def fakes(dtype, weight_dtype, rank, device, batch=4):
    x = torch.empty((batch, 3, 5, 6, 7)[:rank], dtype=dtype, device=device)
    c = torch.empty(3, dtype=weight_dtype, device=device)
    return [x, c, c, c, c]


ABSENT = [
    (("weight",), True, "native"),
    (("bias",), True, "native"),
    (("running_mean", "running_var"), True, "cudnn"),
    (("running_mean", "running_var"), False, "native"),
    (("running_var",), True, "native"),
]


@pytest.mark.parametrize(("absent", "training", "expected"), ABSENT, ids=str)
def test_a_missing_tensor_is_a_rule(absent, training, expected):
    c = torch.ones(3)
    tensors = {name: None if name in absent else c for name in TENSORS[1:]}
    found = tbn.explain_backend(torch.ones(2, 3, 4), **tensors, training=training, eps=1e-5, device="cuda")
    assert found.backend is Backend(expected)
    assert expected == "cudnn" or {v.rule for v in found.deciding} <= {"weight and bias", "running statistics"}


@settings(max_examples=150, deadline=None)
@given(calls)
def test_the_rules_with_this_builds_facts_give_this_builds_answer(call):
    training, eps = call.pop("training"), call.pop("eps")
    with FakeTensorMode():
        tensors = fakes(**call)
        answer = torch._C._select_batch_norm_backend(*tensors, training, eps)
    verdicts = choose(Call(*tensors, training, eps, Build.here(CUDNN)), CUDNN.rules)
    cudnn = call["device"] == "cuda" and all(v.holds for v in verdicts)
    assert answer.name == ("Cudnn" if cudnn else "Native")


@settings(max_examples=150, deadline=None)
@given(calls)
def test_the_rules_before_the_batch_limit_are_the_builds_and_so_is_the_limit(call):
    """A dynamic batch makes PyTorch leave a guard where it compares the batch with cuDNN's limit: it gets that far only
    when every rule before that one holds, whether or not cuDNN is there.
    """
    training, eps = call.pop("training"), call.pop("eps")
    shapes = ShapeEnv()
    sizes = StatelessSymbolicContext([DimDynamic.DYNAMIC])
    mode = FakeTensorMode(shape_env=shapes)
    batch = mode.from_tensor(torch.empty(4), symbolic_context=sizes).shape[0]
    with mode:
        tensors = fakes(**call, batch=batch)
        verdicts = {v.rule: v for v in choose(Call(*tensors, training, eps, CURRENT), CUDNN.rules)}
        torch._C._select_batch_norm_backend(*tensors, training, eps)
    before = ("weight and bias", "running statistics", "dtype", "rank")
    reached = call["device"] == "cuda" and all(verdicts[name].holds for name in before)
    assert bool(shapes.guards) is reached
    assert not reached or str(880801 if training else 65535) in str(shapes.guards[-1].expr)
    assert verdicts["batch"].found.endswith((" in training" if training else " in eval") + rules.DYNAMIC)


def explain(shape=(4, 3, 5, 5), training=True, eps=1e-5, device="cuda", dtype=torch.float32, weight=torch.float32):
    c = torch.empty(shape[1], dtype=weight, device="meta")
    return tbn.explain_backend(torch.empty(shape, dtype=dtype, device="meta"), c, c, c, c, training, eps, device=device)


RULES = [
    ({}, "cudnn", ""),
    ({"shape": (65536, 3, 2), "training": False}, "native", "batch is 65536 in eval, outside the limit: at most"),
    ({"shape": (65535, 3, 2), "training": False}, "cudnn", ""),
    ({"shape": (880802, 3, 1)}, "native", "batch is 880802 in training, outside the limit"),
    ({"shape": (131071, 3)}, "native", "rank is 2, outside the limit: 3 or more"),
    ({"eps": 9e-6}, "native", "eps is 9e-06, outside the limit: 1e-05 or more"),
    ({"dtype": torch.bfloat16}, "native", "dtype is bfloat16 with a float32 weight, outside the limit"),
    ({"dtype": torch.float16}, "cudnn", ""),
    ({"dtype": torch.float16, "weight": torch.float16}, "native", "dtype is float16 with a float16 weight"),
    ({"shape": (800000, 3, 1000)}, "native", "number of elements is 2400000000, outside the limit"),
    ({"device": "cpu"}, "cpu", "device is cpu"),
    ({"device": "mps"}, "native", "device is mps"),
    ({"device": "hip"}, "miopen", ""),
    ({"device": "hip", "dtype": torch.bfloat16}, "miopen", ""),
    ({"device": "hip", "dtype": torch.float64, "weight": torch.float64}, "native", "dtype is float64"),
]


@pytest.mark.parametrize(("call", "expected", "said"), RULES, ids=[f"{call}: {name}" for call, name, _ in RULES])
def test_the_explanation_names_the_rule_what_was_found_and_the_limit(call, expected, said):
    found = explain(**call)
    assert found.backend is Backend(expected)
    assert said in str(found)
    assert all(not rule.holds for rule in found.deciding) or expected in ("cudnn", "miopen")


def test_miopen_is_skipped_by_layout_unless_asked_for(monkeypatch):
    c = torch.ones(3)
    x = torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last)
    call = (x, c, c, c, c, True, 1e-5)
    assert "layout is channels_last, outside the limit" in str(tbn.explain_backend(*call, device="hip"))
    monkeypatch.setenv("PYTORCH_MIOPEN_SUGGEST_NHWC_BATCHNORM", "1")
    assert tbn.explain_backend(*call, device="hip").backend is Backend.MIOPEN


@NO_CUDA
def test_the_explanation_says_where_it_knows_more_than_this_build():
    assert "is not built for cuda and would say native" in explain().note
    assert explain(device="cpu").note == ""


def test_the_switch_is_a_rule(monkeypatch):
    disabled = Build(version=90000, enabled=False)
    for build in ("here", "assumed"):
        monkeypatch.setattr(Build, build, classmethod(lambda *_: disabled))
    assert "the switch torch.backends.cudnn.enabled is False, outside the limit: on" in str(explain())


def test_a_dynamic_batch_is_decided_when_it_runs():
    program = export(nn.BatchNorm2d(3), torch.randn(4, 3, 5, 5), dynamic={"input": {0: torch.export.Dim("n", min=2)}})
    (entry,) = tbn.inspect(program, device="cuda").entries
    assert entry.backend == "cudnn"
    assert "in training, dynamic: decided when it runs, limit: at most 880801" in entry.why
    program.run_decompositions()


# Forcing.


class Ran(TorchDispatchMode):
    """The batch-norm overloads that reach a kernel."""

    def __enter__(self):
        self.ops = []
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "batch_norm" in str(func):
            self.ops.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def _case(training=True, functional=False):
    torch.manual_seed(0)
    x, w, b = torch.randn(4, 3, 5, 5), torch.rand(3) + 0.5, torch.randn(3)
    op = ops.batch_norm_with_update_functional if functional else ops.batch_norm_with_update
    return (op if training else ops.batch_norm_no_update), (x, w, b, torch.randn(3), torch.rand(3) + 0.5, *TAIL)


@pytest.mark.parametrize("functional", [False, True], ids=("in place", "functional"))
@pytest.mark.parametrize("training", [True, False], ids=("train", "eval"))
def test_native_forced_is_the_native_op_forward_and_backward(training, functional):
    op, args = _case(training, functional)
    results = []
    for forced in (False, True):
        given = [t.clone() if isinstance(t, torch.Tensor) else t for t in args]
        for t in given[:3]:
            t.requires_grad_()
        with Ran() as ran:
            if forced:
                with tbn.backend("native"):
                    found = op(*given)
            else:
                found = op(*given)
            found[0].square().sum().backward()
        results.append((list(found), given, [t.grad for t in given[:3]]))
        assert all(name.startswith(("native", "_native")) == forced for name in ran.ops)
        assert len(ran.ops) == 2
    assert same(results[0], results[1])


def test_a_consolidated_program_runs_on_it_and_trains():
    torch.manual_seed(0)
    x = torch.randn(4, 3, 8, 8)
    program = consolidated(export(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), x)).program
    module, outside = program.module(), program.module()
    with tbn.backend("native"), Ran() as ran:
        forced = step(module, x)
    assert ran.ops == ["native_batch_norm", "native_batch_norm_backward"]
    assert same(forced, step(outside, x))


def test_backward_outside_the_block_is_still_the_forced_ones():
    op, args = _case()
    args[0].requires_grad_()
    with tbn.backend("native"):
        out = op(*args)[0]
    with Ran() as ran:
        out.sum().backward()
    assert ran.ops == ["native_batch_norm_backward"]


def test_out_variants_write_where_they_are_told():
    x, w, b, mean, var, *_ = _case()[1]
    for call, training in ((aten._batch_norm_with_update.out, True), (aten._batch_norm_no_update.out, False)):
        (form,) = (f for f in FAMILY if f.overload is call)
        results = []
        for forced in ("auto", "native"):
            sizes = {"out": x.shape, "reserve": (0,)}
            outs = {
                name: torch.empty(sizes.get(role, (3,) if training else (0,)))
                for role, name in form.destinations.items()
            }
            outs[form.destinations["reserve"]] = torch.empty(0, dtype=torch.uint8)
            stats = [mean.clone(), var.clone()]
            with tbn.backend(forced):
                call(x, w, b, *stats, *TAIL, **outs)
            results.append((list(outs.values()), stats))
        assert same(results[0], results[1])


def test_only_this_thread_is_affected_and_blocks_nest():
    op, args = _case(False)
    seen = {}

    def call(name):
        with Ran() as ran:
            op(*args)
        seen[name] = ran.ops

    with tbn.backend("native"):
        thread = threading.Thread(target=call, args=("other thread",))
        thread.start()
        thread.join()
        with tbn.backend("auto"):
            call("auto inside")
        call("inside")
    call("after")
    family, native = ["_batch_norm_no_update"], ["native_batch_norm"]
    assert seen == {"other thread": family, "auto inside": family, "inside": native, "after": family}


def test_it_is_over_after_an_error_and_nothing_global_was_touched():
    before = torch.backends.cudnn.enabled
    block = tbn.backend("native")
    block.__enter__()
    assert torch.backends.cudnn.enabled is before  # convolutions keep what they have
    assert block.__exit__(ZeroDivisionError, ZeroDivisionError(), None) is False  # not swallowed
    assert torch.overrides._get_current_function_mode_stack() == []
    assert forcing._blocks.innermost == []


def test_nothing_is_pinned_in_what_is_traced_inside_the_block():
    op, args = _case(False)
    program = export(nn.BatchNorm2d(3), args[0])
    with tbn.backend("native"):
        graphs = [
            make_fx(lambda x: op(x, *args[1:])[0])(args[0]),
            tbn.consolidate(export(nn.BatchNorm2d(3), args[0])).graph_module,
            tbn.consolidate(program).run_decompositions().graph_module,
        ]
        torch._dynamo.reset()
        compiled = torch.compile(lambda x: op(x, *args[1:])[0], backend="eager", fullgraph=True)(args[0])
    assert same(compiled, op(*args)[0])
    for graph in graphs:
        assert not [n for n in graph.graph.nodes if "native" in str(n.target)]
        assert [n for n in graph.graph.nodes if "_batch_norm" in str(n.target)]


@NO_CUDA
def test_what_is_not_there_is_a_clear_error():
    with pytest.raises(tbn.InvalidChoice, match="found backend 'mkl', expected one of native, cudnn, miopen, auto"):
        tbn.backend("mkl").__enter__()
    for name in ("cudnn", Backend.MIOPEN):
        with pytest.raises(tbn.InvalidChoice, match="is built without it: install a build that has it"):
            tbn.backend(name).__enter__()


def test_a_batch_norm_that_the_library_cannot_run_is_an_error_with_the_rule(monkeypatch):
    op, args = _case()
    monkeypatch.setattr(Build, "here", classmethod(lambda *_: CURRENT))
    with (
        tbn.backend("cudnn"),
        pytest.raises(tbn.InvalidChoice, match="cannot run on cudnn, which was asked for: cpu: device is cpu"),
    ):
        op(*args)


# The kernels that the family lacks.


@pytest.mark.parametrize("key", ["CUDA", "MPS", "XPU"])
def test_no_update_has_a_kernel_off_the_cpu(key):
    _, (x, *rest) = _case(False)
    keys = DispatchKeySet(getattr(DispatchKey, key))
    found = aten._batch_norm_no_update.default._handle.redispatch_boxed(keys, x, *rest)
    assert same(found[0], aten._batch_norm_no_update(x, *rest)[0])
    assert found[3].dtype == torch.uint8


def test_stock_no_update_refuses_any_other_tensor():
    """The reason for the kernel: PyTorch's one is its CPU function for any device. When this fails, drop ours."""
    x, c = torch.ones(2, 3, device="meta"), torch.ones(3, device="meta")
    op = aten._batch_norm_no_update.default._handle
    with pytest.raises(RuntimeError, match="Expected tensor to have CPU Backend"):
        op.redispatch_boxed(DispatchKeySet(DispatchKey.CPU), x, c, c, c, c, *TAIL)


def test_the_gradient_of_running_statistics_on_cuda_is_pytorchs():
    _, (x, w, _, mean, var, _, eps) = _case(False)
    calls = []

    class Original:
        def call_boxed(self, keys, *args):
            calls.append(keys)

    kernel = kernels._backward_on_cuda(Original())
    reserve = torch.empty(0, dtype=torch.uint8)
    tail = (eps, [True, True, True], reserve)
    found = kernel("keys", torch.ones_like(x), x, w, mean, var, None, None, False, *tail)
    assert same(found, aten.batch_norm_backward(torch.ones_like(x), x, w, mean, var, None, None, False, *tail))
    in_training = (torch.ones_like(x), x, w, mean, var, mean, var, True)
    kernel("keys", *in_training, *tail)
    assert calls == ["keys"]
    cudnn = {"_select_batch_norm_backend": lambda *_: torch._C._BatchNormBackend.Cudnn}
    size = {"_get_cudnn_batch_norm_reserve_space_size": lambda *_: 64}
    with patch.multiple(torch._C, **cudnn, **size):  # native saved what cuDNN would, and left no reserve
        assert same(kernel("keys", *in_training, *tail), aten.batch_norm_backward(*in_training, *tail))
        kernel("keys", *in_training, *tail[:-1], torch.empty(64, dtype=torch.uint8))
    assert calls == ["keys"] * 2


@pytest.mark.parametrize("library", KERNELS)
def test_every_library_has_a_row_forward_and_backward(library):
    forward, backward = KERNELS[library].forward, KERNELS[library].backward
    assert [f.overload for f in FORMS if f.overload is forward] == [forward]
    assert [f.overload for f in GRADIENTS if f.overload is backward] == [backward]


VENDOR = """Vendor(
    "acme", "Acme", aten.native_batch_norm.default, aten.native_batch_norm_backward.default, devices=("xpu",),
    built=lambda: False, version=lambda: None, rules=(Rule("eps", lambda c: c.eps, "1e-4 or more", lambda c: c.eps >= 1e-4),)
)"""
ACME = """
import torch
import torch_batchnorm as tbn

c = torch.ones(3)
for eps in (1e-3, 1e-5):
    print(tbn.explain_backend(torch.ones(2, 3, 4), c, c, c, c, True, eps, device="xpu"))
try:
    tbn.backend("acme").__enter__()
except tbn.InvalidChoice as error:
    print(error)
for eps in (1e-3, 1e-5):
    program = torch.export.export(torch.nn.BatchNorm1d(3, eps=eps), (torch.randn(2, 3),))
    result = tbn.Legalize("acme")(program)
    print([edit.after for edit in result.edits], [declined.reason for declined in result.declined])
"""


def test_a_vendor_is_one_row():
    said = run_with({"torch_batchnorm.decomps.backends.rules:VENDORS": [VENDOR]}, ACME).splitlines()
    assert "acme: every rule of acme holds" in said[0]
    assert "native: eps is 1e-05, outside the limit: 1e-4 or more" in said[1]
    assert "is not built for xpu and would say native: this is a build with Acme" in said[1]
    assert "backend acme was asked for" in said[2]
    assert "is built without it" in said[2]
    assert said[3] == "['aten.native_batch_norm.default'] []"
    assert said[4] == "[] ['acme cannot run it: eps is 1e-05, outside the limit: 1e-4 or more']"


OWN = """
import torch, warnings

warnings.simplefilter("error")
theirs = torch.library.Library("aten", "IMPL")
theirs.impl("_batch_norm_no_update", lambda *args: (args[0],) * 4, "CUDA")
import torch_batchnorm
from torch_batchnorm.decomps.backends.registration import register

register()
x, c = torch.ones(2, 3), torch.ones(3)
for key in ("CUDA", "XPU"):
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
    found = torch.ops.aten._batch_norm_no_update.default._handle.redispatch_boxed(keys, x, c, c, c, c, 0.1, 1e-5)
    print(found[3].dtype)
"""


def test_a_kernel_that_is_there_is_left_alone():
    assert run_with({}, OWN).split() == ["torch.float32", "torch.uint8"]


def test_importing_decomps_registers_nothing():
    """The package's own __init__ does, by one call: it is stood in for here by an empty one."""
    code = """
import sys, types, torch, importlib, pathlib, pkgutil

root = types.ModuleType("torch_batchnorm")
spec = importlib.machinery.PathFinder.find_spec("torch_batchnorm")
root.__path__ = list(spec.submodule_search_locations)
sys.modules["torch_batchnorm"] = root
ops = ("_batch_norm_no_update", "batch_norm_backward", "_batch_norm_with_update")


def registered():
    fakes = torch._subclasses.fake_impls.op_implementations_dict
    ours = [getattr(torch.ops.aten, op).default in fakes for op in ops]
    return [torch._C._dispatch_dump("aten::" + op) for op in ops], ours, hasattr(torch.ops.torch_batchnorm, ops[0])


before = registered()
for module in pkgutil.walk_packages(root.__path__, "torch_batchnorm."):
    if module.name.startswith(("torch_batchnorm.decomps", "torch_batchnorm.passes")):
        importlib.import_module(module.name)
print(registered() == before)
importlib.import_module("torch_batchnorm.decomps.backends.registration").register()
importlib.import_module("torch_batchnorm.passes.inductor.marks").kept()
print(registered() == before)
"""
    assert run_with({}, code).split() == ["True", "False"]
