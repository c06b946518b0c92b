"""What helps a user of the command line: help in groups, hints, environment variables, and colours."""

from __future__ import annotations

import io
import itertools
import json
import re
from pathlib import Path

import pytest
import torch
from cells import looking, of_features
from checkpoints import ckptconv_here, done
from processes import on_terminal
from safetensors.torch import save_file

from ckptconv.cli.failures import meant_by
from ckptconv.cli.help import read
from ckptconv.cli.registered import GROUPS as REGISTERED
from ckptconv.cli.registered import STRICT
from ckptconv.cli.terminal import has_colours
from ckptconv.options import GROUPS
from ckptconv.options.table import COMMAND, LIBRARY, OPTIONS, UsageError


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("NO_COLOR", "FORCE_COLOR", *VARIABLES):
        monkeypatch.delenv(name, raising=False)
    torch.save({"w": torch.ones(3)}, "model.pt")


VARIABLES = [option.env for table in (OPTIONS, COMMAND) for option in table.values() if option.env]


def help_of(*command: str) -> str:
    """The help of a command, with its lines joined."""
    run = ckptconv_here(*command)
    assert (run.code, run.err) == (0, "")
    return " ".join(run.out.split())


# --------------------------------------------------------------------------------------------------------------- help


def test_options_stand_in_groups_in_one_order() -> None:
    lines = ckptconv_here("convert", "--help").out.splitlines()
    headings = [line.removesuffix(":") for line in lines if line.endswith(":") and not line.startswith(" ")]
    assert headings == ["Arguments", *GROUPS, "Examples"]
    of_commands = (tables for each in of_features("FLAGS") for tables in each.values())
    for table in (OPTIONS, COMMAND, *itertools.chain(*of_commands)):
        assert {option.group for option in table.values()} <= {*GROUPS, LIBRARY}
        assert all(option.group == LIBRARY or option.about.endswith((".", "?")) for option in table.values())


def test_a_command_tells_its_own_defaults_and_no_others() -> None:
    for command, dtype, size in (
        ("pt2safetensors", "keep", "the files of the input"),
        *itertools.chain(*of_features("DEFAULTS")),
    ):
        told = help_of(command, "--help")
        assert f"keep does not cast. [default: {dtype}]" in told, command
        assert f"such as 5GB or 2GiB. [default: {size}]" in told, command
        others = {*itertools.chain(*of_features("FORMATS"))} - {command}
        assert not [name for name in others if f"for {name}" in told], command


def test_the_short_help_is_short_and_leads_to_the_long_one() -> None:
    short, long = (ckptconv_here("pt2safetensors", option).out for option in ("-h", "--help"))
    assert len(short.splitlines()) < 40
    assert "--dtype" in short
    assert "--depfile" not in short
    assert short.count("  ckptconv pt2safetensors") == 1
    assert short.splitlines()[-1] == f"--help for all {len(read()['ckptconv pt2safetensors'].flags)} options."
    assert ckptconv_here("pt2safetensors", "-h", "--help").out == long


def test_the_short_help_of_convert_has_what_people_use() -> None:
    names = re.findall(r"^  --([\w-]+)", ckptconv_here("convert", "-h").out, re.MULTILINE)
    common = "key exclude strip-prefix dtype like max-shard-size for-hub to verify json"
    common += " optimizer quantize dequantize map output-dir copy-config dry-run"
    # Some are features', which may be missing.
    known = {option.flags[0].partition("/")[0].lstrip("-") for option in (*OPTIONS.values(), *COMMAND.values())}
    assert sorted(names) == sorted(known.intersection(common.split()))
    for path, told in read().items():
        assert path == "ckptconv convert" or sum(flag.common for flag in told.flags) <= 10, path


def test_the_short_help_begins_with_what_a_command_is_for() -> None:
    for path, told in read().items():
        shown = ckptconv_here(*path.split()[1:], "-h").out
        assert " ".join(shown.split()).startswith(f"{told.summary} Usage: {told.usage.split()[0]}"), path


def test_the_help_has_in_full_what_is_a_commands_own_and_names_the_rest() -> None:
    base = read()["ckptconv convert"]
    shared = help_of("help", "options")
    for path, told in read().items():
        long = help_of(*path.split()[1:], "--help")
        as_there = told.as_in(base)
        for flag in told.flags:
            assert flag.word in long, (path, flag.word)
            assert (" ".join(flag.text.split()) in long) == (flag not in as_there), (path, flag.word)
        for flag in as_there:
            assert f"{flag.words} {' '.join(flag.text.split())}" in shared, flag.word


