"""Batch norms kept whole through Inductor: what is kept, what is called, and that the numbers are eager's."""

import json
import logging
import operator
import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn
from torch._inductor import config, list_mode_options
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import run_and_get_code
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import torch_batchnorm as tbn
from programs import call_graph, export
from torch_batchnorm.decomps.forms import BY_TARGET, BatchNorm
from torch_batchnorm.passes.inductor import marking
from torch_batchnorm.passes.inductor.marking import MarkKept
from torch_batchnorm.passes.inductor.options import KEEP

aten = torch.ops.aten
FORWARD, EVAL, BACKWARD = (
    "aten._batch_norm_with_update_functional.default(",
    "aten._batch_norm_no_update.default(",
    "aten.batch_norm_backward.default(",
)
X = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    # importing torchao, as another test does, leaves a pass of its own in the config
    hooks = {"pre_grad_custom_pass": None, "joint_custom_pre_pass": None}
    with config.patch(fx_graph_cache=False, **hooks), torch._functorch.config.patch(enable_autograd_cache=False):
        yield
    torch._dynamo.reset()


def _net(affine=True):
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, affine=affine), nn.ReLU())


def _seen(logits):
    return logits.float().square().mean()


def _stepped(model, run, x, context=nullcontext):
    """Output, gradients and buffers of one step, and the code that Inductor wrote for it."""
    x = x.clone().requires_grad_()

    def step():
        with context():
            out = run(x)
        if out.requires_grad:
            _seen(out).backward()
        return out.detach()

    out, codes = run_and_get_code(step)
    return [out, x.grad, *(p.grad for p in model.parameters()), *model.buffers()], "\n".join(codes)


def _close(found, expected, tolerance=1e-5):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)


def _calls(code):
    return tuple(code.count(f"torch.ops.{op}") for op in (FORWARD, EVAL, BACKWARD))


class Wide:
    """A predicate with an identity."""

    def __call__(self, norm):
        return norm.training and norm.input.shape[1] > 3

    def uuid(self):
        return "wider than three channels"


# What `keep` says, the module's mode, and how often the family is called: train, eval, backward.
KEPT = {
    "always in training": ("always", True, (1, 0, 1)),
    "always in eval": ("always", False, (0, 1, 1)),
    "train in training": ("train", True, (1, 0, 1)),
    "train in eval": ("train", False, (0, 0, 0)),
    "never": ("never", True, (0, 0, 0)),
    "auto in training, on CPU": ("auto", True, (0, 0, 0)),
    "a predicate that says yes": (Wide(), True, (1, 0, 1)),
    "a predicate that says no": (lambda norm: norm.input.shape[0] > 4, True, (0, 0, 0)),
}


@pytest.mark.parametrize(("keep", "training", "calls"), KEPT.values(), ids=KEPT)
def test_what_keep_keeps(keep, training, calls):
    model, eager = _net().train(training), _net().train(training)
    found, code = _stepped(model, torch.compile(model, options=tbn.inductor_options(keep), fullgraph=True), X)
    assert _calls(code) == calls
    _close(found, _stepped(eager, eager, X)[0])


# A batch norm on CUDA, and whether "auto" keeps it.
AUTO = {
    "cuDNN in training": ({}, True),
    "cuDNN in eval": ({"training": False}, False),
    "native in training, an eps below cuDNN's": ({"eps": 1e-6}, False),
}


@pytest.mark.parametrize(("changed", "kept"), AUTO.values(), ids=AUTO)
def test_auto_keeps_what_a_vendor_s_kernel_runs(changed, kept):
    with FakeTensorMode():
        x, channels = torch.empty(2, 3, 4, 4, device="cuda"), torch.empty(3, device="cuda")
    norm = BatchNorm(x, *[channels] * 4, training=True, momentum=0.1, eps=1e-5)
    assert KEEP["auto"](replace(norm, **changed)) is kept


def test_an_unknown_keep_is_one_clear_error():
    with pytest.raises(
        tbn.InvalidChoice, match="found keep='most', expected one of 'auto', 'always', 'never', 'train'"
    ):
        tbn.inductor_options("most")


