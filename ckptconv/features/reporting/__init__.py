"""Parts that reports of checkpoints share: tensors, statistics of their values, quantized weights, an HTML page.

In: data of a report, or tensors to be read (`measure`). Out: fields, and a page, which is a file. Nothing here prints.
The features that report on checkpoints build on this one.
"""

from __future__ import annotations
