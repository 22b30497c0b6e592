"""sae-probes and SAEBench on a dictionary of saejax, offline: the same probes on SAELens's latents and on saejax's.

    python benchmarks/peers/run_sae_probes.py runs/quickstart build/probes

Four of the data sets that sae-probes ships. Its own code runs the language model (a HookedTransformer, made of the
local folder that the dictionary names), selects latents, fits and scores the probes. It gets three dictionaries: the
exported folder as `SAE.load_from_disk` reads it, `saejax.interop.saebench.as_module`, and `encode` of saejax itself.
SAEBench's sae-probes evaluation takes as_module, its core evaluation SAELens's and as_module. Prints the tables of
benchmarks/sae_probes.md.

Runs in saejax's environment (with torch), with the packages of build/peers-venv behind its own.
"""

import argparse
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", HF_DATASETS_OFFLINE="1", WANDB_MODE="disabled")
ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "build/peers-venv/lib/python3.11/site-packages"))

# E402 below: the peers are found only once their folder is on the path, and read the environment as they are imported.
import stand_ins  # noqa: E402, F401 - before the peers
import torch  # noqa: E402
import transformers  # noqa: E402
from sae_bench.custom_saes import base_sae  # noqa: E402
from sae_bench.evals.core import main as core  # noqa: E402
from sae_bench.evals.sparse_probing_sae_probes import eval_config, main  # noqa: E402
from sae_bench.sae_bench_utils import general_utils  # noqa: E402
from sae_lens import SAE  # noqa: E402
from sae_probes import run_sae_evals  # noqa: E402
from sae_probes.constants import DATA_PATH  # noqa: E402
from sae_probes.generate_model_activations import generate_single_dataset_activations  # noqa: E402
from transformer_lens import HookedTransformer, HookedTransformerConfig  # noqa: E402
from transformer_lens.pretrained.weight_conversions import convert_gpt2_weights  # noqa: E402

import saejax  # noqa: E402
from saejax.interop.hooks import to_transformer_lens  # noqa: E402
from saejax.interop.saebench import as_module  # noqa: E402

MODEL = "local"  # what the peers' files are named after
DATASETS = ("41_truthqa_tf", "95_toxic_is", "117_us_state_FL", "130_temp_cat_Frequency")
KS = (1, 2, 5, 10)


def hooked(folder: Path) -> HookedTransformer:
    """The GPT-2 of a local folder in TransformerLens, weights as they are; compared with transformers' own layers."""
    theirs = transformers.GPT2LMHeadModel.from_pretrained(folder, trust_remote_code=False).eval()
    c = theirs.config
    config = HookedTransformerConfig(
        n_layers=c.n_layer,
        d_model=c.n_embd,
        n_ctx=c.n_positions,
        d_head=c.n_embd // c.n_head,
        n_heads=c.n_head,
        d_vocab=c.vocab_size,
        act_fn="gelu_new",
        eps=c.layer_norm_epsilon,
        normalization_type="LN",
        device="cpu",
    )
    model = HookedTransformer(config)
    model.set_tokenizer(transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False))
    states = convert_gpt2_weights(theirs, config)
    model.load_and_process_state_dict(
        states, fold_ln=False, center_writing_weights=False, center_unembed=False, fold_value_biases=False
    )
    tokens = torch.arange(40).reshape(2, 20)
    with torch.no_grad():
        layers = theirs(tokens, output_hidden_states=True).hidden_states
        _, cache = model.run_with_cache(tokens)
    for i, there in enumerate(layers[1:-1]):  # the last one is normalised
        torch.testing.assert_close(cache[f"blocks.{i}.hook_resid_post"], there, rtol=1e-4, atol=1e-4)
    return model


def probed(
    sae: Any, name: str, hook: str, out: Path, datasets: list[str], ks: Sequence[int] = KS
) -> dict[tuple[str, int], float]:
    """{(data set, k): AUC on sae-probes' test rows}, by its own code."""
    run_sae_evals(
        sae=sae,
        model_name=MODEL,
        hook_name=hook,
        reg_type="l1",
        setting="normal",
        ks=list(ks),
        results_path=out / name,
        model_cache_path=out / "activations",
        datasets=datasets,
        device="cpu",
    )
    folder = out / name / f"sae_probes_{MODEL}" / "normal_setting"
    rows = [row for path in sorted(folder.glob("*.json")) for row in json.loads(path.read_text())]
    return {(row["dataset"], row["k"]): row["test_auc"] for row in rows if row["dataset"] in datasets}


