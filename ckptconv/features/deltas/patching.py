"""Applies deltas to a checkpoint."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from ckptconv.engine.threads import in_threads
from ckptconv.errors import UNWRITTEN, CorruptError, UsageError, leaving
from ckptconv.features.deltas.changes import read_chain
from ckptconv.features.deltas.options import PATCHING
from ckptconv.features.deltas.reading import ORDER, Delta, is_delta
from ckptconv.features.deltas.together import blocks_of
from ckptconv.formats.opening import opened
from ckptconv.formats.registered import copying
from ckptconv.formats.source import NOT_CONVERTED, without_states
from ckptconv.options.option import checked
from ckptconv.options.table import Options
from ckptconv.outputs.planning import Output, planned
from ckptconv.outputs.targets import Target, check_spool, nearest_directory, resolve_output
from ckptconv.plan import Data
from ckptconv.process import no_garbage, settled
from ckptconv.publish.producing import produce
from ckptconv.publish.publish import Verifier
from ckptconv.result import Report
from ckptconv.storage.digests import hasher
from ckptconv.storage.files import Readers, is_far, look
from ckptconv.storage.location import Location
from ckptconv.storage.packed import packed
from ckptconv.storage.paths import is_remote, listed, normalize
from ckptconv.storage.progress import Progress, counter, shown
from ckptconv.tensors.dtypes import DTYPES
from ckptconv.tensors.lazy import LazyTensor, Stored
from ckptconv.text import some

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ckptconv.options.keywords import PatchOptions
    from ckptconv.storage.progress import AnyProgress

# Returns the tensors of an output without the deltas.
_Before = Callable[[], Mapping[str, LazyTensor]]
# Bytes of a tensor that are hashed at a time, and tensors at once.
_STEP = 1 << 19
_MOST_JOBS = 4
_U8 = DTYPES["uint8"]


@leaving(UNWRITTEN)
@shown
@checked(PATCHING)
def patch(
    base: str | os.PathLike[str],
    deltas: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    *,
    progress: AnyProgress | None = None,
    on_total: Callable[[int], object] | None = None,
    before_commit: Callable[[], object] | None = None,
    **options: Unpack[PatchOptions],
) -> Report:
    """Apply `deltas`, directories that `diff` or slime wrote, in their order to `base`, a checkpoint of any format.

    `output` is safetensors, in one file or a directory, like a conversion of `base`. Every tensor that a delta
    changes is read again when it is written, and its checksum compared, before the output gets its name. `progress`,
    `on_total` and `before_commit` are those of `convert`.

    Raise UsageError for deltas that do not follow one another, CorruptError if a delta is damaged or for another base,
    and the errors of `convert`. Then no new file has a final name.

    Examples:
        >>> report = ckptconv.convert("model.pt", "model.safetensors")
        >>> difference = ckptconv.diff("model.pt", "model.safetensors", delta="delta")
        >>> report = ckptconv.patch("model.pt", "delta", "patched.safetensors")
        >>> report.tensors
        2
    """
    started = time.monotonic()
    chosen = Options(**options)
    base, delta_paths = normalize(base), listed(deltas, "No delta was given to apply.")
    target = resolve_output(normalize(output), chosen)
    if target.kind not in ("file", "directory", "virtual"):
        raise UsageError(
            f"{target.path} is not a name of a safetensors output, which patch writes.",
            "Give a directory, or a name that ends in .safetensors or .virtual.json.",
        )
    check_spool(chosen.spool_dir)
    chosen = chosen.replaced(spool_dir=chosen.spool_dir or nearest_directory(target.path))
    with no_garbage():
        places = [Location(path, dict(chosen.storage_options)) for path in delta_paths]
        chain = _chain(places, [Location(path, places[0].options) for path in (base, target.path)])
        source = opened(base, chosen, key=chosen.key)
        for module in copying("source"):
            source, target = module.accompanied(source, target, chosen)
        unpatched, source = source, source.computing(patch=chain)
        plan = planned(source, target, chosen)
        # The deltas are inputs, which the output may not replace.
        source = source._replace(
            pointers=[*source.pointers, *_indices(chain)],
            notes=[_note(note) for note in source.notes],
            warnings=[*source.warnings, *_of_base(plan)],
        )
    expected = expected_of(chain, plan.aliases)
    source = source._replace(notes=[*source.notes, *_unchecked(plan, expected, target.path)])
    verify, whole = None, Target(target.path, "directory")
    before: _Before = lambda: _tensors(planned(unpatched, whole, chosen))  # noqa: E731
    if not chosen.dry_run:
        if is_remote(target.path) or target.kind == "virtual":
            # A store returns only files with final names: compare the data to be written instead. For a virtual
            # checkpoint, no data is written.
            real = planned(source, whole, chosen) if target.kind == "virtual" else plan
            check_changes(_tensors(real), expected, base, chosen, before)
        else:
            verify = _verifier(plan, expected, base, chosen, before)
    return produce([source], [plan], chosen, started, counter(progress), on_total, before_commit, verify)


def _chain(places: Sequence[Location], others: Iterable[Location]) -> list[Delta]:
    """Read the deltas. If one is none, but one of `others`, BASE and OUTPUT, is, say in which order they come."""
    try:
        return read_chain(places)
    except UsageError as error:
        if delta := next(filter(is_delta, others), None):
            error.hint = f"{delta} is a delta. {ORDER}".strip()
        raise


def _indices(chain: Sequence[Delta]) -> Iterator[str]:
    for delta in chain:
        for name in delta.inputs:
            yield Location(delta.path).join(name).path


def _note(note: str) -> str:
    """Return a note on BASE. The delta decides which parts of a checkpoint `patch` can write."""
    if note.startswith(NOT_CONVERTED) and note.endswith(" --key . for everything."):
        return f"{note.partition('. Use ')[0]}. Give --key . to both diff --delta and patch for everything."
    return without_states(note)


def _of_base(output: Output) -> Iterator[str]:
    """Yield a warning about values that no delta changes, such as the step of the training."""
    if recorded := output.notices.recorded:
        yield (
            f"The values under {some(recorded, form=str)} were copied from BASE, because a delta changes only tensors."
        )


def _unchecked(output: Output, expected: Mapping[str, Delta], path: str) -> Iterator[str]:
    """Yield a note on the tensors that no delta changes: deltas have no checksums of them."""
    names = [part.name for part in _parts(output) if part.nbytes and part.name not in expected]
    if names:
        yield (
            f"copied from BASE and not checked, because no delta changes them: {some(names)}. To compare all tensors: "
            f"ckptconv diff {shlex.quote(path)} B, where B is the checkpoint that the last delta produces."
        )


def _parts(output: Output) -> Iterator[Data]:
    return (part for file in output.plan.files for part in file.parts if isinstance(part, Data))


def _tensors(output: Output) -> dict[str, LazyTensor]:
    return {part.name: part.tensor for part in _parts(output)}


def expected_of(chain: Sequence[Delta], aliases: Mapping[str, str]) -> dict[str, Delta]:
    """Return the last delta that changes each tensor, without `aliases`: its checksum is that of the result."""
    last: dict[str, Delta] = {}
    for delta in chain:
        last.update(dict.fromkeys(delta.checksums, delta))
    return {name: delta for name, delta in last.items() if name not in aliases}


def _verifier(
    output: Output, expected: Mapping[str, Delta], base: object, options: Options, before: _Before
) -> Verifier:
    """Return the function that compares the checksums of the staged files."""

    def verify(places: Sequence[Mapping[str, str] | None], progress: Progress) -> int:
        staged: dict[str, LazyTensor] = {}
        for file in output.plan.files:
            staged_file = look((places[0] or {})[file.name]).file
            for part in file.parts:
                if isinstance(part, Data):
                    staged[part.name] = Stored(staged_file, part.offset, _U8, (part.nbytes,), (1,))
        return check_changes(staged, expected, base, options, before, progress)

    return verify


def check_changes(
    tensors: Mapping[str, LazyTensor],
    expected: Mapping[str, Delta],
    base: object,
    options: Options,
    before: _Before,
    progress: Progress | None = None,
) -> int:
    """Compare the checksums of `tensors` with those of the deltas `expected`. Return the bytes read. `before` returns
    the tensors as they were before the deltas.

    Raise CorruptError for a tensor with another checksum.
    """
    far = any(is_far(file.stored.path) for name in expected for file in tensors[name].inputs())
    jobs = 1 if far else min(options.jobs or min(os.cpu_count() or 1, _MOST_JOBS), max(len(expected), 1))
    with settled(), Readers(dict(options.storage_options), options.spool_dir) as readers:
        readers.expect(packed(tensors[name] for name in expected))
        checkers = [_Checker(readers, tensors, base, before, progress) for _ in range(jobs)]
        in_threads(iter(expected.items()), checkers, None)
    return sum(tensors[name].nbytes for name in expected)


class _Checker:
    """Compares the checksums of tensors, one after the other."""

    def __init__(
        self,
        readers: Readers,
        tensors: Mapping[str, LazyTensor],
        base: object,
        before: _Before,
        progress: Progress | None,
    ) -> None:
        self._readers, self._tensors, self._progress = readers, tensors, progress
        self._base, self._before = base, before

    def run(self, task: tuple[str, Delta]) -> int:
        """Check a tensor against the last delta that changes it. Return its bytes."""
        name, delta = task
        checksum = self._checksum(self._tensors[name], delta)
        if checksum != delta.checksums[name]:
            why = "is not the checkpoint from which the delta was written, or one of the two is damaged."
            if self._checksum(self._before()[name], delta) == delta.checksums[name]:
                why = "has this tensor as the delta produces it: the delta was already applied."
            raise CorruptError(
                f"{name!r} does not match {delta.path}: the {delta.checksum} of the result is {checksum}, but "
                f"{delta.checksums[name]} was expected. {self._base} {why}",
                "Give the base that the first delta changes, and all deltas in order.",
            )
        return self._tensors[name].nbytes

    def _checksum(self, tensor: LazyTensor, delta: Delta) -> str:
        hashing = hasher(delta.checksum)
        for block in blocks_of(tensor, self._readers, _STEP):
            hashing.update(block)
            if self._progress:
                self._progress(len(block))
        return str(hashing.hexdigest())
