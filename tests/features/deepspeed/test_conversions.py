"""Runs of DeepSpeed are converted as checkpoints of other formats are: in parts, several at once, with checksums."""

from __future__ import annotations

import random
import shutil
import sys
import zipfile
from pathlib import Path

import pytest
from cells import verifying
from checkpoints import ZERO, ckptconv_here, contents, copy_of, done

import ckptconv
from ckptconv.options.table import OPTIONS

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))
import make_example

Z3 = ZERO / "z3_bf16_w2/checkpoint"


def test_a_run_with_one_checkpoint_is_converted_as_by_its_command(place: Path) -> None:
    shutil.copytree(Z3, place / "in" / "epoch=0.ckpt")
    done(ckptconv_here("convert", "in", "out"))
    done(ckptconv_here("zero-to-fp32", "in", "special"))
    assert contents(place / "out") == contents(place / "special")
    shutil.copytree(Z3, place / "in" / "epoch=1.ckpt")
    several = "It contains several checkpoints: in/epoch=0.ckpt, in/epoch=1.ckpt."
    ckptconv_here("convert", "in", "again").refused(2, several)


@verifying
def test_what_an_output_lacks_is_said_when_it_is_compared(place: Path) -> None:
    lacks = "Not in the output: the optimizer. Use convert --optimizer PATH for its states."
    done(ckptconv_here("convert", Z3, "out", "--optimizer", "states"))
    for words, notes in (
        (["out"], [lacks]),
        (["--states", "states"], ["Not in the output: the weights."]),
        (["out", "--states", "states"], []),
    ):
        report = done(ckptconv_here("verify", Z3, *words, "--json")).json
        assert [note for note in report["notes"] if not note.startswith("Took ")] == notes
        assert all(note in done(ckptconv_here("verify", Z3, *words)).out for note in notes)


def test_classes_of_the_format_are_named_if_asked_for(place: Path) -> None:
    line = "kept as inert data, never run: deepspeed."
    for option, told in ((), False), (("--verbose",), True):
        run = ckptconv_here("zero-to-fp32", Z3, "out", *option)
        assert (line in run.out) == told, run.out
    assert done(ckptconv_here("zero-to-fp32", Z3, "out", "--json")).json["opaque"]


@pytest.mark.skipif("depfile" not in OPTIONS, reason="there are no rules for make")
def test_what_says_which_tag_is_meant_is_an_input(tmp_path: Path) -> None:
    make_example.write(make_example.Example(params=300_000, ranks=2), tmp_path / "run")
    for source, tag, told in ((tmp_path / "run", [], True), (tmp_path / "run", ["-t", make_example.TAG], False)):
        run = ckptconv_here("zero-to-fp32", source, tmp_path / "out", *tag, "--depfile", tmp_path / "out.d")
        assert run.code == 0, run.err
        assert (str(tmp_path / "run" / "latest") in (tmp_path / "out.d").read_text().split()) is told


def flipped(data: bytes, at: int, bit: int = 0) -> bytes:
    return data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]


def code_of(source: Path, output: Path) -> int:
    """How a conversion ends that checks the checksums."""
    try:
        ckptconv.convert(source, output, fsync=False, checksum=True)
    except ckptconv.CkptconvError as error:
        return error.exit_code
    return 0


@pytest.mark.parametrize("case", ["z1_bf16_w2", "z2_bf16_client_w2", "z3_bf16_w2"])
def test_partitions_of_every_rank_are_checked(case: str, tmp_path: Path) -> None:
    checkpoint = copy_of(case, tmp_path)
    output = tmp_path / "out.safetensors"
    run = ckptconv_here("zero-to-fp32", checkpoint, output, "--json", "--checksum")
    assert run.code == 0
    assert run.json["checksums"] > 0
    output.unlink()
    largest = max(checkpoint.rglob("*optim_states.pt"), key=lambda file: file.stat().st_size)
    with zipfile.ZipFile(largest) as archive:
        member = max((m for m in archive.infolist() if "/data/" in m.filename), key=lambda m: m.file_size)
        data = archive.read(member)
    largest.write_bytes(flipped(largest.read_bytes(), largest.read_bytes().index(data) + 8))
    run = ckptconv_here("zero-to-fp32", checkpoint, output, "--checksum", "--optimizer", tmp_path / "states")
    assert run.code == 4
    assert largest.name in run.err
    assert not output.exists()


@pytest.mark.parametrize("case", ["z1_bf16_w2", "z2_bf16_client_w2", "z3_bf16_w2"])
def test_random_flips_in_the_files_of_ranks_too(case: str, tmp_path: Path) -> None:
    checkpoint, output = copy_of(case, tmp_path), tmp_path / "out.safetensors"
    ckptconv.convert(checkpoint, output, fsync=False)
    expected = output.read_bytes()
    output.unlink()
    files = sorted(checkpoint.rglob("*.pt"))
    chance = random.Random(0)
    refused = 0
    for _ in range(20):
        path = chance.choice(files)
        whole = path.read_bytes()
        path.write_bytes(flipped(whole, chance.randrange(len(whole)), chance.randrange(8)))
        code = code_of(checkpoint, output)
        if code:
            refused += 1
            assert code in (3, 4, 5)
            assert not output.exists()
        else:
            assert output.read_bytes() == expected
            output.unlink()
        path.write_bytes(whole)
    assert refused > 2
