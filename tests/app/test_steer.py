"""`saejax steer`: what it prints is what the model writes with the decoder row added by hand."""

import dataclasses
import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from tiny.by_hand import coder_of, random_params, sites_of
from tiny.commands import run_command

import saejax
from saejax.app.steer import Operation, continuations, features
from saejax.core.errors import ConfigError, DataError
from saejax.interventions import Interventions, steered
from saejax.lm import checkpoint, load_lm
from saejax.lm.generation import Sampling, generate
from saejax.trained import Origin, TrainedCoder

POINT, F = "blocks.0.resid_post", 40
DEMO = Path(checkpoint.__file__).parent / "demo"


def dictionary(**origin: Any) -> TrainedCoder:
    coder = coder_of("autoencoder", "topk", (POINT,), (POINT,), F, 128)
    params = random_params(coder)
    params["W_dec"] *= 8
    return TrainedCoder(coder, params, sites_of(coder, (POINT,), (POINT,)), Origin(**origin))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dictionary of the demo model's first two layers, which are a model beside it."""
    path = tmp_path_factory.mktemp("steer") / "sae"
    model = path.parent / "lm"
    params = load_lm("demo").params
    config_json = json.loads((DEMO / "config.json").read_text()) | {"n_layer": 2}
    checkpoint.write(model, config_json, params | {"blocks": params["blocks"][:2]})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, model / name)
    dictionary(model=str(model)).save(path)
    return path


def test_both_texts_and_what_is_said_of_them(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = ["def read(self):", "return self.read("]  # of as many tokens, for one program
    run_command("steer", [folder, *prompts], feature="3", scale=5.0, tokens=6)
    out = capsys.readouterr().out
    lm, sae = load_lm(str(folder.parent / "lm")), dictionary()
    rows = [[0, *lm.tokenizer.encode(prompt)] for prompt in prompts]
    row = jnp.asarray(sae.params["W_dec"][3]) * 5

    def push(place: Any, _: Any) -> Any:
        return {POINT: lambda x: x + jnp.where(place[..., None] >= 1, row, 0)}

    said = re.findall(r"^(without|with   )\| (.*(?:\n {7}\| .*)*)", out, re.MULTILINE)
    texts = [text.replace("\n       | ", "\n") for _, text in said]
    for i, edits in ((0, None), (1, push)):
        columns = list(generate(lm.config, lm.params, rows, Sampling(6), edits))
        want = [lm.tokenizer.decode_inside([int(t) for t in row]) for row in np.stack(columns, axis=1)]
        assert texts[i::2] == want
    assert texts[0] != texts[1]
    fires, n, kl = re.findall(r"fires at (\d+) of (\d+) tokens.*moves by ([\d.e+-]+) nats", out)[0]
    x = np.asarray(lm.run([rows[0]], capture=[POINT])[1][POINT])[0, 1:]
    assert (int(fires), int(n)) == (int((sae.encode(x)[:, 3] != 0).sum()), len(x)) and float(kl) > 0.01


def test_in_python_it_is_what_the_command_prints(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    how: dict[str, Any] = {"scale": 30.0, "operation": "set", "tokens": 4}
    run_command("steer", [folder, "def read(self):"], feature="3,9", **how)
    lm, sae = load_lm(str(folder.parent / "lm"), backend="jax"), dictionary()
    (one,) = saejax.steer(sae, lm, "def read(self):", np.array([3, 9]), **how)
    out = capsys.readouterr().out
    assert out.endswith(f"\n{one!r}\n") and f"latent 3,9: {one.change}, at" in out
    assert one.without != one.changed and one.prompt == "def read(self):"


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"sae": "sae"}, "a dictionary and then its model; the first is a str"),
        ({"lm": "demo"}, "model that JAX runs"),
        ({"prompt": ["x", ""]}, "prompt is empty"),
        ({"latents": F}, r"latents=40: the latents are 0 to 39"),
        ({"latents": [1, F]}, r"latents=40: the latents are 0 to 39"),
        ({"latents": "1:3"}, "there is no layer 1"),
        ({"operation": "ad"}, "No operation 'ad'"),
    ],
)
def test_in_python_too_what_cannot_be_is_refused(change: dict[str, Any], match: str) -> None:
    how: dict[str, Any] = {"sae": dictionary(), "lm": load_lm("demo"), "prompt": "x", "latents": 3}
    with pytest.raises(ConfigError, match=match):
        saejax.steer(**how | change)


