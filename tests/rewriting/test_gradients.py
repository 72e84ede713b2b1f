"""The gradient rows: each becomes the family's, with the same numbers, masks, missing weights and reserve."""

import operator

import pytest
import torch
from expecttest import assert_expected_inline
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import torch_batchnorm as tbn
from programs import consolidated, same
from torch_batchnorm.decomps.forms import GRADIENTS, Dialect, Mode

aten = torch.ops.aten
LEGACY = [form for form in GRADIENTS if form.dialect is not Dialect.FAMILY]
FIELDS = ("grad_out", "input", "weight", "running_mean", "running_var", "save_mean", "save_invstd")


def tensors():
    torch.manual_seed(0)
    x, w, m, v = torch.randn(6, 3, 4) * 3, torch.rand(3) + 0.5, torch.randn(3), torch.rand(3) + 0.5
    saved = aten._batch_norm_with_update_functional(x, w, m, m, v, 0.1, 1e-5)[1:3]
    return dict(zip(FIELDS, (torch.randn_like(x), x, w, m, v, *saved), strict=True))


def graph_of(form, training=True, mask=(True, True, True), absent=(), shaped=True):
    """A call of a gradient on placeholders, returning every gradient that is asked for."""
    graph, given = Graph(), tensors()
    fields = {name: None if name in absent else graph.placeholder(name) for name in FIELDS}
    fields |= {"training": training, "eps": 1e-5, "output_mask": list(mask), "impl_index": 0}
    if "reserve" in form.arguments:
        fields["reserve"] = graph.placeholder("reserve")
    outs = {name: graph.placeholder(f"into_{role}") for role, name in form.destinations.items()}
    call = graph.call_function(form.overload, tuple(fields[a] for a in form.arguments), outs)
    graph.output(tuple(graph.call_function(operator.getitem, (call, i)) for i in range(3) if mask[i]))
    for node in graph.find_nodes(op="placeholder") if shaped else ():
        like = {"into_grad_input": given["input"], "reserve": torch.empty(0)}.get(node.target, torch.empty(3))
        node.meta["val"] = given.get(node.target, like).to("meta")
    return GraphModule({}, graph)


def run(graph):
    given, outs = tensors(), []
    made = {"into_grad_input": torch.zeros(6, 3, 4), "reserve": torch.empty(0, dtype=torch.uint8)}
    for node in graph.graph.find_nodes(op="placeholder"):
        value = given.get(node.target)
        outs.append(made.get(node.target, torch.zeros(3)) if value is None else value)
    results = graph(*outs)
    return list(results), [out for out in outs[7:] if out.dtype is not torch.uint8]


def native(training, mask=(True, True, True), weight=True):
    given = tensors()
    given["weight"] = given["weight"] if weight else None
    found = aten.native_batch_norm_backward(*given.values(), training, 1e-5, list(mask))
    return [grad for grad, asked in zip(found, mask, strict=True) if asked]


ROWS = [(form, training) for form in LEGACY for training in ((True,) if form.mode is Mode.TRAIN else (True, False))]


@pytest.mark.parametrize(("form", "training"), ROWS, ids=[f"{f.name}, {'train' if t else 'eval'}" for f, t in ROWS])
def test_every_row_becomes_the_familys_and_computes_what_native_does(form, training):
    result = tbn.Consolidate()(graph_of(form, training))
    assert ([e.after for e in result.edits], result.declined) == (["aten.batch_norm_backward.default"], ())
    assert tbn.Consolidate()(result.program).modified is False
    found, written = run(result.program)
    assert same(found, native(training))
    assert not form.destinations or same(written, found)


@pytest.mark.parametrize("mask", [(True, False, True), (False, True, False), (True, True, True)], ids=str)
@pytest.mark.parametrize("weight", [True, False], ids=("weight", "no weight"))
@pytest.mark.parametrize("training", [True, False], ids=("train", "eval"))
def test_masks_and_a_missing_weight(training, weight, mask):
    form = next(f for f in LEGACY if f.overload is aten.native_batch_norm_backward.default)
    graph = graph_of(form, training, mask, () if weight else ("weight",))
    found = consolidated(graph).program
    assert same(run(found)[0] if weight else _without_weight(found), native(training, mask, weight))
    back = tbn.legalize(found, "core_aten")
    assert same(run(back)[0] if weight else _without_weight(back), native(training, mask, weight))
    assert tbn.render(back) == tbn.render(graph).replace(
        "native_batch_norm_backward_default", "native_batch_norm_backward"
    )


def _without_weight(graph):
    given = {name: value for name, value in tensors().items() if name != "weight"}
    return list(graph(*given.values()))


def _joint(op, backward, x, w, b, m, v):
    out, mean, invstd, *_ = op(x, w, b, m, v, True, 0.1, 1e-5)
    return out, *backward(out, x, w, m, v, mean, invstd)


def test_the_reserve_comes_from_the_forward_in_the_graph():
    graph = make_fx(
        lambda *t: _joint(
            aten.native_batch_norm,
            lambda *s: aten.native_batch_norm_backward(*s, True, 1e-5, [True, True, True]),
            *t,
        )
    )(torch.randn(4, 3), torch.rand(3), torch.randn(3), torch.zeros(3), torch.ones(3))
    assert_expected_inline(
        tbn.render(consolidated(graph).program),
        """\
arg0_1: f32[4, 3] = placeholder
arg1_1: f32[3] = placeholder
arg2_1: f32[3] = placeholder
arg3_1: f32[3] = placeholder
arg4_1: f32[3] = placeholder
_batch_norm_with_update: (f32[4, 3], f32[3], f32[3], u8[0]) = aten._batch_norm_with_update.default(arg0_1, arg1_1, arg2_1, arg3_1, arg4_1, 0.1, 1e-05)
getitem_6: u8[0] = getitem(_batch_norm_with_update, 3)
getitem: f32[4, 3] = getitem(_batch_norm_with_update, 0)
getitem_1: f32[3] = getitem(_batch_norm_with_update, 1)
getitem_2: f32[3] = getitem(_batch_norm_with_update, 2)
batch_norm_backward: (f32[4, 3], f32[3], f32[3]) = aten.batch_norm_backward.default(getitem, arg0_1, arg1_1, arg3_1, arg4_1, getitem_1, getitem_2, True, 1e-05, [True, True, True], getitem_6)
getitem_3: f32[4, 3] = getitem(batch_norm_backward, 0)
getitem_4: f32[3] = getitem(batch_norm_backward, 1)
getitem_5: f32[3] = getitem(batch_norm_backward, 2)
return (getitem, getitem_3, getitem_4, getitem_5)""",
    )


DECLINED = {
    "a resized out argument": ({"shaped": False}, "its out arguments may be resized"),
    "a mask over out arguments": ({"mask": (True, False, True)}, "its output_mask leaves out arguments unwritten"),
}


@pytest.mark.parametrize("name", DECLINED)
def test_declined_with_a_reason(name):
    options, reason = DECLINED[name]
    form = next(f for f in LEGACY if f.overload is aten.native_batch_norm_backward.out)
    result = tbn.Consolidate()(graph_of(form, **options))
    assert (result.modified, [reason in d.reason for d in result.declined]) == (False, [True])
