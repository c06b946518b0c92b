"""What someone meets who types a command for the first time, and something else than was meant."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
import torch
from checkpoints import ckptconv_here

from ckptconv.text import parse_path

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import make_example


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    torch.save({"w": torch.ones(3)}, "model.pt")
    return tmp_path / "model.pt"


# ------------------------------------------------------------------------------------------------------ other inputs


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"<!DOCTYPE html><html>Not found</html>", "is a web page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "git lfs pull"),
        (b"", "is empty (0 bytes)"),
    ],
)
@pytest.mark.parametrize("command", ["zero-to-fp32", "dcp2safetensors", "safetensors2pt", "pt2safetensors"])
def test_a_file_that_no_command_takes_is_called_what_it_is(
    command: str, content: bytes, said: str, model: Path
) -> None:
    Path("page.pt").write_bytes(content)
    output = "out.pt" if command == "safetensors2pt" else "out.safetensors"
    run = ckptconv_here(command, "page.pt", output)
    run.refused(4, "page.pt", said)
    assert not Path(output).exists()


def test_the_right_command_is_one_that_can_be_pasted(model: Path) -> None:
    model.rename("my model.pt")
    ckptconv_here("zero-to-fp32", "my model.pt", "out").refused(2, "ckptconv pt2safetensors 'my model.pt'")
    Path("run").mkdir()
    Path("run/latest").write_text("global_step1")
    ckptconv_here("pt2safetensors", "run").refused(2, "ckptconv zero-to-fp32 run OUTPUT")


def test_a_path_that_is_not_there_is_explained(model: Path) -> None:
    os.symlink("gone.pt", "link.pt")
    ckptconv_here("inspect", "link.pt").refused(2, "symbolic link to gone.pt")
    ckptconv_here("inspect", "~/model.pt").refused(2, "did not expand the ~", os.path.expanduser("~/model.pt"))
    ckptconv_here("inspect", "s3:/bucket/model.pt").refused(2, "Did you mean s3://bucket/model.pt?")


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("org/model", "hf://org/model."),
        ("org/Model-1.5_b@v2", "hf://org/Model-1.5_b@v2."),
        ("https://huggingface.co/org/model", "hf://org/model."),
        ("https://huggingface.co/org/model/tree/main?not-for-all-audiences=true", "hf://org/model."),
        ("https://hf.co/org/model/blob/v2/sub/model.bin#L1", "hf://org/model@v2/sub/model.bin."),
        ("https://huggingface.co/datasets/org/data/", "hf://datasets/org/data."),
    ],
)
def test_a_repository_of_the_hub_is_told_how_it_is_written(given: str, meant: str, tmp_path: Path) -> None:
    for command in (("convert", given, tmp_path / "x.safetensors"), ("inspect", given)):
        ckptconv_here(*command).refused(2, given, "Hugging Face hub", meant)


def test_the_hub_s_address_without_a_scheme_is_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse_path("hf.co/org/model@v2") == "hf://org/model@v2"
    assert parse_path("huggingface.co/org/model/x.bin") == "hf://org/model/x.bin"
    for page in ("hf.co/org/model/tree/main", "huggingface.co/org/model/blob/v2/x.bin"):
        ckptconv_here("inspect", page).refused(2, "Hugging Face hub", "hf://org/model")
    (tmp_path / "hf.co" / "org").mkdir(parents=True)
    assert parse_path("hf.co/org") == "hf.co/org"


def test_other_paths_that_do_not_exist_are_no_repositories(tmp_path: Path) -> None:
    for given in ("a/b/c", tmp_path / "a/b", "model.pt", "./org/model"):
        assert "hub" not in ckptconv_here("inspect", given).refused(2, "does not exist")


def test_a_link_that_leads_in_a_circle_concerns_only_who_names_it(model: Path) -> None:
    os.symlink("circle", "circle")
    ckptconv_here("inspect", "circle").refused(1, "too many levels of symbolic links")
    assert ckptconv_here("convert", model.name, "out", "--like", model.name).code == 0
    ckptconv_here("inspect", "none.pt").refused(2, "none.pt does not exist")


@pytest.mark.parametrize("setting", ["--delta-encoding overwrite", "--delta-checksum blake3", "--delta-version 2"])
def test_a_setting_of_a_delta_without_a_delta_is_refused(setting: str, model: Path) -> None:
    run = ckptconv_here("diff", model.name, model.name, *setting.split())
    run.refused(2, f"{setting.split(maxsplit=1)[0]} is about a delta, and none was asked for", "--delta DIR")


def test_a_plan_of_a_part_does_not_ask_to_finish_it(model: Path) -> None:
    run = ckptconv_here("convert", model.name, "out", "--part", "0/2", "--dry-run")
    assert run.code == 0
    assert "finish" not in run.out


def test_of_a_directory_without_a_checkpoint_it_says_what_is_there(model: Path) -> None:
    Path("nothing").mkdir()
    ckptconv_here("inspect", "nothing").refused(2, "holds none that is known", "It is empty.")
    Path("nothing/notes.txt").write_text("none")
    ckptconv_here("inspect", "nothing").refused(2, "It holds notes.txt")


# ------------------------------------------------------------------------------------------- files beside the output


LONG = "x" * 300
NAMED_WRONGLY = [
    (2, "pipe", "is a pipe or a device"),
    (2, "/dev/stdout", "cannot be /dev/stdout"),
    (1, LONG, "too long. Nothing was written"),
]


@pytest.mark.parametrize("option", ["--manifest", "--depfile"])
@pytest.mark.parametrize(
    ("code", "name", "said"),
    [
        *NAMED_WRONGLY,
        (2, "directory", "is a directory"),
        (2, "gone/file", "there is no directory gone"),
        (2, "model.pt", "would replace model.pt"),
        (2, "out.safetensors", "would replace out.safetensors"),
    ],
)
def test_a_file_that_cannot_be_written_is_said_before_the_output_has_its_name(
    option: str, code: int, name: str, said: str, model: Path
) -> None:
    Path("directory").mkdir()
    os.mkfifo("pipe")
    before = model.read_bytes()
    ckptconv_here("pt2safetensors", model.name, "out.safetensors", option, name).refused(code, said)
    assert not Path("out.safetensors").exists()
    assert Path("pipe").is_fifo()
    assert model.read_bytes() == before


@pytest.mark.parametrize(
    "words", ["convert {}", "convert --universal", "safetensors2dcp {}", "inspect --html", "scan --sarif"]
)
@pytest.mark.parametrize(("code", "name", "said"), NAMED_WRONGLY)
def test_no_output_takes_the_place_of_a_pipe_or_has_a_name_too_long(
    words: str, code: int, name: str, said: str, model: Path
) -> None:
    os.mkfifo("pipe")
    command, option = words.split()
    ckptconv_here(command, model.name, *(() if option == "{}" else (option,)), name).refused(code, said)
    assert Path("pipe").is_fifo()


def test_a_page_that_cannot_be_written_is_said_before_anything_is_read() -> None:
    for words in (["diff", "none", "none"], ["inspect", "none"]):
        ckptconv_here(*words, "--html", "gone/page.html").refused(2, "there is no directory gone")
    ckptconv_here("scan", "none", "--sarif", "gone/found.sarif").refused(2, "there is no directory gone")


def test_a_manifest_on_a_store_that_takes_none_is_refused_as_an_output_is(model: Path) -> None:
    ckptconv_here("convert", model.name, "--manifest", "https://host/m.json").refused(2, "cannot be written to http:")


def test_a_directory_of_outputs_that_cannot_be_made_is_named(model: Path) -> None:
    ckptconv_here("convert", model.name, "--output-dir", LONG).refused(1, f"{LONG} cannot be written", "too long")


def test_two_files_of_one_name_are_refused(model: Path) -> None:
    ckptconv_here("pt2safetensors", model.name, "--manifest", "x", "--depfile", "x").refused(2, "both name x")


def test_parts_are_not_finished_where_the_manifest_cannot_be_written(model: Path) -> None:
    for part in ("0/2", "1/2"):
        assert ckptconv_here("pt2safetensors", model.name, "out", "--part", part).code == 0
    ckptconv_here("finish", "out", "--manifest", "gone/file").refused(2, "there is no directory")
    assert not Path("out/model.safetensors").exists()
    assert ckptconv_here("finish", "out").code == 0


@pytest.mark.parametrize("address", ["foo", "foo://x", "tcp"])
def test_what_is_no_address_of_a_scheduler_is_said_at_once(address: str, model: Path) -> None:
    ckptconv_here("pt2safetensors", model.name, "--dask", address).refused(2, "is not the address of a scheduler")


# --------------------------------------------------------------------------------------------------------- the report


def test_a_universal_checkpoint_is_told_of_in_a_few_lines(tmp_path: Path) -> None:
    make_example.write(make_example.Example(params=300_000, ranks=2), tmp_path / "run")
    run = ckptconv_here("zero-to-fp32", tmp_path / "run", "--universal", tmp_path / "step_universal")
    assert run.code == 0, run.err
    assert len(run.out.splitlines()) < 10
    assert f"files in {tmp_path / 'step_universal'} (" in run.out


# ------------------------------------------------------------------------------------------------ the command itself

COMMANDS = [
    *["convert", "pt2safetensors", "safetensors2pt", "zero-to-fp32", "dcp2safetensors", "inspect", "verify", "finish"],
    *["rows split", "rows pack", "rows check"],
]


@pytest.mark.parametrize("command", ["", "rows", *COMMANDS])
def test_help_has_examples_says_what_each_argument_is_and_fits_80_columns(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    run = ckptconv_here(*command.split(), "--help")
    lines = run.out.splitlines()
    assert run.code == 0
    assert max(map(len, lines)) <= 80
    assert not re.search(r"<(str|list)|^Usage.*{", run.out), "arguments are called by their names"
    assert not [line for line in lines[1:] if line.endswith("...")], "what commands do is said whole"
    examples = lines[lines.index("Examples:" if "Examples:" in lines else "Example:") + 1 :]
    assert [line for line in examples if line.startswith(f"  ckptconv {command}")]
    if command in COMMANDS:
        arguments = lines[lines.index("Arguments:") + 1 :]
        assert all(len(line.split()) > 3 for line in arguments[: arguments.index("")])


def test_words_that_are_no_options_and_no_commands_are_met_with_those_that_are(model: Path) -> None:
    ckptconv_here("pt2safetensors", "--max_shard_siz", "1", "model.pt").refused(2, "Did you mean --max-shard-size?")
    ckptconv_here("transform", "model.pt").refused(2, "There are: convert, pt2safetensors, ", "zero-to-fp32")
    ckptconv_here("rows", "join").refused(2, "There are: split, pack, check.")


@pytest.mark.parametrize(
    "arguments", [["--json"], ["-q", "inspect", "model.pt"], ["--max_shard_size", "1GB", "verify"]]
)
def test_an_option_before_the_command_is_said_to_stand_after_it(arguments: list[str], model: Path) -> None:
    option = arguments[0].replace("_", "-")
    ckptconv_here(*arguments).refused(2, f"no option {option} of ckptconv itself", f"ckptconv COMMAND {option}")
    ckptconv_here("rows", "--tensor", "t", "split").refused(
        2, "of ckptconv rows itself", "ckptconv rows COMMAND --tensor"
    )


def test_the_word_for_the_version_leads_to_the_option(model: Path) -> None:
    ckptconv_here("version").refused(2, "No such command 'version'. Did you mean ckptconv --version?")


def test_a_file_in_the_place_of_a_command_is_known_for_one_whatever_its_name(model: Path) -> None:
    """Also if it is nearly that of a command, which is suggested else."""
    for name in ("model.pt", "finished", "verify_"):
        Path(name).touch()
        ckptconv_here(name).refused(
            2,
            f"{name} is not a command",
            f"ckptconv convert {name} converts it; ckptconv inspect {name} shows",
        )
    ckptconv_here("verity").refused(2, "Did you mean ckptconv verify?")


def test_too_many_arguments_are_named_and_what_is_done_about_them(model: Path) -> None:
    run = ckptconv_here("pt2safetensors", "a.pt", "out", "b.pt", "c d.pt")
    run.refused(2, "more arguments than ckptconv pt2safetensors takes: b.pt c d.pt.", "Quote names with blanks")


@pytest.mark.parametrize("command", ["pt2safetensors", "zero-to-fp32", "inspect", "verify"])
def test_a_variable_of_the_shell_that_was_not_set_is_an_empty_name(command: str, model: Path) -> None:
    output = [] if command == "inspect" else ["out.safetensors"]
    Path("out.safetensors").write_bytes(b"")
    ckptconv_here(command, "", *output).refused(2, "The input's name is empty.", "not set?")


@pytest.mark.parametrize("output", ["-", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/2"])
def test_an_output_does_not_go_through_a_pipe(output: str, model: Path) -> None:
    ckptconv_here("pt2safetensors", "model.pt", output).refused(2, f"OUTPUT cannot be {output}", "by a rename")
    assert os.listdir() == ["model.pt"]


def test_the_command_that_inspect_shows_can_be_pasted(model: Path) -> None:
    model.rename("my model.pt")
    run = ckptconv_here("inspect", "my model.pt", "--as", "bf16")
    assert "    ckptconv pt2safetensors 'my model.pt' OUTPUT --dtype bfloat16\n" in run.out


@pytest.mark.parametrize("option", ["--json", "--quiet", "--verbose", "--no-progress"])
def test_every_command_takes_the_options_that_say_what_is_shown(option: str) -> None:
    for command in COMMANDS:
        assert option in ckptconv_here(*command.split(), "--help").out


def test_only_options_that_are_alike_are_suggested(model: Path) -> None:
    ckptconv_here("--versoin").refused(2, "Did you mean --version?")
    ckptconv_here("verify", "--jsn", "model.pt").refused(2, "Did you mean --json?")
    run = ckptconv_here("--gson")
    run.refused(2, "no option --gson")
    assert "Did you mean" not in run.err, "two dashes are no likeness"


@pytest.mark.parametrize("command", ["pt2safetensors", "rows split"])
def test_an_option_without_its_value_leads_to_the_help_of_the_command(command: str, model: Path) -> None:
    option = "--max-shard-size" if command == "pt2safetensors" else "--jobs"
    run = ckptconv_here(*command.split(), "model.pt", option)
    run.refused(2, f"'{option}' requires an argument", f"See ckptconv {command} --help.")


def test_dtypes_are_taken_as_people_say_them(model: Path) -> None:
    for short, long in (("bf16", "bfloat16"), ("fp16", "float16"), ("fp32", "float32")):
        for dtype in (short, long):
            assert ckptconv_here("pt2safetensors", "--dtype", dtype, "model.pt", f"{dtype}.safetensors").code == 0
        assert Path(f"{short}.safetensors").read_bytes() == Path(f"{long}.safetensors").read_bytes()
        assert ckptconv_here("verify", "--dtype", short, "model.pt", f"{long}.safetensors").code == 0


def test_two_pt_files_are_verified_as_any_source_and_output(model: Path) -> None:
    torch.save({"w": torch.ones(3)}, "other.pt")
    assert ckptconv_here("verify", "model.pt", "other.pt").code == 0
    torch.save({"w": torch.zeros(3)}, "other.pt")
    ckptconv_here("verify", "model.pt", "other.pt").refused(1, "other.pt", "'w'")
