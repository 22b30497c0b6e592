"""`saejax adapt`, from a checkout."""

from saejax.commands import launch

if __name__ == "__main__":
    launch(__file__)
