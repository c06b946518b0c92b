"""A checkpoint in a directory: the description of its tensors, and its other values."""

from __future__ import annotations

import functools
import re
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from ckptconv.errors import CorruptError, UnsupportedError
from ckptconv.features.dcp import dialects
from ckptconv.features.dcp.entries import Entries, records_of
from ckptconv.features.dcp.metadata import Description, SavedTensor, read_description
from ckptconv.features.dcp.names import INTEGRITY, METADATA, RANK, SHARD
from ckptconv.features.joining import names as dcp_names
from ckptconv.features.joining.names import MAX_VALUE, Path, named
from ckptconv.formats.source import MODEL_KEYS, FileFacts
from ckptconv.formats.torch.container import MAX_PICKLE
from ckptconv.pickles.children import is_tensor, walk
from ckptconv.plan import Input
from ckptconv.storage.location import Location
from ckptconv.text import format_size, some


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
                f"Left out: the tensors inside {some(tensors, form=named)}, which were pickled as whole values. To "
                "convert one, use --key NAME."
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
            f"--key {key} converts such a value. One rank saved each value, so it contains only that rank's parts of "
            "distributed tensors.",
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
    """Return whether `value` contains no tensor."""
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
        from ckptconv.features.dcp.in_safetensors import read_shards

        described, bytes_read = read_shards(place, inputs)
        entries.bytes_read += bytes_read
        return described
    dialects.check_backend(place)
    from ckptconv.features.dcp.undescribed import not_described

    raise not_described(place)


def _is_described(names: Iterable[str]) -> bool:
    return any(name == METADATA or re.fullmatch(RANK, name) for name in names)


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
