"""Steps of torch_checkpointing: what comes out, and what is refused.

`data` was written by torch_checkpointing 0.1.1: FSDP over tensor parallelism on four ranks, and
tensors that tell their own rectangles on two, with what the live model held.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from cells import VERIFY, naming_attacks, verified_here, verifying
from checkpoints import Run, assert_same, ckptconv_here, done, load_with_aliases
from dtensors import placed, playing
from effort import every
from features.torch_checkpointing.step_files import REPLICA, SHARD, dtensor, write_step
from format_suite import FormatSuite
from lone_files import STATE
from optimizer_files import muon_saved
from reading import state_in, states_of
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from ckptconv.formats.detect import open_source
from ckptconv.options.table import OPTIONS, Options

REAL = Path(__file__).parent / "data"
WEIGHT = torch.arange(9 * 4, dtype=torch.float32).reshape(9, 4)
BIAS = torch.arange(3.0)
EXPECTED = {"weight": WEIGHT, "bias": BIAS}
QUIETLY = ("--no-fsync", "--quiet")


def metadata(kind: str = "TorchSerialization", suffix: str = "pt") -> dict[str, Any]:
    """The metadata of a step of two ranks with `EXPECTED`."""
    return {
        "version": "2.0",
        "world_size": 2,
        "metadata": {
            "model": {
                "nested_path_to_metadata": {
                    '["weight"]': [dtensor((9, 4), SHARD)],
                    '["bias"]': [dtensor((3,), REPLICA)],
                },
                "rank_to_layout_info": {
                    rank: {"file_path": f"model_{rank}.{suffix}", "serialization_format": {"type": kind}}
                    for rank in range(2)
                },
            }
        },
    }


def in_safetensors(step: Path) -> Path:
    """A step of two ranks whose model is in safetensors: the rows 0 to 4, and 5 to 8."""
    step.mkdir(parents=True)
    for rank, rows in enumerate(WEIGHT.chunk(2)):
        save_file({"weight": rows.contiguous(), "bias": BIAS}, step / f"model_{rank}.safetensors")
    write(step, metadata("SafetensorsSerialization", "safetensors"))
    return step


def in_torch(step: Path, described: bool = True) -> Path:
    """The same with pickled DTensors."""
    step.mkdir(parents=True)
    for rank in range(2):
        with playing(rank, 2):
            mesh = init_device_mesh("cpu", (2,))
            torch.save({"weight": placed(WEIGHT, mesh, Shard(0)), "bias": BIAS}, step / f"model_{rank}.pt")
    if described:
        write(step, metadata())
    return step


def write(step: Path, tree: Any) -> None:
    (step / "metadata.pkl").write_bytes(pickle.dumps(tree))


def change(step: Path, how: Callable[[dict[str, Any]], object]) -> Path:
    """Change the metadata of a step."""
    tree = pickle.loads((step / "metadata.pkl").read_bytes())
    how(tree)
    write(step, tree)
    return step


def convert(step: Path, output: Path, *options: object) -> Run:
    return ckptconv_here("convert", step, output, *options, *QUIETLY)


# ------------------------------------------------------------------------------------------------- what comes out


@every("case", ["2d-2x2-st", "rect-2-st"])
def test_weights_are_what_the_live_model_held(case: str, tmp_path: Path) -> None:
    assert convert(REAL / case / "step-2", tmp_path / "out", *VERIFY).code == 0
    assert_same(load_with_aliases(tmp_path / "out"), load_file(REAL / case / "expected.safetensors"))


def test_states_are_those_of_the_live_optimizer(tmp_path: Path) -> None:
    step, states = REAL / "2d-2x2-st" / "step-2", tmp_path / "states.safetensors"
    assert convert(step, tmp_path / "out", "--optimizer", states).code == 0
    assert_same(load_with_aliases(states), load_file(REAL / "2d-2x2-st" / "optimizer.safetensors"))


@every("make", [in_safetensors, in_torch, lambda step: in_torch(step, described=False)])
def test_items_of_either_kind_are_joined(make: Callable[[Path], Path], tmp_path: Path) -> None:
    step = make(tmp_path / "run" / "step-7")
    assert convert(step, tmp_path / "out").code == 0
    assert_same(load_with_aliases(tmp_path / "out"), EXPECTED)
    assert "metadata" in open_source(step).facts


def test_version_1_is_the_same_by_path(tmp_path: Path) -> None:
    def flat(tree: dict[str, Any]) -> None:
        own = tree["metadata"].pop("model")
        tree["version"] = "1.0"
        tree["metadata"] = {'["model","' + text[2:]: each for text, each in own["nested_path_to_metadata"].items()}
        files = own["rank_to_layout_info"]
        tree["rank_to_layout_info_mappings"] = {str(rank): {"model": each} for rank, each in files.items()}

    step = change(in_safetensors(tmp_path / "step-1"), flat)
    assert convert(step, tmp_path / "out").code == 0
    assert_same(load_with_aliases(tmp_path / "out"), EXPECTED)


@every("make", [in_torch, in_safetensors])
def test_plain_tensors_of_pipeline_stages_are_taken(make: Callable[[Path], Path], tmp_path: Path) -> None:
    """The library's metadata says of a plain tensor that all ranks have it if rank 0 has, and else nothing."""
    step = make(tmp_path / "step-1")
    if make is in_torch:
        both = [torch.load(step / f"model_{rank}.pt", weights_only=False) for rank in range(2)]
        del both[1]["bias"]
        torch.save({**both[1], "count": torch.tensor(7)}, step / "model_1.pt")
    else:
        save_file({"weight": WEIGHT, "count": torch.tensor(7)}, step / "model_1.safetensors")
        save_file({"bias": BIAS}, step / "model_0.safetensors")
        own = dtensor((9, 4), REPLICA, mesh=(1,))
        own["ranks"] = own["sharding_metadata"]["data"]["mesh_spec"]["mesh_data"] = (1,)
        change(step, lambda tree: tree["metadata"]["model"]["nested_path_to_metadata"].update({'["weight"]': [own]}))
    run = ckptconv_here("convert", step, tmp_path / "out.safetensors", "--no-fsync")
    assert "The whole tensors of other ranks were used: 'model.count'." in run.err
    assert_same(load_file(tmp_path / "out.safetensors"), {**EXPECTED, "count": torch.tensor(7)})


