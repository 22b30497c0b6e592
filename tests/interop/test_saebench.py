"""The module that SAEBench evaluates: the coder's reconstructions, unit rows, and what SAEBench asks a dictionary for.

What it asks is copied from SAEBench 0.6.0 (custom_saes/base_sae.py, sae_bench_utils/general_utils.py,
evals/core/main.py). benchmarks/peers/run_sae_probes.py hands the module to SAEBench's own functions.
"""

import dataclasses
import sys
from typing import Any

import numpy as np
import pytest

from saejax.core.errors import ConfigError
from saejax.interop.assemble import UNCENTRED, coder_kind
from saejax.interop.saebench import as_module, refuses
from saejax.interop.table import examples
from saejax.trained import Origin, TrainedCoder

torch: Any = pytest.importorskip("torch")
SPARSITIES = ("relu", "topk", "jumprelu", "gated")
KINDS = [(topology, sparsity) for topology in ("autoencoder", UNCENTRED) for sparsity in SPARSITIES]


def example(topology: str, sparsity: str) -> TrainedCoder:
    """Random weights; decoder rows of lengths from 1e-4 to 1e4, one of them 0, and two latents that always tie."""
    sae = next(sae for sae in examples() if coder_kind(sae) == (topology, sparsity))
    rng = np.random.default_rng(5)
    params = {name: rng.normal(size=value.shape).astype(np.float32) for name, value in sae.params.items()}
    params["W_dec"] *= np.array([1e-4, 0.3, 1, 7, 1e4, 0], np.float32)[:, None]
    params["W_enc"][:, 3], params["b_enc"][3] = params["W_enc"][:, 1], params["b_enc"][1]
    return dataclasses.replace(sae, params=params, origin=Origin(model="gpt2", tokens=1000))


@pytest.fixture(scope="module", params=KINDS, ids="-".join)
def pair(request: pytest.FixtureRequest) -> tuple[TrainedCoder, Any]:
    sae = example(*request.param)
    return sae, as_module(sae)


X = np.random.default_rng(0).normal(size=(3, 40, 4)).astype(np.float32)


def test_reconstructions_and_firing_latents_are_the_coders(pair: tuple[TrainedCoder, Any]) -> None:
    sae, module = pair
    latents, norms = sae.encode(X), np.linalg.norm(sae.params["W_dec"].astype(np.float64), axis=1)
    theirs = module.encode(torch.tensor(X))
    assert theirs.dtype == torch.float32 and theirs.shape == latents.shape
    assert np.array_equal(theirs.numpy() != 0, (latents != 0) & (norms > 0))
    scaled = np.where(norms > 0, latents, 0)
    np.testing.assert_allclose(theirs.numpy() / (norms + (norms == 0)), scaled, rtol=0, atol=1e-5 * latents.max())
    x_hat = sae.decode(latents, X)
    np.testing.assert_allclose(module.decode(theirs).numpy(), x_hat, rtol=0, atol=1e-5 * np.abs(x_hat).max())
    assert torch.equal(module(torch.tensor(X)), module.decode(theirs))


def test_what_saebench_reads_of_a_dictionary_is_there(pair: tuple[TrainedCoder, Any]) -> None:
    _, module = pair
    # general_utils.check_decoder_norms
    assert torch.allclose(torch.norm(module.W_dec, dim=1), torch.ones(6), atol=1e-5) and module.check_decoder_norms()
    # base_sae.test_sae
    assert module.W_dec.shape == (module.cfg.d_sae, module.cfg.d_in) == (6, 4)
    assert module.W_enc.shape == (4, 6) and module.b_dec.shape == (4,)
    # core.main: get_featurewise_weight_based_metrics
    bias = module.b_mag if module.cfg.architecture == "gated" else module.b_enc
    assert bias.shape == (6,) and module.W_enc.norm(dim=-2).isfinite().all()
    # general_utils._standardize_sae_cfg, run_evals, SAELens's ActivationsStore.from_sae
    cfg = module.cfg
    assert (cfg.model_name, cfg.hook_name, cfg.hook_layer) == ("gpt2", f"blocks.{cfg.hook_layer}.mlp.hook_in", 0)
    assert cfg.hook_head_index is None and cfg.prepend_bos is True and cfg.normalize_activations == "none"
    assert (cfg.dtype, cfg.model_from_pretrained_kwargs, cfg.seqpos_slice) == ("float32", {}, (None,))
    cfg.metadata = object()  # which the standardisation adds
    assert "metadata" not in cfg.to_dict() and cfg.to_dict()["d_sae"] == 6
    del cfg.metadata
    assert dataclasses.asdict(cfg) == cfg.to_dict()  # sparse_probing_sae_probes.main


def test_it_moves_and_changes_its_type_as_a_torch_module(pair: tuple[TrainedCoder, Any]) -> None:
    sae, _ = pair
    module = as_module(sae, dtype="bfloat16")
    assert module.dtype == torch.bfloat16 == module.W_enc.dtype and module.check_decoder_norms()
    assert module.encode(torch.tensor(X).to(torch.bfloat16)).dtype == torch.bfloat16
    assert module.to(dtype=torch.float32).dtype == torch.float32 and module.device.type == "cpu"
    assert not any(value.requires_grad for value in module.parameters())


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (("skip_transcoder", "relu"), "nothing for a skip_transcoder"),
        (("transcoder", "topk"), "nothing for a transcoder"),
        (("crosscoder", "relu"), "nothing for a crosscoder"),
        (("clt", "jumprelu"), "nothing for a clt"),
        (("autoencoder", "abs_topk"), "those of abs_topk are negative too"),
    ],
)
def test_what_it_cannot_be_is_refused(kind: tuple[str, str], message: str) -> None:
    sae = next(sae for sae in examples() if coder_kind(sae) == kind)
    with pytest.raises(ConfigError, match=message):
        as_module(sae, "gpt2")


def test_a_place_or_a_model_that_saebench_does_not_find_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    sae = example("autoencoder", "topk")

    def at(name: str) -> TrainedCoder:
        return dataclasses.replace(sae, sites=dataclasses.replace(sae.sites, reads=(name,), writes=(name,)))

    assert "names none" in refuses(at("unknown")) and "format='saelens'" in refuses(at("blocks.1.attn_z"))
    nameless = dataclasses.replace(sae, origin=Origin())
    with pytest.raises(ConfigError, match="model_name='gpt2'"):
        as_module(nameless)
    assert as_module(nameless, "gpt2").cfg.model_name == "gpt2"
    with pytest.raises(ConfigError, match="dtype is 'int8'"):
        as_module(sae, dtype="int8")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ConfigError, match=r"pip install 'torch>="):
        as_module(sae)
