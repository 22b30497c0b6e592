"""Show which features lead to the next token of a prompt: an attribution graph, as JSON and as a page.

    python -m launch.graph runs/coders-clt "x = data[i"

The same as `saejax graph`; --help says all.
"""

from saejax.commands import launch

if __name__ == "__main__":
    launch("graph")
