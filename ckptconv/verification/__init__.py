"""Whether an output is exactly what a source gives.

In: a source, an output, options. Out: a `Verification`, or the difference. `evaluate` works out a tensor's elements
by means of its own; `output` holds safetensors to what the library reads and writes; `provenance` checks manifests.
Which names and tensors there are to be is selected as for a conversion; nothing that moves its bytes is used."""
