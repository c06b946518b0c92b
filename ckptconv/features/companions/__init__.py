"""`--copy-config`: the small files of a model's directory in an output too, such as config.json and the tokenizer.

In: the directory of a source, or of its reference. Out: the source with its companions, the bytes that they have in the
output, and the reasons why other files stay behind. Features read configurations beside weights by it.
"""

from __future__ import annotations

# The features that it builds on.
NEEDS = ("configs",)
