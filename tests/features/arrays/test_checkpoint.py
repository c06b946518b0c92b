"""An opened checkpoint of any format reads as safetensors' safe_open reads its conversion."""

from __future__ import annotations

import copy
import fnmatch
import gc
import importlib.util
import os
import pickle
import random
import re
import shutil
import threading
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cells import naming_attacks, of_features, verifying
from checkpoints import DATA, ZERO, load_with_aliases, seven_shards
from compare import Attack
from effort import spread
from features.arrays.reading import assert_reads, bits, mapped, random_key
from processes import open_files
from reading import KIB, converted, counted
from safetensors import safe_open
from safetensors.torch import save_file

import ckptconv
from ckptconv import CorruptError, UnsupportedError, UsageError
from ckptconv.options.kinds import OptionWarning
from ckptconv.options.table import OPTIONS

CASES = sorted(
    [path for paths in of_features("OPENED") for path in paths]
    # But for tensor-parallel ranks that nothing tells how to join.
    + [ZERO / name / "checkpoint" for name in ZERO.names if not name.startswith("tp_")]
    + [path for path in (DATA / "torch").rglob("*") if path.suffix in (".pt", ".pth", ".bin")]
)
Z3 = "z3_fp32_w4/checkpoint"


def test_every_tensor_and_slice_is_that_of_the_conversion(tmp_path: Path) -> None:
    for number, path in enumerate(spread(CASES, 50)):
        expected = converted(path, tmp_path / f"{number}.safetensors")
        with ckptconv.open(path) as ck:
            assert_reads(ck, expected)
            for name, array in ck.forward():
                assert np.array_equal(bits(array), bits(expected[name])), (path, name)
            assert list(ck.get_tensors()) == list(ck), path


def test_the_states_of_the_optimizer_are_those_of_the_conversion(tmp_path: Path) -> None:
    for case in ("z3_bf16_w2", "z2_bf16_w2", "z1_fp32_empty_w2"):
        path, output = ZERO / case / "checkpoint", tmp_path / f"{case}.safetensors"
        ckptconv.convert(path, optimizer=output, fsync=False)
        with ckptconv.open(path) as ck, safe_open(output, "pt") as states:
            assert set(states.keys()) <= set(ck.optimizer), case
            assert_reads(ck.optimizer, load_with_aliases(output))


# ------------------------------------------------------------------------------------- a program written for safe_open


