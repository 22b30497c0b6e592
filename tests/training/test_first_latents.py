"""A training that starts from a trained coder: its first latents are the source's, wherever that has a meaning."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny.covering import rest_in

from saejax.coders import SPARSITIES, TOPOLOGIES, Coder, CoderConfig, Sites, build
from saejax.core.errors import ConfigError
from saejax.parallel import ParallelConfig, make_mesh
from saejax.store import ArrayRows, Statistics
from saejax.trained import TrainedCoder, folded, unscaled
from saejax.training import TrainConfig
from saejax.training.optim import make_optimizer
from saejax.training.state import TrainState, abstract_state, init_state, make_init
from saejax.training.warm_start import WarmStart, begun_warm

D, F, K, B = 6, 24, 4, 64
CONFIG = TrainConfig(tokens=B, batch_size=B)


@pytest.fixture(autouse=True)
def _without_compiling(request: pytest.FixtureRequest) -> Iterator[None]:
    """A hundred small programs that run once each."""
    with jax.disable_jit("learn" not in request.node.name):
        yield


def coder_of(topology: str, sparsity: str, d_sae: int = F, **keys: Any) -> Coder:
    n = 3 if TOPOLOGIES[topology].stacked else 1
    free = {"unit_decoder_every": 0, "auxk_coefficient": 0.0}
    keys = {"k": K, "init": "uniform", "matmul_dtype": "float32", **free} | keys
    return build(CoderConfig(topology=topology, sparsity=sparsity, d_sae=d_sae, **keys), [D] * n, 10, [D] * n)


def sites_of(coder: Coder, read: float = 1.0, write: float = 1.0, names: str = "ab") -> Sites:
    """Each site with a scale of its own; the same for what is read and written where those are one."""
    kind = coder.topology
    n, one = kind.in_shape[0] if kind.stacked else 1, names[0] == names[-1]
    reads = tuple(f"{names[0]}{i}" for i in range(n))
    writes = reads if kind.tied or one else tuple(f"{names[-1]}{i}" for i in range(n))
    scales = tuple(read * (1 + 0.3 * i) for i in range(n))
    return Sites(reads, writes, scales, scales if writes == reads else tuple(write for _ in reads), kind.stacked)


@functools.cache
def source(topology: str, sparsity: str, unit: bool = False, even: bool = True, names: str = "ab") -> TrainedCoder:
    """Random weights and biases; thresholds positive, of one height where `even`."""
    coder = coder_of(topology, sparsity)
    rng = np.random.default_rng(3)
    with jax.disable_jit():
        params = {n: np.asarray(v) + rng.normal(0, 0.2, v.shape) for n, v in coder.init(jax.random.key(1)).items()}
    if "threshold" in params:
        params["threshold"] = np.full(params["threshold"].shape, 0.3) + (
            0 if even else rng.random(params["b_enc"].shape)
        )
    if unit:
        rows = {name: params[name] for name in coder.topology.decoders}
        params |= {
            n: 2 * r / np.sqrt(np.square(r).sum(tuple(range(1, r.ndim)), keepdims=True)) for n, r in rows.items()
        }
    stats = coder.init_stats() | ({"threshold": jnp.float32(0.3)} if sparsity == "batchtopk" else {})
    sites = sites_of(coder, names=names)
    own, params = folded(coder, {n: jnp.asarray(v, jnp.float32) for n, v in params.items()}, stats, unscaled(sites))
    return TrainedCoder(own, {n: np.asarray(v) for n, v in params.items()}, unscaled(sites))


def raw(coder: Coder, n: int = B) -> np.ndarray:
    return (3 * np.random.default_rng(5).normal(size=(n, *coder.topology.in_shape)) + 1).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Batch:
    """What the centre and new latents' biases are set by."""

    arrays: dict[str, np.ndarray]

    @property
    def statistics(self) -> dict[str, Statistics]:
        return {name: ArrayRows({name: rows}).statistics[name] for name, rows in self.arrays.items()}

    def whole_batch_at(self, step: int) -> dict[str, np.ndarray]:
        return self.arrays


