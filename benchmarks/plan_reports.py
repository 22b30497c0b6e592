"""Four reports that answered "what will it take" by hand, planned again.

    python -m benchmarks.plan_reports [rtx6000 qwen clt latentwire]

rtx6000     six language models on one RTX 6000, and its five scenarios
qwen        Qwen2.5-3B on A100s, fifteen layers as an array
clt         a cross-layer transcoder of 49,152 latents on two devices
latentwire  a latent prefix for Llama-3.1-8B and Qwen2.5-7B on one, two and four H100s
"""

import argparse
import dataclasses
from collections.abc import Callable, Iterator

from saejax.app.experiment import Experiment
from saejax.core.amounts import size, span
from saejax.plans.calibrate import experiment_with
from saejax.plans.devices import EFFICIENCY, Device, device
from saejax.plans.estimate import stage_of, virtual_devices
from saejax.plans.models import shape_of
from saejax.plans.outline import Outline
from saejax.plans.stage import StageEstimate
from saejax.reports.table_page import markdown

HEAD = ("case", "figure", "report", "plan", "why they differ")


@dataclasses.dataclass(frozen=True)
class Claim:
    """A figure of a report beside the plan's."""

    case: str
    figure: str
    theirs: str
    ours: str
    why: str


@dataclasses.dataclass(frozen=True)
class Report:
    """One report: what it is, and its figures beside ours."""

    title: str
    claims: Callable[[], Iterator[Claim]]


def page(names: list[str]) -> Iterator[str]:
    """The tables of these reports, a report at a time."""
    for name in names:
        report = REPORTS[name]
        rows = [list(dataclasses.astuple(claim)) for claim in report.claims()]
        yield f"## {report.title}\n\n{markdown([list(HEAD), *rows])}\n"


def _stage(e: Experiment, on: Device, stage: str, devices: int = 1) -> StageEstimate:
    return stage_of(Outline.of(e), on, devices, stage)


# --- six models on one RTX 6000 ------------------------------------------------------------------------------------

# Model, hook point, expansion, tokens of a batch, epochs; hours of capture and of training that the report gives.
_SIX: dict[str, tuple[str, str, int, int, int, float, float]] = {
    "GPT-2": ("openai-community/gpt2", "blocks.6.resid_pre", 8, 16384, 5, 0.25, 2.5),
    "GPT-2-medium": ("openai-community/gpt2-medium", "blocks.12.resid_pre", 4, 8192, 5, 0.33, 4.5),
    "Pythia-1.4B": ("EleutherAI/pythia-1.4b", "blocks.12.resid_pre", 4, 8192, 5, 0.33, 6.0),
    "Gemma-2B": ("google/gemma-2b", "blocks.9.resid_pre", 4, 8192, 5, 0.25, 5.0),
    "Llama-3-8B": ("meta-llama/Meta-Llama-3-8B", "blocks.16.resid_pre", 4, 4096, 1, 0.5, 3.0),
    "Phi-2": ("microsoft/phi-2", "blocks.16.resid_pre", 4, 8192, 5, 0.42, 5.0),
}
# Seconds that the report's tiers give for a step.
_TIERS = {16384: 0.4, 8192: 0.53, 4096: 0.9}


def _of_six(name: str, tokens: int, epochs: int | None = None) -> Experiment:
    model, hook, expansion, batch, usual, _, _ = _SIX[name]
    return experiment_with(
        {
            "lm.model": model,
            "lm.dtype": "bfloat16",
            "text.context_length": 512,
            "capture.hook_points": (hook,),
            "capture.tokens": tokens,
            "capture.batch_rows": 8,
            "coder.preset": "standard",
            "coder.expansion": expansion,
            "train.batch_size": batch,
            "train.tokens": max(batch, tokens * (epochs or usual)),
        }
    )


def _rtx6000() -> Iterator[Claim]:
    on, spent = device("rtx6000"), {}
    for name, (*_, batch, epochs, capture_hours, train_hours) in _SIX.items():
        e = _of_six(name, 50_000_000)
        capture, train = _stage(e, on, "capture"), _stage(e, on, "train")
        spent[name] = (capture.seconds, train.seconds)
        case, said = f"{name}, 50 M tokens", span(3600 * train_hours)
        why = "the report measured 1,050 tokens/s with GPT-2 (13 h for 50 M), and planned with minutes"
        yield Claim(case, "capture", span(3600 * capture_hours), span(capture.seconds), why)
        reached = train.flops / e.train.steps / _TIERS[batch] / 1e12
        why = f"{_TIERS[batch]} s for a step of {batch:,} tokens is {reached:.1f} TFLOP/s"
        if name == "GPT-2":
            why += "; the report's own runs took 0.037 s for as many tokens"
        yield Claim(case, f"training, {epochs} x 50 M, batch {batch:,}", said, span(train.seconds), why)
        if name == "GPT-2":
            why = f"state is {size(train.parts['state'])}; the rest are dense latents of {batch:,} tokens"
            yield Claim(case, "memory of the training", "4 to 5 GB", size(train.device_bytes), why)
        if name == "Llama-3-8B":
            why = "the weights leave a third of the card; the training needs none of them"
            yield Claim(case, "memory of the capture", "batching or 2 cards", size(capture.device_bytes), why)
    yield from _scenarios(on, spent)


