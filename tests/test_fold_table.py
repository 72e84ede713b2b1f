"""Fold, row by row: what is folded, into what, to what precision, and what is left alone and why."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import torch_batchnorm as tbn
from folds import (
    DIALECTS,
    FORMS,
    Net,
    calls,
    checked,
    decomposed,
    distance,
    distances,
    folded,
    in_form,
    lively,
    made,
    outputs,
    pairwise,
    product,
    sites,
    vector,
)
from programs import aten, export, nodes, same, saved_and_loaded

CONVS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
IMAGE = (2, 4, 9, 8)


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


class Pair(nn.Module):
    def __init__(self, producer, bn):
        super().__init__()
        self.producer, self.bn = producer, bn

    def forward(self, x):
        return self.bn(self.producer(x))


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


FULL = {"affine": (True, False), "bias": (True, False), "dtype": (torch.float64,), "eps": (1e-5,)}


@pytest.mark.parametrize("kind", ["conv1d", "conv_transpose2d"])
def test_every_combination_of_what_a_convolution_takes(kind):
    _, factors, *_, possible = KINDS[kind]
    program, inputs, tolerances = _many(kind, product(possible, **factors, **FULL))
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


def _net(function, conv=None, bn=None, **members):
    """A function of a 2-D convolution from 4 to 6 channels and a batch norm, unless others are given."""
    return lambda: Net(
        function,
        conv=(conv or (lambda: nn.Conv2d(4, 6, 3)))(),
        bn=(bn or (lambda: nn.BatchNorm2d(6)))(),
        **{name: make() for name, make in members.items()},
    )


def _linear(function, **members):
    return _net(function, lambda: nn.Linear(4, 6), lambda: nn.BatchNorm1d(6), **members)


SPELLED = {
    "a batch norm without a bias": (_net(lambda m, x: _bn(m.conv(x), m, bias=False)), IMAGE),
    "a batch norm without a weight": (_net(lambda m, x: _bn(m.conv(x), m, weight=False)), IMAGE),
    **{
        f"a batch norm spelled as {form}": (_net(lambda m, x, form=form: _eval(form, m.conv(x), m.bn)), IMAGE)
        for form in ("native", "legit", "no_training", "impl_index", "family")
    },
    "flattened images": (_net(lambda m, x: m.bn(m.conv(x).flatten(2)), bn=lambda: nn.BatchNorm1d(6)), IMAGE),
    "images seen as rows": (_net(lambda m, x: m.bn(m.conv(x).view(2, 6, -1)), bn=lambda: nn.BatchNorm1d(6)), IMAGE),
    "images reshaped to rows": (
        _net(lambda m, x: m.bn(m.conv(x).reshape(2, 6, -1)), bn=lambda: nn.BatchNorm1d(6)),
        IMAGE,
    ),
    "rows unsqueezed to images": (
        _net(lambda m, x: m.bn(m.conv(x).unsqueeze(-1)), conv=lambda: nn.Conv1d(4, 6, 3)),
        (2, 4, 9),
    ),
    "rows unsqueezed in the middle": (
        _net(lambda m, x: m.bn(m.conv(x).unsqueeze(2)), conv=lambda: nn.Conv1d(4, 6, 3)),
        (2, 4, 9),
    ),
    "height and width swapped": (_net(lambda m, x: m.bn(m.conv(x).transpose(2, 3))), IMAGE),
    "height and width permuted, counted from the end": (
        _net(lambda m, x: m.bn(m.conv(x).permute(0, 1, -1, -2))),
        IMAGE,
    ),
    "there and back": (_net(lambda m, x: m.bn(m.conv(x).permute(0, 2, 3, 1).permute(0, 3, 1, 2))), IMAGE),
    "swapped and contiguous": (_net(lambda m, x: m.bn(m.conv(x).transpose(2, 3).contiguous())), IMAGE),
    "a clone": (_net(lambda m, x: m.bn(m.conv(x).clone())), IMAGE),
    "a dropout in eval": (_net(lambda m, x: m.bn(m.drop(m.conv(x))), drop=lambda: nn.Dropout(0.5)), IMAGE),
    "a channel dropout in eval": (_net(lambda m, x: m.bn(m.drop(m.conv(x))), drop=lambda: nn.Dropout2d(0.5)), IMAGE),
    "an identity": (_net(lambda m, x: m.bn(m.drop(m.conv(x))), drop=nn.Identity), IMAGE),
    "a linear seen as an image": (
        _net(lambda m, x: m.bn(m.conv(x).view(5, 6, 1, 1)), conv=lambda: nn.Linear(4, 6)),
        (5, 4),
    ),
    "a linear unsqueezed": (_linear(lambda m, x: m.bn(m.conv(x).unsqueeze(-1))), (5, 4)),
    "a linear seen as rows": (_linear(lambda m, x: m.bn(m.conv(x).view(-1, 6))), (2, 3, 4)),
    "a linear reshaped to rows and back": (
        _linear(lambda m, x: m.bn(m.conv(x).reshape(-1, 6)).reshape(2, 3, 6)),
        (2, 3, 4),
    ),
    "a linear, transposed there and back": (
        _linear(lambda m, x: m.bn(m.conv(x).transpose(1, 2)).transpose(1, 2)),
        (2, 3, 4),
    ),
    "a linear and an added vector": (_linear(lambda m, x: m.bn(m.conv(x) + m.t), t=lambda: vector(6)), (5, 4)),
    "a linear and a subtracted vector": (_linear(lambda m, x: m.bn(m.conv(x) - m.t), t=lambda: vector(6)), (5, 4)),
    "a vector and a matmul": (
        _net(
            lambda m, x: m.bn(m.t + x @ m.w),
            nn.Identity,
            lambda: nn.BatchNorm1d(6),
            t=lambda: vector(6),
            w=lambda: vector(4, 6),
        ),
        (5, 4),
    ),
    "a linear with a row as its bias": (
        _linear(lambda m, x: m.bn(m.conv(x) + m.t), t=lambda: vector(1, 6)),
        (5, 4),
    ),
    "an addmm with alpha and beta": (
        _linear(
            lambda m, x: m.bn(torch.addmm(m.t, x, m.w, alpha=2, beta=3)), t=lambda: vector(6), w=lambda: vector(4, 6)
        ),
        (5, 4),
    ),
    "one image of one pixel": (_net(lambda m, x: m.bn(m.conv(x))), (1, 4, 3, 3)),
    "an image without a batch of its own": (
        _net(lambda m, x: m.bn(m.conv(x).unsqueeze(0))),
        (4, 9, 8),
    ),
    "one channel": (_net(lambda m, x: m.bn(m.conv(x)), lambda: nn.Conv2d(4, 1, 3), lambda: nn.BatchNorm2d(1)), IMAGE),
    "an empty batch": (_net(lambda m, x: m.bn(m.conv(x))), (0, 4, 9, 8)),
    "a convolution whose bias is all there is of it": (
        _net(lambda m, x: m.bn(functional.conv2d(x, m.conv.weight, m.t)), t=lambda: vector(6)),
        IMAGE,
    ),
}


@pytest.mark.parametrize("form", DIALECTS)
@pytest.mark.parametrize("name", SPELLED)
def test_a_batch_norm_goes_into_what_makes_its_input(name, form):
    make, shape = SPELLED[name]
    folded(*in_form(make, shape, form=form))


@pytest.mark.parametrize("form", DIALECTS)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("weights", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("kernel", [1, 3])
def test_the_layout_of_the_output_stays(kernel, weights, layout, form):
    module, x = made(_net(lambda m, x: m.bn(m.conv(x)), lambda: nn.Conv2d(4, 6, kernel)), IMAGE)
    module, x = module.to(memory_format=weights), x.contiguous(memory_format=layout)
    folded(FORMS[form](export(module, x)), x)


@pytest.mark.parametrize("form", DIALECTS)
def test_sizes_that_are_not_known_stay_free(form):
    make = _net(lambda m, x: m.bn(m.conv(x).flatten(2)), bn=lambda: nn.BatchNorm1d(6))
    module, x = made(make, (3, 4, 9, 9))
    batch, size = torch.export.Dim("batch", min=2), torch.export.Dim("size", min=5)
    program = FORMS[form](export(module, x, dynamic=({0: batch, 2: size, 3: size},)))
    result = folded(program, x)
    other = torch.randn(5, 4, 12, 12, dtype=torch.float64)
    for found in (result.program, saved_and_loaded(result.program)):
        assert max(distances(outputs(found, other), outputs(program, other))) < 1e-12
    assert str(result.program.range_constraints) == str(program.range_constraints)


# Whatever is done about these, the program stays right: traps for a fold that looks at less than it has to.

TRAPS = {
    "linear over the last axis, batch norm over the middle": (
        _net(lambda m, x: m.bn(m.conv(x)), lambda: nn.Linear(3, 5), lambda: nn.BatchNorm1d(5)),
        (2, 5, 3),
    ),
    "linear of an image, batch norm over the channels": (
        _net(lambda m, x: m.bn(m.conv(x)), lambda: nn.Linear(8, 6), lambda: nn.BatchNorm2d(4)),
        IMAGE,
    ),
    "channels moved to another axis": (
        _net(lambda m, x: m.bn(m.conv(x).permute(0, 2, 1, 3)), bn=lambda: nn.BatchNorm2d(6)),
        (2, 4, 8, 8),
    ),
    "the batch in the place of the channels": (
        _net(lambda m, x: m.bn(m.conv(x).transpose(0, 1))),
        (6, 4, 5, 5),
    ),
    "a view that mixes channels and width": (
        _net(lambda m, x: m.bn(m.conv(x).view(2, 12, -1, 6)), bn=lambda: nn.BatchNorm2d(12)),
        (2, 4, 8, 8),
    ),
    "a view that splits the channels": (
        _net(lambda m, x: m.bn(m.conv(x).view(2, 3, 2, -1)), bn=lambda: nn.BatchNorm2d(3)),
        (2, 4, 8, 8),
    ),
    "a view of as many channels, of other elements": (
        _net(lambda m, x: m.bn(m.conv(x).permute(0, 2, 3, 1).reshape(2, 6, 6, 6))),
        (2, 4, 8, 8),
    ),
    "a flatten that counts channels and places as one": (
        _net(lambda m, x: m.bn(m.conv(x).flatten(1)), bn=lambda: nn.BatchNorm1d(24)),
        (5, 4, 4, 4),
    ),
    "the batch put into the channels": (
        _net(lambda m, x: m.bn(m.conv(x).view(1, 12, 7, 6)), bn=lambda: nn.BatchNorm2d(12)),
        IMAGE,
    ),
    "an added vector that runs along the width": (
        _net(lambda m, x: m.bn(m.conv(x) + m.t), t=lambda: vector(6)),
        (2, 4, 8, 8),
    ),
    "an added matrix": (_linear(lambda m, x: m.bn(m.conv(x) + m.t), t=lambda: vector(6, 6)), (6, 4)),
    "an added input": (_linear(lambda m, x: m.bn(m.conv(x) + x.sum())), (5, 4)),
    "a relu between": (_net(lambda m, x: m.bn(m.conv(x).relu())), IMAGE),
    "a relu in place between": (_net(lambda m, x: m.bn(m.conv(x).relu_())), IMAGE),
    "an addition in place between": (_net(lambda m, x: m.bn(m.conv(x).add_(1))), IMAGE),
    "an addition in place, dropped between": (
        _net(lambda m, x: (y := m.conv(x), y.add_(1), m.bn(y))[2]),
        IMAGE,
    ),
    "a write in place to the producer's output afterwards": (
        _net(lambda m, x: (y := m.conv(x), m.bn(y), y.mul_(2))[1:]),
        IMAGE,
    ),
    "a write in place through a view of the producer's output": (
        _net(lambda m, x: (y := m.conv(x), y[:, :2].zero_(), m.bn(y))[2]),
        IMAGE,
    ),
    "a write in place to the batch norm's output": (
        _net(lambda m, x: m.bn(m.conv(x)).mul_(2).add_(m.t), t=lambda: vector(6, 1, 1)),
        IMAGE,
    ),
    "a dropout that drops": (_net(lambda m, x: m.bn(functional.dropout(m.conv(x), 0.0, True))), IMAGE),
    "a slice of the channels": (
        _net(lambda m, x: m.bn(m.conv(x)[:, :3]), bn=lambda: nn.BatchNorm2d(3)),
        IMAGE,
    ),
    "channels that are expanded": (
        _net(lambda m, x: m.bn(m.conv(x).expand(-1, 6, -1, -1)), conv=lambda: nn.Conv2d(4, 1, 3)),
        IMAGE,
    ),
    "a pixel shuffle": (
        _net(
            lambda m, x: m.bn(m.conv(x)),
            lambda: nn.Sequential(nn.Conv2d(4, 8, 3), nn.PixelShuffle(2)),
            lambda: nn.BatchNorm2d(2),
        ),
        IMAGE,
    ),
    "a channel shuffle": (
        _net(lambda m, x: m.bn(functional.channel_shuffle(m.conv(x), 2))),
        IMAGE,
    ),
    "a flip of the channels": (_net(lambda m, x: m.bn(m.conv(x).flip(1))), IMAGE),
    "a product of two inputs": (
        _net(lambda m, x: m.bn(x @ x.transpose(0, 1)), bn=lambda: nn.BatchNorm1d(5)),
        (5, 4),
    ),
    "a parameter on the left of the product": (
        _net(lambda m, x: m.bn(m.w @ x), bn=lambda: nn.BatchNorm1d(6), w=lambda: vector(5, 3)),
        (3, 6),
    ),
    "a batched matrix, the batch of which is the channels": (
        _net(lambda m, x: m.bn(x @ m.w), bn=lambda: nn.BatchNorm1d(5), w=lambda: vector(5, 4, 6)),
        (2, 5, 3, 4),
    ),
    "a vector for a matrix": (
        _net(lambda m, x: m.bn(x @ m.w), bn=lambda: nn.BatchNorm1d(3), w=lambda: vector(4)),
        (2, 3, 4),
    ),
    "an addmm whose first argument is a matrix": (
        _linear(lambda m, x: m.bn(torch.addmm(m.t, x, m.w)), t=lambda: vector(5, 6), w=lambda: vector(4, 6)),
        (5, 4),
    ),
    "an addmm whose first argument is a column": (
        _linear(lambda m, x: m.bn(torch.addmm(m.t, x, m.w)), t=lambda: vector(5, 1), w=lambda: vector(4, 6)),
        (5, 4),
    ),
    "an addmm whose first argument is an input": (
        _linear(lambda m, x: m.bn(torch.addmm(x[:, :1].sum(0), x, m.w)), w=lambda: vector(4, 6)),
        (5, 4),
    ),
    "an addmm of two inputs": (
        _net(lambda m, x: m.bn(torch.addmm(m.t, x, x.t())), bn=lambda: nn.BatchNorm1d(5), t=lambda: vector(5)),
        (5, 4),
    ),
    "a bias that is computed": (
        _net(lambda m, x: m.bn(functional.conv2d(x, m.conv.weight, x.mean((0, 2, 3)).repeat(2)[:6]))),
        IMAGE,
    ),
    "a residual before the batch norm": (
        _net(lambda m, x: m.bn(m.conv(x) + x), lambda: nn.Conv2d(4, 4, 3, padding=1), lambda: nn.BatchNorm2d(4)),
        IMAGE,
    ),
    "a residual of two convolutions": (
        _net(lambda m, x: m.bn(m.conv(x) + m.other(x)), other=lambda: nn.Conv2d(4, 6, 3)),
        IMAGE,
    ),
    "batch norms of one another's input": (
        _net(lambda m, x: m.bn(m.conv(x)) + m.other(m.conv(x)), other=lambda: nn.BatchNorm2d(6)),
        IMAGE,
    ),
    "one batch norm of two convolutions": (
        _net(lambda m, x: m.bn(m.conv(x)) + m.bn(m.other(x)), other=lambda: nn.Conv2d(4, 6, 3)),
        IMAGE,
    ),
    "a dtype changed between": (_net(lambda m, x: m.bn(m.conv(x).float().double())), IMAGE),
    "a maximum between": (_net(lambda m, x: m.bn(functional.max_pool2d(m.conv(x), 2))), IMAGE),
    "a mean between": (_net(lambda m, x: m.bn(functional.avg_pool2d(m.conv(x), 2))), IMAGE),
    "a mean with padding between": (_net(lambda m, x: m.bn(functional.avg_pool2d(m.conv(x), 2, padding=1))), IMAGE),
    "zero padding between": (_net(lambda m, x: m.bn(functional.pad(m.conv(x), (1, 1, 1, 1)))), IMAGE),
    "an upsampling between": (_net(lambda m, x: m.bn(functional.interpolate(m.conv(x), scale_factor=2.0))), IMAGE),
    "a prelu after, whose weight is shaped as a scale": (
        _net(lambda m, x: functional.prelu(m.bn(m.conv(x)), m.t), t=lambda: vector(6)),
        IMAGE,
    ),
    "weight norm by hand": (
        _net(
            lambda m, x: m.bn(functional.conv2d(x, m.t * m.conv.weight / m.conv.weight.norm(), m.conv.bias)),
            t=lambda: vector(6, 1, 1, 1),
        ),
        IMAGE,
    ),
    "a bias that is a view of the weight": (
        _net(lambda m, x: m.bn(functional.conv2d(x, m.conv.weight, m.conv.weight[:, 0, 0, 0]))),
        IMAGE,
    ),
    "a weight that is its own bias": (
        _net(
            lambda m, x: m.bn(functional.linear(x, m.w, m.w[0])), bn=lambda: nn.BatchNorm1d(4), w=lambda: vector(4, 4)
        ),
        (5, 4),
    ),
    "one parameter as the weight of the batch norm and the bias of the convolution": (
        _net(
            lambda m, x: functional.batch_norm(
                functional.conv2d(x, m.conv.weight, m.bn.weight), m.bn.running_mean, m.bn.running_var, m.bn.weight
            )
        ),
        IMAGE,
    ),
}


@pytest.mark.parametrize("form", DIALECTS)
@pytest.mark.parametrize("name", TRAPS)
def test_right_whatever_is_done(name, form):
    make, shape = TRAPS[name]
    checked(*in_form(make, shape, form=form))
    checked(*in_form(make, shape, form=form), clone_calls=True, clone_weights=True, alone="multiply_add")


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


@pytest.mark.parametrize("form", DIALECTS)
@pytest.mark.parametrize("name", NOT_FOLDED)
def test_a_batch_norm_that_no_producer_can_take_is_left(name, form):
    make, shape = TRAPS[name]
    result = checked(*in_form(make, shape, form=form))
    assert (result.modified, len(result.declined)) == (False, 1)


# Before its consumer.

SMALL = (2, 4, 6, 5)


def _first(consumer, between=None, bn=None):
    """A batch norm of 4 channels before a consumer, with a function of the batch norm's output between."""
    between = between or (lambda y: y)
    return lambda: Net(
        lambda m, x: m.consumer(between(m.bn(x))), bn=(bn or (lambda: nn.BatchNorm2d(4)))(), consumer=consumer()
    )


