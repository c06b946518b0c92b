"""What tests of the trunk ask of `optimizer_numbers` too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

# Of the option of conversions: its default, a value, and how that may be written; and what is none.
ACCEPTED_VALUES: dict[str, tuple[Any, Any, list[Any]]] = {"order": ("", "order.txt", [Path("order.txt"), "order.txt"])}
REFUSED_VALUES: dict[str, list[Any]] = {"order": [3, b"order", ["order"]]}
# What becomes of it in the trunk's kinds of output: it has no effect on an input without numbered states.
ROWS_OF_KINDS: dict[str, tuple[Any, ...]] = {"order": ("ssss", {"order": "../order.txt"})}
# A file that is read is not replaced.
REFUSED = "convert train.pt new --order notes.md --manifest notes.md --overwrite\n"


def make_like(here: Path) -> None:
    """Write an order of parameters."""
    (here / "order.txt").write_text("l1.weight")


# Options of other programs, and the advice.
OTHER_OPTIONS = {
    "--no-optim": "in a .pt file, --key PATH selects them: inspect lists the keys.",
    "--skip-optimizer": "--key PATH selects them",
    "--optimizer-only": "--optimizer PATH without OUTPUT writes only the states",
    "--load-optimizer": "Use --optimizer PATH",
}
