"""The faults: one line of one room each, and the test files that are to notice it."""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """`old`, which stands once in saejax/, becomes `new`; `tests` are files below tests/."""

    room: str
    old: str
    new: str
    tests: tuple[str, ...]


def _of(room: str, tests: str, *changes: tuple[str, str]) -> list[Mutant]:
    return [Mutant(room, old, new, tuple(f"{name}.py" for name in tests.split())) for old, new in changes]


MUTANTS = [
    *_of(
        "coders",
        "coders/test_conformance coders/test_coders coders/test_losses",
        ('"fve": 1 - squared_error(c.y, c.y_hat) / c.variance', '"fve": 1 - squared_error(c.y, c.y_hat)'),
        ('jnp.where(seen["fired"] > 0, 0, since)', 'jnp.where(seen["fired"] > 1, 0, since)'),
        ("due = (step + 1) % self.unit_decoder_every == 0", "due = step % self.unit_decoder_every == 0"),
        ("end=k.end * self.factor", "end=k.end"),
        ("lengths[0] / (2 * lengths[1] + 1e-6)", "lengths[0] / (lengths[1] + 1e-6)"),
        ('params["W_skip"] * (reads / writes)', 'params["W_skip"] * (writes / reads)'),
        ("self._e_hat(c)) / total_variance(e), 0)", "self._e_hat(c)), 0)"),
        ("greatest_token(jax.lax.stop_gradient(c.pre))", "-greatest_token(-jax.lax.stop_gradient(c.pre))"),
    ),
    *_of(
        "coders",
        "coders/test_layernorm coders/test_calibration coders/test_listed coders/test_coder_config",
        ("/ max(1, x.shape[-1] - 1)", "/ max(1, x.shape[-1])"),
        ("jnp.quantile(pre, 1 - rate, axis=0)", "jnp.quantile(pre, rate, axis=0)"),
        ('latents.at, side="right")', 'latents.at, side="left")'),
        ("max(1, round(_DEAD_SHARE * tokens))", "max(1, 2 * round(_DEAD_SHARE * tokens))"),
    ),
    *_of(
        "kernels",
        "kernels/test_pairs kernels/test_dead kernels/test_segments kernels/test_kernels coders/test_hierarchical",
        ("rank_TU < count_T[:, None]", "rank_TU <= count_T[:, None]"),
        ("reach(least_BG) >= k, 31", "reach(least_BG) > k, 31"),
        ("jnp.where(rank >= below, place + half, place)", "jnp.where(rank > below, place + half, place)"),
        ("jnp.where(lengths > 0, lengths, 1)", "jnp.where(lengths > 1, lengths, 1)"),
        ("(n_kept - 1) % every :: every", "n_kept % every :: every"),
    ),
    *_of(
        "lm",
        "lm/test_lm lm/test_families lm/test_generation lm/test_shared_batches lm/test_conventions",
        ("-window)[None]", "-window - 1)[None]"),
        ("softcap(scores_BHST.astype(jnp.float32), config.attn_softcap)", "scores_BHST.astype(jnp.float32)"),
        ("falling_BV, jnp.inf).min(", "falling_BV, -jnp.inf).max("),
        ("lambda i: i % 2 == 0)", "lambda i: i % 2 == 1)"),
        ("row * len(segments_S) + np.arange(start, stop)", "np.arange(start, stop)"),
    ),
    *_of(
        "lm",
        "lm/test_pair lm/test_torch_hooks lm/test_checkpoint_folders",
        (
            "min(self.first.config.context_length, self.second.config.context_length)",
            "max(self.first.config.context_length, self.second.config.context_length)",
        ),
        ("embedding and head and not files.are_equal(embedding, head)", "embedding and head and False"),
    ),
    *_of(
        "store",
        "store/test_store store/test_store_faults store/test_parts store/test_arrays store/test_neighbours "
        "store/test_int8",
        ("return -(-self.n_rows // self.block_rows)", "return self.n_rows // self.block_rows"),
        ("(within >= self._low) & (within < self._high)", "(within >= self._low) & (within <= self._high)"),
        (".max() == _EXPONENT:", ".max() > _EXPONENT:"),
        ("enough = count >= max(first_rows, batch_size)", "enough = count >= batch_size"),
        ("each = np.maximum(lengths - shift, 0) // n", "each = np.maximum(lengths - shift, 0) // n * (shift == 0)"),
        ('if sum(counts) != value["n_tokens"] or', "if"),
        ("_U64(30))) * _U64(0xBF58476D1CE4E5B9)", "_U64(30)))"),
    ),
    *_of(
        "store",
        "store/test_object_store app/test_store_tools app/test_foreign_stores",
        ("time.monotonic() - watched[1] >= STALE_SECONDS", "time.monotonic() - watched[1] >= -STALE_SECONDS"),
        ("following += max(-1, *largest) + 1", "following += max(-1, *largest)"),
        ("later == 0 for rows, later", "True for rows, later"),
    ),
    *_of(
        "text",
        "text/test_text text/test_text_mixture text/test_text_folders text/test_chat text/test_added_tokens",
        ("begun_C = period * quotas_C +", "begun_C = quotas_C +"),
        ("special |= positions == 0", "special |= positions < 0"),
        ("(hash_fraction(group) < self.heldout_fraction)", "(hash_fraction(group) <= 2 * self.heldout_fraction)"),
    ),
    *_of(
        "capture",
        "capture/test_stream capture/test_capture_options capture/test_capture_faults",
        ("np.cumsum(ordinary[::-1])[::-1] - ordinary", "np.cumsum(ordinary[::-1])[::-1]"),
        ("(packed.to_end < config.last_tokens)", "(packed.to_end <= config.last_tokens)"),
        ("(usual_R1 > 0) & (norm_RS > ratio * usual_R1)", "(usual_R1 > 0) & (norm_RS > usual_R1)"),
        ("done=self.done + rows, skip=self.skip + rows)", "done=self.done + rows, skip=self.skip)"),
    ),
    *_of(
        "checkpoints",
        "checkpoints/test_checkpoints checkpoints/test_checkpoint_faults",
        ('elif now["sha256"] != entry["sha256"]:', "elif False:"),
        ("and not (every and step % every == 0)", "and not every"),
        ("if have[path][field] != want[path][field]:", "if False:"),
    ),
    *_of(
        "training",
        "training/test_train training/test_resample training/test_guard training/test_optim training/test_recipe",
        (
            "decay = jnp.minimum(config.ema_decay, (1.0 + step) / (10.0 + step))",
            "decay = jnp.float32(config.ema_decay)",
        ),
        ("jnp.cumsum(jnp.square(error_B / jnp.maximum(error_B.max(), 1e-30)))", "jnp.cumsum(error_B)"),
        ("jnp.roll(losses, -1).at[-1].set(loss)", "jnp.roll(losses, -1).at[0].set(loss)"),
        ("lambda a: a / parts, means", "lambda a: a, means"),
        ("/ (ends_C[at] - ends_C[at - 1])", "/ ends_C[at]"),
        ("memory.in_a_row >= self.config.max_skipped_steps", "memory.in_a_row > self.config.max_skipped_steps"),
        ("weight_N = 1 / distance_N[away_N]", "weight_N = 0 * distance_N[away_N] + 1"),
        ("<= config.resample_until_fraction * config.steps", ">= config.resample_until_fraction * config.steps"),
    ),
    *_of(
        "evals",
        "evals/test_evals evals/test_intervals evals/test_matching evals/test_similarity evals/test_probing",
        ("return (x_BD * x_hat_BD).sum(-1) /", "return jnp.abs(x_BD * x_hat_BD).sum(-1) /"),
        ("np.subtract(zero, sae) / apart", "np.subtract(zero, clean) / apart"),
        ("(jnp.exp(log_p_RSV) * (log_p_RSV - log_q_RSV))", "(jnp.exp(log_q_RSV) * (log_q_RSV - log_p_RSV))"),
        ("q_D + 2 * at_D * s_D + n * np.square(at_D)", "q_D + 2 * at_D * s_D - n * np.square(at_D)"),
        ("return np.abs(unit(rows_AD) @ unit(rows_BD).T)", "return unit(rows_AD) @ unit(rows_BD).T"),
        ("carried_B = np.minimum(others_B, act_B - main_B)", "carried_B = others_B"),
        ("+ often_F[None] - both_NF", "+ often_F[None] + both_NF"),
        ("self.value < self.bar if self.comparison", "self.value > self.bar if self.comparison"),
    ),
    *_of(
        "interventions",
        "interventions/test_interventions interventions/test_patching studies/test_study",
        ("lambda t, g, m: t + g * m", "lambda t, g, m: t + g"),
        ("(jnp.exp(log_p_RV) * (log_p_RV - log_q_RV))", "(jnp.exp(log_q_RV) * (log_q_RV - log_p_RV))"),
        ("np.where(stays_F, 0.0, instead)", "np.where(stays_F, instead, 0.0)"),
    ),
    *_of(
        "attribution",
        "attribution/test_influence attribution/test_rows attribution/test_resume attribution/test_two_steps",
        ("tokens / (tokens + errors) if", "errors / (tokens + errors) if"),
        ("key=lambda row: -row[0])", "key=lambda row: row[0])"),
        ("x_M32 = x_M32 - x_M32.mean()", "x_M32 = x_M32 - 0 * x_M32.mean()"),
    ),
    *_of(
        "analysis",
        "analysis/test_analysis analysis/test_scoring",
        ("max(1, 2 * self.true_positives + wrong)", "max(1, self.true_positives + wrong)"),
        ("np.lexsort((-np.abs(value), latent))", "np.lexsort((np.abs(value), latent))"),
        ("jnp.matmul(part_FD * scale_D[None], W_U_DV", "jnp.matmul(part_FD, W_U_DV"),
    ),
    *_of(
        "trained",
        "trained/test_trained_coder interop/test_formats interop/test_dictionary_learning interop/test_openai",
        ('(params["b_mag"] + scale_F * shift_F)', '(params["b_mag"] - scale_F * shift_F)'),
        ("statistics.mean_norm / np.sqrt(len(statistics.mean))", "statistics.mean_norm / len(statistics.mean)"),
    ),
    *_of(
        "parallel",
        "parallel/test_parallel parallel/test_equality parallel/test_pmap",
        ("pmax(share, axis) if axis else share", "pmin(share, axis) if axis else share"),
        ("n_own * jax.sharding.get_abstract_mesh().shape[axis] if axis", "n_own if axis"),
    ),
    *_of(
        "interop",
        "interop/test_formats interop/test_llama_scope interop/test_circuit_tracer "
        "interop/test_dictionary_learning interop/test_circuit_tracer_features",
        ("math.sqrt(width) / np.array(values)", "np.array(values) / math.sqrt(width)"),
        ("(arrays[name] * factor_F)", "(arrays[name] / factor_F)"),
        ("np.arange(1, 101) / 100 * above[-1]", "np.arange(0, 100) / 100 * above[-1]"),
    ),
    *_of(
        "reports",
        "reports/test_report reports/test_graph_page reports/test_graph_page_input reports/test_study_page "
        "training/test_monitor serve/test_serve_features",
        ("latent = number - diagonal * (diagonal + 1) // 2", "latent = number - diagonal * (diagonal - 1) // 2"),
        ("1e3 * seconds[key] / steps", "seconds[key] / steps"),
        ("(np.cumsum(count) - (count - 1) / 2)[place]", "np.cumsum(count)[place]"),
        ("total(NOT density > 0)", "total(density > 0)"),
    ),
    *_of(
        "serve",
        "serve/test_serve_guard serve/test_serve_features serve/test_serve_runs serve/test_serve_requests "
        "serve/test_serve_notes",
        (
            'if site not in ("same-origin", "none") and (changes or',
            'if site not in ("same-origin", "none") and (changes and',
        ),
        ("int(length[:20]) > LARGEST_BODY", "int(length[:20]) > 9 * LARGEST_BODY"),
        ("LARGEST_INT = (1 << 31) - 1", "LARGEST_INT = 1 << 31"),
    ),
    *_of(
        "plans",
        "plans/test_recommendation plans/test_plan_programs plans/test_laws plans/test_devices plans/test_plan_models",
        ("if stage.device_bytes > ROOM * self.device.memory]", "if stage.device_bytes > self.device.memory]"),
    ),
    *_of(
        "jobs",
        "jobs/test_jobs",
        ("128 + int(match[2]) if", "int(match[2]) if"),
        ("self._started.get(label, 0) <= self._job.requeues", "self._started.get(label, 0) < self._job.requeues"),
    ),
    *_of(
        "app",
        "runs/test_run app/test_explain app/test_commands app/test_sweep app/test_comparisons app/test_given",
        ("if colon else start + 1", "if colon else start + 2"),
        ('re.compile(r"attempt-[1-9]\\d*")', 're.compile(r"attempt-[0-9]")'),
        ("min(c.target_l0_start * c.target_l0 / math.prod", "min(c.target_l0 / math.prod"),
    ),
    *_of(
        "fit",
        "fit/test_resolve fit/test_workload app/test_doors app/test_warm_start app/test_sweep",
        ("if not train.lr and isinstance(lr, float) and lr > 0:", "if isinstance(lr, float) and lr > 0:"),
        ("on = [sum(program.bytes()[1] for", "on = [max(program.bytes()[1] for"),
        (
            "Beginning(dataclasses.replace(sites, latent_scale=float",
            "Beginning(dataclasses.replace(sites, latent_scale=2 * float",
        ),
    ),
    *_of(
        "prefix",
        "prefix/test_prefix_parts app/test_prefix_command",
        ("/ math.sqrt(q_BPHK.shape[-1])", "/ q_BPHK.shape[-1]"),
        ("[[i + 1 for i in row[: config.length]]", "[[i + 1 for i in row]"),
        ("jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6", "jnp.mean(x, axis=-1, keepdims=True) + 1e-6"),
    ),
    *_of(
        "studies",
        "studies/test_summary studies/test_study studies/test_behaviours",
        ("np.abs(controls) >= abs(effect[0])", "np.abs(controls) < abs(effect[0])"),
        (
            "(place_RS >= 1) & (place_RS <= prompts.last[:, None])",
            "(place_RS >= 1) & (place_RS < prompts.last[:, None])",
        ),
    ),
    *_of(
        "core", "interop/test_torch_file", ("last >= storage.count or count > storage.count", "count > storage.count")
    ),
    *_of(
        "core",
        "core/test_core core/test_settings core/test_stopping core/test_streams core/test_memory core/test_bootstrap",
        ("(self.below is None or value < self.below)", "(self.below is None or value <= self.below)"),
        ("struct.unpack(_FLOCK, answer)[0] != fcntl.F_UNLCK", "struct.unpack(_FLOCK, answer)[0] == fcntl.F_UNLCK"),
        ("if max(size, len(raw)) > limit:", "if size > limit:"),
        ("check_depth(item, levels - 1)", "check_depth(item, levels)"),
    ),
]
