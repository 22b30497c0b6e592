"""The local replacement model of one prompt: its nodes, and rows of direct effects on them.

    y_l = sum_f a_f W_dec,f + e_l (+ skip + b_dec)       of the prompt's own activations; e_l is what is left

Active features are the latents that are not 0. (Ameisen et al. 2025, "Circuit Tracing"; circuit-tracer 0.5)

Shape letters: A active features, L layers, S tokens, K logits that are nodes, D width, F latents of a layer.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from saejax.attribution.frozen import Frozen, unembedding_at_residual, watch
from saejax.attribution.graph import Graph
from saejax.attribution.layers import Layer, layers_of
from saejax.attribution.rows import listed, row_program, shardings
from saejax.attribution.settings import AttributionConfig
from saejax.core.arrays import as_array
from saejax.core.errors import ConfigError, DataError
from saejax.kernels.batch import DATA, LATENT
from saejax.lm import LanguageModel
from saejax.lm.rows import check_ids, check_length
from saejax.parallel import ParallelConfig, check_divides, make_mesh
from saejax.trained import TrainedCoder

_watch = jax.jit(watch, static_argnums=(0, 4))
_LENGTH_STEP = 16  # prompts are filled up to a multiple of this, so that few lengths need a program of their own
_POSITIONS = 64  # encoded at once: all latents of so many tokens are dense for a moment


class LocalModel:
    """Nodes and the row program of one prompt, its arrays on the mesh.

    Args:
        saes: of `layers.at_model`.
        tokens_S: of `checked_tokens`.
        mesh: default one device.
        answers: tokens whose logits are nodes, whatever their probability.

    Attributes:
        layers: of the graph.
        features: int32 [A, 3]: layer, position, latent; in this order.
        activations: float32 [A].
        logits, probabilities: int32 [K], float32 [K]: the next tokens that are nodes, the likeliest first.
        n_errors, n_tokens: L S and S.
        tokens: int32 [S].
        lm, mesh, params, frozen, sources: what the program of the rows takes.

    Raises:
        ConfigError: dictionaries that do not go together, or a mesh that does not divide chunk or latents.
        DataError: no feature is active.
    """

    def __init__(
        self,
        lm: LanguageModel,
        saes: Sequence[TrainedCoder],
        tokens_S: np.ndarray,
        config: AttributionConfig,
        mesh: Mesh | None = None,
        answers: Sequence[int] = (),
    ):
        mesh = make_mesh(ParallelConfig((1, 1)), jax.local_devices()) if mesh is None else mesh
        self.layers = layers = layers_of(lm, saes)
        _check_mesh(saes, config, mesh)
        self.tokens, self.n_tokens, self.n_errors = tokens_S, len(tokens_S), len(layers) * len(tokens_S)
        put, widths = shardings(mesh), [saes[layer.dictionary].coder.topology.d_sae for layer in layers]
        # Heads, MLPs and vocabulary are spread over the devices along "latent", too.
        params = lm.placed(mesh)
        filled = min(-(-self.n_tokens // _LENGTH_STEP) * _LENGTH_STEP, lm.config.context_length)
        tokens = jnp.asarray(np.resize(tokens_S, filled))
        seen = _watch(lm.config, params, tokens, jnp.int32(self.n_tokens), layers)
        inside = range(config.silent, self.n_tokens)
        codes = [_coded(sae, layers, number, seen["values"], inside) for number, sae in enumerate(saes)]
        active, errors = zip(*(codes[layer.dictionary][layer.group] for layer in layers), strict=True)
        numbers = [np.full(len(values), number) for number, (_, _, values) in enumerate(active)]
        rows = [np.stack([layer, *part[:2]], axis=1) for layer, part in zip(numbers, active, strict=True)]
        self.features = np.concatenate(rows).astype(np.int32)
        self.activations = np.concatenate([values for _, _, values in active])
        if not len(self.features):
            raise DataError("No latent of any dictionary is active in the prompt: there are no features to attribute.")
        slots, self._at = listed(active, widths, mesh.shape[LATENT], config.block)
        skips = {n: _of_group(saes, layer, "W_skip") for n, layer in enumerate(layers) if layer.skip}
        sources = {
            "decoders": [jax.device_put(_decoder(saes, layer, mesh), put["latent"]) for layer in layers],
            "slots": jax.device_put(slots, put["latent"]),
            "errors": jax.device_put(list(errors), put["whole"]),
            "embeddings": seen["embeddings"],
            "skips": jax.device_put(skips, put["whole"]),
        }
        self.frozen = {name: seen[name] for name in ("queries", "keys", "scales", "inputs")}
        self.lm, self.mesh, self.params, self.sources, self._block = lm, mesh, params, sources, config.block
        self.logits, self.probabilities = _logit_nodes(np.asarray(seen["logits"], np.float64), config, answers)
        vectors = unembedding_at_residual(lm.config, lm.params, jnp.asarray(self.logits), seen["final"][1])
        self._logit_vectors, self._encoders = np.asarray(vectors), [_of_group(saes, layer, "W_enc") for layer in layers]

    @property
    def n_sources(self) -> int:
        return len(self.features) + self.n_errors + self.n_tokens

    def rows(self, targets: np.ndarray, size: int) -> np.ndarray:
        """Direct effects [targets, A + L S + S] on nodes: a feature's number, or A + L S + S + k for logit k.

        `size` targets, or fewer, go through the program at once.
        """
        return self._effects(self.targets(targets, size), ())[: len(targets)]

    def residual_rows(self, block: int, position: int, vectors_CM: np.ndarray) -> np.ndarray:
        """Direct effects [C, A + L S + S] on the products of vectors with what enters a block, at one token."""
        size = self.mesh.shape[DATA] * -(-len(vectors_CM) // self.mesh.shape[DATA])
        vectors = np.zeros((size, vectors_CM.shape[1]), np.float32)
        vectors[: len(vectors_CM)] = vectors_CM
        layer, at = (np.full(size, number, np.int32) for number in (len(self.layers) + 1 + block, position))
        also = tuple(f"blocks.{i}.resid_pre" for i in range(self.lm.config.n_layer))
        return self._effects({"layer": layer, "position": at, "vector": vectors}, also)[: len(vectors_CM)]

    def _effects(self, targets: dict[str, Any], also: tuple[str, ...]) -> np.ndarray:
        """A row of direct effects for each target, on features, errors and tokens."""
        program, size = row_program(self.lm.config, self.layers, self._block, self.mesh, also), len(targets["layer"])
        put = jax.device_put(targets, shardings(self.mesh)["targets"])
        effects = jax.device_get(program(self.params, self.frozen, self.sources, put))
        features = [layer.reshape(size, -1)[:, at] for layer, at in zip(effects["features"], self._at, strict=True)]
        errors, tokens = (effects[name][..., : self.n_tokens] for name in ("errors", "tokens"))
        return np.concatenate([*features, errors.reshape(size, -1), tokens], axis=1)

    def numbers(self, graph: Graph) -> np.ndarray:
        """The number here of each node of a graph of this prompt, int64 [N]: it may show fewer features than there are.

        Raises:
            DataError: a feature of the graph is not active here, or a logit is no node.
        """
        place = {tuple(feature): i for i, feature in enumerate(self.features.tolist())}
        logit = {token: self.n_sources + i for i, token in enumerate(self.logits.tolist())}
        try:
            features = [place[tuple(feature)] for feature in graph.features.tolist()]
            logits = [logit[token] for token in graph.logits.tolist()]
        except KeyError as error:
            raise DataError(
                f"Feature (layer, token, latent) or logit {error} of the graph is not active in these dictionaries."
            ) from None
        rest = len(self.features) + np.arange(graph.n_errors + len(graph.tokens))
        return np.r_[features, rest, logits].astype(np.int64)

    def source(self, node: int) -> dict[str, Any]:
        """All that a node writes: its position, what it adds to the embeddings [M], and where each layer writes [D]."""
        errors, embeddings = self.sources["errors"], self.sources["embeddings"]
        writes = [np.zeros(error_SD.shape[1], np.float32) for error_SD in errors]
        embedding = np.zeros(embeddings.shape[1], np.float32)
        place = node - len(self.features)
        if place < 0:
            layer, position, latent = self.features[node].tolist()
            decoder_NFWD = self.sources["decoders"][layer]
            rows_WD = decoder_NFWD.reshape(-1, *decoder_NFWD.shape[2:])[latent]
            for reached, row_D in zip(self.layers[layer].reaches, np.asarray(rows_WD), strict=True):
                writes[reached] = self.activations[node] * row_D
        elif place < self.n_errors:
            layer, position = divmod(place, self.n_tokens)
            writes[layer] = np.asarray(errors[layer][position])
        else:
            position = place - self.n_errors
            embedding = np.asarray(embeddings[position], np.float32)
        return {"position": position, "embedding": embedding, "writes": writes}

    def targets(self, targets: np.ndarray, size: int) -> dict[str, Any]:
        """Layer, position and vector of each, filled up to `size` with vectors of zeros."""
        wide = max([self._logit_vectors.shape[1], *(W_DF.shape[0] for W_DF in self._encoders)])
        arguments = {
            "layer": np.zeros(size, np.int32),
            "position": np.zeros(size, np.int32),
            "vector": np.zeros((size, wide), np.float32),
        }
        for row, node in enumerate(targets):
            if node < len(self.features):
                layer, position, latent = self.features[node]
                vector = self._encoders[layer][:, latent]
            else:
                layer, position = len(self.layers), self.n_tokens - 1
                vector = self._logit_vectors[node - self.n_sources]
            arguments["layer"][row], arguments["position"][row] = layer, position
            arguments["vector"][row, : len(vector)] = vector
        return arguments


def checked_tokens(lm: LanguageModel, tokens: Sequence[int] | np.ndarray, config: AttributionConfig) -> np.ndarray:
    """The prompt's ids, int32 [S]."""
    tokens_S = np.asarray(as_array(tokens, "tokens"))
    if tokens_S.size == 0 or tokens_S.ndim != 1:
        raise DataError(f"A prompt is one row of ids, one at least; this one has the shape {tokens_S.shape}.")
    check_ids("tokens", tokens_S[None], lm.config.vocab_size)
    check_length("The prompt has", len(tokens_S), lm.config.context_length)
    if len(tokens_S) <= config.silent:
        raise DataError(
            f"The prompt has {len(tokens_S)} tokens, and attribution.silent leaves out the first {config.silent}: "
            "nothing is left. Give a longer prompt, with the model's own bos in front, or set attribution.silent=0."
        )
    return tokens_S.astype(np.int32)


