"""The decomposition table is honoured: in every front end that takes one, no legacy batch norm is left."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import aot_export_module, aot_function
from torch._inductor.compile_fx import compile_fx
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.utils import run_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import torch_batchnorm as tbn
from programs import LEGACY, claim_aten, export, legacy_left, modes, native, same, state_of, step
from samples import DTYPES, samples
from torch_batchnorm.decomps.forms import FORMS, GRADIENTS, BatchNorm, Dialect

aten = torch.ops.aten
X = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(0))
GRADS_LEFT = [form.overload for form in GRADIENTS if form.dialect is not Dialect.FAMILY]
FAMILY = {form.overload for form in (*FORMS, *GRADIENTS) if form.dialect is Dialect.FAMILY}


class Net(nn.Module):
    """Batch norm in its usual kinds: affine, not affine, without statistics, one module called twice."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 4, 3)
        self.affine, self.plain = nn.BatchNorm2d(4), nn.BatchNorm2d(4, affine=False)
        self.batch = nn.BatchNorm2d(4, track_running_stats=False)
        for bn in (self.affine, self.plain):
            bn.running_mean.normal_()
            bn.running_var.uniform_(0.5, 1.5)

    def forward(self, x):
        x = self.affine(self.conv(x)).relu()
        return (self.affine(self.plain(x)) + self.batch(x),)


class Loss(Net):
    def forward(self, x):
        return (super().forward(x)[0].square().mean(),)


def net(training, kind=Net):
    return kind().train(training)


def _targets(*graphs):
    return [n.target for g in graphs for n in g.graph.nodes if "batch_norm" in str(n.target)]


def _compiled(model, x, backward):
    """The graphs that a torch.compile backend gets through AOTAutograd, and what the compiled model computes."""
    torch._dynamo.reset()
    graphs = []

    def take(graph, _):
        graphs.append(graph)
        return graph

    backend = aot_autograd(fw_compiler=take, bw_compiler=take, decompositions=tbn.decomposition_table())
    out = torch.compile(model, backend=backend)(x)[0]
    if backward:
        out.square().mean().backward()
    return graphs


def _aot_function(model, x):
    graphs = []

    def take(graph, _):
        graphs.append(graph)
        return graph

    parameters = dict(model.named_parameters())
    buffers = dict(model.named_buffers())

    def call(parameters, buffers, x):
        return torch.func.functional_call(model, {**parameters, **buffers}, (x,))

    f = aot_function(call, fw_compiler=take, bw_compiler=take, decompositions=tbn.decomposition_table())
    f(parameters, buffers, x)[0].square().mean().backward()
    return graphs


def _merged(model):
    table = torch.export.default_decompositions()
    table.update(tbn.decomposition_table())
    return export(model, X).run_decompositions(table).graph_module


def _joint(model):
    table = tbn.decomposition_table()
    return aot_export_module(model, (X,), trace_joint=True, output_loss_index=0, decompositions=table)[0]


FRONT_ENDS = {
    "run_decompositions, alone": lambda t: [
        export(net(t), X).run_decompositions(tbn.decomposition_table()).graph_module
    ],
    "run_decompositions, merged": lambda t: [_merged(net(t))],
    "make_fx": lambda t: [make_fx(net(t), tbn.decomposition_table())(X)],
    "make_fx, fake": lambda t: [make_fx(net(t), tbn.decomposition_table(), "fake", _allow_non_fake_inputs=True)(X)],
    "make_fx, symbolic": lambda t: [
        make_fx(net(t), tbn.decomposition_table(), "symbolic", _allow_non_fake_inputs=True)(X)
    ],
    "make_fx, pre_dispatch": lambda t: [make_fx(net(t), tbn.decomposition_table(), pre_dispatch=True)(X)],
    "make_fx, functionalized": lambda t: [make_fx(torch.func.functionalize(net(t)), tbn.decomposition_table())(X)],
    "aot_export_module, forward": lambda t: [
        aot_export_module(net(t), (X,), trace_joint=False, decompositions=tbn.decomposition_table())[0]
    ],
    "aot_export_module, joint": lambda t: [_joint(net(t, Loss))],
    "aot_function": lambda t: _aot_function(net(t), X),
    "torch.compile, forward and backward": lambda t: _compiled(net(t), X, backward=True),
    "torch.compile, no grad": lambda t: _compiled(net(t).requires_grad_(False), X, backward=False),
}


@pytest.mark.parametrize("training", [True, False], ids=("train", "eval"))
@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_no_legacy_node_is_left(front_end, training):
    targets = _targets(*FRONT_ENDS[front_end](training))
    assert len(targets) >= 4
    assert set(targets) <= FAMILY
    if not front_end.startswith("make_fx") and ("joint" in front_end or "backward" in front_end):
        assert targets.count(aten.batch_norm_backward.default) == 4


