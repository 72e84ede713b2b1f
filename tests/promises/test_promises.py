"""A row added to a table, and nothing else: every pass, the contract and the command line serve it.

Each runs in a process of its own, whose import hook appends the row to the literal in the source (rows.py).
"""

import json
from pathlib import Path

from rows import run_with

TESTS = Path(__file__).parent.parent
FORMS, GRADIENTS = "torch_batchnorm.decomps.forms:FORMS", "torch_batchnorm.decomps.forms:GRADIENTS"

PRELUDE = f"""
import sys
sys.path[:0] = [{str(TESTS)!r}, {str(TESTS / "promises")!r}]
import torch

library, aten, ops = torch.library.Library("promise", "DEF"), torch.ops.aten, torch.ops.promise


def define(schema, kernel):
    name = schema.partition("(")[0]
    library.define(schema)
    library.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"promise::{{name}}", kernel, lib=library)


TENSORS = "Tensor input, Tensor? weight, Tensor? bias"
FLAGS = "bool training, float momentum, float eps"
THREE = "(Tensor, Tensor, Tensor)"
"""

# What follows it sees the library with the rows in it.
LIBRARY = """
import warnings
warnings.simplefilter("ignore")
import torch_batchnorm as tbn
from torch import nn
from typer.testing import CliRunner
from contracts import Kind, built, holds, instances, named
from programs import call_graph, export, saved_and_loaded
from torch_batchnorm.cli import app
from torch_batchnorm.passes import PASSES

X = torch.randn(4, 3, 2, 2, generator=torch.Generator().manual_seed(0))


def run(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "400"})


def calls(program):
    top = getattr(program, "graph_module", program)
    return [str(n.target) for n in top.graph.nodes if n.op == "call_function" and "getitem" not in str(n.target)]


def everything(make, passes=PASSES):
    '''The contract of every pass on a program; returns what the passes that changed it made of it.'''
    held = {named(instance): holds(instance, make) for instance in instances(passes)}
    return {name: calls(r.program) for name, r in held.items() if r is not None and r.modified}
"""


def promised(rows, definitions, code):
    """What the code says, in JSON on its last line, where the library has these rows."""
    said = run_with(rows, f"{PRELUDE}{definitions}{LIBRARY}{code}\nimport json\nprint(json.dumps(said))")
    return json.loads(said.splitlines()[-1])


OVERLOADS = """
define(
    f"functional({TENSORS}, Tensor running_mean, Tensor running_var, {FLAGS}) -> {THREE[:-1]}, Tensor, Tensor)",
    lambda *args: tuple(t.clone() for t in aten._native_batch_norm_legit_functional(*args)),
)
define(
    f"in_place({TENSORS}, Tensor(a!) running_mean, Tensor(b!) running_var, {FLAGS}) -> {THREE}",
    lambda *args: aten._native_batch_norm_legit(*args),
)
"""


def test_an_overload_row_is_read_and_written_by_every_pass():
    rows = [
        "Form(torch.ops.promise.functional.default, SAVED + UPDATED, _FLAG, _OUTPUTS, _CORE)",
        "Form(torch.ops.promise.in_place.default, SAVED, _FLAG, _IN_PLACE, _COMPOSITE)",
    ]
    said = promised(
        {FORMS: rows},
        OVERLOADS,
        """
class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)

    def forward(self, x):
        bn = self.bn
        state = bn.running_mean, bn.running_var
        found = ops.functional(self.conv(x), bn.weight, bn.bias, *state, self.training, 0.1, 1e-5)
        if self.training:
            for old, new in zip(state, found[3:]):
                old.copy_(new)
        return found[0].relu()


class InPlace(Functional):
    def forward(self, x):
        bn, flags = self.bn, (self.training, 0.1, 1e-5)
        return ops.in_place(self.conv(x), bn.weight, bn.bias, bn.running_mean, bn.running_var, *flags)[0].relu()


def made(module, training):
    program = export(module().train(training), X)
    return (program.run_decompositions({}) if module is Functional else program.module()), (X,)


said = {
    f"{module.__name__} {training}": everything(lambda: made(module, training))
    for module in (Functional, InPlace)
    for training in (True, False)
}
said["inspect"] = tbn.inspect(made(Functional, True)[0]).summary()
""",
    )
    functional, family = said["Functional True"], "aten._batch_norm_with_update_functional.default"
    assert family in functional["Consolidate()"]
    assert "aten._native_batch_norm_legit_functional.default" in functional["Legalize(target='native')"]
    assert "aten._native_batch_norm_legit_no_training.default" in functional["SwitchMode(to='eval')"]
    assert "Fold()" not in functional
    assert "aten._batch_norm_with_update.default" in said["InPlace True"]["Consolidate()"]
    assert "aten.batch_norm.default" in said["InPlace True"]["Legalize(target='composite')"]
    assert "promise.in_place.default" in said["InPlace True"]["SwitchMode(to='eval')"]
    for kind in ("Functional False", "InPlace False"):
        assert "aten._batch_norm_no_update.default" in said[kind]["Consolidate()"]
        assert said[kind]["Fold()"] == ["aten.conv2d.default", "aten.relu.default"]
    assert said["inspect"] == "1 batch norm: 1 x promise.functional.default (train)"


