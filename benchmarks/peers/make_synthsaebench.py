"""SynthSAEBench's world by its authors' recipe and SAELens' own generator: build/truth/<name>, for truth.source.

    build/peers-venv/bin/python benchmarks/peers/make_synthsaebench.py 16k|small

    saejax truth --config=truth:saelens --config.truth.source=build/truth/small

The recipe is that of decoderesearch/synth-sae-bench-experiments (seed 42). The published world was drawn on a GPU,
which has other random numbers: 16k made here has the same trees and mean magnitudes, and other directions and causes.
`small` is the recipe at a sixteenth of the features and a third of the width, as truth:synthsaebench_small.
"""

import sys
from pathlib import Path

from sae_lens.synthetic import HierarchyConfig, SyntheticModel, SyntheticModelConfig
from sae_lens.synthetic import firing_magnitudes as sizes
from sae_lens.synthetic import firing_probabilities as firing
from sae_lens.synthetic.synthetic_model import LowRankCorrelationConfig, OrthogonalizationConfig

OUT = Path(__file__).resolve().parents[2] / "build" / "truth"
# Features, width, roots.
SIZES = {"16k": (16_384, 768, 128), "small": (1024, 256, 8)}


def model_of(n_features: int, d_in: int, roots: int) -> SyntheticModel:
    trees = HierarchyConfig(
        total_root_nodes=roots,
        branching_factor=4,
        max_depth=3,
        mutually_exclusive_portion=1.0,
        mutually_exclusive_min_depth=0,
        compensate_probabilities=True,
        scale_children_by_parent=True,
    )
    config = SyntheticModelConfig(
        num_features=n_features,
        hidden_dim=d_in,
        firing_probability=firing.ZipfianFiringProbabilityConfig(exponent=0.5, max_prob=0.4, min_prob=5e-4),
        hierarchy=trees,
        orthogonalization=OrthogonalizationConfig(num_steps=100, lr=3e-4),
        correlation=LowRankCorrelationConfig(rank=25, correlation_scale=0.1),
        mean_firing_magnitudes=sizes.LinearMagnitudeConfig(start=5.0, end=4.0),
        std_firing_magnitudes=sizes.FoldedNormalMagnitudeConfig(mean=0.5, std=0.5),
        bias=0.5,
        seed=42,
    )
    return SyntheticModel(config)


def main() -> None:
    if len(sys.argv) != 2 or sys.argv[1] not in SIZES:
        sys.exit(f"error: give one of {', '.join(SIZES)}.")
    name = sys.argv[1]
    model_of(*SIZES[name]).save(OUT / name)
    print(OUT / name)


if __name__ == "__main__":
    main()
