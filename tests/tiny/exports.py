"""A report and a scan of a tiny coder, beside its latents by hand: what the exports are compared with."""

import copy
import dataclasses
import functools
from typing import Any

import numpy as np

from saejax.analysis import ReportConfig, Scan, collect_features, scan_latents
from saejax.text import Packer
from saejax.trained import Origin, TrainedCoder
from tiny.by_hand import (
    HOOK,
    ROW,
    SIDES,
    captured_at,
    coder_of,
    documents,
    numpy_coder,
    random_params,
    sites_of,
    source,
    tiny_lm,
)

WIDTH, DEAD = 40, 5
REPORT = ReportConfig(tokens=10**6, examples=3, quantiles=3, before=5, after=3, logits=6, batch_rows=4)


@dataclasses.dataclass(frozen=True)
class Reported:
    """The coder, its report and scan; tokens [R, S] and latents f [R, S, G F] in float64, 0 where none is kept."""

    sae: TrainedCoder
    content: dict[str, Any]
    scan: Scan
    tokens: np.ndarray
    f: np.ndarray
    n_tokens: int

    def strings(self, row: int) -> list[str]:
        return [{60: "<bos>", 61: "<mask>"}.get(int(t), f"w{t}") for t in self.tokens[row]]

    def holds(self, latent: int, tokens: list[str], values: list[float], atol: float = 2e-3) -> bool:
        """Whether these tokens stand somewhere in a row, and the latent has these values there."""
        for row in range(len(self.tokens)):
            strings = self.strings(row)
            for at in range(len(strings) - len(tokens) + 1):
                inside = slice(at, at + len(tokens))
                if strings[inside] == tokens and np.allclose(self.f[row, inside, latent], values, atol=atol):
                    return True
        return False


def reported(topology: str = "autoencoder", sparsity: str = "topk") -> Reported:
    """Computed once; each caller has a report of its own."""
    kept = _reported(topology, sparsity)
    return dataclasses.replace(kept, content=copy.deepcopy(kept.content))


@functools.cache
def _reported(topology: str, sparsity: str) -> Reported:
    reads, writes = SIDES.get(topology, ((HOOK,), (HOOK,)))
    coder = coder_of(topology, sparsity, reads, writes, WIDTH)
    params, lm = random_params(coder), tiny_lm()
    sae = TrainedCoder(coder, params, sites_of(coder, reads, writes), Origin(model="org/Tiny"))
    packer = Packer(source(documents()), lm.tokenizer, ROW)
    content, _, _ = collect_features(sae, lm, packer, REPORT)
    scan = scan_latents(sae, lm, packer, REPORT.tokens, REPORT.batch_rows)
    (packed,) = packer.batches("heldout", len(scan.tokens))
    f, _ = numpy_coder(topology, sparsity, params, captured_at(lm, packed, reads))
    f = np.where(packed.keep[:, :, None], f.reshape(*packed.tokens.shape, -1), 0)
    return Reported(sae, content, scan, packed.tokens, f, int(packed.keep.sum()))