def test_a_site_that_is_not_kept_is_what_stock_inductor_makes_of_it():
    stock, left = _net(), _net()
    _, one = _stepped(stock, torch.compile(stock), X)
    _, other = _stepped(left, torch.compile(left, options=tbn.inductor_options("never")), X)
    lines = [[line for line in code.splitlines() if not line.startswith("# AOT ID")] for code in (one, other)]
    assert lines[0] == lines[1]


# The ways in: every one keeps one site.


TRAIN = tbn.inductor_options("train")
WAYS = {
    "options": {"options": TRAIN},
    "options of a mode": {"options": tbn.inductor_options("train", list_mode_options("max-autotune-no-cudagraphs"))},
    "backend": {"backend": "batchnorm_inductor", "options": {"keep": "train"}},
    "config": {},
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_install(way):
    model, eager = _net(), _net()
    with config.patch(TRAIN) if way == "config" else nullcontext():
        found, code = _stepped(model, torch.compile(model, **WAYS[way]), X)
    assert _calls(code) == (1, 0, 1)
    _close(found, _stepped(eager, eager, X)[0])


def test_the_backend_takes_a_mode_too():
    model, eager = _net(), _net()
    compiled = torch.compile(model, backend="batchnorm_inductor", mode="max-autotune-no-cudagraphs")
    _close(_stepped(model, compiled, X)[0], _stepped(eager, eager, X)[0])


@pytest.mark.parametrize("training", [False, True], ids=("eval", "train"))
def test_aot_inductor_calls_the_kernel(training, tmp_path):
    model, eager = _net().train(training), _net().train(training)
    package = torch._inductor.aoti_compile_and_package(
        export(model, X), package_path=str(tmp_path / "net.pt2"), inductor_configs=tbn.inductor_options("always")
    )
    sources = subprocess.run(["unzip", "-p", package, "*.cpp", "*.json"], capture_output=True, text=True).stdout
    assert ("_batch_norm_with_update_functional" if training else "_batch_norm_no_update") in sources
    loaded = torch._inductor.aoti_load_package(package)
    with torch.no_grad():
        for _ in range(3):
            _close([loaded(X)], [eager(X)])


# Beside other passes, and nowhere else.


class Counting(CustomGraphPass):
    def __init__(self):
        self.graphs = 0

    def __call__(self, graph):
        self.graphs += 1

    def uuid(self):
        return "counting"


@pytest.mark.parametrize("there", ["callable", "list", "config"])
def test_passes_of_others_in_the_same_hooks_run_too(there):
    other, model = Counting(), _net()
    given = [other] if there == "list" else other
    if there == "config":
        with config.patch(joint_custom_pre_pass=other):
            options = tbn.inductor_options("train")
    else:
        options = tbn.inductor_options("train", {"joint_custom_pre_pass": given, "pre_grad_custom_pass": given})
    _, code = _stepped(model, torch.compile(model, options=options), X)
    assert _calls(code) == (1, 0, 1)
    assert other.graphs == (1 if there == "config" else 2)


def test_options_asked_for_twice_install_once():
    once = tbn.inductor_options("train")
    assert tbn.inductor_options("train", once) == once
    assert tbn.inductor_options("never", once) == tbn.inductor_options("never")


def test_only_the_compilation_that_asked_is_affected():
    kept, stock = _net(), _net()
    _stepped(kept, torch.compile(kept, options=tbn.inductor_options("train")), X)
    assert config.pre_grad_custom_pass is config.joint_custom_pre_pass is None
    torch._dynamo.reset()
    assert _calls(_stepped(stock, torch.compile(stock), X)[1]) == (0, 0, 0)
    for backend in ("aot_eager", "eager", "cudagraphs"):
        model, eager = _net(), _net()
        _close(_stepped(model, torch.compile(model, backend=backend), X)[0], _stepped(eager, eager, X)[0])


# The compile cache, over processes.

CACHED = """
import json, sys, torch, torch_batchnorm as tbn
from torch._dynamo.utils import counters
net = torch.compile(torch.nn.BatchNorm1d(3), options=tbn.inductor_options(sys.argv[1]))
net(torch.ones(2, 3)).sum().backward()
print(json.dumps([counters["aot_autograd"][f"autograd_cache_{found}"] for found in ("hit", "miss", "bypass")]))
"""


def test_the_cache_hits_in_a_new_process_and_misses_when_an_option_changes(tmp_path):
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}

    def counted(keep):
        ran = subprocess.run(
            [sys.executable, "-c", CACHED, keep], env=environment, capture_output=True, text=True, check=True
        )
        return json.loads(ran.stdout.splitlines()[-1])

    assert [counted(keep) for keep in ("train", "train", "always")] == [[0, 1, 0], [1, 0, 0], [0, 1, 0]]


