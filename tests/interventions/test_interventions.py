"""Interventions beside runs by hand: every topology, operation and kind of error; many at once; what is refused."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny.by_hand import HOOK, numpy_coder
from tiny.covering import rest_in
from tiny.intervened import LM, OTHERS, TOKENS, F, R, S, dictionary, inside, inside_at_the_end

from saejax.coders import TOPOLOGIES
from saejax.core.errors import ConfigError, DataError
from saejax.evals.in_turn import edits_in_turn
from saejax.interventions import (
    Change,
    Interventions,
    added,
    both,
    clamped,
    kl_from,
    logit_difference,
    padded,
    patched,
    probability,
    scaled,
    set_to,
    zero,
)
from saejax.interventions.metrics import loss
from saejax.parallel import ParallelConfig, make_mesh
from saejax.trained import TrainedCoder


@pytest.fixture(scope="module")
def one() -> Interventions:
    return inside()


def _captured(tokens: np.ndarray, points: tuple[str, ...], fixed: dict[str, np.ndarray]) -> Any:
    edits = {name: lambda _, value=value: jnp.asarray(value, jnp.float32) for name, value in fixed.items()}
    logits, seen = LM.run(tokens, capture=points, edits=edits)
    return np.asarray(logits), {name: np.asarray(value, np.float64) for name, value in seen.items()}


def by_hand(topology: str, sae: TrainedCoder, tokens: np.ndarray, f_of: Any, errors: Any) -> np.ndarray:
    """Logits with y' put in as constants, one site after the other: latents [R, S, G F] of `numpy_coder`, changed by
    f_of(latents)."""
    sites, p, fixed = sae.sites, dict(sae.params), {}
    n_sites = len(sites.writes)
    _, first = _captured(tokens, sites.hook_points, {})
    before: dict[str, np.ndarray] = {}
    for i, point in enumerate(sites.writes):
        _, seen = _captured(tokens, sites.hook_points, fixed)
        # A crosscoder's latents are those of the clean run; a causal one reads a site before it is written.
        reads = first if topology == "crosscoder" else seen | before
        before[point] = seen[point]
        x = np.stack([reads[name] for name in sites.reads], axis=2).reshape(R * S, len(sites.reads), -1)
        f, y_hat = numpy_coder(topology, "relu", p, x)
        changed = f_of(f.reshape(R, S, -1)).reshape(R * S, -1)
        new = decoded(topology, p, changed, x).reshape(R, S, n_sites, -1)[:, :, i]
        old = y_hat.reshape(R, S, n_sites, -1)[:, :, i]
        if errors == "own":
            fixed[point] = seen[point] - old + new
        elif errors == "none":
            fixed[point] = new
        else:
            fixed[point] = new + np.asarray(errors[point], np.float64)
    return _captured(tokens, (), fixed)[0]


def decoded(topology: str, p: dict[str, np.ndarray], f: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Dec(f) [N, S, D] in float64, by the linearity of `numpy_coder` in its decoder."""
    p = {name: value.astype(np.float64) for name, value in p.items()}
    n_sites = x.shape[1]
    if "W_dec_0" in p:
        f_NGF, alone = f.reshape(len(f), n_sites, -1), topology.startswith("per_layer")
        writers = [[m] if alone else range(m + 1) for m in range(n_sites)]
        out = [sum(f_NGF[:, i] @ p[f"W_dec_{i}"][:, m - i] for i in writers[m]) for m in range(n_sites)]
        out = [y + p["b_dec"][m] for m, y in enumerate(out)]
        return np.stack([y + x[:, m] @ p["W_skip"][m] if "W_skip" in p else y for m, y in enumerate(out)], axis=1)
    if topology == "crosscoder":
        return np.einsum("nf,fsd->nsd", f, p["W_dec"]) + p["b_dec"]
    y = f @ p["W_dec"] + p["b_dec"]
    if topology == "layernorm_autoencoder":
        mean, size = x[:, 0].mean(1, keepdims=True), x[:, 0].std(1, ddof=1, keepdims=True)
        y = y * size + mean
    if "W_skip" in p:
        y = y + x[:, 0] @ p["W_skip"]
    return y[:, None]


