"""Apply renaming rules that come from a file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ckptconv.errors import UsageError
from ckptconv.features.regexes import regexes
from ckptconv.outputs.renaming import collected


def renamed(names: Iterable[str], prefix: str, rules: Sequence[str], where: str) -> dict[str, str]:
    """Rename as `selection.renamed` does, by `rules` that come from the file `where`.

    Raise UsageError if the rules cannot be applied, or not in time.
    """
    old = list(names)
    try:
        new = regexes.renamed(old, prefix, list(rules))
    except regexes.LimitsError as error:
        raise UsageError(
            f"{where} records --rename {' --rename '.join(map(repr, rules))[:200]}, which cannot be applied "
            "in reasonable time.",
            "Specify the options of the conversion on the command line.",
        ) from error
    return collected(zip(old, new, strict=True))
