"""The command line: what it prints, what it exits with, and that it never loses a file."""

import json
import os
import zipfile

import numpy
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from typer.testing import CliRunner

from programs import Op, claim_aten, export, legacy_left, native, nodes, same, step, writes_to_a_view
from torch_batchnorm import cli, inspect, verify
from torch_batchnorm.cli import app
from torch_batchnorm.files import Loaded
from torch_batchnorm.passes import PASSES

X = torch.randn(2, 3, 4, 4)


@pytest.fixture
def run():
    return lambda *arguments: CliRunner().invoke(app, [str(a) for a in arguments])


@pytest.fixture
def model(tmp_path):
    file = tmp_path / "model.pt2"
    torch.export.save(export(nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)), X), file)
    return file


@pytest.fixture
def declined(tmp_path):
    """A program with a site that cannot be rewritten."""
    file = tmp_path / "declined.pt2"
    torch.export.save(writes_to_a_view(), file)
    return file


def test_inspect_prints_a_table(run, model):
    result = run("inspect", model)
    assert result.exit_code == 0
    assert "1 batch norm: 1 x aten.batch_norm.default (train)" in result.stdout
    assert "f32[2, 3, 4, 4]" in result.stdout


def test_inspect_prints_json(run, model):
    (entry,) = json.loads(run("inspect", model, "--json").stdout)["batch_norms"]
    assert (entry["form"], entry["counter"]) == ("aten.batch_norm.default", "1.num_batches_tracked")


def test_inspect_tells_the_backend_of_a_device(run, model):
    assert "cudnn" in run("inspect", model, "--device", "cuda").stdout
    unknown = run("inspect", model, "--device", "quantum")
    assert (unknown.exit_code, "found device 'quantum', expected one that PyTorch knows" in unknown.stderr) == (2, True)


def test_legalize_and_back_and_the_difference(run, model, tmp_path):
    core, family, again = (tmp_path / name for name in ("core.pt2", "family.pt2", "again.pt2"))
    result = run("legalize", model, "--to", "core_aten", "-o", core, "--report")
    assert result.exit_code == 0
    assert "aten._native_batch_norm_legit.default" in result.stdout
    assert run("consolidate", core, "-o", family).exit_code == 0
    assert run("consolidate", model, "-o", again).exit_code == 0
    alike, unlike = run("diff", family, again), run("diff", model, core)
    assert (alike.exit_code, "1 sites, 0 different" in alike.stdout) == (0, True)
    assert (unlike.exit_code, "1 sites, 1 different" in unlike.stdout, "form" in unlike.stdout) == (1, True, True)
    assert same(step(torch.export.load(core).module(), X), step(torch.export.load(model).module(), X))


def test_mode_to_eval_and_back(run, model, tmp_path):
    evaluates, trains = tmp_path / "eval.pt2", tmp_path / "train.pt2"
    assert run("mode", model, "--to", "eval", "-o", evaluates, "--strict").exit_code == 0
    result = run("mode", evaluates, "--to", "train", "-o", trains, "--report")
    assert (result.exit_code, "aten.batch_norm.default (train)" in result.stdout) == (0, True)
    assert nodes(torch.export.load(trains)) == nodes(torch.export.load(model))
    wrong = run("mode", model, "--to", "test", "-o", tmp_path / "out.pt2")
    assert (wrong.exit_code, "found mode 'test', expected one of eval, train" in wrong.stderr) == (2, True)


def test_fold_an_eval_program(run, model, tmp_path):
    evaluates, out = tmp_path / "eval.pt2", tmp_path / "folded.pt2"
    assert run("mode", model, "--to", "eval", "-o", evaluates).exit_code == 0
    result = run("fold", evaluates, "-o", out, "--report", "--strict")
    assert (result.exit_code, "folded into conv2d (aten.conv2d.default)" in result.stdout) == (0, True)
    folded, program = torch.export.load(out), torch.export.load(evaluates)
    assert list(folded.state_dict) == ["0.weight", "0.bias"]
    torch.testing.assert_close(folded.module()(X), program.module()(X))
    train = run("fold", model, "-o", tmp_path / "no.pt2", "--strict")
    assert (train.exit_code, "switch the program to eval first" in train.stderr) == (1, True)
    wrong = run("fold", evaluates, "-o", tmp_path / "no.pt2", "--alone", "gone")
    assert (wrong.exit_code, "found alone='gone', expected one of leave" in wrong.stderr) == (2, True)
    assert not (tmp_path / "no.pt2").exists()