# What is done to latents [R, S, n] in numpy, beside the change that says the same.
LATENTS = [3, 17, 30]
AT = np.zeros((R, S), bool)
AT[:, 2:5] = True
OPERATIONS: dict[str, tuple[Change, Any]] = {
    "zero": (zero(LATENTS), lambda f: 0 * f),
    "set": (set_to(LATENTS, 1.5), lambda f: 0 * f + 1.5),
    "scale": (scaled(LATENTS, 3.0, AT), lambda f: np.where(AT[:, :, None], 3 * f, f)),
    "add": (added(LATENTS, [0.5, 1.0, -2.0]), lambda f: f + np.array([0.5, 1.0, -2.0])),
    "clamp": (clamped(LATENTS, 0.2, 0.4), lambda f: np.clip(f, 0.2, 0.4)),
}


def changed(operation: Any, latents: list[int]) -> Any:
    def f_of(f: np.ndarray) -> np.ndarray:
        f = f.copy()
        f[..., latents] = operation(f[..., latents])
        return f

    return f_of


@pytest.mark.parametrize("topology", rest_in("ci", TOPOLOGIES, ("autoencoder", "clt")))
def test_logits_are_those_of_a_run_by_hand(topology: str) -> None:
    """Latents of every group of a cross-layer transcoder are changed at once, with each kind of errors."""
    made = inside(topology)
    sae = made.dictionaries["sae"]
    latents = _some(sae)
    change, plain = {"sae": added(latents, 2.0)}, _captured(TOKENS, (), {})[0]
    given = made.run(OTHERS, {"sae": scaled(latents, 1.0)}).errors
    kinds: list[Any] = ["own", "none", given]
    for errors in kinds:
        got = made.run(TOKENS, change, errors=errors)
        own = errors["sae"] if errors is given else errors
        want = by_hand(topology, sae, TOKENS, changed(lambda f: f + 2.0, latents), own)
        np.testing.assert_allclose(got.logits, want, rtol=2e-4, atol=2e-4)
        assert np.abs(want - plain).max() > 0.05


