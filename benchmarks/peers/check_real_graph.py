"""The attribution graph of a real decoder against circuit-tracer's own, on the same model, prompt and dictionaries.

    saejax study --config=smollm2:transcoders                      the dictionaries; see docs/real-model.md
    python benchmarks/peers/check_real_graph.py ours [--features=500 --prompt="The capital of France is"]
    build/peers-venv/bin/python benchmarks/peers/check_real_graph.py theirs

circuit-tracer wants a dictionary for every layer from 0 on, and all of one width. So the MLPs 20 to 25 of
SmolLM2-135M-Instruct have their trained transcoders, and the other 24 a random one of 64 latents, filled up with zeros
for circuit-tracer. What these miss is in the errors; what is compared are the weights. Both sides keep the k largest
pre-activations of a token, if above 0. Neither puts a bos in front, and the first token has no features and no errors.

`ours` writes to build/real_graph: the model as transformers reads it, dictionaries.npz ({block}.{parameter}, as
saejax lays them out), prompt.npz (tokens; logits [S, V] of saejax), settings.json, graph.npz (saejax's `Graph`).
`theirs` reads them, writes circuit_tracer.npz, prints the comparison, and exits with 1 where features or logits are not
the same or a weight is off by more than 1e-4 of the largest. --features=0 takes all that are active.
"""

import argparse
import itertools
import json
import pathlib
import shutil
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np

GGUF = "build/real/SmolLM2-135M-Instruct.Q4_1.gguf"
RUNS = "runs/smollm2-transcoders"
TRAINED, LATENTS, K = range(20, 26), 64, 8  # blocks with a trained transcoder; size of the random ones
LOGITS, CHUNK, RANK_EVERY = 10, 64, 4
FOLDER = pathlib.Path("build/real_graph")

Arrays = dict[str, np.ndarray]


# saejax


def ours(prompt: str, features: int) -> None:
    from saejax.attribution import AttributionConfig, attribute
    from saejax.attribution.influence import scores
    from saejax.lm import load_lm

    FOLDER.mkdir(parents=True, exist_ok=True)
    lm = load_lm(GGUF)
    write_model(lm)
    dictionaries = [transcoder(block, lm.config.d_model) for block in range(lm.config.n_layer)]
    held = {f"{i}.{name}": np.asarray(p) for i, one in enumerate(dictionaries) for name, p in one.params.items()}
    np.savez(FOLDER / "dictionaries.npz", **held)
    tokens = np.array(lm.tokenizer.encode_behind_bos([prompt])[0], np.int32)
    np.savez(FOLDER / "prompt.npz", tokens=tokens, logits=np.asarray(lm.run(tokens[None])[0])[0])
    config = AttributionConfig(max_features=features, logits=LOGITS, silent=1, chunk=CHUNK, rank_every=RANK_EVERY)
    graph = attribute(lm, dictionaries, tokens, config)
    graph.save(FOLDER / "graph.npz")
    ks = [one.coder.sparsity.kept for one in dictionaries]
    settings = {"features": features, "ks": ks, "scores": list(map(float, scores(graph)))}
    (FOLDER / "settings.json").write_text(json.dumps(settings))
    print(f"saejax: {tokens.tolist()}, {graph.n_features} features, {len(graph.logits)} logits")


def write_model(lm: Any) -> None:
    from saejax.core.files import read_json
    from saejax.lm.checkpoint import write
    from saejax.lm.gguf.folder import as_folder

    of_gguf, model = as_folder(pathlib.Path(GGUF)), FOLDER / "model"
    model.mkdir(exist_ok=True)
    write(model, read_json(of_gguf / "config.json"), lm.params)
    for file in of_gguf.glob("tokenizer*.json"):
        shutil.copy(file, model)


