"""What the tests of folding build, and what holds for every fold: see `folded`."""

import itertools

import torch
from torch import nn
from torch.export import ExportedProgram

import torch_batchnorm as tbn
from programs import export, fingerprint, nodes, same, state_of

ATEN = dict(torch.export.default_decompositions().items())  # made once: it is dear
CONVS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
IMAGE = (2, 4, 9, 8)


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
# What a program has to be right under, whatever is folded of it.
MORE = ({}, {"clone_calls": True, "clone_weights": True, "alone": "multiply_add"})
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
    for bn in (m for m in module.modules() if getattr(m, "running_mean", None) is not None):
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
    """The tensors that a program returns, its state and the inputs as they were."""
    module = program.module() if isinstance(program, ExportedProgram) else program
    before, copies = state_of(module), [x.clone() for x in inputs]
    with torch.no_grad():
        found = [t for t in torch.utils._pytree.tree_leaves(module(*copies)) if isinstance(t, torch.Tensor)]
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
    finite = want[want.isfinite()].abs()
    return (off.max() / finite.max().clamp(min=1e-30)).item() if finite.numel() else float(off.count_nonzero())


def distances(found, want):
    return [distance(a, b) for a, b in zip(found, want, strict=True)]


def layouts(tensors):
    return [(t.shape, t.dtype, t.stride()) for t in tensors]


def recorded(program, tensors):
    """The layouts of a program's outputs as its graph has them: of transposed inputs, the batch norm of the CPU returns
    contiguous tensors, where the graph, and CUDA, have transposed ones.
    """
    top = program.graph_module if isinstance(program, ExportedProgram) else program
    returned = torch.utils._pytree.tree_leaves(top.graph.output_node().args)
    vals = [n.meta.get("val") for n in returned if isinstance(n, torch.fx.Node)]
    vals = [v for v in vals[-len(tensors) :] if isinstance(v, torch.Tensor)] if tensors else []
    known = len(vals) == len(tensors)
    return [
        (t.shape, t.dtype, v.stride()) if known and all(type(i) is int for i in v.stride()) else None
        for t, v in zip(tensors, vals if known else tensors, strict=True)
    ]


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
    laid = zip(layouts(found), layouts(want), recorded(program, want), strict=True)
    assert [(a, b) for a, b, c in laid if a not in (b, c)] == [], "the layout of an output changed"
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


class Rows(nn.Module):
    """Modules side by side, each on inputs of its own."""

    def __init__(self, modules, counts):
        super().__init__()
        self.rows, self.counts = nn.ModuleList(modules), counts

    def forward(self, *inputs):
        left = iter(inputs)
        return [row(*itertools.islice(left, count)) for row, count in zip(self.rows, self.counts, strict=True)]


def side_by_side(rows, form="ATEN"):
    """A program of several modules, each given with its inputs, and its inputs: decomposing is dear."""
    rows = [(module, inputs) for module, *inputs in rows]
    module = Rows([module for module, _ in rows], [len(inputs) for _, inputs in rows])
    inputs = [x for _, inputs in rows for x in inputs]
    module.training = False
    return FORMS[form](export(module, *inputs)), *inputs


def in_form(make, *shapes, form="training IR", **kwargs):
    """A program in this form, and its inputs."""
    return exported(made(make, *shapes, **kwargs), form)


def exported(row, form="training IR"):
    """A module that comes with its inputs, as a program in this form with its inputs."""
    module, *inputs = row
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


class Pair(nn.Module):
    def __init__(self, producer, bn):
        super().__init__()
        self.producer, self.bn = producer, bn

    def forward(self, x):
        return self.bn(self.producer(x))


def net(function, conv=None, bn=None, **members):
    """A function of a 2-D convolution from 4 to 6 channels and a batch norm, unless others are given."""
    return lambda: Net(
        function,
        conv=(conv or (lambda: nn.Conv2d(4, 6, 3)))(),
        bn=(bn or (lambda: nn.BatchNorm2d(6)))(),
        **{name: make() for name, make in members.items()},
    )


def linear(function, **members):
    return net(function, lambda: nn.Linear(4, 6), lambda: nn.BatchNorm1d(6), **members)


def by_hand(module, transposed=False):
    """Weight and bias of a producer of float64 with its batch norm in it."""
    producer, bn = module.producer, module.bn
    scale = (1 if bn.weight is None else bn.weight) / (bn.running_var + bn.eps).sqrt()
    shape = [1] * producer.weight.dim()
    shape[1 if transposed else 0] = -1
    bias = (0 if producer.bias is None else producer.bias) - bn.running_mean
    return producer.weight * scale.view(shape), bias * scale + (0 if bn.bias is None else bn.bias)


def plain(m, x):
    return m.bn(m.conv(x))


def swamp(module):
    """Statistics of outputs that are large, and differ little."""
    module.bn.running_mean.fill_(1e4)
    module.bn.running_var.fill_(1e-6)


def edited(function, *shapes, dtype=torch.float64, edit=None, **members):
    """A lively `net` that is edited further, and its inputs."""
    module, *inputs = made(net(function, **members), *(shapes or (IMAGE,)), dtype=dtype)
    if edit is not None:
        with torch.no_grad():
            edit(module)
    return module, *inputs


def same_weight(function):
    """Two convolutions that read one weight, and their input."""

    def tie(module):
        module.other.weight = module.conv.weight

    return edited(function, other=lambda: nn.Conv2d(4, 6, 3), edit=tie)


def shared(function, form):
    return in_form(net(function, second=lambda: nn.BatchNorm2d(6)), IMAGE, form=form)


# What makes a layer of 4 inputs and 6 outputs, its batch norm and the shape of its input.
LAYERS = {
    "conv2d": (lambda *args, **kwargs: nn.Conv2d(*args, 3, padding=1, **kwargs), nn.BatchNorm2d, IMAGE),
    "conv_transpose2d": (lambda *args, **kwargs: nn.ConvTranspose2d(*args, 3, **kwargs), nn.BatchNorm2d, IMAGE),
    "linear": (nn.Linear, nn.BatchNorm1d, (5, 4)),
}
HALVES = {
    "all of it": lambda module, dtype: module.to(dtype),
    "but for a float32 batch norm": lambda module, dtype: (module.to(dtype), module.bn.float())[0],
}
