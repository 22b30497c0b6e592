"""Planted batches: functions of (world, seed, step), in this process and another, straight into a training."""

import dataclasses
import hashlib
import itertools
import json
import subprocess
import sys

import numpy as np
import pytest
from tiny import ROOT, one_device

from saejax.core.errors import ConfigError
from saejax.core.rng import stream
from saejax.evals.truth import Means, PlantedBatches, Spreads, World, heldout, plant

W = World(n_features=30, d_in=8, roots=3, branching=3, exclusive=0.5, rank=2, std=Spreads(first=0.4), p_max=0.4)


def digest(values: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()


def test_a_batch_is_a_function_of_world_seed_and_step() -> None:
    batches = PlantedBatches(plant(W), 32, seed=3)
    first = [batch["x"] for batch in itertools.islice(batches.iterate(), 5)]
    assert {one.shape for one in first} == {(32, 8)} and {one.dtype for one in first} == {np.dtype(np.float32)}
    assert len({digest(one) for one in first}) == 5
    later = PlantedBatches(plant(W), 32, seed=3)
    for step, one in enumerate(itertools.islice(later.iterate(2), 3), 2):
        np.testing.assert_array_equal(one["x"], first[step])
        np.testing.assert_array_equal(later.whole_batch_at(step)["x"], first[step])
    assert digest(PlantedBatches(plant(W), 32, seed=4).whole_batch_at(0)["x"]) != digest(first[0])
    other = plant(dataclasses.replace(W, seed=1))
    assert not np.array_equal(PlantedBatches(other, 32, seed=3).whole_batch_at(0)["x"], first[0])
    assert plant(W).fingerprint != other.fingerprint
    assert plant(W).fingerprint == plant(dataclasses.replace(W, score_samples=500)).fingerprint


def test_several_processes_have_rows_of_one_batch() -> None:
    planted = plant(W)
    whole = PlantedBatches(planted, 32, seed=0).whole_batch_at(1)["x"]
    parts = [PlantedBatches(planted, 32, 0, rows=rows) for rows in ((0, 8), (8, 32))]
    found = [next(part.iterate(1))["x"] for part in parts]
    np.testing.assert_array_equal(np.concatenate(found), whole)
    np.testing.assert_array_equal(parts[1].whole_batch_at(1)["x"], whole)
    assert parts[0].statistics["x"].to_json() == parts[1].statistics["x"].to_json()
    with pytest.raises(ConfigError, match="rows must be a range within the batch"):
        PlantedBatches(planted, 32, 0, rows=(8, 40))


def test_statistics_are_those_of_the_stream() -> None:
    batches = PlantedBatches(plant(W), 4096, seed=0)
    rows = np.concatenate([batch["x"] for batch in itertools.islice(batches.iterate(), 5)]).astype(np.float64)
    found = batches.statistics["x"]
    assert found.count == 16_384
    np.testing.assert_allclose(found.mean, rows.mean(0), atol=0.05)
    assert found.mean_squared_norm == pytest.approx(np.square(rows).sum(1).mean(), rel=0.03)
    other = heldout(plant(W), seed=0).rows(0, 16_384)["x"]
    assert np.square(other, dtype=np.float64).sum(1).mean() == pytest.approx(found.mean_squared_norm, rel=0.03)
    both = {row.tobytes() for row in rows.astype(np.float32)} & {row.tobytes() for row in other}
    # Rows where nothing or one feature fires may be equal by chance.
    assert len(both) < 20, "what is held out is in no batch"


CODE = """
import hashlib, json
import numpy as np
from saejax.core.rng import stream
from saejax.evals.truth import PlantedBatches, Spreads, World, plant
w = World(n_features=30, d_in=8, roots=3, branching=3, exclusive=0.5, rank=2, std=Spreads(first=0.4), p_max=0.4)
p = plant(w)
x, a = p.sample(stream(0, "here"), 40)
batch = PlantedBatches(p, 32, 3).whole_batch_at(7)["x"]
values = [p.directions, p.bias, p.probability, np.asarray(x), np.asarray(a), batch]
print(json.dumps([hashlib.sha256(np.ascontiguousarray(v).tobytes()).hexdigest() for v in values]))
"""


@pytest.mark.ci
def test_another_process_draws_the_same_bits() -> None:
    found = subprocess.run(
        [sys.executable, "-c", CODE], env=one_device(), cwd=ROOT, capture_output=True, text=True, check=True
    )
    p = plant(W)
    x, a = p.sample(stream(0, "here"), 40)
    batch = PlantedBatches(p, 32, 3).whole_batch_at(7)["x"]
    values = [p.directions, p.bias, p.probability, np.asarray(x), np.asarray(a), batch]
    assert json.loads(found.stdout) == [digest(value) for value in values]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"p_max": 0.1, "p_min": 0.2}, r"truth.p_min is 0.2, more than truth.p_max, 0.1"),
        ({"firing": "zipfan"}, r"truth.firing is 'zipfan'. Did you mean 'zipfian'"),
        ({"branching": 1}, r"truth.branching is 1; it must be at least 2"),
    ],
)
def test_a_world_that_cannot_be_is_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        World(**settings)  # type: ignore[arg-type]


def test_magnitudes_that_grow_or_fall_by_a_factor_begin_above_0() -> None:
    with pytest.raises(ConfigError, match=r"truth.mean.first is 1.0, last is 0.0; where kind is linear both must"):
        Means(kind="linear", last=0.0)
    with pytest.raises(ConfigError, match=r"truth.std.first is 0.0, last is 1.0; where kind is exponential both must"):
        Spreads(kind="exponential")


def test_worlds_of_one_feature_and_with_less_features_than_roots() -> None:
    one = plant(World(n_features=1, d_in=3, p_max=0.5, p_min=0.5, roots=2))
    x, a = one.sample(stream(0, "one"), 400)
    assert 0.3 < float((a > 0).mean()) < 0.7 and x.shape == (400, 3)
    few = plant(World(n_features=5, d_in=3, roots=8))
    assert few.hierarchy.roots == 5 and not few.hierarchy.generations
