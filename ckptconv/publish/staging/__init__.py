"""Where outputs grow until they are whole: beside their final place, hidden, locked, resumable.

In: the files that a plan lists. Out: writers for them, and one step that gives them their names. `local` is for
local disks, `remote` and `remote_parts` are for stores; `area` has the names of what is staged."""
