"""Refuse attacks: in pickles, as the machine reads them, and in files of torch.save that are refused anyway."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ckptconv.errors import CkptconvError, TruncatedError, UnsafeError
from ckptconv.features.attacks import tables, zip_entries
from ckptconv.formats.torch.container import SCANNED
from ckptconv.pickles.machine import Machine, load
from ckptconv.storage import LOCAL_SIGNATURE
from ckptconv.storage.reading import Reader


def refuse_pickle(machine: Machine, error: CkptconvError | None = None) -> None:
    """Raise UnsafeError if what `machine` has read of a pickle is an attack. `error` is how the pickle broke."""
    # Callers read truncated data again, with more of it, so it does not count as broken.
    is_broken = error is not None and not isinstance(error, TruncatedError)
    _refuse(machine, is_broken)
    if is_broken and machine.around:
        _run_on(machine)


def _refuse(machine: Machine, is_broken: bool) -> None:
    if machine.suspects and (machine.opaque or is_broken):
        raise tables.error(machine.where, machine.suspects, machine.opaque) from None


class _Unframed(Machine):
    """A machine that ignores frames, as CPython's C unpickler ignores some."""

    def enter_frame(self, length: int) -> None:
        """Read on."""


def _run_on(machine: Machine) -> None:
    """Look for an attack in a pickle that breaks in a frame."""
    vocabulary, where, limits = machine.vocabulary, machine.where, machine.limits
    whole, _, base = machine.around or (machine.data, 0, 0)
    again = _Unframed(whole, vocabulary, where, 0 if base else machine.start, limits, lean=False)
    try:
        with contextlib.suppress(CkptconvError):
            again.run()
        again.report(broken=True)
        _refuse(again, True)
    finally:
        vars(again).clear()


def refuse_pickles(data: bytes, where: str, most: int = 1) -> None:
    """Raise UnsafeError if there is an attack among the first `most` pickles of `data`.

    Another reader would run these pickles, although the file is refused.
    """
    at = 0
    for _ in range(most):
        try:
            at = load(data, where=where, start=at).end
        except UnsafeError:
            raise
        except CkptconvError:
            return


def refuse_file(reader: Reader, head: bytes) -> None:
    """Raise UnsafeError if a refused file holds an attack that torch.load, or Python's pickle, would run."""
    if head.startswith(LOCAL_SIGNATURE):
        for pickle in _pickles_in_zip(reader):
            refuse_pickles(pickle, reader.file.path)
    else:
        refuse_pickles(reader.read_at(0, min(SCANNED, reader.file.size)), reader.file.path)


def _pickles_in_zip(reader: Reader) -> Iterator[bytes]:
    """Yield the beginning of each member that torch may take for data.pkl."""
    entries = list(zip_entries.entries(reader))
    top, slash, _ = entries[0].name.partition(b"/") if entries else (b"", b"", b"")
    for entry in entries:
        if slash and entry.name.lower() == (top + b"/data.pkl").lower():
            yield zip_entries.content(reader, entry, SCANNED)
