"""Notes are input: what 0.1.0 wrote still switches back, and what is no note changes nothing."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

import torch_batchnorm as tbn
from programs import export, same, saved_and_loaded
from torch_batchnorm import SwitchMode
from torch_batchnorm.passes.graph.draft import Draft

X = torch.randn(4, 3, 2, 2, generator=torch.Generator().manual_seed(1))
FIXTURES = Path(__file__).parent / "fixtures"


class Net(nn.Module):
    """A batch norm called twice, one without weights, one whose counter adds a tensor; dropout, stochastic depth."""

    def __init__(self):
        super().__init__()
        self.conv, self.twice, self.plain = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.BatchNorm2d(3, affine=False)
        self.lifted, self.dropout = nn.BatchNorm2d(3), nn.Dropout(0.3)

    def forward(self, x):
        x = self.plain(self.twice(self.twice(self.conv(x)).relu()))
        if self.training:
            self.lifted.num_batches_tracked.add_(torch.tensor(1))
        bn = self.lifted
        x = functional.batch_norm(x, bn.running_mean, bn.running_var, bn.weight, bn.bias, self.training)
        return self.dropout(x / 0.8 * torch.floor(0.8 + torch.rand(4, 1, 1, 1)))


def exported(decomposed=False, consolidated=False):
    torch.manual_seed(0)
    program = export(Net(), X)
    program = program.run_decompositions() if decomposed else program
    return tbn.consolidate(program) if consolidated else program


# What 0.1.0 wrote, each by `torch.export.save(tbn.switch_mode(program, "eval"), path)`: here are the programs.
WRITTEN = {
    "training": exported,
    "aten": lambda: exported(decomposed=True),
    "family_aten": lambda: exported(decomposed=True, consolidated=True),
    "frozen_affine": lambda: tbn.freeze(exported(decomposed=True), "twice", affine=True),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_what_0_1_0_wrote_switches_back_to_what_it_was(name):
    program = WRITTEN[name]()
    result = SwitchMode("train")(torch.export.load(FIXTURES / f"{name}.pt2"))
    assert (result.modified, result.declined, tbn.verify(result.program)) == (True, (), ())
    assert tbn.render(result.program) == tbn.render(saved_and_loaded(program))
    assert same(dict(result.program.state_dict), dict(program.state_dict))


@pytest.mark.parametrize("name", ["training", "aten"])
def test_a_note_says_its_format(name):
    program = tbn.switch_mode(WRITTEN[name](), "eval")
    notes = [node.meta["custom"]["torch_batchnorm"] for node in program.graph.nodes if node.meta.get("custom")]
    assert len(notes) == 6
    assert {note["format"] for note in notes} == {1}


ENTRY = {"name": "add_", "op": "aten.add_.Tensor"}
ONE = {"wraps": [], "constant": {"name": "c", "place": 0, "target": "c", "dtype": "int64"}}

# What anyone may have written under our key: each is a kind of damage, and none of it says anything.
DAMAGED = {
    "no dict": 5,
    "custom is no dict": None,
    "a field that does not exist": {"filled": ["x"]},
    "updates are text": {"train": {"updates": "x"}},
    "an update of nothing": {"train": {"form": "f", "updates": [{"role": "out", "name": "getitem_3"}]}},
    "an update without a name": {"train": {"form": "f", "updates": [{"role": "new_running_mean"}]}},
    "a name that is none": {"train": {"form": "f", "counter": {**ENTRY, "name": "add 1; import os"}}},
    "a place before the first": {"train": {"form": "f", "counter": {**ENTRY, "listed": -1}}},
    "a constant of no dtype": {
        "train": {
            "form": "f",
            "counter": {**ENTRY, "one": {"wraps": [], "constant": {**ONE["constant"], "dtype": "load"}}},
        }
    },
    "what it was is a list": {"train": {"was": [1]}},
    "a depth of one node": {"depth": ["mul"]},
    "a depth of other nodes": {"depth": ["output", "x", "dropout"]},
    "a form of another format": {"format": 2, "train": {"form": "aten.batch_norm.default"}, "frozen": "asked"},
    "frozen for no reason": {"frozen": [], "detached": 1},
}
PASSES_RUN = {
    "eval": lambda p: tbn.switch_mode(p, "eval"),
    "train": lambda p: tbn.switch_mode(p, "train", include_frozen=True),
    "freeze": lambda p: tbn.freeze(p, affine=True),
    "unfreeze": tbn.unfreeze,
    "consolidate": tbn.consolidate,
    "composite": lambda p: tbn.legalize(p, "composite"),
    "math": lambda p: tbn.legalize(p, "math"),
    "fold": lambda p: tbn.fold(p, force=True),
    "recalibrate": lambda p: tbn.recalibrate(p, [X]),
}


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.dropout = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.Dropout(0.3)

    def forward(self, x):
        return self.dropout(self.bn(self.conv(x)) / 0.8 * torch.floor(0.8 + torch.rand(4, 1, 1, 1)))


@pytest.fixture(scope="module")
def small():
    torch.manual_seed(0)
    made = {mode: export(Small().train(mode == "train"), X) for mode in ("train", "eval")}
    made |= {"family": tbn.consolidate(made["eval"]), "aten": made["train"].run_decompositions()}
    return {kind: (p, {name: tbn.render(run(p)) for name, run in PASSES_RUN.items()}) for kind, p in made.items()}


@pytest.mark.parametrize("kind", ["train", "family", "aten"])
@pytest.mark.parametrize("damage", DAMAGED)
def test_what_is_no_note_changes_nothing(small, kind, damage):
    program, want = small[kind]
    damaged = Draft(program).build()
    for node in damaged.graph.nodes:
        if node.op == "call_function":
            node.meta["custom"] = 5 if DAMAGED[damage] is None else {"torch_batchnorm": DAMAGED[damage]}
    for name, run in PASSES_RUN.items():
        found = run(damaged)
        assert tbn.verify(found) == (), name
        assert tbn.render(found) == want[name], name


def test_a_counter_whose_one_cannot_be_made_again_adds_a_literal(small):
    damaged = Draft(small["train"][0]).build()
    evaluates = tbn.switch_mode(damaged, "eval")
    for wraps in ([{"name": "a", "op": "aten.neg.default"}], []):
        (norm,) = evaluates.graph.find_nodes(op="call_function", target=torch.ops.aten.batch_norm.default)
        note = {"form": "aten.batch_norm.default", "counter": {**ENTRY, "one": {"wraps": wraps, "node": "gone"}}}
        norm.meta["custom"] = {"torch_batchnorm": {"train": note}}
        assert tbn.render(tbn.switch_mode(evaluates, "train")) == tbn.render(damaged)
