"""delphi's latent cache: every non-zero latent of a scan, with the tokens. Out only. (eai-delphi 0.1.3: latents/)

    latents/<hook point>/{first}_{last}.safetensors      latents first to last, both included
        locations [N, 3]    (row, position, latent - first), sorted so; uint16 where that is enough, else uint32
        activations [N]     float16
        tokens [R, S]       int64, all rows, in each file
    latents/<hook point>/config.json                     CacheConfig and model_name
    explanations/<hook point>_latent<i>.txt              a JSON string, where there is an explanation

LatentDataset(raw_dir="latents") cuts the rows into windows of its own, so it returns the report's peaks in other
windows around them.
"""

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import safetensors.numpy

from saejax.core.errors import ConfigError, DataError
from saejax.core.progress import Progress

# delphi keeps what is farther than this from 0; half precision ends at the other.
_LEAST, _MOST = 1e-5, 65504.0
# Where its windows end, unless it is told another length.
WINDOW = 32


def write_delphi(
    folder: Path,
    tokens_RS: np.ndarray,
    entries: Mapping[str, np.ndarray],
    hook_points: Sequence[str],
    width: int,
    model: str,
    dataset: str,
    splits: int = 5,
    explanations: Mapping[int, str] | None = None,
) -> dict[str, int]:
    """Write the cache of a scan into a new folder.

    Args:
        tokens_RS: the rows that were scanned.
        entries: row, position, latent, value, [E] each: the non-zero latents. Latent f of group g is g width + f.
        hook_points: a name for each group of latents: one folder each.
        width: latents of a group.
        model: folder or hub id of the language model, from which delphi loads the tokenizer.
        dataset: a name for the text.
        splits: files for each group.
        explanations: {latent: text}, which delphi scores with its explainer "none".

    Returns:
        {hook point: entries written}.
    """
    if not 1 <= splits <= width:
        raise ConfigError(f"splits is {splits}; {width:,} latents can be in 1 to {width:,} files.")
    if entries["value"].size and (most := float(np.abs(entries["value"]).max())) > _MOST:
        raise DataError(f"A latent is {most:.4g}, and delphi's files hold at most {_MOST:,.0f}: scale the dictionary.")
    tokens = np.ascontiguousarray(tokens_RS, np.int64)
    config = {
        "dataset_repo": dataset,
        "dataset_split": "heldout",
        "dataset_name": "",
        "dataset_column": "text",
        "batch_size": 32,
        "cache_ctx_len": tokens.shape[1],
        "n_tokens": tokens.size,
        "n_splits": splits,
        "model_name": model,
    }
    large = np.abs(entries["value"]) > _LEAST
    row, position, latent, value = (entries[name][large] for name in ("row", "position", "latent", "value"))
    order = np.lexsort((latent, position, row))
    group, latent = np.divmod(latent[order], width)
    located = np.stack([row[order], position[order], latent], axis=1)
    half = value[order].astype(np.float16)
    bounds = np.linspace(0, width, splits + 1).astype(int)
    written = {}
    with Progress("delphi", len(half), unit="activations") as progress:
        for g, name in enumerate(hook_points):
            (folder / "latents" / name).mkdir(parents=True)
            (folder / "latents" / name / "config.json").write_text(json.dumps(config, indent=4) + "\n")
            for first, stop in itertools.pairwise(bounds.tolist()):
                of_file = (group == g) & (latent >= first) & (latent < stop)
                path = folder / "latents" / name / f"{first}_{stop - 1}.safetensors"
                locations = located[of_file] - [0, 0, first]
                arrays = {
                    "locations": locations.astype(np.uint16 if locations.max(initial=0) < 2**16 else np.uint32),
                    "activations": half[of_file],
                    "tokens": tokens,
                }
                path.write_bytes(
                    safetensors.numpy.save({key: np.ascontiguousarray(array) for key, array in arrays.items()})
                )
                progress.advance(int(of_file.sum()))
            written[name] = int((group == g).sum())
    if explanations:
        (folder / "explanations").mkdir()
    for number, text in (explanations or {}).items():
        path = folder / "explanations" / f"{hook_points[number // width]}_latent{number % width}.txt"
        path.write_text(json.dumps(text), encoding="utf-8")
    return written
