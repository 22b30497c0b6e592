"""Neuronpedia: the folders of its bulk import, and files for its upload API. Out only.

    bulk/{model}/{layer}-{set}/
        release|model|sourceset|source.jsonl, features|activations|explanations/batch-N.jsonl.gz
    upload/{layer}-{set}/
        batch-N.json, each the body of one POST to /api/feature/upload-batch

A source is the dictionary of one layer; latents without a passage are in neither. (hijohnnylin/neuronpedia ebb8426f:
apps/webapp/prisma/schema.prisma, app/api/admin/import, app/api/feature/upload-batch; jbloomAus/SAEDashboard db4839a:
neuronpedia/neuronpedia_export.py)
"""

import dataclasses
import datetime
import gzip
import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from saejax.core.errors import ConfigError
from saejax.core.progress import Progress
from saejax.interop.passages import centred_passage, clean, group_of, lists_of, logits_of, token_strings

# Limits of the upload API, in features, logits, tokens and letters; the bulk files keep to the same.
FEATURES, LOGITS, TOKENS, LETTERS = 128, 20, 1024, 512
# What SAEDashboard writes where nobody says who the creator is: the user that Neuronpedia's own imports belong to.
CREATOR_ID = "clkht01d40000jv08hvalcvly"

Json = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Names:
    """Ids of dictionaries and people there.

    Attributes:
        model: Neuronpedia's id of the language model, as in gpt2-small.
        set: of the set of sources, as in res-mine.
        layers: of each group of latents.
        hook_points: of each group, by TransformerLens's name.
        creator, creator_id: who publishes; the id is of a user there.
        release: a name for all that is published together.
        dataset: the text.
        context: tokens in a prompt.
    """

    model: str
    set: str
    layers: tuple[int, ...]
    hook_points: tuple[str, ...]
    creator: str = "saejax"
    creator_id: str = CREATOR_ID
    release: str = ""
    dataset: str = ""
    context: int = 0

    def __post_init__(self) -> None:
        for what in ("model", "set", "release"):
            value = getattr(self, what)
            if (value or what != "release") and not re.fullmatch(r"[a-z0-9][a-z0-9._-]*", value):
                raise ConfigError(
                    f"{what} is {value!r}; Neuronpedia's ids are of a-z, 0-9, '.', '_', '-'. Give another: --{what}=..."
                )
        if len(set(self.layers)) < len(self.layers):
            raise ConfigError(f"Two groups of latents are of one layer ({self.layers}); Neuronpedia has one a layer.")

    @property
    def sources(self) -> tuple[str, ...]:
        return tuple(f"{layer}-{self.set}" for layer in self.layers)


def write_neuronpedia(folder: Path, content: Mapping[str, Any], names: Names) -> dict[str, int]:
    """Write both forms into a new folder.

    Args:
        content: of features.sqlite.

    Returns:
        {source: features written}.
    """
    strings, written = token_strings(content["vocab"]), {}
    with Progress("neuronpedia", len(content["features"]), unit="latents") as progress:
        for group, source in enumerate(names.sources):
            entries = group_of(content, group, len(names.sources))
            shown = [entry for entry in entries if any(passages for _, passages in lists_of(entry))]
            bulk, upload = folder / "bulk" / names.model / source, folder / "upload" / source
            upload.mkdir(parents=True)
            _write_metadata(bulk, content, names, group)
            for batch, start in enumerate(range(0, len(shown), FEATURES)):
                batch_entries = shown[start : start + FEATURES]
                part = [Feature.of(entry, content, strings, len(names.sources)) for entry in batch_entries]
                tables = {
                    "features": [f.row(names, group) for f in part],
                    "activations": [row for f in part for row in f.activation_rows(names, group)],
                    "explanations": [row for f in part for row in f.explanation_rows(names, group)],
                }
                for table, rows in tables.items():
                    if rows:  # no file where a table has none
                        (bulk / table).mkdir(exist_ok=True)
                        raw = "".join(_json_line(row) + "\n" for row in rows).encode()
                        (bulk / table / f"batch-{batch}.jsonl.gz").write_bytes(gzip.compress(raw, 6, mtime=0))
                body = {"modelId": names.model, "source": source, "features": [f.upload() for f in part]}
                (upload / f"batch-{batch}.json").write_text(_json_line(body) + "\n", encoding="utf-8")
                progress.advance(len(part))
            progress.advance(len(entries) - len(shown))
            written[source] = len(shown)
    return written


