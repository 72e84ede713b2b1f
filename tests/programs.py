"""What the tests build programs from, and how they compare two of them: to the bit, NaN equal to NaN."""

import functools
import io
import operator
import typing
from unittest import mock

import torch
from torch import nn
from torch._export.serde import schema
from torch._export.verifier import Verifier
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule

from torch_batchnorm import FORMS, Consolidate, verify
from torch_batchnorm.decomps.forms import Dialect, Form, Mode, Statistics

aten = torch.ops.aten
LEGACY = [form for form in FORMS if form.dialect is not Dialect.FAMILY]
TENSORS = ("input", "weight", "bias", "running_mean", "running_var")


def same(a, b):
    """Whether two values are equal to the bit."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        a, b = a.detach(), b.detach()
        return torch.equal(torch.nan_to_num(a, nan=12345.0), torch.nan_to_num(b, nan=12345.0)) and (
            not a.is_floating_point() or torch.equal(torch.signbit(a), torch.signbit(b))
        )
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


class Op(nn.Module):
    """A module that calls a batch-norm function on its own parameters and buffers, as many times as asked."""

    def __init__(self, function, channels=3, calls=1, affine=True):
        super().__init__()
        self.function, self.calls = function, calls
        self.weight = nn.Parameter(torch.rand(channels) + 0.5) if affine else None
        self.bias = nn.Parameter(torch.randn(channels)) if affine else None
        self.register_buffer("running_mean", torch.randn(channels))
        self.register_buffer("running_var", torch.rand(channels) + 0.5)

    def forward(self, x):
        for _ in range(self.calls):
            x = self.function(x, self.weight, self.bias, self.running_mean, self.running_var)
        return x, self.running_mean * 2


def native(x, w, b, m, v):
    """A form that hides its write."""
    return aten.native_batch_norm.default(x, w, b, m, v, True, 0.1, 1e-5)[0]


def export(module, *inputs, dynamic=None, **kwargs):
    return torch.export.export(module, inputs, kwargs or None, dynamic_shapes=dynamic)


def claim_aten(ep):
    """The same graph as an ATEN-dialect program: what a capture that trusts the schemas hands over."""
    return ExportedProgram(
        root=ep.graph_module,
        graph=ep.graph,
        graph_signature=ep.graph_signature,
        state_dict=ep.state_dict,
        range_constraints=ep.range_constraints,
        module_call_graph=ep.module_call_graph,
        example_inputs=ep.example_inputs,
        constants=ep.constants,
        verifiers=[Verifier],
    )


def writes_to_a_view():
    """A functional program with one site, whose hidden write goes to slices: it cannot be consolidated."""

    class View(Op):
        def forward(self, x):
            return native(x, self.weight[:3], self.bias[:3], self.running_mean[:3], self.running_var[:3])

    return claim_aten(export(View(native, channels=4), torch.randn(4, 3)))


def call_graph(
    form: Form, training: bool, *, absent=(), unread=(), keywords=False, shape=None, **changed
) -> GraphModule:
    """A hand-built graph module: one call of the form on placeholders that returns every output, unless unread."""
    graph = Graph()
    fields = {name: None if name in absent else graph.placeholder(name) for name in TENSORS if name in form.arguments}
    fields |= {"training": training, "momentum": 0.1, "eps": 1e-5, "cudnn_enabled": False} | changed
    outs = {name: graph.placeholder(f"into_{role}") for role, name in form.destinations.items()}
    schema = [a.name for a in form.overload._schema.arguments if not a.is_out]
    given = dict(zip(schema, (fields[field] for field in form.arguments), strict=True))
    args, kwargs = ((), given) if keywords else (tuple(given.values()), {})
    node = graph.call_function(form.overload, args, {**kwargs, **outs})
    for placeholder in (fields["input"], outs[form.destinations["out"]]) if shape else ():
        placeholder.meta["val"] = torch.empty(shape, device="meta")
    roles = [role for role in form.roles if role not in ("impl_index", *unread)]
    if len(form.roles) == 1:
        graph.output((node,))
    else:
        graph.output(tuple(graph.call_function(operator.getitem, (node, form.roles.index(r))) for r in roles))
    return GraphModule({}, graph)


def modes(form: Form):
    """The values of `training` for which a form is defined."""
    return {Mode.TRAIN: (True,), Mode.EVAL: (False,), Mode.FLAG: (True, False)}[form.mode]


def lacks_statistics(form: Form) -> bool:
    """Whether the overload takes no running statistics at all."""
    return form.statistics is Statistics.NONE and "running_mean" not in form.arguments


_schema_hints = functools.cache(functools.partial(typing.get_type_hints, globalns=vars(schema)))


def saved_and_loaded(program: ExportedProgram) -> ExportedProgram:
    """The program, by way of a file."""
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    # torch asks for the type hints of its schema at every object of it: a third of the time that all of this takes
    with mock.patch.object(typing, "get_type_hints", lambda kind, globalns: _schema_hints(kind)):
        return torch.export.load(file)


def state_of(module):
    return {k: v.detach().clone() for k, v in module.state_dict().items()}


def step(module, *inputs, **kwargs):
    """Outputs, state after the call and gradients of everything, of one forward and backward from the same state."""
    before = state_of(module)
    inputs = [t.clone().requires_grad_() if t.is_floating_point() else t for t in inputs]
    outputs = [t for t in torch.utils._pytree.tree_leaves(module(*inputs, **kwargs)) if isinstance(t, torch.Tensor)]
    after = state_of(module)
    differentiable = [t for t in outputs if t.requires_grad]
    for parameter in module.parameters():
        parameter.grad = None
    if differentiable:
        torch.manual_seed(0)
        sum((t.double() * torch.randn_like(t.double())).sum() for t in differentiable).backward()
    gradients = [t.grad for t in (*inputs, *module.parameters())]
    module.load_state_dict(before)
    return [t.detach().clone() for t in outputs], after, [None if g is None else g.clone() for g in gradients]


def legacy_left(program) -> list[str]:
    """The names of legacy batch-norm nodes in a program, nested graphs included."""
    top = program.graph_module if isinstance(program, ExportedProgram) else program
    graphs = [m.graph for m in top.modules() if isinstance(m, GraphModule)]
    return [
        n.name
        for graph in graphs
        for form in LEGACY
        for n in graph.find_nodes(op="call_function", target=form.overload)
    ]


def structure(program) -> list:
    """A program's graph and signature apart from what its calls are named."""
    top = program.graph_module if isinstance(program, ExportedProgram) else program
    number = {node: i for i, node in enumerate(top.graph.nodes)}
    shown = [
        (n.op, str(n.target), repr(torch.fx.node.map_arg((n.args, n.kwargs), lambda a: number[a])))
        for n in top.graph.nodes
    ]
    signature = getattr(program, "graph_signature", None)
    return shown + ([] if signature is None else [(s.kind, s.target) for s in signature.output_specs])


