"""torch is an extra: what needs it says what to install."""

from __future__ import annotations

from pathlib import Path

from processes import prepared
from test_without_torch import without


def test_load_state_dict_says_what_to_install(tmp_path: Path) -> None:
    code = """
import ckptconv
try:
    ckptconv.load_state_dict("model.safetensors")
except ckptconv.UsageError as error:
    print(error)
"""
    done = prepared().run(without(["torch"], code, tmp_path), cwd=tmp_path)
    assert done.stdout == (
        "Tensors of torch require the package torch, which cannot be imported: No module named torch. "
        "Install it: pip install 'ckptconv[torch]'. Or open with framework=\"np\".\n"
    )
