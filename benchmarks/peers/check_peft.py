"""PEFT's own model on adapters that saejax wrote, and saejax on those that PEFT wrote: the logits of both.

    pip install --no-deps peft accelerate          # beside torch and transformers
    PYTHONPATH=tests python benchmarks/peers/check_peft.py

On small random models of four families. A line each: the largest difference of the logits, and the size of the change.
Exits with 1 where they differ by more than rounding.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
import peft
import torch
import transformers
from tiny.attributed import FAMILIES
from tiny.decoders import random_params, write_tokenizer

from saejax.lm import checkpoint, load_lm
from saejax.lm.adapter import PROJECTIONS, Adaptable, Adapter

FAMILIES_CHECKED = ("gpt2", "gpt_neox", "qwen3", "gemma2")
ROUNDING = 1e-5


def theirs(folder: Path) -> torch.nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()


def check(family: str, folder: Path) -> bool:
    config_json = {"model_type": family} | FAMILIES[family]
    checkpoint.write(folder, config_json, random_params(config_json))
    write_tokenizer(folder, FAMILIES[family]["vocab_size"] - 2)
    lm, rng = load_lm(folder, backend="jax"), np.random.default_rng(0)
    tokens = rng.integers(0, 39, (2, 9))
    base = np.asarray(lm.run(tokens)[0])
    adaptable = Adaptable.of(lm.config, lm.family, tuple(PROJECTIONS), 1, 3)
    matrices = {
        module: tuple(rng.normal(0, 0.3, shape).astype(np.float32) for shape in sides)
        for module, sides in adaptable.shapes.items()
    }
    Adapter(2.0, matrices, adaptable.transposed).write(folder / "ours", str(folder))
    modules = sorted({module.rpartition(".")[2] for module in matrices})
    how = {"r": 4, "lora_alpha": 6, "init_lora_weights": False, "task_type": "CAUSAL_LM", "target_modules": modules}
    more = {"fan_in_fan_out": adaptable.transposed, "use_rslora": family == "qwen3"}
    written = peft.get_peft_model(theirs(folder), peft.LoraConfig(**how, **more)).eval()
    written.save_pretrained(str(folder / "theirs"))
    models = {"ours": peft.PeftModel.from_pretrained(theirs(folder), str(folder / "ours")).eval(), "theirs": written}
    equal = True
    for name, model in models.items():
        with torch.no_grad():
            want = model(torch.tensor(tokens)).logits.numpy()
        got = np.asarray(load_lm(folder, backend="jax", adapter=folder / name).run(tokens)[0])
        off, change = (float(np.abs(got - other).max()) for other in (want, base))
        print(f"{family}, written by {name}: off by {off:.1e}, the change is {change:.2f}")
        equal &= off < ROUNDING < change
    return equal


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as root:
        found = [check(family, Path(root) / family) for family in FAMILIES_CHECKED]
    sys.exit(0 if all(found) else 1)
