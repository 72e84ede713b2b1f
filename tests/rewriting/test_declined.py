"""What cannot be rewritten exactly is left alone, with a reason: one row a reason."""

import operator

import pytest
import torch
from torch import nn
from torch.fx import Graph, GraphModule

from programs import Op, aten, call_graph, claim_aten, consolidated, export, fingerprint, native, writes_to_a_view
from torch_batchnorm import Consolidate, inspect
from torch_batchnorm.decomps.forms import BY_TARGET

IMPL_INDEX = BY_TARGET[aten._batch_norm_impl_index.default][0]
COMPOSITE = BY_TARGET[aten.batch_norm.default][0]
CUDNN = BY_TARGET[aten.cudnn_batch_norm.default][0]
NO_STATS = BY_TARGET[aten._native_batch_norm_legit.no_stats][0]
NATIVE = BY_TARGET[aten.native_batch_norm.default][0]
NATIVE_OUT = BY_TARGET[aten.native_batch_norm.out][0]


def _with(field):
    """A `batch_norm` whose `training` or `eps` is an input of the graph."""
    graph = call_graph(COMPOSITE, True)
    (node,) = graph.graph.find_nodes(op="call_function", target=aten.batch_norm.default)
    args = list(node.args)
    with graph.graph.inserting_before(node):
        args[COMPOSITE.arguments.index(field)] = graph.graph.placeholder("given")
    node.args = tuple(args)
    return graph


def _missing_argument():
    graph = call_graph(NATIVE, True)
    (node,) = graph.graph.find_nodes(op="call_function", target=aten.native_batch_norm.default)
    node.args = node.args[:-1]
    return graph


def _reads_impl_index():
    graph = call_graph(IMPL_INDEX, True, unread={"reserve"})
    (node,) = graph.graph.find_nodes(op="call_function", target=IMPL_INDEX.overload)
    (output,) = graph.graph.find_nodes(op="output")
    with graph.graph.inserting_before(output):
        index = graph.graph.call_function(operator.getitem, (node, 4))
    output.args = ((*output.args[0], index),)
    return graph


def _returns_the_tuple():
    graph = call_graph(NATIVE, True)
    (node,) = graph.graph.find_nodes(op="call_function", target=aten.native_batch_norm.default)
    (output,) = graph.graph.find_nodes(op="output")
    output.args = ((*output.args[0], node),)
    return graph


def _rank_one():
    graph = call_graph(COMPOSITE, True)
    graph.graph.find_nodes(op="placeholder")[0].meta["val"] = torch.empty(3)
    return graph


def _nested():
    class NoGrad(Op):
        def forward(self, x):
            with torch.no_grad():
                y = super().forward(x)[0]
            return y + 1

    return claim_aten(export(NoGrad(native), torch.randn(4, 3)))


def _on_constants():
    class Constant(nn.Module):
        def __init__(self):
            super().__init__()
            self.mean, self.var = torch.zeros(3), torch.ones(3)

        def forward(self, x):
            return native(x, None, None, self.mean, self.var)

    return claim_aten(export(Constant(), torch.randn(4, 3)))


def _hidden(call):
    """A functional program that calls `native_batch_norm` on what `call(module, x)` makes of its buffers."""

    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.rand(3)), nn.Parameter(torch.rand(3))
            mean, var = torch.zeros(3), torch.ones(3)
            for name, made in {"mean": mean, "var": var, "pair": torch.stack([mean, var]), "piece": mean[:2]}.items():
                self.register_buffer(name, made)

        def forward(self, x):
            return call(self, x)

    return claim_aten(export(Hidden(), torch.randn(4, 3)))


def _empty_batch():
    graph = call_graph(COMPOSITE, True)
    graph.graph.find_nodes(op="placeholder")[0].meta["val"] = torch.empty(0, 3, 4, 4)
    return graph


def _short_variance():
    graph = call_graph(COMPOSITE, False)
    values = {"input": torch.empty(2, 3), "running_var": torch.empty(2)}
    for node in graph.graph.find_nodes(op="placeholder"):
        if node.target in values:
            node.meta["val"] = values[node.target]
    return graph


def _out_in_a_functional_program():
    def into(x, w, b, m, v):
        new = {"out": torch.empty_like(x), "save_mean": torch.empty_like(m), "save_invstd": torch.empty_like(v)}
        return aten.native_batch_norm.out(x, w.detach(), b.detach(), m, v, True, 0.1, 1e-5, **new)[0]

    program = export(Op(into), torch.randn(4, 3))
    program._verifiers = claim_aten(export(nn.ReLU(), torch.randn(2))).verifiers
    return program


