"""recalibrate: the running statistics of all the data, nothing else changed, and nothing at all when it fails."""

import copy

import pytest
import torch
from torch import nn

import torch_batchnorm as tbn
from programs import export, fingerprint, same, saved_and_loaded
from torch_batchnorm import Recalibrate

G = torch.Generator().manual_seed(1)
DATA = torch.randn(64, 8, 3, 5, 5, generator=G) * 3 + 10


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.conv, self.last = nn.BatchNorm2d(3), nn.Conv2d(3, 4, 2), nn.BatchNorm2d(4)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        return self.dropout(self.last(self.conv(self.first(x)).relu()))


def made(training=True):
    torch.manual_seed(0)
    return Net().train(training)


def whole(batches, net):
    """The statistics of all the data in float64, each layer behind layers that normalise each batch."""
    net = copy.deepcopy(net).double().train()
    seen = {"first": [], "last": []}
    for name, values in seen.items():
        getattr(net, name).register_forward_pre_hook(lambda m, args, values=values: values.append(args[0]))
    with torch.no_grad():
        for batch in batches:
            net(batch.double())
    found = {}
    for name, values in seen.items():
        flat = torch.cat([v.transpose(0, 1).flatten(1) for v in values], 1)
        found |= {f"{name}.running_mean": flat.mean(1), f"{name}.running_var": flat.var(1)}
    return found


def close(found, want, relative=1e-6):
    return all(bool(((found[k].double() - v).abs() <= relative * v.abs().max()).all()) for k, v in want.items())


PROGRAMS = {
    "train": lambda: export(made(), DATA[0]),
    "eval": lambda: export(made(False), DATA[0]),
    "train, ATEN": lambda: export(made(), DATA[0]).run_decompositions(),
    "eval, ATEN": lambda: export(made(False), DATA[0]).run_decompositions(),
    "family": lambda: tbn.consolidate(export(made(), DATA[0])),
    "module": lambda: export(made(), DATA[0]).module(),
}


def state_of(program):
    return program.state_dict if isinstance(program, torch.export.ExportedProgram) else program.state_dict()


@pytest.mark.parametrize("name", PROGRAMS)
def test_64_batches_give_the_statistics_of_the_whole_data(name):
    program = PROGRAMS[name]()
    before, state = fingerprint(program), {k: v.clone() for k, v in state_of(program).items()}
    result = Recalibrate()(program, list(DATA))
    assert (len(result.edits), result.declined, fingerprint(program)) == (2, (), before)
    assert same(dict(state_of(program)), state)
    found = state_of(result.program)
    want = whole(DATA, made())
    assert close(found, want)
    assert all(found[k].equal(v) for k, v in state.items() if k not in want)
    assert fingerprint(result.program) == before
    assert tbn.verify(result.program) == ()


@pytest.mark.parametrize("name", ["train", "module"])
def test_in_place_writes_into_the_buffers(name):
    program = PROGRAMS[name]()
    buffer = state_of(program)["first.running_mean"]
    assert tbn.recalibrate(program, DATA, inplace=True) is program
    assert close({"first.running_mean": buffer}, {"first.running_mean": whole(DATA, made())["first.running_mean"]})


def test_a_copy_of_a_module_and_its_source_share_no_statistics():
    module = PROGRAMS["module"]()
    found = tbn.recalibrate(module, DATA)
    assert found.first.weight is module.first.weight
    assert not torch.equal(found.first.running_mean, module.first.running_mean)


def test_batches_of_any_size_count_by_their_size():
    net = nn.BatchNorm1d(3)
    program = export(net, torch.randn(4, 3), dynamic=({0: torch.export.Dim("batch", min=2)},))
    data = torch.randn(37, 3, generator=G) + 1000
    found = tbn.recalibrate(program, data.split([2, 30, 5])).state_dict
    want = {"running_mean": data.double().mean(0), "running_var": data.double().var(0)}
    assert close(found, want)


def test_cumulative_is_update_bn():
    net = made()
    program = export(net, DATA[0])
    loader = [(batch,) for batch in DATA]
    torch.optim.swa_utils.update_bn([x for (x,) in loader], net)
    found = tbn.recalibrate(program, loader, method="cumulative").state_dict
    assert close(found, {k: v.double() for k, v in net.state_dict().items() if "running" in k}, 1e-5)


