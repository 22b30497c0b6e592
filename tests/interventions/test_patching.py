"""Attribution patching, integrated gradients, controls and intervals beside exact patching and arithmetic by hand."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny.by_hand import HOOK
from tiny.intervened import LAST, LM, OTHERS, TOKENS, F, R, S, inside, inside_at_the_end

from saejax.core.errors import ConfigError, DataError
from saejax.interventions import added, estimated, interval, logit_difference, matched, only, set_to, share, without


def _linear(logits: jax.Array) -> jax.Array:
    return logit_difference(-1, 5, 9)(logits)


def test_on_a_linear_measure_effects_add_up_to_the_whole() -> None:
    """W_U applied to what the dictionary writes: gradients of one step and of ten give the exact effects, and features
    and errors together all that putting the source in does."""
    end = inside_at_the_end()
    scale, W_U = LM.readout()
    direction = scale * (W_U[:, 5] - W_U[:, 9])
    source, clean = (end.run(t, capture=[LAST, "ln_final_scale"]) for t in (OTHERS, TOKENS))
    held = clean.captured["ln_final_scale"]
    whole = (np.asarray(source.captured[LAST] - clean.captured[LAST]) / np.asarray(held))[:, -1]
    whole = float(((whole - whole.mean(-1, keepdims=True)) @ direction).sum())
    for steps in (1, 10):
        got = estimated(end, "sae", TOKENS, source, _linear, steps, held={"ln_final_scale": held})
        assert got.features.shape == (R, S, F) and got.errors[LAST].shape == (R, S)
        assert (got.features[:, :-1] == 0).all() and np.abs(got.features[:, -1]).max() > 0.01
        assert abs(got.features.sum() + got.errors[LAST].sum() - whole) < 1e-5 * max(1, abs(whole))


@pytest.mark.parametrize(
    "topology", ["autoencoder", "clt", "layernorm_autoencoder", pytest.param("transcoder", marks=pytest.mark.soak)]
)
def test_one_step_is_the_derivative_of_exact_patching(topology: str) -> None:
    """A small part of the way to the source, feature by feature, through all that comes behind: norms, attention, MLPs
    and, of a cross-layer transcoder, later layers."""
    made = inside(topology)
    source, clean = made.run(OTHERS), made.run(TOKENS)
    got = estimated(made, "sae", TOKENS, source, _linear).features.reshape(R, S, -1)
    delta = np.asarray(source.latents["sae"] - clean.latents["sae"]).reshape(R, S, -1)
    places = [tuple(at) for at in np.argwhere(np.abs(got) > 0.02)[:: max(1, (np.abs(got) > 0.02).sum() // 6)]]
    assert len(places) >= 5
    changes, h = [], 0.02
    for sign in (1, -1):
        for row, token, latent in places:
            shift = np.zeros((R, S, 1))
            shift[row, token] = sign * h * delta[row, token, latent]
            changes.append({"sae": added(latent, shift)})
    up, down = np.split(made.many(TOKENS, changes, _linear).sum(1), 2)
    np.testing.assert_allclose([got[at] for at in places], (up - down) / (2 * h), rtol=0.05, atol=2e-3)


def test_many_steps_add_up_to_what_putting_the_source_in_does() -> None:
    """Completeness of integrated gradients through a whole block and the norms: the sum's error falls as 1 / steps."""
    source, clean = inside().run(OTHERS), inside().run(TOKENS)
    # With all features and errors of the source put in, the run is the source's: `test_interventions`.
    whole = float((_linear(source.logits) - _linear(clean.logits)).sum())
    misses = []
    for steps in (1, 10, 100):
        got = estimated(inside(), "sae", TOKENS, source, _linear, steps)
        misses.append(abs(got.features.sum() + got.errors[HOOK].sum() - whole))
    assert misses[2] < 0.02 * abs(whole) and misses[2] < misses[1] < misses[0]


