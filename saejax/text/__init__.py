"""L2: documents from files, the Python standard library or the hub, and their packing into token rows."""

from saejax.text.chat import ChatTemplate
from saejax.text.config import SourceConfig, TextConfig
from saejax.text.documents import SPLITS, Document, Source
from saejax.text.in_memory import IdsAlone, is_tokenizer, tokenizer_in_memory
from saejax.text.mixture import parts_of
from saejax.text.packing import PackedRows, Packer, begins_with_bos
from saejax.text.sources import open_source
from saejax.text.tokenizer import Tokenizer

__all__ = [
    "SPLITS",
    "ChatTemplate",
    "Document",
    "IdsAlone",
    "PackedRows",
    "Packer",
    "Source",
    "SourceConfig",
    "TextConfig",
    "Tokenizer",
    "begins_with_bos",
    "is_tokenizer",
    "open_source",
    "parts_of",
    "tokenizer_in_memory",
]
