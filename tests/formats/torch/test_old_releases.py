"""Files that old releases of torch wrote (tests/data/torch/make.py) are read as the present one reads them."""

from __future__ import annotations

from pathlib import Path

from cells import torch_containers, torch_releases
from checkpoints import DATA, ckptconv_here, done, torch_loaded
from compare import bits, evaluate, same
from effort import every

from ckptconv.formats.torch.file import read_torch

RELEASES = sorted(path for path in (DATA / "torch").iterdir() if path.is_dir())
FILES = torch_releases()


def of_kind(*kinds: str) -> list[Path]:
    return [path for path in FILES if path.name.split(".")[0] in kinds]


def test_there_are_files_of_several_releases() -> None:
    assert [path.name for path in RELEASES] == ["1.13.0", "2.0.1", "2.4.1"]
    assert len(FILES) == 9 * len(torch_containers())


@every("path", of_kind("training"))
def test_training_checkpoints(path: Path) -> None:
    same(read_torch(str(path)).value, torch_loaded(path))


@every("path", of_kind("tensors"))
def test_tensors(path: Path) -> None:
    # The same tensors are in both formats, and torch cannot read 8-bit floats from a stream, though it writes them.
    ours, theirs = read_torch(str(path)).value, torch_loaded(DATA / "torch" / path.parent.name / "tensors.pt")
    assert list(ours) == list(theirs)
    for name, tensor in theirs.items():
        if tensor.is_conj() or tensor.is_neg():
            # What torch keeps as a flag is no different from the values it stands for.
            assert evaluate(ours[name]) == bits(tensor.resolve_conj().resolve_neg()), name
        else:
            same(ours[name], tensor)


@every("path", of_kind("module"))
def test_whole_modules_are_kept_as_data_with_their_tensors(path: Path) -> None:
    file, model = read_torch(str(path)), torch_loaded(path)
    assert "torch.nn.modules.linear.Linear" in map(str, file.opaque)
    parameters = file.value.state[0]["_parameters"]
    for name in ("weight", "bias"):
        assert evaluate(parameters[name]) == bits(getattr(model, name))


@every("path", of_kind("training", "module"))
def test_all_are_converted(path: Path, tmp_path: Path) -> None:
    done(ckptconv_here("pt2safetensors", path, tmp_path / "out.safetensors"))
