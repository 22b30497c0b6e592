"""Files of OpenAI's sparse_autoencoder, with what its own code computes (benchmarks/peers/make_interop_fixtures.py)."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import saejax
from saejax.core.errors import DataError
from saejax.core.torch_file import read_torch, write_torch
from saejax.interop import dictionaries_below
from saejax.interop.assemble import coder_kind
from tests.interop import fixtures

CASES = fixtures.cases("openai")
BY_NAME = {case["case"]: case for case in CASES}


@pytest.mark.parametrize("case", CASES, ids=fixtures.name)
def test_its_dictionaries_do_here_what_they_do_there(case: dict[str, Any]) -> None:
    sae = fixtures.load(case)
    fixtures.check(sae, case)
    wanted = {"topk": ("layernorm_autoencoder", "topk")}.get(case["case"], ("autoencoder", "relu"))
    assert coder_kind(sae) == wanted
    assert sae.sites.reads == sae.sites.writes == ("unknown",)


def test_a_topk_is_of_layer_normalised_tokens() -> None:
    sae = fixtures.load(BY_NAME["topk"])
    assert "layer-normalised" in " ".join(sae.origin.notes)
    x = np.random.default_rng(0).normal(size=(8, 14)).astype(np.float32)
    latents = sae.encode(x)
    # Neither the mean nor the size of a token matters to its latents; both come back in the reconstruction.
    np.testing.assert_allclose(sae.encode(7 * x + 3), latents, rtol=0, atol=1e-4 * latents.max())
    np.testing.assert_allclose(sae.decode(latents, 7 * x + 3), 7 * sae.decode(latents, x) + 3, rtol=1e-4, atol=1e-3)
    with pytest.raises(DataError, match="give x"):
        sae.decode(latents)


def test_the_folders_of_its_storage_say_where_it_reads(tmp_path: Path) -> None:
    for location, hook in (
        ("mlp_post_act", "blocks.8.mlp_act"),
        ("resid_delta_mlp_v4", "blocks.8.mlp_out"),
        ("resid_post_attn_v5_32k", "blocks.8.resid_mid"),
        ("resid_post_mlp_v5_128k", "blocks.8.resid_post"),
    ):
        folder = tmp_path / "gpt2-small" / location / "autoencoders"
        folder.mkdir(parents=True)
        shutil.copy(fixtures.path(BY_NAME["relu"]), folder / "8.pt")
        sae = saejax.load(folder / "8.pt")
        assert (sae.origin.model, sae.sites.reads) == ("gpt2", (hook,))
    shutil.copy(fixtures.path(BY_NAME["relu"]), folder / "11.pt")
    assert dictionaries_below(folder) == [folder / "8.pt", folder / "11.pt"]
    with pytest.raises(DataError, match="holds 2 dictionaries"):
        saejax.load(folder)


def test_it_goes_on_to_saelens(tmp_path: Path) -> None:
    for case in CASES:
        sae = fixtures.load(case)
        sae.save(tmp_path / case["case"], format="saelens")
        fixtures.check(saejax.load(tmp_path / case["case"]), case)


@pytest.mark.parametrize(
    ("case", "change", "match"),
    [
        ("relu", {"encoder.weight": np.zeros(5, np.float32)}, "matrix"),
        ("relu", {"pre_bias": np.zeros(13, np.float32)}, "b_dec"),
        ("relu", {"decoder.weight": None}, "decoder.weight"),
        ("relu", {"decoder.bias": np.zeros(14, np.float32)}, "decoder.bias"),
        ("relu", {"latent_bias": np.full(44, np.nan, np.float32)}, "NaN"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_tensors_are_refused(case: str, change: dict[str, Any], match: str, tmp_path: Path) -> None:
    state = {k: v for k, v in read_torch(fixtures.path(BY_NAME[case])).items() if isinstance(v, np.ndarray)} | change
    write_torch(tmp_path / "8.pt", {name: value for name, value in state.items() if value is not None})
    with pytest.raises(DataError, match=match):
        saejax.load(tmp_path / "8.pt")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"activation": "Identity"}, "Identity"),
        ({"activation": "SoftPlus"}, "SoftPlus"),
        ({"activation": 7}, "activation is 7"),
        ({"activation_state_dict": {"k": 8, "postact_fn": "Identity"}}, "TopK with 'Identity'"),
        ({"activation_state_dict": {"k": 0, "postact_fn": "ReLU"}}, "whole number k"),
        ({"activation_state_dict": {"k": 99, "postact_fn": "ReLU"}}, "k = 99 of 44"),
    ],
    ids=str,
)
def test_activations_that_saejax_has_not_are_refused(change: dict[str, Any], match: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    state = torch.load(fixtures.path(BY_NAME["topk"]), weights_only=True)
    torch.save(dict(state) | change, tmp_path / "8.pt")
    with pytest.raises(DataError, match=match):
        saejax.load(tmp_path / "8.pt")
