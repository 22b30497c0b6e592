"""delphi's own LatentDataset on the cache that saejax wrote: it must return the report's passages.

    saejax export delphi runs/quickstart out
    build/peers-venv/bin/python benchmarks/peers/check_delphi.py runs/quickstart out

Every passage of the report, the strongest and those by quantile, is looked for among the windows that delphi cuts
around the activations of its latent: the same tokens with the same activations to half precision, wherever passage and
window overlap. Prints one line, and exits with 1 where one is missing. With several layers each has its own folder.
"""

import functools
import json
import sqlite3
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import stand_ins  # noqa: F401 - before delphi
import torch
from delphi.config import ConstructorConfig, SamplerConfig
from delphi.latents import LatentDataset
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast


def main(run: Path, out: Path) -> int:
    table = sqlite3.connect(f"{(run / 'features.sqlite').absolute().as_uri()}?mode=ro", uri=True)
    ((head,),) = table.execute("SELECT value FROM about WHERE key = 'head'")
    content = json.loads(head)
    content["features"] = [json.loads(zlib.decompress(raw)) for (raw,) in table.execute("SELECT feature FROM pages")]
    content["vocab"] = [token.decode() for (token,) in table.execute("SELECT token FROM vocab ORDER BY number")]
    modules = sorted((path.name for path in (out / "latents").iterdir()), key=layer_of)
    width = content["d_sae"] // len(modules)
    entries = {feature["id"]: feature for feature in content["features"]}
    found = wanted = latents = 0
    missing = []
    for group, module in enumerate(modules):
        tokenizer = tokenizer_of(out / "latents" / module)
        string_of = functools.cache(lambda token, of=tokenizer: of.decode([token], skip_special_tokens=False))
        for record in records(out / "latents", module, tokenizer):
            entry = entries.get(group * width + record.latent.latent_index)
            latents += 1
            for passage in passages(entry) if entry else []:
                wanted += 1
                if any(holds(example, string_of, passage, content["vocab"]) for example in record.examples):
                    found += 1
                else:
                    missing.append((module, entry["id"], passage["position"]))
    fired = sum(feature["density"] > 0 for feature in content["features"])
    print(f"delphi: {found:,} of {wanted:,} passages of {latents:,} latents found; {fired:,} fired in the report")
    for where in missing[:5]:
        print("  missing: module {}, latent {}, position {}".format(*where))
    return 0 if found == wanted > 0 and latents >= fired else 1


def layer_of(name: str) -> list[int]:
    return [int(part) for part in name.split(".") if part.isdigit()]


def tokenizer_of(folder: Path) -> Any:
    model = Path(json.loads((folder / "config.json").read_text())["model_name"])
    if not (model / "tokenizer.json").is_file():
        return AutoTokenizer.from_pretrained(str(model))
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_file(str(model / "tokenizer.json")))


def records(raw: Path, module: str, tokenizer: Any) -> Iterator[Any]:
    """delphi's record of each latent that fires at all, with all its windows."""
    constructor = ConstructorConfig(min_examples=1, n_non_activating=0)
    sampler = SamplerConfig(n_examples_train=10**6, n_examples_test=0, train_type="top")
    return iter(LatentDataset(raw, sampler, constructor, tokenizer, modules=[module]))


def passages(entry: dict[str, Any]) -> list[dict[str, Any]]:
    return entry["examples"] + [example for part in entry["quantiles"] for example in part["examples"]]


def holds(example: Any, string_of: Callable[[int], str], passage: dict[str, Any], vocab: list[str]) -> bool:
    """Whether a window has the passage's peak, and agrees with it wherever they overlap."""
    peak, size = passage["peak"], len(passage["tokens"])
    value = passage["activations"][peak]
    close = torch.isclose(example.activations.float(), torch.tensor(float(value)), rtol=1e-3, atol=6e-4)
    for at in torch.nonzero(close).flatten().tolist():
        inside = range(max(0, at - peak), min(len(example.tokens), at - peak + size))
        theirs = [(string_of(int(example.tokens[i])), float(example.activations[i])) for i in inside]
        ours = [(vocab[passage["tokens"][i - at + peak]], passage["activations"][i - at + peak]) for i in inside]
        if all(a == c and abs(b - d) <= 1e-3 * abs(d) + 6e-4 for (a, b), (c, d) in zip(theirs, ours, strict=True)):
            return True
    return False


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
