"""Fold, row by row: what goes into the layer that makes its input, to what precision, and what does not."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import torch_batchnorm as tbn
from folds import (
    CONVS,
    DIALECTS,
    FORMS,
    HALVES,
    IMAGE,
    LAYERS,
    MORE,
    NORMS,
    TRANSPOSED,
    Net,
    Pair,
    by_hand,
    checked,
    distance,
    distances,
    folded,
    in_form,
    linear,
    lively,
    made,
    net,
    outputs,
    pairwise,
    product,
    side_by_side,
    vector,
)
from programs import aten, export, same, saved_and_loaded

# Every kind of producer, every way to call it. A program holds all the rows of a kind side by side.

COMMON = {
    "bias": (True, False),
    "affine": (True, False),
    "dtype": (torch.float64, torch.float32),
    "eps": (1e-5, 1e-3),
}
CONV = {
    "groups": (1, 2, "depthwise"),
    "padding": (0, 1, "same", "valid", "reflect", "circular"),
    "stride": (1, 2),
    "dilation": (1, 2),
    "outs": (4, 8),
}
CONV_TRANSPOSE = {
    "groups": (1, 2, "depthwise"),
    "padding": (0, 1),
    "output_padding": (0, 1),
    "stride": (1, 2),
    "dilation": (1, 2),
    "outs": (4, 8),  # as many as the inputs, and not
}


def _possible(row):
    """Whether torch has this convolution."""
    strided_same = row.get("padding") == "same" and row["stride"] == 2
    return not strided_same and row.get("output_padding", 0) < max(row["stride"], row["dilation"])


def _conv(row, rank):
    groups = 4 if row["groups"] == "depthwise" else row["groups"]
    mode = row["padding"] if row["padding"] in ("reflect", "circular") else "zeros"
    padding = 1 if mode != "zeros" else row["padding"]
    more = {"stride": row["stride"], "dilation": row["dilation"], "padding_mode": mode}
    return CONVS[rank](4, row["outs"], 2, padding=padding, groups=groups, bias=row["bias"], **more)


def _conv_transpose(row, rank):
    groups = 4 if row["groups"] == "depthwise" else row["groups"]
    more = {k: row[k] for k in ("stride", "dilation", "padding", "output_padding")}
    return TRANSPOSED[rank](4, row["outs"], 2, groups=groups, bias=row["bias"], **more)


def _matrix(function):
    """A product with a parameter of shape [4, 6], and one added when it has a bias."""
    return lambda row: Net(function, weight=vector(4, 6), bias=vector(6) if row["bias"] else None)


def _plus(value, m):
    return value if m.bias is None else value + m.bias


def _addmm(m, x):
    return torch.mm(x, m.weight) if m.bias is None else torch.addmm(m.bias, x, m.weight)


# The kind: the shape of its input, its factors, what makes the producer of a row, the batch norm's rank.
KINDS = {
    **{f"conv{r}d": ((2, 4, 9, 8, 7)[: r + 2], CONV, lambda row, r=r: _conv(row, r), r, _possible) for r in (1, 2, 3)},
    **{
        f"conv_transpose{r}d": (
            (2, 4, 5, 4, 3)[: r + 2],
            CONV_TRANSPOSE,
            lambda row, r=r: _conv_transpose(row, r),
            r,
            _possible,
        )
        for r in (1, 2, 3)
    },
    "linear": ((5, 4), {}, lambda row: nn.Linear(4, 6, row["bias"]), 1, None),
    "linear and a transpose": (
        (2, 3, 4),
        {},
        lambda row: Net(lambda m, x: m.linear(x).transpose(1, 2), linear=nn.Linear(4, 6, row["bias"])),
        1,
        None,
    ),
    "linear and a permute": (
        (2, 3, 5, 4),
        {},
        lambda row: Net(lambda m, x: m.linear(x).permute(0, 3, 1, 2), linear=nn.Linear(4, 6, row["bias"])),
        2,
        None,
    ),
    "linear of flattened rows": (
        (2, 3, 4),
        {},
        lambda row: Net(lambda m, x: m.linear(x).flatten(0, 1), linear=nn.Linear(4, 6, row["bias"])),
        1,
        None,
    ),
    "matmul by a parameter": ((5, 4), {}, _matrix(lambda m, x: _plus(x @ m.weight, m)), 1, None),
    "matmul and a transpose": (
        (2, 3, 4),
        {},
        _matrix(lambda m, x: _plus(x @ m.weight, m).transpose(1, 2)),
        1,
        None,
    ),
    "matmul by a transposed parameter": (
        (5, 4),
        {},
        lambda row: Net(
            lambda m, x: _plus(x @ m.weight.t(), m), weight=vector(6, 4), bias=vector(6) if row["bias"] else None
        ),
        1,
        None,
    ),
    "torch.mm": ((5, 4), {}, _matrix(lambda m, x: _plus(torch.mm(x, m.weight), m)), 1, None),
    "torch.addmm": ((5, 4), {}, _matrix(_addmm), 1, None),
}


class Many(nn.Module):
    """Modules side by side, each on the input of its own dtype."""

    def __init__(self, modules, dtypes):
        super().__init__()
        self.rows, self.dtypes = nn.ModuleList(modules), dtypes

    def forward(self, wide, narrow):
        inputs = {torch.float64: wide, torch.float32: narrow}
        return [module(inputs[dtype]) for module, dtype in zip(self.rows, self.dtypes, strict=True)]


def _many(kind, rows):
    """A program of every row, its inputs, and the tolerance of each output."""
    shape, _, make, rank, _ = KINDS[kind]
    torch.manual_seed(0)
    modules = []
    for row in rows:
        producer = make(row)
        channels = row.get("outs", 6)
        bn = NORMS[rank](channels, affine=row["affine"], eps=row["eps"])
        modules.append(lively(Pair(producer, bn), row["dtype"]))
    x = torch.randn(shape, dtype=torch.float64)
    tolerances = [{torch.float64: 1e-12, torch.float32: 1e-5}[row["dtype"]] for row in rows]
    return export(Many(modules, [row["dtype"] for row in rows]).eval(), x, x.float()), (x, x.float()), tolerances


PROGRAMS = {}


def _pairwise(kind, form):
    """Of a kind, the rows in which every two values of two factors meet, in a form; made once."""
    _, factors, *_, possible = KINDS[kind]
    for base in ("training IR", "ATEN"):
        if (kind, base) not in PROGRAMS:
            made = _many(kind, pairwise(possible or (lambda row: True), **factors, **COMMON))
            PROGRAMS[kind, base] = FORMS[base](made[0]), *made[1:]
    program, inputs, tolerances = PROGRAMS[kind, "ATEN" if "ATEN" in form else "training IR"]
    if "family" in form:
        program = tbn.consolidate(program)
    return program.module() if "module" in form else program, inputs, tolerances


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_way_to_call_a_producer_takes_its_batch_norm(kind, form):
    program, inputs, tolerances = _pairwise(kind, form)
    result = folded(program, *inputs, edits=len(tolerances), tolerance=tolerances)
    if form in DIALECTS:
        loaded = saved_and_loaded(result.program)
        assert same(outputs(loaded, *inputs), outputs(result.program, *inputs))
        assert loaded.state_dict.keys() == result.program.state_dict.keys()


FULL = {"affine": (True,), "dtype": (torch.float64,), "eps": (1e-5,)}
NARROWED = {"conv1d": {"outs": (8,), "bias": (True, False)}, "conv_transpose2d": {"bias": (True,)}}


@pytest.mark.parametrize("kind", NARROWED)
def test_every_combination_of_what_a_convolution_takes(kind):
    _, factors, *_, possible = KINDS[kind]
    program, inputs, tolerances = _many(kind, product(possible, **factors | FULL | NARROWED[kind]))
    folded(program, *inputs, edits=len(tolerances), tolerance=tolerances)


# One batch norm each: what lies between it and its producer, and how it is spelled.


def _bn(x, m, weight=True, bias=True):
    return functional.batch_norm(
        x, m.bn.running_mean, m.bn.running_var, m.bn.weight if weight else None, m.bn.bias if bias else None
    )


def _eval(form, x, bn):
    """One of the functions that normalise with running statistics."""
    tensors = (x, bn.weight, bn.bias, bn.running_mean, bn.running_var)
    if form == "no_training":
        return aten._native_batch_norm_legit_no_training.default(*tensors, 0.1, 1e-5)[0]
    if form == "legit":
        return aten._native_batch_norm_legit.default(*tensors, False, 0.1, 1e-5)[0]
    if form == "impl_index":
        return aten._batch_norm_impl_index.default(*tensors, False, 0.1, 1e-5, True)[0]
    if form == "family":
        return aten._batch_norm_no_update.default(*tensors, 0.1, 1e-5)[0]
    return aten.native_batch_norm.default(*tensors, False, 0.1, 1e-5)[0]


def _zeroed():
    """Pairs such as those that a residual network starts from: `lively` leaves a batch norm without a weight alone."""
    return Net(
        lambda m, x: functional.batch_norm(m.conv(x), m.bn.running_mean, m.bn.running_var, m.zero, m.bn.weight),
        conv=nn.Conv2d(4, 6, 3),
        bn=nn.BatchNorm2d(6),
        zero=nn.Parameter(torch.zeros(6)),
    )


def _shares_memory():
    """A weight of which another buffer is a part, which the program writes."""
    weight = torch.randn(6, 4, 3, 3, dtype=torch.float64)
    return Net(
        lambda m, x: (m.part.mul_(2), m.bn(functional.conv2d(x, m.w)))[1],
        bn=nn.BatchNorm2d(6),
        w=nn.Buffer(weight),
        part=nn.Buffer(weight[0]),
    )


SPELLED = {
    "a batch norm without a bias": (net(lambda m, x: _bn(m.conv(x), m, bias=False)), IMAGE),
    "a batch norm without a weight": (net(lambda m, x: _bn(m.conv(x), m, weight=False)), IMAGE),
    **{
        f"a batch norm spelled as {form}": (net(lambda m, x, form=form: _eval(form, m.conv(x), m.bn)), IMAGE)
        for form in ("native", "legit", "no_training", "impl_index", "family")
    },
    "flattened images": (net(lambda m, x: m.bn(m.conv(x).flatten(2)), bn=lambda: nn.BatchNorm1d(6)), IMAGE),
    "images seen as rows": (net(lambda m, x: m.bn(m.conv(x).view(2, 6, -1)), bn=lambda: nn.BatchNorm1d(6)), IMAGE),
    "images reshaped to rows": (
        net(lambda m, x: m.bn(m.conv(x).reshape(2, 6, -1)), bn=lambda: nn.BatchNorm1d(6)),
        IMAGE,
    ),
    "rows unsqueezed to images": (
        net(lambda m, x: m.bn(m.conv(x).unsqueeze(-1)), conv=lambda: nn.Conv1d(4, 6, 3)),
        (2, 4, 9),
    ),
    "rows unsqueezed in the middle": (
        net(lambda m, x: m.bn(m.conv(x).unsqueeze(2)), conv=lambda: nn.Conv1d(4, 6, 3)),
        (2, 4, 9),
    ),
    "height and width swapped": (net(lambda m, x: m.bn(m.conv(x).transpose(2, 3))), IMAGE),
    "height and width permuted, counted from the end": (
        net(lambda m, x: m.bn(m.conv(x).permute(0, 1, -1, -2))),
        IMAGE,
    ),
    "there and back": (net(lambda m, x: m.bn(m.conv(x).permute(0, 2, 3, 1).permute(0, 3, 1, 2))), IMAGE),
    "swapped and contiguous": (net(lambda m, x: m.bn(m.conv(x).transpose(2, 3).contiguous())), IMAGE),
    "a clone": (net(lambda m, x: m.bn(m.conv(x).clone())), IMAGE),
    "a dropout in eval": (net(lambda m, x: m.bn(m.drop(m.conv(x))), drop=lambda: nn.Dropout(0.5)), IMAGE),
    "a channel dropout in eval": (net(lambda m, x: m.bn(m.drop(m.conv(x))), drop=lambda: nn.Dropout2d(0.5)), IMAGE),
    "an alpha dropout in eval": (
        net(lambda m, x: m.bn(m.drop(m.conv(x))), drop=lambda: nn.AlphaDropout(0.5)),
        IMAGE,
    ),
    "images seen as others are": (
        net(
            lambda m, x: m.bn(m.conv(x).view_as(x)),
            lambda: nn.Conv2d(4, 4, 3, padding=1),
            lambda: nn.BatchNorm2d(4),
        ),
        IMAGE,
    ),
    "an identity": (net(lambda m, x: m.bn(m.drop(m.conv(x))), drop=nn.Identity), IMAGE),
    "a linear seen as an image": (
        net(lambda m, x: m.bn(m.conv(x).view(5, 6, 1, 1)), conv=lambda: nn.Linear(4, 6)),
        (5, 4),
    ),
    "a linear unsqueezed": (linear(lambda m, x: m.bn(m.conv(x).unsqueeze(-1))), (5, 4)),
    "a linear seen as rows": (linear(lambda m, x: m.bn(m.conv(x).view(-1, 6))), (2, 3, 4)),
    "a linear reshaped to rows and back": (
        linear(lambda m, x: m.bn(m.conv(x).reshape(-1, 6)).reshape(2, 3, 6)),
        (2, 3, 4),
    ),
    "a linear, transposed there and back": (
        linear(lambda m, x: m.bn(m.conv(x).transpose(1, 2)).transpose(1, 2)),
        (2, 3, 4),
    ),
    "a linear and an added vector": (linear(lambda m, x: m.bn(m.conv(x) + m.t), t=lambda: vector(6)), (5, 4)),
    "a linear and a subtracted vector": (linear(lambda m, x: m.bn(m.conv(x) - m.t), t=lambda: vector(6)), (5, 4)),
    "a vector and a matmul": (
        net(
            lambda m, x: m.bn(m.t + x @ m.w),
            nn.Identity,
            lambda: nn.BatchNorm1d(6),
            t=lambda: vector(6),
            w=lambda: vector(4, 6),
        ),
        (5, 4),
    ),
    "a linear with a row as its bias": (
        linear(lambda m, x: m.bn(m.conv(x) + m.t), t=lambda: vector(1, 6)),
        (5, 4),
    ),
    "a batch norm whose weight is zero": (lambda: _zeroed(), IMAGE),
    "one image of one pixel": (net(lambda m, x: m.bn(m.conv(x))), (1, 4, 3, 3)),
    "an image without a batch of its own": (
        net(lambda m, x: m.bn(m.conv(x).unsqueeze(0))),
        (4, 9, 8),
    ),
    "one channel": (net(lambda m, x: m.bn(m.conv(x)), lambda: nn.Conv2d(4, 1, 3), lambda: nn.BatchNorm2d(1)), IMAGE),
    "a convolution whose bias is all there is of it": (
        net(lambda m, x: m.bn(functional.conv2d(x, m.conv.weight, m.t)), t=lambda: vector(6)),
        IMAGE,
    ),
}


@pytest.mark.parametrize("name", SPELLED)
def test_a_batch_norm_goes_into_what_makes_its_input(name):
    make, shape = SPELLED[name]
    folded(*in_form(make, shape))


def test_every_batch_norm_goes_into_what_makes_its_input_in_ATEN():
    rows = [row for name, row in SPELLED.items() if name != LEGIT]
    folded(*side_by_side([made(*row) for row in rows]), edits=len(rows))


LEGIT = "a batch norm spelled as legit"


def test_a_batch_norm_that_was_made_functional_folds_too():
    """Decomposed, it returns the statistics that it did not write, and the signature lists them as written."""
    folded(*in_form(*SPELLED[LEGIT], form="ATEN"))


@pytest.mark.parametrize("form", DIALECTS)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("weights", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("kernel", [1, 3])
def test_the_layout_of_the_output_stays(kernel, weights, layout, form):
    module, x = made(net(lambda m, x: m.bn(m.conv(x)), lambda: nn.Conv2d(4, 6, kernel)), IMAGE)
    module, x = module.to(memory_format=weights), x.contiguous(memory_format=layout)
    folded(FORMS[form](export(module, x)), x)


@pytest.mark.parametrize("form", DIALECTS)
def test_sizes_that_are_not_known_stay_free(form):
    make = net(lambda m, x: m.bn(m.conv(x).flatten(2)), bn=lambda: nn.BatchNorm1d(6))
    module, x = made(make, (3, 4, 9, 9))
    batch, size = torch.export.Dim("batch", min=2), torch.export.Dim("size", min=5)
    program = FORMS[form](export(module, x, dynamic=(({0: batch, 2: size, 3: size},),)))
    result = folded(program, x)
    other = torch.randn(5, 4, 12, 12, dtype=torch.float64)
    for found in (result.program, saved_and_loaded(result.program)):
        assert max(distances(outputs(found, other), outputs(program, other))) < 1e-12
    assert str(result.program.range_constraints) == str(program.range_constraints)


# Whatever is done about these, the program stays right: traps for a fold that looks at less than it has to.

TRAPS = {
    "linear over the last axis, batch norm over the middle": (
        net(lambda m, x: m.bn(m.conv(x)), lambda: nn.Linear(3, 5), lambda: nn.BatchNorm1d(5)),
        (2, 5, 3),
    ),
    "linear of an image, batch norm over the channels": (
        net(lambda m, x: m.bn(m.conv(x)), lambda: nn.Linear(8, 6), lambda: nn.BatchNorm2d(4)),
        IMAGE,
    ),
    "channels moved to another axis": (
        net(lambda m, x: m.bn(m.conv(x).permute(0, 2, 1, 3)), bn=lambda: nn.BatchNorm2d(6)),
        (2, 4, 8, 8),
    ),
    "the batch in the place of the channels": (
        net(lambda m, x: m.bn(m.conv(x).transpose(0, 1))),
        (6, 4, 5, 5),
    ),
    "a view that mixes channels and width": (
        net(lambda m, x: m.bn(m.conv(x).view(2, 12, -1, 6)), bn=lambda: nn.BatchNorm2d(12)),
        (2, 4, 8, 8),
    ),
    "a view that splits the channels": (
        net(lambda m, x: m.bn(m.conv(x).view(2, 3, 2, -1)), bn=lambda: nn.BatchNorm2d(3)),
        (2, 4, 8, 8),
    ),
    "a view of as many channels, of other elements": (
        net(lambda m, x: m.bn(m.conv(x).permute(0, 2, 3, 1).reshape(2, 6, 6, 6))),
        (2, 4, 8, 8),
    ),
    "a flatten that counts channels and places as one": (
        net(lambda m, x: m.bn(m.conv(x).flatten(1)), bn=lambda: nn.BatchNorm1d(24)),
        (5, 4, 4, 4),
    ),
    "the batch put into the channels": (
        net(lambda m, x: m.bn(m.conv(x).view(1, 12, 7, 6)), bn=lambda: nn.BatchNorm2d(12)),
        IMAGE,
    ),
    "an added vector that runs along the width": (
        net(lambda m, x: m.bn(m.conv(x) + m.t), t=lambda: vector(6)),
        (2, 4, 8, 8),
    ),
    "an added matrix": (linear(lambda m, x: m.bn(m.conv(x) + m.t), t=lambda: vector(6, 6)), (6, 4)),
    "an added input": (linear(lambda m, x: m.bn(m.conv(x) + x.sum())), (5, 4)),
    "a relu between": (net(lambda m, x: m.bn(m.conv(x).relu())), IMAGE),
    "a relu in place between": (net(lambda m, x: m.bn(m.conv(x).relu_())), IMAGE),
    "an addition in place between": (net(lambda m, x: m.bn(m.conv(x).add_(1))), IMAGE),
    "an addition in place, dropped between": (
        net(lambda m, x: (y := m.conv(x), y.add_(1), m.bn(y))[2]),
        IMAGE,
    ),
    "a write in place to the producer's output afterwards": (
        net(lambda m, x: (y := m.conv(x), m.bn(y), y.mul_(2))[1:]),
        IMAGE,
    ),
    "a write in place through a view of the producer's output": (
        net(lambda m, x: (y := m.conv(x), y[:, :2].zero_(), m.bn(y))[2]),
        IMAGE,
    ),
    "a write in place through a view of all of it, before": (
        net(lambda m, x: (y := m.conv(x), y.view(-1).mul_(2), m.bn(y), y)[2:]),
        IMAGE,
    ),
    "a write in place through a view, after": (
        net(lambda m, x: (y := m.conv(x), v := y[:, :2], m.bn(y), v.zero_(), y)[2:]),
        IMAGE,
    ),
    "a write in place to a view that was made before the batch norm": (
        net(lambda m, x: (y := m.conv(x), v := y.flatten(2), v.relu_(), m.bn(y))[3]),
        IMAGE,
    ),
    "a write in place to the input, between": (net(lambda m, x: (y := m.conv(x), x.add_(1), m.bn(y), y)[2:]), IMAGE),
    "a write in place to the input, before": (net(lambda m, x: (x.add_(1), m.bn(m.conv(x)))[1]), IMAGE),
    "a write in place to the input, after": (net(lambda m, x: (m.bn(m.conv(x)), x.add_(1))[0]), IMAGE),
    "a write in place to the input, through a view, between": (
        net(lambda m, x: (y := m.conv(x), x[0].add_(1), m.bn(y), y)[2:]),
        IMAGE,
    ),
    "a write in place to the batch norm's output, and the producer returned": (
        net(lambda m, x: (y := m.conv(x), m.bn(y).relu_(), y)[1:]),
        IMAGE,
    ),
    "one output, returned twice": (net(lambda m, x: (y := m.bn(m.conv(x)), y)), IMAGE),
    "a batch norm that nothing reads": (net(lambda m, x: (y := m.conv(x), m.bn(y), y)[2]), IMAGE),
    "a weight that is a slice": (
        net(lambda m, x: m.bn(functional.conv2d(x, m.w[:6])), w=lambda: vector(8, 4, 3, 3)),
        IMAGE,
    ),
    "a weight that is a transposed parameter": (
        net(lambda m, x: m.bn(functional.conv2d(x, m.w.transpose(0, 1))), w=lambda: vector(4, 6, 3, 3)),
        IMAGE,
    ),
    "a weight that is expanded": (
        net(lambda m, x: m.bn(functional.conv2d(x, m.w.expand(6, 4, 3, 3))), w=lambda: vector(6, 1, 3, 3)),
        IMAGE,
    ),
    "a weight that is detached": (
        net(lambda m, x: m.bn(functional.conv2d(x, m.conv.weight.detach(), m.conv.bias))),
        IMAGE,
    ),
    "a transposed linear's weight that another linear reads as it is": (
        linear(lambda m, x: (m.bn(x @ m.w.t()), functional.linear(x, m.w), x @ m.w.t()), w=lambda: vector(6, 4)),
        (5, 4),
    ),
    "a product both ways with one parameter": (
        linear(lambda m, x: m.bn(x @ m.w) @ m.w.t(), w=lambda: vector(4, 6)),
        (5, 4),
    ),
    "an embedding that is the weight too": (
        linear(
            lambda m, x: (m.bn(functional.linear(x, m.w)), functional.embedding(torch.tensor([1, 2]), m.w)),
            w=lambda: vector(6, 4),
        ),
        (5, 4),
    ),
    "an empty batch": (net(lambda m, x: m.bn(m.conv(x))), (0, 4, 9, 8)),
    "a write in place to the batch norm's output": (
        net(lambda m, x: m.bn(m.conv(x)).mul_(2).add_(m.t), t=lambda: vector(6, 1, 1)),
        IMAGE,
    ),
    "a dropout that drops": (net(lambda m, x: m.bn(functional.dropout(m.conv(x), 0.0, True))), IMAGE),
    "a slice of the channels": (
        net(lambda m, x: m.bn(m.conv(x)[:, :3]), bn=lambda: nn.BatchNorm2d(3)),
        IMAGE,
    ),
    "channels that are expanded": (
        net(lambda m, x: m.bn(m.conv(x).expand(-1, 6, -1, -1)), conv=lambda: nn.Conv2d(4, 1, 3)),
        IMAGE,
    ),
    "a pixel shuffle": (
        net(
            lambda m, x: m.bn(m.conv(x)),
            lambda: nn.Sequential(nn.Conv2d(4, 8, 3), nn.PixelShuffle(2)),
            lambda: nn.BatchNorm2d(2),
        ),
        IMAGE,
    ),
    "a channel shuffle": (
        net(lambda m, x: m.bn(functional.channel_shuffle(m.conv(x), 2))),
        IMAGE,
    ),
    "a flip of the channels": (net(lambda m, x: m.bn(m.conv(x).flip(1))), IMAGE),
    "a product of two inputs": (
        net(lambda m, x: m.bn(x @ x.transpose(0, 1)), bn=lambda: nn.BatchNorm1d(5)),
        (5, 4),
    ),
    "a parameter on the left of the product": (
        net(lambda m, x: m.bn(m.w @ x), bn=lambda: nn.BatchNorm1d(6), w=lambda: vector(5, 3)),
        (3, 6),
    ),
    "a batched matrix, the batch of which is the channels": (
        net(lambda m, x: m.bn(x @ m.w), bn=lambda: nn.BatchNorm2d(5), w=lambda: vector(5, 4, 6)),
        (2, 5, 3, 4),
    ),
    "a vector for a matrix": (
        net(lambda m, x: m.bn(x @ m.w), bn=lambda: nn.BatchNorm1d(3), w=lambda: vector(4)),
        (2, 3, 4),
    ),
    "an addmm whose first argument is a matrix": (
        linear(lambda m, x: m.bn(torch.addmm(m.t, x, m.w)), t=lambda: vector(5, 6), w=lambda: vector(4, 6)),
        (5, 4),
    ),
    "an addmm with alpha and beta": (
        linear(
            lambda m, x: m.bn(torch.addmm(m.t, x, m.w, alpha=2, beta=3)), t=lambda: vector(6), w=lambda: vector(4, 6)
        ),
        (5, 4),
    ),
    "an addmm whose first argument is a column": (
        linear(lambda m, x: m.bn(torch.addmm(m.t, x, m.w)), t=lambda: vector(5, 1), w=lambda: vector(4, 6)),
        (5, 4),
    ),
    "an addmm whose first argument is an input": (
        linear(lambda m, x: m.bn(torch.addmm(x[:, :1].sum(0), x, m.w)), w=lambda: vector(4, 6)),
        (5, 4),
    ),
    "an addmm of two inputs": (
        net(lambda m, x: m.bn(torch.addmm(m.t, x, x.t())), bn=lambda: nn.BatchNorm1d(5), t=lambda: vector(5)),
        (5, 4),
    ),
    "a bias that is computed": (
        net(lambda m, x: m.bn(functional.conv2d(x, m.conv.weight, x.mean((0, 2, 3)).repeat(2)[:6]))),
        IMAGE,
    ),
    "a residual before the batch norm": (
        net(lambda m, x: m.bn(m.conv(x) + x), lambda: nn.Conv2d(4, 4, 3, padding=1), lambda: nn.BatchNorm2d(4)),
        IMAGE,
    ),
    "a residual of two convolutions": (
        net(lambda m, x: m.bn(m.conv(x) + m.other(x)), other=lambda: nn.Conv2d(4, 6, 3)),
        IMAGE,
    ),
    "batch norms of one another's input": (
        net(lambda m, x: m.bn(m.conv(x)) + m.other(m.conv(x)), other=lambda: nn.BatchNorm2d(6)),
        IMAGE,
    ),
    "one batch norm of two convolutions": (
        net(lambda m, x: m.bn(m.conv(x)) + m.bn(m.other(x)), other=lambda: nn.Conv2d(4, 6, 3)),
        IMAGE,
    ),
    "a dtype changed between": (net(lambda m, x: m.bn(m.conv(x).float().double())), IMAGE),
    "a maximum between": (net(lambda m, x: m.bn(functional.max_pool2d(m.conv(x), 2))), IMAGE),
    "a mean between": (net(lambda m, x: m.bn(functional.avg_pool2d(m.conv(x), 2))), IMAGE),
    "a mean with padding between": (net(lambda m, x: m.bn(functional.avg_pool2d(m.conv(x), 2, padding=1))), IMAGE),
    "zero padding between": (net(lambda m, x: m.bn(functional.pad(m.conv(x), (1, 1, 1, 1)))), IMAGE),
    "an upsampling between": (net(lambda m, x: m.bn(functional.interpolate(m.conv(x), scale_factor=2.0))), IMAGE),
    "a prelu after, whose weight is shaped as a scale": (
        net(lambda m, x: functional.prelu(m.bn(m.conv(x)), m.t), t=lambda: vector(6)),
        IMAGE,
    ),
    "weight norm by hand": (
        net(
            lambda m, x: m.bn(functional.conv2d(x, m.t * m.conv.weight / m.conv.weight.norm(), m.conv.bias)),
            t=lambda: vector(6, 1, 1, 1),
        ),
        IMAGE,
    ),
    "a bias that is a view of the weight": (
        net(lambda m, x: m.bn(functional.conv2d(x, m.conv.weight, m.conv.weight[:, 0, 0, 0]))),
        IMAGE,
    ),
    "a weight that is its own bias": (
        net(lambda m, x: m.bn(functional.linear(x, m.w, m.w[0])), bn=lambda: nn.BatchNorm1d(4), w=lambda: vector(4, 4)),
        (5, 4),
    ),
    "one parameter as the weight of the batch norm and the bias of the convolution": (
        net(
            lambda m, x: functional.batch_norm(
                functional.conv2d(x, m.conv.weight, m.bn.weight), m.bn.running_mean, m.bn.running_var, m.bn.weight
            )
        ),
        IMAGE,
    ),
}


@pytest.mark.parametrize("options", MORE, ids=str)
@pytest.mark.parametrize("name", TRAPS)
def test_right_whatever_is_done(name, options):
    make, shape = TRAPS[name]
    checked(*in_form(make, shape), **options)


@pytest.mark.parametrize("options", MORE, ids=str)
def test_everything_is_right_in_ATEN(options):
    checked(*side_by_side([made(*row) for row in TRAPS.values()]), **options)


@pytest.mark.parametrize("options", MORE, ids=str)
def test_a_buffer_that_is_written_through_another_that_shares_its_memory(options):
    checked(*in_form(_shares_memory, IMAGE), **options)


@pytest.mark.parametrize("options", MORE, ids=str)
@pytest.mark.parametrize("form", DIALECTS)
def test_a_weight_that_is_cast_is_as_precise_as_the_cast(form, options):
    make = net(lambda m, x: m.bn(functional.conv2d(x, m.conv.weight.float().double())))
    checked(*in_form(make, IMAGE, form=form), tolerance=1e-6, **options)


WRITES = {
    "an entry": lambda w: w[0].mul_(2),
    "a slice": lambda w: w[:2].mul_(2),
    "a view": lambda w: w.view(-1).mul_(2),
    "a transposed view": lambda w: w.transpose(0, 1).mul_(2),
    "one of those unbound": lambda w: w.detach().unbind(0)[1].mul_(2),
    "one of those split": lambda w: w.detach().split(2)[1].mul_(2),
    "a strided view": lambda w: w.as_strided((2, 2), (1, 1)).mul_(2),
    "a view of a view": lambda w: w.flatten(1)[:, 1].mul_(2),
    "a diagonal": lambda w: w.diagonal().mul_(2),
    "a detached view": lambda w: w.detach()[0].mul_(2),
    "what is indexed": lambda w: w.index_put_((torch.tensor([0]),), torch.zeros(4, 3, 3, dtype=w.dtype)),
    "a copy": lambda w: w[0].copy_(w[1]),
}


SQUARE = (4, 4, 3, 3)
WRITTEN = {
    "a weight": lambda write: lambda m, x: (write(m.w), m.bn(functional.conv2d(x, m.w)))[1],
    "a weight, afterwards": lambda write: lambda m, x: (m.bn(functional.conv2d(x, m.w)), write(m.w))[0],
    "a producer's output": lambda write: lambda m, x: (y := m.conv(x), write(y), m.bn(y), y)[2:],
    "a producer's output, afterwards": lambda write: lambda m, x: (y := m.conv(x), z := m.bn(y), write(y), y, z)[3:],
    "a producer's input": lambda write: lambda m, x: (y := m.conv(x), write(x), m.bn(y), y)[2:],
    "a batch norm's output": lambda write: lambda m, x: (y := m.conv(x), z := m.bn(y), write(z), z, y)[3:],
    "a batch norm's input, before its consumer": lambda write: (
        lambda m, x: (
            z := m.bn(x),
            write(x),
            m.conv(z),
        )[2]
    ),
    "a batch norm's output, before its consumer": lambda write: lambda m, x: (z := m.bn(x), write(z), m.conv(z))[2],
    "a batch norm's output, after its consumer": lambda write: lambda m, x: (z := m.bn(x), m.conv(z), write(z))[1],
}


@pytest.mark.parametrize("options", MORE, ids=str)
@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_written_through_a_view_is_not_what_it_was(name, options):
    """The shapes are such that every write fits each. Side by side: one row a write."""
    layer, bn = (lambda: nn.Conv2d(4, 4, 1)), (lambda: nn.BatchNorm2d(4))
    buffer = {"w": lambda: nn.Buffer(torch.randn(SQUARE))}
    rows = [made(net(WRITTEN[name](write), layer, bn, **buffer), SQUARE) for write in WRITES.values()]
    checked(*side_by_side(rows, "training IR"), **options)


SHORT_WRITES = {
    "an entry": lambda v: v[0].add_(1),
    "a slice": lambda v: v[:2].mul_(2),
    "a view": lambda v: v.view(2, -1).mul_(2),
    "a strided view": lambda v: v.as_strided((2,), (1,)).mul_(2),
    "one of those unbound": lambda v: v.unbind(0)[1].mul_(2),
}


class Vectors(nn.Module):
    """A convolution, a batch norm and a scale on buffers, one of which is written first."""

    NAMES = ("mean", "var", "weight", "bias", "conv_bias", "scale")

    def __init__(self, name, write):
        super().__init__()
        self.name, self.write, self.conv = name, write, nn.Conv2d(4, 6, 3)
        for buffer in self.NAMES:
            self.register_buffer(buffer, torch.rand(6) + 0.5)

    def forward(self, x):
        self.write(getattr(self, self.name))
        y = functional.conv2d(x, self.conv.weight, self.conv_bias)
        return functional.batch_norm(y, self.mean, self.var, self.weight, self.bias) * self.scale.view(6, 1, 1)


@pytest.mark.parametrize("form", DIALECTS)
@pytest.mark.parametrize("name", Vectors.NAMES)
def test_a_vector_that_is_written_through_a_view_is_no_constant(name, form):
    rows = [made(lambda write=write: Vectors(name, write), IMAGE) for write in SHORT_WRITES.values()]
    checked(*side_by_side(rows, form))


NOT_FOLDED = (
    "linear over the last axis, batch norm over the middle",
    "channels moved to another axis",
    "the batch in the place of the channels",
    "a view of as many channels, of other elements",
    "an added matrix",
    "an added input",
    "a relu between",
    "a relu in place between",
    "a product of two inputs",
    "a parameter on the left of the product",
    "a maximum between",
)


@pytest.mark.parametrize("name", NOT_FOLDED)
def test_a_batch_norm_that_no_producer_can_take_is_left(name):
    make, shape = TRAPS[name]
    result = checked(*in_form(make, shape))
    assert (result.modified, len(result.declined)) == (False, 1)


def test_what_no_producer_can_take_is_left_in_ATEN():
    result = checked(*side_by_side([made(*TRAPS[name]) for name in NOT_FOLDED]))
    assert (result.modified, len(result.declined)) == (False, len(NOT_FOLDED))


# Dtypes. The reference is the same module in float64.


@pytest.mark.parametrize("form", DIALECTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", HALVES)
@pytest.mark.parametrize("kind", LAYERS)
def test_half_precision_is_folded_in_full(kind, name, dtype, form):
    """Within 4 eps of the result in float64, and weights within half an eps of their own."""
    make, bn, shape = LAYERS[kind]
    torch.manual_seed(0)
    module = HALVES[name](lively(Pair(make(4, 6), bn(6))), dtype)
    x = torch.randn(shape).to(dtype)
    result = folded(FORMS[form](export(module, x)), x, tolerance=16 * torch.finfo(dtype).eps)
    (found,) = outputs(result.program, x)
    (want,) = outputs(module.double(), x.double())
    assert distance(found.double(), want) < 4 * torch.finfo(dtype).eps
    weight = result.program.state_dict["producer.weight"]
    assert weight.dtype == dtype
    assert same(weight, by_hand(module, transposed="transpose" in kind)[0].to(dtype))


@pytest.mark.parametrize("form", DIALECTS)
def test_the_weights_are_those_of_float64_cast_once(form):
    torch.manual_seed(0)
    module = lively(Pair(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6)), torch.float32)
    x = torch.randn(IMAGE)
    state = tbn.fold(FORMS[form](export(module, x))).state_dict
    weight, bias = by_hand(module.double())
    assert same(state["producer.weight"].detach(), weight.float())
    assert same(state["producer.bias"].detach(), bias.float())


@pytest.mark.parametrize("form", DIALECTS)
def test_above_a_size_the_arithmetic_may_be_of_float32(form):
    program, x = in_form(net(lambda m, x: m.bn(m.conv(x))), IMAGE, form=form, dtype=torch.float32)
    for limit in (0, 10**9):
        folded(program, x, float32_above=limit, tolerance=1e-5)
