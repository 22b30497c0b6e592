"""L2: activations of a language model on disk, written once by a capture, read in shuffled order."""

from saejax.store.arrays import ArrayRows, IteratedBatches
from saejax.store.batches import Batches, BatchSource, RowSource
from saejax.store.describe import describe
from saejax.store.importing import ImportConfig, import_files
from saejax.store.layout import METADATA_NAMES, StoreLayout
from saejax.store.merge import merge
from saejax.store.order import EpochOrder, permute
from saejax.store.reader import StoreReader
from saejax.store.statistics import Statistics
from saejax.store.verify import verify
from saejax.store.writer import StoreWriter

__all__ = [
    "METADATA_NAMES",
    "ArrayRows",
    "BatchSource",
    "Batches",
    "EpochOrder",
    "ImportConfig",
    "IteratedBatches",
    "RowSource",
    "Statistics",
    "StoreLayout",
    "StoreReader",
    "StoreWriter",
    "describe",
    "import_files",
    "merge",
    "permute",
    "verify",
]