def test_the_uuid_covers_the_options_and_a_predicate_has_its_own():
    def uuids(keep):
        options = tbn.inductor_options(keep)
        return tuple(options[hook].uuid() for hook in ("pre_grad_custom_pass", "joint_custom_pre_pass"))

    assert uuids("train") == uuids("train") != uuids("always")
    assert uuids(Wide()) == uuids(Wide())
    assert uuids(Wide())[0] not in (None, uuids("train")[0])
    assert uuids(lambda norm: True)[0] is None


# What it works with.


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = _net()

    def forward(self, x):
        return checkpoint(self.net, x, use_reentrant=False)


def test_a_checkpointed_batch_norm_moves_its_statistics_once():
    model, eager = Checkpointed(), _net()  # eager mode would move them twice
    found, code = _stepped(model, torch.compile(model, options=tbn.inductor_options("train"), fullgraph=True), X)
    assert _calls(code)[0] == 2
    _close(found, _stepped(eager, eager, X)[0])


def _bf16():
    return torch.autocast("cpu", torch.bfloat16)


WORKS = {
    "a dynamic batch": (_net, X, nullcontext, 1e-5),
    "autocast": (_net, X, _bf16, 1e-2),
    "half parameters and statistics": (lambda: _net().bfloat16(), X.bfloat16(), nullcontext, 2e-2),
    "channels last": (
        lambda: _net().to(memory_format=torch.channels_last),
        X.contiguous(memory_format=torch.channels_last),
        nullcontext,
        1e-5,
    ),
    "no weight and bias": (lambda: _net(affine=False), X, nullcontext, 1e-5),
    "no statistics": (lambda: nn.BatchNorm2d(3, track_running_stats=False), X, nullcontext, 1e-5),
    "rank two": (lambda: nn.BatchNorm1d(3), X[:, :, 0, 0], nullcontext, 1e-5),
    "rank three, transposed": (lambda: nn.BatchNorm1d(8), X[:, :, 0].transpose(1, 2), nullcontext, 1e-5),
}


@pytest.mark.parametrize(("make", "x", "context", "tolerance"), WORKS.values(), ids=WORKS)
def test_works_with(make, x, context, tolerance):
    model, eager = make(), make()
    compiled = torch.compile(model, options=tbn.inductor_options("train"), fullgraph=True, dynamic=len(x) == 4 or None)
    found, code = _stepped(model, compiled, x, context)
    assert _calls(code) == (1, 0, 1)
    _close(found, _stepped(eager, eager, x, context)[0], tolerance)


@pytest.mark.parametrize("consolidated", [False, True], ids=("legacy", "family"))
@pytest.mark.parametrize("decomposed", [False, True], ids=("training IR", "ATEN"))
def test_an_exported_train_program_trains(decomposed, consolidated):
    """A decomposed one does not without: backward raises that its statistics were modified in place."""
    program = export(_net(), X)
    program = program.run_decompositions() if decomposed else program
    model, eager = (tbn.consolidate(program) if consolidated else program).module(), _net()
    for _ in range(2):
        compiled = torch.compile(model, options=tbn.inductor_options("train"), fullgraph=True)
        found, _ = _stepped(model, compiled, X)
        expected = _stepped(eager, eager, X)[0]
    assert dict(model.named_buffers()).keys() == dict(eager.named_buffers()).keys()
    _close(found[:2], expected[:2])
    for name, buffer in eager.named_buffers():
        torch.testing.assert_close(model.get_buffer(name), buffer)


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.bn = nn.BatchNorm2d(3)

    def forward(self, x):
        return self.bn(self.bn(x))


