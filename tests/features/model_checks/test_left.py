"""The files of an input's directory that its output does not have are named, each with the reason."""

from __future__ import annotations

import shutil
import tarfile
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from cells import looking, offered, trained
from checkpoints import ckptconv_here
from effort import every
from safetensors.torch import save_file

from ckptconv import Report, UsageError, convert
from ckptconv.features.companions.deciding import UNASKED
from ckptconv.features.model_checks.left import reason_of

COPIED = {"config.json": b"{}", "tokenizer.json": b"{}", "README.md": b"# A model"}
LEFT = {
    "modeling_tiny.py": "code, which is never copied",
    "optimizer.pt": "of the training",
    "trainer_state.json": "of the training",
    "model.onnx": "for other programs",
    "vocab.pkl": "pickles, which are never copied",
    "notes.odt": "not known as a model's",
    "adapter_config.json": "not copied without --copy-config",
    ".env": "hidden",
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """The directory of a model with all that people put there."""
    directory = tmp_path / "source"
    (directory / "onnx").mkdir(parents=True)
    torch.save({"norm.weight": torch.ones(4)}, directory / "pytorch_model.bin")
    for name, data in {**COPIED, **dict.fromkeys(LEFT, b"\x80\x02N.")}.items():
        (directory / name).write_bytes(data)
    return directory


def noted(notes: Iterable[str]) -> list[str]:
    return [note for note in notes if note.startswith("not copied from")]


def named(report: Report) -> dict[str, str]:
    return {Path(path).name: reason for path, reason in report.left.items()}


def test_every_file_that_the_output_lacks_is_in_the_report_with_a_reason(source: Path, tmp_path: Path) -> None:
    report = convert(source, tmp_path / "copied", copy_config=True)
    there = {path.name for path in (tmp_path / "copied").iterdir()}
    assert named(report) == LEFT | {"onnx": "folders are not copied", "adapter_config.json": "it belongs to an adapter"}
    assert {path.name for path in source.iterdir()} == {"pytorch_model.bin", *named(report), *(COPIED.keys() & there)}
    assert named(convert(source, tmp_path / "described")) == named(report)
    plain = named(convert(source, tmp_path / "plain", rename=["^=model."]))
    assert plain == LEFT | {"onnx": "folders are not copied"} | dict.fromkeys(
        COPIED, "not copied without --copy-config"
    )
    one = named(convert(source, tmp_path / "one.safetensors"))
    assert all(one[name] == "OUTPUT is a single file" for name in COPIED)


def test_an_earlier_output_beside_the_steps_of_a_run_is_read_with_a_warning(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for step in ("step-100", "step-200"):
        (run / step).mkdir(parents=True)
        torch.save({"norm.weight": torch.ones(4)}, run / step / "pytorch_model.bin")
    save_file({"norm.weight": torch.zeros(4)}, run / "model.safetensors", {"format": "pt"})
    assert convert(run, tmp_path / "of-a-trainer").warnings == []
    convert(run / "step-100", tmp_path / "out.safetensors")
    (tmp_path / "out.safetensors").replace(run / "model.safetensors")
    (warning,) = convert(run, tmp_path / "of-ours").warnings
    assert warning.startswith(
        f"{run / 'model.safetensors'}, an earlier output of ckptconv, was read instead of the steps"
    )
    assert "step-100, step-200." in warning


def test_the_directory_of_an_optimizer_is_no_step() -> None:
    assert [reason_of(name, "directory") for name in ("optimizer_0", "step_100", "onnx")] == [
        "folders are not copied",
        "named like another step",
        "folders are not copied",
    ]


def test_people_read_names_by_reason_but_no_hidden_ones(source: Path, tmp_path: Path) -> None:
    (note,) = noted(convert(source, tmp_path / "out", copy_config=True).notes)
    assert note.startswith(f"not copied from {source}: ")
    assert "optimizer.pt, trainer_state.json (of the training)" in note
    assert "onnx (folders are not copied)" in note
    assert ".env" not in note
    run = ckptconv_here("convert", source, tmp_path / "told", "--json")
    assert run.json["left"][str(source / ".env")] == "hidden"
    for files in offered(source):
        assert "modeling_tiny.py (code, which is never copied)" in "".join(noted(files.notes))


def test_what_could_not_be_copied_says_why(source: Path, tmp_path: Path) -> None:
    (tmp_path / "secret.json").write_bytes(b"{}")
    (source / "vocab.json").symlink_to(tmp_path / "secret.json")
    (source / "merges.txt").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "README.md").write_bytes(b"mine")
    left = named(convert(source, tmp_path / "out", copy_config=True))
    assert left["vocab.json"] == "it is a link to a file outside its directory"
    assert left["merges.txt"] == "it is no file"
    assert left["README.md"] == "the file in the output directory was not replaced"


def test_files_of_ranks_are_not_named_but_those_of_the_model_beside_them(tmp_path: Path) -> None:
    for number, run in enumerate(trained()):
        here = tmp_path / str(number)
        shutil.copytree(run, here)
        for name in ("config.json", "tokenizer.json"):
            (here / name).write_text("{}")
        reason = "OUTPUT is a single file"
        left = f"not copied from {here}: config.json, tokenizer.json ({reason})."
        assert noted(convert(here, tmp_path / f"{number}.safetensors").notes) == [left]
        assert noted(convert(here, tmp_path / f"{number}-copied", copy_config=True).notes) == []
        assert noted(convert(here, here / "out.safetensors").notes) == []


def test_beside_ranks_all_else_is_named_and_the_files_of_a_folder(tmp_path: Path) -> None:
    for number, run in enumerate(trained()):
        here = tmp_path / str(number)
        shutil.copytree(run, here)
        (here / "huggingface").mkdir()
        for name in ("trainer_state.json", "huggingface/config.json", "huggingface/modeling_tiny.py"):
            (here / name).write_text("{}")
        left = {"trainer_state.json": "of the training", "modeling_tiny.py": "code, which is never copied"}
        assert named(convert(here, tmp_path / f"{number}-copied", copy_config=True)) == left
        assert (tmp_path / f"{number}-copied" / "config.json").exists()
        left |= {"config.json": UNASKED}
        assert named(convert(here, tmp_path / f"{number}-plain")) == left
        (here / "config.json").write_text("{}")
        left |= {"config.json": "the file of another folder is used"}
        report = convert(here, tmp_path / f"{number}-beside", copy_config=True)
        assert named(report) == left
        assert str(here / "huggingface" / "config.json") in report.left


def test_a_file_by_its_name_and_an_output_beside_its_input_leave_nothing(source: Path, tmp_path: Path) -> None:
    assert convert(source / "pytorch_model.bin", tmp_path / "out").left == {}
    assert convert(source, source / "model.safetensors").left == {}


@every(
    "name, reason",
    [
        ("config.json", ""),
        ("tokenizer.model", ""),
        ("params.json", "for other programs"),
        ("pytorch_model-00001-of-00002.bin", "other weights"),
        ("model.safetensors.index.json", "index of the input files"),
        ("tf_model.h5", "for other programs"),
        ("run_config.yaml", "of the training"),
        ("optimizer_1.bin", "of the training"),
        ("optim_world_size_4_rank_0.pt", "of the training"),
        ("events.out.tfevents.1.host", "of the training"),
        ("optimizer", "of the training"),
        ("ocdbt.process_0", "of ranks"),
        ("array_metadatas", "of ranks"),
        ("_sharding", "of ranks"),
        (".gitattributes", "hidden"),
        ("configuration_tiny.py", "code, which is never copied"),
        ("anything", "not known as a model's"),
    ],
)
def test_the_name_of_a_file_tells_what_it_is_for(name: str, reason: str) -> None:
    assert reason_of(name) == reason


def test_a_folder_with_the_name_of_a_step_is_said_to_be_one() -> None:
    steps = ("10", "step-10", "global_step20", "checkpoint-500", "epoch=3", "onnx", "1_Pooling", "llama-3b")
    assert [name for name in steps if reason_of(name, "directory") == "folders are not copied"] == [*steps[5:]]
    assert reason_of("10", "directory") == "named like another step"


def test_one_file_among_other_weights_is_not_taken_for_the_checkpoint(tmp_path: Path) -> None:
    """Such as in the parent directory of several checkpoints."""
    directory = tmp_path / "in"
    (directory / "run").mkdir(parents=True)
    save_file({"w": torch.ones(2)}, directory / "c.safetensors")
    for name in ("c.pt", "optimizer.pt", "notes.txt"):
        (directory / name).write_bytes(b"\x80\x02N.")
    assert convert(directory, tmp_path / "alone", fsync=False).tensors == 1
    (directory / "base.pt").write_bytes(b"\x80\x02N.")
    with pytest.raises(
        UsageError, match=r"several files of weights, .* which to convert: .*/in/c\.safetensors, .*/in/base\.pt\."
    ) as told:
        convert(directory, tmp_path / "out", dry_run=True)
    assert told.value.hint.startswith("Give one of them")
    warning = told.value.message.removesuffix(" Nothing was written.")
    for command in looking():
        assert warning in ckptconv_here(command, directory, "--json").json["warnings"]
    assert convert(directory / "c.safetensors", tmp_path / "out", fsync=False).tensors == 1
    # A file with the name of a model is the checkpoint.
    (directory / "c.safetensors").rename(directory / "model.safetensors")
    assert convert(directory, tmp_path / "model", fsync=False).tensors == 1


def test_of_weights_of_several_libraries_the_report_names_all(tmp_path: Path) -> None:
    place = tmp_path / "in"
    place.mkdir()
    for name in ("model", "open_clip_model"):
        save_file({"w": torch.ones(2)}, place / f"{name}.safetensors")
    report = convert(place, tmp_path / "out")
    what = "model.safetensors was read, but not open_clip_model.safetensors. Give the path of a file to convert it."
    assert report.warnings == [f"{place} has weights of several libraries: {what}"]
    for command in looking():
        assert report.warnings[0] in ckptconv_here(command, place, "--json").json["warnings"]
    assert convert(place / "model.safetensors", tmp_path / "one").warnings == []
    # The same weights in another format are no others.
    (place / "open_clip_model.safetensors").rename(place / "pytorch_model.bin")
    assert convert(place, tmp_path / "two").warnings == []


def test_a_model_in_one_file_beside_an_index_is_warned_of_once(tmp_path: Path) -> None:
    place = tmp_path / "in"
    save_file({"v": torch.ones(2), "w": torch.ones(2)}, tmp_path / "whole.safetensors")
    convert(tmp_path / "whole.safetensors", place, max_shard_size=8)
    assert len([*place.glob("*.safetensors")]) == 2
    save_file({"w": torch.ones(2)}, place / "model.safetensors")
    expected = [f"{place / 'model.safetensors'} was not read, because the directory has an index."]
    assert convert(place, tmp_path / "out").warnings == expected
    for command in looking():
        assert ckptconv_here(command, place, "--json").json["warnings"] == expected
    # Weights of another library are named still.
    save_file({"w": torch.ones(2)}, place / "open_clip_model.safetensors")
    warnings = convert(place, tmp_path / "more", dry_run=True).warnings
    assert any("not open_clip_model.safetensors." in warning for warning in warnings)


def test_a_file_that_has_not_the_name_of_a_model_is_named(tmp_path: Path) -> None:
    for name, is_named in (("tuned-v3", True), ("model", False)):
        place = tmp_path / name
        (place / "logs").mkdir(parents=True)
        save_file({"w": torch.ones(2)}, place / f"{name}.safetensors")
        note = f"The weights are those of {place / name}.safetensors."
        assert (note in convert(place, tmp_path / f"{name}-out").notes) is is_named


def test_a_checkpoint_in_a_folder_beside_a_file_is_named(tmp_path: Path) -> None:
    place = tmp_path / "run"
    (place / "logs").mkdir(parents=True)
    save_file({"w": torch.ones(2)}, place / "expected.safetensors")
    assert convert(place, tmp_path / "out").warnings == []
    convert(place / "expected.safetensors", place / "checkpoint")
    told = [f"{place / 'checkpoint'} is a checkpoint too, but not read. To convert it, give its path."]
    assert convert(place, tmp_path / "out").warnings == told
    assert convert(place / "checkpoint", tmp_path / "other").tensors == 1


def test_of_a_folder_in_an_archive_a_copied_file_is_not_named_as_left(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with tarfile.open("all.tar", "w") as archive:
        archive.add(source, "model")
    expected = noted(convert(source, tmp_path / "of-folder").notes)
    told = noted(convert("tar://model::all.tar", tmp_path / "of-archive").notes)
    assert [note.replace("tar://model::all.tar", str(source)) for note in told] == expected
