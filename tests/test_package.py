"""The package as others meet it: its names, its import arrows, its doctests, its wheel and its README."""

import ast
import doctest
import importlib
import importlib.metadata
import importlib.util
import os
import pkgutil
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch

import torch_batchnorm as tbn
from torch_batchnorm.passes import PASSES
from torch_batchnorm.passes.graph.options import verb_of

ROOT = Path(__file__).parent.parent
PUBLIC = [
    *(made.__name__ for made in PASSES),
    *map(verb_of, PASSES),
    "Backend",
    "BatchNormError",
    "Declined",
    "Edit",
    "Explanation",
    "FORMS",
    "Form",
    "InductorBatchNorm",
    "InvalidBatchNorm",
    "InvalidChoice",
    "InvalidOutput",
    "InvalidProgram",
    "Report",
    "Result",
    "TARGETS",
    "backend",
    "decomposition_table",
    "diff",
    "explain_backend",
    "exportable",
    "inductor_options",
    "inspect",
    "ops",
    "render",
    "select_backend",
    "verify",
]
# A room imports only from rooms in later rows: what shares a row does not know of each other.
ARROWS = [
    ["cli"],
    ["files"],
    ["inspection"],
    ["render", "tables"],
    ["passes"],  # the table of them
    ["passes.modes", "passes.folding", "passes.raising", "passes.inductor", "exporting"],
    ["passes.rewriting"],
    ["passes.graph"],
    ["decomps.table", "decomps.backends"],
    ["decomps.family"],
    ["decomps"],
    ["errors"],
]
MODULES = [m.name for m in pkgutil.walk_packages(tbn.__path__, "torch_batchnorm.")]


def test_public_names_are_these():
    modules = {"cli", "decomps", "errors", "exporting", "files", "inspection", "passes", "tables"}
    assert sorted(n for n in vars(tbn) if not n.startswith("_") and n not in modules) == sorted(PUBLIC)


def room(name):
    """The room of a module, by its path under the package, and the number of its row."""
    rooms = [(room, number) for number, row in enumerate(ARROWS) for room in row]
    found = [(room, number) for room, number in rooms if f"{name}.".startswith(f"{room}.")]
    assert found, f"{name} lies in no room of the arrows"
    return max(found, key=lambda pair: len(pair[0]))


def imports(name):
    """The modules of the package that a module imports, by path under it, and whether each was named relatively."""
    module = importlib.import_module(name)
    for node in ast.walk(ast.parse(Path(module.__file__).read_text())):
        if isinstance(node, ast.ImportFrom) and (node.level or node.module.startswith("torch_batchnorm")):
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), module.__spec__.parent)
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                yield (whole if whole in MODULES else base).partition(".")[2], bool(node.level)
        elif isinstance(node, ast.Import):
            assert not any(alias.name.startswith("torch_batchnorm") for alias in node.names), name


@pytest.mark.parametrize("name", MODULES)
def test_imports_run_one_way(name):
    inside = name.partition(".")[2]
    if inside == "decomps":
        return
    mine, row = room(inside)
    for target, relative in imports(name):
        theirs, other = room(target)
        assert theirs == mine or other > row, f"{inside} imports {target}"
        assert relative is f"{inside}.".startswith(("decomps.", "passes.")), (
            "relative inside the two folders, absolute elsewhere"
        )


@pytest.mark.parametrize("name", MODULES)
def test_doctests(name):
    module = importlib.import_module(name)
    result = doctest.testmod(module, extraglobs={"torch": torch})
    assert result.failed == 0


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    return folder


@pytest.mark.xdist_group("dist")
def test_wheel_imports_outside_the_repository_and_claims_no_other_name(dist, tmp_path):
    (wheel,) = dist.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path)
    assert {n.split("/")[0] for n in names} == {"torch_batchnorm", f"torch_batchnorm-{tbn_version()}.dist-info"}
    assert {
        "torch_batchnorm/py.typed",
        "torch_batchnorm/decomps/forms.py",
        "torch_batchnorm/passes/rewriting/site.py",
    } <= set(names)
    code = (
        "import importlib.util as u, torch_batchnorm as t, torch_batchnorm.cli; print(t.__file__);"
        "print([n for n in ('decomps', 'passes') if u.find_spec(n)])"
    )
    # -S would hide torch as well: the installed copy comes after the extracted one on the path
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert ran.stdout.splitlines() == [str(tmp_path / "torch_batchnorm" / "__init__.py"), "[]"]


def tbn_version():
    return importlib.metadata.version("torch-batchnorm")


@pytest.mark.xdist_group("dist")
def test_sdist_holds_the_sources_and_the_wheel_was_built_from_it(dist):
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {n.partition("/")[2] for n in archive.getnames()}
    assert {"pyproject.toml", "LICENSE", "README.md", "src/torch_batchnorm/decomps/forms.py"} <= names


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_snippets_of_every_page_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scope = {}
    for snippet in re.findall(r"```python\n(.*?)```", page.read_text(), re.S):
        exec(compile(snippet, page.name, "exec"), scope)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_links_of_every_page_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / link).exists(), link


def test_the_readme_is_a_screen_and_a_half():
    assert len((ROOT / "README.md").read_text().split()) <= 900
    assert "```python" in (ROOT / "README.md").read_text()


def test_the_readme_and_the_makefile_name_the_same_commands():
    readme, makefile = (ROOT / "README.md").read_text(), (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z]+):.*##", makefile, re.M))
    assert targets == {"help", "setup", "demo", "check", "test", "accept", "bench", "docs", "fuzz", "interop"}
    assert set(re.findall(r"`make ([a-z]+)`", readme)) <= targets


def test_the_version_is_said_once_and_the_changelog_has_it():
    assert f"## [{tbn_version()}]" in (ROOT / "CHANGELOG.md").read_text()


def test_the_reference_page_is_what_the_code_says():
    found = importlib.util.spec_from_file_location("reference", ROOT / "docs" / "reference.py")
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    assert module.PAGE.read_text() == module.page(), "run make docs"
