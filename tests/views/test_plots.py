import ast
import re
from pathlib import Path

import pytest
import torch

from rlhf_lab.files import PAGE_MARK
from rlhf_lab.views import plots
from rlhf_lab.views.picture import Picture
from rlhf_lab.views.plots import bars, curves, heatmap, heatmaps

HEAT = ([[0.0, None], [1.0, 2.0]], ["a", "b"], ["x", "y"], "grid")


def draw_all():
    return (
        curves({"a": ([0, 1, 2], [1.0, None, 2.0]), "b": ([0, 1], [0.0, 1.0])}, "two curves"),
        bars(["x", "y"], {"a": [1.0, -2.0], "b": [0.5, 0.5]}, "bars"),
        heatmap(*HEAT),
        heatmap(torch.tensor([[-1.0, 3.0]]), ["a"], ["x", "y"], "signed", kind="diverging"),
        heatmaps({"one": [[0, 1]], "two": [[2, 3]], "three": [[1, 0]]}, ["a"], ["x", "y"], "3", 2),
    )


@pytest.mark.slow
def test_drawings_repeat_byte_for_byte_and_refer_to_nothing_outside():
    for one, again in zip(draw_all(), draw_all(), strict=True):
        assert one.svg == again.svg
        links = re.findall(r'(?:href|src)="([^"#][^"]*)"', one.svg)
        assert all(link.startswith("data:") for link in links)
        assert one.html().startswith("<img alt=")


@pytest.mark.slow
def test_a_picture_says_in_words_what_it_shows():
    assert draw_all()[0].alt == "two curves: a, b over phase"


@pytest.mark.slow
@pytest.mark.parametrize(
    "x, has_fractions", [([0, 1], False), ([0, 1, 2], False), ([0.0, 1.0], True)]
)
def test_phases_have_no_fractional_ticks(monkeypatch, x, has_fractions):
    seen = []
    finish = plots.finish
    monkeypatch.setattr(
        plots, "finish", lambda figure, alt: seen.append(figure) or finish(figure, alt)
    )
    curves({"a": (x, [1.0] * len(x))}, "one curve")
    (figure,) = seen
    ticks = figure.axes[0].get_xticks().tolist()
    assert len(ticks) >= 2
    assert any(tick != round(tick) for tick in ticks) == has_fractions


@pytest.mark.slow
def test_a_logarithmic_axis_has_equal_steps_for_equal_factors_and_names_its_places(monkeypatch):
    seen = []
    finish = plots.finish
    monkeypatch.setattr(
        plots, "finish", lambda figure, alt: seen.append(figure.axes[0]) or finish(figure, alt)
    )
    curves({"a": ([64, 256, 1024], [0.1, 0.2, 0.3])}, "batch sizes", log_x=True)
    (axes,) = seen
    across = axes.transData.transform([[64, 0.1], [256, 0.1], [1024, 0.1]])[:, 0]
    assert across[1] - across[0] == pytest.approx(across[2] - across[1])
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["64", "256", "1,024"]


@pytest.mark.slow
def test_a_picture_is_saved_as_it_is(tmp_path):
    picture = draw_all()[1]
    assert picture.save(tmp_path / "p.svg").read_text(encoding="utf-8") == picture.svg + PAGE_MARK


def test_a_drawing_can_be_had_in_pixels():
    image = curves({"a": ([0, 1], [1.0, 2.0])}, "rising").image(dots_per_inch=100)
    assert image.size == (640, 320) and image.format == "PNG"
    assert len(set(image.convert("L").tobytes())) > 20
    with pytest.raises(ValueError, match="SVG alone"):
        Picture("<svg/>", "nothing").image()


