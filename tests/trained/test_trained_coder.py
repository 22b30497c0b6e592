"""The trained coder: encoding in blocks and in other programs; a folder comes back bit for bit or not at all."""

import dataclasses
import functools
import hashlib
import json
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from tiny.covering import rest_in
from tiny.torches import needs_torch, torch

import saejax
from saejax.coders import SPARSITIES, TOPOLOGIES, CoderConfig, Sites, build
from saejax.core.errors import ConfigError, DataError
from saejax.store.statistics import Statistics
from saejax.trained import Origin, TrainedCoder, folded, unscaled
from saejax.trained import coder as module
from saejax.trained.sites import raw_scale

D, F, K = 6, 24, 4


@functools.cache
def made(topology: str = "autoencoder", sparsity: str = "topk") -> TrainedCoder:
    """A coder with random weights, folded from a scale of 2 (reads) and 4 (writes, where they are others)."""
    kind = TOPOLOGIES[topology]
    n = 3 if kind.stacked else 1
    reads = tuple(f"in{i}" for i in range(n))
    writes = reads if kind.tied else tuple(f"out{i}" for i in range(n))
    config = CoderConfig(topology=topology, sparsity=sparsity, d_sae=F, k=K, init="uniform", matmul_dtype="float32")
    coder = build(config, [D] * n, 10, [D] * n)
    with jax.disable_jit():
        params = coder.init(jax.random.key(1))
        stats = coder.init_stats() | ({"threshold": jnp.float32(0.1)} if sparsity == "batchtopk" else {})
        scales = (2.0,) * n
        sites = Sites(reads, writes, scales, scales if kind.tied else (4.0,) * n, kind.stacked)
        own, params = folded(coder, params, stats, sites)
    origin = Origin("gpt2", "abc", "00ff", {"source": "files"}, 1000, 10, "runs/x", "9.9")
    figures = {"fve": 0.9, "l0": 4.0}
    settings = {"coder": {"k": K, "prefixes": [0.5, 1.0]}, "seed": 3}
    numbers = {name: np.asarray(value) for name, value in params.items()}
    return TrainedCoder(own, numbers, unscaled(sites), origin, figures, settings)


def inputs(sae: TrainedCoder, n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(n, *sae.coder.topology.in_shape)).astype(np.float32)


# Every topology and every sparsity once; the other pairs in .ci/run.
ONCE = [("autoencoder", sparsity) for sparsity in SPARSITIES] + [(topology, "batchtopk") for topology in TOPOLOGIES]
ALL = rest_in("ci", [(topology, sparsity) for topology in TOPOLOGIES for sparsity in SPARSITIES], ONCE)


@pytest.mark.parametrize(("topology", "sparsity"), ALL)
def test_a_folder_gives_the_coder_back_bit_for_bit(topology: str, sparsity: str, tmp_path: Path) -> None:
    sae, x = made(topology, sparsity), inputs(made(topology, sparsity), 5)
    sae.save(tmp_path / "sae")
    again = saejax.load(tmp_path / "sae")
    assert again.params.keys() == sae.params.keys()
    for name, value in sae.params.items():
        assert again.params[name].dtype == np.float32 and again.params[name].tobytes() == value.tobytes(), name
    latents = sae.encode(x)
    np.testing.assert_array_equal(again.encode(x), latents)
    np.testing.assert_array_equal(again.decode(latents, x), sae.decode(latents, x))
    assert (again.sites, again.origin, again.figures) == (sae.sites, sae.origin, sae.figures)
    assert again.config.coder.prefixes == (0.5, 1.0) and again.finished and again.hook_point == sae.hook_point


@pytest.mark.parametrize(("topology", "sparsity"), ALL)
def test_sparse_latents_are_the_dense_ones(topology: str, sparsity: str) -> None:
    sae, x = (
        made(topology, sparsity),
        inputs(made(topology, sparsity), 6).reshape(2, 3, *made(topology).coder.topology.in_shape),
    )
    dense = sae.encode(x)
    assert dense.shape == (2, 3, *sae.coder.topology.latent_shape)
    values, indices = sae.encode_sparse(x)
    assert values.shape == indices.shape and values.shape[:2] == (2, 3)
    spread = np.zeros((6, sae.n_latents), np.float32)
    np.add.at(spread, (np.arange(6)[:, None], indices.reshape(6, -1)), values.reshape(6, -1))
    np.testing.assert_array_equal(spread.reshape(dense.shape), dense)
    if not sae.coder.sparsity.sparse:
        most = (dense.reshape(6, -1) != 0).sum(1).max()
        assert values.shape[-1] == max(1, most)
        assert (np.diff(np.abs(values), axis=-1) <= 0).all()
    largest, _ = sae.encode_sparse(x, k=2)
    np.testing.assert_array_equal(
        largest, np.sort(np.abs(dense.reshape(2, 3, -1)), axis=-1)[..., :-3:-1] * np.sign(largest)
    )


