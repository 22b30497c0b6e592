"""The words of the stages on the terminal."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from saejax.core.metrics import l0_note

if TYPE_CHECKING:  # every command speaks, and few need what these bring along
    from saejax.capture import Captured
    from saejax.evals import Gate


def say(text: str = "") -> None:
    """One line, at once."""
    print(text, flush=True)


def keep_quiet(text: str = "") -> None:
    """`say`, for a process whose words another one says."""


def captured(split: str, path: str, done: "Captured", wanted: int, parts: int) -> None:
    """The end of the capture of a split."""
    from saejax.runs.made import already_done

    if done.already_complete and not done.missing:
        say(already_done(f"capture {split}", f"{done.rows:,} activations in {path}"))
        return
    if done.missing:
        others = ", ".join(map(str, done.missing))
        say(
            f"capture {split}: this process's parts are done, {done.rows:,} activations in {path}; "
            f"part{'s' * (len(done.missing) > 1)} {others} of {parts} still to come"
        )
        return
    say(f"capture {split}: {done.rows:,} activations in {path}, {done.tokens / done.seconds:,.0f} tokens/s")
    if done.overhead is not None:
        say(
            f"  read {done.read / done.seconds:,.0f} tokens/s, the forward pass alone {done.forward_rate:,.0f}: "
            f"overhead {done.overhead:.1%}"
        )
    if done.rows < wanted:
        say(f"  the text ran out before the {wanted:,} that were asked for")


def non_finite(tokens: int | None) -> None:
    """The number of tokens that an evaluation left out, where there are any."""
    if tokens:
        say(
            f"evaluate: {tokens:,} tokens are in no metric, because the model's activations or predictions there are "
            "NaN or infinite; lm.dtype=float32 may be enough for it"
        )


def other_l0(result: Mapping[str, Any]) -> None:
    """A warning where the evaluated coder keeps another number of latents than in training, from eval.json."""
    if note := l0_note(result.get("l0_in_training"), result["metrics"]["l0"]):
        say(f"evaluate: {note}")


def sinks(metrics: Mapping[str, float]) -> None:
    """The share of tokens that the figures leave out as sinks, and the figures with them; silent where none were."""
    if not metrics.get("sinks"):
        return
    of_all = {name.removesuffix("_with_sinks"): v for name, v in metrics.items() if name.endswith("_with_sinks")}
    say(
        f"evaluate: {metrics['sinks']:.2%} of the tokens are sinks (capture.drop_first, capture.max_norm_ratio) and "
        f"left out. With them: {', '.join(f'{name} {value:.4g}' for name, value in of_all.items())}."
    )


def gates(checked: Sequence["Gate"], warnings: Sequence["Gate"] = ()) -> None:
    """The gates, with advice for those that did not pass, and the warnings beside them."""
    say("gates:")
    for gate in checked:
        say(f"  {_verdict(gate)}  {gate.title}")
        if advice := "" if gate.passed else gate.unmeasured or gate.advice:
            say(f"        {advice}")
    for warning in warnings:
        say(f"warning: {warning.title}: {warning.value:.4g} > {warning.bar:g}. {warning.advice}")


def summary(result: Mapping[str, Any], stages: Mapping[str, Any], page: Path, live: str, took: str) -> None:
    """The table at the end of the pipeline, from eval.json and stages.json; `live`: how the page opens."""
    metrics = result["metrics"]
    # A coder that writes in the second of two models alone does not touch the loss of the first.
    recovered = metrics.get("loss_recovered")
    from saejax.evals import Gate
    from saejax.evals.gates import NOT_MEASURED

    gates = [Gate.from_json(gate) for gate in result["gates"]]
    unmeasured = sum(gate.state == NOT_MEASURED for gate in gates)
    passed = f"{sum(gate.passed for gate in gates)} of {len(gates)}"
    rows = [
        ("L0", f"{metrics['l0']:.1f} of {result['d_sae']:,} latents"),
        ("FVE", f"{metrics['fve']:.4f}"),
        ("loss recovered", "not measured" if recovered is None else f"{recovered:.4f}"),
        *(("  in turn", f"{value:.4f}") for name, value in metrics.items() if name == "loss_recovered_in_turn"),
        ("dead features", f"{metrics['dead_fraction']:.2%}"),
        *((f"{name}", f"{stage['tokens_per_second']:,.0f} tokens/s") for name, stage in stages.items()),
        ("took", took),
        ("gates passed", f"{passed}, {unmeasured} not measured" if unmeasured else passed),
        *((f"  {gate.name}", _verdict(gate)) for gate in gates),
        ("report", str(page)),
        ("live page", live),
    ]
    say()
    for name, value in rows:
        say(f"  {name:<18} {value}")


def _verdict(gate: "Gate") -> str:
    word = "pass" if gate.passed else "none" if gate.ends_well else "FAIL"
    value = "not measured" if gate.unmeasured else "not finite" if gate.value is None else f"{gate.value:.4g}"
    return f"{word}  {value} {gate.comparison} {gate.bar:g}"
