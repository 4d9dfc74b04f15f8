"""Runs on several processes, number by number beside the same run in one."""

import json
import math
import os
from typing import Any

import pytest

pytestmark = pytest.mark.process

RUN = """
settings, parts = json.loads({settings!r}), {{}}
{before}
args = RLHFArgs(**({{"preset": "reel", "device": "cpu", "batch_size": 16, "num_minibatches": 2,
                    "gen_len": 26, "total_phases": 2, "base_lr": 3e-3, "warmup_steps": 1}}
                   | settings))
if args.samples_per_prompt > 1:  # prompts of unequal length
    ends = ["", " wow , the", " wow ,", " wow"]
    parts["prompts"] = ["this movie" + end for end in ends]
trainer = RLHFTrainer(args, out=place / "run", **parts)
reports = trainer.train()
tell(reports=[report.to_dict() for report in reports],
     weights=sum(p.double().sum().item() for p in trainer.policy.parameters()))
if trainer.world is not None:
    trainer.world.close()
"""
TIMES = {"seconds", "rollout_seconds", "learning_seconds", "peak_memory_bytes"}
"""What is of a process, and not of the run."""

SETTINGS: dict[str, dict[str, Any]] = {
    "ppo": {},
    "parts": {"micro_batch_size": 2},
    "grpo": {
        "advantages": "grpo",
        "samples_per_prompt": 4,
        "top_k": 8,
        "dynamic_sampling": 2,
        "gen_len": 20,
        "stop_tokens": ".",
    },
    "lora": {"lora_rank": 2, "stop_tokens": ".", "loss_aggregation": "sequence_mean"},
    "critic": {"value_head": "separate", "kl_in": "reward", "kl_estimator": "k1"},
    "adaptive": {
        "kl_controller": "adaptive",
        "reward_scaling": "scale",
        "normalize_reward": False,
        "kl_target": 0.5,
    },
    "target_kl": {"target_kl": 0.0005, "batches_per_learning_phase": 4},
    "remax": {"advantages": "remax", "policy_loss": "gspo", "normalize_reward": False},
}


def run_of(settings: dict[str, Any], before: str = "") -> str:
    return RUN.format(settings=json.dumps(settings), before=before)


def numbers(found: Any, name: str = "") -> dict[str, float]:
    """All numbers of nested objects by their path, times and memory apart."""
    if isinstance(found, dict):
        parts = [numbers(x, f"{name}.{key}") for key, x in found.items() if key not in TIMES]
    elif isinstance(found, list):
        parts = [numbers(x, f"{name}[{i}]") for i, x in enumerate(found)]
    elif isinstance(found, int | float):
        return {} if "per_second" in name else {name: float(found)}
    else:
        return {}
    return {key: x for part in parts for key, x in part.items()}


def furthest(one: Any, other: Any) -> tuple[float, str]:
    """The largest difference of two runs' numbers, relative above 1, and where it is."""
    before, after = numbers(one), numbers(other)
    assert before.keys() == after.keys() and len(before) > 20
    gaps = {k: abs(after[k] - x) / max(1.0, abs(x)) for k, x in before.items()}
    assert not any(map(math.isnan, gaps.values()))
    name = max(gaps, key=gaps.get)
    return gaps[name], name


SLOW = pytest.mark.skipif(not os.environ.get("RLHF_LAB_SLOW"), reason="RLHF_LAB_SLOW is unset")


@pytest.mark.parametrize("n", [2, pytest.param(4, marks=SLOW)])
@pytest.mark.parametrize("name", SETTINGS)
def test_several_processes_are_one_run(ranks, name, n):
    """Every number of every report, and the ranks' weights bit for bit."""
    code = run_of(SETTINGS[name])
    (alone,), several = ranks(1, code), ranks(n, code)
    assert alone.status == 0, alone.error
    for ended in several:
        assert ended.status == 0, ended.error
    gap, where = furthest(alone.told["reports"], several[0].told["reports"])
    assert gap < 2e-5, (gap, where)
    assert len({ended.told["weights"] for ended in several}) == 1


