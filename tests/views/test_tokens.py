import re

import torch
from rich.color import ColorTriplet

from rlhf_lab.views.marks import BLUE, NEUTRAL, ORANGE, ink_on, pick_color
from rlhf_lab.views.tokens import color_key, tokens_html, tokens_text

WORDS = ["this", " was", " <b>&", " fine"]


def test_the_scale_ends_and_its_middle():
    assert [pick_color(x, 2.0) for x in (-2, 0, 2)] == [ORANGE, NEUTRAL, BLUE]
    assert pick_color(9.0, 2.0) == BLUE and pick_color(-9.0, 2.0) == ORANGE
    assert pick_color(0.0, 2.0, "sequential") == pick_color(-1.0, 2.0, "sequential") == NEUTRAL
    assert pick_color(1.0, 0.0) == pick_color(float("nan"), 2.0) == NEUTRAL


def test_ink_has_the_higher_contrast():
    black, white = ColorTriplet(0, 0, 0), ColorTriplet(255, 255, 255)
    inks = {118: black, 117: white}  # luminances 0.181 and 0.178
    assert {gray: ink_on(ColorTriplet(gray, gray, gray)) for gray in inks} == inks
    shades = [ColorTriplet(*rgb) for rgb in ((255, 0, 0), (0, 140, 0), (0, 0, 255), (9, 9, 9))]
    assert [ink_on(shade) for shade in shades] == [black, black, white, white]


def test_tooltips_have_the_exact_number_and_words_are_escaped():
    fragment = tokens_html(WORDS, [0.123456789, -2.0, 0.0, 1e-7], "kl").fragment
    titles = ["kl 0.123456789", "kl -2", "kl 0", "kl 1e-07"]
    assert re.findall(r'title="([^"]*)"', fragment) == titles
    assert " &lt;b&gt;&amp;" in fragment and "<b>" not in fragment
    assert tokens_html(["", "a"], [0.0, 1.0]).fragment.count("<span") == 1  # "" is padding
    key = color_key("advantage", 0.5).fragment
    assert "advantage -0.5" in key and "advantage 0.5" in key


def test_masked_tokens_have_no_number_and_do_not_set_the_scale():
    values = torch.tensor([99.0, 1.0, -1.0, torch.nan])
    mask = torch.tensor([False, True, True, True])
    fragment = tokens_html(WORDS, values, "x", mask).fragment
    assert fragment.count("title=") == 3 and "x 99" not in fragment
    assert "#0072b2" in fragment
    unknown = re.findall("<span style=.*?</span>", fragment)[-1]
    assert 'title="x nan"' in unknown and "background" not in unknown and "color" not in unknown


def test_terminal_text_carries_the_same_colors():
    text = tokens_text(WORDS, [1.0, -1.0, 0.0, 0.0], mask=[True, True, True, False])
    assert text.plain == "this was <b>& fine"
    styles = [str(span.style) for span in text.spans]
    assert styles[0] == "rgb(255,255,255) on rgb(0,114,178)"
    assert styles[1] == "rgb(0,0,0) on rgb(213,94,0)"
    assert styles[3] == "dim"
    assert tokens_text(["a\n", "b"], [0.0, 0.0]).plain == "a↵b"
