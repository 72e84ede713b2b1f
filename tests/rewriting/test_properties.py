"""Random chains and diamonds of batch norms of every kind: equality, idempotence, saving, an untouched input."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from drawn import drawn
from programs import aten, claim_aten, consolidated, export, legacy_left, same, saved_and_loaded, step

# How a site calls batch norm: functions of (x, weight, bias, mean, var) that return the output.
TAIL = (0.1, 1e-5)
CALLS = {
    "composite, train": lambda *t: aten.batch_norm.default(*t, True, *TAIL, False),
    "composite, eval": lambda *t: aten.batch_norm.default(*t, False, *TAIL, True),
    "impl_index, train": lambda *t: aten._batch_norm_impl_index.default(*t, True, *TAIL, False)[0],
    "native, train": lambda *t: aten.native_batch_norm.default(*t, True, *TAIL)[0],
    "native, eval": lambda *t: aten.native_batch_norm.default(*t, False, *TAIL)[0],
    "legit, train": lambda *t: aten._native_batch_norm_legit.default(*t, True, *TAIL)[0],
    "no_stats": lambda x, w, b, m, v: aten._native_batch_norm_legit.no_stats(x, w, b, True, *TAIL)[0],
    "no_training": lambda *t: aten._native_batch_norm_legit_no_training.default(*t, *TAIL)[0],
    "no_training, saved": lambda *t: aten._native_batch_norm_legit_no_training.default(*t, *TAIL)[0] + t[3].sum(),
    "family": lambda *t: aten._batch_norm_with_update.default(*t, *TAIL)[0],
}


class Random(nn.Module):
    """Sites in a row; one that is given a `join` adds the output of an earlier one to its input. Pairs of statistics
    are shared by all the sites that name the same pair."""

    def __init__(self, sites, pairs=2):
        super().__init__()
        self.sites = sites
        self.weight, self.bias = nn.Parameter(torch.rand(3) + 0.5), nn.Parameter(torch.randn(3))
        for i in range(pairs):
            self.register_buffer(f"mean{i}", torch.randn(3))
            self.register_buffer(f"var{i}", torch.rand(3) + 0.5)

    def forward(self, x):
        values = [x]
        for call, affine, pair, join, reads in self.sites:
            y = values[-1] + values[join % len(values)]
            weight, bias = (
                None if name == "no" else p for name, p in zip(affine, (self.weight, self.bias), strict=True)
            )
            if weight is None or bias is None:  # the family's own fake kernel refuses these
                call = "composite, train" if call == "family" else call
            y = CALLS[call](y, weight, bias, getattr(self, f"mean{pair}"), getattr(self, f"var{pair}"))
            values.append(y * getattr(self, f"var{pair}").sum() if reads else y.relu())
        return values[-1], values[len(values) // 2]


SITES = st.lists(
    st.tuples(
        st.sampled_from(sorted(CALLS)),
        st.tuples(st.booleans(), st.booleans()),
        st.integers(0, 1),
        st.integers(0, 5),
        st.booleans(),
    ),
    min_size=1,
    max_size=6,
)


DRAWN = drawn(20)
SIZES = st.sampled_from([(), (5,), (4, 4)])


def _program(sites, size):
    torch.manual_seed(0)
    x = torch.randn(6, 3, *size)
    return export(Random(sites), x), x


def _check_functional(program, x, forward):
    """No site is left, and the program still computes what it did before it was functional."""
    result = consolidated(program)
    assert (result.declined, legacy_left(result.program)) == ((), [])
    with torch.no_grad():
        assert same(step(result.program.module(), x)[:2], forward)
        assert same(step(saved_and_loaded(result.program).module(), x)[:2], forward)


@DRAWN
@given(sites=SITES, size=SIZES)
def test_random_program_is_preserved_in_training_ir_and_unlifted(sites, size):
    program, x = _program(sites, size)
    expected, result = step(program.module(), x), consolidated(program)
    assert (result.declined, legacy_left(result.program)) == ((), [])
    for found in (result.program, saved_and_loaded(result.program)):
        assert same(step(found.module(), x), expected)
    assert same(step(consolidated(program.module()).program, x), expected)


@DRAWN
@given(sites=SITES, size=SIZES)
def test_random_program_is_preserved_in_the_aten_dialect(sites, size):
    program, x = _program(sites, size)
    with torch.no_grad():
        forward = step(program.module(), x)[:2]
    _check_functional(program.run_decompositions({}), x, forward)
    if not any(call.startswith(("legit", "family")) for call, *_ in sites):  # ops that write have no place there
        _check_functional(claim_aten(program), x, forward)
