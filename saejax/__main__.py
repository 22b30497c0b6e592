"""`python -m saejax <command>`: the same as `saejax <command>`."""

from saejax.commands import main

if __name__ == "__main__":
    main()
