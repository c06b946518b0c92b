"""From a source and options to plans of files. Pure: nothing here opens a file.

In: a `Source`, which is complete, and `Options`. `selection` chooses and names the tensors, `targets` says what the
output's name means, `planning` makes a plan for each output; there is one module for each kind of file that is
written. Out: `FilePlan`s, which `publish` carries out.
"""
