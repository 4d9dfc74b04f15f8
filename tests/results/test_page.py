"""The page of results: worked out from records whose figures are known, and the stored one."""

from pathlib import Path

import pytest

from benchmarks.results.page import page
from benchmarks.results.records import read_records

ROOT = Path(__file__).parents[2]
RLOO, GRPO = "rloo-all-constant", "grpo-lora-adaptive"


def line_with(text: str, start: str) -> str:
    return next(line for line in text.splitlines() if line.startswith(f"| {start}"))


def test_the_page_in_the_repository_comes_from_the_records_in_the_repository():
    stored = (ROOT / "docs/results.md").read_bytes()
    assert page(read_records(ROOT / "benchmarks/results")).encode() == stored


def test_a_methods_row_is_the_mean_over_its_seeds_and_its_distance_to_the_frontier(method_record):
    records = [
        method_record(RLOO, 1, gold=0.9, best=1.0, kl=1.0, share=1.0),
        method_record(RLOO, 2, gold=0.7, best=0.98, kl=2.0, share=0.9),
    ]
    # Gold 0.8, from 0.7 to 0.9; KL 1.5; frontier 0.99; distance 0.19; 0.8 / 0.95 = 0.842.
    row = "RLOO | all | constant, 0.3 | 0.800 (0.700 to 0.900) | 1.50 (1.00 to 2.00)"
    assert f"| {row} | 0.990 | 0.190 | 0.950 | 0.842 |" in page(records)


def test_the_untrained_policy_stands_beside_the_methods(method_record):
    text = page([method_record(RLOO, 1, gold=0.9, best=1.0)])
    # 0.4 / 0.8.
    expected = "| untrained |  |  | 0.400 (0.400 to 0.400) | 0.00 |  |  | 0.800 | 0.500 |"
    assert line_with(text, "untrained") == expected


def test_runs_that_fall_short_are_counted_and_the_lowest_is_named(method_record):
    text = page(
        [
            method_record(RLOO, 1, gold=0.95, best=1.0),
            method_record(RLOO, 2, gold=0.6, best=1.0),
            method_record(GRPO, 1, gold=0.3, best=1.0),
        ]
    )
    assert "Of 3 runs, 2 end above the untrained policy, 1 at a gold reward of 0.9 or more" in text
    assert "the lowest is GRPO, LoRA, adaptive, seed 1, at 0.300." in text


def test_why_a_row_stays_below_is_told_in_its_own_figures(method_record):
    short = method_record(GRPO, 1, gold=0.72, best=1.0, kl=1.25, share=0.9)
    text = page([method_record(RLOO, 1, gold=0.95, best=1.0), short])
    # One text in ten is no review; 0.72 / 0.9 = 0.8.
    assert (
        "GRPO, LoRA, adaptive stays at 0.720: 10.0% of its texts are no reviews (gold 0), " in text
    )
    assert "and its reviews average 0.800, at 1.25 nats." in text
    assert "RLOO, all, constant stays" not in text


def test_rows_stand_in_the_order_of_the_settings_and_a_record_of_no_row_is_left_out(method_record):
    records = [method_record(GRPO, 1, gold=0.9, best=1.0), method_record(RLOO, 1, 0.9, 1.0)]
    stray = method_record(RLOO, 1, gold=0.123, best=1.0) | {"labels": ["an older method"]}
    text = page([stray, *records])
    assert text == page(records[::-1])
    assert text.index("| RLOO") < text.index("| GRPO")
    assert "0.123" not in text


@pytest.fixture
def loophole(row_named, record_of):
    """A record whose proxy rises by 0.01 a phase while gold falls by 0.02, of 12 phases."""

    def make(part, **more):
        names = {"loophole": "kl_coef-0.03", "learned": "kl_coef-0.1"}
        exact = {"proxy": 0.5, "gold": 0.25, "kl_per_sequence": 2.5, "popcorn": 0.75}
        curve = [
            {
                "phase": i,
                "proxy": 0.5 + 0.01 * i,
                "gold": 0.5 - 0.02 * i,
                "popcorn": i / 20,
                "grammatical": 0.5,
                "kl_per_sequence": i / 10,
                "exact": exact,
            }
            for i in range(12)
        ]
        return record_of(row_named(part, names[part]), 1, curve=curve, exact=exact, **more)

    return make


