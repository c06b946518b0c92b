"""The options of `open`."""

from __future__ import annotations

from ckptconv.options.table import OF_OPENING, OPENING, OPTIONS, named_in

# Those about reading a checkpoint, and in addition those about its names and dtypes.
VIEWING = {name: option for name, option in OPENING.items() if name != "states"} | named_in(
    "with_states partial fill", {**OPTIONS, **OF_OPENING}
)
# Advice on options of `convert` that it lacks.
INSTEAD = {
    "map_location device_map": "Use device.",
    "strip_prefix": "Rename in Python: {name.removeprefix(VALUE): ck.get_tensor(name) for name in ck}.",
    "rename": "Rename in Python: {re.sub(REGEX, REPLACEMENT, name): ck.get_tensor(name) for name in ck}.",
    "include": "Select tensors in Python: ck.get_tensors(fnmatch.filter(ck, VALUE)).",
    "exclude": "Select tensors in Python: ck.get_tensors(n for n in ck if not fnmatch.fnmatchcase(n, VALUE)).",
    "dtype": "Cast a tensor in Python: ck[name].to(VALUE). load_state_dict has an option dtype.",
    "exclude_frozen_parameters": "Did you mean exclude_frozen?",
}
# Advice on arguments of `get_tensor`.
OF_TENSORS = {
    "dtype": "Cast it: ck[name].to(VALUE) is a lazy tensor, and .torch() or .numpy() reads it.",
    "device": "Pass device to ckptconv.open, or use ck[name].torch(device=...).",
}
# The options of the type of the keywords, and its docstring.
KEYWORDS = VIEWING, "Options of `open`."
