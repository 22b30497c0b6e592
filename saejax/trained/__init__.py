"""L4: the trained coder, which knows no experiment, no run folder and no Orbax; how it is saved and read back."""

from saejax.trained.coder import Origin, TrainedCoder, folded
from saejax.trained.files import coder_of, is_saved, sites_of
from saejax.trained.formats import FORMATS, Format, Kind, format_named, register_format
from saejax.trained.per_layer import layers, side_by_side
from saejax.trained.sites import centred, check_widths, make_sites, sites_from_meta, sites_to_meta, unscaled

__all__ = [
    "FORMATS",
    "Format",
    "Kind",
    "Origin",
    "TrainedCoder",
    "centred",
    "check_widths",
    "coder_of",
    "folded",
    "format_named",
    "is_saved",
    "layers",
    "make_sites",
    "register_format",
    "side_by_side",
    "sites_from_meta",
    "sites_of",
    "sites_to_meta",
    "unscaled",
]
