"""`ckptconv convert --output-dir`: several inputs at once, each to an output of its own."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch
from attacks.assemble import members, pickled, tensor, zipped
from attacks.corpus import CASES
from cells import naming_attacks, of_features, trained
from checkpoints import Run, ckptconv_here, contents, done
from hypothesis import given
from hypothesis import strategies as st
from processes import prepared
from safetensors.torch import save_file

import ckptconv
from ckptconv.errors import CorruptError, UsageError
from ckptconv.features.batch.command import shares
from ckptconv.features.batch.naming import InputWord, output_paths
from ckptconv.features.batch.running import SEVERITY, Outcome, first_sentence, table, worst
from ckptconv.outputs.kinds import FURTHER, NAMED

WEIGHTS = {"model.a": torch.arange(6.0).reshape(2, 3), "model.b": torch.tensor([1.0, -0.5]), "n": torch.arange(4)}
NESTED = {"s": {"x": torch.ones(3), "y": torch.zeros(2, 2)}, "epoch": 3}


def succeeding(*arguments: object) -> Run:
    """A command that succeeds."""
    return done(ckptconv_here(*arguments))


def refused(code: int, *arguments: object) -> str:
    """What a command that fails says."""
    return ckptconv_here(*arguments).refused(code)


def test_a_variable_that_was_not_set_replaces_no_input(place: Path) -> None:
    torch.save(NESTED, "a.pt")
    save_file(WEIGHTS, "b.safetensors")
    before = contents(place)
    assert "--output-dir is empty" in refused(2, "convert", "a.pt", "b.safetensors", "--output-dir", "")
    assert contents(place) == before


def test_an_output_that_is_there_is_not_replaced_if_that_is_refused(place: Path) -> None:
    for name in ("a.pt", "b.pt"):
        torch.save(NESTED, name)
    succeeding("convert", "a.pt", "b.pt", "--output-dir", "o")
    before = contents(place)
    assert "--no-clobber" in refused(1, "convert", "a.pt", "b.pt", "--output-dir", "o", "--no-clobber")
    assert contents(place) == before


def test_who_gives_several_inputs_without_it_is_led_to_it(place: Path) -> None:
    (place / "in").mkdir()
    for name in ("a.pt", "b.pt", "in/a.pt", "in/b c.pt"):
        torch.save(NESTED, name)
    hint = "convert INPUT... --output-dir DIR"
    assert f"To convert several inputs: ckptconv {hint}." in refused(2, "pt2safetensors", "a.pt", "b.pt")
    assert f"Several inputs: ckptconv {hint}." in refused(2, "pt2safetensors", "a.pt", "b.pt", "c.pt")
    assert "use --output-dir DIR instead of OUTPUT" in refused(2, "convert", "a.pt", "b c.pt", "d.pt")
    assert "--output-dir DIR instead of -o made/." in refused(2, "convert", "a.pt", "in/a.pt", "x.pt", "-o", "made/")
    other = refused(2, "convert", "a.pt", "in/a.pt", "-o", "made/")
    assert f"If the first is another input: ckptconv {hint}." in other
    # Each is a file: none was cut at its blanks.
    torch.save(NESTED, "d.pt")
    assert "Quote" not in refused(2, "convert", "a.pt", "d.pt", "in/a.pt")
    assert "Quote" not in refused(2, "pt2safetensors", "a.pt", "d.pt", "in/a.pt")
    assert "Quote it: 'in/b c.pt'." in refused(2, "convert", "a.pt", "in/b", "c.pt")
    several = refused(2, "convert", "--dtype", "bf16", "float16", "a.pt", "b.safetensors")
    assert "If 'float16' is the value of an option, use --dtype float16; an option takes one value." in several
    assert "To write a report to out.json, use --json > out.json." in refused(
        2, "convert", "a.pt", "new", "--json", "out.json"
    )
    several = refused(2, "convert", "a.pt", "new", "--checksum", "sha256")
    assert "If 'sha256' is the value of an option, use --digest sha256; an option takes one value." in several
    assert "Specify the directory too: --output-dir DIR" in refused(
        2, "convert", "a.pt", "out", "--output-name", "{stem}"
    )
    err = refused(2, "convert", "in")
    assert re.search(r"ckptconv (convert in/a.pt 'in/b c.pt' --output-dir) DIR", err), err
    assert "Specify OUTPUT last. ckptconv convert" in refused(2, "pt2safetensors", "a.pt", "--output-dir", "y")
    assert "ckptconv convert has --output-name." in refused(2, "pt2safetensors", "a.pt", "--output-name", "y")


@pytest.mark.skipif("pt" not in NAMED, reason="no feature writes .pt files")
def test_files_for_torch_are_made_of_several_too(place: Path) -> None:
    for name in ("m", "n"):
        save_file(WEIGHTS, f"{name}.safetensors")
    succeeding("convert", "m.safetensors", "n.safetensors", "--output-dir", "out", "--to", "pt")
    assert sorted(contents(place / "out")) == ["m.pt", "n.pt"]


# ------------------------------------------------------------------------------------------------------ several at once

CUT = zipped(members(pickled(tensor())))[:-40]
CODES = {"attack.pt": 3, "cut.pt": 4, "unknown.json": 5}


def mixed(place: Path) -> list[str]:
    """Twenty inputs of every format, three of them broken."""
    (place / "in").mkdir()
    for number, step in enumerate(trained()):
        shutil.copytree(step, place / "in" / f"step{number}")
    for number in range(10 - len(trained())):
        torch.save({**NESTED, "epoch": number}, place / "in" / f"m{number}.pt")
    for number in range(3):
        save_file({"w": torch.ones(3, dtype=torch.float16)}, place / "in" / f"s{number}.safetensors")
    for number in range(3):
        model = place / "in" / f"model{number}"
        model.mkdir()
        torch.save(WEIGHTS, model / "pytorch_model.bin")
    save_file(WEIGHTS, place / "whole.safetensors")
    succeeding("convert", place / "whole.safetensors", place / "in" / "shards", "--max-shard-size", "20B")
    (place / "in" / "attack.pt").write_bytes(CASES["live_os_system.pt"].make("canary"))
    (place / "in" / "cut.pt").write_bytes(CUT)
    (place / "in" / "unknown.json").write_text("{}")
    return sorted(f"in/{name}" for name in os.listdir(place / "in"))


@naming_attacks
def test_of_twenty_the_broken_ones_do_not_stop_the_others(place: Path) -> None:
    words = mixed(place)
    assert len(words) == 20
    (place / "alone").mkdir()
    for word in words:
        name = os.path.basename(word)
        output = f"alone/{name}" if Path(word).is_dir() else f"alone/{os.path.splitext(name)[0]}.safetensors"
        assert ckptconv_here("convert", word, output).code == CODES.get(name, 0)
    for jobs in (1, 2):
        out = f"out{jobs}/deep"
        run = ckptconv_here("convert", *words, "--output-dir", out, "--jobs", jobs)
        said = run.refused(3, "this file is an attack")
        assert said.splitlines()[-1] == "ckptconv: 3 of 20 inputs could not be converted."
        assert contents(place / "alone") == contents(place / out), jobs
        lines = run.out.splitlines()
        assert lines[0].split() == ["input", "input", "format", "output", "size", "time"]
        assert [line.split()[0] for line in lines[1:21]] == words, "in the order in which they were given"
        also = [line for line in lines if line.startswith("the structure record of in/m0.pt, in/m1.")]
        assert [line for line in also if " also contains values" in line]
        assert lines[-1].startswith("17 of 20 inputs converted, 3 failed: wrote ")
        kinds = {line.split()[0]: " ".join(line.split()[1:3]) for line in lines[1:-1]}
        shown = [f"error: {kind}" for kind in ("unsafe", "corrupt", "unsupported")]
        assert [kinds[f"in/{name}"] for name in CODES] == shown, jobs


def test_with_json_several_are_one_object(place: Path) -> None:
    torch.save(NESTED, "a.pt")
    Path("b.pt").write_bytes(CUT)
    save_file(WEIGHTS, "c.safetensors")
    words = ["a.pt", "b.pt", "c.safetensors", "none.pt"]
    alone = succeeding("convert", "a.pt", "again.safetensors", "--json").json
    for jobs in (1, 3):
        run = ckptconv_here("convert", *words, "--output-dir", f"o{jobs}", "--json", "--jobs", jobs)
        told = run.json
        assert run.code == told["error"]["exit_code"] == 4
        assert (told["ok"], told["command"]) == (False, "convert")
        assert [each["input"] for each in told["results"]] == words, jobs
        assert [each["ok"] for each in told["results"]] == [True, False, True, False], jobs
        assert [each["error"]["kind"] for each in told["results"] if not each["ok"]] == ["corrupt", "usage"]
        assert alone.keys() - {"version", "command"} == told["results"][0].keys()
        assert (told["inputs"], told["converted"], told["failed"]) == (4, 2, 2)
        for total in ("tensors", "bytes_written", "bytes_read", "input_bytes"):
            assert told[total] == sum(each[total] for each in told["results"] if each["ok"]), total
    run = succeeding("convert", "a.pt", "--output-dir", "o", "--json", "-q")
    assert run.json["ok"]
    assert len(run.json["results"]) == 1, "one input is told of as several are"


def test_a_plan_for_several_writes_nothing(place: Path) -> None:
    torch.save(NESTED, "a.pt")
    run = succeeding("convert", "a.pt", "--output-dir", "o/p", "--dry-run")
    assert "1 of 1 input would be converted" in run.out
    assert os.listdir() == ["a.pt"]


def test_a_directory_in_which_nothing_was_made_does_not_stay(place: Path) -> None:
    refused(2, "convert", "none.pt", "--output-dir", "o")
    assert os.listdir() == []
    Path("file").touch()
    torch.save(NESTED, "a.pt")
    assert "file is not a directory" in refused(2, "convert", "a.pt", "--output-dir", "file")


def test_options_for_one_output_are_refused_for_several(place: Path) -> None:
    torch.save(NESTED, "a.pt")
    options = (
        *(f"--{name}=o" for name in FURTHER),
        "--manifest=m",
        *itertools.chain(*of_features("OF_ONE")),
    )
    for option in options:
        said = refused(2, "convert", "a.pt", "--output-dir", "o", option)
        assert f"{option.partition('=')[0]} applies to one conversion" in said
    assert "must be converted alone" in refused(2, "convert", "-", "a.pt", "--output-dir", "o")
    of_digests = "convert", "a.pt", "--output-dir", "o", "--digest", "sha256"
    assert "--output-name '{stem}'" in refused(2, *of_digests)
    assert os.listdir() == ["a.pt"]
    succeeding(*of_digests, "--output-name", "{stem}")
    assert '"digest"' in Path("o/a/.ckptconv-manifest.json").read_text()


def test_templates_name_files_and_directories(place: Path) -> None:
    for run in ("r1", "r2"):
        (place / run).mkdir()
        torch.save(NESTED, f"{run}/model.pt")
    words = ["r1/model.pt", "r2/model.pt"]
    err = refused(2, "convert", *words, "--output-dir", "o")
    assert "The outputs of r1/model.pt and r2/model.pt would both be o/model.safetensors. They were not conv" in err
    assert err.count("--output-name") == 1
    proposed = re.findall("different names, such as '(.+?)'", err)
    assert not Path("o").exists()
    assert proposed
    for template, expected in [
        ("{parent}.safetensors", ["r1.safetensors", "r2.safetensors"]),
        ("{parent}-{stem}", ["r1-model/model.safetensors", "r2-model/model.safetensors"]),
        ("{parent}/{stem}.safetensors", ["r1/model.safetensors", "r2/model.safetensors"]),
        ("{number}.safetensors", ["1.safetensors", "2.safetensors"]),
        *((template, ["r1-model.safetensors", "r2-model.safetensors"]) for template in proposed),
    ]:
        succeeding("convert", *words, "--output-dir", "o", "--output-name", template)
        assert sorted(name for name in contents(place / "o") if name.endswith(".safetensors")) == expected
        shutil.rmtree("o")


@pytest.mark.parametrize(
    ("words", "proposed"),
    [
        (["r1/model.pt", "r2/model.pt"], "'{parent}-{stem}.safetensors'."),
        (["r1/model.pt", "r1/model.bin"], "'{name}.safetensors'."),
        (["r1/model.pt", "r1/model.bin", "r2/model.pt"], "'{parent}-{name}.safetensors'."),
        (
            ["a/r/model.pt", "b/r/model.pt"],
            "'{number}-{stem}.safetensors'. {number} is the position in the command: if ",
        ),
        (["r1/step/", "r2/step/"], "'{parent}-{stem}'."),
        (["r1/step/", "r2/step/", "r1/step.pt"], "'{parent}-{name}'."),
        (["r1/model.pt", "./r1/model.pt"], "Specify it once."),
        (["r1/model.pt", "r1/model.pt"], "Specify it once."),
    ],
)
def test_a_template_is_proposed_that_tells_the_outputs_apart(words: list[str], proposed: str) -> None:
    inputs = [InputWord(word, word.endswith("/")) for word in words]
    template = re.search("'(.*?)'", proposed)
    errors = [path for path in output_paths(inputs, "o") if isinstance(path, UsageError)]
    assert errors
    assert all(error.hint.partition("such as ")[2].startswith(proposed) or error.hint == proposed for error in errors)
    if template:
        assert all(isinstance(path, str) for path in output_paths(inputs, "o", template[1]))


def test_the_table_says_which_outputs_replaced_others(place: Path) -> None:
    for name in ("a.pt", "b.pt"):
        torch.save(NESTED, name)
    succeeding("convert", "a.pt", "--output-dir", "o")
    for options, verb in ((["--dry-run"], "replaces"), ([], "replaced")):
        run = ckptconv_here("convert", "a.pt", "b.pt", "--output-dir", "o", *options)
        first, second = [line for line in (run.out + run.err).splitlines() if line.startswith(("a.pt", "b.pt"))]
        assert first.endswith(f"{verb} an earlier output")
        assert verb not in second


# ------------------------------------------------------------------------------------------------------- its pure parts

# What names of files may have in them, and what leads elsewhere.
HOSTILE = st.one_of(
    st.sampled_from([".", "..", "~", "a", "b", "a.pt", "a.bin", ".pt", "{stem}", "s3:", "a::b", "%2e%2e", "-", "A"]),
    st.text(st.characters(blacklist_characters="/\0", blacklist_categories=["Cs"]), min_size=1, max_size=5),
)
WORDS = st.lists(st.builds("/".join, st.lists(HOSTILE, min_size=1, max_size=4)), min_size=1, max_size=6)
PIECES = ["{stem}", "{name}", "{parent}", "{number}", "/", "..", ".", "-", "x", ".safetensors"]
TEMPLATES = st.one_of(
    st.just(""),
    st.lists(st.sampled_from(PIECES), min_size=1, max_size=5).map("".join),
    st.text(max_size=8),
)  # fmt: skip


@given(
    WORDS,
    TEMPLATES,
    st.lists(st.booleans(), min_size=6, max_size=6),
    st.sampled_from(["out", "/o", "memory://bucket/o"]),
)
def test_no_two_outputs_have_one_name_and_none_leads_out_of_the_directory(
    words: list[str], template: str, kinds: list[bool], directory: str
) -> None:
    def resolve(path: str) -> str:
        return path if path.startswith("memory://") else os.path.abspath(path)

    inputs = [InputWord(word, kind) for word, kind in zip(words, kinds, strict=False)]
    try:
        paths = output_paths(inputs, directory, template, resolve)
    except UsageError:
        return
    places = [resolve(path) for path in paths if isinstance(path, str)]
    assert len(places) == len(set(places))
    assert len(paths) == len(words)
    for place in places:
        assert place.startswith(resolve(directory) + "/")
        assert ".." not in place.split("/")
        assert not [other for other in places if other.startswith(place + "/")]
        assert place not in {resolve(word) for word in words}


def test_what_is_no_template_or_leads_out_is_refused() -> None:
    fields = r"not a valid template.*\{stem\}, \{name\}, \{parent\}, \{number\}"
    for said, templates in (
        ("not a valid name in out", ["..", "../{stem}", "/{stem}", "{stem}/..", "{stem}//x", ".", "a/./b"]),
        (fields, ["{stem", "{}", "{0}", "{other}", "{stem.upper}", "{stem!r}", "{number:03}", "}"]),
    ):
        for template in templates:
            with pytest.raises(UsageError, match=said):
                output_paths([InputWord("a.pt")], "out", template)


NAMED = [
    ("x/epoch=3.ckpt", False, "", "out/epoch=3.safetensors"),
    ("x/pytorch_model-00001-of-00002.bin", False, "", "out/model-00001-of-00002.safetensors"),
    ("x/pytorch_model.bin.index.json", False, "", "out/x"),
    ("runs/step-1.5/", True, "", "out/step-1.5"),
    ("runs/step-1.5/", True, "{parent}-{stem}", "out/runs-step-1.5"),
    ("a/model@v1", True, "", "out/model@v1"),
    *itertools.chain(*of_features("CALLED")),
]


def test_names_are_made_of_what_an_input_is_called() -> None:
    for word, is_directory, template, expected in NAMED:
        assert output_paths([InputWord(word, is_directory)], "out", template) == [expected]


def test_an_output_does_not_take_the_place_of_an_input() -> None:
    paths = output_paths([InputWord("x/b.pt"), InputWord("b.safetensors"), InputWord("c.pt")], ".")
    shared, again, free = paths
    assert shared is again
    assert isinstance(shared, UsageError)
    assert "The output of x/b.pt, b.safetensors would be ./b.safetensors, and b.safetensors is an input" in str(shared)
    assert "They were not converted." in str(shared)
    assert free == "./c.safetensors"


def test_inputs_whose_outputs_would_have_one_name_do_not_keep_the_others(place: Path) -> None:
    """As with `convert *`, where LICENSE.txt and LICENSE.md are no checkpoints anyway."""
    torch.save(NESTED, "a.pt")
    for name in ("b.txt", "b.md", "b.log"):
        Path(name).write_text("no checkpoint")
    for jobs in ("1", "2"):
        run = ckptconv_here("convert", "a.pt", "b.log", "b.md", "b.txt", "--output-dir", f"o{jobs}", "--jobs", jobs)
        said = run.refused(2, "3 of 4 inputs could not be converted")
        assert said.count(f"b.log, b.md and b.txt would all be o{jobs}/b.safetensors") == 1
        assert [name for name in os.listdir(f"o{jobs}") if name.endswith(".safetensors")] == ["a.safetensors"]


def test_the_exit_code_is_the_worst() -> None:
    assert worst([]) == 0
    assert [worst(SEVERITY[index:]) for index in range(len(SEVERITY))] == [3, 4, 5, 1, 2, 0]
    assert worst([3, 130, 4]) == 130
    assert worst([143, 3]) == 143


def test_threads_and_memory_are_shared() -> None:
    mib = 1 << 20
    assert shares({}, 20, far=False) == (1, {})
    assert shares({"jobs": 1}, 20, far=False) == (1, {"jobs": 1})
    assert shares({"jobs": 4}, 20, far=False) == (4, {"jobs": 1, "memory": 2 * mib})
    assert shares({"jobs": 8}, 2, far=False) == (2, {"jobs": 4, "memory": 4 * mib})
    assert shares({"jobs": 4}, 4, far=True) == (4, {"jobs": 1, "memory": 6 * mib})
    assert shares({"jobs": 2, "memory": 6 * mib}, 3, far=True) == (2, {"jobs": 1, "memory": 3 * mib})


def test_the_table_fits_the_terminal() -> None:
    error = CorruptError("long/" * 20 + "x.pt is cut. And more.", "Copy it.")
    output = ckptconv.result.OutputFile("out/" * 20 + "x", 10, 1)
    report = ckptconv.Report("in", [output], "torch zip", 1, {}, {}, [], [])
    for width in (60, 80, 200, None):
        lines = list(table([Outcome("in/" * 30 + "x.pt", report), Outcome("y.pt", error=error), Outcome("z")], width))
        assert len(lines) == 4
        assert all(width is None or len(line) <= width for line in lines), width
    assert first_sentence(error.message).endswith("x.pt is cut")


def test_an_error_that_inputs_share_is_told_once() -> None:
    error = CorruptError("a and b would both be x. And more.")
    lines = [*table([Outcome("a", error=error), Outcome("b", error=error), Outcome("c")], 200)]
    assert lines[1].split(maxsplit=3) == ["a", "error:", "corrupt", "a and b would both be x"]
    assert lines[2].split(maxsplit=3) == ["b", "error:", "corrupt", "(the same)"]


def test_an_output_beside_an_output_directory_is_not_taken_for_an_input(place: Path) -> None:
    torch.save(NESTED, "a.pt")
    run = ckptconv_here("convert", "a.pt", "b.safetensors", "--output-dir", "out")
    run.refused(2, "with --output-dir every argument is an input", "ckptconv convert a.pt b.safetensors")
    assert not Path("out").exists()
    assert ckptconv_here("convert", "a.pt", "b.safetensors").code == 0
    assert ckptconv_here("convert", "a.pt", "b.safetensors", "--output-dir", "out").code == 0


def test_rows_of_different_inputs_differ_in_any_width() -> None:
    names = [
        f"model.layers.{layer}.mlp.experts.{expert}.{way}_proj.weight"
        for layer in (1, 11) for expert in (7, 17) for way in ("up", "down")
    ]  # fmt: skip
    for width in (40, 50, 60, 80, 100, 200, None):
        shown = [line.partition("  ")[0] for line in table([Outcome(name) for name in names], width)]
        assert len({*shown}) == len(names) + 1, width


# ------------------------------------------------------------------------------------------------------------- signals

# Slow enough for a signal to come; "!" in the named file says that writing of the second input has begun.
SLOW = """
import os, sys, time
from ckptconv.storage import writing
write_at = writing.LocalWriter.write_at
def slowly(self, offset, data):
    write_at(self, offset, data)
    if len(data) > 100_000:
        with open({begun!r}, "w") as begun:
            begun.write("!")
        time.sleep(600)
