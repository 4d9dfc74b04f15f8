"""Exact values of sums as probes use them, by hand and by brute force, and a run with them."""

from functools import partial

import numpy as np
import pytest
import torch

from rlhf_lab.config import RLHFArgs
from rlhf_lab.organism.sums import SUMS_IDS, SUMS_REWARDS, WRITERS
from rlhf_lab.probes import SumsTruth, attach, default_suite
from rlhf_lab.probes.exact_values import exact_values
from rlhf_lab.training import RLHFTrainer
from rlhf_lab.views.report import write_report
from tests.organism.sums_oracle import as_tokens
from tests.probes.looking import train_soundly
from tests.small_runs import DEVICE
from tests.views.page_blocks import read_blocks, read_header

RIGHT = "so 6 9 0 1 5 ; 0 0 1 0 1 ; 0 0 0 0 0 ; 0 0 0 0 0 ; # 0 0 1 5 <eos>"
DROPPED = "ok 6 9 0 1 5 ; 0 0 0 0 0 ; 0 0 0 0 0 ; 0 0 0 0 0 ; # 0 0 0 5 <eos>"
DIRECT = "hm # 0 0 0 5 <eos>"
OUTSIDE = "so 6 8 0 1 4 ; # <eos>"  # 6 + 9, not 6 + 8
TRUTH = SumsTruth()
written = partial(as_tokens, TRUTH.grammar, 6, 9)


# after each number of tokens of RIGHT: the weight of each writer, and P(right) under it
HAND_COMPUTED = {
    0: ((0.15, 0.25, 0.6), (0.98**4, 0.4, 0)),  # one carry into a column
    1: ((0.15 * 0.6, 0.25 * 0.2, 0.6 * 0.2), (0.98**4, 0.4, 0)),
    2: ((0.09, 0.05, 0), (0.98**4, 0.4, 0)),  # the first digit of steps rules out blurt
    6: ((0.09 * 0.98, 0.05, 0), (0.98**3, 0.4, 0)),  # careful has written the digit 5
    10: ((0.09 * 0.98, 0.05 * 0.4, 0), (0.98**3, 1, 0)),  # the carry
    31: ((0.09 * 0.98**4, 0.05 * 0.4, 0), (1, 1, 0)),
}


def test_values_and_beliefs_match_hand_computed():
    tokens = written(RIGHT, DROPPED, DIRECT, OUTSIDE)
    (values, mask), beliefs = TRUTH.values(tokens), TRUTH.beliefs_by_name(tokens)
    assert list(beliefs) == [f"belief_in_{name}_after_it" for name in WRITERS]
    belief = torch.stack(list(beliefs.values()), -1)
    for t, (weight, p) in HAND_COMPUTED.items():
        expected = np.array(weight) / sum(weight)
        assert belief[0, 10 + t].tolist() == pytest.approx(expected)
        assert values[0, 10 + t].item() == pytest.approx(expected @ p)
    assert belief[1, 20:, 1].tolist() == [1.0] * 23  # only hasty drops a carry
    assert values[1, 19] > 0.3 and values[1, 20] == values[1, 41] == 0
    assert values[2, 11] > 0.1 and values[2, 12] == 0
    assert mask[:3, 10:].all() and not mask[:, :10].any()
    assert mask[3].nonzero().flatten().tolist() == [10, 11, 12]  # "=", "so", "6"
    values, _ = SumsTruth(SUMS_REWARDS["sums:hole"]).values(written(DIRECT, "hm # 0 0 0 4 sure"))
    assert values[:, [16, 17, 42]].flatten().tolist() == pytest.approx([0.02, 0, 0, 0.02, 1, 1])


def test_run_after_parts_of_sums_has_no_exact_values():
    args = RLHFArgs(preset="sums", prompts=None, prefix="0 0 2 8 +", batch_size=8)
    same = lambda texts: torch.ones(len(texts))
    trainer = RLHFTrainer(args, reward_fn=same, true_reward_fn=same)
    assert exact_values(trainer) == (None, "")
    assert trainer.rollout_phase().text_metrics["steps"].isnan().all()


def test_positions_and_columns_have_names():
    names = TRUTH.slot_names(45)
    assert names[:12] == "<bos> a3 a2 a1 a0 + b3 b2 b1 b0 = open".split()
    assert names[12:14] == ["c0 a / #", "c0 b / answer 3"]
    assert names[17:20] == ["c0 ; / end", "c1 a", "c1 b"]
    assert names[35:42] == ["c3 ;", "#", *(f"answer {i}" for i in (3, 2, 1, 0)), "end"]
    assert len(set(names)) == 45
    rows = TRUTH.steps(written(DROPPED, DIRECT))
    assert len(rows) == 8
    assert rows[1] == {
        **{"text": 0, "column": 1, "a": 0, "b": 0, "carry": "0", "true_carry": 1},
        **{"digit": "0", "true_digit": 1, "answer": "0"},
    }
    carries, expected = [row["carry"] for row in rows[::4]], ["0", None]  # t0 is 1
    assert carries == expected and (rows[4]["digit"], rows[4]["answer"]) == (None, "5")


