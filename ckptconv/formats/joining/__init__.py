"""State dicts that ranks saved in parts, joined.

In: the pickles of all ranks. `sets` finds their files by name, `pieces` reads a rank's part of a tensor, `layouts`
computes which part of the tensor that is, and `join` joins the parts. `names` tells model from optimizer, and `states`
names the optimizer's states. Out: a `Source`, which `files` returns.
"""
