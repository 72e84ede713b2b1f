"""OPS, the table of what other ops do: every row is of ops that exist, once, and true to what they do."""

import pytest
import torch

from torch_batchnorm.decomps.ops import (
    OP_BY_TARGET,
    OPS,
    Kind,
    Memory,
    Op,
    _by_overload,
    filled_with,
    kind_of,
    memory_of,
    written_by,
)

aten = torch.ops.aten
NAMES = [name for row in OPS for name in row.names.split()]


@pytest.mark.parametrize("name", NAMES)
def test_every_name_is_an_op_of_the_pinned_torch(name):
    row = next(row for row in OPS if name in row.names.split())
    assert list(Op(name, row.kind, mode=row.mode).overloads())


def test_a_duplicate_names_both_rows():
    with pytest.raises(ValueError, match=rf"rows 0 and {len(OPS)} both describe aten.alias.default"):
        _by_overload((*OPS, Op("alias", Kind.FRESH)))


MATRIX = torch.arange(6.0).view(2, 3)
VIEWED = {  # overload -> its other arguments; the result has the operand's entries as the row's kind says
    aten.alias.default: (),
    aten.detach.default: (),
    aten.view.default: ([3, 2],),
    aten.reshape.default: ([3, 2],),
    aten.unsqueeze.default: (0,),
    aten.clone.default: (),
    aten.flatten.using_ints: (),
    aten.contiguous.default: (),
    aten.permute.default: ([1, 0],),
    aten.transpose.int: (0, 1),
    aten.t.default: (),
    aten.slice.Tensor: (0, 0, 1),
    aten.select.int: (0, 1),
    aten.expand.default: ([4, 2, 3],),
    aten.reflection_pad1d.default: ([1, 2],),
    aten.replication_pad1d.default: ([1, 2],),
    aten._to_copy.default: (),
    aten.to.dtype: (torch.float64,),
    aten.relu.default: (),
}


@pytest.mark.parametrize("overload", VIEWED, ids=str)
def test_whose_memory_a_result_lies_in_is_as_its_row_says(overload):
    made = overload(MATRIX, *VIEWED[overload])
    shared = made.untyped_storage()._cdata == MATRIX.untyped_storage()._cdata
    assert memory_of(overload) in (Memory.SHARED if shared else Memory.OWN, Memory.EITHER)


@pytest.mark.parametrize("overload", VIEWED, ids=str)
def test_entries_are_as_the_kind_says(overload):
    made, kind = overload(MATRIX, *VIEWED[overload]), kind_of(overload)
    if kind in (Kind.ALIAS, Kind.RESHAPE):
        assert made.flatten().equal(MATRIX.flatten())
    elif kind is Kind.PERMUTE:
        axes = OP_BY_TARGET[overload].axes([MATRIX, *VIEWED[overload]], 2)
        assert made.equal(torch.permute(MATRIX, axes))
    elif kind is Kind.PAD:
        axes = OP_BY_TARGET[overload].axes([MATRIX, *VIEWED[overload]], 2)
        assert axes == [0]
        assert made.shape == (2, 6)
    elif kind is Kind.PART:
        assert set(made.flatten().tolist()) <= set(MATRIX.flatten().tolist())
    elif kind is Kind.CAST:
        assert made.equal(MATRIX)
    else:
        assert kind is None


@pytest.mark.parametrize("row", [row for row in OPS if row.kind is Kind.FRESH], ids=lambda row: row.names)
def test_fresh_ops_are_composite_and_need_their_row(row):
    dispatched = torch._C._dispatch_has_kernel_for_dispatch_key
    assert all(dispatched(overload.name(), "CompositeImplicitAutograd") for overload in row.overloads())


FILLS = {
    "zeros": (aten.zeros.default, ([2],), {}, 0),
    "new_ones": (aten.new_ones.default, (MATRIX, [2]), {}, 1),
    "full": (aten.full.default, ([2], 7), {}, 7),
    "full by keyword": (aten.new_full.default, (MATRIX,), {"size": [2], "fill_value": 3}, 3),
    "empty": (aten.new_empty.default, (MATRIX, [2]), {}, None),
    "no fill": (aten.relu.default, (MATRIX,), {}, None),
}


@pytest.mark.parametrize("case", FILLS)
def test_what_is_filled_in(case):
    overload, args, kwargs, value = FILLS[case]
    assert filled_with(overload, args, kwargs) == value


STATISTICS = ("x", None, None, "mean", "var")
WRITES = {
    "in place": (aten.add_.Tensor, ("x", "y"), {}, ["x"]),
    "a packet, as hand-made graphs call it": (aten.add_, ("x", "y"), {}, ["x"]),
    "a packet that does not write": (aten.add, ("x", "y"), {}, []),
    "out": (aten.add.out, ("x", "y"), {"out": "z"}, ["z"]),
    "hidden, in training": (aten.native_batch_norm.default, (*STATISTICS, True, 0.1, 1e-5), {}, ["mean", "var"]),
    "hidden, in eval": (aten.native_batch_norm.default, (*STATISTICS, False, 0.1, 1e-5), {}, []),
    "instance norm, in training": (
        aten.instance_norm.default,
        (*STATISTICS, True, 0.1, 1e-5, False),
        {},
        STATISTICS[3:],
    ),
    "instance norm, in eval": (aten.instance_norm.default, (*STATISTICS, False, 0.1, 1e-5, False), {}, []),
    "no op": (len, ("x",), {}, []),
}


@pytest.mark.parametrize("case", WRITES)
def test_what_a_call_writes_to(case):
    target, args, kwargs, written = WRITES[case]
    assert {*written_by(target, args, kwargs)} - {None} == {*written}
