"""Programs on which a fold is easily wrong: whatever is folded or declined, every output stays."""

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

import torch_batchnorm as tbn
from programs import export, saved_and_loaded
from torch_batchnorm import Fold

aten = torch.ops.aten


class Net(nn.Module):
    """A function of itself and its input over the parts that it is given, in float64; its batch norms are not new."""

    def __init__(self, function, **parts):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)
        generator = torch.Generator().manual_seed(0)
        self.double()
        for bn in (m for m in self.modules() if isinstance(m, _BatchNorm)):
            for tensor, low, high in ((bn.running_mean, -1, 1), (bn.running_var, 0.5, 2)):
                tensor.uniform_(low, high, generator=generator)
            for tensor, low, high in ((bn.weight, 0.5, 2), (bn.bias, -1, 1)):
                nn.init.uniform_(tensor, low, high, generator=generator)
        self.eval()

    def forward(self, x):
        return self.function(self, x)


def parameter(*shape, seed=1):
    return nn.Parameter(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double())


def conv(**options):
    torch.manual_seed(0)
    return nn.Conv2d(4, 4, 1, **options)


def norm():
    return nn.BatchNorm2d(4)


X = torch.randn(2, 4, 5, 5, generator=torch.Generator().manual_seed(0)).double()


def one_storage(tied=False):
    """Two parameters that are two halves of a storage, or all of it twice."""
    held = parameter(2, 4, 4, 1, 1).data
    first = nn.Parameter(held[0])
    return {"w1": first, "w2": nn.Parameter(first.data if tied else held[1])}


def written_through_a_view(self, x):
    y = self.c(x)
    y.view(-1).mul_(2)
    return self.bn(y)


def inside_and_outside(self, x):
    outside = self.bn(self.c(x + 1))
    with torch.no_grad():
        inside = self.bn(self.c(x))
    return outside + inside


def aliased_by_a_nested_graph(self, x):
    t = x.relu()
    with torch.no_grad():
        y = t.view(2, 4, 5, 5).detach()
    z = self.bn(y)
    t.add_(1)
    return self.c(z) + t


def buffers_in_one_memory(self, x):
    z = self.bn(self.a)
    self.b.add_(1)
    return self.c(z) + x


class Memory(Net):
    def __init__(self):
        super().__init__(buffers_in_one_memory, c=conv(), bn=norm())
        held = torch.arange(200.0).double()
        self.register_buffer("a", held.view(2, 4, 5, 5))
        self.register_buffer("b", held)


# A function that makes the module, and how many batch norms are folded: as asked for, and with copies of weights.
TRAPS = {
    "a weight and its transpose": (
        lambda: Net(
            lambda s, x: s.bn(F.linear(x[:, :, 0, 0], s.w)) + s.bn(F.linear(x[:, :, 0, 0], s.w.t())),
            bn=nn.BatchNorm1d(4),
            w=parameter(4, 4),
        ),
        (0, 2),
    ),
    "a weight of a convolution and of a transposed one": (
        lambda: Net(
            lambda s, x: s.bn(F.conv2d(x, s.w)) + s.bn(F.conv_transpose2d(x, s.w)), bn=norm(), w=parameter(4, 4, 1, 1)
        ),
        (0, 2),
    ),
    "a batch norm ahead of both": (
        lambda: Net(
            lambda s, x: (lambda y: F.conv2d(y, s.w) + F.conv_transpose2d(y, s.w))(s.bn(x)),
            bn=norm(),
            w=parameter(4, 4, 1, 1),
        ),
        (0, 1),
    ),
    "two halves of a storage": (
        lambda: Net(lambda s, x: s.bn(F.conv2d(x, s.w1)) + s.bn(F.conv2d(x, s.w2)), bn=norm(), **one_storage()),
        (2, 2),
    ),
    "one storage under two parameters": (
        lambda: Net(lambda s, x: s.bn(F.conv2d(x, s.w1)) + s.bn(F.conv2d(x, s.w2)), bn=norm(), **one_storage(True)),
        (0, 2),
    ),
    "a weight that is the bias too": (
        lambda: Net(lambda s, x: s.bn(F.conv2d(x[:, :1], s.w, s.w.view(4))), bn=norm(), w=parameter(4, 1, 1, 1)),
        (0, 1),
    ),
    "a weight that is the input too": (
        lambda: Net(lambda s, x: s.bn(F.conv2d(s.w, s.w)) + x.sum(), bn=norm(), w=parameter(4, 4, 1, 1)),
        (0, 1),
    ),
    "a layer and its batch norm called inside and outside of a nested graph": (
        lambda: Net(inside_and_outside, c=conv(bias=False), bn=norm()),
        (2, 2),
    ),
    "an output written through a view": (lambda: Net(written_through_a_view, c=conv(), bn=norm()), (0, 0)),
    "a bias that is a column": (
        lambda: Net(
            lambda s, x: s.bn(torch.addmm(s.b, x[0, :, 0, :4], s.w)),
            bn=nn.BatchNorm1d(4),
            w=parameter(4, 4),
            b=parameter(4, 1),
        ),
        (0, 0),
    ),
    "a submodule where the new bias would be": (
        lambda: Net(
            lambda s, x: s.bn(F.conv2d(x, s.weight)) + s.bias(x), weight=parameter(4, 4, 1, 1), bias=conv(), bn=norm()
        ),
        (1, 1),
    ),
    "a concatenation with an empty vector": (
        lambda: Net(lambda s, x: s.bn(torch.cat([s.c(x), torch.zeros(0).double()], 1)), c=conv(), bn=norm()),
        (0, 0),
    ),
    "a constant minus, and the negative": (
        lambda: Net(lambda s, x: -(3 - s.bn(1.5 - s.c(x))) * 2, c=conv(), bn=norm()),
        (1, 1),
    ),
    "a weight that is cast": (
        lambda: Net(lambda s, x: s.bn(F.conv2d(x, s.w.double())), bn=norm(), w=parameter(4, 4, 1, 1)),
        (1, 1),
    ),
}


