"""What shares a batch changes no number: models whose frequencies or windows change at some length, in PyTorch."""

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny.decoders import VOCAB, in_order, rows_of, write_tokenizer

from saejax.capture import CaptureConfig, capture, store_identity
from saejax.core.errors import DataError
from saejax.evals.probing.last_token import Reader
from saejax.lm import load_lm
from saejax.lm.pair import ModelPair
from saejax.lm.rows import WAYS, Chunk
from saejax.parallel import ParallelConfig, make_mesh
from saejax.store import StoreReader
from saejax.text import Source, TextConfig, Tokenizer, open_source

torch = pytest.importorskip("torch", reason="models in PyTorch need it: pip install 'saejax[torch]'")
transformers = pytest.importorskip("transformers")

from saejax.lm.torch_hooks import TorchModel, from_module, probe, run_chunk  # noqa: E402 - after the skips
from saejax.lm.torch_hooks.probe import difference  # noqa: E402 - after the skips

# Frequencies, or the window of attention, change here; the rows are longer.
CHANGE, S = 16, 48
FACTORS = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.5, 4.0, 9.0, 20.0]}
BASE = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
BASE |= {"intermediate_size": 40, "max_position_embeddings": S, "pad_token_id": 1, "bos_token_id": 95}
LONG = FACTORS | {"rope_type": "longrope", "factor": 3.0, "original_max_position_embeddings": CHANGE}
OLD = FACTORS | {"type": "longrope"}  # as Phi-3's own files say it
SCALES = {"short_mscale": 1.1, "long_mscale": 1.3}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}
GROUPED = BASE | {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": CHANGE}
SHORT_TABLE = {"max_position_embeddings": CHANGE}  # dynamic NTK's frequencies change there


def by_layers(full: dict[str, Any]) -> dict[str, Any]:
    plain = {"rope_type": "default", "rope_theta": 10000.0}
    ropes = {"full_attention": full | {"rope_theta": 10000.0}, "sliding_attention": plain}
    return {"layer_types": ["sliding_attention", "full_attention"], "rope_parameters": ropes}


# Class, configuration, the longest documents that may share a pass.
FAMILIES: dict[str, tuple[str, dict[str, Any], int]] = {
    "phi3": ("Phi3", BASE | {"original_max_position_embeddings": CHANGE, "rope_scaling": OLD}, CHANGE),
    "phimoe": ("Phimoe", GROUPED | {"num_local_experts": 4, "rope_scaling": LONG | SCALES}, CHANGE),
    "llama longrope": ("Llama", BASE | {"rope_scaling": LONG}, CHANGE),
    "llama dynamic": ("Llama", BASE | SHORT_TABLE | {"rope_scaling": DYNAMIC}, CHANGE),
    "llama yarn": ("Llama", BASE | {"rope_scaling": LONG | {"rope_type": "yarn"}}, S),
    "mistral": ("Mistral", GROUPED, S),
    "gemma2": ("Gemma2", GROUPED, S),
    "gemma3 longrope": ("Gemma3Text", GROUPED | by_layers(LONG), CHANGE),
    "gemma3 dynamic": ("Gemma3Text", GROUPED | SHORT_TABLE | by_layers(DYNAMIC), CHANGE),
}  # fmt: skip
FOLLOWING = [name for name, (*_, longest) in FAMILIES.items() if longest == CHANGE]
# Below, at and above the change, together in rows and beside padding.
LENGTHS = [[S], [15, 16, 17], [7, 30, 9], [1, 17, 20], [47], [16, 30], []]
ROWS = rows_of(LENGTHS, seed=3)


def random_model(family: str, filled: bool = True) -> Any:
    """As transformers begins it, or filled with numbers so large that positions matter."""
    name, settings, _ = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**settings)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters() if filled else ():
            parameter.normal_(0.0, 0.3)
    return model


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return Tokenizer.from_folder(folder)


@pytest.fixture
def lm_of(tokenizer: Tokenizer) -> Callable[..., TorchModel]:
    """(family) -> its model; one that reads longer texts than its table says, if that is where it changes."""
    return lambda family: from_module(random_model(family), tokenizer, {"model": family}, context_length=S)


def alone(model: Any, tokens_T: np.ndarray, places: Any) -> dict[str, np.ndarray]:
    """One document through a model that has read nothing before."""
    tokens = tokens_T[None].astype(np.int64)
    with torch.inference_mode():
        seen = run_chunk(copy.deepcopy(model), Chunk(tokens, np.zeros_like(tokens)), places)
    return {place: value[0].numpy() for place, value in seen.items()}


