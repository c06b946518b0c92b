"""Tensors of subclasses, as torchao saves them: their parts come out as they are, never cast."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from cells import VERIFY, verified_here
from checkpoints import ckptconv_here, done, metadata_of
from effort import every
from reading import state_of
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import return_and_correct_aliasing

from ckptconv.outputs.kinds import NAMED


def _wrapper(name: str) -> type[torch.Tensor]:
    """A class like those of torchao: a wrapper of the tensors `qdata` and `scale`."""

    class Wrapper(torch.Tensor):
        qdata: torch.Tensor
        scale: torch.Tensor
        block_size: list[int]

        @staticmethod
        def __new__(cls: Any, qdata: torch.Tensor, scale: torch.Tensor) -> Any:
            made = torch.Tensor._make_wrapper_subclass(cls, qdata.shape, dtype=torch.bfloat16)
            made.qdata, made.scale, made.block_size = qdata, scale, [1, qdata.shape[-1]]
            return made

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.detach.default:
                return return_and_correct_aliasing(func, args, kwargs or {}, cls(args[0].qdata, args[0].scale))
            raise NotImplementedError(func)

    Wrapper.__name__ = Wrapper.__qualname__ = name
    Wrapper.__module__ = "torchao.quantization"
    return Wrapper


@pytest.fixture
def torchao(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A module of torchao's name with classes of its names."""
    module = types.ModuleType("torchao.quantization")
    for name in ("Float8Tensor", "Another"):
        setattr(module, name, _wrapper(name))
    monkeypatch.setitem(sys.modules, "torchao", types.ModuleType("torchao"))
    monkeypatch.setitem(sys.modules, "torchao.quantization", module)
    return module


def quantized(cls: Any) -> dict[str, Any]:
    data = torch.arange(12.0).reshape(3, 4).to(torch.float8_e4m3fn)
    return {"layers.0.weight": cls(data, torch.rand(3, 1)), "layers.0.bias": torch.ones(3)}


def test_torchao_s_names_of_the_parts(torchao: Any, tmp_path: Path) -> None:
    """Those of torchao.prototype.safetensors."""
    state = quantized(torchao.Float8Tensor)
    torch.save(state, tmp_path / "m.pt")
    done(ckptconv_here("pt2safetensors", tmp_path / "m.pt", *VERIFY, "--json"))
    found, weight = load_file(tmp_path / "m.safetensors"), state["layers.0.weight"]
    assert found.keys() == {"layers.0._weight_qdata", "layers.0._weight_scale", "layers.0.bias"}
    assert torch.equal(found["layers.0._weight_qdata"].view(torch.uint8), weight.qdata.view(torch.uint8))
    assert torch.equal(found["layers.0._weight_scale"], weight.scale)


@pytest.mark.skipif("pt" not in NAMED, reason="no feature writes .pt files")
def test_the_way_back_gives_the_tensors_of_the_class(torchao: Any, tmp_path: Path) -> None:
    state = quantized(torchao.Float8Tensor)
    torch.save(state, tmp_path / "m.pt")
    assert ckptconv_here("pt2safetensors", tmp_path / "m.pt").code == 0
    done(ckptconv_here("safetensors2pt", tmp_path / "m.safetensors", tmp_path / "back.pt"))
    weight, theirs = torch.load(tmp_path / "back.pt", weights_only=False)["layers.0.weight"], state["layers.0.weight"]
    assert type(weight) is torchao.Float8Tensor
    assert (weight.dtype, weight.shape, weight.block_size) == (theirs.dtype, theirs.shape, theirs.block_size)
    assert torch.equal(weight.qdata.view(torch.uint8), theirs.qdata.view(torch.uint8))
    assert torch.equal(weight.scale, theirs.scale)


