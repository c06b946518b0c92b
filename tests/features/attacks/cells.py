"""What tests of the trunk ask of attacks too."""

from __future__ import annotations

from typing import Any

from attacks.corpus import CASES
from hypothesis import strategies as st

from ckptconv.features.attacks.tables import is_suspect
from ckptconv.pickles import machine

# Of the option: its default, a value, how that may be written, and its values in manifests. No kind of output knows it.
ACCEPTED_VALUES: dict[str, tuple[Any, Any, list[Any]]] = {"inert": (False, True, [True])}
DECIDING = {"inert": st.booleans()}
OF_INPUTS = {"inert"}
OPENING_FLAGS = {"--inert"}
# Whether a call of a name is one.
SUSPECTING = is_suspect
# A rule taken out of the reader of pickles, and what is found then.
FUZZ_FAULTS = [("pickle", machine, "refuse_attack", lambda *_: None, "attack passes")]
ERRORS: dict[str, Any] = {
    "unsafe": (
        3,
        lambda: CASES["live_os_system.pt"].make("canary"),
        [],
        (
            "{path} (archive/data.pkl): this file is an attack: it calls os.system, which torch.load would run. "
            "Nothing was run, and nothing was written."
        ),
        "Inform its sender. Use --inert to convert its tensors anyway; its code does not run then either.",
    )
}

# Options of other programs, and the advice.
OTHER_OPTIONS = {
    "--safe": "ckptconv runs no code from files",
    "--weights-only": "ckptconv runs no code from files; --key PATH selects the weights: inspect lists",
}
