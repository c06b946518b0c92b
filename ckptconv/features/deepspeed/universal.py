"""Read DeepSpeed's universal checkpoints: a directory for each parameter, with a file for its weights and for each
state.

Source: DeepSpeed's checkpoint/ds_to_universal.py and universal_checkpoint.py. Frozen parameters, buffers and ties are
in the model files next to them, as in any checkpoint.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

from ckptconv.errors import CorruptError
from ckptconv.features.deepspeed import locate as zero_files
from ckptconv.features.deepspeed.assemble import complete
from ckptconv.features.deepspeed.left import left_of
from ckptconv.features.deepspeed.partitions import Shape
from ckptconv.features.deepspeed.records import Fields, ModelFile, Reading
from ckptconv.features.deepspeed.states import own
from ckptconv.features.deepspeed.weights import Weights
from ckptconv.formats.run_names import COMMON, LATEST_UNIVERSAL, WEIGHTS, ZERO
from ckptconv.formats.source import Defaults, Source, Wanted
from ckptconv.storage.location import Location
from ckptconv.storage.paths import basename
from ckptconv.storage.reading import Entry
from ckptconv.tensors.lazy import LazyTensor, View, untagged
from ckptconv.tensors.moves import File


def read(place: Location, tagged: Location, wanted: Wanted) -> Source:
    """Open the universal checkpoint in the directory `tagged`, which `place` names."""
    directory, is_named = tagged.path, tagged is not place and not wanted.tag
    # One that any stage can load has a model file under each stage's name: they are the same.
    files = zero_files.files_of(tagged, [name for name in tagged.names if _as_below_3(name) in tagged.names])
    reading = Reading(tagged)
    first = min(mp for _, mp in files.model)
    own = {dp: file for (dp, mp), file in files.model.items() if mp == first}
    model = reading.model(own[min(own)])
    zero = tagged.join(ZERO)
    names = zero.names
    common = Fields(reading.read(names[COMMON].file).value, names[COMMON].file.path) if COMMON in names else None
    weights = Weights(directory, _stage(own), max(own) + 1)
    shapes = {name: shape for group in model.shapes or () for name, shape in group.items()}
    # Frozen parameters, buffers and tied names may be there too, widened; the model file has the originals.
    elsewhere = {*(model.module or {}), *model.shared} - set(shapes) if shapes else set()
    for name, entry in names.items():
        if entry.kind == "directory" and name not in elsewhere:
            _read_parameter(weights, name, zero.join(name).names, shapes.get(name), reading)
    missing = [name for name, shape in shapes.items() if name not in weights.trainable and math.prod(shape) > 0]
    if missing:
        raise CorruptError(
            f"{zero} lacks {len(missing)} of {len(shapes)} parameters: {', '.join(missing[:5])}.",
            f"Copy their directories into {zero}.",
        )
    # In DeepSpeed's order, if the model file gives it.
    named = weights.trainable
    weights.trainable = {name: named[name] for name in {**shapes, **named} if name in named}
    weights.groups = _groups(common, model, weights)
    if weights.stage == 3:
        _add_steps(weights, common, model)

    def read_model(rank: int) -> ModelFile:
        if rank not in own:
            raise CorruptError(
                f"{directory} lacks the model file of rank {rank}, which contains parts of the parameters."
            )
        return reading.model(own[rank])

    complete(weights, model, read_model)
    if wanted.exclude_frozen:
        weights.without_frozen()
    return Source(
        format="DeepSpeed universal checkpoint",
        family="deepspeed",
        path=directory,
        weights=weights.state_dict(),
        optimizer=weights.optimizer(),
        training=weights.training(common.values if common else {}, files.model.values()),
        left=functools.partial(left_of, model.values),
        structured=False,
        owners=weights.aliases,
        counts=weights.counts(),
        facts={"directory": basename(directory), **({"DeepSpeed": model.version} if model.version else {})},
        notes=[f"Took {directory}: the universal checkpoint in `{LATEST_UNIVERSAL}`."] if is_named else [],
        pointers=[place.join(LATEST_UNIVERSAL).path] if is_named else [],
        warnings=weights.warnings,
        unaccounted=weights.unaccounted,
        defaults=Defaults("float32", 5 * 10**9),
        **reading.log.fields(),
    )


def _as_below_3(name: str) -> str:
    """Return the name that ZeRO-1 and 2 give to ZeRO-3's model file `name` of the first data-parallel rank."""
    return name.removeprefix("zero_pp_rank_0_") if name.startswith("zero_pp_rank_0_") else ""


