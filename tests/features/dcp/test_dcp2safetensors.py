"""dcp2safetensors on checkpoints that torch.distributed.checkpoint wrote, in releases from 2.3 to 2.15."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dist_checkpoint
from cells import VERIFY, looking, of_features, verified_here
from checkpoints import bits, ckptconv_here, done
from compare import assert_same
from effort import every
from features.dcp.cases import CASES as DIRECTORIES
from features.dcp.cases import checkpoint_of, converted, expected_of, refused
from reading import state_in, state_of
from safetensors.torch import load_file

import ckptconv
from ckptconv.engine.execute import carry_out
from ckptconv.errors import CorruptError
from ckptconv.features.joining.names import MAX_VALUE
from ckptconv.formats.detect import open_source
from ckptconv.plan import Data, FilePlan
from ckptconv.storage.files import Readers
from ckptconv.storage.writing import Writer
from ckptconv.tensors.lazy import LazyTensor

CASES = list(DIRECTORIES)
# Their dtypes are stored under others by safetensors.
EXOTIC = "leaves_nodist"


class _Hashing(Writer):
    positioned = False

    def __init__(self) -> None:
        self.digest = hashlib.sha256()

    def write_at(self, offset: int, data: memoryview) -> None:
        self.digest.update(data)


def sha256(tensor: LazyTensor) -> str:
    writer = _Hashing()
    with Readers() as readers:
        carry_out(FilePlan("", tensor.nbytes, (Data(0, tensor, ""),)), writer, readers, jobs=1, memory=1 << 20)
    return writer.digest.hexdigest()


def described(tensor: torch.Tensor) -> dict[str, Any]:
    data = bits(tensor).numpy().tobytes() if tensor.numel() else b""
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "sha256": hashlib.sha256(data).hexdigest(),
    }


# -------------------------------------------------------------------------------------------- what real writers wrote


@every("case", CASES)
def test_every_tensor_is_what_torch_reads(case: str) -> None:
    tree = open_source(checkpoint_of(case), key=".").tree(".")
    found = {
        ".".join(map(str, path)): {
            "dtype": leaf.dtype.name,
            "shape": list(leaf.shape),
            "sha256": sha256(leaf),
        }
        for path, leaf in leaves_of(tree)
        if isinstance(leaf, LazyTensor)
    }
    assert found == expected_of(case)["tensors"]


def leaves_of(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[tuple[Any, ...], Any]]:
    if isinstance(tree, dict) and tree:
        return [leaf for key, value in tree.items() for leaf in leaves_of(value, (*path, key))]
    if isinstance(tree, list) and any(isinstance(value, (dict, list, LazyTensor)) for value in tree):
        return [leaf for key, value in enumerate(tree) for leaf in leaves_of(value, (*path, key))]
    return [(path, tree)]


@every("case", CASES)
def test_the_model_is_converted_under_its_own_names(case: str, tmp_path: Path) -> None:
    output = tmp_path / "model.safetensors"
    converted(checkpoint_of(case), output, "--checksum")
    expected = expected_of(case)["tensors"]
    model = {name.removeprefix("model."): tensor for name, tensor in expected.items() if name.startswith("model.")}
    beside = ("optim", "train_state.")
    model = model or {name: tensor for name, tensor in expected.items() if not name.startswith(beside)}
    found = load_file(output)
    assert set(found) == set(model)
    for name, tensor in found.items():
        if case != EXOTIC or tensor.dtype in (torch.float32, torch.bfloat16, torch.int64):
            if model[name]["dtype"] in ("complex32", "complex128", "float4_e2m1fn_x2"):
                continue
            assert described(tensor) == model[name], name
    verified_here(checkpoint_of(case), output)


@every("case", [case for case in CASES if (DIRECTORIES[case] / "expected.pt").exists() and case != "noflatten_nodist"])
def test_the_whole_nested_state_comes_back_as_torch_loads_it(case: str, tmp_path: Path) -> None:
    expected = torch.load(DIRECTORIES[case] / "expected.pt", weights_only=False)
    # What holds a tensor was pickled as a whole, and objects of classes that are not known stay inert.
    if case == EXOTIC:
        del expected["nest"]["tuple_t"]
        del expected["leaf"]["bytesio"]
    output = tmp_path / "all"
    converted(checkpoint_of(case), output, "--key", ".")
    tree = state_in(output)
    if case == EXOTIC:
        assert tree["leaf"].pop("bytesio").name == "_io.BytesIO"
    assert_alike(tree, expected)


def assert_alike(got: Any, expected: Any, where: str = "") -> None:
    assert type(got) is type(expected), where
    if isinstance(expected, dict):
        # torch puts what is sharded and what is not in an order of its own.
        assert set(got) == set(expected), where
        for key in expected:
            assert_alike(got[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(got) == len(expected), where
        for index, value in enumerate(expected):
            assert_alike(got[index], value, f"{where}.{index}")
    elif isinstance(expected, torch.Tensor):
        assert described(got) == described(expected), where
    elif type(expected).__module__ == "numpy":
        assert got.dtype == expected.dtype
        assert got.tolist() == expected.tolist()
    else:
        assert got == expected, where


@every("case", CASES)
def test_what_there_is_is_told(case: str) -> None:
    for command in looking():
        told = done(ckptconv_here(command, checkpoint_of(case), "--json")).json
        assert told["format"].endswith("torch.distributed.checkpoint")
        assert told["facts"]["tensors"] == len(expected_of(case)["tensors"])
        assert {row["name"] for row in told["tensors"]}


def test_the_optimizer_is_written_by_parameter(tmp_path: Path) -> None:
    weights, states = tmp_path / "model.safetensors", tmp_path / "optimizer.safetensors"
    converted(checkpoint_of("fsdp2_w2_nested"), weights, "--optimizer", states)
    expected = expected_of("fsdp2_w2_nested")["tensors"]
    found = {f"optim.state.{name}": described(tensor) for name, tensor in load_file(states).items()}
    assert found == {name: tensor for name, tensor in expected.items() if name.startswith("optim.")}
    tree = state_in(states)
    saved = torch.load(DIRECTORIES["fsdp2_w2_nested"] / "expected.pt", weights_only=False)["optim"]
    assert_alike(tree["param_groups"], saved["param_groups"])
    assert_alike(tree["state"], saved["state"])


@every("case", CASES)
def test_what_was_converted_verifies(case: str, tmp_path: Path) -> None:
    # One half of the cases with another choice than the other; and the states of each.
    choices = [[("--key", "."), ("--dtype", "float16")][CASES.index(case) % 2]]
    if any(name.startswith("optim") for name in expected_of(case)["tensors"]):
        choices.append(("--optimizer", str(tmp_path / "states")))
    for options in choices:
        output = [] if "--optimizer" in options else [tmp_path / "model"]
        converted(checkpoint_of(case), *output, *options)
        verified_here(checkpoint_of(case), *output, *options)


@pytest.mark.skipif(not VERIFY, reason="without verify")
def test_a_damaged_output_does_not_mean_that_the_source_has_changed(tmp_path: Path) -> None:
    """The checksums of the source that a manifest records are those of the parts that its output has."""
    source = tmp_path / "source"
    shutil.copytree(checkpoint_of("fsdp2_w2_nested"), source)
    weights, states = tmp_path / "weights", tmp_path / "states"
    converted(source, weights, "--optimizer", states)
    for output in (weights, states):
        file = output / "model.safetensors"
        whole = file.read_bytes()
        file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        for words in ((output,), (weights, "--states", states)):
            said = ckptconv_here("verify", source, *words).refused(1, "differs at index")
            assert "another version" not in said
        file.write_bytes(whole)
    # An option that reads other parts of the source does not mean it either.
    assert "another version" not in ckptconv_here("verify", source, weights, "--key", "optim").refused(1)
    for file in source.glob("*.distcp"):
        file.write_bytes(file.read_bytes() + b"x")
    for output in (weights, states):
        file = output / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-1] + bytes([file.read_bytes()[-1] ^ 1]))
        ckptconv_here("verify", source, output).refused(1, "records another version of __0_0.distcp, __1_0.distcp")


def test_an_optimizer_that_numbers_its_parameters_keeps_the_numbers(tmp_path: Path) -> None:
    converted(checkpoint_of("ddp_w2"), "--optimizer", tmp_path / "optimizer.safetensors")
    found = load_file(tmp_path / "optimizer.safetensors")
    assert set(found) == {f"{number}.momentum_buffer" for number in range(8)}


def test_renaming_a_weight_renames_its_states(tmp_path: Path) -> None:
    options = ("--include", "l1.*", "--rename", "^l1=first")
    converted(checkpoint_of("fsdp2_w2_nested"), "--optimizer", tmp_path / "optimizer.safetensors", *options)
    names = {name.rsplit(".", 1)[0] for name in load_file(tmp_path / "optimizer.safetensors")}
    assert names == {"first.weight", "first.bias"}


def test_a_key_takes_any_part(tmp_path: Path) -> None:
    output = tmp_path / "part.safetensors"
    converted(checkpoint_of("fsdp2_w2_nested"), output, "--key", "optim.state.l1.weight")
    assert set(load_file(output)) == {"step", "exp_avg", "exp_avg_sq"}
    error = refused(checkpoint_of("fsdp2_w2_nested"), tmp_path / "no.safetensors", 2, "--key", "optim.stat")
    assert "'state'" in error


def test_what_is_left_out_is_said(tmp_path: Path) -> None:
    run = converted(checkpoint_of("ddp_w2"), tmp_path / "model.safetensors")
    assert "'optimizer' (8 tensors, 10 values)" in run.out
    assert "'epoch' (1 value)" in run.out
    run = converted(checkpoint_of("torch2.3.1_dtensor_w2"), tmp_path / "model.safetensors")
    assert "'buf' (1 tensor), 'rep' (1 tensor)" in run.err


def test_weights_of_a_file_that_is_cut_short_behind_them_are_converted_with_a_warning(tmp_path: Path) -> None:
    state = {"model": {"weight": torch.ones(50, 50)}, "optimizer": {"exp_avg": torch.ones(50, 50)}}
    place, output = tmp_path / "step", tmp_path / "out.safetensors"
    dist_checkpoint.save(state, checkpoint_id=place)
    (file,) = place.glob("*.distcp")
    whole = done(ckptconv_here("convert", place, output))
    assert "cut short" not in whole.err
    with file.open("r+b") as cut:
        cut.truncate(file.stat().st_size - 1000)
    found = done(ckptconv_here("convert", place, output, "--overwrite"))
    assert torch.equal(load_file(output)["weight"], state["model"]["weight"])
    assert f"{file} lacks bytes of entries that were not converted" in found.err
    assert "--last-good" not in found.err  # it was named itself
    with file.open("r+b") as cut:
        cut.truncate(1000)
    ckptconv_here("convert", place, output, "--overwrite").refused(4, "the file was cut short")


def test_tensors_inside_a_value_are_warned_of_and_can_be_named(tmp_path: Path) -> None:
    output = tmp_path / "model.safetensors"
    run = converted(checkpoint_of("noflatten_nodist"), output)
    assert "'nested'" in run.err
    assert set(load_file(output)) == {"w"}
    converted(checkpoint_of("noflatten_nodist"), output, "--key", "nested")
    assert load_file(output)["a"].tolist() == [1.0, 1.0]


def test_a_model_pickled_as_one_value_is_refused_and_its_key_converts_it_whatever_its_size(tmp_path: Path) -> None:
    source, output = tmp_path / "in", tmp_path / "model.safetensors"
    weight = torch.arange((MAX_VALUE >> 2) + 1, dtype=torch.float32)
    state = {"model": {"inner.weight": weight, "count": torch.tensor(3)}, "step": 5}
    planner = dist_checkpoint.DefaultSavePlanner(flatten_state_dict=False)
    dist_checkpoint.save(state, checkpoint_id=source, planner=planner, no_dist=True)
    assert "--key model" in refused(source, output, 5)
    assert "--key model" in refused(source, output, 5, "--key", ".")
    converted(source, output, "--key", "model", *VERIFY)
    found = load_file(output)
    assert set(found) == {"inner.weight", "count"}
    assert torch.equal(found["inner.weight"], weight)


# --------------------------------------------------------------------------------------------- how they are named


def test_the_metadata_stands_for_its_directory(tmp_path: Path) -> None:
    converted(checkpoint_of("fsdp2_w2_nested") / ".metadata", tmp_path / "one.safetensors")
    converted(checkpoint_of("fsdp2_w2_nested"), tmp_path / "other.safetensors")
    assert (tmp_path / "one.safetensors").read_bytes() == (tmp_path / "other.safetensors").read_bytes()


@every("options", [(), ("--overwrite",), ("--dry-run",)])
@every("name", [".", ".metadata"])
def test_a_checkpoint_is_not_converted_into_its_own_directory(
    name: str, options: tuple[str, ...], tmp_path: Path
) -> None:
    step = shutil.copytree(checkpoint_of("fsdp2_w2_nested"), tmp_path / "step-8")
    before = {path.name: path.read_bytes() for path in step.iterdir()}
    ckptconv_here("convert", step / name, step, *options).refused(2, f"{step} contains .metadata", "does not exist yet")
    assert {path.name: path.read_bytes() for path in step.iterdir()} == before


@every("command", ["dcp2safetensors", "pt2safetensors", *looking()])
def test_a_single_file_of_it_is_explained(command: str, tmp_path: Path) -> None:
    outputs = () if command in looking() else (tmp_path / "out.safetensors",)
    run = ckptconv_here(command, checkpoint_of("fsdp2_w2_nested") / "__0_0.distcp", *outputs)
    assert run.code == 2
    assert "dcp2safetensors" in run.err or "Give the directory" in run.err


@every("command", sorted({"pt2safetensors"}.union(*of_features("FORMATS")) - {"dcp2safetensors"}))
@every("name", [".", ".metadata"])
def test_other_commands_name_the_right_one(command: str, name: str, tmp_path: Path) -> None:
    checkpoint = checkpoint_of("fsdp2_w2_nested")
    output = tmp_path / ("out.pt" if command == "safetensors2pt" else "out.safetensors")
    run = ckptconv_here(command, checkpoint / name, output)
    assert run.code == 2
    assert "is a checkpoint of torch.distributed.checkpoint" in run.err
    assert f"Use: ckptconv dcp2safetensors {checkpoint} OUTPUT" in run.err
    assert not output.exists()


def test_the_metadata_alone_lacks_its_files(tmp_path: Path) -> None:
    """Without a command that wants another family, it stands for its directory: what is missing there is named."""
    shutil.copy(checkpoint_of("fsdp2_w2_nested") / ".metadata", tmp_path)
    for command in looking():
        ckptconv_here(command, tmp_path / ".metadata").refused(4, "lacks 2 of the 2 files with its tensors: '__")
    with pytest.raises(CorruptError, match="lacks 2 of the 2 files with its tensors: '__"):
        open_source(tmp_path / ".metadata")


def test_the_metadata_is_loaded_with_all_that_it_describes() -> None:
    one, other = (state_of(checkpoint_of("fsdp2_w2_nested") / name) for name in (".metadata", "."))
    assert_same(one, other)


def test_of_several_models_that_is_taken_that_is_taken_of_a_file_of_torch(tmp_path: Path) -> None:
    state = {key: {key: torch.ones(2)} for key in ("module", "model", "model_state_dict", "state_dict")}
    while state:
        torch.save(state, tmp_path / "x.pt")
        dist_checkpoint.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
        found = []
        for name in ("x.pt", "dcp"):
            ckptconv.convert(tmp_path / name, tmp_path / "out.safetensors", for_hub=True, fsync=False)
            found.append(list(load_file(tmp_path / "out.safetensors")))
        assert found == [[list(state)[-1]]] * 2
        state.popitem()
        shutil.rmtree(tmp_path / "dcp")
