"""Steps of Orbax: those that Orbax and tensorstore wrote, whose arrays come out bit for bit, and others by hand."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cells import VERIFY, looking
from checkpoints import assert_same, ckptconv_here, done
from effort import every
from features.compressed.packings import crc32c, packed
from features.ocdbt.writer import database
from features.orbax import writer
from features.orbax.attacks import STEPS
from features.zarr import writer as of_arrays
from format_suite import FormatSuite
from reading import state_in, state_of
from safetensors.torch import load_file, save_file

import ckptconv
from ckptconv.formats.detect import open_source
from ckptconv.formats.registered import DESCRIBING
from ckptconv.outputs.kinds import NAMED
from ckptconv.storage import packed as packing

DATA = Path(__file__).parent / "data"
CASES = {path.name: json.loads((path / "case.json").read_text()) for path in sorted(DATA.iterdir())}
SOUND = [name for name in CASES if not name.startswith("error-")]


def step_of(case: str) -> Path:
    return DATA / case / str(CASES[case]["path"])


def expected_of(case: str) -> dict[str, torch.Tensor]:
    """The arrays that were saved; numbers are in the record, not among these."""
    leaves = json.loads((DATA / case / "expected.json").read_text())["leaves"]
    numbers = {leaf["name"] for leaf in leaves if leaf["kind"] == "scalar" and is_number(case, leaf["name"])}
    arrays = load_file(DATA / case / "expected.safetensors")
    return {name: array for name, array in arrays.items() if name not in numbers}


def is_number(case: str, name: str) -> bool:
    entries = json.loads((step_of(case) / "_METADATA").read_text())["tree_metadata"].values()
    kinds = {".".join(key["key"] for key in entry["key_metadata"]): entry["value_metadata"] for entry in entries}
    return bool(kinds[name]["value_type"] == "scalar")


class TestCompressed(FormatSuite):
    """Chunks of zstandard in two dimensions, cut at the edges of their arrays."""

    command, family = "convert", "orbax"
    case = "small-chunks"

    def write(self, place: Path) -> Path:
        return Path(shutil.copytree(step_of(self.case), place / "step"))

    def expected(self, checkpoint: Path) -> Mapping[str, torch.Tensor]:
        return expected_of(self.case)


class TestShards(TestCompressed):
    """Shards of zarr 3, of which some chunks are not there."""

    case = "sharded-zarr3"


class TestLarge(TestCompressed):
    """Arrays of which each has several outputs, not compressed."""

    arrays: Mapping[str, Any] = {
        f"layer{at}": np.random.default_rng(at).random((700, 300), np.float32) for at in range(2)
    }

    def write(self, place: Path) -> Path:
        return writer.step(place / "step", self.arrays, compressed=False)

    def expected(self, checkpoint: Path) -> Mapping[str, torch.Tensor]:
        return {name: torch.from_numpy(array) for name, array in self.arrays.items()}


class TestLargeCompressed(TestLarge):
    def write(self, place: Path) -> Path:
        return writer.step(place / "step", self.arrays, rows=160)


@every("case", SOUND)
def test_every_array_comes_out_bit_for_bit(case: str, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    done(ckptconv_here("convert", step_of(case), out, "--key", ".", *VERIFY))
    assert_same(load_file(out), expected_of(case))


@every("case", [name for name in CASES if name not in SOUND])
def test_what_tensorstore_refuses_is_refused(case: str, tmp_path: Path) -> None:
    run = ckptconv_here("convert", step_of(case), tmp_path / "out.safetensors")
    assert run.code in (3, 4), (case, run)
    assert not (tmp_path / "out.safetensors").exists()


@every("case, name", [("manager", "20"), ("not-committed", "1"), ("manager-composite", "3")])
def test_of_a_run_the_last_complete_step_is_taken(case: str, name: str, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    run = done(ckptconv_here("convert", DATA / case / "checkpoint" / "run", out))
    text = f"Took {name}, the last complete step."
    if case == "not-committed":
        assert f"warning: {text} Later steps are not complete: 2.orbax-checkpoint-tmp." in run.err
    else:
        assert text in run.out
    model = expected_of(case)
    own = {each.removeprefix("params."): array for each, array in model.items() if "params." in each} or model
    assert_same(load_file(out), own)


def test_of_a_step_that_is_not_there_the_others_are_told(tmp_path: Path) -> None:
    run = DATA / "manager" / "checkpoint" / "run"
    ckptconv_here("convert", run / "99", tmp_path / "out").refused(2, "99 does not exist", "contains 10, 20")


def test_a_step_that_is_not_complete_is_refused(tmp_path: Path) -> None:
    left = DATA / "not-committed" / "checkpoint" / "run" / "2.orbax-checkpoint-tmp"
    for place in (left, left / "default.orbax-checkpoint-tmp"):
        ckptconv_here("convert", place, tmp_path / "out").refused(4, "is not complete", ".orbax-checkpoint-tmp")
    copied = Path(shutil.copytree(left, tmp_path / "2"))
    ckptconv_here("convert", copied, tmp_path / "out").refused(4, "is not complete")
    (copied / "default.orbax-checkpoint-tmp").rename(copied / "default")
    ckptconv_here("convert", copied, tmp_path / "out").refused(4, "records no commit time")
    told = json.loads((copied / "_CHECKPOINT_METADATA").read_text())
    (copied / "_CHECKPOINT_METADATA").write_text(
        json.dumps({**told, "commit_timestamp_nsecs": 5, "item_handlers": {"default": "x", "params": "y"}})
    )
    ckptconv_here("convert", copied, tmp_path / "out").refused(4, "lacks 'params'")


def test_the_model_is_what_is_under_params_and_a_note_says_what_is_beside_it(tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    run = done(ckptconv_here("convert", step_of("train-state"), out))
    every_array = expected_of("train-state")
    params = {name[7:]: array for name, array in every_array.items() if name.startswith("params.")}
    assert_same(load_file(out), params)
    assert "Not converted: 'opt_state' (21 arrays, 2 values), 'step' (1 value)." in run.out
    assert "--optimizer PATH for the optimizer states" in run.out
    done(ckptconv_here("convert", step_of("train-state"), out, "--key", "opt_state.0.mu"))
    mu = {name[15:]: array for name, array in every_array.items() if name.startswith("opt_state.0.mu.")}
    assert_same(load_file(out), mu)
    refused = ckptconv_here("convert", step_of("train-state"), out, "--key", "opt_state.7")
    refused.refused(2, "The key '7' does not exist under 'opt_state'")


def test_the_model_that_is_converted_is_published_too(tmp_path: Path) -> None:
    step = step_of("train-state")
    ckptconv.convert(step, tmp_path / "plain.safetensors")
    ckptconv.convert(step, tmp_path / "hub", for_hub=True)
    published, plain = load_file(tmp_path / "hub" / "model.safetensors"), load_file(tmp_path / "plain.safetensors")
    assert published.keys() == plain.keys()
    # Here no key says that it is a model's.
    with pytest.raises(ckptconv.UsageError, match="it is not clear which is the model"):
        ckptconv.convert(step_of("ocdbt-zarr3"), tmp_path / "other", for_hub=True)


def test_states_of_optax_are_converted_by_parameter(tmp_path: Path) -> None:
    states = tmp_path / "states.safetensors"
    for step, arrays in (
        (step_of("train-state"), load_file(DATA / "train-state" / "expected.safetensors")),
        (DATA / "manager-composite" / "checkpoint" / "run" / "3", None),
    ):
        done(ckptconv_here("convert", step, tmp_path / "out.safetensors", "--optimizer", states))
        found = load_file(states)
        if arrays is None:
            own = load_file(DATA / "manager-composite" / "expected.opt_state.safetensors")
            arrays = {f"opt_state.{name}": array for name, array in own.items()}
        wanted = {}
        for name, array in arrays.items():
            state = name.removeprefix("opt_state.0.").partition(".")[0]
            if name.startswith("opt_state.0.") and state in ("mu", "nu", "trace"):
                wanted[f"{name.removeprefix(f'opt_state.0.{state}.')}.{state}"] = array
        assert wanted
        assert {name: tensor for name, tensor in found.items() if name in wanted}.keys() == wanted.keys()
        assert_same({name: found[name] for name in wanted}, wanted)
        assert {name for name in found if name not in wanted} <= {"param_groups.0.opt_state.0.count"}


def test_lists_texts_numbers_and_none_are_in_the_record() -> None:
    state = state_of(step_of("odd-keys"), key=".")
    assert state["text"] == "hello"
    assert state["none"] is None
    assert (state["empty_dict"], state["empty_list"], state["empty_tuple"]) == ({}, [], ())
    assert state["list"][2][1] is None
    assert state["list"][1][1]["k"].shape == (1,)
    numbers = state_of(step_of("dtypes"), key=".")
    assert (numbers["python_int"], numbers["python_float"], numbers["python_bool"]) == (12345, 0.1, True)
    assert (numbers["np_int64"], numbers["np_scalar"]) == (-(1 << 40), 3.25)
    composite = state_of(DATA / "manager-composite" / "checkpoint" / "run", key=".")
    assert composite["metadata"] == {"model": "tiny", "vocab": 8}


def test_two_arrays_of_one_name_are_both_named(tmp_path: Path) -> None:
    place = writer.step(tmp_path / "step", {"a.b": np.ones((2, 2), "f4")})
    both = writer.metadata(writer.entry("a.b"), writer.entry("a", "b"))
    (place / "_METADATA").write_text(both)
    run = ckptconv_here("convert", place, tmp_path / "out.safetensors")
    run.refused(4, "['a.b']", "['a']['b']", "'a.b'")


def test_a_file_of_a_step_means_the_step(tmp_path: Path) -> None:
    for name in ("_METADATA", "manifest.ocdbt"):
        done(ckptconv_here("convert", step_of("small-chunks") / name, tmp_path / f"{name}.safetensors"))
    run = ckptconv_here("convert", step_of("two-processes") / "ocdbt.process_1", tmp_path / "out")
    run.refused(2, "one process's part of a step", "Specify the step directory")
    run = ckptconv_here("convert", step_of("small-chunks") / "d", tmp_path / "out")
    run.refused(2, "contains only the data of a step", f"Specify the step directory: {step_of('small-chunks')}")
    shutil.copytree(step_of("small-chunks"), tmp_path / "step")
    (tmp_path / "step" / "array_metadatas").mkdir(exist_ok=True)
    run = ckptconv_here("convert", tmp_path / "step" / "array_metadatas", tmp_path / "out")
    run.refused(2, "is only a part of an Orbax checkpoint", f"Specify the checkpoint: {tmp_path / 'step'}")
    save_file({"w": torch.ones(1)}, tmp_path / "step" / "array_metadatas" / "model.safetensors")
    done(ckptconv_here("convert", tmp_path / "step" / "array_metadatas", tmp_path / "out"))


def test_an_array_that_the_tree_does_not_name_is_told(tmp_path: Path) -> None:
    place = writer.step(tmp_path / "step", {"a": np.ones((2, 2), "f4"), "b": np.ones((2, 2), "f4")})
    (place / "_METADATA").write_text(writer.metadata(writer.entry("a")))
    run = done(ckptconv_here("convert", place, tmp_path / "out.safetensors"))
    assert "does not list all arrays in its directory: 'b'" in run.err


ARRAY = np.arange(12 * 10, dtype="f4").reshape(12, 10)


def stored(place: Path, values: Mapping[str, bytes], **settings: Any) -> Path:
    database(place, values, **settings)
    (place / "_METADATA").write_text(writer.metadata(writer.entry("w")))
    return place


def third(codecs: list[Any], pack: Any, chunk: tuple[int, int] = (4, 10), **changed: Any) -> dict[str, bytes]:
    """`ARRAY` in zarr 3, in chunks that `pack` makes bytes of."""
    values = {"w/zarr.json": of_arrays.zarr3(ARRAY, chunk, codecs, **changed)}
    for at in np.ndindex(12 // chunk[0], 10 // chunk[1]):
        box = ARRAY[at[0] * chunk[0] :, at[1] * chunk[1] :][: chunk[0], : chunk[1]]
        values[f"w/c/{at[0]}/{at[1]}"] = pack(np.ascontiguousarray(box))
    return values


def summed(data: bytes) -> bytes:
    return data + crc32c(data).to_bytes(4, "little")


BIG = {"name": "bytes", "configuration": {"endian": "big"}}
TURNED = {"name": "transpose", "configuration": {"order": [1, 0]}}
# Arrays as tensorstore can write them, and Orbax does not.
STORED = {
    "crc32c": third([of_arrays.LITTLE, of_arrays.CRC32C], lambda box: summed(box.tobytes())),
    "zstd, crc32c": third(
        [of_arrays.LITTLE, of_arrays.ZSTD, of_arrays.CRC32C], lambda box: summed(packed(box.tobytes()))
    ),
    "crc32c, zstd": third(
        [of_arrays.LITTLE, of_arrays.CRC32C, of_arrays.ZSTD], lambda box: packed(summed(box.tobytes()))
    ),
    "transposed": third([TURNED, of_arrays.LITTLE], lambda box: box.T.tobytes()),
    "big-endian": third([BIG], lambda box: box.astype(">f4").tobytes()),
    "shard": third(
        [of_arrays.sharding((2, 5), [TURNED, of_arrays.LITTLE, of_arrays.ZSTD])],
        lambda box: of_arrays.shard(
            [packed(box[at : at + 2, to : to + 5].T.tobytes()) for at in (0, 2) for to in (0, 5)]
        ),
    ),
    "zarr 2, big-endian": of_arrays.chunked("w", ARRAY.astype(">f4"), (5, 4)),
    "zarr 2, slashes": {
        key.replace("0.", "0/").replace("1.", "1/").replace("2.", "2/"): value
        for key, value in of_arrays.chunked("w", ARRAY, (5, 5), dimension_separator="/").items()
    },
    "zarr 2, columns first": {
        "w/.zarray": of_arrays.zarray(ARRAY, (12, 10), order="F"), "w/0.0": ARRAY.T.tobytes()
    },
}  # fmt: skip


@every("way", STORED)
@every("inline", [0, 1 << 20])
def test_what_tensorstore_can_store_comes_out(way: str, inline: int, tmp_path: Path) -> None:
    place = stored(tmp_path / "step", STORED[way], inline=inline)
    out = tmp_path / "out.safetensors"
    done(ckptconv_here("convert", place, out, *VERIFY))
    assert torch.equal(load_file(out)["w"], torch.from_numpy(ARRAY)), way
    for suffix in DESCRIBING:
        ckptconv.convert(place, tmp_path / f"x{suffix}", overwrite=True)
        assert torch.equal(state_of(tmp_path / f"x{suffix}")["w"], torch.from_numpy(ARRAY)), way
    shutil.rmtree(place)


# What holds the chunk that is taken from an array of each case: a file or a key.
LOST = {
    "plain-zarr2": "b.kernel/2.0",
    "plain-zarr3": "b.kernel/c/3/0",
}


@every("case", LOST)
def test_a_step_that_stores_zeros_too_and_lacks_a_chunk_is_refused(case: str, tmp_path: Path) -> None:
    place = Path(shutil.copytree(step_of(case), tmp_path / "step"))
    (place / LOST[case]).unlink()
    for command in (*looking(), "convert"):
        output = [tmp_path / "out.safetensors"] * (command == "convert")
        run = ckptconv_here(command, place, *output)
        run.refused(4, "lacks the chunk that begins at element", f": {LOST[case]}.")
    assert not (tmp_path / "out.safetensors").exists()


KEY = "store_array_data_equal_to_fill_value"
HALVES = [np.ascontiguousarray(ARRAY[:, at : at + 5]).tobytes() for at in (0, 5)]
SHARD = of_arrays.sharding((12, 5), [of_arrays.LITTLE])
# Arrays without their last chunk, and its place.
LACKING = {
    "zarr 2": ({"w/.zarray": of_arrays.zarray(ARRAY, (12, 5)), "w/0.0": HALVES[0]}, ": w/0.1"),
    "zarr 3": (
        {"w/zarr.json": of_arrays.zarr3(ARRAY, (12, 5), [of_arrays.LITTLE]), "w/c/0/0": HALVES[0]}, ": w/c/0/1"
    ),
    "shard": (
        {"w/zarr.json": of_arrays.zarr3(ARRAY, (12, 10), [SHARD]), "w/c/0/0": of_arrays.shard([HALVES[0], None])},
        ", in its shard w/c/0/0",
    ),
}  # fmt: skip


@every("way", LACKING)
def test_missing_chunks_are_zeros_with_a_warning_where_orbax_does_not_store_zeros(way: str, tmp_path: Path) -> None:
    values, lost = LACKING[way]
    place = stored(tmp_path / "step", values)
    out = tmp_path / "out.safetensors"
    filled = torch.from_numpy(np.where(np.arange(10) < 5, ARRAY, np.float32(0)))
    for more in ({}, {KEY: False}):
        (place / "_METADATA").write_text(writer.metadata(writer.entry("w"), **more))
        assert (
            "lacks chunks, which are read as zeros: 1 of 2 of 'w' are stored."
            in done(ckptconv_here("convert", place, out, *VERIFY)).err
        )
        assert torch.equal(load_file(out)["w"], filled)
    (place / "_METADATA").write_text(writer.metadata(writer.entry("w"), **{KEY: True}))
    ckptconv_here("convert", place, out).refused(4, f"lacks the chunk that begins at element [0, 5]{lost}.")
    (place / "_METADATA").write_text(writer.metadata(writer.entry("w"), **{KEY: "yes"}))
    ckptconv_here("convert", place, out).refused(4, KEY)


def test_nothing_is_said_where_all_chunks_are_there(tmp_path: Path) -> None:
    run = done(ckptconv_here("convert", step_of("release-0.4.4-default"), tmp_path / "out.safetensors"))
    assert "chunks" not in run.err


BOOLS, COMPLEX = ARRAY % 3 == 0, (ARRAY + 1j * ARRAY[::-1]).astype("c8")


@every("array", [BOOLS, COMPLEX, COMPLEX.astype("c16")], ids=["bool", "complex64", "complex128"])
def test_bools_and_complex_numbers_come_out_and_lack_chunks_of_zeros(array: Any, tmp_path: Path) -> None:
    zero = False if array.dtype == bool else [0.0, 0.0]
    grid = {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [6, 10]}}}
    codec = of_arrays.LITTLE if array.dtype != bool else {"name": "bytes"}
    values = {
        **of_arrays.chunked("second", array, (6, 10)),
        "third/zarr.json": of_arrays.zarr3(array, (6, 10), [codec], fill_value=zero, **grid),
        "third/c/1/0": array[6:].tobytes(),
    }
    database(tmp_path / "step", values)
    (tmp_path / "step" / "_METADATA").write_text(writer.metadata(writer.entry("second"), writer.entry("third")))
    output = tmp_path / ("out.pt" if "pt" in NAMED else "out.safetensors")
    done(ckptconv_here("convert", tmp_path / "step", output))
    state = torch.load(output) if "pt" in NAMED else state_in(output)
    assert torch.equal(state["second"], torch.from_numpy(array))
    assert not state["third"][:6].any()
    assert torch.equal(state["third"][6:], torch.from_numpy(array[6:]))


@every("way", ["crc32c", "zstd, crc32c", "crc32c, zstd"])
@every("inline", [0, 1 << 20])
def test_a_changed_byte_behind_a_crc32c_is_seen(way: str, inline: int, tmp_path: Path) -> None:
    values = dict(STORED[way])
    for at, bit in ((3, 1), (-2, 64)):
        data = bytearray(values["w/c/1/0"])
        data[at] ^= bit
        place = stored(tmp_path / "step", {**values, "w/c/1/0": bytes(data)}, inline=inline)
        ckptconv_here("convert", place, tmp_path / "out.safetensors").refused(4)
        assert not (tmp_path / "out.safetensors").exists()


def test_a_large_chunk_that_lies_in_a_node_is_unpacked_where_it_is_wanted(tmp_path: Path) -> None:
    zeros = np.zeros((4096, 4096), "f4")
    zeros[7] = 1
    for compression in (0, 1):
        values = of_arrays.chunked("w", zeros, (4096, 4096))
        assert len(values["w/0.0"]) < 1 << 14
        database(tmp_path, values, inline=1 << 14, compression=compression)
        (tmp_path / "_METADATA").write_text(writer.metadata(writer.entry("w")))
        done(ckptconv_here("convert", tmp_path, tmp_path / "out.safetensors", *VERIFY))
        assert torch.equal(load_file(tmp_path / "out.safetensors")["w"], torch.from_numpy(zeros))
        for command in looking():
            assert ckptconv_here(command, tmp_path).code == 0, command


def test_only_what_is_converted_is_opened(tmp_path: Path) -> None:
    place = writer.step(tmp_path / "step", {"params.w": ARRAY, "opt_state.mu.w": ARRAY})
    values = of_arrays.chunked("params.w", ARRAY, (12, 10)) | {"opt_state.mu.w/.zarray": b"{}"}
    database(place, values)
    done(ckptconv_here("convert", place, tmp_path / "out.safetensors"))
    run = ckptconv_here("convert", place, tmp_path / "x.safetensors", "--optimizer", tmp_path / "y.safetensors")
    run.refused(4, "opt_state.mu.w")


def test_a_store_of_google_needs_the_file_that_is_written_last(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from ckptconv.features.orbax import locate

    place = writer.step(tmp_path / "step", {"w": ARRAY})
    monkeypatch.setattr(locate, "WITHOUT_RENAME", (str(tmp_path),))
    ckptconv_here("convert", place, tmp_path / "out.safetensors").refused(
        4, "commit_success.txt, which Orbax writes last"
    )
    (place / "commit_success.txt").write_text("x")
    done(ckptconv_here("convert", place, tmp_path / "out.safetensors"))


def test_the_word_that_flax_has_twice_is_passed_over_in_states_too(tmp_path: Path) -> None:
    names = ["params.params.a.w", "opt_state.0.mu.params.a.w", "opt_state.1.mu.params.a.w", "batch_stats.a.mean"]
    place = writer.step(tmp_path / "step", {name: ARRAY + at for at, name in enumerate(names)})
    states = tmp_path / "states.safetensors"
    run = done(ckptconv_here("convert", place, tmp_path / "out.safetensors", "--optimizer", states))
    assert "'batch_stats' (1 array)" in run.err
    assert_same(load_file(tmp_path / "out.safetensors"), {"a.w": torch.from_numpy(ARRAY)})
    found = load_file(states)
    assert found.keys() == {"a.w.0.mu", "a.w.1.mu"}
    assert torch.equal(found["a.w.1.mu"], torch.from_numpy(ARRAY + 2))
    assert any("batch_stats" in warning for warning in open_source(place).warnings)
    assert [*state_of(place)] == ["a"]


@every("around", ["", "params."])
def test_a_state_that_is_all_of_the_optimizer_is_converted(around: str, tmp_path: Path) -> None:
    place = writer.step(tmp_path / "step", {"params.w": ARRAY, f"opt_state.{around}w": ARRAY + 1})
    states = tmp_path / "states.safetensors"
    done(ckptconv_here("convert", place, tmp_path / "out.safetensors", "--optimizer", states))
    assert_same(load_file(states), {"w.state": torch.from_numpy(ARRAY + 1)})


def test_each_chunk_is_expected_to_be_read_once(tmp_path: Path) -> None:
    """So that it is unpacked where it is wanted, and not to the temporary file."""
    place = writer.step(tmp_path / "step", {"w": np.random.default_rng(0).random((512, 512), np.float32)}, rows=64)
    model = open_source(place)
    expected = packing.packed([model.weights["w"]])
    assert {file.size for file in expected} == {64 * 512 * 4}
    assert {*expected.values()} == {64 * 512 * 4}


# What is said of attacks, of those whose other numbers would be refused elsewhere too.
SAID = {
    "array_linked": "has too many directories",
    "tree_inside": "is inside another value",
    "tree_up": "'../../w', which its tree lists, is missing",
}


@every("file", SAID)
def test_what_is_wrong_is_said(file: str, tmp_path: Path) -> None:
    (attack,) = (each for each in STEPS if each.file == f"orbax_{file}")
    (tmp_path / file).mkdir()
    run = ckptconv_here("convert", attack.make(tmp_path / file, ""), tmp_path / "out.safetensors")
    run.refused(attack.exit, SAID[file])


def test_a_value_that_is_cut_short_is_found_before_anything_is_written(tmp_path: Path) -> None:
    run = ckptconv_here("convert", step_of("error-data-cut"), tmp_path / "out.safetensors")
    run.refused(4, "has 7473 bytes, but should contain 1949 bytes from byte 5824 on")


def test_of_arrays_that_lie_in_descriptions_the_bytes_read_are_those_of_the_descriptions(tmp_path: Path) -> None:
    run = done(ckptconv_here("convert", step_of("dtypes"), tmp_path / "out"))
    (line,) = (line for line in run.out.splitlines() if line.startswith("read all "))
    assert not line.startswith("read all 0 bytes")


def test_a_key_that_is_given_as_a_part_of_the_path_is_said_to_be_one(tmp_path: Path) -> None:
    step = step_of("train-state")
    words = ("convert", step / "params", tmp_path / "out.safetensors")
    said = f"If params is a part of the checkpoint {step}, give that with --key params."
    ckptconv_here(*words).refused(2, f"{step / 'params'} does not exist", said)
    done(ckptconv_here("convert", step, tmp_path / "out.safetensors", "--key", "params"))
