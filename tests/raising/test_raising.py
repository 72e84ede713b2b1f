"""Decomposed batch norm becomes the family again: what is raised, what is declined, what is no batch norm at all."""

import operator

import pytest
import torch
from expecttest import assert_expected_inline
from functorch.compile import aot_module, make_boxed_func
from torch import nn
from torch._decomp import core_aten_decompositions, get_decompositions
from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch.export import Dim, ExportedProgram
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from programs import aten, export, fingerprint, saved_and_loaded, state_of, step
from torch_batchnorm import RaiseDecomposed, consolidate, legalize, raise_decomposed, render, verify
from torch_batchnorm.decomps import formula
from torch_batchnorm.decomps.forms import BatchNorm, Gradient
from torch_batchnorm.errors import InvalidProgram
from torch_batchnorm.passes.raising import recognition, reference

TRAIN = aten._batch_norm_with_update_functional.default
EVAL = aten._batch_norm_no_update.default
GRADIENT = aten.batch_norm_backward.default
FORWARDS = [
    aten._native_batch_norm_legit_functional,
    aten._native_batch_norm_legit_no_training,
    aten._native_batch_norm_legit,
]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 4e-3}
X = torch.randn(4, 3, 5, 6, dtype=torch.float64)


def inductor():
    return dict(select_decomp_table())


def plain():
    """Batch norm alone: casts stay `_to_copy`."""
    return get_decompositions(FORWARDS)


def core():
    return {**core_aten_decompositions(), **get_decompositions(FORWARDS)}


def math(program):
    return legalize(program.run_decompositions({}), "math")


def decomposed(table):
    return lambda program: program.run_decompositions(table())


SPELLINGS = {
    "Inductor's table": decomposed(inductor),
    "batch norm's decompositions alone": decomposed(plain),
    "core ATen's table and batch norm's": decomposed(core),
    "this library's formula": math,
}


def calls(program, *targets):
    top = program.graph_module if isinstance(program, ExportedProgram) else program
    graphs = [m.graph for m in top.modules() if isinstance(m, GraphModule)]
    return [n for g in graphs for t in targets for n in g.find_nodes(op="call_function", target=t)]


def raised(program):
    """Raises a copy, having checked what holds for every program."""
    before = fingerprint(program)
    result = RaiseDecomposed()(program)
    assert fingerprint(program) == before, "the input was touched"
    assert RaiseDecomposed()(result.program).modified is False
    assert verify(result.program) == ()
    assert len(calls(result.program, TRAIN, EVAL, GRADIENT)) == len(result.edits)
    if isinstance(program, ExportedProgram):
        assert [s.arg.name for s in result.program.graph_signature.output_specs] == [
            s.arg.name for s in program.graph_signature.output_specs
        ]
        assert all(result.program.state_dict[k] is v for k, v in program.state_dict.items())
    return result


def close(a, b, dtype):
    torch.testing.assert_close(a, b, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype], check_dtype=True)


def run(program, x):
    """Outputs and state of one run, which leaves the state as it was: programs share it."""
    module = program.module()
    before = state_of(module)
    output, after = module(x.clone()), state_of(module)
    module.load_state_dict(before)
    return output.detach(), after


class Net(nn.Module):
    def __init__(self, bn):
        super().__init__()
        self.bn = bn

    def forward(self, input):  # `input` shadows a builtin, which torch renames when it copies a graph
        return self.bn(input) * 2


def half(bn):
    """Parameters of the input's type, and not of float32 beside a half input."""
    return bn.bfloat16()


F32, F64 = torch.float32, torch.float64
CASES = {
    "rank 2": (lambda: nn.BatchNorm1d(3), (8, 3), F64),
    "rank 3": (lambda: nn.BatchNorm1d(3), (4, 3, 5), F64),
    "rank 4": (lambda: nn.BatchNorm2d(3), (4, 3, 5, 6), F64),
    "rank 5": (lambda: nn.BatchNorm3d(3), (2, 3, 4, 5, 6), F64),
    "float32": (lambda: nn.BatchNorm2d(3), (4, 3, 5, 6), F32),
    "one channel": (lambda: nn.BatchNorm2d(1), (4, 1, 5, 6), F64),
    "batch of one": (lambda: nn.BatchNorm2d(3), (1, 3, 5, 6), F64),
    "no weight and bias": (lambda: nn.BatchNorm2d(3, affine=False), (4, 3, 5, 6), F64),
    "another momentum and eps": (lambda: nn.BatchNorm2d(3, momentum=0.25, eps=1e-3), (4, 3, 5, 6), F64),
    "momentum one": (lambda: nn.BatchNorm2d(3, momentum=1.0), (4, 3, 5, 6), F64),
    "bfloat16 beside float32 parameters": (lambda: nn.BatchNorm2d(3), (4, 3, 5, 6), torch.bfloat16),
    "float16 beside float32 parameters": (lambda: nn.BatchNorm2d(3), (4, 3, 5, 6), torch.float16),
    "bfloat16 throughout": (lambda: half(nn.BatchNorm2d(3)), (4, 3, 5, 6), torch.bfloat16),
    "bfloat16 without weight and bias": (lambda: nn.BatchNorm2d(3, affine=False), (4, 3, 5, 6), torch.bfloat16),
}


