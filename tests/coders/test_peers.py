"""saejax against SAELens and dictionary_learning: losses, their parts, every gradient, optimizer steps, thresholds.

The fixtures hold what the peers' own code computed (benchmarks/peers/make_fixtures.py, which says what each array is);
neither peer nor torch is needed here. Where a peer's definition is ours, the coder is built from our pieces alone.
Where it is not, the first section below says the difference in a few lines, as a piece of the test; with it the peer's
numbers come out, and a test at the end shows what the difference does.
"""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from saejax.coders.coder import Coder
from saejax.coders.latents import Latents
from saejax.coders.ramp import Ramp
from saejax.coders.reconstruction import Matryoshka, Mse
from saejax.coders.sparsity.base import Sparsity
from saejax.coders.sparsity.batchtopk import BatchTopK
from saejax.coders.sparsity.gated import Gated
from saejax.coders.sparsity.jumprelu import JumpRelu
from saejax.coders.sparsity.relu import Relu
from saejax.coders.sparsity.topk import TopK
from saejax.coders.term import Context, Term, squared_error
from saejax.coders.terms.auxk import AuxK
from saejax.coders.terms.penalties import L0, AnnealedLp, NormWeightedL1, PreActivation, Tanh, TargetL0
from saejax.coders.terms.second_reconstructions import GateReconstruction
from saejax.coders.topologies import Autoencoder, SkipTranscoder
from saejax.coders.topology import Transcoder
from saejax.training.config import TrainConfig
from saejax.training.optim import make_optimizer

pytestmark = pytest.mark.ci

FIXTURES = pathlib.Path(__file__).parents[1] / "fixtures" / "peers"
ABOUT = json.loads((FIXTURES / "cases.json").read_text())
B, D, F, K, GROUPS = ABOUT["B"], ABOUT["D"], ABOUT["F"], ABOUT["k"], tuple(ABOUT["groups"])
# Relative to the largest entry of what is compared; both sides compute in float32.
TOLERANCE = 1e-5
BANDWIDTH, DEAD_AFTER = 0.5, 10_000_000

Tree = dict[str, Any]
constant, stop = Ramp.constant, jax.lax.stop_gradient


# --- where a peer's definition is not ours ---------------------------------------------------------------------


class AuxKMovesBias(AuxK):
    """dictionary_learning: AuxK also moves b_dec, through the input of the dead latents' encoder.

    Ours leaves b_dec to the reconstruction.
    """

    def __call__(self, c: Context) -> jax.Array:
        return super().__call__(dataclasses.replace(c, params=c.params | {"b_enc": _carrying_b_dec(c.params)}))


def _carrying_b_dec(params: Tree) -> jax.Array:
    """b_enc, with the gradient of -b_dec W_enc to b_dec."""
    zero_D = params["b_dec"] - stop(params["b_dec"])
    return params["b_enc"] - zero_D @ stop(params["W_enc"])


@dataclasses.dataclass(frozen=True)
class SaeLensAuxK(Term):
    """SAELens: mean_b sum_d (e - e_hat)^2 x min(number of dead / k, 1), not divided by the residual's variance.

    The dead latents' pre-activations go in without relu, so that e_hat may use negative latents; b_dec is moved, as
    in `AuxKMovesBias`. `levels`: each matryoshka level has an AuxK of its own, on the residual of its own prefix.
    """

    k: int = D // 2
    levels: tuple[int, ...] = ()
    name = "auxk"

    def __call__(self, c: Context) -> jax.Array:
        total, start, y_hat = jnp.float32(0), 0, c.params["b_dec"][None]
        for end in self.levels or (F,):
            block = slice(start, end)
            y_hat = y_hat + c.latents.dense()[:, block] @ c.params["W_dec"][block]
            total, start = total + self._level(c, block, stop(c.y - y_hat)), end
        return total

    def _level(self, c: Context, block: slice, e: jax.Array) -> jax.Array:
        p, dead = c.topology.restrict(c.params, block), c.dead[block]
        pre = (c.x - p["b_dec"][None]) @ p["W_enc"] + p["b_enc"][None]
        pre = jnp.where(dead[None], pre, -jnp.inf)
        rank = jnp.argsort(jnp.argsort(-pre, axis=1), axis=1)
        kept = dead[None] & (rank < jnp.minimum(self.k, dead.sum()))
        error = squared_error(e, jnp.where(kept, pre, 0) @ p["W_dec"])
        return jnp.minimum(dead.sum() / self.k, 1.0) * error


