"""Fold on random graphs of layers, batch norms and what lies between them: always right, twice is as good as once."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from drawn import drawn
from folds import DIALECTS, FORMS, checked, lively, outputs, sites, vector
from programs import export, same, saved_and_loaded

X = (2, 4, 7, 6)


def _conv(channels, n):
    """One of the convolutions from some channels, by number."""
    groups = (1, 2, channels)[n % 3] if channels % 2 == 0 else 1
    kernel, padding = ((1, 0), (3, 1), (3, 0), (1, 1), (2, 0), (3, "same"))[n // 3 % 6]
    outs = channels * (1, 2)[n // 18 % 2] if channels < 8 else channels // 2 * groups // groups
    outs = outs if outs % groups == 0 else channels
    return nn.Conv2d(channels, outs, kernel, padding=padding, groups=groups, bias=n // 36 % 2 == 0)


def _conv_transpose(channels, n):
    groups = (1, 2, channels)[n % 3] if channels % 2 == 0 else 1
    kernel, stride = ((1, 1), (2, 1), (2, 2), (1, 2))[n // 3 % 4]
    outs = channels * (1, 2)[n // 12 % 2] if channels < 8 else channels
    return nn.ConvTranspose2d(channels, outs, kernel, stride, groups=groups, bias=n // 24 % 2 == 0)


LAYERS = {
    "convolution": _conv,
    "transposed convolution": _conv_transpose,
    "batch norm": lambda channels, n: nn.BatchNorm2d(channels, affine=n % 4 != 0),
}
# What is done to a value, by number n, with the parameter p that is its own, [C, 1, 1].
BETWEEN = {
    "relu": lambda y, p, n: y.relu(),
    "scale": lambda y, p, n: (y * p, p * y, y * 2, y / p, y * p.view(1, -1, 1, 1))[n % 5],
    "shift": lambda y, p, n: (y + p, p - y, y - 0.5, y - p, torch.add(y, p, alpha=2))[n % 5],
    "swap": lambda y, p, n: (y.transpose(2, 3), y.transpose(2, 3).contiguous(), y.transpose(0, 1).transpose(0, 1))[
        n % 3
    ],
    "copy": lambda y, p, n: (y.clone(), functional.dropout(y, 0.5, False), y.flatten(2).unflatten(2, y.shape[2:]))[
        n % 3
    ],
    "write": lambda y, p, n: (y.clone().mul_(p), y.clone().relu_())[n % 2],
    "pool": lambda y, p, n: functional.avg_pool2d(y, 2, ceil_mode=True) if y.shape[2] > 2 < y.shape[3] else y,
}


class Random(nn.Module):
    """Steps from value to value: each takes one value, or two, and makes the next. Layers are made on the first run."""

    def __init__(self, steps, returned):
        super().__init__()
        self.steps, self.returned = steps, returned
        self.layers, self.parameters_of = nn.ModuleDict(), nn.ParameterDict()
        self.kinds = {}
        with torch.no_grad():
            self(torch.randn(X))

    def forward(self, x):
        values = [x]
        for place, (kind, back, other, n) in enumerate(self.steps):
            y = values[-1 - back % len(values)]
            values.append(self._step(str(place), kind, y, values[other % len(values)], n))
        head = self._layer("head", "linear", values[-1].flatten(1), 0)
        chosen = [values[i % len(values)] * 1 for i in self.returned]
        return [*chosen, self._layer("last", "batch norm of rows", head, 0), values[-1]]

    def _step(self, place, kind, y, z, n):
        if kind == "add":
            return y + z if y.shape == z.shape else y + y
        if kind == "concatenation":
            return torch.cat([y, z], 1) if y.shape[2:] == z.shape[2:] and y.shape[1] + z.shape[1] < 17 else y.neg()
        if kind == "again":
            known = [
                k
                for k, (_, c) in self.kinds.items()
                if c == y.shape[1] and k not in ("head", "last") and int(k) < int(place)
            ]
            return self.layers[known[n % len(known)]](y) if known and min(y.shape[2:]) > 2 else y.relu()
        if kind in LAYERS:
            return self._layer(place, kind, y, n) if min(y.shape[2:]) > 2 and max(y.shape[2:]) < 20 else y.abs()
        if place not in self.parameters_of:
            self.parameters_of[place] = vector(y.shape[1], 1, 1)
        return BETWEEN[kind](y, self.parameters_of[place], n)

    def _layer(self, place, kind, y, n):
        if place not in self.layers:
            made = {
                "linear": lambda c, n: nn.Linear(c, 3),
                "batch norm of rows": lambda c, n: nn.BatchNorm1d(c),
            } | LAYERS
            self.layers[place], self.kinds[place] = made[kind](y.shape[1], n), (kind, y.shape[1])
        return self.layers[place](y)


KINDS = [*LAYERS, "batch norm", "batch norm", "convolution", *BETWEEN, "add", "concatenation", "again", "again"]
STEPS = st.lists(
    st.tuples(st.sampled_from(KINDS), st.sampled_from([0, 0, 0, 1, 2]), st.integers(0, 7), st.integers(0, 71)),
    min_size=2,
    max_size=9,
)
RETURNED = st.lists(st.integers(0, 8), max_size=2)
OPTIONS = st.fixed_dictionaries(
    {
        "clone_calls": st.booleans(),
        "clone_weights": st.booleans(),
        "keep_state": st.booleans(),
        "alone": st.sampled_from(["leave", "multiply_add", "depthwise"]),
    }
)
DRAWN = drawn(25)


def _program(steps, returned, form):
    torch.manual_seed(0)
    x = torch.randn(X, dtype=torch.float64)
    return FORMS[form](export(lively(Random(steps, returned)), x)), x


@pytest.mark.parametrize("form", DIALECTS)
@DRAWN
@given(steps=STEPS, returned=RETURNED, options=OPTIONS)
def test_a_random_graph_is_right_however_it_is_folded(form, steps, returned, options):
    program, x = _program(steps, returned, form)
    result = checked(program, x, tolerance=1e-9, **options)
    assert sites(result.program) == len(result.declined)
    assert options["alone"] == "leave" or {d.reason for d in result.declined} <= {"nothing reads its output"}
    assert same(outputs(saved_and_loaded(result.program), x), outputs(result.program, x))


@DRAWN
@given(steps=STEPS, returned=RETURNED, options=OPTIONS)
def test_a_random_module_is_right_however_it_is_folded(steps, returned, options):
    program, x = _program(steps, returned, "module")
    checked(program, x, tolerance=1e-9, **options)
