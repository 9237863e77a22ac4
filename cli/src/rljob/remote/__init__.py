"""Commands on a job in a cluster, through the API server alone. ``rljob.local`` has those on a run directory.

Everything is synchronous. Errors are a CliError with one sentence.
"""