def ran(program, x=X):
    module = program if isinstance(program, nn.Module) else program.module()
    with torch.no_grad():
        return module(x.clone())


def close(found, want):
    torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("form", ["training IR", "ATEN", "module"])
@pytest.mark.parametrize("copies", [False, True], ids=("as asked", "clone_weights"))
@pytest.mark.parametrize("name", TRAPS)
def test_every_output_stays(name, copies, form):
    make, folded = TRAPS[name]
    program = export(make(), X)
    program = {"ATEN": program.run_decompositions, "module": program.module}.get(form, lambda: program)()
    want = ran(program)
    result = Fold(clone_weights=copies)(program)
    assert len(result.edits) == folded[copies]
    assert tbn.verify(result.program) == ()
    assert Fold(clone_weights=copies)(result.program).modified is False
    close(ran(result.program if form == "module" else saved_and_loaded(result.program)), want)


def test_buffers_in_one_memory_written_in_between():
    program = export(Memory(), X)
    want = ran(program)
    program = export(Memory(), X)
    result = Fold()(program)
    assert "may be written to by add_" in result.declined[0].reason
    close(ran(result.program), want)


def test_an_alias_that_a_nested_graph_returns_and_that_is_written_to_later():
    program = export(Net(aliased_by_a_nested_graph, bn=norm(), c=conv()), X)
    result = Fold()(program)
    assert "may be written to by add_" in result.declined[0].reason
    close(ran(result.program), ran(program))


def test_a_layer_is_not_called_once_more_when_its_output_is_written_through_a_view():
    program = export(Net(written_through_a_view, c=conv(), bn=norm()), X)
    result = Fold(clone_calls=True)(program)
    assert "conv2d may be written to by mul_" in result.declined[0].reason
    close(ran(result.program), ran(program))


@pytest.mark.parametrize("options", [{}, {"alone": "multiply_add"}, {"clone_calls": True}], ids=str)
def test_an_output_that_two_nodes_hold(options):
    module = Net(
        lambda s, x: (lambda y: s.b(y) + y.relu())(s.a(s.c(x) if "alone" not in options else x)),
        c=conv(),
        a=norm(),
        b=norm(),
    )
    program = export(module, X).run_decompositions()
    held = next(iter(tbn.inspect(program).entries)).node
    first = next(n for n in program.graph.nodes if n.name == held).users
    first = next(iter(first))
    with program.graph.inserting_after(first):
        second = program.graph.node_copy(first)
    program.graph.find_nodes(op="call_function", target=aten.relu.default)[0].replace_input_with(first, second)
    program.graph_module.recompile()
    close(ran(tbn.fold(program, **options)), ran(program))


