"""From a source and options to plans of files. Pure: nothing here opens a file, except to verify an output that a
command has computed from several checkpoints, which are planned again (`computed.Again`).

In: a `Source`, which is complete, and `Options`. `pipeline` selects the names and tensors of an output, for planning
and verifying alike; `targets` interprets the output's name; `planning` makes a plan for each output. Each kind of file
has a module. Out: `FilePlan`s, which `publish` carries out.
"""
