"""Average checkpoints."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

from ckptconv.conversion import convert
from ckptconv.errors import UNWRITTEN, UsageError, leaving
from ckptconv.features.average.options import AVERAGING, INSTEAD
from ckptconv.features.average.steps import averaged, weighted
from ckptconv.formats.opening import opened
from ckptconv.formats.training import model_alone
from ckptconv.options.option import checked
from ckptconv.options.table import Options
from ckptconv.process import no_garbage, of_feature
from ckptconv.publish.present import taken_for_input
from ckptconv.result import Report
from ckptconv.storage.files import look
from ckptconv.storage.paths import listed, normalize
from ckptconv.text import LastWord

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from typing_extensions import Unpack

    from ckptconv.options.keywords import AverageOptions
    from ckptconv.storage.progress import AnyProgress


@leaving(UNWRITTEN)
@checked(AVERAGING, INSTEAD)
def average(
    steps: Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    *,
    progress: AnyProgress | None = None,
    on_total: Callable[[int], object] | None = None,
    before_commit: Callable[[], object] | None = None,
    executor: Executor | None = None,
    **options: Unpack[AverageOptions],
) -> Report:
    """Average the weights of `steps`, checkpoints of any formats with the same names, and write them to `output`.

    Each element is the sum, in float64 and in the given order, of the steps' elements times their `weights`, divided by
    the sum of the weights (default: 1 for each), and rounded once. With `ema`, a decay, each step counts by 1 - `ema`,
    and the average of the steps before it by `ema`; the numbers of a run's steps must rise. With `minus`, a checkpoint,
    nothing is divided: the result is the first step, plus the differences of the other steps from that checkpoint, by
    their weights; for one step, its difference. Tensors without an average, such as integers, come from the last step,
    as do the structure record and companions.

    `output` is safetensors, in one file or a directory, or a virtual checkpoint, or with `to` a checkpoint of
    torch.distributed.checkpoint. The other arguments are those of `convert`.

    Raise DifferenceError for tensors that are missing in one step, or have another shape there, UsageError for weights
    without an average, and the errors of `convert`. Then no new file has a final name.

    Examples:
        >>> report = ckptconv.average(["model.pt", "model.pt"], "average.safetensors", weights=[1, 3])
        >>> report.tensors
        2
    """
    if isinstance(steps, (Mapping, Set)):
        hint = "Give them in a list, and their weights in another: average([STEP, STEP], OUTPUT, weights=[0.3, 0.7])."
        raise UsageError(f"The steps are in a {type(steps).__name__}, which is no list of paths.", hint)
    further: dict[str, Any] = {**options}
    weights, decay, base = (further.pop(name, None) for name in ("weights", "ema", "minus"))
    paths, minus = listed(steps, "No checkpoint was given to average."), normalize(base) if base else ""
    if len(paths) == 1 and not minus and isinstance(output, LastWord) and _exists(output, further):
        raise taken_for_input(output)
    if weights is not None and (stray := next(filter(_is_number, [*paths, normalize(output)]), "")):
        raise UsageError(
            f"{stray} was read as a path, not as a weight.", "Give the weights without spaces: --weights 1,1,2."
        )
    if decay is not None and (runs := of_feature("average", "with_runs")):
        runs.check_order(paths)
    chosen = Options(**further)
    if len(paths) == 1 and not _exists(paths[0], further):
        opened(paths[0], chosen)  # the error may say which names a pattern would match
    weights, over = weighted(len(paths), weights, decay, bool(minus))
    with no_garbage():
        terms = [opened(path, chosen, key=chosen.key) for path in ([*paths, minus] if minus else paths)]
        if chosen.for_hub:
            terms = [model_alone(term, chosen) for term in terms]
        source = averaged(terms, len(paths) - 1, weights, over, bool(minus))
    return convert(
        source,
        output,
        progress=progress,
        on_total=on_total,
        before_commit=before_commit,
        executor=executor,
        **further,
    )


def _is_number(path: str) -> bool:
    try:
        float(path)
    except ValueError:
        return False
    return not os.path.exists(path)


def _exists(path: str, options: Mapping[str, Any]) -> bool:
    return look(normalize(path), dict(Options(**options).storage_options)).kind != "missing"
