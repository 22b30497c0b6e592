"""Attribution graphs by circuit-tracer's own code: fixtures of tests/attribution/test_against_circuit_tracer.py.

    build/peers-venv/bin/python benchmarks/peers/make_attribution_fixtures.py [folder]

A random decoder as GPT-2 is one (3 layers of width 12, 31 tokens), six tokens of a prompt, and dictionaries on its
MLPs: skip_transcoder (one a layer, ReLU) and clt (JumpReLU). Each case is one .npz:

    model/<parameter>           as saejax names and lays them out; blocks are model/blocks.0.attn.W_Q and so on
    coder/<layer>/<parameter>   W_enc [D, F], b_enc, W_dec, b_dec, W_skip; of the clt W_enc [L, D, F], W_dec_0 ...
    tokens, features, activations, logits, probabilities, weights      the graph, as saejax's `Graph` has them
    nodes, edges, cumulative    of prune_graph at 0.8 and 0.98;  scores: replacement, completeness
    few/features, few/weights   a graph of the 12 features of most influence, four rows at a time

Everything is float32, as the peer computes.
"""

import pathlib
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import stand_ins  # noqa: F401 - before the peer
import torch
from circuit_tracer.attribution.attribute import attribute
from circuit_tracer.graph import compute_graph_scores, prune_graph
from circuit_tracer.replacement_model.replacement_model_transformerlens import TransformerLensReplacementModel
from circuit_tracer.transcoder.cross_layer_transcoder import CrossLayerTranscoder
from circuit_tracer.transcoder.single_layer_transcoder import SingleLayerTranscoder, TranscoderSet
from transformer_lens import HookedTransformerConfig

LAYERS, WIDTH, HEADS, MLP, VOCAB, CONTEXT, F = 3, 12, 3, 20, 31, 10, 18
TOKENS = (30, 4, 17, 4, 9, 22)
FIXTURES = pathlib.Path(__file__).parents[2] / "tests" / "fixtures" / "peers" / "attribution"
CPU = torch.device("cpu")

Arrays = dict[str, np.ndarray]


def random(rng: np.random.Generator, *shape: int, scale: float = 0.35) -> torch.Tensor:
    return torch.tensor(rng.normal(size=shape) * scale, dtype=torch.float32)


def transcoders(seed: int) -> tuple[Any, Arrays]:
    rng, layers, arrays = np.random.default_rng(seed), {}, {}
    for i in range(LAYERS):
        one = SingleLayerTranscoder(WIDTH, F, torch.nn.functional.relu, i, True, device=CPU, dtype=torch.float32)
        w = {"W_enc": random(rng, F, WIDTH), "W_dec": random(rng, F, WIDTH), "W_skip": random(rng, WIDTH, WIDTH)}
        w |= {"b_enc": random(rng, F) - 0.5, "b_dec": random(rng, WIDTH)}
        held = dict(one.named_parameters())
        with torch.no_grad():
            for name, tensor in w.items():
                held[name].copy_(tensor)
        layers[i] = one
        # compute_skip is x W_skip^T.
        ours = w | {"W_enc": w["W_enc"].T, "W_skip": w["W_skip"].T}
        arrays |= {f"coder/{i}/{name}": tensor.numpy() for name, tensor in ours.items()}
    return TranscoderSet(layers, "mlp.hook_in", "mlp.hook_out"), arrays


def cross_layer(seed: int) -> tuple[Any, Arrays]:
    rng = np.random.default_rng(seed)
    clt = CrossLayerTranscoder(
        LAYERS, F, WIDTH, "jump_relu", lazy_decoder=False, device=CPU, dtype=torch.float32,
        feature_input_hook="mlp.hook_in", feature_output_hook="mlp.hook_out",
    )  # fmt: skip
    w = {"W_enc": random(rng, LAYERS, F, WIDTH), "b_enc": random(rng, LAYERS, F), "b_dec": random(rng, LAYERS, WIDTH)}
    threshold = random(rng, LAYERS, F).abs() + 0.4
    rows = {f"W_dec.{i}": random(rng, F, LAYERS - i, WIDTH) for i in range(LAYERS)}
    held = dict(clt.named_parameters()) | dict(clt.named_buffers())
    with torch.no_grad():
        for name, tensor in (w | rows | {"activation_function.threshold": threshold[:, None]}).items():
            held[name].copy_(tensor)
    ours = w | {"W_enc": w["W_enc"].transpose(1, 2), "threshold": threshold}
    ours |= {name.replace(".", "_"): tensor for name, tensor in rows.items()}
    return clt, {f"coder/0/{name}": tensor.numpy() for name, tensor in ours.items()}


