"""Legalize: every target from every form and dialect, the way back, and what is declined."""

import copy
import operator

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import torch_batchnorm as tbn
from programs import (
    TENSORS,
    call_graph,
    export,
    fingerprint,
    modes,
    same,
    saved_and_loaded,
    state_of,
    step,
    structure,
)
from torch_batchnorm import Legalize
from torch_batchnorm.decomps.forms import FORMS

aten = torch.ops.aten
X = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(0))
WITH_A_WAY_BACK = [t for t in tbn.TARGETS if t != "math"]
RUNS_ON_CPU = [t for t in WITH_A_WAY_BACK if t not in ("cudnn", "miopen")]


class Net(nn.Module):
    """Batch norm in its usual kinds, one module called twice, and another op that writes in place."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.relu = nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True)
        self.affine, self.plain = nn.BatchNorm2d(4, eps=1e-3, momentum=0.3), nn.BatchNorm2d(4, affine=False)
        self.batch = nn.BatchNorm2d(4, track_running_stats=False)
        for bn in (self.affine, self.plain):
            bn.running_mean.normal_()
            bn.running_var.uniform_(0.5, 1.5)

    def forward(self, x):
        x = self.affine(self.relu(self.conv(x)))
        return self.batch(self.affine(self.plain(x)))


def programs(training):
    """The same program as it is met: training IR and ATEN, legacy and consolidated."""
    training_ir = export(Net().train(training), X)
    aten_dialect = training_ir.run_decompositions()
    return {
        "training IR": training_ir,
        "training IR, consolidated": tbn.consolidate(training_ir),
        "ATEN": aten_dialect,
        "ATEN, consolidated": tbn.consolidate(aten_dialect),
    }


@pytest.mark.parametrize("training", [True, False], ids=("train", "eval"))
@pytest.mark.parametrize("target", WITH_A_WAY_BACK)
def test_the_way_back_is_exact_node_for_node_and_the_input_untouched(target, training):
    """Where a target changes the dialect, there is no way back to compare: the result is the same from either form."""
    shown = {}
    for name, program in programs(training).items():
        before = fingerprint(program)
        result = Legalize(target)(program)
        assert fingerprint(program) == before
        assert tbn.verify(result.program) == (), name
        assert result.program.state_dict.keys() == program.state_dict.keys()
        if result.program.dialect == program.dialect and not result.declined:
            assert tbn.render(tbn.consolidate(result.program)) == tbn.render(tbn.consolidate(program)), name
        assert Legalize(target)(result.program).modified is False, name
        if not result.declined:
            shown.setdefault(name.partition(",")[0], []).append(structure(result.program))
    assert all(legacy == consolidated for legacy, consolidated in shown.values())
    assert len(shown) == 2 or target in ("cudnn", "miopen")


@pytest.mark.parametrize("training", [True, False], ids=("train", "eval"))
@pytest.mark.parametrize("target", RUNS_ON_CPU)
def test_outputs_statistics_and_gradients_are_the_same_to_the_bit(target, training):
    """A functional program with train sites does not train in PyTorch: there, outputs and statistics."""
    found = programs(training)
    expected = step(found["training IR"].module(), X)
    for name, program in found.items():
        result = Legalize(target)(program)
        assert result.declined == ()
        legalized = saved_and_loaded(result.program)
        if training and legalized.dialect != "TRAINING":
            module = legalized.module()
            with torch.no_grad():
                assert same([module(X)], expected[0]), name
            assert same(state_of(module), expected[1]), name
        else:
            assert same(step(legalized.module(), X), expected), name


def test_a_decomposed_program_trains_again_as_the_eager_model_does():
    model = Net()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step(export(Net(), X).run_decompositions().module(), X)
    decomposed = export(copy.deepcopy(model), X).run_decompositions()
    module = tbn.legalize(decomposed, "training").module()
    losses = []
    for each in (model, module):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.05, momentum=0.9)
        losses.append([])
        for _ in range(5):
            optimizer.zero_grad()
            loss = each(X).square().mean()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert losses[0] == losses[1]
    assert same(dict(model.named_buffers()), dict(module.named_buffers()))


def _valued(graph):
    """The graph with values at its placeholders."""
    for node in graph.graph.find_nodes(op="placeholder"):
        node.meta["val"] = torch.empty((4, 3, 5) if node.name == "input_1" else 3, device="meta")
    return graph


ROWS = [(form, training) for form in FORMS for training in modes(form) if not form.destinations]


@pytest.mark.parametrize("target", RUNS_ON_CPU)
@pytest.mark.parametrize(("form", "training"), ROWS, ids=[f"{f.name}, {'train' if t else 'eval'}" for f, t in ROWS])
def test_a_hand_built_call_of_every_form(form, training, target):
    absent = () if "running_mean" in form.arguments else ("running_mean", "running_var")
    unread = {role for role in form.roles if role not in ("out", "new_running_mean", "new_running_var")}
    if not absent or training:
        graph = _valued(call_graph(form, training, absent=absent, unread=unread))
        result = Legalize(target)(graph)
        theirs = [torch.randn(4, 3, 5), *(torch.rand(3) + 0.5 for _ in range(4))]
        mine = [t.clone() for t in theirs]
        names = [name for name in TENSORS if name in form.arguments]
        runs = [[dict(zip(TENSORS, ts, strict=True))[n] for n in names] for ts in (mine, theirs)]
        consolidated = tbn.consolidate(graph)
        assert same(list(result.program(*runs[0])), list(consolidated(*runs[1])))
        assert same(runs[0], runs[1])
        if not result.declined:
            again = structure(tbn.consolidate(result.program))
            assert sorted(node[1] for node in again) == sorted(node[1] for node in structure(consolidated))


@pytest.mark.parametrize("training", [True, False], ids=("train", "eval"))
def test_math_leaves_no_batch_norm_and_computes_it(training):
    found = programs(training)
    expected = step(found["training IR"].module(), X)
    for name, program in found.items():
        result = Legalize("math")(program)
        assert (len(result.edits), result.declined, tbn.verify(result.program)) == (4, (), ()), name
        assert tbn.inspect(result.program).entries == ()
        module = saved_and_loaded(result.program).module()
        if training and program.dialect != "TRAINING":
            with torch.no_grad():
                torch.testing.assert_close([module(X)], expected[0])
            torch.testing.assert_close(state_of(module), expected[1])
        else:
            for mine, theirs in zip(step(module, X), expected, strict=True):
                torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("training", [True, False], ids=("train", "eval"))
@pytest.mark.parametrize("affine", [True, False], ids=("affine", "affine off"))
def test_the_math_of_a_gradient_is_autograds_in_double(training, affine):
    x, w, b = torch.randn(6, 3, 5).double() * 3, torch.rand(3).double() + 0.5, torch.randn(3).double()
    m, v = torch.randn(3).double(), torch.rand(3).double() + 0.5

    def joint(x, w, b, m, v, g):
        op = aten._batch_norm_with_update_functional if training else aten._batch_norm_no_update
        out = op(x, w, b, m, v, 0.1, 1e-5)
        given = (g, x, w, m, v, *out[1:3], training, 1e-5, [True] * 3, out[3])
        return out[0], *aten.batch_norm_backward(*given)

    if not affine:
        w, b = torch.ones_like(w), torch.zeros_like(b)
    inputs = (x, w, b, m, v, torch.randn_like(x))
    graph = make_fx(joint)(*inputs)
    result = Legalize("math")(graph)
    assert (len(result.edits), result.declined) == (2, ())
    torch.testing.assert_close(list(result.program(*inputs)), list(graph(*inputs)), atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("decomposed", [False, True], ids=("training IR", "ATEN"))
@pytest.mark.parametrize("target", [*RUNS_ON_CPU, "math"])
def test_a_dynamic_batch_stays_dynamic(target, decomposed):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    program = export(copy.deepcopy(model), X, dynamic=({0: torch.export.Dim("n", min=2)},))
    result = Legalize(target)(program.run_decompositions() if decomposed else program)
    module = saved_and_loaded(result.program).module()
    with torch.no_grad():
        for n in (7, 2):
            x = torch.randn(n, 3, 6, 6)
            torch.testing.assert_close(module(x), model(x))
    torch.testing.assert_close(state_of(module), state_of(model))


def test_math_of_one_value_a_channel_is_declined():
    graph = _valued(call_graph(next(f for f in FORMS if f.overload is aten.batch_norm.default), True))
    graph.graph.find_nodes(op="placeholder")[0].meta["val"] = torch.empty((1, 3), device="meta")
    (declined,) = Legalize("math")(graph).declined
    assert declined.reason == "it has one value a channel or none: its unbiased variance is undefined"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_math_takes_the_statistics_of_half_types_in_float32(dtype):
    x = torch.tensor([[[1.3047, 0.8789]]], dtype=dtype)
    program = tbn.legalize(export(nn.BatchNorm1d(1, affine=False, track_running_stats=False, eps=1e-5), x), "math")
    assert same(program.module()(x), torch.tensor([[[1.0, -1.0]]], dtype=dtype))


def test_cudnn_enabled_is_an_option_of_composite():
    program = tbn.consolidate(export(Net(), X))
    for enabled in (True, False):
        found = tbn.legalize(program, "composite", cudnn_enabled=enabled)
        nodes = found.graph.find_nodes(op="call_function", target=aten.batch_norm.default)
        assert [node.args[8] for node in nodes] == [enabled] * 4


def test_an_unknown_target_lists_the_targets():
    with pytest.raises(tbn.InvalidChoice, match="found target 'onnx', expected one of core_aten, composite, training"):
        tbn.legalize(export(Net(), X), "onnx")


def _joint(x, w, b, m, v):
    out, mean, invstd, reserve = aten._batch_norm_with_update.default(x, w, b, m, v, 0.1, 1e-5)
    return out, *aten.batch_norm_backward.default(out, x, w, m, v, mean, invstd, True, 1e-5, [True] * 3, reserve)


def _graph(**changed):
    op = changed.pop("op")
    form = next(f for f in FORMS if f.overload is op)
    return _valued(call_graph(form, **{"training": True, **changed}))


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(2))

    def forward(self, x):
        self.count = self.count + 1
        return x, self.count.view(2)


def _returns_old_memory():
    """A functional program that returns a view of a buffer as it was before its mutation."""
    program = export(Counts(), X).run_decompositions({})
    (view,) = program.graph.find_nodes(op="call_function", target=aten.view.default)
    view.args = (program.graph.find_nodes(op="placeholder")[0], [2])
    return program


DECLINED = {
    "composite returns no save_mean": (
        lambda: _graph(op=aten._batch_norm_with_update.default, unread={"reserve"}),
        "composite",
        "its save_mean is read, which aten.batch_norm.default does not return",
    ),
    "a reserve that something else reads": (
        lambda: _graph(op=aten._batch_norm_with_update.default),
        "core_aten",
        "its reserve is read, which aten._native_batch_norm_legit.default does not return",
    ),
    "cuDNN's rules": (
        lambda: _graph(op=aten._batch_norm_with_update.default, eps=1e-6),
        "cudnn",
        "cudnn cannot run it: eps is 1e-06, outside the limit: 1e-05 or more",
    ),
    "a functional form has nothing to write to": (
        lambda: _graph(op=aten._batch_norm_with_update_functional.default, unread={"reserve"}),
        "native",
        "leaves its statistics as they were, and aten.native_batch_norm.default writes them",
    ),
    "out arguments": (
        lambda: _graph(op=aten._batch_norm_with_update.out, unread={"reserve"}),
        "core_aten",
        "writes to its out arguments",
    ),
    "a vendor's hidden write in a functional program": (
        lambda: export(nn.BatchNorm2d(3), X).run_decompositions(),
        "cudnn",
        "writes its statistics, which a functional program does not allow",
        "legalize it to training",
    ),
    "old memory handed out": (
        _returns_old_memory,
        "training",
        "it cannot be made a training program: b_count is mutated, and",
    ),
}


@pytest.mark.parametrize("name", DECLINED)
def test_declined_with_a_reason_and_left_as_it_was(name):
    build, target, reason, *remedy = DECLINED[name]
    program = build()
    before = tbn.render(program)
    result = Legalize(target)(program)
    assert [(reason in d.reason, d.remedy) for d in result.declined] == [(True, "".join(remedy))]
    assert result.modified is False
    assert tbn.render(result.program) == before


def test_a_joint_graph_leaves_and_comes_back_with_its_reserve():
    inputs = [torch.randn(4, 3), torch.rand(3), torch.randn(3), torch.zeros(3), torch.ones(3)]
    graph = make_fx(_joint)(*map(torch.clone, inputs))
    core = Legalize("core_aten")(graph)
    assert [e.after for e in core.edits] == [
        "aten.native_batch_norm_backward.default",
        "aten._native_batch_norm_legit.default",
    ]
    again = tbn.consolidate(core.program)
    calls = [[str(n.target) for n in g.graph.nodes if n.op == "call_function"] for g in (graph, again)]
    assert sorted(calls[0]) == sorted(calls[1])
    (gradient,) = again.graph.find_nodes(op="call_function", target=aten.batch_norm_backward.default)
    (forward,) = again.graph.find_nodes(op="call_function", target=aten._batch_norm_with_update.default)
    assert gradient.args[-1].args == (forward, 3)
    runs = [(list(map(torch.clone, inputs)), g) for g in (graph, core.program, again)]
    results = [(g(*given), given) for given, g in runs]
    assert same(results[0], results[1])
    assert same(results[0], results[2])


def test_the_graphs_of_each_target():
    program = tbn.consolidate(export(nn.BatchNorm2d(3), X))
    shown = [
        f"{target}:\n{tbn.render(tbn.legalize(program, target))}"
        for target in ("core_aten", "composite", "functional", "cudnn")
    ]
    assert_expected_inline(
        "\n\n".join(shown),
        """\
