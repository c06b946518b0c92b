"""From a source and options to plans of files. Pure: nothing here opens a file, but what verifying
needs to plan an output again that a command has computed of several checkpoints (`computed.Again`).

In: a `Source`, which is complete, and `Options`. `pipeline` selects the names and tensors of an output, for planning
and verifying alike; `targets` says what the output's name means; `planning` makes a plan for each output. There is one
module for each kind of file that is written. Out: `FilePlan`s, which `publish` carries out.
"""
