"""`explain(passages, chat)`: what a latent stands for, in a phrase of a language model that sees where it is active.

The procedure is that of automated interpretability (Bills et al. 2023; delphi, arXiv 2410.13928): passages from all
over the activation range, the strongly activating tokens marked, their activations listed from 1 to 10.
"""

import hashlib
import math
import re
from collections.abc import Callable

from saejax.analysis.endpoint import EndpointError, Messages
from saejax.analysis.passages import FeaturePassages, Passage

Chat = Callable[[Messages], str]

# Neuronpedia takes 512 letters.
LONGEST = 500
_ACTIVATIONS_LISTED = 10

_TASK = """\
You find out what one feature of a language model stands for. You get passages of text in which the feature is active. \
The tokens on which it is strong stand between << and >>. The line below each passage lists these tokens with the \
strength, from 1 (weak) to 10 (the strongest seen).

Say in one short phrase what the marked tokens have in common: the tokens themselves, what they mean, or what stands \
around them. Be as specific as the passages allow, and no more. Never mention the marks or the strengths. Give one \
explanation, not a list of possible ones. If you think first, keep that short.

End with one line of this form:
Explanation: <the phrase>"""


def explain(feature: FeaturePassages, chat: Chat) -> str:
    """The phrase that a language model finds for a latent, asked once.

    Raises:
        EndpointError: an answer in which there is no explanation.
    """
    return explanation_in(chat(explanation_request(feature)))


def explanation_request(feature: FeaturePassages) -> Messages:
    """The request: the task, then every shown passage with its marks and strengths."""
    passages = [f"Passage {i}: {_strengths(p, feature.largest)}" for i, p in enumerate(feature.shown, 1)]
    return told(_TASK, "\n\n".join(passages))


def told(task: str, material: str) -> Messages:
    """One message of the user: the chat templates of some models, Gemma's among them, refuse a system's."""
    return [{"role": "user", "content": f"{task}\n\n---\n\n{material}"}]


def explanation_in(answer: str) -> str:
    """The phrase behind the last "Explanation:" on one line; without that word, the answer's last line.

    At most `LONGEST` letters, without line breaks and control characters.
    """
    spoken = without_thoughts(answer)
    *_, text = re.split(r"explanation\W{0,4}:", spoken, flags=re.IGNORECASE)
    lines = [line for line in text.splitlines() if line.strip(" *_`")] or [""]
    line = (lines[0] if text != spoken else lines[-1])[: 10 * LONGEST]
    line = " ".join(line.split()).strip(" *_`")
    phrase = "".join(letter for letter in line if letter.isprintable())
    if not phrase:
        raise EndpointError(f"The model's answer holds no explanation: {answer[:80]!r}.")
    return phrase if len(phrase) <= LONGEST else phrase[: LONGEST - 1].rstrip() + "…"


def without_thoughts(answer: str) -> str:
    """The answer of a model that thinks aloud, without its thoughts."""
    return answer.rpartition("</think>")[2]


def wording(*texts: str) -> str:
    """A short hash of what the models are told: explanations with another one were asked for differently."""
    return hashlib.sha256("\0".join((_TASK, *texts)).encode()).hexdigest()[:16]


def _strengths(passage: Passage, largest: float) -> str:
    strong = sorted(passage.strong)
    levels = [max(1, math.ceil(10 * abs(passage.activations[i]) / largest)) for i in strong]
    listed = [f"{passage.tokens[i]!r} {level}" for i, level in zip(strong, levels, strict=True)]
    return f"{passage.text(passage.strong)}\nStrengths: {', '.join(listed[:_ACTIVATIONS_LISTED])}"
