"""Whether an output is exactly what a source gives.

In: a source, an output, options. Out: a `Verification`, or the difference. `evaluate` works out a tensor's elements
by means of its own, `output` reads safetensors by its own reader: neither uses what plans or moves a conversion's
bytes."""
