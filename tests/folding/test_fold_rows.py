"""TRANSFERS: one row says how an op passes channels on, up and down; two rows of one op are a mistake."""

import pytest
import torch

from rows import run_with
from torch_batchnorm.decomps.ops import OP_BY_TARGET, Kind
from torch_batchnorm.passes.folding.channels import Scales, transfer_of

TRANSFERS = "torch_batchnorm.passes.folding.channels:TRANSFERS"
CODE = """
import torch, torch_batchnorm as tbn

def program(*modules):
    return torch.export.export(torch.nn.Sequential(*modules).eval(), (torch.randn(2, 4, 5, 5),))

class Positive(torch.nn.Module):
    def forward(self, x):
        return torch.positive(x)

bn, conv = torch.nn.BatchNorm2d(4), torch.nn.Conv2d(4, 4, 1)
for modules in ((conv, Positive(), bn), (bn, Positive(), conv)):
    print(len(tbn.Fold()(program(*modules)).edits))
"""


def test_a_new_row_is_walked_up_and_down(capsys):
    exec(CODE, {})  # as the table is
    assert capsys.readouterr().out.split() == ["0", "0"]
    assert run_with({TRANSFERS: ["Moves((aten.positive.default,))"]}, CODE).split() == ["1", "1"]


def test_two_rows_of_one_op_are_said_at_import():
    with pytest.raises(AssertionError, match=r"two rows of TRANSFERS describe Kind.PAD"):
        run_with({TRANSFERS: ["Joins((Kind.PAD,))"]}, "import torch_batchnorm")


def test_every_scaling_has_its_algebra():
    graph = torch.fx.Graph()
    scaling = [target for target, row in OP_BY_TARGET.items() if row.kind is Kind.SCALING]
    assert {type(transfer_of(graph.call_function(target))) for target in scaling} == {Scales}
