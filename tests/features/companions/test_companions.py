"""Companions: which files beside a checkpoint are copied to its output, what they replace there, and what is said."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from cells import VERIFIED, offered, verified, verified_here
from checkpoints import ckptconv_here
from fsspec.implementations.memory import MemoryFileSystem
from safetensors.torch import load_file, save_file
from stores import FAR

import ckptconv
from ckptconv import convert
from ckptconv.errors import CorruptError, UsageError
from ckptconv.features.companions import reading
from ckptconv.options.table import OPTIONS
from ckptconv.outputs.targets import MANIFEST as NAME

MODEL = {f"layers.{number}.weight": torch.arange(40.0).reshape(4, 10) + number for number in range(3)}
BROUGHT = {
    "config.json": b'{"torch_dtype": "float32"}',
    "generation_config.json": b"{}",
    "merges.txt": b"#version: 0.2\n",
    "tokenizer.json": b"{" + b" " * 300_000 + b"}",
    "tokenizer.model": b"\n\x0e\n\x05<unk>",
    "vocab.txt": b"",
    "LICENSE": b"Apache-2.0",
    "README.md": b"# A model",
}
LEFT = {
    "modeling_tiny.py": b"import os",
    "optimizer.pt": b"\x80\x02N.",
    "vocab.pkl": b"\x80\x02N.",
    "training_args.bin": b"\x80\x02N.",
    ".env": b"SECRET=1",
    "trainer_state.json": b"{}",
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """The directory of a model with all that its trainer and its tokenizer left there."""
    directory = tmp_path / "source"
    directory.mkdir()
    torch.save(MODEL, directory / "pytorch_model.bin")
    for name, data in (BROUGHT | LEFT).items():
        (directory / name).write_bytes(data)
    return directory


def content(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def brought(directory: Path) -> dict[str, bytes]:
    """What a directory holds beside the weights and the manifest."""
    own = ("model", ".ckptconv", "ckptconv.")
    return {name: data for name, data in content(directory).items() if not name.startswith(own)}


# ------------------------------------------------------------------------------------------------------ what is copied


def test_data_that_a_model_is_loaded_with_is_copied_and_nothing_else(source: Path, tmp_path: Path) -> None:
    report = convert(source, tmp_path / "out", copy_config=True, **VERIFIED)
    assert brought(tmp_path / "out") == BROUGHT
    assert {Path(each.path).name: each.bytes for each in report.outputs if not each.tensors} == {
        name: len(data) for name, data in BROUGHT.items()
    }
    assert report.tensors == len(MODEL)
    assert any("config.json" in note for note in report.notes)
    told = json.loads((tmp_path / "out" / NAME).read_bytes())
    assert all(told["files"][name] == {"size": len(data), "tensors": {}} for name, data in BROUGHT.items())
    assert told["source"]["inputs"].keys() == {"pytorch_model.bin", *BROUGHT}


def test_a_directory_that_its_configuration_describes_is_copied_from_unless_that_is_declined(
    source: Path, tmp_path: Path
) -> None:
    report = convert(source, tmp_path / "out")
    assert brought(tmp_path / "out") == BROUGHT
    assert any(note.startswith("copied: ") and "config.json" in note for note in report.notes)
    verified(source, tmp_path / "out")
    report = convert(source, tmp_path / "bare", copy_config=False)
    assert brought(tmp_path / "bare") == {}
    assert any("config.json" in note and "--no-copy-config" in note for note in report.notes)


@pytest.mark.parametrize(
    "options",
    [{"rename": ["^layers=blocks"]}, {"include": ["layers.0.*"]}, {"strip_prefix": "layers."}],
    ids=["renamed", "a part", "without a prefix"],
)
def test_a_directory_is_not_copied_from_if_its_configuration_may_not_describe_the_output(
    options: dict[str, Any], source: Path, tmp_path: Path
) -> None:
    report = convert(source, tmp_path / "out", **options)
    assert brought(tmp_path / "out") == {}
    assert any("config.json" in note and "not copied without --copy-config" in note for note in report.notes)


def test_a_directory_without_a_model_or_a_configuration_of_it_is_not_copied_from(source: Path, tmp_path: Path) -> None:
    convert(source / "pytorch_model.bin", tmp_path / "of-a-file")
    (source / "config.json").write_text("no JSON")
    convert(source, tmp_path / "unreadable")
    (source / "config.json").unlink()
    convert(source, tmp_path / "without")
    (source / "config.json").write_bytes(BROUGHT["config.json"])
    (source / "pytorch_model.bin").unlink()
    save_file(MODEL, source / "consolidated.safetensors")
    convert(source, tmp_path / "of-another-library")
    for name in ("of-a-file", "unreadable", "without", "of-another-library"):
        assert brought(tmp_path / name) == {}, name


def test_a_file_of_a_model_says_that_the_configuration_next_to_it_stays(source: Path, tmp_path: Path) -> None:
    file = source / "pytorch_model.bin"
    told = f"not copied from {source}: config.json (not copied without --copy-config)."
    assert told in convert(file, tmp_path / "out", fsync=False).notes
    assert not (tmp_path / "out/config.json").exists()
    for options in ({"copy_config": True}, {"copy_config": False}):
        assert told not in convert(file, tmp_path / "out", fsync=False, **options).notes
    assert told not in convert(file, tmp_path / "out.safetensors", fsync=False).notes
    other = file.rename(source / "other.bin")
    assert told not in convert(other, tmp_path / "other", fsync=False).notes


def test_the_command_line(source: Path, tmp_path: Path) -> None:
    run = ckptconv_here("pt2safetensors", "--copy-config", "--json", source, tmp_path / "out")
    assert run.code == 0, run.err
    assert brought(tmp_path / "out") == BROUGHT
    verified_here(source, tmp_path / "out")
    shown = ckptconv_here("pt2safetensors", "--copy-config", "--dry-run", source, tmp_path / "dry")
    assert "config.json" in shown.out
    assert not (tmp_path / "dry").exists()


@pytest.mark.parametrize(
    ("place", "reason"),
    [("out.safetensors", "a single file"), ("source", "the input's directory"), ("out", "no model configuration")],
)
def test_where_nothing_can_be_copied_that_is_said_to_who_asked_for_it(
    place: str, reason: str, source: Path, tmp_path: Path
) -> None:
    if reason == "no model configuration":
        for name in BROUGHT:
            (source / name).unlink()
    before = content(source)
    report = convert(source, tmp_path / place, copy_config=True)
    assert any("--copy-config copies nothing" in text and reason in text for text in report.warnings)
    assert content(source).items() >= before.items()


def test_links_out_of_the_directory_are_not_followed_but_in_the_cache_of_the_hub(source: Path, tmp_path: Path) -> None:
    (tmp_path / "secret.json").write_bytes(b"{}")
    (source / "config.json").unlink()
    (source / "config.json").symlink_to(tmp_path / "secret.json")
    (source / "README.md").unlink()
    (source / "README.md").symlink_to("LICENSE")
    (source / "vocab.json").symlink_to("nowhere")
    (source / "special_tokens_map.json").mkdir()
    report = convert(source, tmp_path / "out", copy_config=True)
    assert "config.json" not in brought(tmp_path / "out")
    assert brought(tmp_path / "out")["README.md"] == BROUGHT["LICENSE"]
    assert any("config.json" in text and "a link to a file outside its directory" in text for text in report.warnings)

    cache = tmp_path / "models--org--model"
    (cache / "snapshots" / "abc").mkdir(parents=True)
    (cache / "blobs").mkdir()
    (source / "pytorch_model.bin").rename(cache / "snapshots" / "abc" / "pytorch_model.bin")
    (cache / "blobs" / "123").write_bytes(BROUGHT["config.json"])
    (cache / "snapshots" / "abc" / "config.json").symlink_to("../../blobs/123")
    (cache / "snapshots" / "abc" / "vocab.txt").symlink_to(tmp_path / "secret.json")
    convert(cache / "snapshots" / "abc", tmp_path / "cached", copy_config=True)
    assert brought(tmp_path / "cached") == {"config.json": BROUGHT["config.json"]}
    (cache / "blobs").rename(cache / "other")
    (cache / "snapshots" / "abc" / "config.json").unlink()
    (cache / "snapshots" / "abc" / "config.json").symlink_to("../../other/123")
    convert(cache / "snapshots" / "abc", tmp_path / "none", copy_config=True)
    assert not brought(tmp_path / "none")


def test_what_is_too_large_for_such_a_file_stays(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "LARGEST", 1 << 10)
    report = convert(source, tmp_path / "out", copy_config=True)
    assert brought(tmp_path / "out").keys() == BROUGHT.keys() - {"tokenizer.json"}
    assert any("tokenizer.json was not copied" in text for text in report.warnings)


@pytest.mark.parametrize(
    ("config", "dtype", "said"),
    [
        ('{"dtype": "bfloat16"}', "bf16", ""),
        ('{"torch_dtype": "float16"}', "keep", ""),
        ('{"auto_map": {"AutoModel": "modeling_tiny.Tiny"}}', "keep", "modeling_tiny.py"),
        ('{"auto_map": {"AutoModel": "org/other--modeling_tiny.Tiny"}}', "keep", ""),
        ('{"dtype": 3, "auto_map": 4}', "bf16", ""),
        ('{"time_step_limit": [0.0, Infinity]}', "bf16", ""),
    ],
)
def test_a_configuration_that_stays_true_is_copied_as_it_is(
    config: str, dtype: str, said: str, source: Path, tmp_path: Path
) -> None:
    (source / "config.json").write_text(config)
    report = convert(source, tmp_path / "out", copy_config=True, dtype=dtype)
    assert (tmp_path / "out" / "config.json").read_text() == config
    noted = [note for note in report.notes if note.startswith("config.json")]
    assert len(noted) == bool(said)
    assert all(said in note for note in noted)


def test_the_dtype_in_a_configuration_follows_the_weights_at_every_depth(source: Path, tmp_path: Path) -> None:
    told = {
        "torch_dtype": "torch.float32",
        "a": {"dtype": "float16", "b": [{"dtype": "float32"}]},
        "dtype": "auto",
        "limit": [0.0, float("inf")],
    }
    (source / "config.json").write_text(json.dumps(told))
    report = convert(source, tmp_path / "out", copy_config=True, dtype="bf16", **VERIFIED)
    made = json.loads((tmp_path / "out" / "config.json").read_text())
    assert made == {
        "torch_dtype": "bfloat16",
        "a": {"dtype": "bfloat16", "b": [{"dtype": "bfloat16"}]},
        "dtype": "auto",
        "limit": [0.0, float("inf")],
    }
    assert (
        "The copy of config.json has the dtype of the output's weights, bfloat16, instead of float32." in report.notes
    )
    verified(source, tmp_path / "out", copy_config=True, dtype="bf16")
    for files in offered(source, dtype="bf16"):
        assert json.loads(files.read_bytes("config.json")) == made


@pytest.mark.parametrize("config", ["[1]", "no JSON", '{"a": 1, "a": 2}', '{"a": ' * 600 + "1" + "}" * 600])
def test_a_configuration_that_is_none_is_refused(config: str, source: Path, tmp_path: Path) -> None:
    (source / "config.json").write_text(config)
    with pytest.raises(CorruptError, match=r"config.json is not a valid configuration"):
        convert(source, tmp_path / "out", copy_config=True)
    assert not (tmp_path / "out").exists()


# ---------------------------------------------------------------------------------------------------- what is replaced


def test_a_file_of_the_users_stays_and_is_no_part_of_the_output(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_bytes(b"mine")
    (out / "LICENSE").write_bytes(BROUGHT["LICENSE"])
    for _ in range(2):
        report = convert(source, out, copy_config=True)
        assert any("config.json was not replaced, because" in text for text in report.warnings)
        assert brought(out) == {**BROUGHT, "config.json": b"mine"}
        assert "config.json" not in json.loads((out / NAME).read_bytes())["files"]
        verified(source, out)


def test_what_an_earlier_output_brought_is_replaced_or_goes(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert(source, out, copy_config=True)
    (source / "config.json").write_bytes(b'{"new": 1}')
    (source / "merges.txt").unlink()
    report = convert(source, out, copy_config=True)
    assert brought(out) == {name: (source / name).read_bytes() for name in BROUGHT if name != "merges.txt"}
    assert report.warnings == []
    assert any("removed" in note and "merges.txt" in note and "config.json" not in note for note in report.notes)
    report = convert(source, out, rename=["^layers=blocks"])
    assert brought(out) == {}
    assert any("config.json" in text and "--copy-config copies these files" in text for text in report.warnings)


def test_copies_of_an_earlier_output_that_an_option_declines_are_removed_with_a_note(
    source: Path, tmp_path: Path
) -> None:
    convert(source, tmp_path / "out")
    report = convert(source, tmp_path / "out", copy_config=False)
    assert brought(tmp_path / "out") == {}
    assert any("removed" in note and "config.json" in note for note in report.notes)
    assert report.warnings == []


def test_what_was_changed_since_is_the_users(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert(source, out, copy_config=True)
    (out / "config.json").write_bytes(b'{"torch_dtype": "float99"}')
    assert len(b'{"torch_dtype": "float99"}') == len(BROUGHT["config.json"])
    later = (out / NAME).stat().st_mtime_ns + 10**9
    os.utime(out / "config.json", ns=(later, later))
    report = convert(source, out, copy_config=True)
    assert (out / "config.json").read_bytes() == b'{"torch_dtype": "float99"}'
    assert any("was not replaced, because" in text for text in report.warnings)


@pytest.mark.parametrize("damage", [b"", b"{}", b"\xff", b'{"files": {"config.json": 3}}'])
def test_a_manifest_that_is_none_says_nothing(damage: bytes, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert(source, out, copy_config=True)
    (out / NAME).write_bytes(damage)
    (source / "config.json").write_bytes(b'{"new": 1}')
    for path in out.iterdir():
        os.removexattr(path, "user.ckptconv")
    with pytest.raises(UsageError, match="not recognised as an output of ckptconv"):
        convert(source, out, copy_config=True)
    assert (out / "config.json").read_bytes() == BROUGHT["config.json"]
    assert (out / "LICENSE").read_bytes() == BROUGHT["LICENSE"]


# ------------------------------------------------------------------------------------------- parts, stores, differences


@pytest.mark.skipif("part" not in OPTIONS, reason="there are no parts")
def test_parts_and_finish_bring_the_same(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "whole", copy_config=True, max_shard_size=200)
    for part in ("0/3", "1/3", "2/3"):
        convert(source, tmp_path / "out", copy_config=True, max_shard_size=200, part=part)
        assert not (tmp_path / "out" / "config.json").exists()
    ckptconv.finish(tmp_path / "out")
    assert content(tmp_path / "out") == content(tmp_path / "whole")


@FAR
@pytest.mark.parametrize("parts", [False, True] if "part" in OPTIONS else [False])
def test_from_and_to_stores(parts: bool, source: Path, tmp_path: Path) -> None:
    store = MemoryFileSystem()
    place = f"{tmp_path.name}-{parts}"
    for name, data in content(source).items():
        store.pipe_file(f"/{place}/in/{name}", data)
    url = f"memory://{place}/out"
    settings: dict[str, Any] = {"copy_config": True, "max_shard_size": 200}
    for _ in range(2):
        if parts:
            for part in ("0/2", "1/2"):
                convert(f"memory://{place}/in", url, part=part, **settings)
            ckptconv.finish(url)
        else:
            convert(f"memory://{place}/in", url, **settings)
        there = {path.rpartition("/")[2]: store.cat_file(path) for path in store.find(f"/{place}/out")}
        assert there.items() >= BROUGHT.items()
        assert not LEFT.keys() & there.keys()
        verified(f"memory://{place}/in", url)


def test_a_companion_that_changes_meanwhile_spoils_the_output(source: Path, tmp_path: Path) -> None:
    def change() -> None:
        raise AssertionError("it was to be found before")

    class Changing:
        def __call__(self, count: int) -> None:
            pass

        def on_file(self, name: str) -> None:
            if name.startswith("model"):
                (source / "config.json").write_bytes(b'{"other": true}')

    with pytest.raises(CorruptError, match=r"config\.json (changed while it was read|ends at byte (0|15))"):
        convert(source, tmp_path / "out", copy_config=True, progress=Changing(), before_commit=change)
    assert not (tmp_path / "out").exists()


def test_the_weights_of_a_loaded_directory_are_right(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "out", copy_config=True)
    loaded = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in MODEL.items())
