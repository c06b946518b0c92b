"""State dicts that ranks saved in parts, joined.

In: what the pickles of all ranks say. `sets` finds their files by name, `pieces` reads a rank's part of a tensor,
`layouts` computes which part that is, `join` joins the parts, `names` tells model from optimizer, and `states` names
the optimizer's states. Out: a `Source`, which `files` makes.
"""
