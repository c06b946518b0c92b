"""What reports of checkpoints share: tensors, lines of text that fit a screen, an HTML page; and what a map has.

In: data of a report. Out: lines, and a page, which is a file. Nothing here prints."""
