"""`ckptconv convert`: one command for every input, for several at once, and from safetensors to safetensors."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from attacks.assemble import members, pickled, tensor, zipped
from attacks.corpus import CASES
from cells import looking, of_features, trained
from checkpoints import COMMAND, Run, bits, ckptconv_here, contents, done, metadata_of
from hypothesis import given
from hypothesis import strategies as st
from processes import prepared
from safetensors.torch import load_file, save_file

import ckptconv
from ckptconv.cli.batch import SEVERITY, Outcome, first_sentence, table, worst
from ckptconv.cli.convert import shares
from ckptconv.cli.naming import InputWord, output_paths
from ckptconv.cli.registered import COMMANDS
from ckptconv.errors import CorruptError, UsageError
from ckptconv.outputs.kinds import FURTHER

WEIGHTS = {"model.a": torch.arange(6.0).reshape(2, 3), "model.b": torch.tensor([1.0, -0.5]), "n": torch.arange(4)}
NESTED = {"s": {"x": torch.ones(3), "y": torch.zeros(2, 2)}, "epoch": 3}


def succeeding(*arguments: object) -> Run:
    """A command that succeeds."""
    return done(ckptconv_here(*arguments))


def refused(code: int, *arguments: object) -> str:
    """What a command that fails says."""
    return ckptconv_here(*arguments).refused(code)


def flags_of(command: str) -> set[str]:
    """The names of a command's options."""
    parameters = COMMAND.commands[command].params  # type: ignore[attr-defined]
    return {flag for each in parameters if each.param_type_name == "option" for flag in each.opts}


def test_it_has_every_option_of_the_commands_for_a_format() -> None:
    for command in ("pt2safetensors", "safetensors2pt", *itertools.chain(*of_features("FORMATS"))):
        assert flags_of(command) - flags_of("convert") == set(), command
    opening = {"--tag", "--exclude-frozen-parameters", "--master", "--unstack", "--raw", "--inert"}
    for command in itertools.chain(*of_features("CONVERTING")):
        assert opening <= flags_of(command), command


def a_set(directory: Path) -> None:
    """A sharded set of torch files, with its index."""
    directory.mkdir()
    names = {f"pytorch_model-0000{number}-of-00002.bin": name for number, name in ((1, "model.a"), (2, "model.b"))}
    for file, name in names.items():
        torch.save({name: WEIGHTS[name]}, directory / file)
    index = {"metadata": {}, "weight_map": {name: file for file, name in names.items()}}
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps(index))


# ---------------------------------------------------------------------------------------------- one of every format

MAKERS: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "file": (lambda path: torch.save(NESTED, path), "in.pt", "pt2safetensors"),
    "set": (a_set, "in", "pt2safetensors"),
    **{name: maker for more in of_features("MAKERS") for name, maker in more.items()},
}


def test_it_does_what_the_command_for_a_format_does(place: Path) -> None:
    many = ["--dtype", "bf16", "--max-shard-size", "10MB", "--tied", "duplicate"]
    for kind, (make, name, command) in MAKERS.items():
        source = place / kind / name
        source.parent.mkdir()
        make(source)
        for output, options in (("out", []), ("out.safetensors", []), ("out", many)):
            special, obvious = (place / f"{way} {kind} {output} {len(options)}" for way in ("special", "obvious"))
            special.mkdir()
            obvious.mkdir()
            told = succeeding(command, source, special / output, "--json", *options).json
            other = succeeding("convert", source, obvious / output, "--json", *options).json
            assert contents(special) == contents(obvious), (kind, output)
            assert other.pop("command") == "convert"
            assert told.keys() - {"command"} == other.keys(), kind
            succeeding("verify", source, obvious / output, *options)


def test_the_index_of_a_set_stands_for_the_set(place: Path) -> None:
    a_set(place / "in")
    succeeding("pt2safetensors", "in/pytorch_model.bin.index.json", "special")
    succeeding("convert", "in/pytorch_model.bin.index.json", "obvious")
    assert contents(place / "special") == contents(place / "obvious")


def test_safetensors_become_a_file_for_torch_if_the_output_is_called_so(place: Path) -> None:
    torch.save(NESTED, "in.pt")
    succeeding("convert", "in.pt", "in.safetensors")
    succeeding("safetensors2pt", "in.safetensors", "back.pt")
    expected = Path("back.pt").read_bytes()
    succeeding("convert", "in.safetensors", "back.pt")
    assert Path("back.pt").read_bytes() == expected
    for suffix in ("pth", "bin", "ckpt"):
        succeeding("convert", "in.safetensors", f"back.{suffix}")
        assert torch.load(f"back.{suffix}")["epoch"] == 3