def test_momentum_moves_the_statistics_as_training_does():
    net = nn.BatchNorm2d(3, momentum=0.3)
    program = export(net, DATA[0])
    for batch in DATA:
        net(batch)
    found = tbn.recalibrate(program, DATA, 0.3).state_dict
    assert close(found, {k: v.double() for k, v in net.state_dict().items() if "running" in k}, 1e-5)


def test_a_module_called_twice_is_measured_over_both_calls():
    class Twice(nn.BatchNorm1d):
        def forward(self, x, y):
            return super().forward(x) + super().forward(y)

    x, y = torch.randn(6, 3, generator=G), torch.randn(6, 3, generator=G) + 5
    found = tbn.recalibrate(export(Twice(3), x, y), [(x, y)]).state_dict
    assert close(found, {"running_mean": torch.cat([x, y]).double().mean(0)})


class Options(nn.BatchNorm1d):
    def forward(self, x, *, scale):
        return super().forward(x * scale)


def test_any_form_of_a_batch():
    x, scale = torch.randn(6, 3, generator=G), torch.full((3,), 2.0)
    program = torch.export.export(Options(3), (x,), {"scale": scale})
    want = {"running_mean": (x.double() * 2).mean(0)}
    for batch in ({"x": x, "scale": scale}, ((x,), {"scale": scale})):
        assert close(tbn.recalibrate(program, [batch]).state_dict, want)

    class Nested(nn.BatchNorm1d):
        def forward(self, batch):
            return super().forward(batch["x"] * batch["scale"])

    program = export(Nested(3), {"x": x, "scale": scale})
    assert close(tbn.recalibrate(program, [{"x": x, "scale": scale}]).state_dict, want)


def test_nested_graphs_are_measured():
    class Autocast(nn.Module):
        def __init__(self):
            super().__init__()
            self.bn = nn.BatchNorm2d(3)

        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self.bn(x)

    found = tbn.recalibrate(export(Autocast(), DATA[0]), DATA).state_dict
    flat = DATA.transpose(0, 2).flatten(1).double()
    assert close(found, {"bn.running_mean": flat.mean(1), "bn.running_var": flat.var(1)})


def test_what_is_frozen_is_not_measured():
    program = tbn.freeze(export(made(), DATA[0]), "first")
    result = Recalibrate()(program, DATA)
    assert [edit.module for edit in result.edits] == ["last"]
    assert torch.equal(result.program.state_dict["first.running_mean"], torch.zeros(3))


def test_the_same_batches_again_change_nothing():
    program = export(made(False), DATA[0])
    once = tbn.recalibrate(program, DATA)
    assert Recalibrate()(once, DATA).modified is False
    assert same(dict(saved_and_loaded(once).state_dict), dict(once.state_dict))


def _interrupted():
    yield DATA[0]
    raise KeyboardInterrupt


FAILURES = {
    "interrupted": (_interrupted, KeyboardInterrupt, "^$"),
    "a batch of another shape": (lambda: [DATA[0], DATA[0, :, :2]], tbn.InvalidChoice, "batch 2: found one that"),
    "a label too many": (lambda: [(DATA[0], 1)], tbn.InvalidChoice, "batch 1: found one that"),
    "other names": (lambda: [{"y": DATA[0], "z": 1}], tbn.InvalidChoice, "batch 1: found one that"),
    "no batch": (list, tbn.InvalidChoice, "found no batch"),
    "not finite": (lambda: [DATA[0] / 0], tbn.InvalidBatchNorm, "not finite somewhere"),
}


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("name", FAILURES)
def test_a_run_that_fails_leaves_the_program_as_it_was(name, inplace):
    batches, error, message = FAILURES[name]
    program = export(made(), DATA[0])
    before, state = fingerprint(program), {k: v.clone() for k, v in program.state_dict.items()}
    with pytest.raises(error, match=message):
        tbn.recalibrate(program, batches(), inplace=inplace)
    assert (fingerprint(program), same(dict(program.state_dict), state)) == (before, True)


