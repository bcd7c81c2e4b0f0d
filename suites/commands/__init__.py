"""One module per command of `assay`: `add(subparsers)` declares it, `run(arguments)` does it.

`run` returns the exit code. What the user asked for goes to standard output, progress and errors to
standard error.
"""
