"""load_state_dict: tensors of torch over a memory map, as they were saved."""

from __future__ import annotations

import io
import os
import warnings
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from attacks.corpus import CASES
from cells import torch_containers, trained
from checkpoints import ZERO, ckptconv_here, load_with_aliases, torch_file, torch_loaded
from checkpoints import assert_same as assert_same_tensors
from compare import assert_same
from processes import prepared
from safetensors.torch import load_file, save_file
from states import STATES

import ckptconv
from ckptconv.errors import CkptconvError, CorruptError, UsageError
from ckptconv.features.arrays import frameworks
from ckptconv.pickles.nodes import Opaque
from ckptconv.storage import files

MIB = 1 << 20


def converted(path: Path, output: str = "x.safetensors", *options: object) -> Path:
    done = ckptconv_here("pt2safetensors", path, path.parent / output, "--no-fsync", *options)
    assert done.code == 0, done.err
    return path.parent / output


def in_map(tensor: torch.Tensor, path: Path) -> bool:
    """Whether the memory of a tensor is a map of this file."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            span, _, _, _, _, *name = line.split(maxsplit=5)
            low, high = (int(part, 16) for part in span.split("-"))
            if low <= tensor.data_ptr() < high:
                return bool(name) and name[0].strip() == str(path)
    return False


# --------------------------------------------------------------------------------------------------- the same as it was

# Tensors made of several, and objects, are tested with the mapper.
TREES = [name for name in STATES if not name.startswith(("1000-deep", "root", "bits", "quantized"))]


LAID_OUT = ("strides", "parameters, gradients, attributes")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["pt", "safetensors", "directory"])
def test_any_state_is_what_torch_loads(kind: str, tmp_path: Path) -> None:
    for number, name in enumerate(TREES):
        place = tmp_path / str(number)
        place.mkdir()
        path = torch_file(place, STATES[name]())
        theirs = torch_loaded(path)
        if kind == "safetensors":
            path = converted(path)
        elif kind == "directory":
            path = converted(path, "x", "--max-shard-size", "1kB")
        ours = ckptconv.load_state_dict(path)
        if kind != "pt" and name in LAID_OUT:
            # In safetensors, tensors lie in C order, and to bring them into another they would have to be copied.
            assert all(torch.equal(theirs[key], ours[key]) for key in theirs), name
        else:
            assert_same({name: theirs}, {name: ours})


def test_a_plain_file_is_a_dict_by_name(tmp_path: Path) -> None:
    save_file({"b": torch.ones(2), "a": torch.zeros(3)}, tmp_path / "x.safetensors")
    loaded = ckptconv.load_state_dict(str(tmp_path / "x.safetensors"))
    assert type(loaded) is dict
    assert_same(load_file(tmp_path / "x.safetensors"), loaded)


def test_a_subtree_by_its_key(tmp_path: Path) -> None:
    path = torch_file(tmp_path, {"model": {"w": torch.ones(2)}, "epoch": 3})
    for source in (path, converted(path)):
        assert list(ckptconv.load_state_dict(source, key="model")) == ["w"]
        with pytest.raises(UsageError, match="nothing"):
            ckptconv.load_state_dict(source, key="nothing")


# ---------------------------------------------------------------------------------------------------- nothing is copied


def test_tensors_lie_in_the_file(tmp_path: Path) -> None:
    path = torch_file(tmp_path, {"a": torch.ones(300), "t": torch.randn(30, 40).t(), "b": torch.ones(7).bfloat16()})
    safe = converted(path)
    for file in (path, safe):
        loaded = ckptconv.load_state_dict(file)
        assert all(in_map(tensor, file) for name, tensor in loaded.items() if (name, file) != ("t", safe))
    assert loaded["t"].shape == (40, 30)


MEMORY = """
import sys, ckptconv
def peak(what):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(what)) << 10
before = peak("VmHWM")
state = ckptconv.load_state_dict(sys.argv[1])
print(sum(tensor.nbytes for tensor in state.values()), peak("VmHWM") - before)
"""


def test_a_large_file_takes_no_memory(tmp_path: Path) -> None:
    path = torch_file(tmp_path, {f"w{number}": torch.ones(8 * MIB // 4) for number in range(8)})
    for file in (path, converted(path)):
        done = prepared("torch").run(MEMORY, file)
        size, grown = map(int, done.stdout.split())
        assert size == 8 * 8 * MIB
        assert grown < 24 * MIB


def test_to_change_a_tensor_does_not_change_the_file(tmp_path: Path) -> None:
    path = torch_file(tmp_path, {"a": torch.zeros(300)})
    for file in (path, converted(path)):
        before = file.read_bytes()
        loaded = ckptconv.load_state_dict(file)
        loaded["a"].add_(1)
        assert loaded["a"].sum() == 300
        assert file.read_bytes() == before
        assert ckptconv.load_state_dict(file)["a"].sum() == 0


def test_the_memory_stays_when_the_file_is_replaced(tmp_path: Path) -> None:
    path = torch_file(tmp_path, {"a": torch.arange(1000.0)})
    loaded = ckptconv.load_state_dict(path)
    (tmp_path / "other.pt").write_bytes(b"x" * path.stat().st_size)
    os.replace(tmp_path / "other.pt", path)
    assert torch.equal(loaded["a"], torch.arange(1000.0))


# --------------------------------------------------------------------------------------------------------- into a model


def a_model() -> torch.nn.Module:
    model = torch.nn.Sequential(
        OrderedDict(
            embed=torch.nn.Embedding(9, 4), norm=torch.nn.BatchNorm1d(4), head=torch.nn.Linear(4, 9, bias=False)
        )
    )
    model.head.weight = model.embed.weight
    return model


def test_a_model_on_the_meta_device_gets_all_its_tensors(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = a_model().eval()
    saved = torch_file(tmp_path, model.state_dict())
    shards = converted(saved, "x", "--max-shard-size", "100B")
    tokens = torch.arange(9)
    for path in (saved, converted(saved), shards):
        with torch.device("meta"):
            empty = a_model().eval()
        empty.load_state_dict(ckptconv.load_state_dict(path), assign=True)
        assert not any(tensor.is_meta for tensor in (*empty.parameters(), *empty.buffers()))
        assert_same({path.name: model.state_dict()}, {path.name: empty.state_dict()})
        assert empty.state_dict()["head.weight"].data_ptr() == empty.state_dict()["embed.weight"].data_ptr()
        assert torch.equal(model(tokens), empty(tokens))


def test_an_optimizer_takes_its_state(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    path = torch_file(tmp_path, optimizer.state_dict())
    for file in (path, converted(path)):
        other = torch.optim.AdamW(torch.nn.Linear(3, 2).parameters())
        other.load_state_dict(ckptconv.load_state_dict(file))
        assert_same(optimizer.state_dict(), other.state_dict())


STEPS = {name: ZERO / name / "checkpoint" for name in ("z3_bf16_w2", "z2_bf16_w2") if name in ZERO.names}
STEPS |= {step.parent.name: step for step in trained()}


def test_a_step_of_training_is_loaded_as_its_conversion(tmp_path: Path) -> None:
    dtypes: tuple[Any, ...] = (None, "bf16", torch.float16)
    for name, step in STEPS.items():
        for number, dtype in enumerate(dtypes):
            output = tmp_path / f"{name}{number}.safetensors"
            ckptconv.convert(step, output, dtype=dtype, fsync=False)
            assert_same_tensors(ckptconv.load_state_dict(step, dtype=dtype, device="cpu"), load_with_aliases(output))


def test_tied_weights_of_a_step_share_their_memory() -> None:
    loaded = ckptconv.load_state_dict(ZERO / "z3_bf16_w2/checkpoint")
    pointers = [tensor.data_ptr() for tensor in loaded.values() if tensor.numel()]
    assert loaded["head.weight"].data_ptr() == loaded["emb.weight"].data_ptr()
    assert len(set(pointers)) == len(pointers) - 1


def test_a_cast_keeps_what_was_tied_and_no_other(tmp_path: Path) -> None:
    shared = torch.arange(8.0)
    path = torch_file(tmp_path, {"a": shared, "b": shared, "n": torch.arange(3), "c": torch.ones(2)})
    loaded = ckptconv.load_state_dict(path, dtype=torch.bfloat16)
    assert loaded["a"].dtype == torch.bfloat16
    assert loaded["n"].dtype == torch.int64
    assert loaded["a"].tolist() == loaded["b"].tolist() == shared.tolist()
    assert loaded["a"].data_ptr() == loaded["b"].data_ptr()


def test_whole_modules_are_state_dicts_or_objects(tmp_path: Path) -> None:
    path = torch_file(tmp_path, {"model": torch.nn.Linear(2, 3)})
    assert list(ckptconv.load_state_dict(path)["model"]) == ["weight", "bias"]
    assert type(ckptconv.load_state_dict(path, raw=True)["model"]) is Opaque


def test_all_is_moved_to_a_device(tmp_path: Path) -> None:
    for path in (torch_file(tmp_path, a_model().state_dict()), *STEPS.values()):
        assert all(tensor.is_meta for tensor in ckptconv.load_state_dict(path, device="meta").values())


# -------------------------------------------------------------------------------- files that cannot be used as they lie


def packed_again(path: Path) -> None:
    """Write an archive again, whose members lie anywhere."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)


