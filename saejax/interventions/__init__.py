"""L6: features changed inside the language model, and what follows from it."""