def test_a_layer_row_is_folded_into_and_makes_memory_of_its_own():
    row = 'LayerForm(torch.ops.promise.linear.default, "input", "weight", "bias", kernel=False)'
    said = promised(
        {"torch_batchnorm.decomps.layers:LAYERS": [row]},
        """
define("linear(Tensor input, Tensor weight, Tensor? bias) -> Tensor", lambda *args: nn.functional.linear(*args))
from torch import nn
""",
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.bn = nn.Linear(3, 3), nn.BatchNorm1d(3)

    def forward(self, x):
        weight, bias = self.linear.weight, self.linear.bias
        return ops.linear(self.bn(ops.linear(x, weight, bias)), weight, None).relu_()


def made(training):
    return export(Net().train(training), X[..., 0, 0]).module(), (X[..., 0, 0],)


said = {str(training): everything(lambda: made(training)) for training in (True, False)}
functional = tbn.Legalize("functional")(export(Net().eval(), X[..., 0, 0]))
said["functional"] = [d.reason for d in functional.declined]
""",
    )
    assert said["False"]["Fold(clone_weights=True)"].count("promise.linear.default") == 2
    assert not any("batch_norm" in call for call in said["False"]["Fold(clone_weights=True)"])
    assert "aten._batch_norm_with_update.default" in said["True"]["Consolidate()"]
    assert said["functional"] == []


def test_a_target_row_is_a_choice_of_legalize_and_of_its_command():
    row = """"quietly": Target(
        lambda site, functional: row_of(aten._native_batch_norm_legit_no_training.default) if not site.norm.training
        else row_of(aten._native_batch_norm_legit_functional.default) if functional else site.form,
        "those who ask for nothing in training")"""
    said = promised(
        {"torch_batchnorm.passes.rewriting.targets:TARGETS": [row]},
        "",
        """
def net():
    return export(nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)).eval(), X)


said = {"made": everything(lambda: (net(), (X,)), [tbn.Legalize]), "help": run("legalize", "--help").stdout}
""",
    )
    assert "aten._native_batch_norm_legit_no_training.default" in said["made"]["Legalize(target='quietly')"]
    assert "quietly (those who ask for nothing in training)" in " ".join(said["help"].split())


def test_a_vendor_row_is_explained_chosen_and_pinned():
    rows = {
        FORMS: ["Form(torch.ops.promise.quick.default, SAVED, _FLAG, _IN_PLACE, _VENDOR)"],
        GRADIENTS: ["Form(torch.ops.promise.quick_backward.default, GRADS, _FLAG, _NONE, _VENDOR, _GRADIENT)"],
        "torch_batchnorm.decomps.backends.rules:VENDORS": [
            """Vendor("quick", "Quick", torch.ops.promise.quick.default, torch.ops.promise.quick_backward.default,
            devices=("xpu",), built=lambda: False, current=1,
            rules=(Rule("rank", lambda c: c.input.ndim, "4", lambda c: c.input.ndim == 4),))"""
        ],
    }
    said = promised(
        rows,
        """
