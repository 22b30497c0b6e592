"""GGUF files: the numbers of transformers' reader, the ids of the original tokenizers, and files made to do harm."""

import dataclasses
import itertools
import json
import math
import struct
import time
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tiny import ROOT, tiny_experiment
from tiny.ggufs import FAMILIES, VOCAB, random_of, write_gguf, write_tokenizer
from tokenizers import models, pre_tokenizers, trainers

from saejax.app.stages import run_capture
from saejax.app.workspace import Workspace
from saejax.core.errors import ConfigError, DataError
from saejax.lm import LanguageModel, gguf, load_lm
from saejax.lm.gguf import tensors
from saejax.lm.gguf.configuration import config_json
from saejax.lm.gguf.header import read_header
from saejax.lm.gguf.tokens import tokenizer_json
from saejax.store import StoreReader

KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_1", "Q5_0")
IDS = np.random.default_rng(0).integers(3, VOCAB, (2, 20))
TEXT = (ROOT / "README.md").read_text()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "saejax" / "gguf"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("torch")
    return write_gguf(tmp_path_factory.mktemp("gguf") / "llama.gguf", "llama", random_of("llama"), "Q8_0")


def loaded(path: Path) -> LanguageModel:
    lm = load_lm(str(path))
    assert isinstance(lm, LanguageModel)
    return lm


def logits(path: Path) -> np.ndarray:
    return np.asarray(loaded(path).run(IDS)[0])


# Each family in one quantization here, in all of them where `make ci` runs. transformers does not read three of them.
READ_BY_BOTH = tuple(family for family in FAMILIES if family not in ("gemma", "olmo2", "smollm3"))
CASES = [
    pytest.param(family, kind, marks=[] if i % len(KINDS) == n % len(KINDS) else pytest.mark.ci)
    for (n, family), (i, kind) in itertools.product(enumerate(READ_BY_BOTH), enumerate(KINDS))
]


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_logits_are_those_of_transformers_reader(family: str, kind: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    model = random_of(family)
    path = write_gguf(tmp_path / "model.gguf", family, model, kind)
    read = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    assert not model.load_state_dict(read, strict=False).unexpected_keys
    model.tie_weights()
    with torch.no_grad():
        theirs = model(torch.tensor(IDS)).logits.numpy()
    np.testing.assert_allclose(logits(path), theirs, rtol=0, atol=1e-5 * np.abs(theirs).max())


def test_an_unquantized_file_is_the_original(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    for family in FAMILIES:
        model = random_of(family)
        with torch.no_grad():
            theirs = model(torch.tensor(IDS)).logits.numpy()
        path = write_gguf(tmp_path / f"{family}.gguf", family, model)
        np.testing.assert_allclose(logits(path), theirs, rtol=0, atol=1e-5 * np.abs(theirs).max(), err_msg=family)


def test_llama_3_positions(tmp_path: Path) -> None:
    """The file has what each frequency is divided by; the configuration is found from it, or it is refused."""
    torch = pytest.importorskip("torch")
    scaling = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # fmt: skip
    model = random_of("llama", rope_parameters=scaling)
    usual = 1 / 500000.0 ** (np.arange(0, 16, 2) / 16)
    divided_by = (usual / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    assert divided_by[0] == pytest.approx(1) and divided_by[-1] == pytest.approx(8)
    path = write_gguf(tmp_path / "llama3.gguf", "llama", model, more={"rope_freqs.weight": divided_by})
    with torch.no_grad():
        theirs = model(torch.tensor(IDS)).logits.numpy()
    np.testing.assert_allclose(logits(path), theirs, rtol=0, atol=1e-5 * np.abs(theirs).max())
    other = write_gguf(tmp_path / "other.gguf", "llama", model, more={"rope_freqs.weight": divided_by**1.1})
    with pytest.raises(DataError, match=r"rope_freqs\.weight is not the scaling of Llama 3"):
        load_lm(str(other))


def test_biases_windows_and_linear_positions_are_in_the_configuration(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    biases = random_of("llama", attention_bias=True, mlp_bias=True)
    path = write_gguf(
        tmp_path / "a.gguf", "llama", biases, llama__rope__scaling__type="linear", llama__rope__scaling__factor=4.0
    )
    config = loaded(path).config
    assert config.qkv_bias and config.mlp_bias and config.rope is not None and config.rope.factor == 4
    path = write_gguf(tmp_path / "old.gguf", "llama", random_of("llama"), llama__rope__scale_linear=2.0)
    rope = loaded(path).config.rope
    assert rope is not None and rope.factor == 2
    path = write_gguf(tmp_path / "b.gguf", "llama", random_of("llama"), llama__attention__sliding_window=7)
    assert loaded(path).config.windows == (7, 7)


# --- the tokenizer ----------------------------------------------------------------------------------


def trained(pre: pre_tokenizers.PreTokenizer) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        TEXT.splitlines(), trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    )
    return backend


def byte_level(**how: Any) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, **how)


def split_by(regex: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(tokenizers.Regex(regex), "isolated")
    return pre_tokenizers.Sequence([split, byte_level(use_regex=False)])


def qwen2() -> pre_tokenizers.PreTokenizer:
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    return split_by(PRETOKENIZE_REGEX)


ORIGINALS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": byte_level,
    "smollm": lambda: pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level()]),
    "qwen2": qwen2,
}


