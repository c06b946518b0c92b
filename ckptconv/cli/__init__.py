"""The command line: options in, calls of the library out; one module for a command, and the only place that prints.

In: the words of a command line. Out: calls of `conversion`, `publish` and features;
reports on stdout, progress and errors on stderr, an exit code. No logic of a conversion is here. Nothing but
`cli.main` is imported from outside."""
