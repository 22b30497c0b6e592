"""The coder for after training keeps as many latents as the one that was trained, or says that it does not."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import saejax
from saejax.coders import RECIPES, TOPOLOGIES, CoderConfig, Sites, build
from saejax.core.metrics import l0_note, read_metrics
from saejax.fit.stacked import l0_for_all
from saejax.training import TrainState
from saejax.training.program import can_differ, compare

K, ROWS, STEPS, BATCH = 4, 2048, 48, 256
# All whose latents are chosen by batch. Each is trained in the soak.
FOLLOWING = [name for name in RECIPES if CoderConfig(preset=name).resolved().sparsity == "batchtopk"]
BOTH = [name if name == "batchtopk" else pytest.param(name, marks=pytest.mark.soak) for name in FOLLOWING]


def activations(sites: int) -> Any:
    """Sums of 32 directions in 16 dimensions, each present in a tenth of the rows."""
    rng = np.random.default_rng(0)
    present = (rng.random((ROWS, 32)) < 0.1) * rng.uniform(0.5, 1.5, (ROWS, 32))
    x = {f"h{i}": (present @ rng.normal(size=(32, 16))).astype(np.float32) for i in range(2)}
    return x if sites == 2 else x["h0"]


def trained(preset: str, x: Any, **how: Any) -> saejax.TrainedCoder:
    names = {"reads": tuple(x), "writes": tuple(x)} if preset.startswith("clt") else {}
    if preset == "temporal":  # rows of an array are no neighbours
        how["contrastive_coefficient"] = 0.0
    how = {"tokens": STEPS * BATCH, "batch_size": BATCH, "d_sae": 48, "progress": False, **names, **how}
    return saejax.train(x, preset, k=K, **how)


def l0(sae: saejax.TrainedCoder, x: Any) -> float:
    """Mean number of latents of a token, of all groups, of the coder as everybody uses it."""
    rows = np.stack(list(x.values()), axis=1) if isinstance(x, dict) else x
    return float((sae.encode(rows) != 0).reshape(ROWS, -1).sum(1).mean())


@pytest.mark.parametrize("preset", BOTH)
def test_a_short_training_leaves_a_coder_with_its_l0(preset: str) -> None:
    topology = TOPOLOGIES[CoderConfig(preset=preset).resolved().topology]
    x = activations(2 if topology.stacked else 1)
    sae = trained(preset, x)
    assert l0(sae, x) == pytest.approx(sae.figures["l0_in_training"], rel=0.1)
    assert sae.figures["l0_in_training"] <= K * sae.n_latents / 48  # k of each group


@pytest.mark.ci
def test_a_coder_whose_l0_is_another_after_training_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the run as from memory, in the metrics and to the user; with what was counted by hand."""
    x, how = activations(1), {"threshold_warmed": False, "progress": True}
    sae = trained("batchtopk", x, run=tmp_path / "run", **how)
    said = [line for line in capsys.readouterr().out.splitlines() if "in training" in line]
    (row,) = (row for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if "after/l0" in row)
    assert row["step"] == STEPS and row["after/l0"] < 0.8 * row["after/l0_in_training"]
    assert row["after/l0"] == pytest.approx(l0(sae, x), rel=0.1)
    assert len(said) == 1 and f"keeps {row['after/l0']:.3g} latents for a token and kept" in said[0]
    again = trained("batchtopk", x, **how)
    assert said == [line for line in capsys.readouterr().out.splitlines() if "in training" in line]
    assert again.figures == sae.figures == {"l0_in_training": row["after/l0_in_training"]}
    again.save(tmp_path / "saved")
    assert saejax.load(tmp_path / "saved").figures == sae.figures


def test_averaged_weights_are_what_is_compared() -> None:
    """relu: with averaged biases so low that nothing fires, L0 is 0 afterwards and half of all latents in training."""
    coder = build(CoderConfig(preset="standard", d_sae=48, encoder_centre=False), [16], STEPS, [16])
    x, sites = activations(1)[:256], Sites(("h",), ("h",), (0.5,), (0.5,), False)
    params, stats = coder.init(jax.random.key(0)), coder.init_stats()
    state = TrainState(jnp.int32(STEPS), params, {}, stats, params | {"b_enc": jnp.full(48, -1e3)})
    found = compare(coder, sites, 128)(state, {"h": jnp.asarray(x)})
    own = 0.5 * x[:128].astype(np.float64) - np.asarray(params["b_dec"], np.float64)
    by_hand = (own @ np.asarray(params["W_enc"], np.float64) > 0).sum(1).mean()
    assert float(found["l0"]) == 0 and float(found["l0_in_training"]) == pytest.approx(by_hand, abs=0.1)
    assert can_differ(coder, state) and not can_differ(coder, dataclasses.replace(state, averaged={}))


@pytest.mark.parametrize("platform", [pytest.param("cpu", marks=pytest.mark.ci), "gpu"])
def test_members_of_a_sweep_have_the_figures_that_each_has_alone(platform: str) -> None:
    """In turn, as on a CPU, and as one batch: of states that differ in parameters and threshold."""
    coder = build(CoderConfig(preset="batchtopk", k=K, d_sae=48), [16], STEPS, [16])
    both, sites = compare(coder, Sites(("h",), ("h",), (0.5,), (0.5,), False), 128), {"h": jnp.asarray(activations(1))}
    alone = [
        TrainState(jnp.int32(7), coder.init(jax.random.key(i)), {}, coder.init_stats() | {"threshold": theta}, {})
        for i, theta in enumerate(np.float32([0.1, 0.6]))
    ]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *alone)
    found = l0_for_all(both, platform)(dataclasses.replace(stacked, step=jnp.int32(7)), sites)
    for i, state in enumerate(alone):
        own = both(state, sites)
        for name, value in found.items():
            assert float(value[i]) == pytest.approx(float(own[name]), abs=0.02), name
    assert float(found["l0"][0]) > 1.5 * float(found["l0"][1]) > 0


@pytest.mark.ci
@pytest.mark.parametrize("mode", ["jit", pytest.param("pmap", marks=pytest.mark.ci)])
def test_every_mesh_and_mode_has_the_same_figures(mode: str) -> None:
    how = {"tokens": 3 * BATCH, "lr": 1e-3, "matmul_dtype": "float32"}
    one = trained("batchtopk", activations(1), mesh=(1, 1), **how)
    spread = trained("batchtopk", activations(1), mesh=(2, 1), mode=mode, **how)
    assert spread.figures == pytest.approx(one.figures)
    np.testing.assert_allclose(spread.params["threshold"], one.params["threshold"], rtol=1e-4)


@pytest.mark.parametrize(
    ("trained_l0", "after", "apart"),
    [(4.0, 4.7, False), (4.0, 3.3, False), (4.0, 5.0, True), (4.0, 0.0, True), (None, 1.0, False), (0.0, 0.0, False)],
)
def test_a_fifth_is_far_apart(trained_l0: float | None, after: float, apart: bool) -> None:
    assert bool(l0_note(trained_l0, after)) is apart
