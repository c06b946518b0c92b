"""Decide which files may be replaced: every path that a command or a call of the library writes is checked here.

1. A file that this program wrote is replaced by one of the same kind. `publish.earlier` recognizes it.
2. A file of another program is replaced only if the user typed it as OUTPUT.
3. A directory that holds weights, a step or an adapter of another program is no output.
4. A file that the user did not type as OUTPUT, such as a default name, a report or a page, replaces only its like.
5. No file replaces an input.

`--overwrite` lifts 2 to 4 for the very names that are written; `--no-clobber` refuses even what 1 and 2 allow. Where
nothing lies yet, only 5 is left: `publish.present`, which has the others, is imported for what exists.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from ckptconv.errors import UsageError
from ckptconv.formats.run_names import TREES
from ckptconv.formats.source import Source
from ckptconv.outputs.computed import terms_of
from ckptconv.outputs.targets import MANIFEST, check_file, directory_of, files_behind, kind_of_directory
from ckptconv.publish.claims import INPUT, NEW_NAME, Claim
from ckptconv.publish.statements import AFTERWARDS, STATEMENTS
from ckptconv.storage.handles import HIDDEN
from ckptconv.storage.location import Location
from ckptconv.storage.paths import basename, dirname, is_remote, join, normalize, resolved_name, resolving
from ckptconv.text import LastWord

if TYPE_CHECKING:
    from ckptconv.options.table import Options
    from ckptconv.publish.present import Present

# The options for files that are written next to outputs. An option's name is also the kind of its file.
_BESIDE = ("manifest", *STATEMENTS, *AFTERWARDS)
_ELSEWHERE = "Write it to another path, and rename it afterwards if necessary."


def _further_files(options: Options) -> dict[str, tuple[str, str]]:
    """Return the files that are written next to outputs, {option: (path, kind)}."""
    return {f"--{kind}": (normalize(path), kind) for kind in _BESIDE if (path := options.asked(kind))}


class Replacing:
    """Checks all files that one call writes: outputs, by their `claims`, and the files `beside` them, {option: (path,
    kind)}."""

    def __init__(
        self,
        options: Options,
        spared: Spared,
        claims: Sequence[Claim],
        beside: Mapping[str, tuple[str, str]] | None = None,
    ) -> None:
        self._options, self._spared, self.claims = options, spared, claims
        self._beside = _further_files(options) if beside is None else beside
        self._stores = dict(options.storage_options)
        self.replaced: dict[str, None] = {}  # sentences on files that are replaced

    def read_permissions(self) -> list[str]:
        """Return the permissions that name the inputs, for the process that publishes what others have staged."""
        return [f"{INPUT}{place}" for place in self._spared.places]

    def written(self, directories: Iterable[str]) -> dict[str, str]:
        """Return the files that are written besides those of the outputs, of which `directories` have manifests."""
        beside = {path: option for option, (path, _) in self._beside.items()}
        return beside | {join(path, MANIFEST): "manifest" for path in directories}

    def check(self, again: bool = False) -> None:
        """Raise UsageError if a file would replace a protected one; FailedError if --no-clobber forbids it.

        `again`: check files on disks only. On a store, files of the outputs may have their names by now.
        """
        claims = [claim for claim in self.claims if not (again and is_remote(claim.path))]
        beside = {option: file for option, file in self._beside.items() if not (again and is_remote(file[0]))}
        if self._options.overwrite and not self._options.clobber:
            raise UsageError("--overwrite and --no-clobber contradict each other.", "Leave one out.")
        self._check_apart(claims, {option: path for option, (path, _) in beside.items()})
        for option, (path, _) in beside.items():
            self._spared.check(path, f"The output of {option}")
            check_file(path, option, self._stores)
        for claim in claims:
            if claim.form == "file":
                self._spared.check(claim.path, "The output")
            else:
                self._spared.check_directory(claim.path, claim.form, claim.names, "The output")
            place = Location(claim.path, self._stores)
            # A file names a tree's step, and lies next to it.
            if claim.form in TREES or not (self._may_be_any(claim) or place.kind == "missing"):
                self._present.check(claim, place)
            # A store is not asked for a file that may be any.
            is_unasked = is_remote(claim.path) and self._may_be_any(claim)
            if not (is_unasked or place.kind == "missing") and (sentence := self._present.replaced(claim, place)):
                self.replaced[sentence] = None
        for within in dict.fromkeys(claim.within for claim in claims if claim.within and not claim.beside):
            if (place := Location(within, self._stores)).kind != "missing":
                self._present.check_within(place, [claim for claim in claims if claim.within == within])
        for option, (path, kind) in beside.items():
            if (place := Location(path, self._stores)).kind != "missing":
                self._present.check_written(place, option, kind)

    @functools.cached_property
    def _present(self) -> Present:
        """The checks of what exists. They remember files that were compared, for the second time."""
        from ckptconv.publish.present import Present

        return Present(self._options)

    def _may_be_any(self, claim: Claim) -> bool:
        """Return whether the file of a claim may be replaced whatever it is."""
        is_last = isinstance(claim.proposed, LastWord)
        is_typed = claim.proposed is None or (claim.overwrite and not is_last)
        return claim.form == "file" and self._options.clobber and is_typed

    def _check_apart(self, claims: Sequence[Claim], beside: Mapping[str, str]) -> None:
        """Raise UsageError if two of the files that are to be written have one name."""
        resolve = resolving()
        taken: dict[str, str] = {}
        for claim in claims:
            names = [*claim.names, *([] if claim.form == "file" else [MANIFEST])]
            places = {resolve(path) for path in (claim.path, *map(claim.final, names))}
            shared = next((taken[place] for place in places if place in taken), "")
            inside = next((outer for outer in claims if outer is not claim and _is_inside(outer, claim)), None)
            if shared or inside:
                rival = shared or inside.path  # type: ignore[union-attr]
                raise UsageError(
                    f"{claim.path} and {rival} would replace each other.", "Give one of them another path."
                )
            taken.update(dict.fromkeys(places, claim.path))
        named: dict[str, str] = {}
        for option, path in beside.items():
            place = resolve(path)
            if place in taken or any(claim.form in TREES and _lies_below(path, claim.path) for claim in claims):
                raise UsageError(f"The output of {option} would replace the output {path}.", "Give it another path.")
            if option[2:] in STATEMENTS and any(_lies_below(path, claim.path) for claim in claims):
                why = f"{option} {path} is in the output, but the file cannot describe itself."
                raise UsageError(why, "Give a path outside the output.")
            if basename(path).startswith(HIDDEN):
                raise UsageError(f"{option} {path}: ckptconv reserves names with this prefix.", NEW_NAME)
            if (rival := named.setdefault(place, option)) != option:
                raise UsageError(f"{rival} and {option} both specify {path}.", "Give one of them another path.")


def _is_inside(inner: Claim, outer: Claim) -> bool:
    """Return whether an output is in the directory of another that is replaced as a whole."""
    return outer.form in TREES and _lies_below(inner.path, outer.path)


def _lies_below(path: str, directory: str) -> bool:
    return resolved_name(path).startswith(f"{resolved_name(directory)}/")


# ------------------------------------------------------------------------------------------------------------- inputs


def inputs_behind(sources: Iterable[Source]) -> Iterator[str]:
    """Yield the paths of the files from which `sources` were read, and of the inputs that they are computed from."""
    for source in sources:
        yield from files_behind(source)
        for term in terms_of(source):
            yield from files_behind(term)


class Spared:
    """The files of the checkpoint that is read, and of its reference. No output may replace them, under any name.

    `places` are the paths, by their resolved forms.
    """

    def __init__(self, paths: Iterable[str], reference: Iterable[str] = ()) -> None:
        of_reference, typed = list(reference), list(paths)
        present = (path for path in (*of_reference, *typed) if is_remote(path) or os.path.lexists(path))
        self._resolve = resolving()
        self.places = {self._resolve(path): path for path in present}
        self._of_reference = set(of_reference).difference(typed)
        self._identities = {_identity(path): path for path in self.places.values() if not is_remote(path)}

    def check(self, path: str, subject: str) -> None:
        """Raise UsageError if the file `subject`, written to `path`, would replace one of the spared files."""
        hit = self.places.get(self._resolve(path))
        if hit is None and not is_remote(path) and os.path.exists(path):
            hit = self._identities.get(_identity(path))
        if hit is not None:
            raise self._refused(hit, subject, path)

    def check_directory(self, path: str, form: str, names: Iterable[str], subject: str) -> None:
        """Raise UsageError if `subject`, written to the directory `path` under `names`, would replace one of the files.

        A tree replaces everything in its directory; other outputs, the files in it that have names of output files.
        """
        directory = resolved_name(path)
        is_ours = (directory_of(form) or kind_of_directory("directory")).is_file
        for place, hit in self.places.items():
            if form in TREES:
                inside = place.startswith(f"{directory}/")
            else:
                inside = dirname(place) == directory and is_ours(basename(place))
            if inside:
                raise self._refused(hit, subject, hit)
        if not is_remote(path):
            present = os.listdir(path) if os.path.isdir(path) and form not in TREES else []
            for name in {*names, *filter(is_ours, present)}:
                self.check(join(path, name), subject)

    def _refused(self, hit: str, subject: str, path: str) -> UsageError:
        """Return the error for `subject`, written to `path`, where the spared file `hit` is."""
        shown = path if hit == path else f"{path}, which is {hit}"
        message = f"{subject} would replace {shown}, the input itself."
        if hit in self._of_reference:
            message = f"{subject} would replace {shown}, a file of the reference."
        return UsageError(message, _ELSEWHERE)


def _identity(path: str) -> tuple[int, int] | None:
    """Return device and inode of the file to which `path` leads; None if there is none."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    return status.st_dev, status.st_ino
