"""SAEDashboard's own loading of a cross-layer transcoder that saejax wrote, against the formula in float64.

    saejax convert runs/clt coder --to=saejax
    saejax export saedashboard runs/clt out
    build/peers-venv/bin/python benchmarks/peers/check_saedashboard.py coder out

Loads cfg.json and the weights as neuronpedia_runner does (CLTConfig, CrossLayerTranscoder.load_state_dict of the
package decode-clt 0.0.1, CLTLayerWrapper of each layer) and compares latents, the decoder rows that it shows,
and the reconstructions of all layers. The formula reads the coder's own file. Prints the largest differences, as parts
of the largest entry; exits with 1 where one is above 1e-5. Other coders are SAELens folders (benchmarks/interop.md).
"""

import sys
from pathlib import Path

import numpy as np
import stand_ins  # noqa: F401 - before the peers
import torch
from clt.config.clt_config import CLTConfig
from clt.models.clt import CrossLayerTranscoder
from sae_dashboard.clt_layer_wrapper import CLTLayerWrapper
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_tensors

EQUAL = 1e-5


def main(coder: Path, out: Path) -> int:
    p = {name: array.astype(np.float64) for name, array in load_file(coder / "coder.safetensors").items()}
    layers = len(p["W_enc"])
    clt = CrossLayerTranscoder(CLTConfig.from_json(str(out / "cfg.json")), None, torch.device("cpu"))
    (weights,) = out.glob("*.safetensors")
    clt.load_state_dict(load_tensors(weights))
    rows = np.concatenate([p["W_enc"][i].T for i in range(layers)])
    x_BLD = np.random.default_rng(0).normal(size=(256, layers, rows.shape[1])) * 3
    f_BLF = np.einsum("bld,ldf->blf", x_BLD, p["W_enc"]) + p["b_enc"]
    f_BLF = np.where(f_BLF > np.maximum(p.get("threshold", 0), 0), f_BLF, 0)
    y_BLD = np.broadcast_to(p["b_dec"], x_BLD.shape).copy()
    worst = {"latents": 0.0, "decoder rows": 0.0, "reconstructions": 0.0}
    for layer in range(layers):
        wrapper = CLTLayerWrapper(clt, layer, str(out))
        theirs = wrapper.encode(torch.tensor(x_BLD[:, layer], dtype=torch.float32)).detach().numpy()
        worst["latents"] = max(worst["latents"], off(theirs, f_BLF[:, layer]))
        own = p[f"W_dec_{layer}"]
        worst["decoder rows"] = max(worst["decoder rows"], off(wrapper.W_dec.detach().numpy(), own[:, 0]))
        for to in range(layer, layers):
            y_BLD[:, to] += f_BLF[:, layer] @ own[:, to - layer]
    with torch.no_grad():
        latents = {i: torch.tensor(f_BLF[:, i], dtype=torch.float32) for i in range(layers)}
        for layer in range(layers):
            theirs = clt.decode(latents, layer).numpy()
            worst["reconstructions"] = max(worst["reconstructions"], off(theirs, y_BLD[:, layer]))
    fired = float((f_BLF != 0).mean())
    print(
        f"SAEDashboard: {layers} layers, {fired:.1%} of latents fire; "
        + ", ".join(f"{k} {v:.1e}" for k, v in worst.items())
    )
    return 0 if max(worst.values()) <= EQUAL and fired > 0 else 1


def off(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).max() / np.abs(b).max())


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
