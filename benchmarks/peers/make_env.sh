#!/bin/sh
# The peers' own environment: Python 3.11, torch, and all peers at the versions of requirements.txt.
#
#   sh benchmarks/peers/make_env.sh [folder, by default build/peers-venv]
#
# torch comes first and pinned: SAELens leaves its version open, and on Linux the usual wheel brings gigabytes of CUDA
# libraries. For the small CPU build put PyTorch's CPU index in PIP_EXTRA_INDEX_URL. The rest comes with --no-deps:
# requirements.txt holds what importing them imports; what they import and do not use here, stand_ins.py replaces. So
# one environment holds peers that ask for different versions of the same library (circuit-tracer: transformers before
# 4.58 and huggingface_hub before 1; SAEBench: datasets before 4).
set -e
here=$(dirname "$0")
folder=${1:-build/peers-venv}
python3.11 -m venv "$folder"
"$folder/bin/python" -m pip install --disable-pip-version-check torch==2.13.0
"$folder/bin/python" -m pip install --disable-pip-version-check --no-deps -r "$here/requirements.txt"
"$folder/bin/python" -W ignore "$here/stand_ins.py"