def made(name, training):
    make, shape, dtype = CASES[name]
    torch.manual_seed(0)
    model = Net(make()).train(training)
    model = model.double() if dtype is F64 else model
    for tensor in [*model.parameters(), model.bn.running_mean, model.bn.running_var]:
        tensor.data.copy_(torch.rand_like(tensor) + 0.5)
    return model, (torch.randn(shape, dtype=F64) * 2 + 1).to(dtype), dtype


SPELLED = ["rank 4", "bfloat16 beside float32 parameters", "bfloat16 throughout"]  # in every spelling
ROWS = [(n, s) for n in CASES for s in SPELLINGS if n in SPELLED or s == "Inductor's table"]


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize(("name", "spelling"), ROWS)
def test_a_decomposed_program_is_raised_and_computes_the_same(name, spelling, training):
    model, x, dtype = made(name, training)
    program = SPELLINGS[spelling](export(model, x))
    result = raised(program)
    assert result.declined == ()
    assert [e.after for e in result.edits] == [str(TRAIN if training else EVAL)]
    assert len(list(result.program.graph.nodes)) < len(list(program.graph.nodes)), "the chain is gone"
    close(run(result.program, x), run(program, x), dtype)
    close(run(saved_and_loaded(result.program), x), run(result.program, x), dtype)
    outputs, state, gradients = step(model, x)
    trainable = legalize(result.program, "training").module()
    got = step(trainable, x)
    close(got[0], outputs, dtype)
    close(
        {k: v for k, v in got[1].items() if "running" in k}, {k: v for k, v in state.items() if "running" in k}, dtype
    )
    close(got[2], gradients, dtype)


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_a_dynamic_batch_is_raised_and_stays_dynamic(training, spelling):
    model, x, dtype = made("rank 4", training)
    result = raised(SPELLINGS[spelling](export(model, x, dynamic=({0: Dim("batch")},))))
    assert (len(result.edits), result.declined) == (1, ())
    assert not [n for n in result.program.graph.nodes if n.target in (operator.truediv, operator.floordiv)]
    for batch in (2, 7):
        close(result.program.module()(torch.cat([x, x])[:batch]), model(torch.cat([x, x])[:batch]), dtype)


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_batch_statistics_alone_are_raised(spelling):
    model = Net(nn.BatchNorm2d(3, track_running_stats=False)).double()
    result = raised(SPELLINGS[spelling](export(model, X)))
    assert (len(result.edits), result.declined) == (1, ())
    close(result.program.module()(X), model(X), F64)


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.conv2, self.bn2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)

    def forward(self, x):
        return (x + self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))).relu()


def resnet():
    torch.manual_seed(0)
    stem = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU())
    return nn.Sequential(stem, Block(4), Block(4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)).double()


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_every_batch_norm_of_a_residual_network_is_raised(training):
    program = export(resnet().train(training), X).run_decompositions(inductor())
    result = raised(program)
    assert [e.module for e in result.edits] == ["0.1", "1.bn1", "1.bn2", "2.bn1", "2.bn2"]
    assert result.declined == ()
    assert calls(result.program, aten.rsqrt.default, aten.sqrt.default, aten.var_mean.correction) == []
    close(run(result.program, X), run(program, X), F64)


def test_metadata_is_kept_and_inplace_edits_the_program_itself():
    program = export(resnet(), X).run_decompositions(inductor())
    module = program.graph_module
    stacks = {n.name: n.meta["nn_module_stack"] for n in program.graph.nodes if "nn_module_stack" in n.meta}
    assert RaiseDecomposed(inplace=True)(program).program is program
    assert program.graph_module is module
    for node in calls(program, TRAIN):
        assert "val" in node.meta
        assert all(user.meta["nn_module_stack"] == stacks[user.name] for user in node.users)


