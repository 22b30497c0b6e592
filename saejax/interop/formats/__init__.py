"""Formats of dictionaries: one file a format, which registers itself and is imported when it is asked for by name."""
