"""Decides whether files that exist may be replaced by outputs: the rules of `replacing` except those about inputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ckptconv.errors import FailedError, UsageError
from ckptconv.formats.checkpoint_names import is_distributed, is_of_checkpoint, is_read_with_others
from ckptconv.formats.registered import is_companion_name
from ckptconv.formats.run_names import TREES, is_numbered
from ckptconv.outputs.targets import MANIFEST, directory_of, is_output_name, kind_of_directory, of_trees
from ckptconv.publish.claims import NEW_NAME, Claim
from ckptconv.publish.earlier import UNFINISHED, Directory, file_made_as
from ckptconv.storage.handles import HIDDEN
from ckptconv.storage.location import Location
from ckptconv.storage.marks import CHANGED
from ckptconv.storage.paths import basename, join
from ckptconv.storage.reading import REQUESTS
from ckptconv.text import LastWord, some

if TYPE_CHECKING:
    from ckptconv.options.table import Options

NEW_DIRECTORY = "Give a directory that does not exist yet."
_LATE = "These files changed, or were copied, after the manifest was written. "
# Bytes of a planned file that are compared at a time with one that exists.
_UNIT, _MEMORY = 512 << 10, 8 << 20


class Present:
    """Checks what exists at the places of outputs, and of files next to them. It remembers files that it compared byte
    for byte, for the second check just before the commit.
    """

    def __init__(self, options: Options) -> None:
        self._options, self._stores = options, dict(options.storage_options)
        self._same: set[tuple[str, str]] = set()

    def check(self, claim: Claim, place: Location) -> None:
        """Raise UsageError if the entry at the place of a claim may not be replaced."""
        if claim.form == "file":
            self._check_file(claim, place)
        elif claim.form in TREES:
            of_trees("replacing", claim.path).check(claim, place, self._options)
        else:
            self._check_directory(claim, place)

    def check_written(self, place: Location, option: str, kind: str) -> None:
        """Raise UsageError if the file at `place` was not written for `option`, as a file of this kind."""
        check_clobber(self._options, place.path)
        if not self._options.overwrite and file_made_as(place, kind) != kind:
            raise UsageError(
                f"{option} would replace {place.path}, which ckptconv did not write for {option}.", NEW_NAME
            )

    def replaced(self, claim: Claim, place: Location) -> str:
        """Return a sentence on files that are replaced, which may be another program's; "" if there are none."""
        where, are_ours = claim.path, [file_made_as(place, claim.made_as) not in ("", CHANGED)]
        if claim.form != "file":
            directory, is_tree = Directory(place), claim.form in TREES
            is_part = str if is_tree else kind_of_directory(claim.form).is_file
            if directory.is_being_made and not (is_tree or kind_of_directory(claim.form).last in directory.names):
                return ""  # those of this very output, by an earlier part or an interrupted run
            names = filter(is_part, files_below(place) if is_tree and directory.names else directory.names)
            where = f"files in {claim.path}"
            are_ours = [bool(directory.made_as(name)) for name in names if name != MANIFEST]
        what = "an earlier output of ckptconv" if all(are_ours) else "not recognised as an output of ckptconv"
        return f"This replaces {where}, {what}." if are_ours else ""

    # ---- single files

    def _check_file(self, claim: Claim, place: Location) -> None:
        check_clobber(self._options, claim.path)
        if _is_like(claim, file_made_as(place, claim.made_as)):
            return
        if self._is_as_planned(claim, claim.names[0], place):
            return
        if claim.proposed is None or isinstance(claim.proposed, LastWord):
            raise taken_for_input(claim.path)
        raise UsageError(
            f"{claim.path} exists, but is not recognised as an earlier output of this kind. It may be a checkpoint of "
            "another program, which -o would replace.",
            claim.proposed.hint,
        )

    def _is_as_planned(self, claim: Claim, name: str, place: Location) -> bool:
        """Return whether an existing file has the very bytes that are to be written, so that nothing is lost."""
        file, entry = claim.plans.get(name), place.entry
        if file is None or entry.kind != "file" or entry.file.size != file.size:
            return False
        if (entry.file.path, entry.file.stamp) in self._same:
            return True
        from ckptconv.engine.ranges import FileBytes
        from ckptconv.storage.files import Readers

        with Readers(self._stores, self._options.spool_dir) as readers, place.open_reader() as reader:
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

    def _check_directory(self, claim: Claim, place: Location) -> None:
        directory, is_ours = Directory(place), kind_of_directory(claim.form).is_file
        if present := max((name for name in directory.names if is_output_name(name) or is_ours(name)), default=""):
            check_clobber(self._options, join(claim.path, present))
        visible = [name for name in directory.names if not name.startswith(HIDDEN)]
        if (
            isinstance(claim.proposed, LastWord)
            and visible
            and not any(_is_like(claim, directory.made_as(name)) for name in visible)
        ):
            raise taken_for_input(claim.path)
        if step := next((name for name in sorted(claim.read) if is_numbered(name)), ""):
            raise _above(claim.path, step)
        others, foreign = [], []
        # The feature that copies companions decides about them.
        for name in (name for name in visible if not is_companion_name(name)):
            is_written = name in claim.names or is_ours(name)
            is_input = name in claim.read or (claim.beside and not is_distributed(name))
            if is_written or (not is_input and is_of_checkpoint(directory.place, name)):
                earlier = self._made_as(claim, directory, name)
                is_of_another_form = is_output_name(name) and not is_ours(name)  # an adapter's beside a model's
                if not earlier:
                    foreign.append(name)
                elif is_of_another_form or earlier.partition("/")[0] not in (claim.kind, UNFINISHED):
                    others.append(name)
        mixed = [name for name in (*foreign, *others) if _is_mixed(claim, name)]
        if claim.overwrite:
            foreign, others = mixed, []
        if foreign:
            listed = (directory.manifest or {}).get("files", ())
            raise _foreign(claim.path, foreign, mixed, claim.overwrite, _LATE * ({*foreign} <= {*listed}))
        if others:
            raise UsageError(
                f"{claim.path} contains {others[0]}, part of another kind of output: programs would read two outputs "
                "in one directory as one.",
                NEW_DIRECTORY,
            )

    def check_within(self, place: Location, claims: Sequence[Claim]) -> None:
        """Raise UsageError if the directory at `place`, where outputs are to lie, holds files of other programs."""
        directory = Directory(place)
        inside = {basename(claim.path) for claim in claims}.union(*(claim.read for claim in claims))
        visible = [name for name in directory.names if not name.startswith(HIDDEN) and name not in inside]
        foreign = [name for name in visible if is_of_checkpoint(directory.place, name)]
        foreign = [name for name in foreign if not self._made_as(claims[0], directory, name)]
        mixed = [name for name in foreign if _is_mixed(claims[0], name)]
        if mixed if claims[0].overwrite else foreign:
            raise _foreign(place.path, foreign, mixed, claims[0].overwrite)

    def _made_as(self, claim: Claim, directory: Directory, name: str) -> str:
        """Return the kind of the entry `name` if this program wrote it. A file with the very bytes that are to be
        written counts as written by it."""
        if directory.names[name].kind == "directory":
            return claim.made_as if Directory(directory.place.child(name)).manifest else ""
        earlier = directory.made_as(name)
        if not earlier and name in claim.plans and self._is_as_planned(claim, name, directory.place.join(name)):
            return claim.made_as
        return earlier or (UNFINISHED if directory.is_being_made and name in claim.names else "")


