"""Open directories of torch.distributed.checkpoint (DCP): those of FSDP, torchtitan, OLMo-core, accelerate, Lightning.

A directory holds `.metadata`, or a `__R.metadata` of each rank, and `__R_N.distcp` files; or `shard-*.safetensors`,
which describe themselves. The metadata describes each tensor's chunks and their places. The model is converted; other
tensors are read on request.
"""

from __future__ import annotations

import functools
import re
import zlib
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from ckptconv.errors import CkptconvError, CorruptError, UnsupportedError
from ckptconv.features.dcp import dialects
from ckptconv.features.dcp.entries import Entries, offsets_of, records_of
from ckptconv.features.dcp.locate import BEGINNING, FAMILY, is_metadata, located
from ckptconv.features.dcp.metadata import Chunk, Description, SavedTensor, read_description
from ckptconv.features.dcp.names import INTEGRITY, METADATA, RANK, SHARD, SUFFIX
from ckptconv.features.joining import names as dcp_names
from ckptconv.features.joining.names import MAX_VALUE, Path, left_by_key, named
from ckptconv.formats import model_files
from ckptconv.formats.runs import Located
from ckptconv.formats.source import (
    MODEL_KEYS,
    NOT_CONVERTED,
    STATES_ARE_CONVERTED,
    Defaults,
    FileFacts,
    Source,
    StateFacts,
    Wanted,
)
from ckptconv.formats.torch.container import MAX_PICKLE
from ckptconv.pickles.children import is_tensor, walk
from ckptconv.plan import Input
from ckptconv.storage.location import Location
from ckptconv.storage.paths import basename
from ckptconv.storage.reading import Entry
from ckptconv.text import format_size, some

# Files that are searched for metadata under another name, at most.
_TRIED = 32
# Names listed in a message, at most.
_SHOWN = 5


# ---------------------------------------------------------------------------------------------------------- reading


def read(place: Location, wanted: Wanted) -> Source:
    """Open a checkpoint by its directory, or by a directory above it.

    Read descriptions only: the metadata, and the beginning and end of each entry of the tensors that are `wanted` and
    of all other values. Raise CorruptError if something is missing or contradicts itself, UnsafeError for an attack.
    """
    return _read(place.path, located(place), wanted)


def _read(path: str, place: Located, wanted: Wanted) -> Source:
    checkpoint = Described.open(place.directory)
    optimizer = Described.open(place.optimizer) if place.optimizer else None
    described, roles = checkpoint.described, checkpoint.roles
    chosen = [name for name, way in described.paths.items() if roles.is_model(way)]
    if not any(name in described.tensors for name in chosen) and not roles.models:
        chosen = list(described.paths)  # the checkpoint is an optimizer's
    # A model saved as one value with tensors in it is left out: then `below` finds nothing.
    model = dcp_names.subtree(checkpoint.tree(chosen), roles.model)
    weights = {} if model is None else model
    # A user who names a key, or asks for the optimizer, needs no notes about the rest.
    left = _Left() if wanted.key else _Left.beside(set(chosen), checkpoint)
    trees = {wanted.key: checkpoint.under(wanted.key)} if wanted.key else {}
    inputs = checkpoint.identified()
    states, state_inputs = None, dict[str, Hashable]()
    state_notes: list[str] = []
    states_error: CkptconvError | None = None
    read = [checkpoint]
    if wanted.states or wanted.master:
        left = left.without(left.optimizers)
        states, states_error, state_notes, named_by = _optimizer(checkpoint, optimizer or checkpoint, wanted)
        read = [checkpoint, optimizer] if optimizer else read
        identified = optimizer.identified(f"{basename(optimizer.directory)}/") if optimizer else checkpoint.identified()
        state_inputs = {**identified, **named_by}
    values = {**checkpoint.values, **checkpoint.hidden}
    extra = dialects.read_extra(place.directory, described, values, checkpoint.digests)
    left = left.without(extra.common) if extra and described.nested else left
    notes, warnings = left.messages()
    notes += state_notes
    if extra:
        described.mentioned.update(extra.log.mentioned)
        weights, states, unnamed = extra.arranged(weights, states, described, checkpoint.values, wanted)
        states_error = states_error or unnamed
        inputs = {**(state_inputs if wanted.master else inputs), **extra.log.inputs}
        notes += [*extra.notes(), *checkpoint.warnings]
        checkpoint.warnings.clear()
    if optimizer and not wanted.states:
        notes.append(f"{NOT_CONVERTED}{optimizer.directory}{STATES_ARE_CONVERTED}.")
    return Source(
        format=extra.format if extra else checkpoint.format,
        family=FAMILY,
        path=path,
        weights=weights,
        weights_error=checkpoint.pickled_error(trees.get(".", weights)) if wanted.key in ("", ".") else None,
        optimizer=states,
        of_states=StateFacts(states_error, inputs=state_inputs),
        trees=trees,
        notes=[*([place.note] if place.note else []), *notes],
        warnings=[*checkpoint.warnings, *warnings, *(text for further in read[1:] for text in further.warnings)],
        facts={**_facts(path, checkpoint), **dialects.facts(extra.common if extra else checkpoint.values)},
        files=FileFacts.of_all(opened.files for opened in read),
        inputs=inputs,
        bytes_read=sum(opened.entries.bytes_read for opened in read) + (extra.log.bytes_read if extra else 0),
        defaults=Defaults(shard_size=5 * 10**9),
        structured=described.nested or bool(described.values) or extra is not None,
        pieces=dcp_names.FLAT_PARAMETER,
        wanted=wanted,
        pointers=place.pointers,
        reread=functools.partial(_read, path, place),
    )


