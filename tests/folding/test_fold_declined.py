"""What Fold leaves alone says why, and stays as it is: one row a reason."""

import re

import pytest
import torch
from torch import nn
from torch.nn import functional

from folds import IMAGE, checked, edited, exported, plain, same_weight, side_by_side, swamp, vector
from programs import aten, export
from torch_batchnorm import Fold, switch_mode


def _stats(m):
    return m.bn.weight, m.bn.bias, m.bn.running_mean, m.bn.running_var


def _set(path, index, value):
    def edit(module):
        module.get_parameter(path)[index] = value

    def buffer(module):
        module.get_buffer(path)[index] = value

    return buffer if "running" in path else edit


# The program and its inputs, what the reason says, how many batch norms are left.
LEFT = {
    "the producer's output is read elsewhere": (
        lambda: edited(lambda m, x: (y := m.conv(x), m.bn(y), y)[1:]),
        "elsewhere|also|other|read",
        1,
    ),
    "two batch norms of one output": (
        lambda: edited(lambda m, x: (y := m.conv(x), m.bn(y), m.other(y))[1:], other=lambda: nn.BatchNorm2d(6)),
        "elsewhere|also|other|read",
        2,
    ),
    "a view of the producer's output is read elsewhere": (
        lambda: edited(lambda m, x: (y := m.conv(x).flatten(2), m.bn(y), y)[1:], bn=lambda: nn.BatchNorm1d(6)),
        "elsewhere|also|other|read",
        1,
    ),
    "a weight that two convolutions read": (
        lambda: same_weight(lambda m, x: (m.bn(m.conv(x)), m.other(x))),
        "weight",
        1,
    ),
    "a convolution called twice, once without batch norm": (
        lambda: edited(lambda m, x: (m.bn(m.conv(x)), m.conv(x * 2))),
        "weight",
        1,
    ),
    "a convolution called twice, with two batch norms": (
        lambda: edited(lambda m, x: (m.bn(m.conv(x)), m.other(m.conv(x * 2))), other=lambda: nn.BatchNorm2d(6)),
        "weight",
        2,
    ),
    "a weight that something else reads": (
        lambda: edited(lambda m, x: (m.bn(m.conv(x)), m.conv.weight.square().sum())),
        "weight",
        1,
    ),
    "a weight that is returned": (
        lambda: edited(lambda m, x: (m.bn(m.conv(x)), m.conv.weight)),
        "weight",
        1,
    ),
    "a weight that is an input": (
        lambda: edited(lambda m, x, w: m.bn(functional.conv2d(x, w)), IMAGE, (6, 4, 3, 3)),
        "constant|input",
        1,
    ),
    "a bias that is an input": (
        lambda: edited(lambda m, x, b: m.bn(functional.conv2d(x, m.conv.weight, b)), IMAGE, (6,)),
        "constant|input",
        1,
    ),
    "a weight that is computed": (
        lambda: edited(lambda m, x: m.bn(functional.conv2d(x, m.conv.weight.tanh()))),
        "constant|comput",
        1,
    ),
    "statistics that are inputs": (
        lambda: edited(lambda m, x, mean: functional.batch_norm(m.conv(x), mean, m.bn.running_var), IMAGE, (6,)),
        "constant|input",
        1,
    ),
    "a weight that the program writes": (
        lambda: edited(
            lambda m, x: (m.w.mul_(2), m.bn(functional.conv2d(x, m.w)))[1], w=lambda: nn.Buffer(torch.randn(6, 4, 3, 3))
        ),
        "writ|mutat|constant",
        1,
    ),
    "a weight that the program writes afterwards": (
        lambda: edited(
            lambda m, x: (m.bn(functional.conv2d(x, m.w)), m.w.mul_(2))[0], w=lambda: nn.Buffer(torch.randn(6, 4, 3, 3))
        ),
        "writ|mutat|constant",
        1,
    ),
    "a weight that the program writes through a view": (
        lambda: edited(
            lambda m, x: (m.w[0].mul_(2), m.bn(functional.conv2d(x, m.w)))[1],
            w=lambda: nn.Buffer(torch.randn(6, 4, 3, 3)),
        ),
        "writ|mutat|constant",
        1,
    ),
    "statistics that the program writes": (
        lambda: edited(lambda m, x: (m.bn(m.conv(x)), m.bn.running_mean.add_(1))[0]),
        "writ|mutat|constant",
        1,
    ),
    "statistics that a batch norm in training writes": (
        lambda: edited(
            lambda m, x: (
                functional.batch_norm(m.conv(x), *_stats(m)[2:], *_stats(m)[:2]),
                functional.batch_norm(m.conv(x * 2), *_stats(m)[2:], training=True),
            )
        ),
        "statistics|trains",
        2,
    ),
    "batch statistics": (
        lambda: edited(lambda m, x: m.bn(m.conv(x)), edit=lambda m: m.bn.train()),
        "statistics",
        1,
    ),
    "batch statistics in eval": (
        lambda: edited(plain, bn=lambda: nn.BatchNorm2d(6, track_running_stats=False)),
        "statistics",
        1,
    ),
    "saved statistics in use": (
        lambda: edited(lambda m, x: aten.native_batch_norm.default(m.conv(x), *_stats(m), False, 0.1, 1e-5)[:2]),
        "save_mean",
        1,
    ),
    "a complex shift after it, a relu before": (
        lambda: edited(lambda m, x: m.bn(m.conv(x).relu()) + 1j),
        "",
        1,
    ),
    **{
        f"{name} of {value}": (
            lambda name=name, value=value: edited(plain, edit=_set(name, 2, value)),
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
        lambda: edited(plain, bn=lambda: nn.BatchNorm2d(6, eps=0.0), edit=_set("bn.running_var", 1, 0.0)),
        "finite|zero|variance|inf",
        1,
    ),
    "a mean that swamps the rest in float32": (
        lambda: edited(plain, edit=swamp, dtype=torch.float32),
        "loss|los|precision|condition",
        1,
    ),
    "weights that overflow": (
        lambda: edited(
            lambda m, x: m.bn(m.conv(x / 1024)),
            edit=lambda m: (m.bn.weight.fill_(3e3), m.conv.weight.fill_(60.0)),
            dtype=torch.float16,
        ),
        "overflow|finite|range|large",
        1,
    ),
    "an addmm with alpha and beta": (
        lambda: edited(
            lambda m, x: m.bn(torch.addmm(m.t, x, m.w, alpha=2, beta=3)),
            (5, 4),
            bn=lambda: nn.BatchNorm1d(6),
            t=lambda: vector(6),
            w=lambda: vector(4, 6),
        ),
        "alpha",
        1,
    ),
    "an activation between": (lambda: edited(lambda m, x: m.bn(m.conv(x).sigmoid())), "", 1),
    "nothing around it": (
        lambda: edited(lambda m, x: m.bn(x), bn=lambda: nn.BatchNorm2d(4)),
        "alone|neither|no |nothing|producer",
        1,
    ),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_alone_says_why_and_stays_as_it_is(name):
    make, reason, count = LEFT[name]
    program, *inputs = exported(make())
    result = checked(program, *inputs)
    assert (result.modified, len(result.declined), result.program is program) == (False, count, True)
    for declined in result.declined:
        with pytest.raises(ValueError, match=f"(?i){reason}"):
            raise ValueError(declined.reason)


IN_ATEN = [row for row in LEFT.values() if "statistics" not in row[1]]  # in a program that trains, nothing folds


def test_all_of_it_is_left_alone_in_ATEN_too():
    program, *inputs = side_by_side([make() for make, *_ in IN_ATEN])
    result = checked(program, *inputs)
    assert (result.modified, len(result.declined)) == (False, sum(count for *_, count in IN_ATEN))
    reasons = [(IN_ATEN[int(d.module.split(".")[1])][1], d.reason) for d in result.declined]
    assert [(want, found) for want, found in reasons if not re.search(f"(?i){want}", found)] == []


@pytest.mark.parametrize("name", [name for name, row in LEFT.items() if "statistics" in row[1]])
def test_batch_statistics_are_left_in_ATEN_too(name):
    program, x = exported(LEFT[name][0](), "ATEN")
    assert checked(program, x, clone_calls=True, clone_weights=True, alone="multiply_add").modified is False


ALWAYS_LEFT = [name for name, row in LEFT.items() if re.search("constant|finite|statistics|save_mean", row[1])]


@pytest.mark.parametrize("name", ALWAYS_LEFT)
def test_no_option_folds_what_cannot_be_read(name):
    program, *inputs = exported(LEFT[name][0]())
    assert checked(program, *inputs, clone_calls=True, clone_weights=True).modified is False


def test_no_option_folds_what_cannot_be_read_in_ATEN():
    program, *inputs = side_by_side([LEFT[name][0]() for name in ALWAYS_LEFT if LEFT[name] in IN_ATEN])
    assert checked(program, *inputs, clone_calls=True, clone_weights=True).modified is False


class Written(nn.Module):
    """Batch norm into memory that is resized."""

    def __init__(self):
        super().__init__()
        self.bn = nn.BatchNorm2d(4)

    def forward(self, x):
        out, *saved = (x.new_empty(0) for _ in range(3))
        found = aten.native_batch_norm.out(
            x, *_stats(self), False, 0.1, 1e-5, out=out, save_mean=saved[0], save_invstd=saved[1]
        )
        return found[0].relu()


def _read_twice():
    return edited(lambda m, x: (y := m.conv(x), m.bn(y), y)[1:])


def _without_vals(row):
    module = exported(row)[0].module()
    for node in module.graph.nodes:
        node.meta.pop("val", None)
    return module


# What is refused, the reason but for the names in it, and what the user can do about it.
REMEDIES = {
    "a layer that something else reads": (
        lambda: exported(_read_twice())[0],
        r"\w+ is read by output too",
        "clone_calls=True calls it once more",
    ),
    "a weight that something else reads": (
        lambda: exported(LEFT["a weight that something else reads"][0]())[0],
        r"conv.weight is read by \w+ too",
        "clone_weights=True copies it",
    ),
    "too much lost": (
        lambda: exported(LEFT["a mean that swamps the rest in float32"][0]())[0],
        r"folding it loses \S+ standard deviations of a channel to rounding in torch.float32, more than 1.0e-03",
        "force=True folds it",
    ),
    "batch statistics": (
        lambda: exported(LEFT["batch statistics"][0]())[0],
        "it normalises with its batch's statistics",
        "switch the program to eval first",
    ),
    "frozen in a program that trains": (
        lambda: exported(
            edited(
                lambda m, x: m.other(m.bn(m.conv(x))),
                other=lambda: nn.BatchNorm2d(6),
                edit=lambda m: m.other.train(),
            )
        )[0],
        "it is frozen in a program that trains, and folding changes what weights learn",
        "switch the program to eval first",
    ),
    "frozen beside a dropout that drops": (
        lambda: exported(
            edited(
                lambda m, x: m.drop(m.bn(m.conv(x)).relu()),
                drop=lambda: nn.Dropout(0.5),
                edit=lambda m: m.drop.train(),
            )
        )[0],
        "it is frozen in a program that trains, and folding changes what weights learn",
        "switch the program to eval first",
    ),
    "no shapes": (
        lambda: _without_vals(_read_twice()),
        r"the graph keeps no shapes \(no val\)",
        "trace it with fake tensors",
    ),
    "an out argument that is resized": (
        lambda: export(Written().eval().requires_grad_(False), torch.randn(2, 4, 3, 3)),
        "its out argument may be resized",
        "allocate it in full",
    ),
}


@pytest.mark.parametrize("name", REMEDIES)
def test_the_remedy_is_apart_from_the_reason_and_helps(name):
    make, reason, remedy = REMEDIES[name]
    program = make()
    declined = Fold()(program).declined[0]
    assert re.search(f"(^|; ){reason}(; |$)", declined.reason), declined.reason
    assert (remedy in declined.remedy.split("; "), remedy in declined.reason) == (True, False)
    option, is_an_option, _ = remedy.partition("=True")
    if is_an_option:
        assert Fold(**{option: True})(program).modified
    if "frozen" in name:
        assert Fold(force=True)(program).modified
    if "switch" in remedy:
        assert Fold()(switch_mode(program, "eval")).declined == ()
