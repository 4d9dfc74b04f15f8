"""The README's figure: each tile has its number, and a run's numbers are drawn."""

import re

import pytest
import torch

from rlhf_lab.organism import true_reward
from rlhf_lab.organism.grammar import decode
from rlhf_lab.probes.reel_truth import ReelTruth
from tools.first_look import PREFIX, Row, draw, figure


def tiles(svg: str) -> list[tuple[str, float]]:
    """The title of each tile without its number, and the number."""
    found = re.findall(r"<title>([^<]*): (-?[\d.]+)</title>", svg)
    return [(title, float(number)) for title, number in found]


def test_figure_has_each_number_in_the_tile_of_its_token():
    words = ["this", "movie", *"abcdefgh"]
    values = torch.arange(8) / 8 - 0.3
    rows = [
        Row("KL to the reference", "phase 0", values.abs(), ""),
        Row("advantage", "p", values, ""),
    ]
    found = tiles(figure(words, 0.5, rows))
    titles = [f"{word}, KL to the reference, phase 0" for word in "abcdefgh"]
    titles += [f"{word}, advantage, p" for word in "abcdefgh"]
    assert [title for title, _ in found] == titles
    numbers = torch.tensor([number for _, number in found])
    torch.testing.assert_close(numbers, torch.cat([values.abs(), values]), atol=6e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.nightly
def test_figure_of_a_run_has_its_kl_and_the_exact_advantages(tmp_path):
    draw(tmp_path / "look.svg", phases=1, review=3)
    numbers: dict[str, list[float]] = {}
    for title, number in tiles((tmp_path / "look.svg").read_text(encoding="utf-8")):
        numbers.setdefault(title.split(", ", 1)[1], []).append(number)
    assert set(numbers["KL to the reference, phase 0"]) == {0.0}
    assert sum(numbers["KL to the reference, phase 1"]) > 0.0
    truth = ReelTruth()
    tokens, _ = truth.reviews(64)
    before = truth.values(tokens)[0][3, PREFIX - 1].item()
    (reward,) = true_reward([decode(tokens[3].tolist())])
    gain = sum(numbers["advantage, exact, by the grammar"])
    assert gain == pytest.approx(reward.item() - before, abs=0.02)
