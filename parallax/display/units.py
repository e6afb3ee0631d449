"""Format bytes, FLOPs, shares, durations and counts."""

import math

BYTES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
LONG = 1e12  # larger numbers are written with an exponent
THOUSANDS = ("", "k", "M", "G", "T", "P", "E")
DAY = 86_400  # seconds


def in_bytes(size: float) -> str:
    """Bytes in the largest unit that leaves a number of 1 or more.

    >>> [in_bytes(size) for size in (512, 0.25, 1536, 3 * 2**30)]
    ['512 B', '0.2 B', '1.5 KiB', '3.0 GiB']
    """
    return _scaled(size, BYTES, 1024, "")


def memory_unit(largest: float) -> tuple[int, str]:
    """The bytes of a unit, and its name, for a column of sizes: GiB, but MiB where even the largest is below 0.1 GiB.

    >>> memory_unit(3e9), memory_unit(2e6)
    ((1073741824, 'GiB'), (1048576, 'MiB'))
    """
    return (2**30, "GiB") if largest >= 2**30 / 10 else (2**20, "MiB")


def time_unit(longest: float) -> tuple[float, str]:
    """The seconds of a unit, and its name, for a column of times: s, but ms where even the longest is below 0.1 s.

    >>> time_unit(1.5), time_unit(0.02)
    ((1.0, 's'), (0.001, 'ms'))
    """
    return (1.0, "s") if longest >= 0.1 else (1e-3, "ms")


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
    """A number with this many decimals; four significant digits if it is very large.

    >>> decimal(1234.567, 1), decimal(1e300, 1)
    ('1,234.6', '1e+300')
    """
    return f"{number:,.{decimals}f}" if abs(number) < LONG else f"{number:.4g}"


def duration(secs: float) -> str:
    """A duration in its two largest units of days, hours, minutes and seconds.

    >>> [duration(secs) for secs in (7, 250, 7262, 93_600, 1e12)]
    ['7s', '4m10s', '2h01m', '1d02h', 'over 999d']
    """
    secs = round(min(secs, 1e9))
    if secs < 60:
        return f"{secs}s"
    if secs < 3600:
        return f"{secs // 60}m{secs % 60:02}s"
    if secs < DAY:
        return f"{secs // 3600}h{secs % 3600 // 60:02}m"
    return f"{secs // DAY}d{secs % DAY // 3600:02}h" if secs < 1000 * DAY else "over 999d"


def count(number: float) -> str:
    """A count in at most five characters: exact below ten thousand, three digits beyond.

    >>> [count(number) for number in (0.5, 2317, 54_321, 123_456, 999_999, 12_345_678)]
    ['0.5', '2,317', '54.3k', '123k', '1M', '12.3M']
    """
    if number < 1e4:
        return f"{number:,.0f}" if number >= 10 or number == int(number) else f"{number:.1f}"
    number = float(f"{number:.3g}")
    power = min(int(math.log10(number)) // 3, len(THOUSANDS) - 1)
    return f"{number / 1000**power:.3g}{THOUSANDS[power]}"


def _scaled(number: float, units: tuple[str, ...], base: int, of: str) -> str:
    power = 0
    while abs(number) >= base and power < len(units) - 1:
        number, power = number / base, power + 1
    decimals = 1 if power or (0 < abs(number) < 10 and number != int(number)) else 0
    return f"{decimal(number, decimals).replace(',', '')} {units[power]}{of}"
