"""The peers' own classes, under the names that this folder's scripts use. As a script: prints the versions."""

import importlib.metadata

import stand_ins  # noqa: F401 - before the peers
from dictionary_learning.trainers.batch_top_k import BatchTopKTrainer
from dictionary_learning.trainers.gdm import GatedSAETrainer
from dictionary_learning.trainers.jumprelu import JumpReluTrainer
from dictionary_learning.trainers.matryoshka_batch_top_k import MatryoshkaBatchTopKTrainer
from dictionary_learning.trainers.p_anneal import PAnnealTrainer
from dictionary_learning.trainers.standard import StandardTrainer, StandardTrainerAprilUpdate
from dictionary_learning.trainers.top_k import TopKTrainer
from sae_lens import (
    SAE,
    BatchTopKTrainingSAE,
    BatchTopKTrainingSAEConfig,
    GatedTrainingSAE,
    GatedTrainingSAEConfig,
    JumpReLUTrainingSAE,
    JumpReLUTrainingSAEConfig,
    JumpReLUTranscoder,
    JumpReLUTranscoderConfig,
    MatryoshkaBatchTopKTrainingSAE,
    MatryoshkaBatchTopKTrainingSAEConfig,
    SAETrainer,
    SkipTranscoder,
    SkipTranscoderConfig,
    StandardTrainingSAE,
    StandardTrainingSAEConfig,
    TopKTrainingSAE,
    TopKTrainingSAEConfig,
    Transcoder,
    TranscoderConfig,
)
from sae_lens.config import SAETrainerConfig
from sae_lens.saes.sae import TrainStepInput

VERSIONS = {name: importlib.metadata.version(name) for name in ("sae-lens", "dictionary-learning", "torch")}

__all__ = [
    "SAE",
    "VERSIONS",
    "BatchTopKTrainer",
    "BatchTopKTrainingSAE",
    "BatchTopKTrainingSAEConfig",
    "GatedSAETrainer",
    "GatedTrainingSAE",
    "GatedTrainingSAEConfig",
    "JumpReLUTrainingSAE",
    "JumpReLUTrainingSAEConfig",
    "JumpReLUTranscoder",
    "JumpReLUTranscoderConfig",
    "JumpReluTrainer",
    "MatryoshkaBatchTopKTrainer",
    "MatryoshkaBatchTopKTrainingSAE",
    "MatryoshkaBatchTopKTrainingSAEConfig",
    "PAnnealTrainer",
    "SAETrainer",
    "SAETrainerConfig",
    "SkipTranscoder",
    "SkipTranscoderConfig",
    "StandardTrainer",
    "StandardTrainerAprilUpdate",
    "StandardTrainingSAE",
    "StandardTrainingSAEConfig",
    "TopKTrainer",
    "TopKTrainingSAE",
    "TopKTrainingSAEConfig",
    "TrainStepInput",
    "Transcoder",
    "TranscoderConfig",
]

if __name__ == "__main__":
    print(VERSIONS)
