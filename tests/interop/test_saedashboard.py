"""The folder of a cross-layer transcoder for SAEDashboard; benchmarks/peers/check_saedashboard.py runs its own code."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from tiny.by_hand import SIDES, coder_of, sites_of
from tiny.exports import WIDTH

from saejax.interop.saedashboard import refuses, write_saedashboard
from saejax.trained import TrainedCoder


def clt(sparsity: str, reads: tuple[str, ...] = SIDES["clt"][0]) -> TrainedCoder:
    coder = coder_of("clt", sparsity, reads, SIDES["clt"][1], WIDTH)
    rng = np.random.default_rng(1)
    shapes = {"W_enc": (2, 16, WIDTH), "b_enc": (2, WIDTH), "b_dec": (2, 16)}
    shapes |= {"W_dec_0": (WIDTH, 2, 16), "W_dec_1": (WIDTH, 1, 16)}
    params = {name: rng.normal(0, 0.5, shape).astype(np.float32) for name, shape in shapes.items()}
    if sparsity == "jumprelu":
        params["threshold"] = rng.uniform(-0.3, 1, (2, WIDTH)).astype(np.float32)
    coder = dataclasses.replace(coder, terms=(), unit_decoder_every=0)
    return TrainedCoder(coder, params, sites_of(coder, reads, SIDES["clt"][1]))


@pytest.mark.parametrize("sparsity", ["relu", "jumprelu"])
def test_the_tensors_do_what_the_coder_does(sparsity: str, tmp_path: Path) -> None:
    """encode and decode as decode-clt's modules compute them from these names, in float64."""
    sae = clt(sparsity)
    assert refuses(sae) == ""
    write_saedashboard(tmp_path, sae)
    config = json.loads((tmp_path / "cfg.json").read_text())
    assert (config["num_features"], config["num_layers"], config["d_model"]) == (WIDTH, 2, 16)
    assert (config["activation_fn"], config["normalization_method"]) == (sparsity, "none")
    assert config["tl_input_template"] == "blocks.{}.mlp.hook_in"
    t = {
        name: array.astype(np.float64)
        for name, array in safetensors.numpy.load_file(tmp_path / "clt.safetensors").items()
    }
    assert len(t) == 2 * 2 + 3 * 2 + (sparsity == "jumprelu")
    x_BLD = np.random.default_rng(2).normal(size=(50, 2, 16)).astype(np.float32)
    theta = np.exp(t.get("theta_manager.log_threshold", np.full((2, WIDTH), -np.inf)))
    y = np.zeros((50, 2, 16))
    latents = []
    for layer in range(2):
        name = f"encoder_module.encoders.{layer}"
        pre = x_BLD[:, layer] @ t[f"{name}.weight"].T + t[f"{name}.bias_param"]
        latents.append(np.where(pre > theta[layer], pre, 0))
        for to in range(layer, 2):
            name = f"decoder_module.decoders.{layer}->{to}"
            y[:, to] += latents[-1] @ t[f"{name}.weight"].T + t[f"{name}.bias_param"]
    ours = sae.encode(x_BLD)
    np.testing.assert_allclose(np.stack(latents, 1), ours.reshape(50, 2, WIDTH), atol=1e-5)
    np.testing.assert_allclose(y, sae.decode(ours, x_BLD), atol=1e-4)
    assert 0.05 < (ours != 0).mean() < 0.95


def test_what_the_dashboard_cannot_show_is_refused_by_name() -> None:
    assert "not of topk" in refuses(clt("topk"))
    for reads in (("blocks.1.mlp_in", "blocks.2.mlp_in"), ("blocks.0.mlp_in", "blocks.1.resid_mid")):
        assert reads[1] in refuses(clt("relu", reads))
