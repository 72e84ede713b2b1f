"""What the tests of folding build, and what holds for every fold: see `folded`."""

import itertools

import torch
from torch import nn
from torch.export import ExportedProgram

import torch_batchnorm as tbn
from programs import export, fingerprint, nodes, same, state_of

ATEN = dict(torch.export.default_decompositions().items())  # made once: it is dear
NORMS = (nn.modules.batchnorm._BatchNorm,)


def decomposed(program):
    return program.run_decompositions(dict(ATEN))


# Every form that a program comes in.
FORMS = {
    "training IR": lambda program: program,
    "ATEN": decomposed,
    "family": tbn.consolidate,
    "family in ATEN": lambda program: tbn.consolidate(decomposed(program)),
    "module": lambda program: program.module(),
    "ATEN module": lambda program: decomposed(program).module(),
}
DIALECTS = ("training IR", "ATEN")


class Net(nn.Module):
    """`function(net, *inputs)` over the modules and parameters that it is given."""

    def __init__(self, function, **members):
        super().__init__()
        self.function = function
        for name, member in members.items():
            setattr(self, name, member)

    def forward(self, *inputs):
        return self.function(self, *inputs)


def lively(module, dtype=torch.float64):
    """The module in eval and this dtype, its batch norms unlike new ones: every number of them matters."""
    for bn in (m for m in module.modules() if isinstance(m, NORMS)):
        bn.running_mean.normal_(std=0.5)
        bn.running_var.uniform_(0.5, 1.5)
        if bn.affine:
            nn.init.normal_(bn.weight, 1.0, 0.3)
            nn.init.normal_(bn.bias, std=0.5)
    return module.eval().to(dtype)


def vector(*shape):
    """A parameter like the scale of a layer that was trained."""
    return nn.Parameter(1 + 0.3 * torch.randn(shape))


def made(make, *shapes, dtype=torch.float64, seed=0):
    """A lively module and its inputs."""
    torch.manual_seed(seed)
    module = lively(make(), dtype)
    return module, *(torch.randn(shape, dtype=dtype) for shape in shapes)


def outputs(program, *inputs):
    """The tensors that a program returns, its state as it was."""
    module = program.module() if isinstance(program, ExportedProgram) else program
    before = state_of(module)
    with torch.no_grad():
        found = [t for t in torch.utils._pytree.tree_leaves(module(*inputs)) if isinstance(t, torch.Tensor)]
        found = [t.clone() for t in found]
    module.load_state_dict(before)
    return found


def distance(found, want):
    """The largest error, relative to the largest value; equal infinities and NaNs are no error."""
    if (found.shape, found.dtype) != (want.shape, want.dtype):
        return float("inf")
    wide = torch.complex128 if want.is_complex() else torch.float64
    found, want = found.to(wide), want.to(wide)
    off = torch.where((found == want) | (found.isnan() & want.isnan()), 0, (found - want).abs())
    return 0.0 if want.numel() == 0 else (off.max() / want[want.isfinite()].abs().max().clamp(min=1e-30)).item()


def distances(found, want):
    return [distance(a, b) for a, b in zip(found, want, strict=True)]


def layouts(tensors):
    return [(t.shape, t.dtype, t.stride()) for t in tensors]


def tensors_of(program):
    """Every tensor that a program holds, and a copy of its value."""
    if isinstance(program, ExportedProgram):
        held = {**program.state_dict, **program.constants}
    else:
        held = dict(program.named_parameters(remove_duplicate=False)) | dict(
            program.named_buffers(remove_duplicate=False)
        )
    return {name: (t, t.detach().clone()) for name, t in held.items() if isinstance(t, torch.Tensor)}


def untouched(before, after):
    return before.keys() == after.keys() and all(
        after[name][0] is tensor and same(after[name][1], value) for name, (tensor, value) in before.items()
    )


def sites(program):
    return len(tbn.inspect(program).entries)


def checked(program, *inputs, tolerance=1e-12, **options):
    """Folds a copy, having checked what holds for every program, folded or declined.

    tolerance: of the outputs, relative to the largest, one of all or one for each.
    """
    before, held, want = fingerprint(program), tensors_of(program), outputs(program, *inputs)
    result = tbn.Fold(**options)(program)
    assert fingerprint(program) == before, "the input program was touched"
    assert untouched(held, tensors_of(program)), "the tensors of the input program were touched"
    assert len(result.edits) + len(result.declined) == sites(program), "a batch norm is neither folded nor declined"
    assert all(d.reason for d in result.declined)
    found = outputs(result.program, *inputs)
    assert layouts(found) == layouts(want)
    tolerances = tolerance if isinstance(tolerance, list) else [tolerance] * len(want)
    off = distances(found, want)
    assert {i: d for i, (d, t) in enumerate(zip(off, tolerances, strict=True)) if not d <= t} == {}
    assert tbn.verify(result.program) == ()
    again = tbn.Fold(**options)(result.program)
    assert (again.modified, nodes(again.program)) == (False, nodes(result.program)), "a second run changes it again"
    assert result.modified or (same(found, want) and nodes(result.program) == nodes(program))
    return result


def folded(program, *inputs, edits=1, **rest):
    """Folds a copy, and every batch norm of it: see `checked`."""
    result = checked(program, *inputs, **rest)
    assert result.declined == ()
    assert (len(result.edits), sites(result.program)) == (edits, 0)
    return result


def in_form(make, *shapes, form="training IR", **kwargs):
    """A program in this form, and its inputs."""
    module, *inputs = made(make, *shapes, **kwargs)
    return FORMS[form](export(module, *inputs)), *inputs


def calls(program):
    """The names of the ops that a program calls, nested graphs included: conv2d, mul, ..."""
    top = program.graph_module if isinstance(program, ExportedProgram) else program
    found = [n for m in top.modules() if isinstance(m, torch.fx.GraphModule) for n in m.graph.nodes]
    return [str(n.target).removeprefix("aten.").partition(".")[0] for n in found if n.op == "call_function"]


def pairwise(allowed=lambda row: True, **factors):
    """Rows of a table, as few as a greedy search finds, in which every two values of two factors meet."""
    rows = [dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values())]
    pairs = [(row, set(itertools.combinations(row.items(), 2))) for row in rows if allowed(row)]
    left, chosen = set().union(*(p for _, p in pairs)), []
    while left:
        row, covered = max(pairs, key=lambda pair: len(pair[1] & left))
        chosen.append(row)
        left -= covered
    return chosen


def product(allowed=lambda row: True, **factors):
    """Every row of a table."""
    rows = (dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values()))
    return [row for row in rows if allowed(row)]
