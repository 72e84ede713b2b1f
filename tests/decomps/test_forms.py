"""FORMS covers ATen, says what the schemas say, and reads back what it writes."""

import pytest
import torch

from programs import LEGACY, call_graph, consolidated, modes
from torch_batchnorm import FORMS, render
from torch_batchnorm.decomps.counterparts import nearest
from torch_batchnorm.decomps.forms import (
    BY_TARGET,
    GRADIENTS,
    GRADS,
    BatchNorm,
    Dialect,
    Gradient,
    Mode,
    Statistics,
    _by_target,
    form_of,
)

HELPERS = ("_elemt", "_reduce", "_gather_stats", "_gather_stats_with_counts", "_update_stats", "_stats")
SCHEMAS = [s for s in torch._C._jit_get_all_schemas() if s.name.startswith("aten::") and "batch_norm" in s.name]


def test_every_batch_norm_overload_of_aten_has_a_row():
    helpers = {s.name for s in SCHEMAS if s.name.endswith(HELPERS) or "quantized" in s.name}
    rows = {f.overload._schema.name + "." + f.overload._schema.overload_name for f in (*FORMS, *GRADIENTS)}
    open_questions = [str(s) for s in SCHEMAS if s.name not in helpers and f"{s.name}.{s.overload_name}" not in rows]
    assert open_questions == []


def test_a_duplicate_row_is_an_error_that_names_both():
    with pytest.raises(ValueError, match=r"FORMS rows 0 and 1 both describe aten\._batch_norm_with_update\.default"):
        _by_target((FORMS[0], FORMS[0]))


@pytest.mark.parametrize("form", FORMS, ids=lambda f: f.name)
def test_row_agrees_with_the_schema(form):
    schema = form.overload._schema
    assert len(form.roles) == len(schema.returns)
    named = [(role, r.name) for role, r in zip(form.roles, schema.returns, strict=True) if r.name.endswith("_out")]
    assert all(name == role.removeprefix("new_") + "_out" for role, name in named)
    assert ("training" in form.arguments) is (form.mode is Mode.FLAG)
    takes = "running_mean" in form.arguments
    assert takes or form.statistics is Statistics.NONE
    assert BY_TARGET[form.overload] == (form,)


@pytest.mark.parametrize("form", FORMS, ids=lambda f: f.name)
def test_hidden_writes_are_those_that_the_schema_leaves_out(form):
    hides = {"batch_norm", "_batch_norm_impl_index", "native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"}
    assert form.hides_update is (form.overload._schema.name.removeprefix("aten::") in hides)


@pytest.mark.parametrize("form", FORMS, ids=lambda f: f.name)
def test_row_reads_what_it_writes_by_position_and_by_keyword(form):
    values = {name: name for name in form.arguments} | {"training": form.mode is not Mode.EVAL}
    norm = BatchNorm(
        **{f: values.get(f) for f in ("input", "weight", "bias", "running_mean", "running_var")},
        training=values["training"],
        momentum="momentum",
        eps="eps",
        out={role: f"into_{role}" for role in form.destinations},
        extras={name: f"given {name}" for name in form.extras},
    )
    args, kwargs = form.write(norm)
    assert form.read(args, kwargs) == norm
    schema = [a.name for a in form.overload._schema.arguments if not a.is_out]
    assert form.read((), dict(zip(schema, args, strict=True)) | kwargs) == norm


@pytest.mark.parametrize("form", GRADIENTS, ids=lambda f: f.name)
def test_gradient_row_reads_what_it_writes_by_position_and_by_keyword(form):
    values = {f: f for f in ("grad_out", "input", "weight", "running_mean", "running_var", "save_mean", "save_invstd")}
    has = {name: name if name in form.arguments else None for name in ("reserve", "output_mask")}
    norm = Gradient(
        **values,
        **{**has, "output_mask": has["output_mask"] or [True] * 3},
        training=True,
        eps="eps",
        out={role: f"into_{role}" for role in form.destinations},
        extras={name: f"given {name}" for name in form.extras},
    )
    args, kwargs = form.write(norm)
    assert len(form.roles) == len(form.overload._schema.returns)
    assert form.roles == GRADS
    assert form.read(args, kwargs) == norm
    schema = [a.name for a in form.overload._schema.arguments if not a.is_out]
    assert form.read((), dict(zip(schema, args, strict=True)) | kwargs) == norm


def test_the_family_has_an_overload_for_every_mode():
    names = [
        nearest(Dialect.FAMILY, True, Statistics.IN_PLACE, False).name,
        nearest(Dialect.FAMILY, True, Statistics.IN_PLACE, True).name,
        nearest(Dialect.FAMILY, True, Statistics.OUTPUTS, False).name,
        nearest(Dialect.FAMILY, False, Statistics.NONE, False).name,
        nearest(Dialect.FAMILY, False, Statistics.NONE, True).name,
    ]
    assert names == [
        "aten._batch_norm_with_update.default",
        "aten._batch_norm_with_update.out",
        "aten._batch_norm_with_update_functional.default",
        "aten._batch_norm_no_update.default",
        "aten._batch_norm_no_update.out",
    ]
    with pytest.raises(LookupError, match="no overload"):
        nearest(Dialect.FAMILY, True, Statistics.OUTPUTS, True)


@pytest.mark.parametrize("form", FORMS, ids=lambda f: f.name)
def test_a_call_of_the_op_without_an_overload_is_read_by_the_row_it_is_a_call_of(form):
    args = tuple(range(len(form.arguments)))
    kwargs = dict.fromkeys(form.destinations.values())
    assert form_of(form.overload.overloadpacket, args, kwargs) is form


@pytest.mark.parametrize("form", LEGACY, ids=lambda f: f.name)
def test_a_call_by_keyword_or_of_the_packet_is_rewritten_as_one_by_position(form):
    def rewritten(packet=False, **options):
        shape, unread = (2, 3) if form.destinations else None, set(form.roles) - {"out"}
        graph = call_graph(form, modes(form)[0], shape=shape, unread=unread, **options)
        (node,) = graph.graph.find_nodes(op="call_function", target=form.overload)
        node.target = form.overload.overloadpacket if packet else form.overload
        return consolidated(graph)

    expected, *others = rewritten(), rewritten(keywords=True), rewritten(packet=True)
    assert len(expected.edits) == 1
    assert [render(other.program) for other in others] == [render(expected.program)] * 2
