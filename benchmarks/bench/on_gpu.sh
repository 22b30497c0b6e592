#!/bin/sh
# The benchmark on a borrowed GPU: one command, ten minutes.
#
# Before, on a machine with internet, from the repository's root. It downloads wheels for Python 3.12 on x86-64 into
# .whl (45 MB): what the GPU machine's Python lacks beside jax, flax, optax, orbax, torch and transformers.
#
#     sh benchmarks/bench/on_gpu.sh wheels
#
# There, with this checkout and .whl beside it, and a Python that has jax and torch with CUDA:
#
#     OUT=results sh benchmarks/bench/on_gpu.sh [seconds, by default 540] [arguments of python -m benchmarks.bench]
#
# A row takes about two minutes there, most of it compilation (an H100 with 16 cores, 2026-11-26).
#
# First the quick rows, three rounds each, then all others as long as time is left. $OUT/results.json is written after
# every row, $OUT/results.md at the end; $OUT/log holds what was printed. Missing peers are left out, and the log says why.
set -e
cd "$(dirname "$0")/../.."

if [ "$1" = wheels ]; then
  mkdir -p .whl
  : "${PYTHON:=python3}"
  # saejax's own wheel says its version; its code is read from the checkout.
  "$PYTHON" -m pip wheel -q --no-deps -w .whl .
  "$PYTHON" -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
    --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 -d .whl \
    ml-collections==1.1.0 sae-lens==6.54.12 transformer-lens==3.9.0 datasets==5.2.0 wandb==0.31.0 \
    pydantic==2.14.3 pydantic-core==2.50.4 annotated-types==0.8.0 typing-inspection==0.4.5 \
    simple-parsing==0.1.9 docstring-parser==0.18.0 better-abc==0.0.3 dill==0.4.1 multiprocess==0.70.19 \
    platformdirs sniffio pytz zstandard httpx2 httpcore2 truststore googleapis-common-protos \
    opentelemetry-api opentelemetry-sdk opentelemetry-proto opentelemetry-semantic-conventions \
    opentelemetry-exporter-otlp-proto-http opentelemetry-exporter-otlp-proto-common \
    opentelemetry-exporter-otlp-common opentelemetry-exporter-http-transport
  "$PYTHON" -m pip wheel -q --no-deps -w .whl dictionary-learning==0.1.0
  du -sh .whl
  exit
fi

: "${PYTHON:=python3}"
: "${OUT:=build/gpu}"
seconds=540
case "$1" in [0-9]*) seconds=$1; shift ;; esac
mkdir -p "$OUT"
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
started=$(date +%s)
if ls .whl/*.whl >/dev/null 2>&1; then
  "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$site" .whl/*.whl
  # Beside what is there, not before it: nothing that is installed is replaced.
  export PYTHONPATH="$PWD:$site"
else
  export PYTHONPATH="$PWD"
fi
export PYTHONUNBUFFERED=1
# Each contestant is a process, and JAX would take three quarters of the memory for each.
export XLA_PYTHON_CLIENT_PREALLOCATE=false

bench() {
  left=$((seconds - $(date +%s) + started))
  [ "$left" -gt 30 ] || return 0
  # As Ctrl-C: what was measured is kept, and the page is written.
  timeout --signal=INT --kill-after=20 "$left" \
    "$PYTHON" -m benchmarks.bench --peers="$(command -v "$PYTHON")" --output="$OUT/results.json" "$@" 2>&1 | tee -a "$OUT/log"
}

{ nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv || true; } 2>&1 | tee "$OUT/log"
"$PYTHON" -c 'import jax; print(jax.__version__, jax.devices())' 2>&1 | tee -a "$OUT/log"
if [ $# -gt 0 ]; then
  bench "$@"
else
  bench --quick
  done_already=$("$PYTHON" -c 'import json,sys; print(" ".join(r["row"] for r in json.load(open(sys.argv[1]))["results"]))' "$OUT/results.json")
  others=$("$PYTHON" -m benchmarks.bench --list | awk -v "done=$done_already" '
    BEGIN { n = split(done, names, " "); for (i = 1; i <= n; i++) seen[names[i]] = 1 }
    !($2 in seen) { printf "%s%s", comma, $2; comma = "," }')
  [ -z "$others" ] || bench --rounds=3 --rows="$others"
fi
