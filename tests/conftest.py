"""What holds for all tests: no test fails because the machine is busy. And what tests of many modules share."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
from collections.abc import Generator
from pathlib import Path

import pytest
from effort import EFFORT, TIMES
from hypothesis import HealthCheck, settings

_WISHES = ("COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR")

# What a user or a CI wants of terminals and of ckptconv is not what the tests ask for.
for _name in [name for name in os.environ if name in _WISHES or name.startswith("CKPTCONV_")]:
    if _name != EFFORT:
        del os.environ[_name]
# Compiled modules are kept: tests start Python some thousand times, and each worker imports all of them.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# What is written here need not outlive the machine: whether it is asked to be kept is seen, the disk not waited for.
os.fsync = os.fstat  # type: ignore[assignment]
# Files are made a million times: where memory has room for those of the tests, they are written to it.
_MEMORY, _ROOM = Path("/dev/shm"), 8 << 30
if _MEMORY.is_dir() and os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free >= _ROOM:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(_MEMORY))
# Where the tests run in the background of a script, signals of the keyboard are ignored, by all processes from then on.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile(
    "any machine",
    deadline=None,
    derandomize=TIMES == 1,
    max_examples=50 * TIMES,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("any machine")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Let torch work in one thread: its threads wait for each other by spinning, and there are other workers.

    Garbage is not looked for while all is imported, and rarely among it afterwards: that would take a tenth of the
    time. It counts as old without having been walked. It does not stay frozen, as it would be counted for each
    conversion.
    """
    gc.disable()
    collected = yield
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    gc.freeze()
    gc.unfreeze()
    gc.set_threshold(700, 10, 100)
    gc.enable()
    return collected


@pytest.hookimpl(tryfirst=True)
def pytest_unconfigure() -> None:
    """Look for what the last tests left, which pytest does twice from here on, and takes a second each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory to work in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that `convert_sharded` converts to seven files."""
    from checkpoints import seven_shards

    return seven_shards(tmp_path_factory.mktemp("model") / "model.pt", rows=25)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A directory of the user's that nothing here may touch."""
    from strangers import precious

    return precious(tmp_path / "home")


@pytest.fixture(scope="session")
def program() -> Path:
    """A directory for the PATH with `ckptconv`, which starts at once."""
    from processes import prepared

    return prepared().programs
