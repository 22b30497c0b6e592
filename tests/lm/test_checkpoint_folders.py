"""Every way to write a checkpoint folder: the logits are those of transformers, or the folder is refused by name.

A tensor that is there is never dropped silently, and of two files the one counts that transformers takes.
"""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import safetensors.numpy
from tiny.decoders import CONFIG, VOCAB, write_tokenizer
from tiny.families import random_model

from saejax.core.errors import DataError
from saejax.lm import checkpoint, decoder, list_hook_points, load_lm
from saejax.lm.conventions import DecoderConfig

torch = pytest.importorskip("torch", reason="parity needs PyTorch, an extra: pip install 'saejax[torch]'")
transformers = pytest.importorskip("transformers")

Tensors = dict[str, np.ndarray]
TIED = {
    "gpt2": ("transformer.", "wte.weight", "ln_f.weight"),
    "gpt_neox, sequential, no bias": ("gpt_neox.", "embed_in.weight", "final_layer_norm.weight"),
    "llama, linear rope, biases, tied": ("model.", "embed_tokens.weight", "norm.weight"),
}
TOKENS = np.random.default_rng(0).integers(0, VOCAB - 2, (1, 12))
HEAD = "lm_head.weight"


@functools.cache
def original(family: str) -> tuple[dict[str, Any], Tensors]:
    """(config.json, tensors under the names of transformers' own modules, the tied ones once) of a random model."""
    if family == "gpt2":
        torch.manual_seed(0)
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**CONFIG, eos_token_id=0)).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0.0, 0.3)
    else:
        model = random_model(family)
    tensors = {name: value.detach().numpy().copy() for name, value in model.named_parameters()}
    return model.config.to_dict() | {"architectures": [type(model).__name__]}, tensors


def other(tensors: Tensors, name: str, seed: int = 1) -> np.ndarray:
    """Other numbers in the shape of a tensor."""
    return np.random.default_rng(seed).normal(0.0, 0.3, tensors[name].shape).astype(np.float32)


def put(folder: Path, tensors: Tensors, name: str = "model.safetensors") -> None:
    safetensors.numpy.save_file(tensors, folder / name, metadata={"format": "pt"})