def _is_like(claim: Claim, earlier: str) -> bool:
    """Return whether the output of a claim may replace a file of the kind `earlier`. A last word that is an output of
    another command is an input; the manifest of rows does not say which command wrote them."""
    is_last = isinstance(claim.proposed, LastWord) and claim.kind != "rows"
    return earlier == claim.made_as or (earlier == claim.kind and not is_last)


def _is_mixed(claim: Claim, name: str) -> bool:
    """Return whether the file `name` in a claim's directory is not replaced, and is read together with the output."""
    directory = directory_of(claim.form)
    is_own = directory is not None and directory.is_file(name)
    return name not in claim.names and (is_own or is_read_with_others(name))


def check_clobber(options: Options, path: str) -> None:
    """Raise FailedError if nothing that exists may be replaced."""
    if not options.clobber:
        raise FailedError(f"{path} exists, but --no-clobber forbids replacing it.")


def _foreign(path: str, names: Sequence[str], mixed: Sequence[str], overwrite: bool, why: str = "") -> UsageError:
    """Return the error for a directory that holds `names`, which this program did not write, and of them `mixed`."""
    if overwrite:
        return UsageError(
            f"{path} contains {mixed[0]}, which --overwrite does not replace: programs would read this file together "
            "with the output.",
            NEW_DIRECTORY,
        )
    return UsageError(
        f"{path} contains {some(names, 3, str)}, not recognised as an output of ckptconv: an output in this "
        "directory would replace these files or be read together with them.",
        f"{why}{NEW_DIRECTORY}{'' if mixed else ' --overwrite replaces files that have names of output files.'}",
    )


def _above(path: str, step: str) -> UsageError:
    """Return the error for the directory of a run that contains the `step` that is read."""
    own = path if is_numbered(basename(path)) else join(path, step)  # an output in a step looks like another step
    return UsageError(
        f"{path} is the directory of the run, but the input is its step {step}: weights in {path} would be read as "
        "those of the run, even after later steps.",
        f"Give a new directory, such as {own}-safetensors, or a name that ends in .safetensors.",
    )


def taken_for_input(path: str) -> UsageError:
    """Return the error for a last word that is no OUTPUT."""
    return UsageError(
        f"{path} exists, but is not an earlier output of this command. It is read as another input, so OUTPUT is "
        "missing.",
        "Give OUTPUT with -o.",
    )


def files_below(place: Location, above: str = "") -> Iterator[str]:
    """Yield the names of the files below a directory, except those of stagings."""
    for name, entry in place.names.items():
        if entry.kind == "directory":
            if not name.startswith(HIDDEN):
                yield from files_below(place.child(name), f"{above}{name}/")
        elif above or name != MANIFEST:
            yield above + name
