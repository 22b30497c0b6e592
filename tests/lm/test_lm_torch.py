"""The JAX decoder against transformers' GPT-2 in PyTorch: logits and every hook point."""

import contextlib
import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tiny.decoders import CONFIG, POINTS, POSITIONS, VOCAB, random_params, rows_of, run_rows, saved, write_tokenizer
from tiny.families import MODELS, random_model

from saejax.lm import LanguageModel, checkpoint, load_lm

torch = pytest.importorskip("torch", reason="parity needs PyTorch, an extra: pip install 'saejax[torch]'")
transformers = pytest.importorskip("transformers")

TOLERANCE: dict[str, Any] = {"atol": 1e-4, "rtol": 1e-4}
VARIANTS: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied, relu, narrow MLP, large epsilon": {
        "tie_word_embeddings": False,
        "activation_function": "relu",
        "n_inner": 40,
        "layer_norm_epsilon": 0.1,
    },
}


def random_torch_model(**changes: Any) -> Any:
    """A GPT2LMHeadModel in which no parameter is zero or one."""
    settings = {k: v for k, v in CONFIG.items() if k != "model_type"}
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**settings, eos_token_id=0, **changes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3)
    return model


@pytest.fixture(scope="module", params=VARIANTS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, LanguageModel]:
    """One model twice: transformers' and ours."""
    model = random_torch_model(**VARIANTS[request.param])
    return model, load_lm(str(saved(model, tmp_path_factory.mktemp("gpt2"))))


def first(value: Any) -> Any:
    return value[0] if isinstance(value, tuple) else value


@contextlib.contextmanager
def hooks(model: Any, seen: dict[str, np.ndarray]) -> Iterator[None]:
    """Writes the value at each of our hook points to `seen`, taken from PyTorch's own modules."""

    def put_input(name: str, _: Any, args: Any) -> None:
        seen[name] = args[0].numpy().copy()

    def put_output(name: str, _: Any, __: Any, output: Any) -> None:
        seen[name] = first(output).numpy().copy()

    with contextlib.ExitStack() as stack:
        for i, block in enumerate(model.transformer.h):
            inputs = {"resid_pre": block, "attn_z": block.attn.c_proj, "resid_mid": block.ln_2}
            outputs = {
                "attn_out": block.attn,
                "mlp_in": block.ln_2,
                "mlp_act": block.mlp.act,
                "mlp_out": block.mlp,
                "resid_post": block,
            }
            for name, module in inputs.items():
                hook = functools.partial(put_input, f"blocks.{i}.{name}")
                stack.callback(module.register_forward_pre_hook(hook).remove)
            for name, module in outputs.items():
                hook = functools.partial(put_output, f"blocks.{i}.{name}")
                stack.callback(module.register_forward_hook(hook).remove)
        yield


def run_torch(model: Any, tokens: np.ndarray, positions: np.ndarray | None = None) -> dict[str, np.ndarray]:
    """Logits and every hook point. Restarting positions keep documents apart; a mask beside would undo it."""
    seen: dict[str, np.ndarray] = {}
    where = {} if positions is None else {"position_ids": torch.tensor(positions, dtype=torch.long)}
    with hooks(model, seen), torch.inference_mode():
        logits = model(torch.tensor(tokens, dtype=torch.long), use_cache=False, **where).logits
    return seen | {"logits": logits.numpy()}


def assert_close(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray], at: Any = ...) -> None:
    assert set(ours) == set(theirs) == {*POINTS, "logits"}
    for name in ours:
        np.testing.assert_allclose(ours[name][at], theirs[name], **TOLERANCE, err_msg=name)


# Every test runs rows of this shape, so that a configuration is compiled once.
ROWS = rows_of([[POSITIONS], [13, 1, 20, 14], [30], [], []], seed=3)


def test_every_hook_point_is_that_of_pytorch(pair: tuple[Any, LanguageModel]) -> None:
    model, lm = pair
    theirs = run_torch(model, ROWS["tokens"][:1])
    assert np.std(theirs["logits"]) > 0.5, "the comparison is of something"
    assert_close(run_rows(lm, ROWS), theirs, np.s_[:1])


def test_packed_documents_are_those_of_pytorch_packed_and_alone(pair: tuple[Any, LanguageModel]) -> None:
    model, lm = pair
    ours = run_rows(lm, ROWS)
    assert_close(ours, run_torch(model, ROWS["tokens"][1:2], ROWS["positions"][1:2]), np.s_[1:2])
    for row, start, stop in ((1, 0, 13), (1, 13, 14), (1, 14, 34), (1, 34, 48), (2, 0, 30)):
        piece = np.s_[row : row + 1, start:stop]
        assert_close(ours, run_torch(model, ROWS["tokens"][piece]), piece)


