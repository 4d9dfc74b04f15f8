"""Labels of a control task: one per word type, of the chosen fraction, and independent."""

import pytest
import torch

from rlhf_lab.probes import control_labels


def test_labels_match_hand_computed():
    """The generator's numbers below the fraction, for the types in rising order."""
    seeded = lambda: torch.Generator().manual_seed(0)
    row = torch.tensor([7, 7, 3, 7, 12, 3])
    three, seven, twelve = (torch.rand(3, generator=seeded()) < 0.4).tolist()
    found = control_labels(row, seeded(), 0.4)
    assert found.tolist() == [seven, seven, three, seven, twelve, three]
    for share in (0.0, 1.0, -0.1):
        with pytest.raises(ValueError, match="between 0 and 1"):
            control_labels(row, seeded(), share)