def begun(
    sae: TrainedCoder, coder: Coder, sites: Sites, resamples: bool = False
) -> tuple[TrainState, Sites, list[str]]:
    """The state at step 0, the sites with the latents' unit, and what is said."""
    warm, sites, notes = warm_of(sae, coder, sites, resamples)
    return make_init(coder, optax.adam(1e-3), CONFIG)(3, warm), sites, notes


def warm_of(sae: TrainedCoder, coder: Coder, sites: Sites, resamples: bool = False) -> tuple[WarmStart, Sites, Any]:
    x = raw(coder).reshape(B, -1, D)
    batch: Any = Batch(dict.fromkeys(sites.writes, x[:, 0]) | {name: x[:, i] for i, name in enumerate(sites.reads)})
    warm, sites, notes = begun_warm(sae, coder, sites, batch, resamples)
    assert isinstance(warm, WarmStart)
    return warm, sites, notes


def scaled(sites: Sites, x: np.ndarray) -> jax.Array:
    scales = np.asarray(sites.read_scales, np.float32)
    return jnp.asarray(x * (scales[:, None] if sites.stacked else scales[0]))


def check_same(
    sae: TrainedCoder, coder: Coder, state: TrainState, sites: Sites, n: int = F, per_token: bool = True
) -> None:
    """The trained coder of step 0, and the training's own latents in their unit, against the source."""
    x = raw(coder)
    if coder.topology.centred:
        mean = x.astype(np.float64).mean(0) * np.reshape(sites.read_scales, (-1, 1) if sites.stacked else ())
        np.testing.assert_allclose(state.params["centre"], mean, rtol=1e-5)
    want, want_y = sae.encode(x), sae.decode(sae.encode(x), x)
    own, params = folded(coder, state.params, state.stats, sites)
    here = TrainedCoder(own, {name: np.asarray(v) for name, v in params.items()}, unscaled(sites))
    found = here.encode(x)
    assert np.abs(found[..., :n] - want).max() <= 1e-5 * np.abs(want).max() > 0
    assert np.abs(here.decode(found, x) - want_y).max() <= 2e-5 * np.abs(want_y).max()
    if per_token:
        inside = np.asarray(coder.encode(state.params, scaled(sites, x)).dense(), np.float64) / sites.latent_scale
        assert np.abs(inside[..., :n] - want).max() <= 1e-5 * np.abs(want).max()


# Every topology and every sparsity; in .ci/run both ways through a topology with all; the other pairs in the soak.
QUICK = [(t, s) for t in TOPOLOGIES for s in SPARSITIES if t == "autoencoder" or s == "batchtopk"]
SHORT = [(t, s) for t in TOPOLOGIES for s in SPARSITIES if t in ("autoencoder", "clt") or s in ("relu", "batchtopk")]
LONG = [pytest.param(t, s, marks=pytest.mark.soak) for t in TOPOLOGIES for s in SPARSITIES if (t, s) not in SHORT]


@pytest.mark.parametrize(("topology", "sparsity"), [*rest_in("ci", SHORT, QUICK), *LONG])
def test_the_first_latents_are_the_source_s(topology: str, sparsity: str) -> None:
    """In other scales than the source was trained in, with free decoder rows."""
    sae, coder = source(topology, sparsity), coder_of(topology, sparsity)
    state, sites, notes = begun(sae, coder, sites_of(coder, 0.02, 5.0))
    check_same(sae, coder, state, sites, per_token=sparsity != "batchtopk")
    assert not notes and int(state.step) == 0 and not np.asarray(state.stats["tokens_since_fired"]).any()
    assert all(not np.asarray(leaf).any() for leaf in jax.tree.leaves(state.opt_state))
    # Weights of a size that learning rates are made for, whatever the size of the activations.
    rows = np.linalg.norm(coder.topology.decoder_rows(state.params)[0], axis=1).mean()
    columns = np.linalg.norm(np.asarray(state.params["W_enc"]).reshape(-1, D, F)[0], axis=0).mean()
    assert 0.05 < rows / columns < 20