def documents(rows: dict[str, np.ndarray]) -> list[tuple[int, np.ndarray]]:
    """(row, columns) of each document."""
    return [
        (row, np.flatnonzero(segments == segment))
        for row, segments in enumerate(rows["segments"])
        for segment in range(segments.max() + 1)
    ]


def largest_difference(lm: TorchModel, rows: dict[str, np.ndarray]) -> float:
    """Between the documents in these rows and alone, at every place of the model."""
    places = [*lm.widths, ""]
    got = lm._run(*in_order(rows), places, {})
    model, found = random_model(str(lm.identity["model"])), []
    for row, at in documents(rows):
        want = alone(model, rows["tokens"][row, at], places)
        found += [
            difference(got[place].numpy()[row * rows["tokens"].shape[1] + at], value) for place, value in want.items()
        ]
    return max(found)


@pytest.mark.parametrize(
    "tried", [pytest.param(12, marks=pytest.mark.ci), 256]
)  # less than the change: nothing that was tried shows it
@pytest.mark.parametrize("family", FAMILIES)
def test_a_document_in_any_batch_is_the_document_alone(
    family: str, tried: int, lm_of: Callable[..., TorchModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "_LONG", tried)
    lm = lm_of(family)
    assert lm.longest_mixed == FAMILIES[family][2]
    assert largest_difference(lm, ROWS) < 2e-5
    # Rows so short that documents share them under one mask, with the document that fills a row.
    width = min(tried, CHANGE)
    few = {name: value[:, :width] for name, value in rows_of([[5, 7], [width], [3, 9]]).items()}
    assert lm.window >= width and lm.way == "packed"
    assert largest_difference(lm, few) < 2e-5
    # What was read before changes no bit.
    once, again = (lm._run(*in_order(ROWS), [""], {})[""] for _ in range(2))
    assert torch.equal(once, again)


@pytest.mark.ci
@pytest.mark.parametrize("family", FOLLOWING)
def test_longer_documents_in_one_pass_would_change_the_others(family: str, lm_of: Callable[..., TorchModel]) -> None:
    lm = lm_of(family)
    mixing = [dataclasses.replace(lm, longest_mixed=S, way=way, long_way=way) for way in ("packed", "padded")]
    assert min(largest_difference(one, ROWS) for one in mixing) > 1e-3
    # Up to that length every way is right.
    rows = rows_of([[16, 15, 7], [3, 16], [1], []])
    for way in WAYS if family in ("phi3", "llama longrope", "llama dynamic") else ("padded", "equal"):
        assert largest_difference(dataclasses.replace(lm, way=way, long_way=way), rows) < 2e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_the_length_is_found_in_bfloat16_too(family: str, tokenizer: Tokenizer) -> None:
    """Also of a model that hardly looks at positions, so that rounding hides what they do."""
    for filled in (True, False):
        module = random_model(family, filled)
        lm = from_module(module.to(torch.bfloat16), tokenizer, {}, context_length=S)
        assert lm.longest_mixed == FAMILIES[family][2]
    assert from_module(module, tokenizer, {}, context_length=CHANGE - 2).longest_mixed == CHANGE - 2


def test_what_was_read_before_changes_nothing(lm_of: Callable[..., TorchModel]) -> None:
    """Dynamic NTK keeps the frequencies of the longest text so far, also of a text that its owner read."""
    lm, rows = lm_of("llama dynamic"), rows_of([[20], [16], [9]])
    with torch.inference_mode():
        lm.module(torch.arange(S)[None])
    assert largest_difference(lm, rows) < 2e-5
    want = lm.activations(" ".join(f"w{i}" for i in range(20)), "model.norm")
    lm.activations(" ".join(f"w{i}" for i in range(45)), "model.norm")
    np.testing.assert_array_equal(lm.activations(" ".join(f"w{i}" for i in range(20)), "model.norm"), want)


class Unknown(torch.nn.Module):
    """Takes no positions, and its configuration says that its frequencies follow the length."""

    def __init__(self, config: Any):
        super().__init__()
        self.config, self.embed, self.act = config, torch.nn.Embedding(VOCAB, 8), torch.nn.Tanh()

    def forward(self, input_ids: Any) -> Any:
        return self.act(self.embed(input_ids) * input_ids.shape[1])


def test_what_cannot_be_seen_is_kept_apart_everywhere(tokenizer: Tokenizer) -> None:
    for family, longest in (("phi3", 0), ("mistral", S)):
        lm = from_module(Unknown(random_model(family).config), tokenizer, {}, context_length=S)
        assert (lm.longest_mixed, lm.way) == (longest, "equal")


# ------------------------------------------------------------------------------------------------------------- doors


TEXT = TextConfig(source="files", paths=("unused",), context_length=S, heldout_fraction=0.5, prepend_bos=False)
CAPTURE = CaptureConfig(hook_points=("blocks.1.resid_post",), shard_rows=256, chunk_rows=64)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    """Documents below and above the change."""
    folder, rng = tmp_path_factory.mktemp("texts"), np.random.default_rng(0)
    for i in range(60):
        (folder / f"{i}.txt").write_text(" ".join(f"w{w}" for w in rng.integers(0, VOCAB - 2, rng.integers(5, 40))))
    return open_source(dataclasses.replace(TEXT, paths=(str(folder),)))


def captured(path: Path, lm: TorchModel, source: Source, batch_rows: int) -> StoreReader:
    config = dataclasses.replace(CAPTURE, batch_rows=batch_rows)
    mesh = make_mesh(ParallelConfig((1, 1)))
    capture(path, lm, source, TEXT, config, mesh, split="train", n_tokens=400, seed=0)
    return StoreReader.open(path)


@pytest.mark.parametrize("family", ["phi3", "gemma2"])
def test_a_store_does_not_depend_on_batch_rows(
    family: str, lm_of: Callable[..., TorchModel], source: Source, tmp_path: Path
) -> None:
    one, eight = (captured(tmp_path / str(n), lm_of(family), source, n) for n in (1, 8))
    assert one.identity == eight.identity
    first, second = (store.rows(0, 400, metadata=True) for store in (one, eight))
    assert (first["position"] >= CHANGE).any()
    for name, values in first.items():
        same = values.view(np.uint16) == second[name].view(np.uint16) if values.ndim == 2 else values == second[name]
        # Sums of another order may round to the neighbouring bfloat16.
        assert same.mean() > 0.999 and np.allclose(values.astype(float), second[name].astype(float), rtol=8e-3), name


def test_a_store_of_an_earlier_version_is_refused_only_where_documents_were_mixed(
    lm_of: Callable[..., TorchModel], source: Source, tmp_path: Path
) -> None:
    lm = lm_of("phi3")
    before = captured(tmp_path / "mixed", dataclasses.replace(lm, longest_mixed=S), source, 4)
    assert "long_documents" not in before.identity
    with pytest.raises(
        DataError, match="long_documents: the store has nothing, this run wants 'of more than 16 tokens"
    ):
        captured(tmp_path / "mixed", lm, source, 4)
    with pytest.raises(DataError, match="long_documents"):
        StoreReader.open(tmp_path / "mixed", expect=store_identity(lm, source, TEXT, "train", CAPTURE))
    short = dataclasses.replace(TEXT, context_length=CHANGE)
    assert "long_documents" not in store_identity(lm, source, short, "train", CAPTURE)
    assert store_identity(ModelPair(lm, lm), source, TEXT, "train", CAPTURE)["long_documents"].startswith(
        f"of more than {CHANGE} tokens"
    )
    assert "long_documents" not in store_identity(load_lm("demo"), source, TEXT, "train", CAPTURE)


def test_probes_and_edits_read_each_text_alone(lm_of: Callable[..., TorchModel], tmp_path: Path) -> None:
    lm = lm_of("phi3")
    texts = [" ".join(f"w{i + n}" for i in range(n)) for n in (5, 16, 17, 40, 46, 12)]
    hook = "blocks.1.resid_post"
    reader = Reader(lm, (hook,), False, S, 6 * S, "float32", tmp_path)
    want = np.stack([lm.activations(text, hook)[-1] for text in texts])
    np.testing.assert_allclose(reader.of_texts("texts", texts)[hook], want, rtol=1e-4, atol=1e-5)
    kept = {path.name for path in tmp_path.iterdir()}
    dataclasses.replace(reader, lm=dataclasses.replace(lm, longest_mixed=S)).of_texts("texts", texts)
    assert len({path.name for path in tmp_path.iterdir()} - kept) == 1, "kept by an earlier version: not taken"
    logits, _ = lm.apply({}, *in_order(ROWS), edits={"blocks.0.resid_post": lambda x: x})
    model = random_model("phi3")
    for row, at in documents(ROWS):
        assert difference(np.asarray(logits)[row, at], alone(model, ROWS["tokens"][row, at], [""])[""]) < 2e-5
