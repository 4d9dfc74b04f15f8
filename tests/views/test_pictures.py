import math
import re
import xml.etree.ElementTree as ElementTree
from itertools import pairwise

import pytest
import torch

from rlhf_lab import views
from rlhf_lab.views.dots import seed_dots
from rlhf_lab.views.marks import (
    COLOR_OF_NAME,
    N_COLORS,
    SVG_STYLE,
    series_colors,
    text_width,
    ticks,
)
from rlhf_lab.views.plots import bars, curves, default_limits, heatmap, heatmaps
from rlhf_lab.views.tokens import quantile_limit

SVG = "{http://www.w3.org/2000/svg}"
LONG = "blocks.11.attn.hook_result of a component with a long name"
TWO = {"reward": ([0, 1, 2], [1.0, None, 2.0]), "b": ([0, 1], [0.125, 1.0])}


def titles(picture):
    return [x.text for x in ElementTree.fromstring(picture.svg).iter(SVG + "title")]


def marks(picture, tag):
    """Attributes of the marks of a kind, in the order of their titles."""
    groups = ElementTree.fromstring(picture.svg).iter(SVG + "g")
    found = [g.find(SVG + tag) for g in groups if g.find(SVG + "title") is not None]
    return [mark.attrib for mark in found if mark is not None]


def draw_all(title="t", name=LONG):
    return (
        curves({name: ([0, 1], [1.0, 2.0]), "b": ([0], [1.0])}, title),
        bars(["x", name], {name: [1.0, -2.0], "b": [0.5, 0.5]}, title, "nats"),
        heatmap([[0.0, None], [1.0, 2.0]], ["a", name], ["x", name], title),
        heatmap(torch.tensor([[-1.0, 3.0]]), ["a"], [name, "y"], title, kind="diverging"),
        heatmaps({name: [[0, 1]], "b": [[2, 3]], "c": [[1, None]]}, [name], [name, "y"], title, 2),
        views.loop_diagram(),
    )


def test_drawings_repeat_and_refer_to_nothing_outside():
    for one, again in zip(draw_all(), draw_all(), strict=True):
        assert one.svg == again.svg and "url(" not in one.svg and "href" not in one.svg
        bundle = one._repr_mimebundle_()
        assert bundle["image/svg+xml"] == one.svg and bundle["text/plain"] == one.alt
        assert bundle["text/html"].startswith("<img alt=")
        assert "<style>" not in one.fragment


def test_marks_carry_label_value_and_interval():
    ends = {"a": ([0.5, None], [1.5, None])}
    drawn = bars(["x", "y"], {"a": [1.0, -2.123456789]}, "t", whiskers=ends)
    assert titles(drawn) == ["x: 1 [0.5, 1.5]", "y: -2.12345679"]
    drawn = curves(TWO, "t", bands={"b": ([0.1, 0.9], [0.2, 1.25])})
    expected = ["b, phase 0: 0.125 [0.1, 0.2]", "b, phase 1: 1 [0.9, 1.25]"]
    assert titles(drawn)[2:] == expected
    (outline,) = re.findall(r'class="band[^"]*" points="([^"]*)"', drawn.svg)
    x = [point.split(",")[0] for point in outline.split()]  # there and back
    assert x[0] == x[3] != x[1] == x[2]
    drawn = heatmap([[0.0, None], [1.0, 9.0]], ["a", "b"], ["x", "y"], "t", limits=(0, 2))
    assert titles(drawn) == ["a, x: 0", "b, x: 1", "b, y: 9, beyond the scale"]
    assert titles(heatmap([[5, 6]], ["a"], ["all"], "t")) == ["a, 0: 5", "a, 1: 6"]
    pytest.raises(ValueError, heatmap, [[5, 6]], ["a", "without values"], ["all"], "t")
    assert heatmap([[5, 6]], ["a"], ["all"], "t").alt == "t: 1 rows, 2 columns"
    drawn = heatmaps({"one": [[0, 1]], "two": [[2, 3]]}, ["a"], ["x", "y"], "t", limits=(0, 9))
    assert titles(drawn) == ["a, x: 0", "a, y: 1", "a, x: 2", "a, y: 3"]
    assert drawn.svg.count(">9<") == 1


