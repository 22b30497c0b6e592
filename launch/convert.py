"""Write dictionaries in another project's format, or read another project's into saejax's.

    python -m launch.convert runs/quickstart out --to=saelens

The same as `saejax convert`; --help says all.
"""

from saejax.commands import launch

if __name__ == "__main__":
    launch("convert")
