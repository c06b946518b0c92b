"""Makes the files of a plan, and gives them their names when all are whole.

In: the plans of a conversion's outputs. `staging` holds the files while they grow, `jobs` makes one of them,
`publish` all, `parts` and `finish` divide the work among processes. Out: files under their names, with a manifest
if asked for."""
