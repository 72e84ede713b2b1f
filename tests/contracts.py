"""What every pass promises of every program: kinds of programs, the passes with each of their options, one check.

The promise tests run the same check on rows of their own, in a process of their own.
"""

import copy
from dataclasses import MISSING, dataclass, fields, replace
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.export import Dim, ExportedProgram
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import torch_batchnorm as tbn
from programs import aten, export, fingerprint, same, saved_and_loaded, state_of, step
from torch_batchnorm.decomps.forms import BY_TARGET, GRADIENT_BY_TARGET
from torch_batchnorm.passes import PASSES
from torch_batchnorm.passes.graph.draft import Draft
from torch_batchnorm.passes.graph.options import Keeps, options_of


class Net(nn.Module):
    """A batch norm behind a convolution, one behind a linear map, and what switches with the mode beside them.

    between: what stands between the two. last: the second batch norm.
    """

    def __init__(self, between=None, last=None):
        super().__init__()
        self.conv, self.bn, self.drop = nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3), nn.Dropout(0.2)
        self.between = nn.Identity() if between is None else between
        self.head, self.last = nn.Linear(3, 3), nn.BatchNorm1d(3, affine=False) if last is None else last

    def forward(self, x):
        y = self.drop(self.between(self.bn(self.conv(x)).relu()))
        return self.last(self.head(y.mean((2, 3))))


class NoGrad(Net):
    def forward(self, x):
        with torch.no_grad():
            y = self.bn(x[:, :1].expand(-1, 3, -1, -1))
        return self.conv(y[:, :2])


class Cond(Net):
    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda y: self.bn(y) + 1, lambda y: self.bn(y * 2), (self.conv(x),))


X = torch.randn(4, 2, 2, 2, generator=torch.Generator().manual_seed(0))
ELEMENTARY = (
    aten._native_batch_norm_legit_functional,
    aten._native_batch_norm_legit_no_training,
    aten._native_batch_norm_legit,
    aten.native_batch_norm_backward,
)


def seeded(module, training=True):
    """The module with statistics that are no neutral element, the same each time."""
    for bn in module.modules():
        if getattr(bn, "running_var", None) is not None:
            bn.running_mean.normal_()
            bn.running_var.uniform_(0.5, 1.5)
    return module.train(training)


def net(training=True, module=Net, **options):
    return export(seeded(module(**options), training), X)


def elementary(training):
    table = torch.export.default_decompositions() | torch._decomp.get_decompositions(ELEMENTARY)
    return net(training).run_decompositions(table)


def frozen():
    module = seeded(Net())
    module.bn.eval()
    return export(module, X)


def joint():
    """Forward, loss and the gradients of a training step in one graph, on the module's own tensors as inputs."""
    module = seeded(nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3), nn.ReLU()))
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}

    def run(x, *tensors):
        given = dict(zip(state, tensors, strict=True))
        out = torch.func.functional_call(module, given, (x,))
        weights = [given[name] for name, _ in module.named_parameters()]
        return (out, *torch.autograd.grad(out.square().sum(), weights))

    inputs = (X, *(t.detach().clone().requires_grad_(t.requires_grad) for t in state.values()))
    return make_fx(run)(*inputs), inputs


