"""`saejax graph`: the files that it writes, what stands in them, and what it refuses."""

import dataclasses
import html
import json
import re
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from tiny.attributed import lm_of, mlp_dictionaries, prompt
from tiny.by_hand import coder_of, random_params, sites_of
from tiny.commands import run_command
from tiny.graphs import VOCAB, made_up_feature

import saejax
from saejax.app import graph_heads
from saejax.app.graph import ablations, mlps_of, slug_of
from saejax.attribution import AttributionConfig, Graph, attribute
from saejax.attribution.build import decided_by
from saejax.attribution.export import checked_slug, node_ids, scan_of
from saejax.attribution.heads import Heads
from saejax.attribution.influence import path_length, pruned, scores
from saejax.attribution.local import LocalModel
from saejax.attribution.skipping import response_errors, skipped
from saejax.commands.graph import Graph as GraphCommand
from saejax.core.errors import ConfigError, DataError
from saejax.interventions import Interventions, zero
from saejax.lm import load_lm
from saejax.reports.feature_table import write_features
from saejax.runs import Run
from saejax.trained import Origin, TrainedCoder

READS, WRITES, F = ("blocks.1.mlp_in", "blocks.4.mlp_in"), ("blocks.1.mlp_out", "blocks.4.mlp_out"), 12
PROMPT = "return data[x"


