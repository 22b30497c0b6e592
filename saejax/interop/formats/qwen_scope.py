"""Qwen-Scope: layer<n>.sae.pt for each layer, in a repository whose name says the rest.

By the converter of SAELens 6.54.12 (loading/pretrained_sae_loaders.py); Qwen publishes files and no code.

    f = topk(relu(x W_enc^T + b_enc)),   x_hat = f W_dec^T + b_dec

W_enc is [F, D] and W_dec [D, F]. Read and written is what a layer writes, blocks.<n>.resid_post. k is in no file: it is
the number at the end of SAE-Res-Qwen3-1.7B-Base-W32K-L0_50.
"""

import re
from collections.abc import Collection, Sequence
from pathlib import Path

from saejax.core.errors import DataError
from saejax.core.torch_file import read_torch
from saejax.interop.assemble import UNCENTRED, Layout, assemble
from saejax.trained import Format, TrainedCoder, register_format

_FILE = re.compile(r"layer(0|[1-9]\d{0,3})\.sae\.pt")
# Also as the hub's cache names it: models--Qwen--SAE-Res-...
_REPOSITORY = re.compile(r"SAE-Res-(Qwen[\w.-]+?)-W(\d{1,5})K-L0_(\d{1,5})")


@register_format
class QwenScope(Format):
    """Several coders a folder, one file a layer."""

    name = "qwen_scope"
    title = "Qwen-Scope"
    files = "SAE-Res-<model>-W<width>K-L0_<k>/layer<n>.sae.pt"
    sets = True
    reads = frozenset({(UNCENTRED, "topk")})

    def here(self, path: Path) -> list[Path]:
        if _FILE.fullmatch(path.name):
            return [path] if path.is_file() else []
        try:
            named = [(match, file) for file in path.glob("layer*.sae.pt") if (match := _FILE.fullmatch(file.name))]
        except OSError:
            return []
        return [file for _, file in sorted((int(match[1]), file) for match, file in named) if file.is_file()]

    def among(self, names: Collection[str]) -> dict[str, list[str]]:
        return {name: [name] for name in names if _FILE.fullmatch(name)}

    def read(self, path: Path, hook_points: Sequence[str] = ()) -> TrainedCoder:
        names = [match for part in path.absolute().parent.parts if (match := _REPOSITORY.search(part))]
        layer = _FILE.fullmatch(path.name)
        if not names or layer is None:
            raise DataError(
                f"{path}: Qwen-Scope's k and model are in the repository's name alone. Put the file into a folder "
                "that is called like it, as in SAE-Res-Qwen3-1.7B-Base-W32K-L0_50/layer7.sae.pt."
            )
        arrays = Layout(transposed=("W_enc", "W_dec")).read(path, read_torch(path))
        hook, (model, _, k) = (f"blocks.{layer[1]}.resid_post",), names[-1].groups()
        model = f"Qwen/{model}"
        return assemble(path, "transcoder", "topk", arrays, hook_points, reads=hook, writes=hook, k=int(k), model=model)