@every("kind", ["Float8Tensor", "Another"])
def test_a_cast_leaves_the_parts_as_they_are(kind: str, torchao: Any, tmp_path: Path) -> None:
    state = quantized(getattr(torchao, kind))
    torch.save(state, tmp_path / "m.pt")
    run = done(ckptconv_here("pt2safetensors", tmp_path / "m.pt", "--dtype", "bf16", *VERIFY, "--json"))
    assert "2 tensors are parts of quantized tensors and were not cast to bfloat16" in run.json["warnings"][0]
    dtypes = {
        name.rpartition(".")[2][-5:]: tensor.dtype for name, tensor in load_file(tmp_path / "m.safetensors").items()
    }
    assert dtypes == {"qdata": torch.float8_e4m3fn, "scale": torch.float32, "bias": torch.bfloat16}
    verified_here(tmp_path / "m.pt", tmp_path / "m.safetensors", "--dtype", "bf16")
    if "pt" not in NAMED:
        return
    is_known = kind == "Float8Tensor"
    back = done(
        ckptconv_here(
            "safetensors2pt",
            tmp_path / "m.safetensors",
            tmp_path / "b.pt",
            *(() if is_known else ("--opaque", "drop")),
            "--dtype",
            "fp16",
            "--json",
        )
    )
    words = "not cast to float16" if is_known else "left out"
    assert words in " ".join(back.json["warnings"])


# ---------------------------------------------------------------------------------------------- files of torchao itself

THEIRS = Path(__file__).parent / "data"
CASES = ["float8", "int8", "intx", "mx"]


def told(path: Path) -> dict[str, Any]:
    """The metadata that torchao's loader reads, parsed, without the order of names."""
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    listed = json.loads(metadata["tensor_names"])
    entries = {name: json.loads(metadata[name]) for name in listed}
    for entry in entries.values():
        entry["_tensor_data_names"] = sorted(entry.get("_tensor_data_names", []))
    return entries


def converted(source: Path, output: Path, *options: str) -> Path:
    done(ckptconv_here("convert", source, output, *VERIFY, *options))
    return output


def same_tensors(one: Path, other: Path) -> bool:
    tensors, others = load_file(one), load_file(other)
    return tensors.keys() == others.keys() and all(
        torch.equal(tensor.view(torch.uint8), others[name].view(torch.uint8)) for name, tensor in tensors.items()
    )


@every("case", CASES)
def test_the_metadata_is_that_which_torchao_writes(case: str, tmp_path: Path) -> None:
    output = converted(THEIRS / f"{case}.pt", tmp_path / "m.safetensors")
    assert told(output) == told(THEIRS / f"{case}.safetensors")
    assert same_tensors(output, THEIRS / f"{case}.safetensors")


@pytest.mark.skipif("pt" not in NAMED, reason="no feature writes .pt files")
@every("case", CASES)
def test_what_torchao_wrote_becomes_its_tensors_again(case: str, tmp_path: Path) -> None:
    """As the pickle of the same tensors has them."""
    back = tmp_path / "back.pt"
    done(ckptconv_here("safetensors2pt", THEIRS / f"{case}.safetensors", back, *VERIFY))
    again = converted(back, tmp_path / "again.safetensors")
    assert told(again) == told(THEIRS / f"{case}.safetensors")
    assert same_tensors(again, THEIRS / f"{case}.safetensors")
    done(ckptconv_here("safetensors2pt", THEIRS / f"{case}.safetensors", tmp_path / "p.pt", *VERIFY, "--no-structure"))
    assert all(type(tensor) is torch.Tensor for tensor in torch.load(tmp_path / "p.pt", weights_only=True).values())


def test_the_metadata_follows_the_names(tmp_path: Path) -> None:
    """From a pickle, from our file, and from torchao's; in each of several files."""
    expected = {
        f"model.{name}" if name == "0.weight" else name: entry
        for name, entry in told(THEIRS / "int8.safetensors").items()
    }
    first = converted(THEIRS / "int8.pt", tmp_path / "a.safetensors", "--rename", r"^0\._=model.0._")
    assert told(first) == expected
    assert told(converted(first, tmp_path / "b.safetensors", "--rename", "^1=1")) == expected
    theirs = THEIRS / "int8.safetensors"
    assert told(converted(theirs, tmp_path / "c.safetensors", "--rename", r"^0\._=model.0._")) == expected
    converted(THEIRS / "int8.pt", tmp_path / "d", "--max-shard-size", "100B")
    shards = sorted((tmp_path / "d").glob("*.safetensors"))
    assert len(shards) > 1
    assert all(told(shard) == told(theirs) for shard in shards)


