"""Steps of nanotron, as its `save_weights` lays them out (nanotron's serialize/weights.py)."""

from __future__ import annotations

from pathlib import Path

import torch
from cells import VERIFY
from checkpoints import ckptconv_here, done
from effort import every
from safetensors.torch import load_file, save_file

from ckptconv.formats.detect import open_source

EMBEDDING = torch.arange(48.0).reshape(8, 6)
QKV = torch.arange(72.0).reshape(12, 6)
DOWN = torch.arange(24.0).reshape(6, 4)
NORM = torch.arange(6.0)
NAMES = {
    "model.token_position_embeddings.pp_block.token_embedding.weight": EMBEDDING,
    "model.decoder.0.pp_block.attn.qkv_proj.weight": QKV,
    "model.decoder.0.pp_block.mlp.down_proj.weight": DOWN,
    "model.decoder.0.pp_block.input_layernorm.weight": NORM,
}


def saved(step: Path, name: str, tensor: torch.Tensor, rank: int = 0, slices: str = "", whole: str = "") -> Path:
    """Write a file of a parameter; with `slices`, the part of a rank of two."""
    *modules, own = name.split(".")
    place = step / "model" / Path(*modules)
    place.mkdir(parents=True, exist_ok=True)
    rest = f"_pp-rank-0-of-1_tp-rank-{rank}-of-2" if slices else ""
    told = {"version": "1.5", "local_global_slices_pairs": slices, "unsharded_shape": whole} if slices else {}
    path = place / f"model_{own}{rest}.safetensors"
    save_file({"data": tensor.contiguous()}, path, metadata=told)
    return path


def written(step: Path) -> Path:
    """A step of two tensor-parallel ranks: rows, rows of q, k and v each, columns, and a norm that all have."""
    embedding, qkv, down, norm = NAMES
    for rank in range(2):
        rows = f"None,None,None|None,None,None#{4 * rank},{4 * rank + 4},None|None,None,None"
        saved(step, embedding, EMBEDDING[4 * rank :][:4], rank, rows, "(8, 6)")
        thirds = [QKV[4 * at + 2 * rank :][:2] for at in range(3)]
        pairs = [f"{2 * at},{2 * at + 2},None#{4 * at + 2 * rank},{4 * at + 2 * rank + 2},None" for at in range(3)]
        saved(step, qkv, torch.cat(thirds), rank, ";".join(pairs), "(12, np.int64(6))")
        columns = f"None,None,None|0,2,None#None,None,None|{2 * rank},{2 * rank + 2},None"
        saved(step, down, DOWN[:, 2 * rank :][:, :2], rank, columns, "(6, 4)")
    saved(step, norm, NORM)
    (step / "model_config.json").write_text("{}")
    (step / "checkpoint_metadata.json").write_text('{"version": "1.5", "tp": 2, "dp": 1}')
    return step


def test_parts_are_joined_as_their_slices_say(tmp_path: Path) -> None:
    step = written(tmp_path / "10")
    done(ckptconv_here("convert", step, tmp_path / "out.safetensors", *VERIFY))
    found = load_file(tmp_path / "out.safetensors")
    assert found.keys() == NAMES.keys()
    for name, tensor in NAMES.items():
        assert torch.equal(found[name], tensor), name
    assert "nanotron" in open_source(step).format


def test_a_file_of_a_step_is_one_of_many(tmp_path: Path) -> None:
    step = written(tmp_path / "10")
    for path in step.rglob("*.safetensors"):
        run = ckptconv_here("convert", path, tmp_path / "out.safetensors")
        run.refused(5, "is one parameter of a nanotron step,", "model_config.json")
    assert ckptconv_here("convert", path, tmp_path / "out.safetensors", "--alone").code == 0


@every(
    "damage, words",
    [
        ("missing", "lacks parts of"),
        ("beyond", "are not valid slices"),
        ("shape", "unsharded_shape is"),
        ("overlap", "overlap"),
        ("other", "but the data of one parameter was expected"),
        ("experts", "expert-parallel ranks,"),
    ],
)
def test_what_does_not_fit_is_refused(damage: str, words: str, tmp_path: Path) -> None:
    step = written(tmp_path / "10")
    name = next(iter(NAMES))
    slices = "None,None,None|None,None,None#4,8,None|None,None,None"
    if damage == "missing":
        next(step.rglob("model_weight_pp-rank-0-of-1_tp-rank-1-of-2.safetensors")).unlink()
    elif damage == "beyond":
        saved(step, name, EMBEDDING[:4], 1, slices.replace("4,8", "6,10"), "(8, 6)")
    elif damage == "shape":
        saved(step, name, EMBEDDING[:4], 1, slices, "(8,)")
    elif damage == "overlap":
        saved(step, name, EMBEDDING[:4], 1, slices.replace("4,8", "0,4"), "(8, 6)")
    elif damage == "other":
        save_file({"weight": NORM}, saved(step, name, EMBEDDING[:4], 1, slices, "(8, 6)"))
    else:
        path = saved(step, name, EMBEDDING[:4], 1, slices, "(8, 6)")
        path.rename(path.with_name("model_weight_pp-rank-0-of-1_tp-rank-1-of-2_exp-rank-0-of-2.safetensors"))
    run = ckptconv_here("convert", step, tmp_path / "out.safetensors")
    assert run.code in (4, 5), run.err
    assert words in run.err, run.err
    assert "Traceback" not in run.err
