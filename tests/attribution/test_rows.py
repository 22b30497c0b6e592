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
from saejax.trained import Origin, TrainedCoder, side_by_side

ALL = AttributionConfig(max_features=0, chunk=16, block=64)
SCALES = ("ln1_scale", "ln2_scale", "ln1_post_scale", "ln2_post_scale")


def measured(
    lm: LanguageModel, graph: Graph, saes: Sequence[TrainedCoder], small: bool
) -> tuple[np.ndarray, np.ndarray]:
    """(features, logits) [targets, sources] by adding each source's vector to the frozen model, one run a source.

    `small`: as much as a small part of the vector would change, times its size; where MLPs stay that is not the same.
    """
    config = dataclasses.replace(lm.config, logit_softcap=None)
    groups = [(sae, g, site) for sae in saes for g, site in enumerate(sae.sites.writes)]
    groups.sort(key=lambda group: graph.hook_points.index(group[2]))
    reads, writes = [sae.sites.reads[g] for sae, g, _ in groups], graph.hook_points
    held = [
        name for name in lm.inner_points() if name.rpartition(".")[2] in (*SCALES, "attn_pattern", "ln_final_scale")
    ]
    skips = [sae.params["W_skip"].reshape(-1, 16, 16)[g] if "W_skip" in sae.params else None for sae, g, _ in groups]
    length, n = len(graph.tokens), len(graph.features)
    at_own_token = np.eye(length, dtype=np.float32)[:, :, None]

    def run(model: LanguageModel, clean: Any, added: Any, to_embedding: jax.Array) -> tuple[list[jax.Array], jax.Array]:
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
        logits, _ = model.run(graph.tokens[None], edits=edits)
        return [seen[name][0] for name in reads], logits[0, -1] - logits[0, -1].mean()

    of_features = {name: np.zeros((n, length, 16), np.float32) for name in writes}
    for number, (layer, position, latent) in enumerate(graph.features):
        sae, group, _ = groups[layer]
        sites = sae.sites.writes[group:]
        W_FWD = np.asarray(sae.coder.topology.decoder_rows(sae.params)[group]).reshape(-1, len(sites), 16)
        for i, name in enumerate(sites):
            of_features[name][number, position] = graph.activations[number] * W_FWD[latent, i]
    embeddings = np.asarray(lm.params["W_E"])[graph.tokens] * lm.config.embed_scale

    def of_errors(clean: Any) -> dict[str, list[jax.Array]]:
        """{site: [S, S, D] for each group}: the error at the group's own site, one token after the other."""
        found: dict[str, list[jax.Array]] = {name: [] for name in writes}
        for sae, group, site in groups:
            x, y = (jnp.stack([clean[n][0] for n in names], 1) for names in (sae.sites.reads, sae.sites.writes))
            x = x if sae.coder.topology.stacked else x[:, 0]
            error_SD = (y - sae.decode(sae.encode(x), x).reshape(y.shape))[:, group].at[0].set(0)
            for name in writes:
                found[name].append(at_own_token * error_SD[None] * (name == site))
        return found

    @jax.jit
    def all_moved(params: Any) -> Any:
        model = dataclasses.replace(lm, config=config, params=params)
        _, clean = model.run(graph.tokens[None], capture=[*held, *reads, *writes])
        errors, nothing = of_errors(clean), jnp.zeros((length, length, 16))
        added = {name: jnp.concatenate([of_features[name], *errors[name], nothing, nothing[:1]]) for name in writes}
        before = jnp.zeros((n + len(groups) * length, length, 16))
        to_embedding = jnp.concatenate([before, at_own_token * embeddings[None], nothing[:1]])
        # The last source is none at all: the run that the others are compared with.
        own = functools.partial(run, model, clean)
        if small:
            start = jax.tree.map(lambda x: x[-1], (added, to_embedding))
            return jax.vmap(lambda *vector: jax.jvp(own, start, vector)[1])(added, to_embedding)
        return jax.tree.map(lambda x: x - x[-1:], jax.vmap(own)(added, to_embedding))

    moved_x, moved = jax.device_get(all_moved(lm.params))
    rows = []
    for layer, position, latent in graph.features:
        sae, group, _ = groups[layer]
        W_enc = sae.params["W_enc"].reshape(-1, 16, sae.coder.topology.d_sae)[group]
        rows.append(moved_x[layer][:-1, position] @ W_enc[:, latent])
    return np.stack(rows), moved[:-1, graph.logits].T


