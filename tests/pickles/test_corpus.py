"""The corpus of hostile, broken and odd files: nothing runs, nothing explodes, nothing is misread."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from attacks import corpus
from attacks.corpus import CASES, Case
from attacks.directories import Directory
from attacks.ending import LARGE, Ending, ending_of, size_of
from attacks.every import ALL, ALL_DIRECTORIES, LIVE, W, loaded, written
from attacks.live import ODD
from cells import of_features
from effort import TIMES

import ckptconv
from ckptconv.process import has_feature

# What a file takes at most, in calls of functions.
MOST_CALLS = 4_000_000
# What the process that converts them takes at most.
MOST_MEMORY = 320 << 20
FAMILIES = sorted({case.family for case in ALL})


def filled(directory: Directory, place: Path) -> Path:
    """A directory of the corpus, in another of its name; the input of the conversion."""
    inside = place / directory.file / "in"
    inside.mkdir(parents=True)
    return directory.make(inside, str(place / "canary"))


def output_of(command: str, place: Path) -> Path:
    return place / ("model.pt" if command == "safetensors2pt" else "model.safetensors")


def test_the_manifest_says_what_the_corpus_is() -> None:
    assert corpus.MANIFEST.read_text() == corpus.manifest_text(), "python -m attacks.corpus --manifest, in tests/"
    assert len(CASES) >= 150
    assert Counter(case.exit for case in LIVE)[corpus.UNSAFE] > 90


def load_carelessly(path: Path) -> None:
    """Load a file with torch.load, or as programs load safetensors that a feature reads."""
    if path.suffix == ".pt":
        torch.load(path, weights_only=False)
        return
    for load in of_features("CARELESS"):
        load(path)


def be_a_victim(paths: Sequence[Path], canary: Path, told: Path) -> None:
    """Load every file, and tell the names of those that made the canary."""
    with told.open("w") as telling:
        for path in paths:
            with contextlib.suppress(BaseException):
                load_carelessly(path)
            if os.path.lexists(canary):
                print(path.name, file=telling, flush=True)
                shutil.rmtree(canary) if canary.is_dir() else canary.unlink()


@pytest.mark.filterwarnings("ignore")
def test_the_live_files_are_live(tmp_path: Path) -> None:
    """Else it would be no wonder that they do nothing here."""
    paths = [written(case, tmp_path) for case in ALL if case.live]
    for directory in ALL_DIRECTORIES:
        if directory.live:
            # The file alone, under the name of the directory.
            filled(directory, tmp_path)
            paths.append((tmp_path / directory.file / "in" / directory.live).rename(tmp_path / f"{directory.file}.pt"))
    victim = os.fork()  # what they do, they do to a process of its own
    if not victim:
        try:
            os.chdir(tmp_path)
            be_a_victim(paths, tmp_path / "canary", tmp_path / "told")
        finally:
            os._exit(0)
    os.waitpid(victim, 0)
    assert set((tmp_path / "told").read_text().split()) ^ {path.name for path in paths} == set()


def is_unnamed(case: Case | Directory) -> bool:
    """Whether it may be an attack, and no feature recognizes attacks: it is a file like others then, sound or not."""
    return case.exit == corpus.UNSAFE and not has_feature("attacks")


def assert_ended(case: Case | Directory, source: Path, output: Path, ending: Ending) -> Any:
    """A conversion ended as `case` says. What it wrote, if it wrote something."""
    assert ending.called < MOST_CALLS, case.file
    # Safetensors made of safetensors keep as data what a file for torch.load would have to call.
    assert ending.code == case.exit or (case.command, ending.code) == ("convert", corpus.DONE) or is_unnamed(case), (
        f"{case.file}: {ending.err}"
    )
    assert not ending.canary, case.file
    assert ending.peak < MOST_MEMORY, case.file
    assert "Traceback" not in ending.err, ending.err
    assert "bug in ckptconv" not in ending.err, ending.err
    if not ending.code:
        return loaded(output)
    assert ending.written == [], case.file
    assert len(ending.err.splitlines()) == 1, ending.err
    assert str(source) in ending.err or str(output) in ending.err, ending.err
    return None


def codes_of_reading(path: Path) -> set[int]:
    """The exit codes of the errors of features that read a checkpoint into programs; 0 for none."""
    codes = set()
    for read_all in of_features("read_all"):
        try:
            # It takes long, and loads in the same way again.
            read_all(path, briefly=size_of(path) > LARGE)
            codes.add(0)
        except ckptconv.CkptconvError as error:
            codes.add(error.exit_code)
    return codes


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", FAMILIES)
def test_every_file_ends_as_it_should_and_so_does_the_library(family: str, tmp_path: Path) -> None:
    cases = [case for case in ALL if case.family == family]
    canary = tmp_path / "canary"
    for case in cases:
        source = written(case, tmp_path)
        output = output_of(case.command, tmp_path / "out" / case.file)
        output.parent.mkdir(parents=True)
        ending = ending_of(case.command, source, output, canary)
        tensors = assert_ended(case, source, output, ending)
        assert not canary.exists(), case.file
        if tensors is not None and case.whole and not is_unnamed(case):
            # Safetensors made of safetensors have an object of two names, v and w, under the first.
            name = "v" if case.command == "convert" and "w" not in tensors else "w"
            assert torch.equal(tensors[name].view(torch.int32), W.view(torch.int32)), case.file
        if TIMES > 1 or size_of(source) <= LARGE:
            codes = codes_of_reading(source)
            assert not canary.exists(), case.file
            # A file for torch.load is not written with objects that are harmless to read, and views take no memory.
            if case.command == "pt2safetensors" and case.file != "tensor_gigabytes_twice.pt":
                assert codes <= {case.exit} or is_unnamed(case), case.file
        source.unlink()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["out"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", sorted({directory.family for directory in ALL_DIRECTORIES}))
def test_every_directory_ends_as_it_should_and_so_does_the_library(family: str, tmp_path: Path) -> None:
    directories = [directory for directory in ALL_DIRECTORIES if directory.family == family]
    canary = tmp_path / "canary"
    for directory in directories:
        source = filled(directory, tmp_path)
        output = output_of(directory.command, tmp_path / directory.file / "out")
        output.parent.mkdir()
        ending = ending_of(directory.command, source, output, canary)
        assert_ended(directory, source.parent, output, ending)
        assert output.exists() == (ending.code == 0)
        assert not canary.exists(), directory.file
        codes = codes_of_reading(source)
        assert not canary.exists(), directory.file
        if directory.command != corpus.BACK:
            assert codes <= {directory.exit} or is_unnamed(directory), directory.file


def test_odd_payloads_are_few() -> None:
    assert {"load_from_bytes", "graph_module"} == ODD