class UnfrozenGateReconstruction(GateReconstruction):
    """SAELens: the gate's reconstruction trains decoder and b_dec too; the paper freezes them there."""

    def __call__(self, c: Context) -> jax.Array:
        gate = Latents(jax.nn.relu(c.pre), None, F)
        return squared_error(c.y, c.topology.decode(c.params, gate, c.x))


class TargetL0OfLatents(TargetL0):
    """dictionary_learning: the step's estimator looks at f instead of the pre-activations (its issue 55).

    What is just below its threshold is 0 there, out of the window, so that only what is just above moves a threshold.
    """

    def __call__(self, c: Context) -> jax.Array:
        soft = c.sparsity.soft_l0(c.latents.values, c.params)  # type: ignore[attr-defined]
        return jnp.square(soft.sum() / B / self.target - 1)


class JumpReluToAll(JumpRelu):
    """SAELens with jumprelu_ste_to_input: f also passes +(theta / eps) rect on to pre; ours does so for the count H."""

    def __call__(self, pre: jax.Array, keep: Any, params: Tree, step: Any) -> Latents:
        theta = stop(jax.nn.relu(params["threshold"]))[None]
        inside = (jnp.abs(stop(pre) - theta) < self.bandwidth / 2) / self.bandwidth
        latents = super().__call__(pre, keep, params, step)
        return dataclasses.replace(latents, values=latents.values + inside * theta * (pre - stop(pre)))


class RootLp(Term):
    """dictionary_learning, p-annealing's default `Lp`: mean_b (sum_f f^p)^(1/p). Ours has no root, as its `Lp^p`."""

    name = "lp"

    def __call__(self, c: Context) -> jax.Array:
        f = c.latents.dense()
        powers = jnp.where(f > 0, jnp.power(jnp.where(f > 0, f, 1), 0.6), 0)
        return (powers.sum(-1) ** (1 / 0.6)).mean()


def weighed_by_norm(params: Tree) -> Tree:
    """SAELens selects by pre x ||W_dec|| (rescale_acts_by_decoder_norm): the same coder with unit rows."""
    norms = jnp.linalg.norm(params["W_dec"], axis=1)
    scaled = {"W_enc": params["W_enc"] * norms[None], "b_enc": params["b_enc"] * norms}
    return params | scaled | {"W_dec": params["W_dec"] / norms[:, None]}


# --- the cases -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Case:
    """A fixture, and the coder that should compute the same.

    Attributes:
        parts: our metric -> (the peer's part, the peer's part / our metric).
        fold: parameters -> the parameters that the coder runs on.
        unit: decoder rows of length 1, gradients along them removed (dictionary_learning).
        floored: thresholds below 0 are put to 0 before each step (SAELens).
    """

    sparsity: Sparsity
    terms: tuple[Term, ...]
    parts: dict[str, tuple[str, float]]
    topology: type[Any] = Autoencoder
    fold: Callable[[Tree], Tree] = dict
    unit: bool = False
    floored: bool = False

    @functools.cached_property
    def coder(self) -> Coder:
        topology = self.topology(d_in=D, d_sae=F, matmul_dtype="float32")
        return Coder(topology, self.sparsity, self.terms, int(self.unit), DEAD_AFTER)


