"""Which row says the same batch norm in another dialect, or in the other mode: read off FORMS, never listed."""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from itertools import product

from .forms import BY_NAME, FORMS, BatchNorm, Dialect, Form, Mode, Statistics


@cache
def nearest(dialect: Dialect, training: bool, statistics: Statistics, out: bool) -> Form:
    """The row of a dialect for a mode, a way of handing on the statistics, and an `out=` call or not.

    An overload of that mode alone comes before one whose flag says it. Where there are no statistics to hand on, in
    eval or as NONE says, an overload that updates some will do. No other difference is overlooked.

    Raises: LookupError when the dialect has no such overload (no functional one of the family writes to `out=`).

    >>> nearest(Dialect.FAMILY, training=False, statistics=Statistics.NONE, out=False).name
    'aten._batch_norm_no_update.default'
    """
    # An overload of one mode comes first: it cannot be called in the other one.
    modes = (Mode.TRAIN if training else Mode.EVAL, Mode.FLAG)
    # In eval nothing is updated: then an overload that would update in training says the same.
    handed_on = training and statistics is not Statistics.NONE
    ways = (statistics,) if handed_on else (Statistics.NONE, Statistics.OUTPUTS, Statistics.IN_PLACE)
    rows = [form for form in FORMS if form.dialect is dialect and bool(form.destinations) is out]
    for mode, way in product(modes, ways):
        for form in rows:
            if form.mode is mode and form.statistics is way:
                return form
    wanted = f"{modes[0].value}, statistics {statistics.value}, {'with' if out else 'without'} out"
    raise LookupError(f"{dialect.value} has no overload for {wanted}")


def row_in(dialect: Dialect, form: Form, norm: BatchNorm, functional: bool, out: bool = False) -> Form:
    """The row of a dialect for a record that was read by a form: one that writes statistics in place where that form
    does and the program may, else one that returns them.
    """
    statistics = Statistics.NONE
    if norm.running_mean is not None and norm.training:
        # no `.out` overload returns new statistics
        writes = out or (form.statistics is Statistics.IN_PLACE and not functional)
        statistics = Statistics.IN_PLACE if writes else Statistics.OUTPUTS
    return nearest(dialect, bool(norm.training), statistics, out)


def in_eval(form: Form) -> Form:
    """The row that says in eval what a row says in training: itself where a flag of an overload that returns no
    statistics says so, else an overload of eval alone, of its own dialect or of core ATen.

    It has to know every extra of the row, so that the way back has them too: where none does, a flag has to do.

    Raises: LookupError when no row says it in eval.

    >>> in_eval(FORMS[0]).name
    'aten._batch_norm_no_update.default'
    """
    if form.mode is Mode.EVAL or (form.mode is Mode.FLAG and form.statistics is not Statistics.OUTPUTS):
        return form
    # a flag of an overload that returns statistics would still return them in eval: copies of what it was given
    place, out = FORMS.index(form), bool(form.destinations)
    for dialect in (form.dialect, Dialect.CORE):
        rows = [r for r in FORMS if r.dialect is dialect and r.mode is Mode.EVAL and bool(r.destinations) is out]
        rows = [row for row in rows if form.extras.keys() <= row.extras.keys()]
        if rows:
            # rows of one kernel stand together, so the closest one runs the same kernel
            return min(rows, key=lambda row: abs(FORMS.index(row) - place))
    if form.mode is Mode.FLAG:
        return form
    raise LookupError(f"no row says in eval what {form.name} says in training")


def in_training(form: Form, statistics: Statistics, was: str = "") -> Form:
    """The row that says in training what a row says in eval, and hands on its statistics in this way.

    was: the name of the row that it was in training, which it is again unless it was written as another since.

    Raises: LookupError when no row says it in training.

    >>> in_training(in_eval(FORMS[0]), Statistics.IN_PLACE).name
    'aten._batch_norm_with_update.default'
    """
    if form.mode is not Mode.EVAL:
        return form
    out, before = bool(form.destinations), BY_NAME.get(was)
    statistics = Statistics.IN_PLACE if out else statistics
    if before is not None and before.mode is not Mode.EVAL and before.statistics is statistics:
        # a row that nothing says in eval is not where this one came from
        with suppress(LookupError):
            if in_eval(before) is form:
                return before
    return nearest(form.dialect, True, statistics, out)
