"""Reconciles RLJobs: what a job's objects shall be, keeping them so, and saying how the job stands."""
