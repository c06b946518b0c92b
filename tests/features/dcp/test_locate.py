"""Where checkpoints are looked for, and what frameworks put around them."""

from __future__ import annotations

import json
import pickle
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dist_checkpoint
from cells import looking, verifying
from checkpoints import ckptconv_here
from effort import every
from features.dcp.cases import checkpoint_of, converted, copy_of, expected_of, refused
from features.dcp.writer import Checkpoint, one, shards
from reading import state_in, state_of
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from stores import FAR
from torch.distributed._shard.sharded_tensor import metadata as sharded_metadata

import ckptconv
from ckptconv.formats.detect import open_source


def model(value: float = 1.0) -> Checkpoint:
    return one(torch.full((4, 2), value), shards((4, 2), 0, 2))


def optimizer() -> Checkpoint:
    made = Checkpoint()
    made.add(("optimizer", "state", "w", "exp_avg"), torch.ones(4, 2))
    made.add_value(("optimizer", "param_groups", 0, "lr"), 0.5)
    made.add_value(("optimizer", "param_groups", 0, "params"), ["w"])
    return made


def weights(source: Path, tmp_path: Path, *options: object) -> dict[str, Any]:
    output = tmp_path / "out.safetensors"
    converted(source, output, *options)
    return {name: tensor.tolist() for name, tensor in load_file(output).items()}


ONES = {"w": [[1.0, 1.0]] * 4}


# ---------------------------------------------------------------------------------------------------------- frameworks


def test_accelerate_puts_the_optimizer_beside_the_model(tmp_path: Path) -> None:
    model().write(tmp_path / "state" / "pytorch_model_fsdp_0")
    optimizer().write(tmp_path / "state" / "optimizer_0")
    (tmp_path / "state" / "random_states_0.pkl").write_bytes(b"x")
    assert weights(tmp_path / "state", tmp_path, "--optimizer", tmp_path / "optimizer.safetensors") == ONES
    assert set(load_file(tmp_path / "optimizer.safetensors")) == {"w.exp_avg"}
    with safe_open(tmp_path / "optimizer.safetensors", "pt") as file:
        record = json.loads(file.metadata()["ckptconv.structure"])
    assert '"lr", ["float", "0.5"]' in json.dumps(record)
    # Either of them can be named as well.
    assert weights(tmp_path / "state" / "pytorch_model_fsdp_0", tmp_path) == ONES
    assert set(weights(tmp_path / "state" / "optimizer_0", tmp_path)) == {"optimizer.state.w.exp_avg"}
    for name, count in (("optimizer_0", 1), ("pytorch_model_fsdp_0", 0), ("", 0)):
        notes = ckptconv.convert(tmp_path / "state" / name, tmp_path / f"of-{name}.safetensors", fsync=False).notes
        assert len([note for note in notes if "optimizer states, but no weights" in note]) == count, name


def test_two_models_are_not_chosen_between(tmp_path: Path) -> None:
    for number in (0, 1):
        model().write(tmp_path / "state" / f"pytorch_model_fsdp_{number}")
    message = refused(tmp_path / "state", tmp_path / "out.safetensors", 2)
    assert "pytorch_model_fsdp_0, pytorch_model_fsdp_1" in message


def test_the_last_step_of_a_torchtitan_run(tmp_path: Path) -> None:
    for step in (9, 10, 8):
        model(float(step == 10)).write(tmp_path / "checkpoint" / f"step-{step}")
    assert weights(tmp_path / "checkpoint", tmp_path) == ONES
    assert "Took step-10" in converted(tmp_path / "checkpoint", tmp_path / "out.safetensors").out
    assert weights(tmp_path / "checkpoint" / "step-9", tmp_path) == {"w": [[0.0, 0.0]] * 4}


def test_olmo_core_s_step(tmp_path: Path) -> None:
    model().write(tmp_path / "run" / "step1000" / "model_and_optim")
    (tmp_path / "run" / "step1000" / "train").mkdir()
    (tmp_path / "run" / "step1000" / ".metadata.json").write_text("{}")
    assert weights(tmp_path / "run" / "step1000", tmp_path) == ONES
    assert weights(tmp_path / "run", tmp_path) == ONES


