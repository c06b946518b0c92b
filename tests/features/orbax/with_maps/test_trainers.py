"""Steps of openpi and MaxText with the maps to the names of Hugging Face."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from cells import VERIFY, verified_here
from checkpoints import assert_same, ckptconv_here, done
from effort import every
from features.ocdbt.writer import database
from features.orbax import writer
from features.zarr.writer import chunked
from safetensors.torch import load_file

CASES = Path(__file__).parents[2] / "maps" / "data"


def step(place: Path, arrays: Mapping[str, Any], keys: Iterable[str], suffix: str = "") -> Path:
    """A step whose item `params` has arrays below these keys."""
    values: dict[str, bytes] = {}
    for name, array in arrays.items():
        values |= chunked(".".join([*keys, f"{name}{suffix}"]), array, array.shape)
    database(place / "params", values)
    tree = (writer.entry(*keys, *f"{name}{suffix}".split(".")) for name in arrays)
    (place / "params" / "_METADATA").write_text(writer.metadata(*tree))
    return place


def arrays_of(case: str) -> dict[str, Any]:
    return {name: array.numpy() for name, array in load_file(CASES / case / "ours.safetensors").items()}


@every("suffix", ["", ".value"])
def test_a_step_of_openpi_gets_the_names_of_hugging_face(suffix: str, tmp_path: Path) -> None:
    place = step(tmp_path / "step", arrays_of("openpi-pi0"), ["params"], suffix)
    out = tmp_path / "out.safetensors"
    for source in (place, place / "params"):
        done(ckptconv_here("convert", source, out, "--map", "openpi-pi0", *VERIFY))
        assert_same(load_file(out), load_file(CASES / "openpi-pi0" / "hf.safetensors"))


@every("layers", ["", "-numbered"])
@every(
    "map_, sizes",
    [("llama", []), ("llama3.1", []), ("gemma", ["--size", "v=11"]), ("gemma2", ["--size", "v=11"])],
)
def test_a_step_of_maxtext_gets_the_names_and_numbers_of_hugging_face(
    map_: str, sizes: list[str], layers: str, tmp_path: Path
) -> None:
    case = f"maxtext-{map_}{layers}"
    place = step(tmp_path / "step", arrays_of(case), ["params", "params"])
    out = tmp_path / "out.safetensors"
    done(ckptconv_here("convert", place, out, "--map", f"maxtext-{map_}", *VERIFY, *sizes))
    assert_same(load_file(out), load_file(CASES / case / "hf.safetensors"))
    verified_here(place, out)
