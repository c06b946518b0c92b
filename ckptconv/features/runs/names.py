"""Names of steps: the number in a name, the run, and whether the name shows that the step is being written. Pure."""

from __future__ import annotations

import functools
import re

from ckptconv.features.joining.sets import MODEL, FileSet
from ckptconv.formats.model_files import SUFFIX
from ckptconv.formats.torch import SUFFIXES as TORCH_SUFFIXES

# Words before the number of a step, the first kind first: of `epoch=3-step=100`, 100 is the step.
_WORDS = (("step", "steps", "iter", "iteration", "ba", "batch", "update"), ("checkpoint", "ckpt"), ("epoch", "ep"))
# A letter directly behind a number is a unit or another word: the 7 of `checkpoint-7b` is no step.
_NUMBER = re.compile(r"([a-zA-Z]*)[-_=.]*(\d{1,18})(?![a-zA-Z\d])")
# A number without a word: no letter is directly around it, and it is no part of a version or of a value such as 0.25.
_ALONE = re.compile(r"(?<![a-zA-Z\d])(?<!\d\.)\d{1,18}(?![a-zA-Z\d]|\.\d)")
# A number of a fixed width is a counter also directly behind a word, as in `model010000`.
_WIDE = re.compile(r"(?<!\d)(?<!\d\.)\d{4,18}(?![a-zA-Z\d]|\.\d)")
# The parts, besides the number of the step, in which names of one run differ: measured values, and counts of a name.
_MEASURED = re.compile(
    r"(?<![a-z])((?:loss|acc|accuracy|score|metric|ppl|perplexity|f1|auc|bleu|wer|m?iou|mse|mae)[-_=]?)"
    r"(?:[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?|nan|inf)(?![a-z\d])",
    re.IGNORECASE,
)
_AGAIN = re.compile(r"-v\d+$")
# Words in names of steps while they are written: of torch_checkpointing, transformers, Orbax, and others.
_UNFINISHED = re.compile(r"\.?(?:tmp|temp)[-_.].*|.*[-_.](?:tmp|temp|part|partial|incomplete)(?:[-_.].*)?")
# The whole name of the directory of a step, with a word for it.
_OF_STEP = re.compile(r"(?:\w*[-_])?(?:global_step|step|iter|checkpoint|ckpt|epoch)[-_=]?\d+")
# Names of files of a trainer's own state without a word for it.
_OF_TRAINER = re.compile(r"(?:training_args|train(?:er)?_state|(?:grad_)?scaler|random_states)(?![a-z]).*")
# Ends of the names of files that are checkpoints, and before them of those of torch.
TORCH = (*TORCH_SUFFIXES, ".pth.tar", ".pt.tar")
SUFFIXES = (*TORCH, SUFFIX)


def number_of(name: str) -> int | None:
    """Return the number of a step in a name; None if it has none.

    >>> [number_of(name) for name in ("epoch=3-step=100.ckpt", "global_step20", "0300", "llama-7b", "2.orbax-tmp-7")]
    [100, 20, 300, None, 2]
    """
    plain = name.lower()
    whole = re.split(r"[-_.]", plain)[0] if is_unfinished(plain) else plain
    if whole.isdecimal() and whole.isascii() and len(whole) <= 18:
        return int(whole)
    for words in _WORDS:
        of_steps = [int(match[2]) for match in _NUMBER.finditer(plain) if _is_word(match[1], words)]
        if of_steps:
            return of_steps[-1]
    return None


def _is_word(word: str, words: tuple[str, ...]) -> bool:
    return word in words or word.endswith(words[0])


def lone_number(name: str, is_wide: bool = False) -> int | None:
    """Return the last number in a name that may be a step's without a word for it; None if it has none. With `is_wide`,
    the numbers of such names have a fixed width.

    >>> [lone_number(name) for name in ("model_100", "llama-7b", "resnet50", "model_v1", "llama-3.2")]
    [100, None, None, None, None]
    """
    numbers = (_WIDE if is_wide else _ALONE).findall(name)
    return int(numbers[-1]) if numbers else None


def is_padded(name: str) -> bool:
    """Return whether a number in a name begins with a zero, as counters of a fixed width do."""
    return any(number.startswith("0") for number in _WIDE.findall(name))


def series_of(name: str) -> str:
    """Return the common part of the names of all steps of a run, with * for the parts that differ.

    >>> [series_of(name) for name in ("vit_epoch_3.pt", "epoch=3-val_loss=0.25.ckpt", "run_a-step-100", "0300")]
    ['vit_epoch_*', 'epoch=*-val_loss=*', 'run_a-step-*', '*']
    """
    plain = _MEASURED.sub(r"\1*", _AGAIN.sub("", stem(name)))
    numbers = [match.span(2) for match in _NUMBER.finditer(plain) if _tells_step(match[1].lower())]
    lone = [*_ALONE.finditer(plain)] or [*_WIDE.finditer(plain)]
    for start, stop in reversed(numbers or [match.span() for match in lone[-1:]]):
        plain = f"{plain[:start]}*{plain[stop:]}"
    return plain


def _tells_step(word: str) -> bool:
    return any(_is_word(word, words) for words in _WORDS)


def is_unfinished(name: str) -> bool:
    """Return whether trainers give this name to a step until it is complete."""
    return _UNFINISHED.fullmatch(name) is not None


def is_of_step(name: str) -> bool:
    """Return whether a name is that of a step's directory, with a word for it."""
    return _OF_STEP.fullmatch(name) is not None


def is_beside_weights(path: str) -> bool:
    """Return whether a file holds an optimizer's states, or something other than weights, by its name."""
    name = stem(path.rpartition("/")[2])
    return FileSet(name, None).kind != MODEL or _OF_TRAINER.fullmatch(name) is not None


def stem(name: str) -> str:
    """Return a name without the suffix of a checkpoint, and without endings that it may have while it is written."""
    match = _of_file().fullmatch(name)
    return match[1] if match else name


@functools.cache
def _of_file() -> re.Pattern[str]:
    suffixes = "|".join(map(re.escape, SUFFIXES))
    return re.compile(rf"(.+?)(?:{suffixes})(?:\.(?:tmp|part|partial|incomplete).*)?")