def test_without_an_output_it_is_beside_the_input(place: Path) -> None:
    (place / "runs").mkdir()
    torch.save(NESTED, "runs/x.pt")
    steps = {f"step{number}": step for number, step in enumerate(trained())}
    for name, step in steps.items():
        shutil.copytree(step, f"runs/{name}")
    for source in ("runs/x.pt", *(f"runs/{name}/" for name in steps)):
        succeeding("convert", source)
    made = {name for step in steps for name in (step, f"{step}-safetensors")}
    assert set(os.listdir("runs")) == {"x.pt", "x.safetensors", *made}
    for name in steps:
        os.chdir(place / "runs" / name)
        shutil.rmtree(f"../{name}-safetensors")
        succeeding("convert", ".")
        assert Path(f"../{name}-safetensors").is_dir()


def test_a_prefix_of_wrappers_is_told(place: Path) -> None:
    names = {"_orig_mod.module.a": torch.ones(2), "_orig_mod.module.b": torch.ones(2)}
    torch.save(names, "flat.pt")
    torch.save({"epoch": 1, "state_dict": names}, "train.pt")
    torch.save({"model.a": torch.ones(2)}, "model.pt")  # which may be the module's own name
    torch.save({1: torch.ones(2)}, "numbers.pt")
    save_file(names, "flat.safetensors")
    told = "the prefix of a model wrapper"
    for command in (("convert", "--output-dir=o", "--dry-run"), *((each,) for each in looking())):
        for name in ("flat.pt", "flat.safetensors"):
            said = succeeding(command[0], name, *command[1:], "--json").out
            assert f"{told}; --strip-prefix _orig_mod.module. removes it." in said
    words = ("convert", "train.pt", "out.safetensors")
    assert f"{told}; --key state_dict --strip-prefix _orig_mod.module. removes it." in succeeding(*words).out
    assert told not in succeeding(*words, "--key", "state_dict", "--strip-prefix", "_orig_mod.module.").out
    for name in ("model.pt", "numbers.pt"):
        assert told not in succeeding("convert", name).out


def test_an_output_that_cannot_be_written_is_refused_with_what_to_do(place: Path) -> None:
    save_file(WEIGHTS, "a.safetensors")
    for name in ("a.pt", "b.pt"):
        torch.save(NESTED, name)
    succeeding("convert", "a.pt", "b.pt", "--output-dir", "o")
    before = contents(place)
    for command, code, said in (
        ("convert a.safetensors ./a.safetensors", 2, "Write it to another path, and rename it afterwards"),
        ("convert a.safetensors", 2, "is already in safetensors, so it needs an OUTPUT"),
        ("pt2safetensors a.pt b.pt", 2, "is an existing checkpoint"),
        ("pt2safetensors a.pt b.pt", 2, "convert INPUT... --output-dir DIR"),
        ("convert a.pt b.pt --output-dir o --no-clobber", 1, "--no-clobber"),
    ):
        assert said in refused(code, *command.split())
        assert contents(place) == before, command


def test_a_directory_of_several_checkpoints_is_said_to_hold_them(place: Path) -> None:
    (place / "in").mkdir()
    torch.save(NESTED, "in/a.pt")
    torch.save(NESTED, "in/b c.pt")
    Path("in/notes.txt").write_text("notes")
    Path("in/fsdp_config.json").write_text("{}")
    err = refused(2, "convert", "in")
    assert "It holds several: in/a.pt, in/b c.pt." in err
    command = re.search(r"ckptconv (convert in/a.pt 'in/b c.pt' --output-dir) DIR", err)
    assert command, err


def test_verify_does_not_compare_a_file_with_itself(place: Path) -> None:
    save_file(WEIGHTS, "a.safetensors")
    torch.save(NESTED, "a.pt")
    for name in ("a.safetensors", "a.pt"):
        assert f"{name} is both SOURCE and OUTPUT." in refused(2, "verify", name, f"./{name}")


def test_a_directory_of_one_file_names_it(place: Path) -> None:
    (place / "in").mkdir()
    torch.save(NESTED, "in/epoch=0.ckpt")
    assert "Give the checkpoint in it: in/epoch=0.ckpt" in refused(2, "convert", "in", "out")


