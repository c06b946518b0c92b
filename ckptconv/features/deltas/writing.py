"""Writes the changes from one checkpoint to another as a delta."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckptconv.errors import UNWRITTEN, UnsupportedError, UsageError, leaving
from ckptconv.features.deltas.changes import delta_files
from ckptconv.features.deltas.comparing import COMPARING
from ckptconv.features.deltas.encoding import Encoder, Pair, check_installed
from ckptconv.features.deltas.reading import OVERWRITE, versions_at
from ckptconv.formats.model_files import SUFFIX
from ckptconv.formats.source import Source
from ckptconv.options.table import Options
from ckptconv.outputs.planning import output_of
from ckptconv.outputs.targets import CHECKPOINT_SUFFIXES, Target, nearest_directory, resolve_output
from ckptconv.publish.producing import produce
from ckptconv.result import Report
from ckptconv.storage.files import held, look
from ckptconv.storage.location import Location
from ckptconv.storage.paths import normalize
from ckptconv.text import Proposed, some

_CHECKPOINT, _SMALLER = "use the new checkpoint itself", "use --delta-encoding auto"


@dataclass(frozen=True)
class AskedDelta:
    """A delta to write: its directory, and its encoding.

    It leads to `version`, from the version before it, or from `base_version`.
    """

    path: str
    encoding: str
    checksum: str
    version: int
    base_version: int | None = None

    @leaving(UNWRITTEN)
    def checked(self, options: Options) -> Options:
        """Return `options` with a directory for temporary data. Raise UsageError if the delta cannot be at its path,
        and the errors of `check_installed`."""
        check_installed(self.checksum)
        target = self._target(options)
        if target.is_file or look(normalize(self.path)).kind == "file":
            raise UsageError(f"{self.path} is the name of a file, but a delta must be a directory.")
        return options.replaced(spool_dir=options.spool_dir or nearest_directory(target.path))

    def _target(self, options: Options) -> Target:
        path = normalize(self.path)
        if os.path.splitext(path)[1] and not path.endswith((SUFFIX, *CHECKPOINT_SUFFIXES)):
            path += "/"  # a name such as v2.delta is that of a directory
        return resolve_output(Proposed(path, "Give another directory to --delta."), options)

    def encoder(self, options: Options) -> Encoder:
        """Return an encoder for the delta, to be used while the tensors are compared. `options` has the place of
        temporary data."""
        return Encoder(self.encoding, self.checksum, options.spool_dir)

    @leaving(UNWRITTEN)
    def write(
        self,
        before: Source,
        after: Source,
        difference: Any,
        changed: Mapping[str, Pair],
        encoder: Encoder,
        options: Options,
    ) -> tuple[dict[str, Any], Report]:
        """Write the delta that changes `before` into `after`. They differ in `changed`, by the `difference`, a
        `Difference`; `encoder` has the encoded changes. Return the fields of its `DeltaFiles`, and the report of its
        output.

        Raise UnsupportedError if more than values of tensors differ, because a delta stores nothing else.
        """
        started = time.monotonic()
        unlike = [tensor.name for tensor in difference.tensors if not tensor.is_alike]
        if unlike:
            raise UnsupportedError(
                f"A delta requires that {before.path} and {after.path} have the same tensors, with the same shapes and "
                f"dtypes. These do not match: {some(unlike)}.",
                "Give both sides the same names and dtypes with --rename and --dtype. --exclude omits tensors from the "
                "delta. To add new tensors, use the whole checkpoint.",
            )
        # Names that are tied on both sides share a pair. Other readers find only the one that is kept in a base.
        ties = {tensor.name: tensor.tied for tensor in difference.tensors}
        changed = {name: pair for name, pair in changed.items() if changed.get(ties[name]) is not pair}
        encoding, places = encoder.made(changed.values())
        with contextlib.ExitStack() as stack:
            spools = []
            for spool in encoder.spools:
                name = f"<the changes in {spool.descriptor}>"
                stack.enter_context(held(name, spool.descriptor))
                spools.append(look(name).file)
            payloads = {key: place.payload(spools) for key, place in zip(changed, places, strict=True)}
            sums = {key: place.checksum for key, place in zip(changed, places, strict=True)}
            base_version = self.version - 1 if self.base_version is None else self.base_version
            files = delta_files(payloads, sums, encoding, self.checksum, (base_version, self.version))
            inputs = {f"a/{path}": item for path, item in before.inputs.items()}
            inputs |= {f"b/{path}": item for path, item in after.inputs.items()}
            source = before.computing(like=None)._replace(inputs=inputs, companions={})
            target = self._target(options)
            output = output_of("delta", [source], target, options, files, {})
            earlier = versions_at(Location(target.path, dict(options.storage_options)))
            report = produce([source, after], [output], options, started)
        replaced = [note for note in report.notes if note.startswith("This replaces ")]
        if replaced and earlier and earlier != (base_version, self.version):
            replaced.append("The delta that was there changed version {:06d} into {:06d}.".format(*earlier))
        difference.warnings.extend(replaced)
        size, whole = sum(item.size for item in files), sum(pair.other.nbytes for pair in changed.values())
        # Of small changes in a large checkpoint, the description is the largest part.
        is_larger = size > sum(tensor.bytes for tensor in difference.tensors)
        instead = [_CHECKPOINT] * is_larger + [_SMALLER] * (self.encoding == OVERWRITE)
        if size > whole > 0 and instead:
            difference.warnings.append(
                f"the delta has {size} bytes, but the tensors that it changes have only {whole} bytes. To save space, "
                f"{', or '.join(instead)}."
            )
        fields = {
            "path": target.path,
            "base_version": base_version,
            "version": self.version,
            "encoding": encoding,
            "checksum": self.checksum,
            "tensors": len(changed),
            "bytes": size,
        }
        return fields, report


def asked(
    options: Options, optimizer: bool, tolerance: tuple[float | None, float | None], settings: Mapping[str, Any]
) -> AskedDelta | None:
    """Return the delta to write, if options ask for one. Raise UsageError for options that contradict it."""
    path, *others = (settings[name] for name in COMPARING)
    if not path:
        for name, value in zip(list(COMPARING)[1:], others, strict=True):
            if value != COMPARING[name].default:
                raise UsageError(
                    f"{COMPARING[name].flags[0]} requires --delta: it applies only to a delta.", "Give --delta DIR."
                )
        return None
    if optimizer:
        raise UsageError("--delta writes only weights, but --with-states also selects optimizer states.")
    if tolerance != (None, None):
        raise UsageError("--delta stores every changed bit, and cannot be combined with --rtol or --atol.")
    if getattr(options, "map", ""):
        raise UsageError("--delta starts from A unchanged, and cannot be combined with --map.", "Convert A first.")
    return AskedDelta(path, *others)
