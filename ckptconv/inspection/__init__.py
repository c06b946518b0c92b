"""Parts that reports of checkpoints share: tensors, lines of text that fit a screen, an HTML page.

In: data of a report. Out: lines, and a page, which is a file. Nothing here prints."""
