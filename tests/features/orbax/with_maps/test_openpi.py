"""Steps of openpi with the map to the names of Hugging Face."""

from __future__ import annotations

from pathlib import Path

from checkpoints import assert_same, ckptconv_here, done
from effort import every
from features.orbax import writer
from safetensors.torch import load_file


@every("suffix", ["", ".value"])
def test_a_step_of_openpi_gets_the_names_of_hugging_face(suffix: str, tmp_path: Path) -> None:
    case = Path(__file__).parents[2] / "maps" / "data" / "openpi-pi0"
    arrays = {name: array.numpy() for name, array in load_file(case / "ours.safetensors").items()}
    place = tmp_path / "step"
    values: dict[str, bytes] = {}
    for name, array in arrays.items():
        values |= writer.chunked(f"params.{name}{suffix}", array, array.shape)
    writer.database(place / "params", values)
    tree = (writer.entry("params", *f"{name}{suffix}".split(".")) for name in arrays)
    (place / "params" / "_METADATA").write_text(writer.metadata(*tree))
    out = tmp_path / "out.safetensors"
    for source in (place, place / "params"):
        done(ckptconv_here("convert", source, out, "--map", "openpi-pi0", "--verify"))
        assert_same(load_file(out), load_file(case / "hf.safetensors"))