@pytest.mark.parametrize("pre", ORIGINALS)
def test_ids_of_a_byte_level_tokenizer_are_the_original_s(pre: str, tmp_path: Path) -> None:
    original = trained(ORIGINALS[pre]())
    content = json.loads(original.to_str())["model"]
    tokens = sorted(content["vocab"], key=content["vocab"].__getitem__)
    path = write_tokenizer(
        tmp_path / "t.gguf", model="gpt2", pre=pre, tokens=[*tokens, "<|end|>", "<own>"],
        token_type=[*[1] * len(tokens), 3, 4], merges=[" ".join(pair) for pair in content["merges"]],
    )  # fmt: skip
    text, beside = tokenizer_json(read_header(path))
    ours = tokenizers.Tokenizer.from_str(text)
    for line in [*TEXT.splitlines(), "12345 über 漢字 🙂\n\n\n  x", "it's I'LL", ""]:
        assert ours.encode(line).ids == original.encode(line).ids, line
        assert ours.decode(ours.encode(line).ids) == line
    assert ours.encode("a<|end|><own>").ids[-2:] == [len(tokens), len(tokens) + 1]
    assert ours.decode([len(tokens), len(tokens) + 1]) == "<own>"
    assert beside["bos_token"] is None


def test_llama_3_takes_three_digits_at_once_and_whole_words(tmp_path: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    path = write_tokenizer(
        tmp_path / "t.gguf", model="gpt2", pre="llama-bpe", tokens=[*alphabet, "123", "45", "hello", "Ġit", "'s"],
        token_type=[1] * (len(alphabet) + 5), merges=["4 5"], bos_token_id=0,
    )  # fmt: skip
    text, beside = tokenizer_json(read_header(path))
    ours = tokenizers.Tokenizer.from_str(text)
    assert ours.encode("12345 it'shello").tokens[:5] == ["123", "45", "Ġit", "'s", "hello"]
    assert beside["bos_token"] == alphabet[0]


def greedy(text: str, ids: dict[str, int], scores: list[float]) -> list[int]:
    """SentencePiece's BPE: of all neighbours that together are a token, those of the highest score become one."""
    pieces = list("\u2581" + text.replace(" ", "\u2581"))
    while True:
        pairs = [(scores[ids[a + b]], -i) for i, (a, b) in enumerate(itertools.pairwise(pieces)) if a + b in ids]
        if not pairs:
            break
        i = -max(pairs)[1]
        pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]
    bytes_of = [[ids[p]] if p in ids else [ids[f"<0x{byte:02X}>"] for byte in p.encode()] for p in pieces]
    return list(itertools.chain.from_iterable(bytes_of))


