"""What is inside a checkpoint, as plain data, as lines of text, and as an HTML page.

In: a `Source`. Out: data and text. Nothing here prints or writes."""
