"""Pictures of AdapterReading: pieces of adapters by strength, in words, and by what they earn."""

from collections.abc import Sequence
from typing import Any

from rlhf_lab.probes import Run
from rlhf_lab.views import html
from rlhf_lab.views.picture import Picture
from rlhf_lab.views.plots import bars, curves

SHOWN_PIECES, SHOWN_ADAPTERS = 24, 8


def adapter_reading_parts(
    run: Run, name: str, records: Sequence[dict[str, Any]]
) -> list[Picture | str]:
    """Of the last record: singular values, the strongest pieces in words, and what they earn."""
    last = records[-1]
    pieces = last["pieces"]
    total = sum(row["s"] ** 2 for row in pieces)
    if not total:
        return [f"<p>No adapter has changed anything by phase {last['phase']}.</p>"]
    spectra: dict[str, list[float]] = {}
    for row in pieces:
        spectra.setdefault(row["weight"], []).append(row["s"])
    largest = sorted(spectra, key=lambda weight: -spectra[weight][0])[:SHOWN_ADAPTERS]
    title = f"phase {last['phase']}: singular values of {len(largest)} of {len(spectra)} adapters"
    series = {weight: (range(1, 1 + len(spectra[weight])), spectra[weight]) for weight in largest}
    parts: list[Picture | str] = [curves(series, title, "piece", "singular value")]
    shown = sorted(pieces, key=lambda row: -row["s"])[:SHOWN_PIECES]
    keys = ["weight", "piece", "s", "share", "reads", "words read", "upstream", "times chance"]
    keys += ["writes", "words written"]
    table = [
        [row["weight"], row["piece"], row["s"], row["share"], row["reads"], _words(row, "reads")]
        + [row["upstream"], row["upstream_times"], row["writes"], _words(row, "writes")]
        for row in shown
    ]
    parts.append(html.table(keys, table))
    parts.append(
        f"<p>The {len(shown)} strongest of {len(pieces)} pieces. Beside each word is the cosine; "
        "the sign of a piece is that by which the largest entry that it writes is positive.</p>"
    )
    if "removed" in last:
        names = [f"{pieces[i]['weight']} {pieces[i]['piece']}" for i in last["removed"]]
        ends = {}
        if "earned_low" in last:
            ends = {"earned": (last["earned_low"], last["earned_high"])}
        title = f"reward less that without the piece; {last['reward']:.3f} whole, n = {last['n']}"
        turned = ", ".join(f"{name} {x:.0%}" for name, x in zip(names, last["turned"], strict=True))
        parts.append(bars(names, {"earned": last["earned"]}, title, "reward", whiskers=ends))
        parts.append(f"<p>Samples that come out otherwise without it: {turned}.</p>")
    return parts


def _words(row: dict[str, Any], side: str) -> str:
    """Words with their cosines."""
    pairs = zip(row[f"{side}_words"], row[f"{side}_cos"], strict=True)
    return ", ".join(f"{word.strip() or repr(word)} {cosine:+.2f}" for word, cosine in pairs)
