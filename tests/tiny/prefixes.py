"""What the tests of prefixes share: small experiments, and folders of small random models."""

import json
import shutil
from pathlib import Path
from typing import Any

from saejax.app import experiments
from saejax.app.experiment import Experiment, experiment
from saejax.lm import checkpoint
from tiny.decoders import random_params

RECALL = Path(checkpoint.__file__).parent / "recall"


def small_prefix(folder: Path, name: str = "prefix", **sections: dict[str, Any]) -> Experiment:
    """The quickstart with few steps and a narrow encoder."""
    c = experiments.shipped("latentwire_quickstart")
    c.name, c.runs_dir, c.parallel.mesh = name, str(folder), (1, 1)
    c.prefix.update(samples=64, heldout=20, latents=4, d_latent=16, d_encoder=16, n_pool=1, eval_rows=10, timed=2)
    c.train.update(tokens=12 * 8, batch_size=8, checkpoint_every=4, validate_every=6, log_every=2, lr=3e-3)
    for section, values in sections.items():
        c[section].update(values)
    return experiment(c)


def random_model_folder(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """A random Llama, or what `changes` of its config.json make of it, with the tokenizer of `recall`."""
    folder.mkdir(parents=True)
    config = json.loads((RECALL / "config.json").read_text())
    config |= {"hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2}
    config |= {"num_key_value_heads": 2, "head_dim": 12, "max_position_embeddings": 512} | changes
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(RECALL / name, folder / name)
    checkpoint.write(folder, config, random_params(config, seed))
    return folder


def write_squad(path: Path, rows: int) -> Path:
    """Rows as SQuAD has them."""
    with path.open("w") as handle:
        for i in range(rows):
            row = {"context": f"The box {i} is {i % 7} wide and red.", "question": f"How wide is box {i}?"}
            row |= {"answers": {"text": [str(i % 7), f"{i % 7} wide"], "answer_start": [0, 0]}}
            handle.write(json.dumps(row) + "\n")
    return path