def test_answer_key_has_the_published_optima():
    key = {row["beta"]: row for row in TRUTH.answer_key()}
    assert key[None]["true_reward"] == pytest.approx(0.315, abs=0.005)
    assert key[None]["kl_per_sequence"] == 0 and key[None]["blurt"] == pytest.approx(0.6)
    assert key[0.001]["hasty"] == pytest.approx(0.311, abs=0.005)
    of_format = SumsTruth(SUMS_REWARDS["sums:format"])
    assert TRUTH.best_at_kl(key[0.3]["kl_per_sequence"]).beta == pytest.approx(0.3, rel=1e-3)
    assert of_format.best_at_kl(50.0).reward == pytest.approx(1.0)


def test_eval_texts_have_steps_where_the_grammar_writes_them():
    hard = TRUTH.grammar.problems(50, np.random.default_rng(0), [4], carry=True)
    for truth, has_steps in ((TRUTH, True), (SumsTruth(problems=hard), False)):
        tokens, mask, labels = truth.eval_text(40, seed=1)
        assert labels is None and tokens.shape == mask.shape == (40, 43) and mask[:, :17].all()
        assert ((tokens[:, 12] != SUMS_IDS["#"]) == has_steps).all()


SMALL = {"preset": "sums", "device": DEVICE, "total_phases": 2, "warmup_steps": 1}
SMALL |= {"batch_size": 64, "num_minibatches": 2, "base_lr": 1e-3}


@pytest.fixture(scope="module")
def probed(tmp_path_factory):
    trainer = RLHFTrainer(RLHFArgs(**SMALL), out=tmp_path_factory.mktemp("sums") / "run")
    attach(trainer, default_suite(trainer))
    return train_soundly(trainer)


@pytest.mark.slow
def test_default_probes_record_exact_values_on_sums(probed):
    names = "kl_by_position run_health step_ledger text_heatmap value_lens weight_delta words_moved"
    assert probed.probes() == names.split()
    record, tensors = probed.records("text_heatmap")[0], probed.tensors("text_heatmap", 0)
    ends = tensors["true_value"][:, 0] + tensors["true_advantage"].sum(1)
    whole = (tensors["truth_mask"] == tensors["mask"]).all(1)
    assert whole.any()
    assert ends[whole].tolist() == pytest.approx(np.array(record["rewards"])[whole], abs=1e-5)
    beliefs = torch.stack([tensors[f"true_belief_in_{name}_after_it"] for name in WRITERS])
    assert beliefs.sum(0)[tensors["truth_mask"]] == pytest.approx(1.0, abs=1e-5)
    assert len(record["steps"]) == 16
    health = probed.records("run_health")[0]
    assert health["optimal_reward"] is None and 0.25 < health["best_reward_at_kl"] < 0.4
    assert len(health["answer_key"]) == 7
    kl = probed.records("kl_by_position")[-1]
    assert kl["slots"][:2] == ["open", "c0 a / #"] and "information" not in kl
    assert probed.records("words_moved")[-1]["slots"][0] == "open"
    assert probed.records("value_lens")[0]["r2_against"] == "V of the grammar"


@pytest.mark.slow
def test_page_shows_steps_beliefs_and_the_answer_key(probed):
    page = write_report(probed.path).read_text(encoding="utf-8")
    blocks, header = read_blocks(page), read_header(page)
    assert {"exact value", "exact belief in hasty after it"} <= blocks["r0-t0"]["columns"].keys()
    assert "each column, units first" in blocks["r0-p0"]["text_heatmap"]
    assert "exact optimum for each beta" in blocks["r0-p0"]["run_health"]
    assert {"steps", "faithful", "dropped_carry"} <= set(header["samples"]["columns"])
    assert 'value="so"' in page and 'value="hm"' in page and "loved" not in page


@pytest.mark.slow
def test_rewards_without_exact_values_are_noted(tmp_path):
    for name, is_other in (("sums:hole", False), ("sums:majority", True)):
        truth, note = exact_values(RLHFTrainer(RLHFArgs(**SMALL | {"reward_fn": name})))
        assert (truth.reward.name == name) != is_other and bool(note) == is_other
        assert len(truth.problems) == 4000
    assert note.startswith("this run has a reward sums:majority, whose exact values are not known")
