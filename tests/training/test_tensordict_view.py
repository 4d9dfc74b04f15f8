"""A rollout as a TensorDict: torchrl's numbers, with one reward and one end per response."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import tensor

from rlhf_lab.errors import ConfigError
from rlhf_lab.sampling import Samples
from tests.training.recorded_runs import make_rollout

REFERENCE = Path(__file__).parent.parent / "functional" / "reference" / "torchrl.json"


@pytest.fixture(scope="module")
def tensordict() -> Any:
    return pytest.importorskip("tensordict")


@pytest.fixture(scope="module")
def theirs() -> dict[str, Any]:
    case = json.loads(REFERENCE.read_text())["rollout_view"]
    return {name: tensor(x) if isinstance(x, list) else x for name, x in case.items()}


@pytest.fixture(scope="module")
def ours(theirs, tensordict) -> Any:
    """The same rollout, whose prompts are padded on the left here.

    Row 0: prompt 1 2, response 5 and a stop. Row 1: prompt 1 2 3, response 6 7 8 9. Row 2: prompt
    1 2, response 5 6 7 and a stop in the last slot.
    """
    eos = theirs["stop_token"]
    pad = [0]
    tokens = tensor(
        [[*pad, 1, 2, 5, eos, eos, eos], [1, 2, 3, 6, 7, 8, 9], [*pad, 1, 2, 5, 6, 7, eos]]
    )
    prompt_mask = tensor([[0, 1, 1], [1, 1, 1], [0, 1, 1]]).bool()
    mask = tensor([[1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1]]).bool()
    logprobs = theirs["log_probs"].float()
    ref = logprobs - theirs["log_ratio"].float()
    samples = Samples(tokens, prompt_mask, mask, logprobs, values=0 * logprobs, support=None)
    rollout = make_rollout(samples, ref_logprobs=ref, rewards=theirs["scores"].float())
    return rollout.to_tensordict(theirs["kl_coef"], stop_tokens=[eos], pad_token=eos)


KEYS = ["action", "input_ids", "attention_mask", "sample_log_prob"]
NEXT = ["input_ids", "attention_mask", "done", "terminated", "reward", "reward_raw", "reward_kl"]


@pytest.mark.slow
def test_view_matches_torchrl_except_at_the_ends(ours, theirs):
    """torchrl recognizes padding by its token id, which equals the stop token.

    So a stop is not attended to there, a row that stops early has two ends and two rewards, and a
    stop in the last slot is a truncation.
    """
    found = set(ours.keys(include_nested=True, leaves_only=True))
    assert found == {*KEYS, "mask"} | {("next", name) for name in [*NEXT, "truncated"]}
    assert list(ours.batch_size) == theirs["batch_size"].tolist() == [3, 4]
    assert ours.names == [None, "time"]
    pairs = {name: (ours[name], theirs[name]) for name in KEYS}
    after = {f"next {name}": (ours["next", name], theirs[f"next {name}"]) for name in NEXT}
    assert all(a.shape == b.shape for a, b in (pairs | after).values())
    for name in ("action", "input_ids", "next input_ids"):
        assert torch.equal(*(pairs | after)[name]), name
    mask = ours["mask"]
    for a, b in (pairs["sample_log_prob"], after["next reward_kl"], after["next reward"]):
        torch.testing.assert_close(a[mask], b[mask].float(), atol=1e-6, rtol=0)
        assert not a[~mask].any() and b[~mask].all()
    # the stop token of row 0 is at position 3, from step 1 on; that of row 2 at 5, at step 3
    expected = torch.zeros(3, 4, 7).bool()
    expected[0, 1:, 3] = True
    expected[2, 3, 5] = True
    assert torch.equal(torch.ne(*after["next attention_mask"]), expected)
    for name, rows in {
        "done": [[0, 1, 0, 0], [0, 0, 0, 1], [0, 0, 0, 1]],
        "terminated": [[0, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 1]],
        "truncated": [[0, 0, 0, 0], [0, 0, 0, 1], [0, 0, 0, 0]],
        "reward_raw": [[0, 3, 0, 0], [0, 0, 0, 2], [0, 0, 0, 1]],
    }.items():
        assert ours["next", name].squeeze(-1).tolist() == rows, name


def test_ends_and_exact_kl_match_hand_computed(tensordict):
    """An early end with another padding; without reference log-probs, 2.0 - 0.5 * 7."""
    ones, mask = torch.ones(1, 2), tensor([[True, False]])
    samples = Samples(tensor([[4, 9, 0]]), mask[:, :1], mask, -ones, values=ones, support=None)
    rollout = make_rollout(samples, rewards=tensor([2.0]), kl=ones)
    view = rollout.to_tensordict(stop_tokens=[9], pad_token=0)
    assert view["next", "terminated"].flatten().tolist() == [True, False]
    one = torch.ones(1, 1)
    samples = Samples(tensor([[4, 9]]), one.bool(), one.bool(), -one, values=one, support=None)
    rollout = make_rollout(samples, rewards=tensor([2.0]), kl=7 * one)
    view = rollout.to_tensordict(kl_coef=0.5)
    assert view["next", "reward"].item() == -1.5 and view["next", "truncated"].item()
    assert view["input_ids"].tolist() == [[[4, 0]]] and view["action"].tolist() == [[9]]
    assert rollout.to_tensordict()["next", "reward"].item() == 2.0


def test_changing_the_view_keeps_the_rollout(make_trainer, tensordict, monkeypatch):
    rollout = make_trainer().rollout_phase()
    before = rollout.samples.logprobs.clone()
    rollout.to_tensordict()["sample_log_prob"].zero_()
    assert torch.equal(rollout.samples.logprobs, before) and before.any()
    monkeypatch.setitem(sys.modules, "tensordict", None)
    with pytest.raises(ConfigError, match=r"-e .\.\[tensordict\]"):
        rollout.to_tensordict()