def test_a_local_tensor_that_nothing_describes_is_refused(tmp_path: Path) -> None:
    step = in_safetensors(tmp_path / "step-1")
    save_file({"weight": WEIGHT[5:].clone(), "bias": BIAS, "more": BIAS.clone()}, step / "model_1.safetensors")
    convert(step, tmp_path / "out").refused(4, "model.more", "does not describe.")


def test_one_rank_needs_no_metadata(tmp_path: Path) -> None:
    (tmp_path / "step-1").mkdir()
    save_file(EXPECTED, tmp_path / "step-1" / "model_0.safetensors")
    (tmp_path / "step-1" / "train.json").write_text('{"step": 1}')
    assert convert(tmp_path / "step-1", tmp_path / "out").code == 0
    assert_same(load_with_aliases(tmp_path / "out"), EXPECTED)


def test_the_last_step_of_a_run_is_taken_and_no_unfinished_one(tmp_path: Path) -> None:
    for name in ("step-9", "step-10", "tmp_step-11"):
        in_safetensors(tmp_path / "run" / name)
    run = ckptconv_here("convert", tmp_path / "run", tmp_path / "out", "--no-fsync")
    assert run.code == 0
    assert "Took step-10" in run.out + run.err


def test_every_item_is_under_its_key(tmp_path: Path) -> None:
    step = in_torch(tmp_path / "step-1")
    for rank in range(2):
        (step / f"train_{rank}.json").write_text(json.dumps({"step": 3, "rank": rank}))
        (step / f"state_{rank}.bin").write_bytes(b"\x00raw")
    (step / "config.json").write_text('{"dim": 4}')
    run = ckptconv_here("convert", step, tmp_path / "out", "--key", ".", "--no-fsync")
    assert run.code == 0
    assert "differ between the ranks" in run.err + run.out
    tree = state_in(tmp_path / "out")
    assert tree["train"] == {"step": 3, "rank": 0}
    assert tree["state"] == b"\x00raw"
    assert tree["config"] == {"dim": 4}
    assert torch.equal(tree["model"]["weight"], WEIGHT)