@pytest.mark.parametrize("form", ["module", "ATEN", "family, ATEN"])
def test_a_batch_norm_of_a_batch_norm(form):
    eager, model = Twice(), Twice()
    program = None if form == "module" else export(Twice(), X).run_decompositions()
    model = model if program is None else (tbn.consolidate(program) if "family" in form else program).module()
    found, code = _stepped(model, torch.compile(model, options=TRAIN, fullgraph=True), X)
    assert _calls(code) == (2, 0, 2)
    _close(found[:2], _stepped(eager, eager, X)[0][:2])
    for name, buffer in eager.named_buffers():
        torch.testing.assert_close(model.get_buffer(name), buffer)


def test_the_numbers_are_eager_s_to_the_bit_where_only_batch_norm_runs():
    model, eager = nn.BatchNorm2d(3), nn.BatchNorm2d(3)
    compiled = torch.compile(model, options=tbn.inductor_options("train"))
    for optimizer in [torch.optim.SGD(m.parameters(), 0.1) for m in (model, eager)]:
        optimizer.zero_grad()
    for _ in range(3):
        for module, run in ((model, compiled), (eager, eager)):
            module.zero_grad()
            x = X.clone().requires_grad_()
            out = run(x)
            out.backward(X)
            module.seen = [out, x.grad, module.weight.grad, module.bias.grad, *module.buffers()]
        assert all(torch.equal(a, b) for a, b in zip(model.seen, eager.seen, strict=True))


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.a, self.b = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norm_a, self.norm_b = (nn.BatchNorm2d(channels) for _ in range(2))

    def forward(self, x):
        return torch.relu(self.norm_b(self.b(torch.relu(self.norm_a(self.a(x))))) + x)


def test_twenty_steps_of_a_residual_net_follow_eager():
    def trained(compiled):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 8, 3), Block(8), Block(8), nn.Flatten(), nn.Linear(8 * 36, 5))
        # Inductor would move the convolutions to another layout, which rounds differently
        options = tbn.inductor_options("train", {"layout_optimization": False})
        run = torch.compile(model, options=options) if compiled else model
        optimizer, losses = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9), []
        for _ in range(20):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(run(X), torch.arange(4))
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return [torch.stack(losses), *model.state_dict().values()]

    _close(trained(True), trained(False), 1e-6)


# What is left to Inductor.


class Saved(nn.BatchNorm2d):
    def forward(self, x):
        call = torch.ops.aten.native_batch_norm.default
        found = call(x, self.weight, self.bias, self.running_mean, self.running_var, False, 0.1, 1e-5)
        return found[0] + found[1].sum()


class PerSample(nn.BatchNorm2d):
    def forward(self, x):
        return torch.func.vmap(lambda sample: super(PerSample, self).forward(sample[None])[0])(x)


LEFT = {
    "saved statistics of eval": (Saved(3), "its save_mean is read"),
    "under torch.func": (PerSample(3).eval(), "it is under a transform of torch.func"),
    "nothing but what `keep` says": (nn.BatchNorm2d(3).eval(), "as keep='train' says"),
}


@pytest.mark.parametrize(("module", "reason"), LEFT.values(), ids=LEFT)
def test_what_is_left_is_said(module, reason, caplog):
    with caplog.at_level(logging.INFO, logger="torch_batchnorm"), torch.no_grad():
        keep = "train" if "keep" in reason else "always"
        torch.compile(module, options=tbn.inductor_options(keep))(X)
    assert [record.message.partition(": ")[2] for record in caplog.records] == [reason]


# The reserve, and the graphs.


def test_nothing_allocates_a_reserve_that_nothing_reads():
    model = nn.BatchNorm2d(3)
    compiled = torch.compile(model, options=tbn.inductor_options("train"))
    with torch.no_grad():
        _, code = _stepped(model, compiled, X)
    assert _calls(code) == (1, 0, 0)
    assert code.count("[3]") == 0, "the reserve is never taken out of what the call returned"
    _, code = _stepped(model, compiled, X)
    assert _calls(code) == (1, 0, 1)
    assert code.count("[3]") == 1, "it is kept for the gradient"


