"""Pictures of a crosscoder: a histogram of relative decoder norms, before and after scaling."""

import torch

from rlhf_lab.diffing import CrosscoderRecord
from rlhf_lab.views.picture import Picture
from rlhf_lab.views.plots import bars

BINS = 20


def relative_norm_bars(record: CrosscoderRecord) -> Picture:
    """How many living latents have which relative norm, of which latent scaling rejects some.

    Those of a crosscoder of the base beside itself stand beside them: what is tuned-only there is
    an artefact. In the legend: candidates above .7, and how many of them scaling keeps.
    """
    alive = (record.freq > 0).nonzero()[:, 0]
    rejected = set(record.candidates.tolist()) - set(record.tuned_only.tolist())
    kept = torch.tensor([i for i in alive.tolist() if i not in rejected], dtype=torch.long)
    n, left = len(record.candidates), len(record.tuned_only)
    base, tuned = record.models
    counts = {
        f"{len(alive)} latents, {n} above .7": record.rel_norm[alive],
        f"without those that scaling finds in {base}, {left} above .7": record.rel_norm[kept],
        f"{base} beside itself, {len(record.control)} latents": record.control,
    }
    names = [f"{i / BINS:.2f}" for i in range(BINS)]
    series = {name: torch.histc(x, BINS, 0, 1).int().tolist() for name, x in counts.items()}
    title = f"{record.site}: share of the decoder that is in {tuned}"
    return bars(names, series, title, "latents")