def _shiftless(module):
    """The module, its batch norms such that they map zero to zero."""
    for bn in (m for m in module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)):
        nn.init.zeros_(bn.running_mean)
        if bn.affine:
            nn.init.zeros_(bn.bias)
    return module


def _bn1d(channels=4):
    return lambda: nn.BatchNorm1d(channels)


TAKEN = {
    "a convolution without padding": (_first(lambda: nn.Conv2d(4, 6, 3)), SMALL),
    "a convolution without padding or bias": (_first(lambda: nn.Conv2d(4, 6, 3, bias=False)), SMALL),
    "a convolution, strided and dilated": (_first(lambda: nn.Conv2d(4, 6, 2, stride=2, dilation=2)), SMALL),
    "a convolution of kernel 1": (_first(lambda: nn.Conv2d(4, 6, 1)), SMALL),
    "a convolution of kernel 1 with padding 'same'": (_first(lambda: nn.Conv2d(4, 6, 1, padding="same")), SMALL),
    "a convolution with padding 'valid'": (_first(lambda: nn.Conv2d(4, 6, 3, padding="valid")), SMALL),
    "a convolution of two groups": (_first(lambda: nn.Conv2d(4, 6, 3, groups=2)), SMALL),
    "a depthwise convolution": (_first(lambda: nn.Conv2d(4, 8, 3, groups=4, bias=False)), SMALL),
    "a convolution in 1-D": (_first(lambda: nn.Conv1d(4, 6, 3), bn=_bn1d()), (2, 4, 7)),
    "a convolution in 3-D": (
        _first(lambda: nn.Conv3d(4, 6, 2, groups=2), bn=lambda: nn.BatchNorm3d(4)),
        (2, 4, 3, 4, 5),
    ),
    "a convolution after a batch norm without a weight": (
        _first(lambda: nn.Conv2d(4, 6, 3), bn=lambda: nn.BatchNorm2d(4, affine=False)),
        SMALL,
    ),
    "a transposed convolution of kernel 1": (_first(lambda: nn.ConvTranspose2d(4, 6, 1)), SMALL),
    "a transposed convolution of kernel 1, two groups, no bias": (
        _first(lambda: nn.ConvTranspose2d(4, 6, 1, groups=2, bias=False)),
        SMALL,
    ),
    "a transposed convolution of kernel 1 in 1-D, depthwise": (
        _first(lambda: nn.ConvTranspose1d(4, 4, 1, groups=4), bn=_bn1d()),
        (2, 4, 7),
    ),
    "a linear": (_first(lambda: nn.Linear(4, 6), bn=_bn1d()), (5, 4)),
    "a linear without a bias": (_first(lambda: nn.Linear(4, 6, bias=False), bn=_bn1d()), (5, 4)),
    "a linear of flattened images": (_first(lambda: nn.Linear(120, 6), lambda y: y.flatten(1)), SMALL),
    "a linear of images seen as rows": (_first(lambda: nn.Linear(120, 6), lambda y: y.view(2, -1)), SMALL),
    "a matmul by a parameter": (
        _first(lambda: Net(lambda m, x: x @ m.weight, weight=vector(4, 6)), bn=_bn1d()),
        (5, 4),
    ),
    "an addmm": (
        _first(
            lambda: Net(lambda m, x: torch.addmm(m.bias, x, m.weight), weight=vector(4, 6), bias=vector(6)), bn=_bn1d()
        ),
        (5, 4),
    ),
    "two convolutions": (
        _first(lambda: Net(lambda m, x: m.a(x) + m.b(x), a=nn.Conv2d(4, 6, 3), b=nn.Conv2d(4, 6, 3, bias=False))),
        SMALL,
    ),
    "a convolution and a linear": (
        _first(lambda: Net(lambda m, x: (m.a(x), m.b(x.flatten(1))), a=nn.Conv2d(4, 6, 3), b=nn.Linear(120, 6))),
        SMALL,
    ),
}
# Where zero padding would have to be the batch norm's shift: taken only without one.
NOT_TAKEN = {
    "a convolution with padding": (_first(lambda: nn.Conv2d(4, 6, 3, padding=1)), SMALL),
    "a convolution with padding on one axis": (_first(lambda: nn.Conv2d(4, 6, 3, padding=(0, 1))), SMALL),
    "a convolution with padding 'same'": (_first(lambda: nn.Conv2d(4, 6, 3, padding="same")), SMALL),
    "a convolution of kernel 1 with padding": (_first(lambda: nn.Conv2d(4, 6, 1, padding=1)), SMALL),
    "a depthwise convolution with padding": (_first(lambda: nn.Conv2d(4, 4, 3, padding=1, groups=4)), SMALL),
    "a convolution in 1-D with padding": (_first(lambda: nn.Conv1d(4, 6, 3, padding=2), bn=_bn1d()), (2, 4, 7)),
    "a transposed convolution": (_first(lambda: nn.ConvTranspose2d(4, 6, 2)), SMALL),
    "a transposed convolution with a stride": (_first(lambda: nn.ConvTranspose2d(4, 6, 1, stride=2)), SMALL),
    "a transposed convolution, strided and padded": (
        _first(lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2)),
        SMALL,
    ),
}
# Never taken.
OUT_OF_REACH = {
    "a linear over the last axis": (_first(lambda: nn.Linear(4, 6)), (2, 4, 5, 4)),
    "a relu": (_first(lambda: nn.Conv2d(4, 6, 3), lambda y: y.relu()), SMALL),
    "a convolution and a relu": (_first(lambda: Net(lambda m, x: (m.a(x), x.relu()), a=nn.Conv2d(4, 6, 3))), SMALL),
    "a convolution and the caller": (_first(lambda: Net(lambda m, x: (m.a(x), x), a=nn.Conv2d(4, 6, 3))), SMALL),
    "a convolution, and one with padding": (
        _first(lambda: Net(lambda m, x: (m.a(x), m.b(x)), a=nn.Conv2d(4, 6, 3), b=nn.Conv2d(4, 6, 3, padding=1))),
        SMALL,
    ),
    "a convolution by what is normalised": (
        _first(lambda: Net(lambda m, x: functional.conv2d(m.t.expand(1, 4, 6, 6), x), t=vector(1, 1, 1))),
        (4, 4, 3, 3),
    ),
    "a product with itself": (_first(lambda: Net(lambda m, x: x @ x.transpose(0, 1)), bn=_bn1d()), (5, 4)),
    "a parameter on the left": (
        _first(lambda: Net(lambda m, x: m.weight @ x, weight=vector(3, 5)), bn=_bn1d()),
        (5, 4),
    ),
    "the added matrix of an addmm": (
        _first(lambda: Net(lambda m, x: torch.addmm(x, m.a, m.b), a=vector(5, 3), b=vector(3, 4)), bn=_bn1d()),
        (5, 4),
    ),
    "the bias of a linear": (
        _first(lambda: Net(lambda m, x: functional.linear(m.a, m.b, x[0]), a=vector(5, 3), b=vector(4, 3)), bn=_bn1d()),
        (5, 4),
    ),
}
CONSUMERS_EITHER_WAY = {
    "a linear of transposed rows": (_first(lambda: nn.Linear(4, 6), lambda y: y.transpose(1, 2), _bn1d()), (2, 4, 5)),
    "a linear of images, channels last": (_first(lambda: nn.Linear(4, 6), lambda y: y.permute(0, 2, 3, 1)), SMALL),
    "a linear of permuted, flattened images": (
        _first(lambda: nn.Linear(120, 6), lambda y: y.permute(0, 2, 3, 1).flatten(1)),
        SMALL,
    ),
    "a linear of half the flattened": (_first(lambda: nn.Linear(60, 6), lambda y: y.flatten(1)[:, :60]), SMALL),
    "a linear of images flattened in two": (_first(lambda: nn.Linear(60, 6), lambda y: y.reshape(4, 60)), SMALL),
    "a linear of flattened rows of width": (_first(lambda: nn.Linear(30, 6), lambda y: y.flatten(2)), SMALL),
    "a convolution of swapped axes": (_first(lambda: nn.Conv2d(4, 6, 3), lambda y: y.transpose(2, 3)), SMALL),
    "a convolution of channels that were another axis": (
        _first(lambda: nn.Conv2d(4, 6, 3), lambda y: y.transpose(1, 2)),
        (2, 4, 4, 5),
    ),
    "a convolution of the unbatched": (_first(lambda: nn.Conv2d(4, 6, 3), lambda y: y[0]), SMALL),
    "a convolution with reflected padding": (
        _first(lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect")),
        SMALL,
    ),
    "a convolution with padding by hand": (
        _first(lambda: nn.Conv2d(4, 6, 3), lambda y: functional.pad(y, (1, 1, 1, 1))),
        SMALL,
    ),
    "a convolution with padding by hand, of ones": (
        _first(lambda: nn.Conv2d(4, 6, 3), lambda y: functional.pad(y, (1, 1, 1, 1), value=1.0)),
        SMALL,
    ),
    "a convolution with padding cut off": (
        _first(lambda: nn.Conv2d(4, 6, 3), lambda y: functional.pad(y, (-1, 0, 0, -1))),
        SMALL,
    ),
    "a transposed convolution of kernel 1, cut": (_first(lambda: nn.ConvTranspose2d(4, 6, 1, padding=1)), SMALL),
    "a linear of the mean": (_first(lambda: nn.Linear(4, 6), lambda y: y.mean((2, 3))), SMALL),
    "a linear after a dropout in eval": (
        _first(lambda: nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 6)), bn=_bn1d()),
        (5, 4),
    ),
    "one convolution of it twice": (
        _first(lambda: Net(lambda m, x: m.a(x) + m.a(x), a=nn.Conv2d(4, 6, 3))),
        SMALL,
    ),
    "one convolution of it and of a relu": (
        _first(lambda: Net(lambda m, x: m.a(x) + m.a(m.b(x)), a=nn.Conv2d(4, 4, 3, padding=0), b=nn.Conv2d(4, 4, 1))),
        SMALL,
    ),
    "a bilinear product": (_first(lambda: Net(lambda m, x: m.b(x, x), b=nn.Bilinear(4, 4, 3)), bn=_bn1d()), (5, 4)),
}