def test_the_graphs():
    shown = {}

    def show(when):
        def look(graph):
            names = [n.name for n in graph.nodes]
            stage = "joint" if when == "joint" else f"{'backward' if 'tangents_1' in names else 'forward'} {when}"
            shown[stage] = tbn.render(graph.owning_module)

        return look

    hooks = {
        "joint_custom_post_pass": show("joint"),
        "post_grad_custom_pre_pass": show("graph"),
        "post_grad_custom_post_pass": show("after post-grad"),
    }
    model = nn.BatchNorm1d(3)
    torch.compile(model, options=tbn.inductor_options("train", hooks))(torch.ones(2, 3)).sum().backward()
    assert list(shown) == [
        "joint",
        "forward graph",
        "forward after post-grad",
        "backward graph",
        "backward after post-grad",
    ]
    assert_expected_inline(
        shown["joint"],
        """\
primals_1: f32[2, 3] = placeholder
primals_2: i64[] = placeholder
primals_3: f32[3] = placeholder
primals_4: f32[3] = placeholder
primals_5: f32[3] = placeholder
primals_6: f32[3] = placeholder
tangents_1: f32[2, 3] = placeholder
add: i64[] = aten.add.Tensor(primals_2, 1)
_batch_norm_with_update_functional: (f32[2, 3], f32[3], f32[3], u8[0], f32[3], f32[3]) = aten._batch_norm_with_update_functional.default(primals_1, primals_5, primals_6, primals_3, primals_4, 0.1, 1e-05)
getitem: f32[2, 3] = getitem(_batch_norm_with_update_functional, 0)
getitem_1: f32[3] = getitem(_batch_norm_with_update_functional, 1)
getitem_2: f32[3] = getitem(_batch_norm_with_update_functional, 2)
getitem_3: u8[0] = getitem(_batch_norm_with_update_functional, 3)
getitem_4: f32[3] = getitem(_batch_norm_with_update_functional, 4)
getitem_5: f32[3] = getitem(_batch_norm_with_update_functional, 5)
batch_norm_backward: (NoneType, f32[3], f32[3]) = aten.batch_norm_backward.default(tangents_1, primals_1, primals_5, None, None, getitem_1, getitem_2, True, 1e-05, [False, True, True], getitem_3)
getitem_7: f32[3] = getitem(batch_norm_backward, 1)
getitem_8: f32[3] = getitem(batch_norm_backward, 2)
copy_: i64[] = aten.copy_.default(primals_2, add)
copy__1: f32[3] = aten.copy_.default(primals_3, getitem_4)
copy__2: f32[3] = aten.copy_.default(primals_4, getitem_5)
return [getitem, None, None, None, None, getitem_7, getitem_8]""",
    )
    assert_expected_inline(
        shown["forward graph"],
        """\
primals_1: f32[2, 3] = placeholder
primals_2: i64[] = placeholder
primals_3: f32[3] = placeholder
primals_4: f32[3] = placeholder
primals_5: f32[3] = placeholder
primals_6: f32[3] = placeholder
add: i64[] = aten.add.Tensor(primals_2, 1)
_batch_norm_with_update_functional: (f32[2, 3], f32[3], f32[3], u8[0], f32[3], f32[3]) = aten._batch_norm_with_update_functional.default(primals_1, primals_5, primals_6, primals_3, primals_4, 0.1, 1e-05)
getitem: f32[2, 3] = getitem(_batch_norm_with_update_functional, 0)
getitem_1: f32[3] = getitem(_batch_norm_with_update_functional, 1)
getitem_2: f32[3] = getitem(_batch_norm_with_update_functional, 2)
getitem_3: u8[0] = getitem(_batch_norm_with_update_functional, 3)
getitem_4: f32[3] = getitem(_batch_norm_with_update_functional, 4)
getitem_5: f32[3] = getitem(_batch_norm_with_update_functional, 5)
copy_: i64[] = aten.copy_.default(primals_2, add)
copy__1: f32[3] = aten.copy_.default(primals_3, getitem_4)
copy__2: f32[3] = aten.copy_.default(primals_4, getitem_5)
return (getitem, primals_1, primals_5, getitem_1, getitem_2, getitem_3)""",
    )
    assert_expected_inline(
        shown["backward graph"],
        """\
primals_1: f32[2, 3] = placeholder
primals_5: f32[3] = placeholder
getitem_1: f32[3] = placeholder
getitem_2: f32[3] = placeholder
getitem_3: u8[0] = placeholder
tangents_1: f32[2, 3] = placeholder
batch_norm_backward: (NoneType, f32[3], f32[3]) = aten.batch_norm_backward.default(tangents_1, primals_1, primals_5, None, None, getitem_1, getitem_2, True, 1e-05, [False, True, True], getitem_3)
getitem_7: f32[3] = getitem(batch_norm_backward, 1)
getitem_8: f32[3] = getitem(batch_norm_backward, 2)
return (None, None, None, None, getitem_7, getitem_8)""",
    )
    assert_expected_inline(
        shown["forward after post-grad"],
        """\
primals_1: f32[2, 3] = placeholder
primals_2: i64[] = placeholder
primals_3: f32[3] = placeholder
primals_4: f32[3] = placeholder
primals_5: f32[3] = placeholder
primals_6: f32[3] = placeholder
add: i64[] = aten.add.Tensor(primals_2, 1)
_batch_norm_with_update_functional: (f32[2, 3], f32[3], f32[3], u8[0], f32[3], f32[3]) = aten._batch_norm_with_update_functional.default(primals_1, primals_5, primals_6, primals_3, primals_4, 0.1, 1e-05)
getitem: f32[2, 3] = getitem(_batch_norm_with_update_functional, 0)
getitem_1: f32[3] = getitem(_batch_norm_with_update_functional, 1)
getitem_2: f32[3] = getitem(_batch_norm_with_update_functional, 2)
getitem_3: u8[0] = getitem(_batch_norm_with_update_functional, 3)
getitem_4: f32[3] = getitem(_batch_norm_with_update_functional, 4)
getitem_5: f32[3] = getitem(_batch_norm_with_update_functional, 5)
copy_: i64[] = aten.copy_.default(primals_2, add)
copy__1: f32[3] = aten.copy_.default(primals_3, getitem_4)
copy__2: f32[3] = aten.copy_.default(primals_4, getitem_5)
return (getitem, primals_1, primals_5, getitem_1, getitem_2, getitem_3)""",
    )
    assert shown["backward after post-grad"] == shown["backward graph"]


