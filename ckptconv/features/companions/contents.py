"""The bytes of companions in an output: a configuration follows the weights, any other file is copied as it is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ckptconv.features.configs.configs import DTYPE, QUANTIZING, dtype_named, dtype_of
from ckptconv.formats.source import CONFIG, Source
from ckptconv.outputs.notices import Change, Notices
from ckptconv.plan import Copied, FilePlan
from ckptconv.tensors.dtypes import DTYPES
from ckptconv.tensors.lazy import Inline, LazyTensor, whole
from ckptconv.tensors.moves import File

# The key of a model's own name for the codes of its experts.
EXPERT_DTYPE = "expert_dtype"


def planned(source: Source, notices: Notices) -> tuple[tuple[FilePlan, ...], Notices]:
    """Return the plans of the companions of `source`, and the `notices` of its output with further ones."""
    contents = {name: content(source, name, file, notices.change) for name, file in source.companions.items()}
    plans = (FilePlan(name, data.nbytes, (Copied(0, data),) if data.nbytes else ()) for name, data in contents.items())
    if CONFIG not in contents:
        return tuple(plans), _warned_of_quantization(notices)
    notes = dtype_notes(source, notices.change)
    return tuple(plans), notices._replace(notes=(*notices.notes, *notes))


def dtype_notes(source: Source, change: Change) -> list[str]:
    """Return a note if the copy of the configuration of `source` has another dtype than the original: after `change`,
    that of the output's weights."""
    every = (configuration(source, one_change) for one_change in (change._replace(dtype=""), change))
    said, says = (dtype_of(config) if config else "" for config in every)
    instead = f"instead of {said}" if said else "which the original does not specify"
    return [f"The copy of {CONFIG} has the dtype of the output's weights, {says}, {instead}."] if says != said else []


def _warned_of_quantization(notices: Notices) -> Notices:
    """Return `notices` with a warning that the user has to state the quantization: no configuration is written."""
    quantization = notices.change.quantization
    if not quantization:
        return notices
    shown = {key: value for key, value in quantization.items() if not isinstance(value, list) or len(value) < 5}
    warning = (
        "no config.json was written, but programs read the quantization of the weights from it. Add one with "
        f'"quantization_config": {json.dumps(shown)} and the names of the modules that are not quantized.'
    )
    return notices._replace(warnings=(*notices.warnings, warning))


def content(source: Source, name: str, file: File, change: Change) -> LazyTensor:
    """Return the bytes of the companion `file` in the output: those of a configuration have `change`."""
    config = configuration(source, change) if name == CONFIG else source.values.get(name)
    if config is None or (file.size and (config == source.config or name != CONFIG)):
        return whole(file)
    data = text_of(config).encode()
    return Inline(data, DTYPES["uint8"], (len(data),))


def configuration(source: Source, change: Change) -> Mapping[str, Any] | None:
    """Return the configuration of `source` as the output has it, with `change`; unchanged, if it is no companion."""
    file = source.companions.get(CONFIG)
    if source.config is None or file is None:
        return source.config
    if source.quantized and source.quantized.says != file.path:
        change = change._replace(plain=False)  # it is a reference's, which does not describe these
    return changed(source.config, change._replace(edit=None) if source.reference else change)


def is_of_codes(key: str, value: Any) -> bool:
    """Return whether a key of a configuration is about quantized weights; "quantization" is if mlx-lm wrote it."""
    is_of_mlx = key == "quantization" and isinstance(value, Mapping) and "group_size" in value
    return is_of_mlx or key in QUANTIZING or key == EXPERT_DTYPE


def changed(config: Mapping[str, Any], change: Change) -> dict[str, Any]:
    """Return a configuration with `change`, at every depth. Everything else stays unchanged, in its order."""
    config = change.edit(config) if change.edit else config
    is_new = change.plain or change.quantization is not None

    def of(value: Any) -> Any:
        if isinstance(value, list):
            return [of(inner) for inner in value]
        if not isinstance(value, Mapping):
            return value
        kept = {key: of(inner) for key, inner in value.items() if not (is_new and is_of_codes(key, inner))}
        stale = [key for key in DTYPE if change.dtype and dtype_named(kept.get(key)) not in ("", change.dtype)]
        return {**kept, **dict.fromkeys(stale, change.dtype)}

    result: dict[str, Any] = of(config)
    # If a configuration has no dtype, loaders assume another one than that of weights that were codes.
    if change.plain and change.dtype and not dtype_of(result):
        result[DTYPE[0]] = change.dtype
    return result if change.quantization is None else {**result, QUANTIZING[0]: change.quantization}


def text_of(config: Mapping[str, Any]) -> str:
    """Return the text of a configuration, as transformers writes it."""
    return json.dumps(config, indent=2, ensure_ascii=False) + "\n"
