"""L0: what every other room may use and that uses no other room."""
