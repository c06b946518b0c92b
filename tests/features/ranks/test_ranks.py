"""Checkpoints with a file for each rank: what comes out, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from cells import VERIFY, of_features
from checkpoints import assert_same, load_with_aliases, metadata_of
from dtensors import placed, playing
from effort import every
from features.ranks.rank_files import CASES, NUMBERED, RANKS, converted, refused, write
from format_suite import FormatSuite
from safetensors.torch import load_file
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import ShardedTensor, ShardedTensorMetadata
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import ckptconv
from ckptconv import UnsupportedError
from ckptconv.errors import CorruptError
from ckptconv.features.ranks import flat
from ckptconv.formats.detect import open_source

WEIGHT = torch.arange(9 * 4, dtype=torch.float32).reshape(9, 4)
OTHER = -WEIGHT[:5].bfloat16()


def sharded(mesh: Any, rank: int) -> dict[str, Any]:
    """A parameter that two ranks share unevenly, another of which one has none, and a buffer."""
    return {
        "weight": placed(WEIGHT, mesh, Shard(0)),
        "small": placed(torch.ones(1, 3), mesh, Shard(0)),
        "buffer": torch.arange(3),
    }


EXPECTED = {"weight": WEIGHT, "small": torch.ones(1, 3), "buffer": torch.arange(3)}


# ------------------------------------------------------------------------------------------------- what comes out


@every("case", CASES)
def test_weights_and_states_are_what_the_live_model_held(case: str, tmp_path: Path) -> None:
    states = tmp_path / "states.safetensors"
    asked = [] if case in NUMBERED else ["--optimizer", states]
    converted(RANKS / case / "checkpoint", tmp_path / "out", *asked)
    assert_same(load_with_aliases(tmp_path / "out"), load_file(RANKS / case / "expected.safetensors"))
    if asked:
        assert_same(load_with_aliases(states), load_file(RANKS / case / "optimizer.safetensors"))


@every(
    "shape, placements",
    [
        ((4,), (Shard(0),)),
        ((3,), (Shard(1),)),
        ((2, 2), (Replicate(), Shard(0))),
        ((2, 2), (Shard(0), Shard(1))),
        ((2, 2), (Shard(0), Shard(0))),
        ((2, 2), (_StridedShard(0, split_factor=2), Shard(0))),
        ((2,), (_StridedShard(0, split_factor=3),)),
        ((2, 2, 2), (Replicate(), _StridedShard(0, split_factor=2), Shard(0))),
        ((1,), (Shard(0),)),
    ],
)
def test_any_mesh_and_placements_are_joined(shape: tuple[int, ...], placements: Any, tmp_path: Path) -> None:
    source = write(tmp_path / "in", shape, lambda mesh, rank: {"weight": placed(WEIGHT, mesh, *placements)})
    converted(source, tmp_path / "out")
    assert_same(load_with_aliases(tmp_path / "out"), {"weight": WEIGHT})


def test_a_mesh_that_is_a_slice_of_another_is_joined_on_each_slice(tmp_path: Path) -> None:
    """Tensor parallelism beside plain data parallelism: every row of the mesh has the whole tensor."""
    source = write(
        tmp_path / "in", (2, 2), lambda mesh, rank: {"weight": placed(WEIGHT, mesh["tp"], Shard(0))}, names=("dp", "tp")
    )
    converted(source, tmp_path / "out")
    assert_same(load_with_aliases(tmp_path / "out"), {"weight": WEIGHT})


def test_a_tied_tensor_is_one_with_two_names(tmp_path: Path) -> None:
    def tied(mesh: Any, rank: int) -> dict[str, Any]:
        local = placed(WEIGHT, mesh, Shard(0))
        head = DTensor.from_local(local.to_local(), mesh, [Shard(0)], run_check=False, shape=(9, 4), stride=(4, 1))  # type: ignore[attr-defined]
        return {"embed": local, "head": head}

    converted(write(tmp_path / "in", (2,), tied), tmp_path / "out")
    assert len(load_file(tmp_path / "out" / "model.safetensors")) == 1
    assert_same(load_with_aliases(tmp_path / "out"), {"embed": WEIGHT, "head": WEIGHT})


def test_a_whole_state_of_training_gives_its_model_and_shows_the_rest(tmp_path: Path) -> None:
    source = write(
        tmp_path / "in",
        (2,),
        lambda mesh, rank: {"model": sharded(mesh, rank), "epoch": 7, "rank": rank},
        name="checkpoint_rank_{}.pt",
    )
    run = converted(source, tmp_path / "out")
    assert_same(load_with_aliases(tmp_path / "out"), EXPECTED)
    assert "differ" not in run.err
    told = open_source(source).facts
    assert told["epoch"] == 7
    assert told["ranks"] == 2
    everything = converted(source, tmp_path / "all", "--key", ".", "--json").json
    assert any(
        "differ between the ranks. The values of rank 0 were used: 'rank'" in each for each in everything["warnings"]
    )


@every("rank", [0, 1])
def test_one_of_the_files_stands_for_the_set(rank: int, tmp_path: Path) -> None:
    source = write(tmp_path / "in", (2,), sharded)
    converted(source / f"model_rank{rank}.pt", tmp_path / "out")
    assert_same(load_with_aliases(tmp_path / "out"), EXPECTED)


def test_a_file_of_a_rank_that_is_alone_and_whole_is_a_file_like_any_other(tmp_path: Path) -> None:
    torch.save({"weight": WEIGHT, "epoch": 3}, tmp_path / "model_rank0.pt")
    converted(tmp_path / "model_rank0.pt", tmp_path / "out.safetensors")
    assert_same(load_with_aliases(tmp_path / "out.safetensors"), {"weight": WEIGHT})
    assert "epoch" in metadata_of(tmp_path / "out.safetensors")["ckptconv.structure"]


def test_the_source_names_framework_mesh_ranks_and_settings() -> None:
    facts = open_source(RANKS / "fsdp2_tp" / "checkpoint").facts
    assert facts["mesh"] == "dp 2 × tp 2, dp 2, tp 2" or facts["mesh"].startswith("dp 2 × tp 2")
    assert facts["ranks"] == 4
    assert facts["lr_scheduler.last_epoch"] == 2
    assert facts["lr_scheduler._last_lr"] == 0.01


def test_a_note_names_the_optimizer_and_an_adapter(tmp_path: Path) -> None:
    source = Path(shutil.copytree(RANKS / "fsdp2_tp" / "checkpoint", tmp_path / "in"))
    (source / "lora_adapter").mkdir()
    notes = json.loads(converted(source, tmp_path / "out", "--json").out)["notes"]
    assert any("optim_world_size_4_rank_0.pt. Use convert --optimizer PATH" in note for note in notes)
    assert any("LoRA adapter" in note for note in notes)


def _of_old(mesh: DeviceMesh) -> dict[str, Any]:
    """A mesh's state until torch 2.9: its tensor of ranks, and a list of them since 2.2."""
    told = {"device_type": "cpu", "mesh": mesh.mesh, "mesh_dim_names": mesh.mesh_dim_names}
    return {**told, "_coordinate_on_dim": list(mesh.get_coordinate() or ())}