def test_states_named_in_their_groups_are_known(tmp_path: Path) -> None:
    step = in_torch(tmp_path / "step-1", described=False)
    for rank in range(2):
        with playing(rank, 2):
            mesh = init_device_mesh("cpu", (2,))
            state = {"weight": {"exp_avg": placed(-WEIGHT, mesh, Shard(0))}, "bias": {"exp_avg": -BIAS}}
            groups = [{"param_names": ["weight", "bias"], "lr": 0.1}]
            tree = {"state": state, "param_groups": groups, "_optimizer_state_format_version": 1}
            torch.save(tree, step / f"optimizer_{rank}.pt")
    states = tmp_path / "states.safetensors"
    assert convert(step, tmp_path / "out", "--optimizer", states).code == 0
    assert_same(load_with_aliases(states), {"weight.exp_avg": -WEIGHT, "bias.exp_avg": -BIAS})
    (group,) = state_in(states)["param_groups"]
    assert group["params"] == ["weight", "bias"]


def test_a_final_export_is_read_once(tmp_path: Path) -> None:
    in_safetensors(tmp_path / "export" / "sharded")
    save_file({"weight": WEIGHT, "bias": BIAS}, tmp_path / "export" / "model-00001-of-00001.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(EXPECTED, "model-00001-of-00001.safetensors")}
    (tmp_path / "export" / "model.safetensors.index.json").write_text(json.dumps(index))
    source = open_source(tmp_path / "export")
    assert source.family == "safetensors"
    assert {*source.inputs} == {"model-00001-of-00001.safetensors", "model.safetensors.index.json"}


def manifest(step: Path) -> Path:
    files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(step.iterdir())}
    told = {"version": 1, "granularity": "file", "algorithm": "sha256", "files": files}
    (step / "_integrity_manifest.json").write_text(json.dumps(told))
    return step


def test_files_are_those_of_the_manifest(tmp_path: Path) -> None:
    step = manifest(in_safetensors(tmp_path / "step-1"))
    assert convert(step, tmp_path / "out").code == 0
    file = step / "model_1.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    convert(step, tmp_path / "other").refused(4, "model_1.safetensors", "SHA-256")
    assert not (tmp_path / "other").exists()
    file.unlink()
    convert(step, tmp_path / "other").refused(4, "cannot be found (1 of 3): 'model_1.safetensors'.")


# ------------------------------------------------------------------------------------------------- what is refused


def groups(tree: Mapping[str, Any], name: str = "weight") -> Any:
    return tree["metadata"]["model"]["nested_path_to_metadata"][f'["{name}"]']


def data(tree: Mapping[str, Any], name: str = "weight") -> Any:
    return groups(tree, name)[0]["sharding_metadata"]["data"]


def files(tree: Mapping[str, Any]) -> Any:
    return tree["metadata"]["model"]["rank_to_layout_info"]


