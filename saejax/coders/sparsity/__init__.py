"""From pre-activations to latents: one sparsity a file, which registers itself (`coders.parts`)."""