def _optimizer(
    model: Described, checkpoint: Described, wanted: Wanted
) -> tuple[dict[str, Any] | None, CkptconvError | None, list[str], Mapping[str, Hashable]]:
    """Return the states by parameter, and the groups, of the optimizers in `checkpoint`, None if there are none; why
    they cannot be converted; notes on the source of names of numbers; and the identity of its files."""
    from ckptconv.features.dcp.numbered import model_of, pieces_error  # few conversions ask for states
    from ckptconv.formats.states import by_parameter, is_numbered
    from ckptconv.formats.states import named as named_states

    described, roles = checkpoint.described, checkpoint.roles
    names: dict[Path, list[str]] = {}
    for name, way in described.paths.items():
        optimizer = roles.optimizer_of(way)
        if optimizer is not None:
            names.setdefault(optimizer, []).append(name)
    if not names and checkpoint is not model:
        names[()] = list(described.paths)
    parameters = model.parameters()
    error = pieces_error(described, names, parameters.values(), checkpoint.directory)
    if error:
        return None, error, [], {}
    trees = []
    for at, of_optimizer in names.items():
        tree = checkpoint.tree(of_optimizer, key=dcp_names.dotted(at))
        beside = dcp_names.dotted(roles.model_beside(at))
        trees.append((f"{beside}." if beside else "", dcp_names.subtree(tree, at)))
    numbered = [tree for _, tree in trees if is_numbered(tree, parameters)]
    if not numbered or len(numbered) < len(trees):
        return by_parameter(trees, parameters, checkpoint.directory), None, [], {}
    try:
        optimizers = [(dcp_names.dotted(at), tree) for at, tree in zip(names, numbered, strict=True)]
        states, by = named_states(optimizers, model_of(parameters, wanted.orders), checkpoint.directory)
    except UnsupportedError as unnamed:
        if len(trees) > 1 or wanted.orders:
            return None, unnamed, [], {}
        kept = (
            "The optimizer's states keep numbers instead of names, because the names of its parameters are not known: "
            f"{unnamed.message}"
        )
        return by_parameter([("", numbered[0])], parameters, checkpoint.directory), None, [kept], {}
    return states, None, by.notes, by.inputs


def _facts(path: str, checkpoint: Described) -> dict[str, Any]:
    described = checkpoint.described
    chunks = sum(len(tensor.chunks) for tensor in described.tensors.values())
    facts: dict[str, Any] = {
        **({} if checkpoint.directory == path else {"directory": checkpoint.directory}),
        "tensors": len(described.tensors),
        "chunks": chunks,
        "size": sum(tensor.nbytes for tensor in described.tensors.values()),
    }
    if described.values:
        facts["other values"] = len(described.values)
    if described.version:
        facts["version"] = described.version
    return facts


