"""The command line: options in, calls of the library out; one module for a command, and the only place that prints.

In: the words of a command line. Out: calls of `conversion`, `publish` and features;
reports on stdout, progress and errors on stderr, an exit code. It contains no conversion logic. Other
modules import only `cli.main`."""
