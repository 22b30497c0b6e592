"""The keys of `coder` and `train` as arguments of `saejax.train`, for type checkers and editors.

Made by `python -m saejax.commands._reference` from the settings; change those, not this file.
"""

from collections.abc import Sequence
from typing import TypedDict


class TrainSettings(TypedDict, total=False):
    """Arguments of `saejax.train` besides its own."""

    topology: str
    sparsity: str
    d_sae: int
    expansion: int
    sparsity_warmup_fraction: float | None
    dead_after_tokens: int
    init: str
    decoder_norm: float | None
    encoder_scale: float | None
    unit_decoder_every: int | None
    encoder_centre: bool | None
    lista_steps: int | None
    lista_rate: float
    b_dec_init: str
    firing_rate_init: float
    normalize: str
    matmul_dtype: str
    reconstruction: str
    prefixes: Sequence[float]
    prefixes_detached: bool | None
    hierarchical_every: int | None
    k: int
    k_start: int
    k_anneal_fraction: float
    threshold_decay: float
    threshold_warmed: bool
    threshold_init: float | None
    bandwidth: float | None
    l0_through_input: bool
    l1_coefficient: float | None
    lp_coefficient: float | None
    lp_end: float
    lp_updates: int
    lp_after_fraction: float
    tanh_coefficient: float | None
    tanh_scale: float
    l0_coefficient: float | None
    target_l0_coefficient: float | None
    target_l0: float
    target_l0_of: str
    target_l0_start: float | None
    frequency_coefficient: float | None
    frequency_scale: float
    pre_activation_coefficient: float | None
    pre_activation_dead_only: bool
    gate_coefficient: float | None
    multi_topk_coefficient: float | None
    multi_topk_factor: int
    auxk_coefficient: float | None
    auxk_k: int
    lift_coefficient: float | None
    ghost_coefficient: float | None
    contrastive_coefficient: float | None
    contrastive_share: float
    contrastive_similarity: str
    contrastive_temperature: float
    decorrelation_coefficient: float | None
    tokens: int
    batch_size: int
    optimizer: str
    lr: float
    b_enc_rate: float | None
    b1: float
    b2: float | None
    eps: float
    weight_decay: float
    schedule: str
    warmup_fraction: float
    final_lr_fraction: float
    decay_fraction: float
    restart_period: float
    restart_multiplier: float
    plateau_factor: float
    plateau_patience: int
    plateau_window: int
    clip_norm: float
    ema_decay: float
    max_skipped_steps: int
    spike_factor: float
    resample_every: int
    resample_until_fraction: float
    early_stop_patience: int
    early_stop_min_delta: float
    keep_best: str
    through: str
    through_weight: float
    through_from: float
    through_rows: int
    through_parts: int
    through_errors: bool
    through_in_turn: bool
    max_rows: int
    accumulate: int
    checkpoint_every: int
    keep_checkpoints: int
    keep_every: int
    validate_every: int
    validate_epochs: float
    log_every: int
    block_chunks: int
    blocks_ahead: int
    shares: int
    neighbours: int
    profile: bool
    monitor: bool
    tensorboard: bool
    wandb: bool
