"""Settings of a capture."""

import dataclasses
import math
from typing import Any

from saejax.capture.sinks import Sinks
from saejax.core.errors import ConfigError
from saejax.core.settings import Settings, setting
from saejax.store import StoreLayout
from saejax.store.layout import DTYPES


@dataclasses.dataclass(frozen=True)
class CaptureConfig(Settings, section="capture"):
    """Settings of a capture."""

    hook_points: tuple[str, ...] = setting(
        ("blocks.3.resid_post",),
        "Names as in `blocks.6.resid_pre`, ranges as in `blocks.{0..5}.resid_post` and `blocks.*.mlp_out`; all are "
        "captured in the same forward pass.",
    )
    tokens: int = setting(
        10_000_000, "Activations for training; the store is smaller if the text runs out.", low=1, high=math.inf
    )
    heldout_tokens: int = setting(
        65_536, "Activations of held-out text, for validation during training.", low=1, high=math.inf
    )
    batch_rows: int = setting(
        32,
        "Packed rows in a forward pass; 0: as many as the GPU has memory for (lm.backend torch; 32 on a CPU).",
        low=0,
    )
    shard_rows: int = setting(32_768, "Rows of a shard of the store, within which they are shuffled.", low=1)
    chunk_rows: int = setting(256, "Rows of a chunk of the store, which is read as a whole.", low=1)
    dtype: str = setting(
        "bfloat16",
        "How the store holds the training activations: bfloat16, or int8 with one scale a row, which takes half the "
        "disk. The held-out ones stay bfloat16, so that every figure is of exact activations.",
        choices=DTYPES,
    )
    non_finite: str = setting(
        "abort", "abort, or drop the rows that hold NaN or infinity (they are counted).", choices=("abort", "drop")
    )
    last_tokens: int = setting(
        0, "How many ordinary tokens are stored of each document, its last ones; 0 stores all.", low=0
    )
    drop_ids: tuple[int, ...] = setting(
        (), "Tokens with these ids are never stored. (bos, other special tokens and padding never are.)", low=0
    )
    drop_first: int = setting(
        1,
        "Tokens at the front of each piece of a text that are never stored, a bos among them. The first reads nothing "
        "but itself, and many models rest their attention on it; 0 stores it where it is no bos.",
        low=0,
    )
    max_norm_ratio: float = setting(
        20.0,
        "Tokens with a massive activation are dropped and counted: at some hook point it is longer than so many times "
        "the median of the tokens of its packed row that are to be stored. 0 drops none.",
        low=0,
    )
    into: str = setting(
        "store",
        "store, or training: the training activations go from the model straight into the training and never to disk; "
        "an epoch is `tokens` of them. (The held-out ones are stored all the same: they are few.)",
        choices=("store", "training"),
    )
    buffer_rows: int = setting(
        131_072, "Into training: activations that are shuffled with each other; two such blocks are in memory.", low=1
    )
    mesh: tuple[int, ...] = setting(
        (),
        'Into training: devices along ("data", "latent") that run the language model and nothing else, as in 2,1; the '
        "others train at the same time. Empty: all do both, in turn.",
        decides=False,
    )
    parts: int = setting(
        1,
        "The text is divided into so many parts, by a hash of each document's index, and at most so many processes can "
        "share the capture (parallel.processes). Each part fills its own shards with its own text: what is stored "
        "depends on the number of parts, and not on how many processes wrote them.",
        low=1,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.hook_points:
            raise ConfigError("capture.hook_points is empty; name at least one, as in blocks.6.resid_pre.")
        if 0 < self.max_norm_ratio <= 1:
            raise ConfigError(
                f"capture.max_norm_ratio is {self.max_norm_ratio}; it must be 0 (no filter) or a number above 1, as 10."
            )
        if self.into == "training" and self.dtype != StoreLayout.dtype:
            raise ConfigError(f"capture.into=training stores no training activations: leave out dtype={self.dtype}.")
        if self.mesh and (len(self.mesh) != 2 or min(self.mesh) < 1):
            raise ConfigError(f"capture.mesh is {self.mesh}; it must be two positive numbers, as in 2,1, or empty.")
        if self.mesh and self.into != "training":
            raise ConfigError(
                f"capture.mesh is {self.mesh}, but a capture into a store runs on the devices of parallel.mesh; leave "
                "it empty, or set capture.into=training."
            )
        StoreLayout(self.shard_rows, self.chunk_rows)

    @property
    def sinks(self) -> Sinks:
        return Sinks(self.drop_first, self.max_norm_ratio)

    def layout(self, split: str) -> StoreLayout:
        return StoreLayout(self.shard_rows, self.chunk_rows, self.dtype if split == "train" else StoreLayout.dtype)

    @property
    def identity(self) -> dict[str, Any]:
        """JSON of what decides which tokens are stored: what leaves none out is not in it."""
        chosen: dict[str, Any] = {}
        if self.last_tokens:
            chosen["last_tokens"] = self.last_tokens
        if self.drop_ids:
            chosen["drop_ids"] = sorted(set(self.drop_ids))
        if self.drop_first:
            chosen["drop_first"] = self.drop_first
        if self.max_norm_ratio:
            chosen["max_norm_ratio"] = self.max_norm_ratio
        if self.parts > 1:
            chosen["parts"] = self.parts
        return chosen
