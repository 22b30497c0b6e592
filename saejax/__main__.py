"""`python -m saejax <command>`: the same as `saejax <command>`."""

from saejax.app.commands import main

if __name__ == "__main__":
    main()
