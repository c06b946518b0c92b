"""Names of steps: the number that one tells, and whether it says that the step is being written. Pure."""

from __future__ import annotations

import functools
import re

from ckptconv.features.joining.sets import MODEL, FileSet
from ckptconv.formats.model_files import SUFFIX
from ckptconv.formats.torch import SUFFIXES as TORCH_SUFFIXES

# Words before the number of a step, the first kind first: of `epoch=3-step=100`, 100 is the step.
_WORDS = (("step", "steps", "iter", "iteration", "ba", "batch", "update"), ("checkpoint", "ckpt"), ("epoch", "ep"))
_NUMBER = re.compile(r"([a-z]*)[-_=.]*(\d{1,18})")
# What names of steps contain while they are written: of torch_checkpointing, transformers, Orbax, and of others.
_UNFINISHED = re.compile(r"\.?(?:tmp|temp)[-_.].*|.*[-_.](?:tmp|temp|part|partial|incomplete)(?:[-_.].*)?")
# The whole name of the directory of a step, with a word for it.
_OF_STEP = re.compile(r"(?:\w*[-_])?(?:global_step|step|iter|checkpoint|ckpt|epoch)[-_=]?\d+")
# Names of files of a trainer's own state without a word for it.
_OF_TRAINER = re.compile(r"(?:training_args|train(?:er)?_state|(?:grad_)?scaler|random_states)(?![a-z]).*")
# Ends of the names of files that are checkpoints.
SUFFIXES = (*TORCH_SUFFIXES, SUFFIX)


def number_of(name: str) -> int | None:
    """Return the number of a step that a name tells; None if it tells none.

    >>> [number_of(name) for name in ("epoch=3-step=100.ckpt", "global_step20", "0300", "llama-7b")]
    [100, 20, 300, None]
    """
    plain = name.lower()
    if plain.isdecimal() and plain.isascii() and len(plain) <= 18:
        return int(plain)
    numbers = [(match[1], int(match[2])) for match in _NUMBER.finditer(plain)]
    for words in _WORDS:
        of_steps = [number for word, number in numbers if word in words or word.endswith(words[0])]
        if of_steps:
            return of_steps[-1]
    return None


def is_unfinished(name: str) -> bool:
    """Whether trainers give that name to a step until it is complete."""
    return _UNFINISHED.fullmatch(name) is not None


def is_of_step(name: str) -> bool:
    """Whether that is the name of the directory of a step, with a word for it."""
    return _OF_STEP.fullmatch(name) is not None


def is_beside_weights(path: str) -> bool:
    """Whether a file holds an optimizer's states, or something else than weights, by its name."""
    name = stem(path.rpartition("/")[2])
    return FileSet(name, None).kind != MODEL or _OF_TRAINER.fullmatch(name) is not None


def stem(name: str) -> str:
    """Return a name without the suffix of a checkpoint, and what may stand behind that while it is written."""
    match = _of_file().fullmatch(name)
    return match[1] if match else name


@functools.cache
def _of_file() -> re.Pattern[str]:
    suffixes = "|".join(map(re.escape, SUFFIXES))
    return re.compile(rf"(.+?)(?:{suffixes})(?:\.(?:tmp|part|partial|incomplete).*)?")
