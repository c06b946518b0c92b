"""A user's program, for type checkers: checkpoints as arrays, and mistakes that they have to find."""

from __future__ import annotations

from pathlib import Path

import ckptconv


class Array:
    """As arrays are typed."""

    def mean(self) -> float:
        return 0.0


def right(path: Path) -> None:
    with ckptconv.open(path, "np", key="model", model_rank=0) as ck:
        tensor: ckptconv.Tensor = ck["w"]
        shape: tuple[int, ...] = tensor.shape
        names: list[str] = list(ck)
        print(shape, names, ck.optimizer["w.exp_avg"].nbytes, tensor[1:2, ...])
    state: dict[str, object] = ckptconv.load_state_dict(path, device="cpu", dtype="bf16")
    print(state.keys())


def average(checkpoint: ckptconv.Checkpoint[Array], name: str) -> float:
    """Knows the arrays of an opened checkpoint."""
    array: Array = checkpoint.get_tensor(name)
    named: dict[str, Array] = checkpoint.get_tensors([name])
    return sum(each.mean() for each in (array, named[name], *(other for _, other in checkpoint.forward())))


def wrong(path: Path) -> None:
    ckptconv.open(path, "tf")  # type: ignore[call-overload]
    ckptconv.open(path, dtype="bf16")  # type: ignore[call-overload]
    ckptconv.load_state_dict(path).forward()  # type: ignore[attr-defined]
    ckptconv.load_state_dict(path, keys="model")  # type: ignore[call-arg]
