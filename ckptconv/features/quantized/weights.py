"""A source whose tensors are the weights that its quantized ones stand for."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

from ckptconv.errors import CorruptError, UnsupportedError
from ckptconv.features.companions import reading
from ckptconv.features.companions.directory import QUANTIZED
from ckptconv.features.quantized import configuration, joining
from ckptconv.features.quantized.configuration import COMFY, Configuration
from ckptconv.features.quantized.joining import Weight
from ckptconv.formats.source import CONFIG, Quantized, Source
from ckptconv.formats.values import first_bytes
from ckptconv.pickles.nodes import Composite
from ckptconv.plan import Input
from ckptconv.storage import strict_json
from ckptconv.storage.files import Readers
from ckptconv.storage.reading import DESCRIPTIONS, max_gap
from ckptconv.structure import parted
from ckptconv.tensors import casting
from ckptconv.tensors.dtypes import DTYPES
from ckptconv.tensors.lazy import LazyTensor, Stored, same_bytes, untagged
from ckptconv.tensors.moves import File
from ckptconv.text import some


def with_weights(source: Source, dtype: str, storage_options: Mapping[str, Any], *, anew: bool = False) -> Source:
    """Return `source` with the weights of `dtype` in the place of quantized ones, in every state dict that it holds.

    `anew`: weights are to be quantized again; `dtype` is "" if all of these are, and then they are float32. Parts of
    quantized weights, and scales of activations, are gone. Read the configuration beside it, and parts that are shapes.
    Raise as `joining.recognized` does.
    """
    if source.quantized:
        return source
    again = functools.partial(with_weights, dtype=dtype, storage_options=storage_options, anew=anew)
    read = dict(reading.configurations(source, storage_options, CONFIG, QUANTIZED))
    plain = _Weights(configuration.of_all(read, source.metadata), source.metadata, dtype or "float32", storage_options)
    try:
        weights = plain.of_tree(source.weights)
    except CorruptError as error:
        # The scales may be in other files, if this is one of a set.
        raise source.weights_error or error from None
    formats = dict(plain.formats)
    stored = source.stored
    if stored and formats:
        stored = stored._replace(tensors=plain.of(stored.tensors))
    quantized = Quantized(dtype, read[CONFIG].file.path if CONFIG in read else "", formats, again)
    gone = plain.gone
    word = "--dequantize" if dtype else "--requantize"
    idle = [f"{word} has no effect: no weight of {source.path} is quantized."] if not formats else []
    return source.computing(dequantize=quantized)._replace(
        weights=weights,
        trees={key: plain.of_tree(tree) for key, tree in source.trees.items()},
        stored=stored,
        owners={alias: owner for alias, owner in source.owners.items() if not {alias, owner} & gone},
        equal=[entry for entry in source.equal if entry[0] not in gone],
        remarks=_without_quantization(source.remarks) if formats else source.remarks,
        notes=[*source.notes, *_notes(quantized, plain, anew)],
        warnings=[*source.warnings, *idle],
        inputs={**source.inputs, **{name: Input.stamped(config.file) for name, config in read.items()}},
    )


def _without_quantization(remarks: Mapping[str, str]) -> dict[str, str]:
    return {key: text for key, text in parted.without(remarks).items() if key != COMFY}


def _notes(quantized: Quantized, plain: _Weights, anew: bool) -> Iterator[str]:
    counts = ", ".join(f"{count:,} {name}" for name, count in sorted(quantized.formats.items()))
    if counts:
        made_of = "weights that were already quantized" if anew else f"dequantized to {quantized.dtype}"
        yield f"{made_of}: {counts}."
    if plain.has_first_gptq:
        yield (
            "GPTQ's first format stores each zero point minus 1. The largest stored value was read as in AutoGPTQ's "
            "kernels: as 1 more. GPTQModel reads this value as 0, and changes the next zero point. If the model was "
            "used with GPTQModel, compare the results of both."
        )
    if plain.bare:
        yield (
            "Left unchanged: 8-bit floats without scales, which no configuration describes as quantized: "
            f"{some(plain.bare)}."
        )
    if plain.unknown:
        yield f"Left unchanged: scales of unknown purpose: {some(plain.unknown)}."


class _Weights:
    """Makes weights of state dicts of one source. `formats` counts them."""

    def __init__(
        self, config: Configuration, metadata: Mapping[str, str], dtype: str, storage_options: Mapping[str, Any]
    ) -> None:
        self._told, self._metadata, self._dtype, self._options = config, metadata, dtype, storage_options
        self.formats: Counter[str] = Counter()
        self.gone: set[str] = set()
        self.bare: list[str] = []
        self.unknown: list[str] = []
        self._known: dict[int, tuple[Any, Any]] = {}
        self._made: dict[Hashable, LazyTensor] = {}

    @property
    def has_first_gptq(self) -> bool:
        """Whether weights have GPTQ's first format, and zero points other than half of the codes."""
        config = self._told.told
        is_first = (config.get("checkpoint_format") or config.get("format") or "gptq") == "gptq"
        return self._told.method == "gptq" and is_first and config.get("sym") is not True and bool(self.formats)

    def of_tree(self, tree: Any) -> Any:
        """Return `tree` with weights in each of its mappings; the same object if none of them is quantized."""
        if id(tree) in self._known:
            return self._known[id(tree)][1]
        result = tree
        if isinstance(tree, Mapping):
            result = self.of(tree)
            inner = {key: self.of_tree(value) for key, value in result.items() if isinstance(value, Mapping)}
            changed = {key: value for key, value in inner.items() if value is not result[key]}
            if changed:
                result = _like(result, {**result, **changed})
        self._known[id(tree)] = tree, result
        return result

    def of(self, items: Mapping[Any, Any]) -> Any:
        """Return a state dict with weights in the place of quantized tensors, which it has under their names.

        Raise UnsupportedError for a tensor of torchao's with attributes that are not known.
        """
        given, config = items, self._told
        items, layers = _in_parts(items, self._metadata)
        if layers:
            config = config._replace(method="torchao", layers=layers)
        flat = {name: value for name, value in items.items() if isinstance(value, LazyTensor) and type(name) is str}
        joined = joining.recognized(flat, config, lambda wanted: read_small(wanted, self._options))
        self.bare += joined.bare
        self.unknown += joined.unknown
        if not joined.weights and not joined.gone:
            return given
        self.gone |= joined.gone
        self.formats.update(weight.format for weight in joined.weights.values())
        # A weight stands where its codes stood.
        at = {weight.parts["codes"]: name for name, weight in joined.weights.items()}
        result: dict[Any, Any] = {}
        for name, value in items.items():
            if name in at:
                result[at[name]] = self._once(joined.weights[at[name]], flat)
            elif name not in joined.gone:
                result[name] = value
        return _like(given, result)

    def _once(self, weight: Weight, items: Mapping[str, LazyTensor]) -> LazyTensor:
        """Return the weight in its dtype: the same object for the same parts, so that tied names stay tied."""
        parts = tuple((role, same_bytes(items[name])) for role, name in sorted(weight.parts.items()))
        plain = casting.rounded(weight.tensor, DTYPES[self._dtype])
        if any(part is None for _, part in parts):
            return plain
        return self._made.setdefault((weight.format, weight.tensor.shape, parts), plain)