def _of_listed(mesh: DeviceMesh) -> dict[str, Any]:
    return {**_of_old(mesh), "_flatten_mesh_list": tuple(mesh.mesh.flatten().tolist())}


def _of_layouts(mesh: DeviceMesh) -> dict[str, Any]:
    """A mesh's state of torch 2.10: the extents and strides of all dimensions at once."""
    layout = SimpleNamespace(shape=tuple(mesh.mesh.shape), stride=tuple(mesh.mesh.stride()))
    told = {"_device_type": "cpu", "_layout": layout, "_rank_map": mesh.mesh.flatten(), "_mesh_dim_names": None}
    return {**told, "_rank": mesh.get_rank()}


@every("state", [_of_old, _of_listed, _of_layouts])
def test_the_meshes_of_other_releases_are_read(state: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceMesh, "__getstate__", state)
    source = write(tmp_path / "in", (2, 2), lambda mesh, rank: {"weight": placed(WEIGHT, mesh, Shard(1), Shard(0))})
    monkeypatch.undo()
    converted(source, tmp_path / "out")
    assert_same(load_with_aliases(tmp_path / "out"), {"weight": WEIGHT})


@every("placement", [Shard(0), Shard(1), Replicate()])
def test_a_single_rank_s_file_may_have_any_name(placement: Any, tmp_path: Path) -> None:
    weight = torch.arange(12.0).reshape(4, 3)

    def state(mesh: DeviceMesh, rank: int) -> Any:
        return {"model": {"w": placed(weight, mesh, placement), "b": torch.ones(2)}, "step": 3}

    write(tmp_path, (1,), state, "latest.pt")
    converted(tmp_path / "latest.pt", tmp_path / "out.safetensors", *VERIFY)
    assert_same(load_file(tmp_path / "out.safetensors"), {"w": weight, "b": torch.ones(2)})


