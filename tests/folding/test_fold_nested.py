"""Fold in nested graphs: folded or not, they are right."""

import pytest
import torch
from torch import nn

from folds import DIALECTS, FORMS, IMAGE, checked, distances, in_form, made, outputs
from programs import export, same, saved_and_loaded


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
