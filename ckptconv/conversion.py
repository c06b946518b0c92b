"""The steps of a conversion, in order: open, flatten, select, plan, move, commit."""

from __future__ import annotations

import contextlib
import os
import shlex
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from ckptconv.errors import UNWRITTEN, UsageError, leaving
from ckptconv.formats.opening import all_opened, fitted
from ckptconv.formats.registered import copying
from ckptconv.formats.source import Opened, Source, source_of
from ckptconv.options.kinds import Default
from ckptconv.options.option import checked
from ckptconv.options.table import OPTIONS, Options
from ckptconv.outputs.kinds import NAMED, check_options, entry_of
from ckptconv.outputs.planning import Output, planned
from ckptconv.outputs.targets import Target, check_spool, named_outputs, nearest_directory, of_part, targets_of
from ckptconv.pickles.nodes import Opaque
from ckptconv.process import no_garbage, settled
from ckptconv.publish.jobs import executing
from ckptconv.publish.producing import produce
from ckptconv.publish.statements import requested
from ckptconv.result import Report
from ckptconv.storage.location import Location
from ckptconv.storage.paths import is_pipe, is_remote, normalize
from ckptconv.storage.progress import counter, shown
from ckptconv.text import Proposed, parse_path

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from typing_extensions import Unpack

    from ckptconv.options.keywords import ConvertOptions
    from ckptconv.storage.progress import AnyProgress

# The module that compares outputs with their sources before publication, by the option that requests it. Its
# `verifier(work, options)` returns the `Verifier` of pairs of a source and a target.
VERIFIERS: dict[str, str] = {
    "verify": "ckptconv.features.verify.staged",
}


@leaving(UNWRITTEN)
@shown
@checked(OPTIONS)
def convert(
    source: str | os.PathLike[str] | Source | Opened,
    output: str | os.PathLike[str] | None = None,
    *,
    progress: AnyProgress | None = None,
    on_total: Callable[[int], object] | None = None,
    before_commit: Callable[[], object] | None = None,
    executor: Executor | None = None,
    **options: Unpack[ConvertOptions],
) -> Report:
    """Convert `source`, a path or an opened checkpoint, to safetensors at `output`, or from safetensors to a `.pt`.

    If `output` ends in ".safetensors" it is one file, else a directory; the default is next to the input. The name of a
    file for torch.load ends in .pt, .pth, .bin or .ckpt. `to` names the kind of output if the name does not say it,
    such as a checkpoint for torch.distributed.checkpoint ("dcp"), with the optimizer's states if `states` names their
    checkpoint. `options` are the fields of `Options`.

    `progress` shows the bytes written: it is a bar of tqdm or the class of one, a `rich.progress.Progress`, True for a
    bar of tqdm's, or a function, which is called from any thread with the bytes since the last call; if that has a
    method `on_file`, it is called with the name of each file as it is begun. An exception of `progress` ends the work.
    `on_total` is called once, before the first byte, with the total bytes. `before_commit` is called when everything is
    staged, before the first output gets its final name. `executor` writes the files: any `concurrent.futures.Executor`
    whose workers see the inputs and outputs under the same names.

    Raises a `CkptconvError`; then nothing new has a final name.

    Examples:
        >>> report = ckptconv.convert("model.pt", "model.safetensors", dtype="bf16")
        >>> report.tensors, [file.path for file in report.outputs]
        (2, ['model.safetensors'])
    """
    started = time.monotonic()
    source = source_of(source, options)
    output = None if output is None else parse_path(output, "OUTPUT")
    if executor is not None:
        executing().check(executor)
    chosen = Options(**options)
    # Check the outputs before reading a large input.
    named, chosen = named_outputs(output, chosen)
    targets = targets_of(named, chosen)
    check_options([target.kind for target in targets] or [NAMED[chosen.to or "safetensors"][-1]], chosen)
    wanted = chosen.spool_dir
    check_spool(wanted)
    chosen = chosen.replaced(spool_dir=wanted or nearest_directory(targets[0].path if targets else ""))
    with contextlib.ExitStack() as stack:
        # A million small objects live until the end: collecting garbage among them takes longer than making them.
        with no_garbage():
            holds = {target.holds for target in targets} or {"weights"}
            if not targets and not isinstance(source, Source) and is_pipe(normalize(source)):
                raise UsageError("Input from a pipe requires OUTPUT: a directory, or a name that ends in .safetensors.")
            sources = fitted(all_opened(source, chosen, holds), source, chosen, holds)
            if not targets or isinstance(sources[0].weights, Opaque):
                from ckptconv.outputs.default_names import check_tensors, default_output, suffix_of

                check_tensors(sources[0], is_named=bool(targets))
            if not targets:
                path = source.path if isinstance(source, Source) else normalize(source)
                place = Location(path, dict(chosen.storage_options))
                beside_it = default_output(sources[0], place, suffix_of(chosen.to))
                beside_it = Proposed(beside_it, f"To replace it, give INPUT {shlex.quote(beside_it)}, or --overwrite.")
                named, chosen = named_outputs(beside_it, chosen)
                targets = targets_of(named, chosen)
                chosen = chosen.replaced(spool_dir=chosen.spool_dir or nearest_directory(targets[0].path))
            if any(chosen.fitting().values()) and (module := entry_of(targets[0].kind).like):
                targets, chosen = import_module(module).like(sources[0], targets, chosen)
            if len(targets) == 1 and any(part.weights_error for part in sources):
                from ckptconv.formats.alone import kept_apart

                sources = [kept_apart(part, targets[0].path) for part in sources]
            work = _work(sources, targets, chosen)
            outputs = [planned(part, target, chosen) for part, target in work]
            if wanted and not isinstance(wanted, Default) and not _is_spooled(source, outputs):
                unneeded = "--spool-dir had no effect: nothing was unpacked or read from a pipe."
                sources[0] = sources[0]._replace(notes=[*sources[0].notes, unneeded])
            stack.enter_context(settled())
        asked = requested(chosen, VERIFIERS).values()
        verify = next((module.verifier(work, chosen) for _, module in asked), None)
        return produce(sources, outputs, chosen, started, counter(progress), on_total, before_commit, verify, executor)


def _is_spooled(source: str | os.PathLike[str] | Source, outputs: Sequence[Output]) -> bool:
    """Return whether any part of `source` is, or may be, kept in a temporary file."""
    path = "" if isinstance(source, Source) else normalize(source)
    return is_pipe(path) or is_remote(path) or any(file.packed for output in outputs for file in output.plan.inputs())


def _work(sources: list[Source], targets: Sequence[Target], options: Options) -> list[tuple[Source, Target]]:
    """Return the outputs to plan. In `sources`, replace each that has companions by one that names them."""
    work = []
    parts = {source.component.partition("/")[0] for source in sources if source.component}
    for number, source in enumerate(sources):
        for target in targets:
            bare = source._replace(companions={}, config=None) if source.is_model else source
            taken, goal = bare, of_part(target, source, options)
            if target.holds == "weights":
                for module in copying("source"):
                    taken, goal = module.accompanied(source, goal, options, parts)
                sources[number] = taken
            if taken.is_model or taken.companions:
                work.append((taken, goal))
    if not work:
        raise UsageError(f"{sources[0].path} contains neither a model nor files to copy.")
    # The file that declares a pipeline is written last.
    return sorted(work, key=lambda pair: pair[0].component == "")
