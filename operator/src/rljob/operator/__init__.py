"""The operator: creates and repairs the objects of RLJobs and writes their status."""