@every(
    "how, code, words",
    [
        (lambda tree: tree.update(version="3.0"), 5, "version"),
        (lambda tree: tree.update(world_size=1 << 40), 4, "world_size"),
        (lambda tree: tree.update(world_size=3), 4, "3 ranks"),
        (lambda tree: files(tree)[1].update(file_path="../model_1.safetensors"), 3, "a place outside"),
        (lambda tree: files(tree)[1].update(file_path="/etc/passwd"), 3, "absolute"),
        (lambda tree: files(tree)[1].update(file_path="model_0.safetensors"), 4, "both in model_0"),
        (lambda tree: files(tree)[1].update(file_path="model_7.safetensors"), 4, "rank 1"),
        (lambda tree: files(tree)[1]["serialization_format"].update(type="Arrow"), 5, "Arrow"),
        (lambda tree: groups(tree).append(groups(tree)[0]), 4, "twice"),
        (lambda tree: groups(tree)[0].update(ranks=(0, 9)), 4, "ranks"),
        (lambda tree: groups(tree)[0]["sharding_metadata"].update(type="Other"), 5, "Other"),
        (lambda tree: data(tree).update(global_shape=[10, 4]), 4, "but the placements"),
        (lambda tree: data(tree).update(global_shape=[-1, 4]), 4, "shape"),
        (lambda tree: data(tree).update(dtype="torch.float64"), 4, "float64"),
        (lambda tree: data(tree).update(dtype="os.system"), 5, "dtype"),
        (lambda tree: data(tree).update(placements=[{"type": "Shard", "dim": 7}]), 4, "dimension 7"),
        (lambda tree: data(tree).update(placements=[{"type": "Partial"}]), 5, "Partial"),
        (lambda tree: data(tree)["mesh_spec"].update(mesh_data=(0, 0)), 4, "repeated ranks"),
        (lambda tree: data(tree)["mesh_spec"].update(mesh_data=(0, 1, 2)), 4, "mesh"),
        (lambda tree: tree["metadata"]["model"]["nested_path_to_metadata"].pop('["bias"]'), 4, "bias"),
        (lambda tree: tree["metadata"]["model"]["nested_path_to_metadata"].update({'["c"]': groups(tree)}), 4, "lacks"),
        (
            lambda tree: tree["metadata"]["model"]["nested_path_to_metadata"].update({"{": groups(tree)}),
            4,
            "is not a path",
        ),
        (lambda tree: tree["metadata"].update({"../x": tree["metadata"]["model"]}), 3, "a place outside"),
    ],
)
def test_metadata_that_lies_is_refused(how: Any, code: int, words: str, tmp_path: Path) -> None:
    step = change(in_safetensors(tmp_path / "step-1"), how)
    convert(step, tmp_path / "out").refused(code, words)
    assert not (tmp_path / "out").exists()


@every(
    "how",
    [
        lambda tree: data(tree).update(placements=[{"type": "Shard", "dim": 1}]),
        lambda tree: data(tree).update(placements=[REPLICA]),
        lambda tree: data(tree).update(global_shape=[8, 4]),
        lambda tree: data(tree)["mesh_spec"].update(mesh_data=(1, 0)),
    ],
)
def test_metadata_and_a_pickled_dtensor_must_agree(how: Any, tmp_path: Path) -> None:
    step = change(in_torch(tmp_path / "step-1"), how)
    convert(step, tmp_path / "out").refused(4, "model_0.pt", "weight", "metadata.pkl")


@naming_attacks
def test_a_pickle_that_runs_code_is_an_attack(tmp_path: Path) -> None:
    step = in_safetensors(tmp_path / "step-1")

    class Attack:
        def __reduce__(self) -> Any:
            return eval, ("print('ran')",)

    change(step, lambda tree: tree["metadata"].update(other=Attack()))
    convert(step, tmp_path / "out").refused(3, "metadata.pkl")


@every("size", [0, 10, 400])
def test_metadata_that_is_cut_is_corrupt(size: int, tmp_path: Path) -> None:
    step = in_safetensors(tmp_path / "step-1")
    (step / "metadata.pkl").write_bytes((step / "metadata.pkl").read_bytes()[:size])
    convert(step, tmp_path / "out").refused(4, "metadata.pkl")


def test_missing_ranks_are_named(tmp_path: Path) -> None:
    for make in (in_safetensors, in_torch):
        step = make(tmp_path / make.__name__ / "step-1")
        next(step.glob("model_1.*")).unlink()
        convert(step, tmp_path / "out").refused(4, "rank 1")


