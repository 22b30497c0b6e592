"""L6: which features act on which, and on the next token, within one prompt."""
