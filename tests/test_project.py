"""What stands around the package (extras, workflows, site, image, hooks, recipe) agrees with it and with the rest."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from ckptconv.process import has_feature
from ckptconv.storage.packed import UNPACKING

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import site_pages  # noqa: E402
import smoke  # noqa: E402
import test_pythons as pythons  # noqa: E402

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
EXTRAS = PROJECT["optional-dependencies"]
# Extras of those who work on ckptconv.
OURS = {"test", "dev"}
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


class Loader(yaml.SafeLoader):
    """YAML with tags that name Python's, as mkdocs has them."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)


def read(name: str) -> Any:
    return yaml.load((ROOT / name).read_text(), Loader)


# ------------------------------------------------------------------------------------------------------- the package


def test_torch_is_an_extra_and_no_dependency() -> None:
    assert not [each for each in PROJECT["dependencies"] if each.startswith("torch")]
    assert EXTRAS["torch"] == ["torch>=2.0,<3"]


def test_all_is_every_extra_of_a_user() -> None:
    (every,) = EXTRAS["all"]
    listed = re.fullmatch(r"ckptconv\[(.*)\]", every)
    assert listed
    assert listed[1].split(",") == sorted(set(EXTRAS) - OURS - {"all"})


def test_every_extra_is_explained_in_the_readme() -> None:
    install = (ROOT / "README.md").read_text().partition("## Install")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \|", install, re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", " ".join(rows))) == set(EXTRAS) - OURS


def test_every_extra_that_a_message_names_exists() -> None:
    package = "".join(path.read_text() for path in (ROOT / "ckptconv").rglob("*.py"))
    named = re.findall(r"\binstall\(\"(\w+)\"\)", package)
    assert set(named) >= ({"zstd"} if has_feature(UNPACKING) else set())
    assert set(named) <= set(EXTRAS)
    assert set(re.findall(r"\bextra=\"(\w+)\"", package)) <= set(EXTRAS)


def test_extras_are_tried_on_each_python() -> None:
    assert set(pythons.EXTRAS) == set(EXTRAS) - OURS - {"all", "torch"}
    for requirement in [
        *PROJECT["dependencies"],
        *(each for name in set(EXTRAS) - OURS - {"all"} for each in EXTRAS[name]),
    ]:
        name = re.split(r"[<>=]", requirement)[0]
        assert ">=" in requirement, f"{requirement} has no lower bound"
        assert name in smoke.LIBRARIES


