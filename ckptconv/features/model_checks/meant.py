"""Tell whether it is clear which of several weights in a directory are meant."""

from __future__ import annotations

from collections.abc import Mapping
from os.path import splitext

from ckptconv.errors import UsageError
from ckptconv.features.model_checks.left import WEIGHTS
from ckptconv.formats.model_files import SUFFIX
from ckptconv.formats.source import STEMS, Source
from ckptconv.options.registered import several
from ckptconv.storage.paths import basename, join
from ckptconv.storage.stores import is_repository
from ckptconv.text import some


def check(source: Source, left: Mapping[str, str]) -> None:
    """Raise UsageError if `source` is a directory of which one file was read, whose name is not that of a model, and
    weights among the files that were `left`, {path: reason}, are as likely to be meant.

    Weights of the same name are the same in another format. The report names other weights of a repository.
    """
    read = [name for name in source.inputs if name.endswith(SUFFIX)]
    if len(read) != 1 or read[0].startswith(STEMS) or is_repository(source.path):
        return
    stem, _ = splitext(read[0])
    others = [path for path, why in left.items() if why == WEIGHTS and splitext(basename(path))[0] != stem]
    if others:
        raise UsageError(
            f"{source.path} holds several weights, and it is not clear which are meant: "
            f"{some([join(source.path, read[0]), *others], form=str)}.",
            f"Give one of them{several(', or convert several: {}') or '.'}",
        )
