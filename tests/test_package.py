"""What is released: a source archive, and of it a wheel, which installs and runs where nothing else of us is."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pip
import pytest
import torch
from cells import of_features

ROOT = Path(__file__).parents[1]
# What building an archive adds.
MADE = {"PKG-INFO", "setup.cfg"}
# Archives are compressed little, which takes a tenth of the time.
BUILD = """
import sys, tarfile
from setuptools import build_meta
tarfile.TarFile.gzopen.__func__.__defaults__ = ("r", None, 1)
print(getattr(build_meta, sys.argv[1])(sys.argv[2]))
"""


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
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source archive, made of a copy of what is under version control."""
    place = tmp_path_factory.mktemp("source")
    copy = place / "copy"
    copied = {copy / name: (ROOT / name).read_bytes() for name in versioned()}
    # What lies about where somebody works.
    for name in (".venv/lib/site.py", "build/bench/model.pt", "tests/__pycache__/x.pyc", "node_modules/x/index.js"):
        copied[copy / name] = b"not ours"
    for folder in {path.parent for path in copied}:
        folder.mkdir(parents=True, exist_ok=True)
    for path, data in copied.items():
        path.write_bytes(data)
    return build("build_sdist", copy, place)


def names_in(archive: Path) -> dict[str, tarfile.TarInfo]:
    """The files in the source archive, by their names in the directory that is its root."""
    with tarfile.open(archive) as tar:
        return {each.name.partition("/")[2]: each for each in tar if not each.isdir()}


@pytest.fixture(scope="module")
def wheel(archive: Path) -> Path:
    """The wheel, made of what is in the source archive, but for the tests."""
    wanted = [each for name, each in names_in(archive).items() if not name.startswith("tests/")]
    with tarfile.open(archive) as tar:
        tar.extractall(archive.parent, wanted, filter="data")
    return build("build_wheel", archive.parent / archive.name.removesuffix(".tar.gz"), archive.parent)


def test_the_source_archive_holds_what_is_under_version_control_and_nothing_else(archive: Path) -> None:
    found = {name for name in names_in(archive) if name not in MADE and ".egg-info/" not in name}
    assert {"tests/data/torch/make.py", "docs/formats.md", "CHANGELOG.md"} <= found
    assert found == versioned()


def test_the_wheel_holds_every_module_and_the_types_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name and ".data/" not in name}
        manual = {Path(name).name for name in archive.namelist() if "/share/man/man1/" in name}
    modules = {str(path.relative_to(ROOT)) for path in ROOT.glob("ckptconv/**/*.py*") if path.suffix in (".py", ".pyi")}
    assert manual == {path.name for path in ROOT.glob("docs/man/*.1")}
    tables = {str(path.relative_to(ROOT)) for path in ROOT.glob("ckptconv/**/*.json")}
    maps = {str(path.relative_to(ROOT)) for path in ROOT.glob("ckptconv/**/*.toml")}
    texts = {str(path.relative_to(ROOT)) for path in ROOT.glob("ckptconv/**/*.txt")}
    pages = {str(path.relative_to(ROOT)) for path in ROOT.glob("ckptconv/**/*.html")}
    assert names == modules | tables | maps | texts | pages | {"ckptconv/py.typed"}


def test_it_installs_and_runs_in_an_environment_of_its_own(wheel: Path, tmp_path: Path) -> None:
    place = tmp_path / "environment"
    venv.create(place, symlinks=True)
    python = place / "bin" / "python"
    # The pip that is here, run by the Python there.
    install = [python, Path(pip.__file__).parent, "install", "--no-index", "--no-deps", "--no-compile", wheel]
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
    # A page has a template, which is a file of the package.
    for words in itertools.chain(*of_features("PAGES")):
        page = [command[0], *words, "page.html", "model.safetensors", "-q"]
        subprocess.run(page, cwd=tmp_path, env=environment, check=True)
        assert (tmp_path / "page.html").stat().st_size > 10_000
    code = "import ckptconv; print(ckptconv.__file__)"
    where = subprocess.check_output([python, "-c", code], cwd=tmp_path, env=environment, text=True)
    assert where.startswith(str(place))
