"""What others made stays: many commands in a directory full of it, of which every file is compared afterwards."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from cells import of_features
from checkpoints import COMMAND, DATA, Run, ckptconv_here, done
from safetensors.torch import load_file, save, save_file
from stores import FAR, PLACES
from typer.core import TyperGroup

from ckptconv import CkptconvError, FailedError, UsageError, convert
from ckptconv.formats.registered import STATES
from ckptconv.options.kinds import PATH
from ckptconv.options.option import Option
from ckptconv.options.table import COMMAND as OF_COMMANDS
from ckptconv.options.table import OPTIONS
from ckptconv.process import has_feature

PEFT = DATA / "peft" / "lora-bf16"
# What is read, and not written; and what is written to a directory of its own, under names that are not taken.
READ = {"config", "order", "spool_dir", "like", "map", "minus", "states"}
# The commands that write nothing.
READING: set[str] = set().union(*of_features("READING"))


def tensors(seed: int) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    # In the order of a file of safetensors, which then has no record of ours.
    return {"b": torch.randn(3, generator=made), "w": torch.randn(3, 4, generator=made)}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What other programs made; and deltas of this one, which are inputs too."""
    here = tmp_path_factory.mktemp("made")
    for number, name in enumerate(("model", "a", "b"), 1):
        torch.save(tensors(number), here / f"{name}.pt")
    torch.save({"nested": tensors(9), "epoch": 3}, here / "nested.pt")
    # As transformers writes them: with the very headers of a conversion of model.pt and others.
    for number, name in enumerate(("model", "g1", "g2", "g3", "a-named"), 11):
        save_file(tensors(number), here / f"{name}.safetensors", {"format": "pt"})
    for number, name in enumerate(("hf", "step1", "step2", "step3"), 21):
        (here / name).mkdir()
        save_file(tensors(number), here / name / "model.safetensors", {"format": "pt"})
        (here / name / "config.json").write_text("{}")
    (here / "sharded").mkdir()
    for number, name in enumerate("wb", 1):
        save_file({name: tensors(31)[name]}, here / "sharded" / f"model-0000{number}-of-00002.safetensors")
    index = {
        "metadata": {},
        "weight_map": {name: f"model-0000{n}-of-00002.safetensors" for n, name in enumerate("wb", 1)},
    }
    (here / "sharded" / "model.safetensors.index.json").write_text(json.dumps(index))
    (here / "bin").mkdir()
    torch.save(tensors(41), here / "bin" / "pytorch_model.bin")
    (here / "bin" / "config.json").write_text("{}")
    (here / "empty").mkdir()
    (here / "configured").mkdir()
    (here / "configured" / "config.json").write_text('{"mine": 1}')
    shutil.copytree(PEFT / "base", here / "base")
    for name in ("ad1", "ad2"):
        shutil.copytree(PEFT / "adapter", here / name)
    (here / "megatron" / "mp_rank_00").mkdir(parents=True)
    torch.save({"model": tensors(51)}, here / "megatron" / "mp_rank_00" / "model_optim_rng.pt")
    (here / "runs" / "checkpoint-500").mkdir(parents=True)
    save_file(tensors(52), here / "runs" / "checkpoint-500" / "model.safetensors")
    (here / "uni" / "zero" / "w").mkdir(parents=True)
    torch.save({"param": torch.ones(2)}, here / "uni" / "zero" / "w" / "fp32.pt")
    for name, text in {
        "Makefile": "all: a b\n\techo\n",
        "notes.md": "mine",
        "page.html": "<p>mine</p>",
        "x.json": "{}",
    }.items():
        (here / name).write_text(text)
    (here / "empty-rule.d").write_text("all:\n")
    os.symlink("hf/model.safetensors", here / "linked.safetensors")
    os.link(here / "g1.safetensors", here / "hard.safetensors")
    os.symlink("a.pt", here / "linked.pt")
    for scene in of_features("scene"):
        scene(here)
    (here / "out").mkdir()
    save_file(tensors(61), here / "out" / "a.safetensors", {"format": "pt"})
    return here