def test_a_file_of_any_name_with_a_part_of_a_tensor_is_refused(tmp_path: Path) -> None:
    """Whatever has no parts can be converted without the rest."""

    def state(mesh: DeviceMesh, rank: int) -> Any:
        return {"w": placed(torch.ones(4, 2), mesh, Shard(0)), "b": torch.ones(2)}

    write(tmp_path, (2,), state, "latest.pt")
    assert "lacks the data" in refused(tmp_path / "latest.pt", tmp_path / "out.safetensors", 5)
    converted(tmp_path / "latest.pt", tmp_path / "out.safetensors", "--exclude", "w")
    assert set(load_file(tmp_path / "out.safetensors")) == {"b"}


def test_a_model_and_its_optimizer_in_one_file_are_told_apart(tmp_path: Path) -> None:
    def state(mesh: Any, rank: int) -> dict[str, Any]:
        weights = {"a": placed(WEIGHT, mesh, Shard(0)), "b": placed(OTHER, mesh, Shard(0))}
        states = {"a": {"exp_avg": placed(-WEIGHT, mesh, Shard(0))}, "b": {"exp_avg": placed(OTHER, mesh, Shard(0))}}
        return {"model": weights, "optimizer": {"state": states, "param_groups": [{"lr": 0.1, "params": ["a", "b"]}]}}

    source = write(tmp_path / "in", (2,), state, name="rank_{}.pt")
    converted(source, tmp_path / "out", "--optimizer", tmp_path / "states.safetensors")
    assert_same(load_with_aliases(tmp_path / "out"), {"a": WEIGHT, "b": OTHER})
    states = load_with_aliases(tmp_path / "states.safetensors")
    assert_same({name: states[f"{name}.exp_avg"] for name in "ab"}, {"a": -WEIGHT, "b": OTHER})


def test_what_each_rank_keeps_beside_its_model_may_differ(tmp_path: Path) -> None:
    def state(mesh: Any, rank: int) -> dict[str, Any]:
        return {"model_state_dict": sharded(mesh, rank), "rng": {"cpu": torch.full((4,), rank)}}

    converted(write(tmp_path / "in", (2,), state), tmp_path / "out")
    assert_same(load_with_aliases(tmp_path / "out"), EXPECTED)


def test_a_state_dict_that_was_gathered_on_the_first_rank_is_all_there_is(tmp_path: Path) -> None:
    source = write(tmp_path / "in", (2,), lambda mesh, rank: {"model": {} if rank else EXPECTED, "epoch": 3})
    converted(source, tmp_path / "out")
    assert_same(load_with_aliases(tmp_path / "out"), EXPECTED)


# ---------------------------------------------------------------------------------------------------- what is refused


def _lost(source: Path) -> None:
    (source / "model_rank1.pt").unlink()


def _doubled(source: Path) -> None:
    shutil.copy(source / "model_rank0.pt", source / "model_rank1.pt")


def _saved_again(state: Callable[[Any, int], Any], mesh: tuple[int, ...] = (4,)) -> Callable[[Path], object]:
    """Put one rank's file of another save among the others."""

    def spoil(source: Path) -> None:
        other = write(source.parent / "other", mesh, state)
        shutil.copy(other / "model_rank2.pt", source / "model_rank2.pt")

    return spoil


def _states(**changes: Any) -> Callable[[Any, int], dict[str, Any]]:
    return lambda mesh, rank: {**sharded(mesh, rank), **{name: make(mesh) for name, make in changes.items()}}


