"""What features add to the tables that tests of the trunk go through: `cells.py` in the folder of their tests."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from ckptconv.process import has_feature

FEATURES = Path(__file__).parent / "features"
# Marks a test in which an attack is to be refused by name.
naming_attacks = pytest.mark.skipif(not has_feature("attacks"), reason="no feature recognizes attacks")
# Marks a test in which an output is to be found wrong.
verifying = pytest.mark.skipif(not has_feature("verify"), reason="no feature verifies outputs")
# Has a conversion verify its output, in Python and on the command line, where a feature does so.
VERIFIED: dict[str, Any] = {"verify": True} if has_feature("verify") else {}
VERIFY = ["--verify"] if VERIFIED else []
# Has outputs that are read without a structure record, in Python and on the command line, where no feature reads one.
READABLE: dict[str, Any] = {} if has_feature("unflattening") else {"structure": False}
READ_BACK = ["--no-structure"] if READABLE else []


def looking() -> list[str]:
    """The commands that show what is at a path, and write nothing."""
    return [command for commands in of_features("LOOKING") for command in commands]


def trained() -> list[Path]:
    """Return checkpoints of trainings, with weights and states, of the formats that features read."""
    return [path for paths in of_features("TRAINED") for path in paths]


def offered(source: Any, **options: Any) -> Iterator[Any]:
    """Yield the files of a conversion as features offer them that do not write them, which differ in no byte."""
    for offer in of_features("OFFERING"):
        with offer(source, **options) as files:
            yield files


def opened(source: Any, **options: Any) -> Iterator[Any]:
    """Yield the checkpoint as features open it for programs: a mapping of lazy tensors."""
    for opening in of_features("READER"):
        with opening(source, **options) as checkpoint:
            yield checkpoint


def loaded(source: Any, **options: Any) -> Iterator[Any]:
    """Yield the state of a checkpoint as features load it into memory."""
    for loading in of_features("LOADER"):
        yield loading(source, **options)


def verified(*output: Any, **options: Any) -> list[Any]:
    """Verify an output, given its source first, where a feature does so: return the report."""
    return [compare(*output, **options) for compare in of_features("COMPARING_OUTPUTS")]


def verified_here(*words: object) -> None:
    """Verify an output by the command for it, where there is one."""
    from checkpoints import ckptconv_here, done

    if VERIFIED:
        done(ckptconv_here("verify", *words))


def verify(*output: Any, **options: Any) -> Any:
    """Verify an output in a test that is marked as `verifying`: return the report."""
    (report,) = verified(*output, **options)
    return report


def torch_containers() -> dict[str, dict[str, Any]]:
    """Return the containers that torch.save writes and that are read: for each, the options of torch.save."""
    return {"zip": {}} | {name: options for more in of_features("CONTAINERS") for name, options in more.items()}


def torch_releases() -> list[Path]:
    """Return the files of old releases of torch, in every container that is read."""
    folders = (FEATURES.parent / "data" / "torch", *of_features("RELEASES"))
    return sorted(path for folder in folders for path in folder.glob("*/*.pt"))


def of_features(name: str) -> list[Any]:
    """Return what each feature has under this name."""
    modules = [import_module(f"features.{path.parent.name}.cells") for path in sorted(FEATURES.glob("*/cells.py"))]
    return [getattr(module, name) for module in modules if hasattr(module, name)]
