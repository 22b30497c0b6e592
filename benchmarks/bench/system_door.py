"""The door that people use: seconds of a step of `saejax.train(x, preset)`, beside the step alone."""

from benchmarks.bench import training
from benchmarks.bench.frame import Result, Told
from benchmarks.bench.markdown import table
from benchmarks.bench.rows import CPU_ROWS, GPU_ROWS
from benchmarks.bench.rows import Row as TrainRow
from benchmarks.bench.system_rows import Row, ours, ratio, spread

ROWS = (Row("door-topk", "topk", quick=False), Row("door-batchtopk", "batchtopk", quick=False))

# Steps of a turn of the step alone; of a short training, and so many more of a long one.
_ALONE, _SHORT, _MORE = 10, 10, 40


def shape(row: Row, backend: str) -> TrainRow:
    """768 -> 6,144 with 32 latents, on a GPU 32,768."""
    name = f"{row.preset}-6144" if backend == "cpu" else f"gpu-{row.preset}-32768"
    (found,) = (one for one in (*CPU_ROWS, *GPU_ROWS) if one.name == name)
    return found


def run(row: Row, told: Told) -> Result:
    """A step through the door is the difference of two trainings, divided by the steps that one has more."""
    of = shape(row, told.backend)
    data, _ = training.tokens(of, told.folder)
    seconds: dict[str, list[float]] = {"alone": [], "door": []}
    with ours(told) as worker:
        steps = _ALONE * (told.rounds + 1)
        worker.ask("prepare_door", row=of.to_json(), data=str(data), lr=training.LR, steps=steps)
        for _ in range(told.rounds):
            seconds["alone"].append(worker.ask("step_alone", steps=_ALONE)["seconds"])
            short, long = (worker.ask("train", steps=n)["seconds"] for n in (_SHORT, _SHORT + _MORE))
            seconds["door"].append((long - short) / _MORE)
    over = ratio(seconds["door"], seconds["alone"])
    figure = {"what": "a step of saejax.train over the step alone", "value": over, "aim": 1.1, "better": "less"}
    return {"about": of.to_json(), "seconds": seconds, "figures": [figure]}


def lines(results: list[Result]) -> list[str]:
    rows = [
        [
            f"{r['row']}, {r['about']['d_in']} -> {r['about']['d_sae']:,}",
            *(spread([1000 * s for s in r["seconds"][name]], ".0f") for name in ("alone", "door")),
            f"{r['figures'][0]['value']:.2f}",
        ]
        for r in results
    ]
    return [
        "door-*: `saejax.train(x, preset)` of an array, with its defaults but for the rate: the difference of a",
        f"training of {_SHORT + _MORE} steps and one of {_SHORT}. Batches, their order and the metrics are in it.",
        "",
        *table(("", "ms, the step alone", "ms, a step of saejax.train", "times as long, median of the rounds"), rows),
    ]
