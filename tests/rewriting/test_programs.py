"""Exported programs of both dialects and plain graph modules: the same numbers, state, gradients and metadata after."""

import copy
import operator

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.infra.pass_manager import PassManager

import torch_batchnorm as tbn
from programs import (
    Op,
    aten,
    call_graph,
    claim_aten,
    consolidated,
    export,
    legacy_left,
    native,
    same,
    saved_and_loaded,
    state_of,
    step,
)
from torch_batchnorm.decomps.forms import BY_TARGET


class BiasOnly(nn.BatchNorm2d):
    """A batch norm whose weight alone is missing."""

    def __init__(self, channels):
        super().__init__(channels)
        self.weight = None


class Diamond(nn.Module):
    """Two batch norms of one convolution, added, and a third one of their sum."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3)
        self.left, self.right, self.last = nn.BatchNorm2d(3), nn.BatchNorm2d(3, affine=False), BiasOnly(3)

    def forward(self, input):
        y = self.conv(input)
        return self.last(self.left(y) + self.right(y).relu())


class Inside(nn.Module):
    """Batch norm inside batch norm: the weight of the outer one is what an inner one returns."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.BatchNorm1d(3), nn.BatchNorm2d(3)

    def forward(self, x):
        weight = self.inner(x.mean((2, 3))).mean(0)
        return nn.functional.batch_norm(self.outer(x), None, None, weight, training=True)


class Twice(nn.Module):
    """One batch norm called twice."""

    def __init__(self):
        super().__init__()
        self.bn = nn.BatchNorm2d(3)

    def forward(self, x):
        return self.bn(self.bn(x).relu())


X = torch.randn(4, 3, 6, 6)
MODULES = {
    "2-D input": (lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), torch.randn(5, 3)),
    "3-D input": (lambda: nn.Sequential(nn.Conv1d(3, 3, 2), nn.BatchNorm1d(3)), torch.randn(4, 3, 6)),
    "4-D input": (lambda: nn.Sequential(nn.Conv2d(3, 3, 2), nn.BatchNorm2d(3), nn.ReLU()), X),
    "5-D input": (lambda: nn.Sequential(nn.Conv3d(3, 3, 2), nn.BatchNorm3d(3)), torch.randn(2, 3, 4, 4, 4)),
    "affine off": (lambda: nn.Sequential(nn.Conv2d(3, 3, 2), nn.BatchNorm2d(3, affine=False)), X),
    "weight missing": (lambda: nn.Sequential(nn.Conv2d(3, 3, 2), BiasOnly(3)), X),
    "statistics off": (lambda: nn.Sequential(nn.Conv2d(3, 3, 2), nn.BatchNorm2d(3, track_running_stats=False)), X),
    "all off": (
        lambda: nn.Sequential(nn.Conv2d(3, 3, 2), nn.BatchNorm2d(3, affine=False, track_running_stats=False)),
        X,
    ),
    "double": (lambda: nn.Sequential(nn.Conv2d(3, 3, 2), nn.BatchNorm2d(3)).double(), X.double()),
    "bf16 input, f32 statistics": (lambda: nn.BatchNorm2d(3), X.bfloat16()),
    "bf16 input, nothing else": (lambda: nn.BatchNorm2d(3, affine=False, track_running_stats=False), X.bfloat16()),
    "channels_last input": (lambda: nn.BatchNorm2d(3), X.contiguous(memory_format=torch.channels_last)),
    "chain": (lambda: nn.Sequential(nn.BatchNorm2d(3), nn.BatchNorm2d(3, affine=False), nn.BatchNorm2d(3)), X),
    "diamond": (Diamond, X),
    "batch norm inside batch norm": (Inside, X),
    "one module called twice": (Twice, X),
    "eps and momentum of its own": (lambda: nn.BatchNorm2d(3, eps=1e-3, momentum=0.03), X),
    "one frozen in a train program": (lambda: nn.Sequential(nn.BatchNorm2d(3), nn.BatchNorm2d(3).eval()), X),
}


