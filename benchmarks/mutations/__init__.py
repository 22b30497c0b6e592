"""Faults of one line in every room, and which tests notice them."""
