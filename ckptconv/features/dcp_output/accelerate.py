"""Plan the directories that accelerate loads as outputs."""

from __future__ import annotations

from ckptconv.features.dcp_output import output
from ckptconv.features.dcp_output.kind import NO_WEIGHTS
from ckptconv.features.dcp_output.options import GIVEN
from ckptconv.formats.source import Source
from ckptconv.options.table import Options
from ckptconv.outputs.planning import Output
from ckptconv.outputs.targets import Target
from ckptconv.storage.paths import dirname


def plan(source: Source, target: Target, options: Options) -> Output:
    """Plan one of the directories that accelerate loads, with a note in that of the weights on its other files."""
    half = target.options or options
    planned = output.plan(source, target, half)
    if GIVEN.of(half).model_key == NO_WEIGHTS:
        return planned
    step = dirname(target.path)
    left = "" if options.states else "The output has no optimizer states (optimizer_0); --states PATH adds them. "
    note = (
        f"{left}Copy schedulers and random states from the run to {step}: load_state reads scheduler.bin and "
        "random_states_*.pkl, the Trainer reads trainer_state.json, scheduler.pt and rng_state_*.pth. Without "
        "scheduler.pt, the Trainer does not load the optimizer."
    )
    return planned._replace(notices=planned.notices._replace(notes=(*planned.notices.notes, note)))
