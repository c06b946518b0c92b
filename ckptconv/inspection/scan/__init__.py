"""What loading a file would run, as a verdict for each file, without running it.

In: paths of files and directories. Out: a `ScanReport`, and the same as SARIF for code hosts. Nothing here prints."""
