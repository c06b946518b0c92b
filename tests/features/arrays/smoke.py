"""open and load_state_dict, for scripts/smoke.py: without torch, the second has to say what to install."""

from __future__ import annotations

import importlib
from typing import Any


def run(smoke: Any) -> None:
    import ckptconv

    path = smoke.place / "model.safetensors"
    with ckptconv.open(path, "np") as checkpoint:
        if "b" not in checkpoint:
            raise SystemExit("An opened checkpoint lacks a tensor.")
    try:
        state = ckptconv.load_state_dict(path)
    except ckptconv.UsageError as error:
        if with_torch() or "pip install 'ckptconv[torch]'" not in str(error):
            raise
    else:
        if state["b"].tolist() != [7, 8]:
            raise SystemExit("load_state_dict gave other values.")


def with_torch() -> bool:
    try:
        importlib.import_module("torch")
    except ImportError:
        return False
    return True
