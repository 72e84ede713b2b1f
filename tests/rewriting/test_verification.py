"""verify: a program broken by hand, one row for each sentence that it says of it."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.export.graph_signature import OutputKind, TensorArgument

import torch_batchnorm as tbn
from programs import export

X = torch.randn(4, 3)


def decomposed():
    return export(nn.BatchNorm1d(3), X).run_decompositions()


def _site(program):
    return next(n for n in program.graph.nodes if n.op == "call_function" and "batch_norm" in str(n.target))


def _change(specs, found, **changed):
    """Changes the first of the signature's specs that is found."""
    place = next(i for i, spec in enumerate(specs) if found(spec))
    specs[place] = replace(specs[place], **changed)


def _output(which, **changed):
    return lambda program: _change(program.graph_signature.output_specs, lambda spec: spec.kind is which, **changed)


def _input(named, **changed):
    return lambda program: _change(program.graph_signature.input_specs, lambda spec: spec.target == named, **changed)


def lists_an_output_too_many(program):
    program.graph_signature.output_specs.append(program.graph_signature.output_specs[-1])


def has_no_val(program):
    del _site(program).meta["val"]


def has_a_site_that_cannot_be_read(program):
    site = _site(program)
    site.args = (*site.args[:4], None, *site.args[5:])


def reads_what_comes_later(program):
    site = _site(program)
    program.graph.output_node().prepend(site)


# The program, what is done to it, and what is said of it first.
BROKEN = {
    "a mutation of what is not in the state": (
        decomposed,
        _output(OutputKind.BUFFER_MUTATION, target="running_median"),
        "running_median: it is listed as mutated, and is neither state nor an input",
    ),
    "an input that the state does not hold": (
        decomposed,
        _input("running_mean", target="running_median"),
        "running_median: an input that the state does not hold",
    ),
    "an output of another name": (
        decomposed,
        _output(OutputKind.USER_OUTPUT, arg=TensorArgument("getitem_99")),
        "the signature calls an output getitem_99, the graph getitem",
    ),
    "an input of another name": (
        decomposed,
        _input("running_mean", arg=TensorArgument("b_running_median")),
        "the signature's inputs are ['p_weight', 'p_bias', 'b_running_median', 'b_running_var', "
        "'b_num_batches_tracked', 'input'], the graph's ['p_weight', 'p_bias', 'b_running_mean', 'b_running_var', "
        "'b_num_batches_tracked', 'input']",
    ),
    "an output too many": (
        decomposed,
        lists_an_output_too_many,
        "the signature lists 5 outputs, the graph returns 4",
    ),
    "a mutation in a training program": (
        lambda: export(nn.BatchNorm1d(3), X),
        _output(OutputKind.USER_OUTPUT, kind=OutputKind.BUFFER_MUTATION, target="running_mean"),
        "running_mean: a mutation is listed in a training program, which writes in place",
    ),
    "no val": (decomposed, has_no_val, "_native_batch_norm_legit_functional: it has no val, which saving needs"),
    "a site that cannot be read": (
        decomposed,
        has_a_site_that_cannot_be_read,
        "_native_batch_norm_legit_functional: running_var is None and running_mean is the value of node "
        "b_running_mean: pass both or neither",
    ),
    "an order that cannot run": (
        decomposed,
        reads_what_comes_later,
        "graph top: Argument '_native_batch_norm_legit_functional' of Node 'getitem' was used before it",
    ),
}


@pytest.mark.parametrize(("make", "broken", "said"), BROKEN.values(), ids=BROKEN)
def test_what_is_wrong_is_said(make, broken, said):
    program = make()
    assert tbn.verify(program) == ()
    broken(program)
    assert tbn.verify(program)[0].startswith(said)


def test_a_write_in_a_functional_program_is_said():
    program = tbn.consolidate(decomposed())
    site, placed = _site(program), {n.name: n for n in program.graph.find_nodes(op="placeholder")}
    for output in [user for user in site.users if user.args[1] > 3]:  # the new statistics
        output.replace_all_uses_with(placed[("b_running_mean", "b_running_var")[output.args[1] - 4]])
        program.graph.erase_node(output)
    site.target = torch.ops.aten._batch_norm_with_update.default
    said = f"{site}: it writes b_running_mean in place, and a functional program lists mutations"
    assert tbn.verify(program)[0] == said


def test_state_is_the_parameters_the_constants_and_the_inputs_and_a_buffer_that_is_not_saved():
    class Net(nn.BatchNorm1d):
        def __init__(self):
            super().__init__(3)
            self.register_buffer("seen", torch.zeros(()), persistent=False)
            self.constant = torch.ones(3)

        def forward(self, x, log):
            self.seen.add_(1)
            log.add_(1)
            return super().forward(x) * self.constant

    program = export(Net(), X, torch.zeros(()))
    for found in (program, program.run_decompositions(), tbn.consolidate(program.run_decompositions())):
        assert tbn.verify(found) == ()


def test_torch_s_own_validation_is_asked_and_the_program_left_as_it_was():
    program = decomposed()
    before = copy.copy(program.graph_signature.output_specs)
    _site(program).target = torch.nn.functional.batch_norm
    (said,) = tbn.verify(program)
    assert said.startswith("torch's validation: ")
    assert program.graph_signature.output_specs == before