def model(dictionaries: Any, seed: int) -> tuple[Any, Arrays]:
    config = HookedTransformerConfig(
        n_layers=LAYERS, d_model=WIDTH, n_ctx=CONTEXT, d_head=WIDTH // HEADS, n_heads=HEADS, d_mlp=MLP, d_vocab=VOCAB,
        act_fn="gelu_new", normalization_type="LN", device="cpu", model_name="random",
    )  # fmt: skip
    lm = TransformerLensReplacementModel.from_config(config, dictionaries)
    rng = np.random.default_rng(seed)
    with torch.no_grad():
        for name, parameter in sorted(lm.named_parameters()):
            if not name.startswith("transcoders."):
                parameter.copy_(random(rng, *parameter.shape))
        lm.unembed.old_unembed.b_U.zero_()  # GPT-2 has none
    held = {name.replace(".old_mlp", "").replace(".old_unembed", ""): p for name, p in lm.named_parameters()}
    arrays = {"W_E": held["embed.W_E"], "W_pos": held["pos_embed.W_pos"], "W_U": held["unembed.W_U"]}
    arrays |= {f"ln_final.{w}": held[f"ln_final.{w}"] for w in "wb"}
    for i in range(LAYERS):
        mine = {name: held[f"blocks.{i}.{name}"] for name in (
            *(f"attn.{w}_{x}" for w in "Wb" for x in "QKVO"), *(f"mlp.{w}_{x}" for w in "Wb" for x in ("in", "out")),
            *(f"ln{n}.{w}" for n in (1, 2) for w in "wb"),
        )}  # fmt: skip
        mine |= {f"attn.W_{x}": mine[f"attn.W_{x}"].transpose(0, 1) for x in "QKV"}
        arrays |= {f"blocks.{i}.{name}": p for name, p in mine.items()}
    lm.tokenizer = SimpleNamespace(
        vocab_size=VOCAB, bos_token_id=VOCAB - 1, all_special_ids=[VOCAB - 1], decode=str, padding_side="right"
    )
    return lm, {f"model/{name}": p.detach().numpy() for name, p in arrays.items()}


def graph(lm: Any) -> Arrays:
    tokens = torch.tensor(TOKENS)
    whole = attribute(tokens, lm, batch_size=16)
    pruned = prune_graph(whole, 0.8, 0.98)
    few = attribute(tokens, lm, batch_size=4, max_feature_nodes=12, update_interval=1)
    return {
        "tokens": np.array(TOKENS, np.int32),
        "features": whole.active_features[whole.selected_features].numpy().astype(np.int32),
        "activations": whole.activation_values.numpy(),
        "logits": whole.logit_token_ids.numpy().astype(np.int32),
        "probabilities": whole.logit_probabilities.numpy(),
        "weights": whole.adjacency_matrix.numpy(),
        "nodes": pruned.node_mask.numpy(),
        "edges": pruned.edge_mask.numpy(),
        "cumulative": pruned.cumulative_scores.numpy(),
        "scores": np.array(compute_graph_scores(whole), np.float32),
        "few/features": few.active_features[few.selected_features].numpy().astype(np.int32),
        "few/weights": few.adjacency_matrix.numpy(),
    }


def main() -> None:
    folder = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else FIXTURES
    folder.mkdir(parents=True, exist_ok=True)
    for seed, (name, make) in enumerate({"skip_transcoder": transcoders, "clt": cross_layer}.items()):
        dictionaries, coder = make(seed)
        lm, parameters = model(dictionaries, 10 + seed)
        found = graph(lm)
        path = folder / f"{name}.npz"
        np.savez_compressed(path, **{k: np.ascontiguousarray(a) for k, a in (coder | parameters | found).items()})
        print(name, len(found["features"]), "features", found["scores"], f"{path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
