"""The command line: rljob."""