def _some(sae: TrainedCoder) -> list[int]:
    """Two latents of each group."""
    return [n for g in range(sae.n_latents // F) for n in (g * F + 3, g * F + 17)]


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_at_its_tokens(name: str, one: Interventions) -> None:
    change, operation = OPERATIONS[name]
    want = by_hand("autoencoder", one.dictionaries["sae"], TOKENS, changed(operation, LATENTS), "own")
    got = one.run(TOKENS, {"sae": change}).logits
    np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-4)


def test_tokens_and_numbers_may_be_tensors_of_torch(one: Interventions) -> None:
    torch = pytest.importorskip("torch")
    latents, value = _some(one.dictionaries["sae"]), np.linspace(0, 1, 2, dtype=np.float32)
    tensor = torch.from_numpy(value).bfloat16().requires_grad_()
    want = one.run(TOKENS, {"sae": set_to(latents, tensor.detach().float().numpy())}).logits
    got = one.run(torch.from_numpy(np.array(TOKENS)), {"sae": set_to(torch.tensor(latents), tensor)}).logits
    np.testing.assert_array_equal(got, want)


def test_what_a_run_has_seen_adds_up(one: Interventions) -> None:
    """Dec(latents) + errors is what stands at the hook point, and latents are those of `encode`."""
    run = one.run(TOKENS, capture=[HOOK])
    sae = one.dictionaries["sae"]
    x = np.asarray(run.captured[HOOK])
    np.testing.assert_allclose(run.latents["sae"], sae.encode(x), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(sae.decode(sae.encode(x)) + run.errors["sae"][HOOK], x, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("topology", rest_in("ci", TOPOLOGIES, ("autoencoder", "clt")))
def test_changes_of_no_effect_change_nothing(topology: str) -> None:
    made, plain = inside(topology), _captured(TOKENS, (), {})[0]
    few = _some(made.dictionaries["sae"])
    for change in (scaled(few, 1.0), added(few, 0.0), zero(few, np.zeros((R, S), bool))):
        assert np.abs(made.run(TOKENS, {"sae": change}).logits - plain).max() < 1e-5
    run = made.run(TOKENS)
    assert np.abs(run.logits - plain).max() < 1e-5
    every = range(made.dictionaries["sae"].n_latents)
    assert np.abs(made.run(TOKENS, {"sae": patched(every, run.latents["sae"])}).logits - plain).max() < 1e-5


def test_all_features_and_errors_of_a_source_are_the_source(one: Interventions) -> None:
    """The rest of the run is the source's, too."""
    source = one.run(OTHERS, capture=["blocks.1.resid_post"])
    change = patched(range(F), source.latents["sae"])
    got = one.run(TOKENS, {"sae": change}, errors=source.errors, capture=["blocks.1.resid_post"])
    np.testing.assert_allclose(got.logits, source.logits, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got.captured["blocks.1.resid_post"], source.captured["blocks.1.resid_post"], atol=1e-5)
    assert np.abs(_captured(TOKENS, (), {})[0] - source.logits).max() > 0.1


def test_several_dictionaries_act_in_one_pass() -> None:
    """The second sees what the first has done: its latents are computed anew behind the change."""
    second = dictionary("transcoder")
    sites = second.sites.__class__(("blocks.1.mlp_in",), ("blocks.1.mlp_out",), (1.0,), (1.0,))
    second = TrainedCoder(second.coder, second.params, sites)
    made = Interventions(LM, {"first": dictionary(), "second": second})
    change = {"first": added(3, 4.0), "second": zero(range(F))}
    run = made.run(TOKENS, change, capture=["blocks.1.mlp_in", HOOK])
    x = np.asarray(run.captured["blocks.1.mlp_in"])
    np.testing.assert_allclose(run.latents["second"], second.encode(x), rtol=1e-4, atol=1e-4)
    # What the first one alone leaves: y + 4 W_dec,3.
    _, clean = _captured(TOKENS, (HOOK,), {})
    fixed = {HOOK: clean[HOOK] + 4.0 * dictionary().params["W_dec"][3]}
    np.testing.assert_allclose(run.captured[HOOK], fixed[HOOK], rtol=1e-5, atol=1e-5)
    _, seen = _captured(TOKENS, ("blocks.1.mlp_out",), fixed)
    fixed["blocks.1.mlp_out"] = seen["blocks.1.mlp_out"] - second.encode(x) @ second.params["W_dec"]
    np.testing.assert_allclose(run.logits, _captured(TOKENS, (), fixed)[0], rtol=2e-4, atol=2e-4)


def test_held_patterns_and_scales_leave_the_direct_effect() -> None:
    """With all norms and patterns held, and no MLP behind, logits are linear in the change: twice the push is twice
    the effect. Without, they are not."""
    made = inside_at_the_end()
    plain, held = _captured(TOKENS, (), {})[0], made.frozen(TOKENS)
    assert {"blocks.0.attn_pattern", "ln_final_scale"} <= held.keys()
    small, large = (made.run(TOKENS, {"sae": added(3, x)}, held=held).logits - plain for x in (4.0, 8.0))
    np.testing.assert_allclose(large, 2 * small, rtol=1e-3, atol=1e-4)
    free = made.run(TOKENS, {"sae": added(3, 8.0)}).logits - plain
    assert np.abs(free - large).max() > 0.1


# --- many at once ----------------------------------------------------------------------------------------------------


def _measure(log: list[int]) -> Any:
    difference = logit_difference(-1, 5, 9)

    def measure(logits: jax.Array) -> Any:
        log.append(1)
        return difference(logits)

    return measure


@pytest.mark.parametrize("devices", [0, 8, *(pytest.param(n, marks=pytest.mark.soak) for n in (1, 2, 4))])
def test_many_are_one_after_the_other_in_one_program(devices: int, one: Interventions) -> None:
    """Of different numbers of latents, at other tokens; the last block is filled up; measured once a program."""
    changes = [{"sae": OPERATIONS[name][0]} for name in OPERATIONS] + [{"sae": zero(7, AT)}, {"sae": added([1, 2], 3)}]
    alike = [*changes[:-2], {"sae": scaled([7, 1, 2], [0, 1, 1], AT)}, {"sae": added([1, 2, 5], [3, 3, 0])}]
    want = np.stack([logit_difference(-1, 5, 9)(one.run(TOKENS, change).logits) for change in alike])
    mesh = make_mesh(ParallelConfig(mesh=(devices, 1)), jax.devices()[:devices]) if devices else None
    made, traced = Interventions(LM, {"sae": dictionary()}, mesh), []
    measure = _measure(traced)
    got = made.many(TOKENS, changes, measure, at_once=4)
    assert got.shape == (len(changes), R) and len(traced) == 1
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    if not devices:
        np.testing.assert_array_equal(made.many(TOKENS, changes[::-1], measure, at_once=4), got[::-1])
        assert len(traced) == 1, "another call has the program"


def test_measures_of_other_tokens_share_a_program(one: Interventions) -> None:
    changes = [{"sae": zero([f, f + 1, f + 2], AT)} for f in (3, 17)]
    clean, logits = (np.asarray(one.run(TOKENS, c).logits) for c in changes)
    made, rows = Interventions(LM, {"sae": dictionary()}), np.arange(R)
    for at, right in ((np.array([6, 6, 6]), 5), (np.array([2, 6, 4]), 8)):
        got = made.many(TOKENS, changes, both(difference=logit_difference(at, right, 9), kl=kl_from(clean, at)))
        want = logits[rows, at, right] - logits[rows, at, 9]
        np.testing.assert_allclose(got["difference"][1], want, rtol=1e-4, atol=1e-4)
        assert (got["kl"][0] < 1e-5).all() and (got["kl"][1] > 1e-4).all()
    assert made._block._cache_size() == 1


@pytest.mark.parametrize("sparsity", ["topk", "gated", "jumprelu", pytest.param("abs_topk", marks=pytest.mark.soak)])
def test_every_sparsity_can_be_mapped(sparsity: str) -> None:
    """Behind a change, latents of a second dictionary are encoded for each intervention."""
    made = Interventions(LM, {"sae": dictionary("clt", sparsity)})
    changes = [{"sae": added([f, F + f], 1.0)} for f in range(3)]
    got = made.many(TOKENS, changes, lambda logits: logits[:, -1], errors="none")
    want = [made.run(TOKENS, change, errors="none").logits[:, -1] for change in changes]
    np.testing.assert_allclose(got, np.stack(want), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("topology", "sparsity"), [("clt", "topk"), ("skip_clt", "relu"), ("causal_crosscoder", "jumprelu")]
)
def test_without_errors_the_pass_is_that_of_the_evaluation_in_turn(topology: str, sparsity: str) -> None:
    """Two doors to one thing: latents that may be changed on the way, and the evaluation, which holds none of them."""
    sae = dictionary(topology, sparsity)
    want = Interventions(LM, {"sae": sae}).run(TOKENS, errors="none").logits
    got, _ = LM.run(TOKENS, edits=edits_in_turn(sae.coder, dict(sae.params), sae.sites))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    assert np.abs(np.asarray(got) - np.asarray(LM.run(TOKENS)[0])).max() > 0.1


def test_a_mesh_with_latents_spread_out(one: Interventions) -> None:
    made = Interventions(LM, {"sae": dictionary()}, make_mesh(ParallelConfig(mesh=(2, 2)), jax.devices()[:4]))
    changes = [{"sae": set_to([f, f + 4, f + 8], 2.0)} for f in range(4)]
    want = [one.run(TOKENS, change).logits for change in changes]
    got = made.many(TOKENS, changes, lambda logits: logits[:, -1])
    np.testing.assert_allclose(got, np.stack(want)[:, :, -1], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(made.run(TOKENS, changes[0]).logits, want[0], atol=1e-4)


# --- metrics ---------------------------------------------------------------------------------------------------------


def test_metrics_are_their_definitions() -> None:
    z, clean = np.random.default_rng(0).normal(size=(2, R, S, 11)).astype(np.float32) * 3
    at, right, wrong = np.array([2, 6, 4]), np.array([1, 3, 10]), 5
    rows = np.arange(R)
    p, q = (np.exp(x[rows, at].astype(np.float64)) for x in (z, clean))
    p, q = p / p.sum(1, keepdims=True), q / q.sum(1, keepdims=True)
    got = both(
        difference=logit_difference(at, right, wrong),
        probability=probability(at, right),
        loss=loss(at, right),
        kl=kl_from(jnp.asarray(clean), at),
    )(jnp.asarray(z))
    np.testing.assert_allclose(got["difference"], z[rows, at, right] - z[rows, at, wrong], rtol=1e-5)
    np.testing.assert_allclose(got["probability"], p[rows, right], rtol=1e-4)
    np.testing.assert_allclose(got["loss"], -np.log(p[rows, right]), rtol=1e-4)
    np.testing.assert_allclose(got["kl"], (q * np.log(q / p)).sum(1), rtol=1e-4, atol=1e-5)


def test_rows_of_different_lengths_run_together(one: Interventions) -> None:
    """A row filled up behind gives what it gives alone."""
    prompts = [[5, 9, 23], [60, 4, 8, 15, 16, 23, 42], [7, 7, 31]]
    tokens, last = padded(prompts)
    np.testing.assert_array_equal(last, [2, 6, 2])
    change = {"sae": added(LATENTS, 2.0)}
    got = logit_difference(last, 5, 9)(one.run(tokens, change).logits)
    alone = logit_difference(-1, 5, 9)(one.run([prompts[0], prompts[2]], change).logits)
    np.testing.assert_allclose(np.asarray(got)[[0, 2]], alone, rtol=1e-4, atol=1e-5)


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (([[1, 2]], {"sae": zero(40)}), "sae has no latent 40; its latents are 0 to 39"),
        (([[1, 2]], {"sae": zero(-1)}), "no latent -1"),
        (([[1, 2]], {"sae": zero([])}), "names no latent"),
        (([[1, 2]], {"sae": zero([7, 3, 7])}), "names latent 7 twice"),
        (([[1, 2]], {"sae": zero(3, np.ones((1, 5), bool))}), r"`at` of a change of sae is \(1, 5\)"),
        (([[1, 2]], {"sae": set_to([3, 4], np.zeros(3))}), r"`shift` of a change of sae is \(3,\)"),
        (([[1, 2]], {"other": zero(3)}), "no dictionary 'other'; there are sae"),
        (([[1, 2]], {}, "keep"), "errors is 'keep'; it is own, none, or the errors of another run"),
        (([[1, 2]], {}, {"sae": {}}), f"errors of sae lack {HOOK}"),
        (([[]],), "no tokens"),
        (([],), "no tokens"),
        (([[1, 2], [3]],), r"Rows of \[1, 2\] tokens do not run together"),
        (([[1, 62]],), r"tokens\[0, 1\] is 62"),
        (([[1] * 25],), "The rows have 25 tokens; the model reads 24"),
    ],
)
def test_what_cannot_be_run_is_refused(arguments: Any, match: str, one: Interventions) -> None:
    with pytest.raises((ConfigError, DataError), match=match):
        one.run(*arguments)


def test_dictionaries_that_do_not_belong_are_refused() -> None:
    with pytest.raises(ConfigError, match="There is no dictionary"):
        Interventions(LM, {})
    with pytest.raises(ConfigError, match=f"Two dictionaries write {HOOK}"):
        Interventions(LM, {"a": dictionary(), "b": dictionary()})
    with pytest.raises(DataError, match="a was made with another tokenizer, that of gpt9: its latents mean nothing"):
        lm = LM.__class__(LM.config, LM.params, LM.tokenizer, {"model": "tiny", "tokenizer_sha256": "1"})
        Interventions(lm, {"a": dictionary(model="gpt9", tokenizer="2")})
    other = dictionary()
    sites = other.sites.__class__(("blocks.7.resid_post",) * 1, ("blocks.7.resid_post",) * 1, (1.0,), (1.0,))
    with pytest.raises(ConfigError, match=r"blocks\.7\.resid_post"):
        Interventions(LM, {"a": TrainedCoder(other.coder, other.params, sites)})


def test_interventions_of_different_shapes_are_told_apart(one: Interventions) -> None:
    with pytest.raises(ConfigError, match="change different dictionaries"):
        one.many(TOKENS, [{"sae": zero(1)}, {}], lambda z: z[:, -1, 0])
    with pytest.raises(ConfigError, match="nothing to do"):
        one.many(TOKENS, [], lambda z: z[:, -1, 0])
