"""List the formats of dictionaries: which coders each can say, what is read and what is written.

    python -m launch.formats [saelens]

The same as `saejax formats`; --help says all.
"""

from saejax.commands import launch

if __name__ == "__main__":
    launch("formats")
