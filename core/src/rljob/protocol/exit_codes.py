"""Exit codes of components, of the command line and of the checks before a start."""

FAILURE = 1
"""A failure in progress. Starting again may help."""
CONFIGURATION_ERROR = 2
"""Wrong input or configuration, nothing was started. Starting again would end the same."""
