"""One folder or module for each input format, and the choice between them.

In: the place of a checkpoint. `detect` finds out what it is; the format's own reader reads descriptions only, no tensor
data. Out: a `Source`, which is complete: whoever plans with it opens nothing.
"""