UNTRACKED = {"last": nn.BatchNorm1d(3, track_running_stats=False)}
# A program, or a program and its inputs where they are others than X.
KINDS = {
    "training IR, train": net,
    "training IR, eval": lambda: net(False),
    "ATEN, train": lambda: net().run_decompositions({}),
    "ATEN, eval": lambda: net(False).run_decompositions({}),
    "decomposed, train": lambda: net().run_decompositions(),
    "decomposed, eval": lambda: net(False).run_decompositions(),
    "elementary operations, train": lambda: elementary(True),
    "elementary operations, eval": lambda: elementary(False),
    "a joint graph": joint,
    "a graph inside no_grad, train": lambda: net(module=NoGrad),
    "branches, eval": lambda: net(False, Cond),
    "a dynamic batch, train": lambda: export(seeded(Net()), X, dynamic=({0: Dim("n", min=2)},)),
    "loaded from a file, train": lambda: saved_and_loaded(net()),
    "loaded from a file, decomposed, train": lambda: saved_and_loaded(net().run_decompositions()),
    "the family, loaded from a file, train": lambda: saved_and_loaded(tbn.consolidate(net())),
    "the family, loaded from a file, eval": lambda: saved_and_loaded(tbn.consolidate(net(False))),
    "one without statistics beside a tracked one, train": lambda: net(**UNTRACKED),
    "one without statistics beside a tracked one, eval": lambda: net(False, **UNTRACKED),
    "the family, one without statistics, loaded from a file": lambda: saved_and_loaded(
        tbn.consolidate(net(**UNTRACKED))
    ),
    "one frozen in a program that trains": frozen,
    "one in a program without batch norm": lambda: export(nn.ReLU(), X),
    "a graph module, train": lambda: net().module(),
    "a graph module, eval": lambda: net(False).module(),
}


@dataclass(frozen=True)
class Kind:
    """A program as it was built: a pass that touches it is found out by what is known of it here."""

    program: Any
    inputs: tuple[torch.Tensor, ...]
    looks: str
    state: dict[str, torch.Tensor]


@cache
def built(make):
    """What a row of KINDS makes, once."""
    torch.manual_seed(0)
    made = make()
    program, inputs = made if isinstance(made, tuple) else (made, (X,))
    return Kind(program, inputs, looks(program), tensors_of(program))


def looks(program):
    """All that can be seen of a program but for its tensors."""
    top = program.graph_module if isinstance(program, ExportedProgram) else program
    graphs = [module.graph for module in top.modules() if isinstance(module, GraphModule)]
    noted = [str(node.meta.get("custom")) for graph in graphs for node in graph.nodes]
    return f"{getattr(program, 'dialect', '')} {fingerprint(program)} {noted}"


def tensors_of(program):
    """Copies of the tensors that a program holds."""
    held = {**program.state_dict, **program.constants} if isinstance(program, ExportedProgram) else state_of(program)
    return {name: value.detach().clone() for name, value in held.items() if isinstance(value, torch.Tensor)}


def instances(passes=PASSES):
    """Every pass with each value of the options that have choices, and with each of its switches turned over."""
    for made in passes:
        options = options_of(made)
        fixed = {o.name: next(iter(o.choices)) for o in options if o.choices and o.default is MISSING}
        yield made(**fixed)
        for option in options:
            values = option.choices or ((not option.default,) if isinstance(option.default, bool) else ())
            for value in values if option.flags else ():
                if (made(**fixed | {option.name: value})) != made(**fixed):
                    yield made(**fixed | {option.name: value})


def named(instance):
    """A pass as its call: what is not the default."""
    given = [f"{f.name}={v!r}" for f in fields(instance) if (v := getattr(instance, f.name)) != f.default]
    return f"{type(instance).__name__}({', '.join(given)})"


def applied(instance, program, kind):
    """The result of a pass, called with data where it takes some, from the same random numbers."""
    torch.manual_seed(0)
    return instance(program, [kind.inputs]) if instance.command.data else instance(program)


def holds(instance, make):
    """Checks that a pass keeps its promises on a kind of program, and returns its result; None where it has a word to
    say about the program as a whole.
    """
    kind = built(make)
    try:
        result = applied(instance, kind.program, kind)
    except tbn.BatchNormError:  # no other exception is one of a pass
        result = None
    assert (looks(kind.program), same(tensors_of(kind.program), kind.state)) == (kind.looks, True), "touched"
    if result is None:
        return None
    assert all(d.site and d.reason.strip() for d in result.declined)
    assert result.modified is bool(result.edits)
    if not result.modified:
        assert result.program is kind.program
        return result
    assert isinstance(result.program, ExportedProgram) is isinstance(kind.program, ExportedProgram)
    alike = looks(result.program) == kind.looks and same(tensors_of(result.program), kind.state)
    assert not alike, "modified, and the same"
    again = applied(instance, result.program, kind)
    assert (again.edits, again.program is result.program) == ((), True)
    assert [(d.site, d.reason) for d in again.declined] == [(d.site, d.reason) for d in result.declined]
    _edits_in_place(instance, result, kind)  # before it runs: torch's `module()` takes dead code out of nested graphs
    _is_sound(result.program, kind)
    _keeps_numbers(instance, result.program, kind)
    if isinstance(result.program, ExportedProgram):
        loaded = saved_and_loaded(result.program)
        assert (tbn.verify(loaded), applied(instance, loaded, kind).edits) == ((), ())
        if _runs_here(loaded):
            grad = _differentiable(loaded) and _differentiable(kind.program)
            assert same(_ran(loaded, kind, grad), _ran(result.program, kind, grad)), "other numbers when loaded"
    return result


