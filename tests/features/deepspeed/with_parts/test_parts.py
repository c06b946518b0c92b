"""All outputs of a checkpoint of DeepSpeed are made in parts."""

from __future__ import annotations

from pathlib import Path

from checkpoints import ZERO, ckptconv_here, contents, done

from ckptconv.outputs.kinds import FURTHER

Z3 = ZERO / "z3_bf16_w2/checkpoint"


def test_all_outputs_in_parts(tmp_path: Path) -> None:
    for place, options in (("one", [[]]), ("many", [["--part", f"{n}/3"] for n in range(3)])):
        (tmp_path / place).mkdir()
        at = tmp_path / place
        outputs = {name: at / ("states.safetensors" if name == "optimizer" else name) for name in FURTHER}
        for option in options:
            done(
                ckptconv_here(
                    "zero-to-fp32", Z3, at / "model", *(f"--{name}={path}" for name, path in outputs.items()),
                    *option,
                )
            )  # fmt: skip
    many = tmp_path / "many"
    assert not [path for path in many.iterdir() if not path.name.startswith(".") and path.name != "model"]
    done(ckptconv_here("finish", many / "model", *outputs.values(), "--checksum"))
    assert contents(many) == contents(tmp_path / "one")


def test_the_ranks_of_a_tensor_parallel_checkpoint_are_finished_together(tmp_path: Path) -> None:
    source = ZERO / "tp_z2_mp2_w4" / "checkpoint"
    done(ckptconv_here("zero-to-fp32", source, tmp_path / "one", "--per-rank"))
    for number in range(2):
        done(ckptconv_here("zero-to-fp32", source, tmp_path / "many", "--per-rank", "--part", f"{number}/2"))
    done(ckptconv_here("finish", tmp_path / "many"))
    assert contents(tmp_path / "many") == contents(tmp_path / "one")
