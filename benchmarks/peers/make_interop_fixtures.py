"""Small dictionaries in the peers' formats, written by the peers' own code, and what the peers compute from them.

    build/peers-venv/bin/python benchmarks/peers/make_interop_fixtures.py [--only=saelens,gemma_scope]
        [--openai=<checkout of openai/sparse_autoencoder>] [--llamascopium=<checkout of OpenMOSS/Language-Model-SAEs>]

tests/fixtures/interop/<format>/<case>/ holds the files as the peer writes them, and beside them expected.npz: x
[N, d_in] (crosscoders and CLTs: [N, layers, d_in]), latents and reconstructions as the peer's inference path has them.
index.json has a row a case: where it is, whose code wrote it, the hook points as the peer states them, topology,
sparsity at inference, and why saejax refuses it, if it does. Weights are in no special position (common.weights).
"""

import argparse
import importlib
import json
import warnings
from pathlib import Path

import stand_ins  # noqa: F401 - before the peers
import torch

FORMATS = {
    "saelens": "saelens",
    "dictionary_learning": "dictionary_learning_",
    "gemma_scope": "gemma_scope",
    "circuit_tracer": "circuit_tracer_",
    "sparsify": "sparsify_",
    "openai": "openai_",
    "llama_scope": "llama_scope",
    "qwen_scope": "qwen_scope",
}
ROOT = Path(__file__).parents[2] / "tests" / "fixtures" / "interop"


def main() -> None:
    from interop_cases.common import Fixtures

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(FORMATS), help="formats (default: all)")
    parser.add_argument("--openai", type=Path, help="a checkout; needed for openai")
    parser.add_argument("--llamascopium", type=Path, help="a checkout; needed for llama_scope")
    asked = parser.parse_args()
    only = asked.only.split(",")
    warnings.filterwarnings("ignore")
    ROOT.mkdir(parents=True, exist_ok=True)
    index = ROOT / "index.json"
    kept = [row for row in json.loads(index.read_text()) if row["format"] not in only] if index.exists() else []
    fixtures = Fixtures(ROOT, kept)
    for format in only:
        torch.manual_seed(0)
        before = len(fixtures.rows)
        module = importlib.import_module(f"interop_cases.{FORMATS[format]}")
        if hasattr(module, "checkout"):
            module.checkout = getattr(asked, {"llama_scope": "llamascopium"}.get(format, format))
        module.write(fixtures)
        size = sum(path.stat().st_size for path in (ROOT / format).rglob("*") if path.is_file())
        print(f"{format}: {len(fixtures.rows) - before} cases, {size / 1000:.0f} kB", flush=True)
    fixtures.rows.sort(key=lambda row: list(FORMATS).index(row["format"]))
    fixtures.write_index()


if __name__ == "__main__":
    main()