def test_ids_of_a_sentencepiece_tokenizer(tmp_path: Path) -> None:
    spaced = TEXT.replace(" ", "\u2581")
    backend = tokenizers.Tokenizer(models.BPE())
    backend.train_from_iterator(spaced.splitlines(), trainers.BpeTrainer(vocab_size=400, show_progress=False))
    own = sorted(backend.get_vocab(), key=backend.get_vocab().__getitem__)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *own]
    first = len(tokens) - len(own)
    scores = [*[0.0] * first, *(-float(i) for i in range(len(own)))]
    types = [2, 3, 3, *[6] * 256, *[1] * len(own)]
    fields: dict[str, Any] = {"tokens": tokens, "token_type": types, "scores": scores, "unknown_token_id": 0}
    path = write_tokenizer(tmp_path / "t.gguf", model="llama", bos_token_id=1, **fields)
    text, beside = tokenizer_json(read_header(path))
    ours = tokenizers.Tokenizer.from_str(text)
    ids = {token: i for i, token in enumerate(tokens)}
    for line in [*TEXT.splitlines()[:80], "über 漢字 🙂", "x  y"]:
        if line and not line.startswith(" "):
            assert ours.encode(line).ids == greedy(line, ids, scores), line
            assert ours.decode(ours.encode(line).ids) == line
    assert beside["bos_token"] == "<s>"
    path = write_tokenizer(tmp_path / "u.gguf", model="llama", add_space_prefix=False, add_bos_token=False, **fields)
    text, beside = tokenizer_json(read_header(path))
    assert tokenizers.Tokenizer.from_str(text).encode("import").ids == greedy("import", ids, scores)[1:]
    assert beside["bos_token"] is None


# --- the folder -------------------------------------------------------------------------------------


def test_it_is_a_model_like_any_other(llama: Path, tmp_path: Path, cache: Path) -> None:
    """Loaded once, the folder stays; another file at the same place is another folder. A capture takes it."""
    lm = load_lm(str(llama))
    (folder,) = cache.iterdir()
    assert lm.identity["model"] == "llama.gguf" and lm.tokenizer.bos_id == 1
    before = (folder / "config.json").stat().st_mtime_ns
    assert load_lm(str(llama)).identity == lm.identity
    assert (folder / "config.json").stat().st_mtime_ns == before
    e = tiny_experiment(
        tmp_path,
        lm={"model": str(llama)},
        capture={"hook_points": ("blocks.1.resid_post",), "tokens": 500, "heldout_tokens": 200},
    )
    work = Workspace(e)
    run_capture(work)
    assert StoreReader.open(str(tmp_path / "stores" / "tiny" / "train")).hook_points == {"blocks.1.resid_post": 64}
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(llama.read_bytes())
    assert load_lm(str(copy)).identity["weights_sha256"] == lm.identity["weights_sha256"]
    assert len(list(cache.iterdir())) == 2


