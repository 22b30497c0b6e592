"""The page of a study: behaviours, graphs, what groups of features cause, and what the graphs had predicted.

Made from plain data alone (`saejax.studies.summary`); it needs no other file, and no script. Each claim leads to the
rows of the table that it comes from (`render_rows`).
"""

import re
import urllib.parse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from saejax.core.files import write_bytes
from saejax.reports.study_charts import effects_chart, interval, number, points_chart
from saejax.reports.table_page import Markup, html_page, link, markup, note, table_markup

# (name, one of its page; number of the line in the file and values of each row).
Part = tuple[Sequence[str], Sequence[tuple[int, Sequence[str]]]]

# A rank correlation from which on the page calls predictions good.
_GOOD = 0.5
_HOW = """<details class="how"><summary>How to read this page</summary><dl>
<dt>logit difference</dt><dd>The logit of the right answer less that of the wrong one, after the last token. Above 0 the
model prefers the right answer. Every effect on this page is a change of it.</dd>
<dt>clean, corrupt</dt><dd>Two prompts that differ in one thing, after which different answers are right. Features are
found on training pairs, and their effects are measured on test pairs.</dd>
<dt>feature, group</dt><dd>A feature is one latent of a dictionary. L0 is the first layer that has one. A group is
several features of a layer: L0.1 has those with the most influence there, L0.2 the next.</dd>
<dt>graph, influence</dt><dd>An attribution graph says what each feature of one prompt adds to each other and to the
answers. The influence of a feature is its part in the answers, directly and through others.</dd>
<dt>control</dt><dd>As many random features of the same layer that fire as much. A group does more than its controls if
the interval of its effect does not hold 0 and at most one control in ten is as large. Where few features fire, the same
control is drawn again; it counts once, and with fewer than 9 different ones there is no verdict.</dd>
</dl></details>"""


def render_study(path: Path, content: Mapping[str, Any]) -> Path:
    """Writes the page to `path` and returns it. Equal content gives equal bytes.

    Args:
      content: {"name", "model", "dictionaries": [text], "graphs": number for each behaviour, "group_size",
        "least_accuracy", "behaviours": [...], "refused": [...]}, as `saejax.studies.pages` makes it. A number that is
        not finite is None.

    Raises:
      DataError: it cannot be written.
    """
    behaviours, refused = content["behaviours"], content["refused"]
    links = "".join(f'<a href="#{_id(b["name"])}">{markup(b["name"])}</a>' for b in behaviours)
    facts = {
        "model": content["model"],
        "dictionaries": ", ".join(content["dictionaries"]),
        "graphs": f"{content['graphs']} a behaviour",
        "groups": f"of {content['group_size']} features",
    }
    described = "".join(f"<div><dt>{name}</dt><dd>{markup(fact)}</dd></div>" for name, fact in facts.items())
    page = html_page(
        f"{content['name']} · saejax study",
        f"""<header class="masthead"><p class="eyebrow">saejax study</p><h1>{markup(content["name"])}</h1>
<dl class="facts">{described}</dl></header>
<nav class="contents" aria-label="Behaviours">{links}</nav>
<section id="results"><h2>Results</h2>
<p class="lead">Which features of the dictionaries make the model do what it does? Attribution graphs name candidates;
what counts is what happens when they are taken away.</p>
{_overview(behaviours)}{_refused(refused, content["least_accuracy"])}
{_HOW}</section>
{"".join(map(_behaviour, behaviours))}""",
    )
    write_bytes(path, page.encode())
    return path


def render_rows(path: Path, title: str, csv: str, back: str, columns: Sequence[str], parts: Sequence[Part]) -> None:
    """Write a table of a study as a page: the rows that a claim comes from. Equal arguments give equal bytes.

    Args:
      csv, back: addresses of the file with these rows, and of the page whose links lead here.
      parts: (names, rows) that a link can name together, shown in another colour then.

    Raises:
      DataError: it cannot be written.
    """
    head = "".join(f"<th>{markup(name)}</th>" for name in ("line", *columns))
    bodies = []
    for names, rows in parts:
        cells = ("".join(f"<td>{markup(value)}</td>" for value in (line, *values)) for line, values in rows)
        bodies.append(f'<tbody id="{anchor(*names)}">{"".join(f"<tr>{row}</tr>" for row in cells)}</tbody>')
    page = html_page(
        title,
        f"""<header class="masthead"><p class="eyebrow">{link(back, "saejax study")}</p>
<h1>{markup(title)}</h1>
<p class="note">{sum(len(rows) for _, rows in parts):,} rows of {link(csv, title)}.</p></header>
<div class="scroll"><table class="rows"><thead><tr>{head}</tr></thead>{"".join(bodies)}</table></div>""",
    )
    write_bytes(path, page.encode())


