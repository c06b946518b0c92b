"""What is released: a source archive, and of it a wheel, which installs and runs where nothing else of us is."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
# What building an archive adds.
MADE = {"PKG-INFO", "setup.cfg"}
BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"


def build(kind: str, source: Path, place: Path) -> Path:
    """The archive of this kind, "build_sdist" or "build_wheel", as a build front end makes it."""
    command = [sys.executable, "-c", BUILD, kind, str(place)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return place / done.stdout.splitlines()[-1]


def versioned() -> set[str]:
    """The files under version control; in an unpacked archive, those that it came with."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    names = listed.split("\0") if listed else (ROOT / "ckptconv.egg-info" / "SOURCES.txt").read_text().splitlines()
    return {name for name in names if (ROOT / name).is_file() and name not in MADE and ".egg-info" not in name}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source archive, made of a copy of what is under version control, and unpacked."""
    place = tmp_path_factory.mktemp("source")
    copy = place / "copy"
    for name in versioned():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes((ROOT / name).read_bytes())
    # What lies about where somebody works.
    for name in (".venv/lib/site.py", "build/bench/model.pt", "tests/__pycache__/x.pyc", "node_modules/x/index.js"):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes(b"not ours")
    archive = build("build_sdist", copy, place)
    with tarfile.open(archive) as tar:
        tar.extractall(place, filter="data")
    return place / archive.name.removesuffix(".tar.gz")


@pytest.fixture(scope="module")
def wheel(source: Path) -> Path:
    return build("build_wheel", source, source.parent)


def test_the_source_archive_holds_what_is_under_version_control_and_nothing_else(source: Path) -> None:
    found = {str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()}
    found = {name for name in found if name not in MADE and ".egg-info/" not in name}
    assert {"tests/data/dcp/zstd_w2/checkpoint/.metadata", "docs/formats.md", "CHANGELOG.md"} <= found
    assert found == versioned()


def test_the_wheel_holds_every_module_and_the_types_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name and ".data/" not in name}
        manual = {Path(name).name for name in archive.namelist() if "/share/man/man1/" in name}
    modules = {str(path.relative_to(ROOT)) for path in ROOT.glob("ckptconv/**/*.py")}
    assert manual == {path.name for path in ROOT.glob("docs/man/*.1")}
    tables = {str(path.relative_to(ROOT)) for path in ROOT.glob("ckptconv/cli/**/*.json")}
    maps = {str(path.relative_to(ROOT)) for path in ROOT.glob("ckptconv/structure/maps/catalogue/*.toml")}
    assert names == modules | tables | maps | {"ckptconv/py.typed", "ckptconv/inspection/page.html"}


def test_it_installs_and_runs_in_an_environment_of_its_own(wheel: Path, tmp_path: Path) -> None:
    place = tmp_path / "environment"
    venv.create(place, symlinks=True)
    python = place / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install"]
    install += ["--no-index", "--no-deps", "--no-compile", str(wheel)]
    subprocess.run(install, capture_output=True, check=True)
    # The libraries are those that are here; our own package is not seen that way.
    (home,) = place.glob("lib/python*/site-packages")
    (home / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    torch.save({"a": torch.arange(6.0)}, tmp_path / "model.pt")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(place / "bin" / "ckptconv"), "pt2safetensors", "model.pt"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "model.safetensors").stat().st_size > 24
    shown = [command[0], "inspect", "-q", "--html", "page.html", "model.safetensors"]
    subprocess.run(shown, cwd=tmp_path, env=environment, check=True)
    assert (tmp_path / "page.html").stat().st_size > 10_000
    code = "import ckptconv; print(ckptconv.__file__)"
    where = subprocess.check_output([python, "-c", code], cwd=tmp_path, env=environment, text=True)
    assert where.startswith(str(place))
