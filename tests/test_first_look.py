"""The README's figure: each tile has its number, and a run's numbers are drawn."""

import re

import torch

from tools.first_look import Row, figure


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