def test_what_cannot_be_estimated_is_refused() -> None:
    source = inside().run(OTHERS)
    for arguments, match in (
        (("other", TOKENS, source, _linear), "no dictionary 'other'"),
        (("sae", TOKENS, source, _linear, 0), "steps is 0"),
        (("sae", TOKENS[:, :-1], source, _linear), "same number and length"),
    ):
        with pytest.raises(ConfigError, match=match):
            estimated(inside(), *arguments)


# --- sets of features -------------------------------------------------------------------------------------------------


def test_a_set_alone_and_without_it() -> None:
    """All latents kept is the run itself, none is Dec(0) + e; a set and its complement divide them."""
    clean = inside().run(TOKENS)
    chosen, mean = [3, 17, 25], np.asarray(clean.latents["sae"]).mean((0, 1))
    kept = {
        "all": only(range(F), F),
        "nothing left out": without([], F),
        "chosen": only(chosen, F),
        "others left out": without(sorted(set(range(F)) - set(chosen)), F),
        "means": only(chosen, F, mean),
        "none": without(range(F), F),
    }
    got = dict(zip(kept, inside().many(TOKENS, [{"sae": c} for c in kept.values()], lambda z: z[:, -1]), strict=True))
    for name in ("all", "nothing left out"):
        np.testing.assert_allclose(got[name], clean.logits[:, -1], atol=1e-5)
    np.testing.assert_allclose(got["chosen"], got["others left out"], atol=1e-5)
    f = np.array(clean.latents["sae"])
    f = np.where(np.isin(np.arange(F), chosen), f, mean)
    want = inside().run(TOKENS, {"sae": set_to(jnp.arange(F), f)}).logits[:, -1]
    np.testing.assert_allclose(got["means"], want, atol=1e-5)
    assert np.abs(got["none"] - got["chosen"]).max() > 0.01
    assert np.abs(got["means"] - got["chosen"]).max() > 0.01


def test_shares_are_their_definitions() -> None:
    np.testing.assert_allclose(share([3.0, 1.0], [1.0, 1.0], [5.0, 1.0]), [0.5, np.nan])


def test_controls_fire_as_much_and_are_others() -> None:
    rng = np.random.default_rng(0)
    mean = np.where(rng.random(200) < 0.3, 0, rng.lognormal(0, 2, 200))
    chosen = rng.choice(np.flatnonzero(mean), 8, replace=False)
    sets = matched(chosen, mean, 50)
    assert sets.shape == (50, 8) and len({tuple(sorted(s)) for s in sets}) > 40
    assert not np.isin(sets, chosen).any() and (mean[sets] > 0).all()
    assert all(len(set(s)) == 8 for s in sets)
    apart = np.abs(np.log(mean[sets]) - np.log(mean[chosen]))
    assert np.median(apart) < 0.5, "controls of about the same activation"
    np.testing.assert_array_equal(sets, matched(chosen, mean, 50))
    assert (sets != matched(chosen, mean, 50, seed=1)).any()
    with pytest.raises(DataError, match="Only 2 other latents fire in these rows, too few for a control of 3"):
        matched([0, 1, 2], np.array([1.0, 1, 1, 1, 1, 0, 0]), 4)


def test_intervals_cover_the_mean_as_often_as_they_say() -> None:
    """Of 300 samples of 40 normal numbers about 95 in 100 intervals hold the true mean; one seed, one interval."""
    rng = np.random.default_rng(0)
    held = []
    for _ in range(300):
        values = rng.normal(2.0, 3.0, 40)
        mean, low, high = interval(values, draws=400)
        assert low < mean < high and mean == pytest.approx(values.mean())
        held.append(low <= 2.0 <= high)
    assert 0.88 < np.mean(held) < 0.98
    assert interval([1.0, 2, 5]) == interval([1.0, 2, 5, np.nan])
    assert all(np.isnan(x) for x in interval([]))
    one: Any = interval([3.0])
    assert one == (3.0, 3.0, 3.0)