core_aten:
p_weight: f32[3] = placeholder
p_bias: f32[3] = placeholder
b_running_mean: f32[3] = placeholder
b_running_var: f32[3] = placeholder
b_num_batches_tracked: i64[] = placeholder
input: f32[4, 3, 6, 6] = placeholder
add_: i64[] = aten.add_.Tensor(b_num_batches_tracked, 1)
_native_batch_norm_legit: (f32[4, 3, 6, 6], f32[3], f32[3]) = aten._native_batch_norm_legit.default(input, p_weight, p_bias, b_running_mean, b_running_var, True, 0.1, 1e-05)
batch_norm: f32[4, 3, 6, 6] = getitem(_native_batch_norm_legit, 0)
return (batch_norm)

composite:
p_weight: f32[3] = placeholder
p_bias: f32[3] = placeholder
b_running_mean: f32[3] = placeholder
b_running_var: f32[3] = placeholder
b_num_batches_tracked: i64[] = placeholder
input: f32[4, 3, 6, 6] = placeholder
add_: i64[] = aten.add_.Tensor(b_num_batches_tracked, 1)
batch_norm: f32[4, 3, 6, 6] = aten.batch_norm.default(input, p_weight, p_bias, b_running_mean, b_running_var, True, 0.1, 1e-05, True)
return (batch_norm)