def test_lightning_s_directory_that_is_called_like_a_file(tmp_path: Path) -> None:
    directory = model().write(tmp_path / "epoch=1-step=10.ckpt")
    torch.save({"epoch": 1}, directory / "meta.pt")
    assert weights(directory, tmp_path) == ONES
    assert open_source(directory).family == "dcp"


def test_a_directory_that_holds_none(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "is not a checkpoint" in refused(tmp_path / "empty", tmp_path / "out.safetensors", 2)


def test_what_is_no_part_of_the_save_is_left_alone(tmp_path: Path) -> None:
    directory = model().write(tmp_path / "c")
    (directory / "__7_0.distcp").write_bytes(b"left from a save on more ranks")
    assert weights(directory, tmp_path) == ONES


def test_a_model_in_one_file_is_not_mistaken_for_what_lies_below_it(tmp_path: Path) -> None:
    model().write(tmp_path / "hub" / "checkpoint")
    torch.save({"other": torch.zeros(2)}, tmp_path / "hub" / "pytorch_model.bin")
    assert set(open_source(tmp_path / "hub").weights) == {"other"}
    assert weights(tmp_path / "hub", tmp_path) == ONES


@FAR
@every("case", ["fsdp2_w2_nested", "hf_sharded_w2", "safetensors_fmt_w2"])
def test_a_checkpoint_far_away(case: str, tmp_path: Path) -> None:
    far = fsspec.filesystem("memory")
    for path in checkpoint_of(case).iterdir():
        far.pipe_file(f"/{tmp_path.name}/{case}/step-5/{path.name}", path.read_bytes())
    converted(checkpoint_of(case), tmp_path / "near.safetensors")
    for url in (f"memory://{tmp_path.name}/{case}", f"memory://{tmp_path.name}/{case}/step-5"):
        ckptconv.convert(url, tmp_path / "far.safetensors", fsync=False)
        assert (tmp_path / "far.safetensors").read_bytes() == (tmp_path / "near.safetensors").read_bytes()


# --------------------------------------------------------------------------------------------- what else is there


def with_more() -> Checkpoint:
    """A model, the states of its optimizer, and tensors of nobody knows what."""
    made = model()
    made.add(("optimizer", "state", "w", "exp_avg"), torch.ones(4, 2))
    made.add_value(("optimizer", "param_groups", 0, "params"), ["w"])
    made.add(("ema", "w"), torch.ones(4, 2))
    return made


@verifying
@every(
    "options, notes, warnings",
    [
        ([], ["'optimizer' (1 tensor, 1 value)"], ["'ema' (1 tensor)"]),
        (["--key", "."], [], []),
        (["--key", "optimizer"], [], []),
        (["--optimizer", "states.safetensors"], [], ["'ema' (1 tensor)"]),
    ],
)
def test_of_what_was_asked_for_nobody_is_told_that_it_is_there(
    options: list[str], notes: list[str], warnings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    report = converted(with_more().write(tmp_path / "c"), tmp_path / "out.safetensors", *options, "--json").json
    for told, expected in ((report["notes"], notes), (report["warnings"], warnings)):
        assert len(told) == len(expected)
        assert all(f"Not converted: {what}" in text for text, what in zip(told, expected, strict=True))
    # What compares them says the same of the output.
    verified = ckptconv_here("verify", tmp_path / "c", tmp_path / "out.safetensors", *options, "--json").json
    for field in ("notes", "warnings"):
        said = [text.replace("Not converted: ", "Not in the output: ") for text in report[field]]
        assert [text.replace("Use convert --", "Use --") for text in verified[field]] == said


def test_the_directory_of_the_optimizer_is_told_of_unless_it_is_converted(tmp_path: Path) -> None:
    model().write(tmp_path / "state" / "pytorch_model_fsdp_0")
    optimizer().write(tmp_path / "state" / "optimizer_0")
    for options, told in (([], True), (["--key", "."], True), (["--optimizer", tmp_path / "adam.safetensors"], False)):
        run = converted(tmp_path / "state", tmp_path / "out.safetensors", *options)
        assert ("Not converted: " in run.out) == told


# ------------------------------------------------------------------------------------------------------ names and keys


def test_a_wrapper_s_prefix_is_told_and_kept(tmp_path: Path) -> None:
    assert "module.l1.weight" in open_source(checkpoint_of("ddp_w2")).weights
    for command in looking():
        assert "--strip-prefix module." in ckptconv_here(command, checkpoint_of("ddp_w2")).out, command
    assert "--strip-prefix module." in converted(checkpoint_of("ddp_w2"), tmp_path / "out.safetensors").out


@every("options", [["--strip-prefix", "module."], ["--rename", r"^module\.="], ["--key", "."], ["--key", "model"]])
def test_a_prefix_is_not_told_of_to_who_chooses_the_names(options: list[str], tmp_path: Path) -> None:
    run = converted(checkpoint_of("ddp_w2"), tmp_path / "out.safetensors", *options)
    assert "Every name begins with" not in run.out
    assert run.err == ""


def test_a_model_that_was_pickled_as_a_whole(tmp_path: Path) -> None:
    checkpoint = Checkpoint()
    checkpoint.add_value(("model", "parts"), (torch.ones(2), 5))
    directory = checkpoint.write(tmp_path / "c")
    run = converted(directory, tmp_path / "none.safetensors")
    assert "'model.parts'" in run.err
    assert weights(directory, tmp_path, "--key", "model.parts") == {"0": [1.0, 1.0]}


def test_without_paths_names_are_whole(tmp_path: Path) -> None:
    checkpoint = Checkpoint(paths=None)
    checkpoint.add(("model.embed.weight",), torch.ones(2))
    checkpoint.add(("lm_head.weight",), torch.ones(3))
    checkpoint.add(("optimizer.state.exp_avg.lm_head.weight",), torch.ones(3))
    directory = checkpoint.write(tmp_path / "c")
    assert set(weights(directory, tmp_path)) == {"model.embed.weight", "lm_head.weight"}
    run = converted(directory, tmp_path / "out.safetensors")
    assert "'optimizer' (1 tensor)" in run.out


def test_a_flat_optimizer_is_told_by_parameter(tmp_path: Path) -> None:
    checkpoint = model()
    for name in ("a.w", "b"):
        checkpoint.add(("optim", f"state.{name}.exp_avg"), torch.ones(2))
        checkpoint.add_value(("optim", f"param_groups.{name}.lr"), 0.5 if name == "b" else 0.1)
    converted(checkpoint.write(tmp_path / "c"), "--optimizer", tmp_path / "optimizer")
    tree = state_in(tmp_path / "optimizer")
    assert set(tree["state"]) == {"a.w", "b"}
    assert tree["param_groups"] == [{"lr": 0.1, "params": ["a.w"]}, {"lr": 0.5, "params": ["b"]}]


def test_several_optimizers_are_one(tmp_path: Path) -> None:
    checkpoint = model()
    for number, name in enumerate("ab"):
        checkpoint.add((f"optimizer_{number}", "state", name, "exp_avg"), torch.ones(2))
    converted(checkpoint.write(tmp_path / "c"), "--optimizer", tmp_path / "optimizer.safetensors")
    assert set(load_file(tmp_path / "optimizer.safetensors")) == {"a.exp_avg", "b.exp_avg"}


def adam(checkpoint: Checkpoint, path: tuple[Any, ...], parameters: str = "w", value: float = 1.0) -> None:
    """Add an optimizer's state dict at `path`."""
    for name in parameters:
        checkpoint.add((*path, "state", name, "exp_avg"), torch.full((4, 2), value))
    checkpoint.add_value((*path, "param_groups", 0, "lr"), 0.5)
    checkpoint.add_value((*path, "param_groups", 0, "params"), list(parameters))


@every("above", [("app",), ("trainer", "app"), ("runs", 0)])
@every("name", ["optim", "optimizer", "opt"])
def test_a_model_and_its_optimizer_are_told_apart_at_any_depth(
    above: tuple[Any, ...], name: str, tmp_path: Path
) -> None:
    checkpoint = Checkpoint()
    checkpoint.add((*above, "model", "w"), torch.zeros(4, 2))
    adam(checkpoint, (*above, name))
    checkpoint.add_value((*above, "epoch"), 3)
    directory = checkpoint.write(tmp_path / "c")
    run = converted(directory, tmp_path / "model.safetensors", "--optimizer", tmp_path / "states.safetensors")
    assert set(load_file(tmp_path / "model.safetensors")) == {"w"}
    assert set(load_file(tmp_path / "states.safetensors")) == {"w.exp_avg"}
    key = ".".join(map(str, (*above, name)))
    run = converted(directory, tmp_path / "model.safetensors")
    assert f"'{key}' (1 tensor, 2 values)" in run.out
    assert set(weights(directory, tmp_path, "--key", key)) == {"state.w.exp_avg"}


def test_a_model_beside_a_model_keeps_the_name_of_its_place(tmp_path: Path) -> None:
    checkpoint = Checkpoint()
    for number, name in enumerate(("generator", "critic")):
        checkpoint.add((name, "model", "w"), torch.full((4, 2), float(number)))
        adam(checkpoint, (name, "optim"), value=float(number))
    directory = checkpoint.write(tmp_path / "c")
    converted(directory, tmp_path / "model.safetensors", "--optimizer", tmp_path / "states.safetensors")
    assert set(load_file(tmp_path / "model.safetensors")) == {"generator.model.w", "critic.model.w"}
    states = load_file(tmp_path / "states.safetensors")
    assert set(states) == {"generator.model.w.exp_avg", "critic.model.w.exp_avg"}
    assert states["critic.model.w.exp_avg"].unique() == 1


def test_a_part_of_a_model_that_is_called_model_is_no_model_of_its_own(tmp_path: Path) -> None:
    checkpoint = Checkpoint()
    checkpoint.add(("net", "model", "w"), torch.ones(2))
    checkpoint.add(("net", "head", "w"), torch.ones(2))
    assert set(weights(checkpoint.write(tmp_path / "c"), tmp_path)) == {"net.model.w", "net.head.w"}


def test_what_a_trainer_keeps_beside_a_model_at_the_top_is_named_and_no_weight(tmp_path: Path) -> None:
    checkpoint = Checkpoint()
    checkpoint.add(("layers.w",), torch.ones(4, 2))
    checkpoint.add(("buffer",), torch.ones(3))
    checkpoint.add(("train_state", "step"), torch.tensor(3))
    directory = checkpoint.write(tmp_path / "no optimizer")
    run = converted(directory, tmp_path / "model.safetensors")
    assert "'train_state' (1 tensor)" in run.err
    checkpoint.add(("sampler", "seen"), torch.tensor(7))
    checkpoint.add(("optimizer", "state.layers.w.exp_avg"), torch.ones(4, 2))
    directory = checkpoint.write(tmp_path / "c")
    run = converted(directory, tmp_path / "model.safetensors")
    assert set(load_file(tmp_path / "model.safetensors")) == {"layers.w", "buffer"}
    assert "'train_state' (1 tensor), 'sampler' (1 tensor)" in run.err
    assert set(weights(directory, tmp_path, "--key", "train_state")) == {"step"}


def test_modules_that_are_nested_beside_tensors_at_the_top_are_weights(tmp_path: Path) -> None:
    checkpoint = Checkpoint()
    checkpoint.add(("temperature",), torch.ones(1))
    checkpoint.add(("encoder", "w"), torch.ones(4, 2))
    adam(checkpoint, ("optimizer",), ("temperature", "encoder.w"))  # type: ignore[arg-type]
    assert set(weights(checkpoint.write(tmp_path / "c"), tmp_path)) == {"temperature", "encoder.w"}


@every("first", ["optimizer", "chained_1.optimizer"])
def test_megatron_s_states_are_named_as_all_others(first: str, tmp_path: Path) -> None:
    """It puts the state before the parameter, and tells no paths."""
    checkpoint = Checkpoint(paths=None)
    for name in ("embed.weight", "decoder.layers.norm.bias"):
        checkpoint.add((name,), torch.ones(2))
        for state in ("exp_avg", "exp_avg_sq"):
            checkpoint.add((f"{first}.state.{state}.{name}",), torch.ones(2))
    directory = checkpoint.write(tmp_path / "c")
    run = converted(directory, tmp_path / "model.safetensors")
    assert set(load_file(tmp_path / "model.safetensors")) == {"embed.weight", "decoder.layers.norm.bias"}
    assert f"--key {first} for" in run.out
    converted(directory, "--optimizer", tmp_path / "states.safetensors")
    assert set(load_file(tmp_path / "states.safetensors")) == {
        f"{name}.{state}"
        for name in ("embed.weight", "decoder.layers.norm.bias")
        for state in ("exp_avg", "exp_avg_sq")
    }
    assert "state.exp_avg.embed.weight" in weights(directory, tmp_path, "--key", first)


@every("name", ["_flat_param", "layers.0._flat_param", "flat_param", "m._fsdp.flat_param_0"])
def test_flat_parameters_are_refused(name: str, tmp_path: Path) -> None:
    checkpoint = Checkpoint()
    checkpoint.add(("model", "norm.weight"), torch.ones(0))
    checkpoint.add(("model", name), torch.ones(7))
    checkpoint.add(("optimizer", "state", name, "exp_avg"), torch.ones(7))
    directory = checkpoint.write(tmp_path / "c")
    for options in ((tmp_path / "o.safetensors",), ("--optimizer", tmp_path / "o.safetensors")):
        run = ckptconv_here("dcp2safetensors", directory, *options)
        assert run.code == 5
        assert "LOCAL_STATE_DICT" in run.err
        assert not (tmp_path / "o.safetensors").exists()
    for command in looking():
        assert ckptconv_here(command, directory).code == 0, command


def test_lists_and_keys_with_dots_come_back(tmp_path: Path) -> None:
    checkpoint = Checkpoint()
    checkpoint.add(("layers", 1, "w"), torch.ones(2))
    checkpoint.add(("layers", 0, "w"), torch.zeros(2))
    checkpoint.add_value(("a.b", "c"), {"deep": [1, (2, None)]})
    checkpoint.add_value(("1", "2"), b"x")
    loaded = state_of(checkpoint.write(tmp_path / "c"), key=".")
    assert [layer["w"].tolist() for layer in loaded.pop("layers")] == [[0.0, 0.0], [1.0, 1.0]]
    assert loaded == {"a.b": {"c": {"deep": [1, (2, None)]}}, "1": {"2": b"x"}}


@every(
    "one_path, other",
    [(("a",), ("a", "b")), (("a", 0), ("a", "b")), (("a", 10**9), ("a", 0)), (("a", -1), ("a", 0)), (("a",), ("a",))],
)
def test_paths_that_contradict_each_other(one_path: Any, other: Any, tmp_path: Path) -> None:
    checkpoint = Checkpoint()
    checkpoint.add(("x",), torch.ones(2))
    checkpoint.add(("y",), torch.ones(2))
    checkpoint.paths = {"x": one_path, "y": other}
    refused(checkpoint.write(tmp_path / "c"), tmp_path / "out.safetensors", 4)


def test_a_large_value_is_left_out_and_said(tmp_path: Path) -> None:
    checkpoint = model()
    checkpoint.add_value(("dataloader",), bytes(17 << 20))
    run = converted(checkpoint.write(tmp_path / "c"), tmp_path / "out.safetensors")
    assert "'dataloader', a value of" in run.err


# ---------------------------------------------------------------------------------------------------------- unfinished


def test_an_interrupted_save(tmp_path: Path) -> None:
    directory = model().write(tmp_path / "c")
    (directory / ".metadata").rename(directory / ".metadata.tmp")
    assert "was interrupted" in refused(directory, tmp_path / "out.safetensors", 4)


def test_metadata_that_was_not_copied(tmp_path: Path) -> None:
    directory = model().write(tmp_path / "c")
    (directory / ".metadata").unlink()
    assert "begins with a dot" in refused(directory, tmp_path / "out.safetensors", 4)


@every("name", ["metadata", ".metadata.1", "0a1b2c"])
@every("command", ["dcp2safetensors", "pt2safetensors", *looking()])
def test_metadata_under_another_name(command: str, name: str, tmp_path: Path) -> None:
    directory = model().write(tmp_path / "c")
    (directory / "README").write_text("The metadata of a run.")
    (directory / ".metadata").rename(directory / name)
    output = [] if command in looking() else [tmp_path / "out.safetensors"]
    if command != "pt2safetensors":
        run = ckptconv_here(command, directory, *output)
        assert (run.code, run.out) == (4, "")
        assert f"has 2 .distcp files, but no .metadata that describes them: {name} is a renamed .metadata" in run.err
        assert f"Rename {name} to .metadata." in run.err
    run = ckptconv_here(command, directory / name, *output)
    assert (run.code, run.out) == (2, "")
    assert f"{directory / name} is a renamed .metadata of a checkpoint" in run.err
    (directory / name).rename(directory / ".metadata")
    assert weights(directory, tmp_path) == ONES


@every("data", [b"", b"not a pickle", pickle.dumps({}), pickle.dumps([1]), pickle.dumps(torch.Size)])
def test_metadata_that_is_none(data: bytes, tmp_path: Path) -> None:
    directory = model().write(tmp_path / "c")
    (directory / ".metadata").write_bytes(data)
    run = ckptconv_here("dcp2safetensors", directory, tmp_path / "out.safetensors")
    assert run.code in (4, 5)


@every("rank", [0, 1])
def test_every_rank_s_metadata_is_needed(rank: int, tmp_path: Path) -> None:
    directory = copy_of("no_collectives_w2", tmp_path)
    (directory / f"__{rank}.metadata").unlink()
    refused(directory, tmp_path / "out.safetensors", 4)


def test_ranks_of_two_saves(tmp_path: Path) -> None:
    directory = copy_of("no_collectives_w2", tmp_path)
    other = Checkpoint()
    other.add(("model", "l1", "weight"), torch.ones(3, 3))
    (directory / "__1.metadata").write_bytes(pickle.dumps(other.metadata()))
    assert "come from different saves." in refused(directory, tmp_path / "out.safetensors", 4)


# --------------------------------------------------------------------------------------------- other writers, and old


def test_metadata_as_the_first_releases_wrote_them(tmp_path: Path) -> None:
    checkpoint = model()
    for tensor in checkpoint.tensors.values():
        tensor.properties = sharded_metadata.TensorProperties(dtype=torch.float32)  # type: ignore[union-attr, assignment]
    metadata = checkpoint.metadata()
    for name in ("storage_meta", "version"):
        vars(metadata).pop(name, None)
    directory = checkpoint.write(tmp_path / "c")
    data = pickle.dumps(metadata)
    assert b"torch.distributed._shard.sharded_tensor.metadata" in data
    (directory / ".metadata").write_bytes(data)
    assert weights(directory, tmp_path) == ONES


@dataclass
class _StorageInfo:
    """Where an entry is, in the words of a writer that nobody knows."""

    relative_path: str
    offset: int
    length: int


def test_places_as_another_writer_tells_them(tmp_path: Path) -> None:
    checkpoint = model()
    checkpoint.places = [
        (index, _StorageInfo(place.relative_path, place.offset, place.length)) for index, place in checkpoint.places
    ]
    assert weights(checkpoint.write(tmp_path / "c"), tmp_path) == ONES
    checkpoint.places = [(index, complex(1, 2)) for index, _ in checkpoint.places]
    assert "complex" in refused(checkpoint.write(tmp_path / "c"), tmp_path / "no.safetensors", 5)


@every("what", ["a tensor", "a dtype", "a layout"])
def test_what_is_not_known_is_named(what: str, tmp_path: Path) -> None:
    checkpoint = model()
    described: Any = checkpoint.tensors["model.w"]
    if what == "a tensor":
        checkpoint.tensors["model.w"] = _StorageInfo("x", 1, 2)  # type: ignore[assignment]
    elif what == "a dtype":
        described.properties.dtype = torch.uint4
    else:
        described.properties.layout = torch.sparse_coo
    message = refused(checkpoint.write(tmp_path / "c"), tmp_path / "out.safetensors", 5)
    assert {"a tensor": "_StorageInfo", "a dtype": "uint4", "a layout": "sparse_coo"}[what] in message


# ------------------------------------------------------------------------------------------------ shards of safetensors


def test_shards_are_preferred_to_what_was_made_of_them(tmp_path: Path) -> None:
    output = tmp_path / "c"
    shutil.copytree(checkpoint_of("hf_sharded_w2"), output / "sharded")
    # Consolidation makes zeros of scalars.
    save_file({name: torch.zeros(1) for name in expected_of("hf_sharded_w2")["tensors"]}, output / "model.safetensors")
    found = weights(output, tmp_path)
    assert found == weights(checkpoint_of("hf_sharded_w2"), tmp_path)


def test_what_one_process_saves_for_hugging_face_is_an_ordinary_set(tmp_path: Path) -> None:
    state = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(3)}
    writer = dist_checkpoint.HuggingFaceStorageWriter(str(tmp_path / "c"), {"a": 1, "b": 2})
    dist_checkpoint.save(state, storage_writer=writer, no_dist=True)
    assert weights(tmp_path / "c", tmp_path) == {name: tensor.tolist() for name, tensor in state.items()}


def test_a_shard_in_the_middle_is_missed(tmp_path: Path) -> None:
    directory = copy_of("hf_sharded_w2", tmp_path)
    for path in directory.glob("shard-00001-*"):
        path.unlink()
    assert "lacks shard 1 of 2" in refused(directory, tmp_path / "out.safetensors", 4)


def test_one_file_of_a_shard_is_missed(tmp_path: Path) -> None:
    directory = copy_of("hf_sharded_w2", tmp_path)
    (directory / "shard-00001-model-00002-of-00002.safetensors").unlink()
    assert "chunks are missing" in refused(directory, tmp_path / "out.safetensors", 4)


@every("info", ["", "{", "[]", '{"up.bias": 5}', '{"up.bias": {"saved_offsets": [-1]}}'])
def test_shards_that_do_not_say_where_they_belong(info: str, tmp_path: Path) -> None:
    directory = copy_of("hf_sharded_w2", tmp_path)
    path = directory / "shard-00002-model-00001-of-00002.safetensors"
    metadata = {"DCP_SHARDING_INFO": info} if info else {}
    save_file(load_file(path), path, metadata)
    refused(directory, tmp_path / "out.safetensors", 4)


def test_a_rank_s_second_chunk_that_torch_has_lost(tmp_path: Path) -> None:
    directory = copy_of("safetensors_fmt_w2", tmp_path)
    data = (directory / "__1_0.distcp").read_bytes()
    assert data.count(b"saved_offsets") > 1
    at = data.find(b'\\"saved_offsets\\": [')
    spoilt = data[:at] + data[at:].replace(b"[5, 0]", b"[0, 5]").replace(b"[3, 0]", b"[0, 3]")
    (directory / "__1_0.distcp").write_bytes(spoilt)
    assert "saves only the last one." in refused(directory, tmp_path / "out.safetensors", 4)


def test_an_unknown_transform(tmp_path: Path) -> None:
    checkpoint = Checkpoint(descriptors=["stream.brotli/1"])
    checkpoint.add(("model", "w"), torch.ones(2))
    assert "stream.brotli/1" in refused(checkpoint.write(tmp_path / "c"), tmp_path / "out.safetensors", 5)
