"""The start of a coder's biases and centre, from the activations that it is going to learn."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from saejax.coders import Coder, CoderConfig, Sites
from saejax.store import BatchSource, Statistics


def make_prepare(config: CoderConfig, coder: Coder, sites: Sites, batches: BatchSource) -> Callable[[Any], Any]:
    """(fresh parameters) -> parameters with biases and centre where the data are, by `b_dec_init` and
    `firing_rate_init`.

    What it needs of the data is read here: the function itself is traced, and reads nothing.
    """
    # One shuffled batch: a fair sample, and the same on every machine.
    rate = first_rate(config, coder)
    wanted = rate or config.b_dec_init == "geometric_median"
    sample = batches.whole_batch_at(0) if wanted else {}
    b_dec = initial_b_dec(config.b_dec_init, sites, sample, batches.statistics)
    centre = read_mean(sites, batches.statistics)
    x = sites.batch({name: jnp.asarray(v) for name, v in sample.items()})["x"] if rate else None

    def prepare(params: Any) -> Any:
        params = params | {"b_dec": jnp.asarray(b_dec, jnp.float32)}
        if "centre" in params:
            params = params | {"centre": jnp.asarray(centre, jnp.float32)}
        return params if x is None else bias_for_rate(coder, params, x, rate)

    return prepare


def first_rate(config: CoderConfig, coder: Coder) -> float:
    """The share of tokens on which each latent is to fire at the start, at most a half; 0 leaves b_enc at 0.

    `firing_rate_init`, or where thresholds are drawn to `target_l0` what makes `target_l0_start` times as many fire.
    From b_enc = 0 half of all latents fire, and in falling from there to the target most die.
    """
    c = config.resolved()
    if c.firing_rate_init or not c.target_l0_coefficient:
        return float(c.firing_rate_init)
    return float(min(c.target_l0_start * c.target_l0 / math.prod(coder.topology.latent_shape), 0.5))


def bias_for_rate(coder: Coder, params: dict[str, Any], x: jax.Array, rate: float) -> dict[str, Any]:
    """Parameters with b_enc moved so that each latent's pre-activation exceeds its threshold on `rate` of the tokens.

    b_enc += theta - q,   q the (1 - rate) quantile of pre over the tokens x;  theta is 0 where none is learned.
    (Anthropic, January 2025)
    """
    pre = coder.topology.pre_activations(params, x)
    quantile = jnp.quantile(pre, 1 - rate, axis=0)
    theta = params.get("threshold", jnp.zeros_like(quantile))
    return params | {"b_enc": params["b_enc"] + theta - quantile}


def read_mean(sites: Sites, statistics: Mapping[str, Statistics]) -> np.ndarray:
    """The mean of what is read, in the scale of training, [D] or [S, D]."""
    rows = [statistics[name].mean * scale for name, scale in zip(sites.reads, sites.read_scales, strict=True)]
    return np.stack(rows) if sites.stacked else rows[0]


def read_spread(coder: Coder, sites: Sites, statistics: Mapping[str, Statistics]) -> tuple[float, ...]:
    """sqrt(E||x - mean x||^2 / E||x||^2) of what the encoder reads, in (0, 1]: of all sites, or of each group's own.

    An encoder with a centre sees x - mean x, and b_enc is in units of that. Scales bring x to one length, whatever part
    of it is the mean; where that is most, a step on b_enc must be smaller, or every latent is negative after a few.
    """
    scales = np.square(sites.read_scales)
    spread_S = np.array([statistics[name].total_variance for name in sites.reads]) * scales
    size_S = np.array([statistics[name].mean_squared_norm for name in sites.reads]) * scales
    if len(coder.topology.latent_shape) == 1:
        spread_S, size_S = spread_S.sum(keepdims=True), size_S.sum(keepdims=True)
    return tuple(float(value) for value in np.sqrt(spread_S / size_S))


def initial_b_dec(
    how: str, sites: Sites, sample: Mapping[str, np.ndarray], statistics: Mapping[str, Statistics]
) -> np.ndarray:
    """b_dec at step 0, in the scale of training: mean, geometric median or zero of each written site; [D] or [S, D]."""
    centre = {
        "mean": lambda name: statistics[name].mean,
        "geometric_median": lambda name: geometric_median(sample[name].astype(np.float64)),
        "zeros": lambda name: np.zeros(len(statistics[name].mean)),
    }[how]
    rows = [centre(name) * scale for name, scale in zip(sites.writes, sites.write_scales, strict=True)]
    return np.stack(rows) if sites.stacked else rows[0]


def geometric_median(rows_ND: np.ndarray, tolerance: float = 1e-7, most: int = 1000) -> np.ndarray:
    """argmin_m sum_n ||rows_n - m||, float64 [D], by Weiszfeld's iteration from the coordinates' medians.

    Stops when a step is shorter than `tolerance` x the spread of the rows (their median distance), or after `most`
    steps. Rows that m meets on its way hold it back as far as they should and no further (Vardi and Zhang 2000).
    """
    rows_ND = np.asarray(rows_ND, np.float64)
    median_D = np.median(rows_ND, axis=0)
    spread = np.median(np.linalg.norm(rows_ND - median_D, axis=1))
    for _ in range(most):
        offset_ND = rows_ND - median_D
        distance_N = np.linalg.norm(offset_ND, axis=1)
        away_N = distance_N > 1e-12 * spread
        weight_N = 1 / distance_N[away_N]
        pull_D = weight_N @ offset_ND[away_N]
        pull, held = np.linalg.norm(pull_D), np.count_nonzero(~away_N)
        if pull <= held:
            break
        step_D = (1 - held / pull) * pull_D / weight_N.sum()
        median_D = median_D + step_D
        if np.linalg.norm(step_D) <= tolerance * spread:
            break
    return median_D
