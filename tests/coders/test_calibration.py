"""Where b_enc starts: so that each latent fires on a wanted share of tokens."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from saejax.coders import CoderConfig, build
from saejax.training.start import bias_for_rate, first_rate

D, F = 6, 32


@pytest.mark.parametrize(
    ("preset", "changes", "rate"),
    [
        ("jumprelu", {}, 4 * 3 / F),
        ("jumprelu", {"target_l0_start": 0.0}, 0.0),
        ("jumprelu", {"target_l0_start": 100.0}, 0.5),
        ("jumprelu", {"firing_rate_init": 0.3}, 0.3),
        ("jumprelu_l0", {"target_l0_start": 2.0}, 0.0),  # is drawn to no target
        ("clt", {"sparsity": "jumprelu", "target_l0_coefficient": 1.0, "target_l0_start": 2.0}, 2 * 3 / (2 * F)),
        ("topk", {}, 0.0),
    ],
)
def test_the_share_that_fires_at_the_start(preset: str, changes: dict[str, float], rate: float) -> None:
    config = CoderConfig(preset, d_sae=F, target_l0=3.0, k=3, **changes)
    coder = build(config, (D, D) if preset == "clt" else D, 10)
    assert first_rate(config, coder) == rate


def test_every_latent_fires_on_that_share_of_tokens() -> None:
    config = CoderConfig("jumprelu", d_sae=F, target_l0=3.0, matmul_dtype="float32")
    coder = build(config, D, 10)
    x = np.random.default_rng(0).normal(size=(800, D)).astype(np.float32)
    params = bias_for_rate(coder, coder.init(jax.random.key(0)), x, first_rate(config, coder))
    share_F = (np.asarray(coder.encode(params, x).dense()) != 0).mean(0)
    np.testing.assert_allclose(share_F, 4 * 3 / F, atol=2 / 800)
