"""Where outputs grow until they are whole: beside their final place, hidden, locked, resumable.

In: the files that a plan lists. Out: writers for them, and one step that gives them their names. `directories` is
for local disks, `remote` for stores; `area` has the names and records that both leave."""