@every("options", [("--exclude", "*_scale"), ("--rename", "_weight_scale=scale"), ("--include", "*.bias")])
def test_a_tensor_that_lacks_a_part_is_not_described(options: tuple[str, str], tmp_path: Path) -> None:
    for source in ("int8.pt", "int8.safetensors"):
        output = converted(THEIRS / source, tmp_path / "m.safetensors", *options)
        assert "tensor_names" not in metadata_of(output) or "0.weight" not in told(output)


@every("begin", ["0.", "0.__", "0.weight_", "0._weight", "_weight_", "0._"])
def test_parts_whose_names_torchao_does_not_take_for_a_tensor_s_are_not_described(begin: str, tmp_path: Path) -> None:
    output = converted(THEIRS / "int8.pt", tmp_path / "m.safetensors", "--rename", rf"^0\._weight_={begin}")
    assert f"{begin}qdata" in load_file(output)
    assert "tensor_names" not in metadata_of(output)


def test_names_of_tied_tensors_are_left_to_whoever_reads_the_aliases(torchao: Any, tmp_path: Path) -> None:
    state = quantized(torchao.Float8Tensor)
    state["layers.0.weight"].block_size = [1, 4]
    torch.save({**state, "head.bias": state["layers.0.bias"]}, tmp_path / "m.pt")
    output = converted(tmp_path / "m.pt", tmp_path / "m.safetensors")
    kept = {"layers.0.weight", "layers.0.bias"}
    assert set(told(output)) == kept
    assert metadata_of(output)["head.bias"] == "layers.0.bias"
    both = converted(tmp_path / "m.pt", tmp_path / "n.safetensors", "--tied", "duplicate")
    assert set(told(both)) == {*kept, "head.bias"}


def test_a_cast_leaves_the_parts_in_torchao_s_files_as_they_are(tmp_path: Path) -> None:
    run = done(
        ckptconv_here("convert", THEIRS / "int8.safetensors", tmp_path / "m.safetensors", "--dtype", "fp16", "--json")
    )
    assert "1 tensor is part of a quantized tensor and was not cast" in " ".join(run.json["warnings"])
    dtypes = {name: tensor.dtype for name, tensor in load_file(tmp_path / "m.safetensors").items()}
    assert (dtypes["0._weight_scale"], dtypes["0.bias"]) == (torch.float32, torch.float16)


@every("value", [Path("of no known class"), 10**5000, "x" * 10**6, [1] * 300], ids=["class", "number", "text", "many"])
def test_what_torchao_cannot_load_is_not_described(value: Any, torchao: Any, tmp_path: Path) -> None:
    state = quantized(torchao.Float8Tensor)
    state["layers.0.weight"].mm_config = value
    torch.save(state, tmp_path / "m.pt")
    assert "tensor_names" not in metadata_of(converted(tmp_path / "m.pt", tmp_path / "m.safetensors"))


@pytest.mark.parametrize(
    "entry",
    [
        "no JSON",
        "[1]",
        '{"_type": ["Int8Tensor"], "_tensor_data_names": ["qdata"]}',
        '{"_type": "Int8Tensor", "_tensor_data_names": [["qdata"]]}',
        '{"_type": "Int8Tensor", "_data": {"dtype": {"_type": "os.system"}}, "_tensor_data_names": ["qdata"]}',
        '{"_type": "Int8Tensor", "_data": {"__class__": 1}, "_tensor_data_names": ["qdata"]}',
        '{"_type": "Int4Tensor", "_data": {"shape": [-1, 1e9]}, "_tensor_data_names": ["qdata", "scale"]}',
        '{"_type": "Int8Tensor", "_data": {"dtype": ' + "[" * 90 + "]" * 90 + '}, "_tensor_data_names": ["qdata"]}',
        pytest.param("[" * 100_000, id="deep"),
    ],
)
def test_metadata_that_lies_leaves_the_parts_as_they_are(entry: str, tmp_path: Path) -> None:
    tensors = {"0._weight_qdata": torch.zeros(2, 2, dtype=torch.int8), "0._weight_scale": torch.ones(2)}
    save_file(tensors, tmp_path / "m.safetensors", {"tensor_names": '["0.weight"]', "0.weight": entry})
    output = "m.pt" if "pt" in NAMED else "again.safetensors"
    done(ckptconv_here("convert", tmp_path / "m.safetensors", tmp_path / output, *VERIFY))
    assert state_of(tmp_path / output).keys() == tensors.keys()
