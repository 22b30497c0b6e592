"""L6: dictionaries of other projects, in and out; one file a format, and where they are found.

A format says how its files look (`here`), reads them into a `TrainedCoder`, and writes one, or says by name what it
cannot say. `saejax.load`, `TrainedCoder.save(format=)`, `saejax convert` and `saejax formats` work through the table.
"""

from saejax.interop.circuit_tracer import CircuitTracer
from saejax.interop.dictionary_learning import DictionaryLearning
from saejax.interop.finding import found, read
from saejax.interop.gemma_scope import GemmaScope, GemmaScope2
from saejax.interop.llama_scope import LlamaScope
from saejax.interop.openai import OpenAI
from saejax.interop.qwen_scope import QwenScope
from saejax.interop.saelens import SAELens
from saejax.interop.sparsify import Sparsify
from saejax.interop.table import format_table
from saejax.trained import FORMATS, Format, register

for _format in (
    SAELens(),
    DictionaryLearning(),
    GemmaScope(),
    GemmaScope2(),
    Sparsify(),
    CircuitTracer(),
    LlamaScope(),
    QwenScope(),
    OpenAI(),
):
    register(_format)

__all__ = ["FORMATS", "Format", "format_table", "found", "read", "register"]
