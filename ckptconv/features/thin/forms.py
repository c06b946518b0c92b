"""Files next to the ranks of a step that hold its weights in another form: a reduced step lacks nothing without them.

transformers' Trainer writes the model for from_pretrained next to the states that DeepSpeed writes, in the dtype in
which it computes.
"""

from __future__ import annotations

import glob

from ckptconv.errors import CkptconvError, StoppedError
from ckptconv.features.runs.whole import Judged, read_of, sources_of
from ckptconv.features.verify.verifying import verify
from ckptconv.formats.detect import open_source
from ckptconv.formats.model_files import INDEX_SUFFIX, SUFFIX
from ckptconv.options.kinds import SHORT_DTYPES
from ckptconv.options.table import Options
from ckptconv.outputs.naming import named
from ckptconv.storage.paths import is_remote

_MODELS = (f"model{INDEX_SUFFIX}", f"model{SUFFIX}")


def without_forms(known: Judged, goal: str, inert: bool) -> Judged:
    """Return a step, which is to be reduced to weights of the dtype `goal`, with the files that hold its own weights,
    rounded to their dtype, among those that are read, and not among those with others. Their data is read for this."""
    step = known.step
    path = next((path for name in _MODELS if (path := f"{step.name}/{name}") in step.files), "")
    if not known.others or not path or is_remote(step.path):
        return known
    try:
        source = open_source(step.at(path).path, inert=inert)
        files = read_of(step, source)
        tensors = named(source, Options()).described.tensors
        every = named(sources_of(step, inert)[0], Options()).described.tensors
        dtype, *further = {tensor.dtype.name for tensor in tensors.values() if tensor.dtype.kind == "f"} or {"keep"}
        # A value rounded twice may differ from one rounded once.
        is_wide = any(tensor.dtype.name == "float64" for tensor in every.values())
        exact = (dtype,) if is_wide else (dtype, "float32")
        if further or {*known.others} - {*files} or SHORT_DTYPES.get(goal, dtype) not in exact:
            return known
        left = [glob.escape(name) for name in every if name not in tensors]
        verify(known.path, step.path, dtype=dtype, exclude=left, inert=inert)
    except StoppedError:
        raise
    except CkptconvError:
        return known
    return known._replace(read=known.read.union(files), others=())