def a_program(open_file: Any, path: Path) -> list[Any]:
    """What programs do with safe_open: of transformers, accelerate and vllm."""
    told: list[Any] = []
    with open_file(path, framework="pt", device="cpu") as f:
        metadata = f.metadata()
        told.append(metadata and metadata.get("format"))
        for name in f.keys():  # noqa: SIM118
            part = f.get_slice(name)
            told.append((name, part.get_shape(), part.get_dtype()))
            told.append(f.get_tensor(name))
            if len(part.get_shape()) == 2:
                rows, columns = part.get_shape()
                told += [part[: rows // 2], part[rows // 2 :, ...], part[:, columns // 2 :], part[0], part[-1, 1:3]]
                told.append(part[:])
            told.append(part[...])
        told.append(sorted(f.keys()) == sorted(f.offset_keys()))
        told += [(name, tensor.sum().item()) for name, tensor in f.get_tensors().items()]
    return told


def test_a_program_written_for_safe_open_runs_unchanged(tmp_path: Path) -> None:
    state = {"b": torch.randn(6, 8), "a": torch.arange(5).to(torch.bfloat16), "s": torch.tensor(2.0)}
    plain, made = tmp_path / "plain.safetensors", tmp_path / "made.safetensors"
    save_file(state, plain, {"format": "pt"})
    # A conversion stores a tied tensor under one of its names.
    step = ZERO / "z3_bf16_untied_w2" / "checkpoint"
    converted(step, made)
    for source, output in ((plain, plain), (step, made)):
        ours, theirs = a_program(ckptconv.open, source), a_program(safe_open, output)
        assert sorted(map(repr, ours)) == sorted(map(repr, theirs)), source


# -------------------------------------------------------------------------------------------------- what a tensor tells


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    state = {
        "w": torch.arange(24.0).reshape(4, 6),
        "half": torch.ones(3).bfloat16(),
        "ids": torch.arange(5),
        "one": torch.tensor(2.0),
    }
    save_file(state, tmp_path / "x.safetensors", {"format": "pt", "who": "me"})
    return tmp_path / "x.safetensors"


def test_a_lazy_tensor_says_what_it_is(plain: Path) -> None:
    with ckptconv.open(plain, "np") as ck:
        w = ck["w"]
        assert (w.name, str(w.dtype), w.shape) == ("w", "float32", (4, 6))
        assert (w.ndim, w.size, w.nbytes, len(w)) == (2, 24, 96, 4)
        assert repr(w) == "Tensor('w', float32, [4, 6], 96 bytes)"
        assert isinstance(w[1], np.ndarray)
        assert isinstance(w.torch(), torch.Tensor)
        assert np.array_equal(np.asarray(w, dtype="f8"), np.arange(24.0).reshape(4, 6))
        assert [row[0] for row in w] == [0, 6, 12, 18]
        assert ck.metadata() == {"format": "pt", "who": "me"}
        for without in (lambda: len(ck["one"]), lambda: bool(w)):
            with pytest.raises(TypeError, match=r"'(one|w)'"):
                without()


def test_what_cannot_be_read_by_slices_is_refused(plain: Path) -> None:
    keys: list[Any] = [[0, 1], np.array([1]), True, "a", 1.5, slice("a"), (slice(None), [1])]
    beyond: list[Any] = [4, -5, (0, 0, 0), (..., ...), (0, 6)]
    with ckptconv.open(plain) as ck:
        for key in keys:
            with pytest.raises(UsageError, match="'w' cannot be"):
                ck["w"][key]
        with pytest.raises(UsageError) as listed:
            ck["w"][[0, 1]]
        assert listed.value.hint == "Read each of these: [tensor[index] for index in [0, 1]]."
        for key in beyond:
            with pytest.raises(IndexError) as caught:
                ck["w"][key]
            assert isinstance(caught.value, UsageError), key


def test_a_name_that_is_not_there_is_a_key_error_too(plain: Path) -> None:
    with ckptconv.open(plain) as ck:
        assert "v" not in ck
        assert ck.get("v") is None
        for read in (ck.get_tensor, ck.get_slice, ck.__getitem__):
            with pytest.raises(KeyError) as caught:
                read("wei")
            assert isinstance(caught.value, UsageError)
            assert "The keys are " in str(caught.value)


def test_it_tells_people_and_completers_what_is_in_it(plain: Path) -> None:
    with ckptconv.open(plain) as ck:
        assert f"<Checkpoint '{plain}': safetensors" in repr(ck)
        assert {"keys", "get_tensor", "optimizer", "tree", "source", "close"} <= set(dir(ck))
        assert ck._ipython_key_completions_() == list(ck)
        assert ck.keys() == list(ck)
        assert ck.keys()[0] in {*ck.keys()}
    assert {*ckptconv.__all__} <= set(dir(ckptconv))


def test_numpy_without_bfloat16_says_what_to_do(plain: Path) -> None:
    with ckptconv.open(plain, "np") as ck:
        if importlib.util.find_spec("ml_dtypes") is None:
            with pytest.raises(UnsupportedError, match=r"framework=\"pt\".*raw=True"):
                ck["half"].numpy()
        assert ck["half"].numpy(raw=True).dtype == "u2"
        assert ck["half"].to("float32").numpy().tolist() == [1, 1, 1]


def test_a_cast_is_lazy_and_told_of(plain: Path, tmp_path: Path) -> None:
    torch.save({"a": torch.tensor([1e6, 2.0, 70000.0]), "n": torch.arange(2)}, tmp_path / "x.pt")
    with ckptconv.open(tmp_path / "x.pt") as ck:
        half = ck["a"].to(torch.float16)
        assert str(half.dtype) == "float16"
        with pytest.warns(UserWarning, match="2 values were too large"):
            assert half.torch().tolist() == [float("inf"), 2, float("inf")]
        assert half[1:2].tolist() == [2]
        with pytest.raises(UsageError, match="only floating-point"):
            ck["n"].to("float32")
        with pytest.raises(UsageError, match="not a supported output dtype"):
            ck["a"].to("int8")


def test_it_is_read_into_a_buffer() -> None:
    makers: list[Callable[[int], Any]] = [bytearray, lambda n: np.empty(n // 4, "f4"), lambda n: torch.empty(n // 4)]
    with ckptconv.open(ZERO / Z3) as ck:
        tensor = max(ck.values(), key=lambda each: each.nbytes)
        for make in makers:
            buffer = make(tensor.nbytes)
            tensor.read_into(buffer)
            got = buffer if isinstance(buffer, bytearray) else bytes(memoryview(np.asarray(buffer)))
            assert bytes(got) == tensor.numpy().tobytes(), type(buffer)
        for wrong in (bytearray(3), bytes(tensor.nbytes), 3):
            with pytest.raises(UsageError, match=r"buffer|read into"):
                tensor.read_into(wrong)


def test_what_there_is_not_is_a_usage_error(plain: Path) -> None:
    for wrong in ({"framework": "tf"}, {"backend": "dma"}, {"key": "none"}, {"device": "x"}):
        with pytest.raises(UsageError):
            ckptconv.open(plain, **{"framework": "np", **wrong}).get_tensor("w")


def test_a_former_name_of_the_option_to_read_states_is_told(plain: Path) -> None:
    with pytest.warns(OptionWarning, match="--states is called --with-states"):
        ckptconv.open(plain, states=True)  # type: ignore[call-arg]


def test_the_tree_is_nested_as_it_was_saved(tmp_path: Path) -> None:
    whole: dict[str, Any] = {"model": {"w": torch.arange(4.0), "l": [torch.ones(2), (1, None)]}, "epoch": 3}
    whole["self"] = whole
    torch.save(whole, tmp_path / "x.pt")
    with ckptconv.open(tmp_path / "x.pt") as ck:
        assert ck.tree["epoch"] == 3
        assert ck.tree["self"]["self"]["model"]["w"][1:3].tolist() == [1, 2]
        assert ck.tree["model"]["l"][0].torch().tolist() == [1, 1]
        assert list(ck.tree["model"]["l"][1]) == [1, None]
        assert ck.tree["model"]["w"].name == "model.w"
        assert ("model" in ck.tree, "w" in ck.tree, ck.tree.get("w", 3)) == (True, False, 3)
        with pytest.raises(
            KeyError, match=r"has no key 'model_state_dict' at the top\. Did you mean 'model'"
        ) as caught:
            ck.tree["model_state_dict"]
        assert isinstance(caught.value, UsageError)
        with pytest.raises(UsageError, match=r"has no key 'v' under 'model'\. The keys are 'w', 'l'"):
            ck.tree["model"]["v"]
        with pytest.raises(IndexError, match=r"Index 2 is out of range: 'model\.l' has 2 items"):
            ck.tree["model"]["l"][2]
        assert ck.tree["model"]["l"][-2].name == "model.l.0"
    torch.save({"state": {0: torch.ones(1)}, "a": {"b.c": 1}}, tmp_path / "y.pt")
    with ckptconv.open(tmp_path / "y.pt") as ck:
        with pytest.raises(UsageError, match=r"Did you mean 0\?"):
            ck.tree["state"]["0"]
        with pytest.raises(UsageError, match=r"The names that begin with b\. are 'b\.c'"):
            ck.tree["a"]["b"]
    with ckptconv.open(tmp_path / "x.pt", key="model") as ck:
        assert list(ck) == ["w", "l.0"]
        assert list(ck.tree) == ["w", "l"]


@verifying
def test_convert_and_verify_take_it(tmp_path: Path) -> None:
    with ckptconv.open(ZERO / Z3) as ck:
        ckptconv.convert(ck, tmp_path / "x.safetensors", fsync=False)
        assert ckptconv.verify(ck, tmp_path / "x.safetensors").tensors


def test_an_option_that_comes_after_the_opening_is_refused(tmp_path: Path, plain: Path) -> None:
    with ckptconv.open(plain) as ck:
        for option, value in (("tag", "x"), ("exclude_frozen_parameters", True), ("raw", True), ("family", "dcp")):
            with pytest.raises(UsageError, match=f"^{option} decides how a checkpoint is opened") as caught:
                ckptconv.convert(ck, tmp_path / "late.safetensors", **{option: value})
            assert caught.value.hint == "Give a path instead."
    assert not (tmp_path / "late.safetensors").exists()


# --------------------------------------------------------------------------------------------------- one memory for all


def test_what_lies_as_it_is_needed_is_mapped_and_not_read(plain: Path) -> None:
    with ckptconv.open(plain) as ck, ckptconv.open(plain, backend="pread") as copied:
        ck.get_tensor("w"), copied.get_tensor("w")  # what is done once
        with counted() as reads:
            assert mapped(ck["w"].torch())
            assert mapped(ck["w"][1:3, ::2])
            assert reads.nbytes == 0
            assert not mapped(copied["w"].torch())
            assert reads.nbytes == 96
        ck["w"].torch()[0, 0] = 9  # private to this process
    assert safe_open(plain, "pt").get_tensor("w")[0, 0] == 0


def test_tied_tensors_are_one_storage(tmp_path: Path) -> None:
    shared = torch.randn(50, 40)
    torch.save({"a": shared, "b": torch.ones(2), "c": shared}, tmp_path / "x.pt")
    for way in (("pt", "mmap"), ("pt", "pread"), ("np", "mmap"), ("np", "pread")):
        with ckptconv.open(tmp_path / "x.pt", way[0], backend=way[1]) as ck:
            for arrays in (ck.get_tensors(), {name: ck.get_tensor(name) for name in ck}):
                a, b, c = (np.asarray(arrays[name]) for name in "abc")
                assert np.shares_memory(a, c), way
                assert not np.shares_memory(a, b), way


def test_arrays_outlive_the_checkpoint_and_reads_do_not(plain: Path) -> None:
    ck = ckptconv.open(plain)
    w, tensor = ck["w"], ck["w"].torch()
    ck.close()
    ck.close()
    gc.collect()
    assert tensor.sum() == 276
    for read in (w.torch, lambda: w[0], lambda: ck.get_tensor("w"), ck.__enter__, lambda: ck.tree, ck.metadata):
        with pytest.raises(UsageError, match="is closed"):
            read()


def test_a_checkpoint_that_is_collected_keeps_no_file_open() -> None:
    before = open_files()
    for _ in range(3):
        ckptconv.open(ZERO / Z3).get_tensors()
    gc.collect()
    assert not open_files() - before


def test_threads_read_at_once(tmp_path: Path) -> None:
    expected = converted(ZERO / Z3, tmp_path / "x.safetensors")
    with ckptconv.open(ZERO / Z3) as ck:

        def work(seed: int) -> None:
            rng = random.Random(seed)
            for _ in range(40):
                name = rng.choice(list(expected))
                key = random_key(rng, ck[name].shape)
                assert np.array_equal(bits(ck[name][key]), bits(expected[name])[key])

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(8)))


def test_it_closes_when_the_last_reader_is_done(plain: Path) -> None:
    ck = ckptconv.open(plain, backend="pread")
    failures: list[BaseException] = []

    def work() -> None:
        try:
            while True:
                assert ck["w"].torch().sum() == 276
        except UsageError:
            pass
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    ck.close()
    for thread in threads:
        thread.join()
    assert not failures


def test_it_is_read_after_a_fork(tmp_path: Path) -> None:
    with ckptconv.open(ZERO / Z3) as ck:
        name = max(ck, key=lambda each: ck[each].nbytes)
        whole = ck.get_tensor(name)
        child = os.fork()
        if not child:
            os._exit(0 if torch.equal(ck.get_tensor(name), whole) else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert torch.equal(ck.get_tensor(name), whole)


def test_it_is_pickled_and_opened_again() -> None:
    with ckptconv.open(ZERO / Z3, "np") as ck:
        name = list(ck)[-1]
        again, tensor, cast = pickle.loads(pickle.dumps((ck, ck[name], ck[name].to("bf16"))))
        assert np.array_equal(again.get_tensor(name), ck.get_tensor(name))
        assert np.array_equal(tensor.numpy(), ck.get_tensor(name))
        assert str(cast.dtype) == "bfloat16"
    with pytest.raises(UsageError, match="is closed"):
        pickle.dumps(ck)


# ------------------------------------------------------------------------------------------------- bytes that are read


ROWS, COLUMNS = 1000, 700
MATRIX = torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS)


def test_all_tensors_are_read_forward_in_bounded_memory(tmp_path: Path) -> None:
    seven_shards(tmp_path / "x.pt")
    with ckptconv.open(tmp_path / "x.pt", "np", backend="pread") as ck:
        names = [name for name, _ in ck.forward()]
        assert names == list(ck) == ck.offset_keys()
        offsets = [ck[name].lazy.origin() for name in names]
        assert offsets == sorted(offsets)
        tracemalloc.start()
        for _, array in ck.forward():
            del array
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 24 * KIB * KIB


# --------------------------------------------------------------------------------------------- files that are not right


def test_a_file_that_changes_or_is_cut_while_it_is_open_is_corrupt(plain: Path) -> None:
    with ckptconv.open(plain) as in_map, ckptconv.open(plain, backend="pread") as copied:
        for ck in (in_map, copied):
            ck.get_tensor("w")
        os.utime(plain, ns=(1, 1))
        reading: list[Callable[[ckptconv.Checkpoint], object]] = [
            lambda ck: ck.get_tensor("w"),
            lambda ck: ck["w"][0],
            lambda ck: ck.get_tensors(),
            lambda ck: [*ck.forward()],
        ]
        for ck in (in_map, copied):
            for read in reading:
                with pytest.raises(CorruptError, match=r"x\.safetensors changed while it was read"):
                    read(ck)
    with ckptconv.open(plain) as in_map, ckptconv.open(plain, backend="pread") as copied:
        assert len(in_map) == len(copied) == 4
        os.truncate(plain, plain.stat().st_size // 2)
        for ck in (in_map, copied):
            with pytest.raises(CorruptError, match=r"x\.safetensors"):
                ck.get_tensors()


def test_a_step_whose_rank_is_cut_is_corrupt(tmp_path: Path) -> None:
    step = Path(shutil.copytree(ZERO / Z3, tmp_path / "step"))
    largest = max((path for path in step.rglob("*_optim_states.pt")), key=lambda path: path.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)
    with pytest.raises(CorruptError, match=largest.name):
        ckptconv.open(step)


@naming_attacks
def test_an_attack_is_unsafe(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1), "b": Attack(tmp_path / "canary")}, tmp_path / "x.pt")
    with pytest.raises(ckptconv.UnsafeError, match="this file is an attack"):
        ckptconv.open(tmp_path / "x.pt")
    with ckptconv.open(tmp_path / "x.pt", inert=True) as ck:
        assert ck["a"][0] == 1
    assert not (tmp_path / "canary").exists()


def test_metadata_is_what_a_conversion_writes(tmp_path: Path) -> None:
    w = torch.arange(6.0)
    torch.save({"model": {"w": w, "tied": w}, "epoch": 3}, tmp_path / "x.pt")
    for key in ("", "model"):
        ckptconv.convert(tmp_path / "x.pt", tmp_path / "x.safetensors", key=key, fsync=False)
        with safe_open(tmp_path / "x.safetensors", "np") as f, ckptconv.open(tmp_path / "x.pt", key=key) as ck:
            assert ck.metadata() == f.metadata()


def test_the_states_of_tied_names_are_there_as_in_a_conversion(tmp_path: Path) -> None:
    run = ZERO / "z2_bf16_w2" / "checkpoint"
    ckptconv.convert(run, optimizer=tmp_path / "states.safetensors", fsync=False)
    with ckptconv.open(run) as ck, ckptconv.open(tmp_path / "states.safetensors") as written:
        assert any(name.startswith("head.weight.") for name in written)
        assert set(ck.optimizer) == set(written)
        assert torch.equal(ck.optimizer["head.weight.exp_avg"].torch(), written["head.weight.exp_avg"].torch())


def test_a_tied_tensor_that_is_held_is_checked_again(tmp_path: Path) -> None:
    w = torch.arange(600.0)
    torch.save({"w": w, "tied": w}, tmp_path / "x.pt")
    with ckptconv.open(tmp_path / "x.pt") as ck:
        held = ck["w"].torch()
        os.truncate(tmp_path / "x.pt", 100)
        with pytest.raises(CorruptError):
            ck["tied"].torch()
        del held


# ----------------------------------------------------------------------------------------- as torch, numpy and dask ask


@pytest.fixture
def lazy(tmp_path: Path) -> ckptconv.Checkpoint:
    torch.save({"w": torch.arange(12.0).reshape(3, 4), "b": torch.ones(3, dtype=torch.bfloat16)}, tmp_path / "x.pt")
    return ckptconv.open(filename=tmp_path / "x.pt")


def test_a_dtype_equals_that_of_torch_and_numpy(lazy: ckptconv.Checkpoint) -> None:
    w, b = lazy["w"].dtype, lazy["b"].dtype
    for same in (torch.float32, "float32", "torch.float32", "F32", np.float32, np.dtype("f4"), lazy["w"].dtype):
        assert w == same
        assert same == w
        assert b != same
    assert b == torch.bfloat16
    assert w not in (None, 3, torch.float16, "f", np.dtype(">f4"), object())
    assert np.dtype(w) == np.float32
    assert (str(w), pickle.loads(pickle.dumps(w)), hash(w)) == ("float32", w, hash(lazy["w"].dtype))


def test_a_tensor_is_an_array_for_torch_and_numpy(lazy: ckptconv.Checkpoint) -> None:
    w = lazy["w"]
    assert torch.equal(torch.as_tensor(w), w.torch())
    assert torch.equal(torch.as_tensor(lazy["b"]), torch.ones(3, dtype=torch.bfloat16))
    assert np.shares_memory(np.asarray(w, copy=False), np.asarray(w))
    for cannot in (lambda: np.asarray(w, dtype="f8", copy=False), lambda: np.asarray(w.to("fp16"), copy=False)):
        with pytest.raises(ValueError, match="without a copy"):
            cannot()
    assert not np.shares_memory(np.array(w, copy=True), np.asarray(w))


def test_a_tensor_has_the_methods_of_torch(lazy: ckptconv.Checkpoint) -> None:
    w, array = lazy["w"], lazy["w"].torch()
    assert (w.numel(), w.dim()) == (array.numel(), array.dim())
    assert (w.stride(), w.stride(1)) == (array.stride(), array.stride(1))
    assert (w.size(), w.size(-1), w.size) == (array.size(), array.size(-1), 12)
    with pytest.raises(UsageError, match="two names"):
        ckptconv.open("a", filename="b")


def test_dask_takes_a_tensor_for_an_array(lazy: ckptconv.Checkpoint) -> None:
    dask = pytest.importorskip("dask.array")
    with ckptconv.open(lazy.source.path, "np") as ck:
        for tensor in (ck["w"], lazy["w"]):
            made = dask.from_array(tensor, chunks=2)
            assert made.dtype == np.float32
            assert made.sum().compute(scheduler="synchronous") == 66
            np.testing.assert_array_equal(np.add(tensor, tensor), 2 * np.asarray(tensor))
            np.testing.assert_array_equal((made + 1)[1:].compute(scheduler="synchronous"), ck["w"][1:] + 1)


def test_an_option_of_convert_is_refused_with_what_to_do_instead(tmp_path: Path) -> None:
    for call, option, advice in (
        (ckptconv.open, "strip_prefix", "{name.removeprefix('x'): ck.get_tensor(name) for name in ck}"),
        (ckptconv.open, "rename", "{re.sub(REGEX, REPLACEMENT, name): ck.get_tensor(name) for name in ck}"),
        (ckptconv.open, "include", "ck.get_tensors(n for n in ck if (n + '.').startswith('x.')). If 'x' is a mapping"),
        (ckptconv.open, "exclude", "ck.get_tensors(n for n in ck if not (n + '.').startswith('x.'))"),
        (ckptconv.open, "dtype", "ck[name].to('x')"),
        (
            ckptconv.load_state_dict,
            "strip_prefix",
            "{name.removeprefix('x'): tensor for name, tensor in state.items()}",
        ),
        (ckptconv.load_state_dict, "include", "ck.get_tensors(n for n in ck if (n + '.').startswith('x.'))"),
        *([(ckptconv.load_state_dict, "inert", "ckptconv.open(PATH, inert=True)")] if "inert" in OPTIONS else []),
    ):
        with pytest.raises(UsageError, match=f"has no option {option}, unlike convert") as caught:
            call(tmp_path / "x.pt", **{option: "x"})
        assert advice in caught.value.hint
        assert " has alone, " in caught.value.message
    with pytest.raises(UsageError, match="There is no option 'zzz'"):
        ckptconv.open(tmp_path / "x.pt", zzz=1)  # type: ignore[call-overload]


@pytest.mark.parametrize("function", [ckptconv.open, ckptconv.load_state_dict])
@pytest.mark.parametrize(
    ("chosen", "names"),
    [
        ("a", ["a.w", "a.b"]),
        ("a.w", ["a.w"]),
        ("*.w", ["a.w", "ab.w"]),
        (["a.w", "c"], ["a.w", "c"]),
        (("*.w", "c"), ["a.w", "ab.w", "c"]),
    ],
)
def test_the_advice_on_choosing_tensors_can_be_pasted(
    function: Any, chosen: Any, names: list[str], tmp_path: Path
) -> None:
    save_file({name: torch.ones(2) for name in ("a.w", "a.b", "ab.w", "c")}, tmp_path / "x.safetensors")
    with ckptconv.open(tmp_path / "x.safetensors") as ck:
        for option, expected in (("include", {*names}), ("exclude", ck.keys() - {*names})):
            with pytest.raises(UsageError) as caught:
                function(tmp_path / "x.safetensors", **{option: chosen})
            call = re.search(r"ck\.get_tensors\(.*\)(?=\.( If|$))", caught.value.hint)
            assert call
            assert eval(call[0], {"ck": ck, "fnmatch": fnmatch}).keys() == expected
            with pytest.raises(UsageError, match="where NAMES is a list of names"):
                function(tmp_path / "x.safetensors", **{option: [1]})


@pytest.mark.parametrize("dtype", [torch.float16, np.float16, np.dtype("float16"), "float16"])
def test_the_advice_on_a_dtype_names_it(dtype: Any, plain: Path) -> None:
    with pytest.raises(UsageError, match=r"ck\[name\]\.to\('float16'\)"):
        ckptconv.open(plain, dtype=dtype)  # type: ignore[call-overload]


def test_a_lazy_tensor_says_how_to_compute_with_it(plain: Path) -> None:
    with ckptconv.open(plain) as ck:
        tensor: Any = ck["w"]
        with pytest.raises(AttributeError, match=r"no attribute 'mean': it is not loaded\. \.torch\(\) or \.numpy\(\)"):
            tensor.mean()
        assert not hasattr(tensor, "__array_interface__")
        assert copy.copy(tensor).name == "w"


def test_what_get_tensor_does_not_take_is_met_with_what_does(plain: Path) -> None:
    with ckptconv.open(plain) as ck:
        for option, value, advice in (
            ("dtype", "fp16", "ck[name].to('fp16')"),
            ("device", "cpu", "torch(device='cpu')"),
        ):
            with pytest.raises(UsageError) as caught:
                ck.get_tensor("w", **{option: value})
            assert advice in caught.value.hint
        assert ck["w"].to("fp16").torch().dtype == torch.float16
        for device in ("cpu", "cuda:1", torch.device("cpu")):
            with pytest.raises(UsageError, match=r"is a device, but to\(\) only casts to a dtype"):
                ck["w"].to(device)


def test_an_opened_checkpoint_cannot_be_changed_and_says_what_can(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "x.safetensors")
    with ckptconv.open(tmp_path / "x.safetensors") as ck:
        with pytest.raises(TypeError, match=r"'a' is read-only\. load_state_dict returns tensors that can be changed"):
            ck["a"][0] = 0
        with pytest.raises(TypeError, match=r"x.safetensors is read-only. load_state_dict returns"):
            ck["a"] = torch.zeros(2)  # type: ignore[assignment]


def test_the_advice_on_prefixes_that_loading_lacks_holds_for_a_nested_state(tmp_path: Path) -> None:
    torch.save({"state_dict": {"model.a": torch.ones(2)}, "epoch": 1}, tmp_path / "x.ckpt")
    for option in ({"strip_prefix": "model."}, {"rename": "^model.="}):
        with pytest.raises(UsageError, match="For a flat state, such as key= selects in a nested one: "):
            ckptconv.load_state_dict(tmp_path / "x.ckpt", **option)  # type: ignore[arg-type]
    state = ckptconv.load_state_dict(tmp_path / "x.ckpt", key="state_dict")
    assert list({name.removeprefix("model."): tensor for name, tensor in state.items()}) == ["a"]


def test_names_of_tensors_are_a_list(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2), "b": torch.ones(2)}, tmp_path / "x.safetensors")
    with ckptconv.open(tmp_path / "x.safetensors") as ck:
        with pytest.raises(UsageError, match="get_tensors expects a list of names") as caught:
            ck.get_tensors("ab")
        assert "fnmatch.filter(ck, 'ab')" in caught.value.hint
        assert list(ck.get_tensors(["a"])) == ["a"]
