"""Write what changes one checkpoint into another as a delta."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckptconv.errors import UNWRITTEN, UnsupportedError, UsageError, leaving
from ckptconv.features.deltas.changes import delta_files
from ckptconv.features.deltas.comparing import COMPARING
from ckptconv.features.deltas.encoding import Encoder, Pair, check_installed
from ckptconv.features.deltas.reading import OVERWRITE
from ckptconv.formats.source import Source
from ckptconv.options.table import Options
from ckptconv.outputs.planning import output_of
from ckptconv.outputs.targets import Target, nearest_directory, resolve_output
from ckptconv.publish.producing import produce
from ckptconv.result import Report
from ckptconv.storage.files import held, look
from ckptconv.storage.paths import normalize
from ckptconv.text import Proposed, some

_SMALLER = ", or take --delta-encoding auto"


@dataclass(frozen=True)
class AskedDelta:
    """A delta to be written: its directory, and how to encode it.

    It leads to `version`, from the one before unless `base_version` is another.
    """

    path: str
    encoding: str
    checksum: str
    version: int
    base_version: int | None = None

    @leaving(UNWRITTEN)
    def checked(self, options: Options) -> Options:
        """Return `options` with a directory for temporary data. Raise UsageError if the delta cannot be at its path,
        and what `check_installed` raises."""
        check_installed(self.checksum)
        target = self._target(options)
        if target.is_file:
            raise UsageError(f"{self.path} is the name of a file, but a delta is a directory.")
        return options.replaced(spool_dir=options.spool_dir or nearest_directory([target]))

    def _target(self, options: Options) -> Target:
        return resolve_output(Proposed(normalize(self.path), "Give another directory to --delta."), options)

    def encoder(self, options: Options) -> Encoder:
        """Return what encodes the delta while the tensors are compared, with temporary data where `options` say."""
        return Encoder(self.encoding, self.checksum, options.spool_dir)

    @leaving(UNWRITTEN)
    def write(
        self,
        one: Source,
        other: Source,
        found: Any,
        changed: Mapping[str, Pair],
        encoder: Encoder,
        options: Options,
    ) -> tuple[dict[str, Any], Report]:
        """Write the delta that makes `other` of `one`, which differ in `changed` as `found` says, a `Difference`, and
        of which `encoder` has the encoded changes. Return the fields of its `DeltaFiles`, and the report of its output.

        Raise UnsupportedError if more than values of tensors differ, as a delta tells nothing else.
        """
        started = time.monotonic()
        unlike = [tensor.name for tensor in found.tensors if not tensor.is_alike]
        if unlike:
            raise UnsupportedError(
                f"A delta changes tensors that {one.path} and {other.path} both have, with the same shape and dtype. "
                f"These tensors do not fit: {some(unlike)}.",
                "Leave them out with --exclude, or give both sides the same names and dtypes with --rename and "
                "--dtype.",
            )
        # Names that are tied on both sides share a pair. Other readers find only the one that is kept in a base.
        ties = {tensor.name: tensor.tied for tensor in found.tensors}
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
            inputs = {f"a/{path}": each for path, each in one.inputs.items()}
            inputs |= {f"b/{path}": each for path, each in other.inputs.items()}
            source = one.computing(like=None)._replace(inputs=inputs, companions={})
            target = self._target(options)
            output = output_of("delta", [source], target, options, files, {})
            report = produce([source, other], [output], options, started)
        size, whole = sum(each.size for each in files), sum(pair.other.nbytes for pair in changed.values())
        if size > whole > 0:
            found.warnings.append(
                f"the delta has {size} bytes, more than the {whole} of the tensors that it changes: send the new "
                f"checkpoint itself{_SMALLER if encoding == OVERWRITE else ''}."
            )
        made = {
            "path": target.path,
            "base_version": base_version,
            "version": self.version,
            "encoding": encoding,
            "checksum": self.checksum,
            "tensors": len(changed),
            "bytes": size,
        }
        return made, report


def asked(
    options: Options, optimizer: bool, tolerance: tuple[float | None, float | None], settings: Mapping[str, Any]
) -> AskedDelta | None:
    """Return the delta that is to be written, if one is. Raise UsageError for options that contradict it."""
    path, *others = (settings[name] for name in COMPARING)
    if not path:
        for name, given in zip(list(COMPARING)[1:], others, strict=True):
            if given != COMPARING[name].default:
                raise UsageError(
                    f"{COMPARING[name].flags[0]} needs --delta: it applies only to a delta.", "Give --delta DIR."
                )
        return None
    if optimizer:
        raise UsageError("--delta is of weights, and --with-states asks for the optimizer states too.")
    if tolerance != (None, None):
        raise UsageError("--delta stores every changed bit, and cannot be combined with --rtol or --atol.")
    if getattr(options, "map", ""):
        raise UsageError("--delta starts from A unchanged, and cannot be combined with --map.", "Convert A first.")
    return AskedDelta(path, *others)
