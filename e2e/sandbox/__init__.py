"""Attacks on the sandbox of the reward ``code``, and the processes beside which they run."""