functional:
p_weight: f32[3] = placeholder
p_bias: f32[3] = placeholder
b_running_mean: f32[3] = placeholder
b_running_var: f32[3] = placeholder
b_num_batches_tracked: i64[] = placeholder
input: f32[4, 3, 6, 6] = placeholder
add_: i64[] = aten.add.Tensor(b_num_batches_tracked, 1)
_batch_norm_with_update_functional: (f32[4, 3, 6, 6], f32[3], f32[3], u8[0], f32[3], f32[3]) = aten._batch_norm_with_update_functional.default(input, p_weight, p_bias, b_running_mean, b_running_var, 0.1, 1e-05)
getitem: f32[3] = getitem(_batch_norm_with_update_functional, 4)
getitem_1: f32[3] = getitem(_batch_norm_with_update_functional, 5)
batch_norm: f32[4, 3, 6, 6] = getitem(_batch_norm_with_update_functional, 0)
return (add_, getitem, getitem_1, batch_norm)
add_ -> BUFFER_MUTATION num_batches_tracked
getitem -> BUFFER_MUTATION running_mean
getitem_1 -> BUFFER_MUTATION running_var

cudnn:
p_weight: f32[3] = placeholder
p_bias: f32[3] = placeholder
b_running_mean: f32[3] = placeholder
b_running_var: f32[3] = placeholder
b_num_batches_tracked: i64[] = placeholder
input: f32[4, 3, 6, 6] = placeholder
add_: i64[] = aten.add_.Tensor(b_num_batches_tracked, 1)
cudnn_batch_norm: (f32[4, 3, 6, 6], f32[3], f32[3], u8[0]) = aten.cudnn_batch_norm.default(input, p_weight, p_bias, b_running_mean, b_running_var, True, 0.1, 1e-05)
batch_norm: f32[4, 3, 6, 6] = getitem(cudnn_batch_norm, 0)
return (batch_norm)""",
    )


# Found by review: each was silently wrong, or an invalid program.


class ReadsStatistics(nn.Module):
    """Reads its running mean before and after it is updated."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.bn = nn.Linear(3, 3), nn.BatchNorm1d(3)

    def forward(self, x):
        before = self.bn.running_mean * 2
        return self.bn(self.linear(x)) + before + self.bn.running_mean * 3