@pytest.mark.parametrize(
    "kind, limits, colors",
    [
        ("sequential", (0, 2), [("deep far", 0.06), ("deep", 0.06), ("deep", 0.53), ("deep", 1.0)]),
        ("diverging", (-2, 2), [("less", 0.53), ("more", 0.06), ("more", 0.53), ("more", 1.0)]),
    ],
)
def test_cells_are_denser_with_the_distance_from_zero(kind, limits, colors):
    drawn = heatmap([[-1.0, 0.0, 1.0, 2.0]], ["a"], list("wxyz"), "t", kind, limits)
    assert [(x["class"], float(x["fill-opacity"])) for x in marks(drawn, "rect")] == colors


def test_large_grids_are_one_mark_per_color():
    large = heatmap([[0.0] * 30 + [1.0] * 30] * 30, ["r"] * 30, ["c"] * 60, "t")
    paths = [x.attrib["d"] for x in ElementTree.fromstring(large.svg).iter(SVG + "path")]
    assert titles(large) == [] and [d.count("z") for d in paths] == [900, 900]


def test_bars_and_whiskers_match_their_values():
    ends = {"a": ([0.5, -3.0], [2.0, -1.0])}
    picture = bars(["x", "y"], {"a": [1.0, -2.0]}, "t", whiskers=ends)
    one, two = marks(picture, "rect")
    unit, zero = float(one["height"]), float(one["y"]) + float(one["height"])
    assert float(two["height"]) == pytest.approx(2 * unit, abs=0.2)
    assert zero == pytest.approx(float(two["y"]), abs=0.2)
    found = [float(w[y]) for w in marks(picture, "line") for y in ("y1", "y2")]
    assert found == pytest.approx([zero - x * unit for x in (0.5, 2, -3, -1)], abs=0.5)


def test_curves_leave_gaps_and_long_ones_keep_their_extremes():
    lines = ElementTree.fromstring(curves(TWO, "t").svg).iter(SVG + "polyline")
    assert [len(line.attrib["points"].split()) for line in lines] == [1, 1, 2]
    values = [float(i % 100) for i in range(5000)]
    values[1234], values[4321] = 1e4, -1e4
    long = titles(curves({"a": (range(5000), values)}, "t"))
    assert len(long) <= 420
    assert "a, phase 1234: 10000" in long and "a, phase 4321: -10000" in long


@pytest.mark.parametrize(
    "x, has_fractions", [([0, 1], False), ([0, 1, 2], False), ([0.0, 1.0], True)]
)
def test_phases_have_no_fractional_ticks(x, has_fractions):
    svg = curves({"a": (x, [1.0] * len(x))}, "t").svg
    places = [float(w) for w in re.findall(r'"middle">([^<]*)<', svg) if w != "phase"]
    assert len(places) >= 2 and any(x % 1 for x in places) == has_fractions


def placed_texts(node, x=0.0):
    """Texts with their x on the drawing."""
    moved = re.search(r"translate\(([\d.]+)", node.attrib.get("transform", ""))
    x += float(moved[1] if moved else node.attrib.get("x", 0))
    if node.tag == SVG + "text":
        yield x, node
    for child in node:
        yield from placed_texts(child, x)


def test_labels_stay_on_the_drawing_and_are_whole():
    title = "Reward and true reward of each run, as a fraction of the best (lines: low to high)"
    for picture in draw_all(title)[:-1]:
        root = ElementTree.fromstring(picture.svg)
        nodes = list(placed_texts(root))
        for x, node in nodes:
            words, anchor = "".join(node.itertext()), node.attrib.get("text-anchor")
            if "transform" in node.attrib:
                assert x - 0.5 * 0.9 * text_width(words) >= 0, words
                continue
            x -= {"end": 1.0, "middle": 0.5}.get(anchor, 0.0) * text_width(words)
            assert x >= -1, words
            assert x + 0.9 * text_width(words) <= float(root.attrib["width"]) + 1, words
        whole = " ".join("".join(node.itertext()) for _, node in nodes)
        assert all(word in whole for word in title.split())


def test_labels_next_to_each_other_do_not_overlap():
    svg = curves({"a": (range(123456789, 123456796), [1.0] * 7)}, "t").svg
    found = re.findall(r'<text x="([\d.]+)"[^>]*"middle">(\d+)<', svg)
    ends = [[float(x) + side * text_width(words) / 2 for side in (-1, 1)] for x, words in found]
    assert len(ends) > 2 and all(a[1] < b[0] for a, b in pairwise(ends))
    turned = [bars([name] * 9, {"a": [1.0] * 9}, "t").svg.count("-60)") for name in ("x", LONG[:9])]
    assert turned == [0, 9]


