"""What someone meets who types a command for the first time, and something else than was meant."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import sys
from pathlib import Path

import pytest
import torch
from cells import of_features, verified_here
from checkpoints import ckptconv_here, done

from ckptconv.options.table import OPTIONS
from ckptconv.outputs.kinds import NAMED
from ckptconv.text import format_size

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

LONG = "x" * 300
# Commands for a format, and the names of their outputs.
FORMATS = {
    "pt2safetensors": "out.safetensors",
    **{command: output for more in of_features("FORMATS") for command, output in more.items()},
}


@pytest.fixture(autouse=True)
def _here(place: Path) -> None:
    """A directory with a model, and with much that is none."""
    torch.save({"w": torch.ones(3)}, "model.pt")
    Path("my model.pt").write_bytes(Path("model.pt").read_bytes())
    Path("run").mkdir()
    Path("run/latest").write_text("global_step1")
    Path("empty").mkdir()
    Path("notes").mkdir()
    Path("notes/notes.txt").write_text("none")
    os.mkfifo("pipe")
    os.symlink("gone.pt", "link.pt")
    os.symlink("circle", "circle")
    for name in ("finished", "verify_", "my model.pt"):
        Path(name).touch()


# Commands that fail, with which code, and what is said; nothing is changed by them. A semicolon is between things that
# are said.
REFUSED: list[tuple[str, int, str]] = [
    # Other inputs
    ("convert link.pt", 2, "symbolic link to gone.pt"),
    ("convert '~/model.pt'", 2, f"did not expand the ~;{os.path.expanduser('~/model.pt')}"),
    ("convert s3:/bucket/model.pt x", 2, "Did you mean s3://bucket/model.pt?"),
    ("convert hf:organization/model x", 2, "Did you mean hf://organization/model?"),
    ("convert model.pt x --tied aliases", 2, "--tied is 'aliases'; it may be alias or duplicate. Did you mean alias?"),
    ("convert model.pt x --to safetensor", 2, "Did you mean safetensors?"),
    ("convert model.pt x --include optimizer", 2, "convert --optimizer PATH converts the states of an optimizer"),
    ("convert model.pt x --to dpc", 2, "Did you mean dcp?" if "dcp" in NAMED else "it may be"),
    ("convert", 2, "Usage: ckptconv convert [OPTIONS] INPUT... [OUTPUT]. See"),
    ("convert model.pt x --digest md5", 2, "--digest is 'md5'; it may be sha256 or blake3."),
    ("convert circle", 1, "too many levels of symbolic links"),
    ("convert none.pt", 2, "none.pt does not exist"),
    ("convert MODEL.PT x", 2, "MODEL.PT does not exist;Did you mean model.pt?"),
    ("convert model.pt x -dtype bf16", 2, "There is no option -d.;Did you mean --dtype or --verbose?"),
    ("convert model.pt x --raw yes", 2, "found 3 arguments;Leave out 'yes'"),
    ("convert_checkpoint model.pt x", 2, "Did you mean ckptconv convert?"),
    ("convert model.pt to x", 2, "found 3 arguments;Leave out 'to'"),
    ("convert model.pt x --safe_serialization True", 2, "found 3 arguments;Leave out 'True'"),
    ("convert model.pt '~/x.safetensors'", 2, "The shell did not expand the ~"),
    ("convert empty", 2, "but not a known checkpoint;It is empty."),
    ("convert notes", 2, "It contains notes.txt"),
    # Files beside the output
    *(
        (f"pt2safetensors model.pt out.safetensors {option} {name}", code, said)
        for option in ("--manifest", *itertools.chain(*of_features("BESIDE")))
        for name, code, said in (
            ("empty", 2, "is a directory"),
            ("gone/file", 2, "the directory gone does not exist"),
            ("model.pt", 2, "would replace model.pt"),
            ("out.safetensors", 2, "would replace the output out.safetensors"),
        )
    ),
    *(
        (f"{words} {name}", code, said)
        for words in (
            "convert model.pt",
            *itertools.chain(*of_features("WHOLE")),
            "pt2safetensors model.pt out.safetensors --manifest",
        )
        for name, code, said in (
            ("pipe", 2, "is a pipe or a device"),
            ("/dev/stdout", 2, "cannot be /dev/stdout"),
            (LONG, 1, "too long. Nothing was written"),
        )
    ),
    *(
        (f"pt2safetensors model.pt {output}", 2, f"does not write to stdout: OUTPUT cannot be {output}.")
        for output in ("-", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/2")
    ),
    # The command itself
    ("pt2safetensors --max_shard_siz 1 model.pt", 2, "Did you mean --max-shard-size?"),
    ("transform model.pt", 2, "The commands of ckptconv are convert, pt2safetensors, "),
    ("--json", 2, "no option --json of ckptconv itself;ckptconv COMMAND --json"),
    ("-q convert model.pt", 2, "no option -q of ckptconv itself;ckptconv COMMAND -q"),
    (
        "--max_shard_size 1GB convert",
        2,
        "no option --max-shard-size of ckptconv itself;ckptconv COMMAND --max-shard-size",
    ),
    ("version", 2, "No such command 'version'. Did you mean ckptconv --version?"),
    # Also where it is nearly the name of a command, which is suggested else.
    *(
        (name, 2, f"{name} is not a command;ckptconv convert {name} OUTPUT converts it")
        for name in ("model.pt", "finished", "verify_")
    ),
    (
        "pt2safetensors a.pt out b.pt 'c d.pt'",
        2,
        "Too many arguments: b.pt c d.pt.",
    ),
    ("pt2safetensors my model.pt out", 2, "Too many arguments: out.;Quote it: 'my model.pt'."),
    ("convert my model.pt out", 2, "found 3 arguments;Quote it: 'my model.pt'." if "output_dir" in OPTIONS else "3"),
    ("pt2safetensors '' out.safetensors", 2, "The path of the input is empty.;not set?"),
    ("--versoin", 2, "Did you mean --version?"),
    ("convert --jsn model.pt", 2, "Did you mean --json?"),
    (
        "pt2safetensors model.pt --max-shard-size",
        2,
        "'--max-shard-size' requires an argument;Give --max-shard-size SIZE. See ckptconv pt2safetensors --help.",
    ),
    *itertools.chain(*of_features("SAID")),
]


def test_what_cannot_be_done_is_said_with_what_can() -> None:
    def seen() -> set[tuple[str, int]]:
        return {(str(path), path.lstat().st_mtime_ns) for path in Path().rglob("*")}

    before = seen()
    for words, code, said in REFUSED:
        ckptconv_here(*shlex.split(words)).refused(code, *said.split(";"))
        assert seen() == before, words


def test_what_is_not_alike_is_not_suggested() -> None:
    said = ckptconv_here("--gson").refused(2, "no option --gson")
    assert "Did you mean" not in said, "two dashes are no likeness"
    for option in ("--compress", "--fast", "--strict"):
        assert "Did you mean" not in ckptconv_here("convert", "model.pt", option).refused(2, f"no option {option}")


def test_a_link_that_leads_in_a_circle_concerns_only_who_names_it() -> None:
    like = ("--like", "model.pt") if "like" in OPTIONS else ()
    done(ckptconv_here("convert", "model.pt", "out", *like))


def test_a_dry_run_tells_how_much_it_would_read_and_write() -> None:
    said = done(ckptconv_here("convert", "model.pt", "out", "--dry-run")).out
    assert not Path("out").exists()
    report = json.loads(done(ckptconv_here("convert", "model.pt", "out", "--json")).out)
    written, read = (format_size(report[field]) for field in ("bytes_written", "input_bytes"))
    assert f"would write {written} in all, from input files of {read}" in said


@pytest.mark.skipif("part" not in OPTIONS, reason="there are no parts")
def test_a_plan_of_a_part_does_not_ask_to_finish_it() -> None:
    assert "finish" not in done(ckptconv_here("convert", "model.pt", "out", "--part", "0/2", "--dry-run")).out


@pytest.mark.skipif("part" not in OPTIONS, reason="there are no parts")
def test_parts_are_not_finished_where_the_manifest_cannot_be_written() -> None:
    for part in ("0/2", "1/2"):
        done(ckptconv_here("pt2safetensors", "model.pt", "out", "--part", part))
    ckptconv_here("finish", "out", "--manifest", "gone/file").refused(2, "the directory gone does not exist")
    assert not Path("out/model.safetensors").exists()
    done(ckptconv_here("finish", "out"))


# --------------------------------------------------------------------------------------------------------- the report


# ------------------------------------------------------------------------------------------------ the command itself

COMMANDS = [
    *["convert", "pt2safetensors"],
    *itertools.chain(*of_features("COMMANDS")),
]


def test_help_has_examples_says_what_each_argument_is_and_fits_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for command in ("", *itertools.chain(*of_features("GROUPS")), *COMMANDS):
        run = done(ckptconv_here(*command.split(), "--help"))
        lines = run.out.splitlines()
        assert max(map(len, lines)) <= 80, command
        assert not re.search(r"<(str|list)|^Usage.*{", run.out), "arguments are called by their names"
        assert not [line for line in lines[1:] if line.endswith("...")], "what commands do is said whole"
        examples = lines[lines.index("Examples:" if "Examples:" in lines else "Example:") + 1 :]
        assert [line for line in examples if line.startswith(f"  ckptconv {command}")], command
        if command in COMMANDS:
            arguments = lines[lines.index("Arguments:") + 1 :]
            assert all(len(line.split()) > 3 for line in arguments[: arguments.index("")]), command
            for option in ("--json", "--quiet", "--verbose", "--no-progress"):
                assert option in run.out, (command, option)


def test_dtypes_are_taken_as_people_say_them() -> None:
    for short, long in (("bf16", "bfloat16"), ("fp16", "float16"), ("fp32", "float32")):
        for dtype in (short, long):
            done(ckptconv_here("pt2safetensors", "--dtype", dtype, "model.pt", f"{dtype}.safetensors"))
        assert Path(f"{short}.safetensors").read_bytes() == Path(f"{long}.safetensors").read_bytes()
        verified_here("--dtype", short, "model.pt", f"{long}.safetensors")
