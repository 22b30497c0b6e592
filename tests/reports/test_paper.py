"""What a paper takes: .csv with every digit, .tex that LaTeX reads, .svg and .pdf that are the same each time."""

import csv
import io
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from saejax.evals.seeds import Trained, over_seeds
from saejax.reports.dictionaries_page import render_dictionaries
from saejax.reports.paper import csv_of, tex_of
from saejax.reports.sweep_page import render_sweep, sweep_table
from saejax.reports.table_page import Table


def content(seeds: int) -> dict[str, Any]:
    rows: list[dict[str, Any]] = [
        {"member": f"top_k{k}-seed{seed}", "preset": "topk", "reads": ["h", "i"], "d_sae": 64, "k": k, "lr": 1e-3}
        | {"seed": seed, "sparsity_scale": 1.0, "l0": float(k), "fve": 0.1 * k + 0.01 * seed, "dead_fraction": 0.25}
        | {"relative_error": 1 / 3, "tokens_per_second": 1e3, "status": "ok"}
        for k in (4, 8)
        for seed in range(seeds)
    ]
    names = ("l0", "fve", "dead_fraction", "relative_error")
    coders = [Trained(r["member"], str(r["k"]), r["seed"], "h", {name: r[name] for name in names}) for r in rows]
    settings = over_seeds(coders)
    return {"name": "grid", "tokens": 10, "tokens_per_second": 1.0, "members": rows, "settings": settings, "choice": []}


def tabular(path: Path) -> list[list[str]]:
    """The cells of a .tex file, after a look at its form."""
    first, begin, top, head, middle, *body, bottom, end = path.read_text(encoding="ascii").splitlines()
    assert first == "% Needs the package booktabs." and (top, middle, bottom) == (
        r"\toprule",
        r"\midrule",
        r"\bottomrule",
    )
    assert end == r"\end{tabular}"
    lines = [line.removesuffix(r" \\").split(" & ") for line in (head, *body)]
    columns = re.fullmatch(r"\\begin\{tabular\}\{([lr]+)\}", begin)
    assert columns and {len(line) for line in lines} == {len(columns[1])}
    return lines


def test_a_sweep_writes_what_a_paper_takes(tmp_path: Path) -> None:
    made = content(seeds=3)
    render_sweep(tmp_path, made)
    with (tmp_path / "sweep.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["relative_error"]) for row in rows] == [1 / 3] * 6 and rows[0]["reads"] == "h i"
    lines = tabular(tmp_path / "sweep.tex")
    assert lines[0][:4] == ["setting", "seeds", "L0", r"95 \%"] and [line[1] for line in lines[1:]] == ["3", "3"]
    # 0.01 t / sqrt(3), t of 2 degrees of freedom 4.302653.
    assert lines[1][0] == r"top\_k4" and lines[1][4:6] == [r"0.4100 $\pm$ 0.0100", "0.3852 to 0.4348"]
    assert ElementTree.parse(tmp_path / "sweep.svg").getroot().tag.endswith("svg")
    assert (tmp_path / "sweep.pdf").read_bytes().startswith(b"%PDF")
    text = (tmp_path / "sweep.md").read_text()
    assert "## Over seeds" in text and sweep_table(made) in text and "0.4100 +- 0.0100" in text
    pictures = {name: (tmp_path / name).read_bytes() for name in ("sweep.svg", "sweep.pdf")}
    render_sweep(tmp_path, made)
    assert pictures == {name: (tmp_path / name).read_bytes() for name in pictures}


def test_without_several_seeds_the_tex_has_the_members(tmp_path: Path) -> None:
    render_sweep(tmp_path, content(seeds=1))
    lines = tabular(tmp_path / "sweep.tex")
    assert lines[0] == ["member", r"d\_sae", "L0", "FVE", "dead", "relative error"]
    assert lines[1] == [r"top\_k4-seed0", "64", "4.0", "0.4000", r"25.00\%", "0.3333"]
    assert "Over seeds" not in (tmp_path / "sweep.html").read_text()


def test_dictionaries_have_the_same_files(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"name": f"a-seed{seed}", "coder": "topk", "reads": ["h"], "writes": ["h"], "d_sae": 64, "gates": []}
        | {"metrics": {"l0": 4.0, "fve": 0.5 + seed / 10, "loss_recovered": None, "dead_fraction": 0.0}, "notes": []}
        | {"intervals": {"fve": [0.4, 0.6]}}
        for seed in (0, 1)
    ]
    rows.append({"name": "gone", "error": "there is none"})
    figures = ("l0", "fve", "loss_recovered", "dead_fraction")
    alike = [
        Trained(row["name"], "same", row["name"], "h", {name: row["metrics"][name] for name in figures})
        for row in rows[:2]
    ]
    text = render_dictionaries(tmp_path, "title", "lead", rows, (), over_seeds(alike))
    assert "0.5500 +- 0.0707" in text
    assert [line[1] for line in tabular(tmp_path / "table.tex")] == ["seeds", "2"]
    known = list(csv.DictReader(io.StringIO((tmp_path / "table.csv").read_text())))
    assert [(row["fve"], row["fve_low"], row["fve_high"]) for row in known] == [
        *(("0.5", "0.4", "0.6"), ("0.6", "0.4", "0.6"), ("", "", ""))
    ]
    assert (tmp_path / "table.svg").exists() and (tmp_path / "table.pdf").exists()


def test_letters_that_mean_something_to_latex_and_csv_are_escaped() -> None:
    table = Table([["50% & more", "a\nb"], [r"\x{y}^2~$#_", "1"]])
    _, _, _, head, _, body, *_ = tex_of(table).splitlines()
    assert head == r"50\% \& more & a b \\"
    assert body == r"\textbackslash{}x\{y\}\textasciicircum{}2\textasciitilde{}\$\#\_ & 1 \\"
    written = csv_of([{"a": 'with "quotes", and\nlines', "b": None}, {"c": 0.1 + 0.2}])
    assert list(csv.DictReader(io.StringIO(written, newline=""))) == [
        {"a": 'with "quotes", and\nlines', "b": "", "c": ""},
        {"a": "", "b": "", "c": "0.30000000000000004"},
    ]
