"""Two plots as SVG text: ratios by kind, and the roofline. Plain shapes and words, readable on light and dark pages."""

import math
from typing import Iterable, List, Optional, Sequence, Tuple
from xml.sax.saxutils import escape

INK, FAINT, PAPER = "#24292f", "#c9d1d9", "#ffffff"
OURS, THEIRS, AHEAD, BEHIND = "#1f7a5c", "#b35900", "#2e9e75", "#c0392b"


class _Canvas:
    def __init__(self, width: int, height: int, title: str):
        self.width, self.height, self.title = width, height, title
        self.parts: List[str] = []

    def text(self, x, y, words, anchor="start", size=12, color=INK, weight="normal"):
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" font-weight="{weight}" fill="{color}">{escape(words)}</text>'
        )

    def line(self, x1, y1, x2, y2, color=INK, width=1.0, dash=""):
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        self.parts.append(f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{color}" stroke-width="{width}"{dashes}/>')

    def box(self, x, y, width, height, color, words=""):
        inner = f"<title>{escape(words)}</title>" if words else ""
        self.parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{color}">{inner}</rect>')

    def dot(self, x, y, radius, fill, stroke, words=""):
        inner = f"<title>{escape(words)}</title>" if words else ""
        self.parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{fill}" stroke="{stroke}">{inner}</circle>')

    def __str__(self) -> str:
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width}" height="{self.height}" viewBox="0 0 {self.width} {self.height}" '
            f'font-family="system-ui, sans-serif" role="img" aria-label="{escape(self.title)}">'
        )
        paper = f'<rect width="{self.width}" height="{self.height}" fill="{PAPER}"/>'
        return "\n".join([head, paper, *self.parts, "</svg>", ""])


def ratio_bars(title: str, groups: Sequence[Tuple[str, Sequence[float]]]) -> str:
    """One bar for each (name, ratios): from 1 to the geometric mean, with a thin line from the worst row to the best, on a logarithmic scale."""
    left, right, top, step = 260, 60, 60, 22
    canvas = _Canvas(900, top + step * len(groups) + 40, title)
    every = [value for _, values in groups for value in values]
    low = min([0.5, *every]) / 1.05
    high = max([2.0, *every]) * 1.05
    span = math.log(high / low)

    def x(value):
        return left + (canvas.width - left - right) * math.log(value / low) / span

    bottom = top + step * len(groups)
    canvas.text(10, 22, title, size=15, weight="bold")
    canvas.text(10, 40, "peer's time over ours; bar: geometric mean, line: worst row to best", color="#57606a")
    for tick in (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8, 16, 32, 64):
        if low <= tick <= high:
            canvas.line(x(tick), top - 6, x(tick), bottom, INK if tick == 1 else FAINT, 1.5 if tick == 1 else 1)
            canvas.text(x(tick), bottom + 16, f"{tick:g}×", "middle")
    for i, (name, values) in enumerate(groups):
        y = top + step * i
        mean = math.exp(sum(map(math.log, values)) / len(values))
        start, end = sorted((x(1.0), x(mean)))
        words = f"{name}: mean {mean:.3g}, worst {min(values):.3g}, best {max(values):.3g}, {len(values)} rows"
        canvas.text(left - 8, y + 14, name, "end")
        canvas.box(start, y + 4, max(end - start, 1.0), step - 9, AHEAD if mean >= 1 else BEHIND, words)
        canvas.line(x(min(values)), y + step / 2 - 0.5, x(max(values)), y + step / 2 - 0.5, INK, 1.2)
        canvas.text(canvas.width - right + 6, y + 14, f"{mean:.2f}")
    return str(canvas)


def roofline(title: str, points: Iterable[Tuple[str, float, float, Optional[float]]], gemm_tflops: float, copy_gb_per_s: float) -> str:
    """Points are (name, FLOP a byte, our TFLOP/s, the peer's TFLOP/s or None), under the run's own ceilings."""
    points = list(points)
    left, right, top, bottom = 70, 30, 60, 50
    canvas = _Canvas(900, 520, title)
    rates = [rate for _, _, ours, theirs in points for rate in (ours, theirs) if rate]
    x_low, x_high = min([1.0, *(p[1] for p in points)]) / 1.2, max([1000.0, *(p[1] for p in points)]) * 1.2
    y_low, y_high = min([1.0, *rates]) / 1.2, gemm_tflops * 1.6

    def x(value):
        return left + (canvas.width - left - right) * math.log(value / x_low) / math.log(x_high / x_low)

    def y(value):
        return canvas.height - bottom - (canvas.height - top - bottom) * math.log(value / y_low) / math.log(y_high / y_low)

    canvas.text(10, 22, title, size=15, weight="bold")
    canvas.text(10, 40, "filled: ours, hollow: PyTorch; lines: this run's own product of matrices and streaming copy", color="#57606a")
    for power in range(-3, 6):
        tick = 10.0**power
        if x_low <= tick <= x_high:
            canvas.line(x(tick), top, x(tick), canvas.height - bottom, FAINT)
            canvas.text(x(tick), canvas.height - bottom + 16, f"{tick:g}", "middle")
        if y_low <= tick <= y_high:
            canvas.line(left, y(tick), canvas.width - right, y(tick), FAINT)
            canvas.text(left - 8, y(tick) + 4, f"{tick:g}", "end")
    canvas.text(canvas.width - right, canvas.height - 12, "FLOP a byte (operands read once, result written once)", "end")
    canvas.text(10, 56, "TFLOP/s")
    slope = copy_gb_per_s * 1e-3
    ridge = gemm_tflops / slope
    start = max(x_low, y_low / slope)
    canvas.line(x(start), y(start * slope), x(ridge), y(gemm_tflops), INK, 1.5)
    canvas.line(x(ridge), y(gemm_tflops), x(x_high), y(gemm_tflops), INK, 1.5)
    canvas.text(canvas.width - right, y(gemm_tflops) - 6, f"{gemm_tflops:.0f} TFLOP/s", "end")
    canvas.text(x(math.sqrt(start * ridge)) - 8, y(math.sqrt(start * ridge) * slope) - 8, f"{copy_gb_per_s:.0f} GB/s", "end")
    for name, intensity, ours, theirs in points:
        if theirs:
            canvas.line(x(intensity), y(ours), x(intensity), y(theirs), FAINT)
            canvas.dot(x(intensity), y(theirs), 3, "none", THEIRS, f"{name}: PyTorch {theirs:.3g} TFLOP/s")
        canvas.dot(x(intensity), y(ours), 3, OURS, OURS, f"{name}: ours {ours:.3g} TFLOP/s")
    return str(canvas)