def _in_parts(
    items: Mapping[Any, Any], metadata: Mapping[str, str]
) -> tuple[Mapping[Any, Any], dict[str, Mapping[str, Any]]]:
    """Return `items` with torchao's tensors in their parts, and {module: torchao's words for its weight}."""
    parts_by_name: dict[Any, Any] = {}
    described = parted.read(metadata, [name for name in items if type(name) is str])
    for name, value in items.items():
        parting = parted.of_class(value.kind) if isinstance(value, Composite) else None
        if parting is None:
            parts_by_name[name] = value
            continue
        torchao_part = parting.described(value.kind, value.parts)
        if torchao_part is None:
            raise UnsupportedError(
                f"The quantized weight {name!r} has torchao's class {value.kind} with unknown attributes."
            )
        described[name] = torchao_part
        own = value.parts["attributes"]
        parts_by_name.update((parted.prefix_of(name) + part, own[part]) for part in torchao_part.parts)
    return (parts_by_name if described else items), _layers(described)


def _layers(described: Mapping[str, parted.PartedTensor]) -> dict[str, Mapping[str, Any]]:
    """Return {module: torchao's words for its weight}."""
    layers: dict[str, Mapping[str, Any]] = {}
    for name, part in described.items():
        entry = strict_json.parse(part.text)
        layers[name.removesuffix(".weight")] = {**entry.get("_data", {}), "_type": entry["_type"], "parts": part.parts}
    return layers


def surveyed(
    source: Source,
    tensors: Mapping[str, LazyTensor],
    described: Mapping[str, parted.PartedTensor],
    storage_options: Mapping[str, Any],
) -> joining.Recognized:
    """Return which weights are quantized among `tensors` of `source`; `described` are those of torchao in a pickle.

    Raise as `joining.recognized` does.
    """
    config = configuration.of_all(
        dict(reading.configurations(source, storage_options, CONFIG, QUANTIZED)), source.metadata
    )
    layers = _layers({**parted.read(source.metadata, tensors), **described})
    if layers:
        config = config._replace(method="torchao", layers=layers)
    return joining.recognized(tensors, config, lambda wanted: read_small(wanted, storage_options))


def _like(items: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    """Return `made` as a mapping of the class of `items`."""
    if type(items) is dict:
        return values
    again = type(items)(values)  # type: ignore[call-arg]
    vars(again).update(getattr(items, "__dict__", {}))
    return again


def read_small(tensors: Mapping[str, LazyTensor], storage_options: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the bytes of small tensors; those near each other in a file are read at once."""
    data_of: dict[str, bytes] = {}
    near: dict[File, list[tuple[int, int, str]]] = {}
    for name, tensor in tensors.items():
        plain = untagged(tensor)
        if isinstance(plain, Stored) and plain.contiguous:
            near.setdefault(plain.file, []).append((plain.offset, plain.offset + plain.nbytes, name))
        else:
            data_of[name] = first_bytes(plain, plain.nbytes, storage_options)[0]
    with Readers(dict(storage_options)) as readers:
        for file, spans in near.items():
            spans.sort()
            with readers.reading(file) as reader:
                while spans:
                    start, stop, _ = spans[0]
                    count = 0
                    for low, high, _ in spans:
                        if low > stop + max_gap(file) or high - start > DESCRIPTIONS:
                            break
                        stop, count = max(stop, high), count + 1
                    data = reader.read_at(start, stop - start)
                    data_of.update((name, data[low - start : high - start]) for low, high, name in spans[:count])
                    del spans[:count]
    return data_of
