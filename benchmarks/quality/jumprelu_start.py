"""What keeps jumprelu's latents alive: where b_enc starts, and AuxK; demo model, d_sae 1024, target L0 24.

    make quickstart                       # captures stores/quickstart
    python -m benchmarks.quality.jumprelu_start

Every run is a line of jumprelu_start.jsonl beside this file; what is there already is not run again. Then the table
jumprelu_start.md is made.
"""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from benchmarks.peers.measure import measure
from saejax.coders import CoderConfig, build
from saejax.store import Batches, StoreReader
from saejax.trained import make_sites
from saejax.training import TrainConfig
from saejax.training.optim import make_optimizer, make_schedule
from saejax.training.start import make_prepare
from saejax.training.state import make_init
from saejax.training.step import default_hyper, make_step

HOOK_POINT, D_SAE, L0, BATCH = "blocks.3.resid_post", 1024, 24.0, 1024
STARTS = {
    "b_enc = 0": {"target_l0_start": 0.0, "auxk_coefficient": 0.0},
    "b_enc = 0, AuxK 1/32": {"target_l0_start": 0.0},
    "2 x target, AuxK 1/32 (the preset)": {},
    "4 x target, AuxK 1/32": {"target_l0_start": 4.0},
}
SEEDS, RATES = (0, 1, 2), (3e-3, 1e-2)
HERE = Path(__file__).parent
LINES = HERE / "jumprelu_start.jsonl"

_STORE = flags.DEFINE_string("store", "stores/quickstart", "Captured activations, with train and heldout.")
_TOKENS = flags.DEFINE_integer("tokens", 1_024_000, "Activations that each coder is trained on.")
_ONLY_TABLE = flags.DEFINE_bool("only_table", False, "Train nothing; make the table again.")

Row = dict[str, Any]

HEAD = """# Where jumprelu's b_enc should start

`python -m benchmarks.quality.jumprelu_start`: 2026-11-23, 2 CPU cores, 24 GB, no GPU, beside other work. The demo
model's blocks.3.resid_post, 1,024 latents, target L0 24, 1,024,000 tokens in batches of 1,024, dead after 100,000. A
seed is a start of the coder and an order of the data. Means (least to most); dead: latents silent on 32,768 held-out
tokens. These lines were made by hand
before the script was there: the same training, with the shares given as `firing_rate_init` 0.0469 and 0.0938, and the
schedule and b2 of then. The script itself was not run to its end.
"""


def trained(start: str, lr: float, seed: int) -> Row:
    """l0, fve and the share of latents that are silent on the held-out activations."""
    keys = {"target_l0": L0, "dead_after_tokens": 100_000, "encoder_centre": False} | STARTS[start]
    told = CoderConfig("jumprelu", d_sae=D_SAE, **keys)
    config = TrainConfig(
        tokens=_TOKENS.value,
        batch_size=BATCH,
        lr=lr,
        b_enc_rate=1.0,
        b2=0.999,
        decay_fraction=0.2,
        final_lr_fraction=0.1,
    )
    source = Batches(StoreReader.open(f"{_STORE.value}/train", [HOOK_POINT]), BATCH, seed=seed)
    coder = build(told, source.hook_points[HOOK_POINT], config.steps)
    sites = make_sites(told, coder.topology, (HOOK_POINT,), (HOOK_POINT,), source.statistics)
    optimizer = make_optimizer(config)
    state = jax.jit(make_init(coder, optimizer, config, make_prepare(told, coder, sites, source)))(seed)
    step = jax.jit(make_step(coder, optimizer, make_schedule(config), sites, config), donate_argnums=0)
    for _, batch in zip(range(config.steps), source.iterate(0), strict=False):
        state, _ = step(state, {HOOK_POINT: jnp.asarray(batch[HOOK_POINT])}, default_hyper(0))
    alone, params = coder.inference(state.evaluated(), state.stats)
    scale = sites.read_scales[0]

    @jax.jit
    def encode(x_BD: jax.Array) -> tuple[jax.Array, jax.Array]:
        latents = alone.encode(params, x_BD * scale)
        return latents.dense(), alone.decode(params, latents, x_BD * scale) / scale

    heldout = StoreReader.open(f"{_STORE.value}/heldout", [HOOK_POINT])
    rows = heldout.rows(0, heldout.n_tokens)[HOOK_POINT].astype(np.float32)
    return {"start": start, "lr": lr, "seed": seed} | measure(lambda x: encode(jnp.asarray(x)), rows)


def known() -> list[Row]:
    return [json.loads(line) for line in LINES.read_text(encoding="utf-8").splitlines()] if LINES.exists() else []


def table(rows: list[Row]) -> str:
    lines = [HEAD, "| start | lr | seeds | L0 | FVE | dead |", "|---|---|---|---|---|---|"]
    for lr in RATES:
        for start in STARTS:
            own = [row for row in rows if (row["start"], row["lr"]) == (start, lr)]
            if own:
                l0, fve, dead = ([row[key] for row in own] for key in ("l0", "fve", "dead"))
                cells = (f"{np.mean(l0):.1f}", _spread(fve, "{:.4f}"), _spread(dead, "{:.1%}"))
                lines.append(f"| {start} | {lr:g} | {len(own)} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _spread(values: list[float], form: str) -> str:
    """mean (least to most)"""
    mean, *ends = (form.format(value) for value in (np.mean(values), min(values), max(values)))
    return mean if len(values) == 1 else f"{mean} ({ends[0]} to {ends[1]})"


def main(_: list[str]) -> None:
    rows = known()
    there = {(row["start"], row["lr"], row["seed"]) for row in rows}
    wanted = [(start, lr, seed) for seed in SEEDS for start in STARTS for lr in RATES]
    for task in [] if _ONLY_TABLE.value else wanted:
        if task not in there:
            rows.append(trained(*task))
            with LINES.open("a", encoding="utf-8") as file:
                file.write(json.dumps(rows[-1]) + "\n")
    (HERE / "jumprelu_start.md").write_text(table(rows), encoding="utf-8")


if __name__ == "__main__":
    app.run(main)