def test_freeze_and_unfreeze(run, model, tmp_path):
    frozen, back = tmp_path / "frozen.pt2", tmp_path / "back.pt2"
    assert run("freeze", model, "-m", "1", "--affine", "-o", frozen).exit_code == 0
    assert [e.mode for e in inspect(torch.export.load(frozen)).entries] == ["eval"]
    assert run("unfreeze", frozen, "--modules", "*", "-o", back).exit_code == 0
    assert nodes(torch.export.load(back)) == nodes(torch.export.load(model))
    wrong = run("freeze", model, "-m", "bn", "-o", tmp_path / "out.pt2")
    assert (wrong.exit_code, "found modules='bn', which matches no batch norm" in wrong.stderr) == (2, True)


def test_raise_what_was_decomposed(run, model, tmp_path):
    math, out = tmp_path / "math.pt2", tmp_path / "raised.pt2"
    assert run("legalize", model, "--to", "math", "-o", math, "--strict").exit_code == 0
    result = run("raise", math, "-o", out, "--report", "--strict")
    assert (result.exit_code, "elementary operations" in result.stdout) == (0, True)
    assert [e.form for e in inspect(torch.export.load(out)).entries] == [
        "aten._batch_norm_with_update_functional.default"
    ]


def test_verify_prints_each_violation_and_exits_1(run, model, monkeypatch):
    fine = run("verify", model)
    assert (fine.exit_code, fine.stdout) == (0, "no violation\n")
    program = torch.export.load(model)  # torch refuses to save what is wrong with this one
    for node in program.graph.nodes:
        if "batch_norm" in str(node.target):
            del node.meta["val"]
    monkeypatch.setattr(cli, "load", lambda path: Loaded(program, {}))
    wrong = run("verify", model)
    assert (wrong.exit_code, wrong.stdout.splitlines()) == (1, list(verify(program)))
    assert "batch_norm: it has no val, which saving needs" in wrong.stdout


def test_a_flag_is_a_field_and_the_last_one_counts(run, model, tmp_path):
    """Every field that has a flag reaches its pass; those for Python alone have none."""
    out = tmp_path / "out.pt2"
    for asked, given in ((("--no-cudnn-enabled",), False), (("--no-cudnn-enabled", "--cudnn-enabled"), True)):
        assert run("legalize", model, "--to", "composite", *asked, "-o", out).exit_code == 0
        (node,) = (n for n in torch.export.load(out).graph.nodes if "batch_norm" in str(n.target))
        assert node.args[8] is given
    for option in (("--inplace",), ("--no-inplace",)):
        assert run("consolidate", model, *option, "-o", out).exit_code == 2


def _inputs(folder, suffix):
    file, data = folder / f"inputs{suffix}", torch.randn(8, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    if suffix == ".npz":
        numpy.savez(file, input=data.numpy())
    elif suffix == ".safetensors":
        save_file({"input": data}, file)
    else:
        torch.save([(part,) for part in data.split(2)], file)
    return file, data


@pytest.mark.parametrize("suffix", [".pt", ".npz", ".safetensors"])
def test_recalibrate_from_a_file(run, model, tmp_path, suffix):
    file, data = _inputs(tmp_path, suffix)
    options = () if suffix == ".pt" else ("--batch-size", 2)
    result = run("recalibrate", model, "--data", file, *options, "-o", tmp_path / "out.pt2", "--report")
    assert result.exit_code == 0, result.output
    assert "statistics of 128 values a channel" in result.stdout
    found = torch.export.load(tmp_path / "out.pt2")
    with torch.no_grad():
        flat = nn.functional.conv2d(data, *[found.state_dict[k] for k in ("0.weight", "0.bias")]).transpose(0, 1)
    assert torch.allclose(found.state_dict["1.running_mean"], flat.flatten(1).mean(1), atol=1e-6)
    assert torch.allclose(found.state_dict["1.running_var"], flat.flatten(1).var(1), rtol=1e-5)


BAD_INPUTS = {
    "missing": (lambda folder: folder / "none.pt", (), "found no file, expected one of inputs"),
    "another suffix": (lambda folder: _written(folder / "a.csv"), (), "found .csv, expected .pt, .npz, .safetensors"),
    "not what it says": (lambda folder: _written(folder / "a.npz"), (), "cannot be read as inputs"),
    "another shape": (lambda folder: _inputs(folder, ".npz")[0], (), "batch 1: found one that the program does not"),
    "no tensors": (lambda folder: _held(folder, 5), (), "batch 1: found one that the program does not take"),
    "text": (lambda folder: _held(folder, ["a"]), (), "batch 1: found one that the program does not take"),
    "sparse": (lambda folder: _held(folder, X.to_sparse()), ("--batch-size", 2), "expected tensors of one length"),
    "not to split": (
        lambda folder: _held(folder, torch.tensor(1.0)),
        ("--batch-size", 2),
        "expected tensors of one length to split",
    ),
}


def _written(file):
    file.write_text("not a tensor")
    return file


def _held(folder, value):
    torch.save(value, folder / "held.pt")
    return folder / "held.pt"


@pytest.mark.parametrize("kind", BAD_INPUTS)
def test_bad_inputs_are_one_clear_line(run, model, tmp_path, kind):
    make, options, message = BAD_INPUTS[kind]
    result = run("recalibrate", model, "--data", make(tmp_path), *options, "-o", tmp_path / "out.pt2")
    assert (result.exit_code, message in result.stderr, (tmp_path / "out.pt2").exists()) == (2, True, False)
    assert len(result.stderr.strip().splitlines()) == 1


def test_the_inputs_are_not_overwritten(run, model, tmp_path):
    file, data = _inputs(tmp_path, ".npz")
    result = run("recalibrate", model, "--data", file, "-o", file)
    assert (result.exit_code, "the output is the input" in result.stderr) == (2, True)
    assert numpy.array_equal(numpy.load(file)["input"], data.numpy())


def test_diff_shows_what_is_only_on_one_side(run, model, tmp_path):
    longer = tmp_path / "longer.pt2"
    net = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.BatchNorm2d(3, eps=1e-3))
    torch.export.save(export(net, X), longer)
    result = run("diff", model, longer)
    assert (result.exit_code, "2 sites, 1 different" in result.stdout) == (1, True)
    assert "only on one side" in result.stdout