SL_MSE, DL_MSE, DL_SUM = ("mse_loss", 1.0), ("mse_loss", 1.0), ("l2_loss", 1.0)
L1 = NormWeightedL1(constant(0.7))
TOP, BATCH_SL, BATCH_DL = TopK(constant(K)), BatchTopK(constant(K), 0.99, False), BatchTopK(constant(K), 0.999, False)
JUMP, JUMP_TO_ALL = JumpRelu(bandwidth=BANDWIDTH), JumpReluToAll(bandwidth=BANDWIDTH, through_input=True)
N_GROUPS = len(GROUPS)
SL_AUXK = {"auxk": ("auxiliary_reconstruction_loss", 1.0)}
PRE_ACTIVATION = PreActivation(constant(0.2), dead_only=True)
SL_TANH = {"mse": SL_MSE, "tanh": ("l0_loss", 0.3), "pre_activation": ("pre_act_loss", 0.2)}
DL_AUXK = AuxKMovesBias(constant(8.0), D // 2)


def _sl_topk(**changes: Any) -> Case:
    return Case(TOP, (Mse(), SaeLensAuxK()), {"mse": SL_MSE} | SL_AUXK, **({"fold": weighed_by_norm} | changes))


def _sl_matryoshka(levels: tuple[int, ...] = ()) -> Case:
    """SAELens adds up the prefixes' errors where ours is their mean; the last prefix is its mse_loss."""
    terms = (Matryoshka(constant(N_GROUPS), prefixes=GROUPS), SaeLensAuxK(levels=levels))
    return Case(BATCH_SL, terms, SL_AUXK, fold=weighed_by_norm)


def _sl_jumprelu(sparsity: Sparsity, *penalties: Term, parts: Tree | None = None, **changes: Any) -> Case:
    return Case(sparsity, (Mse(), *penalties), {"mse": SL_MSE} | (parts or {}), floored=True, **changes)


def _dl(sparsity: Sparsity, *terms: Term, parts: Tree, **changes: Any) -> Case:
    return Case(sparsity, terms, parts, **({"unit": True} | changes))


CASES: dict[str, Case] = {
    "saelens_standard": Case(Relu(), (Mse(), L1), {"mse": SL_MSE, "l1": ("l1_loss", 0.7)}),
    # Without b_dec in the encoder's input an autoencoder is our transcoder from x to x.
    "saelens_standard_uncentred": Case(
        Relu(), (Mse(), L1), {"mse": SL_MSE, "l1": ("l1_loss", 0.7)}, topology=Transcoder
    ),
    "saelens_gated": Case(
        Gated(),
        (Mse(), L1, UnfrozenGateReconstruction()),
        {"mse": SL_MSE, "l1": ("l1_loss", 0.7), "gate_reconstruction": ("auxiliary_reconstruction_loss", 1.0)},
    ),
    "saelens_topk": _sl_topk(),
    "saelens_topk_by_value": _sl_topk(fold=dict),
    "saelens_topk_few_dead": _sl_topk(),
    "saelens_topk_many_dead": _sl_topk(),
    "saelens_batchtopk": Case(BATCH_SL, (Mse(), SaeLensAuxK()), {"mse": SL_MSE} | SL_AUXK, fold=weighed_by_norm),
    "saelens_matryoshka": _sl_matryoshka(),
    "saelens_matryoshka_auxk_by_level": _sl_matryoshka(GROUPS),
    "saelens_jumprelu_step": _sl_jumprelu(JUMP, L0(constant(0.3)), parts={"l0_loss": ("l0_loss", 0.3)}),
    "saelens_jumprelu_step_through_input": _sl_jumprelu(
        JUMP_TO_ALL, L0(constant(0.3)), parts={"l0_loss": ("l0_loss", 0.3)}
    ),
    "saelens_jumprelu_negative_threshold": _sl_jumprelu(JUMP, L0(constant(0.3)), parts={"l0_loss": ("l0_loss", 0.3)}),
    "saelens_jumprelu_quadratic": _sl_jumprelu(
        JUMP, TargetL0(constant(2 * 10 * 0.3), 10.0, each=True), parts={"target_l0": ("l0_loss", 2 * 10 * 0.3)}
    ),
    "saelens_jumprelu_tanh": _sl_jumprelu(JUMP_TO_ALL, Tanh(constant(0.3)), PRE_ACTIVATION, parts=SL_TANH),
    "saelens_jumprelu_tanh_threshold_only": _sl_jumprelu(JUMP, Tanh(constant(0.3)), PRE_ACTIVATION, parts=SL_TANH),
    "dl_standard": _dl(Relu(), Mse(), L1, parts={"mse": DL_MSE, "l1": ("sparsity_loss", 1.0)}),
    "dl_standard_april": _dl(Relu(), Mse(), L1, parts={"mse": DL_MSE, "l1": ("sparsity_loss", 1.0)}, unit=False),
    "dl_p_anneal": _dl(Relu(), Mse(), AnnealedLp(constant(0.7), constant(0.6)), parts={"lp": ("lp_loss", 1.0)}),
    "dl_p_anneal_root": _dl(Relu(), Mse(), RootLp(constant(0.7)), parts={"lp": ("lp_loss", 1.0)}),
    "dl_gated": _dl(
        Gated(),
        Mse(),
        L1,
        GateReconstruction(),
        parts={"mse": DL_MSE, "l1": ("sparsity_loss", 1.0), "gate_reconstruction": ("aux_loss", 1.0)},
    ),
    "dl_topk_few_dead": _dl(TOP, Mse(), DL_AUXK, parts={"mse": DL_SUM, "auxk": ("auxk_loss", 1.0)}),
    "dl_topk_many_dead": _dl(TOP, Mse(), DL_AUXK, parts={"mse": DL_SUM, "auxk": ("auxk_loss", 1.0)}),
    "dl_batchtopk": _dl(BATCH_DL, Mse(), DL_AUXK, parts={"mse": DL_SUM, "auxk": ("auxk_loss", 1.0)}),
    # Group weights of 1 / G inside a mean over the G groups: the prefixes weigh 1 / G of what a mean would give them,
    # and AuxK beside them G times as much.
    "dl_matryoshka": _dl(
        BATCH_DL,
        Matryoshka(constant(1 / N_GROUPS), prefixes=GROUPS),
        DL_AUXK,
        parts={"matryoshka": ("l2_loss", 1 / N_GROUPS), "auxk": ("auxk_loss", 1.0)},
    ),
    "dl_jumprelu": _dl(JUMP, Mse(), TargetL0OfLatents(constant(0.8), 10.0), parts={"mse": DL_SUM}, topology=Transcoder),
}


@functools.cache
def _arrays(name: str) -> dict[str, np.ndarray]:
    with np.load(FIXTURES / f"{name}.npz") as stored, np.load(FIXTURES / "batches.npz") as shared:
        return dict(shared) | dict(stored)


def _params(name: str, prefix: str = "init") -> Tree:
    return {n.split("/")[1]: jnp.asarray(v) for n, v in _arrays(name).items() if n.startswith(f"{prefix}/")}


def _batch(x: np.ndarray) -> Tree:
    return {"x": jnp.asarray(x), "y": jnp.asarray(x)}


def _dead(name: str, i: int) -> np.ndarray:
    """Latents that the peer counted as dead in its step i.

    dictionary_learning counts a batch in before it asks who is dead; SAELens asks first, in steps.
    """
    arrays = _arrays(name)
    if name.startswith("dl_"):
        return arrays["idle"][i] >= DEAD_AFTER if "idle" in arrays else np.zeros(F, bool)
    return arrays["idle"][i - 1] > 1000 if i else arrays["dead"]


def _stats(coder: Coder, dead: np.ndarray) -> Tree:
    return coder.init_stats() | {"tokens_since_fired": jnp.where(jnp.asarray(dead), DEAD_AFTER, 0)}


@functools.cache
def _updater(unit: bool, optimizer: Any) -> Any:
    """(params, gradients, optimizer state, loss) -> (params, optimizer state), compiled once for all cases it fits."""
    coder = CASES["dl_standard"].coder if unit else CASES["dl_standard_april"].coder

    def update(params: Tree, grads: Tree, opt_state: Any, value: jax.Array) -> tuple[Tree, Any]:
        grads = coder.project_gradients(params, grads)
        updates, opt_state = optimizer.update(grads, opt_state, params, value=value)
        return coder.constrain(optax.apply_updates(params, updates), jnp.int32(0)), opt_state

    return jax.jit(update)


def _optimizer(name: str) -> Any:
    told = ABOUT["cases"][name]["optimizer"]
    b1, b2 = told.get("betas") or (told["adam_beta1"], told["adam_beta2"])
    # SAELens clips always, dictionary_learning where its trainer is not one of the two with ConstrainedAdam.
    constrained = ("StandardTrainer", "PAnnealTrainer", "GatedSAETrainer")
    return _make_optimizer(told["lr"], b1, b2, told["eps"], ABOUT["cases"][name]["class"] not in constrained)


@functools.cache
def _make_optimizer(lr: float, b1: float, b2: float, eps: float, clips: bool) -> Any:
    config = TrainConfig(lr=lr, b1=b1, b2=b2, eps=eps, schedule="constant", warmup_fraction=0.0, b_enc_rate=1.0)
    return make_optimizer(dataclasses.replace(config, clip_norm=float(clips)))


@functools.cache
def _run(name: str) -> Tree:
    """Loss, metrics and gradients of the first batch; parameters after each of three steps; statistics."""
    case, arrays, params = CASES[name], _arrays(name), _params(name)
    coder, optimizer = case.coder, _optimizer(name)
    found: Tree = {"after": [], "ema": []}

    @jax.jit
    def gradient(params: Tree, x: jax.Array, stats: Tree) -> Any:
        def loss(params: Tree) -> Any:
            return coder.loss(case.fold(params), _batch(x), stats, jnp.int32(1))

        return jax.value_and_grad(loss, has_aux=True)(params)

    opt_state, stats = optimizer.init(params), None
    for i in range(3):
        dead = _dead(name, i)
        now = _stats(coder, dead)
        if stats is not None and "threshold" in stats:
            now["threshold"] = stats["threshold"]
        elif name.startswith("saelens") and "threshold" in now:
            now["threshold"] = jnp.float32(0)  # SAELens starts its average there, ours with the first batch
        if case.floored:
            params = params | {"threshold": jax.nn.relu(params["threshold"])}
        (value, (metrics, stats)), grads = gradient(params, arrays["x"][i], now)
        params, opt_state = _updater(case.unit, optimizer)(params, grads, opt_state, value)
        if i == 0:
            found |= {"loss": value, "metrics": metrics, "grads": grads}
        found["after"].append(params)
        found["ema"].append(float(stats.get("threshold", 0)))
    return found | {"stats": stats}


def _close(got: Any, want: Any, name: str, tolerance: float = TOLERANCE) -> None:
    """Largest difference, relative to the largest entry: small entries are sums that cancel."""
    scale = max(float(np.abs(want).max()), 1e-12)
    np.testing.assert_allclose(np.asarray(got), want, rtol=0, atol=tolerance * scale, err_msg=name)


# --- agreement -------------------------------------------------------------------------------------------------


def test_every_fixture_is_compared() -> None:
    others = {"saelens_transcoder", "saelens_skip_transcoder", "saelens_jumprelu_transcoder"}
    others |= {"dl_p_anneal_schedule", "dl_topk_silent_token"}
    assert set(ABOUT["cases"]) == set(CASES) | others


@pytest.mark.parametrize("name", CASES)
def test_loss_parts_and_gradients_are_the_peers(name: str) -> None:
    arrays, case, found = _arrays(name), CASES[name], _run(name)
    _close(found["loss"], arrays["loss"], "loss")
    for ours, (theirs, factor) in case.parts.items():
        _close(factor * found["metrics"][ours], arrays[f"part/{theirs}"], theirs)
    # Weighting by decoder norms, which are 1, adds a gradient along the rows: what the projection removes.
    project = functools.partial(case.coder.project_gradients, _params(name))
    ours, theirs = project(found["grads"]), project(_params(name, "grad"))
    assert set(ours) == set(theirs)
    for parameter, gradient in theirs.items():
        assert np.abs(gradient).max() > 1e-3, f"{parameter} has no gradient: the fixture tests nothing"
        _close(ours[parameter], gradient, parameter)
    # Dead latents have gradients of their own size.
    if (dead := _dead(name, 0)).any():
        _close(ours["W_enc"][:, dead], theirs["W_enc"][:, dead], "W_enc of the dead", 1e-4)
        _close(ours["W_dec"][dead], theirs["W_dec"][dead], "W_dec of the dead", 1e-4)


@pytest.mark.parametrize("name", CASES)
def test_steps_of_the_optimizer_are_the_peers(name: str) -> None:
    found = _run(name)
    for i in (0, 2):
        for parameter, want in _params(name, f"after{i + 1}").items():
            before = np.asarray(_params(name)[parameter])
            # Relative to the largest change, not to the parameters: an optimizer that does nothing would pass.
            moved = max(np.abs(want - before).max(), 1e-12)
            error = np.abs(found["after"][i][parameter] - want).max() / moved
            assert error < 1e-3, f"{parameter} after step {i + 1}: {error:.1e} of the largest change"
            _close(found["after"][i][parameter], want, parameter)


@pytest.mark.parametrize("name", [name for name in CASES if "batchtopk" in name or "matryoshka" in name])
def test_moving_average_of_the_threshold_is_the_peers(name: str) -> None:
    _close(np.array(_run(name)["ema"]), _arrays(name)["ema"], "ema")


@pytest.mark.parametrize("name", CASES)
def test_trained_coder_gives_the_peers_latents_and_reconstructions(name: str) -> None:
    arrays, case = _arrays(name), CASES[name]
    trained = case.fold(_params(name, "after3"))
    stats = case.coder.init_stats()
    if "threshold" in stats:
        stats["threshold"] = jnp.float32(arrays["ema"][-1])
    coder, params = case.coder.inference(trained, stats)
    latents = coder.encode(params, arrays["x"][2])
    _close(latents.dense(), arrays["eval/latents"], "latents")
    _close(coder.decode(params, latents), arrays["eval/y_hat"], "y_hat")


@pytest.mark.parametrize(
    ("name", "topology", "sparsity"),
    [
        ("saelens_transcoder", Transcoder, Relu()),
        ("saelens_skip_transcoder", SkipTranscoder, Relu()),
        ("saelens_jumprelu_transcoder", Transcoder, JumpRelu()),
    ],
)
def test_transcoders_are_saelens(name: str, topology: Any, sparsity: Sparsity) -> None:
    arrays, params = _arrays(name), _params(name)
    d_out = params["b_dec"].shape[0]
    coder = Coder(topology(d_in=D, d_sae=F, d_out=d_out, matmul_dtype="float32"), sparsity, (), 0, DEAD_AFTER)
    latents = coder.encode(params, arrays["x"][2])
    _close(latents.dense(), arrays["eval/latents"], "latents")
    _close(coder.decode(params, latents, arrays["x"][2]), arrays["eval/y_hat"], "y_hat")


@pytest.mark.parametrize("name", ["saelens_topk", "saelens_batchtopk", "dl_topk_few_dead", "dl_batchtopk"])
def test_tokens_since_fired_are_counted_like_the_peers(name: str) -> None:
    arrays, case = _arrays(name), CASES[name]
    unit = B if name.startswith("saelens") else 1  # SAELens counts steps
    start = np.where(arrays["dead"], 1001 * B if unit == B else DEAD_AFTER, 0)
    coder = dataclasses.replace(case.coder, terms=(Mse(),))
    stats = coder.init_stats() | {"tokens_since_fired": jnp.asarray(start)}
    _, (_, new) = jax.jit(coder.loss)(case.fold(_params(name)), _batch(arrays["x"][0]), stats, jnp.int32(1))
    np.testing.assert_array_equal(new["tokens_since_fired"], arrays["idle"][0] * unit)


def test_annealing_of_p_and_its_coefficient_are_dictionary_learnings() -> None:
    """With a queue of one batch: dictionary_learning takes the ratio of the last ten batches by default.

    Its updates at steps 3, 6, 9, 12 of 1, .8, .6, .4 take effect a step later, the first one changes nothing.
    """
    arrays, params = _arrays("dl_p_anneal_schedule"), _params("dl_p_anneal_schedule")
    term = AnnealedLp(constant(0.7), Ramp(1.0, 0.4, over=9, after=5), updates=3)
    coder = Coder(Autoencoder(d_in=D, d_sae=F, matmul_dtype="float32"), Relu(), (term,), 1, DEAD_AFTER)
    loss, stats, scales = jax.jit(coder.loss), coder.init_stats(), []
    for step in range(16):
        _, (_, stats) = loss(params, _batch(arrays["x"][step % 3]), stats, jnp.int32(step))
        scales.append(0.7 * float(stats["lp_scale"]))
    powers = [float(term._power(jnp.int32(step + 1))) for step in range(16)]
    _close(powers, arrays["p"], "p")
    _close(scales, arrays["coefficient"], "coefficient")


# --- differences -----------------------------------------------------------------------------------------------


def _gradients(name: str, *terms: Term, sparsity: Sparsity | None = None, index: int = 0) -> Tree:
    """Of our own terms, with the dead latents of the peer."""
    case = CASES[name]
    coder = dataclasses.replace(case.coder, terms=terms, sparsity=sparsity or case.sparsity)
    stats = _stats(coder, _dead(name, index))

    def loss(params: Tree) -> jax.Array:
        return coder.loss(case.fold(params), _batch(_arrays(name)["x"][index]), stats, jnp.int32(1))[0]

    return jax.jit(jax.value_and_grad(loss))(_params(name))


def _size(a: Any, b: Any) -> float:
    """Largest difference, relative to the largest entry of b."""
    return float(np.abs(np.asarray(a) - np.asarray(b)).max() / np.abs(b).max())


@pytest.mark.parametrize("name", ["dl_topk_few_dead", "dl_topk_many_dead"])
def test_auxk_of_dictionary_learning_moves_b_dec_and_ours_does_not(name: str) -> None:
    want = _params(name, "grad")
    _, ours = _gradients(name, Mse(), AuxK(constant(8.0), D // 2))
    _, auxk = _gradients(name, AuxK(constant(8.0), D // 2))
    assert not np.asarray(auxk["b_dec"]).any()
    assert _size(ours["b_dec"], want["b_dec"]) > 1e-3
    # pre = (x - b_dec) W_enc + b_enc: the gradient to b_dec is -W_enc times that to b_enc.
    _close(ours["b_dec"] - _params(name)["W_enc"] @ auxk["b_enc"], want["b_dec"], "b_dec")
    _close(ours["W_enc"], want["W_enc"], "W_enc")


def test_dictionary_learning_leaves_out_dead_latents_that_fire_in_the_batch() -> None:
    """It counts the batch before it looks for the dead; ours are those that were dead before the batch."""
    arrays = _arrays("dl_topk_few_dead")
    assert arrays["dead"].sum() == 5
    assert _dead("dl_topk_few_dead", 0).sum() == 4
    assert not (_dead("dl_topk_few_dead", 0) & ~arrays["dead"]).any()


@pytest.mark.parametrize(("name", "relu_matters"), [("saelens_topk_few_dead", True), ("saelens_topk_many_dead", False)])
def test_auxk_of_saelens_is_not_normalised_and_lets_negative_latents_in(name: str, relu_matters: bool) -> None:
    """peer = ours x variance of the residual x min(number of dead / k, 1), where no negative latent is chosen."""
    arrays, n_dead = _arrays(name), int(_arrays(name)["dead"].sum())
    peer = float(arrays["part/auxiliary_reconstruction_loss"])
    ours, _ = _gradients(name, AuxK(k=D // 2))
    e = arrays["x"][0] - np.asarray(CASES[name].coder.reconstruct(weighed_by_norm(_params(name)), arrays["x"][0]))
    variance = ((e - e.mean(0)) ** 2).sum() / B
    assert variance > 10, "its weight beside the reconstruction grows with the data's scale"
    error = abs(float(ours) * variance * min(n_dead / (D // 2), 1) - peer) / peer
    assert 1e-3 < error < 0.5 if relu_matters else error < TOLERANCE


def test_gate_of_saelens_trains_the_decoder() -> None:
    _, ours = _gradients("saelens_gated", GateReconstruction())
    assert not np.asarray(ours["W_dec"]).any()
    _, all_ours = _gradients("saelens_gated", Mse(), L1, GateReconstruction())
    want = _params("saelens_gated", "grad")
    for parameter in ("b_enc", "r_mag", "b_mag", "W_enc"):
        _close(all_ours[parameter], want[parameter], parameter)
    assert _size(all_ours["W_dec"], want["W_dec"]) > 0.1


def test_quadratic_l0_of_saelens_holds_every_token_at_the_target() -> None:
    """(2 / T) mean_b (L0_b - T)^2 = 2 T (mean L0 / T - 1)^2 + (2 / T) variance of L0 over tokens"""
    name, target = "saelens_jumprelu_quadratic", 10.0
    ours, _ = _gradients(name, TargetL0(target=target))
    latents = CASES[name].coder.encode(_params(name), _arrays(name)["x"][0]).dense()
    spread = np.var((np.asarray(latents) != 0).sum(1))
    peer = float(_arrays(name)["part/l0_loss"]) / 0.3
    assert spread > 1
    _close(2 * target * float(ours) + 2 / target * spread, np.float32(peer), "quadratic")


def test_thresholds_of_dictionary_learning_move_only_from_above() -> None:
    """Its estimator sees f, ours the pre-activations: the half of the window below the threshold is missing."""
    name = "dl_jumprelu"
    arrays = _arrays(name)
    pre, theta = arrays["x"][0] @ arrays["init/W_enc"] + arrays["init/b_enc"], arrays["init/threshold"]
    l0 = (pre > theta).sum() / B
    slope = 0.8 * 2 * (l0 / 10.0 - 1) / 10.0
    below = ((pre <= theta) & (theta - pre < BANDWIDTH / 2)).sum(0) / BANDWIDTH / B
    # A latent that is off counts as f = 0, in the window of a threshold below eps / 2, wherever its pre-activation is.
    off = ((pre <= theta) & (theta < BANDWIDTH / 2)).sum(0) / BANDWIDTH / B
    _, ours = _gradients(name, Mse(), TargetL0(constant(0.8), 10.0))
    want = _params(name, "grad")
    assert _size(ours["threshold"], want["threshold"]) > 0.05
    _close(ours["threshold"] + slope * (below - off), want["threshold"], "threshold")
    _close(ours["W_enc"], want["W_enc"], "W_enc")


@pytest.mark.parametrize("name", ["saelens_jumprelu_tanh", "saelens_jumprelu_step_through_input"])
def test_jumprelu_of_saelens_can_pass_its_estimator_to_the_encoder(name: str) -> None:
    """Ours passes it through the count H (through_input), never through f: the tanh loss has no such gradient."""
    penalty: Term = Tanh(constant(0.3)) if "tanh" in name else L0(constant(0.3))
    pull = dataclasses.replace(PRE_ACTIVATION, coefficient=constant(0.2 if "tanh" in name else 0.0))
    ours = _gradients(name, Mse(), penalty, pull, sparsity=dataclasses.replace(JUMP, through_input=True))[1]
    want = _params(name, "grad")
    assert _size(ours["b_enc"], want["b_enc"]) > 1e-2
    _close(ours["threshold"], want["threshold"], "threshold")
    _close(ours["W_dec"], want["W_dec"], "W_dec")


def test_negative_thresholds_act_as_zero_in_both_and_saelens_puts_them_there() -> None:
    name = "saelens_jumprelu_negative_threshold"
    start, moved = _params(name)["threshold"], _params(name, "after1")["threshold"]
    negative = np.asarray(start) < 0
    assert negative.sum() == 12
    value, grads = _gradients(name, Mse(), L0(constant(0.3)))
    _close(value, _arrays(name)["loss"], "loss")
    _close(grads["threshold"], _params(name, "grad")["threshold"], "threshold")
    # Its step starts from 0, ours from the parameter as it is.
    assert np.abs(moved)[negative].max() <= 1.01 * ABOUT["cases"][name]["optimizer"]["lr"]


def test_average_of_saelens_starts_at_zero_and_lags() -> None:
    """theta_n = 0.99 theta_(n-1) + 0.01 min from theta_0 = 0: 1 % of the first minimum, where ours starts with it."""
    name = "saelens_batchtopk"
    case, arrays = CASES[name], _arrays(name)
    coder = dataclasses.replace(case.coder, terms=(Mse(),))
    _, (_, new) = coder.loss(case.fold(_params(name)), _batch(arrays["x"][0]), coder.init_stats(), jnp.int32(0))
    _close(float(new["threshold"]) / 100, arrays["ema"][0], "first threshold")


def test_threshold_of_dictionary_learnings_topk_is_infinite_after_a_silent_token() -> None:
    """Its topk follows the mean over tokens of the smallest kept latent, infinity for a token that keeps none.

    Ours has no such threshold: topk selects at inference as it does in training.
    """
    arrays, params = _arrays("dl_topk_many_dead"), _params("dl_topk_many_dead")
    kept = np.asarray(CASES["dl_topk_many_dead"].coder.encode(params, arrays["x"][0]).values)
    _close(kept.min(1).mean(), arrays["ema"][0], "threshold")
    silent = _arrays("dl_topk_silent_token")
    own = CASES["dl_topk_many_dead"].coder.encode(_params("dl_topk_silent_token"), silent["x"][0])
    assert (np.asarray(own.values) > 0).sum(1).min() == 0
    assert np.isinf([silent[f"ema/{i}"] for i in range(3)]).all()
