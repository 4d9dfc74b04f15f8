"""Pictures of a run's probes as HTML; probes without pictures as a table."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from itertools import groupby
from typing import Any

from rlhf_lab.probes import Run
from rlhf_lab.probes.store import records_file
from rlhf_lab.training.run_dir import reading
from rlhf_lab.views import html
from rlhf_lab.views.declared import PICTURE_ROWS
from rlhf_lab.views.drawings import OF_RECORD, OVER_PHASES
from rlhf_lab.views.intervals import sample_bands
from rlhf_lab.views.marks import STYLE_ELEMENT
from rlhf_lab.views.pictures import Bars, Curves, Matrix, Picture, Strip, Table, quantile_limit
from rlhf_lab.views.records import Drawn, Snapshot, curves_over, rows_of_dicts
from rlhf_lab.views.svg import draw_picture
from rlhf_lab.views.tokens import color_key, tokens_html

LAST_RECORDS = 20
WIDE_PIXELS = 520  # pixels from which a drawing takes a whole row, and is not made smaller


def pictures_over(name: str, kind: str | None, records: list[Snapshot]) -> Iterator[Drawn]:
    """Yield the pictures that take all records, then a table of their plain numbers."""
    if records:
        run = records[-1].run
        with reading(run.path / records_file(name)):
            bands = sample_bands(run)[0] if kind == "RunHealth" else None
            for row in (row for row in PICTURE_ROWS if (row.probe, row.kind) == (kind, "curves")):
                picture = curves_over(records, row.title, row.columns, row.unit, bands=bands)
                yield from filter(None, [picture])
            draw = OVER_PHASES.get(kind or "")
            yield from filter(None, draw(records) if draw else ())
    numbers = number_table([at.record for at in records])
    if not isinstance(numbers, Table) or len(numbers.columns) > 1:
        yield numbers


def draw_declared(name: str, kind: str | None, at: Snapshot) -> Iterator[Drawn]:
    """Yield the pictures of one record."""
    rows = [row for row in PICTURE_ROWS if row.probe == kind and row.kind != "curves"]
    with reading(at.run.path / records_file(name)):
        yield from filter(None, (row.draw(at) for row in rows))
        draw = OF_RECORD.get(kind or "")
        yield from filter(None, draw(at) if draw else ())


def probe_pictures(run: Run, name: str) -> Iterator[Drawn]:
    """Yield the pictures of one probe: over phases, then of the last record."""
    kind = run.kinds().get(name)
    records = [Snapshot(run, name, record) for record in run.records(name)]
    yield from pictures_over(name, kind, records)
    for at in records[-1:]:
        yield from draw_declared(name, kind, at)


def probe_html(run: Run, name: str) -> str:
    """Return the pictures of one probe as a fragment of HTML.

    Raises:
        RunError: If no such probe recorded anything, or its records lack a field.
    """
    return STYLE_ELEMENT + in_grids(map(fragment, probe_pictures(run, name)))


def in_grids(fragments: Iterable[str]) -> str:
    """Join fragments; neighboring drawings share a grid."""
    parts = []
    for is_drawn, group in groupby(fragments, key=lambda x: x.startswith("<figure")):
        part = "".join(group)
        parts.append(f'<div class="figures">{part}</div>' if is_drawn else part)
    return "".join(parts)


def probe_plots(run: Run, name: str) -> list[Picture]:
    """Return the drawings among the pictures of one probe.

    Raises:
        RunError: If no such probe recorded anything, or its records lack a field.
    """
    parts = probe_pictures(run, name)
    return [draw_picture(x) for x in parts if isinstance(x, Bars | Curves | Matrix | Picture)]


def number_table(records: Sequence[Mapping[str, Any]]) -> Table | str:
    """Return the plain numbers and words of the last records, with intervals in brackets."""
    if not records:
        return "<p>It recorded nothing.</p>"
    keys = [k for k, v in records[-1].items() if isinstance(v, int | float | str | None)]
    keys = [key for key in keys if key != "prefix_len"]
    last = records[-LAST_RECORDS:]
    note = "" if len(last) == len(records) else f"The last {len(last)} of {len(records)}."
    return Table(*rows_of_dicts(last, keys), note=note)


def fragment(part: Drawn) -> str:
    """Return a picture as HTML: an inline drawing, a table or colored texts."""
    if isinstance(part, str):
        return part
    if isinstance(part, Table | Strip):
        title = f"<h4>{escape(part.title)}</h4>" * bool(part.title)
        if isinstance(part, Strip):
            return title + strip_html(part)
        note = f"<p>{escape(part.note)}</p>" * bool(part.note)
        return title + html.table(part.columns, part.rows) + note
    if not isinstance(part, Picture) and not any(known := part.known_values()):
        return f"<p>{escape(part.title)}: {'0 everywhere' if known else 'not defined'}.</p>"
    picture, note = draw_picture(part), escape(getattr(part, "note", "").strip())
    caption = f"<figcaption>{note}</figcaption>" if note else ""
    wide = ' class="wide"' if picture.width > WIDE_PIXELS else ""
    return f"<figure{wide}>{picture.inline()}{caption}</figure>"


def strip_html(part: Strip) -> str:
    """Return texts with their tokens colored, below the key of the colors.

    The color ends at the 99 % quantile of all sizes; larger values are marked.
    """
    limit = quantile_limit([x for _, _, row in part.rows for x in row])
    if limit == 0:
        return f"<p>{escape(part.unit)} is 0 on every token of these samples.</p>"
    lines = [color_key(part.unit, limit, part.kind).fragment]
    for label, tokens, row in part.rows:
        known = [x is not None for x in row]
        numbers = [0.0 if x is None else float(x) for x in row]
        tiles = tokens_html(tokens, numbers, part.unit, known, limit, part.kind).fragment
        lines.append(f"<small>{escape(label)}</small>{tiles}")
    return "".join(lines)