def check(lm: LanguageModel, saes: Sequence[TrainedCoder], graph: Graph, small: bool = False) -> None:
    features, logits = measured(lm, graph, saes, small)
    sources = graph.n_nodes - len(graph.logits)
    assert graph.n_features > 15 and (features != 0).mean() > 0.05
    np.testing.assert_allclose(graph.weights[: graph.n_features, :sources], features, rtol=1e-5, atol=5e-4)
    np.testing.assert_allclose(graph.weights[graph.n_features :, :sources], logits, rtol=1e-3, atol=1e-5)
    assert not graph.weights[:, sources:].any()


FEW = {("olmo2", "transcoder"), ("qwen3_moe", "clt")}
FEW |= {("gpt2", "transcoder"), ("gpt_neox", "clt"), ("qwen3", "skip_transcoder"), ("gemma2", "skip_clt")}


@pytest.mark.parametrize(
    ("family", "topology"),
    [
        pytest.param(family, topology, marks=[] if (family, topology) in FEW else [pytest.mark.soak])
        for family in FAMILIES
        for topology in ("transcoder", "skip_transcoder", "clt", "skip_clt")
    ],
)
def test_a_column_is_what_adding_its_source_changes(family: str, topology: str) -> None:
    check(lm_of(family), mlp_dictionaries(topology), whole(family, topology))


@functools.cache
def whole(family: str, topology: str) -> Graph:
    return attribute(lm_of(family), mlp_dictionaries(topology), prompt(), ALL)


def test_transcoders_side_by_side_have_the_graph_of_each() -> None:
    each = mlp_dictionaries("transcoder")
    one = attribute(lm_of("gpt2"), [side_by_side(each)], prompt(), ALL)
    want = whole("gpt2", "transcoder")
    np.testing.assert_array_equal(one.features, want.features)
    np.testing.assert_allclose(one.weights, want.weights, rtol=1e-4, atol=1e-5)


def residual(name: str, layers: Sequence[int], **more: Any) -> list[TrainedCoder]:
    points = [(f"blocks.{i}.{name}",) for i in layers]
    return [dictionary("autoencoder", point, point, seed, **more) for seed, point in enumerate(points)]


IN_RESIDUAL = residual("resid_post", (0, 1, 2), preset="topk")


@functools.cache
def whole_in_residual() -> Graph:
    return attribute(lm_of("qwen3"), IN_RESIDUAL, prompt(), ALL)


def test_autoencoders_in_the_residual_stream_have_the_derivative_of_what_is_between() -> None:
    check(lm_of("qwen3"), IN_RESIDUAL, whole_in_residual(), small=True)


@pytest.mark.parametrize(
    "saes",
    [
        pytest.param(residual("attn_out", (1, 2)) + residual("mlp_out", (1,)), id="where attention and an MLP write"),
        pytest.param(
            mlp_dictionaries("skip_transcoder")[1:], id="a layer without a transcoder", marks=pytest.mark.soak
        ),
    ],
)
def test_what_no_dictionary_replaces_has_its_derivative_at_the_prompt(saes: list[TrainedCoder]) -> None:
    lm = lm_of("qwen3")
    check(lm, saes, attribute(lm, saes, prompt(), ALL), small=True)


def test_a_path_ends_where_an_autoencoder_stands() -> None:
    graph = whole_in_residual()
    # Rows, and the layers of columns that may be other than zero: embeddings reach layer 0, layer 2 the logits.
    layer = graph.features[:, 0]
    below = np.r_[layer, np.repeat(range(LAYERS), len(graph.tokens)), np.full(len(graph.tokens), -1)]
    for row, level in zip(graph.weights, [*layer, *[LAYERS] * len(graph.logits)], strict=True):
        assert np.unique(below[np.flatnonzero(row)]).tolist() == [level - 1]


