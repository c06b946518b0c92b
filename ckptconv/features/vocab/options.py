"""The option of conversions about the vocabulary."""

from __future__ import annotations

from typing import Any

from ckptconv.errors import UsageError
from ckptconv.options import TAKE
from ckptconv.options.kinds import counted
from ckptconv.options.option import Given, deciding
from ckptconv.text import parse_count


def _rows(value: Any, called: str) -> int:
    try:
        return parse_count(value, called, 1, 1 << 31)
    except UsageError as error:
        raise UsageError(error.message, "--vocab keeps the first N rows; other rows cannot be selected.") from None


ROWS = counted(1, 1 << 31)._replace(parse=_rows)


class VocabularyOptions(Given):
    """The rows of the vocabulary that are converted."""

    vocab: int | None = deciding(
        ROWS,
        "Convert only the first N rows of embeddings and head. Rows are not added: only --to megatron pads embeddings.",
        metavar="N",
        group=TAKE,
    )


GIVEN = VocabularyOptions
# Other words for it, as commands and as options.
OTHER_WORDS = {"convert --vocab N": ("resize", "resize-vocab", "resize-embeddings")}
OTHER_OPTIONS = {"--vocab-size --true-vocab-size": "Use --vocab N."}