def test_an_unknown_target_is_one_clear_line(run, model, tmp_path):
    result = run("legalize", model, "--to", "onnx", "-o", tmp_path / "out.pt2")
    assert result.exit_code == 2
    assert "found target 'onnx', expected one of core_aten, composite" in result.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["model.pt2"]


def test_consolidate_saves_an_equal_program(run, model, tmp_path):
    before, out = model.read_bytes(), tmp_path / "out.pt2"
    result = run("consolidate", model, "-o", out, "--report")
    assert (result.exit_code, model.read_bytes()) == (0, before)
    assert "1 rewritten, 0 declined" in result.stdout
    assert "aten._batch_norm_with_update.default" in result.stdout
    found = torch.export.load(out)
    assert legacy_left(found) == []
    assert same(step(found.module(), X), step(torch.export.load(model).module(), X))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.pt2", "out.pt2"]


def test_strict_exits_1_and_saves_nothing(run, declined, tmp_path):
    out = tmp_path / "out.pt2"
    result = run("consolidate", declined, "-o", out, "--strict", "--report")
    assert (result.exit_code, out.exists()) == (1, False)
    assert "1 declined: native_batch_norm: it writes to slice_3" in result.stderr
    assert "1 declined" in result.stdout


def test_extra_files_are_kept(run, tmp_path):
    extra = {"labels.txt": "cat,dog"}
    torch.export.save(export(nn.BatchNorm2d(3), X), tmp_path / "in.pt2", extra_files=extra)
    assert run("consolidate", tmp_path / "in.pt2", "-o", tmp_path / "out.pt2").exit_code == 0
    found = {"labels.txt": ""}
    torch.export.load(tmp_path / "out.pt2", extra_files=found)
    assert found == extra


def test_a_link_stays_and_what_it_points_to_is_replaced(run, model, tmp_path):
    target, link = tmp_path / "target.pt2", tmp_path / "link.pt2"
    target.write_text("old")
    link.symlink_to(target)
    assert run("consolidate", model, "-o", link).exit_code == 0
    assert (link.is_symlink(), legacy_left(torch.export.load(target))) == (True, [])


@pytest.mark.parametrize("name", ["[a] b.pt2", "x" * 248 + ".pt2", "no suffix"])
def test_odd_file_names(run, model, tmp_path, name):
    result = run("consolidate", model, "-o", tmp_path / name)
    assert result.exit_code == 0, result.stderr
    assert legacy_left(torch.export.load(tmp_path / name)) == []


def test_without_strict_a_declined_site_is_reported_and_the_program_saved(run, declined, tmp_path):
    result = run("consolidate", declined, "-o", tmp_path / "out.pt2")
    assert (result.exit_code, "0 rewritten, 1 declined" in result.stdout) == (0, True)
    assert (tmp_path / "out.pt2").is_file()


