"""Bytes and seconds in words."""


def size(count: float) -> str:
    """1.23 GB: bytes in the unit that suits, to three digits."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            return f"{count:.3g} {unit}" if count < 999.5 else f"{count:,.0f} {unit}"
        count /= 1000
    raise AssertionError


def span(seconds: float) -> str:
    """45 ms, 45 s, 12 min, 3.4 h, 2.1 d: to three digits."""
    for unit, of, least in (("d", 86400, 2), ("h", 3600, 2), ("min", 60, 2)):
        if seconds >= least * of:
            return f"{seconds / of:,.3g} {unit}"
    return f"{seconds:.3g} s" if seconds >= 1 or not seconds else f"{1e3 * seconds:.3g} ms"
