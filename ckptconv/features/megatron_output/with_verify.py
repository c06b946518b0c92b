"""Compare a step of Megatron-core with the plan of a conversion of its source."""

from __future__ import annotations

from collections.abc import Iterator

from ckptconv.errors import CkptconvError, DifferenceError, UsageError
from ckptconv.features.megatron_core.alone import RUN_CONFIG
from ckptconv.features.megatron_output.imitating import Form, form_of
from ckptconv.features.pairs.runs import ExpectedPair
from ckptconv.features.verify.paired import paired
from ckptconv.features.verify.pairs import Attested, Differences
from ckptconv.features.verify.planned import compare
from ckptconv.features.verify.report import CheckedOutput, Verification
from ckptconv.formats.source import Source
from ckptconv.options.table import Options
from ckptconv.outputs.planning import planned
from ckptconv.outputs.targets import MANIFEST, final_path
from ckptconv.storage.paths import join


def pairs(
    source: Source, target: CheckedOutput, options: Options, done: Verification, attested: Attested, wrong: Differences
) -> Iterator[ExpectedPair]:
    """Compare the files of a step, and the file next to it; yield the pairs of its tensors."""
    wanted = target.planned._replace(layout=_form(target, options))
    output = planned(source, wanted, options)
    form = output.target.form
    names = [file.name for file in output.plan.files]
    at = target.at or {name: final_path(target.path, form, name) for name in names}
    if target.at is None and (odd := sorted(target.place.names.keys() - {*names, MANIFEST})):
        path = join(target.path, odd[0])
        raise DifferenceError(f"{path} is not part of the output.", "Remove it.", what="file", file=path)
    where = {name: target.place.at(at[name]) for name in names}
    if options.states:
        source = source._replace(inputs=source.inputs_of_all)
    compared = compare(target.path, output.plan.files, where, output.notices.record, form)
    yield from paired(source, target, compared, done, attested)


def _form(target: CheckedOutput, options: Options) -> Form:
    """Return the form of the step that the output is like, or else its own, which says all but its run_config.yaml."""
    if reference := options.fitting().get("like"):
        return form_of(reference, options.storage_options)
    if target.at is not None:
        return Form()
    try:
        form = form_of(target.path, options.storage_options)
    except CkptconvError:
        return Form()  # what is wrong with it is said when its files are compared
    if form.run_config:
        raise UsageError(
            f"{join(target.path, RUN_CONFIG)} was copied from another step.",
            "Use --like with the step that the conversion used.",
        )
    return form