define(
    f"quick({TENSORS}, Tensor(a!)? running_mean, Tensor(b!)? running_var, {FLAGS}) -> {THREE}",
    lambda *args: aten._native_batch_norm_legit(*args) if args[3] is not None
    else aten._native_batch_norm_legit.no_stats(*args[:3], *args[5:]),
)
define(
    "quick_backward(Tensor grad_out, Tensor input, Tensor? weight, Tensor? running_mean, Tensor? running_var, "
    f"Tensor? save_mean, Tensor? save_invstd, bool train, float eps, bool[3] output_mask) -> {THREE}",
    lambda *args: aten.native_batch_norm_backward(*args),
)
""",
        """
def net(training=True, x=X, norm=nn.BatchNorm2d):
    return export(nn.Sequential(norm(3)).train(training), x)


tensors = (torch.ones(3),) * 4
said = {
    "explained": [str(tbn.explain_backend(x, *tensors, True, 1e-5, device="xpu")) for x in (X, X[..., 0])],
    "made": {str(t): everything(lambda: (net(t).module(), (X,)), [tbn.Legalize]) for t in (True, False)},
    "declined": tbn.Legalize("quick")(net(True, X[..., 0], nn.BatchNorm1d)).declined[0].reason,
    "inspected": tbn.inspect(net(), "xpu").entries[0].backend,
    "help": run("legalize", "--help").stdout,
}
""",
    )
    chosen, other = said["explained"]
    assert (chosen.partition(":")[0], other.partition(":")[0], said["inspected"]) == ("quick", "native", "quick")
    for training in ("True", "False"):
        assert "promise.quick.default" in said["made"][training]["Legalize(target='quick')"]
    assert said["declined"] == "quick cannot run it: rank is 3, outside the limit: 4"
    assert "quick (Quick's kernel, pinned)" in " ".join(said["help"].split())


PASS = '''
"""SetMomentum: a pass in one file."""

from dataclasses import dataclass, field
from typing import ClassVar

from torch_batchnorm.passes.graph.draft import Draft
from torch_batchnorm.passes.graph.options import NO_FLAG, Command, Keeps, flag
from torch_batchnorm.passes.graph.result import Log
from torch_batchnorm.passes.rewriting.site import find_sites


@dataclass(frozen=True)
class SetMomentum:
    """Sets the momentum of every batch norm.

    momentum: what to set it to. only: which sites. inplace: edit the given program.
    """

    command: ClassVar[Command] = Command("momentum", "-m 0.5 -o out.pt2", Keeps.MEANING)

    momentum: float = field(default=0.5, metadata=flag("-m", "--momentum"))
    only: str = field(default="all", metadata=flag(choices=("all", "trained")))
    inplace: bool = field(default=False, metadata=NO_FLAG)

    def __call__(self, program):
        draft, log = Draft(program, self.inplace), Log()
        for site in find_sites(draft.graphs):
            index = site.form.arguments.index("momentum")
            trained = self.only == "all" or site.norm.training
            if trained and site.node.args[index] != self.momentum:
                log.edit(site, site.spelling, f"momentum {self.momentum}")
                site.node.update_arg(index, self.momentum)
        return log.result(draft.build() if log.edits else program)
'''


def test_a_pass_row_is_a_command_and_keeps_the_contract(tmp_path):
    (tmp_path / "setting.py").write_text(PASS)
    said = promised(
        {"torch_batchnorm.passes:PASSES": ["__import__('setting').SetMomentum"]},
        f"sys.path.insert(0, {str(tmp_path)!r})",
        f"""
def net():
    return export(nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)), X)


file, out = {str(tmp_path / "in.pt2")!r}, {str(tmp_path / "out.pt2")!r}
torch.export.save(net(), file)
ran = run("momentum", file, "-m", "0.25", "-o", out, "--report", "--strict")
said = {{
    "made": everything(lambda: (net(), (X,)), PASSES[-1:]),
    "help": [run("--help").stdout, run("momentum", "--help").stdout],
    "ran": [ran.exit_code, ran.stdout, [e.momentum for e in tbn.inspect(torch.export.load(out)).entries]],
}}
""",
    )
    assert list(said["made"]) == ["SetMomentum()", "SetMomentum(only='trained')"]
    assert "momentum" in said["help"][0]
    for told in ("Sets the momentum of every batch norm.", "What to set it to.", "--only", "Example: torch-batchnorm"):
        assert told in said["help"][1]
    assert "inplace" not in said["help"][1]
    assert (said["ran"][0], said["ran"][2]) == (0, [0.25])