@dataclasses.dataclass(frozen=True)
class Feature:
    """One latent: its entry of features.sqlite and the passages of all its lists, each with its part of the range."""

    index: int
    entry: Mapping[str, Any]
    strings: Sequence[str]
    passages: list[tuple[dict[str, float], list[str], list[float], int]]

    @classmethod
    def of(cls, entry: Mapping[str, Any], content: Mapping[str, Any], strings: Sequence[str], groups: int) -> "Feature":
        passages = [
            (part, *centred_passage(example, strings, TOKENS))
            for part, examples in lists_of(entry)
            for example in examples
        ]
        return cls(entry["id"] % (content["d_sae"] // groups), entry, strings, passages)

    def logits(self, key: str) -> tuple[list[str], list[float]]:
        """(tokens, values) of top_logits or bottom_logits."""
        pairs = logits_of(self.entry, key, self.strings)[:LOGITS]
        return [token for token, _ in pairs], [value for _, value in pairs]

    def explanations(self) -> Iterator[Json]:
        """{text, by, scores} of the explanations, none longer than there is room for."""
        for explanation in self.entry.get("explanations") or []:
            if text := clean(explanation["text"]).strip()[:LETTERS]:
                yield {**explanation, "text": text}

    def upload(self) -> Json:
        """The feature of an upload. Methods and models of explanations must be known to the server: none is named."""
        activations = []
        for part, tokens, values, _ in self.passages:
            bounds = {"quantileMin": part["low"], "quantileMax": part["high"], "quantileFraction": part["fraction"]}
            activations.append({"tokens": tokens, "values": values, **(bounds if part["fraction"] >= 0 else {})})
        return {
            "index": self.index,
            "density": self.entry["density"],
            **{
                name: [{"token": t, "value": v} for t, v in zip(*self.logits(key), strict=True)]
                for name, key in (("topLogits", "top_logits"), ("bottomLogits", "bottom_logits"))
            },
            "explanations": [{"text": explanation["text"]} for explanation in self.explanations()],
            "activations": activations,
        }

    def row(self, names: Names, group: int) -> Json:
        """A row of the table Neuron. What saejax does not measure (neighbours, alignment, vectors) stays empty."""
        top, bottom = self.logits("top_logits"), self.logits("bottom_logits")
        histogram = self.entry.get("histogram") or {"edges": [0.0], "counts": []}
        edges = histogram["edges"]
        measured = {
            "maxActApprox": max(max(values) for _, _, values, _ in self.passages),
            "hookName": names.hook_points[group],
            **{"pos_str": top[0], "pos_values": top[1], "neg_str": bottom[0], "neg_values": bottom[1]},
            "frac_nonzero": self.entry["density"],
            "freq_hist_data_bar_heights": histogram["counts"],
            "freq_hist_data_bar_values": [(a + b) / 2 for a, b in itertools.pairwise(edges)],
            "sourceSetName": names.set,
        }
        return self._place(names, group) | {"creatorId": names.creator_id, "createdAt": _now()} | _NEURON | measured

    def activation_rows(self, names: Names, group: int) -> Iterator[Json]:
        """Rows of the table Activation; binMin, binContains are -1 for the strongest, as SAEDashboard writes them."""
        for number, (part, tokens, values, peak) in enumerate(self.passages):
            place = self._place(names, group)
            strongest = max(values)
            yield (
                place
                | _ACTIVATION
                | {
                    "id": _row_id(place, number, tokens, values),
                    "tokens": tokens,
                    "values": values,
                    "maxValue": strongest,
                    "maxValueTokenIndex": values.index(strongest),
                    "minValue": min(values),
                    "creatorId": names.creator_id,
                    "createdAt": _now(),
                    **{"binMin": part["low"], "binMax": part["high"], "binContains": part["fraction"]},
                    "qualifyingTokenIndex": peak,
                }
            )

    def explanation_rows(self, names: Names, group: int) -> Iterator[Json]:
        """Rows of the table Explanation; who explained and the scores are notes, as models there are a closed list."""
        for number, explanation in enumerate(self.explanations()):
            place = self._place(names, group)
            scores = "".join(f"; {name} {value:.3f}" for name, value in (explanation.get("scores") or {}).items())
            yield place | {
                "id": _row_id(place, "explanation", number, explanation["text"]),
                "description": explanation["text"],
                "authorId": names.creator_id,
                **dict.fromkeys(("embedding", "typeName", "explanationModelName")),
                "notes": f"{explanation.get('by', '')}{scores}" or None,
                "createdAt": _now(),
            }

    def _place(self, names: Names, group: int) -> Json:
        return {"modelId": names.model, "layer": names.sources[group], "index": str(self.index)}


_NEURON: Json = {
    "hasVector": False,
    "vectorLabel": None,
    "vectorDefaultSteerStrength": 10,
    **{
        name: []
        for name in (
            *("vector", "topkCosSimIndices", "topkCosSimValues", "decoder_weights_dist"),
            *("neuron_alignment_indices", "neuron_alignment_values", "neuron_alignment_l1"),
            *("correlated_neurons_indices", "correlated_neurons_pearson", "correlated_neurons_l1"),
            *("correlated_features_indices", "correlated_features_pearson", "correlated_features_l1"),
            *("logits_hist_data_bar_heights", "logits_hist_data_bar_values"),
        )
    },
}
_ACTIVATION: Json = dict.fromkeys(("dataSource", "dataIndex", "dfaTargetIndex", "dfaMaxValue", "logitContributions"))
_ACTIVATION |= {"dfaValues": [], "lossValues": []}


def _write_metadata(folder: Path, content: Mapping[str, Any], names: Names, group: int) -> None:
    """release, model, sourceset and source: one line each, read before the features."""
    release, title = names.release or names.set, f"{names.hook_points[group]}, {content['d_sae']:,} latents"
    by = {"creatorId": names.creator_id, "createdAt": _now(), "visibility": "PUBLIC"}
    urls: list[str] = []
    prompts = round(content["n_tokens"] / names.context) if names.context else None
    rows: dict[str, Json] = {
        "release": by
        | {"name": release, "description": title, "descriptionShort": title, "urls": urls}
        | {"creatorName": names.creator, "creatorNameShort": names.creator},
        "model": by
        | {"id": names.model, "displayNameShort": names.model, "displayName": names.model, "updatedAt": _now()}
        | {"instruct": names.model.endswith("-it"), "layers": 0, "neuronsPerLayer": 0, "owner": ""},
        "sourceset": by
        | {"modelId": names.model, "name": names.set, "description": title, "type": "", "urls": urls}
        | {"creatorName": names.creator, "releaseName": release, "hasDashboards": True},
        "source": by
        | {"id": names.sources[group], "modelId": names.model, "setName": names.set, "hasDashboards": True}
        | {"inferenceEnabled": False, "inferenceHosts": [], "dataset": names.dataset or None}
        | {"num_prompts": prompts, "num_tokens_in_prompt": names.context or None},
    }
    folder.mkdir(parents=True)
    for name, row in rows.items():
        (folder / f"{name}.jsonl").write_text(_json_line(row) + "\n", encoding="utf-8")


def _row_id(*parts: Any) -> str:
    """25 letters, a function of what is identified: an import that is repeated finds its rows there."""
    return "c" + hashlib.sha256(_json_line(parts).encode()).hexdigest()[:24]


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _json_line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
