"""Decide which files may be replaced: every path that a command or a call of the library writes is checked here.

1. A file that this program wrote is replaced by one of the same kind. `publish.earlier` recognizes it.
2. A file of another program is replaced only if the user typed it as OUTPUT.
3. A directory that holds weights, a step or an adapter of another program is no output.
4. A file that the user did not type as OUTPUT, such as a default name, a report or a page, replaces only its like.
5. No file replaces an input.

`--overwrite` lifts 2 to 4 for the very names that are written; `--no-clobber` refuses even what 1 and 2 allow.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ckptconv.errors import FailedError, UsageError
from ckptconv.formats.model_directory import is_companion_name
from ckptconv.formats.run_names import TREES
from ckptconv.formats.source import Source
from ckptconv.outputs.computed import terms_of
from ckptconv.outputs.kinds import DIVIDED
from ckptconv.outputs.targets import (
    FORMS,
    MANIFEST,
    check_file,
    directory_of,
    files_behind,
    final_path,
    is_beside,
    is_output_name,
    kind_of_directory,
)
from ckptconv.plan import FilePlan
from ckptconv.publish.earlier import UNFINISHED, Directory, file_made_as
from ckptconv.publish.statements import STATEMENTS
from ckptconv.storage.handles import HIDDEN
from ckptconv.storage.location import Location
from ckptconv.storage.paths import basename, dirname, is_remote, join, normalize, resolved_name, resolving
from ckptconv.storage.reading import REQUESTS
from ckptconv.text import LastWord, Proposed, some

if TYPE_CHECKING:
    from ckptconv.options.table import Options
    from ckptconv.outputs.planning import Output

# Forms of safetensors, which may lie in the directory of their input.
_BESIDE_INPUT = frozenset(FORMS.values())
# The options for files that are written next to outputs. An option's name is also the kind of its file.
_BESIDE = ("manifest", *STATEMENTS, "depfile")
_ELSEWHERE = "Write it to another path, and rename it afterwards if it needs this name."
# Prefixes of permissions that name inputs: in the directory of the output, and anywhere.
READ, INPUT = "read/", "input/"
_NEW_DIRECTORY = "Give a directory that does not exist yet."
NEW_NAME = "Give another name, or --overwrite to replace it."
# Bytes of a planned file that are compared at a time with one that exists.
_UNIT, _MEMORY = 512 << 10, 8 << 20


class Claim(NamedTuple):
    """The place of an output to be written, and facts of that output.

    `form` is its form (see `Target.form`), `made_as` its kind, as in marks, and `names` are those of its files; `plans`
    has the plans of some. `proposed` is set if the user did not type the path as OUTPUT. `beside`: the directory is
    that of the input. `within` is the directory that the user gave, if several outputs are put there. `read` are the
    names there in which the input lies.
    """

    path: str
    form: str
    made_as: str
    names: Sequence[str]
    proposed: Proposed | None = None
    beside: bool = False
    overwrite: bool = False
    plans: Mapping[str, FilePlan] = {}
    within: str = ""
    read: frozenset[str] = frozenset()

    @property
    def kind(self) -> str:
        """The kind of its content, by whichever command it is written."""
        return self.made_as.partition("/")[0]

    def final(self, name: str) -> str:
        """Return the final path of one of its files."""
        return final_path(self.path, self.form, name)

    def is_like(self, earlier: str) -> bool:
        """Whether this output may replace a file of the kind `earlier`. A last word that is an output of another
        command is an input; the manifest of rows does not say which command wrote them."""
        is_last = isinstance(self.proposed, LastWord) and self.kind != "rows"
        return earlier == self.made_as or (earlier == self.kind and not is_last)

    def is_mixed_with(self, name: str) -> bool:
        """Whether the file `name` in its directory is not replaced, and read together with the output."""
        from ckptconv.formats.checkpoint_names import is_read_with_others

        directory = directory_of(self.form)
        is_own = directory is not None and directory.is_file(name)
        return name not in self.names and (is_own or is_read_with_others(name))

    def permissions(self) -> list[str]:
        """Return the permissions of this claim, for the process that publishes what others have staged."""
        granted = {"typed": self.proposed is None, "beside": self.beside, "overwrite": self.overwrite}
        return [name for name, is_so in granted.items() if is_so] + [f"{READ}{name}" for name in sorted(self.read)]


def claim_of(output: Output, sources: Sequence[Source], options: Options) -> Claim:
    """Return the claim of a planned output of `sources`."""
    target = output.target
    within = dirname(target.path) if target.kind in DIVIDED or options.per_rank else ""
    # Weights computed from several checkpoints are not the weights of any of them.
    is_plain = output.made_as == "weights" and target.form in _BESIDE_INPUT
    return Claim(
        target.path,
        target.form,
        output.made_as,
        [file.name for file in output.plan.files],
        target.proposed,
        is_plain and is_beside(within or target.path, sources),
        options.overwrite,
        # A directory with a manifest is known by that.
        {} if output.has_manifest else {file.name: file for file in output.plan.files},
        within,
        frozenset(_entries(within or target.path, sources)),
    )


def _entries(directory: str, sources: Iterable[Source]) -> Iterator[str]:
    """Yield the names in `directory` in which the `sources` lie."""
    above = f"{resolved_name(directory)}/"
    for source in sources:
        place = resolved_name(source.path)
        if place.startswith(above):
            yield place.removeprefix(above).partition("/")[0]


def _further_files(options: Options) -> dict[str, tuple[str, str]]:
    """Return the files that are written next to outputs, {option: (path, kind)}."""
    files = {f"--{kind}": (getattr(options, kind), kind) for kind in _BESIDE}
    return {option: (normalize(path), kind) for option, (path, kind) in files.items() if path}


class Replacing:
    """Checks all files that one call writes: outputs, by their `claims`, and the files `beside` them, {option: (path,
    kind)}. It remembers files that it compared byte for byte, for the second check just before the commit.
    """

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
        self._same: set[tuple[str, str]] = set()

    def read_permissions(self) -> list[str]:
        """Return the permissions that name the inputs, for the process that publishes what others have staged."""
        return [f"{INPUT}{place}" for place in self._spared.places]

    def check(self, again: bool = False) -> None:
        """Raise UsageError if a file would replace a protected one; FailedError if --no-clobber forbids it.

        `again`: check files on disks only. On a store, files of the outputs may have their names by now.
        """
        claims = [claim for claim in self.claims if not (again and is_remote(claim.path))]
        beside = {option: file for option, file in self._beside.items() if not (again and is_remote(file[0]))}
        if self._options.overwrite and not self._options.clobber:
            raise UsageError("--overwrite and --no-clobber contradict each other.", "Leave one out.")
        for option, (path, _) in beside.items():
            self._spared.check(path, f"The output of {option}")
            check_file(path, option, self._stores)
        self._check_apart(claims, {option: path for option, (path, _) in beside.items()})
        for claim in claims:
            if claim.form == "file":
                self._spared.check(claim.path, "The output")
                self._check_file(claim)
            else:
                self._spared.check_directory(claim.path, claim.form, claim.names, "The output")
                (self._check_tree if claim.form in TREES else self._check_directory)(claim)
        for within in dict.fromkeys(claim.within for claim in claims if claim.within and not claim.beside):
            self._check_within(within, [claim for claim in claims if claim.within == within])
        for option, (path, kind) in beside.items():
            self._check_written(path, option, kind)

    # ---- files next to outputs

    def _check_written(self, path: str, option: str, kind: str) -> None:
        place = Location(path, self._stores)
        if place.kind == "missing":
            return
        self._check_clobber(path)
        if not self._options.overwrite and file_made_as(place, kind) != kind:
            raise UsageError(
                f"{option} would replace {path}, which ckptconv did not write for {option}.",
                NEW_NAME,
            )

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
                raise UsageError(f"The output of {option} would replace {path}, the output.", "Give it another path.")
            if basename(path).startswith(HIDDEN):
                raise UsageError(f"{option} {path}: ckptconv reserves names with this prefix.", NEW_NAME)
            if (rival := named.setdefault(place, option)) != option:
                raise UsageError(f"{rival} and {option} both name {path}.", "Give one of them another path.")

    # ---- single files

    def _check_file(self, claim: Claim) -> None:
        is_last = isinstance(claim.proposed, LastWord)
        if self._options.clobber and (claim.proposed is None or (claim.overwrite and not is_last)):
            return
        place = Location(claim.path, self._stores)
        if place.kind == "missing":
            return
        self._check_clobber(claim.path)
        if claim.is_like(file_made_as(place, claim.made_as)):
            return
        if self._is_as_planned(claim, claim.names[0], place):
            return
        if claim.proposed is None or is_last:
            raise taken_for_input(claim.path)
        raise UsageError(
            f"{claim.path} exists, and is not recognised as an earlier output of this kind. It is replaced only if you "
            "name it as OUTPUT.",
            claim.proposed.hint,
        )

    def _check_clobber(self, path: str) -> None:
        if not self._options.clobber:
            raise FailedError(f"{path} exists, and --no-clobber forbids replacing it.")

    def _is_as_planned(self, claim: Claim, name: str, place: Location) -> bool:
        """Whether a file that exists has the very bytes that are to be written, so that nothing is lost."""
        file, entry = claim.plans.get(name), place.entry
        if file is None or entry.kind != "file" or entry.file.size != file.size:
            return False
        if (entry.file.path, entry.file.stamp) in self._same:
            return True
        from ckptconv.engine.ranges import FileBytes
        from ckptconv.storage.packed import SpoolingReaders

        with SpoolingReaders(self._stores, self._options.spool_dir) as readers, place.open_reader() as reader:
            try:
                planned = FileBytes(file, readers, self._stores)
            except ValueError:
                return False
            at = 0
            for piece in planned.read(0, file.size, unit=_UNIT, memory=_MEMORY, requests=REQUESTS):
                if reader.read_at(at, len(piece)) != piece:
                    return False
                at += len(piece)
        self._same.add((entry.file.path, entry.file.stamp))
        return True

    # ---- directories

    def _check_directory(self, claim: Claim) -> None:
        from ckptconv.formats.checkpoint_names import is_of_checkpoint

        directory, is_ours = Directory(Location(claim.path, self._stores)), kind_of_directory(claim.form).is_file
        present = next((name for name in directory.names if is_output_name(name) or is_ours(name)), "")
        if present:
            self._check_clobber(join(claim.path, present))
        visible = [name for name in directory.names if not name.startswith(HIDDEN)]
        if (
            isinstance(claim.proposed, LastWord)
            and visible
            and not any(claim.is_like(directory.made_as(name)) for name in visible)
        ):
            raise taken_for_input(claim.path)
        others, foreign = [], []
        # `publish.companions` decides of companions.
        for name in (name for name in visible if not is_companion_name(name)):
            is_written = name in claim.names or is_ours(name)
            if is_written or not (claim.beside or name in claim.read or not is_of_checkpoint(directory.place, name)):
                earlier = self._made_as(claim, directory, name)
                if not earlier:
                    foreign.append(name)
                elif earlier.partition("/")[0] not in (claim.kind, UNFINISHED):
                    others.append(name)
        if claim.overwrite:
            foreign, others = [*filter(claim.is_mixed_with, [*foreign, *others])], []
        if foreign:
            raise _foreign(claim.path, foreign, claim.overwrite)
        if others:
            raise UsageError(
                f"{claim.path} holds {others[0]}, from an output of another kind: two outputs in one directory would "
                "be read as one.",
                _NEW_DIRECTORY,
            )

    def _check_within(self, path: str, claims: Sequence[Claim]) -> None:
        """Raise UsageError if the directory `path`, in which some outputs are to lie, holds files of other programs."""
        from ckptconv.formats.checkpoint_names import is_of_checkpoint

        directory = Directory(Location(path, self._stores))
        inside = {basename(claim.path) for claim in claims}.union(*(claim.read for claim in claims))
        visible = [name for name in directory.names if not name.startswith(HIDDEN) and name not in inside]
        foreign = [name for name in visible if is_of_checkpoint(directory.place, name)]
        foreign = [name for name in foreign if not self._made_as(claims[0], directory, name)]
        if claims[0].overwrite:
            foreign = [*filter(claims[0].is_mixed_with, foreign)]
        if foreign:
            raise _foreign(path, foreign, claims[0].overwrite)

    def _made_as(self, claim: Claim, directory: Directory, name: str) -> str:
        """Return the kind of the entry `name` if this program wrote it. A file with the very bytes that are to be
        written counts as written by it."""
        if directory.names[name].kind == "directory":
            return claim.made_as if Directory(directory.place.child(name)).manifest else ""
        earlier = directory.made_as(name)
        if not earlier and name in claim.plans and self._is_as_planned(claim, name, directory.place.join(name)):
            return claim.made_as
        return earlier or (UNFINISHED if directory.is_being_made and name in claim.names else "")

    def _check_tree(self, claim: Claim) -> None:
        place = Location(claim.path, self._stores)
        if place.kind not in ("directory", "missing"):
            raise UsageError(f"{claim.path} is a file, but the output needs a directory.")
        directory = Directory(place)
        if not self._options.clobber and directory.names:
            self._check_clobber(claim.path)
        for name in _files_below(directory.place) if directory.names else ():
            # The file that names the tree lies next to it.
            is_written = name in claim.names and name != TREES[claim.form]
            is_ours = directory.made_as(name) in (claim.made_as, UNFINISHED) or (directory.is_being_made and is_written)
            if not is_ours and not (claim.overwrite and is_written):
                raise UsageError(
                    f"{claim.path} would be replaced as a whole, but holds files of another kind, such as {name}.",
                    _NEW_DIRECTORY,
                )
        from ckptconv.publish.pointer import check_pointer  # of few outputs

        check_pointer(claim.path, claim.form, claim.made_as, claim.overwrite, self._stores)


def _is_inside(inner: Claim, outer: Claim) -> bool:
    """Whether an output lies in the directory of another that is replaced as a whole."""
    return outer.form in TREES and _lies_below(inner.path, outer.path)


def _lies_below(path: str, directory: str) -> bool:
    return resolved_name(path).startswith(f"{resolved_name(directory)}/")


def _foreign(path: str, names: Sequence[str], overwrite: bool) -> UsageError:
    """Return the error for a directory that holds `names`, which this program did not write."""
    if overwrite:
        return UsageError(
            f"{path} holds {names[0]}, which --overwrite does not replace: programs would read it together with the "
            "output.",
            "Remove it, or give a directory that does not exist yet.",
        )
    return UsageError(
        f"{path} holds {some(names, 3, str)}, which ckptconv did not write: an output there would replace these files, "
        "or be read together with them.",
        f"{_NEW_DIRECTORY} --overwrite replaces files with the names of output files.",
    )


def taken_for_input(path: str) -> UsageError:
    """Return the error for a last word that is no OUTPUT."""
    return UsageError(
        f"{path} exists, and is not an earlier output of this command, so it is read as another input, and OUTPUT is "
        "missing.",
        "Give OUTPUT with -o.",
    )


def _files_below(place: Location, above: str = "") -> Iterator[str]:
    """Yield the names of the files below a directory, but for those of stagings."""
    for name, entry in place.names.items():
        if entry.kind == "directory":
            if not name.startswith(HIDDEN):
                yield from _files_below(place.child(name), f"{above}{name}/")
        elif above or name != MANIFEST:
            yield above + name


# ------------------------------------------------------------------------------------------------------------- inputs


def inputs_behind(sources: Iterable[Source]) -> Iterator[str]:
    """Yield the paths of the files from which `sources` were read, and of the inputs that they are computed from."""
    for source in sources:
        yield from files_behind(source)
        for term in terms_of(source):
            yield from files_behind(term)


class Spared:
    """The files of the checkpoint that is read, and of its reference. No output may replace them, under any name.

    `places` are the paths by where they lead to.
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