def test_commands_stand_in_groups_and_strict_spellings_in_a_line() -> None:
    shown = ckptconv_here().out
    headings = re.findall(r"^(\w[^:\n]*):$", shown, re.MULTILINE)
    assert headings == [*(group for group in REGISTERED if REGISTERED[group] and group != STRICT), "Example"]
    joined = " ".join(shown.split())
    assert f"{STRICT}: {', '.join(REGISTERED[STRICT])}." in joined
    for name in REGISTERED[STRICT]:
        assert ckptconv_here(name, "--help").code == 0


def test_help_is_a_command_too() -> None:
    for words in (["convert"], ["inspect"], []):
        assert ckptconv_here("help", *words).out == ckptconv_here(*words, "--help").out


def test_the_output_can_be_named_by_an_option() -> None:
    for name, value in (("a", 1.0), ("b", 3.0)):
        save_file({"w": torch.full((4, 4), value)}, f"{name}.safetensors")
    for words in (
        "convert model.pt -o made.safetensors",
        "pt2safetensors model.pt --output made-too.safetensors",
    ):
        done(ckptconv_here(*words.split()))
        assert Path(words.split()[-1]).exists(), words
    for make, words in itertools.chain(*of_features("NAMED")):
        _ = make and make()
        done(ckptconv_here(*words.split()))
        assert Path(words.split()[-1]).exists(), words


def test_one_output_is_needed_and_no_two() -> None:
    for words, told in (
        *itertools.chain(*of_features("LACKING")),
        ("convert a.pt b.safetensors -o c.safetensors", "OUTPUT is given twice"),
    ):
        ckptconv_here(*words.split()).refused(2, told)


def test_the_program_alone_shows_its_commands() -> None:
    run = ckptconv_here()
    assert run.code == 2
    # The column of names is as wide as the longest of the commands that are there.
    assert re.search(r"\n  pt2safetensors  +Convert \.pt, \.pth, \.bin and \.ckpt files to safetensors\.\n", run.out)


# --------------------------------------------------------------------------------------------------------------- hints

MEANT = {
    "pt2st": "pt2safetensors",
    "bin-to-safetensors": "pt2safetensors",
    "torch2safetensors": "pt2safetensors",
    "split": "convert --max-shard-size 5GB",
    "optimizer": "convert --optimizer PATH",
    "half": "convert --dtype bf16",
    "huggingface-cli": "convert hf://organization/model",
    "merge-tp": "convert",
    "merge-weights": "convert",
    **{word: meant for words in of_features("MEANT") for word, meant in words.items()},
}


def test_another_name_of_a_command_leads_to_it() -> None:
    for word, meant in MEANT.items():
        run = ckptconv_here(word, "model.pt")
        assert run.code == 2
        assert run.err == f"ckptconv: No such command '{word}'. Did you mean ckptconv {meant}?\n"
        done(ckptconv_here(*meant.split(), "--help"))


def test_a_word_for_what_no_command_does_is_met_with_what_to_use() -> None:
    for word, advice in {
        "unmerge": "Keep the base model",
        "push": "ckptconv convert INPUT DIR --for-hub writes a directory for `hf upload`.",
        "to-gguf": "convert_hf_to_gguf.py",
        "convert_hf_to_gguf.py": "convert_hf_to_gguf.py",
        "pt2onnx": "and export the model",
        "exit-codes": "ckptconv --help lists the exit codes.",
    }.items():
        err = ckptconv_here(word, "model.pt").refused(2, f"No such command '{word}'. ", advice)
        assert "Did you mean" not in err
    ckptconv_here("convert", "model.pt", "--to", "onnx").refused(2, "it may be", "and export the model")


def test_a_word_for_an_option_of_the_program_itself_leads_to_it() -> None:
    completing = "--install-completion or --show-completion"
    for words, meant in ((["completion", "bash"], completing), (["version"], "--version")):
        run = ckptconv_here(*words)
        assert run.err == f"ckptconv: No such command '{words[0]}'. Did you mean ckptconv {meant}?\n"


def test_a_slip_leads_to_the_command_that_is_like_it() -> None:
    for words, meant in ((["pt2safetensor"], "pt2safetensors"), (["convret"], "convert"), (["conv"], "convert")):
        run = ckptconv_here(*words)
        assert run.err == f"ckptconv: No such command '{words[-1]}'. Did you mean ckptconv {meant}?\n"


