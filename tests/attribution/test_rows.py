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
from saejax.attribution.layers import layers_of
from saejax.attribution.rows import row_program
from saejax.core.errors import ConfigError, DataError
from saejax.lm import LanguageModel
from saejax.parallel import ParallelConfig, make_mesh
from saejax.trained import Origin, TrainedCoder

ALL = AttributionConfig(max_features=0, chunk=16, block=64)
SCALES = ("ln1_scale", "ln2_scale", "ln1_post_scale", "ln2_post_scale")


def measured(
    lm: LanguageModel, graph: Graph, saes: Sequence[TrainedCoder], small: bool
) -> tuple[np.ndarray, np.ndarray]:
    """(features, logits) [targets, sources] by adding each source's vector to the frozen model, one run a source.

    `small`: as much as a small part of the vector would change, times its size; where MLPs stay that is not the same.
    """
    lm = dataclasses.replace(lm, config=dataclasses.replace(lm.config, logit_softcap=None))
    groups = [(sae, g, site) for sae in saes for g, site in enumerate(sae.sites.writes)]
    groups.sort(key=lambda group: graph.hook_points.index(group[2]))
    reads, writes = [sae.sites.reads[g] for sae, g, _ in groups], graph.hook_points
    held = [
        name for name in lm.inner_points() if name.rpartition(".")[2] in (*SCALES, "attn_pattern", "ln_final_scale")
    ]
    _, clean = lm.run(graph.tokens[None], capture=[*held, *reads, *writes])
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
    start = (nowhere, jnp.zeros((len(graph.tokens), 16)))

    def change(vector: Any) -> Any:
        if small:
            return jax.jvp(run, start, vector)[1]
        return jax.tree.map(jnp.subtract, run(*vector), run(*start))

    moved_x, moved = jax.jit(lambda v: jax.lax.map(change, v, batch_size=64))(stacked)
    rows = []
    for layer, position, latent in graph.features:
        sae, group, _ = groups[layer]
        W_enc = sae.params["W_enc"].reshape(-1, 16, sae.coder.topology.d_sae)[group]
        rows.append(np.asarray(moved_x[layer])[:, position] @ W_enc[:, latent])
    return np.stack(rows), np.asarray(moved)[:, graph.logits].T


def check(lm: LanguageModel, saes: Sequence[TrainedCoder], graph: Graph, small: bool = False) -> None:
    features, logits = measured(lm, graph, saes, small)
    sources = graph.n_nodes - len(graph.logits)
    assert graph.n_features > 15 and (features != 0).mean() > 0.05
    np.testing.assert_allclose(graph.weights[graph.parts["features"], :sources], features, rtol=1e-5, atol=5e-4)
    np.testing.assert_allclose(graph.weights[graph.parts["logits"], :sources], logits, rtol=1e-3, atol=1e-5)
    assert not graph.weights[:, sources:].any() and not graph.weights[graph.n_features : sources].any()


FEW = {("gpt2", "transcoder"), ("gpt_neox", "clt"), ("qwen3", "skip_transcoder"), ("gemma2", "skip_clt")}


@pytest.mark.parametrize(
    ("family", "topology"),
    [
        pytest.param(family, topology, marks=[] if (family, topology) in FEW else [pytest.mark.soak])
        for family in FAMILIES
        for topology in ("transcoder", "skip_transcoder", "clt", "skip_clt")
    ],
)
def test_a_column_is_what_adding_its_source_changes(family: str, topology: str) -> None:
    lm, saes = lm_of(family), mlp_dictionaries(topology)
    check(lm, saes, attribute(lm, saes, prompt(), ALL))


def residual(name: str, layers: Sequence[int], **more: Any) -> list[TrainedCoder]:
    points = [(f"blocks.{i}.{name}",) for i in layers]
    return [dictionary("autoencoder", point, point, seed, **more) for seed, point in enumerate(points)]


