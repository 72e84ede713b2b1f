"""An overload added as one row goes to eval and comes back as itself, whichever way it says its mode."""

import json

import pytest

from rows import run_with

pytestmark = pytest.mark.xdist_group("an added overload")  # one process says all of it
FORMS = "torch_batchnorm.decomps.forms:FORMS"
EVAL, CORE_EVAL = "synthetic.evaluates.default", "aten._native_batch_norm_legit_no_training.default"
FUNCTIONAL = "SAVED + UPDATED, {}, _OUTPUTS, {}"

# name: (its arguments behind the statistics, its row, what it is in eval)
CASES = {
    "flagged": ("bool training, float momentum, float eps", FUNCTIONAL.format("_FLAG", "_CORE"), CORE_EVAL),
    "flagged_of_vendor": ("bool training, float momentum, float eps", FUNCTIONAL.format("_FLAG", "_VENDOR"), EVAL),
    "flagged_with_extra": (
        "bool training, float momentum, float eps, str group",
        FUNCTIONAL.format("_FLAG", "_CORE") + ', extras={"group": "nobody"}',
        "synthetic.flagged_with_extra.default",
    ),
    "trains": ("float momentum, float eps", FUNCTIONAL.format("_TRAIN", "_COMPOSITE"), CORE_EVAL),
    "trains_of_vendor": ("float momentum, float eps", FUNCTIONAL.format("_TRAIN", "_VENDOR"), EVAL),
}
ROWS = [f"Form(torch.ops.synthetic.{name}.default, {row})" for name, (_, row, _) in CASES.items()]
ROWS.append("Form(torch.ops.synthetic.evaluates.default, SAVED, _EVAL, _NONE, _VENDOR)")

CODE = """
import json, torch

library = torch.library.Library("synthetic", "DEF")
TENSORS = "Tensor input, Tensor? weight, Tensor? bias, Tensor running_mean, Tensor running_var"
aten, ops = torch.ops.aten, torch.ops.synthetic


def define(name, arguments, returns, kernel):
    library.define(f"{name}({TENSORS}, {arguments}) -> ({', '.join(['Tensor'] * returns)})")
    library.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"synthetic::{name}", kernel, lib=library)


def kernel(x, w, b, m, v, *rest):
    training, momentum, eps = ((True, *rest) if len(rest) == 2 else rest)[:3]
    return tuple(t.clone() for t in aten._native_batch_norm_legit_functional(x, w, b, m, v, training, momentum, eps))


for name, arguments in CASES.items():
    define(name, arguments, 5, kernel)
define("evaluates", "float momentum, float eps", 3, lambda *args: aten._native_batch_norm_legit_no_training(*args))

import torch_batchnorm as tbn


class Net(torch.nn.BatchNorm1d):
    def __init__(self, name):
        super().__init__(3)
        rest = {"bool training": True, "float momentum": 0.1, "float eps": 1e-5, "str group": "everyone"}
        self.op, self.rest = getattr(ops, name), [rest[argument] for argument in CASES[name].split(", ")]

    def forward(self, x):
        found = self.op(x, self.weight, self.bias, self.running_mean, self.running_var, *self.rest)
        self.running_mean.copy_(found[3])
        self.running_var.copy_(found[4])
        return found[0]


torch.manual_seed(0)
x, said = torch.randn(4, 3), {}
for name in CASES:
    with torch.no_grad():
        program = torch.export.export(Net(name), (x,)).run_decompositions({})
    evaluated = tbn.switch_mode(program, "eval")
    back = tbn.switch_mode(evaluated, "train")
    rewritten = tbn.switch_mode(tbn.consolidate(evaluated), "train")
    assert tbn.render(back) == tbn.render(program), tbn.render(back)
    assert not any(map(tbn.verify, (evaluated, back, rewritten)))
    torch.testing.assert_close(evaluated.module()(x), torch.nn.BatchNorm1d(3).eval()(x), rtol=0, atol=0)
    torch.testing.assert_close(back.module()(x), torch.nn.BatchNorm1d(3)(x))
    found = [n for p in (evaluated, back, rewritten) for n in p.graph.nodes if n.op == "call_function"]
    said[name] = [str(n.target) for n in found if "getitem" not in n.name]
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def said():
    arguments = {name: arguments for name, (arguments, _, _) in CASES.items()}
    return json.loads(run_with({FORMS: ROWS}, f"CASES = {arguments}\n{CODE}").splitlines()[-1])


@pytest.mark.parametrize("name", CASES)
def test_an_added_overload_comes_back_as_itself_unless_it_was_rewritten_in_between(name, said):
    family = "aten._batch_norm_with_update_functional.default"
    assert said[name] == [CASES[name][2], f"synthetic.{name}.default", family]
