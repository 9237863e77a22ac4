"""A job in a cluster as a person sees it: through the API server alone, as ``rljob.local`` is through a run directory.

Everything is synchronous. Trouble is a CliError of one sentence.
"""
