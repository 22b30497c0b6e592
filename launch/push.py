"""Put a dictionary into a repository of the Hugging Face hub, with a model card.

    python -m launch.push runs/quickstart owner/name

The same as `saejax push`; --help says all.
"""

from saejax.commands import launch

if __name__ == "__main__":
    launch("push")