def test_what_cannot_be_drawn_is_refused():
    with pytest.raises(ValueError, match="series is empty"):
        curves({}, "nothing")
    with pytest.raises(ValueError, match="'a' has 1 values for 2 names"):
        bars(["x", "y"], {"a": [1.0]}, "bars")
    with pytest.raises(ValueError, match="x is 0 on a logarithmic axis"):
        curves({"a": ([0, 1], [1.0, 2.0])}, "from nothing", log_x=True)
    with pytest.raises(ValueError, match="grids is empty"):
        heatmaps({}, ["a"], ["x"], "nothing")


def test_wider_cells_of_grids_bear_larger_labels_that_do_not_touch(monkeypatch):
    seen, words = [], [f"word {i}" for i in range(30)]
    finish = plots.finish
    monkeypatch.setattr(
        plots, "finish", lambda figure, alt: seen.append(figure) or finish(figure, alt)
    )
    for cell in (0.075, 0.15):
        heatmaps({"one": [[0] * 30] * 30}, words, words, "wide", cell=cell)
    small, large = (figure.axes[0].get_yticklabels()[0].get_fontsize() for figure in seen)
    assert (small, large) == (4.0, 8.0)
    assert large / 72 < 0.15  # a label is lower than its row, in inches
    assert seen[1].get_size_inches()[0] - seen[0].get_size_inches()[0] == pytest.approx(30 * 0.075)


def test_bands_and_whiskers_stand_where_their_intervals_are(monkeypatch):
    seen = []
    finish = plots.finish
    monkeypatch.setattr(
        plots, "finish", lambda figure, alt: seen.append(figure.axes[0]) or finish(figure, alt)
    )
    curves({"a": ([0, 1], [1.0, 2.0])}, "a curve", bands={"a": ([0.5, None], [1.5, None])})
    bars(["x", "y"], {"a": [1.0, 2.0]}, "bars", whiskers={"a": ([0.5, None], [2.5, None])})
    band, whisker = seen[0].collections[0].get_paths(), seen[1].collections[0].get_paths()
    heights = band[0].vertices[:, 1]
    assert (heights.min(), heights.max()) == (0.5, 1.5)
    assert whisker[0].vertices.tolist() == [[0.0, 0.5], [0.0, 2.5]]
    for wrong in ({"b": ([1.0], [2.0])}, {"a": ([1.0], [2.0, 3.0])}):
        with pytest.raises(ValueError, match="give one of each per value"):
            bars(["x", "y"], {"a": [1.0, 2.0]}, "bars", whiskers=wrong)


def test_the_plotting_library_is_loaded_only_when_something_is_drawn():
    for path in Path(plots.__file__).parent.glob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            imported = getattr(node, "module", None) or ""
            names = [alias.name for alias in getattr(node, "names", [])]
            assert not any(name.startswith("matplotlib") for name in [imported, *names])


@pytest.mark.slow
def test_a_long_title_stays_on_the_drawing_and_a_legend_off_the_bars():
    title = (
        "Reward and true reward of each run, as a fraction of the best (lines: lowest to highest)"
    )
    names = ["a name that is turned", "another"]
    drawn = [
        curves({"a": ([0, 1], [1.0, 2.0])}, title),
        bars(names, {"one": [1.0, 2.0], "two": [2.0, 1.0]}, title),
        heatmap([[0.0, 1.0]], ["a"], ["x", "y"], title),
        heatmaps({"one": [[0.0, 1.0]]}, ["a"], ["x", "y"], title),
    ]
    for picture in drawn:
        figure = picture._figure
        texts = [axes.title for axes in figure.axes] + [figure._suptitle] * bool(figure._suptitle)
        for text in texts:
            box = text.get_window_extent()
            assert box.x0 >= 0 and box.x1 <= figure.bbox.x1
    axes, (legend,) = drawn[1]._figure.axes[0], drawn[1]._figure.legends
    assert legend.get_window_extent().y1 <= axes.get_window_extent().y0
    turned = [label.get_rotation() for label in axes.get_xticklabels()]
    upright = [label.get_rotation() for label in drawn[2]._figure.axes[0].get_xticklabels()]
    assert (turned, upright) == ([60.0] * 2, [0.0] * 2)