@pytest.mark.parametrize(("topology", "sparsity"), [("autoencoder", "gated"), ("clt", "topk"), ("transcoder", "relu")])
def test_a_source_may_have_a_centre_of_its_own(topology: str, sparsity: str) -> None:
    """One that nobody has folded."""
    coder, folded_one = coder_of(topology, sparsity), source(topology, sparsity)
    rng = np.random.default_rng(7)
    shapes = jax.eval_shape(coder.init, jax.random.key(0))
    params = dict(folded_one.params) | {"centre": rng.normal(size=shapes["centre"].shape).astype(np.float32)}
    sae = TrainedCoder(coder, params, folded_one.sites)
    x = raw(coder)
    assert np.abs(sae.encode(x) - folded_one.encode(x)).max() > 0.1
    state, sites, _ = begun(sae, coder, sites_of(coder, 0.02, 5.0))
    check_same(sae, coder, state, sites)


@pytest.mark.parametrize("sparsity", SPARSITIES)
@pytest.mark.parametrize("topology", ["autoencoder", "skip_transcoder"])
def test_rows_of_one_length_go_to_one_and_nothing_changes(topology: str, sparsity: str) -> None:
    """Nor does it after the first step has set them back to length 1."""
    sae, coder = source(topology, sparsity, unit=True), coder_of(topology, sparsity, unit_decoder_every=1)
    state, sites, notes = begun(sae, coder, sites_of(coder, 0.02, 5.0))
    (rows,) = coder.topology.decoder_rows(state.params)
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1, rtol=1e-6)
    after = dataclasses.replace(state, params=coder.constrain(state.params, jnp.int32(0)))
    check_same(sae, coder, after, sites, per_token=sparsity != "batchtopk")
    assert not notes and sites.latent_scale == pytest.approx(2 * sites.write_scales[0])


def test_rows_of_several_lengths_are_refused_only_by_a_selection() -> None:
    sae, coder = source("autoencoder", "jumprelu"), coder_of("autoencoder", "jumprelu", unit_decoder_every=1)
    state, sites, (note,) = begun(sae, coder, sites_of(coder, 0.5))
    x = raw(coder)
    own, params = folded(coder, state.params, state.stats, sites)
    lengths = np.linalg.norm(sae.params["W_dec"], axis=1)
    want = sae.encode(x) * lengths / lengths.mean()
    np.testing.assert_allclose(own.encode(params, jnp.asarray(x)).dense(), want, atol=1e-4 * want.max())
    np.testing.assert_allclose(own.reconstruct(params, jnp.asarray(x)), sae.decode(sae.encode(x)), rtol=1e-4, atol=1e-3)
    assert "multiplied by their lengths" in note
    for sparsity in ("topk", "batchtopk", "abs_topk"):
        with pytest.raises(ConfigError, match=r"differ in length .* Set coder.unit_decoder_every=0"):
            begun(source("autoencoder", sparsity), coder_of("autoencoder", sparsity, unit_decoder_every=1), sites)


@pytest.mark.parametrize("sparsity", ["jumprelu", "gated", "topk"])
@pytest.mark.parametrize(
    ("there", "here"),
    [
        *(("autoencoder", "transcoder"), ("transcoder", "autoencoder"), ("transcoder", "skip_transcoder")),
        ("autoencoder", "skip_transcoder"),
    ],
)
def test_one_hook_point_is_read_by_several_topologies(there: str, here: str, sparsity: str) -> None:
    sae, coder = source(there, sparsity, names="aa"), coder_of(here, sparsity)
    state, sites, _ = begun(sae, coder, sites_of(coder, 0.3, names="aa"))
    check_same(sae, coder, state, sites)


SAME = [
    ("relu", "jumprelu"),
    ("relu", "gated"),
    ("gated", "jumprelu"),
    ("jumprelu", "gated"),
    ("jumprelu", "batchtopk"),
]


@pytest.mark.parametrize(("there", "here"), [*SAME, ("relu", "batchtopk")])
@pytest.mark.parametrize("topology", ["autoencoder", "clt"])
def test_sparsities_that_say_the_same_in_other_words(topology: str, there: str, here: str) -> None:
    sae, coder = source(topology, there, even=here == "batchtopk"), coder_of(topology, here)
    state, sites, notes = begun(sae, coder, sites_of(coder, 0.1, 2.0))
    check_same(sae, coder, state, sites, per_token=here != "batchtopk")
    assert not notes


