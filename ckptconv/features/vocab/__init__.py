"""The first rows of a model's vocabulary.

In: the tensors of a model, its configuration, and its tokenizer's files. Out: its embeddings and head with their first
rows alone, and the configuration that is true of them.
"""

from __future__ import annotations

# Features that this one builds on: without them, it is gone too.
NEEDS = ("companions", "model_facts")
