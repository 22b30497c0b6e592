"""SAELens's own training on a world that it saved, by the runner of SynthSAEBench: one dictionary in a folder.

    build/peers-venv/bin/python benchmarks/peers/train_synthsaebench.py '{"world": "build/truth/small", "out": "...",
        "family": "batchtopk", "k": 5, "d_in": 256, "d_sae": 256, "lr": 1e-3, "samples": 2048000, "seed": 0}'

Everything but rate, samples and seed is the recipe of decoderesearch/synth-sae-bench-experiments: batches of 1,024, a
constant rate, and for matryoshka inner widths of 1/32, 1/8 and 1/2 of the latents with its auxiliary loss.
"""

import json
import sys

import torch
from sae_lens import BatchTopKTrainingSAEConfig, LoggingConfig, MatryoshkaBatchTopKTrainingSAEConfig
from sae_lens.synthetic import SyntheticSAERunner, SyntheticSAERunnerConfig


def main() -> None:
    job = json.loads(sys.argv[1])
    sizes = {"k": job["k"], "d_in": job["d_in"], "d_sae": job["d_sae"]}
    if job["family"] == "matryoshka":
        widths = [job["d_sae"] // n for n in (32, 8, 2)]
        sae = MatryoshkaBatchTopKTrainingSAEConfig(**sizes, matryoshka_widths=widths, use_matryoshka_aux_loss=True)
    else:
        sae = BatchTopKTrainingSAEConfig(**sizes)
    torch.manual_seed(job["seed"])
    config = SyntheticSAERunnerConfig(
        synthetic_model=job["world"],
        sae=sae,
        lr=job["lr"],
        training_samples=job["samples"],
        batch_size=1024,
        output_path=job["out"],
        run_final_eval=False,
        logger=LoggingConfig(log_to_wandb=False),
    )
    SyntheticSAERunner(config).run()


if __name__ == "__main__":
    main()