def test_what_changes_is_said() -> None:
    scales = sites_of(coder_of("autoencoder", "topk"), 0.5)
    uneven = source("autoencoder", "jumprelu", even=False)
    state, sites, (note,) = begun(uneven, coder_of("autoencoder", "batchtopk"), scales)
    mean = uneven.params["threshold"].mean()
    assert float(state.stats["threshold"]) / sites.latent_scale == pytest.approx(mean) and f"{mean:.3g}" in note
    for there, here, words in (
        ("topk", coder_of("autoencoder", "topk", k=8), "8 latents are kept, 4 by the source"),
        ("jumprelu", coder_of("autoencoder", "topk"), "keeps the 4 largest"),
        ("topk", coder_of("autoencoder", "batchtopk"), "follows from the first batches"),
    ):
        state, sites, (note,) = begun(source("autoencoder", there), here, scales)
        assert words in note
        # Pre-activations are the source's: what is kept has its values.
        x = raw(here)
        kept = np.asarray(here.encode(state.params, scaled(sites, x)).dense()) / sites.latent_scale
        pre = source("autoencoder", there)
        pre_BF = pre.coder.topology.pre_activations(pre.params, jnp.asarray(x))
        np.testing.assert_allclose(kept[kept != 0], np.asarray(pre_BF)[kept != 0], rtol=1e-4)
    assert float(state.stats["threshold"]) == -1


# --- more latents ----------------------------------------------------------------------------------------------


# One of each in `make test`; every pair in .ci/run.
GROWN = list(itertools.product(("crosscoder", "clt"), SPARSITIES))


@pytest.mark.parametrize(("topology", "sparsity"), rest_in("ci", GROWN, [("crosscoder", "relu"), ("clt", "batchtopk")]))
def test_new_latents_leave_the_old_ones_alone(topology: str, sparsity: str) -> None:
    sae = source(topology, sparsity)
    coder = coder_of(
        topology, sparsity, 2 * F, auxk_coefficient=1 / 32 if coder_of(topology, sparsity).sparsity.kept else 0
    )
    state, sites, _ = begun(sae, coder, sites_of(coder, 0.1, 2.0))
    x = raw(coder)
    found = np.asarray(coder.encode(state.params, scaled(sites, x)).dense()) / sites.latent_scale
    want = sae.encode(x)
    since = np.asarray(state.stats["tokens_since_fired"])
    if coder.sparsity.kept:
        check_same(sae, coder, state, sites, per_token=sparsity != "batchtopk")
        assert np.abs(found[..., F:]).max() <= 1e-5 * want.max()
        pre = np.asarray(coder.topology.pre_activations(state.params, scaled(sites, x)))[..., F:]
        assert (pre > 0).any(0).all()  # where AuxK looks, each has something to give
        assert (since[..., F:] == coder.dead_after_tokens).all() and not since[..., :F].any()
    else:
        assert np.abs(found[..., :F] - want).max() <= 1e-5 * want.max()
        share = (found[..., F:] > 0).mean(0)
        assert 0 < share.mean() <= 2 / F and not since.any()
    assert state.params["W_enc"].shape[-1] == 2 * F


@pytest.mark.ci
def test_new_latents_learn() -> None:
    """A residual that the source leaves is taken up by what was added; without AuxK and resampling it is refused."""
    from saejax.training.optim import make_optimizer, make_schedule
    from saejax.training.step import default_hyper, make_step

    config = TrainConfig(tokens=150 * B, batch_size=B, lr=3e-3)
    sae = source("autoencoder", "topk", unit=True)
    coder = coder_of("autoencoder", "topk", 2 * F, unit_decoder_every=1, auxk_coefficient=1 / 32)
    state, sites, _ = begun(sae, coder, sites_of(coder, 0.3))
    step = jax.jit(make_step(coder, make_optimizer(config), make_schedule(config), sites, config))
    state = dataclasses.replace(state, opt_state=make_optimizer(config).init(state.params))
    rng = np.random.default_rng(0)
    for _ in range(150):
        state, _ = step(state, {"a0": rng.normal(size=(B, D)).astype(np.float32)}, default_hyper(0))
    x = jnp.asarray(rng.normal(size=(256, D)).astype(np.float32)) * 0.3
    assert (np.asarray(coder.encode(state.params, x).dense())[:, F:] > 0.01).any(0).mean() > 0.3
    silent = coder_of("autoencoder", "topk", 2 * F)
    with pytest.raises(ConfigError, match=r"set coder.auxk_coefficient or train.resample_every"):
        begun(sae, silent, sites)
    begun(sae, silent, sites, resamples=True)