# What the graph pass refuses, and what its uuid covers.


@pytest.mark.parametrize("read", [True, False], ids=("read", "unread"))
@pytest.mark.parametrize("training", [True, False], ids=("train", "eval"))
def test_an_impl_index_that_is_read_is_not_kept(training, read, caplog):
    form = BY_TARGET[aten._batch_norm_impl_index.default][0]
    module = call_graph(form, training, unread=form.roles[1:])
    graph, (call,) = module.graph, module.graph.find_nodes(op="call_function", target=form.overload)
    with FakeTensorMode():
        for node in graph.find_nodes(op="placeholder"):
            node.meta["val"] = torch.empty((2, 3, 4) if node.name == "input_1" else (3,))
    if read:
        with graph.inserting_after(call):
            index = graph.call_function(operator.getitem, (call, form.roles.index("impl_index")))
        (output,) = graph.find_nodes(op="output")
        output.args = ((*output.args[0], index),)
    with caplog.at_level(logging.INFO, logger="torch_batchnorm"):
        MarkKept("always", lambda norm: True)(graph)
    assert ("its impl_index is read" in caplog.text) is read
    assert bool(graph.find_nodes(op="call_function", target=form.overload)) is read


def test_the_uuid_changes_with_every_file_of_the_package(tmp_path, monkeypatch):
    package = Path(tbn.__file__).parent
    shutil.copytree(package, tmp_path / "package", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(marking, "files", lambda name: tmp_path / name.replace("torch_batchnorm", "package"))
    identity = marking._identity.__wrapped__
    sources = sorted((tmp_path / "package").rglob("*.py"))
    assert tmp_path / "package" / "decomps" / "backends" / "rules.py" in sources
    assert tmp_path / "package" / "passes" / "inductor" / "marking.py" in sources
    seen = {identity("train")}
    for source in sources:
        source.write_text(source.read_text() + "# changed\n")
        seen.add(identity("train"))
    assert len(seen) == len(sources) + 1
