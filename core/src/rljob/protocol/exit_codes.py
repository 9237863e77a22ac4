"""Exit codes of components, of the command line and of preflight checks."""

FAILURE = 1
"""A failure during the run. A restart may succeed."""
CONFIGURATION_ERROR = 2
"""Wrong input or configuration; nothing was started. A restart has the same result."""
