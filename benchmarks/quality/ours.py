"""saejax's own trainings on the arrays of a data set: the preset as it is, with the training defaults."""

import dataclasses
import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.peers.measure import Measured, measured
from benchmarks.quality.sets import SETS, DataSet
from saejax.coders import Coder, CoderConfig, Sites, build
from saejax.coders.term import Term
from saejax.store import ArrayRows
from saejax.trained import TrainedCoder, folded, make_sites, unscaled
from saejax.training import TrainConfig
from saejax.training.optim import make_optimizer, make_schedule, usual_rate
from saejax.training.start import make_prepare, read_spread
from saejax.training.state import TrainState, make_init
from saejax.training.step import default_hyper, make_step

Params = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Hooks:
    """What was tried and is no setting.

    Attributes:
        start: (parameters, rows to train on) -> parameters at step 0.
        whitening: the encoder sees x less its mean times the covariance to the power -whitening: a transcoder that
            reads this and writes x.
        after: parameters -> parameters, after the start and after every step.
        term: a term of the loss -> what stands in its place.
    """

    start: Callable[[Params, np.ndarray], Params] | None = None
    whitening: float = 0.0
    after: Callable[[Params], Params] = lambda params: params
    term: Callable[[Term], Term] = lambda term: term


def train_ours(
    data: DataSet,
    coder_keys: dict[str, Any],
    train_keys: dict[str, Any],
    seed: int,
    hooks: Hooks | None = None,
    save: Path | None = None,
) -> tuple[Measured, np.ndarray, float]:
    """(what held-out rows say, the decoder's rows, seconds of training with compilation).

    Args:
        coder_keys, train_keys: of `CoderConfig` and `TrainConfig`, besides the sizes that the data set gives.
        save: a folder for the dictionary.
    """
    hooks = hooks or Hooks()
    arrays, read = _arrays(data.name, hooks.whitening)
    reads = tuple(arrays)[-1:]
    topology = {"topology": "transcoder"} if hooks.whitening else {}
    told = CoderConfig(**{"d_sae": data.d_sae} | topology | coder_keys)
    config = TrainConfig(**{"tokens": data.tokens, "batch_size": data.batch} | train_keys)
    source = _Ordered(ArrayRows(arrays), arrays, np.load(data.order(seed)), data.batch)
    coder = build(told, source.hook_points["x"], config.steps, tokens=config.tokens)
    coder = dataclasses.replace(coder, terms=tuple(hooks.term(term) for term in coder.terms))
    config = dataclasses.replace(config, lr=config.lr or usual_rate(config, coder.topology.d_in, told.d_sae))
    sites = make_sites(told, coder.topology, reads, ("x",), source.statistics)
    started = time.perf_counter()
    state = _train(coder, config, sites, told, source, seed, hooks)
    seconds = time.perf_counter() - started
    alone, params = coder.inference(state.evaluated(), state.stats)

    @jax.jit
    def encode(x_BD: jax.Array) -> tuple[jax.Array, jax.Array]:
        z_BD = read(x_BD) * sites.read_scales[0]
        latents = alone.encode(params, z_BD)
        return latents.dense(), alone.decode(params, latents, z_BD) / sites.write_scales[0]

    if save:
        _kept(folded(coder, state.evaluated(), state.stats, sites), sites, data).save(save)
    heldout, groups = np.load(data.folder / "H.npy"), np.load(data.folder / "groups.npy")
    found = measured(lambda x: encode(jnp.asarray(x)), heldout, groups, keep=not data.store)
    return found, np.asarray(params["W_dec"]), seconds


def _kept(inference: tuple[Coder, Params], sites: Sites, data: DataSet) -> TrainedCoder:
    """The dictionary for raw activations of the set's hook point."""
    at = dataclasses.replace(unscaled(sites), reads=(data.hook_point,), writes=(data.hook_point,))
    return TrainedCoder(inference[0], {name: np.asarray(value) for name, value in inference[1].items()}, at)


def _train(
    coder: Coder, config: TrainConfig, sites: Sites, told: CoderConfig, source: "_Ordered", seed: int, hooks: Hooks
) -> TrainState:
    spread = read_spread(coder, sites, source.statistics)
    optimizer = make_optimizer(config, coder.sparsity.bias_rate, spread)
    prepare = make_prepare(told, coder, sites, source)

    def begin(params: Params) -> Params:
        params = prepare(params)
        if hooks.whitening:  # pre is that of a transposed decoder on x
            ratio = sites.write_scales[0] / sites.read_scales[0]
            params = params | {"W_enc": ratio * _whitening(source.rows("x"), -hooks.whitening) @ params["W_dec"].T}
        return hooks.after(hooks.start(params, source.rows("x")) if hooks.start else params)

    init = make_init(coder, optimizer, config, begin)
    take = make_step(coder, optimizer, make_schedule(config), sites, config)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: TrainState, batch: dict[str, jax.Array], hyper: Any) -> TrainState:
        state, _ = take(state, batch, hyper)
        return dataclasses.replace(state, params=hooks.after(state.params))

    state, hyper = jax.jit(init)(seed), default_hyper(seed)
    for number in range(config.steps):
        batch = {name: jnp.asarray(rows) for name, rows in source.whole_batch_at(number).items()}
        state = step(state, batch, hyper)
    return jax.block_until_ready(state)


@functools.lru_cache(maxsize=1)
def _arrays(name: str, whitening: float) -> tuple[dict[str, np.ndarray], Callable[[Any], Any]]:
    """({"x": rows, "z": what the encoder reads, where that is another thing}, x -> what it reads)."""
    x_ND = np.load(SETS[name].folder / "A.npy")
    if not whitening:
        return {"x": x_ND}, lambda x: x
    mean_D, matrix_DD = x_ND.mean(0, dtype=np.float64).astype(np.float32), _whitening(x_ND, whitening)
    return {"x": x_ND, "z": (x_ND - mean_D) @ matrix_DD}, lambda x: (x - mean_D) @ matrix_DD


def _whitening(x_ND: np.ndarray, power: float) -> np.ndarray:
    """(C + 0.001 mean C)^-power, C the covariance [D, D], divided so that traces of C to both powers stay near 1."""
    centred = x_ND.astype(np.float64) - x_ND.mean(0, dtype=np.float64)
    values, vectors = np.linalg.eigh(centred.T @ centred / len(centred))
    values = np.maximum(values, 0) / values.mean() + 1e-3
    return ((vectors * values**-power) @ vectors.T).astype(np.float32)


class _Ordered:
    """Batches in a given order, as the peers get them; as much of a `BatchSource` as the start of a training asks."""

    def __init__(self, rows: ArrayRows, arrays: dict[str, np.ndarray], order: np.ndarray, batch: int):
        self.hook_points, self.statistics, self.dtype = rows.hook_points, rows.statistics, rows.dtype
        self.batch_size, self.epoch_rows = batch, rows.n_tokens
        self._order, self._arrays = order, arrays

    def rows(self, name: str) -> np.ndarray:
        return self._arrays[name]

    def whole_batch_at(self, step: int) -> dict[str, np.ndarray]:
        at = self._order[step * self.batch_size : (step + 1) * self.batch_size]
        return {name: rows[at] for name, rows in self._arrays.items()}