@pytest.mark.parametrize("training", [True, False], ids=("train", "eval"))
def test_the_table_and_consolidate_give_the_same_graph(training):
    program = export(net(training), X)
    for base in (dict, torch.export.default_decompositions):
        ours = base()
        ours.update(tbn.decomposition_table())
        consolidated_first = tbn.consolidate(program).run_decompositions(base())
        assert tbn.render(consolidated_first) == tbn.render(program.run_decompositions(ours))


def test_hidden_writes_survive():
    program = claim_aten(export(_Op(), X))
    lowered = program.run_decompositions(tbn.decomposition_table())
    assert legacy_left(lowered) == []
    kinds = [s.kind.name for s in lowered.graph_signature.output_specs]
    assert kinds == ["BUFFER_MUTATION", "BUFFER_MUTATION", "USER_OUTPUT"]


class _Op(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("var", torch.ones(3))

    def forward(self, x):
        return native(x, None, None, self.mean, self.var)


@pytest.mark.parametrize("training", [True, False], ids=("train", "eval"))
def test_a_decomposed_program_computes_the_same_to_the_bit(training):
    model = net(training)
    program = export(model, X)
    legacy, ours = program.run_decompositions({}), program.run_decompositions(tbn.decomposition_table())
    with torch.no_grad():
        runs = [(p.module(), p) for p in (legacy, ours)]
        outs = [m(X) for m, _ in runs]
    assert same(list(outs[0]), list(outs[1]))
    assert same(state_of(runs[0][0]), state_of(runs[1][0]))


@pytest.mark.parametrize("training", [True, False], ids=("train", "eval"))
def test_a_compiled_step_computes_the_same_to_the_bit(training):
    torch._dynamo.reset()
    identity = {"fw_compiler": lambda g, _: g, "bw_compiler": lambda g, _: g}
    ours = aot_autograd(**identity, decompositions=tbn.decomposition_table())
    found = [step(torch.compile(net(training), backend=b), X) for b in (aot_autograd(**identity), ours)]
    assert same(found[0], found[1])


@pytest.mark.parametrize(
    "form", [*LEGACY, *(f for f in GRADIENTS if f.dialect is not Dialect.FAMILY)], ids=lambda f: f.name
)
def test_every_row_has_a_key(form):
    assert (form.overload in tbn.decomposition_table()) is ("impl_index" not in form.roles)


def _call_of(name, training, stats):
    """A call of a sample's own op, as (x, w, b, mean, var, momentum, eps) -> outputs."""
    if name == "nn.functional.batch_norm":
        return lambda x, w, b, m, v, *tail: [nn.functional.batch_norm(x, m, v, w, b, training, *tail)]
    if name == "native_batch_norm":
        return lambda x, w, b, m, v, *tail: aten.native_batch_norm(x, w, b, m, v, training, *tail)
    if name == "_batch_norm_with_update":
        return aten._batch_norm_with_update
    if not stats:
        return lambda x, w, b, m, v, *tail: aten._native_batch_norm_legit(x, w, b, training, *tail)
    return lambda x, w, b, m, v, *tail: aten._native_batch_norm_legit(x, w, b, m, v, training, *tail)


@pytest.mark.parametrize(("name", "dtype"), DTYPES, ids=str)
def test_samples_of_pytorch_are_lowered_to_the_same_numbers(name, dtype):
    compared = 0
    for x, w, b, mean, var, training, *tail in samples(name, dtype):
        call = _call_of(name, training, mean is not None)
        for pre_dispatch in (True, False):
            given, ours, theirs = ([None if t is None else t.clone() for t in (x, w, b, mean, var)] for _ in range(3))
            with torch.no_grad():
                traced = make_fx(call, tbn.decomposition_table(), pre_dispatch=pre_dispatch)(*given, *tail)
            assert set(_targets(traced)) <= FAMILY or x.numel() == 0
            assert same(list(traced(*ours, *tail)), list(call(*theirs, *tail)))
            assert same(ours, theirs)
            compared += 1
    assert compared > 0


def test_what_consolidate_declines_stays():
    x, c = torch.randn(4, 3), torch.ones(3)

    def calls(x):
        half = aten._native_batch_norm_legit_functional(x, c, c, c, c, True, 0.1, 1e-5)[0]
        empty = aten.native_batch_norm(x[:0], c, c, c, c, True, 0.1, 1e-5)[0]
        return half, empty

    left = [str(t) for t in _targets(make_fx(calls, tbn.decomposition_table(), "fake", _allow_non_fake_inputs=True)(x))]
    assert left == [
        "aten._batch_norm_with_update_functional.default",
        "aten.native_batch_norm.default",
    ]


LACKING = {  # the statistics, the mode
    "eval with a mean alone": ((torch.zeros(3), None), False),
    "train with a variance alone": ((None, torch.ones(3)), True),
}


@pytest.mark.parametrize(("statistics", "training"), LACKING.values(), ids=LACKING)
def test_statistics_that_are_not_there_are_not_made_up(statistics, training):
    """PyTorch reads what is not there (a crash), so nothing is traced: the entry itself leaves the call to others."""
    table = tbn.decomposition_table()
    for form in (f for f in LEGACY if f.overload in table and "running_mean" in f.arguments and training in modes(f)):
        norm = BatchNorm(torch.randn(4, 3), None, None, *statistics, training, 0.1, 1e-5)
        out = {role: torch.empty(3) for role in form.destinations}
        args, kwargs = form.write(replace(norm, out=out))
        assert table[form.overload](*args, **kwargs) is NotImplemented, form.name


def _asked_the_driver(*_):
    raise AssertionError("the CUDA driver was asked")


def _on_cuda(model):
    """The model with fake tensors that say they are on CUDA, made without asking for a device.

    Without its convolution and gradients: there PyTorch itself aborts when it has no driver.
    """
    model.conv = nn.Identity()
    for module in model.modules():
        for name, t in module._parameters.items():
            module._parameters[name] = t if t is None else nn.Parameter(torch.empty(t.shape, device="cuda"), False)
        for name, t in module._buffers.items():
            module._buffers[name] = t if t is None else torch.empty(t.shape, dtype=t.dtype, device="cuda")
    return model


@pytest.mark.parametrize("dynamic", [False, True], ids=("static", "dynamic batch"))
@pytest.mark.parametrize("training", [True, False], ids=("train", "eval"))
@pytest.mark.skipif(torch.cuda.is_available(), reason="here a driver may be asked")
def test_tracing_for_cuda_needs_no_driver_and_pins_no_size(training, dynamic):
    names = ("_select_batch_norm_backend", "_get_cudnn_batch_norm_reserve_space_size")
    sizes = StatelessSymbolicContext([DimDynamic.DYNAMIC, *[DimDynamic.STATIC] * 3])
    shapes = ShapeEnv()
    mode = FakeTensorMode(shape_env=shapes)
    batch = mode.from_tensor(torch.empty(4, 1, 1, 1), symbolic_context=sizes).shape[0] if dynamic else 4
    with mode, patch.multiple(torch._C, **dict.fromkeys(names, _asked_the_driver)):
        model, x = _on_cuda(net(training)), torch.empty((batch, 4, 6, 6), device="cuda")
        graph = make_fx(model, tbn.decomposition_table(), pre_dispatch=True)(x)
        again = make_fx(graph)(x)
    for traced in (graph, again):
        assert set(_targets(traced)) <= FAMILY
        assert len(_targets(traced)) == 4
    call = again.graph.find_nodes(op="call_function", target=_targets(again)[0])[0]
    assert {v.device.type for v in call.meta["val"]} == {"cuda"}
    assert call.meta["val"][0].shape == x.shape
    assert shapes.guards == []


def test_a_compiled_train_step_allocates_no_reserve():
    torch._dynamo.reset()

    def backend(graph, inputs):
        return compile_fx(graph, inputs, decompositions={**select_decomp_table(), **tbn.decomposition_table()})

    model, reference = net(True), net(True)
    compiled = torch.compile(model, backend=backend)

    def train():
        out = compiled(X)[0]
        out.square().mean().backward()
        return out

    out, code = run_and_get_code(train)
    expected = reference(X)[0]
    expected.square().mean().backward()
    assert len(code) == 2
    assert not [line for text in code for line in text.splitlines() if "uint8" in line and "empty" in line]
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    for a, b in zip(model.buffers(), reference.buffers(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


OPTIONAL = [form for form in LEGACY if False in modes(form) and "running_mean" not in form.required]
WITHOUT = [form for form in OPTIONAL if not form.destinations and "impl_index" not in form.roles]


@pytest.mark.parametrize("form", WITHOUT, ids=lambda form: form.name)
def test_eval_without_statistics_stays_as_it_is(form):
    """Kernels read memory that is not there: the table leaves it to them to say so, as `consolidate` declines it."""
    entry = tbn.decomposition_table()[form.overload]
    tensors = dict.fromkeys(("weight", "bias", "running_mean", "running_var"))
    norm = BatchNorm(torch.randn(2, 3), **tensors, training=False, momentum=0.1, eps=1e-5)
    assert entry(*form.write(norm)[0]) is NotImplemented
