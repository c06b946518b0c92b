"""`ckptconv convert`: one command for every input, and from safetensors to safetensors."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cells import VERIFY, looking, of_features, trained, verified, verified_here
from checkpoints import COMMAND, Run, ckptconv_here, contents, done, metadata_of
from safetensors.torch import load_file, save_file

import ckptconv
from ckptconv.cli.registered import COMMANDS
from ckptconv.options.registered import missing
from ckptconv.outputs.kinds import NAMED

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
    for command in ("pt2safetensors", *itertools.chain(*of_features("FORMATS"))):
        assert flags_of(command) - flags_of("convert") == set(), command
    opening = {"--tag", "--exclude-frozen-parameters", "--master", "--unstack", "--raw"}.union(
        *of_features("OPENING_FLAGS")
    )
    for command in itertools.chain(*of_features("CONVERTING")):
        assert opening <= flags_of(command), command


# ---------------------------------------------------------------------------------------------- one of every format

MAKERS: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "file": (lambda path: torch.save(NESTED, path), "in.pt", "pt2safetensors"),
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
            verified_here(source, obvious / output, *options)


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
    told = "a model wrapper's prefix"
    for command in (("convert", "--output=o", "--dry-run"), *((each,) for each in looking())):
        for name in ("flat.pt", "flat.safetensors"):
            said = succeeding(command[0], name, *command[1:], "--json").out
            assert f"{told}; --strip-prefix _orig_mod.module. removes it." in said
    words = ("convert", "train.pt", "out.safetensors")
    assert f"{told}; --key state_dict --strip-prefix _orig_mod.module. removes it." in succeeding(*words).out
    assert told not in succeeding(*words, "--key", "state_dict", "--strip-prefix", "_orig_mod.module.").out
    torch.save({"epoch": 1, "state_dict": {"model.a": torch.ones(2)}}, "light.ckpt")
    published = ("convert", "light.ckpt", "hub", "--for-hub")
    assert f"{told}; --key state_dict --strip-prefix model. removes it." in succeeding(*published).out
    assert told not in succeeding(*published, "--strip-prefix", "model.").out
    for name in ("model.pt", "numbers.pt"):
        assert told not in succeeding("convert", name).out


def test_an_output_that_cannot_be_written_is_refused_with_what_to_do(place: Path) -> None:
    save_file(WEIGHTS, "a.safetensors")
    for name in ("a.pt", "b.pt"):
        torch.save(NESTED, name)
    before = contents(place)
    for command, code, said in (
        ("convert a.safetensors ./a.safetensors", 2, "Write it to another path, and rename it afterwards"),
        ("convert a.safetensors", 2, "is already in safetensors, so OUTPUT is required"),
        ("pt2safetensors a.pt b.pt", 2, "is an existing checkpoint"),
    ):
        assert said in refused(code, *command.split())
        assert contents(place) == before, command


@pytest.mark.skipif("pt" not in NAMED, reason="no feature writes .pt files")
def test_an_output_before_its_input_is_recognized(place: Path) -> None:
    torch.save(NESTED, "a.pt")
    before = contents(place)
    said = refused(2, "convert", "new.safetensors", "a.pt")
    assert "new.safetensors does not exist. Nothing was written. INPUT comes first. Is it 'a.pt'?" in said
    assert "INPUT comes first" not in refused(2, "convert", "missing.pt", "new.safetensors")
    assert contents(place) == before


@pytest.mark.skipif("pt" not in NAMED, reason="no feature writes .pt files")
def test_an_output_before_its_input_is_recognized_where_another_name_is_similar(place: Path) -> None:
    torch.save(NESTED, "a.pt")
    save_file(WEIGHTS, "new-1.safetensors")
    said = refused(2, "convert", "new-2.safetensors", "a.pt")
    assert "INPUT comes first. Is it 'a.pt'? Its directory contains new-1.safetensors." in said
    succeeding("convert", "a.pt", "out/")
    said = refused(2, "convert", "aa.pt", "out/")
    assert "Did you mean a.pt?" in said
    assert "INPUT comes first" not in said, "an output of an earlier run"
    for output in ("out.safetensors", "out.pt"):
        succeeding("convert", "a.pt", output)
        for missing_input in ("runs/25", "s3:/runs/25"):
            said = refused(2, "convert", missing_input, output)
            assert f"{missing_input} does not exist" in said
            assert "INPUT comes first" not in said, "an output of an earlier run"


def test_a_command_in_the_place_of_the_input_is_recognized(place: Path) -> None:
    save_file(WEIGHTS, "a.safetensors")
    for command in looking():
        said = refused(2, "convert", "--json", command, "a.safetensors")
        assert f"The command comes first: ckptconv {command} a.safetensors" in said
        succeeding(command, "a.safetensors")


def test_an_index_as_output_is_met_with_the_directory_of_the_shards(place: Path) -> None:
    torch.save(NESTED, "a.pt")
    for name in ("pytorch_model.bin.index.json", "model.safetensors.index.json"):
        said = refused(2, "convert", "a.pt", name)
        assert "Did you mean" not in said
        assert "ckptconv convert INPUT DIR --max-shard-size SIZE" in said
    succeeding("convert", "a.pt", "dir", "--max-shard-size", "10B")
    assert Path("dir/model.safetensors.index.json").exists()


def test_a_directory_of_several_checkpoints_is_said_to_hold_them(place: Path) -> None:
    (place / "in").mkdir()
    torch.save(NESTED, "in/a.pt")
    torch.save(NESTED, "in/b c.pt")
    Path("in/notes.txt").write_text("notes")
    Path("in/fsdp_config.json").write_text("{}")
    err = refused(2, "convert", "in")
    assert "It contains several checkpoints: in/a.pt, in/b c.pt. Give one of them" in err


def test_a_directory_of_one_file_names_it(place: Path) -> None:
    (place / "in").mkdir()
    torch.save(NESTED, "in/epoch=0.ckpt")
    assert "Give the checkpoint in this directory: in/epoch=0.ckpt" in refused(2, "convert", "in", "out")


def test_what_an_interrupted_conversion_staged_is_not_proposed(place: Path) -> None:
    (place / "out/.ckptconv-afd41c").mkdir(parents=True)
    torch.save(NESTED, "out/.ckptconv-afd41c/model.pt")
    said = refused(2, "convert", "out", "other")
    assert "It contains an unfinished conversion. Repeat its command to continue, or delete the directory." in said
    torch.save(NESTED, "out/b.pt")
    assert "Give the checkpoint in this directory: out/b.pt" in refused(2, "convert", "out", "other")


def test_a_glob_that_the_shell_did_not_expand_is_explained(place: Path) -> None:
    torch.save(NESTED, "a.pt")
    assert (
        "*.pt does not exist. Nothing was written. The shell did not expand the pattern; without quotes, it would "
        "match a.pt." in refused(2, "convert", "*.pt")
    )
    assert "*.bin does not exist. Nothing was written. The shell found no match for the pattern" in refused(
        2, "convert", "*.bin", "out"
    )
    torch.save(NESTED, "x[1].pt")
    succeeding("convert", "x[1].pt")


def test_more_words_than_two_lead_to_commands_that_combine(place: Path) -> None:
    err = refused(2, "convert", "a.pt", "b c.pt", "--dtype", "bf16", "d.pt", "--storage-options", '{"key": "secret"}')
    assert "found 3 arguments" in err
    assert [name for name in ("average", "merge") if name in err] == [n for n in ("average", "merge") if n in COMMANDS]
    assert ("--graft 'B:*'" in err) is not bool(missing("graft"))
    assert "secret" not in err


def test_from_python_too(place: Path) -> None:
    save_file(WEIGHTS, "a.safetensors", metadata={"format": "pt"})
    report = ckptconv.convert("a.safetensors", "b.safetensors", dtype="bf16")
    assert report.tensors == 3
    assert {tensor.dtype for tensor in load_file("b.safetensors").values()} <= {torch.bfloat16, torch.int64}
    assert all(verification.tensors == 3 for verification in verified("a.safetensors", "b.safetensors", dtype="bf16"))


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
    succeeding("convert", "in.safetensors", "in", "--max-shard-size", "20B")
    assert len(list(Path("in").glob("model-*-of-00003.safetensors"))) == 3
    for number, (way, (options, expected)) in enumerate(WAYS.items()):
        save_file(expected(WEIGHTS), "by_hand.safetensors", metadata={"format": "pt"})
        by_hand = Path("by_hand.safetensors").read_bytes()
        is_all = way in ("as it is", "all at once")
        for source in ("in.safetensors", "in", "in/model.safetensors.index.json")[: 3 if is_all else 2]:
            shards = f"{number}-{len(source)}"
            succeeding("convert", source, "out.safetensors", *VERIFY, *options)
            assert Path("out.safetensors").read_bytes() == by_hand, (way, source)
            verified_here(source, "out.safetensors", *options)
            succeeding("convert", source, shards, "--max-shard-size", "1B", *VERIFY, *options)
            verified_here(source, shards)  # the options are in its manifest
            succeeding("convert", shards, "again.safetensors")
            assert Path("again.safetensors").read_bytes() == by_hand, (way, source)


def test_a_set_keeps_its_files_unless_other_sizes_are_asked_for(place: Path) -> None:
    save_file(WEIGHTS, "in.safetensors", metadata={"format": "pt"})
    succeeding("convert", "in.safetensors", "in", "--max-shard-size", "20B")
    succeeding("convert", "in", "cast", "--dtype", "bf16")
    for file in Path("in").glob("*.safetensors"):
        assert set(load_file(file)) == set(load_file(Path("cast") / file.name))
    succeeding("convert", "in", "one", "--max-shard-size", "1GB")
    assert [path.name for path in Path("one").glob("*.safetensors")] == ["model.safetensors"]


def test_metadata_stays_in_every_file(place: Path) -> None:
    told = {"format": "tf", "licence": "MIT", "step": "7"}
    save_file(WEIGHTS, "in.safetensors", metadata=told)
    succeeding("convert", "in.safetensors", "out.safetensors", "--dtype", "bf16", *VERIFY)
    assert metadata_of(place / "out.safetensors") == told
    succeeding("convert", "in.safetensors", "shards", "--max-shard-size", "20B", *VERIFY)
    verified_here("in.safetensors", "shards")
    for file in Path("shards").glob("*.safetensors"):
        assert metadata_of(file) == told
    succeeding("convert", "shards", "again.safetensors", *VERIFY)
    assert metadata_of(place / "again.safetensors") == told


def test_metadata_that_would_become_a_tied_name_is_left_out_and_said_to_be(place: Path) -> None:
    save_file(WEIGHTS, "in.safetensors", metadata={"author": "a", "b": "x", "other": "z"})
    run = succeeding("convert", "in.safetensors", "out.safetensors", "--strip-prefix", "model.", *VERIFY)
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
    succeeding("convert", "in.safetensors", "out.safetensors", "--rename", "^=model.", "--dtype", "bf16", *VERIFY)
    assert metadata_of(place / "out.safetensors") == {"format": "pt", "model.head": "model.embed"}
    assert set(load_file("out.safetensors")) == {"model.embed", "model.own"}
    succeeding("convert", "out.safetensors", "apart.safetensors", "--tied", "duplicate", *VERIFY)
    found = load_file("apart.safetensors")
    assert torch.equal(found["model.head"], found["model.embed"])


def test_an_output_with_an_ending_that_none_has_is_refused(place: Path) -> None:
    torch.save({"w": torch.zeros(3)}, "x.pt")
    for name in ("out.gguf", "out.onnx", "out.npz", "out.safetensor", "out.tar.gz"):
        run = ckptconv_here("convert", "x.pt", name)
        stem = name.rpartition(".")[0]
        run.refused(
            2,
            f"{name} ends in .",
            f"{stem}.safetensors?" if name in ("out.safetensor", "out.tar.gz") else "not written",
            f"give {name}/",
            "Nothing was",
        )
        assert ("numpy has no bfloat16: for it, convert with --dtype fp32." in run.err) == (name == "out.npz")
        assert not Path(name).exists()
        succeeding("convert", "x.pt", f"{name}/")
        assert Path(name, "model.safetensors").exists()
        succeeding("convert", "x.pt", name)


def test_a_directory_may_have_a_version_in_its_name(place: Path) -> None:
    torch.save({"w": torch.zeros(3)}, "x.pt")
    for name in ("llama-3.1-8b", "llama-3.1", "run.v2", ".hidden", "a.b-c"):
        succeeding("convert", "x.pt", name)
        assert Path(name, "model.safetensors").exists(), name
