"""Runs a job's components as processes of this machine: `rljob run`, and the commands on its runs."""
