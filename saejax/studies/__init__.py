"""L9: one command from a behaviour of a language model to the features that cause it."""
