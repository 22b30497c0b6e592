"""Probes of latents: k-sparse after sae-probes, first letters, splitting and absorption after SAEBench."""