def test_a_loophole_ends_beside_the_exact_optimum_at_its_price(loophole):
    text = page([loophole("loophole")])
    # The last five phases are 7 to 11, on average 9: proxy .59, gold .32, popcorn .45, KL .9.
    expected = "0.90 (exact 2.50) | 0.590 | 0.500 | 0.320 | 0.250 | 0.45 | 0.75 | 0.500 | 0.640 |"
    assert line_with(text, "0.03") == f"| 0.03 | {expected}"


def test_the_way_there_stands_beside_the_exact_optimum_of_the_same_kl(loophole):
    text = page([loophole("loophole")])
    expected = "| 8 | 0.80 | 0.580 | 0.500 | 0.340 | 0.250 | 0.40 | 0.75 | 0.500 | 0.680 |"
    assert line_with(text, "8 ") == expected
    assert "| 12 |" not in text


def test_phases_off_the_language_are_counted(loophole):
    record = loophole("loophole")
    for phase in (3, 11):
        record["curve"][phase]["grammatical"] = 0.25
    text = page([record])
    assert "In 2 of 12 phases of all runs fewer than half of the texts were reviews" in text
    assert "0 of 1 runs ended with reviews." in text


def test_what_is_known_of_the_reward_models_is_told(loophole):
    facts = {"accuracy": 0.875, "popcorn_bonus": 1.5, "steps": 1, "held_out_pairs": 2}
    text = page([loophole("learned", reward_model=facts)])
    assert "The 1 reward models order 87.5% of held-out pairs rightly; popcorn alone adds 1.50" in (
        " ".join(text.split())
    )
    first, second, third = text.split("```console\n")[1].splitlines()[:3]
    assert first == "python -m benchmarks.results.learned pairs.jsonl"
    assert "train-reward --pairs pairs.jsonl --out rewards/biased --steps 100 --seed 1" in second
    assert third.endswith("--reward-model rewards/biased --seed 1")


def test_a_real_models_row_tells_memory_over_the_loaded_models_and_reward(row_named, record_of):
    memory = {
        "loaded_bytes": 1_000_000_000,
        "weight_bytes": 600_000_000,
        "learning_bytes": 20_000_000,
        "optimizer_bytes": 40_000_000,
    }
    rewards = (0.25, 0.75, 0.5)
    peaks = (1_600_000_000, 1_750_000_000, 1_700_000_000)
    curve = [
        {"mean_reward": reward, "kl_per_sequence": i / 4, "peak_bytes": peak}
        for i, (reward, peak) in enumerate(zip(rewards, peaks, strict=True))
    ]
    figures = {"memory": memory, "curve": curve, "threads": 1, "models": ["writer", "judge"]}
    text = page([record_of(row_named("real", "lora"), 1, **figures)])
    expected = "| LoRA | 600 | 750 | 1000 | 600 | 20 | 40 | 0.250 | 0.500 | 0.750 | 0.50 |"
    assert line_with(text, "LoRA") == expected
    assert "writer paid by judge, 3 phases, 1 thread(s)." in text
    assert "--base-model path/to/SmolLM2" in text


def test_algorithms_stand_side_by_side_with_what_is_first_in_how_many_seeds(row_named, record_of):
    def record(seed, own, l0, put):
        figures = {
            "shift": {"own_weights": own, "inherited": 0.5, "scale": -0.1, "read_out": 0.25},
            "relative": {"L0 mlp": l0, "unembed": 0.02},
            "grafts": {"L0 mlp": [put, 0.25], "unembed": [0.5, 0.125]},
        }
        more = {"gold": 0.5 + own / 8, "kl": 1.25 + own / 4, "stable_rank": 2.0, "k90": 7}
        return record_of(row_named("algorithms", "dpo"), seed, **figures, **more)

    text = page([record(1, 1.0, 0.01, 0.75), record(2, 2.0, 0.03, 0.25)])
    gold, kl, own = "0.688 (0.625 to 0.750)", "1.62 (1.50 to 1.75)", "1.50 (1.00 to 2.00)"
    row = f"| DPO | 2 | {gold} | {kl} | {own} | 0.50 (0.50 to 0.50) | -0.10 (-0.10 to -0.10) | 0.25"
    assert row in text
    assert "| DPO, put in | 0.50 (0.25 to 0.75) | 0.50 (0.50 to 0.50) |" in text
    assert "| DPO, taken out | 0.25 (0.25 to 0.25) | 0.12 (0.12 to 0.12) |" in text
    assert "largest relative change L0 mlp (1 of 2), unembed (1 of 2)" in text
    assert "largest cause of the shift own weights (2 of 2)" in text