def dictionary(topology: str = "clt", **origin: Any) -> TrainedCoder:
    coder = coder_of(topology, "topk", READS, WRITES, F, 128)
    params = {name: p * (4 if name.startswith("W_dec") else 1) for name, p in random_params(coder).items()}
    return TrainedCoder(coder, params, sites_of(coder, READS, WRITES), Origin(**origin))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with graphs/ of a dictionary whose run has a table of features."""
    folder = tmp_path_factory.mktemp("graph")
    rows = [made_up_feature(0, latent) | {"id": latent} for latent in range(2 * F - 1)]
    (folder / "run").mkdir()
    write_features(folder / "run" / Run.features, {"vocab": VOCAB, "features": rows}, {})
    dictionary(model="demo", source=str(folder / "run")).save(folder / "clt")
    run_command("graph", [folder / "clt", PROMPT], out=str(folder / "graphs"), effects=4, node_share=0.99)
    return folder


def of_prompt(folder: Path, readable: str) -> Path:
    """The .npz of the graph whose name begins so."""
    (path,) = (folder / "graphs").glob(f"{readable}-*.npz")
    return path


def test_the_files_say_the_same(made: Path) -> None:
    path = of_prompt(made, "return-data-x")
    assert re.fullmatch(r"return-data-x-[0-9a-f]{8}\.npz", path.name)
    graph, content = Graph.load(path), json.loads(path.with_suffix(".json").read_text())
    lm = load_lm("demo")
    assert graph.tokens.tolist() == [0, *lm.tokenizer.encode(PROMPT)]
    ids = node_ids(graph)
    shown = [node for node in content["nodes"] if "transcoder" in node["feature_type"]]
    assert shown and {node["node_id"] for node in content["nodes"]} <= set(ids)
    features = made / "graphs" / content["metadata"]["scan"].removeprefix("./data/")
    for node in shown:
        number = node["layer"], int(node["node_id"].split("_")[1])
        described = number != ("1", F - 1)  # the one that the table lacks
        assert (features / f"{node['feature']}.json").is_file() == described
        assert bool(node["clerp"]) == described
    index = json.loads((made / "graphs" / "graph-metadata.json").read_text())
    assert [entry["slug"] for entry in index["graphs"]] == [path.stem]


@pytest.mark.ci
def test_the_effects_are_those_of_a_model_edited_by_hand(made: Path) -> None:
    path = of_prompt(made, "return-data-x")
    graph, page = Graph.load(path), path.with_suffix(".html").read_text()
    effects = json.loads(re.findall(r'id="summary-data">(.*?)</script>', page, re.DOTALL)[0])["effects"]
    assert len(effects["rows"]) == 4 and effects["spearman"] is not None
    lm, sae = load_lm("demo"), dictionary()
    ids, best = node_ids(graph), int(graph.logits[0])
    x = {p: np.asarray(v)[0] for p, v in lm.run([graph.tokens], capture=list(READS))[1].items()}
    f = np.asarray(sae.encode(np.stack([x[p] for p in READS], 1)))
    for row in effects["rows"]:
        (place,) = [i for i, name in enumerate(ids) if [name] == row["nodes"]]
        group, position, latent = graph.features[place].tolist()
        off = f.copy()
        off[position, group, latent] = 0
        delta = np.asarray(sae.decode(off)) - np.asarray(sae.decode(f))
        edits = {w: lambda y, d=delta[None, :, i]: y + d for i, w in enumerate(WRITES)}
        z = [np.asarray(lm.run([graph.tokens], edits=e)[0])[0, -1] for e in ({}, edits)]
        want = np.subtract(*[v[best] - v.mean() for v in reversed(z)])
        assert row["measured"] == pytest.approx(want, abs=2e-4)


@pytest.mark.ci
def test_effects_of_several_dictionaries_are_those_of_each_alone() -> None:
    lm, saes = lm_of("gpt2"), mlp_dictionaries("transcoder")
    graph = attribute(lm, saes, prompt(5), AttributionConfig(max_features=12, silent=1))
    shown = ablations(lm, saes, graph, 6)["effects"]
    places = [node_ids(graph).index(row["nodes"][0]) for row in shown]
    nodes, best = graph.features[places].tolist(), int(graph.logits[0])
    assert len({layer for layer, _, _ in nodes}) > 1
    for row, (layer, position, latent) in zip(shown, nodes, strict=True):
        inside = Interventions(lm, {"one": saes[layer]})
        off = zero(latent, np.arange(5)[None] == position)
        z = [np.asarray(inside.run([graph.tokens], c).logits)[0, -1] for c in ({}, {"one": off})]
        assert row["measured"] == pytest.approx(np.subtract(*[v[best] - v.mean() for v in z[::-1]]), abs=1e-5)


def test_a_second_run_and_a_page_read_again_give_the_same_files(made: Path, tmp_path: Path) -> None:
    before = {p: p.read_bytes() for p in (made / "graphs").rglob("*") if p.is_file()}
    run_command("graph", [made / "clt", PROMPT], out=str(made / "graphs"), effects=4, node_share=0.99)
    assert {p: p.read_bytes() for p in before} == before


def test_heads_say_what_edges_pass_and_why_heads_attend(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_heads, "EDGES", 6)
    monkeypatch.setattr(graph_heads, "SCORES", 2)
    run_command("graph", [made / "clt", PROMPT], out=str(tmp_path), effects=0, node_share=0.99, name="one", heads=True)
    content, heads = (json.loads((tmp_path / f"one{kind}.json").read_text()) for kind in ("", ".heads"))
    lm, sae, graph = load_lm("demo"), dictionary(), Graph.load(tmp_path / "one.npz")
    weights = {(link["source"], link["target"]): link["weight"] for link in content["links"]}
    assert heads["slug"] == "one" and len(heads["edges"]) > 3 and len(heads["scores"]) > 1
    place = {node["node_id"]: node["ctx_idx"] for node in content["nodes"]}
    for edge in heads["edges"]:
        ends = edge["source"], edge["target"]
        assert edge["weight"] == pytest.approx(weights[ends], rel=1e-5) and place[ends[0]] < place[ends[1]]
        # Every way from one token to another passes a head.
        assert edge["parts"] and all(one["key"] <= one["query"] for one in edge["parts"])
    local = LocalModel(lm, [sae], graph.tokens, AttributionConfig(), answers=graph.logits.tolist())
    ids = [*node_ids_of(local, graph), "bias"]
    for one in heads["scores"]:
        found = Heads(local).score(*(one[key] for key in ("block", "head", "query", "key")))
        assert one["score"] == pytest.approx(found.score, rel=1e-5)
        for pair in one["pairs"]:
            value = found.pairs[ids.index(pair["query"]), ids.index(pair["key"])]
            assert pair["value"] == pytest.approx(value, rel=1e-4)
        assert one["keys"][0]["value"] == pytest.approx(found.by_key[ids.index(one["keys"][0]["node"])], rel=1e-4)
    page = (tmp_path / "one.html").read_text()
    shown = json.loads(re.findall(r'id="summary-data">(.*?)</script>', page, re.DOTALL)[0])["heads"]
    assert shown == {key: heads[key] for key in ("edges", "scores")}


def test_a_cross_layer_transcoder_is_measured_beside_transcoders(tmp_path: Path) -> None:
    lm, clt, each = lm_of("gpt2"), mlp_dictionaries("clt"), mlp_dictionaries("transcoder")
    how: dict[str, Any] = {"out": tmp_path, "name": "one", "effects": 0, "max_features": 0}
    made = saejax.graph(clt, lm, "w1 w2 w3 w4 w5", beside=each, **how)
    found = json.loads((tmp_path / "one.faithful.json").read_text())
    assert found == {"slug": "one"} | json.loads(json.dumps(made.faithful))
    mine, theirs = found["rows"]
    config = AttributionConfig(max_features=0)
    other = attribute(lm, each, made.graph.tokens, config)
    skips = skipped(lm, clt, made.graph, config)
    assert found["layers"] == list(made.graph.hook_points)
    assert mine["skipped"] == pytest.approx(skips.share) and 0 < mine["skipped"] < 1
    assert mine["skipped_by_layer"] == pytest.approx(skips.shares) and mine["path"] == path_length(made.graph)
    assert theirs["skipped"] == 0 and not any(theirs["skipped_by_layer"])
    for row, saes, graph in ((mine, clt, made.graph), (theirs, each, other)):
        assert row["errors"] == pytest.approx(response_errors(lm, saes, graph.tokens), rel=1e-5)
        assert row["error"] == pytest.approx(np.mean(row["errors"][1:]))
        assert (row["replacement"], row["completeness"]) == pytest.approx(scores(graph))
    page = (tmp_path / "one.html").read_text()
    shown = json.loads(re.findall(r'id="summary-data">(.*?)</script>', page, re.DOTALL)[0])["faithful"]
    assert [row["error"] for row in shown["rows"]] == [mine["error"], theirs["error"]]
    with pytest.raises(ConfigError, match="give one transcoder for each"):
        saejax.graph(clt, lm, "w1 w2 w3 w4 w5", beside=each[:2], **how)


def test_the_command_measures_beside_what_it_names(made: Path, tmp_path: Path, capsys: Any) -> None:
    for i, (read, write) in enumerate(zip(READS, WRITES, strict=True)):
        coder = coder_of("transcoder", "topk", (read,), (write,), F, 128)
        sites = sites_of(coder, (read,), (write,))
        TrainedCoder(coder, random_params(coder), sites, Origin(model="demo")).save(tmp_path / f"mlp{i}")
    how: dict[str, Any] = {"out": str(tmp_path), "effects": 0, "name": "one"}
    beside = f"{tmp_path / 'mlp0'},{tmp_path / 'mlp1'}"
    run_command("graph", [made / "clt", PROMPT], beside=beside, **how)
    said = capsys.readouterr().out
    assert re.search(r": skips \d+% of the influence, response error .*, paths of \d\.\d edges", said)
    assert "one.faithful.json: by layer" in said
    rows = json.loads((tmp_path / "one.faithful.json").read_text())["rows"]
    assert len(rows) == 2 and rows[1]["skipped"] == 0
    with pytest.raises(DataError):
        run_command("graph", [made / "clt", PROMPT], beside=str(tmp_path / "nothing"), **how)


def node_ids_of(local: LocalModel, graph: Graph) -> list[str]:
    """Ids of all that can be a source: all active features, errors and tokens."""
    whole = dataclasses.replace(
        graph,
        features=local.features,
        activations=local.activations,
        weights=np.zeros((len(local.features) + len(graph.logits), local.n_sources + len(graph.logits)), np.float32),
    )
    return node_ids(whole)[: local.n_sources]


def test_in_python_it_writes_the_files_of_the_command(made: Path, tmp_path: Path) -> None:
    sae, lm = saejax.load(made / "clt"), load_lm("demo", backend="jax")
    known = dataclasses.replace(sae, origin=dataclasses.replace(sae.origin, source=str(made / "run")))
    one = saejax.graph(known, lm, PROMPT, out=tmp_path, effects=4, node_share=0.99)
    (page,) = tmp_path.glob("*.html")
    for kind in (".html", ".json", ".npz"):
        mine, theirs = (path.with_suffix(kind).read_bytes() for path in (page, of_prompt(made, "return-data-x")))
        assert mine == theirs
    assert one.page == page and len(one.effects) == 4 and one.mlps == (len(WRITES), lm.config.n_layer)
    assert re.fullmatch(r"\d+ features, \d+ next tokens; replacement score 0\.\d\d, completeness.*", repr(one))
    assert html.escape(page.read_text()) in one._repr_html_()
    wrongs = {"prompt is empty": (sae, lm, ""), "way into a str": (sae, "demo", "x"), "one is a str": ("sae", lm, "x")}
    for match, wrong in wrongs.items():
        with pytest.raises(ConfigError, match=match):
            saejax.graph(*cast(Any, wrong))


def test_the_command_has_the_settings_defaults() -> None:
    assert (GraphCommand.max_features, GraphCommand.logits, GraphCommand.silent) == (
        AttributionConfig.max_features, AttributionConfig.logits, AttributionConfig.silent)  # fmt: skip


def test_a_page_of_few_mlps_shows_features(made: Path) -> None:
    """Tokens have what passes through the others, most of it: shares are of what features and errors have."""
    graph = Graph.load(of_prompt(made, "return-data-x"))
    lm = load_lm("demo")
    assert mlps_of(lm, graph) == (len(WRITES), lm.config.n_layer) and len(WRITES) < lm.config.n_layer
    content = json.loads(of_prompt(made, "return-data-x").with_suffix(".json").read_text())
    kept = pruned(graph, 0.99, 0.98, count_tokens=False)
    assert len(content["nodes"]) == kept.nodes.sum()
    page = of_prompt(made, "return-data-x").with_suffix(".html").read_text()
    assert f"L0 {WRITES[0]}, L1 {WRITES[1]}" in page  # a layer's number is not its block's


def test_each_graph_has_a_name_of_its_own(made: Path, tmp_path: Path) -> None:
    """A clean and a corrupt prompt may differ in punctuation alone; other settings and weights are other graphs."""
    lm, sae = load_lm("demo"), dictionary(model="demo", source=str(made / "run"))
    halved = {name: p * 0.5 if name == "W_dec_0" else p for name, p in sae.params.items()}
    other = TrainedCoder(sae.coder, halved, sae.sites, sae.origin)

    def slug(said: str, of: TrainedCoder = sae, **settings: int) -> str:
        return slug_of(said, decided_by(lm, [of], lm.tokenizer.encode(said), AttributionConfig(**settings)))

    prompts = ("data[x", "data(x", "Data[x", "данные", "数据", "({[")
    slugs = [*map(slug, prompts), slug("data[x", logits=2), slug("data[x", max_features=8), slug("data[x", other)]
    assert len(set(slugs)) == len(slugs) and slugs[0] == slug("data[x")
    assert [checked_slug(one) for one in slugs] == slugs and slugs[0].startswith("data-x-")
    how: dict[str, Any] = {"out": str(tmp_path / "graphs"), "effects": 0, "max_features": 8}
    other.save(tmp_path / "clt")
    for place, said in ((made, prompts[0]), (made, prompts[1]), (tmp_path, prompts[0])):
        run_command("graph", [place / "clt", said], **how)
    found = [Graph.load(path) for path in (tmp_path / "graphs").glob("*.npz")]
    assert sorted(lm.tokenizer.decode(graph.tokens.tolist()[1:]) for graph in found) == ["data(x", "data[x", "data[x"]
    # What features of other weights fire on lies elsewhere, whatever the dictionary is called.
    assert len({scan_of(graph.names) for graph in found}) == 2


@pytest.mark.parametrize(
    ("words", "given", "match"),
    [
        (["clt"], {}, "Give one or more dictionaries and a prompt"),
        (["nothing", "x"], {}, "nothing does not exist"),
        (["clt", ""], {}, "The prompt is empty"),
        (["clt", "x" * 2000], {}, "256"),
        (["clt", "x"], {"name": "a/b"}, "'a/b' cannot name a graph"),
        (["clt", "x"], {"supernodes": "none.json"}, "none.json"),
        (["clt", "x"], {"model": "gpt17"}, "gpt17"),
        (["clt", "pythia", "x"], {}, "clt is of the model demo, and pythia of pythia.*--model=NAME"),
        (["crosscoder", "x"], {}, "Crosscoder.*one latent of it reads several hook points"),
    ],
)
def test_what_has_no_graph_is_refused(
    words: list[str], given: dict[str, Any], match: str, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(made)
    if not Path("crosscoder").exists():
        dictionary("crosscoder", model="demo").save("crosscoder")
        dictionary(model="pythia").save("pythia")
    with pytest.raises((ConfigError, DataError), match=match):
        run_command("graph", words, **given)
    assert not list(Path("graphs").glob("x-*.html"))
