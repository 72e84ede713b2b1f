"""Batch norms inside nested graphs: autocast, grad modes, checkpoint, cond, regions, and modules that hold a graph."""

import pytest
import torch
from torch import nn
from torch.fx import Graph, GraphModule

import torch_batchnorm as tbn
from programs import consolidated, export, legacy_left, same, saved_and_loaded, step

X = torch.randn(4, 3, 5, 5)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 3, 2), nn.BatchNorm2d(3)


class Autocast(Net):
    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.bn(self.conv(x)) + 1


class NoGrad(Net):
    def forward(self, x):
        with torch.no_grad():
            y = self.bn(x)
        return self.conv(y)


class GradInNoGrad(Net):
    def forward(self, x):
        y = self.conv(x)
        with torch.no_grad():
            z = self.bn(y)
            with torch.enable_grad():
                y = self.bn(y + z)
            z = z + 1  # torch cannot load a program whose last block under no_grad is empty
        return y + z


class AutocastInNoGrad(Net):
    def forward(self, x):
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.bn(self.conv(x))
        return self.bn(y.float())


class Cond(Net):
    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda y: self.bn(y) + 1, lambda y: self.bn(y * 2), (self.conv(x),))


@pytest.mark.parametrize("training", [True, False], ids=("train", "eval"))
@pytest.mark.parametrize("module", [Autocast, NoGrad, GradInNoGrad, AutocastInNoGrad])
def test_context_in_training_ir(module, training):
    program = export(module().train(training), X)
    result = consolidated(program)
    assert (len(result.edits), result.declined, legacy_left(result.program)) == (len(legacy_left(program)), (), [])
    assert any("." in e.site for e in result.edits)
    found = step(result.program.module(), X)
    assert same(found, step(program.module(), X))
    assert same(step(saved_and_loaded(result.program).module(), X), found)


@pytest.mark.parametrize("decomposed", [False, True], ids=("training IR", "ATEN"))
def test_cond_in_eval(decomposed):
    program = export(Cond().eval(), X)
    program = program.run_decompositions() if decomposed else program
    result = consolidated(program)
    assert (len(result.edits), result.declined) == (len(legacy_left(program)), ())
    assert any("." in e.site for e in result.edits)
    with torch.no_grad():
        for x in (X.abs(), -X.abs()):
            for found in (result.program, saved_and_loaded(result.program)):
                assert same(found.module()(x), program.module()(x))


def _block(training):
    """A graph of its own that normalises its first argument."""
    graph = Graph()
    tensors = [graph.placeholder(name) for name in ("x", "w", "b", "m", "v")]
    graph.output((graph.call_function(torch.ops.aten.batch_norm.default, (*tensors, training, 0.1, 1e-5, False)),))
    return GraphModule({}, graph)


def _caller(call, training):
    """A graph module whose graph reaches a nested one, `block`, by `call(graph, tensors)`."""
    graph = Graph()
    tensors = [graph.placeholder(name) for name in ("x", "w", "b", "m", "v")]
    graph.output(call(graph, tensors))
    return GraphModule({"block": _block(training)}, graph)


CALLS = {
    "activation checkpoint": lambda graph, tensors: graph.call_function(
        torch.ops.higher_order.tag_activation_checkpoint, (graph.get_attr("block"), *tensors), {"use_reentrant": False}
    ),
    "invoke_subgraph": lambda graph, tensors: graph.call_function(
        torch.ops.higher_order.invoke_subgraph, (graph.get_attr("block"), "block", *tensors)
    ),
    "call_module": lambda graph, tensors: graph.call_module("block", tuple(tensors)),
}


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")  # the hand-built callers, before their module
@pytest.mark.parametrize("training", [True, False], ids=("train", "eval"))
@pytest.mark.parametrize("name", CALLS)
def test_hand_built_call_of_a_nested_graph(name, training):
    caller = _caller(CALLS[name], training)
    result = consolidated(caller)
    family = "aten._batch_norm_with_update.default" if training else "aten._batch_norm_no_update.default"
    assert [(e.site, e.after) for e in result.edits] == [("block.batch_norm_default", family)]
    plain = name == "invoke_subgraph"  # which torch neither differentiates outside a trace nor lets write
    if plain and training:
        return

    def run(module):
        torch.manual_seed(0)
        tensors = [torch.randn(4, 3), torch.rand(3), torch.randn(3), torch.randn(3), torch.rand(3)]
        leaves = [t.requires_grad_(not plain) for t in tensors[:3]]
        output = module(*tensors)[0]
        if not plain:
            output.pow(3).sum().backward()
        return output, tensors, [t.grad for t in leaves]

    assert same(run(result.program), run(caller))


def test_state_of_a_nested_site_is_found_by_its_name_outside():
    (entry,) = tbn.inspect(export(Autocast(), X)).entries
    assert (entry.graph, entry.module, entry.weight, entry.running_var) == (
        "submod_1",
        "bn",
        "bn.weight",
        "bn.running_var",
    )
    assert entry.counter == "bn.num_batches_tracked"


def test_a_copy_leaves_the_nested_graphs_of_the_input_alone():
    program = export(Autocast(), X)
    found = tbn.consolidate(program)
    assert len(legacy_left(program)) == 1
    assert all(found.graph_module.submod_1 is not m for m in program.graph_module.modules())
