"""The commands of `saejax`: what each is called, says of itself, takes and does. `main` runs the one that is named.

`saejax x`, `python -m saejax x` and, from a checkout, `python -m launch.x` are the same. Nothing heavy is imported
before a command runs.
"""

import dataclasses
import importlib.metadata
import re
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from absl import flags

import saejax
from saejax.app import cli, experiments
from saejax.app.cli import Command, Line
from saejax.core.config import nearest
from saejax.core.errors import ConfigError


def _workspace(line: Line) -> Any:
    from saejax.app.experiment import experiment
    from saejax.app.left_open import as_begun
    from saejax.app.workspace import Workspace, refuse_prefix

    e = experiment(line.config)
    refuse_prefix(e)
    return Workspace(as_begun(e))


def _pipeline(line: Line) -> int:
    from saejax.app.stages import run_pipeline
    from saejax.plan.refuse import refuse_what_cannot_end

    work = _workspace(line)
    if not line.flags["anyway"]:
        refuse_what_cannot_end(work.experiment)
    return run_pipeline(work)


def _preflight(line: Line) -> int:
    from saejax.plan.command import of_this_machine
    from saejax.plan.preflight import run_preflight

    work = _workspace(line)
    return run_preflight(work, of_this_machine(work.experiment))


def _capture(line: Line) -> None:
    from saejax.app.stages import run_capture

    run_capture(_workspace(line))


def _train(line: Line) -> int:
    from saejax.app.stages import run_train

    return run_train(_workspace(line))


def _evaluate(line: Line) -> int:
    from saejax.app.stages import run_dictionaries, run_evaluate

    work, redo = _workspace(line), line.flags["redo"]
    words = line.flags["sae"] if "sae" in line.given else None
    probes = _probes(work, line.flags["probes"]) if "probes" in line.given else None
    code = run_evaluate(work, redo) if words is None else run_dictionaries(work, words, redo)
    return max(code, probes(words, redo)) if probes else code


def _probes(work: Any, words: str) -> Any:
    """What runs the probes after the evaluation; refused before it where they cannot run."""
    from saejax.app.probes import asked, run_probes

    return partial(run_probes, work, asked(work.experiment.probes, words))


def _report(line: Line) -> int:
    from saejax.app.stages import run_dictionaries, run_report

    work, redo = _workspace(line), line.flags["redo"]
    if "sae" in line.given:
        return run_dictionaries(work, line.flags["sae"], redo, report=True)
    run_report(work, redo)
    return 0


def _explain(line: Line) -> int:
    from saejax.app.evaluated import experiment_of
    from saejax.app.experiment import experiment
    from saejax.app.explain import Asked, run_explain
    from saejax.app.workspace import Workspace

    if len(line.words) != (1 if line.config is None else 0):
        raise ConfigError("Give the folder of one run, or --config, as in: saejax explain runs/quickstart --url=...")
    e = experiment_of(line.words[0]) if line.config is None else experiment(line.config)
    return run_explain(Workspace(e), Asked(**line.flags))


def _sweep(line: Line) -> int:
    from saejax.app.sweep.run import run_sweep

    return run_sweep(_workspace(line), line.flags["group"])


def _store(line: Line) -> int:
    from saejax.app.store_tools import run_command

    return run_command(line.words, {name: line.flags[name] for name in line.given})


def _convert(line: Line) -> None:
    from saejax.app.convert import run_convert

    flag = line.flags
    run_convert(line.words, flag["to"], flag["hook_points"], flag["step"])


def _formats(line: Line) -> None:
    from saejax.app.convert import print_formats

    print_formats(line.words)


def _export(line: Line) -> None:
    from saejax.app.export import run_export

    run_export(line.words, line.flags)


def _push(line: Line) -> None:
    from saejax.app.push import run_push

    flag = line.flags
    run_push(line.words, flag["format"], flag["private"], flag["folder"], flag["revision"], flag["step"])


def _graph(line: Line) -> None:
    from saejax.app.graph import run_graph

    run_graph(line.words, line.flags)


def _study(line: Line) -> int:
    from saejax.study import study
    from saejax.study.run import run_study

    return run_study(study(line.config))


def _prefix(line: Line) -> int:
    from saejax.app.experiment import experiment
    from saejax.app.prefix import run_prefix

    return run_prefix(experiment(line.config), line.flags["redo"])


def _truth(line: Line) -> int:
    from saejax.app.experiment import experiment
    from saejax.app.truth import run_truth

    return run_truth(experiment(line.config), line.flags["sae"] if "sae" in line.given else None)


