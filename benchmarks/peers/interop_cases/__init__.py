"""The dictionaries that the peers' own code writes for the tests of reading: one module a format."""