def test_known_quantities_keep_their_color_and_series_differ():
    assert series_colors(["k1, n = 8", "exact", "k2"]) == [1, 0, 2]
    assert series_colors(["a", "reward", "b"]) == [1, 0, 2]
    assert series_colors(["reward", "reward, by hand"]) == [0, 1]
    assert max(COLOR_OF_NAME.values()) < N_COLORS
    assert all(SVG_STYLE.count(f"--c{i}:") == 2 for i in range(N_COLORS))  # light and dark
    assert len(set(series_colors(list("abcdefgh")))) == 8
    for kind in ("fill", "stroke"):
        assert len(set(re.findall(rf"{kind}:var\((--c\d)\)", SVG_STYLE))) == N_COLORS


def test_ticks_quantiles_and_limits_match_hand_computed():
    assert default_limits([-3.0, None, 1.0], "diverging") == (-3.0, 3.0)
    assert default_limits([-1.0, None, 3.0], "sequential") == (-1.0, 3.0)
    assert ticks(0, 1) == {0.0: "0", 0.5: "0.5", 1.0: "1"}
    assert list(ticks(-2, 2)) == [-2, -1, 0, 1, 2] and ticks(-2, 2)[-2] == "−2"
    assert list(ticks(0.101, 0.103)) == pytest.approx([0.101, 0.1015, 0.102, 0.1025, 0.103])
    assert list(ticks(1, 1.000002, 2).values()) == ["1", "1.000001", "1.000002"]
    assert quantile_limit([*range(100), None, float("nan")]) == 99
    assert quantile_limit([1.0] * 200 + [50.0]) == 1.0 and quantile_limit([None]) == 0.0
    assert quantile_limit([0.0] * 200 + [50.0]) == 50.0


def test_hostile_numbers_and_names_give_valid_svg():
    nasty = '"><script>\x00\x1b\u202e'
    values = [float("nan"), float("inf"), 1.0]
    for picture in (
        curves({nasty: ([0, 1, 2], values)}, nasty, nasty, nasty),
        bars([nasty] * 3, {nasty: values}, nasty, whiskers={nasty: (values, values)}),
        curves({"a": (range(3), [1.0] * 3)}, "t", bands={"a": (values, values)}),
        heatmap([values], [nasty], [nasty] * 3, nasty),
    ):
        ElementTree.fromstring(picture.svg)
        assert "<script" not in picture.svg and not re.search('="[^"]*(nan|inf)', picture.svg)


def test_diagrams_match_hand_computed():
    picture = views.gae_diagram([0, 0, 1], [0.5, 0.4, 0.9], 0.5)
    numbers = re.findall(r"(?:δ =|advantage) (-?[\d.]+)", picture.svg)
    assert numbers == ["0.10", "0.100", "0.50", "0.550", "-0.10", "0.175"]
    patch = views.patch_diagram(["one", "other"], [("x", "y")] * 3, 1).svg
    assert patch.count('class="paper s1"') == 1  # of the step after the patched one
    for svg in (picture.svg, patch, views.loop_diagram().svg):
        arrows = re.findall(r'([\d.]+),([\d.]+) ([\d.]+),([\d.]+)".*?rotate\((-?\d+)\)', svg, re.S)
        assert len(arrows) == svg.count("<polygon")
        for *ends, turn in arrows:
            x, y, to_x, to_y = map(float, ends)
            angle = math.degrees(math.atan2(to_y - y, to_x - x))
            assert angle == pytest.approx(float(turn), abs=1)


def test_seed_dots_are_placed_in_proportion_to_their_values():
    picture = seed_dots({"first": (0.25, [0.3, 0.5, 0.2]), "second": (-1.0, [])}, "reward", 2)
    other = "first, 3 runs with other seeds"
    of_run = ["first, this run: 0.25", "second, this run: -1"]
    assert titles(picture) == [*(f"{other}: {x}" for x in (0.3, 0.5, 0.2)), *of_run]
    assert picture.alt == "reward: first 0.25 (others 0.20 to 0.50); second -1.00"
    picture = seed_dots({"a": (0.0, []), "b": (1.0, []), "c": (4.0, [])}, "reward")
    a, b, c = (float(mark["cx"]) for mark in marks(picture, "circle"))
    assert c - a == pytest.approx(4 * (b - a), abs=0.3) and b - a > 50