@pytest.mark.parametrize("form", DIALECTS)
@pytest.mark.parametrize("name", TAKEN)
def test_a_batch_norm_goes_into_what_reads_it(name, form):
    make, shape = TAKEN[name]
    folded(*in_form(make, shape, form=form))


def _given_no_shift(name, form, table):
    make, shape = table[name]
    module, x = made(make, shape)
    return FORMS[form](export(_shiftless(module), x)), x


@pytest.mark.parametrize("form", DIALECTS)
@pytest.mark.parametrize("name", NOT_TAKEN)
def test_padding_sees_a_shift_and_nothing_else(name, form):
    make, shape = NOT_TAKEN[name]
    result = checked(*in_form(make, shape, form=form))
    assert (result.modified, len(result.declined)) == (False, 1)
    folded(*_given_no_shift(name, form, NOT_TAKEN))


@pytest.mark.parametrize("form", DIALECTS)
@pytest.mark.parametrize("name", OUT_OF_REACH)
def test_what_no_consumer_can_take_is_left(name, form):
    make, shape = OUT_OF_REACH[name]
    for program, x in (in_form(make, shape, form=form), _given_no_shift(name, form, OUT_OF_REACH)):
        result = checked(program, x)
        assert (result.modified, len(result.declined)) == (False, 1)


