"""Formats of other packages, which are found by their entry points."""

from __future__ import annotations

import re
import struct
import sys
from pathlib import Path

import pytest
import torch
from cells import VERIFY, of_features, trained, verified_here, verifying
from checkpoints import ckptconv, ckptconv_here, done
from reading import state_of
from safetensors.torch import load_file

import ckptconv as library
from ckptconv.errors import FailedError, UsageError
from ckptconv.formats.detect import open_source

DOCS = Path(__file__).parents[3] / "docs" / "plugins.md"
# The example of the documentation.
MODULE = next(code for code in re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL) if "VECTOR1" in code)
NUMBERS = [1.0, -2.5, 3.25]


def install(site: Path, module: str, name: str = "vector") -> None:
    """Put a package into `site` as pip does."""
    site.mkdir(exist_ok=True)
    (site / f"ckptconv_{name}.py").write_text(module)
    told = site / f"ckptconv_{name}-1.0.dist-info"
    told.mkdir()
    (told / "METADATA").write_text(f"Metadata-Version: 2.1\nName: ckptconv-{name}\nVersion: 1.0\n")
    (told / "entry_points.txt").write_text(f"[ckptconv.formats]\n{name} = ckptconv_{name}\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where packages are installed, for this process and those that it starts."""
    place = tmp_path / "site"
    place.mkdir()
    monkeypatch.syspath_prepend(place)
    monkeypatch.setenv("PYTHONPATH", str(place), prepend=":")
    for name in ("vector", "other"):
        monkeypatch.delitem(sys.modules, f"ckptconv_{name}", raising=False)
    return place


def a_vector(path: Path) -> Path:
    path.write_bytes(b"VECTOR1\n" + struct.pack("<3f", *NUMBERS))
    return path


def is_vector(path: Path) -> bool:
    found = load_file(path)
    return list(found) == ["vector"] and torch.equal(found["vector"], torch.tensor(NUMBERS))


@verifying
def test_a_file_of_it_is_converted_and_verified_on_the_command_line(site: Path, tmp_path: Path) -> None:
    install(site, MODULE)
    path, output = a_vector(tmp_path / "a.vec"), tmp_path / "model"
    done(ckptconv("pt2safetensors", path, output, *VERIFY))
    assert is_vector(output / "model.safetensors")
    verified_here(path, output)
    (output / "model.safetensors").write_bytes((output / "model.safetensors").read_bytes()[:-1] + b"\0")
    assert ckptconv_here("verify", path, output).code == 1
    source = open_source(path)
    assert (source.format, source.family) == ("vector", "vector")


def test_the_library_takes_it(site: Path, tmp_path: Path) -> None:
    install(site, MODULE)
    path = a_vector(tmp_path / "a.vec")
    for family in ("", "vector", "torch"):
        output = tmp_path / f"{family}.safetensors"
        library.convert(path, output, family=family)
        assert is_vector(output), family
    assert torch.equal(state_of(path)["vector"], torch.tensor(NUMBERS))


def test_other_commands_name_the_one_that_takes_it(site: Path, tmp_path: Path) -> None:
    install(site, MODULE)
    path = a_vector(tmp_path / "a.vec")
    formats = (pair for commands in of_features("FORMATS") for pair in commands.items())
    for command, output in formats:
        run = ckptconv_here(command, path, tmp_path / output)
        run.refused(2, f"{path} is a file of one vector.", f"Use: ckptconv pt2safetensors {path}")


def test_who_asks_for_it_by_name_gets_it_whatever_the_file_is_called(site: Path, tmp_path: Path) -> None:
    install(site, MODULE.replace("CERTAIN", "POSSIBLE"))
    path = a_vector(tmp_path / "a.pt")
    assert open_source(path, family="vector").family == "vector"


def test_what_is_known_by_its_name_does_not_ask_for_it(site: Path, tmp_path: Path) -> None:
    install(site, "raise RuntimeError")
    torch.save({"w": torch.ones(2)}, tmp_path / "model.pt")
    assert open_source(tmp_path / "model.pt").family == "torch"
    torch.save({"w": torch.ones(2)}, tmp_path / "model")
    assert open_source(tmp_path / "model").family == "torch"
    for step in trained():
        assert open_source(step).family


def test_the_surest_of_several_is_taken(site: Path, tmp_path: Path) -> None:
    install(site, MODULE)
    install(site, MODULE.replace("CERTAIN", "LIKELY"), "other")
    assert open_source(a_vector(tmp_path / "a.vec")).family == "vector"


def test_a_name_that_nobody_has_is_told(site: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="The format 'vector' is not known"):
        open_source(a_vector(tmp_path / "a.vec"), family="vector")


@pytest.mark.parametrize(
    ("module", "why"),
    [
        ("import no_such_module", "load fails with ModuleNotFoundError: No module named 'no_such_module'"),
        ("raise RuntimeError('out of order')", "load fails with RuntimeError: out of order"),
        ("def sniff(probe): pass", "it has no read"),
        (MODULE.replace("probe.head[0]", "probe.no_such"), "sniff fails with AttributeError"),
        (MODULE.replace("return Guess(", "return str("), "sniff fails with TypeError"),
        (
            MODULE.replace("return None", "return 1").replace("VECTOR1", "VECTOR2"),
            "its sniff must return a Guess, not int",
        ),
        (MODULE.replace("// 4", "// 0"), "read fails with ZeroDivisionError"),
        (MODULE.replace("return Source(", "return dict("), "its read must return a Source, not dict"),
        ("import sys; sys.exit(0)", "load fails with SystemExit: 0"),
        (MODULE.replace("return Guess(CERTAIN", "return Guess('sure'"), "sure of its Guess must be int, not str"),
        (MODULE.replace("path=place.path", "path=None"), "path of its Source must be str, not NoneType"),
    ],
)
def test_what_is_wrong_with_it_is_one_sentence(module: str, why: str, site: Path, tmp_path: Path) -> None:
    install(site, module)
    path = a_vector(tmp_path / "a.vec")
    with pytest.raises(FailedError) as caught:
        open_source(path)
    assert caught.value.message.startswith("The format 'vector' of the package ckptconv-vector cannot be")
    assert why in caught.value.message
    run = ckptconv_here("pt2safetensors", path, tmp_path / "out.safetensors")
    assert run.code == FailedError.exit_code
    assert why in run.err


def test_what_fails_later_may_be_its_mistake(site: Path, tmp_path: Path) -> None:
    install(site, MODULE.replace('DTYPES["float32"]', "3"))
    run = ckptconv_here("convert", a_vector(tmp_path / "a.vec"), tmp_path / "out.safetensors")
    run.refused(FailedError.exit_code, "a bug in the package ckptconv-vector, which provides the format 'vector'")
    assert not (tmp_path / "out.safetensors").exists()