@pytest.fixture
def world(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, and the working directory."""
    here = tmp_path / "world"
    shutil.copytree(made, here, symlinks=True)
    (here / "hard.safetensors").unlink()
    os.link(here / "g1.safetensors", here / "hard.safetensors")
    monkeypatch.chdir(here)
    return here


def tree(place: Path) -> dict[str, bytes | str]:
    """All that is below a directory: bytes of files, targets of links, "" of directories."""
    return {
        str(path.relative_to(place)): os.readlink(path)
        if path.is_symlink()
        else ""
        if path.is_dir()
        else path.read_bytes()
        for path in sorted(place.rglob("*"))
    }


def changed(before: dict[str, bytes | str], after: dict[str, bytes | str]) -> set[str]:
    """What is gone or another now, but for what this program keeps for parts."""
    return {name for name in before if before[name] != after.get(name) and ".ckptconv-" not in name}


# Words of commands that would replace what others made, or put an output among it: nothing is changed, and nothing is
# new.
REFUSED = """
convert model.pt
convert a.pt --manifest notes.md
convert model.pt --dtype bf16
convert a.pt new.safetensors --manifest b.pt
convert a.pt new.safetensors --manifest x.json
convert a.pt new.safetensors --manifest a.pt --overwrite
convert a.pt new.safetensors --manifest new.safetensors
convert a.pt configured --manifest configured/model.safetensors
convert g1.safetensors hard.safetensors
convert g1.safetensors ./hf/../g1.safetensors --overwrite
convert hf/model.safetensors linked.safetensors
convert linked.safetensors hf
convert a.pt hf
convert a.pt sharded
convert a.pt ad1
convert a.pt bin
convert a.pt runs
convert a.pt runs/checkpoint-500
convert runs/checkpoint-500 runs
convert runs/checkpoint-500 runs --overwrite
convert a.pt megatron
convert a.pt uni
convert a.pt new --manifest=
convert a.pt sharded --overwrite
convert a.pt hf --overwrite --no-clobber
convert a.pt ad1 --overwrite
convert a.pt .
convert nested.pt hf --for-hub
convert sharded sharded --max-shard-size 1GB
convert sharded/model.safetensors.index.json sharded
convert sharded sharded --overwrite
convert a.pt g1.safetensors --no-clobber
convert a.pt g1.safetensors
convert a.pt linked.safetensors
pt2safetensors model.pt
pt2safetensors bin hf
pt2safetensors a.pt b.pt
pt2safetensors a.pt new.safetensors --manifest g1.safetensors
""" + "".join(of_features("REFUSED"))

# What such an error says.
REASONS = (
    "would replace",
    "ckptconv did not write",
    "read as another input",
    "in one directory as one.",
    "not recognised as",
    "forbids",
    "contradict",
    "replace each other",
    "was given as OUTPUT",
    "is an input",
    "would both be",
    "files of another kind",
    "both specify",
    "is empty",
    "read this file together with",
    "other programs there",
    "those of the run",
)

# Words of commands that succeed, and what of others they replace, as they were told to.
DONE: dict[str, set[str]] = {
    "convert a.pt -o g1.safetensors": {"g1.safetensors"},
    "convert a.pt -o linked.safetensors": {"hf/model.safetensors"},
    "convert model.pt --overwrite": {"model.safetensors"},
    "convert a.pt configured": set(),
    "convert bin bin": set(),
    "convert bin/pytorch_model.bin": set(),
    "convert a.pt hf --overwrite": {"hf/model.safetensors"},
    "convert a.pt bin --overwrite": set(),
    "convert a.pt new.safetensors --manifest x.json --overwrite": {"x.json"},
    **{words: changed for more in of_features("DONE") for words, changed in more.items()},
}


def run(words: str) -> Run:
    return ckptconv_here(*words.replace("{here}", os.getcwd()).split())


def test_what_others_made_is_not_replaced(world: Path) -> None:
    before = tree(world)
    failures = []
    for words in REFUSED.strip().splitlines():
        ended = run(words)
        after = tree(world)
        if ended.code == 0 or not any(reason in ended.err for reason in REASONS) or after != before:
            new = sorted(after.keys() - before.keys())
            failures.append(
                f"{words}: exit {ended.code}, changed {sorted(changed(before, after))}, new {new}: {ended.err}"
            )
            shutil.rmtree(world)
            world.mkdir()
            os.chdir(world)
            restore(world, before)
    assert not failures, "\n".join(failures)


def restore(world: Path, before: dict[str, bytes | str]) -> None:
    for name, data in before.items():
        path = world / name
        if data == "":
            path.mkdir(exist_ok=True)
        elif isinstance(data, str):
            path.symlink_to(data)
        else:
            path.write_bytes(data)
    (world / "hard.safetensors").unlink()
    os.link(world / "g1.safetensors", world / "hard.safetensors")


@pytest.mark.parametrize("words", DONE)
def test_what_was_named_is_replaced_and_nothing_else(words: str, world: Path) -> None:
    before = tree(world)
    done(run(words))
    assert changed(before, tree(world)) == DONE[words]


# ------------------------------------------------------------------------------------------------ nothing is left out


def _commands(group: Any = COMMAND, above: str = "") -> dict[str, Any]:
    found = {}
    for name, command in group.commands.items():
        path = f"{above}{name}"
        found[path] = command
        if isinstance(command, TyperGroup):
            found |= _commands(command, f"{path} ")
    return found


def _written(command: Any) -> list[Option]:
    """The options of a command that take a path, but for those of what is read."""
    own = (tables for flags in of_features("FLAGS") for tables in flags.values())
    known = {
        flag: option
        for table in (OPTIONS, OF_COMMANDS, *itertools.chain(*own))
        for option in table.values()
        for flag in option.flags
    }
    found = {
        id(option): option
        for parameter in command.params
        for flag in parameter.opts
        if not getattr(parameter, "hidden", False) and (option := known.get(flag))
    }
    return [option for option in found.values() if option.kind is PATH and option.name not in READ]


def test_every_command_and_option_that_writes_a_path_is_tried() -> None:
    """A new one has to be added to REFUSED."""
    rows = [words.split() for words in REFUSED.strip().splitlines()]
    # Some features read what others write there; -o is tried as OUTPUT too. No states are written where none are found.
    reading = set[tuple[str, str]]().union(*of_features("READ_THERE"))
    if not has_feature(STATES):
        reading |= {("convert", "optimizer"), ("pt2safetensors", "optimizer")}
    lacking = []
    for path, command in _commands().items():
        words = path.split()
        if path in READING or isinstance(command, TyperGroup):
            continue
        mine = [row for row in rows if row[: len(words)] == words]
        for option in _written(command):
            tried = any(flag in row for row in mine for flag in option.flags)
            if not tried and option.name != "into" and (words[0], option.name) not in reading:
                lacking.append(f"{path} {option.flags[0]}")
        if not mine:
            lacking.append(path)
    assert not lacking


# ------------------------------------------------------------------------------------------------ what is ours


# Commands that are run again, and again after their input has changed, whatever they wrote the first time.
AGAIN = """
convert a.pt
convert nested.pt
convert a.pt new
convert a.pt new --for-hub
convert a.pt new --max-shard-size 16B
convert a.pt fresh.safetensors --manifest m.json
pt2safetensors bin
""" + "".join(of_features("AGAIN"))
# Without marks, as on some file systems, these have nothing but their bytes: if those change, they have to be named.
BY_BYTES = {
    "convert a.pt",
    "convert a.pt new --for-hub",
    "convert a.pt fresh.safetensors --manifest m.json",
}.union(*of_features("BY_BYTES"))


def _without_marks(*_: object) -> None:
    raise OSError("no attributes here")


@pytest.mark.parametrize("marks", [True, False], ids=["marks", "no marks"])
def test_a_command_may_be_run_again(marks: bool, world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not marks:
        monkeypatch.setattr(os, "setxattr", _without_marks)
    before, failures = tree(world), []
    for words in AGAIN.strip().splitlines():
        for turn in ("first", "second", "changed"):
            if turn == "changed":
                torch.save(tensors(99), "a.pt")
                save_file(tensors(98), "g1.safetensors", {"format": "pt"})
            if turn == "changed" and words.startswith("patch"):
                continue
            ended = run(words)
            is_known = marks or turn != "changed" or words not in BY_BYTES
            if (ended.code == 0) != is_known:
                failures.append(f"{words}: {turn}: exit {ended.code}: {ended.err}")
        gone = changed(before, tree(world)) - {"a.pt", "g1.safetensors", "hard.safetensors", "parts"}
        if gone:
            failures.append(f"{words}: {gone}")
        shutil.rmtree(world)
        world.mkdir()
        os.chdir(world)
        restore(world, before)
    assert not failures, "\n".join(failures)


def test_what_was_changed_since_is_not_ours_any_more(world: Path) -> None:
    done(run("convert a.pt"))
    # In place, so that the attributes of the file stay: `save_file` would put a new file there.
    Path("a.safetensors").write_bytes(save(tensors(77), {"format": "pt"}))
    run("convert a.pt").refused(2, "a.safetensors exists")
    for words, path in (("convert nested.pt", "nested.safetensors"), *itertools.chain(*of_features("MAKING"))):
        done(run(words))
        with Path(path).open("r+b") as changing:
            changing.seek(-1, os.SEEK_END)
            changing.write(b"!")
        run(words).refused(2, path)
    done(run("convert a.pt new"))
    os.replace("a.safetensors", "new/model.safetensors")  # of the same size, and older than the manifest
    before = tree(world)
    refused = run("convert a.pt new")
    refused.refused(2, "new contains model.safetensors")
    assert "--overwrite replaces files" in refused.err
    run("convert a.pt new --overwrite --no-clobber").refused(2, "contradict")
    run("convert a.pt new --no-clobber").refused(1, "new/model.safetensors exists")
    assert tree(world) == before
    done(run("convert a.pt new --overwrite"))
    assert torch.equal(load_file("new/model.safetensors")["w"], tensors(2)["w"])


def test_what_others_put_into_an_output_stays(world: Path) -> None:
    done(run("convert a.pt new --max-shard-size 16B"))
    save_file(tensors(5), "new/adapter_model.safetensors")
    before = tree(world)
    refused = run("convert a.pt new")
    refused.refused(2, "adapter_model.safetensors")
    # The option is named where it helps.
    assert "--overwrite" not in refused.err
    run("convert a.pt new --overwrite").refused(2, "adapter_model.safetensors")
    assert tree(world) == before


def test_a_model_and_an_adapter_are_not_put_into_one_directory(world: Path) -> None:
    for first, second in (("base", "ad1"), ("ad1", "base"), ("ad1", "g1.safetensors")):
        place = f"{first}-before-{second.partition('.')[0]}"
        done(run(f"convert {first} {place}"))
        before = tree(world)
        for flag in ("", " --overwrite"):
            run(f"convert {second} {place}{flag}").refused(
                2, f"{place} contains ", "as one" if not flag else "together"
            )
        assert tree(world) == before
        done(run(f"convert {first} {place}"))


def test_what_comes_while_an_output_is_made_stays(world: Path) -> None:
    def other(path: str) -> Callable[[], object]:
        return lambda: save_file(tensors(3), path)

    for call in (
        lambda: convert("a.pt", before_commit=other("a.safetensors")),
        lambda: convert("a.pt", "new", before_commit=other("new/model.safetensors")),
        lambda: convert("a.pt", "n.safetensors", manifest="a.json", before_commit=other("a.json")),
    ):
        with pytest.raises(UsageError):
            call()
    for path in ("a.safetensors", "new/model.safetensors", "a.json"):
        assert torch.equal(load_file(path)["w"], tensors(3)["w"])


@pytest.mark.skipif("part" not in OPTIONS, reason="there are no parts")
def test_what_comes_between_parts_stays(world: Path) -> None:
    save_file(tensors(3), "parts/model.safetensors", {"format": "pt"})
    before = tree(world)
    run("finish parts").refused(2, "parts contains model.safetensors")
    assert tree(world) == before
    done(run("finish parts --overwrite"))
    assert torch.equal(load_file("parts/model.safetensors")["w"], tensors(2)["w"])


@pytest.mark.skipif("part" not in OPTIONS, reason="there are no parts")
def test_what_parts_have_read_stays(world: Path) -> None:
    done(run("convert a.pt new --part 0/1 --digest sha256"))
    before = tree(world)
    for path in ("./a.pt", "linked.pt"):
        run(f"finish new --overwrite --manifest {path}").refused(2, "the input itself")
    assert tree(world) == before


# ------------------------------------------------------------------------------------------------ Python


def test_calls_of_the_library_follow_the_same_rule(world: Path) -> None:
    calls: list[Callable[[], object]] = [
        lambda: convert("model.pt"),
        *itertools.chain(*of_features("WRITING")),
    ]
    before = tree(world)
    for number, call in enumerate(calls):
        with pytest.raises(CkptconvError):
            call()
        assert tree(world) == before, number
    convert("a.pt", "g1.safetensors")
    assert changed(before, tree(world)) == {"g1.safetensors"}


def test_the_report_names_every_further_file(world: Path) -> None:
    words = "convert a.pt one.safetensors --manifest one.json"
    planned, run_ = run(f"{words} --dry-run"), done(run(f"{words} --json")).json
    assert "would write one.json" in planned.out.splitlines()
    assert run_["beside"] == {"one.json": "--manifest"}
    assert "wrote one.json" in done(run(words)).out.splitlines()
    assert convert("a.pt", "many").beside == {"many/.ckptconv-manifest.json": "manifest"}
    assert "manifest" not in done(run("convert a.pt many")).out
    assert "wrote many/.ckptconv-manifest.json" in done(run("convert a.pt many -v")).out.splitlines()


def test_a_second_word_that_may_be_another_input_replaces_only_an_earlier_output(world: Path) -> None:
    other = (world / "a.pt").read_bytes() + b"mine"
    pairs = {"b.safetensors": "c.safetensors b.safetensors"}
    if has_feature("torch_output"):
        pairs |= {"b.pt": "a.pt b.pt", "b.pth": "a.pt b.pth"}
    for name, words in pairs.items():
        source, content = words.split()[0], other
        if name == "b.safetensors":
            shutil.copy("g1.safetensors", source)
            content = Path("g1.safetensors").read_bytes()
        place = world / name
        place.write_bytes(content)
        told = run(f"convert {words} --dtype bf16").refused(2, f"{name} exists, but is not recognised as an earlier")
        # Advice by which a checkpoint may be lost comes last, and says so.
        assert "It may be a checkpoint of another program, which -o would replace." in told
        assert "INPUT comes before OUTPUT." in told
        assert told.rstrip().endswith(f"To replace it, use -o {name}.")
        assert place.read_bytes() == content
        for permitted in (f"{source} -o {name}", f"{words} --overwrite"):
            place.write_bytes(content)
            done(run(f"convert {permitted} --dtype bf16"))
            assert place.read_bytes() != content
        # An earlier output and an empty file hold nothing of another program.
        done(run(f"convert {words}"))
        place.write_bytes(b"")
        done(run(f"convert {words}"))
    # Swapped words: OUTPUT before INPUT.
    done(run("convert a.pt mine.safetensors"))
    refused = "a.pt exists" if has_feature("torch_output") else "needs the feature torch_output"
    run("convert mine.safetensors a.pt").refused(2, refused)


def test_a_copy_that_is_not_recognised_is_told_the_reason(world: Path) -> None:
    why = "These files changed, or were copied, after the manifest was written. Give"
    convert("a.pt", "many")
    manifest = Path("many/.ckptconv-manifest.json")
    # `cp -r` gives every copy its own time: the manifest may be copied first.
    Path("copy").mkdir()
    for path in (manifest, *(path for path in Path("many").iterdir() if path != manifest)):
        Path("copy", path.name).write_bytes(path.read_bytes())
    os.utime("copy/.ckptconv-manifest.json", ns=(1, 1))
    run("convert a.pt copy").refused(2, "not recognised as an output of ckptconv", why)
    # A file that the manifest does not list is of another program.
    shutil.copy("g1.safetensors", "copy/model-00001-of-00009.safetensors")
    assert why not in run("convert a.pt copy").refused(2, "not recognised as an output of ckptconv")


def test_the_report_says_that_an_earlier_output_is_replaced(world: Path) -> None:
    def told(output: str | None, **options: Any) -> list[str]:
        return [note for note in convert("a.pt", output, **options).notes if "replaces" in note]

    store, far = fsspec.filesystem("memory"), ["memory://replaced/many"] if PLACES else []
    try:
        for output, earlier in (
            ("one.safetensors", "one.safetensors, an earlier output of ckptconv"),
            (None, "a.safetensors, an earlier output of ckptconv"),
            ("many", "files in many, an earlier output of ckptconv"),
            *((url, f"files in {url}, an earlier output of ckptconv") for url in far),
        ):
            assert told(output) == []
            for is_dry in (True, False):
                assert told(output, dry_run=is_dry) == [f"This replaces {earlier}."]
        # Of other files too.
        in_many = ["This replaces files in many, an earlier output of ckptconv."]
        assert told("many", max_shard_size=30) == told("many") == in_many
        # Nothing is said of what another program wrote but that it is replaced.
        Path("one.safetensors").write_bytes(b"changed since")
        for output, options in (("g1.safetensors", {}), ("one.safetensors", {}), ("hf", {"overwrite": True})):
            what = "files in hf" if options else output
            assert told(output, **options) == [f"This replaces {what}, not recognised as an output of ckptconv."]
    finally:
        if far:
            store.rm("/replaced", recursive=True)


@FAR
def test_on_a_store_too(world: Path) -> None:
    store = fsspec.filesystem("memory")
    try:
        place = "memory://precious"
        for name in ("hf/model.safetensors", "a.safetensors", "m.json", "uni/zero/w/fp32.pt"):
            store.pipe(f"/precious/{name}", (world / "g1.safetensors").read_bytes())
        store.pipe("/precious/a.pt", (world / "a.pt").read_bytes())
        before = {name: store.cat(name) for name in store.find("/precious")}
        for words in (
            f"convert {place}/a.pt",
            f"convert a.pt {place}/a.safetensors",
            f"convert a.pt {place}/hf",
            f"convert a.pt {place}/new.safetensors --manifest {place}/m.json",
            f"convert {place}/a.safetensors memory:///precious/../precious/a.safetensors --overwrite",
            *(words.format(place=place) for words in itertools.chain(*of_features("REFUSED_THERE"))),
        ):
            assert run(words).code == 2, words
            assert {name: store.cat(name) for name in store.find("/precious")} == before, words
        for _ in range(2):
            for words in (
                f"convert a.pt {place}/new",
                f"convert a.pt {place}/x.safetensors --manifest {place}/new.json",
                *(words.format(place=place) for words in itertools.chain(*of_features("AGAIN_THERE"))),
            ):
                done(run(words))
        now = {name: store.cat(name) for name in store.find("/precious")}
        assert before.items() <= now.items()
        refused = "exists, but is not recognised as an earlier output"
        assert f"-o {place}/a.safetensors." in run(f"convert a.pt {place}/a.safetensors").refused(2, refused)
        if has_feature("torch_output"):
            done(run(f"convert a.pt {place}/new.pt"))
            for words, code in ((f"{place}/new.pt", 2), (f"-o {place}/new.pt", 0)):
                assert run(f"convert a.pt {words}").code == code
        for words in (f"-o {place}/a.safetensors", f"{place}/a.safetensors"):
            done(run(f"convert a.pt {words}"))
            assert store.cat("/precious/a.safetensors") == store.cat("/precious/x.safetensors")
        with pytest.raises(FailedError, match="--no-clobber"):
            convert("a.pt", f"{place}/new", clobber=False)
    finally:
        store.rm("/precious", recursive=True)


def test_a_directory_of_its_own_is_proposed_next_to_a_step_and_not_in_it(world: Path) -> None:
    for above, proposed in (("checkpoint-5", "checkpoint-5-safetensors"), ("trained", "trained/step6-safetensors")):
        shutil.copytree(world / "hf", world / above / "step6")
        found = run(f"convert {above}/step6 {above}")
        assert f"Give a new directory, such as {proposed}, or a name that ends in" in found.err
        done(run(f"convert {above}/step6 {proposed}"))
