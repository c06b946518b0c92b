"""Writes the files of a plan, and publishes them when all are complete.

In: the plans of a conversion's outputs. `staging` holds the files while they are written, `jobs` writes one file,
`publish` all of them, and `parts` names the feature that divides the work among processes. Out: files under their
final names, with a manifest if one was requested.
"""