def _scenarios(on: Device, spent: dict[str, tuple[float, float]]) -> Iterator[Claim]:
    def both(name: str, tokens: int, epochs: int) -> float:
        e = _of_six(name, tokens, epochs)
        return _stage(e, on, "capture").seconds + _stage(e, on, "train").seconds

    def whole(names: tuple[str, ...], share: float, epochs: float) -> float:
        """Of layers of these models, from the plans of 50 M tokens."""
        return sum(share * (spent[name][0] + spent[name][1] * epochs / _SIX[name][4]) for name in names)

    six = tuple(_SIX)
    rows = (
        ("GPT-2, 10 k tokens, 2 epochs", "5 to 10 min", both("GPT-2", 10_000, 2), "two steps: all of it is starting"),
        ("GPT-2, 8 M tokens, 5 epochs", "2 h", both("GPT-2", 8_000_000, 5), "2,440 steps at a tenth of its own speed"),
        (
            "2 models x 2 layers, 50 M, 5 epochs",
            "12 h",
            whole(six[:2], 2.0, 5),
            "the same; each layer with a capture of its own, though one would do",
        ),
        ("6 models x 1 layer, 100 M, 4 epochs", "20 to 25 h", whole(six, 2.0, 4), "the same"),
        ("6 models x 2.5 layers, 100 M, 4 epochs", "40 to 50 h", whole(six, 5.0, 4), "the same"),
    )
    for number, (figure, theirs, ours, why) in enumerate(rows, 1):
        yield Claim(f"scenario {number}", figure, theirs, span(ours), why)


# --- Qwen2.5-3B on A100s -------------------------------------------------------------------------------------------


def _qwen() -> Iterator[Claim]:
    on, layers = device("a100-40gb"), 15
    base = {
        "lm.dtype": "bfloat16",
        "text.context_length": 512,
        "capture.hook_points": tuple(f"blocks.{i}.mlp_out" for i in range(10, 25)),
        "capture.tokens": 2_000_000,
        "capture.batch_rows": 16,
        "coder.preset": "standard",
        "coder.expansion": 4,
        "train.batch_size": 256,
        "train.tokens": 256 * 50_000,
    }
    e = experiment_with(base | {"lm.model": "Qwen/Qwen2.5-3B-Instruct"})
    shape = shape_of("Qwen/Qwen2.5-3B-Instruct")
    said = f"{shape.n_layer} blocks of {shape.d_model:,}"
    yield Claim("Qwen2.5-3B", "shape", "28 blocks of 3,584", said, "the report's is Qwen2.5-7B's; config.json says it")
    yield Claim("Qwen2.5-3B", "weights in bfloat16", "6 GB", size(2.0 * shape.n_parameters), "")
    capture, train = _stage(e, on, "capture"), _stage(e, on, "train")
    case, many = "one layer of 8,192", f"{layers} layers"
    why = "its formula, 2 bytes x 15 x 3,584 a token, gives 215 GB for 2 M tokens; 20 GB follow from nothing in it"
    yield Claim(many, "disk of a capture of 2 M tokens", "20 GB", size(capture.disk_bytes), why)
    why = "its 2 to 3 h are for 2 x 80 prompts, with loading"
    yield Claim(many, "time of a capture of 2 M tokens", "2 to 3 h", span(capture.seconds), why)
    why = "2,048 -> 8,192, where it has 3,584 -> 14,336"
    yield Claim(case, "memory", "2 GB, 10 GB with overhead", size(train.device_bytes), why)
    each = train.flops / e.train.steps / 1e12
    why = f"0.6 to 0.9 s for a step of {each:.2f} TFLOP; a batch of 256 leaves the card idle even so"
    yield Claim(case, "50,000 steps of 256", "8 to 12 h", span(train.seconds), why)
    hours = layers * train.seconds / 3600
    why = "the same; one card can train them one after the other"
    yield Claim(f"{many} as an array", "device-hours", "180", f"{hours:,.1f}", why)
    wide = experiment_with(base | {"lm.model": "Qwen/Qwen2.5-7B", "capture.hook_points": ("blocks.20.mlp_out",)})
    other, case = _stage(wide, on, "train"), "one layer of 14,336, the report's width"
    yield Claim(case, "50,000 steps of 256", "8 to 12 h", span(other.seconds), "three times the work")
    why = f"parameters and moments are {size(other.parts['state'])}, gradients and latents the rest"
    yield Claim(case, "memory", "2 GB", size(other.device_bytes), why)


