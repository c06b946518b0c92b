"""What tests share: the checkpoints in tests/data, and running the command line as a user does."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from processes import PROGRAM, prepared
from safetensors import safe_open
from safetensors.torch import load_file

from ckptconv.cli import commands
from ckptconv.cli import main as main_
from ckptconv.process import has_feature

TESTS = Path(__file__).parent
DATA = TESTS / "data"


class OfFeature:
    """The checkpoints among the tests of a feature. In a copy without it, a test that takes one is skipped.

    `needs` has the names of those that another feature reads too, with its name: without it, they are not listed.
    """

    def __init__(self, feature: str, needs: Mapping[str, str]) -> None:
        self._feature, self._place, self._needs = feature, TESTS / "features" / feature / "data", needs

    def _with(self, file: str) -> list[str]:
        """The names of those that have `file`, and are read here."""
        names = sorted(path.parent.name for path in self._place.glob(f"*/{file}"))
        return [name for name in names if name not in self._needs or has_feature(self._needs[name])]

    @property
    def names(self) -> list[str]:
        """The names of all; none without the feature."""
        return self._with("checkpoint")

    @property
    def cases(self) -> list[str]:
        """The names of those beside which the result of their own program is."""
        return self._with("expected.safetensors")

    def needed(self) -> None:
        """Skip the test if the feature is not here."""
        if not self._place.exists():
            pytest.skip(f"the feature {self._feature} is not here")

    def __truediv__(self, name: str) -> Path:
        self.needed()
        return self._place / name


ZERO = OfFeature("deepspeed", {"z3_bf16_legacyfmt_w2": "torch_stream"})
COMMAND = commands.app.made()


@dataclass
class Run:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    def refused(self, code: int, *words: object) -> str:
        """What a run says that ended with `code`: the error, which has all `words`."""
        assert self.code == code, self.out + self.err
        assert "Traceback" not in self.err, self.err
        missing = [word for word in map(str, words) if word not in self.err]
        assert not missing, self.err
        return self.err


def ckptconv(*arguments: object, timeout: float = 600, **kwargs: Any) -> Run:
    """Run the command line in a new interpreter, for what only that tells: its memory, and what it imports."""
    command = [sys.executable, "-m", "ckptconv", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False, **kwargs)
    return _checked(done.returncode, done.stdout, done.stderr)


def ckptconv_forked(*arguments: object, **options: Any) -> Run:
    """Run the command line in a process that starts at once (`prepared`); `options` are those of `Server.run`."""
    done = prepared().run(PROGRAM, *arguments, **options)
    return _checked(done.returncode, done.stdout, done.stderr)


def _checked(code: int, out: str, err: str) -> Run:
    assert "Traceback" not in err, err
    assert "bug in ckptconv" not in err, err
    return Run(code, out, err)


def ckptconv_here(*arguments: object) -> Run:
    """Run the command line in this process: ten times as fast, and the same but for what only a process has."""
    out, err = io.StringIO(), io.StringIO()
    # Typer builds its commands anew at every call.
    built = mock.patch.object(commands, "app", COMMAND)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    code = None
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), built:
            main_.main(list(map(str, arguments)))
    except SystemExit as ended:
        code = ended.code
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert isinstance(code, int)
    return _checked(code, out.getvalue(), err.getvalue())


def done(run: Run) -> Run:
    """A run that succeeded."""
    assert run.code == 0, run.err
    return run


def torch_file(directory: Path, tree: Any, name: str = "model.pt", **options: Any) -> Path:
    """A file of `torch.save`, with `options` of that."""
    torch.save(tree, directory / name, **options)
    return directory / name


def torch_loaded(path: Path, *, weights_only: bool = False) -> Any:
    """What torch loads of a file. It may warn of kinds of tensors that are in beta, or deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.load(path, weights_only=weights_only, map_location="cpu")


def copy_of(case: str, tmp_path: Path) -> Path:
    """A checkpoint of DeepSpeed that may be spoilt."""
    return Path(shutil.copytree(ZERO / case / "checkpoint", tmp_path / "checkpoint"))


def tag_of(checkpoint: Path) -> Path:
    return checkpoint / (checkpoint / "latest").read_text()


def metadata_of(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        return dict(file.metadata())


def load_with_aliases(path: Path) -> dict[str, torch.Tensor]:
    """An output, one file or a directory, with tied names put back from the alias record."""
    if path.is_dir():
        index = path / "model.safetensors.index.json"
        if index.exists():
            described = json.loads(index.read_text())
            names = sorted(set(described["weight_map"].values()))
            aliases = described["metadata"]
        else:
            names, aliases = ["model.safetensors"], metadata_of(path / "model.safetensors")
        tensors = {key: value for name in names for key, value in load_file(path / name).items()}
    else:
        tensors, aliases = load_file(path), metadata_of(path)
    for removed, kept in aliases.items():
        if isinstance(kept, str) and kept in tensors:
            tensors[removed] = tensors[kept]
    return tensors


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """What zero-to-fp32 makes of a dtype by default."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def assert_same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """The same names, and for each the same dtype, shape and bits."""
    assert set(got) == set(expected)
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype, name
        assert got[name].shape == tensor.shape, name
        assert torch.equal(bits(got[name]), bits(tensor)), name


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, so that NaN equals itself."""
    return tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


# Of `seven_shards`, with a limit of 4 kB for each row: of 1 MB, if nothing else is asked for.
SHARDS = 7


def seven_shards(path: Path, rows: int = 250) -> Path:
    """A model that is converted to seven shards, at `path`."""
    torch.save({f"layer{n}": torch.full((rows, 1000), float(n)) for n in range(SHARDS)}, path)
    return path


def contents(place: Path) -> dict[str, bytes]:
    """What the files below `place` hold, by their paths from there."""
    return {str(path.relative_to(place)): path.read_bytes() for path in place.rglob("*") if path.is_file()}


def model_and_shards(size: int) -> tuple[Any, Any]:
    """The fixtures `model` and `expected` of a module: a model, and the contents of its shards of `size` bytes."""

    @pytest.fixture(scope="module")
    def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
        return seven_shards(tmp_path_factory.mktemp("model") / "model.pt", rows=25)

    @pytest.fixture(scope="module")
    def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
        output = tmp_path_factory.mktemp("expected") / "out"
        done(ckptconv_here("pt2safetensors", model, output, "--max-shard-size", f"{size}B"))
        return contents(output)

    return model, expected


def a_torch_set(tensors: Mapping[str, torch.Tensor], directory: Path) -> None:
    """A sharded set of torch files, one for each of the first two tensors, with its index."""
    directory.mkdir()
    names = {f"pytorch_model-0000{number}-of-00002.bin": name for number, name in enumerate([*tensors][:2], 1)}
    for file, name in names.items():
        torch.save({name: tensors[name]}, directory / file)
    index = {"metadata": {}, "weight_map": {name: file for file, name in names.items()}}
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps(index))