def _is_sound(program, kind):
    known = tbn.verify(kind.program)
    assert [said for said in tbn.verify(program) if said not in known] == []
    if isinstance(program, ExportedProgram):
        program.validate()
    assert _without_val(kind.program) or not _without_val(program)


def _without_val(program):
    """The calls of a program that keep no value, of which saving asks one."""
    top = program.graph_module if isinstance(program, ExportedProgram) else program
    graphs = [module.graph for module in top.modules() if isinstance(module, GraphModule)]
    return [n.name for graph in graphs for n in graph.nodes if n.op == "call_function" and "val" not in n.meta]


def _keeps_numbers(instance, program, kind):
    keeps = getattr(instance, "keeps", instance.command.keeps)
    if keeps is Keeps.MEANING or not _runs_here(program):
        return
    grad = all(_differentiable(p) for p in (program, kind.program))
    found, expected = _ran(program, kind, grad), _ran(kind.program, kind, grad)
    if keeps is Keeps.BITS:
        assert same(found, expected)
        return
    torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=1e-5)
    held = tensors_of(program)
    kept = [name for name, value in held.items() if name in kind.state and same(value, kind.state[name])]
    for name in kept:
        if name in found[1] and name in expected[1]:
            torch.testing.assert_close(found[1][name], expected[1][name], rtol=1e-4, atol=1e-5)


def _runs_here(program):
    """Whether each batch norm has a kernel on CPU: that of a library which this machine lacks may be pinned."""
    top = program.graph_module if isinstance(program, ExportedProgram) else program
    calls = {n.target for m in top.modules() if isinstance(m, GraphModule) for n in m.graph.nodes}
    forms = [form for rows in (BY_TARGET, GRADIENT_BY_TARGET) for t in calls & rows.keys() for form in rows[t]]
    return all(torch._C._dispatch_has_computed_kernel_for_dispatch_key(f.overload.name(), "CPU") for f in forms)


def _differentiable(program):
    """Whether a program can be: a decomposed train program cannot, and a graph module is run as it is called."""
    return isinstance(program, ExportedProgram) and program.dialect == "TRAINING"


def _ran(program, kind, grad):
    """Outputs, state and gradients of one step from the same random numbers."""
    module = program.module() if isinstance(program, ExportedProgram) else copy.deepcopy(program)
    torch.manual_seed(0)
    with torch.set_grad_enabled(grad):
        if len(kind.inputs) == 1:
            return step(module, *kind.inputs)
        inputs = [t.detach().clone().requires_grad_(t.requires_grad) for t in kind.inputs]
        return list(module(*inputs)), {str(i): t.detach() for i, t in enumerate(inputs)}, []


def _copied(program):
    """A program whose graphs and tensors are its own; torch cannot always copy what a trace left in the metadata."""
    if not isinstance(program, ExportedProgram):
        return copy.deepcopy(program)
    made = Draft(program).build()
    made._state_dict, made._constants = copy.deepcopy((program._state_dict, program._constants))
    return made


def _edits_in_place(instance, result, kind):
    if not any(f.name == "inplace" for f in fields(instance)):
        return
    program = _copied(kind.program)
    here = applied(replace(instance, inplace=True), program, kind)
    assert here.program is program
    assert (here.edits, here.declined) == (result.edits, result.declined)
    assert tbn.render(here.program) == tbn.render(result.program)
    assert same(tensors_of(here.program), tensors_of(result.program))