def test_bad_options():
    program = export(made(), DATA[0])
    with pytest.raises(tbn.InvalidChoice, match="found method 'median', expected one of pooled, cumulative"):
        tbn.recalibrate(program, DATA, method="median")
    with pytest.raises(tbn.InvalidChoice, match="found momentum 2, expected None, or more than 0 and at most 1"):
        tbn.recalibrate(program, DATA, 2)
    with pytest.raises(tbn.InvalidProgram, match="expected an ExportedProgram or a GraphModule"):
        tbn.recalibrate(made(), DATA)


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.bn = nn.BatchNorm2d(3)

    def forward(self, x):
        return self.bn(self.bn(x) * 3 + 1)


def test_a_batch_norm_called_twice_counts_both_calls_in_either_dialect():
    program = export(Twice(), DATA[0])
    found = [Recalibrate()(p, DATA[:4]) for p in (program, program.run_decompositions())]
    assert [(len(f.edits), f.declined) for f in found] == [(2, ()), (2, ())]
    for name in ("bn.running_mean", "bn.running_var"):
        torch.testing.assert_close(*(f.program.state_dict[name] for f in found))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.BatchNorm2d(3)
        self.b = self.a

    def forward(self, x):
        return self.b(x)


def test_a_tied_buffer_stays_tied():
    state = tbn.recalibrate(export(Tied(), DATA[0]), DATA[:4]).state_dict
    assert state["a.running_mean"] is state["b.running_mean"]
    assert state["a.running_mean"].sum() > 1


class HalfShared(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.BatchNorm2d(3), nn.BatchNorm2d(3)
        self.b.running_mean = self.a.running_mean

    def forward(self, x):
        return self.b(self.a(x))


def test_a_mean_shared_without_its_variance_is_declined():
    result = Recalibrate()(export(HalfShared(), DATA[0]), DATA[:2])
    assert (result.modified, len(result.declined)) == (False, 2)
    assert "with a batch norm that does not share the other" in result.declined[0].reason


def test_an_empty_batch_says_nothing():
    size = ({0: torch.export.Dim("n", min=0)},)
    program = export(nn.BatchNorm2d(3), DATA[0], dynamic=size)
    whole, more = (tbn.recalibrate(program, batches).state_dict for batches in (DATA[:2], [*DATA[:2], DATA[0][:0]]))
    assert same(whole["running_mean"], more["running_mean"])


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.BatchNorm2d(3).eval(), nn.BatchNorm2d(3).eval()

    def forward(self, x):
        return torch.cond(x.sum() > 0, self.a, self.b, (x,))


def test_a_branch_that_no_batch_reached_is_declined_and_the_other_is_measured():
    result = Recalibrate()(export(Branches().eval(), DATA[0]), DATA[:2])
    assert [d.reason for d in result.declined] == ["no batch reached it"]
    assert len(result.edits) == 1


@pytest.mark.parametrize("batches", [5, None, "file.pt", [None], ["x"], [{"y": 1}, 2]])
def test_what_are_no_batches_is_one_clear_error(batches):
    with pytest.raises(tbn.InvalidChoice, match="found"):
        tbn.recalibrate(export(nn.BatchNorm2d(3), DATA[0]), batches)


@pytest.mark.parametrize("verb", [tbn.recalibrate, lambda p, b, progress: Recalibrate(progress=progress)(p, b).program])
def test_progress_is_told_of_every_batch(verb):
    told = []

    def shown(batches):
        for number, batch in enumerate(batches, 1):
            yield batch
            told.append(number)

    program = export(made(), DATA[0])
    found = verb(program, DATA[:3], progress=shown)
    assert (told, same(dict(found.state_dict), dict(verb(program, DATA[:3], progress=None).state_dict))) == (
        [1, 2, 3],
        True,
    )


@pytest.mark.parametrize("progress", [True, False])
def test_the_booleans_of_0_1_0_are_taken_and_show_nothing(progress, capsys):
    tbn.recalibrate(export(made(), DATA[0]), DATA[:2], progress=progress)
    assert capsys.readouterr() == ("", "")
