"""Compare the files of an output with the digests in its manifest, where its source is not at hand."""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Callable

from ckptconv.errors import DifferenceError, MissingError, UsageError
from ckptconv.features.verify.provenance import Manifest, check_no_manifest, not_stated, read_manifest
from ckptconv.features.verify.report import Verification
from ckptconv.formats.run_names import TREES
from ckptconv.options.table import Options
from ckptconv.outputs.targets import MANIFEST, pointer_of
from ckptconv.process import peak_rss
from ckptconv.result import OutputFile
from ckptconv.storage.digests import digest_of
from ckptconv.storage.location import Location
from ckptconv.storage.paths import basename
from ckptconv.storage.progress import Progress
from ckptconv.text import some

# A user with an output, and without its source, has got the output from someone else.
_AGAIN = "The file was damaged or changed after it was written. Download it again, or convert again."


def compared(
    path: str, options: Options, progress: Progress | None, on_total: Callable[[int], object] | None
) -> Verification:
    """Return the report on the files of the output at `path`, which are those of its manifest.

    Raise UsageError if it has no manifest with digests, DifferenceError for a file that is missing or another.
    """
    started = time.monotonic()
    place = Location(path, dict(options.storage_options))
    is_directory = place.kind == "directory"
    at = place.at(options.manifest) if options.manifest else place.join(MANIFEST)
    if place.kind == "file" and not options.manifest and path.endswith(".json"):
        check_no_manifest(place, options, f"Specify the output: ckptconv verify OUTPUT --manifest {path}")
    manifest = read_manifest(at, options, path)
    if manifest is None or "digest" not in manifest.members:
        if place.kind == "missing":
            raise MissingError(f"{path} does not exist.")
        why = f"the manifest {at} contains none" if manifest else f"{at} does not exist"
        if not (is_directory or options.manifest):
            why = f"{path} is a single file, whose manifest is stored separately"
        elsewhere = "" if options.manifest else " Or specify the manifest with digests: --manifest FILE."
        named = "" if is_directory else " --manifest FILE"
        shown = shlex.join(["ckptconv", "inspect", path])
        download = "" if manifest else f" For a download, {shown} reports missing and truncated files."
        folders = [name for name, entry in place.names.items() if entry.kind == "directory"] if is_directory else []
        inner = [name for name in folders if manifest is None and place.child(name).has_file(MANIFEST)]
        within = (
            f"It contains outputs with manifests, which must be verified separately: {some(inner)}. " if inner else ""
        )
        raise UsageError(
            f"{path} cannot be verified without its source, because digests are missing: {why}.",
            f"{within}Specify the source first: ckptconv verify SOURCE OUTPUT. A conversion with --digest "
            f"sha256{named} writes digests.{elsewhere}{download}",
        )
    algorithm, files = manifest.members["digest"], manifest.members["files"]
    if on_total:
        on_total(sum(entry["size"] for entry in files.values()))
    done = Verification(at.path, [], manifest.members["source"]["format"], 0, manifest.members["aliases"], 0, 0, 0, [])
    for name, entry in files.items():
        file = _file(place, name) if is_directory else place
        _check(manifest, file, entry, algorithm, progress)
        done.outputs.append(OutputFile(file.path, entry["size"], len(entry["tensors"])))
        done.tensors += len(entry["tensors"])
        done.bytes_compared += entry["size"]
    done.tensors += len(done.aliases)
    if is_directory:
        done.warnings.extend(not_stated(place, {*files, basename(at.path)}))
    done.bytes_read = done.bytes_compared
    done.warnings.append(
        f"The files were compared with the {algorithm} digests in {at}, but not with their source. To compare every "
        "element, use ckptconv verify SOURCE OUTPUT."
    )
    done.seconds, done.peak_rss_bytes = time.monotonic() - started, peak_rss()
    return done


def _file(place: Location, name: str) -> Location:
    """Return the place of a file of the output in a directory; the file that names a tree lies next to that."""
    form = next((form for form, pointer in TREES.items() if pointer == name), "")
    return place.at(pointer_of(place.path, form)) if form else place.join(name)


def _check(
    manifest: Manifest, file: Location, entry: dict[str, object], algorithm: str, progress: Progress | None
) -> None:
    """Raise DifferenceError unless a file has the size and the digest of its `entry` in the manifest."""
    stated: dict[str, object] = entry["digests"]  # type: ignore[assignment]
    if file.kind != "file":
        raise DifferenceError(
            f"{file} is missing, but {manifest.place} lists it.", _AGAIN, what="missing", file=file.path
        )
    with contextlib.closing(file.open_reader()) as reader:
        size = reader.file.size
        digest = digest_of(reader, algorithm, progress) if size == entry["size"] else ""
    if digest != stated["file"]:
        difference = f"the {algorithm} {digest}" if digest else f"{size} bytes"
        wanted = stated["file"] if digest else f"{entry['size']} bytes"
        raise DifferenceError(
            f"{file} has {difference}, but {manifest.place} records {wanted}.",
            _AGAIN,
            what="file",
            file=file.path,
            expected=wanted,
            found=difference,
        )