def _built(name, training):
    torch.manual_seed(0)
    make, x = MODULES[name]
    module = make()
    for bn in module.modules():
        if isinstance(bn, nn.modules.batchnorm._BatchNorm) and bn.running_var is not None:
            bn.running_mean.normal_()
            bn.running_var.uniform_(0.5, 1.5)
    return (module if training else module.eval()), x


@pytest.mark.parametrize("training", [True, False], ids=("train", "eval"))
@pytest.mark.parametrize("name", MODULES)
def test_training_ir_program_equals_the_original_and_the_eager_module(name, training):
    module, x = _built(name, training)
    program = export(module, x)
    result = consolidated(program)
    assert (len(result.edits), result.declined) == (len(legacy_left(program)), ())
    found = step(result.program.module(), x)
    assert same(found, step(program.module(), x))
    assert same(found[0], step(module, x)[0])
    assert same(step(saved_and_loaded(result.program).module(), x), found)


@pytest.mark.parametrize("table", [None, {}], ids=("default table", "empty table"))
@pytest.mark.parametrize("training", [True, False], ids=("train", "eval"))
@pytest.mark.parametrize("name", MODULES)
def test_aten_program_equals_the_original(name, training, table):
    module, x = _built(name, training)
    program = export(module, x).run_decompositions(table)
    result = consolidated(program)
    assert (len(result.edits), result.declined) == (len(legacy_left(program)), ())
    assert mutations(result.program) == mutations(program)
    for found in (result.program, saved_and_loaded(result.program)):
        with torch.no_grad():  # a decomposed train program cannot be differentiated, consolidated or not
            assert same(step(found.module(), x), step(program.module(), x))


FLAGS = (True, 0.1, 1e-5)  # training, momentum, eps


def mutations(program):
    return [(s.kind.name, s.target) for s in program.graph_signature.output_specs]


HIDING = {
    "native_batch_norm": native,
    "batch_norm": lambda *tensors: aten.batch_norm.default(*tensors, *FLAGS, False),
    "_batch_norm_impl_index": lambda *tensors: aten._batch_norm_impl_index.default(*tensors, *FLAGS, False)[0],
    "cudnn_batch_norm": lambda *tensors: aten.cudnn_batch_norm.default(*tensors, *FLAGS)[0],
    "miopen_batch_norm": lambda *tensors: aten.miopen_batch_norm.default(*tensors, *FLAGS)[0],
}


@pytest.mark.parametrize("calls", [1, 2, 3])
@pytest.mark.parametrize("name", HIDING)
def test_a_write_that_the_schema_hides_survives_in_both_dialects(name, calls):
    torch.manual_seed(0)
    module, x = Op(HIDING[name], calls=calls), torch.randn(4, 3)
    program = export(module, x)
    module.function = native  # what every one of them computes, on a device that has no cuDNN and no MIOpen
    eager = step(module, x)
    assert same(step(consolidated(program).program.module(), x), eager)
    functional = consolidated(claim_aten(program))
    assert mutations(functional.program)[:2] == [
        ("BUFFER_MUTATION", "running_mean"),
        ("BUFFER_MUTATION", "running_var"),
    ]
    with torch.no_grad():
        for found in (functional.program, saved_and_loaded(functional.program)):
            assert same(step(found.module(), x)[:2], eager[:2])


@pytest.mark.parametrize("onto", ["the listed value", "the input"])
def test_a_hidden_write_beside_a_listed_mutation_leaves_the_signature_right(onto):
    torch.manual_seed(0)
    module, x = Op(native, calls=2), torch.randn(4, 3)
    program = export(module, x).run_decompositions()
    first, second = (n for n in program.graph.nodes if "batch_norm" in str(n.target))
    held = {(n.args[0], n.args[1]): n for n in program.graph.nodes if n.target is operator.getitem}
    for index in (3, 4):  # the second call writes behind its schema, and its first value is what is listed
        held[second, index].replace_all_uses_with(held[first, index])
        program.graph.erase_node(held[second, index])
    second.target = aten.native_batch_norm.default
    if onto == "the input":
        second.args = (*second.args[:3], *first.args[3:5], *second.args[5:])
    for spec, index in zip(program.graph_signature.output_specs, (3, 4), strict=False):
        spec.arg.name = held[first, index].name
    program.graph_module.recompile()
    with torch.no_grad():
        expected = step(program.module(), x)[:2]
        assert (onto == "the input") is not same(expected, step(module, x)[:2])
        assert same(step(consolidated(program).program.module(), x)[:2], expected)
    assert mutations(consolidated(program).program) == mutations(program)