@pytest.mark.parametrize("form", DIALECTS)
@pytest.mark.parametrize("name", CONSUMERS_EITHER_WAY)
def test_a_consumer_is_right_whatever_is_done(name, form):
    make, shape = CONSUMERS_EITHER_WAY[name]
    checked(*in_form(make, shape, form=form))
    checked(*in_form(make, shape, form=form), clone_calls=True, clone_weights=True, alone="depthwise")
    checked(*_given_no_shift(name, form, CONSUMERS_EITHER_WAY))


@pytest.mark.parametrize("form", DIALECTS)
def test_a_batch_norm_between_two_convolutions_goes_into_one(form):
    make = _net(lambda m, x: m.last(m.bn(m.conv(x))), last=lambda: nn.Conv2d(6, 3, 2))
    result = folded(*in_form(make, IMAGE, form=form))
    assert len(calls(result.program)) == 2


# Concatenations, several batch norms in a row, scales and shifts.


def _cat(function, channels=10, **members):
    """A function of two convolutions, of 4 and of 6 channels, and a batch norm of what they are together."""
    return _net(
        function,
        lambda: nn.Conv2d(4, 6, 3),
        lambda: nn.BatchNorm2d(channels),
        other=lambda: nn.Conv2d(4, 4, 3),
        **members,
    )


CONCATENATED = {
    "two convolutions": _cat(lambda m, x: m.bn(torch.cat([m.conv(x), m.other(x)], 1))),
    "two convolutions, the axis counted from the end": _cat(lambda m, x: m.bn(torch.cat([m.conv(x), m.other(x)], -3))),
    "three, one without a bias": _cat(
        lambda m, x: m.bn(torch.cat([m.conv(x), m.other(x), m.third(x)], 1)),
        13,
        third=lambda: nn.Conv2d(4, 3, 3, bias=False),
    ),
    "a concatenation in a concatenation": _cat(
        lambda m, x: m.bn(torch.cat([torch.cat([m.conv(x), m.other(x)], 1), m.third(x)], 1)),
        13,
        third=lambda: nn.Conv2d(4, 3, 3),
    ),
    "one after the other of one input": _cat(lambda m, x: m.bn(torch.cat((m.conv(x), m.other(x)), dim=1)).relu()),
    "a transposed and a plain convolution": _cat(
        lambda m, x: m.bn(torch.cat([m.up(x), m.wide(x)], 1)),
        11,
        up=lambda: nn.ConvTranspose2d(4, 5, 3),
        wide=lambda: nn.Conv2d(4, 6, 3, padding=2),
    ),
    "a single branch": _cat(lambda m, x: m.bn(torch.cat([m.conv(x)], 1)), 6),
}
CONCATENATED_EITHER_WAY = {
    "a convolution and an input": _cat(lambda m, x: m.bn(torch.cat([m.conv(x), x[:, :, 2:, 2:]], 1))),
    "a convolution and a relu": _cat(lambda m, x: m.bn(torch.cat([m.conv(x), m.other(x).relu()], 1))),
    "a convolution twice": _cat(lambda m, x: m.bn(torch.cat([m.conv(x)] * 2, 1)), 12),
    "one output twice": _cat(lambda m, x: (y := m.conv(x), m.bn(torch.cat([y, y], 1)))[1], 12),
    "a convolution that is read elsewhere": _cat(
        lambda m, x: (y := m.conv(x), m.bn(torch.cat([y, m.other(x)], 1)), y.sum())[1:]
    ),
    "a dense block": _cat(
        lambda m, x: (y := m.conv(x), z := m.one(y), m.bn(torch.cat([y, z], 1)))[2], one=lambda: nn.Conv2d(6, 4, 1)
    ),
    "batches one after the other": _cat(
        lambda m, x: m.bn(torch.cat([m.conv(x), m.third(x)], 0)), 6, third=lambda: nn.Conv2d(4, 6, 3)
    ),
    "images side by side": _cat(
        lambda m, x: m.bn(torch.cat([m.conv(x), m.third(x)], 3)), 6, third=lambda: nn.Conv2d(4, 6, 3)
    ),
    "two batch norms of it": _cat(
        lambda m, x: (y := torch.cat([m.conv(x), m.other(x)], 1), m.bn(y) + m.second(y))[1],
        second=lambda: nn.BatchNorm2d(10),
    ),
    "a concatenation that is read elsewhere": _cat(
        lambda m, x: (y := torch.cat([m.conv(x), m.other(x)], 1), m.bn(y), y.relu())[1:]
    ),
    "a batch norm and a convolution": _cat(
        lambda m, x: m.bn(torch.cat([m.second(m.conv(x)), m.other(x)], 1)), second=lambda: nn.BatchNorm2d(6)
    ),
    "a stack": _cat(
        lambda m, x: m.bn(torch.stack([m.conv(x), m.third(x)], 1).flatten(1, 2)), 12, third=lambda: nn.Conv2d(4, 6, 3)
    ),
    "a batch norm before convolutions of each part": _cat(
        lambda m, x: (y := m.bn(torch.cat([x, x.relu()], 1)), m.conv(y[:, :4]) + m.third(y[:, 4:]))[1],
        8,
        third=lambda: nn.Conv2d(4, 6, 3),
    ),
}


@pytest.mark.parametrize("form", DIALECTS)
@pytest.mark.parametrize("name", CONCATENATED)
def test_a_batch_norm_of_a_concatenation_goes_into_its_branches(name, form):
    folded(*in_form(CONCATENATED[name], IMAGE, form=form))


@pytest.mark.parametrize("form", DIALECTS)
@pytest.mark.parametrize("name", CONCATENATED_EITHER_WAY)
def test_a_concatenation_is_right_whatever_is_done(name, form):
    checked(*in_form(CONCATENATED_EITHER_WAY[name], IMAGE, form=form))
    checked(
        *in_form(CONCATENATED_EITHER_WAY[name], IMAGE, form=form),
        clone_calls=True,
        clone_weights=True,
        alone="multiply_add",
    )


ROWS_OF = {
    "a convolution, then two": (_net(lambda m, x: m.more(m.bn(m.conv(x))), more=lambda: nn.BatchNorm2d(6)), 2),
    "a convolution, then three": (
        _net(lambda m, x: m.more(m.bn(m.conv(x))), more=lambda: nn.Sequential(nn.BatchNorm2d(6), nn.BatchNorm2d(6))),
        3,
    ),
    "a convolution, then one of them twice": (_net(lambda m, x: m.bn(m.bn(m.conv(x)))), 2),
    "two, then a convolution": (
        _net(lambda m, x: m.conv(m.more(m.bn(x))), bn=lambda: nn.BatchNorm2d(4), more=lambda: nn.BatchNorm2d(4)),
        2,
    ),
    "a convolution, then two with a view between": (
        _net(lambda m, x: m.more(m.bn(m.conv(x)).flatten(2)), more=lambda: nn.BatchNorm1d(6)),
        2,
    ),
    "one each before and after a convolution": (
        _net(lambda m, x: m.more(m.conv(m.bn(x))), bn=lambda: nn.BatchNorm2d(4), more=lambda: nn.BatchNorm2d(6)),
        2,
    ),
    "a convolution, one, a convolution, one": (
        _net(
            lambda m, x: m.more(m.last(m.bn(m.conv(x)))),
            last=lambda: nn.Conv2d(6, 5, 2, padding=1),
            more=lambda: nn.BatchNorm2d(5),
        ),
        2,
    ),
}


@pytest.mark.parametrize("form", DIALECTS)
@pytest.mark.parametrize("name", ROWS_OF)
def test_several_batch_norms_fold_together(name, form):
    make, edits = ROWS_OF[name]
    result = folded(*in_form(make, IMAGE, form=form), edits=edits)
    assert set(calls(result.program)) <= {"conv2d", "convolution", "flatten", "view"}


@pytest.mark.parametrize("form", DIALECTS)
def test_of_two_batch_norms_alone_one_is_left(form):
    make = _net(lambda m, x: m.more(m.bn(x)), nn.Identity, lambda: nn.BatchNorm2d(4), more=lambda: nn.BatchNorm2d(4))
    result = checked(*in_form(make, IMAGE, form=form))
    assert (sites(result.program), len(result.edits), len(result.declined)) == (1, 1, 1)


def _column():
    return vector(6, 1, 1)


