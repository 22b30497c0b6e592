"""What SAELens' own synthetic data and scores are, for tests/evals/test_truth_peers.py: tests/fixtures/peers/truth.

    build/peers-venv/bin/python benchmarks/peers/make_truth_fixtures.py          (sae-lens 6.54.12; 75 s of CPU)

worlds.json has each world's settings in saejax's names, and one .npz a world:

    base, probability [N]       before and after compensation; mean, std [N] magnitudes
    parent [N], exclusive [N]   of the hierarchy: -1 without a parent; of whose children at most one fires
    causes [N, R], own [N]      of the low-rank correlation: factor and diagonal; threshold [N]
    directions [N, D], bias [D]
    rate [N], size [N]          over SAMPLES samples: share that fires, mean magnitude where it does
    active [2]                  mean and variance of the number of features that fire
    together [N, N]             share of samples on which both fire
    product, product2 [N, N]    mean of a_i a_j, and of its square
    x_mean [D], x_cov [D, D]    of the activations

directions.npz: random rows, the same after SAELens' orthogonalisation, and the mean-max superposition of several seeds.
saved/                         the world "all" as SAELens saves it, and what it has after it is loaded again: loaded.npz
scores_<case>.npz: decoder, latents, true magnitudes, activations, reconstructions; scores.json: SAELens' figures.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sae_lens.synthetic import (
    FeatureDictionary,
    HierarchyConfig,
    SyntheticModel,
    SyntheticModelConfig,
    eval_sae_on_synthetic_data,
    orthogonalize_embeddings,
)
from sae_lens.synthetic import firing_magnitudes as sizes
from sae_lens.synthetic import firing_probabilities as firing
from sae_lens.synthetic.stats import compute_superposition_stats
from sae_lens.synthetic.synthetic_model import LowRankCorrelationConfig, OrthogonalizationConfig

OUT = Path(__file__).resolve().parents[2] / "tests" / "fixtures" / "peers" / "truth"
SAMPLES, PIECE = 200_000, 10_000

SMALL = {"n_features": 40, "d_in": 12, "orthogonal_steps": 0, "p_max": 0.4, "p_min": 0.02, "seed": 7}
TREES = {"roots": 4, "branching": 3, "depth": 2}
SPREAD = {"kind": "folded_normal", "centre": 0.5, "spread": 0.5}
LINEAR = {"kind": "linear", "first": 5.0, "last": 4.0}
WORLDS: dict[str, dict[str, Any]] = {
    "plain": {"exponent": 1.0},
    "linear": {"firing": "linear", "mean": {"kind": "exponential", "first": 2.0, "last": 0.5}},
    "constant": {"firing": "constant", "p_max": 0.1, "bias": 0.0, "mean": {"kind": "constant", "first": 3.0}},
    "folded": {"mean": LINEAR, "std": SPREAD},
    "weak": {"mean": {"kind": "constant", "first": 0.5}, "std": {"kind": "constant", "first": 1.0}},
    "trees": TREES,
    "exclusive": {**TREES, "exclusive": 0.5},
    "compensated": {**TREES, "exclusive": 1.0, "compensate": True, "p_max": 0.3},
    "scaled": {**TREES, "exclusive": 0.7, "scale_by_parent": True, "mean": LINEAR, "std": SPREAD},
    "correlated": {"rank": 3, "correlation": 0.3},
    "too correlated": {"rank": 5, "correlation": 0.6},
    "all": {
        **TREES,
        "exclusive": 1.0,
        "compensate": True,
        "scale_by_parent": True,
        "rank": 3,
        "correlation": 0.2,
        "mean": LINEAR,
        "std": SPREAD,
    },
    "ragged": {**TREES, "n_features": 29, "branching": 4, "depth": 3, "exclusive": 1.0},
}


def probability_config(w: dict[str, Any]) -> firing.FiringProbabilityConfig:
    kind, high, low = w.get("firing", "zipfian"), w["p_max"], w["p_min"]
    if kind == "linear":
        return firing.LinearFiringProbabilityConfig(high, low)
    if kind == "constant":
        return firing.ConstantFiringProbabilityConfig(high)
    return firing.ZipfianFiringProbabilityConfig(w.get("exponent", 0.5), high, low)


def size_config(of: dict[str, Any] | None, default: float) -> float | sizes.MagnitudeConfig:
    of = of or {"kind": "constant", "first": default}
    if of["kind"] == "constant":
        return float(of["first"])
    if of["kind"] == "folded_normal":
        return sizes.FoldedNormalMagnitudeConfig(of["centre"], of["spread"])
    kind = {"linear": sizes.LinearMagnitudeConfig, "exponential": sizes.ExponentialMagnitudeConfig}[of["kind"]]
    return kind(of["first"], of["last"])


def model_of(w: dict[str, Any]) -> SyntheticModel:
    """SAELens' model of the settings of one of our worlds."""
    hierarchy = HierarchyConfig(
        total_root_nodes=max(1, w["roots"]),
        branching_factor=w.get("branching", 2),
        max_depth=w.get("depth", 1),
        mutually_exclusive_portion=w.get("exclusive", 0.0),
        compensate_probabilities=w.get("compensate", False),
        scale_children_by_parent=w.get("scale_by_parent", False),
    )
    steps = w["orthogonal_steps"]
    return SyntheticModel(
        SyntheticModelConfig(
            num_features=w["n_features"],
            hidden_dim=w["d_in"],
            firing_probability=probability_config(w),
            hierarchy=hierarchy if w["roots"] else None,
            orthogonalization=OrthogonalizationConfig(steps, w.get("orthogonal_lr", 0.01)) if steps else None,
            correlation=LowRankCorrelationConfig(w["rank"], w["correlation"]) if w.get("rank") else None,
            mean_firing_magnitudes=size_config(w.get("mean"), 1.0),
            std_firing_magnitudes=size_config(w.get("std"), 0.0),
            bias=w.get("bias", 1.0),
            seed=w["seed"],
        )
    )


