"""Its import raises."""

raise RuntimeError("a licence is missing")