def test_pythons_are_the_same_everywhere() -> None:
    classified = [each.rpartition(" ")[2] for each in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", each)]
    assert tuple(classified) == pythons.VERSIONS
    assert PROJECT["requires-python"] == f">={classified[0]}"
    ci = read(".github/workflows/ci.yml")["jobs"]
    assert ci["test"]["strategy"]["matrix"]["python"] == classified
    assert ci["libraries"]["strategy"]["matrix"] == {"python": classified, "libraries": list(pythons.RESOLUTIONS)}
    images = re.findall(r"^FROM python:([\d.]+)-slim", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert images
    assert set(images) <= set(classified)


def test_the_version_is_the_same_everywhere() -> None:
    assert read("CITATION.cff")["version"] == PROJECT["version"]
    assert read("conda/recipe/recipe.yaml")["context"]["version"] == PROJECT["version"]
    assert f"## {PROJECT['version']}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_recipe_asks_for_what_the_package_asks_for() -> None:
    recipe = read("conda/recipe/recipe.yaml")
    asked = [each.replace(" ", "") for each in recipe["requirements"]["run"]]
    # One package serves every Python, so what only some need is always asked for.
    assert asked == ["python>=${{python_min}}", *(each.partition(";")[0] for each in PROJECT["dependencies"])]
    assert f">={recipe['context']['python_min']}" == PROJECT["requires-python"]


def test_addresses_are_those_of_one_project() -> None:
    home = PROJECT["urls"]["Homepage"]
    owner, name = home.split("/")[-2:]
    assert set(PROJECT["urls"]) >= {"Homepage", "Repository", "Documentation", "Issues", "Changelog"}
    for address in [*PROJECT["urls"].values(), site_pages.FILES, read("CITATION.cff")["repository-code"]]:
        assert address.startswith((home, f"https://{owner}.github.io/{name}/"))


# ----------------------------------------------------------------------------------------------------- the workflows


def steps() -> list[tuple[str, dict[str, Any]]]:
    """Workflow and step of every step."""
    found = []
    for path in WORKFLOWS:
        for job in yaml.safe_load(path.read_text())["jobs"].values():
            found += [(path.name, step) for step in job["steps"]]
    return found


def test_workflows_call_targets_and_scripts_that_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    called = " ".join(step.get("run", "") for _, step in steps())
    assert (
        {"lint", "test", "docs", "dist", "coverage", "demo"} <= set(re.findall(r"\bmake ([\w-]+)", called)) <= targets
    )
    for script in re.findall(r"\bscripts/\w+\.py\b", called):
        assert (ROOT / script).is_file()
    for path in re.findall(r"\$PWD/([\w./-]+)", called):
        assert (ROOT / path).exists()


def test_actions_are_pinned_and_permissions_are_the_least() -> None:
    for workflow, step in steps():
        if "uses" in step:
            assert re.fullmatch(r"[\w-]+/[\w-]+@(v\d+|release/v\d+)", step["uses"]), f"{workflow}: {step['uses']}"
    for path in WORKFLOWS:
        workflow = yaml.safe_load(path.read_text())
        assert workflow["permissions"] in ({}, {"contents": "read"})
        for job in workflow["jobs"].values():
            assert job["timeout-minutes"]
    release = read(".github/workflows/release.yml")["jobs"]
    assert release["publish"]["permissions"] == {"id-token": "write"}
    assert [name for name, job in release.items() if "attestations" in job["permissions"]] == ["build"]
    assert "secrets." not in "".join(path.read_text() for path in WORKFLOWS)


def test_the_makefile_says_what_each_target_does() -> None:
    makefile = (ROOT / "Makefile").read_text()
    (phony,) = re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    assert set(phony.split()) - {"help"} == set(re.findall(r'@echo "make ([\w-]+) ', makefile))


@pytest.mark.parametrize(
    "path", sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("[0-9]*.yml")), ids=lambda path: path.stem
)
def test_forms_for_issues_ask_by_fields_of_their_own(path: Path) -> None:
    form = yaml.safe_load(path.read_text())
    assert {"name", "description", "body"} <= set(form)
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert len({field["id"] for field in fields}) == len(fields) == len({f["attributes"]["label"] for f in fields})
    assert any(field.get("validations", {}).get("required") for field in fields)


# ---------------------------------------------------------------------------------------------- site, image and hooks


def pages(entry: Any) -> list[str]:
    """The pages of a part of mkdocs' nav, in order."""
    if isinstance(entry, str):
        return [entry]
    return [page for each in (entry.values() if isinstance(entry, dict) else entry) for page in pages(each)]


def test_the_site_has_every_page_once() -> None:
    config = read("mkdocs.yml")
    own = [str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")]
    assert sorted(pages(config["nav"])) == sorted(
        [*own, *(page for page in site_pages.OUTSIDE.values() if page.endswith(".md"))]
    )
    assert config["strict"] is True
    assert config["theme"]["font"] is False
    assert [ROOT / hook for hook in config["hooks"]] == [Path(site_pages.__file__)]


@pytest.mark.parametrize(
    ("target", "page"),
    [
        (f"{site_pages.FILES}docs/remote.md", "remote.md"),
        (f"{site_pages.FILES}README.md", "index.md"),
        (f"{site_pages.PICTURES}docs/time-pt.svg", "time-pt.svg"),
        ("../SECURITY.md", "SECURITY.md"),
        ("docs/formats.md", "docs/formats.md"),
        ("../formats.md", "../formats.md"),
        ("internals/formats.md", "internals/formats.md"),
        ("../examples/pipeline/Makefile", f"{site_pages.FILES}examples/pipeline/Makefile"),
        ("remote.md", "remote.md"),
        ("https://example.org/", "https://example.org/"),
    ],
)
def test_links_stay_on_the_site(target: str, page: str) -> None:
    assert site_pages.on_page_markdown(f"[x]({target}#y)") == f"[x]({page}#y)"


def test_links_of_pages_outside_docs_stay_on_the_site() -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_uri="SECURITY.md"))
    assert site_pages.on_page_markdown("[x](docs/formats.md#y)", page=page) == "[x](formats.md#y)"


def test_the_image_is_made_of_what_the_build_may_see_and_is_not_root() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text()
    seen = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = [shlex.split(line)[1:-1] for line in re.findall(r"^COPY (?!--from).*$", dockerfile, re.MULTILINE)]
    assert {name for names in copied for name in names} == seen
    assert all((ROOT / name).exists() for name in seen)
    (extras,) = re.findall(r"^ARG EXTRAS=(.*)$", dockerfile, re.MULTILINE)
    assert set(extras.split(",")) == set(EXTRAS) - OURS - {"all", "torch"}
    assert re.search(r"^USER [1-9]\d*:", dockerfile, re.MULTILINE)


@pytest.mark.parametrize("hook", read(".pre-commit-hooks.yaml"), ids=lambda hook: hook["id"])
def test_hooks_for_other_projects_refuse_what_they_should(
    hook: dict[str, Any], program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(program), prepend=":")
    assert hook["language"] == "python"
    sound = next((ROOT / "tests/data/torch").rglob("*.pt"))
    attack = tmp_path / "attack of ours.pt"
    attack.write_bytes(b"\x80\x02cposix\nsystem\nX\x04\x00\x00\x00true\x85R.")
    assert re.search(hook["files"], attack.name)
    for files, code in (([sound], 0), ([attack, sound], 3)):
        done = subprocess.run([*shlex.split(hook["entry"]), *files], capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stderr
    assert "is an attack" in done.stderr
    assert not list(tmp_path.glob("*.safetensors"))


# --------------------------------------------------------------------------------------------------------- the demo


@pytest.mark.parametrize(
    "newer",
    [
        r"\bmapfile\b", r"\breadarray\b", r"declare -A", r"\$\{\w+,,", r"\$\{\w+\^\^", r"EPOCHREALTIME", r"-printf\b",
        r"\bnumfmt\b", r"stat -c", r"du -b", r"date \+%.*N", r"sed -i ", r"/proc/", r"readlink -f", r"&>>",
        r"\bsync \"",
    ],
)  # fmt: skip
def test_the_demo_is_for_bash_3_and_the_tools_of_bsd(newer: str) -> None:
    assert not re.search(newer, (ROOT / "scripts/demo.sh").read_text())
