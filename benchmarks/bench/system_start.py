"""Start-up: the import, the help, and the first step of a training, compiled or read back."""

import sys

from benchmarks.bench.frame import Result, Told
from benchmarks.bench.markdown import table
from benchmarks.bench.system_rows import Row, median, of_caches, spread, timed

ROWS = (
    Row("start"),
    Row("first-step-topk", "topk", quick=False),
    Row("first-step-batchtopk", "batchtopk", quick=False),
    Row("first-step-clt", "clt", quick=False),
)

_COMMANDS = {
    "python -c 'import saejax'": ("-c", "import saejax"),
    "saejax --help": ("-m", "saejax", "--help"),
    "python -c 'import jax'": ("-c", "import jax"),
}


# Seconds by the clock that each may take; of first steps those of the smaller coders.
_AIMS = {"python -c 'import saejax'": 0.2, "saejax --help": 0.5, "cold": 12.0, "warm": 5.0}


def run(row: Row, told: Told) -> Result:
    """Seconds of the clock and of all threads; the cold run of each round begins with an empty cache."""
    uses: dict[str, list[dict[str, float]]] = {}
    # A first step takes the time of many imports.
    for number in range(told.rounds if not row.preset else 1 if told.quick else 3):
        cache = str(told.folder / f"{row.name}-{number}")
        commands = {name: (words, "0") for name, words in _COMMANDS.items()}
        if row.preset:
            first = ("-m", "benchmarks.bench.system_first_step", row.preset)
            commands = {"without the cache": (first, "0"), "cold": (first, cache), "warm": (first, cache)}
        for name, (words, compiled) in commands.items():
            use = timed([sys.executable, *words], of_caches(told.folder, compiled))
            uses.setdefault(name, []).append(use)
    figures = [
        {
            "what": f"{_label(row.preset, name)}, seconds",
            "value": median([use["real"] for use in of]),
            "aim": aim,
            "better": "less",
        }
        for name, of in uses.items()
        if (aim := _AIMS.get(name)) is not None and row.preset != "clt"
    ]
    return {"preset": row.preset, "uses": uses, "figures": figures}


def _label(preset: str, name: str) -> str:
    return f"first step of {preset}, {name}" if preset else name


def lines(results: list[Result]) -> list[str]:
    rows = [
        [
            _label(r["preset"], name),
            spread([use["real"] for use in uses], ".2f"),
            spread([use["user"] + use["system"] for use in uses], ".2f"),
        ]
        for r in results
        for name, uses in r["uses"].items()
    ]
    return [
        "start, first-step-*: from nothing to the end of the process. First step: import, two steps of 128 -> 1,024",
        "(clt: three layers), batch 2,048 in memory, the coder back. Cold and warm: the cache that the commands keep.",
        "",
        *table(("", "seconds, median (range)", "of all cores"), rows),
    ]
