"""Reads archives of TorchScript: the description of the modules in a program, and the program's constants."""

from __future__ import annotations

from typing import Any

from ckptconv.features.script import described, weights
from ckptconv.features.script.weights import ScriptWeights, told, unsupported
from ckptconv.formats.torch import objects
from ckptconv.formats.torch.container import SCRIPT_ATTRIBUTES, SCRIPT_DESCRIPTION, SCRIPT_RECORDS, TorchFile
from ckptconv.formats.torch.zip import CONSTANTS, OF_CONSTANTS, PICKLE, Storages, TorchArchive
from ckptconv.pickles.machine import Loaded, load
from ckptconv.pickles.vocabulary import Limits, Vocabulary
from ckptconv.text import some


def read(archive: TorchArchive, pickle: bytes, storages: Storages, byteorder: str, limits: Limits) -> TorchFile:
    """Return the weights of an archive, whose description is `pickle`."""
    words = weights.vocabulary(objects.vocabulary(storages.resolve))
    if archive.is_old_script:
        return _old_script(archive, pickle, words, limits)
    loaded = load(pickle, words, where=f"{archive.file.path} ({archive.prefix}{PICKLE})", limits=limits)
    return _script(archive, loaded, _constants(archive, words, storages, limits), byteorder)


def _constants(archive: TorchArchive, words: Vocabulary, storages: Storages, limits: Limits) -> Any:
    """Return the constants of the program in a TorchScript archive, a tuple."""
    inner = storages.within(OF_CONSTANTS)
    pickle = archive.find(CONSTANTS)
    if pickle is None:
        constants: Any = ()
    else:
        words = words._replace(persistent=inner.resolve)
        where = f"{archive.file.path} ({archive.prefix}{CONSTANTS})"
        constants = load(pickle, words, where=where, limits=limits).value
    unused = [name for name, row in archive.storages(OF_CONSTANTS) if row not in inner.used and archive.sizes[row]]
    if unused:
        raise unsupported(archive.file.path, f"its program describes {some(unused, 1)}, but {CONSTANTS} does not")
    return constants


def _script(archive: TorchArchive, loaded: Loaded, constants: Any, byteorder: str) -> TorchFile:
    """Return the weights of a TorchScript archive whose data.pkl holds a module."""
    if archive.prefix + SCRIPT_DESCRIPTION in archive.rows:
        raise archive.corrupt(
            f"it contains both {PICKLE} and {SCRIPT_DESCRIPTION}, and torch releases differ in which file they read"
        )
    return _weights_file(
        archive, weights.weights(loaded.value, constants, archive.find, archive.file.path), loaded, byteorder
    )


def _old_script(archive: TorchArchive, description: bytes, words: Vocabulary, limits: Limits) -> TorchFile:
    """Return the weights of a TorchScript archive of torch 1.0 to 1.2, which has no data.pkl."""

    def size(key: str) -> int | None:
        row = archive.storage(key, SCRIPT_RECORDS)
        return None if row is None else archive.sizes[row]

    def attributes(words: Vocabulary) -> Loaded:
        name = SCRIPT_ATTRIBUTES
        return load(archive.read(name), words, where=f"{archive.file.path} ({archive.prefix}{name})", limits=limits)

    needed = described.Archive(archive.file.path, size, words, attributes)
    return _weights_file(archive, *described.weights(description, needed), "little")


def _weights_file(archive: TorchArchive, weights_found: ScriptWeights, loaded: Loaded, byteorder: str) -> TorchFile:
    return TorchFile(
        weights_found.tensors,
        archive.file,
        tuple(cls for cls in loaded.opaque if cls.module.partition(".")[0] != "__torch__"),
        loaded.globals,
        byteorder,
        archive.records(archive.rows_below(*(archive.prefix + folder for folder in archive.folders))),
        archive.bytes_read,
        "script archive",
        notes=(told(weights_found.others),) if weights_found.others else (),
    )
