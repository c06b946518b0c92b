"""The call `diff`: open two checkpoints of any formats, and report their differences."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ckptconv.errors import UsageError
from ckptconv.features.diff.changes import Tolerance
from ckptconv.features.diff.difference import ONLY_A, ONLY_B, DeltaFiles, Difference, difference
from ckptconv.features.diff.options import COMPARING_TOO, DIFFING, FEATURES, INSTEAD
from ckptconv.formats.opening import opened
from ckptconv.formats.source import Opened, Source, source_of
from ckptconv.options.option import checked, filled
from ckptconv.options.table import Options, named_in
from ckptconv.process import no_garbage
from ckptconv.storage.paths import is_pipe
from ckptconv.storage.progress import counter, shown

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ckptconv.features.diff.reading import Pair
    from ckptconv.options.keywords import DiffOptions
    from ckptconv.storage.progress import AnyProgress

# Options for A alone, which are not given for B.
_OF_ONE = {name: option.default for name, option in named_in("map size").items()}
# Features that write the changes from A to B: the module of each, by its option. `asked` there returns a writer, or
# None. The writer has a method for each step: `checked`, `encoder` (see `reading.Encoding`), and `write`, which returns
# the fields of `DeltaFiles`, and the report of its output.
WRITERS: dict[str, str] = {
    "delta": "ckptconv.features.deltas.writing",
}


@shown
@checked(DIFFING, INSTEAD)
def diff(
    a: str | os.PathLike[str] | Source | Opened,
    b: str | os.PathLike[str] | Source | Opened,
    *,
    progress: AnyProgress | None = None,
    on_total: Callable[[int], object] | None = None,
    measure: bool = True,
    **options: Unpack[DiffOptions],
) -> Difference:
    """Return the differences between `a` and `b`, paths or opened checkpoints, each of any format.

    Tensors are matched by name. Elements of one dtype are compared by their bits; those of two dtypes by value; with
    `rtol` or `atol`, all by value, by the rule `tolerance`. `key`, `include`, `exclude`, `strip_prefix`,
    `rename` and `dtype` apply to both sides, as in a conversion; `map` and `size` to `a` alone. `with_states` compares
    the optimizer states too. `delta` is a directory for the changes from `a` to `b`, which `patch` applies. `html` is a
    file for a page that shows all this. Without `measure`, which takes less time, the report only names tensors that
    differ: `change`, `quantization` and their sums are None. `progress` and `on_total` are those of `convert`, for the
    bytes of both sides.

    Raise UsageError for a path that does not exist, or if `key` or a glob of `include` matches nothing, and the
    errors of opening a checkpoint. A difference is no error.

    Examples:
        >>> report = ckptconv.convert("model.pt", "model.safetensors")
        >>> difference = ckptconv.diff("model.pt", "model.safetensors")
        >>> difference.equal, difference.elements, difference.elements_differ
        (True, 15, 0)
    """
    given_options = filled(DIFFING, options)
    names = ("html", "with_states", "rtol", "atol", "tolerance")
    html, with_states, rtol, atol, rule = (given_options.pop(name) for name in names)
    settings = {name: given_options.pop(name) for name in COMPARING_TOO}
    chosen = Options(**given_options)
    delta = _writer(chosen, with_states, (rtol, atol), settings)
    if html and not measure:
        raise UsageError("html requires measure=True: the page shows how much tensors differ.", "Omit one of them.")
    if html:
        from ckptconv.features.reporting.report_file import PAGE, check_whole

        check_whole(html, PAGE, chosen.overwrite)
    if delta:
        chosen = delta.checked(chosen)
    tolerance = None if rtol is None and atol is None else Tolerance(rtol or 0.0, atol or 0.0, rule)
    if tolerance is None and rule != DIFFING["tolerance"].default:
        raise UsageError(f"--tolerance {rule} requires --rtol or --atol.", "Specify one of them.")
    # If one side is a path, an option may be meant for that.
    late = {} if any(isinstance(side, (str, os.PathLike)) for side in (a, b)) else options
    paths_or_sources = source_of(a, late), source_of(b, late)
    if all(not isinstance(side, Source) and is_pipe(os.fspath(side)) for side in paths_or_sources):
        raise UsageError("A and B are both pipes, but there is only one standard input.", "Specify a path for A or B.")
    with no_garbage():
        source_a = opened(paths_or_sources[0], chosen, key=chosen.key, states=with_states)
        source_b = opened(paths_or_sources[1], chosen.replaced(**_OF_ONE), key=chosen.key, states=with_states)
    for module in map(import_module, FEATURES.values()):
        if hasattr(module, "facing"):
            source_a = module.facing(source_a, source_b, dict(chosen.storage_options))
    changed: dict[str, Pair] = {}
    with delta.encoder(chosen) if delta else nullcontext() as encoder:
        report = difference(
            source_a,
            source_b,
            chosen,
            optimizer=with_states,
            tolerance=tolerance,
            progress=counter(progress),
            on_total=on_total,
            changed=changed,
            encoder=encoder,
            measure=measure,
        )
        if delta and encoder:
            fields, _ = delta.write(source_a, source_b, report, changed, encoder, chosen)
            report.delta = DeltaFiles(**fields)
    only = [[tensor.name for tensor in report.tensors if tensor.status == status] for status in (ONLY_A, ONLY_B)]
    for module in map(import_module, FEATURES.values()):
        if hasattr(module, "advice") and all(only):
            report.hints.extend(module.advice(source_a, *only))
    if html:
        from ckptconv.features.diff.showing import page_of
        from ckptconv.features.reporting.report_file import PAGE, write_whole
        from ckptconv.outputs.targets import files_behind

        read = [source_a.path, source_b.path, *files_behind(source_a), *files_behind(source_b)]
        write_whole(html, page_of(report).encode(), PAGE, chosen.overwrite, read)
    return report


def _writer(
    options: Options, optimizer: bool, tolerance: tuple[float | None, float | None], settings: dict[str, Any]
) -> Any:
    """Return the writer of the changes from A to B, None if options do not ask for one; `settings` are the options of
    features. Raise UsageError for options that contradict it."""
    if all(value == COMPARING_TOO[name].default for name, value in settings.items()):
        return None
    writers = (import_module(module).asked(options, optimizer, tolerance, settings) for module in WRITERS.values())
    return next(filter(None, writers), None)