def spelled(norm):
    """Eval batch norm as nobody emits it so far."""
    if norm.training:
        return formula.forward(norm)
    centered = norm.input - norm.running_mean.view(1, -1, 1, 1)
    scaled = centered * torch.pow(norm.running_var + norm.eps, -0.5).view(1, -1, 1, 1)
    return {"out": scaled * norm.weight.view(1, -1, 1, 1) + norm.bias.view(1, -1, 1, 1)}


def test_a_new_spelling_is_one_row(monkeypatch):
    with torch.no_grad():
        program = make_fx(lambda *o: spelled(BatchNorm(*o, False, 0.1, 1e-3))["out"])(*operands())
    assert RaiseDecomposed()(program).edits == ()
    rows = {"torch": reference.EMITTERS["torch"], "here": {BatchNorm: spelled, Gradient: formula.gradient}}
    monkeypatch.setattr(reference, "EMITTERS", rows)
    monkeypatch.setattr(recognition, "patterns", reference.patterns.__wrapped__)
    result = raised(program)
    assert ([e.after for e in result.edits], result.declined) == ([str(EVAL)], ())
    close(result.program(*operands()), program(*operands()), F64)


def test_what_was_filled_in_is_left_out_again():
    program = raise_decomposed(export(Net(nn.BatchNorm2d(3, affine=False)).double(), X).run_decompositions(inductor()))
    core = legalize(program, "core_aten")
    (node,) = calls(core, aten._native_batch_norm_legit_functional.default)
    assert node.args[1:3] == (None, None)


def test_a_program_without_any_is_returned_as_it_is():
    program = export(nn.Linear(3, 2), torch.randn(2, 3)).run_decompositions(inductor())
    assert raise_decomposed(program) is program
    with pytest.raises(InvalidProgram, match="expected an ExportedProgram or a GraphModule"):
        raise_decomposed(nn.ReLU())


# Gradients: what AOTAutograd makes of a train step, and what its partitioners cut it into.


def captured(model, x, partition=default_partition):
    """The joint, forward and backward graphs of a step, each with the inputs it ran on; the joint one has none."""
    graphs = {}

    def keep(kind):
        def compiler(graph, _):
            def called(*inputs):
                graphs[kind] = (graph, [i.clone() if isinstance(i, torch.Tensor) else i for i in inputs])
                return graph(*inputs)

            return make_boxed_func(called)

        return compiler

    def split(joint, *args, **kwargs):
        graphs["joint"] = (joint, None)
        return partition(joint, *args, **kwargs)

    keeping = {"fw_compiler": keep("forward"), "bw_compiler": keep("backward"), "partition_fn": split}
    aot_module(model, **keeping, decompositions=inductor())(x).square().sum().backward()
    return graphs


PARTITIONS = {"default": default_partition, "min-cut": min_cut_rematerialization_partition}
STEPS = ["rank 2", "rank 4", "no weight and bias", *[name for name in CASES if "float16" in name]]


CUTS = [(name, "default") for name in STEPS] + [("rank 4", "min-cut"), ("bfloat16 throughout", "min-cut")]


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize(("name", "partition"), CUTS)
def test_forward_backward_and_joint_graphs_are_raised_and_compute_the_same(name, partition, training):
    model, x, dtype = made(name, training)
    graphs = captured(model, x.requires_grad_(), PARTITIONS[partition])
    forward = str(TRAIN if training else EVAL)
    # in eval without a weight the gradient is one product, which is left as it is
    gradient = [str(GRADIENT)] if training or model.bn.affine else []
    expected = {"joint": [*gradient, forward], "forward": [forward], "backward": gradient}
    for kind, (graph, inputs) in graphs.items():
        result = raised(graph)
        assert ([e.after for e in result.edits], result.declined) == (expected[kind], ())
        for got, known in zip(result.program(*inputs), graph(*inputs), strict=True) if inputs else ():
            close(got, known, dtype)


def train_step(x, weight, bias, mean, var):
    y = nn.functional.batch_norm(x, mean, var, weight, bias, True, 0.1, 1e-5)
    return (y.detach(), *torch.autograd.grad(y.square().sum(), (x, weight, bias)))


