"""The option of conversions about the vocabulary."""

from __future__ import annotations

from ckptconv.options import TAKE
from ckptconv.options.kinds import counted
from ckptconv.options.option import Given, deciding


class VocabularyOptions(Given):
    """The rows of the vocabulary that are converted."""

    vocab: int | None = deciding(
        counted(1, 1 << 31), "Convert only the first N rows of embeddings and head.", metavar="N", group=TAKE
    )


GIVEN = VocabularyOptions
# What people call it, as commands and as options.
OTHER_WORDS = {"convert --vocab N": ("resize", "resize-vocab", "resize-embeddings")}
OTHER_OPTIONS = {"--vocab-size": "Use --vocab N."}
