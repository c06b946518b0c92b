"""Files of model-parallel ranks that say nothing of their parts: Meta's and Megatron-LM's, which a map joins.

The models are those of the tests of maps, cut as the frameworks cut them.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from cells import VERIFY, of_features, verifying
from checkpoints import ckptconv_here, done
from compare import evaluate
from effort import every
from safetensors.numpy import load_file

from ckptconv.errors import CorruptError, UnsupportedError
from ckptconv.features.model_parallel import megatron, meta
from ckptconv.formats.source import Source, Wanted
from ckptconv.options.table import OPTIONS
from ckptconv.storage.location import Location

Arrays = Mapping[str, np.ndarray]
if "map" not in OPTIONS:
    pytest.skip("there are no maps", allow_module_level=True)

(maps,) = of_features("MAPS")
# Along which dimension Megatron-core's ranks share out a tensor, and how many halves each rank has of it.
MEGATRON = (
    (r"word_embeddings|output_layer|linear_qkv\.(weight|bias)|linear_q_up_proj\.w|linear_kv_up_proj\.w", 0, 1),
    (r"linear_fc1\.weight", 0, 2),
    (r"linear_proj|linear_fc2", 1, 1),
)


def case(name: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], dict[str, object]]:
    """Return what a framework had, what became of it, and config.json."""
    place = maps["data"] / name
    return (
        load_file(place / "ours.safetensors"),
        load_file(place / "hf.safetensors"),
        json.loads((place / "config.json").read_text()),
    )


def check(source: Source, name: str, config: Mapping[str, object], expected: Arrays) -> None:
    """Check that a map makes `expected` of what was read."""
    made = maps["apply"](maps["named"](name), source.weights, config=config, target="hf").tensors
    assert made.keys() == expected.keys()
    for each, tensor in made.items():
        np.testing.assert_array_equal(np.frombuffer(evaluate(tensor), "i2").reshape(tensor.shape), expected[each], each)


def save(arrays: Arrays, path: Path, **more: object) -> None:
    """Save a rank's file: a state dict, or with `more` a dict that has it as `model`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
    torch.save({"model": state, **more} if more else state, path)


# ------------------------------------------------------------------------------------------------------- Meta's files


def of_meta(ours: Arrays, place: Path, ranks: int = 2) -> Path:
    for rank in range(ranks):
        own = {name.removeprefix(f"{rank}."): array for name, array in ours.items() if not re.match(r"\d", name)}
        own |= {name[2:]: array for name, array in ours.items() if name.startswith(f"{rank}.")}
        save(own, place / f"consolidated.{rank:02d}.pth")
    return place


@every("name", ["meta-llama3", "meta-llama2"])
def test_files_of_meta_are_joined(name: str, tmp_path: Path) -> None:
    ours, hf, config = case(f"{name}-tp2")
    check(meta.read(Location(str(of_meta(ours, tmp_path))), Wanted(parts=True)), name, config, hf)


def test_norms_of_meta_must_be_equal_in_all_files(tmp_path: Path) -> None:
    ours, _, _ = case("meta-llama3-tp2")
    source = meta.read(Location(str(of_meta(ours, tmp_path))), Wanted(parts=True))
    assert {name for name, one, other in source.equal} == {name for name, array in ours.items() if array.ndim == 1}


def test_a_single_file_of_meta_is_read_as_it_is(tmp_path: Path) -> None:
    ours, hf, config = case("meta-llama")
    check(meta.read(Location(str(of_meta(ours, tmp_path, 1))), Wanted(parts=True)), "meta-llama", config, hf)


def test_files_of_meta_without_a_map_are_refused(tmp_path: Path) -> None:
    ours, _, _ = case("meta-llama3-tp2")
    run = ckptconv_here("convert", of_meta(ours, tmp_path / "llama"), tmp_path / "o.safetensors")
    run.refused(5, "2 files", "--map meta-llama3", "--map meta-llama2")


def test_a_missing_file_of_meta_is_named(tmp_path: Path) -> None:
    ours, _, _ = case("meta-llama3-tp2")
    of_meta(ours, tmp_path)
    (tmp_path / "consolidated.00.pth").unlink()
    with pytest.raises(CorruptError, match=r"lacks consolidated\.00\.pth"):
        meta.read(Location(str(tmp_path)), Wanted(parts=True))


def test_files_of_meta_with_other_tensors_are_refused(tmp_path: Path) -> None:
    ours, _, _ = case("meta-llama3-tp2")
    of_meta({name: array for name, array in ours.items() if name != "1.layers.1.attention.wo.weight"}, tmp_path)
    with pytest.raises(CorruptError, match=r"only one contains 'layers\.1\.attention\.wo\.weight'"):
        meta.read(Location(str(tmp_path)), Wanted(parts=True))


# -------------------------------------------------------------------------------------------------------- Megatron's


