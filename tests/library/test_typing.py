"""What type checkers and editors know of the calls: the options of the table, and no others."""

from __future__ import annotations

import inspect
import subprocess
import sys
import venv
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

import pytest
import torch
from cells import FEATURES

import ckptconv

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import keywords as script  # noqa: E402

PROGRAMS = [Path(__file__).with_name("typed_program.py"), *FEATURES.glob("*/typed_*.py")]
CALLS = {
    name: getattr(ckptconv, name)
    for name in ckptconv.__all__
    if inspect.isfunction(getattr(ckptconv, name)) and name not in ("flatten", "unflatten")
}


def test_the_types_are_those_of_the_table() -> None:
    assert script.STUB.read_text("utf-8") == script.text(), "run scripts/keywords.py"


def test_every_option_has_a_type_that_python_can_evaluate(monkeypatch: pytest.MonkeyPatch) -> None:
    stub = ModuleType("stub")
    monkeypatch.setitem(sys.modules, "stub", stub)
    exec(compile(script.text(), "keywords.pyi", "exec"), vars(stub))
    for name, (table, _) in script.tables().items():
        assert set(get_type_hints(getattr(stub, name))) == set(table), name
        assert set(get_type_hints(getattr(ckptconv, name))) == set(table), name


@pytest.mark.parametrize("name", CALLS)
def test_a_call_takes_what_its_types_say(name: str) -> None:
    call: Any = CALLS[name]
    shown = inspect.signature(call).parameters
    written = inspect.signature(inspect.unwrap(call)).parameters
    table, _ = script.tables()[str(written["options"].annotation).removeprefix("Unpack[").removesuffix("]")]
    assert set(shown) == {*written, *table} - {"options"}
    for option, parameter in shown.items():
        if option in table:
            assert (parameter.annotation, parameter.default) == (table[option].accepts, table[option].default)
    with pytest.raises(ckptconv.UsageError, match="no option 'no_such_option'"):
        call("none.pt", no_such_option=1)


def test_dtypes_of_torch_are_what_their_type_says() -> None:
    for name in ("is_floating_point", "is_complex", "to_real"):
        assert hasattr(torch.bfloat16, name)


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with nothing but ckptconv in it: no stubs, and none of its libraries."""
    place = tmp_path_factory.mktemp("user")
    venv.create(place, symlinks=True)
    (home,) = place.glob("lib/python*/site-packages")
    (home / "ckptconv").symlink_to(ROOT / "ckptconv")
    return place / "bin" / "python"


def test_a_users_program_passes_mypy_and_mistakes_do_not(python: Path, tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    cache = ROOT / ".mypy_cache" / "user"
    command = [
        *(sys.executable, "-m", "mypy", "--strict", "--config-file=", "--cache-dir", cache),
        *("--python-executable", python, "--python-version", "3.10", *PROGRAMS),
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert done.stdout.startswith("Success: no issues found")
