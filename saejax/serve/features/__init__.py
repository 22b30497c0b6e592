"""Features of a dictionary: what they fire on, what is like them, what they do to a text, where they come from."""