def test_a_variable_that_was_not_set_replaces_no_input(place: Path) -> None:
    torch.save(NESTED, "a.pt")
    save_file(WEIGHTS, "b.safetensors")
    before = contents(place)
    assert "--output-dir is empty" in refused(2, "convert", "a.pt", "b.safetensors", "--output-dir", "")
    assert contents(place) == before


def test_a_glob_that_the_shell_did_not_expand_is_explained(place: Path) -> None:
    torch.save(NESTED, "a.pt")
    assert (
        "*.pt does not exist. Nothing was written. The shell did not expand it; without quotes it would match a.pt."
        in refused(2, "convert", "*.pt")
    )
    assert "*.bin does not exist. Nothing was written. The shell found no match for the pattern" in refused(
        2, "convert", "*.bin", "out"
    )
    torch.save(NESTED, "x[1].pt")
    succeeding("convert", "x[1].pt")


def test_more_words_than_two_lead_to_a_directory_and_to_commands_that_combine(place: Path) -> None:
    err = refused(2, "convert", "a.pt", "b c.pt", "--dtype", "bf16", "d.pt", "--storage-options", '{"key": "secret"}')
    assert "found 3 arguments" in err
    assert "give --output-dir DIR instead of OUTPUT" in err
    assert [name for name in ("average", "merge") if name in err] == [n for n in ("average", "merge") if n in COMMANDS]
    assert "secret" not in err
    assert "--output-dir DIR" in refused(2, "convert", "a.pt", "out", "--output-name", "{stem}")


def test_from_python_too(place: Path) -> None:
    save_file(WEIGHTS, "a.safetensors", metadata={"format": "pt"})
    report = ckptconv.convert("a.safetensors", "b.safetensors", dtype="bf16")
    assert report.tensors == 3
    assert ckptconv.verify("a.safetensors", "b.safetensors", dtype="bf16").tensors == 3
    with pytest.raises(ckptconv.DifferenceError):
        ckptconv.verify("a.safetensors", "b.safetensors")


# ---------------------------------------------------------------------------------------- safetensors to safetensors


def cast(tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in tensors.items()}


WAYS: dict[str, tuple[list[str], Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]]] = {
    "as it is": ([], lambda all_: all_),
    "bfloat16": (["--dtype", "bf16"], lambda all_: cast(all_, torch.bfloat16)),
    "float16": (["--dtype", "fp16"], lambda all_: cast(all_, torch.float16)),
    "include": (["--include", "model.*"], lambda all_: {name: all_[name] for name in ("model.a", "model.b")}),
    "exclude": (["--exclude", "*.b", "--exclude", "n"], lambda all_: {"model.a": all_["model.a"]}),
    "strip": (["--strip-prefix", "model."], lambda all_: {n.removeprefix("model."): t for n, t in all_.items()}),
    "rename": (["--rename", "^model=net"], lambda all_: {n.replace("model", "net"): t for n, t in all_.items()}),
    "all at once": (
        ["--include", "model.*", "--strip-prefix", "model.", "--rename", "a=z", "--dtype", "bf16"],
        lambda all_: cast({"z": all_["model.a"], "b": all_["model.b"]}, torch.bfloat16),
    ),
}


def test_safetensors_are_changed_as_the_library_would(place: Path) -> None:
    save_file(WEIGHTS, "in.safetensors", metadata={"format": "pt"})
    succeeding("convert", "in.safetensors", "in", "--max-shard-size", "20")
    assert len(list(Path("in").glob("model-*-of-00003.safetensors"))) == 3
    for number, (way, (options, expected)) in enumerate(WAYS.items()):
        save_file(expected(WEIGHTS), "by_hand.safetensors", metadata={"format": "pt"})
        by_hand = Path("by_hand.safetensors").read_bytes()
        is_all = way in ("as it is", "all at once")
        for source in ("in.safetensors", "in", "in/model.safetensors.index.json")[: 3 if is_all else 2]:
            shards = f"{number}-{len(source)}"
            succeeding("convert", source, "out.safetensors", "--verify", *options)
            assert Path("out.safetensors").read_bytes() == by_hand, (way, source)
            succeeding("verify", source, "out.safetensors", *options)
            succeeding("convert", source, shards, "--max-shard-size", "1", "--verify", *options)
            succeeding("verify", source, shards)  # the options are in its manifest
            succeeding("convert", shards, "again.safetensors")
            assert Path("again.safetensors").read_bytes() == by_hand, (way, source)