def put_index(folder: Path, weight_map: dict[str, str]) -> None:
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def put_shards(folder: Path, tensors: Tensors) -> dict[str, str]:
    """Three files with an index; gives the index."""
    where = {name: f"model-{i % 3 + 1:05d}-of-00003.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in sorted(set(where.values())):
        put(folder, {name: tensors[name] for name in tensors if where[name] == file}, file)
    put_index(folder, where)
    return where


class Given:
    """One model to be written in some way: its tensors, and the names of its parts."""

    def __init__(self, family: str, folder: Path):
        self.prefix, embedding, norm = TIED[family]
        self.embedding, self.norm = self.prefix + embedding, self.prefix + norm
        self.config, tensors = original(family)
        self.tensors, self.folder = dict(tensors), folder
        self.former = "embed_out.weight" if "neox" in family else HEAD  # as transformers' files call the head

    def put(self, **more: np.ndarray) -> None:
        put(self.folder, self.tensors | more)

    @property
    def spoiled(self) -> Tensors:
        return {name: other(self.tensors, name, 5) for name in self.tensors}


def tied(given: Given) -> None:
    given.put()


def equal_head(given: Given) -> None:
    given.put(**{given.former: given.tensors[given.embedding]})


def other_head(given: Given) -> None:
    given.put(**{given.former: other(given.tensors, given.embedding)})


def head_by_its_module(given: Given) -> None:
    given.put(**{HEAD: other(given.tensors, given.embedding)})


def head_in_half_precision(given: Given) -> None:
    given.put(**{given.former: given.tensors[given.embedding].astype(np.float16)})


def head_alone(given: Given) -> None:
    given.tensors = {HEAD if name == given.embedding else name: value for name, value in given.tensors.items()}
    given.put()


def untied(given: Given) -> None:
    given.config = given.config | {"tie_word_embeddings": False}
    other_head(given)


def untied_without_head(given: Given) -> None:
    given.config = given.config | {"tie_word_embeddings": False}
    given.put()


def neither(given: Given) -> None:
    given.tensors.pop(given.embedding)
    given.put()


def without_prefix(given: Given) -> None:
    given.tensors = {name.removeprefix(given.prefix): value for name, value in given.tensors.items()}
    given.put()


def without_prefix_other_head(given: Given) -> None:
    head = other(given.tensors, given.embedding)
    given.tensors = {name.removeprefix(given.prefix): value for name, value in given.tensors.items()}
    given.put(**{HEAD: head})


def norm_under_both_names(given: Given) -> None:
    given.put(**{given.norm.removeprefix(given.prefix): other(given.tensors, given.norm)})


def left_over(name: str) -> Callable[[Given], None]:
    """A vector under a name; `*` stands for the model's prefix."""

    def write(given: Given) -> None:
        given.put(**{name.replace("*", given.prefix): other(given.tensors, given.norm)})

    return write


def prefixed_head(given: Given) -> None:
    given.put(**{f"{given.prefix}lm_head.weight": other(given.tensors, given.embedding)})


def stale_index(given: Given) -> None:
    put_index(given.folder, dict.fromkeys(given.tensors, "model-00001-of-00002.safetensors"))
    given.put()


def damaged_index(given: Given) -> None:
    (given.folder / "model.safetensors.index.json").write_text("{")
    given.put()


def beside_shards(given: Given) -> None:
    put_shards(given.folder, given.spoiled)
    given.put()


def shards(given: Given) -> None:
    put_shards(given.folder, given.tensors)


def shards_with_other_head(given: Given) -> None:
    put_shards(given.folder, given.tensors | {given.former: other(given.tensors, given.embedding)})


def wrong_places(given: Given) -> None:
    where = put_shards(given.folder, given.tensors)
    put_index(given.folder, dict(zip(where, reversed(where.values()), strict=True)))


def index_of_more(given: Given) -> None:
    where = put_shards(given.folder, given.tensors)
    put_index(given.folder, where | {given.former: next(iter(where.values()))})


def twice(given: Given) -> None:
    where = put_shards(given.folder, given.tensors | {given.norm: other(given.tensors, given.norm)})
    last = "model-00004.safetensors"
    put(given.folder, {given.norm: given.tensors[given.norm]}, last)
    put_index(given.folder, where | {given.norm + "_": last})


def a_shard_that_no_index_names(given: Given) -> None:
    put_shards(given.folder, given.tensors)
    put(given.folder, given.spoiled, "model-00004-of-00004.safetensors")


def a_shard_less(given: Given) -> None:
    put_shards(given.folder, given.tensors)
    (given.folder / "model-00002-of-00003.safetensors").unlink()


def beside_others(given: Given) -> None:
    given.put()
    (given.folder / "original").mkdir()
    for name in ("consolidated.safetensors", "original/model.safetensors", "model.fp16.safetensors"):
        put(given.folder, given.spoiled, name)


def nothing_but_others(given: Given) -> None:
    put(given.folder, given.tensors, "consolidated.safetensors")


def by_another_name(given: Given) -> None:
    given.config = given.config | {"transformers_weights": "mine.safetensors"}
    put(given.folder, given.tensors, "mine.safetensors")
    put(given.folder, given.spoiled)


def with_constants(given: Given) -> None:
    frequencies = np.ones(2, np.float32)
    given.put(**{f"{given.prefix}rotary_emb.inv_freq": frequencies, "rotary_emb.inv_freq": frequencies})


# {name: (how the folder is written, None where the logits are transformers', else what the refusal says)}
WAYS: dict[str, tuple[Callable[[Given], None], str | None]] = {
    "tied": (tied, None),
    "tied, an equal head": (equal_head, None),
    "tied, another head": (other_head, None),
    "tied, another head by its module's name": (head_by_its_module, None),
    "tied, the head in half precision": (head_in_half_precision, None),
    "tied, the head alone": (head_alone, None),
    "untied": (untied, None),
    "untied without a head": (untied_without_head, "is missing"),
    "tied, neither": (neither, "is missing"),
    "without the prefix": (without_prefix, None),
    "without the prefix, another head": (without_prefix_other_head, None),
    "a norm under both names": (norm_under_both_names, "no place"),
    "a bias of the head": (left_over("lm_head.bias"), "'lm_head.bias' no place"),
    "a norm of the embedding": (left_over("*embed_norm.weight"), "embed_norm.weight' no place"),
    "a bias of the last norm": (left_over("*norm_final.bias"), "norm_final.bias' no place"),
    "a scale outside": (left_over("*embed_scale"), "embed_scale' no place"),
    "a head of values": (left_over("v_head.summary.weight"), "'v_head.summary.weight' no place"),
    "a head with a prefix": (prefixed_head, "lm_head.weight' no place"),
    "a stale index": (stale_index, None),
    "a damaged index": (damaged_index, None),
    "one file beside shards": (beside_shards, None),
    "shards": (shards, None),
    "shards, another head": (shards_with_other_head, None),
    "an index with wrong places": (wrong_places, None),
    "an index that promises more": (index_of_more, None),
    "a tensor in two shards": (twice, None),
    "a shard that no index names": (a_shard_that_no_index_names, None),
    "a shard less": (a_shard_less, "names the file 'model-00002-of-00003.safetensors'"),
    "others beside": (beside_others, None),
    "others alone": (nothing_but_others, "No model.safetensors"),
    "by another name": (by_another_name, "transformers_weights names 'mine.safetensors'"),
    "constants": (with_constants, None),
}


@functools.cache
def compiled(config: DecoderConfig) -> Callable[[Any, Any], jax.Array]:
    return jax.jit(lambda params, tokens: decoder.run(config, params, tokens)[0])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", TIED)
def test_a_folder_is_read_as_transformers_reads_it_or_refused(family: str, way: str, tmp_path: Path) -> None:
    write, refusal = WAYS[way]
    given = Given(family, tmp_path)
    write(given)
    (tmp_path / "config.json").write_text(json.dumps(given.config))
    write_tokenizer(tmp_path)
    if refusal:
        with pytest.raises(DataError, match=refusal):
            load_lm(str(tmp_path))
        return
    lm = load_lm(str(tmp_path))
    ours = np.asarray(compiled(lm.config)(lm.params, TOKENS))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager", use_safetensors=True
    ).eval()
    with torch.no_grad():
        wanted = theirs(torch.tensor(TOKENS), use_cache=False).logits.numpy()
    assert np.std(wanted) > 0.2, "the comparison is of something"
    np.testing.assert_allclose(ours, wanted, rtol=1e-4, atol=1e-4)
    # What is listed without loading is what was loaded.
    counted = list_hook_points(str(tmp_path)).shape.n_parameters
    assert counted == sum(value.size for value in jax.tree.leaves(lm.params))
    again = tmp_path / "again"
    again.mkdir()
    checkpoint.write(again, given.config, lm.params)
    jax.tree.map(np.testing.assert_array_equal, checkpoint.read_params(again)[1], lm.params)