@pytest.mark.parametrize("pair", ["tied"], indirect=True)
def test_zeroing_attention_is_a_pytorch_hook_doing_so(pair: tuple[Any, LanguageModel]) -> None:
    model, lm = pair

    def zero(_: Any, __: Any, output: Any) -> Any:
        attention = torch.zeros_like(first(output))
        return (attention, *output[1:]) if isinstance(output, tuple) else attention

    handle = model.transformer.h[1].attn.register_forward_hook(zero)
    try:
        theirs = run_torch(model, ROWS["tokens"][:1])
    finally:
        handle.remove()
    edits: dict[str, Callable[[jax.Array], jax.Array]] = {"blocks.1.attn_out": lambda x: x * 0}
    logits, activations = jax.jit(lambda t: lm.run(t, capture=POINTS, edits=edits))(ROWS["tokens"][:1])
    assert_close({k: np.asarray(v) for k, v in {**activations, "logits": logits}.items()}, theirs)
    assert np.abs(theirs["logits"] - run_torch(model, ROWS["tokens"][:1])["logits"]).max() > 0.1


def test_shards_and_bfloat16_are_read_as_pytorch_reads_them(pair: tuple[Any, LanguageModel], tmp_path: Path) -> None:
    model, lm = pair
    sharded = saved(model, tmp_path / "sharded", max_shard_size="40KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    assert not (sharded / "model.safetensors").exists()
    jax.tree.map(np.testing.assert_array_equal, load_lm(str(sharded)).params, lm.params)
    assert load_lm(str(sharded)).identity["weights_sha256"] != lm.identity["weights_sha256"]

    low = transformers.AutoModelForCausalLM.from_pretrained(sharded, dtype=torch.bfloat16)
    folder = saved(low, tmp_path / "bf16")
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    theirs = run_torch(
        transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), ROWS["tokens"][:1]
    )
    ours = run_rows(load_lm(str(folder)), ROWS)
    assert_close(ours, theirs, np.s_[:1])
    assert np.abs(ours["logits"] - run_rows(lm, ROWS)["logits"]).max() > 1e-3


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_we_write_transformers_loads(tmp_path: Path, variant: str) -> None:
    config_json = CONFIG | {"architectures": ["GPT2LMHeadModel"], "eos_token_id": 0} | VARIANTS[variant]
    checkpoint.write(tmp_path, config_json, random_params(config_json))
    write_tokenizer(tmp_path)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert_close(run_rows(load_lm(str(tmp_path)), ROWS), run_torch(model, ROWS["tokens"][:1]), np.s_[:1])


@pytest.mark.parametrize("name", [name for name in MODELS if not name.startswith("gpt_neox") and name != "gemma3"])
def test_what_we_read_we_write_for_transformers(name: str, tmp_path: Path) -> None:
    """transformers -> our parameters -> a folder that transformers loads: the same tensors under the same names."""
    model = random_model(name)
    lm = load_lm(str(saved(model, tmp_path / "read")))
    config_json = json.loads((tmp_path / "read" / "config.json").read_text())
    checkpoint.write(tmp_path / "written", config_json, lm.params)
    again, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "written", output_loading_info=True)
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    there = again.state_dict()
    for key, value in model.state_dict().items():
        # A norm that is kept as 1 + w loses the last bits of a small w.
        torch.testing.assert_close(there[key], value, rtol=0, atol=2e-7 if name.startswith("gemma") else 0)


def test_the_demo_model_is_the_same_in_transformers() -> None:
    demo = load_lm("demo")
    folder = Path(checkpoint.__file__).parent / "demo"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = 'def main(argv: list[str]) -> int:\n    """Runs."""\n    é = [n for n in range(100)]\n' * 2
    ids = demo.tokenizer.encode(text)
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == ids
    assert tokenizer.decode(ids) == demo.tokenizer.decode(ids) == text
    assert tokenizer.bos_token_id == demo.tokenizer.bos_id
    tokens = np.array([[demo.tokenizer.bos_id, *ids]])
    theirs = run_torch(model, tokens)["logits"]
    assert theirs.shape[-1] == demo.config.vocab_size != VOCAB
    ours = jax.jit(lambda t: demo.run(t)[0])(tokens)
    np.testing.assert_allclose(ours, theirs, atol=1e-4, rtol=1e-4)
