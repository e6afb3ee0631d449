"""Numbers as people read them."""

BYTES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
LONG = 1e12  # of a number in its unit: no quantity of ours has as much
THOUSANDS = ("", "k", "M", "G", "T", "P", "E")


def in_bytes(size: float) -> str:
    """Bytes in the largest unit that leaves a number of 1 or more.

    >>> [in_bytes(size) for size in (512, 0.25, 1536, 3 * 2**30)]
    ['512 B', '0.2 B', '1.5 KiB', '3.0 GiB']
    """
    return _scaled(size, BYTES, 1024, "")


def in_flops(flops: float) -> str:
    """FLOPs in the largest unit that leaves a number of 1 or more.

    >>> [in_flops(flops) for flops in (0, 999, 1_500_000, 4e13)]
    ['0 FLOP', '999 FLOP', '1.5 MFLOP', '40.0 TFLOP']
    """
    return _scaled(flops, THOUSANDS, 1000, "FLOP")


def percent(share: float) -> str:
    """A share with one decimal.

    >>> percent(0.6754)
    '67.5 %'
    """
    return f"{decimal(100 * share, 1)} %"


def decimal(number: float, decimals: int) -> str:
    """A number with so many decimals; one that nobody would read to its end with four digits.

    >>> decimal(1234.567, 1), decimal(1e300, 1)
    ('1,234.6', '1e+300')
    """
    return f"{number:,.{decimals}f}" if abs(number) < LONG else f"{number:.4g}"


def duration(secs: float) -> str:
    """Hours, minutes and seconds, the two largest of them.

    >>> [duration(secs) for secs in (7, 250, 7262)]
    ['7s', '4m10s', '2h01m']
    """
    secs = round(secs)
    if secs < 60:
        return f"{secs}s"
    if secs < 3600:
        return f"{secs // 60}m{secs % 60:02}s"
    return f"{secs // 3600}h{secs % 3600 // 60:02}m"


def _scaled(number: float, units: tuple[str, ...], base: int, of: str) -> str:
    at = 0
    while abs(number) >= base and at < len(units) - 1:
        number, at = number / base, at + 1
    decimals = 1 if at or (0 < abs(number) < 10 and number != int(number)) else 0
    return f"{decimal(number, decimals).replace(',', '')} {units[at]}{of}"