BATCH = {0: Dim("n", min=2)}


@pytest.mark.parametrize("dims", [BATCH, BATCH | {2: Dim("h", min=4), 3: Dim("w", min=4)}], ids=("batch", "and size"))
@pytest.mark.parametrize("affine", [True, False], ids=("affine", "affine off"))
def test_dynamic_shapes_stay_dynamic(dims, affine):
    module = nn.Sequential(nn.Conv2d(3, 3, 2), nn.BatchNorm2d(3, affine=affine))
    program = export(module, X, dynamic=(dims,))
    for original in (program, program.run_decompositions()):
        found = saved_and_loaded(consolidated(original).program)
        assert found.range_constraints.keys() == original.range_constraints.keys()
        for x in (torch.randn(7, 3, 6, 6), torch.randn(2, 3, 6, 6)):
            with torch.no_grad():
                assert same(step(found.module(), x), step(original.module(), x))


def test_dynamic_channels_are_filled_in_by_size():
    class Plain(nn.Module):
        def forward(self, x):
            return nn.functional.batch_norm(x, None, None, training=True)

    program = export(Plain(), X, dynamic=({1: Dim("c", min=2)},))
    found = consolidated(program).program
    for x in (torch.randn(4, 5, 6, 6), torch.randn(4, 9, 6, 6)):
        assert same(step(found.module(), x), step(program.module(), x))


def _joint(x, w, b, m, v):
    out, mean, invstd = aten._native_batch_norm_legit.default(x, w, b, m, v, True, 0.1, 1e-5)
    grads = aten.native_batch_norm_backward.default(out, x, w, m, v, mean, invstd, True, 1e-5, [True, True, True])
    return (out, *grads)


@pytest.mark.parametrize("pre_dispatch", [False, True], ids=("make_fx", "make_fx pre-dispatch"))
@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_traced_graph_module_with_its_backward(mode, pre_dispatch):
    inputs = [torch.randn(4, 3), torch.rand(3), torch.randn(3), torch.zeros(3), torch.ones(3)]
    graph = make_fx(_joint, tracing_mode=mode, pre_dispatch=pre_dispatch)(*map(torch.clone, inputs))
    result = consolidated(graph)
    assert [e.after for e in result.edits] == [
        "aten.batch_norm_backward.default",
        "aten._batch_norm_with_update.default",
    ]
    runs = [(list(map(torch.clone, inputs)), g) for g in (graph, result.program)]
    assert same([g(*i) for i, g in runs], [runs[0][1](*map(torch.clone, inputs))] * 2)
    assert same(runs[0][0], runs[1][0])


def test_unlifted_module_keeps_state_and_refusals():
    module = export(nn.Sequential(nn.Conv2d(3, 3, 2), nn.BatchNorm2d(3)), X).module()
    found = consolidated(module).program
    assert same(step(found, X), step(module, X))
    assert all(a is b for a, b in zip(found.parameters(), module.parameters(), strict=True))
    with pytest.raises(NotImplementedError, match="eval"):
        found.eval()
    assert found.eval.__self__ is found


class Lock:
    """Something that cannot be copied."""

    def __deepcopy__(self, memo):
        raise TypeError("cannot copy a lock")


