"""From two behaviours of Qwen2.5-3B-Instruct to the features that cause them: layers 10 to 24, a transcoder for each.

    saejax study --config=study_qwen

36 layers of 2,048, by the model's own config.json. Captures what the MLPs of fifteen layers read and write on
mathematics as conversations (MetaMathQA), and trains fifteen transcoders of 8 x 2,048 latents as one sweep. The store
of 2,000,000 tokens takes 245.76 GB; --config.capture.tokens=200000 makes a smaller one. Needs the network and the
extras `data` and `chat`. A study with a shrunk random model is tested; with the real weights nothing is measured yet.
"""

from ml_collections import config_dict

from saejax.experiment import shipped

LAYERS = range(10, 25)


def get_config() -> config_dict.ConfigDict:
    c = shipped("models", "qwen2.5-3b-instruct")
    c.name = "study-qwen"
    c.hook_point = ""
    c.capture.hook_points = ("blocks.{10..24}.mlp_in", "blocks.{10..24}.mlp_out")
    c.capture.tokens = 2_000_000
    c.coder.preset = "transcoder"
    c.coder.k = 64
    c.train.tokens = 4 * c.capture.tokens
    c.sweep.reads = tuple(f"blocks.{i}.mlp_in" for i in LAYERS)
    c.study.behaviours = ("agreement", "pronoun")
    c.study.train_pairs, c.study.test_pairs = 80, 20
    c.study.positions = 5
    c.attribution.max_features = 4_000
    return c