def test_blocks_change_nothing_and_kinds_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    sae, x = made("transcoder", "relu"), inputs(made("transcoder", "relu"), 37)
    whole = sae.encode(x)
    monkeypatch.setattr(module, "_BLOCK_TOKENS", 8)
    np.testing.assert_allclose(sae.encode(x), whole, rtol=1e-6, atol=1e-6)
    values, indices = sae.encode_sparse(x)
    np.testing.assert_allclose(np.sort(values)[:, ::-1], np.sort(whole)[:, ::-1][:, : values.shape[1]], atol=1e-6)
    assert isinstance(sae.encode(x), np.ndarray) and isinstance(indices, np.ndarray)
    assert isinstance(sae.encode(jnp.asarray(x)), jax.Array) and isinstance(sae.decode(jnp.asarray(whole)), jax.Array)
    assert sae.encode(x[:0]).shape == (0, F) and sae.encode_sparse(x[:0])[0].shape[0] == 0
    assert sae.encode(x[0]).shape == (F,) and sae.encode(x.tolist()).shape == (37, F)
    np.testing.assert_allclose(sae.encode(x.astype(np.float16)), sae.encode(x.astype(np.float16).astype(np.float32)))


@needs_torch
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16"])
def test_tensors_of_torch_give_what_the_same_numbers_give_in_numpy(kind: str) -> None:
    sae = made("skip_transcoder", "relu")
    x = torch.from_numpy(inputs(sae, 9)).to(getattr(torch, kind)).requires_grad_()
    numbers = x.detach().float().numpy()
    latents = sae.encode(numbers)
    np.testing.assert_array_equal(sae.encode(x), latents)
    np.testing.assert_array_equal(sae.encode(list(x)), latents)
    for one, other in zip(sae.encode_sparse(x, k=3), sae.encode_sparse(numbers, k=3), strict=True):
        np.testing.assert_array_equal(one, other)
    given = torch.tensor(latents).to(x.dtype).requires_grad_()
    np.testing.assert_array_equal(sae.decode(given, x), sae.decode(given.detach().float().numpy(), numbers))


def test_a_memory_map_is_read_block_by_block(tmp_path: Path) -> None:
    """A hundred times as many rows as a block has: the sparse result and one block are all that memory holds."""
    sae = made()
    rows = np.lib.format.open_memmap(tmp_path / "x.npy", "w+", np.float16, (200_000, D))
    rows[:] = np.random.default_rng(0).normal(size=(1000, D)).astype(np.float16).repeat(200, axis=0)
    sae.encode_sparse(rows[:10_000])  # compiled
    tracemalloc.start()
    values, _ = sae.encode_sparse(rows)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert values.shape == (200_000, K)
    assert peak < 4 * 2 * values.nbytes + (8 << 20)


