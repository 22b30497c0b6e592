"""Answers that need parameters, mostly of a language model too: similar features, texts, steering, logits."""

import contextlib
import json
from typing import Any

from saejax.analysis.features import logits_of
from saejax.app.steer import Operation, continuations, features
from saejax.core.errors import ConfigError, SaejaxError
from saejax.interventions import Interventions
from saejax.lm.generation import Sampling
from saejax.serve.features.browser import Browser
from saejax.serve.features.coders import Dictionaries, Place
from saejax.serve.features.similar import Rows, checked_latent, nearest_rows
from saejax.serve.features.texts import Encoded, encoded

_LOGITS = 10
_STEERING = 180.0  # seconds: two programs are compiled for each change


class Models:
    """Answers of dictionaries and models, computed in the worker and kept in the inference cache.

    Args:
        browser: for what is known of the features that are found.
        dictionaries: loads them.
    """

    def __init__(self, browser: Browser, dictionaries: Dictionaries):
        self._browser, self._dictionaries = browser, dictionaries
        self._cache, self._worker = dictionaries.cache, dictionaries.worker

    def similar(self, place: Place, latent: int, other: Place | None, count: int) -> list[dict[str, Any]]:
        """[{dictionary, id, cosine, token, label, density}] of the latents that write most alike.

        Raises:
            Problem: 404: no such latent.
            ConfigError: two dictionaries that do not write the same width.
            DataError: a dictionary cannot be read.
        """
        sae, there = self._dictionaries.coder(place), other or place
        checked_latent(sae, place.name, latent)
        same = there.state() == place.state()
        other_sae = sae if same else self._dictionaries.coder(there)
        row = Rows.of(sae, self._cache, place.state()).row(latent)
        nearest = nearest_rows(row, Rows.of(other_sae, self._cache, there.state()), count, latent if same else -1)
        marks = self._browser.marks(there, [at for at, _ in nearest])
        return [
            {"dictionary": there.name, "id": at, "cosine": cosine} | mark
            for (at, cosine), mark in zip(nearest, marks, strict=True)
        ]

    def encode(self, place: Place, text: str, count: int, feature: int | None) -> dict[str, Any]:
        """{tokens, top, activations, features_per_token} of a text.

        Raises:
            Problem: 404: no such feature; or the worker is busy.
            ConfigError, DataError: no text, no model, or one that does not fit.
        """
        sae = self._dictionaries.coder(place)
        if feature is not None:
            checked_latent(sae, place.name, feature)

        def work() -> Encoded:
            named, reader = self._dictionaries.reader(place, sae)
            return encoded(named, reader, text)

        encoding = self._cache.get(
            ("text", text, *place.state()), lambda: self._worker.run(work), lambda one: one.bytes + 4 * len(text)
        )
        top = encoding.strongest(count)
        strongest = [row["id"] for row in top]
        marks = self._browser.marks(place, strongest)
        shown = dict.fromkeys(strongest if feature is None else [*strongest, feature])
        return {
            "tokens": list(encoding.tokens),
            "top": [row | {key: mark[key] for key in ("token", "label")} for row, mark in zip(top, marks, strict=True)],
            "activations": {str(latent): encoding.activations(latent) for latent in shown},
            "features_per_token": encoding.per_token(),
        }

    def steer(self, place: Place, **wanted: Any) -> dict[str, Any]:
        """{prompt, without, with, about, operation, tokens_without, tokens_with}, as `saejax steer` prints it.

        Args:
            wanted: latents (numbers, or layer:latent of a cross-layer transcoder), operation, scale, prompt, and
                tokens, temperature, top_p, seed of `Sampling`.

        Raises:
            Problem: the worker is busy, or it takes too long.
            ConfigError: latents, an operation or numbers that are not there, an empty prompt, or no model.
            DataError: a prompt longer than the model reads.
        """
        sae = self._dictionaries.coder(place)

        def work() -> dict[str, Any]:
            return _steered(self._dictionaries.inside(place, sae), **wanted)

        # The same seed draws the same tokens.
        key = ("steered", json.dumps(wanted, sort_keys=True), *place.state())
        return self._cache.get(key, lambda: self._worker.run(work, _STEERING), lambda one: 4 * len(json.dumps(one)))

    def bare_feature(self, place: Place, number: int) -> dict[str, Any]:
        """A feature without a report: as `Browser.feature`, with its logits where there is a model.

        Raises:
            Problem: 404: no such feature; or the worker is busy.
            DataError: the dictionary cannot be read.
        """
        sae = self._dictionaries.coder(place)
        checked_latent(sae, place.name, number)

        def work() -> tuple[Any, Any]:
            # No model, or one that it does not fit: the rest can be said without.
            with contextlib.suppress(SaejaxError):
                lm = self._dictionaries.model(place, sae)
                return logits_of(sae.at(lm), lm, number, _LOGITS)
            return [], []

        key = ("logits", number, *place.state())
        top, bottom = self._cache.get(key, lambda: self._worker.run(work), lambda _: 4000)
        hook_points, model = self._dictionaries.described(place, sae)
        grouped, remarks = len(sae.coder.topology.latent_shape) > 1, self._browser.remarks(place)
        unknown = dict.fromkeys(("density", "max", "mean", "histogram"))
        feature = {"id": number, **unknown, "top_logits": top, "bottom_logits": bottom, "examples": [], "quantiles": []}
        if number in remarks.explanations:
            feature["explanations"] = remarks.explanations[number]
        return {
            "vocab": [],
            "feature": feature,
            "note": remarks.notes.get(number),
            "hook_point": hook_points,
            "model": model,
            "layer": number // sae.coder.topology.d_sae if grouped else None,
        }


def _steered(
    inside: Interventions, latents: list[int | str], operation: str, scale: float, prompt: str, **choice: Any
) -> dict[str, Any]:
    lm, (name, sae) = inside.lm, next(iter(inside.dictionaries.items()))
    if not lm.tokenizer.encode_behind_bos([prompt])[0]:
        raise ConfigError("The prompt is empty: give the text that the model continues.")
    numbers = features(",".join(map(str, latents)), sae, "features")
    change = Operation(operation, numbers, scale)
    sampling = Sampling(**choice, stop=tuple(lm.tokenizer.special_ids))
    (written,) = continuations(inside, name, change, [prompt], sampling)
    return {
        "prompt": prompt,
        "without": lm.tokenizer.decode_inside(written.without),
        "with": lm.tokenizer.decode_inside(written.changed),
        "about": written.about,
        "operation": change.reads,
        "tokens_without": lm.tokenizer.pieces(written.without),
        "tokens_with": lm.tokenizer.pieces(written.changed),
    }