def transcoder(block: int, width: int) -> Any:
    """The trained one of the block; or one with random rows of norm 1."""
    import saejax
    from saejax.coders import CoderConfig, Sites, build
    from saejax.trained import TrainedCoder

    if block in TRAINED:
        return saejax.load(f"{RUNS}/blocks.{block}.mlp_in")
    config = CoderConfig("transcoder", d_sae=LATENTS, k=K, matmul_dtype="float32", encoder_centre=False)
    coder = build(config, [width], 10, [width])
    rng = np.random.default_rng(block)
    shapes = {"W_enc": (width, LATENTS), "b_enc": (LATENTS,), "W_dec": (LATENTS, width), "b_dec": (width,)}
    random = {name: (rng.normal(size=shape) / width**0.5).astype(np.float32) for name, shape in shapes.items()}
    coder, params = coder.inference(random, coder.init_stats())
    sites = Sites((f"blocks.{block}.mlp_in",), (f"blocks.{block}.mlp_out",), (1.0,), (1.0,), stacked=False)
    return TrainedCoder(coder, {name: np.asarray(p) for name, p in params.items()}, sites)


# circuit-tracer


def theirs() -> None:
    import stand_ins  # noqa: F401 - before the peer
    import torch
    from circuit_tracer.attribution.attribute import attribute
    from circuit_tracer.graph import compute_graph_scores
    from transformers import LlamaForCausalLM

    settings, prompt = json.loads((FOLDER / "settings.json").read_text()), arrays_of("prompt.npz")
    tokens = torch.tensor(prompt["tokens"], dtype=torch.long)
    llama = LlamaForCausalLM.from_pretrained(FOLDER / "model", dtype=torch.float32)
    lm = replacement_model(llama, dictionaries(settings["ks"], llama.config.hidden_size), int(tokens[0]))
    with torch.no_grad():
        logits = {"transformers": llama(tokens[None]).logits[0], "TransformerLens": lm(tokens[None])[0]}
    for name, found in logits.items():
        print(f"logits of saejax and {name} differ by {np.abs(prompt['logits'] - found.numpy()).max():.1e} at most")
    how = {"max_n_logits": LOGITS, "desired_logit_prob": 0.95, "batch_size": CHUNK, "update_interval": RANK_EVERY}
    graph = attribute(tokens, lm, max_feature_nodes=settings["features"] or None, **how)
    assert graph.input_tokens.tolist() == tokens.tolist()  # no bos was put in front
    weights = graph.adjacency_matrix.numpy()
    found = {
        "features": graph.active_features[graph.selected_features].numpy(),
        "activations": graph.activation_values[graph.selected_features].numpy(),
        "logits": graph.logit_token_ids.numpy(),
        "probabilities": graph.logit_probabilities.numpy(),
        "weights": np.delete(weights, np.s_[len(graph.selected_features) : -len(graph.logit_targets)], axis=0),
    }
    np.savez(FOLDER / "circuit_tracer.npz", **found)
    print(f"circuit-tracer: {len(graph.active_features):,} features are active")
    for name, each in (("saejax", settings["scores"]), ("circuit-tracer", compute_graph_scores(graph))):
        print(f"{name}: replacement score {each[0]:.6f}, completeness score {each[1]:.6f}")
    compare(arrays_of("graph.npz"), found, len(lm.blocks) * len(tokens), len(tokens))


def arrays_of(name: str) -> Arrays:
    with np.load(FOLDER / name) as file:
        return {key: file[key] for key in file.files}


def dictionaries(ks: list[int], width: int) -> Any:
    import torch
    from circuit_tracer.transcoder.activation_functions import TopK
    from circuit_tracer.transcoder.single_layer_transcoder import SingleLayerTranscoder, TranscoderSet

    held, layers, cpu = arrays_of("dictionaries.npz"), {}, torch.device("cpu")
    d_sae = max(p.shape[0] for name, p in held.items() if name.endswith("b_enc"))
    for i, k in enumerate(ks):
        active = torch.nn.Sequential(TopK(k), torch.nn.ReLU())
        one = layers[i] = SingleLayerTranscoder(width, d_sae, active, i, device=cpu, dtype=torch.float32)
        with torch.no_grad():
            for name, parameter in one.named_parameters():
                value = torch.tensor(held[f"{i}.{name}"])
                value = value.T if name == "W_enc" else value
                parameter[: len(value)] = value  # what is left stays 0
    return TranscoderSet(layers, "mlp.hook_in", "mlp.hook_out")


