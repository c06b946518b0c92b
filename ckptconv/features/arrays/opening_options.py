"""The options of `open`."""

from __future__ import annotations

from ckptconv.options.table import OF_OPENING, OPENING, OPTIONS, named_in

# Those about reading a checkpoint, and in addition those about its names and dtypes.
VIEWING = {name: option for name, option in OPENING.items() if name != "states"} | named_in(
    "with_states partial fill", {**OPTIONS, **OF_OPENING}
)
# Advice on options of `convert` that it lacks.
INSTEAD = {
    "strip_prefix rename": "Rename in Python: {name.removeprefix('module.'): ck.get_tensor(name) for name in ck}.",
    "include exclude": "Select tensors in Python: ck.get_tensors(name for name in ck if name.endswith('.bias')).",
    "dtype": "Cast a tensor in Python: ck[name].to('bf16'). Or use load_state_dict, which has the option dtype.",
    "exclude_frozen_parameters": "Did you mean exclude_frozen?",
}
# The options of the type of the keywords, and its docstring.
KEYWORDS = VIEWING, "Options of `open`."
