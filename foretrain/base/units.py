"""Numbers as text; base/quantities.py does the reverse. GiB is 2^30, for memory; GB is 1e9, for bandwidth, disk and
typed sizes. FLOP is a count, FLOP/s a rate."""

import math

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40
JOULES_PER_KWH = 3.6e6

BYTE_UNITS = {
    "": 1, "b": 1, "bytes": 1,
    "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12,
    "kib": KIB, "mib": MIB, "gib": GIB, "tib": TIB,
}  # fmt: skip


def format_bytes(size: float) -> str:
    """Format '9.78 GiB', '786 MiB', '512 B': binary units, as the tools of PyTorch print them."""
    sign, size = ("-" if size < 0 else ""), abs(size)
    for factor, unit in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size >= factor:
            value = size / factor
            digits = 2 if factor >= GIB else (0 if value >= 100 else 1)
            return f"{sign}{value:,.{digits}f} {unit}"
    return f"{sign}{size:,.0f} B"


def format_bytes_like(size: float, other: float) -> str:
    """Format '7.40': a size as a number in format_bytes' unit of another one."""
    number, unit = format_bytes(other).split()
    return f"{size / BYTE_UNITS[unit.lower()]:,.{len(number.partition('.')[2])}f}"


def format_bytes_range(sizes: tuple[float, float]) -> str:
    """Format '7.03 – 9.68 GiB': two sizes in the unit of the larger."""
    low, high = sizes
    number, unit = format_bytes(high).split()
    digits = len(number.partition(".")[2])
    factor = BYTE_UNITS[unit.lower()]
    return f"{low / factor:,.{digits}f} – {number} {unit}"


Span = tuple[float, float, float]  # low, expected, high


def format_bytes_span(sizes: Span) -> str:
    """Format '6.00 GiB (5.78–6.74)': the expected size, and its range in the same unit."""
    low, expected, high = sizes
    number, unit = format_bytes(expected).split()
    digits = len(number.partition(".")[2])
    factor = BYTE_UNITS[unit.lower()]
    ends = [f"{size / factor:,.{digits}f}" for size in (low, high)]
    return f"{number} {unit} ({ends[0]}–{ends[1]})" if ends[0] != ends[1] else f"{number} {unit}"


def duration_unit(seconds: float) -> tuple[float, str]:
    for unit, size in (("ms", 1e-3), ("s", 1.0), ("min", 60.0), ("h", 3600.0)):
        if format_duration(seconds).endswith(f" {unit}"):
            return size, unit
    return 86400.0, "days"


def format_rough(number: float) -> str:
    """Format '55', '6.0', '0.21', '1,300': two significant digits."""
    if number == 0:
        return "0"
    digits = 1 - math.floor(math.log10(abs(number)))
    return f"{round(number, digits):,.{max(0, digits)}f}"


def format_count(number: float) -> str:
    """Format '40.56 M', '10.49 B', '524,288': below a million every digit is shown."""
    for factor, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if abs(number) >= factor:
            return f"{number / factor:.2f} {unit}"
    return f"{number:,.0f}"


def grouped(number: float, decimals: int) -> str:
    """Format '12.3', '980,300': so many decimals below a thousand, from there on four significant digits."""
    if round(abs(number), decimals) < 1000:
        return f"{number:.{decimals}f}"
    return f"{round(number, 3 - math.floor(math.log10(abs(number)))):,.0f}"


def format_duration(seconds: float) -> str:
    """Format '3.9 s', '122 ms', '14.0 min', '21.7 h', '3.6 days', '210,500 days'."""
    if not math.isfinite(seconds):
        return "unknown"
    if 0 < seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 90:
        return f"{seconds:.3g} s"
    if seconds < 5400:
        return f"{seconds / 60:.1f} min"
    if seconds < 72 * 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{grouped(seconds / 86400, 1)} days"


def format_left(seconds: float) -> str:
    """Format '45 s', '1.3 min', '21.7 h': the rest of a run, never to a tenth of a second."""
    if not math.isfinite(seconds) or seconds >= 90:
        return format_duration(seconds)
    return f"{seconds:.0f} s" if round(seconds) < 60 else f"{seconds / 60:.1f} min"


def format_flops(flops: float) -> str:
    """Format '2.55e18': exponents are how papers compare FLOP counts."""
    mantissa, exponent = f"{flops:.2e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def format_flop_rate(flop_per_s: float) -> str:
    for factor, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if flop_per_s >= factor:
            return f"{flop_per_s / factor:.3g} {unit}FLOP/s"
    return f"{flop_per_s:.3g} FLOP/s"


def format_percent(share: float, digits: int = 1) -> str:
    return f"{grouped(share * 100, digits)}%"


def format_signed_percent(share: float) -> str:
    text = grouped(abs(share) * 100, 1)
    return f"{text}%" if float(text.replace(",", "")) == 0 else f"{'-' if share < 0 else '+'}{text}%"


def format_small_percent(share: float) -> str:
    """Format '0%', '0.013%', '0.35%', '2.4%': a share that may be very small."""
    digits = 3 if abs(share) < 0.001 else 2 if abs(share) < 0.01 else 1
    return f"{grouped(share * 100, digits)}%" if abs(share) >= 5e-6 else "0%"


def format_small_signed_percent(share: float) -> str:
    """Format '+0.013%', '-2.4%', '0%': an error that may be very small."""
    sign = "" if abs(share) < 5e-6 else "-" if share < 0 else "+"
    return sign + format_small_percent(abs(share))


def rounds_to_zero(share: float) -> bool:
    """Return whether a share would be shown as 0.0%: then a sentence says that nothing changes."""
    return abs(share) < 1 and float(format_percent(share)[:-1]) == 0


def format_digits4(number: float | str) -> str:
    """Format a loss or a cosine: '10.8241'. A record keeps what is not finite as text ('nan')."""
    return f"{float(number):.4f}"


def format_number(number: float) -> str:
    """Format '1,234', '12.3', '0.00123': four significant digits, whole numbers whole."""
    if number == round(number) and abs(number) < 1e15:
        return f"{number:,.0f}"
    return f"{number:,.0f}" if abs(number) >= 999.95 else f"{number:.4g}"


def format_energy(joules: float) -> str:
    """Format '4.34 kWh', '92 Wh', '980,300 kWh'."""
    kwh = joules / 3.6e6
    return f"{grouped(kwh, 2 if kwh < 100 else 1)} kWh" if kwh >= 1 else f"{kwh * 1e3:.3g} Wh"


def format_factor(factor: float) -> str:
    """Format '1.27', '12.3', '861': how many times as much."""
    return grouped(factor, 2 if factor < 10 else 1 if factor < 100 else 0)


CENT = 0.01


def format_money(amount: float) -> str:
    """Format '1.12', '1,250.00'; '<0.01' of less than a cent."""
    return "<0.01" if 0 < abs(amount) < CENT else f"{amount:,.2f}"


def format_mass(grams: float) -> str:
    return f"{grams / 1e3:,.2f} kg" if grams >= 1e3 else f"{grams:.3g} g"
