"""`convert --output-dir`: each of several inputs is converted to an output of its own in a directory.

In: the words of the command line, and the options of one conversion. Out: the outputs, a table of what became of each
input, and the worst exit code. `naming` names the outputs, `running` converts and reports, in processes of `worker` if
several inputs are converted at once.
"""
