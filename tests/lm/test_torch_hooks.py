"""Models that PyTorch runs: hook points, documents apart, early stop, and the stages through them."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from tiny import replaced, tiny_experiment
from tiny.decoders import POINTS as JAX_POINTS
from tiny.decoders import VOCAB, in_order, rows_of, run_rows, write_tokenizer

from saejax.app.experiment import deciding
from saejax.app.stages import run_capture, run_pipeline
from saejax.app.workspace import Workspace
from saejax.capture import CaptureConfig
from saejax.core.config import to_json
from saejax.core.errors import ConfigError, DataError
from saejax.core.files import read_json
from saejax.lm import LanguageModel, LMConfig, load_lm
from saejax.lm.pair import ModelPair
from saejax.lm.rows import Chunk
from saejax.parallel import ParallelConfig, make_mesh
from saejax.store import StoreReader
from saejax.text import PackedRows, Tokenizer

torch = pytest.importorskip("torch", reason="models in PyTorch need it: pip install 'saejax[torch]'")
transformers = pytest.importorskip("transformers")

from saejax.lm.torch_hooks import TorchModel, find_batch_rows, from_module, probe, run_chunk  # noqa: E402 - after the skips

# PyTorch has no module whose output is the heads' results before W_O.
POINTS = [name for name in JAX_POINTS if not name.endswith("attn_z")]
S = 48
LLAMA = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "max_position_embeddings": S,
    "pad_token_id": 1,
}
GPT2 = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": S, "bos_token_id": 95}
GROUPED = LLAMA | {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 16}
# Of images, which these tests have none of: more layers than the text model's, which are not passed.
IMAGES = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 4, "num_attention_heads": 2}
IMAGES |= {"image_size": 8, "patch_size": 4}
# Class, configuration, the way of keeping documents apart that is expected, names in blocks.
DECODER = ("resid_pre", "attn_out", "resid_mid", "mlp_in", "mlp_act", "mlp_out", "resid_post")
PARALLEL = tuple(name for name in DECODER if name != "resid_mid")
FAMILIES: dict[str, tuple[str, dict[str, Any], str, tuple[str, ...]]] = {
    "GPT2": ("LMHeadModel", GPT2, "packed", DECODER),
    "OPT": ("ForCausalLM", LLAMA | {"ffn_dim": 40, "word_embed_proj_dim": 32}, "packed", DECODER),
    "Bloom": ("ForCausalLM", {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 2, "n_head": 4}, "padded", DECODER),
    "GPTNeoX": ("ForCausalLM", LLAMA, "packed", PARALLEL),
    "Gemma2": ("ForCausalLM", GROUPED, "packed", DECODER),
    # All that is about text is in a configuration of its own, below the model's.
    "Gemma3": (
        "ForConditionalGeneration",
        {
            "text_config": GROUPED | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
            "vision_config": IMAGES,
            "image_token_index": VOCAB - 3,
            "mm_tokens_per_image": 1,
        },
        "packed",
        DECODER,
    ),
    "Mistral3": (
        "ForConditionalGeneration",
        {
            "text_config": GROUPED | {"model_type": "mistral"},
            "vision_config": IMAGES | {"model_type": "pixtral", "head_dim": 4},
            "image_token_index": VOCAB - 3,
        },
        "packed",
        DECODER,
    ),
    "Bert": ("ForMaskedLM", LLAMA, "packed", DECODER),
    "Roberta": ("ForMaskedLM", LLAMA | {"max_position_embeddings": S + 2}, "padded", DECODER),
}
ROWS = rows_of([[S], [13, 1, 20, 14], [30], []], seed=3)


def random_model(family: str) -> Any:
    """A model in which no parameter is zero or one."""
    kind, settings, *_ = FAMILIES[family]
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}{kind}")(getattr(transformers, f"{family}Config")(**settings)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.2)
    return model


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """(family) -> a folder with its random model and a tokenizer."""
    done: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in done:
            done[family] = tmp_path_factory.mktemp(family)
            random_model(family).save_pretrained(done[family])
            write_tokenizer(done[family])
        return done[family]

    return folder


@pytest.fixture(scope="module")
def both(folder_of: Callable[[str], Path]) -> tuple[LanguageModel, TorchModel]:
    """One GPT-2 in JAX and in PyTorch."""
    ours, theirs = (load_lm(str(folder_of("GPT2")), backend=backend) for backend in ("jax", "torch"))
    assert isinstance(ours, LanguageModel) and isinstance(theirs, TorchModel)
    return ours, theirs


def packed_rows(rows: dict[str, np.ndarray]) -> PackedRows:
    keep = rows["segments"] >= 0
    n = rows["segments"]
    return PackedRows(*in_order(rows), documents=n, to_end=n, keep=keep, cursor={"document": 0, "offset": 0})


def mesh() -> Any:
    return make_mesh(ParallelConfig((1, 1)))


# ------------------------------------------------------------------------------------------------------- hook points


def test_every_name_is_the_same_place_in_both_backends(both: tuple[LanguageModel, TorchModel]) -> None:
    ours, theirs = both
    assert list(theirs.aliases) == POINTS
    there = {name: width for name, width in ours.hook_points().items() if not name.endswith("attn_z")}
    assert theirs.hook_points().items() >= there.items()
    want = run_rows(ours, ROWS)
    logits, got = theirs.apply({}, *in_order(ROWS), POINTS)
    kept = ROWS["segments"] >= 0
    for name, value in {**got, "logits": logits}.items():
        assert np.std(want[name][kept]) > 0.05, name
        np.testing.assert_allclose(np.asarray(value)[kept], want[name][kept], atol=1e-4, rtol=1e-4, err_msg=name)


def test_a_readout_is_the_same_in_both_backends(both: tuple[LanguageModel, TorchModel]) -> None:
    for one, two in zip(*(lm.readout() for lm in both), strict=True):
        np.testing.assert_allclose(one, two, atol=1e-5)


def test_rows_go_into_the_residual_stream_at_known_names_alone(both: tuple[LanguageModel, TorchModel]) -> None:
    rows = np.ones((2, 32), np.float32)
    for name in ("blocks.1.mlp_out", "transformer.h.1.mlp.c_proj", "transformer.h.2.in", "blocks.0.resid_mid"):
        assert both[1].into_residual(name, rows) is rows
    # As wide as the model, and read or normed there.
    for name in ("blocks.1.mlp_in", "transformer.h.1.mlp.in", "transformer.h.1.ln_2.out", "transformer.ln_f.out"):
        assert both[1].into_residual(name, rows) is None
    pair = ModelPair(*both)
    assert pair.into_residual("second.blocks.1.mlp_in", rows) is None
    assert pair.into_residual("blocks.1.attn_z", rows).shape == (2, 32)


def test_edits_go_on_as_in_the_jax_decoder(both: tuple[LanguageModel, TorchModel]) -> None:
    ours, theirs = both
    for name in ("blocks.0.resid_pre", "blocks.1.attn_out", "blocks.1.mlp_act", "blocks.2.resid_post"):
        want, wanted = ours.run(*in_order(ROWS), capture=[name], edits={name: lambda x: x * 0.5 + 1})
        got, seen = theirs.apply({}, *in_order(ROWS), [name], {name: lambda x: x * 0.5 + 1})
        kept = ROWS["segments"] >= 0
        np.testing.assert_allclose(got[kept], want[kept], atol=1e-4, rtol=1e-4, err_msg=name)
        np.testing.assert_allclose(seen[name][kept], wanted[name][kept], atol=1e-4, rtol=1e-4, err_msg=name)
        assert theirs.measures_loss([name])
    # There an edit reaches the norm that reads it, not the residual stream.
    assert not theirs.measures_loss(["blocks.1.resid_mid"])
    with pytest.raises(ConfigError, match=r"made \(4, 48, 1\) of \(4, 48, 32\)"):
        theirs.apply({}, *in_order(ROWS), edits={"blocks.1.mlp_out": lambda x: x[..., :1]})
    with pytest.raises(ConfigError, match="Two edits at one hook point"):
        names = ("blocks.1.mlp_out", "transformer.h.1.mlp.c_proj.out")
        theirs.apply({}, *in_order(ROWS), edits=dict.fromkeys(names, jnp.zeros_like))


def test_ids_that_the_model_does_not_have_are_refused(both: tuple[LanguageModel, TorchModel]) -> None:
    for tokens, positions, message in (
        ([[0, VOCAB]], None, rf"tokens\[0, 1\] is {VOCAB}"),
        ([[0, -1]], None, r"tokens\[0, 1\] is -1"),
        ([[0.5]], None, "tokens are float64"),
        ([[0, 1]], [[0, S]], rf"positions\[0, 1\] is {S}"),
        ([[0] * (S + 1)], None, rf"positions\[0, {S}\] is {S}"),
    ):
        with pytest.raises(DataError, match=message):
            both[1].apply({}, tokens, positions)


def test_names_paths_and_what_is_refused(both: tuple[LanguageModel, TorchModel]) -> None:
    lm = both[1]
    assert lm.hook_point("blocks.1.hook_mlp_out") == "blocks.1.mlp_out"
    assert lm.hook_point("transformer.h.1.mlp") == "transformer.h.1.mlp.out"
    assert lm.hook_points()["transformer.h.1.mlp.c_proj.in"] == 128
    with pytest.raises(ConfigError, match=r"'blocks\.1\.mlp_ouf'\. Did you mean 'blocks\.1\.mlp_out'\?"):
        lm.hook_point("blocks.1.mlp_ouf")
    with pytest.raises(ConfigError, match=r"Did you mean 'transformer\.h\.1\.ln_1\.out'\?.*blocks\.0 to blocks\.2"):
        lm.hook_point("transformer.h.1.ln1.out")
    with pytest.raises(ConfigError, match="no hook point 'transformer'"):
        both[0].hook_point("transformer")


# One of each way of keeping documents apart (Gemma 2 has a window), and an encoder; the others in the soak.
QUICK = ("Gemma2", "Bloom", "Bert")


@pytest.mark.parametrize(
    "family", [f if f in QUICK else pytest.param(f, marks=pytest.mark.soak) for f in FAMILIES if f != "GPT2"]
)
def test_documents_packed_are_documents_alone(family: str, folder_of: Callable[[str], Path]) -> None:
    """At every place of the model, in short rows and in rows longer than a window of attention."""
    lm = load_lm(str(folder_of(family)), backend="torch")
    _, _, way, names = FAMILIES[family]
    assert isinstance(lm, TorchModel) and lm.way == way
    assert lm.causal == (family not in ("Bert", "Roberta"))
    own = sorted(name.split(".")[2] for name in lm.aliases if name.startswith("blocks.1."))
    assert own == sorted(names)
    places = list(lm.widths)
    layers = 2 if family == "Bloom" else 3
    assert (lm.config.context_length, lm.config.n_layer) == (2**20 if family == "Bloom" else S, layers)
    packed = lm._run(*in_order(ROWS), places, {})
    model = random_model(family)
    for row, start, stop in ((0, 0, S), (1, 0, 13), (1, 13, 14), (1, 14, 34), (2, 0, 30)):
        tokens = ROWS["tokens"][row : row + 1, start:stop].astype(np.int64)
        with torch.inference_mode():
            alone = run_chunk(model, Chunk(tokens, np.zeros_like(tokens)), places)
        for place in places:
            got = packed[place][row * S + start : row * S + stop].numpy()
            np.testing.assert_allclose(got, alone[place][0].numpy(), atol=2e-4, rtol=1e-3, err_msg=place)


def test_a_window_without_a_known_name_is_seen_by_the_probe(
    folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "_WINDOWS", ())
    lm = load_lm(str(folder_of("Gemma2")), backend="torch")
    assert (lm.way, lm.long_way) == ("padded", "padded")
    # Packed rows are used as far as they were tried, and no further.
    monkeypatch.setattr(probe, "_LONG", 14)
    lm = load_lm(str(folder_of("Gemma2")), backend="torch")
    assert (lm.way, lm.window, lm.long_way) == ("packed", 14, "padded")


class Recurrent(torch.nn.Module):
    """A torch module that is no model of transformers, and takes no mask."""

    def __init__(self, bidirectional: bool):
        super().__init__()
        self.embed = torch.nn.Embedding(VOCAB, 8)
        self.rnn = torch.nn.GRU(8, 6, batch_first=True, bidirectional=bidirectional)
        self.act = torch.nn.Tanh()

    def forward(self, input_ids: Any) -> Any:
        return self.act(self.rnn(self.embed(input_ids))[0])


@pytest.mark.parametrize("bidirectional", [False, True])
def test_any_module_without_masks(bidirectional: bool, tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    torch.manual_seed(0)
    module = Recurrent(bidirectional)
    tokenizer = Tokenizer.from_folder(tmp_path)
    with pytest.raises(ConfigError, match="give context_length"):
        from_module(module, tokenizer, {})
    lm = from_module(module, tokenizer, {"model": "gru"}, context_length=S)
    assert (lm.way, lm.causal) == (("equal", False) if bidirectional else ("padded", True))
    assert lm.hook_points() == {
        "embed.out": 8,
        "rnn.in": 8,
        **dict.fromkeys(("rnn.out", "act.in", "act.out"), lm.widths["rnn.out"]),
    }
    assert lm.readout() is None and not lm.measures_loss(["rnn.out"])
    got, finite = lm.make_forward(["act.out"], ROWS["tokens"].shape, mesh())(packed_rows(ROWS))
    assert got["act.out"].dtype == jnp.bfloat16 and finite.all()
    with torch.inference_mode():
        alone = module(torch.tensor(ROWS["tokens"][1:2, 14:34]).long())[0]
    np.testing.assert_allclose(got["act.out"][S + 14 : S + 34].astype(np.float32), alone.numpy(), atol=4e-3)
    assert not got["act.out"][3 * S :].any(), "padding is zeros"


# --------------------------------------------------------------------------------------------------- the forward pass


def hooks_of(module: Any) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in module.modules())


def test_nothing_runs_after_the_last_hook_point(both: tuple[LanguageModel, TorchModel]) -> None:
    lm = both[1]
    calls = []
    handles = [
        block.register_forward_hook(lambda *_, i=i: calls.append(i)) for i, block in enumerate(lm.module.transformer.h)
    ]
    try:
        for names, want in (
            (["blocks.0.mlp_out"], []),
            (["blocks.1.resid_pre", "blocks.0.mlp_in"], [0]),
            (["blocks.1.resid_post"], [0, 1]),
        ):
            calls.clear()
            got, _ = lm.make_forward(names, ROWS["tokens"].shape, mesh())(packed_rows(ROWS))
            # The block of the last hook point ends before or within a hook of its own.
            assert [i for i in calls if i not in want] in ([], [want[-1] + 1] if want else []) and list(got) == names
            assert 2 not in calls
    finally:
        for handle in handles:
            handle.remove()
    assert hooks_of(lm.module) == 0


def test_hooks_are_gone_after_an_error(both: tuple[LanguageModel, TorchModel]) -> None:
    lm = both[1]

    def fail(_: Any) -> Any:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        lm.apply({}, *in_order(ROWS), POINTS, {"blocks.1.mlp_out": fail})
    assert hooks_of(lm.module) == 0
    lm.apply({}, *in_order(ROWS), POINTS)
    assert hooks_of(lm.module) == 0


def test_a_forward_pass_for_capture_is_that_of_jax(both: tuple[LanguageModel, TorchModel]) -> None:
    names = ["blocks.1.mlp_out", "blocks.0.resid_post"]
    want, _ = both[0].make_forward(names, ROWS["tokens"].shape, mesh())(packed_rows(ROWS))
    got, finite = both[1].make_forward(names, ROWS["tokens"].shape, mesh())(packed_rows(ROWS))
    kept = ROWS["segments"].ravel() >= 0
    assert list(got) == names and finite.shape == kept.shape and finite.all()
    for name in names:
        assert got[name].dtype == jnp.bfloat16
        one, two = (np.asarray(x[name])[kept].astype(np.float32) for x in (got, want))
        np.testing.assert_allclose(one, two, rtol=8e-3, atol=1e-3)


def test_nan_is_seen_before_it_is_rounded(folder_of: Callable[[str], Path]) -> None:
    lm = load_lm(str(folder_of("GPT2")), backend="torch")
    lm.module.transformer.wte.weight.data[5] = torch.nan
    rows = ROWS | {"tokens": np.where(ROWS["tokens"] == 5, 6, ROWS["tokens"])}
    rows["tokens"][2, 29] = 5
    _, finite = lm.make_forward(["blocks.0.resid_pre"], rows["tokens"].shape, mesh())(packed_rows(rows))
    assert np.flatnonzero(~finite).tolist() == [2 * S + 29]


def test_a_pair_of_two_backends(both: tuple[LanguageModel, TorchModel]) -> None:
    pair = ModelPair(*both)
    names = ["blocks.1.mlp_out", "second.blocks.1.mlp_out", "second.transformer.h.0.mlp.out"]
    assert not pair.pure and [pair.hook_point(name) for name in names] == names
    got, finite = pair.make_forward(names, ROWS["tokens"].shape, mesh())(packed_rows(ROWS))
    assert set(got) == set(names) and finite.all()
    kept = ROWS["segments"].ravel() >= 0
    one, two = (np.asarray(got[name])[kept].astype(np.float32) for name in names[:2])
    np.testing.assert_allclose(one, two, rtol=8e-3, atol=1e-3)


def test_rows_are_halved_until_they_fit() -> None:
    tried = []

    def attempt(rows: int) -> None:
        tried.append(rows)
        if rows > 20:
            raise torch.OutOfMemoryError("CUDA out of memory.") if rows > 100 else RuntimeError("HIP out of memory")

    assert find_batch_rows(attempt, 128) == 16 and tried == [128, 64, 32, 16]
    with pytest.raises(DataError, match="no memory for a single row"):
        find_batch_rows(lambda rows: attempt(rows + 20), 4)

    def broken(rows: int) -> None:
        raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes"):
        find_batch_rows(broken, 4)


# ------------------------------------------------------------------------------------------------------------ loading


def test_without_torch_the_extra_is_named(folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [folder_of("OPT"), folder_of("GPT2")]
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ConfigError, match=r"pip install 'torch>="):
        load_lm(str(folders[0]))
    assert isinstance(load_lm(str(folders[1])), LanguageModel)


def test_what_is_chosen_and_refused(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    gpt2 = str(folder_of("GPT2"))
    ours, theirs = (load_lm(gpt2, backend=backend).identity for backend in ("auto", "torch"))
    assert theirs == ours | {"backend": "torch"}
    with pytest.raises(ConfigError, match=r"lm\.backend is 'tensorflow'\. There are: auto, jax, torch"):
        LMConfig(backend="tensorflow")
    with pytest.raises(ConfigError, match=r"lm\.device is 'gpu'"):
        load_lm(gpt2, backend="torch", device="gpu")
    with pytest.raises(ConfigError, match=r"capture\.batch_rows is 0: .* for lm\.backend=torch only"):
        load_lm(gpt2).rows_that_fit(POINTS, S)
    assert load_lm(gpt2, backend="torch").rows_that_fit(POINTS, S) == 32
    CaptureConfig(batch_rows=0)
    with pytest.raises(ConfigError, match=r"batch_rows is -1; it must be 0 or more"):
        CaptureConfig(batch_rows=-1)
    strange = tmp_path / "strange"
    random_model("OPT").save_pretrained(strange)
    write_tokenizer(strange)
    config = json.loads((strange / "config.json").read_text())
    (strange / "config.json").write_text(json.dumps(config | {"model_type": "nothing-that-exists"}))
    with pytest.raises(DataError, match=r"transformers cannot load the model in .*strange"):
        load_lm(str(strange))


# ------------------------------------------------------------------------------------------------------------- stages


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of words that `write_tokenizer` knows."""
    rng = np.random.default_rng(0)
    folder = tmp_path_factory.mktemp("texts")
    for i in range(60):
        words = " ".join(f"w{w}" for w in rng.integers(0, VOCAB - 2, rng.integers(5, 90)))
        (folder / f"{i}.txt").write_text(words)
    return folder


