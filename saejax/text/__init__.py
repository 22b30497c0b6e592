"""L2: documents from files, the Python standard library or the hub, and their packing into token rows."""

from saejax.text.packing import PackedRows, Packer
from saejax.text.sources import SPLITS, Document, Source, TextConfig, open_source
from saejax.text.tokenizer import Tokenizer

__all__ = ["SPLITS", "Document", "PackedRows", "Packer", "Source", "TextConfig", "Tokenizer", "open_source"]
