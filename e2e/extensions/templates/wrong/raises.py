"""A module whose import raises."""

raise RuntimeError("a licence is missing")