def test_latents_are_named_by_number_or_by_layer() -> None:
    reads, writes = ("blocks.0.mlp_in", "blocks.1.mlp_in"), ("blocks.0.mlp_out", "blocks.1.mlp_out")
    coder = coder_of("clt", "topk", reads, writes, F)
    clt = TrainedCoder(coder, random_params(coder), sites_of(coder, reads, writes))
    assert features("1:3, 7,79", clt) == [43, 7, 79]
    for text, match in (("80", "0 to 79"), ("2:1", "there are 0 to 1"), ("1:40", "0 to 39"), ("x", "give numbers")):
        with pytest.raises(ConfigError, match=match):
            features(text, clt)
    with pytest.raises(ConfigError, match="no layer 0 of latents; there are none"):
        features("0:3", dictionary())


@pytest.mark.parametrize(
    ("words", "given", "match"),
    [
        (["sae"], {"feature": "3"}, "Give a dictionary and a prompt"),
        (["sae", "x"], {}, "--feature is missing"),
        (["sae", ""], {"feature": "3"}, "A prompt is empty"),
        (["sae", "x"], {"feature": "3", "operation": "zer"}, "No operation 'zer'.*zero"),
        (["sae", "x"], {"feature": "40"}, "--feature=40: the latents are 0 to 39"),
        (["nothing", "x"], {"feature": "3"}, "nothing does not exist"),
        (["unknown", "x"], {"feature": "3"}, "does not say which language model it belongs to"),
        (["sae", "x" * 2000], {"feature": "3"}, "the model reads 256. Ask for fewer"),
        (["sae", "x"], {"feature": "3", "top_p": 0.0}, "top_p is 0.0"),
        # What float32 does not hold is infinite in the model, or 0.
        *((["sae", "x"], {"feature": "3", "scale": big}, "scale is") for big in (1e39, -1e300, math.inf, math.nan)),
        *((["sae", "x"], {"feature": "3", "temperature": odd}, "temperature is") for odd in (1e-46, 1e39)),
        (["sae", "x"], {"feature": "3", "top_p": 1e-50}, "top_p is 1e-50"),
    ],
)
def test_what_cannot_be_steered_is_refused(
    words: list[str], given: dict[str, Any], match: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    if not Path("unknown").exists():
        dictionary().save("unknown")
    with pytest.raises((ConfigError, DataError), match=match):
        run_command("steer", words, **given)


@pytest.mark.parametrize("with_bos", [True, False])
def test_the_first_token_stays_as_it_is(with_bos: bool, folder: Path) -> None:
    """A model has its sink there, on its bos or on what stands first."""
    lm, prompt = load_lm(str(folder.parent / "lm")), "def read(self):"
    if not with_bos:
        lm = dataclasses.replace(lm, tokenizer=dataclasses.replace(lm.tokenizer, bos_id=None))
    rows, operation = [lm.tokenizer.bos + lm.tokenizer.encode(prompt)], Operation("set", [9], 40.0)
    inside = Interventions(lm, {"x": dictionary()})
    (written,) = continuations(inside, "x", operation, [prompt], Sampling(4))
    own = list(steered(inside, "x", operation.at, rows, Sampling(4), 1))
    assert written.changed == np.stack(own, axis=1)[0].tolist()
    assert f"of {len(rows[0]) - 1} tokens" in written.about


def test_other_latents_and_numbers_take_the_same_programs(folder: Path) -> None:
    lm, prompts = load_lm(str(folder.parent / "lm")), ["def read(self):", "x ="]
    inside = Interventions(lm, {"x": dictionary()})
    bos = lm.tokenizer.bos_id
    rows = [[bos, *lm.tokenizer.encode(prompt)] for prompt in prompts]
    for operation in (Operation("set", [9], 40.0), Operation("most", [3], 0.5)):
        written = continuations(inside, "x", operation, prompts, Sampling(4))
        own = list(steered(inside, "x", operation.at, rows, Sampling(4), 1))
        assert [one.changed for one in written] == np.stack(own, axis=1).tolist()
    (_, kept) = inside.kept["x", 1]
    assert [step._cache_size() for step in kept.values()] == [2]  # of a prompt, of a token
    assert (
        written[0].changed != continuations(inside, "x", Operation("set", [9], 40.0), prompts, Sampling(4))[0].changed
    )
    with pytest.raises(ConfigError, match="too large"):
        continuations(inside, "x", Operation("set", [9], 3.4e38), prompts, Sampling(4))
    with pytest.raises(ConfigError, match="No operation 'ad'"):
        Operation("ad", [3], 1.0)