# --- a cross-layer transcoder on two devices -----------------------------------------------------------------------


def _clt() -> Iterator[Claim]:
    on = device("a100-80gb")
    blocks = range(12)
    e = experiment_with(
        {
            "lm.model": "openai-community/gpt2",
            "capture.hook_points": tuple(f"blocks.{i}.{side}" for side in ("mlp_in", "mlp_out") for i in blocks),
            "reads": tuple(f"blocks.{i}.mlp_in" for i in blocks),
            "writes": tuple(f"blocks.{i}.mlp_out" for i in blocks),
            "capture.tokens": 10_000_000,
            "coder.preset": "clt",
            "coder.d_sae": 4096,
            "coder.k": 16,
            "train.batch_size": 1024,
            "train.tokens": 1024 * 1000,
            "parallel.mesh": (1, 2),
        }
    )
    outline = Outline.of(e)
    two = stage_of(outline, on, 2, "train")
    work = next(iter(outline.known.values()))
    case = "12 layers x 4,096 latents, batch 1,024"
    each = two.seconds / e.train.steps
    sent = work.sent / (EFFICIENCY["links"] * on.link)
    yield Claim(case, "memory of each of 2 devices", "not said", size(two.device_bytes), "")
    why = "163 ms are 33 % of it there, 133 of them torch.topk; saejax halves bit patterns instead"
    yield Claim(case, "a step", "0.49 s", span(each), why)
    why = f"{size(work.sent)} a step: the sum of what both devices decode, and counts"
    yield Claim(case, "communication", "1.16 ms of a selection", span(sent), why)
    yield Claim(case, "communication, share of the step", "below 1 %", f"{sent / each:.1%}", "a shorter step")


# --- two frozen models ---------------------------------------------------------------------------------------------


def _latentwire() -> Iterator[Claim]:
    on = device("h100")
    e = experiment_with(
        {
            "lm.model": "meta-llama/Llama-3.1-8B",
            "lm.dtype": "bfloat16",
            "prefix.source": "recall",  # its records are not read for a plan
            "prefix.second": "Qwen/Qwen2.5-7B",
            "prefix.length": 2048,
            "train.batch_size": 4,
            "train.tokens": 8 * 5000,
            "train.lr": 1e-4,
        }
    )
    outline = Outline.of(e)
    for devices, theirs, hours in ((1, "34 GB", 5.6), (2, "17 GB", 3.2), (4, "8.5 GB", 1.9)):
        one = stage_of(outline, on, devices, "prefix")
        case = f"{devices} x H100"
        why = f"weights {size(one.parts['language model'])}; state {size(one.parts['state'])}; activations the rest"
        if devices > 1:
            why = "the report divides by the devices; with data parallelism each has both models"
        yield Claim(case, "memory of each", theirs, size(one.device_bytes), why)
        why = "a batch of 4 has a row a device at most: reading the weights takes the time"
        if devices == 1:
            rate, used = 40_000 / one.seconds, 2 * one.flops / 40_000 / on.bfloat16
            why = f"{rate:,.0f} samples/s; its 2 samples/s are {used:.1%} of the card's products"
        yield Claim(case, "8 epochs of 5,000 samples", span(3600 * hours), span(one.seconds), why)
    spread = dataclasses.replace(e, parallel=dataclasses.replace(e.parallel, mesh=(1, 2)))
    halves = stage_of(outline.with_experiment(spread), on, 2, "prefix")
    why = "parallel.mesh=1,2: the models are spread over both, which is what halves the memory"
    yield Claim("2 x H100, spread", "memory of each", "17 GB", size(halves.device_bytes), why)


REPORTS = {
    "rtx6000": Report("Six models on one RTX 6000 (24 GB), and five scenarios", _rtx6000),
    "qwen": Report("Qwen2.5-3B-Instruct on A100s of 40 GB", _qwen),
    "clt": Report("A cross-layer transcoder of 49,152 latents on two devices", _clt),
    "latentwire": Report("Llama-3.1-8B and Qwen2.5-7B with a latent prefix, on H100s", _latentwire),
}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Figures of reports beside those of `saejax plan`.")
    parser.add_argument("reports", nargs="*", help=", ".join(REPORTS))
    virtual_devices(4)
    for text in page(parser.parse_args().reports or list(REPORTS)):
        print(text)
