"""L9: the local page and its API, live."""