@pytest.mark.parametrize(
    "saes",
    [
        pytest.param(residual("resid_post", (0, 1, 2), preset="topk"), id="autoencoders in the residual stream"),
        pytest.param(residual("attn_out", (1, 2)) + residual("mlp_out", (1,)), id="where attention and an MLP write"),
        pytest.param(mlp_dictionaries("skip_transcoder")[1:], id="a layer without a transcoder"),
    ],
)
def test_what_no_dictionary_replaces_has_its_derivative_at_the_prompt(saes: list[TrainedCoder]) -> None:
    lm = lm_of("qwen3")
    check(lm, saes, attribute(lm, saes, prompt(), ALL), small=True)


def test_a_path_ends_where_an_autoencoder_stands() -> None:
    lm, saes = lm_of("gpt2"), residual("resid_post", (0, 1, 2))
    graph = attribute(lm, saes, prompt(), ALL)
    # Rows, and the layers of columns that may be other than zero: embeddings reach layer 0, layer 2 the logits.
    layer = graph.features[:, 0]
    below = np.r_[layer, np.repeat(range(LAYERS), len(graph.tokens)), np.full(len(graph.tokens), -1)]
    for node in range(graph.n_nodes):
        reached = np.unique(below[np.flatnonzero(graph.weights[node])])
        level = layer[node] if node < graph.n_features else LAYERS if node >= graph.parts["logits"].start else None
        assert reached.tolist() == ([] if level is None else [level - 1])


def test_features_are_the_latents_that_are_active_and_logits_the_likeliest() -> None:
    lm, saes = lm_of("gemma2"), mlp_dictionaries("clt", preset="jumprelu")
    graph = attribute(lm, saes, prompt(), dataclasses.replace(ALL, logit_mass=0.2))
    names = saes[0].sites.reads
    logits, seen = lm.run(graph.tokens[None], capture=names)
    f_LSF = saes[0].encode(np.stack([np.asarray(seen[name][0]) for name in names], axis=1)).transpose(1, 0, 2).copy()
    f_LSF[:, 0] = 0  # the bos
    np.testing.assert_array_equal(graph.features, np.argwhere(f_LSF))
    np.testing.assert_allclose(graph.activations, f_LSF[f_LSF != 0], rtol=1e-4)
    p = np.asarray(jax.nn.softmax(logits[0, -1]))
    np.testing.assert_allclose(graph.probabilities, p[graph.logits], rtol=1e-5)
    np.testing.assert_array_equal(graph.logits, np.argsort(-p)[: len(graph.logits)])
    assert graph.probabilities[:-1].sum() < 0.2 <= graph.probabilities.sum() and len(graph.logits) > 1
    assert not graph.weights[:, graph.parts["errors"]].reshape(graph.n_nodes, LAYERS, -1)[:, :, 0].any()
    assert (graph.strings[0], graph.hook_points) == ("<bos>", saes[0].sites.writes)
    with_bos = attribute(lm, saes, prompt(), dataclasses.replace(ALL, silent=0))
    assert (with_bos.features[:, 1] == 0).any()
    assert with_bos.weights[:, with_bos.parts["errors"]].reshape(with_bos.n_nodes, LAYERS, -1)[:, :, 0].any()


@functools.cache
def one_device() -> Graph:
    return attribute(lm_of("qwen3"), mlp_dictionaries("skip_clt"), prompt(), ALL)


@pytest.mark.parametrize(
    "shape", [(2, 1), (2, 2), (2, 4), *(pytest.param(s, marks=pytest.mark.soak) for s in ((1, 2), (4, 1), (1, 8)))]
)
def test_devices_give_the_same_graph(shape: tuple[int, int]) -> None:
    mesh = make_mesh(ParallelConfig(shape))
    one, many = one_device(), attribute(lm_of("qwen3"), mlp_dictionaries("skip_clt"), prompt(), ALL, mesh=mesh)
    np.testing.assert_array_equal(one.features, many.features)
    np.testing.assert_array_equal(one.logits, many.logits)
    np.testing.assert_allclose(one.weights, many.weights, rtol=0, atol=2e-6 * np.abs(one.weights).max())