def test_a_set_keeps_its_files_unless_other_sizes_are_asked_for(place: Path) -> None:
    save_file(WEIGHTS, "in.safetensors", metadata={"format": "pt"})
    succeeding("convert", "in.safetensors", "in", "--max-shard-size", "20")
    succeeding("convert", "in", "cast", "--dtype", "bf16")
    for file in Path("in").glob("*.safetensors"):
        assert set(load_file(file)) == set(load_file(Path("cast") / file.name))
    succeeding("convert", "in", "one", "--max-shard-size", "1GB")
    assert [path.name for path in Path("one").glob("*.safetensors")] == ["model.safetensors"]


def test_metadata_stays_in_every_file(place: Path) -> None:
    told = {"format": "tf", "licence": "MIT", "step": "7"}
    save_file(WEIGHTS, "in.safetensors", metadata=told)
    succeeding("convert", "in.safetensors", "out.safetensors", "--dtype", "bf16", "--verify")
    assert metadata_of(place / "out.safetensors") == told
    succeeding("convert", "in.safetensors", "shards", "--max-shard-size", "20", "--verify")
    succeeding("verify", "in.safetensors", "shards")
    for file in Path("shards").glob("*.safetensors"):
        assert metadata_of(file) == told
    succeeding("convert", "shards", "again.safetensors", "--verify")
    assert metadata_of(place / "again.safetensors") == told
    save_file(cast(WEIGHTS, torch.bfloat16), "out.safetensors", metadata={**told, "step": "8"})
    assert "does not say that its step is '7'" in refused(
        1, "verify", "in.safetensors", "out.safetensors", "--dtype", "bf16"
    )


def test_metadata_that_would_become_a_tied_name_is_left_out_and_said_to_be(place: Path) -> None:
    save_file(WEIGHTS, "in.safetensors", metadata={"author": "a", "b": "x", "other": "z"})
    run = succeeding("convert", "in.safetensors", "out.safetensors", "--strip-prefix", "model.", "--verify")
    assert "left out of the metadata: 'author', 'b'." in run.err
    assert metadata_of(place / "out.safetensors") == {"format": "pt", "other": "z"}


def test_files_of_a_set_that_say_different_things_are_told_of(place: Path) -> None:
    for number, name in ((1, "model.a"), (2, "model.b")):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: WEIGHTS[name]}, file, metadata={"step": str(number), "ckptconv.structure": "{}"})
    index = {
        "metadata": {},
        "weight_map": {f"model.{n}": f"model-0000{i}-of-00002.safetensors" for i, n in ((1, "a"), (2, "b"))},
    }
    Path("model.safetensors.index.json").write_text(json.dumps(index))
    run = succeeding("convert", ".", "out.safetensors")
    assert "the metadata of its files differs in 'step'; the metadata of the last file is used" in run.err
    assert "the structure record of one of its files was left out" in run.err
    assert metadata_of(place / "out.safetensors") == {"format": "pt", "step": "2"}


def test_ties_stay_ties(place: Path) -> None:
    shared = torch.arange(4.0)
    torch.save({"embed": shared, "head": shared, "own": torch.ones(4)}, "in.pt")
    succeeding("convert", "in.pt", "in.safetensors", "--no-structure")
    succeeding("convert", "in.safetensors", "out.safetensors", "--rename", "^=model.", "--dtype", "bf16", "--verify")
    assert metadata_of(place / "out.safetensors") == {"format": "pt", "model.head": "model.embed"}
    assert set(load_file("out.safetensors")) == {"model.embed", "model.own"}
    succeeding("convert", "out.safetensors", "apart.safetensors", "--tied", "duplicate", "--verify")
    found = load_file("apart.safetensors")
    assert torch.equal(found["model.head"], found["model.embed"])


def test_the_structure_record_stays_true(place: Path) -> None:
    torch.save(NESTED, "in.pt")
    succeeding("convert", "in.pt", "in.safetensors")
    succeeding("convert", "in.safetensors", "cast.safetensors", "--dtype", "bf16", "--verify")
    succeeding("convert", "cast.safetensors", "back.pt")
    back = torch.load("back.pt")
    assert back["epoch"] == 3
    assert torch.equal(back["s"]["x"], NESTED["s"]["x"].bfloat16())  # type: ignore[index]
    succeeding("convert", "in.safetensors", "shards", "--max-shard-size", "12", "--verify")
    succeeding("convert", "shards", "merged.safetensors", "--verify")
    assert Path("merged.safetensors").read_bytes() == Path("in.safetensors").read_bytes()


