"""Ask a language model what a run's features stand for, and score the answers.

    python -m launch.explain runs/quickstart --url=http://localhost:8000/v1 --model=llama-3.1-8b

The same as `saejax explain`; --help says all.
"""

from saejax.commands import launch

if __name__ == "__main__":
    launch("explain")