def operands(dtype=F64):
    torch.manual_seed(0)
    channels = [torch.rand(3, dtype=dtype) + 0.5 for _ in range(4)]
    x = torch.randn(4, 3, 5, 6, dtype=dtype).to(memory_format=torch.channels_last)
    return [x.requires_grad_(), channels[0].requires_grad_(), channels[1].requires_grad_(), *channels[2:]]


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_a_joint_graph_that_writes_its_statistics_is_raised(mode):
    program = make_fx(train_step, decomposition_table=inductor(), tracing_mode=mode)(*operands())
    result = raised(program)
    assert [e.after for e in result.edits] == [str(GRADIENT), str(TRAIN)]
    first, second = operands(), operands()
    close(result.program(*first), program(*second), F64)
    close(first[3:], second[3:], F64)
    close(result.program(*operands()), train_step(*operands()), F64)


def test_a_raised_gradient_reads_the_reserve_of_its_raised_forward():
    program = raise_decomposed(make_fx(train_step, decomposition_table=inductor())(*operands()))
    (forward,), (gradient,) = calls(program, TRAIN), calls(program, GRADIENT)
    assert (gradient.args[-1].args, gradient.args[8]) == ((forward, 3), 1e-5)


def test_a_gradient_in_the_formula_of_this_library_is_raised():
    program = make_fx(train_step)(*operands())
    result = raised(legalize(program, "math"))
    assert ([e.after for e in result.edits], result.declined) == ([str(GRADIENT), str(TRAIN)], ())
    close(result.program(*operands()), train_step(*operands()), F64)


def test_gradients_that_are_asked_for_are_in_the_mask():
    def some(x, weight, bias, mean, var):
        y = nn.functional.batch_norm(x, mean, var, weight, bias, True, 0.1, 1e-5)
        return torch.autograd.grad(y.square().sum(), (weight, bias))

    program = make_fx(some, decomposition_table=inductor())(*operands())
    program.graph.eliminate_dead_code()
    result = raised(program)
    (gradient,) = calls(result.program, GRADIENT)
    assert gradient.args[9] == [False, True, True]
    close(result.program(*operands()), some(*operands()), F64)


def test_a_backward_that_was_saved_the_statistics_as_they_broadcast_is_raised():
    def backward(grad, x, weight, mean, inverse):
        flat = mean.squeeze([0, 2, 3]), inverse.squeeze([0, 2, 3])
        return aten.native_batch_norm_backward(grad, x, weight, None, None, *flat, True, 1e-5, [True] * 3)

    shapes = [(4, 3, 5, 6), (4, 3, 5, 6), (3,), (1, 3, 1, 1), (1, 3, 1, 1)]
    tensors = [torch.rand(shape, dtype=F64) for shape in shapes]
    program = make_fx(backward, decomposition_table=inductor())(*tensors)
    result = raised(program)
    assert [e.after for e in result.edits] == [str(GRADIENT)]
    close(result.program(*tensors), program(*tensors), F64)


def test_an_operand_that_is_written_in_the_midst_of_the_chain_is_declined():
    def writes(x, weight, bias, mean, var):
        centered = x - mean.view(3, 1, 1)
        mean.mul_(2)
        return centered * (torch.rsqrt(var + 1e-5) * weight).view(3, 1, 1) + bias.view(3, 1, 1)

    with torch.no_grad():
        program = make_fx(writes, tracing_mode="fake")(*operands())
    (declined,) = RaiseDecomposed()(program).declined
    assert declined.reason == "mean_1 is written by mul_ (aten.mul_.Tensor) in the midst of it"


def test_nested_graphs_are_raised():
    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.bn = nn.BatchNorm2d(3).eval()

        def forward(self, x):
            return torch.cond(x.sum() > 0, lambda x: self.bn(x), lambda x: self.bn(x) * 2, (x,))

    model = Nested().double().eval()
    program = export(model, X).run_decompositions(inductor())
    result = raised(program)
    assert [e.site.partition(".")[0] for e in result.edits] == ["true_graph_0", "false_graph_0"]
    close(result.program.module()(X), model(X), F64)


# What looks like batch norm and is not.


