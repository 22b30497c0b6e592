"""What to read: one source of text or a mixture of several, and how documents become rows."""

import dataclasses
import math

from saejax.core.errors import ConfigError

KINDS = ("stdlib", "files", "prompts", "hub")
SPLIT_BY = ("content", "name")


@dataclasses.dataclass(frozen=True)
class SourceConfig:
    """One source of text.

    Attributes:
        source: `stdlib` (the sources of Python's standard library, always there), `files`, `prompts` (files of which
            every line of a .txt, or every row, is a document) or `hub`.
        paths: for `files` and `prompts`: .txt (of UTF-8), .jsonl or .parquet files, folders of them, or glob patterns.
            A file that is named twice is read once.
        column: field of a .jsonl, .parquet or hub row that holds the text.
        template: if set, the text of a row is `template.format(**row)` instead of one column. A row with a null where
            the text or the template wants a value is refused.
        chat: the text of a row is a conversation, written by the chat template of the model's tokenizer: `column`
            holds its messages, a list of {"role", "content"}; or `prompt` is set.
        prompt, response: with chat, the columns of what the user and the assistant say. Without `response` the text
            ends where the assistant's answer would begin.
        dataset, subset, dataset_split, revision: for `hub`: a Hugging Face dataset, streamed; pin `revision`.
        weight: in a mixture, this source's documents for each of the others', relative to their weights.
    """

    source: str = "stdlib"
    paths: tuple[str, ...] = ()
    column: str = "text"
    template: str = ""
    chat: bool = False
    prompt: str = ""
    response: str = ""
    dataset: str = ""
    subset: str = ""
    dataset_split: str = "train"
    revision: str = ""
    weight: float = 1.0

    def __post_init__(self) -> None:
        if self.source not in KINDS:
            raise ConfigError(f"text.source is {self.source!r}; it must be one of {', '.join(KINDS)}.")
        if self.source in ("files", "prompts") and not self.paths:
            raise ConfigError(f"text.source is {self.source!r} but text.paths is empty; name at least one file.")
        if not all(self.paths):
            raise ConfigError("text.paths holds an empty path; name a file or folder ('.' is the current folder).")
        if self.source == "hub" and not self.dataset:
            raise ConfigError("text.source is 'hub' but text.dataset is empty; name a dataset.")
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise ConfigError(f"The weight of a text source is {self.weight}; it must be a number above 0.")
        if self.chat and self.template:
            raise ConfigError("text.chat and text.template both write the text of a row; leave one of them out.")
        if (self.prompt or self.response) and not self.chat:
            raise ConfigError("text.prompt and text.response are read with text.chat=True alone; set it.")
        if self.response and not self.prompt:
            raise ConfigError(f"text.response is {self.response!r} without text.prompt; name the column of the prompt.")
        if self.chat and self.source == "stdlib":
            raise ConfigError("text.chat needs rows with columns; source code has none. Choose another text.source.")


@dataclasses.dataclass(frozen=True)
class TextConfig(SourceConfig):
    """What to read and how to pack it.

    Attributes:
        sources: a mixture of these, in place of the one that the keys above describe. Each is a dict of those keys in
            a config file: `c.text.sources = ({"source": "hub", "dataset": ..., "weight": 2.0}, ...)`. Weights count
            documents; a source that has run out leaves its places empty.
        mix_seed: of the order in which the sources take turns.
        heldout_fraction: share of the documents kept for evaluation.
        split_by: what says which split a file, prompt or row is in: `content`, so that equal texts are in the same one
            wherever they stand, or `name` (the file's name and the row's number), as stores were split before there was
            this key. The standard library is split by its modules.
        context_length: tokens in a packed row, the bos included.
        prepend_bos: put the model's bos token in front of every piece of a document. Where the model's files do not say
            which it is, nor that there is none, this is refused.
        pack: fill a row with as many documents as fit. None: yes, except where every source is `prompts`; then each
            document begins a row of its own.
    """

    sources: tuple[SourceConfig, ...] = ()
    mix_seed: int = 0
    heldout_fraction: float = 0.1
    split_by: str = "content"
    context_length: int = 256
    prepend_bos: bool = True
    pack: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.heldout_fraction < 1:
            raise ConfigError(f"text.heldout_fraction is {self.heldout_fraction}; it must lie between 0 and 1.")
        if self.split_by not in SPLIT_BY:
            raise ConfigError(f"text.split_by is {self.split_by!r}; it must be one of {', '.join(SPLIT_BY)}.")
        if self.split_by == "name" and not self.has_rows:
            raise ConfigError("text.split_by is of files and datasets; the standard library is split by its modules.")
        if self.context_length < 2:
            raise ConfigError(f"text.context_length is {self.context_length}; it must be at least 2.")
        if self.mix_seed < 0:
            raise ConfigError(f"text.mix_seed is {self.mix_seed}; it must be 0 or more.")
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
