"""From a source and options to plans of files.

`selected` says which names and tensors an output holds, for planning and verifying alike; then there is one module per
output format. Nothing here opens a file."""
