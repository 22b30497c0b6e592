#!/bin/sh
# SynthSAEBench-16k at its real size on one GPU: saejax's rows of the published table, one after the other.
#
#     [WORLD=FOLDER] [SAMPLES=200000000] sh benchmarks/truth_on_gpu.sh [arguments of benchmarks.quality.synthsaebench]
#
# WORLD is a world that SAELens saved. The published one, in an environment with sae-lens and internet:
#
#     python -c 'from sae_lens.synthetic import SyntheticModel
#     SyntheticModel.from_pretrained("decoderesearch/synth-sae-bench-16k-v1").save("world")'
#
# Without WORLD the same recipe is planted by saejax: statistics alike, other directions.
#
# What it decides: where batchtopk, matryoshka and jumprelu stand beside the published F1 of .732, .879 and .732; whether
# one more look of the encoder, and all of LISTA-Matryoshka, pay after 200 million samples as they do after one million.
#
# Seven trainings for each of three seeds. Each resumes, and what is finished is not run again: call it again. It has
# not run on a GPU yet.
set -e
cd "$(dirname "$0")/.."
exec "${PYTHON:-python3}" -m benchmarks.quality.synthsaebench --size=16k --world="${WORLD:-}" --samples="${SAMPLES:-0}" "$@"