@dataclass
class _Left:
    """Counts of the rest next to the model, by the key of its part; `optimizers` are the keys of optimizers."""

    counts: dict[str, Counter[str]] = field(default_factory=dict)
    optimizers: set[str] = field(default_factory=set)

    @classmethod
    def beside(cls, chosen: set[str], checkpoint: Described) -> _Left:
        left = cls()
        for name, way in checkpoint.described.paths.items():
            if name not in chosen:
                key = dcp_names.dotted(checkpoint.roles.part_of(way))
                kind = "tensor" if name in checkpoint.described.tensors else "value"
                left.counts.setdefault(key, Counter())[kind] += 1
                if checkpoint.roles.optimizer_of(way) is not None:
                    left.optimizers.add(key)
        return left

    def without(self, keys: Collection[str]) -> _Left:
        return _Left({key: counts for key, counts in self.counts.items() if key not in keys}, self.optimizers - {*keys})

    def messages(self) -> tuple[list[str], list[str]]:
        """Return notes and warnings on the rest: tensors outside an optimizer are worth a warning."""
        notes: list[str] = []
        warnings: list[str] = []
        for surprising, messages in ((False, notes), (True, warnings)):
            keys = [
                key
                for key, count in self.counts.items()
                if (count["tensor"] > 0 and key not in self.optimizers) is surprising
            ]
            if keys:
                parts = some(keys, form=lambda key: f"{named(key)} ({_counted(self.counts[key])})")
                messages.append(left_by_key(parts, keys, bool(self.optimizers) and not surprising))
        return notes, warnings


def _counted(counts: Counter[str]) -> str:
    return ", ".join(
        f"{counts[noun]:,} {noun}{'s' * (counts[noun] > 1)}" for noun in ("tensor", "value") if counts[noun]
    )


# ------------------------------------------------------------------------------------------------------ one checkpoint


@dataclass
class Described:
    """A checkpoint whose description was read: its content, its format's name, and the opener of its entries.

    `digests` are the SHA-256 of its files by path, as its manifest states them.
    """

    directory: str
    described: Description
    entries: Entries
    format: str
    inputs: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    hidden: dict[str, Any] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)

    @functools.cached_property
    def roles(self) -> dcp_names.Roles:
        """The roles of keys: model or optimizer."""
        paths = self.described.paths
        return dcp_names.Roles.of(paths.values(), [paths[name] for name in self.described.tensors])

    @property
    def files(self) -> FileFacts:
        """Facts of its files apart from tensors."""
        named = list(self.described.opaque), list(self.described.mentioned)
        return FileFacts(*named, records_of(self.entries.records), self.digests)

    @classmethod
    def open(cls, place: Location) -> Described:
        """Open the checkpoint in the directory `place` itself."""
        entries = Entries(place)
        inputs: dict[str, Any] = {}
        digests = _read_digests(place, entries, inputs)
        described = _described(place, entries, inputs, digests)
        if not _is_described(place.names):
            return cls(place.path, described, entries, "safetensors shards of torch.distributed.checkpoint", inputs)
        opened = cls(place.path, described, entries, "torch.distributed.checkpoint", inputs, digests=digests)
        entries.described = opened.described
        opened.read_values()
        return opened

    def read_values(self) -> None:
        """Read the values that are no tensors. Skip large ones; hide those with tensors in them, which a key asks
        for."""
        described = self.described
        places = described.values
        for name, place in places.items():
            # Without flatten_state_dict, a whole model may be one value: its tensors are read where they are.
            if place.length > MAX_VALUE and (described.nested or place.transforms):
                self.hidden[name] = None
                size, most = format_size(place.length), format_size(MAX_VALUE)
                self.warnings.append(f"Left out: {named(name)}, a value of {size}; at most {most} are supported.")
        opaque, mentioned = self.described.opaque, self.described.mentioned
        for name, file in self.entries.values({name: at for name, at in places.items() if name not in self.hidden}):
            if file is None:
                self.hidden[name] = None
                self.warnings.append(f"Left out: {named(name)}, which was not written by torch.save.")
                continue
            mentioned.update(dict.fromkeys(map(str, file.globals)))
            if _is_plain(file.value):
                opaque.update(dict.fromkeys(map(str, file.opaque)))
                self.values[name] = file.value
            else:
                self.hidden[name] = file.value
        tensors = [name for name, value in self.hidden.items() if value is not None]
        if tensors:
            self.warnings.append(
                f"Left out: the tensors inside {some(tensors, form=named)}, values that were pickled as a whole. --key "
                "NAME converts such a value."
            )

    def tree(self, names: Iterable[str], *, hidden: bool = False, key: str = "") -> Any:
        """Return the state dict with the values of these names; with `hidden`, also of those that contain tensors.
        Names without a path of their own that begin with `key` go into a dict under `key`."""
        described = self.described
        names = list(names)
        tensors = self.entries.tensors({name: described.tensors[name] for name in names if name in described.tensors})
        leaves: dict[Path, Any] = {}
        for name in names:
            for known in (tensors, self.values, self.hidden if hidden else {}):
                if name in known and (known is not self.hidden or known[name] is not None):
                    way = described.paths[name]
                    inside = key and way == (name,) and name.startswith(f"{key}.")
                    leaves[(key, name[len(key) + 1 :]) if inside else way] = known[name]
        return dcp_names.nest(leaves, self.directory)

    def under(self, key: str) -> Any:
        """Return the state dict with everything under the dotted `key`; if nothing is, with the names alone."""
        described = self.described
        ways = {name: dcp_names.dotted(way) for name, way in described.paths.items()}
        if key == ".":
            return self.tree(ways)
        names = [name for name, way in ways.items() if way == key or way.startswith(key + ".")]
        if not names:
            names = [name for name, way in ways.items() if key.startswith(way + ".") and name in described.values]
        if not names:
            return dcp_names.nest(dict.fromkeys(described.paths.values()), self.directory)
        hidden = all(name in described.values for name in names)
        return self.tree(names, hidden=hidden, key=key)

    def pickled_error(self, weights: Any) -> UnsupportedError | None:
        """Return an error if there is no tensor in `weights` because the model is in a value that was left out."""
        if not self.hidden or self.described.nested or not _is_plain(weights):
            return None
        keys = list(self.hidden)
        key = next((key for key in MODEL_KEYS if key in keys), keys[0])
        return UnsupportedError(
            f"{self.directory} has no separate tensors, only values that were pickled as a whole (a planner with "
            f"flatten_state_dict=False does that): {some(keys, form=named)}.",
            f"--key {key} converts one of them. One rank saved it, so it has only that rank's part of a distributed "
            "tensor.",
        )

    def parameters(self) -> dict[str, SavedTensor]:
        """Return the weights by the names that an optimizer uses for them."""
        depth, described = len(self.roles.model), self.described
        return {dcp_names.dotted(described.paths[name][depth:]): described.tensors[name] for name in self.weights()}

    def weights(self) -> list[str]:
        """Return the names of the model's tensors as the checkpoint has them."""
        described = self.described
        return [name for name in described.tensors if self.roles.is_model(described.paths[name])]

    def identified(self, prefix: str = "") -> dict[str, Any]:
        """Return the identity of the files read so far, by name; each name is given `prefix`."""
        records = records_of(self.entries.records)
        identities = {prefix + name: identity for name, identity in self.inputs.items()}
        for name, file in self.entries.files.items():
            digest = records[file.path].digest() if file.path in records else None
            identities[prefix + name] = Input(file, (file.size, file.stamp if digest is None else digest))
        return identities


