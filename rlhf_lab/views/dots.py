"""One run next to runs with other seeds: a row of dots for each quantity, as static SVG."""

from collections.abc import Mapping, Sequence

from rlhf_lab.views import marks as m
from rlhf_lab.views.marks import Number
from rlhf_lab.views.pictures import Picture

ROW, PLOT_WIDTH = 20, 260  # pixels
SeedRows = Mapping[str, tuple[Number, Sequence[Number]]]  # the run and the other seeds, by name


def seed_dots(rows: SeedRows, title: str, digits: int = 3, this: str = "this run") -> Picture:
    """Plot the value of one run, and smaller the values of other seeds, in one row for each name.

    The text at the right has the value of the run, which the legend calls `this`, and the range of
    the other seeds.
    """
    values = [x for value, others in rows.values() for x in (value, *others)]
    n = max(len(others) for _, others in rows.values())
    names = [this, f"{n} runs with other seeds"][: 1 + bool(n)]
    texts = {name: _range(*row, digits) for name, row in rows.items()}
    pad = 0.04 * (max(values) - min(values)) or 0.5
    low, high, left = min(values) - pad, max(values) + pad, m.text_width(*rows) + 14
    whole = left + PLOT_WIDTH + m.text_width(*texts.values()) + 18
    parts, top = m.header(title, "", names, whole)
    bottom = top + 6 + ROW * len(rows)

    def across(x: Number) -> float:
        return left + (x - low) / (high - low) * PLOT_WIDTH

    for tick, label in m.ticks(low, high).items():
        x = across(tick)
        parts.append(m.tag("line", class_="axis", x1=x, x2=x, y1=top + 4, y2=bottom))
        parts.append(m.text(x, bottom + 13, label, "soft", "middle"))
    for i, (name, (value, others)) in enumerate(rows.items()):
        y = top + 6 + ROW * (i + 0.5)
        parts.append(m.text(left - 8, y + 4, name, "", "end"))
        for kind, x in [*((1, x) for x in others), (0, value)]:
            mark = m.marker(kind, across(x), y, kind, 2.6 + 1.6 * (kind == 0))
            parts.append(m.titled(mark, f"{name}, {names[kind]}", x))
        parts.append(m.text(left + PLOT_WIDTH + 12, y + 4, texts[name]))
    alt = f"{title}: " + "; ".join(f"{name} {words}" for name, words in texts.items())
    return Picture((whole, bottom + 22), parts, alt, title)


def _range(value: Number, others: Sequence[Number], digits: int) -> str:
    if not others:
        return f"{value:.{digits}f}"
    return f"{value:.{digits}f} (others {min(others):.{digits}f} to {max(others):.{digits}f})"
