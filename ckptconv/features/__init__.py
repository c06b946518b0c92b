"""Features: each folder is one, with its code, its options and its command, and can be deleted.

In: the modules that the trunk's registries name. Nothing in the trunk imports a feature, and no feature imports
another. `python scripts/house.py --without NAME` makes a copy of the checkout without one.
"""