def _is_plain(value: Any) -> bool:
    """Whether there is no tensor in `value`."""
    return not any(map(is_tensor, walk(value)))


def describe(place: Location) -> Description:
    """Return the description of the checkpoint in the directory `place` itself. Raise as `read` does."""
    return _described(place, Entries(place), {})


def _read_digests(place: Location, entries: Entries, inputs: dict[str, Any]) -> dict[str, str]:
    """Return the SHA-256 of the files by path, as the checkpoint's manifest states them; none if there is none."""
    if METADATA not in place.names or not place.has_file(INTEGRITY):
        return {}
    from ckptconv.features.joining.integrity import stated_digests

    data = _whole_file(place.join(INTEGRITY), MAX_VALUE, entries, inputs)
    return stated_digests(place, INTEGRITY, data, {})


def _described(
    place: Location, entries: Entries, inputs: dict[str, Any], digests: Mapping[str, str] = MappingProxyType({})
) -> Description:
    """Read the description, compare it with its digest, count the bytes read in `entries`, and put its identity into
    `inputs`."""
    if _is_described(place.names):
        pickles = _pickles(place, entries, inputs, digests)
        return read_description(pickles, of_ranks=METADATA not in place.names)
    if any(re.fullmatch(SHARD, name) for name in place.names):
        return _read_shards(place, entries, inputs)
    dialects.check_backend(place)
    raise _not_described(place)


def _is_described(names: Iterable[str]) -> bool:
    return any(name == METADATA or re.fullmatch(RANK, name) for name in names)


def _describes(place: Location, entry: Entry) -> bool:
    """Whether a file is the metadata of a checkpoint, under any name."""
    if entry.kind != "file" or basename(entry.file.path).endswith((SUFFIX, model_files.SUFFIX)):
        return False
    with place.at(entry.file).open_reader() as reader:
        return is_metadata(reader.read_at(0, min(reader.file.size, BEGINNING)))


