"""Settings of the text: one source or a mixture of several, and how documents become rows."""

import dataclasses
import datetime
import math

from saejax.core.errors import ConfigError
from saejax.core.settings import Settings, setting


@dataclasses.dataclass(frozen=True)
class SourceConfig(Settings, section="text"):
    """One source of text."""

    source: str = setting(
        "stdlib",
        "stdlib (the sources of Python's standard library, always there), files, prompts (files of which every line of "
        "a .txt, or every row, is a document) or hub.",
        choices=("stdlib", "files", "prompts", "hub"),
    )
    paths: tuple[str, ...] = setting(
        (),
        "For files and prompts: files, folders of them, or glob patterns; .txt (of UTF-8), .jsonl, .json (a list of "
        "objects or texts), .csv and .tsv (the first row names the columns), .gz and .zst of these, and .parquet. A "
        "file that is named twice is read once. Other files of a folder are left out, with a warning.",
        place="path",
    )
    column: str = setting("text", "Field of a row that holds the text. A .txt and a .json of texts have no fields.")
    template: str = setting(
        "",
        "If set, the text of a row is `template.format(**row)` instead of one column. A row with a null where the text "
        "or the template wants a value is refused.",
    )
    chat: bool = setting(
        False,
        "The text of a row is a conversation, written by the chat template of the model's tokenizer: `column` holds "
        'its messages, a list of {"role", "content"}; or `prompt` is set.',
    )
    prompt: str = setting("", "With chat, the column of what the user says.")
    response: str = setting(
        "",
        "With chat, the column of what the assistant says. Without it the text ends where the assistant's answer would "
        "begin.",
    )
    chat_date: str = setting(
        "",
        "With chat, what the chat template takes for the present (strftime_now), as in 2026-01-31. A template that "
        "needs it is refused without: a stored text must not depend on the day that it is read.",
    )
    dataset: str = setting("", "For hub: a Hugging Face dataset, which is streamed; or the folder of one.", place="id")
    subset: str = setting("", "For hub: the dataset's configuration.")
    dataset_split: str = setting("train", "For hub: the dataset's split.")
    revision: str = setting("", "For hub: commit, tag or branch; pin it.")
    weight: float = setting(
        1.0, "In a mixture, this source's documents for each of the others', relative to their weights.", above=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.source in ("files", "prompts") and not self.paths:
            raise ConfigError(f"text.source is {self.source!r} but text.paths is empty; name at least one file.")
        if not all(self.paths):
            raise ConfigError("text.paths holds an empty path; name a file or folder ('.' is the current folder).")
        if self.source == "hub" and not self.dataset:
            raise ConfigError("text.source is 'hub' but text.dataset is empty; name a dataset.")
        if self.chat and self.template:
            raise ConfigError("text.chat and text.template both write the text of a row; leave one of them out.")
        if (self.prompt or self.response) and not self.chat:
            raise ConfigError("text.prompt and text.response are read with text.chat=True alone; set it.")
        if self.chat_date and not self.chat:
            raise ConfigError("text.chat_date is read with text.chat=True alone; set it.")
        if self.chat_date and not _is_date(self.chat_date):
            raise ConfigError(f"text.chat_date is {self.chat_date!r}; give a date, as in 2026-01-31.")
        if self.response and not self.prompt:
            raise ConfigError(f"text.response is {self.response!r} without text.prompt; name the column of the prompt.")
        if self.chat and self.source == "stdlib":
            raise ConfigError("text.chat needs rows with columns; source code has none. Choose another text.source.")


def _is_date(text: str) -> bool:
    try:
        datetime.datetime.fromisoformat(text)
    except ValueError:
        return False
    return True


@dataclasses.dataclass(frozen=True)
class TextConfig(SourceConfig):
    """Settings of the text and of its packing."""

    sources: tuple[SourceConfig, ...] = setting(
        (),
        "A mixture of these, in place of the one that the keys above describe. Each is a dict of those keys in a "
        'config file: `c.text.sources = ({"source": "hub", "dataset": ..., "weight": 2.0}, ...)`. Weights count '
        "documents; a source that has run out leaves its places empty.",
    )
    mix_seed: int = setting(0, "Seed of the order in which the sources take turns.", low=0, high=math.inf)
    heldout_fraction: float = setting(
        0.1,
        "The share of the documents kept for evaluation. Equal texts are on one side, wherever they stand; the "
        "standard library is split by its modules.",
        above=0,
        below=1,
    )
    context_length: int = setting(256, "Tokens in a packed row, the bos included.", low=2)
    prepend_bos: bool = setting(
        True,
        "Put the model's bos token in front of every piece of a document. A text that begins with that token gets no "
        "second one. Where the model's files do not say which it is, nor that there is none, this is refused.",
    )
    pack: bool | None = setting(
        None,
        "Fill a row with as many documents as fit. None: yes, except where every source is prompts; then each document "
        "begins a row of its own.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        changed = [f.name for f in dataclasses.fields(SourceConfig) if getattr(self, f.name) != f.default]
        if self.sources and changed:
            raise ConfigError(
                f"text.sources is set, so text.{changed[0]} is never read; say it in each of the sources."
            )

    @property
    def parts(self) -> tuple[SourceConfig, ...]:
        """The sources that are read: those of the mixture, or the one."""
        return self.sources or (self,)

    @property
    def has_rows(self) -> bool:
        """Something else than the standard library is read."""
        return any(part.source != "stdlib" for part in self.parts)

    @property
    def packed(self) -> bool:
        """Several documents may share a row."""
        return any(part.source != "prompts" for part in self.parts) if self.pack is None else self.pack