class Tokens:
    """What SAEBench's core evaluation asks an ActivationsStore for: batches of tokens, here of prompts it is given."""

    def __init__(self, model: HookedTransformer, prompts: list[str], batch: int, context: int) -> None:
        ids = [t for p in prompts for t in (model.tokenizer.bos_token_id, *model.tokenizer(p)["input_ids"])]
        self.rows = torch.tensor(ids[: len(ids) // context * context]).reshape(-1, context)
        self.store_batch_size_prompts, self.context_size, self.batches = batch, context, iter(())

    def get_batch_tokens(self, size: int) -> torch.Tensor:
        self.batches: Iterator[torch.Tensor]
        if (batch := next(self.batches, None)) is None:
            return self.reset_input_dataset(size) or next(self.batches)
        return batch

    def reset_input_dataset(self, size: int = 0) -> None:
        self.batches = iter(self.rows.split(size or self.store_batch_size_prompts))


def core_figures(sae: Any, model: HookedTransformer, prompts: list[str]) -> dict[str, float]:
    """SAEBench's core evaluation of one dictionary."""
    config = core.CoreEvalConfig(
        model_name=MODEL,
        batch_size_prompts=8,
        n_eval_reconstruction_batches=4,
        n_eval_sparsity_variance_batches=4,
        compute_kl=True,
        compute_ce_loss=True,
        compute_l2_norms=True,
        compute_sparsity_metrics=True,
        compute_variance_metrics=True,
        compute_featurewise_density_statistics=True,
        compute_featurewise_weight_based_metrics=True,
    )
    general_utils.load_and_format_sae("mine", sae, "cpu")
    metrics, features = core.run_evals(sae, Tokens(model, prompts, 8, 128), model, config)
    flat = {name: value for group in metrics.values() for name, value in group.items()}
    per_latent = {name: torch.tensor(values).mean().item() for name, values in features.items() if "cosine" in name}
    return {**flat, **per_latent}


def saebench_checks(module: Any, model: HookedTransformer) -> None:
    """Its unit rows and its own test of a dictionary; raises where they fail."""
    assert general_utils.check_decoder_norms(module.W_dec.data), "general_utils.check_decoder_norms"
    assert base_sae.BaseSAE.check_decoder_norms(module), "BaseSAE.check_decoder_norms"
    loads: Callable[..., Any] = lambda *_, **__: model  # noqa: E731
    base_sae.HookedTransformer = SimpleNamespace(from_pretrained=loads)
    base_sae.BaseSAE.test_sae(module, MODEL)


def saebench_probes(module: Any, out: Path, datasets: list[str]) -> dict[int, float]:
    """{k: mean AUC} of SAEBench's sae-probes evaluation."""
    config = eval_config.SparseProbingSaeProbesEvalConfig(
        model_name=MODEL,
        dataset_names=datasets,
        ks=list(KS),
        results_path=str(out / "saebench"),
        model_cache_path=str(out / "activations"),
        include_llm_baseline=False,
    )
    main.run_eval(config, [("mine", module)], "cpu", str(out / "saebench_out"), force_rerun=True)
    (path,) = (out / "saebench_out").glob("*.json")
    said = json.loads(path.read_text())["eval_result_metrics"]["sae"]
    return {k: said[f"sae_top_{k}_test_auc"] for k in KS}


def table(title: str, rows: dict[Any, tuple[float, ...]], columns: tuple[str, ...]) -> None:
    print(f"\n| {title} | {' | '.join(columns)} | largest difference |")
    print("|---" * (len(columns) + 2) + "|")
    for name, values in rows.items():
        label = ", ".join(map(str, name)) if isinstance(name, tuple) else name
        print(f"| {label} | {' | '.join(f'{v:.6f}' for v in values)} | {max(values) - min(values):.1e} |")


def run(source: str, out: Path, datasets: list[str]) -> None:
    warnings.simplefilter("ignore")  # of scikit-learn, about how sae-probes calls it
    sae = saejax.load(source)
    hook = to_transformer_lens(sae.hook_point)
    folder = Path(sae.origin.model) if Path(sae.origin.model).is_dir() else Path(saejax.__file__).parent / "lm" / "demo"
    out.mkdir(parents=True)
    sae.save(out / "saelens", format="saelens")
    model = hooked(folder)
    for name in datasets:
        generate_single_dataset_activations(
            model,
            MODEL,
            DATA_PATH / "cleaned_data" / f"{name}.csv.zst",
            [hook],
            out / "activations",
            "cpu",
            max_seq_len=model.cfg.n_ctx,
        )

    theirs, module = SAE.load_from_disk(str(out / "saelens"), device="cpu"), as_module(sae, MODEL)
    ours = SimpleNamespace(encode=lambda x: torch.tensor(sae.encode(x.numpy())))
    aucs = [probed(s, n, hook, out, datasets) for n, s in (("theirs", theirs), ("ours", ours), ("module", module))]
    print(f"\n{sae!r}")
    columns = ("SAELens", "saejax", "as_module")
    table("data set, k: AUC", {key: tuple(auc[key] for auc in aucs) for key in aucs[0]}, columns)
    means = saebench_probes(module, out, datasets)
    own = {k: sum(value for (_, at), value in aucs[2].items() if at == k) / len(datasets) for k in KS}
    table("SAEBench's mean AUC, k", {k: (means[k], own[k]) for k in KS}, ("SAEBench", "mean of as_module above"))

    saebench_checks(module, model)
    prompts = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "saejax" / "coders").glob("*.py"))]
    figures = [core_figures(s, model, prompts) for s in (theirs, module)]
    table("SAEBench's core", {key: tuple(f[key] for f in figures) for key in figures[0]}, ("SAELens", "as_module"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="what saejax.load takes; its model is the demo model or a GPT-2 folder")
    parser.add_argument("out", type=Path, help="a new folder")
    parser.add_argument("--datasets", nargs="+", default=list(DATASETS))
    given = parser.parse_args()
    run(given.source, given.out, given.datasets)
