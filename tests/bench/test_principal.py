"""Tables of shares in leading directions: means and ranges over seeds, heads counted together."""

from benchmarks.principal import principal_table


def test_lines_by_hand():
    """Two seeds of one matrix, and of two heads that are one line: 3 of their 4 above all draws."""
    row = lambda share, chance, high: {"share": share, "chance": chance, "high": high}
    seeds = [
        {"W": row(0.2, 0.1, 0.15), "L0H0 OV": row(0.3, 0.1, 0.2), "L0H1 OV": row(0.5, 0.1, 0.2)},
        {"W": row(0.4, 0.1, 0.15), "L0H0 OV": row(0.1, 0.1, 0.2), "L0H1 OV": row(0.7, 0.1, 0.2)},
    ]
    head, matrix, heads = principal_table(seeds)
    assert len(head) == len(matrix) == len(heads)
    assert matrix == ["W", "0.300 (0.200 to 0.400)", "0.100", "3.0 (2.0 to 4.0)", "2 of 2"]
    assert heads == [
        "L0 heads, OV",
        "0.400 (0.100 to 0.700)",
        "0.100",
        "4.0 (1.0 to 7.0)",
        "3 of 4",
    ]
