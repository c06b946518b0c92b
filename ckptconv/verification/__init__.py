"""Compare an output, bit for bit, with what its source gives.

In: a source, an output, options. Out: a `Verification`, or the first difference. `evaluate` computes a tensor's
elements with code of its own. `output` reads safetensors outputs strictly: the safetensors library must read them
alike, and would write their headers alike. `provenance` checks manifests. The expected names and tensors are selected
as for a conversion; no code that moves a conversion's bytes is used.
"""