@pytest.mark.parametrize("inplace", [False, True], ids=("a copy", "in place"))
def test_a_module_that_the_graph_calls_keeps_its_parameters(inplace):
    held = export(Net(lambda s, x: s.bn(s.c(x)), c=conv(), bn=norm()), X).module()
    held.c.forward = lambda x: F.conv2d(x, held.c.weight)
    x = held.graph.find_nodes(op="placeholder")[0]
    output = held.graph.output_node()
    with held.graph.inserting_before(output):
        called = held.graph.call_module("c", (x,))
        both = held.graph.call_function(aten.add.Tensor, (output.args[0][0], called))
    output.args = ((both,),)
    held.recompile()
    want = ran(held)
    result = Fold(inplace=inplace)(held)
    assert "a module that is called and is no graph" in result.declined[0].reason
    close(ran(result.program), want)


def test_what_autocast_computes_in_is_what_a_weight_has_to_fit():
    def cast(self, x):
        with torch.autocast("cpu", torch.float16):
            return self.bn(self.c(x))

    module = Net(cast, c=conv(bias=False), bn=nn.BatchNorm2d(4, eps=1e-12)).float()
    module.bn.running_var.fill_(1e-11)
    module.bn.running_mean.zero_()
    x = X.float() * 1e-5
    result = Fold()(export(module, x))
    assert "out of the range of torch.float16" in result.declined[0].reason
    assert ran(result.program, x).isfinite().all()


def test_a_weight_that_is_read_in_float32_and_in_float16_has_to_fit_both():
    def both(self, x):
        found = self.bn(self.c(x))
        with torch.autocast("cpu", torch.float16):
            return found + self.bn(self.c(x))

    module = Net(both, c=conv(bias=False), bn=nn.BatchNorm2d(4, eps=1e-12)).float()
    module.bn.running_var.fill_(1e-11)
    module.bn.running_mean.zero_()
    x = X.float() * 1e-5
    assert ran(tbn.fold(export(module, x)), x).isfinite().all()


