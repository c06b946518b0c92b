"""What every format promises: one suite, which the tests of each inherit."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
import torch
from cells import looking, of_features, offered, opened, verified
from checkpoints import assert_same, ckptconv_here, contents, done, load_with_aliases
from processes import bare
from stores import FAR

import ckptconv
from ckptconv import CorruptError
from ckptconv.formats.detect import open_source
from ckptconv.formats.registered import DESCRIBING
from ckptconv.options.table import OPTIONS

QUIETLY = ("--no-fsync", "--quiet")
IMPORTED = """
import sys
from ckptconv.cli.main import main
try:
    main(sys.argv[1:])
finally:
    print([name for name in ("torch", "pickle", "dill", "deepspeed") if name in sys.modules])
"""


class FormatSuite:
    """Inherit it, say which command converts the format, write a checkpoint, and say what comes out of it."""

    command: str
    # What files with weights are called.
    weights = "*"
    shards: tuple[str, ...] = ("--max-shard-size", "300KB")
    family: str

    def write(self, place: Path) -> Path:
        """Write a checkpoint below `place`, and return the path to convert."""
        raise NotImplementedError

    def expected(self, checkpoint: Path) -> Mapping[str, torch.Tensor]:
        """The tensors that come out, as the program that the format is of loads them."""
        raise NotImplementedError

    # Where the checkpoint of a class was written, and its path from there.
    written: ClassVar[dict[type[FormatSuite], tuple[Path, Path]]] = {}

    @pytest.fixture
    def checkpoint(self, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """A copy, which may be spoilt, of the one that is written once."""
        if type(self) not in self.written:
            place = tmp_path_factory.mktemp("written")
            self.written[type(self)] = place, self.write(place).relative_to(place)
        place, path = self.written[type(self)]
        shutil.copytree(place, tmp_path / "in", symlinks=True)
        return tmp_path / "in" / path

    def convert(self, source: object, output: object, *options: object) -> None:
        done(ckptconv_here(self.command, source, output, *QUIETLY, *self.shards, *options))

    def output(self, tmp_path: Path) -> Path:
        """The output: a directory of shards."""
        return tmp_path / "out"

    def loaded(self, output: Path) -> dict[str, torch.Tensor]:
        return load_with_aliases(output)

    def test_every_tensor_comes_out_and_verifies(self, checkpoint: Path, tmp_path: Path) -> None:
        before = contents(tmp_path)
        assert open_source(checkpoint).family == self.family
        for command in looking():
            assert ckptconv_here(command, checkpoint, "--json").json["format"], command
        output = self.output(tmp_path)
        self.convert(checkpoint, output, "--dry-run")
        assert contents(tmp_path) == before
        self.convert(checkpoint, output)
        assert_same(self.loaded(output), dict(self.expected(checkpoint)))
        assert all(verification.bytes_compared > 0 for verification in verified(checkpoint, output))

    def test_the_same_input_gives_the_same_bytes_and_is_left_alone(self, checkpoint: Path, tmp_path: Path) -> None:
        before = contents(tmp_path / "in")
        made: list[Any] = []
        for _ in range(2):
            output = self.output(tmp_path)
            self.convert(checkpoint, output)
            made.append(output.read_bytes() if output.is_file() else contents(output))
            output.unlink() if output.is_file() else shutil.rmtree(output)
        assert made[0] == made[1]
        assert contents(tmp_path / "in") == before

    def test_it_reads_and_loads_as_it_is_converted(self, checkpoint: Path, tmp_path: Path) -> None:
        expected = dict(self.expected(checkpoint))
        for reads in of_features("reads"):
            reads(checkpoint, expected)
        for ck in opened(checkpoint):
            for path in contents(tmp_path / "in"):
                os.utime(tmp_path / "in" / path, ns=(1, 1))
            with pytest.raises(CorruptError, match="changed"):
                ck.get_tensors()

    @FAR
    def test_a_remote_checkpoint_is_converted_read_and_loaded_alike(self, checkpoint: Path, tmp_path: Path) -> None:
        store, root = fsspec.filesystem("memory"), f"/{type(self).__name__}"
        for name, data in contents(tmp_path / "in").items():
            store.pipe_file(f"{root}/{name}", data)
        far = f"memory:/{root}/{checkpoint.relative_to(tmp_path / 'in')}".removesuffix("/.")
        expected = dict(self.expected(checkpoint))
        self.convert(far, self.output(tmp_path))
        assert_same(self.loaded(self.output(tmp_path)), expected)
        for reads in of_features("reads"):
            reads(far, expected)
        store.rm(root, recursive=True)

    def test_its_files_are_the_same_without_being_written(self, checkpoint: Path, tmp_path: Path) -> None:
        options = {"max_shard_size": "300KB", "dtype": "fp16"}
        ckptconv.convert(checkpoint, tmp_path / "plain", fsync=False, **options)
        written = contents(tmp_path / "plain")
        del written[".ckptconv-manifest.json"]
        for files in offered(checkpoint, **options):
            assert {name: files.read_bytes(name) for name in files} == written
        for suffix in DESCRIBING:
            ckptconv.convert(checkpoint, tmp_path / f"x{suffix}", fsync=False, **options)
            for files in offered(tmp_path / f"x{suffix}"):
                assert {name: files.read_bytes(name) for name in files} == written

    def test_parts_make_what_one_process_makes(self, checkpoint: Path, tmp_path: Path) -> None:
        if "part" not in OPTIONS:
            pytest.skip("there are no parts")
        self.convert(checkpoint, tmp_path / "whole")
        for part in ("1/2", "0/2"):
            self.convert(checkpoint, tmp_path / "parts", "--part", part)
        assert ckptconv_here("finish", tmp_path / "parts").code == 0
        assert contents(tmp_path / "parts") == contents(tmp_path / "whole")

    def test_a_file_that_is_cut_is_corrupt_and_nothing_is_written(self, checkpoint: Path, tmp_path: Path) -> None:
        files = [path for path in (tmp_path / "in").rglob(self.weights) if path.is_file()]
        largest = max(files, key=lambda path: path.stat().st_size)
        with largest.open("r+b") as file:
            file.truncate(largest.stat().st_size // 10)
        output = self.output(tmp_path)
        run = ckptconv_here(self.command, checkpoint, output, *QUIETLY)
        assert run.code == 4, run
        assert largest.name in run.err
        assert not output.exists()

    def test_nothing_that_it_names_is_imported(self, checkpoint: Path, tmp_path: Path) -> None:
        done = bare().run(IMPORTED, self.command, checkpoint, self.output(tmp_path), *QUIETLY, *self.shards)
        assert done.stdout == "[]\n", done.stderr
