"""What the training section measures: one entry a row."""

import dataclasses
from typing import Any

# The families whose latents are sparse from selection to gradient, so that one encoder product is their floor.
SPARSE = ("topk", "batchtopk", "matryoshka", "transcoder", "crosscoder_batchtopk", "clt")
# Products [B, D] x [D, F] that a step cannot do without: the encoder's; and for dense latents also the decoder's, the
# latents' gradient and those of both weights.
SPARSE_PRODUCTS, DENSE_PRODUCTS = 1, 5
# Adam reads a parameter, its gradient and two moments, and writes the parameter and the moments: float32.
ADAM_BYTES = 7 * 4

# Who has what: SAELens runs transcoders and trains none; neither has crosscoders or cross-layer transcoders.
_BOTH = ("saelens", "dictionary_learning")
PEERS = dict.fromkeys(("standard", "topk", "batchtopk", "jumprelu", "matryoshka"), _BOTH)


@dataclasses.dataclass(frozen=True)
class Row:
    """A coder's train step.

    Attributes:
        sites: hook points it reads; two for a transcoder, which reads the first and writes the second.
        dead: so many latents are dead at every step.
        steps: a turn is so many steps; each has a batch of its own.
        beside: another row, whose coder of ours takes its turns in this row too, for a ratio within one run.
        parts: the forward pass and the gradient are timed alone as well.
        published: others' figures for this row, for the page.
    """

    name: str
    preset: str
    d_in: int
    d_sae: int
    k: int = 32
    batch: int = 2048
    sites: int = 1
    dead: int = 0
    steps: int = 3
    quick: bool = False
    beside: str = ""
    parts: bool = False
    published: str = ""

    @property
    def peers(self) -> tuple[str, ...]:
        return PEERS.get(self.preset, ())

    @property
    def sparse(self) -> bool:
        return self.preset in SPARSE

    @property
    def products(self) -> int:
        return SPARSE_PRODUCTS if self.sparse else DENSE_PRODUCTS

    @property
    def encoders(self) -> int:
        """Encoder matrices [D, F]; one of a transcoder's two sites is only written."""
        return 1 if self.preset == "transcoder" else self.sites

    @property
    def latents(self) -> int:
        """Latents of a token over all groups."""
        return self.d_sae * (self.sites if self.preset == "clt" else 1)

    @property
    def parameters(self) -> int:
        """Of the weight matrices; a cross-layer transcoder's group l writes every layer from l on."""
        decoders = self.sites * (self.sites + 1) // 2 if self.preset == "clt" else self.encoders
        return self.d_in * self.d_sae * (self.encoders + decoders)

    @property
    def flops(self) -> float:
        """FLOPs of the products that the floor counts."""
        return 2.0 * self.batch * self.d_in * self.d_sae * self.encoders * self.products

    @property
    def adam_bytes(self) -> float:
        """Bytes that Adam moves over the weights."""
        return float(ADAM_BYTES * self.parameters)

    @property
    def bytes_needed(self) -> float:
        """About what a contestant needs at most: parameters, gradient, moments and an update; dense latents."""
        return 1e9 + 24.0 * self.parameters + 4.0 * self.batch * self.latents * (3 if self.sparse else 6)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def shape(about: dict[str, Any]) -> str:
    """A row's shape in words, from its JSON."""
    sites = f"{about['sites']} x " if about["sites"] > 1 and about["preset"] != "transcoder" else ""
    of_k = {"standard": "", "crosscoder": "", "jumprelu": f", L0 {about['k']}"}.get(
        about["preset"], f", k {about['k']}"
    )
    dead = f", {about['dead']:,} dead" if about["dead"] else ""
    return f"{about['batch']:,} x {sites}{about['d_in']:,} -> {about['d_sae']:,}{of_k}{dead}"


def _row(name: str, preset: str, d_sae: int = 6144, d_in: int = 768, **more: Any) -> Row:
    return Row(name, preset, d_in, d_sae, **more)


