"""Models in memory: read into the decoder or run as they are, with weights, tokenizer and identity of their own."""

import copy
import html
import re
import types
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tokenizers
import transformers
from tiny.decoders import POSITIONS, VOCAB, write_tokenizer
from tiny.families import MODELS
from tiny.families import random_model as of_family

import saejax
from saejax.analysis.features import ReportConfig, collect_features
from saejax.capture import CaptureConfig
from saejax.capture.capture import capture
from saejax.capture.stream import stream_activations
from saejax.core.errors import ConfigError, DataError
from saejax.evals import EvalConfig, evaluate
from saejax.lm import LanguageModel, load_tokenizer
from saejax.lm.pair import ModelPair
from saejax.parallel import ParallelConfig, make_mesh
from saejax.store import StoreReader
from saejax.text import Packer, TextConfig, Tokenizer, open_source

torch = pytest.importorskip("torch", reason="models in memory are PyTorch's, an extra")

from saejax.lm.torch_hooks import TorchModel  # noqa: E402 - after the skips

IDS = np.random.default_rng(0).integers(1, VOCAB - 2, (2, 16))
POINT = "blocks.1.resid_post"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def scattered(module: Any) -> Any:
    """No parameter is zero or one."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0.0, 0.2)
    return module


def gpt2() -> Any:
    """Called by a name, but with weights that are not those of the name."""
    sizes = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": POSITIONS, "bos_token_id": 95}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, eos_token_id=95, resid_pdrop=0.5))
    model.config._name_or_path = "gpt2"
    return scattered(model)


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = torch.nn.Sequential(torch.nn.Linear(16, 24), torch.nn.GELU(), torch.nn.Linear(24, 16))
        self.drop = torch.nn.Dropout(0.5)

    def forward(self, x: Any) -> Any:
        return x + self.drop(self.mlp(x))


class Plain(torch.nn.Module):
    """Token ids [B, T] -> logits; of no library, without a configuration."""

    def __init__(self) -> None:
        super().__init__()
        self.tokenizer = "of the user's"  # which saejax does not know
        self.register_buffer("turns", torch.ones(2, dtype=torch.complex64))
        self.embed = torch.nn.Embedding(VOCAB, 16)
        self.blocks = torch.nn.ModuleList([Block(), Block()])
        self.norm = torch.nn.LayerNorm(16)
        self.unembed = torch.nn.Linear(16, VOCAB, bias=False)

    def forward(self, ids: Any) -> Any:
        if not hasattr(self, "ones"):  # kept, as many keep a mask
            self.ones = torch.ones(16)
        x = self.embed(ids) * self.ones
        for block in self.blocks:
            x = block(x)
        return self.unembed(self.norm(x))


def plain(kind: type[Plain] = Plain) -> Any:
    torch.manual_seed(0)
    return kind()


def logits_of(module: Any, ids: np.ndarray = IDS) -> np.ndarray:
    """The module's own, in eval mode; a copy computes them, so that nothing is left behind."""
    with torch.inference_mode():
        out = copy.deepcopy(module).eval()(torch.tensor(ids))
    logits: np.ndarray = getattr(out, "logits", out).float().numpy()
    return logits


def tokenizer_of(tmp_path: Path) -> Any:
    write_tokenizer(tmp_path)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json"), bos_token="<bos>", pad_token="<mask>"
    )


# ------------------------------------------------------------------------------------------------------ the decoder


def test_a_known_family_is_read_with_its_own_weights_and_left_as_it_was(tmp_path: Path) -> None:
    module, tokenizer = gpt2().train(), tokenizer_of(tmp_path)
    module.config.eos_token_id = [0, 95]
    module.transformer.h[0].eval()
    modes = [part.training for part in module.modules()]
    want = logits_of(module)
    lm = saejax.load_lm(module, tokenizer)
    assert isinstance(lm, LanguageModel)
    assert [part.training for part in module.modules()] == modes
    np.testing.assert_allclose(lm.run(IDS)[0], want, rtol=1e-4, atol=1e-4)
    folder = tmp_path / "saved"
    module.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    on_disk = saejax.load_lm(folder)
    assert lm.hook_points() == on_disk.hook_points() and lm.tokenizer.bos_id == on_disk.tokenizer.bos_id == 95
    jax.tree.map(np.testing.assert_array_equal, lm.params, on_disk.params)
    ModelPair(on_disk, lm)  # of one tokenizer
    identity = dict(lm.identity)
    with torch.no_grad():
        module.transformer.wte.weight.add_(1.0)
    np.testing.assert_allclose(lm.run(IDS)[0], want, rtol=1e-4, atol=1e-4, err_msg="the weights are a copy")
    changed = saejax.load_lm(module, tokenizer).identity
    assert {key for key in identity if identity[key] != changed[key]} == {"weights_sha256"}


