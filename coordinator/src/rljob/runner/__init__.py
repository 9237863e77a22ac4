"""Drives trajectories: receives leases, requests generation and rewards, returns results."""