DECLINED = {
    "training is not a literal": (lambda: _with("training"), "training is the value of node given, not a literal"),
    "eps is not a literal": (lambda: _with("eps"), "eps is the value of node given, not a literal number"),
    "an argument is missing": (_missing_argument, "argument eps is missing from the call"),
    "running_var alone": (
        lambda: call_graph(NATIVE, True, absent=("running_mean",)),
        "running_mean is None and running_var is the value of node running_var: pass both or neither",
    ),
    "running_mean alone": (
        lambda: call_graph(NATIVE, True, absent=("running_var",)),
        "running_var is None and running_mean is the value of node running_mean: pass both or neither",
    ),
    "eval without statistics": (
        lambda: call_graph(COMPOSITE, False, absent=("running_mean", "running_var")),
        "eval without running_mean, running_var is undefined",
    ),
    "no_stats in eval": (lambda: call_graph(NO_STATS, False), "eval without running_mean, running_var is undefined"),
    "input of rank 1": (_rank_one, r"its input is of rank 1, expected \[N, C, \*\]"),
    "impl_index in use": (_reads_impl_index, "its impl_index is in use"),
    "the tuple is returned whole": (_returns_the_tuple, "its outputs are read by output"),
    "the reserve is read by something else": (lambda: call_graph(CUDNN, True), "its reserve is read by output"),
    "saved statistics of an eval out= call": (
        lambda: call_graph(NATIVE_OUT, False, shape=(2, 3)),
        "its saved statistics are read back from an out argument",
    ),
    "out= to be resized in eval": (
        lambda: call_graph(NATIVE_OUT, False, unread={"save_mean", "save_invstd"}),
        "its out argument may be resized",
    ),
    "hidden write to a view": (
        writes_to_a_view,
        r"it writes to slice_\d, whose memory slice_\d .aten.slice.Tensor. may share",
    ),
    "hidden write to unbound buffers": (
        lambda: _hidden(lambda m, x: native(x, None, None, *m.pair.unbind(0))),
        r"it writes to getitem, whose memory getitem \(.*\) may share",
    ),
    "hidden write to what an op may return as it is": (
        lambda: _hidden(lambda m, x: native(x, None, None, m.mean.type_as(x), m.var)),
        r"it writes to type_as, whose memory type_as \(aten.type_as.default\) may share",
    ),
    "hidden write to what is also the bias": (
        lambda: _hidden(lambda m, x: native(x, m.weight, m.mean, m.mean, m.var)),
        "it writes to b_mean, which is another of its arguments too",
    ),
    "hidden write to one tensor as both statistics": (
        lambda: _hidden(lambda m, x: native(x, m.weight, m.bias, m.var, m.var)),
        "it writes to b_var, which is another of its arguments too",
    ),
    "hidden write to memory that another input shares": (
        lambda: _hidden(lambda m, x: (native(x, m.weight, m.bias, m.mean, m.var), m.piece + 1)),
        "it writes to b_mean, whose memory b_piece shares",
    ),
    "empty batch in training": (_empty_batch, "its batch is empty, which the family refuses in training"),
    "running_var too short": (_short_variance, "running_var has 2 elements, expected 3, one for each channel"),
    "hidden write in a nested graph": (_nested, "inside nested graph submod_1, which cannot hand the new value out"),
    "hidden write to a constant": (_on_constants, "it writes to c_mean, a CONSTANT_TENSOR, whose mutation"),
    "out= in a functional program": (_out_in_a_functional_program, "which a functional program does not allow"),
}


@pytest.mark.parametrize("name", DECLINED)
def test_site_is_declined_with_a_reason_and_nothing_is_touched(name):
    make, reason = DECLINED[name]
    program = make()
    before = fingerprint(program)
    result = Consolidate()(program)
    assert result.program is program
    assert fingerprint(program) == before
    assert (result.modified, len(result.declined)) == (False, 1)
    with pytest.raises(ValueError, match=reason):
        raise ValueError(result.declined[0].reason)


@pytest.mark.parametrize("name", ["training is not a literal", "running_mean alone", "an argument is missing"])
def test_an_unreadable_site_is_reported_as_such(name):
    make, reason = DECLINED[name]
    (entry,) = inspect(make()).entries
    assert reason in entry.problem
    assert "unreadable" in str(inspect(make()))


def test_other_sites_of_the_same_program_are_still_rewritten():
    graph = Graph()
    tensors = [graph.placeholder(name) for name in ("x", "w", "b", "m", "v", "flag")]
    first = graph.call_function(aten.batch_norm.default, (*tensors, 0.1, 1e-5, False))
    graph.output(graph.call_function(aten.batch_norm.default, (first, *tensors[1:5], True, 0.1, 1e-5, False)))
    result = consolidated(GraphModule({}, graph))
    assert ([d.site for d in result.declined], [e.site for e in result.edits]) == (
        ["batch_norm_default"],
        ["batch_norm_default_1"],
    )