def batch_norm(x, weight, bias, mean, var, **changed):
    """Train batch norm as torch decomposes it, with one thing changed."""
    o = {"dims": [0, 2, 3], "correction": 0, "momentum": 0.1, "kept": 0.9, "factor": 120 / 119, "again": 0.1} | changed
    shape = [1, 3, *[1 if d in o["dims"] else x.shape[d] for d in (2, 3)]]
    spread, average = torch.var_mean(
        x.to(o.get("computed", x.dtype)), o["dims"], correction=o["correction"], keepdim=True
    )
    scale = torch.rsqrt(spread + o.get("eps", 1e-5))
    centered = o.get("input", x) - o.get("subtracted", average)
    out = centered * scale * weight.view(3, 1, 1) + bias.view(3, 1, 1)
    beside = {"spread": spread, "centered": centered, "saved": average * scale}
    if len(o["dims"]) != 3:
        return out, spread.view(shape)
    flat, wide = average.squeeze([0, 2, 3]), spread.squeeze([0, 2, 3])
    new_mean = o["momentum"] * o.get("tracked", flat) + o["kept"] * mean
    new_var = o["again"] * (wide if "biased" in o else wide * o["factor"]) + 0.9 * var
    return out.to(x.dtype), new_mean, new_var, *[beside[n] for n in o.get("also", ())]


def traced(dtype=F64, drop=0, **changed):
    def function(*tensors):
        given = {k: v(*tensors) if callable(v) else v for k, v in changed.items()}
        return batch_norm(*tensors, **given)[: drop if drop else None]

    with torch.no_grad():
        return make_fx(function, tracing_mode="fake")(*operands(dtype))


def frozen(**changed):
    """Eval batch norm as torch decomposes it, with one thing changed."""

    def function(x, weight, bias, mean, var):
        inverse = 1 / torch.sqrt(var + 1e-5)
        centered = x - mean.view(3, 1, 1)
        out = centered * inverse.view(3, 1, 1) * weight.view(3, 1, 1) + bias.view(3, 1, 1)
        return (out, centered) if changed.get("also") else (out * (inverse.view(3, 1, 1) if "again" in changed else 1),)

    with torch.no_grad():
        return make_fx(function, tracing_mode="fake")(*operands())


DECLINED = {
    "reduces over some dimensions of the batch": (
        lambda: traced(dims=[0, 2]),
        r"it reduces over dimensions \[0, 2\], expected \[0, 2, 3\]",
    ),
    "unbiased variance normalises": (lambda: traced(correction=1), "its correction is 1, expected 0"),
    "eps is a tensor": (
        lambda: traced(eps=lambda x, *_: x.new_full([], 1e-5)),
        r"its eps is \w+, not a literal number",
    ),
    "another input is normalised": (
        lambda: traced(input=lambda x, *_: x * 2),
        "it has no var_mean|which batch norm computes",
    ),
    "variance is read": (lambda: traced(also=("spread",)), r"its getitem is read by output"),
    "the input less its mean is read": (lambda: traced(also=("centered",)), r"its sub is read by output"),
    "the mean is kept with another factor": (
        lambda: traced(kept=0.8),
        r"it has no mul\(\w+, 0.9\), which batch norm computes",
    ),
    "the statistics have two momenta": (
        lambda: traced(again=0.2),
        r"it has no mul\(mul_\d, 0.1\), which batch norm computes",
    ),
    "the unbiased factor is of another count": (
        lambda: traced(factor=118 / 117),
        r"it has no mul\(getitem, 1.0084033613445378\)",
    ),
    "the biased variance is tracked": (lambda: traced(factor=1.0), r"it has no mul\(getitem, 1.0084033613445378\)"),
    "the mean that is tracked is another": (
        lambda: traced(tracked=lambda x, *_: x.mean([0, 2, 3])),
        "it updates its running_var alone",
    ),
    "one statistic is tracked": (lambda: traced(drop=2), "it updates its running_mean alone"),
    "the variance that is tracked is biased": (
        lambda: traced(biased=True),
        r"it has no mul\(getitem, 1.0084033613445378\)",
    ),
    "the mean that is subtracted is another": (
        lambda: traced(subtracted=lambda x, *_: x.amax([0, 2, 3], keepdim=True)),
        r"it has no sub\(\w+, getitem_1\)",
    ),
    "computed in double": (lambda: traced(F32, computed=F64), "which batch norm computes"),
}


@pytest.mark.parametrize("name", DECLINED)
def test_what_differs_is_declined_with_a_reason_and_nothing_is_touched(name):
    make, reason = DECLINED[name]
    program = make()
    program.graph.eliminate_dead_code()
    before = fingerprint(program)
    result = RaiseDecomposed()(program)
    assert (result.program is program, fingerprint(program)) == (True, before)
    assert (result.modified, len(result.declined)) == (False, 1)
    assert result.declined[0].form == "elementary operations"
    with pytest.raises(ValueError, match=reason):
        raise ValueError(result.declined[0].reason)


