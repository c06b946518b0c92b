"""The option of conversions about grafts."""

from __future__ import annotations

from ckptconv.options import TAKE
from ckptconv.options.kinds import TEXTS
from ckptconv.options.option import Given, option


class GraftOptions(Given):
    """The tensors that are added."""

    graft: tuple[str, ...] = option(
        TEXTS,
        "Add the tensors whose names match GLOB from the checkpoint REF, unchanged; repeatable. --fill adds missing "
        "tensors, cast to the dtypes of the output.",
        metavar="REF:GLOB",
        group=TAKE,
    )


GIVEN = GraftOptions
# Other words for it, as a command.
OTHER_WORDS = {"convert INPUT OUTPUT --graft REF:GLOB": ("graft", "transplant")}