def test_samples_of_four_processes_are_those_of_one(ranks, tmp_path):
    code = run_of({"total_phases": 3})
    (alone,), four = ranks(1, code), ranks(4, code)
    assert [ended.status for ended in (alone, *four)] == [0] * 5, four[0].error
    assert furthest(alone.told["reports"], four[0].told["reports"])[0] < 2e-5
    assert len({ended.told["weights"] for ended in four}) == 1
    lines = [
        [json.loads(line) for line in (tmp_path / of / "run/samples.jsonl").open()]
        for of in ("of-1", "of-4")
    ]
    texts = [[line["text"] for line in each] for each in lines]
    assert texts[0] == texts[1] and len(texts[0]) == 3 * 16 + 16


OWN = """
read = []
def advantages(values, rewards, mask, **known):
    return ((rewards - rewards.mean()) / rewards.std())[:, None] * mask
def reward(texts):
    read.append(len(texts))
    (place / f"read-{rank}.json").write_text(json.dumps(read))
    return torch.tensor([len(set(text.split())) / 26 for text in texts])
parts = {"advantages": advantages, "reward_fn": reward}
"""


def test_a_learners_own_function_of_the_whole_batch_needs_to_know_nothing(ranks, tmp_path):
    """Its mean and std are those of the batch, while the reward reads the texts of its rank."""
    code = run_of({}, OWN)
    (alone,), both = ranks(1, code), ranks(2, code)
    assert [ended.status for ended in (alone, *both)] == [0] * 3, both[0].error + alone.error
    assert furthest(alone.told["reports"], both[0].told["reports"])[0] < 2e-5
    # a phase each, behind what is tried at the start; the main process measures the end by itself
    read = [json.loads((tmp_path / f"of-2/read-{rank}.json").read_text()) for rank in (0, 1)]
    assert read[0][-6:] == [8, 8, 16, 16, 16, 16] and read[1][-2:] == [8, 8]


FAULTS = {
    "gradients are not added up": "World.sum_gradients = lambda *a: None",
    "gradients are averaged": (
        "sum_gradients = World.sum_gradients\n"
        "def averaged(self, policy):\n"
        "    sum_gradients(self, policy)\n"
        "    [p.grad.div_(self.size) for p in policy.parameters()]\n"
        "World.sum_gradients = averaged"
    ),
    "each weighs by its own tokens": (
        "weigh = rlhf_lab.training.optimization._weigh\n"
        "rlhf_lab.training.optimization._weigh = lambda t, part, whole, a: weigh(t, part, part, a)"
    ),
    "noise of each rank's own": (
        "rlhf_lab.training.components.phase_spec = lambda spec, args, phase: spec\n"
        "noise = rlhf_lab.sampling.sampling_noise\n"
        "rlhf_lab.sampling.sampling_noise = lambda n, g, r: noise(n, g, r).roll(rank, 1)"
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_told_by_the_numbers(ranks, name):
    modules = "import rlhf_lab.training.components, rlhf_lab.training.optimization\n"
    before = f"{modules}from rlhf_lab.parallel.world import World\n{FAULTS[name]}"
    settings = {"stop_tokens": ".", "total_phases": 1, "warmup_steps": 0}
    (alone,), both = ranks(1, run_of(settings)), ranks(2, run_of(settings, before))
    assert both[0].status == 0, both[0].error
    assert furthest(alone.told["reports"], both[0].told["reports"])[0] > 1e-3


LOCAL = """
from rlhf_lab.parallel.world import World
torch.distributed.init_process_group("gloo", timeout=__import__("datetime").timedelta(seconds=6))
World.any_rank = lambda self, flag: flag
"""


def test_a_decision_of_one_rank_alone_ends_in_a_sentence_and_does_not_hang(ranks):
    """Rank 1 is asked to stop, and the other is not told of it."""
    stop = (
        "import rlhf_lab.training.trainer as t\n"
        "phase = t.RLHFTrainer.run_phase\n"
        "def stopping(self):\n"
        "    found = phase(self)\n"
        "    self.stop_requested |= rank == 1\n"
        "    return found\n"
        "t.RLHFTrainer.run_phase = stopping\n"
    )
    told = ranks(2, run_of({"total_phases": 4}, stop), "agreed")
    assert [len(ended.told["reports"]) for ended in told] == [1, 1]
    first, second = ranks(2, run_of({"total_phases": 4}, LOCAL + stop), "local")
    assert second.status == 0 and first.status != 0
    assert "LostRankError: process 0 lost another process" in first.error