def test_archives_that_were_packed_again(tmp_path: Path) -> None:
    for name in ("one storage under different views", "fp8, uint16, complex64 and all others", "tied"):
        path = torch_file(tmp_path, STATES[name]())
        theirs = torch_loaded(path)
        packed_again(path)
        assert_same({name: theirs}, {name: ckptconv.load_state_dict(path)})


def test_every_container(tmp_path: Path) -> None:
    for options in torch_containers().values():
        path = torch_file(tmp_path, STATES["one storage under different views"](), **options)
        assert_same(torch_loaded(path), ckptconv.load_state_dict(path))


def test_a_file_of_a_big_endian_machine(tmp_path: Path) -> None:
    state = {"a": torch.arange(10.0), "b": torch.arange(10, dtype=torch.int16), "c": torch.arange(3) * 1j}
    path = torch_file(tmp_path, state)
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    sizes = dict(zip("012", (4, 2, 4), strict=True))
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            if name.endswith("byteorder"):
                data = b"big"
            elif "/data/" in name:
                item = sizes[name[-1]]
                data = b"".join(data[at : at + item][::-1] for at in range(0, len(data), item))
            archive.writestr(name, data)
    assert_same(state, ckptconv.load_state_dict(path))


def test_damaged_files_are_told_as_ever(tmp_path: Path) -> None:
    path = torch_file(tmp_path, {"a": torch.ones(100)})
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CkptconvError, match=r"model\.pt"):
        ckptconv.load_state_dict(path)
    with pytest.raises(UsageError, match="does not exist"):
        ckptconv.load_state_dict(tmp_path / "y.pt")