def test_names_given_in_an_earlier_conversion_stay(place: Path) -> None:
    torch.save(NESTED, "in.pt")
    succeeding("convert", "in.pt", "renamed.safetensors", "--rename", "^s=net")
    succeeding("convert", "renamed.safetensors", "out.safetensors", "--dtype", "bf16", "--verify")
    assert set(load_file("out.safetensors")) == {"net.x", "net.y"}
    succeeding("verify", "renamed.safetensors", "out.safetensors", "--dtype", "bf16")
    succeeding("convert", "out.safetensors", "back.pt")
    assert torch.load("back.pt")["s"].keys() == {"x", "y"}
    succeeding("convert", "renamed.safetensors", "again.safetensors", "--rename", "net=t", "--verify")
    assert set(load_file("again.safetensors")) == {"t.x", "t.y"}
    succeeding("convert", "again.safetensors", "back.pt")
    assert torch.load("back.pt")["s"].keys() == {"x", "y"}
    run = succeeding("convert", "renamed.safetensors", "some.safetensors", "--include", "net.x", "--verify")
    assert "its structure record was left out" in run.err
    assert set(load_file("some.safetensors")) == {"net.x"}
    assert metadata_of(place / "some.safetensors") == {"format": "pt"}


def test_a_complex_tensor_is_not_cast_whatever_it_is_called(place: Path) -> None:
    torch.save({"s": {"z": torch.tensor([1 + 2j]), "w": torch.ones(2)}}, "in.pt")
    succeeding("convert", "in.pt", "renamed.safetensors", "--rename", "^s=net")
    succeeding("convert", "renamed.safetensors", "out.safetensors", "--dtype", "bf16", "--verify")
    succeeding("convert", "out.safetensors", "back.pt")
    back = torch.load("back.pt")
    assert torch.equal(back["s"]["z"], torch.tensor([1 + 2j]))
    assert back["s"]["w"].dtype == torch.bfloat16


def test_a_structure_record_that_does_not_fit_is_refused_or_left_out(place: Path) -> None:
    torch.save(NESTED, "in.pt")
    succeeding("convert", "in.pt", "in.safetensors")
    whole = load_file("in.safetensors")
    less = {name: tensor for name, tensor in whole.items() if name != "s.y"}
    for tensors in (less, {**whole, "extra": torch.ones(1)}):
        save_file(tensors, "in.safetensors", metadata=metadata_of(place / "in.safetensors"))
        err = refused(4, "convert", "in.safetensors", "out.safetensors")
        assert "Use --no-structure to convert the tensors without the record" in err
        run = succeeding("convert", "in.safetensors", "out.safetensors", "--no-structure", "--verify")
        assert "its structure record was left out" in run.err
        assert metadata_of(place / "out.safetensors") == {"format": "pt"}
        found = load_file("out.safetensors")
        assert found.keys() == tensors.keys()
        assert all(torch.equal(bits(found[name]), bits(tensors[name])) for name in tensors)


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
        save_file(cast(WEIGHTS, torch.float16), place / "in" / f"s{number}.safetensors")
    for number in range(3):
        a_set(place / "in" / f"set{number}")
    save_file(WEIGHTS, place / "whole.safetensors")
    succeeding("convert", place / "whole.safetensors", place / "in" / "shards", "--max-shard-size", "20")
    (place / "in" / "attack.pt").write_bytes(CASES["live_os_system.pt"].make("canary"))
    (place / "in" / "cut.pt").write_bytes(CUT)
    (place / "in" / "unknown.json").write_text("{}")
    return sorted(f"in/{name}" for name in os.listdir(place / "in"))


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
        assert [line for line in also if " also holds values" in line]
        assert lines[-1].startswith("17 of 20 inputs converted, 3 failed: wrote ")
        kinds = {line.split()[0]: line.split()[1] for line in lines[1:-1]}
        assert [kinds[f"in/{name}"] for name in CODES] == ["unsafe", "corrupt", "unsupported"], jobs


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
        "--depfile=d",
        *itertools.chain(*of_features("OF_ONE")),
    )
    for option in options:
        said = refused(2, "convert", "a.pt", "--output-dir", "o", option)
        assert f"{option.partition('=')[0]} applies to one conversion" in said
    assert "must be converted alone" in refused(2, "convert", "-", "a.pt", "--output-dir", "o")
    assert os.listdir() == ["a.pt"]