def _check_mesh(saes: Sequence[TrainedCoder], config: AttributionConfig, mesh: Mesh) -> None:
    if config.chunk % mesh.shape[DATA]:
        raise ConfigError(
            f"attribution.chunk {config.chunk} cannot be split over the {mesh.shape[DATA]} devices along data; set "
            f"attribution.chunk={-(-config.chunk // mesh.shape[DATA]) * mesh.shape[DATA]}."
        )
    for sae in saes:
        check_divides(mesh, sae.coder.topology.d_sae)


def _coded(
    sae: TrainedCoder, layers: Sequence[Layer], number: int, values: Frozen, inside: range
) -> list[tuple[list[np.ndarray], np.ndarray]]:
    """Of each group what is active `inside` as [positions, latents, values], and the error at its site, 0 outside."""
    groups_of = sorted((layer for layer in layers if layer.dictionary == number), key=lambda layer: layer.group)
    x, y = (
        [np.asarray(values[name], np.float32) for name in names]
        for names in ([layer.read for layer in groups_of], [layer.write for layer in groups_of])
    )
    stacked = sae.coder.topology.stacked
    parts: list[list[list[np.ndarray]]] = [[] for _ in groups_of]
    blocks = []
    for start in range(0, len(x[0]), _POSITIONS):
        rows = [a[start : start + _POSITIONS] for a in x]
        inputs = np.stack(rows, axis=1) if stacked else rows[0]
        latents = np.asarray(sae.encode(inputs))
        y_hat = np.asarray(sae.decode(latents, inputs))
        for group in range(len(groups_of)):
            of_group = latents[:, group] if stacked else latents
            positions, columns = np.nonzero(of_group)
            inner = (positions + start >= inside.start) & (positions + start < inside.stop)
            positions, columns = positions[inner], columns[inner]
            parts[group].append([positions + start, columns, of_group[positions, columns].astype(np.float32)])
        blocks.append(y_hat if stacked else y_hat[:, None])
    y_hat = np.concatenate(blocks)
    groups = []
    for site, rows_of_group in enumerate(parts):
        error_SD = y[site] - y_hat[:, site]
        error_SD[: inside.start] = error_SD[inside.stop :] = 0
        groups.append(([np.concatenate(column) for column in zip(*rows_of_group, strict=True)], error_SD))
    return groups


