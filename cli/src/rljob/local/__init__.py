"""Runs a job's parts as processes of this machine: rljob run."""