TRACED = {
    "original_aten",
    "seq_nr",
    "tensor_meta",
    "desc",
}  # tracing's own notes, which torch drops as well when it saves


def nodes(program):
    """Everything of a program that a round trip has to bring back."""
    top = program.graph_module if isinstance(program, ExportedProgram) else program
    keys = ("val", "custom", "stack_trace", "torch_fn", "nn_module_stack")
    found = [
        (path, n.format_node(), sorted(set(n.meta) - TRACED), *(str(n.meta.get(key)) for key in keys))
        for path, module in top.named_modules()
        if isinstance(module, GraphModule)
        for n in module.graph.nodes
    ]
    return [*found, str(getattr(program, "graph_signature", ""))]


def fingerprint(program) -> str:
    """Everything a pass might have touched in its input: graphs, metadata keys and signature, as text."""
    top = program.graph_module if isinstance(program, ExportedProgram) else program
    graphs = [
        (p, m.code, [(n.format_node(), sorted(n.meta)) for n in m.graph.nodes])
        for p, m in top.named_modules()
        if isinstance(m, GraphModule)
    ]
    return repr((graphs, str(getattr(program, "graph_signature", ""))))


def consolidated(program):
    """Consolidates a copy, having checked what holds for every program: see `Consolidate`'s contract."""
    before = fingerprint(program)
    result = Consolidate()(program)
    assert fingerprint(program) == before, "the input was touched"
    assert Consolidate()(result.program).modified is False
    assert len(legacy_left(result.program)) == len(result.declined)
    known = {violation.partition(": ")[2] for violation in verify(program)}
    assert [v for v in verify(result.program) if v.partition(": ")[2] not in known] == []
    if isinstance(program, ExportedProgram):
        result.program.validate()
        assert result.program.state_dict.keys() == program.state_dict.keys()
        assert all(result.program.state_dict[k] is v for k, v in program.state_dict.items())
    return result
