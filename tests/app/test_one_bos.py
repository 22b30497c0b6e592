"""A text that begins with the model's bos token is read with one bos, at every door that reads a text."""

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny.by_hand import coder_of, random_params, sites_of
from tiny.commands import run_command

import saejax
from saejax.app import graph as graphs
from saejax.app import steer as steering
from saejax.capture import store_identity
from saejax.core.errors import DataError
from saejax.evals.probing.last_token import Reader
from saejax.interventions import Interventions
from saejax.lm import load_lm
from saejax.lm.generation import Sampling
from saejax.prefix.config import PrefixConfig
from saejax.prefix.records import Record
from saejax.prefix.samples import spoken
from saejax.serve.features import texts
from saejax.studies.baseline import as_prompts
from saejax.studies.behaviours import Pair, unfit
from saejax.text import Source, TextConfig
from saejax.trained import TrainedCoder

POINT = "blocks.0.resid_post"
TEXT = "def read(self):"
LM = load_lm("demo")
BOS = LM.tokenizer.decode(LM.tokenizer.bos)


def dictionary() -> TrainedCoder:
    coder = coder_of("autoencoder", "topk", (POINT,), (POINT,), 40, 128)
    return TrainedCoder(coder, random_params(coder), sites_of(coder, (POINT,), (POINT,)))


def of_torch(text: str) -> Any:
    torch, transformers = (
        pytest.importorskip(name, reason="PyTorch is an extra") for name in ("torch", "transformers")
    )
    from saejax.lm.torch_hooks import from_module

    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=4096, n_embd=8, n_layer=1, n_head=1, n_positions=32)
    return from_module(transformers.GPT2Model(config), LM.tokenizer, {}).activations(text, "h.0")


def until(module: Any, name: str, run: Callable[[], Any], **patches: Any) -> Any:
    """The arguments with which `run` calls a function of a module, where it ends."""
    seen: list[Any] = []

    def end(*arguments: Any, **_: Any) -> Any:
        seen.extend(arguments)
        raise DataError("the arguments are all that is asked for")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(DataError, match="all that is asked for"):
        for key, value in {name: end, **patches}.items():
            patch.setattr(module, key, value)
        run()
    return seen


def of_steering(text: str) -> Any:
    inside = Interventions(LM, {"a": dictionary()})
    operation = steering.Operation("add", [3], 5.0)
    run = functools.partial(steering.continuations, inside, "a", operation, [text], Sampling(2))
    _, _, _, rows, _, first = until(steering, "steered", run)
    return rows, first


def of_graph(text: str) -> Any:
    run = functools.partial(run_command, "graph", ["runs/a", text])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("saejax.app.run_coders.with_model", lambda *_: ([], LM))
        patch.setattr(graphs, "at_model", lambda *_: [])
        _, _, tokens, config = until(graphs, "decided_by", run)
    return tokens, config.silent


def of_probes(text: str) -> Any:
    return Reader(LM, (POINT,), True, 16, 64, "float32", Path()).ids([text])


def of_page(text: str) -> Any:
    sae = dictionary()
    return texts.encoded(sae, texts.Reader(LM, sae), text)


def of_study(text: str) -> Any:
    pair = Pair(text, TEXT.replace("self", "data"), " in", " is")
    prompts = as_prompts([pair], LM)
    return prompts.clean, prompts.last, unfit(pair, LM.tokenizer, 9)


DOORS: dict[str, Callable[[str], Any]] = {
    "activations": lambda text: LM.activations(text, POINT),
    "activations, PyTorch": of_torch,
    "steer": of_steering,
    "graph": of_graph,
    "probes": of_probes,
    "a text on the page": of_page,
    "study": of_study,
    "prefix": lambda text: spoken(LM.tokenizer, [Record(text, text, ("a",))], PrefixConfig(prompt="{question}")),
}


def flat(value: Any) -> list[Any]:
    if isinstance(value, tuple | list):
        return [item for one in value for item in flat(one)]
    return [np.asarray(value).tolist()] if not hasattr(value, "__dict__") else flat(list(vars(value).values()))


@pytest.mark.parametrize("door", DOORS)
def test_a_text_is_read_with_one_bos(door: str) -> None:
    assert LM.tokenizer.encode(BOS + TEXT) == [*LM.tokenizer.bos, *LM.tokenizer.encode(TEXT)]
    bare, marked = (flat(DOORS[door](text)) for text in (TEXT, BOS + TEXT))
    assert bare == marked != flat(DOORS[door](TEXT.replace("read", "write")))


def test_a_store_of_texts_that_had_two_is_another_one() -> None:
    files: dict[str, Any] = {"source": "files", "paths": ("x.jsonl",)}
    one, two = (
        store_identity(LM, Source({}, lambda _: iter(()), 0.1), TextConfig(**files, template=f"{front}{{q}}"), "train")
        for front in (BOS, "")
    )
    assert one == two | {"own_bos": "once"}


def test_no_other_place_puts_a_bos_in_front_by_itself() -> None:
    """The rule stands in `Tokenizer`: `bos` and `encode_behind_bos`."""
    package = Path(saejax.__file__).parent
    named = {
        p.relative_to(package).as_posix() for p in package.rglob("*.py") if re.search(r"\bbos_id\b", p.read_text())
    }
    assert named == {"text/tokenizer.py", "text/packing.py", "lm/torch_hooks/load.py"}
