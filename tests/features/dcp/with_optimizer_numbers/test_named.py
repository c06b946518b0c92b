"""States of numbered parameters get names by their shapes, or by an order."""

from __future__ import annotations

from pathlib import Path

import torch
from effort import every
from features.dcp.cases import converted, refused, saved
from safetensors.torch import load_file

from ckptconv.outputs.kinds import FURTHER


@every(
    "states, names",
    [
        (({"exp_avg": torch.ones(8, 4)}, {"exp_avg": torch.ones(8)}), "weight bias"),
        (({"momentum_buffer": torch.ones(8)},), "bias"),
        (({"row": torch.ones(8), "col": torch.ones(4)}, {"sq": torch.ones(8)}), "weight bias"),
        (({"state1": torch.ones(8, 4), "absmax1": torch.ones(3)},), "weight"),
    ],
    ids=["of parameters", "of a vector alone", "factored", "quantized"],
)
def test_whole_states_get_the_names_of_parameters_by_their_shapes(
    states: tuple[dict[str, torch.Tensor], ...], names: str, tmp_path: Path
) -> None:
    output = tmp_path / "states.safetensors"
    said = converted(saved(tmp_path / "in", *states), "--optimizer", output)
    expected = {
        f"{called}.{name}" for called, own in zip(names.split(), states, strict=True) for name in ("step", *own)
    }
    assert set(load_file(output)) == expected
    assert "keep parameter numbers" not in said.out


def test_numbers_of_equal_shapes_get_names_by_an_order_or_none(tmp_path: Path) -> None:
    model = {"a": torch.zeros(4), "b": torch.ones(4)}
    states = ({"exp_avg": torch.full((4,), 1.0)}, {"exp_avg": torch.full((4,), 2.0)})
    source = saved(tmp_path / "in", *states, model=model)
    for name in FURTHER:
        if name == "optimizer":  # whose numbers stay
            continue
        assert "--order" in refused(source, tmp_path / "out", 5, f"--{name}", tmp_path / "u")
    (tmp_path / "order.txt").write_text("b\na\n")
    output = tmp_path / "states.safetensors"
    converted(source, "--optimizer", output, "--order", tmp_path / "order.txt")
    found = load_file(output)
    assert [float(found[f"{name}.exp_avg"][0]) for name in "ba"] == [1.0, 2.0]
    # What one process saved in an order that is no sorted one, is in it.
    source = saved(tmp_path / "kept", *states, model={"b": model["b"], "x": torch.ones(2, 2), "a": model["a"]})
    run = converted(source, "--optimizer", tmp_path / "kept.safetensors")
    assert "were derived from the order of the checkpoint" in run.out
    assert float(load_file(tmp_path / "kept.safetensors")["b.exp_avg"][0]) == 1.0
