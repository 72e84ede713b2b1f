"""Each form against what it is rewritten to, to the bit, over everything the form is defined for on CPU."""

import itertools

import pytest
import torch

from programs import LEGACY, TENSORS, call_graph, consolidated, lacks_statistics, modes, same
from torch_batchnorm.decomps.forms import Mode

DTYPES = {
    "f32": (torch.float32,) * 2,
    "f64": (torch.float64,) * 2,
    "bf16 with f32 statistics": (torch.bfloat16, torch.float32),
}
AFFINE = {"affine": (), "no weight": ("weight",), "no bias": ("bias",), "no weight, no bias": ("weight", "bias")}
SHAPES = {"rank 2": (4, 3), "rank 3": (4, 3, 5), "rank 4": (4, 3, 5, 6), "rank 5": (2, 3, 4, 5, 6)}
PLAIN = torch.contiguous_format
LAYOUTS = {2: [PLAIN], 3: [PLAIN], 4: [PLAIN, torch.channels_last], 5: [PLAIN, torch.channels_last_3d]}
ON_CPU = [f for f in LEGACY if not f.name.startswith(("aten.cudnn", "aten.miopen"))]


# What an eval site saves has one shape only once it is rebuilt: the second test compares it with its meaning.
UNSHAPED = {"save_mean", "save_invstd"}


def _defined(form, training, stats):
    """Whether ATen defines the form with or without running statistics."""
    if lacks_statistics(form):
        return training and not stats
    optional = all(a.type.kind() == "OptionalType" for a in form.overload._schema.arguments if "running" in a.name)
    return stats or (training and optional)


def _inputs(form, shape, layout, dtypes, absent):
    torch.manual_seed(0)
    x = (torch.randn(shape) * 3 + 1).contiguous(memory_format=layout)
    tensors = (x, torch.rand(3) + 0.5, torch.randn(3), torch.randn(3), torch.rand(3))
    named = {n: t.to(dtypes[n != "input"]) for n, t in zip(TENSORS, tensors, strict=True)}
    return {n: t for n, t in named.items() if n in form.arguments and n not in absent}


def _into(form, inputs):
    """Destinations of `out=`: the output in full, in the input's layout; the rest empty, to be resized."""
    like = next((inputs[n] for n in TENSORS[1:4] if n in inputs), inputs["input"])
    made = {role: torch.empty(0, dtype=like.dtype) for role in form.destinations}
    return made | ({"out": torch.empty_like(inputs["input"])} if made else {})


def _run(module, form, inputs, unread):
    """Outputs by role, every input after the call, destinations of `out=`, gradients, and the output's strides."""
    inputs = {n: t.clone() for n, t in inputs.items()}
    for name in () if form.destinations else {"input", "weight", "bias"} & inputs.keys():
        inputs[name].requires_grad_()
    into = list(_into(form, inputs).values())
    outputs = module(*inputs.values(), *into)
    if not form.destinations:
        torch.manual_seed(1)
        outputs[0].backward(torch.randn_like(outputs[0]))
    roles = dict(zip((r for r in form.roles if r not in unread), outputs, strict=True))
    return roles, inputs, into, [t.grad for t in inputs.values()], outputs[0].stride()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("affine", AFFINE)
@pytest.mark.parametrize("form", ON_CPU, ids=lambda f: f.name)
def test_rewritten_form_equals_the_original_to_the_bit(form, affine, dtype):
    compared = 0
    for training, stats in itertools.product(modes(form), (True, False)):
        if not _defined(form, training, stats):
            continue
        absent = AFFINE[affine] + (() if stats else TENSORS[3:])
        unread = {"impl_index", "reserve"} | (set() if training else UNSHAPED)
        for shape, layout in ((s, m) for s in SHAPES.values() for m in LAYOUTS[len(s)]):
            original = call_graph(form, training, absent=absent, unread=unread, shape=form.destinations and shape)
            rewritten = consolidated(original)
            assert [e.before for e in rewritten.edits] == [form.name]
            inputs = _inputs(form, shape, layout, DTYPES[dtype], absent)
            expected = _run(original, form, inputs, unread)
            assert same(expected, _run(rewritten.program, form, inputs, unread)), (training, stats, shape)
            compared += 1
    assert compared >= 6


@pytest.mark.parametrize(
    "form",
    [
        f
        for f in ON_CPU
        if f.mode is not Mode.TRAIN and not f.destinations and len(f.roles) > 1 and not lacks_statistics(f)
    ],
    ids=lambda f: f.name,
)
def test_saved_statistics_of_an_eval_site_are_rebuilt_in_one_shape(form):
    inputs = _inputs(form, (4, 3, 5, 6), PLAIN, DTYPES["f32"], ())
    unread = {"impl_index", "reserve"}
    graph = consolidated(call_graph(form, False, unread=unread)).program
    found = dict(zip((r for r in form.roles if r not in unread), graph(*inputs.values()), strict=True))
    assert same(found["save_mean"], inputs["running_mean"])
    torch.testing.assert_close(found["save_invstd"], 1 / torch.sqrt(inputs["running_var"] + 1e-5))