def _plan(line: Line) -> int:
    from saejax.app.experiment import experiment
    from saejax.plan.command import run_plan

    return run_plan(experiment(line.config), line.flags)


def _calibrate(line: Line) -> None:
    from saejax.plan.calibrate import run_calibrate

    if line.words:
        raise ConfigError(f"Unexpected argument {line.words[0]!r}; `saejax calibrate` measures this machine.")
    run_calibrate(line.flags["name"])


def _jobs(line: Line) -> int:
    from saejax.app.experiment import experiment
    from saejax.plan.command import of_jobs
    from saejax.plan.jobs.run import run_jobs

    planned = line.config is not None and line.words[:1] == ["slurm"] and line.flags["device"]
    named = (line.flags["device"], line.flags["devices"])
    found = of_jobs(experiment(line.config), *named) if planned else ()
    return run_jobs(line.words, line.config, line.flags, line.given, found)


def _serve(line: Line) -> int:
    from saejax.serve.command import run_serve

    return run_serve(line.words, line.flags)


def _steer(line: Line) -> None:
    from saejax.app.steer import run_steer

    run_steer(line.words, line.flags)


def _hooks(line: Line) -> int:
    from saejax.app.experiment import experiment
    from saejax.app.hook_list import print_experiment, print_model

    if line.config is None:
        words, revision = _named(line.words, line.flags["revision"])
        return print_model(words, revision, line.flags["backend"], line.flags["all"])
    for flag in ("revision", "backend"):
        if flag in line.given:
            raise ConfigError(f"--{flag} goes with a model; with --config set --config.lm.{flag}.")
    if line.words:
        raise ConfigError(f"Give a model ({line.words[0]}) or --config, not both.")
    return print_experiment(experiment(line.config), line.flags["all"])


def _named(words: Sequence[str], revision: str) -> tuple[list[str], str]:
    """(words, revision) with the hub id and commit for a preset of the experiment `models`."""
    models = experiments.module("models").MODELS
    if len(words) != 1 or words[0] not in models or Path(words[0]).is_dir():
        return list(words), revision
    return [models[words[0]].model], revision or models[words[0]].revision


def _experiments(line: Line) -> None:
    if line.words:
        raise ConfigError(f"Unexpected argument {line.words[0]!r}; `saejax experiments` lists all.")
    print(experiments.listing())
    print("\nsaejax pipeline --config=quickstart:tiny runs one (sweep_*: saejax sweep);")
    print("saejax new mine --from=quickstart writes one to edit.")


def _new(line: Line) -> None:
    from saejax.app.new_experiment import next_command, write_new

    if len(line.words) != 1:
        raise ConfigError(f"Give one name, got {len(line.words)}, as in: saejax new mine --from=quickstart")
    path = write_new(line.words[0], line.flags["from"], line.flags["force"])
    print(f"wrote {path}; next: {next_command(path)}")


def _redo(what: str) -> Any:
    return partial(flags.DEFINE_boolean, "redo", False, what)


_SAE = partial(
    flags.DEFINE_multi_string,
    "sae",
    None,
    "A dictionary instead of the config's own run: a run, a folder, a file or a hub id; several with commas, or all "
    "below a folder.",
)


_ANYWAY = partial(flags.DEFINE_boolean, "anyway", False, "Start although disk or memory seem too small for all of it.")
_PIPELINE = """\
Each stage continues where it was; what is done is not done again. Exits with 1 when a gate fails, with 75 when a
signal stopped the training (all saved; run it again).
"""

