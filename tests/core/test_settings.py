"""Settings: what a field says of a key, and what follows from it."""

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from saejax.app.experiment import Experiment, deciding, from_json, to_run_json
from saejax.coders import CoderConfig
from saejax.core.config import differences
from saejax.core.errors import ConfigError
from saejax.core.settings import Setting, Settings, setting, settings_of, shared
from saejax.text.config import SourceConfig

OLD = json.loads((Path(__file__).parents[1] / "fixtures" / "config_of_2026_11_22.json").read_text())


def keys(cls: type, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field[Any], Setting]]:
    for field in dataclasses.fields(cls):
        known = settings_of(cls)[field.name]
        if known.section:
            yield from keys(known.section, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", field, known


def part(default: Any, **known: Any) -> Any:
    """A section of one key."""
    fields = [("key", Any, setting(default, "A key.", **known))]
    made: Any = dataclasses.make_dataclass("Part", fields, bases=(Settings,), frozen=True)
    made.section = "part"
    return made


ALL = {name: (field, known) for name, field, known in keys(Experiment)}


@pytest.mark.parametrize("name", ALL)
def test_every_key_is_documented_and_its_default_is_in_its_range(name: str) -> None:
    field, known = ALL[name]
    assert known.doc[0] != " " and known.doc.endswith((".", ".)")), known.doc
    assert "  " not in known.doc
    if known.base is not None:
        assert field.default in (None, "", ())
        bounds = {name: getattr(known, name) for name in ("low", "high", "above", "below", "choices")}
        assert part(known.base, **bounds)().key == known.base
    if isinstance(known.decides, str):
        section = name.rpartition(".")[0]
        assert f"{section}.{known.decides}" in ALL


@pytest.mark.parametrize(
    ("default", "bounds", "bad", "must"),
    [
        (1, {"low": 1}, 0, "is 0; it must be at least 1."),
        (1, {"low": 0}, -1, "is -1; it must be 0 or more."),
        (1, {"low": 0}, 2**31, "is 2147483648; it must be at most 2147483647."),
        (1, {}, 2**31, "is 2147483648; it must be at most 2147483647."),
        (1, {"low": 1, "high": 5}, 6, "is 6; it must be between 1 and 5."),
        (1.0, {"low": 0}, -0.5, "is -0.5; it must be finite, not negative."),
        (1.0, {"low": 0}, 1e50, "is 1e+50; it must be finite, not negative in float32."),
        (1.0, {"low": 1}, math.inf, "is inf; it must be at least 1 and finite."),
        (1.0, {"above": 0}, 1e-50, "is 1e-50; it must be positive and finite in float32."),
        (2.0, {"above": 1}, 1.0, "is 1.0; it must be above 1 and finite."),
        (0.5, {"low": 0, "below": 1}, 1 - 1e-9, "is 0.999999999; it must be below 1, not negative in float32."),
        (0.5, {"above": 0, "high": 1}, math.nan, "is nan; it must be above 0 and at most 1."),
        (0.5, {"above": 0, "below": 1}, 0.0, "is 0.0; it must be above 0 and below 1."),
        (0.5, {"low": 0, "high": 1}, 1.5, "is 1.5; it must be between 0 and 1."),
        (0.5, {}, math.nan, "is nan; it must be finite."),
        ((1, 2), {"low": 1}, (1, 0), "holds 0; each must be at least 1."),
        ("a", {"choices": ("a", "bcd")}, "bcc", "is 'bcc'. Did you mean 'bcd'? There are: a, bcd."),
        ("a", {"choices": ("a", "bcd")}, "", "is ''. There are: a, bcd."),
    ],
)
def test_what_is_outside_of_the_range_is_refused_in_words(default: Any, bounds: Any, bad: Any, must: str) -> None:
    with pytest.raises(ConfigError) as error:
        part(default, **bounds)(bad)
    assert str(error.value) == f"part.key {must}"
    assert part(default, **bounds)().key == default


def test_what_no_program_counts_may_be_larger_and_choices_may_grow() -> None:
    words = {"a": 1}
    assert part(1, low=1, high=math.inf)(2**40).key == 2**40
    kind = part("", choices=words)
    with pytest.raises(ConfigError, match="There are: a"):
        kind("zzz")
    words["zzz"] = 2
    assert kind("zzz").key == "zzz" and kind().key == ""


# --- what follows: runs and sweeps ---------------------------------------------------------------------------

# The rules before settings said it themselves.
RUN = (
    *("seed", "coder_seed", "hook_point", "reads", "writes", "lm", "text", "capture", "coder", "train", "truth"),
    "prefix",
)
EVALUATION = ("heldout", "answer_tokens", "eval_rows", "timed")
TIMING = (
    *("profile", "monitor", "blocks_ahead"),
    *("validate_every", "log_every", "checkpoint_every", "keep_checkpoints", "keep_best", "keep_every"),
    *("max_skipped_steps", "tensorboard", "wandb"),
)
OWN = ("coder", "reads", "writes", "hook_point", "coder_seed")
OWN_TRAIN = {
    *("optimizer", "lr", "b_enc_rate", "b1", "b2", "eps", "weight_decay", "clip_norm", "ema_decay", "accumulate"),
    *("schedule", "warmup_fraction", "final_lr_fraction", "decay_fraction", "restart_period", "restart_multiplier"),
    *("plateau_factor", "plateau_patience", "plateau_window", "resample_every", "resample_until_fraction"),
}
SPARSITY = {
    "l1_coefficient",
    "lp_coefficient",
    "tanh_coefficient",
    "l0_coefficient",
    "target_l0_coefficient",
    "frequency_coefficient",
}


def test_what_decides_a_run_is_what_did_but_for_validations() -> None:
    """Those decide where training may stop early by them, both ways to set them alike; else neither does."""
    for patience, drifted in ((0, {"validate_epochs"}), (4, {"validate_every"})):
        config = to_run_json(from_json(OLD | {"train": OLD["train"] | {"early_stop_patience": patience}}))
        before = {key: config[key] for key in RUN}
        before["lm"] = {key: value for key, value in before["lm"].items() if key != "device"}
        before["truth"] = {
            key: value for key, value in config["truth"].items() if key not in ("score_samples", "source")
        }
        before["prefix"] = {key: value for key, value in config["prefix"].items() if key not in EVALUATION}
        before["capture"] = {key: value for key, value in before["capture"].items() if key != "mesh"}
        before["train"] = {key: value for key, value in before["train"].items() if key not in TIMING}
        now = deciding(config)
        assert {key: now[key] for key in now if key != "train"} == {
            key: before[key] for key in before if key != "train"
        }
        assert now["train"].keys() ^ before["train"].keys() == drifted
        both = {"validate_every", "validate_epochs"}
        assert now["train"].keys() & both == (both if patience else set())


def test_what_members_of_a_sweep_share_is_what_they_did() -> None:
    config = to_run_json(from_json(OLD))
    before = {key: value for key, value in config.items() if key not in OWN}
    before["train"] = {key: value for key, value in before["train"].items() if key not in OWN_TRAIN}
    assert shared(Experiment, config) == before
    assert {key for key, known in settings_of(CoderConfig).items() if known.sparsity_weight} >= SPARSITY


def test_a_config_json_of_before_is_read_as_it_is() -> None:
    changed = differences(OLD, to_run_json(from_json(OLD)))
    assert [line for line in changed if ": None -> " not in line] == []  # but for keys that came later


def test_text_sources_are_sections_of_their_own() -> None:
    assert settings_of(SourceConfig).keys() < settings_of(type(Experiment().text)).keys()
    with pytest.raises(ConfigError, match=r"config\.section"):
        from_json({"section": "train"})
