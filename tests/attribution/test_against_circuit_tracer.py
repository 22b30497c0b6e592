"""The whole graph against circuit-tracer's own code, on the same random model, prompt and dictionaries.

benchmarks/peers/make_attribution_fixtures.py wrote tests/fixtures/peers/attribution; its head says what each array is.
"""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny.attributed import dictionary, tokenizer_of

from saejax.attribution import AttributionConfig, Graph, attribute
from saejax.attribution.influence import influence, pruned, scores
from saejax.lm import LanguageModel
from saejax.lm.conventions import DecoderConfig
from saejax.trained import TrainedCoder

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures" / "peers" / "attribution"
CASES = sorted(path.stem for path in FIXTURES.glob("*.npz"))
LAYERS, VOCAB = 3, 31


@functools.cache
def arrays(case: str) -> dict[str, np.ndarray]:
    with np.load(FIXTURES / f"{case}.npz") as file:
        return {name: file[name] for name in file.files}


def below(case: str, prefix: str) -> dict[str, np.ndarray]:
    return {name.removeprefix(prefix): value for name, value in arrays(case).items() if name.startswith(prefix)}


@functools.cache
def lm_of(case: str) -> LanguageModel:
    config = DecoderConfig(LAYERS, 12, 3, 4, 20, VOCAB, 10, "gelu_new", 1e-5, tied_embeddings=False)
    params: dict[str, Any] = {"blocks": [{} for _ in range(LAYERS)]}
    for name, value in below(case, "model/").items():
        place: Any = params
        *path, last = name.split(".")
        for step in path:
            place = place[int(step)] if isinstance(place, list) else place.setdefault(step, {})
        place[last] = value
    return LanguageModel(config, params, tokenizer_of(VOCAB), {"model": "random"})


@functools.cache
def dictionaries(case: str) -> list[TrainedCoder]:
    reads, writes = (tuple(f"blocks.{i}.{name}" for i in range(LAYERS)) for name in ("mlp_in", "mlp_out"))
    if case == "clt":
        made = [dictionary("clt", reads, writes, width=12, d_sae=18, preset="jumprelu")]
    else:
        made = [dictionary(case, reads[i : i + 1], writes[i : i + 1], width=12, d_sae=18) for i in range(LAYERS)]
    found = []
    for i, sae in enumerate(made):
        params = below(case, f"coder/{i}/")
        assert {n: v.shape for n, v in params.items()} == {n: v.shape for n, v in sae.params.items()}
        found.append(dataclasses.replace(sae, params=params))
    return found


@functools.cache
def graph(case: str) -> Graph:
    config = AttributionConfig(max_features=0, chunk=4)
    return attribute(lm_of(case), dictionaries(case), arrays(case)["tokens"], config)


def theirs(case: str) -> Graph:
    """Its graph as ours, for what is computed from a graph alone."""
    held = arrays(case)
    own = {n: held[n] for n in ("features", "activations", "logits", "probabilities")}
    return dataclasses.replace(graph(case), **own, weights=held["weights"][graph(case).targets])


@pytest.mark.parametrize("case", CASES)
def test_the_graph_is_circuit_tracers(case: str) -> None:
    mine, held = graph(case), arrays(case)
    assert mine.n_features > 20 and (held["weights"] != 0).mean() > 0.1
    np.testing.assert_array_equal(mine.features, held["features"])
    np.testing.assert_array_equal(mine.logits, held["logits"])
    np.testing.assert_allclose(mine.activations, held["activations"], rtol=0, atol=1e-5)
    np.testing.assert_allclose(mine.probabilities, held["probabilities"], rtol=1e-5)
    largest = np.abs(held["weights"]).max()
    np.testing.assert_allclose(mine.matrix, held["weights"], rtol=0, atol=1e-5 * largest)


@pytest.mark.parametrize("case", CASES)
def test_influence_pruning_and_scores_are_circuit_tracers(case: str) -> None:
    held = arrays(case)
    found = pruned(theirs(case), 0.8, 0.98)
    np.testing.assert_allclose(found.cumulative, held["cumulative"], rtol=0, atol=1e-5)
    np.testing.assert_array_equal(found.nodes, held["nodes"])
    np.testing.assert_array_equal(found.edges, held["edges"][graph(case).targets])
    assert held["edges"].sum() == found.edges.sum()
    np.testing.assert_allclose(scores(theirs(case)), held["scores"], rtol=1e-5)
    np.testing.assert_allclose(influence(graph(case)), found.influence, rtol=0, atol=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_the_features_of_most_influence_are_the_ones_that_circuit_tracer_takes(case: str) -> None:
    held = arrays(case)
    config = AttributionConfig(max_features=12, chunk=4, rank_every=1)
    few = attribute(lm_of(case), dictionaries(case), held["tokens"], config)
    np.testing.assert_array_equal(few.features, held["few/features"])
    largest = np.abs(held["few/weights"]).max()
    np.testing.assert_allclose(few.matrix, held["few/weights"], rtol=0, atol=1e-5 * largest)