@every(
    "spoil, named",
    [
        (_lost, ["lacks that of rank 1"]),
        (_doubled, ["model_rank0.pt and model_rank1.pt both belong to rank 0"]),
        (_saved_again(_states(weight=lambda mesh: placed(WEIGHT[:8], mesh, Shard(0)))), ["weight", "[8, 4]", "rank2"]),
        (
            _saved_again(_states(weight=lambda mesh: placed(WEIGHT, mesh, Shard(1)))),
            ["different meshes or placements", "weight"],
        ),
        (_saved_again(_states(weight=lambda mesh: placed(WEIGHT.half(), mesh, Shard(0)))), ["float16", "rank2"]),
        (_saved_again(_states(more=lambda mesh: torch.ones(1))), ["more", "model_rank2.pt has"]),
        (_saved_again(_states(buffer=lambda mesh: torch.ones(3, dtype=torch.int64))), ["buffer", "differ"]),
        (_saved_again(_states(weight=lambda mesh: WEIGHT)), ["weight", "whole", "as a DTensor"]),
        (_saved_again(sharded, (8,)), ["rank"]),
    ],
)
def test_files_that_are_not_of_one_save_are_named(
    spoil: Callable[[Path], object], named: list[str], tmp_path: Path
) -> None:
    source = write(tmp_path / "in", (4,), sharded)
    spoil(source)
    told = refused(source, tmp_path / "out", 4)
    assert all(each in told for each in named), told


def test_a_world_that_the_names_tell_must_be_complete(tmp_path: Path) -> None:
    source = write(tmp_path / "in", (3,), sharded, name="model_world_size_3_rank_{}.pt")
    (source / "model_world_size_3_rank_2.pt").unlink()
    assert "contains files of 2 ranks, but lacks that of rank 2" in refused(source, tmp_path / "out", 4)
    (source / "model_world_size_3_rank_1.pt").unlink()
    assert "contains files of 1 rank, but lacks those of ranks 1, 2" in refused(source, tmp_path / "out", 4)
    assert "lacks" in refused(source / "model_world_size_3_rank_0.pt", tmp_path / "out", 4)


def test_a_lost_last_rank_is_missed_where_the_names_do_not_tell(tmp_path: Path) -> None:
    source = write(tmp_path / "in", (3,), sharded)
    (source / "model_rank2.pt").unlink()
    assert "lacks that of rank 2" in refused(source, tmp_path / "out", 4)


def test_replicas_of_ranks_that_are_not_there_are_not_missed(tmp_path: Path) -> None:
    source = write(tmp_path / "in", (2, 2), lambda mesh, rank: {"weight": placed(WEIGHT, mesh, Replicate(), Shard(0))})
    for rank in (2, 3):
        (source / f"model_rank{rank}.pt").unlink()
    run = converted(source, tmp_path / "out", "--json")
    assert "these ranks are missing: 2, 3. The files of" in run.out
    assert_same(load_with_aliases(tmp_path / "out"), {"weight": WEIGHT})


def test_replicas_that_differ_are_corrupt(tmp_path: Path) -> None:
    def state(mesh: Any, rank: int) -> dict[str, Any]:
        return {"weight": placed(WEIGHT + (rank == 3), mesh, Replicate(), Shard(0))}

    told = refused(write(tmp_path / "in", (2, 2), state), tmp_path / "out", 4)
    assert "'weight' is stored twice" in told
    assert "model_rank3.pt" in told


def test_a_partial_tensor_has_no_value_and_may_be_left_out(tmp_path: Path) -> None:
    def state(mesh: Any, rank: int) -> dict[str, Any]:
        return {**sharded(mesh, rank), "sum": DTensor.from_local(WEIGHT, mesh, [Partial()], run_check=False)}

    source = write(tmp_path / "in", (2,), state)
    assert "'sum'" in refused(source, tmp_path / "out", 5)
    converted(source, tmp_path / "out", "--exclude", "sum")
    assert_same(load_with_aliases(tmp_path / "out"), EXPECTED)


def test_flat_parameters_without_shapes_are_refused_with_advice(tmp_path: Path) -> None:
    source = Path(shutil.copytree(RANKS / "fsdp1_local" / "checkpoint", tmp_path / "in"))
    for path in source.glob("optim*"):
        path.unlink()
    told = refused(source, tmp_path / "out", 5)
    assert "flat parameters" in told
    assert "SHARDED_STATE_DICT" in told