def _decoder(saes: Sequence[TrainedCoder], layer: Layer, mesh: Mesh) -> jax.Array:
    """[devices along "latent", F / devices, layers written, D], float32."""
    topology, params = saes[layer.dictionary].coder.topology, saes[layer.dictionary].params
    rows_FR = jnp.asarray(topology.decoder_rows(dict(params))[layer.group], jnp.float32)
    return rows_FR.reshape(mesh.shape[LATENT], -1, len(layer.reaches), topology.out_shape[-1])


def _of_group(saes: Sequence[TrainedCoder], layer: Layer, name: str) -> np.ndarray:
    """The parameter of one group, W_enc [D, F] or W_skip [D_in, D_out], float32."""
    value = np.asarray(saes[layer.dictionary].params[name], np.float32)
    return value[layer.group] if value.ndim == 3 else value


def _logit_nodes(
    logits_V: np.ndarray, config: AttributionConfig, answers: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """The fewest likeliest tokens with `logit_mass` of the probability, `logits` of them at most; and `answers`."""
    p_V = np.exp(logits_V - logits_V.max())
    p_V /= p_V.sum()
    order = np.argsort(-p_V, kind="stable")[: config.logits]
    count = int(np.searchsorted(np.cumsum(p_V[order]), config.logit_mass)) + 1
    chosen = np.unique([*order[:count], *answers])
    chosen = chosen[np.argsort(-p_V[chosen], kind="stable")]
    return chosen.astype(np.int32), p_V[chosen].astype(np.float32)