def test_the_identity_is_that_of_weights_and_configuration_and_not_of_the_name() -> None:
    module = gpt2()
    identity = saejax.load_lm(module).identity
    assert identity["model"] == "GPT2LMHeadModel in memory" and len(identity["weights_sha256"]) == 64
    module.config._name_or_path = "somewhere/else"
    assert saejax.load_lm(module).identity == identity
    module.config.layer_norm_epsilon = 1e-3
    for layer in module.modules():
        if isinstance(layer, torch.nn.LayerNorm):
            layer.eps = 1e-3
    assert saejax.load_lm(module).identity["weights_sha256"] != identity["weights_sha256"]


def test_a_changed_forward_is_refused_by_the_decoder_and_run_by_torch() -> None:
    module = gpt2()
    handle = module.transformer.h[0].register_forward_hook(lambda part, args, out: out * 2)
    with pytest.raises(DataError, match=r"gives other logits than GPT2LMHeadModel in memory .* Set backend='torch'"):
        saejax.load_lm(module)
    with torch.inference_mode():
        want = module.eval()(torch.tensor(IDS)).logits.numpy()
    np.testing.assert_allclose(saejax.load_lm(module, backend="torch").run(IDS)[0], want, rtol=1e-5, atol=1e-5)
    handle.remove()


@pytest.mark.ci
@pytest.mark.parametrize("name", MODELS)
def test_every_family_of_the_decoder_is_read_from_memory(name: str) -> None:
    module = of_family(name)
    lm = saejax.load_lm(module)
    assert isinstance(lm, LanguageModel) and lm.family == module.config.model_type
    np.testing.assert_allclose(lm.run(IDS)[0], logits_of(module), rtol=1e-4, atol=1e-4)