def anchor(*names: str) -> str:
    """An id for one or several names: names that differ have ids that differ, wherever one of them ends."""
    plain = ("".join(c if c.isascii() and (c.isalnum() or c in ".-") else f"_{ord(c):x}_" for c in n) for n in names)
    return f"p-{':'.join(plain)}"


def _overview(behaviours: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for b in behaviours:
        largest, test = _largest(b), b["baseline"]["test"]
        effect = "none" if largest is None else f"{interval(largest['ablate'])} of {number(test['clean'])}"
        rows.append(
            (link(f"#{_id(b['name'])}", b["name"]), b["about"],
             _source(b, "baseline", f"{test['accuracy']:.0%}", "test"),
             f"{_standing(b)} of {len(b['groups'])}", largest["name"] if largest else "none",
             effect, _two(b["prediction"]["spearman"]))
        )  # fmt: skip
    heads = (
        *("behaviour", "the model", "right in", "groups that do more than controls", "the largest", "without it"),
        "prediction (Spearman)",
    )
    return table_markup([heads, *rows], words=(0, 1, 4))


def _refused(refused: Sequence[Mapping[str, Any]], least: float) -> str:
    if not refused:
        return ""
    rows = [
        (b["name"], b["about"], f"{b['baseline']['train']['accuracy']:.0%}", number(b["baseline"]["train"]["clean"]),
         _source(b, "baseline", "pairs", "train"))
        for b in refused
    ]  # fmt: skip
    sentence = f"The model does not have these: it is right in less than {least:.0%} of the training pairs."
    heads = ("refused", "the model should", "right in", "difference, clean", "rows")
    return f'<div id="refused">{note(sentence)}</div>' + table_markup([heads, *rows], words=(0, 1, 4))


def _behaviour(b: Mapping[str, Any]) -> str:
    name, example, test = b["name"], b["example"], b["baseline"]["test"]
    controls = [group["control"] for group in b["groups"]]
    draws, least = controls[0]["draws"], min(control["distinct"] for control in controls)
    distinct = "" if least == draws else f", of which at least {least} are different"
    return f"""
<section id="{_id(name)}"><h2>{markup(name)}: {markup(b["about"])}</h2>
<p class="lead">{_verdict(b)}</p>
<h3>Does the model do it?</h3>
<p class="lead">After <code>{markup(_line(example["clean"]))}</code> it should prefer
<code>{markup(_line(example["right"]))}</code>, after <code>{markup(_line(example["corrupt"]))}</code>
<code>{markup(_line(example["wrong"]))}</code>.</p>
{_baseline(b)}
<h3>Which features lead there?</h3>
<p class="lead">A graph for each of {len(b["graphs"])} clean training prompts: click one to see it. The replacement
score is the share of the answer that comes through features and not through what the dictionaries do not explain; the
completeness score says the same of each feature's input.</p>
{_graphs(b)}
<p class="lead">The features with the most influence, over these graphs.</p>
{_features(b)}
<h3>What happens without them?</h3>
<p class="lead">Change of the logit difference on {test["pairs"]} other prompts when a group is set to 0, with its 95%
interval over prompts. Grey: the range of {draws} controls{distinct}, random groups of the same layer that fire as
much.</p>
{_effects(b)}
<p class="lead">At which token does it matter? Share of the way from the clean to the corrupt answer when a group gets,
at one token, the values that it has after the corrupt prompt: 100% is all of it.</p>
{_patches(b)}
<h3>Did the graphs predict it?</h3>
{_prediction(b)}
<h3>What is not explained</h3>
{_unexplained(b)}
</section>"""


def _largest(b: Mapping[str, Any]) -> Mapping[str, Any] | None:
    stands = [group for group in b["groups"] if group["stands"]]
    return max(stands, key=lambda group: abs(group["ablate"]["mean"]), default=None)


def _standing(b: Mapping[str, Any]) -> int:
    return sum(group["stands"] is True for group in b["groups"])


def _verdict(b: Mapping[str, Any]) -> str:
    largest, test = _largest(b), b["baseline"]["test"]
    unknown = sum(group["stands"] is None for group in b["groups"])
    judged = len(b["groups"]) - unknown
    few = f" Of {unknown} more it is not known: they have too few different controls." if unknown else ""
    if largest is None and not judged:
        return "Of no group is it known whether it does more than its controls: there are too few different ones."
    if largest is None:
        return f"None of {judged} groups of features does more than its controls.{few}"
    effect, name = largest["ablate"], largest["name"]
    return (
        f"{_standing(b)} of {judged} groups of features do more than their controls.{few} Without {markup(name)} the "
        f"logit difference of {number(test['clean'])} changes by "
        f"{_source(b, 'effects', number(effect['mean']), name, 'ablate')} (95% interval {number(effect['low'])} to "
        f"{number(effect['high'])}); without random features it changes by "
        f"{_source(b, 'effects', number(largest['control']['mean']), name, 'control')}."
    )


def _baseline(b: Mapping[str, Any]) -> str:
    rows = [
        (split, _source(b, "baseline", f"{s['pairs']} pairs", split), f"{s['accuracy']:.0%}", number(s["clean"]),
         number(s["corrupt"]), f"{s['p_right']:.2f}")
        for split, s in b["baseline"].items()
    ]  # fmt: skip
    heads = ("split", "rows", "right in both", "difference, clean", "difference, corrupt", "p(right), clean")
    return table_markup([heads, *rows], words=(0, 1))


def _graphs(b: Mapping[str, Any]) -> str:
    rows = [
        (link(g["href"], _line(g["prompt"])), str(g["features"]), _two(g["replacement"]), _two(g["completeness"]),
         f"{g['errors_share']:.0%}")
        for g in b["graphs"]
    ]  # fmt: skip
    heads = ("graph of", "features", "replacement score", "completeness score", "influence of errors")
    return table_markup([heads, *rows], words=(0,))


def _features(b: Mapping[str, Any]) -> str:
    rows = [
        (f"L{f['layer']}", _feature_link(f), _fires(f), f"{f['share']:.1%}", f"{f['prompts']} of {len(b['graphs'])}",
         number(f["activation"]))
        for f in b["features"]
    ]  # fmt: skip
    heads = ("layer", "feature", "fires on", "share of influence", "in graphs", "activation")
    rest = _source(b, "features", f"All {b['n_features']:,} features")
    return table_markup([heads, *rows], words=(0, 1, 2)) + f'<p class="note">{rest}</p>'


def _feature_link(f: Mapping[str, Any]) -> Markup:
    """The feature's number, a link to its place in the report where there is one."""
    number = str(f["latent"])
    return link(f["href"], number) if f["href"] else Markup(markup(number))


def _fires(f: Mapping[str, Any]) -> Markup:
    tokens = []
    for token in f["fires_on"]:
        visible = re.sub(" {4,}", lambda match: f"␣×{len(match[0])}", _line(token)).replace(" ", "␣")
        tokens.append(f"<code>{markup(visible if len(visible) <= 24 else f'{visible[:21]}...')}</code>")
    explanation = f"<br>{markup(f['explanation'])}" if f["explanation"] else ""
    return Markup((" ".join(tokens) or "no report") + explanation)


def _member(f: Mapping[str, Any]) -> str:
    return f"{_feature_link(f)} {_fires(f) if f['fires_on'] else ''}"


def _effects(b: Mapping[str, Any]) -> str:
    """A line for each group: the effect with its interval, over the range of its controls."""
    groups = b["groups"]
    chart = effects_chart(groups, f"Effect of each group of {b['name']}, beside its controls")
    rows = [
        (g["name"], Markup("<br>".join(map(_member, g["features"]))), _wide(b, g, "ablate"),
         _source(b, "effects", number(g["control"]["mean"]), g["name"], "control"), f"{g['control']['as_large']:.0%}",
         _does_more(g), _wide(b, g, "resample"))
        for g in groups
    ]  # fmt: skip
    heads = (
        *("group", "features, and what they fire on", "without it", "controls, mean", "controls as large"),
        *("more than controls", "resampled"),
    )
    key = (
        "Filled: more than its controls. Hollow: not, or not known. Resampled: the group gets its values of other "
        "clean prompts; the interval is over prompts, each with all of these. Each number leads to its rows."
    )
    return chart + note(key) + table_markup([heads, *rows], words=(0, 1, 5))


def _does_more(g: Mapping[str, Any]) -> str:
    """The verdict on a group; where its controls are too few, the number of different ones."""
    if g["stands"] is None:
        return f"not known: {g['control']['distinct']} different controls"
    return "yes" if g["stands"] else "no"


def _wide(b: Mapping[str, Any], g: Mapping[str, Any], kind: str) -> Markup:
    """A mean that leads to its rows, over its interval."""
    mean, low, high = (number(g[kind][key]) for key in ("mean", "low", "high"))
    return Markup(f"{_source(b, 'effects', mean, g['name'], kind)}<br><small>{low} to {high}</small>")


def _patches(b: Mapping[str, Any]) -> str:
    positions = range(len(b["groups"][0]["patch"]))
    heads = ("group", *("the last token" if i == 0 else f"last but {i}" for i in positions), "rows")
    rows = [
        (g["name"], *("no token" if p is None else _percent(p["share"]) for p in g["patch"]),
         _source(b, "effects", "patched", g["name"], "patch"))
        for g in b["groups"]
    ]  # fmt: skip
    missing = not all(p for g in b["groups"] for p in g["patch"])
    below = note("No token: the prompts are shorter.") if missing else ""
    return table_markup([heads, *rows], words=(0, len(heads) - 1)) + below


def _prediction(b: Mapping[str, Any]) -> str:
    p = b["prediction"]
    lead = (
        f"{_source(b, 'singles', str(p['n']) + ' single features')} were taken away where they stand, in the prompts "
        "of the graphs. Rank correlation (Spearman) of what the graph says and what the model does: "
        f"<b>{_two(p['spearman'])}</b>. 1 is the same order, 0 is no relation."
    )
    return f'<p class="lead">{lead}</p>{points_chart(p["points"])}'


def _unexplained(b: Mapping[str, Any]) -> str:
    """The limits of the graphs and the interventions, a line each."""
    graphs, n = b["graphs"], len(b["graphs"])
    errors, replacement, completeness = (
        sum(g[key] for g in graphs) / n for key in ("errors_share", "replacement", "completeness")
    )
    falls = [g["name"] for g in b["groups"] if g["stands"] is False]
    spearman = b["prediction"]["spearman"]
    lines = [
        f"Errors of the dictionaries have {errors:.0%} of the influence that features and errors have together, as a "
        f"mean over the {n} graphs. The mean replacement score is {replacement:.2f}, the completeness score "
        f"{completeness:.2f}; 1 would be all.",
        "Attention patterns and the scales of norms: graphs take them as they are in the prompt, and so do predictions."
        " Why the model looks where it looks is not in them.",
    ]
    if falls:
        lines.append(
            f"{len(falls)} of {len(b['groups'])} groups that the graphs name cannot be told from their controls: "
            f"{', '.join(falls)}."
        )
    if spearman is None or spearman < _GOOD:
        lines.append(
            f"Predictions: the rank correlation is {_two(spearman)}, so these graphs are a weak guide to what single "
            "features do."
        )
    return f'<ul class="open">{"".join(f"<li>{markup(line)}</li>" for line in lines)}</ul>'


def _source(b: Mapping[str, Any], table: str, text: str, *part: str) -> Markup:
    """A claim that leads to its rows: of a behaviour's table, or of one of its parts."""
    name, part = (table, (b["name"], *part)) if table == "baseline" else (f"{table}.{b['name']}", part)
    return link(f"rows/{urllib.parse.quote(name)}.html#{anchor(*part)}", text)


def _line(text: str) -> str:
    """A prompt in one line: its line breaks are shown."""
    return text.replace("\n", "⏎")


def _two(value: float | None) -> str:
    return "none" if value is None else f"{value:.2f}".replace("-", "−")


def _percent(value: float | None) -> str:
    return "none" if value is None else f"{round(value * 100) + 0:d}%".replace("-", "−")


def _id(name: str) -> str:
    return "b" + anchor(name)
