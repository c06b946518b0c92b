"""The plan of the house: which room imports which, what opens files, and what prints."""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "ckptconv"
sys.path.insert(0, str(ROOT / "scripts"))

import house  # noqa: E402
import mutants  # noqa: E402
import roads  # noqa: E402
import without  # noqa: E402


def test_no_import_leads_up() -> None:
    assert house.upwards() == []


def test_no_modules_import_each_other() -> None:
    assert house.cycles() == []


def test_the_house_stays_as_low_as_it_is() -> None:
    entries = [path for path in PACKAGE.iterdir() if path.name != "__pycache__"]
    assert len(entries) <= 25
    # Features stand on all of the trunk.
    assert max(house.floors(house.rooms()).values()) <= 12


def test_every_folder_says_what_flows_in_and_out() -> None:
    for folder in {path.parent for path in PACKAGE.rglob("*.py")} - {PACKAGE}:
        text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text("utf-8"))) or ""
        assert len(text) > 100, folder


def test_the_trunk_imports_no_feature_and_no_feature_another_but_those_that_it_needs() -> None:
    of_features = [(module, name) for _, _, module, name in house.imports() if name.startswith("ckptconv.features.")]
    needs = {name: without.listed_by(name, "NEEDS") for name in without.names()}
    for module, name in of_features:
        # The feature itself, and another to which the module adds: it is gone without that.
        own = module.split(".")[2] if module.startswith("ckptconv.features.") else ""
        together = (own, *re.findall(r"\.with_(\w+)", module))
        allowed = {*together, *(need for each in together for need in needs.get(each, ()))}
        # What type checkers see of the library's names, which are imported when they are used.
        assert name.split(".")[2] in allowed or module == "ckptconv.__init__", (module, name)


@pytest.mark.parametrize("room", ["engine", "storage"])
def test_what_moves_bytes_knows_no_format(room: str) -> None:
    assert not {"formats", "structure", "outputs"} & house.rooms()[room]


OPENING = {"open", "open_reader", "read_text", "Readers", "LocalWriter", "writing", "os.open", "Path"}


def calls(path: Path, *names: str) -> set[str]:
    """Those of `names` that a module calls."""
    text = path.read_text("utf-8")
    if not any(re.search(rf"\b{name.rpartition('.')[2]}\s*\(", text) for name in names):
        return set()
    called = (ast.unparse(node.func) for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))
    return set(names).intersection(called)


@pytest.mark.parametrize(
    "path", [PACKAGE / "plan.py", *sorted((PACKAGE / "outputs").glob("*.py"))], ids=lambda p: p.name
)
def test_what_plans_opens_nothing(path: Path) -> None:
    assert not calls(path, *OPENING)


def test_only_the_command_line_prints() -> None:
    printing = {path for path in PACKAGE.rglob("*.py") if calls(path, "print")}
    assert {path.relative_to(PACKAGE).parts[0] for path in printing} <= {"cli"}


# What each main job may load at most, and how large the trunk may be, in round numbers. These fall, and never rise.
ROADS = {
    "pt2safetensors": roads.Size(115, 13_980),
    "dcp2safetensors": roads.Size(132, 16_010),
    "zero-to-fp32": roads.Size(128, 15_735),
}
TRUNK = 21_440


@pytest.mark.parametrize("job", [job for job, path in roads.ROADS.items() if (ROOT / path).exists()])
def test_a_main_job_loads_no_more_than_it_did(job: str) -> None:
    found = roads.size_of(roads.loaded(job))
    assert (found.modules <= ROADS[job].modules, found.lines <= ROADS[job].lines) == (True, True), found


def test_the_trunk_is_no_larger_than_it_was() -> None:
    assert roads.trunk().lines <= TRUNK


# The most lines of a feature that reads a format of input, unless its `EXCEEDS` says why it has more.
CONTAINER = 350


def test_formats_of_features_keep_to_their_budget() -> None:
    registry = (PACKAGE / "formats" / "registered.py").read_text("utf-8")
    named = re.findall(r"KnownFormat\([^\n]*?ckptconv\.features\.(\w+)\.", registry)
    assert len(set(named)) > 4
    sizes = {name: roads.size_of((PACKAGE / "features" / name).rglob("*.py")).lines for name in named}
    larger = {name for name, lines in sizes.items() if lines > CONTAINER}
    assert larger == {name for name in named if hasattr(import_module(f"ckptconv.features.{name}"), "EXCEEDS")}


