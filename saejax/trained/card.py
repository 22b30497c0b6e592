"""README.md of a saved coder: a model card that says what it is, how good it is, and how it is loaded."""

import re
from collections.abc import Mapping
from typing import Any

# The figures that people ask for first, with the names they know them by.
_FIGURES = {
    "l0": "L0, latents that fire for a token",
    "fve": "FVE, fraction of variance explained",
    "fve_with_sinks": "FVE, sinks counted",
    "loss_recovered": "loss recovered",
    "loss_recovered_with_sinks": "loss recovered, sinks replaced",
    "loss_recovered_in_turn": "loss recovered, each place rebuilt behind the replaced ones",
    "ce_clean": "cross-entropy of the model, nats",
    "ce_sae": "cross-entropy with the reconstruction, nats",
    "kl": "KL divergence of the predictions, nats",
    "dead_fraction": "dead latents, as a fraction",
}


def facts_and_figures(described: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, str]]:
    """({what: value}, {figure of an evaluation: value}) of what saejax.json says, for people."""
    origin, (reads, writes) = described["origin"], (", ".join(described[side]) for side in ("reads", "writes"))
    facts = {
        "coder": f"{described['topology']}, {described['sparsity']['name']}",
        "language model": " ".join(filter(None, (origin["model"], origin["revision"]))) or "not recorded",
        "reads": reads,
        "writes": writes,
        "d_in": f"{described['d_in']:,}",
        "latents": " x ".join(f"{n:,}" for n in described["latent_shape"]),
        "trained on": f"{origin['tokens']:,} activations" if origin["tokens"] else "not recorded",
        "made by": f"saejax {origin['saejax']}",
    }
    known = described["figures"]
    return facts, {title: f"{known[name]:.4g}" for name, title in _FIGURES.items() if name in known}


def model_card(
    described: Mapping[str, Any], place: str = "path/to/this/folder", library: str = "saejax", usage: str = ""
) -> str:
    """Markdown with the front matter that model hubs read, from what saejax.json says.

    Args:
        place: what `saejax.load` takes.
        library, usage: of files in another project's format: its name, and how they are loaded there.
    """
    model, (facts, figures) = described["origin"]["model"], facts_and_figures(described)
    base = [f"base_model: {model}"] if re.fullmatch(r"\w[\w.-]*/[\w.-]+", model) else []
    return "\n".join(
        [
            *(
                "---",
                f"library_name: {library}",
                "tags: [sparse-autoencoder, interpretability, saejax]",
                *base,
                "---",
                "",
            ),
            *(f"# A sparse dictionary of {facts['reads']}", ""),
            *_markdown_table("", "", facts),
            *("", "## On held-out text", ""),
            *(_markdown_table("figure", "value", figures) if figures else ["Not evaluated."]),
            *("", "## Use", "", *(["```python", usage, "```", ""] if usage else [])),
            *("```python", "import saejax", "", f'sae = saejax.load("{place}")'),
            f"latents = sae.encode(x)  # activations [..., {described['d_in']}] -> [..., {described['d_sae']}]",
            *("x_hat = sae.decode(latents)", "```", ""),
        ]
    )


def _markdown_table(left: str, right: str, rows: Mapping[str, str]) -> list[str]:
    return [f"| {left} | {right} |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())]
