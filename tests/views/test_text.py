"""Sparklines and tables of samples, compared with hand-computed ones."""

import io

import pytest
from rich.console import Console
from rich.text import Text

from rlhf_lab.views import sample_table, sparkline
from rlhf_lab.views.live import reward_color

ORANGE, MIDDLE, BLUE = "rgb(213,94,0)", "rgb(106,104,89)", "rgb(0,114,178)"


@pytest.mark.parametrize(
    ("values", "width", "bars"),
    [
        ([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], 40, "▁▂▃▄▅▆▇█"),
        ([-2.0, 0.0, 6.0], 40, "▁▃█"),  # 0, 1/4 and 1 of 7 steps
        ([0.3, 0.3, 0.3], 40, "▁▁▁"),
        ([5.0], 40, "▁"),
        ([], 40, ""),
        ([None, float("nan"), 1.0, float("inf"), 2.0], 40, "▁█"),
        ([100.0, 0.0, 7.0], 2, "▁█"),
        ([1e38, -1e38, 0.0], 40, "█▁▅"),
    ],
)
def test_sparkline_matches_hand_drawn(values, width, bars):
    assert sparkline(values, width) == bars


@pytest.mark.parametrize(
    ("value", "low", "high", "color"),
    [
        (0.0, 0.0, 1.0, ORANGE),
        (5.0, 0.0, 1.0, BLUE),
        (-5.0, 0.0, 1.0, ORANGE),
        (0.5, 0.0, 1.0, MIDDLE),
        (0.7, 0.7, 0.7, MIDDLE),
        (0.9996, 0.9996, 0.9999, MIDDLE),  # both print as 1.000
        (0.999, 0.999, 1.0, ORANGE),
    ],
)
def test_reward_color_matches_hand_computed(value, low, high, color):
    assert reward_color(value, low, high) == color


def cells(table) -> list[list[Text]]:
    return [list(column.cells) for column in table.columns]


def test_rewards_are_colored_and_only_the_prompt_is_dimmed():
    rewards, samples = cells(sample_table(["this movie is", "bad"], [0.25, 0.75], "this movie"))
    assert [text.plain for text in rewards] == ["0.250", "0.750"]
    assert [text.style for text in rewards] == [f"bold {ORANGE}", f"bold {BLUE}"]
    assert [text.plain for text in samples] == ["this movie is", "bad"]
    assert [(span.start, span.end, span.style) for span in samples[0].spans] == [(0, 10, "dim")]
    assert samples[1].spans == [] and sample_table([], []).row_count == 0


def test_line_breaks_and_markup_of_a_text_are_shown_as_text():
    out = io.StringIO()
    table = sample_table(["a\n[bold]b[/bold] [/red]"], [0.5])
    Console(file=out, width=60, no_color=True).print(table)
    assert "a [bold]b[/bold] [/red]" in out.getvalue()


def test_token_ids_have_a_column_of_their_own():
    _, samples, ids = cells(sample_table(["bad", "good"], [0.25, 0.75], tokens=[[0, 7], [0, 12]]))
    assert [text.plain for text in samples] == ["bad", "good"]
    assert [text.plain for text in ids] == ["0 7", "0 12"]
    with pytest.raises(ValueError):
        sample_table(["a", "b"], [0.1, 0.2], tokens=[[1]])
    with pytest.raises(ValueError):
        sample_table(["a", "b"], [0.1])
