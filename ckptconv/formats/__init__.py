"""One folder or module for each input format, and the choice between them.

In: the location of a checkpoint. `detect` recognizes its format; the format's own reader reads descriptions only, no
tensor data. Out: a `Source`, which is complete: planning with it opens nothing.
"""
