"""The crosscoder's picture counts what its record holds."""

import torch

from rlhf_lab.diffing import CrosscoderRecord
from rlhf_lab.views.crosscoder_pictures import relative_norm_bars


def record_of(rel_norm, nu_base) -> CrosscoderRecord:
    rel_norm, n = torch.tensor(rel_norm), len(rel_norm)
    number, ids = torch.zeros(n), torch.zeros(n, 8, dtype=torch.long)
    freq = (~rel_norm.isnan()).float()
    two = torch.ones(2)
    return CrosscoderRecord(
        ("base", "tuned"), "blocks.0.hook_resid_mid", 2, two, torch.zeros(n, 2, 3), rel_norm, freq,
        number, torch.tensor(nu_base), torch.ones(n), ids, ids, ids, torch.zeros(n, 8), two, 2.0,
        two, two, torch.tensor([0.5, 0.5]),
    )  # fmt: skip


def test_candidates_are_counted_before_and_after_scaling():
    # four living latents: .72 and .96 are candidates, of which the base has the first
    record = record_of([0.5, 0.72, 0.96, 0.4, torch.nan], [1.0, 0.9, 0.1, 1.0, 0.0])
    assert record.candidates.tolist() == [1, 2] and record.tuned_only.tolist() == [2]
    picture = relative_norm_bars(record)
    assert "4 latents, 2 above .7" in picture.alt
    assert "scaling finds in base, 1 above .7" in picture.alt
    assert "base beside itself, 2 latents" in picture.alt
    heights = {
        bars.get_label(): [bar.get_height() for bar in bars]
        for bars in picture._figure.axes[0].containers
    }
    every, kept, control = heights.values()
    assert (every[14], every[19], every[8], every[10]) == (1, 1, 1, 1) and sum(every) == 4
    assert (kept[14], kept[19]) == (0, 1) and sum(kept) == 3
    assert control[10] == 2 == sum(control)
