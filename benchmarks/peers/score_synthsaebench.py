"""SAELens's own evaluation of a dictionary on a world that SAELens saved: F1, MCC, explained variance and L0 as JSON.

build/peers-venv/bin/python benchmarks/peers/score_synthsaebench.py '{"world": "...", "dictionary": "..."}'
"""

import json
import sys

import torch
from sae_lens import SAE
from sae_lens.synthetic import SyntheticModel
from sae_lens.synthetic.evals import eval_sae_on_synthetic_data

SAMPLES = 102_400


def main() -> None:
    job = json.loads(sys.argv[1])
    torch.manual_seed(0)
    world = SyntheticModel.load_from_disk(job["world"])
    with torch.no_grad():
        found = eval_sae_on_synthetic_data(
            SAE.load_from_disk(job["dictionary"]), world.feature_dict, world.activation_generator, SAMPLES
        )
    figures = {"f1": found.classification.f1_score, "mcc": found.mcc, "fve": found.explained_variance}
    print(json.dumps({name: round(float(value), 5) for name, value in (figures | {"l0": found.sae_l0}).items()}))


if __name__ == "__main__":
    main()
