"""`inspect`, `render` and what they print."""

import json

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn

import torch_batchnorm as tbn
from programs import export
from torch_batchnorm.tables import result_tables, text_of

X = torch.randn(2, 3, 4, 4)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 1)
        self.first, self.second = nn.BatchNorm2d(4, eps=1e-3, momentum=0.03), nn.BatchNorm2d(4, affine=False)

    def forward(self, x):
        return self.second(self.first(self.stem(x)).relu())


def test_an_entry_says_everything_there_is_to_say():
    first, second = tbn.inspect(export(Net(), X)).to_dict()["batch_norms"]
    assert first == {
        "node": "batch_norm",
        "graph": "",
        "module": "first",
        "form": "aten.batch_norm.default",
        "mode": "train",
        "input": "f32[2, 4, 4, 4]",
        "channels": 4,
        "rank": 4,
        "dtype": "float32",
        "device": "cpu",
        "eps": 1e-3,
        "momentum": 0.03,
        "affine": "weight and bias",
        "stats": "running",
        "weight": "first.weight",
        "bias": "first.bias",
        "running_mean": "first.running_mean",
        "running_var": "first.running_var",
        "counter": "first.num_batches_tracked",
        "producer": "conv2d (aten.conv2d.default)",
        "consumers": ["relu (aten.relu.default)"],
        "backend": None,
        "why": None,
        "problem": "",
    }
    assert (second["affine"], second["weight"], second["consumers"]) == ("none", None, ["output"])


@pytest.mark.parametrize(
    "change", [lambda p: p, lambda p: p.run_decompositions(), tbn.consolidate, lambda p: p.module()]
)
def test_what_is_computed_reads_the_same_in_every_dialect(change):
    told = ("module", "mode", "channels", "rank", "dtype", "eps", "momentum", "affine", "stats", "counter", "weight")
    expected, found = (tbn.inspect(p).to_dict()["batch_norms"] for p in (export(Net(), X), change(export(Net(), X))))
    assert [{k: e[k] for k in told} for e in found] == [{k: e[k] for k in told} for e in expected]


def test_json_is_the_dict():
    report = tbn.inspect(export(Net(), X))
    assert json.loads(report.to_json()) == report.to_dict()


def test_dynamic_sizes_show_as_symbols():
    program = export(Net(), X, dynamic=({0: torch.export.Dim("n", min=2)},))
    assert tbn.inspect(program).entries[0].input.startswith("f32[s")


def test_a_hand_built_graph_without_shapes_is_reported():
    graph = torch.fx.Graph()
    tensors = [graph.placeholder(n) for n in "xwbmv"]
    graph.output(graph.call_function(torch.ops.aten.batch_norm.default, (*tensors, False, 0.1, 1e-5, False)))
    (entry,) = tbn.inspect(torch.fx.GraphModule({}, graph)).entries
    assert (entry.mode, entry.rank, entry.weight, entry.counter, entry.consumers) == (
        "eval",
        None,
        "w",
        None,
        ("output",),
    )


def test_printed_report():
    assert_expected_inline(
        str(tbn.inspect(export(Net(), X))),
        """\
2 batch norms: 2 x aten.batch_norm.default (train)

| node         | module | form       | mode  | input           | eps   | momentum | affine          | stats            | from   | to     |
|--------------|--------|------------|-------|-----------------|-------|----------|-----------------|------------------|--------|--------|
| batch_norm   | first  | batch_norm | train | f32[2, 4, 4, 4] | 0.001 | 0.03     | weight and bias | running, counted | conv2d | relu   |
| batch_norm_1 | second | batch_norm | train | f32[2, 4, 4, 4] | 1e-05 | 0.1      | none            | running, counted | relu   | output |""",
    )


def test_printed_report_of_a_program_without_batch_norm():
    assert str(tbn.inspect(export(nn.ReLU(), X))) == "no batch norm"


def test_printed_result():
    assert_expected_inline(
        text_of(*result_tables(tbn.Consolidate()(export(Net(), X)))),
        """\
2 rewritten

| site         | module | was                     | is                                   |
|--------------|--------|-------------------------|--------------------------------------|
| batch_norm   | first  | aten.batch_norm.default | aten._batch_norm_with_update.default |
| batch_norm_1 | second | aten.batch_norm.default | aten._batch_norm_with_update.default |""",
    )


def test_something_else_is_refused():
    with pytest.raises(
        tbn.InvalidProgram, match=r"found a builtins\.int, expected an ExportedProgram or a GraphModule"
    ):
        tbn.inspect(3)


def test_a_declined_site_is_shown_with_what_to_do_about_it():
    declined = (tbn.Declined("bn", "1", "aten.batch_norm.default", "it trains", "switch the program to eval first"),)
    assert_expected_inline(
        text_of(*result_tables(tbn.Result(export(Net(), X), (), (*declined, tbn.Declined("bn_1", "", "f", "empty"))))),
        """\
2 declined

| site | module | form                    | reason                                      |
|------|--------|-------------------------|---------------------------------------------|
| bn   | 1      | aten.batch_norm.default | it trains: switch the program to eval first |
| bn_1 | -      | f                       | empty                                       |""",
    )
