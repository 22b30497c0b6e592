"""Show runs, stores, features and jobs live on one local page, with the API behind it.

    python -m launch.serve [--runs=runs] [--stores=stores] [--port=8765]

The same as `saejax serve`; --help says all.
"""

from saejax.commands import launch

if __name__ == "__main__":
    launch("serve")