COMMANDS: dict[str, Command] = {
    "quickstart": Command(
        f"""\
Pipeline with the experiment quickstart: from text to an evaluated SAE of the demo model, in minutes.

    saejax quickstart                              a few minutes on 2 CPU cores
    saejax quickstart:tiny                         a smoke test of seconds
    saejax quickstart --config.coder.k=32 --config.name=mine

{_PIPELINE}""",
        _pipeline,
        flags=(_ANYWAY,),
    ),
    "pipeline": Command(
        f"""\
The whole experiment: capture, train, evaluate, report; then one table of what came out.

    saejax pipeline --config=quickstart[:preset] [--config.train.lr=3e-4]
    saejax pipeline --config=mine.py

{_PIPELINE}""",
        _pipeline,
        flags=(_ANYWAY,),
    ),
    "preflight": Command(
        """\
Try an experiment on a small part of it: devices, disk, model, memory, speed and 1,000 steps of training.

    saejax preflight --config=quickstart
    saejax preflight --config=mine.py --config.stores_dir=/fast/stores

Takes about a minute for a small model, and leaves nothing behind. Prints a table of what passed and what did not, with
a remedy for each that failed. Exits with 1 when something fails, with 75 when a signal stopped it.
""",
        _preflight,
        answers=True,
    ),
    "capture": Command(
        """\
Run text through the language model and store the activations of the experiment's hook points.

    saejax capture --config=quickstart [--config.capture.tokens=2000000]

Writes stores/<store>/train and stores/<store>/heldout. Stopped at any moment, the same command continues.
Several processes share one with --config.capture.parts=8 and, in each, --config.parallel.processes=0/4 (slurm, jax).
""",
        _capture,
    ),
    "train": Command(
        """\
Train the experiment's sparse coder on its stored activations.

    saejax train --config=quickstart [--config.train.lr=3e-4]

Writes runs/<name>. Continues from the last good checkpoint. SIGTERM, SIGUSR1 (SLURM's
--signal=USR1@60) and Ctrl-C finish the step, save and exit with code 75; the same command then continues.
""",
        _train,
    ),
    "evaluate": Command(
        """\
Evaluate a finished run, or any dictionaries, on held-out text and check the gates.

    saejax evaluate --config=quickstart [--redo]
    saejax evaluate --config=quickstart --sae=runs/mine,their/folder,owner/name
    saejax evaluate --config=quickstart --probes=95_toxic_is,117_us_state_* [--sae=...]

Writes runs/<name>/eval.json. With --sae the model, the text and the settings of the evaluation are the config's, and no
store or training is needed: writes runs/<name>/evaluated/<dictionary>/eval.json, and table.md, table.png and table.html
of all that were named. Exits with 1 when a gate fails or a dictionary cannot be evaluated.
--probes also asks what k latents tell about the texts of sae-probes, and writes probes.json beside each eval.json.
""",
        _evaluate,
        flags=(
            _redo("Evaluate again although eval.json is there."),
            _SAE,
            partial(
                flags.DEFINE_string,
                "probes",
                "",
                "Sparse probing: all, or names and patterns of data sets with commas; first_letter for splitting and "
                "absorption, which all has too.",
            ),
        ),
    ),
    "report": Command(
        """\
Write a run's report: curves, gates, densities and a browser of its features, in one HTML file.

    saejax report --config=quickstart [--redo]
    saejax report --config=quickstart --sae=their/folder

Writes runs/<name>/report.html, which opens without a network. With --sae it evaluates as `saejax evaluate --sae` does,
and writes runs/<name>/evaluated/<dictionary>/report.html.
""",
        _report,
        flags=(_redo("Make the report again although it is there."), _SAE),
    ),
    "truth": Command(
        """\
Train on activations whose features are known, and score which of them a dictionary found.

    saejax truth --config=truth [--config.coder.preset=topk --config.coder.k=12]
    saejax truth --config=truth --sae=runs/mine,their/folder,owner/name

Writes runs/<name>, with truth.json (figures with intervals) and truth.png; the same command continues a training that
was stopped. With --sae nothing is trained: the dictionaries are scored on the config's world, and
runs/<name>/scored/table.md has all that were named. Exits with 75 when a signal stopped the training.
""",
        _truth,
        flags=(
            partial(
                flags.DEFINE_multi_string,
                "sae",
                None,
                "A dictionary to score, and no training: a run, a folder, a file or a hub id; several with commas.",
            ),
        ),
    ),
    "prefix": Command(
        """\
Train a latent prefix for frozen models, and compare it with text, truncated text and others.

    saejax prefix --config=latentwire_quickstart [--config.prefix.latents=12]
    saejax prefix --config=latentwire              Llama-3.1-8B and Qwen2.5-7B, on a GPU

A text becomes a few latents, and adapters turn these into embeddings that stand before a model's prompt in place of the
text. Encoder and adapters are trained; the models are not. Writes runs/<name>, with prefix.json (figures with
intervals), prefix.md and report.html; the same command continues a training that was stopped. Exits with 75 when a
signal stopped it.
""",
        _prefix,
        flags=(_redo("Evaluate again although prefix.json is there."),),
    ),
    "explain": Command(
        """\
Ask a language model what a run's features stand for, and score the answers.

    saejax explain runs/quickstart --url=http://localhost:8000/v1 --model=llama-3.1-8b
    saejax explain runs/quickstart --url=https://api.openai.com/v1 --model=gpt-4o-mini --features=0:200
    saejax explain --config=quickstart --url=... --model=... --dry_run     what it would cost
    saejax explain runs/quickstart/evaluated/theirs --url=... --model=...  what `saejax report --sae` evaluated

The address is any OpenAI-compatible one: vLLM, llama.cpp, Ollama, or a hosted service. The key comes from the
environment and is written nowhere. Answers are appended to runs/<name>/explanations.jsonl as they come, so the same
command continues after Ctrl-C; the report shows them. Exits with 1 when some features got no answer.
""",
        _explain,
        takes="either",
        flags=(
            partial(flags.DEFINE_string, "url", "", "The address of the API, as http://localhost:8000/v1."),
            partial(flags.DEFINE_string, "model", "", "The model's name there; it explains and judges."),
            partial(
                flags.DEFINE_string,
                "key_env",
                "",
                "The environment variable that holds the key. Without it OPENAI_API_KEY is used, for https alone.",
            ),
            partial(flags.DEFINE_string, "features", "0:50", "Which: all, 7, 0:50 (without 50), or 3,17,40:60."),
            partial(flags.DEFINE_integer, "examples", 20, "Passages that the explainer sees.", lower_bound=2),
            partial(flags.DEFINE_boolean, "score", True, "Score by detection and fuzzing."),
            partial(
                flags.DEFINE_integer,
                "judged",
                20,
                "Other active passages, and as many random ones, for the judge.",
                lower_bound=2,
            ),
            partial(flags.DEFINE_integer, "parallel", 8, "Features asked about at once.", lower_bound=1),
            partial(
                flags.DEFINE_integer, "max_tokens", 1000, "Longest answer; more for models that think.", lower_bound=16
            ),
            partial(flags.DEFINE_float, "timeout", 120.0, "Seconds to wait for an answer.", lower_bound=1.0),
            _redo("Ask again although there is an answer; the new one counts."),
            partial(flags.DEFINE_boolean, "dry_run", False, "Say how many requests and tokens it takes, and stop."),
        ),
    ),
    "plan": Command(
        """\
Say what an experiment will take: memory, disk, time, cost, on devices that need not be there.

    saejax plan --config=quickstart
    saejax plan --config=models:llama-3-8b --device=h100 --devices=1,2,4,8 --deadline=12h --price=2.5
    saejax plan --config=gpt2_small --device=rtx4090 --devices=1 --json

Of the model only config.json is read. Every step is compiled for virtual devices and not run. Names the least devices
that fit and meet the deadline, and where nothing fits, the smallest change that does; then it exits with 1.
""",
        _plan,
        flags=(
            partial(
                flags.DEFINE_string,
                "device",
                "",
                "a100-40gb, a100-80gb, h100, h200, b200, l40s, rtx6000, rtx6000-ada, rtx4090, tpu-v4, tpu-v5e, "
                "tpu-v5p, tpu-v6e, cpu, here (after `saejax calibrate`), or one of yours. Empty: here, else cpu.",
            ),
            partial(flags.DEFINE_list, "devices", ["1", "8"], "Numbers of devices to plan for."),
            partial(flags.DEFINE_string, "deadline", "", "The time that all stages may take, as 12h, 90min or 2d."),
            partial(flags.DEFINE_float, "price", 0.0, "What one device costs for an hour, in any currency."),
            partial(flags.DEFINE_boolean, "json", False, "Print the figures as JSON, in bytes and seconds."),
        ),
        answers=True,
    ),
    "calibrate": Command(
        """\
Measure what this machine really reaches, for plans: about a minute.

    saejax calibrate
    saejax plan --config=quickstart --device=here

Writes one device into the file of your devices (docs/planning.md): speed of products and memory, of train steps of six
kinds of coder, of a language model, of the store, the evaluation and the report.
""",
        _calibrate,
        takes="words",
        flags=(partial(flags.DEFINE_string, "name", "here", "What plans call this machine."),),
    ),
    "steer": Command(
        """\
Let the model continue a prompt, as it is and with some latents of a dictionary changed.

    saejax steer runs/quickstart --feature=123 --scale=5 "Once upon a time"
    saejax steer runs/quickstart --feature=3,17 --operation=zero "prompt" "another prompt"
    saejax steer their/folder --model=owner/name --feature=2:123 "prompt"      latent 123 of layer 2

The dictionary is a run, a saved folder, another project's, or of the hub. The change acts in every step, at every token
but the model's bos. What the dictionary does not explain stays as it is.
""",
        _steer,
        takes="words",
        flags=(
            partial(flags.DEFINE_string, "feature", "", "Which latents: 123, 3,17, or layer:latent."),
            partial(flags.DEFINE_float, "scale", 5.0, "The number of the operation, in the latent's own unit."),
            partial(
                flags.DEFINE_string,
                "operation",
                "add",
                "add (f + scale), set (f = scale), scale (scale f), zero (f = 0), least, most (f no lower, no higher).",
            ),
            partial(flags.DEFINE_integer, "tokens", 40, "How many tokens are written.", lower_bound=1),
            partial(flags.DEFINE_float, "temperature", 0.0, "0 takes the likeliest token.", lower_bound=0.0),
            partial(flags.DEFINE_float, "top_p", 1.0, "Draw from the likeliest tokens that make up this share."),
            partial(flags.DEFINE_integer, "seed", 0, "Of the draws."),
            partial(flags.DEFINE_string, "model", "", "The language model, where the dictionary does not say."),
            partial(flags.DEFINE_boolean, "past_end", False, "Go on behind the token that ends a text."),
        ),
        answers=True,
    ),
    "sweep": Command(
        """\
Train many coders together, on one reading of the store, and compare them.

    saejax sweep --config=sweep_quickstart [--config.sweep.seeds=0,1,2]

Captures what is missing, then writes runs/<name>/<member> for each coder, and sweep.md, sweep.png, sweep.html. What
differs only in seed, learning rate and sparsity weight is one program; programs are spread over all devices.
Continues where it was: SIGTERM and Ctrl-C finish the step, save and exit with code 75. Exits with 1 when no member
stayed finite.
--group=2 trains one of its programs alone, for as many jobs; the same command without it then makes the table.
""",
        _sweep,
        flags=(partial(flags.DEFINE_integer, "group", None, "Train this program alone, from 0.", lower_bound=0),),
    ),
    "graph": Command(
        """\
Show which features lead to the next token of a prompt: an attribution graph, as JSON and as a page.

    saejax graph runs/coders-clt "x = data[i"
    saejax graph runs/mlps "x = data[i" --out=graphs --name=bracket       a sweep's transcoders, one a layer
    saejax graph runs/coders-clt "x = data[i" --supernodes=bracket.pins.json

Dictionaries are a cross-layer transcoder, transcoders of single layers, or autoencoders. Writes <out>/<name>.html,
which needs no other file, <name>.json in circuit-tracer's format, and <name>.npz. Continues where it was.
""",
        _graph,
        takes="words",
        flags=(
            partial(flags.DEFINE_string, "out", "graphs", "The folder."),
            partial(flags.DEFINE_string, "name", "", "What the files are called; empty: prompt and a digest."),
            partial(flags.DEFINE_string, "model", "", "The language model, where the dictionary does not say."),
            partial(flags.DEFINE_integer, "max_features", 7500, "Features at most; 0 for all.", lower_bound=0),
            partial(flags.DEFINE_integer, "logits", 10, "Next tokens at most.", lower_bound=1),
            partial(flags.DEFINE_float, "node_share", 0.8, "Share of the influence that shown nodes keep.", 0, 1),
            partial(flags.DEFINE_float, "edge_share", 0.98, "Share of the influence that shown edges keep.", 0, 1),
            partial(flags.DEFINE_integer, "effects", 10, "Features to set to zero, one at a time.", lower_bound=0),
            partial(flags.DEFINE_string, "supernodes", "", "Pins and groups that the page has saved."),
        ),
    ),
    "study": Command(
        """\
From behaviours of a language model to the features that cause them, on one page.

    saejax study --config=study_quickstart             minutes on 2 CPU cores
    saejax study --config=study_quickstart --config.study.behaviours=bracket,mine=pairs.jsonl
    saejax study --config=study_quickstart --config.study.dictionaries=runs/mine

Draws pairs of prompts, refuses behaviours that the model does not have, trains dictionaries if none are given, makes
an attribution graph for some prompts, and measures what ablating, patching and resampling groups of features does,
beside controls. Writes runs/<name>/study: CSV files, graphs and study.html. Continues where it was.
""",
        _study,
    ),
    "serve": Command(
        """\
Show runs, stores, features and jobs live on one local page, with the API behind it.

    saejax serve                                   runs/ and stores/ of the current folder
    saejax serve --runs=/big/runs --stores=/big/stores --data=/big/activations
    saejax serve --dictionaries=gemma=downloads/layer_20 --experiments=mine.py

Prints the address of the page. It can be reached from this machine alone; elsewhere use an SSH tunnel, or --host with
the token that the printed link carries. Trainings that are started from the page are processes of their own: they go
on when the server ends. Needs the extra: pip install 'saejax[serve]'.
""",
        _serve,
        takes="words",
        flags=(
            partial(flags.DEFINE_string, "runs", "runs", "The folder of all runs."),
            partial(flags.DEFINE_string, "stores", "stores", "The folder of all stores."),
            partial(flags.DEFINE_list, "data", [], "More folders whose activations and texts a training may read."),
            partial(flags.DEFINE_list, "dictionaries", [], "Other dictionaries to show: folder, or label=folder."),
            partial(flags.DEFINE_list, "experiments", [], "Experiment files to offer besides the shipped ones."),
            partial(flags.DEFINE_string, "host", "127.0.0.1", "The address to listen on."),
            partial(flags.DEFINE_integer, "port", 0, "The port; 0 takes the first free one from 8765.", 0, 65535),
            partial(flags.DEFINE_list, "names", [], "Other names by which browsers may call this server."),
            partial(flags.DEFINE_boolean, "token", False, "Ask for the token on this machine too, as others share it."),
            partial(flags.DEFINE_integer, "jobs", 1, "Jobs that run at a time; others wait.", lower_bound=1),
        ),
    ),
    "jobs": Command(
        """\
Run an experiment as jobs: scripts for Slurm, or one job after another on this machine.

    saejax jobs slurm --config=gpt2_small --out=jobs [--site=site.yaml] [--device=h100] [--devices=2]
    jobs/submit.sh                                    hands them over and prints their ids
    saejax jobs status jobs                           state, progress, time left, exit codes
    saejax jobs cancel jobs
    saejax jobs local --config=quickstart:tiny --out=jobs [--at_once=2]
    saejax jobs figures jobs                          what each job took, from sacct where it answers

One job a stage, each waiting for those before it to end well: a failed gate stops what depends on it. Parts of a
capture, programs of a sweep and (--layers) hook points are arrays. A job that is told to stop saves, exits with 75 and
goes on by itself. The site file names partition, account, modules, container and the like: docs/jobs.md.
""",
        _jobs,
        takes="either",
        flags=(
            partial(flags.DEFINE_string, "out", "jobs", "slurm, local: the folder of scripts, logs and records."),
            partial(flags.DEFINE_string, "site", "", "slurm: the cluster's YAML file."),
            partial(
                flags.DEFINE_string,
                "device",
                "",
                "slurm: the device that limits of time and memory are planned for, of `saejax plan`; cpu asks for no "
                "accelerator. Empty: an accelerator, and the site file's time.",
            ),
            partial(flags.DEFINE_integer, "devices", 1, "slurm: accelerators of each node.", lower_bound=1),
            partial(flags.DEFINE_boolean, "layers", False, "slurm, local: a training for each captured hook point."),
            partial(flags.DEFINE_integer, "at_once", 1, "local: tasks that run at a time.", lower_bound=1),
        ),
    ),
    "convert": Command(
        """\
Write dictionaries in another project's format, or read another project's into saejax's.

    saejax convert runs/quickstart out --to=saelens
    saejax convert gemma-scope/layer_20/width_16k/average_l0_71 out --to=saejax
    saejax convert runs/layer0 runs/layer1 out --to=circuit-tracer      a set of several layers

A source is a run, a saved folder, a foreign dictionary, or a folder of several. What is written is read back and
compared with its source. What a format cannot say is refused: `saejax formats` has the table.
""",
        _convert,
        takes="words",
        flags=(
            partial(flags.DEFINE_string, "to", "", "The format: saejax, or one that `saejax formats` names."),
            partial(
                flags.DEFINE_list,
                "hook_points",
                [],
                "What the dictionary reads, or reads,writes, where its files do not say: blocks.6.resid_pre.",
            ),
            partial(flags.DEFINE_string, "step", "", "Of a run: which checkpoint, or best; empty for the newest."),
        ),
    ),
    "formats": Command(
        """\
List the formats of dictionaries: which coders each can say, what is read and what is written.

    saejax formats                 the table
    saejax formats saelens         one format, with the reason where a coder is not written
""",
        _formats,
        takes="words",
        answers=True,
    ),
    "export": Command(
        """\
Write a run as the files that other tools show, explain and score it from.

    saejax export neuronpedia runs/quickstart out --model=gpt2-small --set=res-mine
                                                      bulk folders and upload batches  [--layer --creator
                                                      --creator_id --release]
    saejax export delphi runs/quickstart out          the latent cache: every activation  [--splits]
    saejax export saedashboard runs/quickstart out    the coder as SAEDashboard loads it
    saejax export circuit-tracer runs/mlp0 runs/mlp1 out
                                                      feature files of its page, one run a layer

neuronpedia and circuit-tracer show what is in the run's report; make it first. delphi scans the report's text again. In
place of a run any dictionary: `saejax report --sae`, then its folder, runs/quickstart/evaluated/theirs.
The destination is new, or an earlier export for the same tool, which is replaced.
""",
        _export,
        takes="words",
        flags=(
            partial(flags.DEFINE_string, "model", "", "neuronpedia: its id of the language model; empty guesses."),
            partial(flags.DEFINE_string, "set", "", "neuronpedia: the set of sources; empty for the run's name."),
            partial(flags.DEFINE_integer, "layer", -1, "The layer, where the hook point's name does not say it."),
            partial(flags.DEFINE_string, "creator", "saejax", "neuronpedia: who publishes."),
            partial(flags.DEFINE_string, "creator_id", "", "neuronpedia: the id of that user; empty for its own."),
            partial(flags.DEFINE_string, "release", "", "neuronpedia: the release; empty for the set's name."),
            partial(flags.DEFINE_integer, "splits", 5, "delphi: files for each hook point.", lower_bound=1),
            partial(flags.DEFINE_string, "step", "", "Which checkpoint, or best; empty for the newest."),
        ),
    ),
    "push": Command(
        """\
Put a dictionary into a repository of the Hugging Face hub, with a model card.

    saejax push runs/quickstart owner/name
    saejax push runs/quickstart owner/name --format=saelens --folder=blocks.3.hook_resid_pre --private

The source is what saejax.load takes. The repository is made where it is missing. Files of the same names are replaced
in one commit; folders of this machine are not told. saejax.load("owner/name@commit/folder") reads it back. The token is
HF_TOKEN, or that of `hf auth login`.
""",
        _push,
        takes="words",
        flags=(
            partial(flags.DEFINE_string, "format", "saejax", "saejax, or one that `saejax formats` names."),
            partial(flags.DEFINE_boolean, "private", False, "Where the repository is made, only you can read it."),
            partial(flags.DEFINE_string, "folder", "", "Folder in the repository; empty for its root."),
            partial(flags.DEFINE_string, "revision", "", "Branch, made where it is missing; empty for main."),
            partial(flags.DEFINE_string, "step", "", "Of a run: which checkpoint, or best; empty for the newest."),
        ),
    ),
    "store": Command(
        """\
Look at activation stores, check them, join them, and make them of activations that others computed.

    saejax store info STORE...              rows, hook points, model, text, statistics, or how far it is
    saejax store verify STORE...            every checksum; exits with 1 and names all that is damaged
    saejax store merge OUT STORE STORE...   several stores of one model into one   [--seed]
    saejax store sample STORE...            random rows with their tokens
                                            [--rows --seed --hook_point --tokenizer]
    saejax store import OUT FILE... --hook_point=blocks.6.resid_pre
                                            .npy, .safetensors and .parquet files of [N, d] as a store
                                            [--d --tensor --non_finite --model --revision
                                             --dtype --shard_rows --chunk_rows --seed]

merge and import continue where they were when they are stopped. Imported files may hold integers token_id, document and
position [N] beside the activations; without them token_id is -1, document the file's number, position its row there.
""",
        _store,
        takes="words",
        flags=(
            partial(flags.DEFINE_integer, "rows", 5, "sample: rows to show.", lower_bound=1),
            partial(
                flags.DEFINE_integer, "seed", 0, "merge, import: of the permutation in shards; sample: of the choice."
            ),
            partial(
                flags.DEFINE_string, "hook_point", "", "sample: this one; import: the name that the activations get."
            ),
            partial(flags.DEFINE_string, "tokenizer", "", "sample: folder with tokenizer.json."),
            partial(flags.DEFINE_integer, "d", 0, "import: width that the files must have; 0 for any.", lower_bound=0),
            partial(flags.DEFINE_string, "tensor", "", "import: tensor or column of each file."),
            partial(flags.DEFINE_string, "non_finite", "abort", "import: abort, or drop rows with NaN or infinity."),
            partial(flags.DEFINE_string, "model", "", "import: the model they come from, for the record."),
            partial(flags.DEFINE_string, "revision", "", "import: its revision."),
            partial(flags.DEFINE_integer, "shard_rows", 32768, "import: rows of a shard.", lower_bound=1),
            partial(flags.DEFINE_integer, "chunk_rows", 256, "import: rows of a chunk.", lower_bound=1),
            partial(flags.DEFINE_string, "dtype", "bfloat16", "import: bfloat16, or int8 with one scale a row."),
        ),
        answers=True,
    ),
    "hooks": Command(
        """\
List a language model's hook points: names, shapes, TransformerLens's names, and what can be stored.

    saejax hooks                            the embedded demo model
    saejax hooks gpt2                       a preset of the experiment models, a hub id, or a folder
    saejax hooks /path/to/folder [--backend=torch]
    saejax hooks --config=gpt2_small        the model of an experiment, and what it captures

The same point of several blocks is one line, in the form that capture.hook_points takes; --all lists each.
For a model that the JAX decoder knows, only config.json is read (or fetched), and no weights. PyTorch loads any other
model, because its hook points and widths are measured on a few tokens.
""",
        _hooks,
        takes="either",
        flags=(
            partial(flags.DEFINE_string, "revision", "", "Commit, tag or branch of a hub id."),
            partial(
                flags.DEFINE_string,
                "backend",
                "auto",
                "jax, torch, or auto: jax where its decoder knows the architecture.",
            ),
            partial(flags.DEFINE_bool, "all", False, "Each hook point in a line of its own."),
        ),
        answers=True,
    ),
    "experiments": Command(
        """\
List the shipped experiments, with their presets.

    saejax experiments
""",
        _experiments,
        takes="words",
        answers=True,
    ),
    "new": Command(
        """\
Write a shipped experiment into the current folder as a file to edit.

    saejax new mine --from=quickstart[:preset]

Writes mine.py: one line for every setting that differs from its default. The experiment is the same but for its name
and its store, which is its own: --config.store=quickstart reads what quickstart captured.
""",
        _new,
        takes="words",
        flags=(
            partial(
                flags.DEFINE_string, "from", "quickstart", "A shipped experiment or a file, with an optional :preset."
            ),
            partial(flags.DEFINE_boolean, "force", False, "Overwrite a file that is there."),
        ),
    ),
}

