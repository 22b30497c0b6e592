"""Write a run as the files that other tools show, explain and score it from.

    saejax export neuronpedia runs/quickstart out --model=gpt2-small --set=res-mine
                                                      bulk folders and upload batches  [--layer --creator
                                                      --creator_id --release]
    saejax export delphi runs/quickstart out          the latent cache: every activation  [--splits]
    saejax export saedashboard runs/quickstart out    the coder as SAEDashboard loads it
    saejax export circuit-tracer runs/mlp0 runs/mlp1 out
                                                      feature files of its page, one run a layer

neuronpedia and circuit-tracer show what is in the run's report; make it first. delphi scans the report's text again. In
place of a run any dictionary: `saejax report --sae`, then its folder, runs/quickstart/evaluated/theirs.
The destination is new, or an earlier export for the same tool, which is replaced.
"""

import dataclasses

from saejax.app.command import Line, OfCheckpoint
from saejax.core.settings import setting


class Export(OfCheckpoint, takes="words"):
    model: str = setting("", "neuronpedia: its id of the language model; empty guesses.")
    set: str = setting("", "neuronpedia: the set of sources; empty for the run's name.")
    layer: int = setting(-1, "The layer, where the hook point's name does not say it.")
    creator: str = setting("saejax", "neuronpedia: who publishes.")
    creator_id: str = setting("", "neuronpedia: the id of that user; empty for its own.")
    release: str = setting("", "neuronpedia: the release; empty for the set's name.")
    splits: int = setting(5, "delphi: files for each hook point.", low=1)

    def run(self, line: Line) -> None:
        from saejax.app.export import run_export

        run_export(line.words, self.checkpoint, dataclasses.asdict(self))