@pytest.mark.parametrize("target", [*RUNS_ON_CPU, "math"])
def test_no_gradient_goes_through_the_statistics(target):
    x, model = torch.randn(4, 3), ReadsStatistics()
    program = export(copy.deepcopy(model), x)
    module = saved_and_loaded(tbn.legalize(program, target)).module()
    if program.dialect == "TRAINING" and target != "functional":
        for _ in range(3):
            for mine, theirs in zip(step(module, x), step(model, x), strict=True):
                torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)
            with torch.no_grad():
                torch.testing.assert_close(module(x), model(x))
        assert not any(buffer.requires_grad for buffer in module.buffers())


class Averages(nn.Module):
    """Keeps a moving average of what it computes, added in place, beside a batch norm."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.bn = nn.Linear(3, 3), nn.BatchNorm1d(3)
        self.register_buffer("average", torch.zeros(()))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        y = self.linear(x)
        self.average.add_(y.mean().detach())
        self.seen.add_(1)
        return self.bn(y)


def test_statistics_of_elementary_operations_take_no_gradient_along():
    from torch._inductor.decomposition import decompositions

    x, model = torch.randn(4, 3), Averages()
    functional = export(copy.deepcopy(model), x).run_decompositions(
        {**torch.export.default_decompositions(), **decompositions}
    )
    assert "batch_norm" not in str(functional.graph)
    # decomposing drops the detach of the model's own average too
    legalized = tbn.legalize(functional, "training")
    assert tbn.verify(legalized) == ()
    module = saved_and_loaded(legalized).module()
    assert [n.name for n in module.graph.nodes if n.target is aten.add_.Tensor] == ["add_1", "add_2"]
    ours, theirs = (torch.optim.SGD(m.parameters(), 0.1) for m in (module, model))
    for _ in range(3):
        for optimizer, m in ((ours, module), (theirs, model)):
            optimizer.zero_grad()
            m(x).square().sum().backward()
            optimizer.step()
        assert not any(buffer.requires_grad for buffer in module.buffers())
    torch.testing.assert_close(dict(module.state_dict()), dict(model.state_dict()))


class KeepsTheOldMean(nn.Module):
    def __init__(self):
        super().__init__()
        self.bn = nn.BatchNorm1d(3)
        self.register_buffer("previous", torch.zeros(3))

    def forward(self, x):
        self.previous.copy_(self.bn.running_mean)
        return self.bn(x)


@pytest.mark.parametrize("target", ["training", "composite"])
def test_a_buffer_that_takes_the_old_value_of_another_is_declined(target):
    program = export(KeepsTheOldMean(), torch.randn(4, 3)).run_decompositions()
    result = Legalize(target)(program)
    assert result.modified is False
    assert "as it was before it is mutated itself" in result.declined[0].reason


def _casts(x):
    y = x * 1
    y.gt_(0.5)
    return y


class InPlace(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.bn, self.function = nn.BatchNorm1d(3), function
        self.register_buffer("a", torch.zeros(3))

    def forward(self, x):
        return self.bn(x), self.function(x)


class Shares(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
        self.b.running_mean = self.a.running_mean.view(3)

    def forward(self, x):
        return self.b(self.a(x))


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.bn = nn.BatchNorm1d(3)
        self.bn.num_batches_tracked = None

    def forward(self, x):
        with torch.no_grad():
            return self.bn(x) * 2


STUCK = {
    "a cast in place": (lambda: InPlace(_casts), "casts to what it writes to"),
    "an op on a list": (lambda: InPlace(lambda x: torch._foreach_add_([x * 1], 1.0)), "has no functional twin"),
    "statistics that share memory": (Shares, "shares"),
    "a batch norm in a nested graph": (Nested, "which cannot hand the new value out"),
}


@pytest.mark.parametrize("inplace", [False, True], ids=("copy", "in place"))
@pytest.mark.parametrize("consolidated_first", [False, True], ids=("legacy", "consolidated"))
@pytest.mark.parametrize("name", STUCK)
def test_what_cannot_be_made_functional_is_declined_whole(name, consolidated_first, inplace):
    build, reason = STUCK[name]
    program = export(build(), torch.randn(4, 3))
    program = tbn.consolidate(program) if consolidated_first else program
    before = fingerprint(program)
    result = Legalize("functional", inplace=inplace)(program)
    assert [reason in d.reason for d in result.declined] == [True], result.declined
    assert (result.modified, result.program.dialect, fingerprint(program)) == (False, "TRAINING", before)


@pytest.mark.parametrize("decomposed", [False, True], ids=("training IR", "ATEN"))
@pytest.mark.parametrize("target", [*RUNS_ON_CPU, "math"])
def test_preserved_module_calls_keep_their_signature(target, decomposed):
    model, x = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.ReLU()), torch.randn(4, 3)
    program = torch.export.export(copy.deepcopy(model), (x,), preserve_module_call_signature=("1",))
    program = program.run_decompositions() if decomposed else program
    assert tbn.verify(program) == ()
    result = Legalize(target)(program)
    assert tbn.verify(result.program) == ()
    loaded = saved_and_loaded(result.program)
    if not decomposed and loaded.dialect == "TRAINING":  # decomposing, PyTorch names a wrong output
        torch.testing.assert_close(torch.export.unflatten(loaded)(x), model(x))


def test_a_gradient_is_pinned_only_with_its_forward():
    inputs = [torch.randn(4, 3, 2), *(torch.ones(3) for _ in range(4))]

    def joint(eps):
        def call(x, w, b, m, v):
            out, mean, invstd, reserve = aten._batch_norm_with_update.default(x, w, b, m, v, 0.1, eps)
            given = (out, x, w, m, v, mean, invstd, True, eps, [True] * 3, reserve)
            return out, *aten.batch_norm_backward.default(*given)

        return make_fx(call)(*inputs)

    for library, eps, edits in (("cudnn", 1e-6, 0), ("cudnn", 1e-5, 2), ("miopen", 1e-5, 2)):
        result = Legalize(library)(joint(eps))
        assert (len(result.edits), len(result.declined)) == (edits, 2 - edits)


def test_a_gradient_that_is_masked_out_and_read_is_declined():
    graph = torch.fx.Graph()
    g, x, mean, invstd = (graph.placeholder(name) for name in "gxmi")
    for node, shape in ((g, (4, 3)), (x, (4, 3)), (mean, 3), (invstd, 3)):
        node.meta["val"] = torch.ones(shape)
    args = (g, x, None, None, None, mean, invstd, True, 1e-5, [True, False, True])
    call = graph.call_function(aten.native_batch_norm_backward.default, args)
    graph.output(tuple(graph.call_function(operator.getitem, (call, i)) for i in range(3)))
    result = Legalize("math")(torch.fx.GraphModule({}, graph))
    assert [d.reason for d in result.declined] == ["its grad_weight is read, which its output_mask leaves out"]
