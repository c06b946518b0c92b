"""The files in the directory of an input that its output does not have, and the reasons."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from importlib import import_module

from ckptconv.features.companions.deciding import is_directory
from ckptconv.features.companions.directory import PARAMS, Row, places_of
from ckptconv.features.model_checks import FOLDER, STEP, WEIGHTS
from ckptconv.formats.model_files import SAFETENSORS
from ckptconv.formats.registered import DCP, DEEPSPEED, FILES_OF_MODELS, is_companion_name
from ckptconv.formats.source import Source
from ckptconv.outputs.targets import Target
from ckptconv.plan import Input
from ckptconv.storage.handles import HIDDEN
from ckptconv.storage.paths import basename, dirname, is_remote, join, resolved_name
from ckptconv.structure.record import FILE_NAME
from ckptconv.text import some

_FOREIGN, _TRAINING = "for other programs", "of the training"
# The reason of files that a checkpoint of ranks consists of, of which some repeat others: they are not named.
_OF_RANKS = "of ranks"
# Files that are not copied. The first row with a name decides, also of those that have several endings.
STAYING = (
    Row(
        ".metadata *.distcp latest latest_universal *_model_states.pt *_optim_states.pt _CHECKPOINT_METADATA "
        "commit_success.txt _sharding array_metadatas ocdbt.process_*",
        "",
        "weights",
        _OF_RANKS,
    ),
    Row(".*", "", "hidden file", "hidden"),
    Row(PARAMS, "Llama", "configuration", _FOREIGN),
    Row("*.py *.pyc __pycache__", "", "code", "code, which is never copied"),
    Row(
        "trainer_state.json training_args.bin optimizer*.pt optimizer*.bin scheduler*.pt scheduler.bin scaler.pt "
        "rng_state*.pth random_states_*.pkl *_results.json events.out.tfevents.* optim_*.pt extra_state_*.pt "
        "fsdp_config.json run_config.yaml optimizer train_state.pt latest_*.txt",
        "transformers, accelerate, Megatron-Bridge",
        "state of the training",
        _TRAINING,
    ),
    Row("*.index.json", "transformers, diffusers", "index", "index of the input files"),
    Row("*.safetensors *.bin *.pt *.pth *.ckpt", "", "weights", WEIGHTS),
    Row("*.h5 *.msgpack *.ot *.onnx *.gguf *.tflite *.mlmodel *.pte *.npz", "", "weights", _FOREIGN),
    Row("*.pkl *.pickle", "", "pickle", "pickles, which are never copied"),
)
UNKNOWN = "not known as a model's"
# Not the optimizer_0 of accelerate.
_STEP = re.compile(r"(?!optim)(?:[A-Za-z_]+[-_=]?)?\d+")
_ELSEWHERE = "the file of another folder is used"
# Names with one reason that are shown.
_SHOWN = 100


def row_of(name: str) -> Row | None:
    """Return the first row that has the name of a file."""
    features = (import_module(module).ROWS for end, module in FILES_OF_MODELS.items() if name.endswith(end))
    texts = ((row, text) for rows in (*features, STAYING) for row in rows for text in row.names.split())
    return next((row for row, text in texts if re.fullmatch(re.escape(text).replace(r"\*", ".*"), name)), None)


def reason_of(name: str, kind: str = "file") -> str:
    """Return why a file, or something of another `kind`, is not copied by its name; "" if it is."""
    row = row_of(name)
    return row.stays if row else of_folder(name) if kind == "directory" else UNKNOWN


def of_folder(name: str) -> str:
    """Return why a folder is not copied."""
    return STEP if _STEP.fullmatch(name) else FOLDER


def with_left(
    source: Source,
    target: Target,
    options: Mapping[str, object],
    stays: Mapping[str, str] = {},
    folders: Collection[str] = (),
) -> tuple[Source, Target]:
    """Return `source` with a note on the files in its directory that were neither read nor copied to `target`, and
    `target` with these files. `options` are those of stores, `stays` has reasons by name, "" for all companions, and
    `folders` belong to other sources. Next to ranks, a store is not asked for them.
    """
    is_of_ranks = source.family in (DEEPSPEED, DCP)
    if (is_of_ranks and is_remote(source.path)) or not is_directory(source, options):
        return source, target
    places = {resolved_name(place.path): place for place in places_of(source, options)}
    places.pop(resolved_name(dirname(target.path) if target.is_file else target.path), None)
    paths = [*(file.path for file in source.companions.values()), *source.pointers, source.path, target.path, *places]
    known = {resolved_name(path) for path in paths}
    known |= {resolved_name(dirname(read.file.path)) for read in source.inputs.values() if isinstance(read, Input)}
    left: dict[str, str] = {}
    notes = [*source.notes]
    for root, place in places.items():
        beside = {path[len(root) + 1 :].partition("/")[0] for path in known if path.startswith(f"{root}/")}
        # The files of an archive have one resolved name.
        beside |= {basename(path) for path in paths if dirname(path) == place.path.rstrip("/")}
        # A configuration that was read is not in the output for that.
        read = (name.partition("/")[0] for name in source.inputs_of_all if not is_companion_name(name))
        used = {FILE_NAME, *beside, *folders, *(read if root == resolved_name(source.path) else ())}
        unused = [name for name in place.names if name not in used and not name.startswith(HIDDEN)]
        here = {name: stays.get(name) or reason_of(name, place.names[name].kind) for name in unused}
        here = {name: why or stays.get("", _ELSEWHERE) for name, why in here.items() if why != _OF_RANKS}
        shown = _grouped((name, reason) for name, reason in here.items() if name[0] != ".")
        notes += [f"not copied from {place.path}: {shown}."] if shown else []
        left |= {join(place.path, name): why for name, why in here.items()}
    warnings = [*source.warnings]
    if source.family == SAFETENSORS:
        from ckptconv.features.model_checks.meant import told  # other families have one file of weights

        meant = told(source, left)
        notes, warnings = [*meant.notes, *notes], [*warnings, *meant.warnings]
    return source._replace(notes=notes, warnings=warnings), target._replace(left=left)


def _grouped(left: Iterable[tuple[str, str]]) -> str:
    """Return names that were left, each with the reason, as text: those of one reason together."""
    groups: dict[str, list[str]] = {}
    for name, reason in left:
        groups.setdefault(reason, []).append(name)
    return "; ".join(f"{some(names, _SHOWN, str)} ({reason})" for reason, names in groups.items())
