"""The matrix of direct effects against the model itself: circuit-tracer's perturbation test, at its tolerances.

Every source's vector is added once where it writes while attention patterns, norms' scales and what dictionaries write
stay as they were; the change of every feature's pre-activation and of every logit less their mean is the column.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny.attributed import FAMILIES, LAYERS, dictionary, lm_of, mlp_dictionaries, prompt

from saejax.attribution import AttributionConfig, Graph, attribute
from saejax.core.errors import ConfigError, DataError
from saejax.lm import LanguageModel
from saejax.parallel import ParallelConfig, make_mesh
from saejax.trained import Origin, TrainedCoder

ALL = AttributionConfig(max_features=0, chunk=16, block=64)
SCALES = ("ln1_scale", "ln2_scale", "ln1_post_scale", "ln2_post_scale")


def measured(lm: LanguageModel, graph: Graph, saes: Sequence[TrainedCoder]) -> tuple[np.ndarray, np.ndarray]:
    """(features, logits) [targets, sources] by adding each source's vector to the frozen model, one run a source."""
    lm = dataclasses.replace(lm, config=dataclasses.replace(lm.config, logit_softcap=None))
    reads, writes = (tuple(n for s in saes for n in getattr(s.sites, side)) for side in ("reads", "writes"))
    held = [name for name in lm.inner_points() if name.rpartition(".")[2] in (*SCALES, "attn_pattern", "ln_final_scale")]
    clean_logits, clean = lm.run(graph.tokens[None], capture=[*held, *reads, *writes])
    groups = [(sae, g, site) for sae in saes for g, site in enumerate(sae.sites.writes)]
    skips = [sae.params["W_skip"].reshape(-1, 16, 16)[g] if "W_skip" in sae.params else None for sae, g, _ in groups]

    def run(added: Any, to_embedding: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        """`added` is {site: [S, D]}; the reads, and the last token's logits less their mean."""
        seen: dict[str, jax.Array] = {}

        def read(name: str, x: jax.Array) -> jax.Array:
            seen[name] = x
            return x

        def write(number: int, x: jax.Array) -> jax.Array:
            y = clean[writes[number]] + added[writes[number]][None]
            moved = seen[reads[number]] - clean[reads[number]]
            return y if skips[number] is None else y + moved @ skips[number]

        edits = {name: functools.partial(lambda value, _: value, clean[name]) for name in held}
        edits |= {name: functools.partial(read, name) for name in reads}
        edits |= {
            name: functools.partial(lambda n, r, x: write(n, r(x) if r else x), n, edits.get(name))
            for n, name in enumerate(writes)
        }
        edits["blocks.0.resid_pre"] = lambda x: x + to_embedding[None]
        logits, _ = lm.run(graph.tokens[None], edits=edits)
        return [seen[name][0] for name in reads], logits[0, -1] - logits[0, -1].mean()

    nowhere = {name: np.zeros((len(graph.tokens), 16), np.float32) for name in writes}
    vectors = []
    for layer, position, latent in graph.features:
        sae, group, _ = groups[layer]
        sites = sae.sites.writes[group:]
        W_FWD = np.asarray(sae.coder.topology.decoder_rows(sae.params)[group]).reshape(-1, len(sites), 16)
        activation = graph.activations[len(vectors)]
        added = {name: value.copy() for name, value in nowhere.items()}
        for i, name in enumerate(sites):
            added[name][position] = activation * W_FWD[latent, i]
        vectors.append((added, np.zeros((len(graph.tokens), 16), np.float32)))
    for sae, group, site in groups:
        x, y = (np.stack([np.asarray(clean[n][0]) for n in names], 1) for names in (sae.sites.reads, sae.sites.writes))
        x = x if sae.coder.topology.stacked else x[:, 0]
        error = (y - np.asarray(sae.decode(sae.encode(x), x)).reshape(y.shape))[:, group]
        for position in range(len(graph.tokens)):
            added = {name: value.copy() for name, value in nowhere.items()}
            added[site][position] = error[position] * (position > 0)
            vectors.append((added, np.zeros((len(graph.tokens), 16), np.float32)))
    for position, token in enumerate(graph.tokens):
        embedding = np.zeros((len(graph.tokens), 16), np.float32)
        embedding[position] = lm.params["W_E"][token] * lm.config.embed_scale
        vectors.append((nowhere, embedding))
    stacked = jax.tree.map(lambda *a: jnp.stack(a), *vectors)
    before_x, before = run(nowhere, jnp.zeros((len(graph.tokens), 16)))
    after_x, after = jax.jit(lambda v: jax.lax.map(lambda one: run(*one), v, batch_size=64))(stacked)
    rows = []
    for layer, position, latent in graph.features:
        sae, group, _ = groups[layer]
        W_enc = sae.params["W_enc"].reshape(-1, 16, sae.coder.topology.d_sae)[group]
        rows.append((np.asarray(after_x[layer]) - np.asarray(before_x[layer])[None])[:, position] @ W_enc[:, latent])
    return np.stack(rows), np.asarray(after - before[None])[:, graph.logits].T


def check(lm: LanguageModel, saes: Sequence[TrainedCoder], graph: Graph) -> None:
    features, logits = measured(lm, graph, saes)
    sources = graph.n_nodes - len(graph.logits)
    assert graph.n_features > 15 and (features != 0).mean() > 0.05
    np.testing.assert_allclose(graph.weights[graph.parts["features"], :sources], features, rtol=1e-5, atol=5e-4)
    np.testing.assert_allclose(graph.weights[graph.parts["logits"], :sources], logits, rtol=1e-3, atol=1e-5)
    assert not graph.weights[:, sources:].any() and not graph.weights[graph.n_features : sources].any()


@pytest.mark.parametrize("topology", ["transcoder", "skip_transcoder", "clt", "skip_clt"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_column_is_what_adding_its_source_changes(family: str, topology: str) -> None:
    lm, saes = lm_of(family), mlp_dictionaries(topology)
    check(lm, saes, attribute(lm, saes, prompt(), ALL))
