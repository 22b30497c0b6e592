"""`saejax.evaluate`: the figures of a dictionary on a text, in a notebook or a program."""

from collections.abc import Sequence

from saejax.app.texts import packed_texts
from saejax.evals.evaluate import EvalConfig, Evaluated
from saejax.evals.evaluate import evaluate as evaluate_packed
from saejax.lm.forward import Model
from saejax.trained import TrainedCoder


def evaluate(
    sae: TrainedCoder,
    lm: Model,
    text: str | Sequence[str],
    *,
    tokens: int = EvalConfig.tokens,
    batch_rows: int = EvalConfig.batch_rows,
) -> Evaluated:
    """L0, FVE, loss recovered, KL and all other figures of a text or of several: evaluate(sae, lm, text).metrics["fve"]

    They are those of `saejax evaluate`, on tokens that are no sinks in the dictionary's training. `intervals` has
    intervals of 95 % where there are ten documents or more.

    Args:
        sae: a dictionary of the model's hook points.
        lm: a model of `saejax.load_lm`.
        text: one document or several, which the dictionary was not trained on. A long one is cut into rows of the
            model's context, at most 256 tokens.
        tokens: the most that are looked at.
        batch_rows: rows in a forward pass.

    Raises:
        ConfigError: no dictionary or no model, or the model has no such hook point.
        DataError: no text, or a model of another width.
    """
    on = packed_texts(sae, lm, text, "evaluate")
    return evaluate_packed(on.sae, lm, on.packer, EvalConfig(min(tokens, on.tokens), batch_rows), on.sinks)