def test_a_hidden_write_is_consolidated_from_a_file(run, tmp_path):
    torch.manual_seed(0)
    module = Op(native)
    torch.export.save(claim_aten(export(module, X)), tmp_path / "in.pt2")
    assert run("consolidate", tmp_path / "in.pt2", "-o", tmp_path / "out.pt2", "--strict").exit_code == 0
    with torch.no_grad():
        found = torch.export.load(tmp_path / "out.pt2").module()
        assert same(step(found, X)[:2], step(module, X)[:2])


def _text(path):
    path.write_text("not a program")


def _archive(path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("model/data", "not a program")


def _truncated(path):
    torch.export.save(export(nn.BatchNorm2d(3), X), path)
    path.write_bytes(path.read_bytes()[:2000])


def _corrupt(path):
    """A .pt2 file whose archive is whole and whose graph is not JSON."""
    torch.export.save(export(nn.BatchNorm2d(3), X), path)
    with zipfile.ZipFile(path) as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in content.items():
            archive.writestr(name, data[: len(data) // 2] if name.endswith("model.json") else data)


def _several(path):
    program = export(nn.BatchNorm2d(3), X)
    torch.export.pt2_archive._package.package_pt2(path, exported_programs={"encoder": program, "decoder": program})


BAD = {
    "missing": (lambda path: None, "found nothing, expected a .pt2 file"),
    "a folder": (lambda path: path.mkdir(), "found a folder, expected a .pt2 file"),
    "not an archive": (_text, "found no archive, expected a .pt2 file"),
    "another archive": (_archive, "found an archive that torch.export.load cannot read"),
    "truncated": (_truncated, "found no archive, expected a .pt2 file"),
    "several programs": (_several, "found programs named encoder, decoder, expected one named model"),
    "a pipe": (os.mkfifo, "found something that is no file, expected a .pt2 file"),
    "corrupt": (_corrupt, "found an archive that torch.export.load cannot read"),
}


@pytest.mark.parametrize("command", ["inspect", "consolidate"])
@pytest.mark.parametrize("kind", BAD)
def test_bad_input_is_one_clear_line_and_exit_code_2(run, tmp_path, kind, command):
    make, message = BAD[kind]
    file, out = tmp_path / "bad.pt2", tmp_path / "out.pt2"
    make(file)
    out.write_text("kept")
    result = run(command, file, *(("-o", out) if command == "consolidate" else ()))
    assert (result.exit_code, out.read_text()) == (2, "kept")
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert "Traceback" not in result.output


OUTPUTS = {
    "the input": (lambda model: model, "the output is the input"),
    "the input by another name": (lambda model: model.parent / "x" / ".." / model.name, "the output is the input"),
    "in a folder that is missing": (lambda model: model.parent / "missing" / "out.pt2", "its folder does not exist"),
    "under a file": (lambda model: model / "out.pt2", "its folder does not exist or cannot be written"),
    "a folder": (lambda model: model.parent, "found a folder"),
    "a pipe": (lambda model: _pipe(model.parent / "pipe"), "found a device or a pipe"),
}


def _pipe(path):
    os.mkfifo(path)
    return path


@pytest.mark.parametrize("place", OUTPUTS)
def test_bad_output_is_one_clear_line_and_the_input_stays(run, model, place):
    where, message = OUTPUTS[place]
    (model.parent / "x").mkdir()
    before = model.read_bytes()
    result = run("consolidate", model, "-o", where(model))
    assert (result.exit_code, model.read_bytes()) == (2, before)
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_a_failing_save_leaves_the_old_output(run, model, tmp_path, monkeypatch):
    out = tmp_path / "out.pt2"
    out.write_text("kept")

    def full(program, path, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch.export, "save", full)
    result = run("consolidate", model, "-o", out)
    assert (result.exit_code, out.read_text()) == (2, "kept")
    assert "cannot be written (No space left on device)" in result.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.pt2", "out.pt2"]


COMMANDS = ("inspect", "verify", "diff", *(made.command.name for made in PASSES))


@pytest.mark.parametrize("arguments", [("--help",), *((command, "--help") for command in COMMANDS)], ids=" ".join)
def test_help_has_an_example(run, arguments):
    result = run(*arguments)
    assert result.exit_code == 0
    assert arguments == ("--help",) or "Example: torch-batchnorm" in result.stdout


def test_version(run):
    assert run("--version").stdout.strip() == "torch-batchnorm 0.1.0"