SCALED = {
    "a scale": _net(lambda m, x: m.bn(m.conv(x)) * m.s, s=_column),
    "a scale from the left": _net(lambda m, x: m.s * m.bn(m.conv(x)), s=_column),
    "a shift": _net(lambda m, x: m.bn(m.conv(x)) + m.s, s=_column),
    "a shift from the left": _net(lambda m, x: m.s + m.bn(m.conv(x)), s=_column),
    "a shift that is subtracted": _net(lambda m, x: m.bn(m.conv(x)) - m.s, s=_column),
    "what it is subtracted from": _net(lambda m, x: m.s - m.bn(m.conv(x)), s=_column),
    "what it is divided by": _net(lambda m, x: m.bn(m.conv(x)) / m.s, s=_column),
    "a scale and a shift": _net(lambda m, x: m.bn(m.conv(x)) * m.s + m.t, s=_column, t=_column),
    "a scale of four axes": _net(lambda m, x: m.bn(m.conv(x)) * m.s, s=lambda: vector(1, 6, 1, 1)),
    "a scale of one number": _net(lambda m, x: m.bn(m.conv(x)) * m.s, s=lambda: vector(1)),
    "a number times it": _net(lambda m, x: m.bn(m.conv(x)) * 3),
    "a number times it, from the left": _net(lambda m, x: 0.5 * m.bn(m.conv(x))),
    "a number added": _net(lambda m, x: m.bn(m.conv(x)) + 1),
    "a number subtracted": _net(lambda m, x: m.bn(m.conv(x)) - 1.5),
    "a number it is subtracted from": _net(lambda m, x: 1 - m.bn(m.conv(x))),
    "a number it is divided by": _net(lambda m, x: m.bn(m.conv(x)) / 4),
    "a shift times alpha": _net(lambda m, x: torch.add(m.bn(m.conv(x)), m.s, alpha=2), s=_column),
    "a subtracted shift times alpha": _net(lambda m, x: torch.sub(m.bn(m.conv(x)), m.s, alpha=2), s=_column),
    "numbers, one after the other": _net(lambda m, x: ((m.bn(m.conv(x)) * 2 + 1) / 3 - 0.5) * 4),
    "a scale after a batch norm of a linear": _linear(
        lambda m, x: m.bn(m.conv(x.mean((2, 3)))) * m.s, s=lambda: vector(6)
    ),
}
SCALED_EITHER_WAY = {
    "a scale along the width": _net(lambda m, x: m.bn(m.conv(x)) * m.s, s=lambda: vector(6)),
    "a scale along the height": _net(lambda m, x: m.bn(m.conv(x)) * m.s, s=lambda: vector(7, 1)),
    "a scale along the batch": _net(lambda m, x: m.bn(m.conv(x)) * m.s, s=lambda: vector(2, 1, 1, 1)),
    "a scale of every element": _net(lambda m, x: m.bn(m.conv(x)) * m.s, s=lambda: vector(2, 6, 7, 6)),
    "a scale that adds an axis": _net(lambda m, x: m.bn(m.conv(x)) * m.s, s=lambda: vector(3, 1, 1, 1, 1)),
    "a scale that widens": _net(
        lambda m, x: m.bn(m.conv(x)) * m.s, lambda: nn.Conv2d(4, 1, 3), lambda: nn.BatchNorm2d(1), s=_column
    ),
    "a column for rows": _linear(lambda m, x: m.bn(m.conv(x.mean((2, 3)))) * m.s, s=_column),
    "a number divided by it": _net(lambda m, x: 1 / m.bn(m.conv(x))),
    "a scale divided by it": _net(lambda m, x: m.s / m.bn(m.conv(x)), s=_column),
    "a division rounded": _net(lambda m, x: torch.div(m.bn(m.conv(x)), 2, rounding_mode="floor")),
    "a number times it, no number": _net(lambda m, x: m.bn(m.conv(x)) * float("nan")),
    "a number times it, zero": _net(lambda m, x: m.bn(m.conv(x)) * 0),
    "a division by zero": _net(lambda m, x: m.bn(m.conv(x)) / 0),
    "a complex number times it": _net(lambda m, x: m.bn(m.conv(x)) * 1j),
    "a scale of integers": _net(lambda m, x: m.bn(m.conv(x)) * m.conv.weight.shape[0]),
    "a power": _net(lambda m, x: m.bn(m.conv(x)) ** 2),
    "it times itself": _net(lambda m, x: (y := m.bn(m.conv(x)), y * y)[1]),
    "it and it": _net(lambda m, x: (y := m.bn(m.conv(x)), y + y)[1]),
    "it, scaled and not": _net(lambda m, x: (y := m.bn(m.conv(x)), y * m.s, y)[1:], s=_column),
    "it, scaled twice": _net(lambda m, x: (y := m.bn(m.conv(x)), y * m.s, y + m.s)[1:], s=_column),
    "a scale that is an input": _net(lambda m, x: m.bn(m.conv(x)) * x.mean()),
    "a scale that is computed": _net(lambda m, x: m.bn(m.conv(x)) * m.s.sigmoid(), s=_column),
    "a squeeze and excitation": _net(
        lambda m, x: (y := m.bn(m.conv(x)), y * y.mean((2, 3), keepdim=True).sigmoid())[1]
    ),
    "a scale before": _net(lambda m, x: m.bn(m.conv(x) * m.s), s=_column),
    "a scale and a shift before": _net(lambda m, x: m.bn(m.conv(x) * m.s + m.t), s=_column, t=_column),
    "a number before": _net(lambda m, x: m.bn(1 - m.conv(x) * 2)),
    "a scale before and after": _net(lambda m, x: m.bn(m.conv(x) * m.s) * m.s, s=_column),
    "a scale along the width before": _net(lambda m, x: m.bn(m.conv(x) * m.s), s=lambda: vector(6)),
    "a scale in place": _net(lambda m, x: m.bn(m.conv(x)).mul_(m.s), s=_column),
    "a shift from another output": _net(lambda m, x: m.bn(m.conv(x)) + m.conv(x).mean()),
    "a layer scale in front of a convolution": _net(
        lambda m, x: m.conv(m.bn(x) * m.s + 1), bn=lambda: nn.BatchNorm2d(4), s=lambda: vector(4, 1, 1)
    ),
    "a scale alone": _net(
        lambda m, x: m.bn(x) * m.s, nn.Identity, lambda: nn.BatchNorm2d(4), s=lambda: vector(4, 1, 1)
    ),
}


@pytest.mark.parametrize("form", DIALECTS)
@pytest.mark.parametrize("name", SCALED)
def test_a_scale_or_shift_after_a_batch_norm_goes_with_it(name, form):
    result = folded(*in_form(SCALED[name], IMAGE, form=form))
    assert not {"mul", "add", "sub", "div", "rsub"} & set(calls(result.program))


@pytest.mark.parametrize("form", DIALECTS)
@pytest.mark.parametrize("name", SCALED_EITHER_WAY)
def test_a_scale_is_right_whatever_is_done(name, form):
    checked(*in_form(SCALED_EITHER_WAY[name], IMAGE, form=form))
    checked(
        *in_form(SCALED_EITHER_WAY[name], IMAGE, form=form),
        clone_calls=True,
        clone_weights=True,
        alone="multiply_add",
    )


PROMOTED = {
    "a wider scale": lambda m, x: m.bn(m.conv(x)) * m.s,
    "a wider shift": lambda m, x: m.bn(m.conv(x)) + m.s,
    "a wider number": lambda m, x: m.bn(m.conv(x)) * m.s.sum(),  # of no axis: it does not promote
    "a cast before a scale": lambda m, x: m.bn(m.conv(x)).double() * m.s,
}


@pytest.mark.parametrize("form", DIALECTS)
@pytest.mark.parametrize("name", PROMOTED)
def test_a_scale_that_widens_the_dtype_still_does(name, form):
    module, x = made(_net(PROMOTED[name]), IMAGE, dtype=torch.float32)
    module.s = nn.Parameter(torch.rand(6, 1, 1, dtype=torch.float64))
    checked(FORMS[form](export(module, x)), x, tolerance=1e-5)