def test_the_unchanged_chain_of_that_table_is_raised():
    assert [e.after for e in raised(traced()).edits] == [str(TRAIN)]
    assert [e.after for e in raised(frozen()).edits] == [str(EVAL)]


def test_saved_statistics_are_read_from_the_raised_call_in_the_shape_they_had():
    program = traced(also=("saved",))
    result = raised(program)
    (call,) = calls(result.program, TRAIN)
    assert sorted(n.args[1] for n in call.users) == [0, 1, 2, 4, 5]
    close(result.program(*operands()), program(*operands()), F64)


def test_the_input_less_its_running_mean_read_elsewhere_is_declined():
    (declined,) = RaiseDecomposed()(frozen(also=True)).declined
    assert declined.reason == "its sub is read by output (output), and batch norm does not return it"


def test_running_statistics_of_eval_may_have_other_readers():
    result = raised(frozen(again=True))
    assert [e.after for e in result.edits] == [str(EVAL)]
    close(result.program(*operands()), frozen(again=True)(*operands()), F64)


def test_mixed_dtypes_that_no_kernel_takes_are_declined():
    class Mixed(nn.Module):
        def forward(self, x, weight, bias, mean, var):
            return batch_norm(x, weight, bias, mean, var)

    tensors = [torch.randn(4, 3, 5, 6), *[torch.rand(3).bfloat16() for _ in range(4)]]
    with torch.no_grad():
        program = make_fx(Mixed(), tracing_mode="fake")(*tensors)
    (declined,) = RaiseDecomposed()(program).declined
    assert declined.reason.startswith("its input is torch.float32, its weight torch.bfloat16, bias torch.bfloat16, ")


def test_other_batch_norms_of_the_same_program_are_still_raised():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.bn = nn.BatchNorm2d(3)

        def forward(self, x):
            spread, average = torch.var_mean(x, [0, 2, 3], correction=1, keepdim=True)
            return self.bn((x - average) * torch.rsqrt(spread + 1e-5))

    result = raised(export(Two().double(), X).run_decompositions(inductor()))
    assert (len(result.edits), [d.reason[:19] for d in result.declined]) == (1, ["its correction is 1"])


class Standardised(nn.Conv2d):
    def forward(self, x):
        spread, average = torch.var_mean(self.weight, [1, 2, 3], correction=0, keepdim=True)
        return self._conv_forward(x, (self.weight - average) * torch.rsqrt(spread + 1e-5), self.bias)


class StandardisedByBatchNorm(nn.Conv2d):
    def forward(self, x):
        flat = self.weight.reshape(1, self.out_channels, -1)
        weight = nn.functional.batch_norm(flat, None, None, training=True).reshape_as(self.weight)
        return self._conv_forward(x, weight, self.bias)


class ByHand(nn.Module):
    def forward(self, x):
        spread, average = torch.var_mean(x, [2, 3], correction=0, keepdim=True)
        return (x - average) * torch.rsqrt(spread + 1e-5)


def masked(x, weight, bias, *_):
    """Statistics of some of the batch, computed from it."""
    mask = (x > 0).to(x.dtype)
    count = mask.sum([0, 2, 3])
    average = (x * mask).sum([0, 2, 3]) / count
    centered = x - average.view(3, 1, 1)
    spread = (centered * centered * mask).sum([0, 2, 3]) / count
    return centered * (torch.rsqrt(spread + 1e-5) * weight).view(3, 1, 1) + bias.view(3, 1, 1)


def of_another(x, weight, bias, mean, var):
    """Statistics of a batch that is not the input's."""
    other = x.relu()
    inverse = torch.rsqrt(other.var([0, 2, 3], correction=0) + 1e-5)
    return (x - other.mean([0, 2, 3]).view(3, 1, 1)) * (inverse * weight).view(3, 1, 1) + bias.view(3, 1, 1)


def predicted(x, weight, bias, mean, var):
    """Statistics that a layer makes, which trains through them."""
    spread = torch.mv(weight.diag(), var)
    return (x - mean.view(3, 1, 1)) * (torch.rsqrt(spread + 1e-5) * weight).view(3, 1, 1) + bias.view(3, 1, 1)


