"""A mixture of four reasoning data sets, read by GPT-2 small: the residual stream entering block 6, TopK.

    saejax pipeline --config=reasoning_mix

Worked mathematics in plain English (GSM8K, and the variations of it and of MATH in MetaMathQA), competition problems
with their solutions (NuminaMath-CoT), and the rationales of 1,060 tasks (CoT-Collection). Weights count documents.
Needs the network and the `data` extra; pin each source's `revision` before a result is to be repeated.
CoT-Collection is published behind a loading script, which `datasets` from version 4 on refuses to run: save it as
.jsonl or .parquet, and name it there by `{"source": "files", "paths": (...,), "template": ...}`, or leave it out.
Tested with rows of the published columns in place of the data; time and quality are not measured yet.
"""

from typing import Any

from ml_collections import config_dict

from saejax.experiment import default_config


def _hub(dataset: str, template: str, weight: float, subset: str = "") -> dict[str, Any]:
    return {"source": "hub", "dataset": dataset, "subset": subset, "template": template, "weight": weight}


def get_config() -> config_dict.ConfigDict:
    c = default_config()
    c.name = "reasoning_mix"
    c.lm.model = "openai-community/gpt2"
    c.lm.revision = "607a30d783dfa663caf39e06633721c8d4cfcd7e"
    c.text.sources = (
        _hub("openai/gsm8k", "Question: {question}\nAnswer: {answer}", 1.0, "main"),
        _hub("kaist-ai/CoT-Collection", "{source}\n{rationale}\nThe answer is {target}", 4.0, "en"),
        _hub("AI-MO/NuminaMath-CoT", "Problem: {problem}\n\nSolution: {solution}", 3.0),
        _hub("meta-math/MetaMathQA", "Question: {query}\nAnswer: {response}", 2.0),
    )
    c.text.heldout_fraction = 0.02
    c.text.context_length = 512
    c.capture.hook_points = ("blocks.6.resid_pre",)
    c.capture.tokens = 20_000_000
    c.capture.heldout_tokens = 262_144
    c.coder.preset = "topk"
    c.coder.expansion = 8
    c.coder.k = 32
    c.train.tokens = 20_000_000
    c.train.batch_size = 4096
    c.train.lr = 1e-4
    return c
