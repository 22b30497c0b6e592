"""L4: the trained coder, which knows no experiment, no run folder and no Orbax; how it is saved and read back."""

from saejax.trained.coder import Origin, TrainedCoder, folded
from saejax.trained.files import is_saved
from saejax.trained.sites import check_widths, make_sites, sites_from_meta, sites_to_meta, unscaled

__all__ = [
    "Origin",
    "TrainedCoder",
    "check_widths",
    "folded",
    "is_saved",
    "make_sites",
    "sites_from_meta",
    "sites_to_meta",
    "unscaled",
]