def test_a_file_of_another_save_is_refused(tmp_path: Path) -> None:
    step = in_safetensors(tmp_path / "step-1")
    shutil.copy(step / "model_0.safetensors", step / "optimizer_2.safetensors")
    convert(step, tmp_path / "out").refused(4, "optimizer_2.safetensors", "2 ranks")


def test_copies_that_differ_are_refused(tmp_path: Path) -> None:
    step = in_safetensors(tmp_path / "step-1")
    save_file({"weight": WEIGHT[5:].contiguous(), "bias": BIAS + 1}, step / "model_1.safetensors")
    convert(step, tmp_path / "out").refused(4, "bias", "differ")


def test_an_unfinished_step_is_refused(tmp_path: Path) -> None:
    step = in_safetensors(tmp_path / "tmp_step-1")
    convert(step, tmp_path / "out").refused(4, "not finished")


def test_local_tensors_without_metadata_are_refused(tmp_path: Path) -> None:
    step = in_safetensors(tmp_path / "step-1")
    (step / "metadata.pkl").unlink()
    convert(step, tmp_path / "out").refused(5, "metadata.pkl")


def test_an_order_of_cuts_that_is_not_told_is_not_guessed(tmp_path: Path) -> None:
    step = tmp_path / "step-2"
    shutil.copytree(REAL / "2d-2x2-st" / "step-2", step)

    def without_strides(tree: dict[str, Any]) -> None:
        for item in tree["metadata"].values():
            for own in item["nested_path_to_metadata"].values():
                for placement in own[0]["sharding_metadata"]["data"]["placements"]:
                    if placement.pop("split_factor", 0):
                        placement["type"] = "Shard"

    change(step, without_strides)
    convert(step, tmp_path / "out").refused(5, "0.1.0", "order")


@every("offset", [0, 5])
def test_rectangles_that_overlap_or_leave_a_hole_are_refused(offset: int, tmp_path: Path) -> None:
    def boxes(tree: dict[str, Any]) -> None:
        own = groups(tree)
        own.clear()
        for rank, (start, rows) in enumerate(((0, 5), (offset or 4, 4))):
            told = {
                "global_shape": [9, 4] if not offset else [10, 4],
                "global_offsets": [[start, 0]],
                "local_offsets": [[0, 0]],
                "local_sizes": [[rows, 4]],
                "dtype": "torch.float32",
            }
            own.append({"sharding_metadata": {"type": "default_tensor_v1", "data": told}, "ranks": (rank,)})

    step = change(in_safetensors(tmp_path / "step-1"), boxes)
    convert(step, tmp_path / "out").refused(4, "weight")


# ------------------------------------------------------------------------------------------------- and back


@every("ranks", [1, 2, 4])
def test_a_step_that_was_written_reads_back(ranks: int, tmp_path: Path) -> None:
    real = REAL / "2d-2x2-st" / "step-2"
    options = ("--to", "torch-checkpointing", "--states", real, "--no-fsync")
    step, states = tmp_path / "step-2", tmp_path / "states.safetensors"
    done(ckptconv_here("safetensors2dcp", real, step, *options, "--chunks", ranks, *VERIFY))
    verified_here(real, step, "--states", real)
    assert convert(step, tmp_path / "out", "--optimizer", states).code == 0
    assert_same(load_with_aliases(tmp_path / "out"), load_file(REAL / "2d-2x2-st" / "expected.safetensors"))
    assert_same(load_with_aliases(states), load_file(REAL / "2d-2x2-st" / "optimizer.safetensors"))
    assert {path.name for path in step.iterdir() if path.suffix == ".safetensors"} == {
        f"model_{rank}.safetensors" for rank in range(ranks)
    }


@verifying
def test_verify_finds_a_changed_step(tmp_path: Path) -> None:
    save_file(EXPECTED, tmp_path / "model.safetensors")
    step = tmp_path / "step-1"
    options = ("--to", "torch-checkpointing", "--chunks", 2)
    assert ckptconv_here("safetensors2dcp", tmp_path / "model.safetensors", step, *options, *QUIETLY).code == 0
    file = step / "model_1.safetensors"
    changed = bytearray(file.read_bytes())
    changed[-1] ^= 1
    file.write_bytes(changed)
    ckptconv_here("verify", tmp_path / "model.safetensors", step).refused(1)