def tree_of(model: SyntheticModel, n: int) -> tuple[np.ndarray, np.ndarray]:
    parent, exclusive = np.full(n, -1), np.zeros(n, bool)

    def walk(node: Any) -> None:
        exclusive[node.feature_index] = node.mutually_exclusive_children
        for child in node.children:
            parent[child.feature_index] = node.feature_index
            walk(child)

    for root in model.hierarchy.roots if model.hierarchy else []:
        walk(root)
    return parent, exclusive


def statistics(model: SyntheticModel) -> dict[str, np.ndarray]:
    """Of SAMPLES samples, in float64."""
    torch.manual_seed(0)
    n = 0
    sums: dict[str, Any] = {}
    for _ in range(SAMPLES // PIECE):
        x, a = (t.double() for t in model.sample_with_features(PIECE))
        fires = (a > 0).double()
        count = fires.sum(1)
        piece = {
            "rate": fires.sum(0), "size": a.sum(0), "active": torch.stack([count.sum(), count.square().sum()]),
            "together": fires.T @ fires, "product": a.T @ a, "product2": a.square().T @ a.square(),
            "x_mean": x.sum(0), "x_cov": x.T @ x,
        }  # fmt: skip
        sums = {name: sums.get(name, 0) + value for name, value in piece.items()}
        n += PIECE
    s = {name: value.numpy() / n for name, value in sums.items()}
    s["size"] = s["size"] / np.maximum(s["rate"], 1e-12)
    s["active"][1] -= s["active"][0] ** 2
    s["x_cov"] -= np.outer(s["x_mean"], s["x_mean"])
    return s


def world_arrays(w: dict[str, Any]) -> dict[str, np.ndarray]:
    model = model_of(w)
    generator = model.activation_generator
    parent, exclusive = tree_of(model, w["n_features"])
    arrays = {
        "base": probability_config(w).generate(w["n_features"], seed=w["seed"]),
        "probability": generator.firing_probabilities,
        "mean": generator.mean_firing_magnitudes,
        "std": generator.std_firing_magnitudes,
        "directions": model.feature_dict.feature_vectors.detach(),
        "bias": model.feature_dict.bias.detach(),
    }
    if model.correlation_matrix is not None:
        arrays |= {
            "causes": model.correlation_matrix.correlation_factor,
            "own": model.correlation_matrix.correlation_diag,
            "threshold": generator.correlation_thresholds,
        }
    plain = {name: value.numpy() for name, value in arrays.items()}
    return plain | {"parent": parent, "exclusive": exclusive} | statistics(model)


class Stored:
    """Latents and reconstructions that are given, in SAELens' evaluation."""

    def __init__(self, case: dict[str, np.ndarray]) -> None:
        self.case, self.at = case, 0
        self.W_dec = torch.tensor(case["W_dec"])

    def eval(self) -> None: ...

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        rows = slice(self.at, self.at + len(x))
        self.at += len(x)
        return torch.tensor(self.case["z"][rows])

    def decode(self, z: torch.Tensor) -> torch.Tensor:
        return torch.tensor(self.case["x_hat"][self.at - len(z) : self.at])


class Samples:
    """True magnitudes that are given."""

    def __init__(self, a: np.ndarray) -> None:
        self.a, self.at = a, 0

    def sample(self, n: int) -> torch.Tensor:
        self.at += n
        return torch.tensor(self.a[self.at - n : self.at])


def score_case(name: str, seed: int) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """A dictionary that is near some features, far from others, and in parts dead."""
    rng, n_samples, width = np.random.default_rng(seed), 600, 16
    w = {**SMALL, **WORLDS["all"]}
    model = model_of(w)
    torch.manual_seed(seed)
    x, a = (t.numpy() for t in model.sample_with_features(n_samples))
    truth = model.feature_dict.feature_vectors.detach().numpy()
    noise = rng.normal(size=(width, w["d_in"])) * np.linspace(0, 0.8, width)[:, None]
    rows = truth[rng.permutation(20)[:width]] + noise
    rows[3] = -rows[3]
    rows[5] = rows[4] + 0.01
    bias = model.feature_dict.bias.detach().numpy()
    pre = (x - bias) @ rows.T
    z = np.where(pre > np.quantile(pre, 0.8, axis=1, keepdims=True), pre, 0)
    if name == "signed":
        z = np.where(np.abs(pre) > np.quantile(np.abs(pre), 0.8, axis=1, keepdims=True), pre, 0)
        rows[7] = 0
        z[:, 8] = 0
    case = {"W_dec": rows, "z": z, "a": a, "x": x, "x_hat": z @ rows * 0.6 + bias, "directions": truth}
    case = {key: value.astype(np.float32) for key, value in case.items()}
    given = FeatureDictionary(w["n_features"], w["d_in"], bias=1.0, initializer=None)
    given.feature_vectors.data = torch.tensor(truth)
    given.bias.data = torch.tensor(bias)
    found = eval_sae_on_synthetic_data(Stored(case), given, Samples(case["a"]), n_samples, batch_size=200)
    figures = found.to_dict()
    return case, figures | figures.pop("classification")


def main() -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    worlds = {name: {"roots": 0, **SMALL, **w} for name, w in WORLDS.items()}
    for name, w in worlds.items():
        arrays = world_arrays(w)
        # Indices as integers, all else with the digits that a comparison uses.
        kept = {k: v if v.dtype.kind in "ib" else v.astype(np.float32) for k, v in arrays.items()}
        np.savez_compressed(OUT / f"{name.replace(' ', '_')}.npz", **kept)
    (OUT / "worlds.json").write_text(json.dumps({"samples": SAMPLES, "worlds": worlds}, indent=1) + "\n")
    torch.manual_seed(0)
    start = torch.nn.functional.normalize(torch.randn(48, 16), dim=1)
    after = {f"after_{steps}": orthogonalize_embeddings(start, steps, 0.01).numpy() for steps in (1, 100)}
    crowd = [FeatureDictionary(128, 32, initializer=None, seed=seed) for seed in range(8)]
    apart = [FeatureDictionary(128, 32, seed=seed) for seed in range(8)]
    mean_max = {
        f"mean_max_{name}": np.array([compute_superposition_stats(one).mean_max_abs_cos_sim for one in some])
        for name, some in (("random", crowd), ("apart", apart))
    }
    first = {"one": apart[0].feature_vectors.detach().numpy()}
    np.savez_compressed(OUT / "directions.npz", start=start.numpy(), **after, **mean_max, **first)
    scores = {}
    for seed, name in enumerate(("positive", "signed")):
        case, scores[name] = score_case(name, seed)
        np.savez_compressed(OUT / f"scores_{name}.npz", **case)
    (OUT / "scores.json").write_text(json.dumps(scores, indent=1) + "\n")
    write_saved()


def write_saved() -> None:
    model_of({"roots": 0, **SMALL, **WORLDS["all"]}).save(OUT / "saved")
    loaded = SyntheticModel.load_from_disk(OUT / "saved")
    generator, tree = loaded.activation_generator, tree_of(loaded, SMALL["n_features"])
    arrays = {
        "directions": loaded.feature_dict.feature_vectors.detach(),
        "bias": loaded.feature_dict.bias.detach(),
        "probability": generator.firing_probabilities,
        "mean": generator.mean_firing_magnitudes,
        "std": generator.std_firing_magnitudes,
        "causes": loaded.correlation_matrix.correlation_factor,
    }
    trees = dict(zip(("parent", "exclusive"), tree, strict=True))
    np.savez_compressed(OUT / "saved" / "loaded.npz", **trees, **{name: a.numpy() for name, a in arrays.items()})


if __name__ == "__main__":
    main()