def test_templates_name_files_and_directories(place: Path) -> None:
    for run in ("r1", "r2"):
        (place / run).mkdir()
        torch.save(NESTED, f"{run}/model.pt")
    words = ["r1/model.pt", "r2/model.pt"]
    err = refused(2, "convert", *words, "--output-dir", "o")
    assert "The outputs of r1/model.pt and r2/model.pt would both be o/model.safetensors. No output" in err
    assert err.count("--output-name") == 1
    assert not Path("o").exists()
    for template, expected in [
        ("{parent}.safetensors", ["r1.safetensors", "r2.safetensors"]),
        ("{parent}-{stem}", ["r1-model/model.safetensors", "r2-model/model.safetensors"]),
        ("{parent}/{stem}.safetensors", ["r1/model.safetensors", "r2/model.safetensors"]),
        ("{number}.safetensors", ["1.safetensors", "2.safetensors"]),
    ]:
        succeeding("convert", *words, "--output-dir", "o", "--output-name", template)
        assert sorted(name for name in contents(place / "o") if name.endswith(".safetensors")) == expected
        shutil.rmtree("o")


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
    fields = r"not a template.*\{stem\}, \{name\}, \{parent\}, \{number\}"
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
    ("memory://bucket/dir/x.pt", False, "{parent}-{name}.safetensors", "out/dir-x.pt.safetensors"),
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
        f"from ckptconv.cli import batch, main\nbatch.START = {slow!r}.replace('{{', '{{{{').replace('}}', '}}}}')"
        " + batch.START\nmain.main(sys.argv[1:])"
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
        "ckptconv: Stopped by SIGINT. 1 of 3 inputs converted; no output of the others was published."
    )


def test_a_worker_imports_nothing_from_the_current_directory(place: Path) -> None:
    for name in ("typing", "threading", "numpy", "multiprocessing"):
        Path(f"{name}.py").write_text("open('canary', 'w')")
    for name in "ab":
        torch.save(NESTED, f"{name}.pt")
    succeeding("convert", "a.pt", "b.pt", "--output-dir", "o", "--jobs", "2", "--dtype", "bf16")
    assert not Path("canary").exists()


def test_a_worker_that_dies_fails_its_input_alone(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckptconv.cli import batch

    for name in "abc":
        torch.save(NESTED, f"{name}.pt")
    killing = (
        "from ckptconv import conversion\nimport os\nconvert = conversion.convert\n"
        "conversion.convert = lambda source, *a, **k: os.kill(os.getpid(), 9) if source == 'b.pt' else "
        "convert(source, *a, **k)\n"
    )
    monkeypatch.setattr(batch, "START", killing + batch.START)
    run = ckptconv_here("convert", "a.pt", "b.pt", "c.pt", "--output-dir", "o", "--jobs", "2", "--json")
    assert run.code == 1
    assert [each["ok"] for each in run.json["results"]] == [True, False, True]
    assert "the process that converted it ended with signal 9" in run.json["results"][1]["error"]["message"]
    assert sorted(os.listdir("o")) == ["a.safetensors", "c.safetensors"]


def test_an_output_with_an_ending_that_none_has_is_refused(place: Path) -> None:
    torch.save({"w": torch.zeros(3)}, "x.pt")
    for name in ("out.gguf", "out.onnx", "out.npz", "out.safetensor", "out.tar.gz"):
        run = ckptconv_here("convert", "x.pt", name)
        stem = name.rpartition(".")[0]
        run.refused(2, f"{name} ends in .", f"{stem}.safetensors?", f"give {name}/", "Nothing was")
        assert not Path(name).exists()
        succeeding("convert", "x.pt", f"{name}/")
        assert Path(name, "model.safetensors").exists()
        succeeding("convert", "x.pt", name)


def test_a_directory_may_have_a_version_in_its_name(place: Path) -> None:
    torch.save({"w": torch.zeros(3)}, "x.pt")
    for name in ("llama-3.1-8b", "llama-3.1", "run.v2", ".hidden", "a.b-c"):
        succeeding("convert", "x.pt", name)
        assert Path(name, "model.safetensors").exists(), name
