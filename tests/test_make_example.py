"""scripts/make_example.py: it writes what torch and DeepSpeed would write, and checks what it says it checks."""

from __future__ import annotations

import itertools
import json
import math
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

import make_example

SCRIPT = Path(__file__).parents[1] / "scripts" / "make_example.py"


EXAMPLES = [
    make_example.Example(params=60_000, ranks=3, stage=stage, seed=7, frozen_blocks=frozen, sub_group_size=size)
    for stage, frozen, size in [(3, 0, 10**9), (3, 1, 10**9), (3, 0, 5_000), (2, 0, 0), (2, 1, 0), (1, 0, 0)]
]


def load(path: Path) -> Any:
    with make_example.stand_ins():
        return torch.load(path, weights_only=False)


def recover(tag: Path, ranks: int) -> dict[str, torch.Tensor]:
    """The weights and buffers of a ZeRO checkpoint, the way DeepSpeed's own converter finds them."""
    optim = [load(tag / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt") for rank in range(ranks)]
    states = [rank["optimizer_state_dict"] for rank in optim]
    stage = int(states[0]["zero_stage"])
    prefix = [f"zero_pp_rank_{rank}_" for rank in range(ranks)] if stage == 3 else [""]
    models = [load(tag / f"{name}mp_rank_00_model_states.pt") for name in prefix]
    model = models[0]
    found = {name: model["module"][name] for name in model["buffer_names"]}
    groups = [state["fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"] for state in states]
    for index, shapes in enumerate(model["param_shapes"]):
        parts = [group[index].detach() for group in groups]
        at = 0
        for name, shape in shapes.items():
            numel = math.prod(shape)
            if stage == 3:
                piece = -(-numel // ranks)
                found[name] = torch.cat([part[at : at + piece] for part in parts])[:numel].view(shape)
                at += piece
            else:
                found[name] = torch.cat(parts)[at : at + numel].view(shape)
                at += numel
        assert at == (len(parts[0]) if stage == 3 else sum(map(len, parts)))
    for name, shape in (model["frozen_param_shapes"] or {}).items():
        pieces = [rank["frozen_param_fragments"][name].reshape(-1) for rank in models]
        found[name] = torch.cat(pieces)[: math.prod(shape)].view(shape)
    for alias, owner in model["shared_params"].items():
        found[alias] = found[owner].clone()
    return found


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_a_checkpoint_holds_what_the_example_promises(example: Any, tmp_path: Path) -> None:
    make_example.write(example, tmp_path)
    assert (tmp_path / "latest").read_text() == make_example.TAG
    found = recover(tmp_path / make_example.TAG, example.ranks)
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == {
        name: shape for name, (shape, _, _) in make_example.expected(example).items()
    }
    result = tmp_path / "model.safetensors"
    save_file(found, result)
    assert make_example.differences(example, result) == []


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_archives_are_sound_and_state_their_stage(example: Any, tmp_path: Path) -> None:
    make_example.write(example, tmp_path)
    for path in (tmp_path / make_example.TAG).iterdir():
        with zipfile.ZipFile(path) as archive:
            assert archive.testzip() is None
    optim = load(tmp_path / make_example.TAG / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt")
    assert optim["optimizer_state_dict"]["zero_stage"] == example.stage
    assert "deepspeed" not in sys.modules


def test_a_file_is_what_torch_save_writes(tmp_path: Path) -> None:
    # Tensors larger than a chunk, views, tied tensors, an attribute, scalars and an empty one.
    saver = make_example.Saver()
    numel = make_example.CHUNK + 5
    parts = torch.randn(numel).split(1000)
    flat = saver.tensor(numel, torch.float32, lambda: iter(parts))
    real = torch.cat(parts)

    def tree(tensor: torch.Tensor) -> dict[str, Any]:
        tagged = tensor[:7].requires_grad_()
        tagged.ds_id = "0_0"
        return {"a": tensor, "b": [tensor[3:], tagged], "c": torch.tensor(2.5), "d": torch.empty(0), "e": 7}

    saver.save(tree(flat), tmp_path / "ours" / "x.pt")
    (tmp_path / "theirs").mkdir()
    torch.save(tree(real), tmp_path / "theirs" / "x.pt")
    ours, theirs = (bytearray((tmp_path / which / "x.pt").read_bytes()) for which in ("ours", "theirs"))
    with zipfile.ZipFile(tmp_path / "theirs" / "x.pt") as archive:
        end, directory = archive.getinfo("x/.data/serialization_id").header_offset, archive.start_dir
    assert ours[:end] == theirs[:end]
    # The id is a hash, and its CRC stands in the last entry of the directory; all other entries are equal.
    last = theirs.rindex(b"PK\x01\x02")
    assert ours[directory:last] == theirs[directory:last]


def test_a_model_loads_and_is_tied(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    make_example.write_model(path, 200_000)
    assert abs(path.stat().st_size / 200_000 - 1) < 0.2
    model = torch.load(path, weights_only=True)
    assert model["lm_head.weight"].data_ptr() == model["transformer.wte.weight"].data_ptr()
    assert {tensor.dtype for tensor in model.values()} >= {torch.bfloat16, torch.float32}


def test_every_number_of_a_tensor_is_its_own() -> None:
    whole = torch.cat(list(make_example.values(0, "x", 0, 600_000)))
    assert torch.equal(torch.cat(list(make_example.values(0, "x", 1000, 300_000))), whole[1000:300_000])
    assert whole.isfinite().all()
    assert len(whole.unique()) > 0.95 * len(whole)
    assert not torch.equal(torch.cat(list(make_example.values(0, "y", 0, 600_000))), whole)


@pytest.fixture
def converted(tmp_path: Path) -> tuple[Any, dict[str, torch.Tensor], Path]:
    example = EXAMPLES[0]
    tensors = {
        name: torch.cat(list(filling())).to(dtype).reshape(shape).clone()
        for name, (shape, dtype, filling) in make_example.expected(example).items()
    }
    return example, tensors, tmp_path / "model.safetensors"


def test_check_takes_other_precisions_and_missing_aliases(converted: Any) -> None:
    example, tensors, path = converted
    save_file({n: t.bfloat16() if t.is_floating_point() else t for n, t in tensors.items()}, path)
    assert make_example.differences(example, path) == []
    del tensors["lm_head.weight"]
    save_file(tensors, path)
    assert make_example.differences(example, path) == []


@pytest.mark.parametrize("fault", ["bit", "shape", "dtype", "missing", "extra", "none"])
def test_check_sees_every_kind_of_fault(converted: Any, fault: str) -> None:
    example, tensors, path = converted
    name = "transformer.h.0.mlp.c_fc.bias"
    if fault == "bit":
        tensors[name].view(torch.int32)[-1] ^= 1
    elif fault == "shape":
        tensors[name] = tensors[name][None]
    elif fault == "dtype":
        tensors["transformer.seen"] = tensors["transformer.seen"].int()
    elif fault == "missing":
        del tensors[name]
    elif fault == "extra":
        tensors["padding"] = torch.zeros(1)
    if fault != "none":
        save_file(tensors, path)
    else:
        path = path.parent
    assert make_example.differences(example, path)


def test_the_command_makes_and_checks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "run"
    assert make_example.main([str(directory), "--params", "6e4", "--ranks", "2"]) == 0
    assert json.loads((directory / "example.json").read_text())["params"] == 60_000
    result = tmp_path / "model.safetensors"
    save_file(recover(directory / make_example.TAG, 2), result)
    assert make_example.main(["--check", str(result), str(directory)]) == 0
    tensors = load_file(result)
    next(itertools.islice(tensors.values(), 3, None)).zero_()
    save_file(tensors, result)
    assert make_example.main(["--check", str(result), str(directory)]) == 1
    assert "other values" in capsys.readouterr().out
