"""Drives trajectories: leases in, generation and rewards asked for, results out."""
