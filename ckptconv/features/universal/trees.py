"""Write DeepSpeed's universal checkpoints: a directory for each parameter, with a file for its weights and for each
state.

Source: DeepSpeed's checkpoint/ds_to_universal.py. The output is the same, without the temporary files of that script:
under ZeRO-3 flat tensors, otherwise {"cat_dim": 0, "param": tensor}, and the step in a file of its own. Of other
sources than ZeRO checkpoints, model files are made too. Moments that are zero take no room: their storage is one
element, which their strides of 0 repeat.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ckptconv.errors import UnsafeError, UnsupportedError
from ckptconv.features.torch_files.tree import plan_tree
from ckptconv.formats.run_names import COMMON, LATEST_UNIVERSAL, WEIGHTS, ZERO
from ckptconv.formats.source import Training
from ckptconv.plan import Data, FilePlan, Literal
from ckptconv.storage.paths import basename
from ckptconv.tensors import casting
from ckptconv.tensors.dtypes import DTYPES
from ckptconv.tensors.lazy import LazyTensor, Tagged, TensorFacts, View, Zeros, whole
from ckptconv.text import quoted

# The longest file name that file systems accept, in bytes.
_LONGEST_NAME = 255


def trees(
    training: Training, weights: Mapping[str, LazyTensor], states: Mapping[str, Any]
) -> Iterator[tuple[str, Any, str]]:
    """Yield what each file for `torch.load` holds, as ds_to_universal writes it: the file's name, its tree, and the
    name of the directory in its zip archive.

    `states` are the optimizer's, by parameter. Raise UnsafeError if the name of a parameter or of a state is a path,
    UnsupportedError if no directory or file can have that name, or another one has it.
    """
    # Below ZeRO-3, a parameter without elements has no optimizer state, even if it is trainable.
    trained = [name for name in training.parameters if weights[name].numel or training.stage == 3]
    for name in trained:
        yield f"{_directory(name)}/{WEIGHTS}", _wrapped(weights[name], training), "fp32"
        for key, value in states.get(name, {}).items():
            partitioned = isinstance(value, LazyTensor) and value.shape == weights[name].shape and key != "step"
            # Under ZeRO-3 the step is only in the common entries.
            if partitioned or (key == "step" and training.stage != 3):
                yield _file(name, key), _wrapped(value, training) if partitioned else value, key
    if training.stage != 3:
        # Untrained tensors, as DeepSpeed writes them, except that integers stay integers: DeepSpeed would round them.
        for name in sorted(weights.keys() - set(trained)):
            yield f"{_directory(name)}/{WEIGHTS}", {"param": _widened(weights[name])}, "fp32"
    yield f"{ZERO}/{COMMON}", training.common, "optimizer_state"
    for name, tree in training.models.items():
        yield name, tree, name.removesuffix(".pt")


def file_plans(training: Training, weights: Mapping[str, LazyTensor], states: Mapping[str, Any]) -> Iterator[FilePlan]:
    """Yield the files of a universal checkpoint; their names are relative to its directory."""
    for name, tree, stem in trees(training, weights, states):
        yield plan_tree(name, tree, stem)
    for file in training.copies:
        name = basename(file.path)
        yield FilePlan(name, file.size, (Data(0, whole(file), name),) if file.size else ())


def latest(directory: str) -> FilePlan:
    """Plan the file beside a universal checkpoint that holds its name."""
    data = os.fsencode(basename(directory))
    return FilePlan(LATEST_UNIVERSAL, len(data), (Literal(0, data),))


def _wrapped(tensor: LazyTensor, training: Training) -> Any:
    flat = training.stage == 3
    shape = (tensor.numel,) if flat else tensor.shape
    if isinstance(tensor, Zeros):
        item = tensor.dtype.itemsize
        facts = TensorFacts(storage=object(), storage_nbytes=item, strides=(0,) * len(shape))
        tensor = Tagged(Zeros(tensor.dtype, shape), facts)
    elif flat:
        tensor = View(tensor, tensor.dtype, shape)
    return tensor if flat else {"cat_dim": 0, "param": tensor}


def _directory(name: str) -> str:
    """Return the path of the directory of a parameter."""
    return f"{ZERO}/{_checked(name, f'A parameter has the name {quoted(name)}', (COMMON,))}"


def _file(name: str, state: str) -> str:
    """Return the path of the file of an optimizer state of the parameter `name`."""
    what = f"An optimizer state of {quoted(name)} has the name {quoted(state)}"
    return f"{_directory(name)}/{_checked(f'{state}.pt', what, (WEIGHTS,))}"


def _checked(name: str, what: str, taken: Sequence[str]) -> str:
    """Return `name`, of a file or directory, if it can be one and is not `taken`; errors begin with `what`."""
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise UnsafeError(f"{what}, which cannot be the name of a file or directory.")
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        size = _LONGEST_NAME + 1
    if size > _LONGEST_NAME or name in taken:
        why = (
            "which is the name of another file there" if name in taken else "which is not valid Unicode or is too long"
        )
        raise UnsupportedError(
            f"{what}, {why}. In a universal checkpoint it would be the name of a file or directory.",
            "Leave the parameter out with --exclude, or rename it with --rename.",
        )
    return name


def _widened(tensor: LazyTensor) -> LazyTensor:
    return casting.cast(tensor, DTYPES["float32"]) if tensor.dtype.name in ("float16", "bfloat16") else tensor
