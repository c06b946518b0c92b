"""The files in the directory of an input that its output does not have, and the reasons."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from importlib import import_module

from ckptconv.formats.model_directory import PARAMS, ROWS, Row, companions_of, is_companion_name
from ckptconv.formats.registered import DCP, DEEPSPEED, FILES_OF_MODELS
from ckptconv.formats.source import Source
from ckptconv.outputs.targets import Target
from ckptconv.storage.handles import HIDDEN
from ckptconv.storage.location import Location
from ckptconv.storage.paths import dirname, is_remote, join, resolved_name
from ckptconv.structure.record import FILE_NAME
from ckptconv.text import some

_FOREIGN, _TRAINING = "for other programs", "of the training"
# Files that are not copied. The first row with a name decides, also of those that have several endings.
STAYING = (
    Row(".*", "", "hidden file", "hidden"),
    Row(PARAMS, "Llama", "configuration", _FOREIGN),
    Row("*.py *.pyc __pycache__", "", "code", "code, which is never copied"),
    Row(
        "trainer_state.json training_args.bin optimizer*.pt optimizer*.bin scheduler*.pt scheduler.bin scaler.pt "
        "rng_state*.pth random_states_*.pkl *_results.json events.out.tfevents.* optim_*.pt extra_state_*.pt",
        "transformers, accelerate",
        "state of the training",
        _TRAINING,
    ),
    Row("run_config.yaml train_state.pt latest_*.txt", "Megatron-Bridge", "state of the training", _TRAINING),
    Row("*.index.json", "transformers, diffusers", "index", "indexes of other files"),
    Row("*.safetensors *.bin *.pt *.pth *.ckpt", "", "weights", "other weights"),
    Row("*.h5 *.msgpack *.ot *.onnx *.gguf *.tflite *.mlmodel *.pte *.npz", "", "weights", _FOREIGN),
    Row("*.pkl *.pickle", "", "pickle", "pickles, which are never copied"),
)
_FOLDER, _UNKNOWN = "folders", "not known as a model's"
# Names with one reason that are shown.
_SHOWN = 100


def reason_of(name: str, kind: str = "file") -> str:
    """Return why a file, or something of another `kind`, is not copied by its name; "" if it is."""
    features = (row for module in FILES_OF_MODELS.values() for row in import_module(module).ROWS)
    row = next((row for row in (*features, *ROWS, *STAYING) if _is_of(row, name)), None)
    return row.stays if row else _FOLDER if kind == "directory" else _UNKNOWN


def _is_of(row: Row, name: str) -> bool:
    return any(re.fullmatch(re.escape(text).replace(r"\*", ".*"), name) for text in row.names.split())


def with_left(
    source: Source,
    target: Target,
    options: Mapping[str, object],
    stays: Mapping[str, str] | None = None,
    folders: Collection[str] = (),
) -> tuple[Source, Target]:
    """Return `source` with a note on the files in its directory that were neither read nor copied to `target`, and
    `target` with these files. `options` are those of stores, `stays` has reasons by name, "" for all companions, and
    `folders` belong to other sources.

    The files of ranks are a format's own, of which some repeat others: next to these, only companions are named. They
    may lie beside the file that points to the step; a store is not asked for them.
    """
    directory, names = source.path, None
    if source.family in (DEEPSPEED, DCP):
        if is_remote(directory):
            return source, target
        near = companions_of(source, options)
        directory, names = near.directory, near.files.keys() - source.companions.keys()
    place = Location(directory, dict(options))
    root = resolved_name(directory)
    output = dirname(target.path) if target.is_file else target.path
    if place.kind != "directory" or root == resolved_name(output):
        return source, target
    paths = [*(file.path for file in source.companions.values()), *source.pointers, target.path]
    beside = {resolved_name(path)[len(root) + 1 :] for path in paths if resolved_name(path).startswith(f"{root}/")}
    # A configuration that was read is not in the output for that.
    read = (name for name in source.inputs_of_all if not is_companion_name(name))
    used = {FILE_NAME} | {name.partition("/")[0] for name in (*read, *beside, *folders)}
    unused = [name for name in place.names if name not in used and not name.startswith(HIDDEN)]
    stays = stays or {}
    left = {
        name: stays.get(name) or reason_of(name, place.names[name].kind) or stays.get("", _UNKNOWN)
        for name in unused
        if names is None or name in names
    }
    shown = _grouped((name, reason) for name, reason in left.items() if name[0] != ".")
    notes = [*source.notes, *([f"left in {directory}: {shown}."] if shown else [])]
    return source._replace(notes=notes), target._replace(left={join(directory, name): left[name] for name in left})


def _grouped(left: Iterable[tuple[str, str]]) -> str:
    """Return names that were left, each with the reason, as text: those of one reason together."""
    groups: dict[str, list[str]] = {}
    for name, reason in left:
        groups.setdefault(reason, []).append(name)
    return "; ".join(f"{some(names, _SHOWN, str)} ({reason})" for reason, names in groups.items())