writing.LocalWriter.write_at = slowly
"""


def stopped(place: Path, number: signal.Signals, jobs: int, *options: str) -> tuple[int, str, str]:
    """How a conversion of three ends if the signal comes while it writes the second."""
    for name in "abc":
        torch.save({"w": torch.full((100_000 if name == "b" else 1000,), 1.0)}, place / f"{name}.pt")
    os.mkfifo(place / "begun")
    slow = SLOW.format(begun=str(place / "begun"))
    code = slow + (
        "from ckptconv.cli import main\nfrom ckptconv.features.batch import running\n"
        f"running.START = {slow!r}.replace('{{', '{{{{').replace('}}', '}}}}') + running.START\nmain.main(sys.argv[1:])"
    )
    words = ["a.pt", "b.pt", "c.pt", "--output-dir", "o", "--jobs", str(jobs), *options]
    process = prepared().python(code, "convert", *words, cwd=place)
    with open(place / "begun") as begun:
        assert begun.read(1) == "!"
    process.send_signal(number)
    out, err = process.communicate()
    assert "Traceback" not in err, err
    os.unlink(place / "begun")
    return process.wait(), out, err


@pytest.mark.parametrize(
    ("jobs", "number", "code"), [(1, signal.SIGTERM, 143), (2, signal.SIGTERM, 143), (2, signal.SIGINT, 130)]
)
def test_a_signal_stops_all_and_nothing_half_made_is_left(
    jobs: int, number: signal.Signals, code: int, tmp_path: Path
) -> None:
    found, out, err = stopped(tmp_path, number, jobs, "--json")
    assert found == code
    told = json.loads(out)
    assert told["error"]["exit_code"] == code
    assert told["error"]["kind"] == "interrupted"
    made = {each["input"] for each in told["results"] if each["ok"]}
    assert {name.replace(".safetensors", ".pt") for name in contents(tmp_path / "o")} == made, "and nothing staged"
    assert "b.pt" not in made
    if jobs == 1:
        assert made == {"a.pt"}
    assert f"Stopped by {number.name}. {len(made) or 'No'}" in err


def test_after_a_signal_the_table_says_what_was_done_and_what_not(tmp_path: Path) -> None:
    code, out, err = stopped(tmp_path, signal.SIGINT, 1)
    assert code == 130
    rows = {line.split()[0]: line for line in out.splitlines()}
    assert "o/a.safetensors" in rows["a.pt"]
    assert rows["b.pt"].endswith("interrupted")
    assert rows["c.pt"].endswith("not begun")
    assert err.splitlines()[-1] == (
        "ckptconv: Stopped by SIGINT. 1 of 3 inputs converted; no other output was published."
    )


def test_a_worker_imports_nothing_from_the_current_directory(place: Path) -> None:
    for name in ("typing", "threading", "numpy", "multiprocessing"):
        Path(f"{name}.py").write_text("open('canary', 'w')")
    for name in "ab":
        torch.save(NESTED, f"{name}.pt")
    succeeding("convert", "a.pt", "b.pt", "--output-dir", "o", "--jobs", "2", "--dtype", "bf16")
    assert not Path("canary").exists()


def test_a_worker_that_dies_fails_its_input_alone(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckptconv.features.batch import running

    for name in "abc":
        torch.save(NESTED, f"{name}.pt")
    killing = (
        "from ckptconv import conversion\nimport os\nconvert = conversion.convert\n"
        "conversion.convert = lambda source, *a, **k: os.kill(os.getpid(), 9) if source == 'b.pt' else "
        "convert(source, *a, **k)\n"
    )
    monkeypatch.setattr(running, "START", killing + running.START)
    run = ckptconv_here("convert", "a.pt", "b.pt", "c.pt", "--output-dir", "o", "--jobs", "2", "--json")
    assert run.code == 1
    assert [each["ok"] for each in run.json["results"]] == [True, False, True]
    assert "its conversion process ended with signal 9" in run.json["results"][1]["error"]["message"]
    assert sorted(os.listdir("o")) == ["a.safetensors", "c.safetensors"]


def test_shards_of_one_set_are_to_be_converted_as_a_set() -> None:
    shards = [f"model/model-{number:05}-of-00002.safetensors" for number in (1, 2)]
    assert "Convert the shards together: ckptconv convert model out." in refused(2, "convert", *shards, "out")
    other = refused(2, "convert", *shards, "other/model-00001-of-00002.safetensors")
    assert "To convert several inputs separately, use --output-dir DIR instead of OUTPUT." in other
    told = refused(2, "convert", *shards, "model/model-00003-of-00003.safetensors", "-o", "made")
    assert "Convert the shards together: ckptconv convert model made." in told
    told = refused(2, "convert", "--", "a.pt", "b c.pt", "--output-dir", "made")
    assert "After --, every argument is a file name, including --output-dir: put options before --." in told