def test_options_of_other_programs_are_said_what_they_are_here() -> None:
    for option, said in {
        "--bf16": "Use --dtype bf16.",
        "--half": "Use --dtype fp16.",
        "--force": "--overwrite",
        "--device": "ckptconv uses no device",
        **{option: text for table in of_features("OTHER_OPTIONS") for option, text in table.items()},
        "--num-workers": "Use --jobs N.",
        "--progressbar": "Progress is shown by default",
        "--overwrite-output-dir": "Use --overwrite",
        "--export-size": "Use --max-shard-size",
        "--ignore-patterns": "Use --exclude GLOB",
        "--progress": "Progress is shown by default; --no-progress turns it off.",
        "--outtype": "Use --dtype",
        "-d": "OUTPUT follows INPUT.",
        "--delete": "Inputs are never changed or removed.",
        "--filter": "Use --include GLOB.",
        "--num-proc": "Use --jobs N.",
        "--save-format": "Use --to KIND.",
        "--log-file": "2> FILE",
    }.items():
        ckptconv_here("convert", "x.pt", option, "1").refused(2, f"There is no option {option}.", said)
    # Nothing is said of an option that the command has not.
    if "part" in OPTIONS:
        assert "--dtype" not in ckptconv_here("finish", "x.pt", "--bf16").refused(2, "no option --bf16")
    assert "--quantize" not in ckptconv_here("convert", "x.pt", "--dtype", "float64").refused(
        2, "not a supported output dtype"
    )


def test_the_opposite_of_an_option_is_not_what_was_meant() -> None:
    for option in ("--no-verify", "--no-dry-run", "--fsync", "--structure"):
        said = ckptconv_here("convert", "x.pt", option).refused(2, f"There is no option {option}.")
        assert "Did you mean" not in said


def test_the_example_of_a_short_help_is_of_its_own_command() -> None:
    for path, told in read().items():
        if not told.commands:
            shown = ckptconv_here(*path.split()[1:], "-h").out
            assert f"Example:\n  {path} " in shown, path
    assert "keep|drop" in ckptconv_here("convert", "--help").out


def test_words_without_a_meaning_have_none() -> None:
    for word in ("", "2", "2pt", "zzz", "xx2pt", "show2me"):
        assert meant_by(word) == ""


def test_a_path_in_the_place_of_a_command_leads_to_convert() -> None:
    for path in ("model.pt", "absent.safetensors", "my model.ckpt", "s3://bucket/model", "runs/7b/"):
        quoted = f"'{path}'" if " " in path else path
        ckptconv_here(path).refused(2, f"{path} is not a command. ckptconv convert {quoted} OUTPUT converts it; ")


# -------------------------------------------------------------------------------------------------------- environment


def test_variables_are_defaults_that_options_override(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = {}

    def convert(*_: object, **options: object) -> None:
        taken.update(options)
        raise UsageError("Enough.")

    monkeypatch.setattr("ckptconv.conversion.convert", convert)
    given = {"CKPTCONV_JOBS": "3", "CKPTCONV_MEMORY": "1GiB", "CKPTCONV_SPOOL_DIR": "/tmp/x"}
    given["CKPTCONV_STORAGE_OPTIONS"] = '{"anon": true}'
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    ckptconv_here("pt2safetensors", "model.pt")
    found = {name: taken[name] for name in ("jobs", "memory", "spool_dir", "storage_options")}
    assert found == {"jobs": 3, "memory": 1 << 30, "spool_dir": "/tmp/x", "storage_options": {"anon": True}}
    ckptconv_here("pt2safetensors", "model.pt", "--jobs", "5", "--storage-options", "{}")
    assert (taken["jobs"], taken["memory"], taken["storage_options"]) == (5, 1 << 30, {})
    for name in given:
        monkeypatch.setenv(name, "")
    taken.clear()
    ckptconv_here("pt2safetensors", "model.pt")
    assert not taken.keys() & {"jobs", "memory", "spool_dir", "storage_options"}


def test_progress_can_be_turned_off_by_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptconv.cli.progress.INTERVAL", -1)
    for value, shown in (("0", False), ("off", False), ("1", True), ("TRUE", True), ("", True)):
        monkeypatch.setenv("CKPTCONV_PROGRESS", value)
        assert (" left" in done(ckptconv_here("pt2safetensors", "model.pt")).err) == shown, value
        assert " left" not in ckptconv_here("pt2safetensors", "model.pt", "--no-progress").err, value


def test_a_wrong_value_is_met_with_the_name_of_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("JOBS", "many"), ("MEMORY", "5 apples"), ("STORAGE_OPTIONS", "{"), ("PROGRESS", "maybe")):
        with monkeypatch.context() as patch:
            patch.setenv(f"CKPTCONV_{name}", value)
            run = ckptconv_here("pt2safetensors", "model.pt", "--json")
        assert run.code == 2, name
        assert run.json["error"]["message"].startswith(f"CKPTCONV_{name}")
        assert run.json["input"] == "model.pt"


