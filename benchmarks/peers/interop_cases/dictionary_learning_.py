"""dictionary_learning: trainer_i/{ae.pt, config.json} as its trainSAE writes them, read by its load_dictionary."""

import copy
import json

import torch
from dictionary_learning import trainers
from dictionary_learning.dictionary import AutoEncoder, AutoEncoderNew
from dictionary_learning.trainers import standard
from dictionary_learning.trainers.matryoshka_batch_top_k import MatryoshkaBatchTopKTrainer
from dictionary_learning.utils import load_dictionary
from stand_ins import version

from .common import D_IN, D_SAE, Fixtures, K, few_positive, fill, inputs, weights

PEER = f"dictionary-learning=={version('dictionary-learning')}"
LAYER, LM = 3, "EleutherAI/pythia-70m-deduped"
COMMON = {"steps": 10_000, "activation_dim": D_IN, "dict_size": D_SAE, "layer": LAYER, "lm_name": LM, "device": "cpu"}
COMMON["submodule_name"] = f"resid_post_layer_{LAYER}"
GROUPS = {"group_fractions": [0.25, 0.25, 0.5]}

# {case: (trainer, its settings, sparsity at inference)}
CASES = {
    "standard": (trainers.StandardTrainer, {}, "relu"),
    "standard_april": (standard.StandardTrainerAprilUpdate, {}, "relu"),
    "p_anneal": (trainers.PAnnealTrainer, {"sparsity_function": "Lp^p"}, "relu"),
    "gated": (trainers.GatedSAETrainer, {}, "gated"),
    "topk": (trainers.TopKTrainer, {"k": K}, "topk"),
    "batchtopk": (trainers.BatchTopKTrainer, {"k": K}, "jumprelu"),
    "batchtopk_threshold_unset": (trainers.BatchTopKTrainer, {"k": K}, "jumprelu"),
    "matryoshka": (MatryoshkaBatchTopKTrainer, {"k": K, **GROUPS}, "jumprelu"),
    "jumprelu": (trainers.JumpReluTrainer, {}, "jumprelu"),
}


def _tensors(ae: torch.nn.Module, w: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Our tensors under dictionary_learning's names, of those that the class has."""
    named = w | {
        "encoder.weight": w["W_enc"].T,
        "encoder.bias": w["b_enc"],
        "decoder.weight": w["W_dec"].T,
        "decoder.bias": w["b_dec"],
        "bias": w["b_dec"],
        "decoder_bias": w["b_dec"],
        "gate_bias": w["b_enc"],
        "mag_bias": w["b_mag"],
    }
    return {name: named[name] for name, _ in ae.named_parameters()}


def write(to: Fixtures) -> None:
    for seed, (case, (trainer, settings, sparsity)) in enumerate(CASES.items(), start=100):
        trained = trainer(**COMMON, **settings)
        w = weights(seed)
        if case != "standard_april":  # every other trainer keeps decoder rows at length 1
            w["W_dec"] /= w["W_dec"].norm(dim=1, keepdim=True)
        fill(trained.ae, _tensors(trained.ae, w))
        if case in ("batchtopk", "matryoshka", "topk"):
            trained.ae.threshold.fill_(0.6)
        x = inputs(seed, centre=w["b_dec"])
        if sparsity == "topk":
            few_positive((x - w["b_dec"]) @ w["W_enc"] + w["b_enc"])
        _save(to, case, trained.ae, trained.config, x, sparsity)
    _new(to)
    _odd(to)


def _save(to: Fixtures, case: str, ae: torch.nn.Module, config: dict, x: torch.Tensor, sparsity: str) -> None:
    """As the end of dictionary_learning's trainSAE."""
    folder = to.folder("dictionary_learning", case, "trainer_0")
    torch.save({name: value.cpu() for name, value in ae.state_dict().items()}, folder / "ae.pt")
    buffer = {"d_submodule": D_IN, "io": "out", "n_ctxs": 100, "ctx_len": 64, "refresh_batch_size": 8, "device": "cpu"}
    (folder / "config.json").write_text(json.dumps({"trainer": config, "buffer": buffer}, indent=4))
    loaded, note = load_dictionary(str(folder), "cpu")[0], None
    with torch.no_grad():
        latents = loaded.encode(x)
        arrays = {"x": x, "latents": latents, "reconstructions": loaded.decode(latents)}
        if isinstance(loaded, AutoEncoder):
            arrays["latents_as_trained"] = ae.encode(x)
            note = "its loader folds decoder norms to 1; latents_as_trained are from the file's own weights"
    hooks = [f"resid_post_layer_{LAYER}"]
    to.add(folder, PEER, topology="autoencoder", sparsity=sparsity, hooks_in=hooks, model=LM, arrays=arrays, note=note)


def _new(to: Fixtures) -> None:
    """AutoEncoderNew, which no trainer of 0.1.0 makes and its loader reads: the encoder sees x itself."""
    ae, w = AutoEncoderNew(D_IN, D_SAE), weights(120)
    fill(ae, _tensors(ae, w))
    config = copy.copy(standard.StandardTrainerAprilUpdate(**COMMON).config) | {"dict_class": "AutoEncoderNew"}
    _save(to, "standard_new", ae, config, inputs(120), "relu")


def _odd(to: Fixtures) -> None:
    """A .pt whose pickle would call os.system, and one in the form before zip files: both refused, neither executed."""

    class Calls:
        def __reduce__(self) -> tuple:
            import os

            return os.system, ("echo this must never run",)

    ok = trainers.TopKTrainer(**COMMON, k=K)
    state = {name: value.cpu() for name, value in ok.ae.state_dict().items()}
    pickled = "the pickle calls a function that no weights file needs"
    for case, content, zipped, why in (
        ("pickle_that_calls", state | {"extra": Calls()}, True, pickled),
        ("before_zip", state, False, "a .pt of before PyTorch 1.6 is one bare pickle, no zip file"),
        ("before_zip_that_calls", state | {"extra": Calls()}, False, pickled),
    ):
        folder = to.folder("dictionary_learning", case, "trainer_0")
        torch.save(content, folder / "ae.pt", _use_new_zipfile_serialization=zipped)
        (folder / "config.json").write_text(json.dumps({"trainer": ok.config}, indent=4))
        to.add(
            folder, PEER, topology="autoencoder", sparsity="topk", hooks_in=["resid_post_layer_3"], model=LM, refuse=why
        )