def _stage(models: Mapping[int, File]) -> int | None:
    """Return 3 if the model files are ZeRO-3's, one for each data-parallel rank; else 1: lower stages are alike."""
    return 3 if any(basename(file.path).startswith("zero_pp_rank_") for file in models.values()) else 1


def _read_parameter(
    weights: Weights, name: str, names: Mapping[str, Entry], shape: Shape | None, reading: Reading
) -> None:
    """Read a parameter's directory: its weights, and each state."""
    states: dict[str, Any] = {}
    for file_name, entry in names.items():
        key, dot, suffix = file_name.rpartition(".")
        if entry.kind != "file" or not dot or suffix != "pt":
            continue
        relative = f"{ZERO}/{name}/{file_name}"
        value = reading.read(entry.file, relative).value
        tensor = value.get("param") if isinstance(value, dict) else value
        if isinstance(tensor, LazyTensor) and key != "step":
            states[key] = _shaped(untagged(tensor), shape, entry.file.path)
        elif key == "step":
            states.update(own({key: value}))
        else:
            raise CorruptError(f"{entry.file.path} contains no tensor, but should contain the {key} of {name!r}.")
    master = states.pop("fp32", None)
    if master is None:
        raise CorruptError(f"{weights.where}/{ZERO}/{name} has no {WEIGHTS}: the weights of {name!r} are missing.")
    if master.dtype.kind != "f":
        weights.buffers[name] = master
        return
    weights.trainable[name] = master
    weights.states[name] = states


def _add_steps(weights: Weights, common: Fields | None, model: ModelFile) -> None:
    """Add the steps of ZeRO-3, which are in the common entries, by sub-group."""
    inner = common.values.get("optimizer_state_dict") if common else None
    numbered = inner.get("state") if isinstance(inner, dict) else None
    for index, named in enumerate(model.shapes or ()):
        state = numbered.get(index) if isinstance(numbered, dict) else None
        if isinstance(state, dict) and "step" in state:
            for name in named:
                weights.states.setdefault(name, {}).update(own({"step": state["step"]}))


def _shaped(tensor: LazyTensor, shape: Shape | None, where: str) -> LazyTensor:
    """Return a tensor in the parameter's shape, or a larger one merged from tensor-parallel slices as it is."""
    if shape is None or tensor.shape == shape:
        return tensor
    if len(tensor.shape) == 1 and tensor.numel == math.prod(shape):
        return View(tensor, tensor.dtype, shape)
    if len(tensor.shape) == len(shape) and all(size >= part for size, part in zip(tensor.shape, shape, strict=True)):
        return tensor
    raise CorruptError(f"{where} has the shape {list(tensor.shape)}, but the model file records {list(shape)}.")


def _groups(common: Fields | None, model: ModelFile, weights: Weights) -> list[dict[str, Any]]:
    """Return the optimizer's param_groups with parameter names; DeepSpeed numbers its own groups."""
    # Of groups that only may be, nothing is known.
    hyper = [group for group in common.get("param_groups", list, []) if group != {}] if common else []
    named = [list(group) for group in model.shapes or ()]
    if len(hyper) != len(named) or not all(isinstance(group, dict) for group in hyper):
        if len(hyper) == 1 and isinstance(hyper[0], dict):
            return [{**hyper[0], "params": list(weights.trainable)}]
        return [{"params": list(weights.trainable)}]
    return [{**group, "params": names} for group, names in zip(hyper, named, strict=True)]
