"""What the runs have written, as tables in Markdown."""

from pathlib import Path
from typing import Any

from saejax.core.files import read_json
from saejax.runs.folder import Run, Sweep

_COLUMNS = (
    "l0",
    "fve",
    "fve_with_sinks",
    "loss_recovered",
    "loss_recovered_with_sinks",
    "kl",
    "dead_fraction",
    "sinks",
)
_RUNS = Path("runs")


def runs(names: list[str]) -> str:
    """A row for each pipeline, then how fast its stages were."""
    rows, speeds = [], []
    for name in names:
        run = Run(_RUNS / name)
        done, stages = read_json(run.evaluation), run.read_stages()
        passed = sum(gate["passed"] for gate in done["gates"])
        failed = ", ".join(gate["name"] for gate in done["gates"] if not gate["passed"])
        gates = f"{passed} of {len(done['gates'])}" + (f" (not {failed})" if failed else "")
        rows.append([name, *(_cell(done["metrics"].get(column)) for column in _COLUMNS), gates])
        speeds.append([name, *(_speed(stages.get(stage)) for stage in ("capture train", "train", "evaluate"))])
    return "\n".join(
        [
            "## Dictionaries\n",
            _table(["run", *_COLUMNS, "gates"], rows),
            "Tokens a second of each stage; a store is captured once for all:\n",
            _table(["run", "capture", "train", "evaluate"], speeds),
        ]
    )


def members(sweep: str) -> str:
    """A row for each member of a sweep, each evaluated by itself."""
    columns = ("l0", "fve", "loss_recovered", "kl", "dead_fraction")
    done, rows = read_json(Sweep(_RUNS / sweep).result), []
    for row in done["members"]:
        metrics = read_json(Run(_RUNS / sweep / row["member"]).evaluation)["metrics"]
        rows.append([" ".join(row["reads"]), *(_cell(metrics[column]) for column in columns)])
    speed = f"{done['tokens']:,} activations each, {done['tokens_per_second']:,.0f} a second, each for all of them.\n"
    return "\n".join(["## Transcoders\n", _table(["reads", *columns], rows), speed])


def study(name: str) -> str:
    """The behaviours: what the model does, graphs' scores, groups that do more than their controls."""
    rows = []
    for one in read_json(_RUNS / name / "study" / "summary.json")["behaviours"]:
        judged = [group for group in one["groups"] if group["stands"] is not None]
        stands = [group for group in judged if group["stands"]]
        most = max(stands, key=lambda group: abs(group["ablate"]["mean"]), default=None)
        test = one["baseline"]["test"]
        rows.append(
            [
                one["name"],
                f"{test['accuracy']:.0%}",
                f"{test['clean']:.2f}",
                *(_mean(one["graphs"], key) for key in ("replacement", "completeness")),
                f"{len(stands)} of {len(judged)}",
                "-" if most is None else f"{most['name']}: {_interval(most['ablate'])}",
                "-" if most is None else f"{most['control']['mean']:.2f}",
                f"{one['prediction']['spearman']:.2f}",
            ]
        )
    head = "behaviour, right, logit difference, replacement, completeness, groups above controls, largest effect"
    columns = [*head.split(", "), "its controls", "Spearman"]
    return "\n".join(["## Study\n", _table(columns, rows)])


def _table(columns: list[str], rows: list[list[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _cell(value: Any) -> str:
    return "-" if value is None else f"{value:.4g}"


def _speed(stage: dict[str, Any] | None) -> str:
    return f"{stage['tokens_per_second']:,.0f}" if stage else "-"


def _mean(rows: list[dict[str, Any]], key: str) -> str:
    return f"{sum(row[key] for row in rows) / len(rows):.2f}"


def _interval(effect: dict[str, float]) -> str:
    return f"{effect['mean']:.2f} ({effect['low']:.2f} to {effect['high']:.2f})"