def test_the_picture_shows_the_imports() -> None:
    page = house.PAGE.read_text("utf-8")
    assert house.picture() in page
    assert house.written(page) == page


def modules_named(page: str) -> list[str]:
    """The modules that a page names, within the package."""
    return [name for name in re.findall(r"`([\w/]+\.pyi?)`", page) if "/" in name]


def test_the_page_on_the_trunk_names_modules_of_the_trunk_that_exist() -> None:
    page = (ROOT / "docs" / "core.md").read_text("utf-8")
    named = [name for name in modules_named(page) if not name.startswith(("tests/", "scripts/"))]
    assert len(named) > 30
    assert [name for name in named if not (PACKAGE / name).exists() or name.startswith("features/")] == []
    # A word alone, such as `encoder.py`, is a module of the room named before; these are those of a feature.
    of_features = {"store.py", "kind.py", "cells.py", "with_verify.py", "test_kernels.py"}
    alone = {*re.findall(r"`(\w+\.py)`", page)} - of_features
    assert alone <= {path.name for path in PACKAGE.rglob("*.py") if "features" not in path.parts}


def names_placed(page: str) -> list[tuple[str, str]]:
    """The names that a page says to be in a module, each with the module: in its table of registries, and as in
    "`KINDS` (`outputs/kinds.py`)"."""
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| `([\w/]+\.py)` \|", page, re.MULTILINE)
    placed = [(name, module) for names, module in rows for name in re.findall(r"`(\w+)`", names)]
    return placed + re.findall(
        r"`([A-Z]\w+)`(?:,? (?:in|of)|,? \()\s?`([\w/]+/\w+\.py|errors\.py|result\.py)`(?! says)", page
    )


@pytest.mark.parametrize(("page", "least"), [(ROOT / "docs" / "core.md", 35), (ROOT / "CONTRIBUTING.md", 8)])
def test_the_pages_for_developers_say_where_a_name_is_defined(page: Path, least: int) -> None:
    placed = names_placed(page.read_text("utf-8"))
    assert len(placed) >= least
    for name, module in placed:
        text = next(path for path in (PACKAGE / module, ROOT / module) if path.exists()).read_text("utf-8")
        assert re.search(rf"^(class|def) {name}\b|^{name}\b[^=\n]*=", text, re.MULTILINE), (name, module)


def test_every_fault_of_the_mutants_is_still_a_line_of_the_package() -> None:
    assert list(mutants.faults()) == []


def test_faults_of_features_are_found_by_tests_that_go_with_them() -> None:
    for path in ROOT.glob("tests/features/**/mutants.json"):
        folder = path.parent.relative_to(ROOT).as_posix()
        for *_, tests in json.loads(path.read_text("utf-8")):
            for test in tests.split(" -k ")[0].split():
                if test.startswith("tests/features/"):
                    assert re.fullmatch(rf"{folder}(/(?!with_).*)?", test), f"{path} names {test}"


# What the checks above have to see: a module, a line that is put into it, and the check that fails then.
WRONG = [
    ("storage/files.py", "from ckptconv.formats import detect", house.upwards),
    ("tensors/lazy.py", "from ckptconv import options, plan", house.upwards),
    ("errors.py", "from .storage.paths import join", house.upwards),
    ("tensors/dtypes.py", "from ckptconv.tensors.lazy import View", house.cycles),
    ("features/dcp/locate.py", "def later():\n    from ckptconv.features.dcp import read", house.cycles),
]


@pytest.mark.parametrize(("module", "line", "check"), WRONG)
def test_a_wrong_import_is_seen(
    module: str, line: str, check: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = house.nodes_of
    wrong = [node for node in ast.walk(ast.parse(line)) if isinstance(node, ast.Import | ast.ImportFrom)]
    monkeypatch.setattr(house, "nodes_of", lambda path: usual(path) + (wrong if path == PACKAGE / module else []))
    assert check()
