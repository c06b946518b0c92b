"""The option of conversions about the order of parameters."""

from __future__ import annotations

from typing import Any

from ckptconv.errors import UsageError
from ckptconv.options import TAKE
from ckptconv.options.kinds import PATH
from ckptconv.options.option import Given, option
from ckptconv.text import brief, parse_path


def _order(value: Any, called: str) -> str:
    if isinstance(value, (list, tuple)):
        hint = "Write the names to a file with json.dump, and give its path."
        raise UsageError(f"{called} {brief(value)} is a list, but a path was expected.", hint)
    return parse_path(value, called)


class NumberOptions(Given):
    """The source of the order in which an optimizer numbers its parameters."""

    order: str = option(
        PATH._replace(parse=_order),
        "The order in which the optimizer numbers its parameters. FILE is a list of parameter names, one per line "
        "or in JSON (optionally one list per parameter group); a checkpoint that preserves their order, such as a "
        "state dict saved with torch.save; or a directory with the config.json of a transformers model.",
        metavar="FILE",
        group=TAKE,
        fallback="from the checkpoint itself, or from its config.json",
    )


GIVEN = NumberOptions
# Options of other programs.
OTHER_OPTIONS = {
    "--no-optimizer --no-optim --model-only --only-model --only-weights --save-only-model --skip-optimizer": (
        "DeepSpeed and DCP steps give only the weights; in a .pt file, --key PATH selects them: inspect lists the keys."
    ),
    "--optimizer-only --only-optimizer": "--optimizer PATH without OUTPUT writes only the states.",
    "--load-optimizer --include-optimizer --with-optimizer --save-optimizer": "Use --optimizer PATH for the states.",
}