# --- what is refused -------------------------------------------------------------------------------------------

NOT: list[tuple[str, str, dict[str, Any], str]] = [
    ("autoencoder/topk", "autoencoder/topk", {"d_sae": F - 1}, r"24 latents and coder.d_sae is 23.*d_sae=24 or more"),
    ("autoencoder/relu", "crosscoder/relu", {}, r"no crosscoder can start. Set coder.topology=autoencoder"),
    ("crosscoder/relu", "clt/relu", {}, "is a crosscoder, from which no clt"),
    ("autoencoder/relu", "transcoder/relu", {}, r"here a0 -> b0. Set coder.topology=autoencoder"),
    ("transcoder/relu", "autoencoder/relu", {}, r"here a0 -> b0"),
    ("skip_transcoder/relu", "transcoder/relu", {}, "has a skip connection"),
    ("autoencoder/topk", "autoencoder/relu", {}, r"keeps k latents .*relu needs thresholds.*sparsity=batchtopk"),
    ("autoencoder/topk", "autoencoder/jumprelu", {}, "jumprelu needs thresholds"),
    ("autoencoder/abs_topk", "autoencoder/topk", {}, r"abs_topk coder, whose latents are none of topk"),
    ("autoencoder/topk", "autoencoder/abs_topk", {}, r"Set coder.sparsity=topk"),
    ("autoencoder/jumprelu", "autoencoder/relu", {}, r"Set coder.sparsity=jumprelu"),
]


@pytest.mark.parametrize(("there", "here", "keys", "message"), NOT)
def test_what_means_nothing_is_refused_with_the_remedy(
    there: str, here: str, keys: dict[str, Any], message: str
) -> None:
    coder = coder_of(*here.split("/"), **keys)
    with pytest.raises(ConfigError, match=message) as refused:
        begun(source(*there.split("/")), coder, sites_of(coder))
    assert "\n" not in str(refused.value)


def test_other_widths_are_refused() -> None:
    sae = source("autoencoder", "topk")
    wide = build(CoderConfig("topk", d_sae=F, k=K), 2 * D, 10)
    with pytest.raises(ConfigError, match=r"reads activations of width 6, this training 12"):
        begun_warm(sae, wide, sites_of(wide), Batch({}), False)  # type: ignore[arg-type]


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("settings", [{}, {"ema_decay": 0.9}, {"optimizer": "schedule_free", "schedule": "constant"}])
def test_what_learns_is_born_in_two_programs_as_in_one(settings: dict[str, Any], warm: bool) -> None:
    """On a mesh, to the same bits: parameters first, then the moments and averages of them."""
    coder = coder_of("autoencoder", "jumprelu")
    given = warm_of(source("autoencoder", "relu"), coder, sites_of(coder, names="a"))[0] if warm else None
    config = TrainConfig(tokens=100 * B, batch_size=B, lr=0.01, **settings)
    init = make_init(coder, make_optimizer(config), config)
    abstract = abstract_state(coder, init, make_mesh(ParallelConfig((2, 2))))
    state, one = init_state(init, 3, abstract, given), jax.jit(init)(3, given)
    jax.tree.map(np.testing.assert_array_equal, state, one)
    assert jax.tree.map(lambda leaf: leaf.sharding, state) == jax.tree.map(lambda leaf: leaf.sharding, abstract)
    assert bool(state.averaged) == bool(settings)