COMPUTED = {
    "of what a mask leaves": (masked, r"its div\w* is computed in the graph, by sum_\d \(aten.sum.dim_IntList\)"),
    "of another batch": (of_another, r"its mean\w* is computed in the graph, by mean\w* \(aten.mean.dim\)"),
    "by a layer": (predicted, r"its mv is computed in the graph, by mv \(aten.mv.default\)"),
}


@pytest.mark.parametrize("name", COMPUTED)
def test_statistics_that_are_computed_are_no_running_statistics(name):
    function, reason = COMPUTED[name]
    with torch.no_grad():
        program = make_fx(function, tracing_mode="fake")(*operands())
    result = RaiseDecomposed()(program)
    assert (result.program is program, len(result.declined)) == (True, 1)
    with pytest.raises(ValueError, match=reason):
        raise ValueError(result.declined[0].reason)


def test_running_statistics_may_be_scaled():
    def scaled(x, weight, bias, mean, var):
        spread, average = (var * 2).to(x.dtype), mean.clone() + 1
        return (x - average.view(3, 1, 1)) * (torch.rsqrt(spread + 1e-5) * weight).view(3, 1, 1) + bias.view(3, 1, 1)

    with torch.no_grad():
        program = make_fx(scaled, tracing_mode="fake")(*operands())
    result = raised(program)
    assert [e.after for e in result.edits] == [str(EVAL)]
    close(result.program(*operands()), program(*operands()), F64)


class Detached(nn.Module):
    """Batch norm by hand; what is named passes no gradient on."""

    def __init__(self, *names):
        super().__init__()
        self.names = names

    def forward(self, x):
        def cut(name, tensor):
            return tensor.detach() if name in self.names else tensor

        x = cut("input", x)
        spread, average = torch.var_mean(cut("statistics' input", x), [0, 2, 3], correction=0, keepdim=True)
        return (x - cut("mean", average)) * torch.rsqrt(cut("variance", spread) + 1e-5)


DETACHED = {
    "the statistics' input": (("statistics' input",), "it has no sub(detach, getitem_1), which batch norm computes"),
    "the mean": (("mean",), "its detach (aten.detach.default) passes no gradient on, and batch norm does"),
    "the variance": (("variance",), "its detach (aten.detach.default) passes no gradient on, and batch norm does"),
}


@pytest.mark.parametrize("name", DETACHED)
def test_a_detach_inside_the_chain_is_not_dropped(name):
    names, reason = DETACHED[name]
    program = export(Detached(*names), X)
    assert len(calls(program, aten.detach.default)) == 1
    assert [d.reason for d in RaiseDecomposed()(program).declined] == [reason]


def test_a_detached_output_stays_detached():
    def function(x, weight, bias, mean, var):
        y = batch_norm(x, weight, bias, mean, var)[0]
        return y, y.detach() * 2

    with torch.no_grad():
        program = make_fx(function, tracing_mode="fake")(*operands())
    result = raised(program)
    (call,) = calls(result.program, TRAIN)
    (detach,) = calls(result.program, aten.detach.default)
    assert detach.args[0].args == (call, 0)
    close(result.program(*operands()), program(*operands()), F64)


def test_batch_norm_of_a_detached_input_stays_of_it():
    program = export(Detached("input"), X)
    result = raised(program)
    assert [e.after for e in result.edits] == [str(TRAIN)]
    assert len(calls(result.program, aten.detach.default)) == 1
    x = X.clone().requires_grad_()
    assert result.program.module()(x).requires_grad is program.module()(x).requires_grad is False


NOT_CANDIDATES = {
    "layer norm": lambda: nn.LayerNorm([5, 6]),
    "layer norm of the last dimension": lambda: nn.LayerNorm(6),
    "group norm": lambda: nn.GroupNorm(3, 3),
    "group norm of one group": lambda: nn.GroupNorm(1, 3),
    "instance norm": lambda: nn.InstanceNorm2d(3, affine=True),
    "instance norm by hand": ByHand,
    "weight standardisation": lambda: Standardised(3, 4, 3),
    "weight standardisation through batch norm": lambda: StandardisedByBatchNorm(3, 4, 3),
    "RMS norm": lambda: nn.RMSNorm(6),
    "softmax of a scaled product": lambda: nn.Softmax(-1),
}


