"""Features: each folder is one, with its code, its options and its command, and can be deleted.

In: what the trunk's registries ask for, by the names of modules. Nothing of the trunk imports a feature, and no feature
another. `python scripts/house.py --without NAME` makes a copy of the checkout without one.
"""
