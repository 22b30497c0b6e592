"""`saejax.features`: the passages of a text that each latent fires on, in a notebook or a program."""

import dataclasses
import html
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from saejax.analysis.features import ReportConfig, collect_features
from saejax.analysis.passages import Passage
from saejax.app.texts import packed_texts
from saejax.core.figures import COLOURS, blank_figure, panels, say_inside
from saejax.lm.forward import Model
from saejax.trained import TrainedCoder

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_SHOWN = 10  # features of a notebook's cell, of those that fire on at most this share of the tokens
_COMMON = 0.1


@dataclasses.dataclass(frozen=True)
class Feature:
    """A latent and the text that it fires on.

    Attributes:
        latent: its number.
        density: share of the tokens on which it fires.
        largest: its largest activation; 0 where it never fires.
        passages: around its largest activations, falling, one of each row of the text.
        promoted, suppressed: (token, logit) of the direct path to the logits; empty where that is not known.
    """

    latent: int
    density: float
    largest: float
    passages: tuple[Passage, ...]
    promoted: tuple[tuple[str, float], ...]
    suppressed: tuple[tuple[str, float], ...]

    def __repr__(self) -> str:
        head = f"feature {self.latent}: fires on {self.density:.2%} of the tokens, at most {self.largest:.4g}"
        promoted = f"\n  promotes {', '.join(repr(token) for token, _ in self.promoted[:5])}" if self.promoted else ""
        lines = [f"\n  {passage.text(passage.strong)!r}" for passage in self.passages]
        return head + promoted + "".join(lines)

    def _repr_html_(self) -> str:
        head = f"<b>feature {self.latent}</b>, on {self.density:.2%} of the tokens, at most {self.largest:.4g}"
        promoted = ", ".join(f"<code>{html.escape(token)}</code>" for token, _ in self.promoted[:5])
        lines = [f"<div>{self._marked(passage)}</div>" for passage in self.passages]
        return f"<div>{head}{f', promotes {promoted}' if promoted else ''}</div>{''.join(lines)}"

    def _marked(self, passage: Passage) -> str:
        """The passage with a background as dark as the latent is active."""
        parts = []
        for token, activation in zip(passage.tokens, passage.activations, strict=True):
            share = abs(activation) / (abs(self.largest) or 1)
            style = f"background: rgba(230, 159, 0, {share:.2f})"
            text = html.escape(token.replace("\n", "\u21b5"))
            parts.append(f'<span style="{style}" title="{activation:.4g}">{text}</span>')
        return f'<span style="white-space: pre-wrap; font-family: monospace">{"".join(parts)}</span>'


class Features(Sequence[Feature]):
    """All latents of a dictionary on a text, by number: `features[17]`, `features.strongest(5)`, `features.plot()`.

    Attributes:
        n_tokens: tokens of the text; bos, other special tokens and padding are none.
        density: [F] share of the tokens on which each latent fires.
    """

    def __init__(self, content: dict[str, Any]) -> None:
        self._content, self.n_tokens = content, int(content["n_tokens"])
        self.density = np.array([one["density"] for one in content["features"]])

    def __len__(self) -> int:
        return len(self.density)

    @overload
    def __getitem__(self, latent: int) -> Feature: ...
    @overload
    def __getitem__(self, latent: slice) -> list[Feature]: ...
    def __getitem__(self, latent: int | slice) -> Feature | list[Feature]:
        if isinstance(latent, slice):
            return [self[i] for i in range(*latent.indices(len(self)))]
        described, strings = self._content["features"][latent], self._content["vocab"]
        low, high = described.get("min", 0.0), described["max"]
        passages = (
            Passage(tuple(strings[token] for token in one["tokens"]), tuple(one["activations"]), one["peak"])
            for one in described["examples"]
        )
        promoted, suppressed = (tuple(map(tuple, described[side])) for side in ("top_logits", "bottom_logits"))
        largest = low if abs(low) > abs(high) else high
        return Feature(described["id"], described["density"], largest, tuple(passages), promoted, suppressed)

    def strongest(self, count: int = _MOST_SHOWN, most_density: float = _COMMON) -> list[Feature]:
        """The features of the largest |activation|, of those that fire on at most `most_density` of the tokens."""
        sizes = np.array([max(one["max"], -one.get("min", 0.0)) for one in self._content["features"]])
        sizes = np.where((self.density > 0) & (self.density <= most_density), sizes, 0)
        return [self[int(i)] for i in np.argsort(-sizes, kind="stable")[:count] if sizes[i]]

    def plot(self) -> "Figure":
        """A histogram of log10 density over the latents that fire, as a picture of matplotlib."""
        figure = blank_figure((5, 2.6))
        (axes,) = panels(figure)
        alive = self.density[self.density > 0]
        axes.hist(np.log10(alive), bins=30, color=COLOURS[0]) if len(alive) else say_inside(axes, "no latent fires")
        silent = len(self) - len(alive)
        axes.set(
            xlabel="log10 of the share of tokens", ylabel="latents", title=f"{silent:,} of {len(self):,} never fire"
        )
        return figure

    def __repr__(self) -> str:
        silent = int((self.density == 0).sum())
        return (
            f"Features({len(self):,} latents at {self._content['hook_point']} on {self.n_tokens:,} tokens; L0 "
            f"{self.density.sum():.3g}, {silent:,} never fire)"
        )

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(repr(self))}</p>" + "<hr>".join(one._repr_html_() for one in self.strongest())


def features(
    sae: TrainedCoder,
    lm: Model,
    text: str | Sequence[str],
    *,
    examples: int = 5,
    before: int = 16,
    after: int = 7,
    progress: bool = True,
) -> Features:
    """The passages of a text, or of several, on which each latent fires: features(sae, lm, text)[17].

    Args:
        sae: a dictionary of one of the model's hook points.
        lm: a model of `saejax.load_lm`.
        text: one document or several. A long one is cut into rows of the model's context, at most 256 tokens. Sinks
            are left out as in the dictionary's training.
        examples: passages of each latent.
        before, after: tokens that a passage shows around its peak.
        progress: show what is done.

    Raises:
        ConfigError: no dictionary or no model, or the model has no such hook point.
        DataError: no text, or a model of another width.
    """
    on = packed_texts(sae, lm, text, "features")
    config = ReportConfig(tokens=on.tokens, examples=examples, quantiles=0, before=before, after=after, batch_rows=8)
    return Features(collect_features(on.sae, lm, on.packer, config, on.sinks, progress=progress)[0])