def _with_everything():
    """A graph module with all the state that a module can have beside its graph."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    root = nn.Module()
    root.weight, root.leaf, root.plain = nn.Parameter(torch.rand(3)), nn.Linear(3, 3), torch.rand(3)
    root.register_buffer("mean", torch.zeros(3))
    root.register_buffer("var", torch.ones(3), persistent=False)
    y = graph.call_module("leaf", (x,))
    weight, bias, mean, var = (graph.create_node("get_attr", name) for name in ("weight", "plain", "mean", "var"))
    graph.output(graph.call_function(aten.batch_norm.default, (y, weight, bias, mean, var, True, 0.1, 1e-5, False)))
    module = torch.fx.GraphModule(root, graph, class_name="Named")
    module.register_buffer("var", module.var, persistent=False)
    module.tied, module.lock, module.cache = module.weight, Lock(), [module.weight * 2]
    module.register_parameter("nothing", None)
    module.unused = nn.Linear(2, 2)
    module.meta["lock"] = module.lock
    module.seen = []
    module.register_forward_hook(lambda m, args, result: m.seen.append(type(m).__name__))
    return module.eval()


def test_a_copy_of_a_graph_module_has_everything_that_the_original_has():
    module = _with_everything()
    found = consolidated(module).program
    assert list(found.state_dict()) == list(module.state_dict())
    assert [n for n, _ in found.named_parameters(remove_duplicate=False)] == [
        n for n, _ in module.named_parameters(remove_duplicate=False)
    ]
    assert all(found.state_dict(keep_vars=True)[k] is v for k, v in module.state_dict(keep_vars=True).items())
    assert (found.lock, found.leaf, found.nothing, found.training) == (module.lock, module.leaf, None, False)
    assert (found.plain is module.plain, found.cache[0] is module.cache[0], found.meta == module.meta) == (True,) * 3
    assert same(step(found, X[:, :, 0, 0]), step(module, X[:, :, 0, 0]))
    assert (found.seen, module.seen) == (["Named"], ["Named"])  # the hook ran, each on its own module
    found.register_buffer("new", torch.zeros(1))
    found.meta["new"] = 1
    assert ("new" in module.state_dict(), "new" in module.meta) == (False, False)
    assert "batch_norm.default" in module.code


def test_aotautograd_graphs():
    from functorch.compile import aot_module

    seen = []

    def compiler(graph, _):
        seen.append((graph, consolidated(graph)))
        return seen[-1][1].program

    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 3, 2), nn.BatchNorm2d(3))
    compiled = aot_module(copy.deepcopy(module), fw_compiler=compiler, bw_compiler=lambda graph, _: graph)
    assert same(compiled(X), module(X))
    (_, forward), *_ = seen
    assert [e.after for e in forward.edits] == ["aten._batch_norm_with_update_functional.default"]


def test_metadata_names_and_outputs_are_kept():
    program = export(_built("chain", True)[0], X)
    found = consolidated(program).program
    names = [n.name for n in found.graph.nodes]
    assert [n.name for n in program.graph.nodes if n.name not in names] == []
    for old in program.graph.nodes:
        new = next(n for n in found.graph.nodes if n.name == old.name)
        assert {k: new.meta[k] for k in old.meta if k not in ("val", "tensor_meta")} == {
            k: v for k, v in old.meta.items() if k not in ("val", "tensor_meta")
        }
    calls = [n for n in found.graph.nodes if "batch_norm" in str(n.target)]
    assert all({"nn_module_stack", "stack_trace", "val"} <= n.meta.keys() for n in calls)
    assert [c.name for c in calls] == [
        "_batch_norm_with_update",
        "_batch_norm_with_update_1",
        "_batch_norm_with_update_2",
    ]


@pytest.mark.parametrize("training", [True, False], ids=("train", "eval"))
@pytest.mark.parametrize("name", MODULES)
def test_the_val_of_every_node_is_what_it_computes(name, training):
    class Checked(torch.fx.Interpreter):
        def run_node(self, node):
            result = super().run_node(node)
            for val, value in zip(*map(torch.utils._pytree.tree_leaves, (node.meta.get("val"), result)), strict=True):
                if node.op == "call_function" and isinstance(value, torch.Tensor):
                    assert (val.shape, val.dtype, val.device) == (value.shape, value.dtype, value.device), node
            return result

    module, x = _built(name, training)
    program = consolidated(export(module, x)).program
    with torch.no_grad():
        Checked(program.graph_module).run(*program._graph_module_flat_inputs((x,), {}))


def test_a_program_for_cuda_is_consolidated_where_there_is_none():
    with FakeTensorMode():
        x, c = torch.empty(2, 3, 4, 4, device="cuda", dtype=torch.bfloat16), torch.empty(3, device="cuda")
    for training in (True, False):
        graph = call_graph(BY_TARGET[aten.batch_norm.default][0], training, absent=("weight",))
        for node in graph.graph.nodes:
            node.meta["val"] = x if node.target == "input" or node.op == "call_function" else c
        (call,) = (n for n in consolidated(graph).program.graph.nodes if "batch_norm" in str(n.target))
        assert [(v.device.type, tuple(v.shape)) for v in call.meta["val"][1:3]] == [("cuda", (3,))] * 2
        assert call.args[1].meta["val"].dtype == torch.float32  # which cuDNN asks for beside a half input


def test_what_was_filled_in_is_remembered_through_saving_and_retracing():
    program = consolidated(export(_built("all off", True)[0], X)).program
    filled = ["weight", "bias", "running_mean", "running_var"]
    for kept in (program, saved_and_loaded(program), program.run_decompositions()):
        (entry,) = tbn.inspect(kept).entries
        assert (entry.affine, entry.stats) == ("none", "batch")
        (node,) = (n for n in kept.graph.nodes if "batch_norm" in str(n.target))
        noted = {"format": 1, "form": "aten.batch_norm.default", "filled": filled}
        assert node.meta["custom"]["torch_batchnorm"] == noted


def test_a_note_of_what_was_filled_in_is_not_taken_for_a_weight_that_is_there():
    program = consolidated(export(nn.BatchNorm1d(3, affine=False), torch.randn(4, 3))).program

    def doubled(x, w, b, m, v, momentum, eps):
        out = aten._native_batch_norm_legit_functional.default(x, w * 2, b, m, v, True, momentum, eps)
        return (*out[:3], x.new_empty(0, dtype=torch.uint8), *out[3:])

    table = {aten._batch_norm_with_update_functional.default: doubled}
    decomposed, x = program.run_decompositions(table), torch.randn(4, 3)
    assert "torch_batchnorm" in str([n.meta.get("custom") for n in decomposed.graph.nodes])
    with torch.no_grad():
        assert same(step(consolidated(decomposed).program.module(), x), step(decomposed.module(), x))
    (node,) = (n for n in program.graph.nodes if "batch_norm" in str(n.target))
    node.args = (node.args[0], node.args[2], *node.args[2:])  # a weight of zeros, where one of ones was filled in
    assert tbn.inspect(program).entries[0].affine == "weight"


def test_in_place_edits_the_given_program_and_returns_it():
    for program in (export(Twice(), X), export(Twice(), X).run_decompositions(), export(Twice(), X).module()):
        expected = consolidated(program).program
        result = tbn.Consolidate(inplace=True)(program)
        assert result.program is program
        assert (result.modified, legacy_left(program)) == (True, [])
        assert tbn.render(program) == tbn.render(expected)


def test_a_program_with_nothing_to_do_is_returned_as_it_is():
    program = export(nn.ReLU(), X)
    assert tbn.consolidate(program) is program
    assert tbn.Consolidate()(program) == tbn.Result(program)


def test_the_pass_drops_into_a_pass_manager():
    graph = export(Twice(), X).module()
    result = PassManager([tbn.Consolidate()])(graph)
    assert (result.modified, legacy_left(result.graph_module)) == (True, [])


def test_a_consolidated_program_can_be_decomposed_again():
    module, x = _built("diamond", True)
    program = export(module, x)
    decomposed = consolidated(program).program.run_decompositions()
    assert legacy_left(decomposed) == []
    with torch.no_grad():
        assert same(step(decomposed.module(), x), step(program.module(), x))


def test_something_else_is_refused_by_name():
    with pytest.raises(tbn.InvalidProgram, match=r"found a torch\..*ReLU, expected an ExportedProgram"):
        tbn.consolidate(nn.ReLU())


def test_training_follows_the_eager_model_step_by_step():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 2), BiasOnly(2))
    found = tbn.consolidate(export(copy.deepcopy(model), X)).module()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, found)]
    for _ in range(5):
        batch, losses = torch.randn_like(X), []
        for m, optimizer in zip((model, found), optimizers, strict=True):
            optimizer.zero_grad()
            losses.append(m(batch).pow(3).mean())
            losses[-1].backward()
            optimizer.step()
        assert same(*losses)
        assert same(state_of(model), state_of(found))
