"""L8: what an experiment will need, and the jobs that run it."""