def test_many_processes_make_one_folder(llama: Path, cache: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        folders = set(pool.map(gguf.as_folder, [llama] * 16))
    assert folders == set(cache.iterdir()) and len(folders) == 1
    names = {"config.json", "tokenizer.json", "tokenizer_config.json", "model.gguf"}
    assert {path.name for path in next(iter(folders)).iterdir()} == names


def test_a_cache_that_cannot_be_written_is_said(llama: Path, cache: Path) -> None:
    cache.parent.mkdir(parents=True)
    cache.touch()
    with pytest.raises(DataError, match="cannot be written"):
        gguf.as_folder(llama)


def test_pytorch_and_a_missing_package_are_refused(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"lm\.backend=torch does not read GGUF"):
        load_lm(str(llama), backend="torch")
    tensors._library.cache_clear()
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    try:
        with pytest.raises(ConfigError, match=r"pip install 'gguf>="):
            load_lm(str(llama))
    finally:
        tensors._library.cache_clear()


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"general__architecture": "olmo2", "olmo2__attention__sliding_window": 6}, "this is OLMo 3"),
        ({"llama__expert_count": 8}, "a mixture of experts is not read"),
        ({"llama__attention__value_length": 8}, "one width for both"),
        ({"llama__rope__scaling__type": "yarn"}, "rope scaling 'yarn' is not read"),
        ({"llama__attention__head_count": 0}, "must be 1 or more"),
        ({"llama__block_count": "2"}, "must be one number"),
        ({"llama__attention__head_count_kv": [1, 2]}, "must be one number for all layers"),
        ({"general__architecture": "gpt2"}, r"gpt2\.block_count is None"),
        ({"general__architecture": "bert"}, "the architecture 'bert' is not read"),
        ({"tokenizer__ggml__pre": "tekken"}, "how tokenizer.ggml.pre 'tekken' splits words is not known"),
        ({"tokenizer__ggml__model": "rwkv"}, "a tokenizer of kind 'rwkv'"),
        ({"tokenizer__ggml__merges": ["ab"]}, "is not two tokens"),
        ({"tokenizer__ggml__merges": ["ab cd"]}, "make no tokenizer"),
        ({"tokenizer__ggml__add_bos_token": "yes"}, "must be true or false"),
    ],
)
def test_what_is_not_read_is_refused_by_name(fields: dict[str, Any], says: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    path = write_gguf(tmp_path / "x.gguf", "llama", random_of("llama"), **fields)
    with pytest.raises(DataError, match=says) as caught:
        load_lm(str(path))
    assert "x.gguf" in str(caught.value)


# --- files made to do harm --------------------------------------------------------------------------


def numbers(*values: int) -> bytes:
    return b"".join(struct.pack("<Q", value) for value in values)


def text(value: str) -> bytes:
    return numbers(len(value)) + value.encode()


HEAD = b"GGUF" + struct.pack("<I", 3)
HARM = {
    "empty": b"",
    "another kind": b"PK\3\4" * 20,
    "version 1": b"GGUF" + struct.pack("<I", 1) + bytes(100),
    "highest byte first": b"GGUF" + struct.pack(">I", 3) + bytes(100),
    "10^12 keys": HEAD + numbers(0, 10**12) + bytes(100),
    "10^12 tensors": HEAD + numbers(10**12, 0) + bytes(100),
    "a name of 10^18 letters": HEAD + numbers(0, 1, 10**18) + bytes(100),
    "a list of 10^12": HEAD + numbers(0, 1) + text("a") + struct.pack("<II", 9, 4) + numbers(10**12) + bytes(100),
    "lists in lists": HEAD + numbers(0, 1) + text("a") + struct.pack("<I", 9)
    + (struct.pack("<I", 9) + numbers(1)) * 1000 + bytes(100),
    "a value of no kind": HEAD + numbers(0, 1) + text("a") + struct.pack("<I", 77) + bytes(100),
    "alignment 0": HEAD + numbers(0, 1) + text("general.alignment") + struct.pack("<II", 4, 0) + bytes(100),
    "a tensor of 10^18": HEAD + numbers(1, 0) + text("a") + struct.pack("<I", 1) + numbers(10**18) + bytes(100),
    "a tensor of no size": HEAD + numbers(1, 0) + text("a") + struct.pack("<I", 1) + numbers(0) + bytes(100),
    "99 dimensions": HEAD + numbers(1, 0) + text("a") + struct.pack("<I", 99) + bytes(2000),
}  # fmt: skip


@pytest.mark.parametrize("case", HARM)
def test_a_header_that_lies_is_refused_at_once(case: str, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(HARM[case])
    tracemalloc.start()
    start = time.perf_counter()
    with pytest.raises(DataError, match=r"x\.gguf"):
        load_lm(str(path))
    assert time.perf_counter() - start < 1
    assert tracemalloc.get_traced_memory()[1] < 20 << 20
    tracemalloc.stop()


def test_a_file_cut_anywhere_is_refused(llama: Path, tmp_path: Path) -> None:
    whole, path = llama.read_bytes(), tmp_path / "x.gguf"
    for n in np.random.default_rng(0).integers(0, len(whole) - 1, 60):
        path.write_bytes(whole[: int(n)])
        with pytest.raises(DataError, match=r"x\.gguf|model\.gguf"):
            load_lm(str(path))


def test_a_tensor_beyond_the_file_or_of_an_unknown_kind(llama: Path, tmp_path: Path) -> None:
    header, raw = read_header(llama), bytearray(llama.read_bytes())
    assert config_json(header)["num_hidden_layers"] == 2
    headless = {name: stored for name, stored in header.tensors.items() if name != "token_embd.weight"}
    with pytest.raises(DataError, match=r"no token_embd\.weight"):
        config_json(dataclasses.replace(header, tensors=headless))
    place = raw.index(b"blk.1.ffn_up.weight") + len(b"blk.1.ffn_up.weight") + 4 + 16  # dimensions, then the kind
    for kind, offset, says in (
        (8, 1 << 40, "has no room"),
        (250, 0, "type 250"),
        (24, 0, "holds I8"),
        (36, 0, "type 36"),
    ):
        struct.pack_into("<IQ", raw, place, kind, offset)
        path = tmp_path / f"{kind}.gguf"
        path.write_bytes(raw)
        with pytest.raises(DataError, match=says):
            load_lm(str(path))
    assert math.prod(header.tensors["blk.1.ffn_up.weight"].shape) == 64 * 96
    assert gguf.GGUF == "model.gguf"