def test_a_product_without_bias_stays_in_the_dtype_of_autocast():
    def product(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.bn(x[:, :, 0, 0] @ self.w)

    module = Net(product, bn=nn.BatchNorm1d(4), w=parameter(4, 4)).float()
    program = export(module, X.float())
    result = Fold()(program)
    assert (len(result.edits), ran(result.program, X.float()).dtype) == (1, torch.bfloat16)


def test_one_site_that_does_not_fit_is_no_matter_to_the_others():
    module = Net(lambda s, x: s.b(s.c(s.a(x))), a=nn.BatchNorm2d(4, eps=1e-12), b=norm(), c=conv(bias=False)).half()
    for tensor, value in ((module.a.running_var, 1e-7), (module.a.weight, 100.0), (module.a.bias, 0.0)):
        nn.init.constant_(tensor, value)
    module.a.running_mean.zero_()
    result = Fold()(export(module, (X * 1e-3).half()))
    assert [(edit.module, bool(edit.after)) for edit in result.edits] == [("b", True)]
    assert [declined.module for declined in result.declined] == ["a"]


def test_two_that_would_lose_as_one_stay_two_alone():
    module = Net(lambda s, x: s.b(s.a(x)), a=norm(), b=norm()).float()
    nn.init.constant_(module.a.bias, 1e5)
    module.b.running_mean.fill_(0)
    result = Fold(alone="multiply_add")(export(module, X.float()))
    assert (len(result.edits), result.declined, Fold(alone="multiply_add")(result.program).modified) == (2, (), False)


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")  # of what is no parameter or buffer
@pytest.mark.parametrize("inplace", [False, True], ids=("a copy", "in place"))
def test_a_module_that_holds_something_else_stays(inplace):
    module = export(Net(lambda s, x: s.bn(s.c(x)), c=conv(), bn=norm()), X).module()
    module.bn.k = torch.full((1, 4, 1, 1), 3.0).double()
    output = module.graph.output_node()
    with module.graph.inserting_before(output):
        k = module.graph.get_attr("bn.k")
        added = module.graph.call_function(aten.add.Tensor, (output.args[0][0], k))
    output.args = ((added,),)
    module.recompile()
    want = ran(module)
    close(ran(tbn.fold(module, inplace=inplace)), want)


def test_a_nested_graph_under_two_names_is_not_bound_to_one_call():
    nested = export(Net(lambda s, x: s.bn(s.c(x)), c=conv(), bn=norm()), X).module()
    inner, outer = nested.graph, torch.fx.Graph()
    roots = [node for node in inner.find_nodes(op="get_attr") if node.users]
    x = inner.find_nodes(op="placeholder")[0]
    for root in roots:
        with inner.inserting_after(x):
            held = inner.placeholder(root.name + "_held")
        held.meta = dict(root.meta)
        root.replace_all_uses_with(held)
    for node in [*inner.find_nodes(op="call_module"), *inner.find_nodes(op="get_attr")]:
        inner.erase_node(node)
    inner.set_codegen(torch.fx.graph.CodeGen())
    order = [str(node.target).removesuffix("_held") for node in inner.find_nodes(op="placeholder")[1:]]
    holder, targets = nn.Module(), {root.name: str(root.target) for root in roots}
    held_by = torch.fx.GraphModule(nn.Module(), inner)
    holder.first = holder.second = held_by
    given = outer.placeholder("x")
    given.meta = dict(x.meta)
    outs = []
    for which, factor in (("first", 1.0), ("second", 2.0)):
        operands = []
        for name in order:
            kept = f"{which}_{name}"
            holder.register_buffer(
                kept,
                nested.get_parameter(targets[name]).detach() * factor
                if "running" not in name
                else nested.get_buffer(targets[name]) * factor,
            )
            operand = outer.get_attr(kept)
            operand.meta["val"] = getattr(holder, kept)
            operands.append(operand)
        outs.append(outer.call_module(which, (given, *operands)))
    outer.output(tuple(out for out in outs))
    module = torch.fx.GraphModule(holder, outer)
    want = module(X)
    found = tbn.fold(module)(X)
    for left, right in zip(found, want, strict=True):
        close(left[0], right[0])


@pytest.mark.parametrize("dtype", [torch.int8, torch.complex64], ids=str)
def test_a_weight_of_another_kind_of_number_is_declined(dtype):
    module = Net(lambda s, x: s.bn(F.conv2d(x, s.w.real.double() if s.w.is_complex() else s.w.double())), bn=norm())
    module.register_buffer("w", torch.ones(4, 4, 1, 1).to(dtype))
    program = export(module, X)
    (declined,) = Fold()(program).declined
    assert "w is torch.int8, expected one of" in declined.reason or "computed by aten." in declined.reason


def test_float32_above_does_not_touch_float64_weights():
    program = export(Net(lambda s, x: s.bn(s.c(x)), c=conv(), bn=norm()), X)
    close(ran(tbn.fold(program, float32_above=0)), ran(program))


# The dtype, the variance, the weight, what multiplies the output, and the size of the input.
UNHELD = {
    "depthwise": (torch.float16, 1e-7, 100, 1.0, 1e-3),
    "multiply_add": (torch.float32, 1.0, 1e15, 1e30, 1e-10),
}


@pytest.mark.parametrize("alone", UNHELD)
def test_alone_only_where_scale_and_shift_fit(alone):
    dtype, var, weight, factor, size = UNHELD[alone]
    module = Net(lambda s, x: s.bn(x) * factor, bn=nn.BatchNorm2d(4, eps=1e-12)).to(dtype)
    for tensor, value in ((module.bn.running_var, var), (module.bn.weight, weight)):
        nn.init.constant_(tensor, value)
    module.bn.running_mean.zero_()
    x = (X * size).to(dtype)
    result = Fold(alone=alone, force=True)(export(module, x))
    assert "out of the range" in result.declined[0].reason
    assert ran(result.program, x).isfinite().all()


def test_three_in_a_row_alone_are_one():
    program = export(Net(lambda s, x: s.c(s.b(s.a(x))), a=norm(), b=norm(), c=norm()), X)
    for alone, op in (("multiply_add", aten.mul.Tensor), ("depthwise", aten.convolution.default)):
        folded = tbn.fold(program, alone=alone)
        assert len(folded.graph.find_nodes(op="call_function", target=op)) == 1
        close(ran(folded), ran(program))


def test_what_was_declined_may_fold_into_a_new_convolution_at_once():
    module = Net(lambda s, x: s.b(s.a(x)), a=norm(), b=norm()).float()
    nn.init.constant_(module.a.bias, 1e5)
    module.b.running_mean.fill_(1e5)
    result = Fold(alone="depthwise")(export(module, X.float()))
    assert (len(result.edits), result.declined, Fold(alone="depthwise")(result.program).modified) == (2, (), False)


def test_strides_stay_in_every_memory_format():
    x = torch.randn(2, 4, 2, 3, 3).to(memory_format=torch.channels_last_3d)
    program = export(nn.BatchNorm3d(4).eval(), x)
    for alone in ("multiply_add", "depthwise"):
        assert ran(tbn.fold(program, alone=alone), x).stride() == x.stride()


@pytest.mark.parametrize("learns", [False, True], ids=("frozen", "learns"))
def test_what_learns_learns(learns):
    module = Net(lambda s, x: s.bn(x) + s.last(s.c(x)), bn=norm(), c=conv(bias=False), last=norm())
    for part in (module.bn, module.last):
        part.requires_grad_(learns)
    module.c.requires_grad_(False)
    folded = tbn.fold(export(module, X), alone="multiply_add")
    assert {name: p.requires_grad for name, p in folded.named_parameters()} == {
        "bn.scale": learns,
        "bn.shift": learns,
        "c.weight": False,
        "c.bias": learns,
    }


def test_a_counter_stays_with_statistics_that_are_still_read():
    program = export(Net(lambda s, x: s.bn(s.c(x)) + s.bn(x.relu()), c=conv(), bn=norm()), X)
    assert "bn.num_batches_tracked" in tbn.fold(program).state_dict


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.k = parameter(4, 1, 1)

    def forward(self, x, k=None):
        return x * (self.k if k is None else k)


# A module, the options, and the modules whose call signatures are to be preserved.
SIGNED = {
    "the batch norm and its layer": (lambda: Net(lambda s, x: s.bn(s.c(x)), c=conv(), bn=norm()), {}, ("bn", "c")),
    "a scale behind it": (
        lambda: Net(lambda s, x: s.k(s.bn(s.c(x))).relu(), k=Scale(), c=conv(), bn=norm()),
        {},
        ("k",),
    ),
    "a scale ahead of it": (lambda: Net(lambda s, x: s.bn(s.k(s.c(x))), k=Scale(), c=conv(), bn=norm()), {}, ("k",)),
    "a scale that is handed its constant": (
        lambda: Net(lambda s, x: s.bn(s.k(s.c(x), s.w)), k=Scale(), c=conv(), bn=norm(), w=parameter(4, 1, 1)),
        {},
        ("k",),
    ),
    "what holds nothing else": (
        lambda: Net(lambda s, x: s.q(s.c(x)).relu(), c=conv(), q=nn.Sequential(norm(), Scale())),
        {},
        ("q", "q.1"),
    ),
    "what holds more": (
        lambda: Net(lambda s, x: s.q(x).relu(), q=nn.Sequential(conv(), norm(), nn.ReLU())),
        {},
        ("q",),
    ),
    "a layer that is called once more": (
        lambda: Net(lambda s, x: (lambda y: s.bn(y).relu() + y)(s.c(x)), c=conv(), bn=norm()),
        {"clone_calls": True},
        ("c",),
    ),
    "a layer called once more in what holds it": (
        lambda: Net(lambda s, x: (lambda y: s.bn(y).relu() + y)(s.q(x)), q=nn.Sequential(nn.ReLU(), conv()), bn=norm()),
        {"clone_calls": True},
        ("q",),
    ),
}


@pytest.mark.parametrize("inplace", [False, True], ids=("a copy", "in place"))
@pytest.mark.parametrize("name", SIGNED)
def test_modules_with_a_call_signature(name, inplace):
    make, options, modules = SIGNED[name]
    program = torch.export.export(make(), (X,), preserve_module_call_signature=modules)
    want = ran(program)
    result = Fold(**options, inplace=inplace)(program)
    assert (len(result.edits), tbn.verify(result.program)) == (1, ())
    close(ran(torch.export.unflatten(result.program)), want)
    close(ran(saved_and_loaded(result.program)), want)


def test_whatever_mode_or_device_is_set_around_it():
    program = export(Net(lambda s, x: s.c(s.bn(x)), c=conv(bias=False), bn=norm()), X)
    with torch.device("meta"), torch.inference_mode():
        folded = tbn.fold(program)
    assert folded.module()(X).requires_grad
    close(ran(folded), ran(program))


def test_a_buffer_of_another_layout_is_no_matter():
    module = export(Net(lambda s, x: s.bn(s.c(x)), c=conv(), bn=norm()), X).module()
    module.register_buffer("sparse", torch.eye(3).to_sparse())
    result = Fold()(module)
    assert (len(result.edits), result.declined) == (1, ())


def test_a_layer_read_through_one_get_attr_for_each_call():
    module = Net(lambda s, x: s.c(s.bn(x)) + s.c(s.bn(x + 1)), c=conv(bias=False), bn=norm())
    traced = make_fx(module)(X)
    result = Fold()(traced)
    assert (len(result.edits), result.declined) == (2, ())
    close(ran(result.program), ran(traced))
