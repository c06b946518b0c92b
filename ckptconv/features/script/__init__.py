"""TorchScript archives: the weights of the modules in a program.

In: a zip archive of torch with a program in it. `archives` reads its description, `weights` takes the tensors of its
modules, and `described` those of archives before torch 1.3, which JSON describes. Out: a `TorchFile` of a state dict.
"""

from __future__ import annotations

PAGES = ()
# Features that this one builds on: without them, it is gone too.
NEEDS = ("modules",)