def test_a_directory_that_is_not_there_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTCONV_SPOOL_DIR", "absent")
    for option, named in ((), "CKPTCONV_SPOOL_DIR absent"), (("--spool-dir", "none"), "--spool-dir none"):
        run = ckptconv_here("pt2safetensors", "model.pt", *option)
        assert (run.code, run.err.startswith(f"ckptconv: {named} is not a directory.")) == (2, True)


def test_a_directory_for_temporary_files_that_a_command_does_not_need_is_no_news(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert ckptconv_here("pt2safetensors", "model.pt", "--json", "--spool-dir", ".").json["notes"]
    monkeypatch.setenv("CKPTCONV_SPOOL_DIR", ".")
    assert "--spool-dir" not in str(ckptconv_here("pt2safetensors", "model.pt", "--json").json["notes"])


def test_variables_decide_nothing_about_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ckptconv_here("pt2safetensors", "model.pt", "a").code == 0
    monkeypatch.setenv("CKPTCONV_JOBS", "2")
    monkeypatch.setenv("CKPTCONV_MEMORY", "64MiB")
    assert ckptconv_here("pt2safetensors", "model.pt", "b").code == 0
    one, other = (json.loads(Path(name, ".ckptconv-manifest.json").read_text()) for name in "ab")
    assert (one["plan"], one["options"]) == (other["plan"], other["options"])
    assert not [option for table in (OPTIONS, COMMAND) for option in table.values() if option.env and option.decides]


def test_the_help_names_the_variables() -> None:
    told = help_of("convert", "--help")
    for name in VARIABLES:
        assert f"[env: {name}" in told


def test_only_the_command_line_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    import ckptconv

    monkeypatch.setenv("CKPTCONV_JOBS", "many")
    assert ckptconv.convert("model.pt", "out").tensors == 1


# ------------------------------------------------------------------------------------------------------------- colours


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_where_there_are_colours() -> None:
    cases: list[tuple[dict[str, str], bool, bool]] = [
        ({"TERM": "xterm"}, True, False),
        ({}, True, False),
        ({"TERM": "dumb"}, False, False),
        ({"TERM": "xterm", "NO_COLOR": "1"}, False, False),
        ({"TERM": "xterm", "NO_COLOR": ""}, True, False),
        ({"TERM": "dumb", "FORCE_COLOR": "1"}, True, True),
        ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, False, False),
    ]
    for environment, terminal, file in cases:
        assert has_colours(Terminal(), environment) == terminal, environment
        assert has_colours(io.StringIO(), environment) == file, environment


def test_colours_on_a_real_terminal() -> None:
    for arguments in (*([command, "model.pt"] for command in looking()), ["convert", "-h"], ["--help"]):
        assert "\x1b[1m" in on_terminal(80, *arguments, TERM="xterm"), arguments
        for environment in ({"TERM": "dumb"}, {"TERM": "xterm", "NO_COLOR": "1"}):
            assert "\x1b" not in on_terminal(80, *arguments, **environment), arguments


def test_colours_where_they_are_demanded(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = {
        word: ckptconv_here(*word.split()).out
        for word in (*(f"{command} model.pt" for command in looking()), "convert --help")
    }
    assert not [text for text in plain.values() if "\x1b" in text]
    monkeypatch.setenv("FORCE_COLOR", "1")
    for word, text in plain.items():
        styled = ckptconv_here(*word.split()).out
        assert "\x1b[1m" in styled
        assert "".join(part.partition("m")[2] if n else part for n, part in enumerate(styled.split("\x1b"))) == text
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in ckptconv_here("convert", "--help").out


def test_a_file_whose_name_is_like_an_option_is_said_how_to_give() -> None:
    torch.save({"w": torch.ones(2)}, "-x.pt")
    ckptconv_here("convert", "-x.pt", "out").refused(2, "There is no option -x.", "For the file -x.pt, give ./-x.pt.")
    assert ckptconv_here("convert", "./-x.pt", "out").code == 0


def test_output_is_advised_to_commands_that_have_it() -> None:
    for path, page in read().items():
        run = ckptconv_here(*path.split()[1:], "a", "--outfile", "b")
        if "There is no option --outfile" in run.err and "OUTPUT" not in page.usage:
            assert "OUTPUT" not in run.err, path