_HELP = ("help", "--help", "-help", "-h")


def main() -> None:
    """`saejax <command> ...`: run it and exit with its code; 2 for a command that does not exist."""
    words = sys.argv[1:]
    # What the record of a run shall show, however saejax was found.
    sys.argv = ["saejax", *words]
    named = None
    with cli.guarded():
        if words[:1] == ["help"] and len(words) > 1:
            words = [words[1], "--help"]
        if not words or words[0] in _HELP:
            print(overview())
        elif words[0] in ("--version", "version"):
            print(f"saejax {importlib.metadata.version('saejax')}")
        else:
            named = _named_command(words[0], words[1:])
    if named is not None:
        cli.run(*named)


def launch(name: str) -> None:
    """`python -m launch.<name> ...` of a checkout: the same command, which calls itself by that name."""
    text = re.sub(rf"\bsaejax {name}\b", f"python -m launch.{name}", COMMANDS[name].text)
    for shipped in experiments.names():
        text = re.sub(rf"--config={shipped}\b(?!\.py)", f"--config=configs/{shipped}.py", text)
    cli.run(dataclasses.replace(COMMANDS[name], text=text), sys.argv, help_code=1)


def overview() -> str:
    """What `saejax` alone prints: every command in a line, and examples."""
    commands = "\n".join(f"  {name:<13}{command.summary}" for name, command in COMMANDS.items())
    return f"""\
saejax: sparse dictionaries on language models, trained in JAX.

{commands}

  saejax quickstart                           from text to an evaluated SAE, in a few minutes
  saejax new mine --from=quickstart           writes mine.py, an experiment to edit
  saejax pipeline --config=mine.py --config.coder.k=32
  saejax train --help                         what a command does and takes"""


def _named_command(word: str, rest: Sequence[str]) -> tuple[Command, list[str]]:
    """(command, its argv) of `saejax <word> <rest>`; the word may be quickstart:preset.

    Raises:
        ConfigError: no such command, or a preset where no experiment is named.
    """
    name, colon, preset = word.partition(":")
    if name.startswith("-"):
        raise ConfigError(f"Name a command before {name!r}, as in: saejax pipeline --config=quickstart")
    if name not in COMMANDS and name in saejax.__all__:
        raise ConfigError(f"{name} is no command but a part of the library: import saejax; saejax.{name}(...)")
    if name not in COMMANDS:
        raise ConfigError(f"There is no command {name!r}.{nearest(name, COMMANDS)}")
    if name == "quickstart" and not any(re.match("--?config(=|$)", other) for other in rest):
        rest = [f"--config=quickstart{colon}{preset}", *rest]
    elif colon:
        raise ConfigError(f"{word!r} names no experiment; give --config=<experiment>{colon}{preset}.")
    return COMMANDS[name], [f"saejax {name}", *rest]