# A batch norm alone, of every rank.


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("affine", [True, False], ids=("affine", "plain"))
@pytest.mark.parametrize("rank", [2, 3, 4, 5, 6])
def test_a_batch_norm_alone(rank, affine, form):
    def make():
        bn = nn.BatchNorm2d(3, affine=affine)
        bn._check_input_dim = lambda x: None  # of any rank
        return bn

    program, x = in_form(make, (2, 3, 4, 3, 2, 2)[:rank], form=form)
    result = checked(program, x)
    assert (result.modified, len(result.declined), result.program is program) == (False, 1, True)
    one = folded(program, x, alone="multiply_add")
    assert not [call for call in calls(one.program) if "conv" in call]
    depthwise = folded(program, x, alone="depthwise")
    assert sum("conv" in call for call in calls(depthwise.program)) == (rank in (3, 4, 5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("alone", ["multiply_add", "depthwise"])
def test_a_batch_norm_alone_keeps_its_dtype(alone, dtype):
    program, x = in_form(lambda: nn.BatchNorm2d(3), (2, 3, 4, 5), dtype=dtype)
    folded(program, x, alone=alone, tolerance=8 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("form", DIALECTS)
def test_alone_is_the_last_resort(form):
    """What a producer or a consumer takes is not left to a multiply-add."""
    make = _net(lambda m, x: m.bn(m.conv(x)).relu())
    result = folded(*in_form(make, IMAGE, form=form), alone="multiply_add")
    assert calls(result.program) in (["conv2d", "relu"], ["convolution", "relu"])


# Dtypes. The reference is the same module in float64.

HALVES = {
    "all of it": lambda module, dtype: module.to(dtype),
    "but for a float32 batch norm": lambda module, dtype: (module.to(dtype), module.bn.float())[0],
}


@pytest.mark.parametrize("form", DIALECTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", HALVES)
@pytest.mark.parametrize("kind", ["conv2d", "conv_transpose2d", "linear"])
def test_half_precision_is_folded_in_full(kind, name, dtype, form):
    """Within 4 eps of the result in float64, and weights within half an eps of their own."""
    shape, _, make, rank, _ = KINDS[kind]
    row = {"groups": 1, "padding": 1, "output_padding": 0, "stride": 1, "dilation": 1, "outs": 6, "bias": True}
    torch.manual_seed(0)
    module = HALVES[name](lively(Pair(make(row), NORMS[rank](6))), dtype)
    x = torch.randn(shape).to(dtype)
    result = folded(FORMS[form](export(module, x)), x, tolerance=16 * torch.finfo(dtype).eps)
    (found,) = outputs(result.program, x)
    (want,) = outputs(module.double(), x.double())
    assert distance(found.double(), want) < 4 * torch.finfo(dtype).eps
    weight = result.program.state_dict["producer.weight"]
    assert weight.dtype == dtype
    assert same(weight, _by_hand(module, transposed="transpose" in kind)[0].to(dtype))


def _by_hand(module, transposed=False):
    """Weight and bias of a producer of float64 with its batch norm in it."""
    producer, bn = module.producer, module.bn
    scale = (1 if bn.weight is None else bn.weight) / (bn.running_var + bn.eps).sqrt()
    shape = [1] * producer.weight.dim()
    shape[1 if transposed else 0] = -1
    bias = (0 if producer.bias is None else producer.bias) - bn.running_mean
    return producer.weight * scale.view(shape), bias * scale + (0 if bn.bias is None else bn.bias)


@pytest.mark.parametrize("form", DIALECTS)
def test_the_weights_are_those_of_float64_cast_once(form):
    torch.manual_seed(0)
    module = lively(Pair(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6)), torch.float32)
    x = torch.randn(IMAGE)
    state = tbn.fold(FORMS[form](export(module, x))).state_dict
    weight, bias = _by_hand(module.double())
    assert same(state["producer.weight"].detach(), weight.float())
    assert same(state["producer.bias"].detach(), bias.float())


@pytest.mark.parametrize("form", DIALECTS)
def test_above_a_size_the_arithmetic_may_be_of_float32(form):
    program, x = in_form(_net(lambda m, x: m.bn(m.conv(x))), IMAGE, form=form, dtype=torch.float32)
    for limit in (0, 10**9):
        folded(program, x, float32_above=limit, tolerance=1e-5)


# Left alone, each for its reason.


def _mixed(function, *shapes, dtype=torch.float64, edit=None, form="training IR", **members):
    module, *inputs = made(_net(function, **members), *(shapes or (IMAGE,)), dtype=dtype)
    if edit is not None:
        with torch.no_grad():
            edit(module)
    return FORMS[form](export(module, *inputs)), *inputs


def _stats(m):
    return m.bn.weight, m.bn.bias, m.bn.running_mean, m.bn.running_var


def _plain(m, x):
    return m.bn(m.conv(x))


def _set(path, index, value):
    def edit(module):
        module.get_parameter(path)[index] = value

    def buffer(module):
        module.get_buffer(path)[index] = value

    return buffer if "running" in path else edit


def _same_weight(function, **edit):
    """Two convolutions that read one weight."""

    def tie(module):
        module.other.weight = module.conv.weight

    return _mixed(function, other=lambda: nn.Conv2d(4, 6, 3), edit=tie, **edit)


# The program and its inputs, what the reason says, how many batch norms are left.
LEFT = {
    "the producer's output is read elsewhere": (
        lambda form: _mixed(lambda m, x: (y := m.conv(x), m.bn(y), y)[1:], form=form),
        "elsewhere|also|other|read",
        1,
    ),
    "two batch norms of one output": (
        lambda form: _mixed(
            lambda m, x: (y := m.conv(x), m.bn(y), m.other(y))[1:], other=lambda: nn.BatchNorm2d(6), form=form
        ),
        "elsewhere|also|other|read",
        2,
    ),
    "a view of the producer's output is read elsewhere": (
        lambda form: _mixed(
            lambda m, x: (y := m.conv(x).flatten(2), m.bn(y), y)[1:], bn=lambda: nn.BatchNorm1d(6), form=form
        ),
        "elsewhere|also|other|read",
        1,
    ),
    "a weight that two convolutions read": (
        lambda form: _same_weight(lambda m, x: (m.bn(m.conv(x)), m.other(x)), form=form),
        "weight",
        1,
    ),
    "a convolution called twice, once without batch norm": (
        lambda form: _mixed(lambda m, x: (m.bn(m.conv(x)), m.conv(x * 2)), form=form),
        "weight",
        1,
    ),
    "a convolution called twice, with two batch norms": (
        lambda form: _mixed(
            lambda m, x: (m.bn(m.conv(x)), m.other(m.conv(x * 2))), other=lambda: nn.BatchNorm2d(6), form=form
        ),
        "weight",
        2,
    ),
    "a weight that something else reads": (
        lambda form: _mixed(lambda m, x: (m.bn(m.conv(x)), m.conv.weight.square().sum()), form=form),
        "weight",
        1,
    ),
    "a weight that is returned": (
        lambda form: _mixed(lambda m, x: (m.bn(m.conv(x)), m.conv.weight), form=form),
        "weight",
        1,
    ),
    "a weight that is an input": (
        lambda form: _mixed(lambda m, x, w: m.bn(functional.conv2d(x, w)), IMAGE, (6, 4, 3, 3), form=form),
        "constant|input",
        1,
    ),
    "a bias that is an input": (
        lambda form: _mixed(lambda m, x, b: m.bn(functional.conv2d(x, m.conv.weight, b)), IMAGE, (6,), form=form),
        "constant|input",
        1,
    ),
    "a weight that is computed": (
        lambda form: _mixed(lambda m, x: m.bn(functional.conv2d(x, m.conv.weight.tanh())), form=form),
        "constant|comput",
        1,
    ),
    "statistics that are inputs": (
        lambda form: _mixed(
            lambda m, x, mean: functional.batch_norm(m.conv(x), mean, m.bn.running_var), IMAGE, (6,), form=form
        ),
        "constant|input",
        1,
    ),
    "statistics that are computed": (
        lambda form: _mixed(
            lambda m, x: functional.batch_norm(m.conv(x), m.bn.running_mean * 2, m.bn.running_var), form=form
        ),
        "constant|comput",
        1,
    ),
    "a batch norm's weight that is computed": (
        lambda form: _mixed(
            lambda m, x: functional.batch_norm(
                m.conv(x), m.bn.running_mean, m.bn.running_var, m.bn.weight.exp(), m.bn.bias
            ),
            form=form,
        ),
        "constant|comput",
        1,
    ),
    "a weight that the program writes": (
        lambda form: _mixed(
            lambda m, x: (m.w.mul_(2), m.bn(functional.conv2d(x, m.w)))[1],
            w=lambda: nn.Buffer(torch.randn(6, 4, 3, 3)),
            form=form,
        ),
        "writ|mutat|constant",
        1,
    ),
    "a weight that the program writes afterwards": (
        lambda form: _mixed(
            lambda m, x: (m.bn(functional.conv2d(x, m.w)), m.w.mul_(2))[0],
            w=lambda: nn.Buffer(torch.randn(6, 4, 3, 3)),
            form=form,
        ),
        "writ|mutat|constant",
        1,
    ),
    "a weight that the program writes through a view": (
        lambda form: _mixed(
            lambda m, x: (m.w[0].mul_(2), m.bn(functional.conv2d(x, m.w)))[1],
            w=lambda: nn.Buffer(torch.randn(6, 4, 3, 3)),
            form=form,
        ),
        "writ|mutat|constant",
        1,
    ),
    "statistics that the program writes": (
        lambda form: _mixed(lambda m, x: (m.bn(m.conv(x)), m.bn.running_mean.add_(1))[0], form=form),
        "writ|mutat|constant",
        1,
    ),
    "statistics that a batch norm in training writes": (
        lambda form: _mixed(
            lambda m, x: (
                functional.batch_norm(m.conv(x), *_stats(m)[2:], *_stats(m)[:2]),
                functional.batch_norm(m.conv(x * 2), *_stats(m)[2:], training=True),
            ),
            form=form,
        ),
        "writ|mutat|constant|train",
        2,
    ),
    "batch statistics": (
        lambda form: _mixed(lambda m, x: m.bn(m.conv(x)), edit=lambda m: m.bn.train(), form=form),
        "train|batch stat",
        1,
    ),
    "batch statistics in eval": (
        lambda form: _mixed(_plain, bn=lambda: nn.BatchNorm2d(6, track_running_stats=False), form=form),
        "train|batch stat",
        1,
    ),
    "saved statistics in use": (
        lambda form: _mixed(
            lambda m, x: aten.native_batch_norm.default(m.conv(x), *_stats(m), False, 0.1, 1e-5)[:2], form=form
        ),
        "saved",
        1,
    ),
    "a complex shift after it, a relu before": (
        lambda form: _mixed(lambda m, x: m.bn(m.conv(x).relu()) + 1j, form=form),
        "",
        1,
    ),
    **{
        f"{name} of {value}": (
            lambda form, name=name, value=value: _mixed(_plain, edit=_set(name, 2, value), form=form),
            "finite|negative|variance|nan|inf",
            1,
        )
        for name, value in (
            ("bn.running_mean", float("nan")),
            ("bn.running_mean", float("inf")),
            ("bn.running_var", float("nan")),
            ("bn.running_var", float("inf")),
            ("bn.running_var", -0.5),
            ("bn.weight", float("nan")),
            ("bn.weight", float("-inf")),
            ("bn.bias", float("nan")),
        )
    },
    "a variance of zero and an eps of zero": (
        lambda form: _mixed(
            _plain, bn=lambda: nn.BatchNorm2d(6, eps=0.0), edit=_set("bn.running_var", 1, 0.0), form=form
        ),
        "finite|zero|variance|inf",
        1,
    ),
    "a mean that swamps the rest in float32": (
        lambda form: _mixed(_plain, edit=_swamp, dtype=torch.float32, form=form),
        "loss|los|precision|condition",
        1,
    ),
    "weights that overflow": (
        lambda form: _mixed(
            _plain, edit=lambda m: (m.bn.weight.fill_(3e4), m.conv.weight.fill_(10.0)), dtype=torch.float16, form=form
        ),
        "overflow|finite|range|large",
        1,
    ),
    "an activation between": (lambda form: _mixed(lambda m, x: m.bn(m.conv(x).sigmoid()), form=form), "", 1),
    "nothing around it": (
        lambda form: _mixed(lambda m, x: m.bn(x), bn=lambda: nn.BatchNorm2d(4), form=form),
        "alone|neither|no |nothing|producer",
        1,
    ),
}


def _swamp(module):
    """Statistics such that the output is the small difference of large numbers."""
    module.bn.running_mean.fill_(1e4)
    module.conv.bias.fill_(-1e4)
    module.bn.running_var.fill_(1e-6)


@pytest.mark.parametrize("form", DIALECTS)
@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_alone_says_why_and_stays_as_it_is(name, form):
    make, reason, count = LEFT[name]
    program, *inputs = make(form)
    result = checked(program, *inputs)
    assert (result.modified, len(result.declined), result.program is program) == (False, count, True)
    for declined in result.declined:
        assert declined.reason
        with pytest.raises(ValueError, match=f"(?i){reason}"):
            raise ValueError(declined.reason)


ALWAYS_LEFT = [
    name for name, (_, reason, _) in LEFT.items() if any(w in reason for w in ("constant", "finite", "train", "saved"))
]


@pytest.mark.parametrize("form", DIALECTS)
@pytest.mark.parametrize("name", ALWAYS_LEFT)
def test_no_option_folds_what_cannot_be_read(name, form):
    """Not into weights: alone, it may become a multiply-add when its own tensors are constants."""
    make, _, _ = LEFT[name]
    program, *inputs = make(form)
    options = {"clone_calls": True, "clone_weights": True}
    result = checked(program, *inputs, **options)
    assert result.modified is False


# The options.

SHARED = {
    "a producer that is read elsewhere": (lambda m, x: (y := m.conv(x), m.bn(y), y.relu())[1:], 1),
    "a producer that is returned": (lambda m, x: (y := m.conv(x), m.bn(y), y)[1:], 1),
    "two batch norms of one output": (lambda m, x: (y := m.conv(x), m.bn(y), m.second(y))[1:], 2),
    "two batch norms of one output, and a relu": (
        lambda m, x: (y := m.conv(x), m.bn(y), m.second(y), y.relu())[1:],
        2,
    ),
    "one batch norm of one output, twice": (lambda m, x: (y := m.conv(x), m.bn(y) * m.bn(y))[1], 2),
    "a view that is read elsewhere": (
        lambda m, x: (y := m.conv(x).transpose(2, 3), m.bn(y), y.relu())[1:],
        1,
    ),
}
TIED = {
    "one convolution of two inputs": (lambda m, x: (m.bn(m.conv(x)), m.conv(x * 2)), 1, 2),
    "one convolution, two batch norms": (lambda m, x: (m.bn(m.conv(x)), m.second(m.conv(x * 2))), 2, 2),
    "one convolution, two batch norms and one without": (
        lambda m, x: (m.bn(m.conv(x)), m.second(m.conv(x * 2)), m.conv(x * 3)),
        2,
        3,
    ),
    "one convolution, three times the one and once the other batch norm": (
        lambda m, x: [m.bn(m.conv(x * i)) for i in (1, 2, 3)] + [m.second(m.conv(x))],
        4,
        2,
    ),
    "a weight that something else reads": (lambda m, x: (m.bn(m.conv(x)), m.conv.weight.square().sum()), 1, 2),
    "a bias that something else reads": (lambda m, x: (m.bn(m.conv(x)), m.conv.bias * 2), 1, 1),
}


def _shared(function, form):
    return in_form(_net(function, second=lambda: nn.BatchNorm2d(6)), IMAGE, form=form)


def _weights(program):
    """The values of the 4-D parameters that the program's graph reads."""
    signature = program.graph_signature
    used = {n.name for n in program.graph.find_nodes(op="placeholder") if n.users}
    names = [s.target for s in signature.input_specs if s.target and s.arg.name in used]
    return [n for n in names if program.state_dict[n].dim() == 4]


@pytest.mark.parametrize("form", DIALECTS)
@pytest.mark.parametrize("name", SHARED)
def test_clone_calls_gives_a_batch_norm_a_call_of_its_own(name, form):
    function, edits = SHARED[name]
    program, x = _shared(function, form)
    assert checked(program, x).modified is False
    assert checked(program, x, clone_weights=True).modified is False
    result = folded(program, x, edits=edits, clone_calls=True)
    assert "conv.weight" in result.program.state_dict


@pytest.mark.parametrize("form", DIALECTS)
@pytest.mark.parametrize("name", TIED)
def test_clone_weights_gives_a_call_a_weight_of_its_own(name, form):
    function, edits, weights = TIED[name]
    program, x = _shared(function, form)
    result = folded(program, x, edits=edits, clone_weights=True)
    assert len(_weights(result.program)) == weights


@pytest.mark.parametrize("form", DIALECTS)
def test_only_a_bias_that_is_shared_is_not_overwritten(form):
    """Its convolution may be folded: the bias that something else reads is another tensor from then on."""
    program, x = _shared(TIED["a bias that something else reads"][0], form)
    checked(program, x)
    checked(program, x, clone_calls=True)


@pytest.mark.parametrize("form", FORMS)
def test_a_module_of_both_called_twice_folds_into_one_weight(form):
    make = _net(lambda m, x: m.pair(m.pair(x)), pair=lambda: nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)))
    program, x = in_form(make, IMAGE, form=form)
    result = folded(program, x, edits=2)
    if form in DIALECTS:
        assert _weights(result.program) == ["pair.0.weight"]


@pytest.mark.parametrize("form", DIALECTS)
def test_a_module_called_twice_where_one_call_cannot_be_folded(form):
    def function(m, x):
        y = m.conv(x)
        return m.bn(y) + y.sum(), m.bn(m.conv(x * 2))

    program, x = _shared(function, form)
    assert checked(program, x).modified is False
    folded(program, x, edits=2, clone_calls=True, clone_weights=True)


@pytest.mark.parametrize("form", DIALECTS)
def test_force_folds_what_loses_precision(form):
    program, x = _mixed(_plain, edit=_swamp, dtype=torch.float32, form=form)
    result = tbn.Fold(force=True)(program)
    assert (len(result.edits), result.declined, tbn.verify(result.program)) == (1, (), ())
    assert all(t.isfinite().all() for t in outputs(result.program, x))


@pytest.mark.parametrize("form", DIALECTS)
def test_what_loses_precision_in_float32_folds_in_float64(form):
    program, x = _mixed(_plain, edit=_swamp, form=form)
    folded(program, x, tolerance=1e-8)


@pytest.mark.parametrize("form", FORMS)
def test_inplace_edits_the_given_program(form):
    program, x = in_form(_net(_plain), IMAGE, form=form)
    want = outputs(program, x)
    result = tbn.Fold(inplace=True)(program)
    assert (result.program is program, len(result.edits), sites(program)) == (True, 1, 0)
    assert (max(distances(outputs(program, x), want)) < 1e-12, tbn.verify(program)) == (True, ())


@pytest.mark.parametrize("form", DIALECTS)
def test_inplace_gives_the_program_that_a_copy_gives(form):
    program, _ = in_form(_net(_plain), IMAGE, form=form)
    copied = tbn.fold(program)
    assert nodes(tbn.fold(program, inplace=True)) == nodes(copied)
    assert program.state_dict.keys() == copied.state_dict.keys()


def test_the_pass_is_a_value():
    assert tbn.Fold() == tbn.Fold()
    assert hash(tbn.Fold(clone_calls=True)) == hash(tbn.Fold(clone_calls=True))
    with pytest.raises(AttributeError):
        tbn.Fold().force = True


def test_fold_returns_the_program_of_the_pass():
    program, _ = in_form(_net(lambda m, x: (y := m.conv(x), m.bn(y), y)[1:]), IMAGE)
    assert nodes(tbn.fold(program, clone_calls=True)) == nodes(tbn.Fold(clone_calls=True)(program).program)
    assert tbn.fold(program) is program


def test_a_choice_that_does_not_exist_is_one_clear_error():
    program, _ = in_form(_net(_plain), IMAGE)
    with pytest.raises(tbn.InvalidChoice, match="alone"):
        tbn.fold(program, alone="relu")
    with pytest.raises(tbn.InvalidProgram):
        tbn.fold(nn.ReLU())


# The state.

DEAD = {f"bn.{name}" for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")}


def _signed(program):
    """The parameters and buffers of a signature."""
    return {spec.target for spec in program.graph_signature.input_specs if spec.target is not None}


@pytest.mark.parametrize("form", DIALECTS)
@pytest.mark.parametrize("bias", [True, False], ids=("bias", "no bias"))
@pytest.mark.parametrize("kind", ["conv2d", "conv_transpose2d", "linear"])
def test_the_weights_keep_their_names_and_the_dead_leave(kind, bias, form):
    shape, _, make, rank, _ = KINDS[kind]
    row = {"groups": 1, "padding": 1, "output_padding": 0, "stride": 1, "dilation": 1, "outs": 6, "bias": bias}
    program, x = in_form(lambda: Pair(make(row), NORMS[rank](6)), shape, form=form)
    found = folded(program, x).program
    names = {"producer.weight", "producer.bias"}
    assert set(found.state_dict) == set(found.graph_signature.parameters) == _signed(found) == names
    for name in names:
        assert isinstance(found.state_dict[name], nn.Parameter)
        assert found.state_dict[name].requires_grad
        assert found.state_dict[name] is not program.state_dict.get(name)
    assert set(dict(found.module().named_parameters())) == names
    assert set(saved_and_loaded(found).state_dict) == names


def test_the_weights_of_a_module_keep_their_names():
    program, x = in_form(_net(_plain), IMAGE, form="module")
    found = folded(program, x).program
    assert set(dict(found.named_parameters())) == set(found.state_dict()) == {"conv.weight", "conv.bias"}


@pytest.mark.parametrize("form", DIALECTS)
@pytest.mark.parametrize("frozen", [False, True], ids=("learns", "frozen"))
def test_a_weight_learns_when_it_did(frozen, form):
    module, x = made(_net(_plain), IMAGE)
    module.conv.requires_grad_(not frozen)
    found = folded(FORMS[form](export(module, x)), x).program
    assert [found.state_dict[f"conv.{name}"].requires_grad for name in ("weight", "bias")] == [not frozen] * 2


@pytest.mark.parametrize("form", DIALECTS)
def test_keep_state_keeps_every_name(form):
    program, x = in_form(_net(_plain, lambda: nn.Conv2d(4, 6, 3, bias=False)), IMAGE, form=form)
    found = folded(program, x, keep_state=True).program
    assert set(found.state_dict) == set(program.state_dict) | {"conv.bias"}
    assert all(found.state_dict[name] is program.state_dict[name] for name in DEAD)
    assert set(saved_and_loaded(found).state_dict) == set(found.state_dict)


@pytest.mark.parametrize("form", DIALECTS)
def test_what_others_read_stays(form):
    program, x = in_form(_net(lambda m, x: (m.bn(m.conv(x)), m.bn.weight * 2, m.bn.running_mean + 1)), IMAGE, form=form)
    found = folded(program, x).program
    assert set(found.state_dict) >= {"conv.weight", "conv.bias", "bn.weight", "bn.running_mean"}
    assert not {"bn.bias", "bn.running_var"} & set(found.state_dict)


@pytest.mark.parametrize("form", DIALECTS)
def test_parameters_of_a_batch_norm_that_another_shares_stay_with_it(form):
    def tie(m):
        m.second.weight, m.second.bias = m.bn.weight, m.bn.bias

    program, x = _mixed(
        lambda m, x: (m.bn(m.conv(x)), m.second(m.conv(x).relu())),
        second=lambda: nn.BatchNorm2d(6),
        edit=tie,
        form=form,
    )
    result = checked(program, x, clone_weights=True)
    assert (len(result.edits), len(result.declined), sites(result.program)) == (1, 1, 1)


@pytest.mark.parametrize("form", DIALECTS)
def test_a_tied_weight_stays_for_the_other(form):
    program, x = _same_weight(lambda m, x: (m.bn(m.conv(x)), m.other(x)), form=form)
    found = folded(program, x, clone_weights=True).program
    kept = [t for t in found.state_dict.values() if same(t.detach(), program.state_dict["conv.weight"].detach())]
    assert len({id(t) for t in kept}) == 1
    assert len(_weights(found)) == 2


@pytest.mark.parametrize("form", DIALECTS)
def test_weights_that_are_buffers_or_constants_fold_too(form):
    class Constants(nn.Module):
        def __init__(self):
            super().__init__()
            self.bn = nn.BatchNorm2d(6)
            self.register_buffer("weight", torch.randn(6, 4, 3, 3))
            self.register_buffer("bias", torch.randn(6), persistent=False)
            self.constant = torch.randn(6, 6, 1, 1, dtype=torch.float64)

        def forward(self, x):
            x = self.bn(functional.conv2d(x, self.weight, self.bias))
            return self.bn(functional.conv2d(x, self.constant))

    program, x = in_form(Constants, IMAGE, form=form)
    found = folded(program, x, edits=2).program
    assert same(outputs(saved_and_loaded(found), x), outputs(found, x))
    assert "weight" in found.state_dict


@pytest.mark.parametrize("form", DIALECTS)
def test_a_tensor_made_in_forward_is_a_constant_too(form):
    ones = torch.ones(6, dtype=torch.float64) * 0.5
    make = _net(lambda m, x: functional.batch_norm(m.conv(x), ones, ones * 3, ones, ones))
    checked(*in_form(make, IMAGE, form=form))


def test_gradients_flow_to_the_folded_weights():
    """A folded program still learns: its gradient by the input is that of the original."""
    program, x = in_form(_net(_plain), IMAGE)
    found = folded(program, x).program.module()
    gradients = []
    for module in (program.module(), found):
        leaf = x.clone().requires_grad_()
        module(leaf).square().sum().backward()
        gradients.append(leaf.grad)
    assert distance(gradients[1], gradients[0]) < 1e-12
    assert all(p.grad is not None for p in found.parameters())


def test_the_metadata_of_the_producer_stays():
    program, _ = in_form(_net(_plain), IMAGE)
    (conv,) = (n for n in tbn.fold(program).graph.nodes if n.op == "call_function")
    (was,) = program.graph.find_nodes(op="call_function", target=aten.conv2d.default)
    assert conv.name == was.name
    assert conv.meta["nn_module_stack"] == was.meta["nn_module_stack"]
    assert conv.meta["val"].shape == was.meta["val"].shape
    assert conv.meta["stack_trace"] == was.meta["stack_trace"]


def test_the_edits_say_what_went_where():
    program, _ = in_form(_net(_plain), IMAGE)
    (edit,) = tbn.Fold()(program).edits
    assert (edit.site, edit.module, edit.before) == ("batch_norm", "bn", "aten.batch_norm.default")
    assert "conv2d" in edit.after


def test_a_folded_program_is_exported_decomposed_and_consolidated_as_any_other():
    program, x = in_form(_net(lambda m, x: m.last(m.bn(m.conv(x)).relu()), last=lambda: nn.BatchNorm2d(6)), IMAGE)
    found = checked(program, x).program
    want = outputs(program, x)
    for changed in (decomposed(found), tbn.consolidate(found), tbn.switch_mode(found, "eval")):
        assert max(distances(outputs(changed, x), want)) < 1e-12
    assert tbn.Fold()(decomposed(found)).modified is False


# Nested graphs: right, whether folded or not.


class NoGrad(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.last = nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.Conv2d(6, 5, 2)
        self.first = nn.BatchNorm2d(4)


class AllInside(NoGrad):
    def forward(self, x):
        with torch.no_grad():
            y = self.bn(self.conv(x))
        return y + 1


class ConvolutionOutside(NoGrad):
    def forward(self, x):
        y = self.conv(x)
        with torch.no_grad():
            z = self.bn(y)
        return z + 1


class BatchNormOutside(NoGrad):
    def forward(self, x):
        with torch.no_grad():
            y = self.conv(x)
        return self.bn(y) + 1


class ConsumerOutside(NoGrad):
    def forward(self, x):
        with torch.no_grad():
            y = self.first(x)
        return self.conv(y)


class WeightInBoth(NoGrad):
    def forward(self, x):
        with torch.no_grad():
            y = self.bn(self.conv(x))
        return y + self.bn(self.conv(x * 2))


class WeightReadOutside(NoGrad):
    def forward(self, x):
        with torch.no_grad():
            y = self.bn(self.conv(x))
        return y, self.conv(x)


class TwoRegions(NoGrad):
    def forward(self, x):
        with torch.no_grad():
            y = self.bn(self.conv(x))
        y = y + 1
        with torch.no_grad():
            z = self.last(y)
        return z * 2


class Deep(NoGrad):
    def forward(self, x):
        with torch.no_grad():
            y = self.conv(x)
            with torch.enable_grad():
                y = self.bn(y)
            y = y + 1
        return y * 2


class Branches(NoGrad):
    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda y: self.bn(y) + 1, lambda y: self.bn(y * 2), (self.conv(x),))


class BothInABranch(NoGrad):
    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda x: self.bn(self.conv(x)), lambda x: self.conv(x) * 2, (x,))


NESTED = [
    AllInside,
    ConvolutionOutside,
    BatchNormOutside,
    ConsumerOutside,
    WeightInBoth,
    WeightReadOutside,
    TwoRegions,
    Deep,
    Branches,
    BothInABranch,
]


@pytest.mark.parametrize("form", ["training IR", "family", "ATEN", "module"])
@pytest.mark.parametrize("make", NESTED)
def test_nested_graphs_stay_right(make, form):
    program, x = in_form(make, IMAGE, form=form)
    for options in ({}, {"clone_calls": True, "clone_weights": True, "alone": "multiply_add"}, {"keep_state": True}):
        result = checked(program, x, **options)
        assert max(distances(outputs(result.program, -x), outputs(program, -x))) < 1e-12
        if form != "module":
            assert same(outputs(saved_and_loaded(result.program), x), outputs(result.program, x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_keeps_its_precision(dtype):
    class Autocast(NoGrad):
        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self.bn(self.conv(x)) + 1

    module, x = made(Autocast, IMAGE, dtype=torch.float32)
    for form in DIALECTS:
        checked(FORMS[form](export(module, x)), x, tolerance=4 * torch.finfo(torch.bfloat16).eps)


# What others reported of folds that were silently wrong, row by row.


@pytest.mark.parametrize("form", DIALECTS)
@pytest.mark.parametrize("both", [{}, {"clone_weights": True}], ids=("as it is", "clone_weights"))
def test_pytorch_197539_and_104593_one_convolution_with_and_without_batch_norm(both, form):
    program, x = _shared(lambda m, x: (m.bn(m.conv(x)), m.conv(x * 2)), form)
    assert checked(program, x, **both).modified is bool(both)


@pytest.mark.parametrize("form", DIALECTS)
@pytest.mark.parametrize("outs", [4, 8], ids=("as many", "more"))
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_pytorch_180995_ultralytics_25364_executorch_22517_transposed_convolutions(rank, groups, outs, form):
    def make():
        return Pair(TRANSPOSED[rank](4, outs, 3, stride=2, groups=groups), NORMS[rank](outs))

    program, x = in_form(make, (2, 4, 5, 4, 3)[: rank + 2], form=form, dtype=torch.float32)
    folded(program, x, tolerance=1e-5)


@pytest.mark.parametrize("form", DIALECTS)
@pytest.mark.parametrize(("shape", "edits"), [((2, 5, 3), 0), ((7, 3), 1)], ids=("refused in 3-D", "folded in 2-D"))
def test_ao_4116_linear_whose_features_are_not_the_channels(shape, edits, form):
    result = checked(*in_form(lambda: nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5)), shape, form=form))
    assert (len(result.edits), len(result.declined)) == (edits, 1 - edits)


@pytest.mark.parametrize("form", DIALECTS)
def test_pytorch_76578_tensorrt_1450_half_convolution_float_batch_norm(form):
    torch.manual_seed(0)
    module = HALVES["but for a float32 batch norm"](lively(Pair(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6))), torch.float16)
    x = torch.randn(IMAGE, dtype=torch.float16)
    found = folded(FORMS[form](export(module, x)), x, tolerance=8 * torch.finfo(torch.float16).eps).program
    weight, bias = _by_hand(module.double())
    assert same(found.state_dict["producer.weight"].detach(), weight.detach().half())
    assert same(found.state_dict["producer.bias"].detach(), bias.detach().half())