def test_it_works_inside_jit_grad_and_vmap() -> None:
    sae, x = made("autoencoder", "jumprelu"), jnp.asarray(inputs(made("autoencoder", "jumprelu"), 4))
    fresh = dataclasses.replace(sae)  # first used inside a program
    np.testing.assert_allclose(jax.jit(fresh.encode)(x), sae.encode(x), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(fresh.encode(x), sae.encode(x))
    np.testing.assert_allclose(jax.vmap(fresh.encode)(x), sae.encode(x), rtol=1e-5, atol=1e-6)
    inside = jax.grad(lambda x: fresh.encode(x).sum())(x)
    outside = jax.grad(lambda x: sae.coder.encode(dict(sae.params), x).dense().sum())(x)
    np.testing.assert_allclose(inside, outside, rtol=1e-5, atol=1e-6)
    values, _ = jax.jit(lambda x: fresh.encode_sparse(x, k=3))(x)
    assert values.shape == (4, 3)
    with pytest.raises(DataError, match=r"give encode_sparse\(x, k=...\)"):
        jax.jit(fresh.encode_sparse)(x)


def test_bad_arrays_are_refused_in_one_line() -> None:
    sae = made("skip_transcoder", "relu")
    with pytest.raises(DataError, match=r"The last axes of activations must be \(6,\); the array is \(3, 5\)"):
        sae.encode(np.zeros((3, 5)))
    with pytest.raises(DataError, match=r"The last axes of latents must be \(24,\)"):
        sae.decode(np.zeros((3, 5)))
    with pytest.raises(DataError, match="decodes with its input: give x"):
        sae.decode(np.zeros((3, F)))
    with pytest.raises(DataError, match=r"of these latents: those are \(3,\), x is \(2,\)"):
        sae.decode(np.zeros((3, F)), np.zeros((2, D)))
    with pytest.raises(DataError, match="activations: dtype complex128 holds complex numbers"):
        sae.encode(np.zeros((3, D), complex))
    with pytest.raises(DataError, match="fold the scales of its sites in first"):
        dataclasses.replace(sae, sites=dataclasses.replace(sae.sites, read_scales=(2.0,)))


# --- folders ----------------------------------------------------------------------------------------------------


def described(folder: Path, **changes: Any) -> None:
    path = folder / "saejax.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def resealed(folder: Path, raw: bytes) -> None:
    (folder / "coder.safetensors").write_bytes(raw)
    described(folder, sha256=hashlib.sha256(raw).hexdigest())


def tensors(**changes: Any) -> bytes:
    params = dict(made().params) | changes
    return safetensors.numpy.save({name: value for name, value in params.items() if value is not None})


DAMAGE: dict[str, tuple[Any, str]] = {
    "a flipped bit": (
        lambda f: (f / "coder.safetensors").write_bytes(
            bytes([*(raw := (f / "coder.safetensors").read_bytes())[:-1], raw[-1] ^ 1])
        ),
        "is not the file that was saved",
    ),
    "cut short": (lambda f: (f / "coder.safetensors").write_bytes(b"\0" * 7), "is not the file that was saved"),
    "no weights": (lambda f: (f / "coder.safetensors").unlink(), "does not exist"),
    "torn json": (lambda f: (f / "saejax.json").write_text("{"), "saejax.json is damaged"),
    "no object": (lambda f: (f / "saejax.json").write_text("[]"), "does not describe a coder"),
    "newer": (lambda f: described(f, format={"name": "saejax-coder", "version": 2}), "newer version of saejax"),
    "foreign": (lambda f: described(f, format={"name": "other"}), "unknown format"),
    "unknown sparsity": (lambda f: described(f, sparsity={"name": "topkk", "k": 4}), "Did you mean 'topk'"),
    "unknown topology": (lambda f: described(f, topology="autoencodr"), "Did you mean 'autoencoder'"),
    "numbers of another": (lambda f: described(f, sparsity={"name": "topk", "bandwidth": 1}), "is damaged"),
    "k is a word": (lambda f: described(f, sparsity={"name": "topk", "k": "4"}), "is damaged"),
    "huge": (lambda f: described(f, d_sae=2**31 - 1), "is not the file|asks for"),
    "too wide": (lambda f: described(f, d_sae=2**40), "d_sae is"),
    "many sites": (lambda f: described(f, reads=["a"] * 5000, writes=["a"] * 5000), "sites is|one site"),
    "sites apart": (lambda f: described(f, writes=["a", "b"]), "is damaged"),
    "no origin": (lambda f: described(f, origin={"who": 1}), "is damaged"),
    "figures are words": (lambda f: described(f, figures={"fve": "good"}), "is damaged"),
    "settings are a list": (lambda f: described(f, settings=[1, 2]), "is damaged"),
    "deep": (lambda f: (f / "saejax.json").write_text("[" * 100_000), "is damaged"),
    "NaN": (lambda f: resealed(f, tensors(b_dec=np.full(D, np.nan, np.float32))), "b_dec: holds|b_dec holds"),
    "another dtype": (lambda f: resealed(f, tensors(b_dec=np.zeros(D, np.float64))), "for b_dec"),
    "another shape": (lambda f: resealed(f, tensors(b_dec=np.zeros(D + 1, np.float32))), "for b_dec"),
    "a tensor more": (lambda f: resealed(f, tensors(evil=np.zeros(1, np.float32))), "for evil"),
    "a tensor less": (lambda f: resealed(f, tensors(b_dec=None)), "for b_dec"),
    "no safetensors": (lambda f: resealed(f, b"\x80\x04N."), "no safetensors file"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_named(case: str, tmp_path: Path) -> None:
    made().save(tmp_path / "sae")
    damage, message = DAMAGE[case]
    damage(tmp_path / "sae")
    with pytest.raises(DataError, match=message) as caught:
        saejax.load(tmp_path / "sae")
    assert "\n" not in str(caught.value)


def test_saving_replaces_a_coder_as_a_whole_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "sae"
    made().save(folder)
    made("autoencoder", "relu").save(folder)
    assert saejax.load(folder).coder.sparsity == made("autoencoder", "relu").coder.sparsity
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "coder.safetensors", "saejax.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["sae"]
    other = tmp_path / "thesis"
    other.mkdir()
    (other / "chapter1.tex").write_text("x")
    with pytest.raises(DataError, match="holds something other than a saved coder"):
        made().save(other)
    assert [path.name for path in other.iterdir()] == ["chapter1.tex"]
    shutil.rmtree(folder)
    folder.write_text("a file")
    with pytest.raises(DataError, match="holds something other"):
        made().save(folder)


def test_the_card_says_what_it_is(tmp_path: Path) -> None:
    made().save(tmp_path / "sae")
    card = (tmp_path / "sae" / "README.md").read_text()
    for wanted in (
        "library_name: saejax",
        "| language model | gpt2 abc |",
        "| latents | 24 |",
        "0.9",
        "1,000",
        "sae.encode(x)",
    ):
        assert wanted in card


def test_paths_that_hold_no_coder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        saejax.load(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"is neither a run .* a saved coder"):
        saejax.load(tmp_path)
    made().save(tmp_path / "sae")
    with pytest.raises(DataError, match="holds one step"):
        saejax.load(tmp_path / "sae", step=3)


def test_scaled_rows_have_the_length_that_the_setting_names() -> None:
    x = np.random.default_rng(0).normal(3, 2, (50, 9)) * np.arange(1, 51)[:, None]
    lengths = np.linalg.norm(x, axis=1)
    statistics = Statistics(len(x), x.mean(0), lengths.mean(), np.square(lengths).mean())

    def scale(normalize: str) -> float:
        return raw_scale(CoderConfig(preset="topk", normalize=normalize), statistics)

    assert (scale("mean_norm") * lengths).mean() == pytest.approx(np.sqrt(9))
    assert np.square(scale("mean_square") * lengths).mean() == pytest.approx(1)
    assert scale("none") == 1


# --- PyTorch -----------------------------------------------------------------------------------------------------

OF_ONE_SITE = ("autoencoder", "transcoder", "skip_transcoder", "layernorm_autoencoder")
MODULES = [("autoencoder", sparsity) for sparsity in SPARSITIES] + [(topology, "topk") for topology in OF_ONE_SITE[1:]]


@needs_torch
@pytest.mark.parametrize(("topology", "sparsity"), MODULES)
def test_a_module_of_pytorch_computes_the_same(topology: str, sparsity: str) -> None:
    sae = made(topology, sparsity)
    if topology == "skip_transcoder":
        skip = np.random.default_rng(3).normal(size=(D, D)).astype(np.float32)
        sae = dataclasses.replace(sae, params={**sae.params, "W_skip": skip})
    x = inputs(sae, 40).reshape(4, 10, D)
    module = sae.to_torch(dtype="float64")
    latents = module.encode(torch.tensor(x, dtype=torch.float64))
    np.testing.assert_allclose(latents.detach().numpy(), sae.encode(x), atol=2e-5)
    y = module.decode(latents, torch.tensor(x, dtype=torch.float64))
    np.testing.assert_allclose(y.detach().numpy(), sae.decode(sae.encode(x), x), atol=5e-5)
    assert torch.equal(module(torch.tensor(x, dtype=torch.float64)), y)
    y.square().sum().backward()
    assert module.W_dec.grad.abs().sum() > 0 and dict(module.named_parameters()).keys() == sae.params.keys()


@needs_torch
def test_equal_latents_are_chosen_as_the_coder_chooses() -> None:
    sae = made()
    alike = {**sae.params, "W_enc": np.zeros((D, F), np.float32), "b_enc": np.ones(F, np.float32)}
    sae = dataclasses.replace(sae, params=alike)
    x = inputs(sae, 3)
    assert (sae.to_torch().encode(torch.tensor(x)).detach().numpy() > 0).tolist() == (sae.encode(x) > 0).tolist()


@needs_torch
@pytest.mark.parametrize(
    ("topology", "how", "message"),
    [
        ("crosscoder", {}, "this coder is a crosscoder"),
        ("autoencoder", {"dtype": "int8"}, "dtype is 'int8'; it must be one of float32"),
        ("autoencoder", {"device": "nowhere"}, "device 'nowhere' cannot be used here"),
    ],
)
def test_what_no_module_can_be_is_refused(topology: str, how: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        made(topology).to_torch(**how)


@needs_torch
def test_a_module_takes_torch_s_own_words() -> None:
    module = made().to_torch(torch.device("cpu"), torch.bfloat16)
    assert module.W_enc.dtype == torch.bfloat16
    with pytest.raises(ValueError, match=r"give decode\(latents, x\)"):
        made("skip_transcoder").to_torch().decode(torch.zeros(1, F))
