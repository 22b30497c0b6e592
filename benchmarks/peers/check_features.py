"""circuit-tracer's own models on the feature files that saejax wrote, read as its page reads them.

    saejax export circuit-tracer runs/mlp0 runs/mlp1 out
    build/peers-venv/bin/python benchmarks/peers/check_features.py out

Every latent is fetched by the byte range that index.json.gz names (its last byte included, as the page asks for it),
unpacked and validated by circuit_tracer.frontend.feature_models.Model. Prints one line; exits with 1 where one is
refused or is not the latent that was asked for.
"""

import gzip
import itertools
import json
import sys
from pathlib import Path

import stand_ins  # noqa: F401 - before circuit_tracer
from circuit_tracer.frontend.feature_models import Model


def main(folder: Path) -> int:
    index = json.loads(gzip.decompress((folder / "index.json.gz").read_bytes()))
    read = examples = empty = 0
    for layer, entry in index.items():
        raw, offsets = (folder / entry["filename"]).read_bytes(), entry["offsets"]
        for latent, (start, end) in enumerate(itertools.pairwise(offsets)):
            if start == end:
                empty += 1
                continue
            sent = raw[start : end + 1]
            length = int.from_bytes(sent[:4], "little", signed=True)
            model = Model.model_validate_json(gzip.decompress(sent[4 : 4 + length]), strict=True)
            if (model.index, model.transcoder_id) != (latent, f"layer_{layer}"):
                print(f"latent {latent} of layer {layer} is {model.index} of {model.transcoder_id}")
                return 1
            if any(
                len(e.tokens) != len(e.tokens_acts_list) for part in model.examples_quantiles for e in part.examples
            ):
                print(f"latent {latent} of layer {layer} has not as many values as tokens")
                return 1
            read, examples = read + 1, examples + sum(len(part.examples) for part in model.examples_quantiles)
    print(f"circuit-tracer: {read:,} latents of {len(index)} layers, {examples:,} examples; {empty:,} without an entry")
    return 0 if read else 1


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(main(Path(sys.argv[1])))
