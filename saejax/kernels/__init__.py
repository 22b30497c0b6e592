"""L1: fast paths, each beside a plain reference of a few lines."""
