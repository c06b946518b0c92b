"""The call `diff`: open two checkpoints of any formats, and say what differs between them."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ckptconv.errors import UsageError
from ckptconv.features.diff.changes import Tolerance
from ckptconv.features.diff.difference import DeltaFiles, Difference, difference
from ckptconv.features.diff.options import COMPARING_TOO, DIFFING
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

# Options that are about A alone, which are not given for B.
_OF_ONE = {name: option.default for name, option in named_in("map size").items()}
# Features that write what changes A into B: the module of each, by its option. `asked` there returns what writes it, or
# None; it has a method for each step: `checked`, `encoder` (see `reading.Encoding`), and `write`, which returns the
# fields of `DeltaFiles`, and the report of its output.
WRITERS: dict[str, str] = {
    "delta": "ckptconv.features.deltas.writing",
}


@shown
@checked(DIFFING)
def diff(
    a: str | os.PathLike[str] | Source | Opened,
    b: str | os.PathLike[str] | Source | Opened,
    *,
    progress: AnyProgress | None = None,
    on_total: Callable[[int], object] | None = None,
    measure: bool = True,
    **options: Unpack[DiffOptions],
) -> Difference:
    """Return what differs between `a` and `b`, paths or opened checkpoints, each of any format.

    Tensors are matched by name. Elements of one dtype are compared by their bits; those of two dtypes by value; with
    `rtol` or `atol`, all by value, and `tolerance` says by which rule. `key`, `include`, `exclude`, `strip_prefix`,
    `rename` and `dtype` apply to both sides, as in a conversion; `map` and `size` to `a` alone. `with_states` compares
    the optimizer states too. `delta` is a directory for what changes `a` into `b`, which `patch` applies. `html` is a
    file for a page that shows all this. Without `measure`, which takes less time, it is only told which tensors differ:
    `change`, `quantization` and what sums them up are None. `progress` and `on_total` are those of `convert`, for the
    bytes of both sides.

    Raise UsageError for a path that does not exist, or if `key` or a glob of `include` matches nothing, and whatever
    else opening a checkpoint raises. A difference is no error.

    Examples:
        >>> report = ckptconv.convert("model.pt", "model.safetensors")
        >>> found = ckptconv.diff("model.pt", "model.safetensors")
        >>> found.equal, found.elements, found.elements_differ
        (True, 15, 0)
    """
    asked = filled(DIFFING, options)
    names = ("html", "with_states", "rtol", "atol", "tolerance")
    html, with_states, rtol, atol, rule = (asked.pop(name) for name in names)
    settings = {name: asked.pop(name) for name in COMPARING_TOO}
    chosen = Options(**asked)
    delta = _writer(chosen, with_states, (rtol, atol), settings)
    if html and not measure:
        raise UsageError("--html shows how much tensors differ, and needs this measurement.", "Leave one out.")
    if html:
        from ckptconv.inspection.file import PAGE, check_whole

        check_whole(html, PAGE, chosen.overwrite)
    if delta:
        chosen = delta.checked(chosen)
    tolerance = None if rtol is None and atol is None else Tolerance(rtol or 0.0, atol or 0.0, rule)
    if tolerance is None and rule != DIFFING["tolerance"].default:
        raise UsageError(f"--tolerance {rule} needs --rtol or --atol.", "Give one.")
    given = source_of(a), source_of(b)
    if all(not isinstance(each, Source) and is_pipe(os.fspath(each)) for each in given):
        raise UsageError("Both sides are a pipe, but there is only one standard input.", "Give a path for one of them.")
    with no_garbage():
        one = opened(given[0], chosen, key=chosen.key, states=with_states)
        other = opened(given[1], chosen.replaced(**_OF_ONE), key=chosen.key, states=with_states)
    changed: dict[str, Pair] = {}
    with delta.encoder(chosen) if delta else nullcontext() as encoder:
        found = difference(
            one,
            other,
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
            fields, _ = delta.write(one, other, found, changed, encoder, chosen)
            found.delta = DeltaFiles(**fields)
    if html:
        from ckptconv.features.diff.showing import page_of
        from ckptconv.inspection.file import PAGE, write_whole
        from ckptconv.outputs.targets import files_behind

        read = [one.path, other.path, *files_behind(one), *files_behind(other)]
        write_whole(html, page_of(found).encode(), PAGE, chosen.overwrite, read)
    return found


def _writer(
    options: Options, optimizer: bool, tolerance: tuple[float | None, float | None], settings: dict[str, Any]
) -> Any:
    """Return what writes what changes A into B, None if that is not asked for; `settings` are the options of features.
    Raise UsageError for options that contradict it."""
    if all(value == COMPARING_TOO[name].default for name, value in settings.items()):
        return None
    asked = (import_module(module).asked(options, optimizer, tolerance, settings) for module in WRITERS.values())
    return next(filter(None, asked), None)
