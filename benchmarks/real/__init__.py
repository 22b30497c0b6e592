"""A published language model, end to end: `python -m benchmarks.real`."""
