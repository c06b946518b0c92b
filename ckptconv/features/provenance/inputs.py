"""Digests of the input files of an output, for statements about it.

A conversion reads parts of a file, in any order. For its digest, the file is read once more, from beginning to end.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from ckptconv.engine.threads import in_threads
from ckptconv.errors import FailedError
from ckptconv.options.table import Options
from ckptconv.outputs.planning import Output
from ckptconv.plan import Input
from ckptconv.storage.files import Readers, check_unchanged, is_far, is_held, look
from ckptconv.storage.paths import basename, is_remote
from ckptconv.storage.progress import Progress, on_file
from ckptconv.storage.reading import Range, Sources
from ckptconv.storage.stores import reached
from ckptconv.tensors.moves import File

# Inputs of an output, by name.
Named: TypeAlias = Mapping[str, File]
# Bytes that are read at a time, and the most files at once.
_READ, _MOST_JOBS = 1 << 20, 4
# The text of the progress meanwhile.
_DIGESTING = "computing digests of the inputs"


def inputs_of(output: Output, source: str) -> dict[str, File]:
    """Return the input files of `output`, by the names in its manifest, and the files read that have no name there.

    The latter are named by their path within the directory of `source`, or else by their own name: the data behind a
    virtual checkpoint, and the files of formats of other packages.
    """
    files = {name: input_file.file for name, input_file in output.inputs.items() if isinstance(input_file, Input)}
    known = {file.path for file in files.values()}
    directory = f"{source.rstrip('/')}/"
    for file in dict.fromkeys(file.stored for file in output.plan.inputs()):
        if file.path not in known:
            inside = file.path.startswith(directory)
            known.add(file.path)
            name = file.path[len(directory) :] if inside else basename(file.path)
            files[name if name not in files else file.path] = file
    return files


class Digested(NamedTuple):
    """An input: its size in bytes, and its content digest in hex."""

    size: int
    digest: str


def digested(
    inputs: Sequence[Named], algorithm: str, options: Options, progress: Progress | None = None
) -> list[dict[str, Digested]]:
    """Return the digests of the `inputs` of each output, by name. Each file is read once, in bounded memory.

    `progress` gets the bytes read. Raises CorruptError if a file has changed since it was opened.
    """
    files = files_in(inputs)
    digests: dict[File, str] = {}
    on_file(progress, _DIGESTING)
    with Readers(dict(options.storage_options), options.spool_dir) as readers:
        # The largest first, so that no thread is left alone with it.
        near = sorted((file for file in files if not is_far(file.path)), key=lambda file: -file.size)
        jobs = max(min(options.jobs or min(os.cpu_count() or 1, _MOST_JOBS), len(near)), 1)
        in_threads(iter(near), [_Digester(readers, algorithm, digests, progress) for _ in range(jobs)], None)
        far = [file for file in files if is_far(file.path)]
        if far:
            memory = options.buffers(far=True) // 2
            with reached(far[0].path).prefetching(readers, _needed, memory=memory) as prefetch:
                digester = _Digester(prefetch, algorithm, digests, progress)
                for item in prefetch.over(_ranges(far)):
                    digester.add(item)
    check_unchanged(files, dict(options.storage_options))
    return [{name: Digested(file.size, digests[file]) for name, file in item.items()} for item in inputs]


def bytes_of(inputs: Iterable[Named]) -> int:
    """Return the number of bytes that `digested` reads."""
    return sum(file.size for file in files_in(inputs))


def files_in(inputs: Iterable[Named]) -> list[File]:
    """Return the files of all outputs, each once."""
    return list(dict.fromkeys(file for named_files in inputs for file in named_files.values()))


def _ranges(files: Iterable[File]) -> Iterator[Range]:
    """Yield the ranges to read `files` in, at least one of each."""
    for file in files:
        for at in range(0, max(file.size, 1), _READ):
            yield Range(file, at, min(at + _READ, file.size))


def _needed(part: Range) -> list[Range]:
    return [part] if part.stop > part.start else []


class _Digester:
    """Digests one file after the other, and puts each digest into `digests`."""

    def __init__(self, readers: Sources, algorithm: str, digests: dict[File, str], progress: Progress | None) -> None:
        self._readers, self._algorithm, self._found, self._progress = readers, algorithm, digests, progress
        self._buffer = memoryview(bytearray(_READ))
        self._hashing: Any = None

    def run(self, file: File) -> int:
        """Digest a file. Return the bytes read."""
        for part in _ranges([file]):
            self.add(part)
        return file.size

    def add(self, part: Range) -> None:
        """Add the next range of a file. The first range begins the digest, and the last one completes it."""
        file, start, stop = part
        if not start:
            from ckptconv.storage.digests import hasher

            self._hashing = hasher(self._algorithm)
        data = self._buffer[: stop - start]
        if data:
            with self._readers.reading(file) as reader:
                reader.fill(start, [data])
            self._hashing.update(data)
        if stop == file.size:
            self._found[file] = self._hashing.hexdigest()
        if self._progress:
            self._progress(len(data))


# ------------------------------------------------------------------------------------------------------------- parts


def described(inputs: Mapping[str, File]) -> dict[str, list[Any]]:
    """Return the places of the inputs, in the form of the description of parts: {name: [path, size, stamp]}.

    A pipe has no place once its part is made: it is left out.
    """
    kept = ((name, file) for name, file in inputs.items() if not is_held(file.path))
    return {
        name: [file.path if is_remote(file.path) else os.path.abspath(file.path), file.size, file.stamp]
        for name, file in kept
    }


def found_again(
    path: str, recorded: Mapping[str, Sequence[Any]], named: Iterable[str], options: Options
) -> dict[str, File]:
    """Return the inputs of parts of the output `path` by name, from the record that `described` returned. `named` are
    those of its manifest.

    Raises FailedError for an input that no longer exists, or that this machine does not see.
    """
    files = {name: File(*entry) for name, entry in recorded.items()}
    gone = [file.path for file in files.values() if look(file.path, dict(options.storage_options)).kind != "file"]
    gone += [name for name in named if name not in files]
    if gone:
        counted = Counter(gone)
        others = f", and {len(counted) - 1} more" if len(counted) > 1 else ""
        raise FailedError(
            f"The statement about {path} requires the digests of its inputs, but {gone[0]}{others} cannot be read "
            "here.",
            "Run finish on the machine that made the parts, or without --attest.",
        )
    return files
