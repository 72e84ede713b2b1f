"""Draft: what the signature lists after an edit."""

import torch
from torch import nn

from programs import export
from torch_batchnorm.passes.graph.draft import Draft


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("a", torch.zeros(3))
        self.register_buffer("b", torch.ones(3))

    def forward(self, x):
        self.a.add_(x)
        self.b.add_(x)
        return x + self.b


def test_a_mutation_by_another_input_that_is_unchanged_itself_stays_listed():
    program = export(Two(), torch.randn(3)).run_decompositions()
    b, output = next(n for n in program.graph.nodes if n.name == "b_b"), program.graph.output_node()
    output.args = ((b, b, output.args[0][-1]),)  # a becomes b, and b is written with what it is
    for spec in program.graph_signature.output_specs[:2]:
        spec.arg.name = b.name
    draft = Draft(program)
    draft.listing.drop_mutations(unchanged=True)
    made = draft.build()
    assert made.graph_signature.buffers_to_mutate == {"b_b": "a"}
    assert len(made.graph.output_node().args[0]) == 2
    assert len(program.graph_signature.output_specs) == 3


def test_a_node_of_a_nested_graph_stands_for_none_of_the_top_graph():
    class Nested(nn.Module):
        def forward(self, x):
            with torch.no_grad():
                y = x.relu().sin()
            return y.relu()

    program = torch.export.export(nn.Sequential(Nested()), (torch.randn(3),), preserve_module_call_signature=("0",))
    draft = Draft(program)
    _, nested = draft.graphs[1]
    relu, sin = [n for n in nested.nodes if n.op == "call_function"][:2]
    (top,) = [n for n in draft.graphs[0][1].nodes if n.target is torch.ops.aten.relu.default]
    relu.name = top.name
    draft.rename(relu, sin)
    signatures = [e.signature for e in draft.build().module_call_graph if e.fqn == "0"]
    assert [output.name for output in signatures[0].outputs] == [top.name]