def test_features_are_the_latents_that_are_active_and_logits_the_likeliest() -> None:
    lm, saes = lm_of("gemma2"), mlp_dictionaries("skip_clt")
    graph = attribute(lm, saes, prompt(), dataclasses.replace(ALL, logit_mass=0.2))
    names = saes[0].sites.reads
    run = jax.jit(lambda params: dataclasses.replace(lm, params=params).run(graph.tokens[None], capture=names))
    logits, seen = run(lm.params)
    f_LSF = saes[0].encode(np.stack([np.asarray(seen[name][0]) for name in names], axis=1)).transpose(1, 0, 2).copy()
    f_LSF[:, 0] = 0  # the bos
    np.testing.assert_array_equal(graph.features, np.argwhere(f_LSF))
    np.testing.assert_allclose(graph.activations, f_LSF[f_LSF != 0], rtol=1e-4)
    p = np.exp(np.asarray(logits[0, -1], np.float64))
    p /= p.sum()
    np.testing.assert_allclose(graph.probabilities, p[graph.logits], rtol=1e-5)
    np.testing.assert_array_equal(graph.logits, np.argsort(-p)[: len(graph.logits)])
    assert graph.probabilities[:-1].sum() < 0.2 <= graph.probabilities.sum() and len(graph.logits) > 1
    assert not graph.weights[:, graph.parts["errors"]].reshape(len(graph.weights), LAYERS, -1)[:, :, 0].any()
    assert (graph.strings[0], graph.hook_points) == ("<bos>", saes[0].sites.writes)
    with_bos = attribute(lm, saes, prompt(), dataclasses.replace(ALL, silent=0))
    assert (with_bos.features[:, 1] == 0).any()
    assert with_bos.weights[:, with_bos.parts["errors"]].reshape(len(with_bos.weights), LAYERS, -1)[:, :, 0].any()


def test_probabilities_behind_a_layer_norm_are_those_of_a_run() -> None:
    lm, graph = lm_of("gpt2"), whole("gpt2", "transcoder")
    logits, _ = jax.jit(lambda params: dataclasses.replace(lm, params=params).run(graph.tokens[None]))(lm.params)
    p = np.asarray(jax.nn.softmax(logits[0, -1]), np.float64)
    np.testing.assert_allclose(graph.probabilities, p[graph.logits], rtol=1e-5)


# Of the most that can be, and of little that is quick to compile.
MANY, LITTLE = ("gemma2", "skip_clt"), ("gpt2", "transcoder")


@pytest.mark.ci
@pytest.mark.parametrize(
    ("shape", "of"),
    [
        ((1, 2), LITTLE),
        ((2, 2), LITTLE),
        ((2, 4), MANY),
        *(pytest.param(shape, MANY, marks=pytest.mark.soak) for shape in ((1, 2), (2, 1), (2, 2), (4, 1), (1, 8))),
    ],
)
def test_devices_give_the_same_graph(shape: tuple[int, int], of: tuple[str, str]) -> None:
    mesh = make_mesh(ParallelConfig(shape))
    one, many = whole(*of), attribute(lm_of(of[0]), mlp_dictionaries(of[1]), prompt(), ALL, mesh=mesh)
    np.testing.assert_array_equal(one.features, many.features)
    np.testing.assert_array_equal(one.logits, many.logits)
    np.testing.assert_allclose(one.weights, many.weights, rtol=0, atol=2e-6 * np.abs(one.weights).max())


def test_how_work_is_divided_changes_nothing() -> None:
    config = dataclasses.replace(ALL, chunk=3, block=1)
    other = attribute(lm_of("gpt2"), mlp_dictionaries("transcoder"), prompt(), config)
    want = whole("gpt2", "transcoder").weights
    np.testing.assert_allclose(other.weights, want, rtol=0, atol=2e-6 * np.abs(want).max())


class Foreign:
    """A language model that is not JAX's."""


@pytest.mark.parametrize(
    ("saes", "error", "message"),
    [
        ([], ConfigError, "none given"),
        (residual("resid_post", (7,)), ConfigError, r"no hook point 'blocks\.7\.resid_post'"),
        (residual("resid_post", (0,), width=20), DataError, "20"),
        (
            [*mlp_dictionaries("transcoder"), *residual("mlp_out", (1,))],
            ConfigError,
            r"Two dictionaries write blocks\.1",
        ),
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
        (["a", "b"], ALL, "holds text"),
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
    lm, saes, config = lm_of("gpt2"), mlp_dictionaries("transcoder"), AttributionConfig(chunk=4)
    program = row_program(lm.config, layers_of(lm, saes), config.block, make_mesh(ParallelConfig((1, 1))), ())
    sizes = []
    for length in (12, 13, 14):
        sizes.append((attribute(lm, saes, prompt(length, seed=length), config).n_features, program._cache_size()))
    features, programs = map(set, zip(*sizes, strict=True))
    assert len(features) == 3 and len(programs) == 1
