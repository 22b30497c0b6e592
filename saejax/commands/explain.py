"""Ask a language model what a run's features stand for, and score the answers.

    saejax explain runs/quickstart --url=http://localhost:8000/v1 --model=llama-3.1-8b
    saejax explain runs/quickstart --url=https://api.openai.com/v1 --model=gpt-4o-mini --features=0:200
    saejax explain --config=quickstart --url=... --model=... --dry_run     what it would cost
    saejax explain runs/quickstart/evaluated/theirs --url=... --model=...  what `saejax report --sae` evaluated

The address is any OpenAI-compatible one: vLLM, llama.cpp, Ollama, or a hosted service. The key comes from the
environment and is written nowhere. Answers are appended to runs/<name>/explanations.jsonl as they come, so the same
command continues after Ctrl-C; the report shows them. Exits with 1 when some features got no answer.
"""

import os

from saejax.app.command import Command, Line
from saejax.core.errors import ConfigError
from saejax.core.settings import setting

_USUAL_KEY = "OPENAI_API_KEY"


class Explain(Command, takes="either"):
    url: str = setting("", "The address of the API, as http://localhost:8000/v1.")
    model: str = setting("", "The model's name there; it explains and judges.")
    key_env: str = setting(
        "", "The environment variable that holds the key. Without it OPENAI_API_KEY is used, for https alone."
    )
    features: str = setting("0:50", "Which: all, 7, 0:50 (without 50), or 3,17,40:60.")
    examples: int = setting(20, "Passages that the explainer sees.", low=2)
    score: bool = setting(True, "Score by detection and fuzzing.")
    judged: int = setting(20, "Other active passages, and as many random ones, for the judge.", low=2)
    parallel: int = setting(8, "Features asked about at once.", low=1)
    max_tokens: int = setting(1000, "Longest answer; more for models that think.", low=16)
    timeout: float = setting(120.0, "Seconds to wait for an answer.", low=1.0)
    redo: bool = setting(False, "Ask again although there is an answer; the new one counts.")
    dry_run: bool = setting(False, "Say how many requests and tokens it takes, and stop.")

    def run(self, line: Line) -> int:
        from saejax.analysis.endpoint import Endpoint
        from saejax.app.explain import run_explain
        from saejax.app.run_coders import experiment_of
        from saejax.app.workspace import Workspace

        if len(line.words) != (1 if line.config is None else 0):
            raise ConfigError(
                "Give the folder of one run, or --config, as in: saejax explain runs/quickstart --url=..."
            )
        for name, example in (("url", "http://localhost:8000/v1"), ("model", "the name that the endpoint knows")):
            if not getattr(self, name):
                raise ConfigError(f"--{name} is missing, as in --{name}={example}.")
        e = experiment_of(line.words[0]) if line.config is None else line.experiment
        endpoint = Endpoint(self.url, self.model, self.key, self.max_tokens, self.timeout)
        judged = self.judged if self.score else 0
        return run_explain(
            Workspace(e), endpoint, self.features, self.examples, judged, self.parallel, self.redo, self.dry_run
        )

    @property
    def key(self) -> str:
        """From the environment. The usual variable goes to https addresses alone: a local server needs no key of
        another one's, and http would show it to the network. A variable that is named goes anywhere.
        """
        if self.key_env:
            if not (key := os.environ.get(self.key_env, "").strip()):
                raise ConfigError(f"--key_env={self.key_env}: the environment has no such variable, or it is empty.")
            return key
        return os.environ.get(_USUAL_KEY, "").strip() if self.url.startswith("https://") else ""