def test_how_work_is_divided_changes_nothing() -> None:
    config = dataclasses.replace(ALL, chunk=3, block=1)
    other = attribute(lm_of("qwen3"), mlp_dictionaries("skip_clt"), prompt(), config)
    np.testing.assert_allclose(one_device().weights, other.weights, rtol=0, atol=2e-6 * np.abs(other.weights).max())


class Foreign:
    """A language model that is not JAX's."""


@pytest.mark.parametrize(
    ("saes", "error", "message"),
    [
        ([], ConfigError, "none given"),
        (residual("resid_post", (7,)), ConfigError, r"no hook point 'blocks\.7\.resid_post'"),
        (residual("resid_post", (0,), width=20), DataError, "20"),
        (mlp_dictionaries("transcoder") + residual("mlp_out", (1,)), ConfigError, r"Two dictionaries write blocks\.1"),
        ([dictionary("transcoder", ("blocks.1.mlp_out",), ("blocks.1.mlp_in",))], ConfigError, "before the model has"),
        ([dictionary("layernorm_autoencoder", *[("blocks.0.resid_post",)] * 2)], ConfigError, "standard deviation"),
        ([dictionary("crosscoder", *[("blocks.0.resid_post", "blocks.1.resid_post")] * 2)], ConfigError, "no place"),
    ],
)
def test_dictionaries_that_make_no_graph_are_refused(saes: list[Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        attribute(lm_of("gpt2"), saes, prompt(), ALL)


@pytest.mark.parametrize(
    ("tokens", "config", "message"),
    [
        ([], ALL, "one at least"),
        ([[1, 2]], ALL, "one row"),
        ([1, 41], ALL, r"tokens\[0, 1\] is 41"),
        (["a", "b"], ALL, "integers"),
        (np.ones(25, int), ALL, "25 tokens; the model reads 24"),
        ([40], ALL, r"attribution\.silent"),
    ],
)
def test_prompts_that_the_model_cannot_read_are_refused(tokens: Any, config: AttributionConfig, message: str) -> None:
    with pytest.raises(DataError, match=message):
        attribute(lm_of("gpt2"), mlp_dictionaries("transcoder"), tokens, config)


def test_what_is_not_of_this_model_is_refused() -> None:
    lm, (sae, *_) = lm_of("gpt2"), mlp_dictionaries("transcoder")
    for origin in (Origin(model="org/other"), Origin(tokenizer="another")):
        named = dataclasses.replace(lm, identity=lm.identity | {"tokenizer_sha256": "mine"})
        with pytest.raises(DataError, match=r"replace\(sae, origin=Origin\(\)\)"):
            attribute(named, [dataclasses.replace(sae, origin=origin)], prompt(), ALL)
    with pytest.raises(ConfigError, match="Foreign"):
        attribute(Foreign(), [sae], prompt(), ALL)  # type: ignore[arg-type]
    silent = dataclasses.replace(sae, params=sae.params | {"b_enc": sae.params["b_enc"] - 1e4})
    with pytest.raises(DataError, match="No latent of any dictionary is active"):
        attribute(lm, [silent], prompt(), ALL)
    with pytest.raises(ConfigError, match=r"set attribution\.chunk=8"):
        attribute(lm, [sae], prompt(), dataclasses.replace(ALL, chunk=7), mesh=make_mesh(ParallelConfig((2, 1))))
    with pytest.raises(ConfigError, match="24 latents cannot be split"):
        attribute(lm, [sae], prompt(), ALL, mesh=make_mesh(ParallelConfig((1, 7))))


def test_prompts_of_about_one_length_share_a_program() -> None:
    lm, saes, config = lm_of("gpt2"), mlp_dictionaries("transcoder"), AttributionConfig(chunk=16)
    program = row_program(lm.config, layers_of(lm, saes), config.block, make_mesh(ParallelConfig((1, 1))))
    before = program._cache_size()  # type: ignore[attr-defined]
    sizes = [attribute(lm, saes, prompt(length, seed=length), config).n_features for length in (12, 13, 14)]
    assert len(set(sizes)) == 3 and program._cache_size() == before + 1  # type: ignore[attr-defined]
