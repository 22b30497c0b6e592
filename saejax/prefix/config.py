"""The settings of a latent prefix: section `prefix` of an experiment."""

import dataclasses
import math

from saejax.core.errors import ConfigError
from saejax.core.settings import Settings, setting

SOURCES = ("recall", "text")
READS = ("bytes", "tokens")


@dataclasses.dataclass(frozen=True)
class PrefixConfig(Settings, section="prefix"):
    """A latent prefix for frozen language models: lm.model, and a second one."""

    source: str = setting(
        "",
        "Where the records come from: text, the rows of text.paths or text.dataset, which have a context, a question "
        "and answers; or recall, an embedded task that needs no file. Empty: the experiment has no prefix.",
        choices=SOURCES,
    )
    second: str = setting(
        "",
        "The second model, of any tokenizer and width: `demo`, `recall`, a folder or a hub id. Empty: lm.model alone.",
        place="hub",
    )
    second_revision: str = setting("", "Commit, tag or branch of the second model; pin it.")
    context: str = setting("context", "The column of the context.")
    question: str = setting("question", "The column of the question.")
    answers: str = setting(
        "answers",
        'The column of the answer: a text, a list of texts, or {"text": [...]} as SQuAD has it. The first is trained '
        "on, and the best of them counts.",
    )
    reads: str = setting(
        "{context}", "What the encoder reads of a record; {context} and {question} stand for its columns."
    )
    prompt: str = setting(
        "Question: {question}\nAnswer:", "What each model reads after the prefix, or after the context."
    )
    answer: str = setting(" {answer}\n", "What each model shall say then; an answer ends with the line.")
    samples: int = setting(5000, "Records to train on, drawn from all that there are.", low=1, high=math.inf)
    heldout: int = setting(200, "Records of the held-out split to evaluate on.", low=1, decides=False)
    latents: int = setting(32, "Latents of a prefix: so many embeddings stand before a prompt.", low=1)
    d_latent: int = setting(256, "Width of a latent.", low=1)
    encoder: str = setting(
        "bytes", "What the encoder reads: the bytes of the text, or the tokens of lm.model.", choices=READS
    )
    length: int = setting(1024, "Bytes or tokens that the encoder reads; what is longer is cut off.", low=1)
    d_encoder: int = setting(768, "Width of the encoder.", low=1)
    n_layer: int = setting(2, "Blocks of the encoder before it is pooled.", low=0)
    n_pool: int = setting(2, "Blocks in which the latents read what the encoder made (Perceiver).", low=1)
    n_head: int = setting(8, "Heads of every attention of the encoder.", low=1)
    first_token_weight: float = setting(
        1.0, "The first token of an answer counts so many times as much in the loss as each other one.", above=0
    )
    distill: float = setting(
        0.0,
        "Weight of the divergence from what the same model predicts after the context itself, in nats; 0 for none.",
        low=0,
    )
    answer_tokens: int = setting(16, "Tokens that a model says at most when it is evaluated.", low=1, decides=False)
    eval_rows: int = setting(16, "Records that are evaluated at once.", low=1, decides=False)
    timed: int = setting(
        16, "Records, one at a time, of which the median time to the first token is taken.", low=1, decides=False
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, width in (("d_encoder", self.d_encoder), ("d_latent", self.d_latent)):
            if width % self.n_head:
                raise ConfigError(f"prefix.{name} {width} is not a multiple of prefix.n_head {self.n_head}.")
        for name, fields in (("reads", ("context", "question")), ("prompt", ("question",)), ("answer", ("answer",))):
            check_template(f"prefix.{name}", getattr(self, name), fields)
        if "{answer}" not in self.answer:
            raise ConfigError(f"prefix.answer is {self.answer!r}; it must hold {{answer}}.")


def check_template(name: str, template: str, fields: tuple[str, ...]) -> None:
    """Raise ConfigError if a template asks for something else than `fields`."""
    try:
        template.format(**dict.fromkeys(fields, ""))
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        there = ", ".join(f"{{{field}}}" for field in fields)
        raise ConfigError(f"{name} is {template!r}, which cannot be filled ({error!r}); it may hold {there}.") from None
