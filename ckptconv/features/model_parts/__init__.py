"""Parts of a model: some of its layers and experts, and one of its components.

In: the names and lazy tensors of a checkpoint, and its configuration. Out: the tensors of the part under their new
names, and the configuration that is true of them. Nothing is computed: a part is a choice of names, numbers in names,
and rows. `cutting` makes the part, `editing` changes the configuration, `opening` reads what both need, and `parting`
applies it all to what is selected.

No model is known by name. Keys of a configuration are known by their values: a number that equals the number of layers,
a list with an entry for each of them, a list of their numbers.
"""

from __future__ import annotations

PAGES = ("parts-of-models.md", "internals/parts-of-models.md")
SCRIPTS = ("formats/parts.py",)
# Features that this one builds on: without them, it is gone too.
NEEDS = ("companions", "configs", "model_facts")
