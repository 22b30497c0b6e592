"""Adapt the language model to a finished dictionary: LoRA behind it.

    saejax adapt --config=quickstart                                  runs/quickstart/adapter
    saejax adapt --config=quickstart --rank=4 --projections=Q,K,V,O --steps=100
    saejax evaluate --config=quickstart --sae=runs/quickstart --config.lm.adapter=runs/quickstart/adapter

Only blocks behind the dictionary change. It stays as it is; with --dictionary_lr it learns too, and lies in
adapter/dictionary. Writes adapter_config.json and adapter_model.safetensors, which PEFT reads, and adapter.json with
what it brings. `lm.adapter` loads the changes wherever a model is named. Continues where it was.
"""

from pathlib import Path

from saejax.app.command import Command, Line
from saejax.core.errors import ConfigError
from saejax.core.settings import setting


class Adapt(Command):
    loss: str = setting("kl", "kl, to the model as it was, or ce, of the next token.", choices=("kl", "ce"))
    rank: int = setting(16, "r: rank of the changes.", low=1)
    alpha: float = setting(32.0, "The changes count alpha / r times.", above=0)
    projections: str = setting("Q,K,V,O,in,gate,out", "Which matrices of a block.")
    steps: int = setting(200, "Steps of Adam.", low=2)
    rows: int = setting(8, "Rows of text of a step.", low=1)
    lr: float = setting(1e-3, "Largest learning rate.", above=0)
    dictionary_lr: float = setting(0.0, "That of the dictionary, which learns in the same steps; 0: it stays.", low=0)
    redo: bool = setting(False, "Make it anew, also where the folder has one of other settings.")
    out: str = setting("", "The folder; empty: adapter in the run.")

    def run(self, line: Line) -> None:
        from saejax.app.adapt import run_adapt
        from saejax.app.console import say
        from saejax.lm.adapter import PROJECTIONS
        from saejax.through.adapt import Adaptation

        line.refuse_words("saejax adapt takes --config and its flags.")
        names = tuple(name.strip() for name in self.projections.split(",") if name.strip())
        if not names or (wrong := [name for name in names if name not in PROJECTIONS]):
            what = repr(wrong[0]) if names else "empty"
            raise ConfigError(f"--projections has {what}; there are {', '.join(PROJECTIONS)}.")
        work = line.workspace()
        seed = work.experiment.seed
        how = Adaptation(
            self.loss, self.rank, self.alpha, names, self.steps, self.rows, self.lr, self.dictionary_lr, seed
        )
        found = run_adapt(work, how, Path(self.out) if self.out else None, self.redo)
        say(
            f"cross-entropy: the model {found['ce_clean']:.4f}, with the dictionary {found['ce_sae']:.4f}, adapted "
            f"{found['ce_sae_adapted']:.4f}: {found['closed']:.1%} of the gap is closed"
        )
        if self.dictionary_lr:
            say(f"the dictionary has learned too: FVE {found['fve']:.4f} -> {found['fve_adapted']:.4f}")
        say(f"{self.out or work.experiment.run.path / 'adapter'}: lm.adapter loads it, and so does PEFT")