@pytest.mark.parametrize("form", DIALECTS)
@pytest.mark.parametrize("affine", [True, False], ids=("affine", "plain"))
def test_pytorch_45474_yolov3_807_the_bias_is_in_the_formula(affine, form):
    module, x = made(lambda: Pair(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6, affine=affine)), IMAGE)
    state = folded(FORMS[form](export(module, x)), x).program.state_dict
    weight, bias = _by_hand(module)
    assert distance(state["producer.weight"].detach(), weight.detach()) < 1e-15
    assert distance(state["producer.bias"].detach(), bias.detach()) < 1e-15


@pytest.mark.parametrize("form", DIALECTS)
@pytest.mark.parametrize("alone", ["multiply_add", "depthwise"])
@pytest.mark.parametrize("shape", [(5, 3), (2, 3, 4), (2, 3, 4, 5), (2, 3, 2, 3, 4)], ids=str)
def test_executorch_11586_and_1501_a_batch_norm_alone(shape, alone, form):
    module = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}[len(shape)]
    folded(*in_form(lambda: module(3), shape, form=form), alone=alone)


def test_pytorch_127513_a_folded_program_compiles_with_the_fold_in_it(tmp_path):
    program, x = in_form(_net(lambda m, x: m.bn(m.conv(x)).relu()), IMAGE, dtype=torch.float32)
    found = folded(program, x, tolerance=1e-5).program
    assert (calls(found), set(found.state_dict)) == (["conv2d", "relu"], {"conv.weight", "conv.bias"})
    package = torch._inductor.aoti_compile_and_package(found, package_path=str(tmp_path / "net.pt2"))
    with torch.no_grad():
        assert distance(torch._inductor.aoti_load_package(package)(x), outputs(program, x)[0]) < 1e-5
