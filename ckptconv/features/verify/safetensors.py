"""Compares safetensors, the weights or the optimizer's states, with their source, and copied files with theirs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from importlib import import_module

from ckptconv.errors import UsageError
from ckptconv.features.pairs.runs import ExpectedPair
from ckptconv.features.verify.names import Expected, check_shards, check_structure, compare_names, expected_of
from ckptconv.features.verify.output import Written, as_planned, read_directory, read_file
from ckptconv.features.verify.pairs import Attested, Differences
from ckptconv.features.verify.provenance import check, check_no_manifest, not_stated
from ckptconv.features.verify.report import CheckedOutput, Verification
from ckptconv.formats.model_files import SUFFIX
from ckptconv.formats.source import MODEL, Source
from ckptconv.options.table import Options
from ckptconv.outputs.kinds import KINDS, entry_of, kind_by_suffix
from ckptconv.outputs.targets import MANIFEST, is_beside
from ckptconv.result import OutputFile
from ckptconv.storage.paths import basename

# The module that compares companions: `with_copied` returns a source with those that an output has, and `compared`
# yields them and their originals.
COPIES: tuple[str, ...] = (
    "ckptconv.features.companions.with_verify",
)  # fmt: skip
# The expected content of an output that consists of companions alone.
_NOTHING = Expected({}, lambda _: None, flat=True, metadata=lambda _: {})


def pairs(
    source: Source, target: CheckedOutput, options: Options, done: Verification, attested: Attested, wrong: Differences
) -> Iterator[ExpectedPair]:
    """Compare safetensors but for the elements, and yield the pairs of tensors whose elements are still to be compared.
    Raise UsageError for what is no output."""
    place = target.place if target.at is None else target.place.at(next(iter(target.at.values())))
    entry = place.entry
    is_file = target.path.endswith(SUFFIX) and (entry.kind == "file" or target.at is not None)
    if not (is_file or entry.kind == "directory" or target.at is not None):
        if entry.kind == "file" and target.path.endswith(".json"):
            named = place.parent.path if place.name == MANIFEST else f"OUTPUT --manifest {target.path}"
            check_no_manifest(place, options, f"Specify the output: ckptconv verify {source.path} {named}")
        # A name that states a kind is no output of another kind.
        states_kind = target.path.endswith(".json") or kind_by_suffix(target.path)
        asked = "" if options.to or states_kind else "Specify its kind with --to; "
        known = [ending for name, kind in KINDS.items() if entry_of(name).compared for ending in kind.suffixes]
        raise UsageError(
            f"{target.path} is not an output: outputs are directories, or files that end in {', '.join(known)}.",
            f"{asked}ckptconv diff compares any two checkpoints." if entry.kind == "file" else "",
        )
    is_model = source.is_model
    expected = expected_of(source, options, target.holds) if is_model else _NOTHING
    metadata = expected.metadata
    of_weights = target.holds == "weights"
    copies = [import_module(module) for module in COPIES if of_weights]
    for module in copies:
        source = module.with_copied(source, target, options)
    if is_file:
        written = read_file(target.path, place, metadata)
    elif not is_model:
        written = Written(target.path)
    else:
        stem = source.stem if of_weights else MODEL
        written = read_directory(target.place, metadata, at=target.at, others=target.others, stem=stem)
    tensors = compare_names(source, expected, written, options, wrong)
    for module in copies:
        tensors.extend(module.compared(source, target, written, options, expected.change))
    if not wrong:  # other names make another record
        check_structure(expected, written)
        check_shards(written, options)
    if manifest := target.manifest:
        as_read = source._replace(inputs=source.all_inputs() if of_weights else source.inputs_of_all)

        def check_manifest() -> list[str]:
            output = as_planned(written, target.place, manifest.members["files"], expected.record, attested.known)
            return check(manifest, as_read, target.planned, output)

        if target.at is None and entry.kind == "directory" and not is_beside(place.path, [source]):
            compared = [file.path for file in written.files]
            beside = map(basename, (manifest.place.path, *target.others, *compared))
            done.warnings.extend(not_stated(place, {*beside, *manifest.members["files"]}))
        attested.later(check_manifest)
        attested.expect(manifest, written)
    counted = Counter(written.homes.values())
    done.outputs.extend(OutputFile(file.path, file.size, counted[file.path]) for file in written.files)
    done.tensors += len(expected.tensors)
    done.aliases.update(written.aliases)
    done.structure_records += written.structure is not None
    done.inert |= expected.inert
    yield from tensors
