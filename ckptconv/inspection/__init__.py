"""What is inside a checkpoint, as data, as lines of text, and as an HTML page.

In: a path, or a `Source`. Out: a `Summary`, and text; a page is a file. Nothing here prints."""
