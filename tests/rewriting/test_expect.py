"""The graph before and after, for each form and mode: tests/expect/<form>.txt. `make accept` rewrites the files."""

import os
from pathlib import Path

import pytest

from programs import LEGACY, call_graph, consolidated, lacks_statistics, modes
from torch_batchnorm import render

FOLDER = Path(__file__).parent.parent / "expect"
ABSENT = {
    "affine": (),
    "without weight, bias": ("weight", "bias"),
    "without statistics": ("running_mean", "running_var"),
}


def _cases(form):
    """Every mode of the form with everything given, then with what its schema and mode can do without."""
    required = {
        form.names.get(a.name, a.name) for a in form.overload._schema.arguments if a.type.kind() == "TensorType"
    }
    for training in modes(form):
        for title, absent in ABSENT.items():
            stats = "running_mean" not in absent
            if lacks_statistics(form) and (not stats or not training):
                continue
            if (required & set(absent)) or not (training or stats):
                continue
            yield f"{'train' if training else 'eval'}, {title}", training, absent


def _snapshot(form):
    """The text of a form's file."""
    blocks = []
    for title, training, absent in _cases(form):
        unread = {"impl_index", "reserve"} if training or not form.destinations else set(form.roles) - {"out"}
        shape = (2, 3, 4, 4) if form.destinations else None
        graph = call_graph(form, training, absent=absent, unread=unread, shape=shape)
        result = consolidated(graph)
        assert [edit.before for edit in result.edits] == [form.name]
        blocks.append(f"# {title}\n{render(graph)}\n# becomes\n{render(result.program)}\n")
    return "\n".join(blocks)


@pytest.mark.parametrize("form", LEGACY, ids=lambda f: f.name)
def test_form_is_rewritten_as_accepted(form):
    file, found = FOLDER / f"{form.name}.txt", _snapshot(form)
    if os.environ.get("EXPECTTEST_ACCEPT"):
        file.write_text(found)
    assert file.read_text() == found


def test_every_file_belongs_to_a_form():
    assert {file.stem for file in FOLDER.iterdir()} == {form.name for form in LEGACY}