@pytest.mark.ci
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(dtype: str) -> None:
    module = of_family("llama, linear rope, biases, tied").to(getattr(torch, dtype))
    ours, theirs = saejax.load_lm(module), saejax.load_lm(module, backend="torch")
    np.testing.assert_allclose(ours.run(IDS)[0], logits_of(copy.deepcopy(module).float()), rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(theirs.run(IDS)[0], logits_of(module))
    assert (ours.identity["dtype"], theirs.identity["dtype"]) == ("float32", dtype)
    assert saejax.load_lm(module, dtype="bfloat16").params["W_E"].dtype == "bfloat16"


# -------------------------------------------------------------------------------------------------------- by hooks


def test_torch_runs_the_module_itself_in_eval_mode_while_its_weights_stay() -> None:
    module = gpt2().train()
    lm = saejax.load_lm(module, backend="torch")
    logits, seen = lm.run(torch.tensor(IDS), capture=[POINT, "transformer.h.1.mlp.out"])
    np.testing.assert_allclose(logits, logits_of(module), rtol=1e-5, atol=1e-5)
    ours, theirs = saejax.load_lm(module), lm.identity
    assert theirs == ours.identity | {"backend": "torch"} and module.training
    np.testing.assert_allclose(seen[POINT], ours.run(IDS, capture=[POINT])[1][POINT], rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        module.transformer.h[0].mlp.c_fc.bias.zero_()
    with pytest.raises(DataError, match=r"have changed since load_lm.* Load it again"):
        lm.run(IDS)


def test_a_plain_module_is_watched_at_its_modules(tmp_path: Path) -> None:
    module = plain().train()
    with pytest.raises(ConfigError, match="give context_length"):
        saejax.load_lm(module)
    lm = saejax.load_lm(module, tokenizer_of(tmp_path), context_length=POSITIONS)
    assert isinstance(lm, TorchModel)
    points = lm.hook_points()
    assert points["blocks.1.mlp.0.out"] == 24 and points["blocks.0.resid_post"] == 16 and points["unembed.out"] == VOCAB
    logits, seen = lm.run(IDS, capture=["blocks.1", "norm.in"])
    np.testing.assert_allclose(logits, logits_of(module), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(seen["blocks.1"], seen["norm.in"])
    assert module.training and lm.measures_loss(["blocks.1.out"])
    readout = lm.readout()
    assert readout is not None
    np.testing.assert_array_equal(readout[1], module.unembed.weight.detach().numpy().T)
    module(torch.tensor(IDS)).sum().backward()  # it trains on
    assert module.embed.weight.grad is not None
    other = copy.deepcopy(module)
    with torch.no_grad():
        other.unembed.weight[0, 0] += 1
    digests = [saejax.load_lm(m, context_length=8).identity["weights_sha256"] for m in (module, other)]
    assert digests[0] == lm.identity["weights_sha256"] != digests[1]


def test_without_a_tokenizer_ids_work_and_text_is_refused() -> None:
    for lm in (saejax.load_lm(gpt2()), saejax.load_lm(plain(), context_length=POSITIONS)):
        assert lm.run(IDS)[0].shape == (*IDS.shape, VOCAB) and lm.identity["tokenizer_sha256"] == ""
        with pytest.raises(ConfigError, match=r"has no tokenizer.* Give one: load_lm\(module, tokenizer\)"):
            lm.activations("w1 w2", lm.hook_point("blocks.1.resid_post"))


# ---------------------------------------------------------------------------------------------------------- wrappers


def test_what_holds_a_module_is_taken_off(tmp_path: Path) -> None:
    module, tokenizer = gpt2(), tokenizer_of(tmp_path)
    want = saejax.load_lm(module, tokenizer).identity
    compiled = type("OptimizedModule", (torch.nn.Module,), {})()
    compiled._orig_mod = module
    held = {
        "compiled": compiled,
        "nnsight": types.SimpleNamespace(_module=module, tokenizer=tokenizer),
        "nnsight, before 0.3": types.SimpleNamespace(_model=module, tokenizer=tokenizer),
        "a pipeline": types.SimpleNamespace(model=module, tokenizer=tokenizer),
        "several devices": torch.nn.DataParallel(module),
    }
    for name, holder in held.items():
        beside = () if hasattr(holder, "tokenizer") else (tokenizer,)
        assert saejax.load_lm(holder, *beside).identity == want, name


@pytest.mark.ci
@pytest.mark.parametrize("kind", ["BertForMaskedLM", "T5ForConditionalGeneration", "BloomForCausalLM"])
def test_families_that_the_decoder_does_not_know(kind: str, tmp_path: Path) -> None:
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 40, "n_head": 4}
    sizes |= {"d_model": 32, "d_kv": 8, "num_heads": 4, "num_layers": 2, "n_layer": 2, "num_hidden_layers": 2}
    family = kind.partition("For")[0]
    module = scattered(getattr(transformers, kind)(getattr(transformers, f"{family}Config")(**sizes, bos_token_id=95)))
    lm = saejax.load_lm(module, tokenizer_of(tmp_path))
    assert isinstance(lm, TorchModel) and lm.identity["model"] == f"{kind} in memory"
    assert lm.causal == lm.measures_loss([]) == (family == "Bloom")
    seen = lm.run(IDS, capture=["blocks.1.resid_post"])[1]["blocks.1.resid_post"]
    whole = copy.deepcopy(module.get_encoder() if family == "T5" else module).eval()
    with torch.inference_mode():
        want = whole(torch.tensor(IDS), output_hidden_states=True).hidden_states
    if family == "Bert":
        np.testing.assert_allclose(seen, want[2], rtol=1e-4, atol=1e-4)
    assert seen.shape == (*IDS.shape, 32) and np.isfinite(seen).all()


class Unembed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.W_U = torch.nn.Parameter(torch.randn(16, VOCAB))

    def forward(self, x: Any) -> Any:
        return x @ self.W_U


class Hooked(Plain):
    """Names and forward of TransformerLens's HookedTransformer."""

    def __init__(self) -> None:
        super().__init__()
        self.unembed = Unembed()
        self.cfg = types.SimpleNamespace(n_ctx=POSITIONS, d_vocab=VOCAB, n_heads=2)
        for block in self.blocks:
            block.hook_resid_pre = torch.nn.Identity()
            block.forward = types.MethodType(lambda self, x: x + self.drop(self.mlp(self.hook_resid_pre(x))), block)

    def forward(self, input: Any, return_type: str = "logits", attention_mask: Any = None) -> Any:
        assert attention_mask is None or attention_mask.shape == input.shape
        return super().forward(input) if return_type == "logits" else None


def test_a_module_with_the_forward_of_transformer_lens(tmp_path: Path) -> None:
    module = plain(Hooked)
    lm = saejax.load_lm(module, tokenizer_of(tmp_path))
    assert (lm.config.context_length, lm.config.n_head, lm.config.vocab_size) == (POSITIONS, 2, VOCAB)
    assert lm.hook_point("blocks.1.hook_resid_pre") == "blocks.1.resid_pre"
    readout = lm.readout()
    assert readout is not None
    np.testing.assert_array_equal(readout[1], module.unembed.W_U.detach())
    names = ["blocks.1.hook_resid_pre", "blocks.1.hook_resid_pre.out"]
    logits, seen = lm.run(IDS, capture=names)
    np.testing.assert_array_equal(seen[names[0]], seen[names[1]])
    np.testing.assert_allclose(logits, logits_of(module), rtol=1e-5, atol=1e-5)


class Adapted(torch.nn.Module):
    """A layer as peft puts it in the place of another."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.base_layer, self.lora_A = layer, torch.nn.Linear(32, 32)

    def forward(self, x: Any) -> Any:
        return self.base_layer(x) + self.lora_A(x)


def test_an_adapter_is_run_as_it_is_and_never_read_without_it() -> None:
    module = gpt2()
    module.transformer.h[1].mlp.c_proj = torch.nn.Sequential(torch.nn.Linear(128, 32), Adapted(torch.nn.Identity()))
    lm = saejax.load_lm(module)
    assert isinstance(lm, TorchModel)
    np.testing.assert_allclose(lm.run(IDS)[0], logits_of(module), rtol=1e-5, atol=1e-5)
    with pytest.raises(ConfigError, match=r"adapter that is not merged .*: give model\.merge_and_unload\(\)\. Or set"):
        saejax.load_lm(module, backend="jax")


# -------------------------------------------------------------------------------------------------------- tokenizers


def test_a_tokenizer_in_memory_is_that_of_its_files_whatever_was_called_with_it(tmp_path: Path, cache: Path) -> None:
    module, tokenizer = plain(), tokenizer_of(tmp_path)
    tokenizer.chat_template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    first = saejax.load_lm(module, tokenizer, context_length=8)
    tokenizer(["w1 w2", "w3"], padding="max_length", truncation=True, max_length=5)
    again = saejax.load_lm(module, tokenizer, context_length=8)
    assert again.identity == first.identity and len(list((cache / "saejax" / "tokenizers").iterdir())) == 1
    read = first.tokenizer
    assert read.bos_id == 95 and read.special_ids == {95, 96} and read.encode("w3 w4") == [3, 4]
    assert read.chat_template.render([{"role": "user", "content": "w3"}]) == "w3"
    bare = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for other in (tmp_path, str(tmp_path), bare, Tokenizer.from_folder(tmp_path)):
        ids = saejax.load_lm(module, other, context_length=8).tokenizer.encode("w3 w4")
        assert ids == [3, 4], other


# ------------------------------------------------------------------------------------------------------------- doors


@pytest.mark.ci
def test_the_python_doors_take_a_model_in_memory(tmp_path: Path) -> None:
    lm = saejax.load_lm(plain(), tokenizer_of(tmp_path), context_length=POSITIONS)
    words = np.random.default_rng(1).integers(0, VOCAB - 2, (40, 60))
    (tmp_path / "texts").mkdir()
    for i, row in enumerate(words):
        (tmp_path / "texts" / f"{i}.txt").write_text(" ".join(f"w{w}" for w in row))
    text = TextConfig(source="files", paths=(str(tmp_path / "texts"),), context_length=POSITIONS, heldout_fraction=0.3)
    source, mesh = open_source(text), make_mesh(ParallelConfig((1, 1)))
    point = "blocks.0.resid_post"
    config = CaptureConfig(hook_points=(point,), tokens=600, heldout_tokens=100, batch_rows=4)
    how = {"split": "train", "n_tokens": 600, "seed": 0}
    assert capture(tmp_path / "store", lm, source, text, config, mesh, **how).rows == 600
    with pytest.raises(DataError, match="weights_sha256"):
        other = plain()
        with torch.no_grad():
            other.norm.bias.add_(1)
        changed = saejax.load_lm(other, lm.tokenizer, context_length=POSITIONS)
        capture(tmp_path / "store", changed, source, text, config, mesh, **how)
    assert StoreReader.open(tmp_path / "store").identity["lm"] == lm.identity
    sae = saejax.train(tmp_path / "store", "topk", k=4, d_sae=32, tokens=624, batch_size=104, progress=False).at(lm)
    packer = Packer.of(source, lm.tokenizer, text)
    done = evaluate(sae, lm, packer, EvalConfig(tokens=100, batch_rows=4))
    assert {"fve", "loss_recovered", "ce_clean"} <= set(done.metrics)
    content, tokens, _ = collect_features(sae, lm, packer, ReportConfig(tokens=100, max_features=2, batch_rows=4))
    assert tokens >= 100 and content["model"] == "Plain in memory" and content["features"][0]["top_logits"]
    where = {"hook_points": [point], "batch_size": 50, "max_rows": 0, "seed": 0}
    stream = stream_activations(tmp_path / "journal", lm, source, text, config, mesh, **where)
    assert next(stream.iterate())[point].shape == (50, 16)


# ---------------------------------------------------------------------------------------------------------- refusals


def test_what_cannot_be_loaded_is_refused_in_one_line(tmp_path: Path) -> None:
    class Last(Plain):
        def forward(self, ids: Any) -> Any:
            return super().forward(ids)[:, -1:]

    class Strings(Plain):
        def forward(self, ids: Any) -> Any:
            return super().forward(ids.strip())

    module, one_id = gpt2(), {"context_length": 8}
    slow = types.SimpleNamespace(is_fast=False)
    refused: dict[str, Any] = {
        r"tokenizer and context_length belong to a module": lambda: saejax.load_lm("demo", "demo"),
        r"'Plain in memory' is in the memory of another program": lambda: saejax.load_lm("Plain in memory"),
        r"revision names a version of a hub id": lambda: saejax.load_lm(module, revision="main"),
        r"Plain is no model of transformers": lambda: saejax.load_lm(plain(), backend="jax", **one_id),
        r"GPT2Model has no head": lambda: saejax.load_lm(module.transformer, backend="jax"),
        r"lm\.dtype is 'bfloat16', and Plain in memory has float32": lambda: saejax.load_lm(
            plain(), dtype="bfloat16", **one_id
        ),
        r"lm\.device is 'gpu', and Plain in memory": lambda: saejax.load_lm(plain(), device="gpu", **one_id),
        r"lm\.device is 'meta', and Plain in memory is on cpu": lambda: saejax.load_lm(
            plain(), device="meta", **one_id
        ),
        r"context_length is that of the module's own config": lambda: saejax.load_lm(module, **one_id),
        r"parameters on the device meta": lambda: saejax.load_lm(plain().to("meta"), **one_id),
        r"Dropout has no parameters": lambda: saejax.load_lm(torch.nn.Dropout(), **one_id),
        r"The tokenizer is a SimpleNamespace\. Give a fast": lambda: saejax.load_lm(module, slow),
        r"^Last gives \[2, 1, 97\] for token ids \[2, 7\]": lambda: saejax.load_lm(plain(Last), context_length=7),
        r"Strings does not run on token ids .* 'strip'": lambda: saejax.load_lm(plain(Strings), **one_id),
        r"A language model takes .*load_lm takes a module": lambda: load_tokenizer(plain()),
    }
    for reason, call in refused.items():
        with pytest.raises((ConfigError, DataError), match=reason) as error:
            call()
        assert "\n" not in str(error.value)


def test_each_kind_of_model_prints_one_line() -> None:
    demo, module = saejax.load_lm("demo"), saejax.load_lm(plain(), context_length=8)
    assert repr(demo) == "LanguageModel(demo: gpt2, 6 layers, width 128, vocabulary 4,096, jax, float32)"
    assert repr(module) == (
        "TorchModel(Plain in memory: Plain, 2 layers, width 16, vocabulary 97, torch on cpu, float32)"
    )
    for model, point, width in ((demo, "blocks.*.resid_post", 128), (module, "blocks.*.out", 16)):
        page = model._repr_html_()
        assert page.startswith(f"<b>{html.escape(repr(model))}</b>") and f"{point} [{width}]" in page
        assert not re.search(r"\.0\.", page), "layers are shown as one"
    assert repr(ModelPair(demo, demo)) == f"ModelPair(first={demo!r}, second={demo!r})"