def experiment_of(folder: Path, model: Path, texts: Path, hook_point: str, **top: Any) -> Any:
    return tiny_experiment(
        folder,
        lm={"model": str(model)},
        text={"source": "files", "paths": (str(texts),), "context_length": S, "heldout_fraction": 0.3},
        capture={"hook_points": (hook_point,), "tokens": 800, "heldout_tokens": 200, "batch_rows": 0},
        coder={"d_sae": 64},
        train={"tokens": 10 * 128},
        eval={"tokens": 200},
        report={"tokens": 200, "max_features": 4},
        top=top,
    )


@pytest.mark.ci
def test_a_model_that_jax_does_not_know_goes_the_whole_way(
    tmp_path: Path, texts: Path, folder_of: Callable[[str], Path]
) -> None:
    e = experiment_of(tmp_path, folder_of("OPT"), texts, "blocks.1.resid_post")
    work = Workspace(e)
    run_pipeline(work)
    metrics = read_json(e.run_dir / "eval.json")["metrics"]
    assert {"fve", "l0", "ce_clean", "loss_recovered"} <= set(metrics)
    assert metrics["ce_zero"] != pytest.approx(metrics["ce_clean"])
    assert "backend" in work.lm.identity and (e.run_dir / "report.html").is_file()
    # What is in the store is what transformers gives each piece of a document alone.
    places: dict[tuple[int, ...], list[np.ndarray]] = {}
    model = random_model("OPT")
    for packed in work.packer.batches("train", 4):
        for row, segments in enumerate(packed.segments):
            for segment in range(segments.max() + 1):
                at = segments == segment
                with torch.inference_mode():
                    tokens = torch.tensor(packed.tokens[row][at][None]).long()
                    states = model(tokens, output_hidden_states=True).hidden_states[2][0].numpy()
                columns = (a[row][at].tolist() for a in (packed.documents, packed.positions, packed.tokens))
                for key, state in zip(zip(*columns, strict=True), states, strict=True):
                    places.setdefault(key, []).append(state)
    rows = StoreReader.open(e.store_dir("train")).rows(0, 800, metadata=True)
    for i in range(800):
        found = places[tuple(int(rows[name][i]) for name in ("document", "position", "token_id"))]
        got = rows["blocks.1.resid_post"][i].astype(np.float32)
        assert any(np.allclose(got, state, rtol=8e-3, atol=1e-3) for state in found), i


@pytest.mark.soak
def test_an_encoder_is_captured_at_a_modules_path(
    tmp_path: Path, texts: Path, folder_of: Callable[[str], Path]
) -> None:
    name = "bert.encoder.layer.1.output.dense"
    # Its tokenizer names no bos.
    e = replaced(experiment_of(tmp_path, folder_of("Bert"), texts, name), "text", prepend_bos=False)
    work = Workspace(e)
    run_pipeline(work)
    assert work.sites == ((f"{name}.out",), (f"{name}.out",))
    result = read_json(e.run_dir / "eval.json")
    assert result["reads"] == [f"{name}.out"] and "fve" in result["metrics"]
    assert not {"ce_clean", "loss_recovered"} & set(result["metrics"])
    run_capture(Workspace(e))  # complete already
    elsewhere, other = (
        deciding(to_json(replaced(e, "lm", **change))) for change in ({"device": "cpu"}, {"backend": "jax"})
    )
    assert elsewhere == deciding(to_json(e)) != other
    with pytest.raises(DataError, match="made for something else"):
        run_capture(Workspace(replaced(e, "lm", dtype="bfloat16")))