@every("in_one_file", [False, True])
def test_flat_parameters_without_views_are_divided_in_the_optimizer_s_order(in_one_file: bool, tmp_path: Path) -> None:
    """FSDP1 without use_orig_params: the root's flat parameter, and that of a module in it."""
    root, inner = torch.arange(9.0), torch.arange(6.0) + 9
    shapes = {"b": (3,), "a": (2, 3), "up.w": (2, 3)}

    def part(tensor: torch.Tensor, rank: int) -> ShardedTensor:
        half = -(-len(tensor) // 2)
        boxes = [
            ShardMetadata([start], [min(half, len(tensor) - start)], f"rank:{index}/cpu")
            for index, start in enumerate((0, half))
        ]
        local = tensor[rank * half :][:half].clone()
        described = ShardedTensorMetadata(boxes, tensor.shape)
        return ShardedTensor._init_from_local_shards_and_global_metadata([LocalShard(local, boxes[rank])], described)

    def states(order: list[str]) -> dict[str, Any]:
        state = {name: {"exp_avg": torch.zeros(shape)} for name, shape in shapes.items()}
        return {"state": state, "param_groups": [{"params": order}]}

    def model(mesh: Any, rank: int) -> dict[str, Any]:
        return {"_flat_param": part(root, rank), "up._flat_param": part(inner, rank)}

    def save(place: Path, order: list[str]) -> Path:
        if not in_one_file:
            write(place, (2,), lambda mesh, rank: states(order), name="optim_rank{}.pt")
            return write(place, (2,), model)
        return write(place, (2,), lambda mesh, rank: {"model": model(mesh, rank), "optimizer": states(order)})

    converted(save(tmp_path / "in", ["b", "a", "up.w"]), tmp_path / "out")
    expected = {"b": root[:3], "a": root[3:].reshape(2, 3), "up.w": inner.reshape(2, 3)}
    assert_same(load_with_aliases(tmp_path / "out"), expected)
    refused(save(tmp_path / "less", ["a", "up.w"]), tmp_path / "none", 5)


@every("lost", [("up.weight",), ("down.weight",), ("head.weight", "tied.weight")])
def test_a_flat_parameter_of_which_a_model_lacks_more_than_padding_is_not_whole(
    lost: tuple[str, ...], tmp_path: Path
) -> None:
    for rank in range(2):
        with playing(rank, 2):
            state = torch.load(RANKS / "fsdp1_local" / "checkpoint" / f"model_rank{rank}.pt", weights_only=False)
            torch.save(
                {name: each for name, each in state.items() if name not in lost}, tmp_path / f"model_rank{rank}.pt"
            )
        shutil.copy(RANKS / "fsdp1_local" / "checkpoint" / f"optim_rank{rank}.pt", tmp_path)
    assert "flat parameters" in refused(tmp_path, tmp_path / "out", 5)


def test_parts_of_a_flat_parameter_that_do_not_meet_are_corrupt(tmp_path: Path) -> None:
    source = Path(shutil.copytree(RANKS / "fsdp1_local" / "checkpoint", tmp_path / "in"))
    (source / "model_rank1.pt").unlink()
    refused(source, tmp_path / "out", 4)


def test_two_files_of_one_rank_are_not_chosen_between(tmp_path: Path) -> None:
    source = write(tmp_path / "in", (2,), sharded, name="rank_{}.pt")
    shutil.copy(source / "rank_1.pt", source / "rank_01.pt")
    assert "rank_01.pt and rank_1.pt" in refused(source, tmp_path / "out", 4)


def test_several_sets_are_not_chosen_between(tmp_path: Path) -> None:
    source = write(tmp_path / "in", (2,), sharded, name="model_world_size_2_rank_{}.pt")
    write(source, (1,), sharded, name="model_world_size_1_rank_{}.pt")
    assert "several sets" in refused(source, tmp_path / "out", 2)
    converted(source / "model_world_size_1_rank_0.pt", tmp_path / "out")


# ------------------------------------------------------------------------------------------------------ the optimizer


def trained(tmp_path: Path, state: Callable[[Any, int], Any], world: int = 2) -> Path:
    """A model of a frozen weight and two trained ones, and its optimizer's `state`."""
    source = write(
        tmp_path / "in",
        (world,),
        lambda mesh, rank: {
            "frozen": placed(WEIGHT, mesh, Shard(0)),
            "a": placed(OTHER, mesh, Shard(0)),
            "b": placed(OTHER.T.contiguous(), mesh, Shard(0)),
        },
    )
    return write(source, (world,), state, name="optim_rank{}.pt")


def test_states_that_are_local_tensors_have_the_parts_of_their_parameters(tmp_path: Path) -> None:
    source = trained(
        tmp_path,
        lambda mesh, rank: {
            "state": {"a": {"exp_avg": placed(OTHER, mesh, Shard(0)).to_local()}},  # type: ignore[attr-defined]
            "param_groups": [{"lr": 0.1, "params": ["a"]}],
        },
    )
    converted(source, tmp_path / "out", "--optimizer", tmp_path / "states.safetensors")
    assert_same(load_file(tmp_path / "states.safetensors"), {"a.exp_avg": OTHER})


def test_a_single_rank_s_model_has_the_optimizer_beside_it(tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.mkdir()
    torch.save({"a": WEIGHT}, source / "model_rank0.pt")
    torch.save({"state": {"a": {"exp_avg": -WEIGHT}}, "param_groups": [{"params": ["a"]}]}, source / "optim_rank0.pt")
    converted(source, tmp_path / "out", "--optimizer", tmp_path / "states.safetensors")
    assert_same(load_with_aliases(tmp_path / "out"), {"a": WEIGHT})
    assert_same(load_file(tmp_path / "states.safetensors"), {"a.exp_avg": -WEIGHT})


def test_a_state_that_a_rank_lacks_is_of_a_parameter_of_which_it_holds_nothing(tmp_path: Path) -> None:
    """FSDP1's own: the ranks share each parameter in pieces, which may end anywhere."""
    pieces = (WEIGHT.flatten(), torch.ones(0)), (OTHER.flatten()[:3], OTHER.flatten()[3:])

    def state(mesh: Any, rank: int) -> dict[str, Any]:
        held = {name: {"exp_avg": own[rank]} for name, own in zip("ab", pieces, strict=True) if own[rank].numel()}
        return {"state": held, "param_groups": [{"params": ["a", "b"]}]}

    both = {"a": WEIGHT, "b": OTHER}
    source = write(
        tmp_path / "in",
        (2,),
        lambda mesh, rank: {name: placed(each, mesh, Shard(0)) for name, each in both.items()},
    )
    write(source, (2,), state, name="optim_rank{}.pt")
    converted(source, tmp_path / "out", "--optimizer", tmp_path / "states.safetensors")
    assert_same(load_file(tmp_path / "states.safetensors"), {"a.exp_avg": WEIGHT, "b.exp_avg": OTHER})
    for path in source.glob("model*"):
        path.unlink()
    write(source, (3,), lambda mesh, rank: {name: placed(each, mesh, Shard(0)) for name, each in both.items()})
    refused(source, tmp_path / "other", 5, "--optimizer", tmp_path / "other.safetensors")


def test_parts_in_a_flat_parameter_follow_one_another() -> None:
    def own(*starts: int) -> dict[tuple[str, int], Any]:
        return {("f", start): SimpleNamespace(numel=4, shape=(4,)) for start in starts}

    ranks: Any = SimpleNamespace(where="run")
    assert len(flat._consecutive(ranks, ("w",), own(8, 12))) == 2
    with pytest.raises(CorruptError, match="are not contiguous"):
        flat._consecutive(ranks, ("w",), own(8, 16))


def test_flat_parameters_of_fsdp_are_refused_by_every_way_in(tmp_path: Path) -> None:
    """Without the optimizer's states, nothing tells the shapes of what is in them."""
    for rank in range(2):
        shutil.copy(RANKS / "fsdp1_local" / "checkpoint" / f"model_rank{rank}.pt", tmp_path)
    for path in (tmp_path, tmp_path / "model_rank0.pt"):
        ways: list[Callable[[Path], object]] = [
            lambda path: ckptconv.convert(path, tmp_path / "out.safetensors"),
            *(call for calls in of_features("READ_WHOLE") for call in calls),
        ]
        for way in ways:
            with pytest.raises(UnsupportedError, match="LOCAL_STATE_DICT"):
                way(path)


class TestRanks(FormatSuite):
    command, family = "pt2safetensors", "torch"
    weights = "model_rank*"
    state: ClassVar[dict[str, torch.Tensor]] = {
        **{f"layer{number}": torch.full((250, 300), float(number)) for number in (1, 2)},
        "scale": torch.tensor(2.0),
    }

    def write(self, place: Path) -> Path:
        def of_rank(mesh: DeviceMesh, rank: int) -> dict[str, torch.Tensor]:
            layers = {name: placed(each, mesh, Shard(0)) for name, each in self.state.items() if each.dim()}
            return {**layers, "scale": self.state["scale"]}

        return write(place, (3,), of_rank)

    def expected(self, checkpoint: Path) -> Mapping[str, torch.Tensor]:
        return self.state
