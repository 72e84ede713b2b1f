"""Every row of PASSES, with each of its options, on every kind of program: the promises of a pass."""

import inspect
from dataclasses import MISSING

import pytest

import torch_batchnorm as tbn
from contracts import KINDS, holds, instances, named
from torch_batchnorm.passes import PASSES
from torch_batchnorm.passes.graph.options import options_of, summary_of, verb_of


@pytest.mark.parametrize("instance", [*instances()], ids=named)
@pytest.mark.parametrize("kind", KINDS)
def test_a_pass_keeps_its_promises(kind, instance):
    holds(instance, KINDS[kind])


@pytest.mark.parametrize("made", PASSES, ids=lambda made: made.__name__)
def test_a_verb_takes_what_its_pass_has(made):
    program, *given = inspect.signature(getattr(tbn, verb_of(made))).parameters.values()
    data = given[: made.command.data]
    options = {p.name: MISSING if p.default is p.empty else p.default for p in given[len(data) :]}
    assert program.name == "program"
    assert list(options.items()) == [(o.name, o.default) for o in options_of(made)]


@pytest.mark.parametrize("made", PASSES, ids=lambda made: made.__name__)
def test_a_pass_says_what_it_does_and_what_each_field_is(made):
    assert summary_of(made).endswith(".")
    assert all(option.help.endswith(".") for option in options_of(made))
    commands = [other.command.name for other in PASSES]
    assert len(set(commands)) == len(commands)