def _not_described(directory: Location) -> CkptconvError:
    from ckptconv.formats.foreign import foreign_directory

    names = directory.names
    foreign = foreign_directory(names)
    if foreign:
        return type(foreign)(f"{directory} {foreign.message}", foreign.hint)
    if f"{METADATA}.tmp" in names:
        return CorruptError(
            f"{directory} has {METADATA}.tmp and no {METADATA}, which is written last: the save was interrupted.",
            "Take another checkpoint.",
        )
    parts = sum(name.endswith(SUFFIX) for name in names)
    likely = sorted(names, key=lambda name: ("metadata" not in name, name))[:_TRIED]
    renamed = next((name for name in likely if _describes(directory, names[name])), "")
    if renamed:
        return CorruptError(
            f"{directory} has {parts} {SUFFIX} files and no {METADATA}, which describes them; {renamed} is a renamed "
            "one.",
            f"Rename it to {METADATA}.",
        )
    return CorruptError(
        f"{directory} has {parts} {SUFFIX} files and no {METADATA}, which describes them: it was not copied, or the "
        "save was interrupted.",
        f"Copy {METADATA} too: its name begins with a dot, so a pattern such as * does not match it.",
    )


def _pickles(
    directory: Location, entries: Entries, inputs: dict[str, Any], digests: Mapping[str, str]
) -> Iterable[tuple[str, bytes]]:
    """Yield the metadata with its path: one, or one of each rank, in order."""
    names = directory.names
    ranks = {int(match[1]): name for name in names if (match := re.fullmatch(RANK, name))}
    wanted = [METADATA] if METADATA in names else [ranks[rank] for rank in sorted(ranks)]
    if METADATA not in names:
        missing = [rank for rank in range(max(ranks) + 1) if rank not in ranks]
        if missing:
            raise CorruptError(
                f"{directory} lacks {len(missing)} of the files that describe it, such as __{missing[0]}.metadata.",
                "Copy the files of all ranks to one place.",
            )
    for name in wanted:
        place = directory.join(name)
        data = _whole_file(place, MAX_PICKLE, entries, inputs)
        if digests:
            from ckptconv.features.joining.integrity import check_content

            check_content(place.path, data, digests)
        yield place.path, data


def _whole_file(place: Location, most: int, entries: Entries, inputs: dict[str, Any]) -> bytes:
    """Return the contents of a file of at most `most` bytes, which is an input from now on."""
    with place.open_reader() as reader:
        size = reader.file.size
        if size > most:
            raise CorruptError(f"{reader.file.path} has {size} bytes; at most {most} are supported.")
        data = reader.read_at(0, size)
    entries.bytes_read += size
    inputs[place.name] = Input(reader.file, (size, zlib.crc32(data)))
    return data


# ------------------------------------------------------------------------------------------------ safetensors shards


def _read_shards(directory: Location, entries: Entries, inputs: dict[str, Any]) -> Description:
    """Return the description of the files of HuggingFaceStorageWriter; each says where its tensors begin."""
    from ckptconv.formats import safetensors

    names = directory.names
    files = [name for name in names if re.fullmatch(SHARD, name)]
    numbers = sorted({int(name[6:11]) for name in files})
    if numbers != list(range(1, len(numbers) + 1)):
        missing = next(number for number in range(1, len(numbers) + 2) if number not in numbers)
        raise CorruptError(
            f"{directory} lacks shard {missing} of {numbers[-1]}: shard-{missing:05d}-….safetensors.",
            "Copy the files of all ranks to one place.",
        )
    described = Description(nested=False)
    for name in files:
        place = directory.at(names[name].file)
        header = safetensors.header_of(place)
        entries.bytes_read += header.bytes_read
        inputs[name] = header.identity
        for key, (offsets, stored) in offsets_of(header.tensors, header.metadata, place.path).items():
            saved = described.tensors.setdefault(key, SavedTensor(stored.dtype, (0,) * len(offsets)))
            if saved.dtype != stored.dtype or len(saved.shape) != len(offsets):
                raise CorruptError(f"{place}: {named(key)} has another type than in the other shards.")
            ends = (offset + size for offset, size in zip(offsets, stored.shape, strict=True))
            saved.shape = tuple(map(max, saved.shape, ends))
            if stored.numel:
                saved.add_once(Chunk(offsets, stored.shape, stored))
    described.paths = {name: (name,) for name in described.tensors}
    return described
