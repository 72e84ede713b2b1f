"""A layer is one row of LAYERS: it makes its own memory, whatever op it is."""

import os
import subprocess
import sys
from pathlib import Path

# Appends a row to the literal, as a user of the source would, and touches nothing else.
SCRIPT = """
import importlib.machinery, importlib.util, sys, torch

torch.library.define("acme::scaled_linear", "(Tensor input, Tensor weight, Tensor? bias) -> Tensor")
torch.library.impl("acme::scaled_linear", "CompositeImplicitAutograd")(
    lambda input, weight, bias: torch.nn.functional.linear(input, weight, bias)
)
ROW = 'LayerForm(torch.ops.acme.scaled_linear.default, "input", "weight", "bias", kernel=False),'

class Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname):
        text = self.get_source(fullname).replace("\\n)\\n\\n\\nLAYER_BY", "\\n    " + ROW + "\\n)\\n\\n\\nLAYER_BY")
        assert ROW in text
        return compile(text, self.path, "exec")

class Finder:
    def find_spec(name, path=None, target=None):
        if name == "torch_batchnorm.decomps.layers":
            spec = importlib.machinery.PathFinder.find_spec(name, path)
            return importlib.util.spec_from_loader(name, Loader(name, spec.origin), origin=spec.origin)

sys.meta_path.insert(0, Finder)
import torch_batchnorm as tbn

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.bn, self.linear = torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 4)

    def forward(self, x):
        made = torch.ops.acme.scaled_linear(self.bn(x), self.linear.weight, self.linear.bias)
        return made.relu_()

torch.manual_seed(0)
x = torch.randn(5, 3)
net = Net().eval()
net.bn.running_mean.normal_()
program = torch.export.export(net, (x,))
result = tbn.Fold()(program)
assert [edit.after for edit in result.edits] == ["folded into scaled_linear (acme.scaled_linear.default)"], result
torch.testing.assert_close(result.program.module()(x), program.module()(x), rtol=1e-5, atol=1e-5)
result = tbn.Legalize("functional")(torch.export.export(net.train(), (x,)))
assert not result.declined, result.declined
assert result.edits[0].after == "functional"
"""


def test_a_layer_of_one_more_row_folds_and_becomes_functional_before_an_activation_in_place():
    source = Path(__file__).parent.parent.parent / "src"
    environment = {**os.environ, "PYTHONPATH": str(source)}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
