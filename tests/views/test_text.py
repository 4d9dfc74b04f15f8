"""Curves and tables made of text, drawn by hand."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.text import Text

from rlhf_lab.views import sample_table, sparkline
from rlhf_lab.views.text import reward_color

ORANGE, BLUE = "rgb(213,94,0)", "rgb(0,114,178)"


def test_eight_even_steps_use_the_eight_bars():
    assert sparkline([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]) == "▁▂▃▄▅▆▇█"


def test_heights_are_relative_to_minimum_and_maximum():
    """Shares 0, 1/4, 1 of 7 steps: 0, 1.75, 7."""
    assert sparkline([-2.0, 0.0, 6.0]) == "▁▃█"


def test_a_constant_series_is_a_flat_line():
    assert sparkline([0.3, 0.3, 0.3]) == "▁▁▁"


def test_a_single_value_is_one_bar_and_none_is_nothing():
    assert sparkline([5.0]) == "▁"
    assert sparkline([]) == ""


def test_only_the_last_values_that_fit_are_drawn_on_their_own_scale():
    assert sparkline([100.0, 0.0, 7.0], width=2) == "▁█"
    assert len(sparkline([float(n) for n in range(100)])) == 40


def test_drawing_leaves_the_series_alone():
    values = [3.0, 1.0, 2.0]
    sparkline(values, width=2)
    assert values == [3.0, 1.0, 2.0]


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60))
def test_one_bar_per_value_lowest_at_the_minimum_highest_at_the_maximum(values):
    drawn, shown = sparkline(values), values[-40:]
    assert len(drawn) == len(shown)
    assert drawn[shown.index(min(shown))] == "▁"
    if max(shown) > min(shown):
        assert drawn[shown.index(max(shown))] == "█"


def test_colors_run_from_orange_to_blue_and_stay_there():
    assert reward_color(0.0, 0.0, 1.0) == ORANGE
    assert reward_color(1.0, 0.0, 1.0) == BLUE
    assert reward_color(-5.0, 0.0, 1.0) == ORANGE
    assert reward_color(5.0, 0.0, 1.0) == BLUE


def test_the_color_in_the_middle_is_the_average():
    """(213 + 0) / 2 = 106.5 -> 106 (to even), (94 + 114) / 2 = 104, 178 / 2 = 89."""
    assert reward_color(0.5, 0.0, 1.0) == "rgb(106,104,89)"
    assert reward_color(0.7, 0.7, 0.7) == "rgb(106,104,89)"


def test_rewards_that_print_alike_are_colored_alike():
    assert {reward_color(r, 0.9996, 0.9999) for r in (0.9996, 0.9999)} == {"rgb(106,104,89)"}
    assert reward_color(0.999, 0.999, 1.0) == ORANGE


def cells(table) -> list[list[Text]]:
    return [list(column.cells) for column in table.columns]


def test_rewards_are_colored_by_their_place_among_the_rewards_shown():
    rewards, samples = cells(sample_table(["bad", "good"], [0.25, 0.75]))
    assert [text.plain for text in rewards] == ["0.250", "0.750"]
    assert [text.style for text in rewards] == [f"bold {ORANGE}", f"bold {BLUE}"]
    assert [text.plain for text in samples] == ["bad", "good"]


def test_the_prompt_is_dimmed_and_nothing_else():
    _, samples = cells(sample_table(["this movie is", "other"], [0.0, 1.0], "this movie"))
    assert [(span.start, span.end, span.style) for span in samples[0].spans] == [(0, 10, "dim")]
    assert samples[1].spans == []


def test_line_breaks_and_markup_of_a_text_are_shown_as_text():
    out = io.StringIO()
    table = sample_table(["a\n[bold]b[/bold] [/red]"], [0.5])
    Console(file=out, width=60, no_color=True).print(table)
    assert "a [bold]b[/bold] [/red]" in out.getvalue()


def test_no_samples_give_an_empty_table():
    assert sample_table([], []).row_count == 0


def test_token_ids_have_a_column_of_their_own():
    _, samples, ids = cells(sample_table(["bad", "good"], [0.25, 0.75], tokens=[[0, 7], [0, 12]]))
    assert [text.plain for text in samples] == ["bad", "good"]
    assert [text.plain for text in ids] == ["0 7", "0 12"]
    with pytest.raises(ValueError):
        sample_table(["a", "b"], [0.1, 0.2], tokens=[[1]])


def test_a_reward_too_few_is_an_error():
    with pytest.raises(ValueError):
        sample_table(["a", "b"], [0.1])
