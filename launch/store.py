"""Look at activation stores, check them, join them, and make them of activations that others computed.

    python -m launch.store info STORE...

The same as `saejax store`; --help says all.
"""

from saejax.commands import launch

if __name__ == "__main__":
    launch("store")