def replacement_model(llama: Any, transcoders: Any, first: int) -> Any:
    """The model, with a tokenizer to which the first token is a special one: else a bos would be put in front."""
    from circuit_tracer.replacement_model.replacement_model_transformerlens import TransformerLensReplacementModel
    from transformer_lens import HookedTransformer, HookedTransformerConfig
    from transformer_lens.pretrained.weight_conversions.llama import convert_llama_weights

    c = llama.config
    config = HookedTransformerConfig(
        n_layers=c.num_hidden_layers, d_model=c.hidden_size, n_ctx=64, d_head=c.head_dim, n_heads=c.num_attention_heads,
        n_key_value_heads=c.num_key_value_heads, d_mlp=c.intermediate_size, d_vocab=c.vocab_size, act_fn=c.hidden_act,
        gated_mlp=True, normalization_type="RMS", final_rms=True, eps=c.rms_norm_eps, rotary_dim=c.head_dim,
        positional_embedding_type="rotary", rotary_base=c.rope_parameters["rope_theta"], rotary_adjacent_pairs=False,
        device="cpu", model_name="smollm2",
    )  # fmt: skip
    plain = HookedTransformer(config)
    missing = plain.load_state_dict(convert_llama_weights(llama, config), strict=False).missing_keys
    assert all(name.endswith((".mask", ".IGNORE", ".rotary_sin", ".rotary_cos")) for name in missing), missing
    lm = TransformerLensReplacementModel(config)
    lm.load_state_dict(plain.state_dict())
    lm._configure_replacement_model(transcoders)
    lm.tokenizer = SimpleNamespace(
        vocab_size=c.vocab_size, bos_token_id=first, all_special_ids=[first], decode=str, padding_side="right"
    )
    return lm


# both


def compare(mine: Arrays, peer: Arrays, n_errors: int, n_tokens: int) -> None:
    sizes = {"features": len(peer["features"]), "errors": n_errors, "tokens": n_tokens, "logits": len(peer["logits"])}
    print("nodes: " + ", ".join(f"{size:,} {kind}" for kind, size in sizes.items()))
    trained = sum(layer in TRAINED for layer in peer["features"][:, 0])
    print(f"{trained:,} of the features are of trained transcoders")
    for name in ("features", "logits"):
        if not np.array_equal(mine[name], peer[name]):
            sys.exit(f"{name}: {len(mine[name]):,} and {len(peer[name]):,}, NOT the same")
        print(f"{name}: the same {len(mine[name]):,} in the same order")
    for name in ("activations", "probabilities"):
        print(f"{name}: differ by {np.abs(mine[name] - peer[name]).max() / peer[name].max():.1e} of the largest")
    a, b = mine["weights"], peer["weights"]
    away, largest = np.abs(a - b), np.abs(b).max()
    print(f"weights {b.shape}: {(b != 0).sum():,} not 0, the largest {largest:.4g}")
    print(f"largest difference / largest weight: {away.max() / largest:.1e}")
    print(f"largest difference of a row / its largest weight: {(away.max(1) / np.abs(b).max(1)).max():.1e}")
    kept = np.abs(b) > 1e-4 * np.abs(b).max(1, keepdims=True)
    relative = away[kept] / np.abs(b[kept])
    median, most, worst = (f"{np.quantile(relative, share):.1e}" for share in (0.5, 0.999, 1))
    print(f"relative difference of the {kept.sum():,} weights above 1e-4 of their row's largest: median {median}, "
          f"99.9 % below {most}, all below {worst}")  # fmt: skip
    ends = list(itertools.accumulate(sizes.values(), initial=0))
    columns = {kind: np.s_[start:end] for kind, start, end in zip(sizes, ends, ends[1:], strict=False)}
    rows = {"features": np.s_[: sizes["features"]], "logits": np.s_[sizes["features"] :]}
    for (target, r), source in itertools.product(rows.items(), ("features", "errors", "tokens")):
        top = np.abs(b[r, columns[source]]).max()
        print(f"{source} -> {target}: {away[r, columns[source]].max() / top:.1e} of their largest, {top:.4g}")
    if away.max() > 1e-4 * largest:
        sys.exit("The weights are NOT the same.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("side", choices=("ours", "theirs"))
    parser.add_argument("--features", type=int, default=500, help="of the graph at most; 0: all (500)")
    parser.add_argument("--prompt", default="The capital of France is", help="64 tokens at most")
    given = parser.parse_args()
    if given.side == "ours":
        ours(given.prompt, given.features)
    else:
        theirs()


if __name__ == "__main__":
    main()