def test_a_replica_is_on_the_first_rank_alone(tmp_path: Path) -> None:
    save_file({**EXPECTED, "scale": torch.tensor(2.0)}, tmp_path / "model.safetensors")
    step = tmp_path / "step-1"
    options = ("--to", "torch-checkpointing", "--chunks", 2)
    assert ckptconv_here("safetensors2dcp", tmp_path / "model.safetensors", step, *options, *QUIETLY).code == 0
    assert [set(load_file(step / f"model_{rank}.safetensors")) for rank in range(2)] == [
        {"bias", "scale", "weight"},
        {"bias", "weight"},
    ]
    told = pickle.loads((step / "metadata.pkl").read_bytes())["metadata"]["model"]["nested_path_to_metadata"]
    assert told['["scale"]'][0]["ranks"] == (0,)
    assert told['["scale"]'][0]["sharding_metadata"]["data"]["placements"] == [REPLICA]


def test_what_a_step_has_no_place_for_is_refused(tmp_path: Path) -> None:
    save_file(EXPECTED, tmp_path / "model.safetensors")
    to = ("--to", "torch-checkpointing")
    for options, words in (
        (("--max-shard-size", "1MB"), "--chunks"),
        *([(("--like", tmp_path), "--like")] if "like" in OPTIONS else []),
        (("--model-key", "../x"), "file"),
    ):
        run = ckptconv_here("safetensors2dcp", tmp_path / "model.safetensors", tmp_path / "step-1", *to, *options)
        run.refused(2, words)


def test_replicated_dtensors_are_taken_once(tmp_path: Path) -> None:
    step = tmp_path / "step-1"
    step.mkdir()
    for rank in range(4):
        with playing(rank, 4):
            mesh = init_device_mesh("cpu", (2, 2))
            torch.save({"weight": placed(WEIGHT, mesh, Replicate(), Shard(0))}, step / f"model_{rank}.pt")
    assert convert(step, tmp_path / "out").code == 0
    assert_same(load_with_aliases(tmp_path / "out"), {"weight": WEIGHT})


def test_two_optimizers_go_on_in_a_step(tmp_path: Path) -> None:
    expected = muon_saved(tmp_path / "t.pt")
    states = tmp_path / "states"
    done(ckptconv_here("convert", tmp_path / "t.pt", tmp_path / "model", "--key", "model", "--optimizer", states))
    step = ["--to", "torch-checkpointing", "--chunks", 2, "--states", states, *VERIFY]
    done(ckptconv_here("safetensors2dcp", tmp_path / "model", tmp_path / "step", *step))
    assert_same(states_of(tmp_path / "step"), expected)


def test_the_metadata_of_a_step_says_how_many_ranks_there_are(tmp_path: Path) -> None:
    save_file(STATE, tmp_path / "model_0.safetensors")
    for told, code in (({"world_size": 1}, 0), ({"world_size": 2}, 5), ([], 5)):
        (tmp_path / "metadata.pkl").write_bytes(pickle.dumps(told))
        run = ckptconv_here("convert", tmp_path / "model_0.safetensors", tmp_path / "o.safetensors", *QUIETLY)
        assert run.code == code, run.err


class TestStep(FormatSuite):
    command, family = "pt2safetensors", "torch"
    weights = "model_*"
    state: ClassVar[dict[str, torch.Tensor]] = {
        **{f"layer{number}": torch.full((250, 300), float(number)) for number in (1, 2)},
        "scale": torch.tensor(2.0),
    }

    def write(self, place: Path) -> Path:
        return write_step(place / "step-1", self.state, 3)

    def expected(self, checkpoint: Path) -> Mapping[str, torch.Tensor]:
        return self.state


def test_its_name_may_be_written_as_that_of_the_package() -> None:
    assert Options(to="torch_checkpointing") == Options(to="torch-checkpointing")
