"""Tests what is chosen by the device: the sizes of the read-out's chunks."""

import pytest
import torch

from rlhf_lab.models.device import total_memory
from rlhf_lab.models.fast.readout import chunk_sizes

GIB = 2**30


@pytest.mark.parametrize(
    ("d_vocab", "memory", "expected"),
    [
        (72, None, (58_254, 2**29)),
        (50_257, None, (256, 2**29)),
        (50_257, 4 * GIB, (256, 2**29)),
        (50_257, 24 * GIB, (500, int(1.5 * GIB))),
        (50_257, 140 * GIB, (2920, int(8.75 * GIB))),
    ],
)
def test_chunks_grow_with_the_memory_of_the_device(d_vocab, memory, expected):
    """By hand: 24 GiB / 256 / 4 bytes are 25,165,824 logits, 500 rows of 50,257; 24 / 16 = 1.5."""
    found = chunk_sizes(d_vocab, memory)
    assert (found[0], found[1]) == expected


def test_only_cuda_has_a_memory_of_its_own(monkeypatch):
    class Properties:
        total_memory = 7 * GIB

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    assert total_memory(torch.device("cuda")) == 7 * GIB
    assert total_memory(torch.device("cpu")) is None and total_memory(torch.device("mps")) is None
