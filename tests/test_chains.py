"""Random networks through random chains of passes: at each step the program is valid, and computes what it has to.

A chain keeps beside its program what it knows of it. While nothing says otherwise that is the eager model, in the same
mode: a step that keeps numbers is held against the program before it, and a switch of the mode against the model.
"""

import copy

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import torch_batchnorm as tbn
from drawn import drawn
from folds import distance
from programs import export, fingerprint, nodes, saved_and_loaded, state_of

X = torch.randn(3, 4, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
TOLERANCE = 1e-9


class Random(nn.Module):
    """Steps from value to value, each with layers of its own: every value is [3, 4, 5, 5]."""

    def __init__(self, steps):
        super().__init__()
        self.steps, self.layers = steps, nn.ModuleList(_layer(kind, n) for kind, _, n in steps)
        self.head, self.last = nn.Linear(4, 3), nn.BatchNorm1d(3)

    def forward(self, x):
        values = [x]
        for place, (kind, back, n) in enumerate(self.steps):
            y, z = values[-1], values[-1 - back % len(values)]
            values.append(self._value(kind, n, self.layers[place], y, z))
        return self.last(self.head(values[-1].mean((2, 3)))), values[len(values) // 2] * 1

    def _value(self, kind, n, layer, y, z):
        if kind == "again":  # an earlier batch norm, if there is one
            known = [m for m in self.layers if isinstance(m, nn.BatchNorm2d)]
            return known[n % len(known)](y) if known else y.relu()
        if kind == "nested":
            with torch.no_grad():
                return layer(y) + 1
        if kind in ("add", "concatenate"):
            return y + z if kind == "add" else layer(torch.cat([y, z], 1))
        return layer(y).clone().relu_() if kind == "written" else layer(y)


def _layer(kind, n):
    if kind == "convolution":
        return nn.Conv2d(4, 4, (1, 3)[n % 2], padding=n % 2, groups=(1, 2, 4)[n // 2 % 3], bias=n // 6 % 2 == 0)
    if kind in ("batch norm", "nested", "written"):
        options = {"eps": (1e-5, 1e-3)[n % 2], "momentum": (0.1, 0.3)[n // 2 % 2]}
        return nn.BatchNorm2d(4, affine=n // 4 % 3 != 0, track_running_stats=n // 12 % 4 != 0, **options)
    if kind == "concatenate":
        return nn.Conv2d(8, 4, 1)
    if kind == "dropout":
        return (nn.Dropout, nn.Dropout2d)[n % 2](0.4)
    return (nn.ReLU(), nn.Hardtanh(), nn.Identity())[n % 3]


def _outcome(module):
    """The outputs, and the statistics that the run leaves; the state is put back as it was."""
    before = state_of(module)
    torch.manual_seed(0)
    with torch.no_grad():
        outputs = [y.clone() for y in module(X)]
    after = {k: v for k, v in state_of(module).items() if k.rpartition(".")[2] in STATISTICS}
    module.load_state_dict(before)
    return outputs, after


STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def _same(found, want):
    """Whether outputs are the same up to rounding, and the statistics that both still have."""
    outputs, state = zip(found[0], want[0], strict=True), found[1].keys() & want[1].keys()
    pairs = [*outputs, *((found[1][k], want[1][k]) for k in state)]
    return all(distance(a, b) < TOLERANCE for a, b in pairs)


class Chain:
    """A program, and what is known of it."""

    def __init__(self, steps, training, start):
        torch.manual_seed(0)
        self.model = Random(steps).double().train(training)  # the eager model, as long as the program has its layers
        for bn in self._norms():
            if bn.track_running_stats:
                bn.running_mean.normal_(std=0.2)
                bn.running_var.uniform_(0.5, 1.5)
        self.training, self.frozen, self.known, self.draws = training, set(), True, True
        self.program = export(copy.deepcopy(self.model), X)
        self._expects_the_model()
        STEPS[start](self, 0)

    def _norms(self):
        return [m for m in self.model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]

    def _dropouts(self):
        return [m for m in self.model.modules() if isinstance(m, nn.modules.dropout._DropoutNd)]

    def _random(self):
        """Whether a run draws numbers in another way than the model does: torch decomposes dropout to other draws."""
        return self.training and not self.draws and any(m.p for m in self._dropouts())

    def _expects_the_model(self):
        if self.known and not self._random():
            self.model.train(self.training)
            for name, module in self.model.named_modules():
                module.training = self.training and name not in self.frozen
            assert _same(_outcome(self.program.module()), _outcome(self.model))

    def passed(self, made):
        """What a pass makes of the program, having checked what holds for every pass."""
        before = fingerprint(self.program)
        result = made(self.program)
        assert fingerprint(self.program) == before, "the input was touched"
        assert result.modified is (nodes(result.program) != nodes(self.program) or result.program is not self.program)
        assert made(result.program).modified is False, "a second run changes it again"
        assert all(d.reason for d in result.declined)
        self._becomes(result.program)
        return result

    def _becomes(self, program):
        program.validate()
        assert set(tbn.verify(program)) <= set(tbn.verify(self.program))
        self.program = program

    def keeps(self, change):
        """Takes a step that keeps every number."""
        before = _outcome(self.program.module())
        result = change()
        found = _outcome(self.program.module())
        assert self._random() or _same(found, before)
        return result

    # The steps, each with a number that says how.

    def consolidate(self, n):
        self.keeps(lambda: self.passed(tbn.Consolidate()))

    def legalize(self, n):
        names = sorted(tbn.TARGETS)
        self.keeps(lambda: self.passed(tbn.Legalize(names[n % len(names)])))
        self.known &= names[n % len(names)] != "math"  # which has no batch norm left to switch

    def raise_decomposed(self, n):
        self.keeps(lambda: self.passed(tbn.RaiseDecomposed()))

    def fold(self, n):
        options = {"clone_calls": n % 2 == 0, "alone": ("leave", "multiply_add", "depthwise")[n // 2 % 3]}
        result = self.keeps(lambda: self.passed(tbn.Fold(**options, clone_weights=n // 6 % 2 == 0)))
        self.known &= not result.edits  # what is folded stays in eval

    def mode(self, n):
        to = ("eval", "train")[n % 2]
        result = self.passed(tbn.SwitchMode(to))
        self.training = to == "train"
        self.known &= not result.declined
        self._expects_the_model()

    def freeze(self, n):
        if paths := self._paths():
            result = self.passed(tbn.Freeze(paths[n % len(paths)], affine=n % 3 == 0))
            self.known &= not result.declined
            self.frozen.add(paths[n % len(paths)])
            self._expects_the_model()

    def unfreeze(self, n):
        if self._paths():
            result = self.passed(tbn.Unfreeze())
            self.known &= not result.declined
            self.frozen.clear()
            self._expects_the_model()

    def file(self, n):
        self.keeps(lambda: self._becomes(saved_and_loaded(self.program)))

    def decompose(self, n):
        table = (None, {}, tbn.decomposition_table())[n % 3]
        self._decomposes()
        self.keeps(lambda: self._becomes(self.program.run_decompositions(table)))

    def _decomposes(self):
        self.draws = False
        for dropout in self._dropouts() if not self.training else ():  # those of eval leave without a trace
            dropout.p = 0.0

    def _paths(self):
        """The modules of the batch norms that can be frozen."""
        return sorted({entry.module for entry in tbn.inspect(self.program).entries if entry.stats == "running"})

    def nothing(self, n):
        pass


STEPS = {
    name: step for name, step in vars(Chain).items() if not name.startswith("_") and name not in ("passed", "keeps")
}
KINDS = ["convolution", "batch norm", "batch norm", "activation", "dropout", "add", "concatenate", "again", "nested"]
NETWORKS = st.lists(
    st.tuples(st.sampled_from([*KINDS, "written"]), st.integers(0, 3), st.integers(0, 47)), min_size=1, max_size=6
)
CHAINS = st.lists(
    st.tuples(st.sampled_from([*(s for s in STEPS if s != "nothing"), "mode"]), st.integers(0, 23)),
    min_size=2,
    max_size=6,
)


@drawn(12)
@given(network=NETWORKS, training=st.booleans(), start=st.sampled_from(["nothing", "decompose", "file"]), chain=CHAINS)
def test_a_random_network_through_a_random_chain_of_passes(network, training, start, chain):
    state = Chain(network, training, start)
    for step, n in chain:
        STEPS[step](state, n)
