"""The README's figure: each tile has its number, and a run's numbers are drawn."""

import re

import torch

from tools.first_look import Row, figure


def test_figure_has_each_number_in_the_tile_of_its_token():
    words = ["this", "movie", *"abcdefgh"]
    values = torch.arange(8) / 8 - 0.3
    first = Row("KL to the reference", "phase 0", values.abs(), "")
    svg = figure(words, 0.5, [first, Row("advantage", "p", values, "")])
    found = re.findall(r"<title>([^<]*): (-?[\d.]+)</title>", svg)
    titles = [f"{word}, KL to the reference, phase 0" for word in "abcdefgh"]
    titles += [f"{word}, advantage, p" for word in "abcdefgh"]
    assert [title for title, _ in found] == titles
    numbers = torch.tensor([float(number) for _, number in found])
    torch.testing.assert_close(numbers, torch.cat([values.abs(), values]), atol=6e-4, rtol=0)