# ------------------------------------------------------------------------------------------------ which of two is newer


def test_a_newer_file_for_torch_beside_it_is_warned_of(tmp_path: Path) -> None:
    path = torch_file(tmp_path, {"a": torch.ones(2)}, "x.pt")
    safe = converted(path)
    os.utime(path, ns=(0, 0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ckptconv.load_state_dict(safe)
    os.utime(path, ns=(1 << 61, 1 << 61))
    with pytest.warns(UserWarning, match=r"x\.pt is newer than .*x\.safetensors") as caught:
        ckptconv.load_state_dict(safe)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ckptconv.load_state_dict(path)


# --------------------------------------------------------------------------------------------------------- nothing runs


class Attack:
    def __reduce__(self) -> Any:
        return os.mkdir, ("canary",)


def test_nothing_that_a_file_names_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    buffer = io.BytesIO()
    torch.save({"a": torch.ones(1), "b": Attack()}, buffer)
    (tmp_path / "x.pt").write_bytes(buffer.getvalue())
    with pytest.raises(CkptconvError, match="mkdir"):
        ckptconv.load_state_dict(tmp_path / "x.pt")
    assert not (tmp_path / "canary").exists()


def test_each_file_is_looked_at_as_often_whatever_the_number_of_its_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[str] = []
    look = files.look
    monkeypatch.setattr(files, "look", lambda path, *more: (looks.append(path), look(path, *more))[1])
    counts = []
    for count in (2, 40):
        path = tmp_path / f"{count}.safetensors"
        save_file({f"w{number}": torch.ones(3) for number in range(count)}, path)
        looks.clear()
        assert len(ckptconv.load_state_dict(path)) == count
        counts.append(looks.count(str(path)))
    assert counts[0] == counts[1]


def test_a_file_that_changes_while_its_tensors_are_made_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(3), "b": torch.ones(3)}, path)
    over = frameworks.Torch.over

    def changing(*arguments: Any) -> Any:
        path.write_bytes(path.read_bytes() + b"more")
        return over(*arguments)

    monkeypatch.setattr(frameworks.Torch, "over", changing)
    with pytest.raises(CorruptError, match="changed while it was read"):
        ckptconv.load_state_dict(path)


def test_tensors_that_repeat_their_elements_are_not_copied_into_memory(tmp_path: Path) -> None:
    path = tmp_path / "twice.pt"
    path.write_bytes(CASES["tensor_gigabytes_twice.pt"].make(""))
    with ckptconv.open(path, backend="pread") as ck, pytest.raises(ckptconv.LimitError, match="repeat the same"):
        ck.get_tensors()
    with pytest.raises(ckptconv.LimitError, match="repeat the same"):
        ckptconv.load_state_dict(path, dtype="bf16")
