"""Fold into what reads a batch norm, of concatenations, of several in a row, with the scales around it, and alone."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from folds import (
    DIALECTS,
    FORMS,
    IMAGE,
    MORE,
    Net,
    calls,
    checked,
    folded,
    in_form,
    linear,
    made,
    net,
    side_by_side,
    vector,
)
from programs import export

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
    "a convolution, and one with padding": (
        _first(lambda: Net(lambda m, x: (m.a(x), m.b(x)), a=nn.Conv2d(4, 6, 3), b=nn.Conv2d(4, 6, 3, padding=1))),
        SMALL,
    ),
}
# Never taken.
OUT_OF_REACH = {
    "a linear over the last axis": (_first(lambda: nn.Linear(4, 6)), (2, 4, 5, 4)),
    "a relu": (_first(lambda: nn.Conv2d(4, 6, 3), lambda y: y.relu()), SMALL),
    "a convolution and a relu": (_first(lambda: Net(lambda m, x: (m.a(x), x.relu()), a=nn.Conv2d(4, 6, 3))), SMALL),
    "a convolution and the caller": (_first(lambda: Net(lambda m, x: (m.a(x), x), a=nn.Conv2d(4, 6, 3))), SMALL),
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
    "one convolution of two batch norms": (
        lambda: Net(
            lambda m, x: m.conv(m.bn(x)) + m.conv(m.other(x)),
            conv=nn.Conv2d(4, 6, 3),
            bn=nn.BatchNorm2d(4),
            other=nn.BatchNorm2d(4),
        ),
        SMALL,
    ),
    "one convolution of it and of its input": (
        lambda: Net(lambda m, x: m.conv(m.bn(x)) + m.conv(x), conv=nn.Conv2d(4, 6, 3), bn=nn.BatchNorm2d(4)),
        SMALL,
    ),
    "one batch norm before two convolutions, of two inputs": (
        lambda: Net(
            lambda m, x: m.conv(m.bn(x)) + m.other(m.bn(x * 2)),
            conv=nn.Conv2d(4, 6, 3),
            bn=nn.BatchNorm2d(4),
            other=nn.Conv2d(4, 6, 3),
        ),
        SMALL,
    ),
    "a convolution after its input was written": (
        lambda: Net(
            lambda m, x: (y := m.bn(x), x.add_(1), m.conv(y))[2], conv=nn.Conv2d(4, 6, 3), bn=nn.BatchNorm2d(4)
        ),
        SMALL,
    ),
    "a convolution after its input was written through a view": (
        lambda: Net(
            lambda m, x: (v := x[0], y := m.bn(x), v.add_(1), m.conv(y))[3],
            conv=nn.Conv2d(4, 6, 3),
            bn=nn.BatchNorm2d(4),
        ),
        SMALL,
    ),
    "a convolution after the batch norm's output was written": (
        lambda: Net(
            lambda m, x: (y := m.bn(x), y.add_(1), m.conv(y))[2], conv=nn.Conv2d(4, 6, 3), bn=nn.BatchNorm2d(4)
        ),
        SMALL,
    ),
    "a convolution before the batch norm's output is written": (
        lambda: Net(
            lambda m, x: (y := m.bn(x), m.conv(y), y.add_(1))[1], conv=nn.Conv2d(4, 6, 3), bn=nn.BatchNorm2d(4)
        ),
        SMALL,
    ),
    "a convolution on both sides, of one weight": (
        lambda: Net(lambda m, x: m.conv(m.bn(m.conv(x))), conv=nn.Conv2d(4, 4, 3), bn=nn.BatchNorm2d(4)),
        SMALL,
    ),
    "batch norm, convolution, batch norm, called twice": (
        lambda: Net(
            lambda m, x: m.all(m.all(x)),
            all=nn.Sequential(nn.BatchNorm2d(4), nn.Conv2d(4, 4, 2), nn.BatchNorm2d(4)),
        ),
        SMALL,
    ),
    "a flattened linear that reads half of its features from elsewhere": (
        lambda: Net(
            lambda m, x: m.linear(torch.cat([m.bn(x).flatten(1), x.flatten(1)], 1)),
            linear=nn.Linear(240, 3),
            bn=nn.BatchNorm2d(4),
        ),
        SMALL,
    ),
    "a bilinear product": (_first(lambda: Net(lambda m, x: m.b(x, x), b=nn.Bilinear(4, 4, 3)), bn=_bn1d()), (5, 4)),
}


@pytest.mark.parametrize("name", TAKEN)
def test_a_batch_norm_goes_into_what_reads_it(name):
    make, shape = TAKEN[name]
    folded(*in_form(make, shape))


def test_every_batch_norm_goes_into_what_reads_it_in_ATEN():
    folded(*side_by_side([made(*row) for row in TAKEN.values()]), edits=len(TAKEN))


@pytest.mark.parametrize("name", NOT_TAKEN)
def test_padding_sees_a_shift_and_nothing_else(name):
    module, x = made(*NOT_TAKEN[name])
    assert checked(export(module, x), x).modified is False
    folded(export(_shiftless(module), x), x)


def test_padding_sees_a_shift_and_nothing_else_in_ATEN():
    rows = [made(*row) for row in NOT_TAKEN.values()]
    assert checked(*side_by_side(rows)).modified is False
    folded(*side_by_side([(_shiftless(module), x) for module, x in rows]), edits=len(NOT_TAKEN))


@pytest.mark.parametrize("shift", [True, False], ids=("with a shift", "without a shift"))
@pytest.mark.parametrize("name", OUT_OF_REACH)
def test_what_no_consumer_can_take_is_left(name, shift):
    module, x = made(*OUT_OF_REACH[name])
    assert checked(export(module if shift else _shiftless(module), x), x).modified is False


def test_what_no_consumer_can_take_is_left_in_ATEN():
    assert checked(*side_by_side([made(*row) for row in OUT_OF_REACH.values()])).modified is False


@pytest.mark.parametrize("options", MORE, ids=str)
@pytest.mark.parametrize("name", CONSUMERS_EITHER_WAY)
def test_a_consumer_is_right_whatever_is_done(name, options):
    module, x = made(*CONSUMERS_EITHER_WAY[name])
    checked(export(module, x), x, **options)
    checked(export(_shiftless(module), x), x, **options)


@pytest.mark.parametrize("options", MORE, ids=str)
def test_consumers_are_right_in_ATEN(options):
    rows = [made(*row) for row in CONSUMERS_EITHER_WAY.values()]
    checked(*side_by_side(rows), **options)
    checked(*side_by_side([(_shiftless(module), x) for module, x in rows]), **options)


@pytest.mark.parametrize("form", DIALECTS)
def test_a_batch_norm_between_two_convolutions_goes_into_one(form):
    make = net(lambda m, x: m.last(m.bn(m.conv(x))), last=lambda: nn.Conv2d(6, 3, 2))
    result = folded(*in_form(make, IMAGE, form=form))
    assert len(calls(result.program)) == 2


# Concatenations, several batch norms in a row, scales and shifts.


def _cat(function, channels=10, **members):
    """A function of two convolutions, of 4 and of 6 channels, and a batch norm of what they are together."""
    return net(
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


@pytest.mark.parametrize("name", CONCATENATED)
def test_a_batch_norm_of_a_concatenation_goes_into_its_branches(name):
    folded(*in_form(CONCATENATED[name], IMAGE))


def test_every_batch_norm_of_a_concatenation_goes_into_its_branches_in_ATEN():
    folded(*side_by_side([made(make, IMAGE) for make in CONCATENATED.values()]), edits=len(CONCATENATED))


@pytest.mark.parametrize("options", MORE, ids=str)
@pytest.mark.parametrize("name", CONCATENATED_EITHER_WAY)
def test_a_concatenation_is_right_whatever_is_done(name, options):
    checked(*in_form(CONCATENATED_EITHER_WAY[name], IMAGE), **options)


@pytest.mark.parametrize("options", MORE, ids=str)
def test_concatenations_are_right_in_ATEN(options):
    checked(*side_by_side([made(make, IMAGE) for make in CONCATENATED_EITHER_WAY.values()]), **options)


ROWS_OF = {
    "a convolution, then two": (net(lambda m, x: m.more(m.bn(m.conv(x))), more=lambda: nn.BatchNorm2d(6)), 2),
    "a convolution, then three": (
        net(lambda m, x: m.more(m.bn(m.conv(x))), more=lambda: nn.Sequential(nn.BatchNorm2d(6), nn.BatchNorm2d(6))),
        3,
    ),
    "a convolution, then one of them twice": (net(lambda m, x: m.bn(m.bn(m.conv(x)))), 2),
    "two, then a convolution": (
        net(lambda m, x: m.conv(m.more(m.bn(x))), bn=lambda: nn.BatchNorm2d(4), more=lambda: nn.BatchNorm2d(4)),
        2,
    ),
    "a convolution, then two with a view between": (
        net(lambda m, x: m.more(m.bn(m.conv(x)).flatten(2)), more=lambda: nn.BatchNorm1d(6)),
        2,
    ),
    "one each before and after a convolution": (
        net(lambda m, x: m.more(m.conv(m.bn(x))), bn=lambda: nn.BatchNorm2d(4), more=lambda: nn.BatchNorm2d(6)),
        2,
    ),
    "a convolution, one, a convolution, one": (
        net(
            lambda m, x: m.more(m.last(m.bn(m.conv(x)))),
            last=lambda: nn.Conv2d(6, 5, 2, padding=1),
            more=lambda: nn.BatchNorm2d(5),
        ),
        2,
    ),
}


@pytest.mark.parametrize("name", ROWS_OF)
def test_several_batch_norms_fold_together(name):
    make, edits = ROWS_OF[name]
    result = folded(*in_form(make, IMAGE), edits=edits)
    assert set(calls(result.program)) <= {"conv2d", "flatten"}


def test_several_batch_norms_fold_together_in_ATEN():
    rows = [made(make, IMAGE) for make, _ in ROWS_OF.values()]
    result = folded(*side_by_side(rows), edits=sum(edits for _, edits in ROWS_OF.values()))
    assert set(calls(result.program)) <= {"convolution", "view"}


@pytest.mark.parametrize("form", DIALECTS)
@pytest.mark.parametrize("count", [2, 3, 4])
def test_batch_norms_in_a_row_alone_are_one_multiply_add(count, form):
    program, x = in_form(lambda: nn.Sequential(*[nn.BatchNorm2d(4) for _ in range(count)]), IMAGE, form=form)
    assert checked(program, x).modified is False
    found = calls(folded(program, x, edits=count, alone="multiply_add").program)
    assert (found.count("mul"), found.count("add")) == (1, 1)
    found = calls(folded(program, x, edits=count, alone="depthwise").program)
    assert len([call for call in found if "conv" in call]) == 1


def _column():
    return vector(6, 1, 1)


SCALED = {
    "a scale": net(lambda m, x: m.bn(m.conv(x)) * m.s, s=_column),
    "a scale from the left": net(lambda m, x: m.s * m.bn(m.conv(x)), s=_column),
    "a shift": net(lambda m, x: m.bn(m.conv(x)) + m.s, s=_column),
    "a shift from the left": net(lambda m, x: m.s + m.bn(m.conv(x)), s=_column),
    "a shift that is subtracted": net(lambda m, x: m.bn(m.conv(x)) - m.s, s=_column),
    "what it is subtracted from": net(lambda m, x: m.s - m.bn(m.conv(x)), s=_column),
    "what it is divided by": net(lambda m, x: m.bn(m.conv(x)) / m.s, s=_column),
    "a scale and a shift": net(lambda m, x: m.bn(m.conv(x)) * m.s + m.t, s=_column, t=_column),
    "a scale of four axes": net(lambda m, x: m.bn(m.conv(x)) * m.s, s=lambda: vector(1, 6, 1, 1)),
    "a scale of one number": net(lambda m, x: m.bn(m.conv(x)) * m.s, s=lambda: vector(1)),
    "a number times it": net(lambda m, x: m.bn(m.conv(x)) * 3),
    "a number times it, from the left": net(lambda m, x: 0.5 * m.bn(m.conv(x))),
    "a number added": net(lambda m, x: m.bn(m.conv(x)) + 1),
    "a number subtracted": net(lambda m, x: m.bn(m.conv(x)) - 1.5),
    "a number it is subtracted from": net(lambda m, x: 1 - m.bn(m.conv(x))),
    "a number it is divided by": net(lambda m, x: m.bn(m.conv(x)) / 4),
    "a shift times alpha": net(lambda m, x: torch.add(m.bn(m.conv(x)), m.s, alpha=2), s=_column),
    "a subtracted shift times alpha": net(lambda m, x: torch.sub(m.bn(m.conv(x)), m.s, alpha=2), s=_column),
    "numbers, one after the other": net(lambda m, x: ((m.bn(m.conv(x)) * 2 + 1) / 3 - 0.5) * 4),
    "a scale after a batch norm of a linear": linear(
        lambda m, x: m.bn(m.conv(x.mean((2, 3)))) * m.s, s=lambda: vector(6)
    ),
}
SCALED_EITHER_WAY = {
    "a scale along the width": net(lambda m, x: m.bn(m.conv(x)) * m.s, s=lambda: vector(6)),
    "a scale along the height": net(lambda m, x: m.bn(m.conv(x)) * m.s, s=lambda: vector(7, 1)),
    "a scale along the batch": net(lambda m, x: m.bn(m.conv(x)) * m.s, s=lambda: vector(2, 1, 1, 1)),
    "a scale of every element": net(lambda m, x: m.bn(m.conv(x)) * m.s, s=lambda: vector(2, 6, 7, 6)),
    "a scale that adds an axis": net(lambda m, x: m.bn(m.conv(x)) * m.s, s=lambda: vector(3, 1, 1, 1, 1)),
    "a scale that widens": net(
        lambda m, x: m.bn(m.conv(x)) * m.s, lambda: nn.Conv2d(4, 1, 3), lambda: nn.BatchNorm2d(1), s=_column
    ),
    "a column for rows": linear(lambda m, x: m.bn(m.conv(x.mean((2, 3)))) * m.s, s=_column),
    "a number divided by it": net(lambda m, x: 1 / m.bn(m.conv(x))),
    "a scale divided by it": net(lambda m, x: m.s / m.bn(m.conv(x)), s=_column),
    "a division rounded": net(lambda m, x: torch.div(m.bn(m.conv(x)), 2, rounding_mode="floor")),
    "a number times it, no number": net(lambda m, x: m.bn(m.conv(x)) * float("nan")),
    "a number times it, zero": net(lambda m, x: m.bn(m.conv(x)) * 0),
    "a division by zero": net(lambda m, x: m.bn(m.conv(x)) / 0),
    "a complex number times it": net(lambda m, x: m.bn(m.conv(x)) * 1j),
    "a scale of integers": net(lambda m, x: m.bn(m.conv(x)) * m.conv.weight.shape[0]),
    "a power": net(lambda m, x: m.bn(m.conv(x)) ** 2),
    "it times itself": net(lambda m, x: (y := m.bn(m.conv(x)), y * y)[1]),
    "it and it": net(lambda m, x: (y := m.bn(m.conv(x)), y + y)[1]),
    "it, scaled and not": net(lambda m, x: (y := m.bn(m.conv(x)), y * m.s, y)[1:], s=_column),
    "it, scaled twice": net(lambda m, x: (y := m.bn(m.conv(x)), y * m.s, y + m.s)[1:], s=_column),
    "a scale that is an input": net(lambda m, x: m.bn(m.conv(x)) * x.mean()),
    "a scale that is computed": net(lambda m, x: m.bn(m.conv(x)) * m.s.sigmoid(), s=_column),
    "a squeeze and excitation": net(lambda m, x: (y := m.bn(m.conv(x)), y * y.mean((2, 3), keepdim=True).sigmoid())[1]),
    "a scale before": net(lambda m, x: m.bn(m.conv(x) * m.s), s=_column),
    "a scale and a shift before": net(lambda m, x: m.bn(m.conv(x) * m.s + m.t), s=_column, t=_column),
    "a number before": net(lambda m, x: m.bn(1 - m.conv(x) * 2)),
    "a scale before and after": net(lambda m, x: m.bn(m.conv(x) * m.s) * m.s, s=_column),
    "a scale along the width before": net(lambda m, x: m.bn(m.conv(x) * m.s), s=lambda: vector(6)),
    "a scale in place": net(lambda m, x: m.bn(m.conv(x)).mul_(m.s), s=_column),
    "a shift from another output": net(lambda m, x: m.bn(m.conv(x)) + m.conv(x).mean()),
    "a layer scale in front of a convolution": net(
        lambda m, x: m.conv(m.bn(x) * m.s + 1), bn=lambda: nn.BatchNorm2d(4), s=lambda: vector(4, 1, 1)
    ),
    "a scale alone": net(lambda m, x: m.bn(x) * m.s, nn.Identity, lambda: nn.BatchNorm2d(4), s=lambda: vector(4, 1, 1)),
}


@pytest.mark.parametrize("name", SCALED)
def test_a_scale_or_shift_after_a_batch_norm_goes_with_it(name):
    result = folded(*in_form(SCALED[name], IMAGE))
    assert not {"mul", "add", "sub", "div", "rsub"} & set(calls(result.program))


def test_every_scale_or_shift_after_a_batch_norm_goes_with_it_in_ATEN():
    result = folded(*side_by_side([made(make, IMAGE) for make in SCALED.values()]), edits=len(SCALED))
    assert not {"mul", "add", "sub", "div", "rsub"} & set(calls(result.program))


@pytest.mark.parametrize("options", MORE, ids=str)
@pytest.mark.parametrize("name", SCALED_EITHER_WAY)
def test_a_scale_is_right_whatever_is_done(name, options):
    checked(*in_form(SCALED_EITHER_WAY[name], IMAGE), **options)


@pytest.mark.parametrize("options", MORE, ids=str)
def test_scales_are_right_in_ATEN(options):
    checked(*side_by_side([made(make, IMAGE) for make in SCALED_EITHER_WAY.values()]), **options)


PROMOTED = {
    "a wider scale": lambda m, x: m.bn(m.conv(x)) * m.s,
    "a wider shift": lambda m, x: m.bn(m.conv(x)) + m.s,
    "a wider number": lambda m, x: m.bn(m.conv(x)) * m.s.sum(),  # of no axis: it does not promote
    "a cast before a scale": lambda m, x: m.bn(m.conv(x)).double() * m.s,
}


@pytest.mark.parametrize("form", DIALECTS)
@pytest.mark.parametrize("name", PROMOTED)
def test_a_scale_that_widens_the_dtype_still_does(name, form):
    module, x = made(net(PROMOTED[name]), IMAGE, dtype=torch.float32)
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
    make = net(lambda m, x: m.bn(m.conv(x)).relu())
    result = folded(*in_form(make, IMAGE, form=form), alone="multiply_add")
    assert calls(result.program) in (["conv2d", "relu"], ["convolution", "relu"])