CPU_ROWS = (
    # Small, and trained for long enough that FVE says who learned what.
    _row("topk-128-1024", "topk", 1024, 128, k=16, steps=60),
    _row("batchtopk-128-1024", "batchtopk", 1024, 128, k=16, steps=60, beside="topk-128-1024"),
    _row("standard-128-1024", "standard", 1024, 128, k=16, steps=60),
    _row("jumprelu-128-1024", "jumprelu", 1024, 128, k=16, steps=60),
    _row("matryoshka-128-1024", "matryoshka", 1024, 128, k=16, steps=60, beside="batchtopk-128-1024"),
    # The families at a small and a middle size.
    _row("topk-3072", "topk", 3072, quick=True, steps=4),
    _row("batchtopk-3072", "batchtopk", 3072, quick=True, steps=4, beside="topk-3072"),
    _row("standard-3072", "standard", 3072, quick=True, steps=4),
    _row("jumprelu-3072", "jumprelu", 3072, steps=4),
    _row("matryoshka-3072", "matryoshka", 3072, steps=4, beside="batchtopk-3072"),
    _row("topk-6144", "topk", parts=True),
    _row("batchtopk-6144", "batchtopk", beside="topk-6144", parts=True),
    _row("standard-6144", "standard", parts=True),
    _row("jumprelu-6144", "jumprelu", parts=True),
    _row("matryoshka-6144", "matryoshka", beside="batchtopk-6144", parts=True),
    _row("transcoder-6144", "transcoder", sites=2),
    _row("crosscoder-3072x4", "crosscoder", 3072, sites=4),
    _row("crosscoder-batchtopk-3072x4", "crosscoder_batchtopk", 3072, sites=4),
    _row("clt-1536x4", "clt", 1536, sites=4, batch=1024, parts=True),
    # A real run's shape, on the activations of a small model.
    _row("topk-384-3072", "topk", 3072, 384, steps=6),
    _row("batchtopk-384-3072", "batchtopk", 3072, 384, steps=6, beside="topk-384-3072"),
    # Width.
    _row("topk-12288", "topk", 12288, steps=2),
    _row("topk-24576", "topk", 24576, steps=1, parts=True),
    _row("batchtopk-24576", "batchtopk", 24576, steps=1, beside="topk-24576", parts=True),
    _row("matryoshka-24576", "matryoshka", 24576, steps=1, beside="batchtopk-24576"),
    _row("standard-24576", "standard", 24576, steps=1),
    _row("topk-49152", "topk", 49152, steps=1),
    _row("batchtopk-49152", "batchtopk", 49152, steps=1, beside="topk-49152"),
    # Batch.
    _row("topk-6144-b4096", "topk", batch=4096, steps=2),
    _row("topk-6144-b8192", "topk", batch=8192, steps=1),
    _row("batchtopk-6144-b8192", "batchtopk", batch=8192, steps=1, beside="topk-6144-b8192"),
    _row("standard-6144-b8192", "standard", batch=8192, steps=1),
    # k.
    _row("topk-6144-k16", "topk", k=16),
    _row("topk-6144-k64", "topk", k=64),
    _row("topk-6144-k128", "topk", k=128, steps=2),
    _row("topk-6144-k256", "topk", k=256, steps=2),
    _row("batchtopk-6144-k16", "batchtopk", k=16, beside="topk-6144-k16"),
    _row("batchtopk-6144-k256", "batchtopk", k=256, steps=2, beside="topk-6144-k256"),
    # Dead latents: fewer than AuxK's k, which is d_in / 2, and many more.
    _row("topk-6144-dead192", "topk", dead=192, steps=2, beside="topk-6144", parts=True),
    _row("topk-6144-dead3072", "topk", dead=3072, steps=2, beside="topk-6144", parts=True),
    _row("batchtopk-6144-dead3072", "batchtopk", dead=3072, steps=2, beside="batchtopk-6144"),
)

_H100 = "SAELens BatchTopK on an H100, evaluations included: 167 to 222 k tokens/s"
_RTX = "RTX 6000 report: 36.5 ms a step, 449 k tokens/s if a batch is 32 x 512 tokens"

# The figures that the project is to reach on a GPU. Steps are short there: a turn has many.
GPU_ROWS = (
    _row("gpu-batchtopk-4096", "batchtopk", 4096, k=25, batch=1024, steps=100, quick=True, published=_H100),
    _row("gpu-topk-4096", "topk", 4096, k=25, batch=1024, steps=100, quick=True),
    _row("gpu-standard-6144", "standard", 6144, batch=16384, steps=20, published=_RTX),
    _row("gpu-topk-6144", "topk", 6144, batch=16384, steps=20, published=_RTX),
    _row("gpu-topk-32768", "topk", 32768, batch=4096, steps=20, quick=True, parts=True),
    _row("gpu-batchtopk-32768", "batchtopk", 32768, batch=4096, steps=20, beside="gpu-topk-32768"),
    _row("gpu-matryoshka-32768", "matryoshka", 32768, batch=4096, steps=20, beside="gpu-batchtopk-32768"),
    _row("gpu-topk-32768-dead16384", "topk", 32768, batch=4096, dead=16384, steps=20, beside="gpu-topk-32768"),
    _row("gpu-topk-2304-16384", "topk", 16384, 2304, k=64, batch=4096, steps=20),
    _row("gpu-topk-2304-65536", "topk", 65536, 2304, k=64, batch=4096, steps=10),
    _row("gpu-topk-4096-131072", "topk", 131072, 4096, k=64, steps=4),
)