def share(name: str, array: np.ndarray, rank: int, ranks: int) -> np.ndarray:
    """Return a tensor-parallel rank's part."""
    for pattern, dim, halves in MEGATRON:
        if re.search(pattern, name) and "norm" not in name:
            parts = [np.split(half, ranks, dim)[rank] for half in np.split(array, halves, dim)]
            return np.concatenate(parts, dim)
    return array


def of_megatron(
    ours: Arrays, run: Path, *, tensor: int = 1, pipeline: int = 1, expert: int = 1, virtual: int = 1, layers: int = 2
) -> Path:
    """Write a run as Megatron-LM does: the layers of a stage, and the experts of a rank, numbered from 0."""
    own = layers // (pipeline * virtual)
    experts = 1 + max((int(match[1]) for name in ours if (match := re.search(r"weight(\d+)$", name))), default=0)
    args = argparse.Namespace(
        tensor_model_parallel_size=tensor, pipeline_model_parallel_size=pipeline, expert_model_parallel_size=expert
    )
    for t, p, e in np.ndindex(tensor, pipeline, expert):
        states: list[dict[str, torch.Tensor]] = []
        for v in range(virtual):
            stage, state = v * pipeline + p, {}
            for name, array in ours.items():
                layer = re.match(r"decoder\.layers\.(\d+)\.", name)
                of_expert = re.search(r"weight(\d+)$", name)
                there = int(layer[1]) // own if layer else 0 if "embedding" in name else pipeline * virtual - 1
                if there != stage or (of_expert and int(of_expert[1]) // (experts // expert) != e):
                    continue
                new = name.replace(f"layers.{layer[1]}.", f"layers.{int(layer[1]) % own}.") if layer else name
                if of_expert:
                    new = re.sub(r"\d+$", str(int(of_expert[1]) % (experts // expert)), new)
                state[new] = torch.from_numpy(share(name, array, t, tensor).copy())
            states.append(state | {"decoder._extra_state": torch.zeros(1)})
        called = f"mp_rank_{t:02d}" + (f"_{p:03d}" if pipeline > 1 else "") + (f"_{e:03d}" if expert > 1 else "")
        place = run / "iter_0000005" / called
        place.mkdir(parents=True)
        held = {"model": states[0]} if virtual == 1 else {f"model{v}": state for v, state in enumerate(states)}
        torch.save({"args": args, "iteration": 5, **held}, place / "model_optim_rng.pt")
    (run / "latest_checkpointed_iteration.txt").write_text("5")
    return run


def read(run: Path) -> Source:
    return megatron.read(Location(str(run)), Wanted(parts=True))


@every(
    "name, ranks",
    [
        ("megatron-llama", {}),
        ("megatron-llama", {"tensor": 2}),
        ("megatron-llama", {"pipeline": 2}),
        ("megatron-llama", {"tensor": 2, "pipeline": 2}),
        ("megatron-llama", {"virtual": 2}),
        ("megatron-qwen2", {"tensor": 2}),
        ("megatron-qwen3", {"tensor": 2}),
        ("megatron-qwen3_moe", {"expert": 3}),
        ("megatron-qwen3_moe", {"pipeline": 2, "expert": 3}),
        ("megatron-mixtral", {"tensor": 2, "expert": 3}),
    ],
)
def test_ranks_of_megatron_are_joined(name: str, ranks: dict[str, int], tmp_path: Path) -> None:
    ours, hf, config = case(name)
    check(read(of_megatron(ours, tmp_path / "run", **ranks)), name, config, hf)


def test_four_layers_in_virtual_stages_follow_one_another(tmp_path: Path) -> None:
    ours = {f"decoder.layers.{layer}.mlp.linear_fc2.weight": np.full((2, 2), layer, "i2") for layer in range(8)}
    source = read(of_megatron(ours, tmp_path / "run", pipeline=2, virtual=2, layers=8))
    first = {name: int(np.frombuffer(evaluate(tensor), "i2")[0]) for name, tensor in source.weights.items()}
    assert first == {f"decoder.layers.{layer}.mlp.linear_fc2.weight": layer for layer in range(8)}


def test_what_all_ranks_of_megatron_have_must_be_equal(tmp_path: Path) -> None:
    ours, _, _ = case("megatron-mixtral")
    source = read(of_megatron(ours, tmp_path / "run", tensor=2))
    told = {name for name, _, _ in source.equal}
    assert "decoder.layers.1.mlp.router.weight" in told
    assert "decoder.layers.0.pre_mlp_layernorm.weight" in told
    assert not [name for name in told if "linear_proj" in name or "experts" in name]
    assert source.facts["TP"] == 2


def damaged(change: Callable[[dict[str, object]], object]) -> Callable[[Path], None]:
    def do(run: Path) -> None:
        file = run / "iter_0000005/mp_rank_01/model_optim_rng.pt"
        state = torch.load(file, weights_only=False)
        change(state["model"])
        torch.save(state, file)

    return do


@every(
    "change, error, words",
    [
        (lambda run: (run / "iter_0000005/mp_rank_00/model_optim_rng.pt").unlink(), CorruptError, "lacks the file"),
        (
            damaged(lambda model: model.pop("output_layer.weight")),
            CorruptError,
            "only one contains 'output_layer.weight'",
        ),
        (
            damaged(lambda model: model.update({"output_layer.weight": torch.zeros(3, 5, dtype=torch.int16)})),
            CorruptError,
            "do not fit together",
        ),
        (
            damaged(lambda model: model.update({"decoder.final_layernorm.weight": torch.zeros(5)})),
            CorruptError,
            "each rank should have the same whole tensor.",
        ),
        (
            damaged(lambda model: [model.clear(), model.update(language_model={"w": torch.ones(2)})]),
            UnsupportedError,
            "without Megatron-core",
        ),
    ],
    ids=["missing", "fewer tensors", "another shape", "another norm", "nested"],
)
def test_ranks_of_megatron_that_do_not_fit_are_refused(
    change: Callable[[Path], None], error: type[Exception], words: str, tmp_path: Path
) -> None:
    ours, _, _ = case("megatron-llama")
    run = of_megatron(ours, tmp_path / "run", tensor=2)
    change(run)
    with pytest.raises(error, match=words):
        read(run)


def test_experts_that_are_shared_out_otherwise_are_refused(tmp_path: Path) -> None:
    ours, _, _ = case("megatron-mixtral")
    run = of_megatron(ours, tmp_path / "run", tensor=2, expert=3)
    for file in run.glob("iter_0000005/*/model_optim_rng.pt"):
        state = torch.load(file, weights_only=False)
        state["args"].expert_tensor_parallel_size = 1
        torch.save(state, file)
    with pytest.raises(UnsupportedError, match="has 2 tensor-parallel ranks, but 1 for experts"):
        read(run)


# ------------------------------------------------------------------------------------------------------- conversions


@every(
    "name, recorded, write",
    [
        ("meta-llama3", "meta-llama3-tp2", of_meta),
        ("megatron-llama", "megatron-llama", lambda ours, place: of_megatron(ours, place, tensor=2, pipeline=2)),
    ],
    ids=["Meta", "Megatron-LM"],
)
def test_ranks_are_converted_and_verified(
    name: str, recorded: str, write: Callable[[Arrays, Path], Path], tmp_path: Path
) -> None:
    ours, hf, config = case(recorded)
    run = write(ours, tmp_path / "run")
    (run / "config.json").write_text(json.dumps(config))
    out = tmp_path / "o.safetensors"
    done = ckptconv_here("convert", run, out, "--map", name, *VERIFY, "--no-fsync")
    assert done.code == 0, done.err
    made = load_file(out)
    assert made.keys() == hf.keys()
    assert all(np.array_equal(made[each], hf[each]) for each in hf)


def test_sizes_are_in_the_file_that_meta_has_beside_its_own(tmp_path: Path) -> None:
    ours, hf, _ = case("meta-llama3-tp2")
    run, out = of_meta(ours, tmp_path / "run"), tmp_path / "o.safetensors"
    (run / "params.json").write_text('{"dim": 24, "n_heads": 6, "n_kv_heads": 2, "norm_eps": 1e-05}')
    done = ckptconv_here("convert", run, out, "--map", "meta-llama3", "--no-fsync")
    assert done.code == 0, done.err
    assert all(np.array_equal(load_file(out)[each], hf[each]) for each in hf)


def test_a_norm_that_differs_between_ranks_is_corrupt(tmp_path: Path) -> None:
    ours, _, config = case("meta-llama3-tp2")
    run = of_meta(ours, tmp_path / "run")
    (run / "config.json").write_text(json.dumps(config))
    state = torch.load(run / "consolidated.01.pth")
    state["norm.weight"][0] += 1
    torch.save(state, run / "consolidated.01.pth")
    done = ckptconv_here("convert", run, tmp_path / "o.safetensors", "--map", "meta-llama3", "--no-fsync")
    done.refused(4, "norm.weight")
    assert not (tmp_path / "o.safetensors").exists()


@verifying
def test_an_output_of_joined_files_is_verified_by_the_map_that_it_records(tmp_path: Path) -> None:
    ours, _, config = case("meta-llama3-tp2")
    ranks = of_meta(ours, tmp_path / "ranks")
    (ranks / "config.json").write_text(json.dumps(config))
    for output in ("out", "one.safetensors"):
        done(ckptconv_here("convert", ranks, tmp_path / output, "--map", "meta-llama3", "--no-fsync"))
    (ranks / "config.json").unlink()  # the record has the sizes
    for output in ("out", "one.safetensors"):
        run = done(ckptconv_here("verify", ranks, tmp_path / output, "--json"))
        assert run.json["bytes_compared"] > 0
    state = torch.load(ranks / "consolidated.01.pth")
    state["layers.0.attention.wo.weight"].view(torch.int16)[0, 0] ^= 1
    torch.save(state, ranks / "consolidated.01.pth")
    ckptconv_here("verify", ranks, tmp_path / "one.safetensors").refused(1, "o_proj.weight", "differs")
