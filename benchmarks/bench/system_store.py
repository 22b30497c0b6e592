"""The store beside a plain memory-mapped file: written as durably, read in the same shuffled order."""

from benchmarks.bench.frame import Result, Told
from benchmarks.bench.markdown import table
from benchmarks.bench.system_rows import Row, median, ours, ratio, spread

ROWS = (Row("store-768"),)

_D, _BATCH = 768, 4096
_SHUFFLED, _PLAIN = "bfloat16: shuffled batches", "memmap: shuffled blocks"


def run(row: Row, told: Told) -> Result:
    """MB of bfloat16 a second, everything in turn (benchmarks/store.py); the page cache is warm for the reads."""
    rows = 65_536 if told.quick else 131_072
    with ours(told) as worker:
        asked = {"rows": rows, "d": _D, "batch": _BATCH, "rounds": told.rounds, "folder": str(told.folder)}
        rates = worker.ask("store", **asked)["rates"]
    # Either will do: a rate that no training of such a width outruns, or nearly that of a plain file.
    share = ratio(rates[_SHUFFLED], rates[_PLAIN])
    reached = max(median(rates[_SHUFFLED]) / 1000, share / 0.8)
    what = "reading shuffled: GB/s, or its share of memmap / 0.8, whichever is more"
    return {
        "rows": rows,
        "rates": rates,
        "share": share,
        "figures": [{"what": what, "value": reached, "aim": 1.0, "better": "more"}],
    }


def lines(results: list[Result]) -> list[str]:
    found: list[str] = []
    for r in results:
        found += [
            f"{r['row']}: {r['rows']:,} x {_D} activations, {r['rows'] * _D * 2 / 1e6:,.0f} MB as bfloat16, batches of",
            f"{_BATCH:,}. The map has no checksums. Rates of int8 count the bfloat16 that comes out.",
            "",
            *table(("", "MB/s, median (range)"), [[name, spread(of, ",.0f")] for name, of in r["rates"].items()]),
            "",
            f"{_SHUFFLED} over {_PLAIN}, median of the rounds: {r['share']:.0%}.",
        ]
    return found