@pytest.mark.parametrize("name", NOT_CANDIDATES)
def test_other_norms_are_no_candidates_at_all(name):
    program = export(NOT_CANDIDATES[name]().double(), X).run_decompositions(inductor())
    result = RaiseDecomposed()(program)
    assert (result.program is program, result.edits, result.declined) == (True, (), ())


def test_a_layer_norm_step_is_no_candidate():
    graphs = captured(nn.LayerNorm(6).double(), torch.randn(4, 6, dtype=F64, requires_grad=True))
    for graph, _ in graphs.values():
        assert RaiseDecomposed()(graph).declined == RaiseDecomposed()(graph).edits == ()


def test_raising_is_the_way_back_from_math():
    program = export(resnet(), X).run_decompositions({})
    there = consolidate(program)
    back = raise_decomposed(legalize(there, "math"))
    assert len(calls(back, TRAIN)) == len(calls(there, TRAIN)) == 5
    close(run(back, X), run(there, X), F64)


def test_snapshot_of_a_train_program():
    program = export(Net(nn.BatchNorm2d(3)), X.float()).run_decompositions(inductor())
    assert_expected_inline(
        render(raised(program).program),
        """\
p_bn_weight: f32[3] = placeholder
p_bn_bias: f32[3] = placeholder
b_bn_running_mean: f32[3] = placeholder
b_bn_running_var: f32[3] = placeholder
b_bn_num_batches_tracked: i64[] = placeholder
input: f32[4, 3, 5, 6] = placeholder
add: i64[] = aten.add.Tensor(b_bn_num_batches_tracked, 1)
_batch_norm_with_update_functional: (f32[4, 3, 5, 6], f32[3], f32[3], u8[0], f32[3], f32[3]) = aten._batch_norm_with_update_functional.default(input, p_bn_weight, p_bn_bias, b_bn_running_mean, b_bn_running_var, 0.1, 1e-05)
add_2: f32[3] = getitem(_batch_norm_with_update_functional, 4)
add_3: f32[3] = getitem(_batch_norm_with_update_functional, 5)
add_4: f32[4, 3, 5, 6] = getitem(_batch_norm_with_update_functional, 0)
mul_7: f32[4, 3, 5, 6] = aten.mul.Tensor(add_4, 2)
return (add_2, add_3, add, mul_7)
add_2 -> BUFFER_MUTATION bn.running_mean
add_3 -> BUFFER_MUTATION bn.running_var
add -> BUFFER_MUTATION bn.num_batches_tracked""",
    )


def test_snapshot_of_a_joint_graph():
    model = Net(nn.BatchNorm2d(3, affine=False, track_running_stats=False))
    graph, _ = captured(model, X.float().requires_grad_())["joint"]
    assert_expected_inline(
        render(raised(graph).program),
        """\
primals_1: f32[4, 3, 5, 6] = placeholder
tangents_1: f32[4, 3, 5, 6] = placeholder
new_ones_1: f32[3] = aten.new_ones.default(primals_1, [3])
new_zeros: f32[3] = aten.new_zeros.default(primals_1, [3])
new_zeros_1: f32[3] = aten.new_zeros.default(primals_1, [3])
new_ones_2: f32[3] = aten.new_ones.default(primals_1, [3])
_batch_norm_with_update_functional: (f32[4, 3, 5, 6], f32[3], f32[3], u8[0], f32[3], f32[3]) = aten._batch_norm_with_update_functional.default(primals_1, new_ones_1, new_zeros, new_zeros_1, new_ones_2, 0.1, 1e-05)
getitem_2: u8[0] = getitem(_batch_norm_with_update_functional, 3)
mul: f32[4, 3, 5, 6] = getitem(_batch_norm_with_update_functional, 0)
squeeze: f32[3] = getitem(_batch_norm_with_update_functional, 1)
squeeze_1: f32[3] = getitem(_batch_norm_with_update_functional, 2)
mul_1: f32[4, 3, 5, 6] = aten.mul.Tensor(mul, 2)
mul_2: f32[4, 3, 5, 6] = aten.mul.Tensor(tangents_1, 2)
new_ones: f32[3] = aten.new_ones.default(squeeze_1, [3])
batch_norm_backward: (f32[4, 3, 5, 6], NoneType, NoneType) = aten.batch_norm_backward.default(mul_2, primals_1, new_ones, None, None, squeeze, squeeze_1, True, 1e-05, [True, False, False], getitem_2)
mul_10: f32[4, 3, 5, 6] = getitem(batch_norm_backward, 0)
return [mul_1, mul_10]""",
    )
