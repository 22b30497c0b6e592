"""Settings of `saejax study`. They are part of every experiment; the room `study`, above this one, reads them."""

import dataclasses

from saejax.core.settings import Settings, setting


@dataclasses.dataclass(frozen=True)
class StudyConfig(Settings, section="study"):
    """Behaviours, and how they are examined."""

    behaviours: tuple[str, ...] = setting(
        ("bracket", "quote"),
        "What the model does: names of the list in docs/study.md, or name=pairs.jsonl for pairs of your own.",
        place="named path",
    )
    train_pairs: int = setting(80, "Pairs of prompts from which features are found, for each behaviour.", low=1)
    test_pairs: int = setting(20, "Other pairs, on which interventions are measured.", low=2)
    least_accuracy: float = setting(
        0.8,
        "The share of pairs, of both kinds, in which the model prefers the right answer after the clean prompt and the "
        "other after the corrupt one. A behaviour with less is refused.",
        low=0,
        high=1,
    )
    dictionaries: tuple[str, ...] = setting(
        (),
        "Dictionaries that are there: runs, folders, files, hub ids. Empty: the experiment's own are trained first.",
        place="hub",
    )
    graphs: int = setting(6, "Training pairs whose clean prompt gets an attribution graph, for each behaviour.", low=1)
    node_share: float = setting(0.8, "Share of the influence that a graph's nodes keep.", above=0, high=1)
    edge_share: float = setting(0.98, "Share of the influence that its edges keep.", above=0, high=1)
    groups: int = setting(10, "Groups of features that are intervened on, for each behaviour.", low=1)
    group_size: int = setting(5, "Features of a group, all of one layer.", low=1)
    controls: int = setting(
        10,
        "Random groups of as many features that fire as much, for each group. With fewer than 9 different ones a group "
        "gets no verdict.",
        low=1,
    )
    positions: int = setting(5, "The last tokens at which groups are patched one by one.", low=1)
    resamples: int = setting(5, "Other prompts whose values a group gets, for each group.", low=1)
    singles: int = setting(
        10, "Features of each graph whose predicted effect is compared with the measured one.", low=2
    )
    every: int = setting(100, "Results after which the table on disk is brought up to date.", low=1)
