"""Fields of RLHFArgs: the first stage of a phase that each changes, and single fields."""

import ast
import dataclasses
from collections.abc import Iterator
from copy import copy
from functools import cache
from itertools import tee
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_lab.commands import ResumeSettings, resume, train
from rlhf_lab.config import RLHFArgs
from rlhf_lab.errors import ConfigError
from rlhf_lab.models import export_adapter, load_model
from rlhf_lab.sampling import SamplingSpec
from rlhf_lab.training import ReplayMemory, RLHFTrainer, objective_terms
from rlhf_lab.training.prompts import phase_spec
from tests.small_runs import SMALL
from tests.training.recorded_runs import move_weights

pytestmark = pytest.mark.usefixtures("no_type_checks")

BASE = SMALL | {"total_phases": 3, "batch_size": 4, "base_lr": 3e-3}
BASE |= {"prefix": "this movie", "stop_at_eos": False, "top_k": None}
HOT = {"temperature": 20.0, "gen_len": 28, "batch_size": 16}  # one response in three has a stop
ENDING = {"stop_at_eos": True, "min_response_length": 20}
RAW = {"normalize_reward": False}
LORA, ADAPTIVE = {"lora_rank": 2}, {"kl_controller": "adaptive"}

# field: changed value, first stage that differs, other settings of both runs
# Fields of rewards, methods and the objective have tests by hand in files of their topic.
CHANGED: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "lora_targets": ("W_O, W_in", "weights", LORA),
    "weight_decay": (0.5, "rates", {}),
    "prepend_bos": (False, "prompts", {}),
    "seed": (2, "samples", {}),
    "precision": ("bf16", "samples", {}),
    "positive_label": ("negative", "rewards", {}),
    "normalize_reward": (False, "rewards", {}),
    "reward_penalty": (-7.0, "rewards", HOT | ENDING | RAW),
    "gamma": (0.5, "credit", {}),
    "gae_lambda": (0.2, "credit", {}),
    "samples_per_prompt": (4, "credit", {"advantages": "rloo", "samples_per_prompt": 2}),
    "num_minibatches": (4, "step", {}),
    "batches_per_learning_phase": (1, "step", {}),
    "max_grad_norm": (0.01, "step", {}),
    "value_head": ("detached", "step", {}),
    "lora_alpha": (64.0, "step", LORA),
    "kl_controller": ("adaptive", "controller", {}),
    "kl_target": (0.01, "controller", ADAPTIVE),
    "kl_horizon": (10, "controller", ADAPTIVE),
}


def stages(settings: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield what each stage of a phase computes, with a reference that is not the policy."""
    reference = move_weights(load_model("reel-nano"))
    trainer = RLHFTrainer(RLHFArgs(**BASE | settings), reference=reference)
    weights = {n: p for n, p in trainer.policy.named_parameters() if p.requires_grad}
    yield "weights", [(name, p.shape, p.dtype) for name, p in weights.items()]
    scales = [trainer.scheduler.lr_lambdas[0](phase) for phase in range(5)]
    decay = trainer.optimizer.param_groups[0]["weight_decay"]
    yield "rates", (scales, trainer.scheduler.base_lrs, decay)
    yield "prompts", trainer.next_prompts()
    rollout = trainer.rollout_phase()
    samples = rollout.samples
    yield "samples", [samples.tokens, samples.mask, samples.logprobs, samples.values]
    yield "rewards", [rollout.rewards]
    yield "credit", [rollout.advantages, rollout.returns]
    minibatch = next(ReplayMemory(rollout, 1, 1).get_minibatches(torch.Generator()))
    shift = torch.arange(minibatch.mask.numel()).cos().reshape(minibatch.mask.shape)
    minibatch = dataclasses.replace(
        minibatch, logprobs=minibatch.logprobs + shift, values=minibatch.values + shift
    )
    terms = objective_terms(trainer.policy, trainer.reference, minibatch, trainer.objective)
    names = ("clipped_surrogate", "value_loss", "entropy_bonus", "kl_penalty")
    yield "objective", [getattr(terms, name) for name in names]
    learned = trainer.learning_phase(rollout)
    yield "step", (learned.unused_minibatches, *map(Tensor.detach, weights.values()))
    yield "controller", trainer.kl_controller.update(1.0, trainer.args.batch_size)


def is_equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(is_equal, a, b))
    return a == b


@pytest.fixture(scope="module")
def find_stages():
    """Yields the stages for some settings, each of which is computed once, when it is needed."""
    compute = cache(lambda settings: tee(stages(ast.literal_eval(settings)), 1)[0])
    return lambda settings: copy(compute(repr(settings)))


@pytest.mark.slow
@pytest.mark.parametrize("field", CHANGED)
def test_field_changes_a_stage_and_none_before_it(find_stages, field):
    value, stage, settings = CHANGED[field]
    pair = (find_stages(changed) for changed in (settings, settings | {field: value}))
    different = (name for (name, a), (_, b) in zip(*pair, strict=True) if not is_equal(a, b))
    assert next(different, None) == stage


@pytest.mark.slow
def test_cpu_tuning_applies_to_commands_only(monkeypatch, tmp_path):
    tuned = []
    monkeypatch.setattr("rlhf_lab.models.cpu_tuning.tune_cpu", tuned.append)
    args = RLHFArgs(**BASE | {"total_phases": 1, "warmup_steps": 0})
    RLHFTrainer(args)
    assert args.cpu_tuning and tuned == []
    train(args, tmp_path / "run", probes=False)
    resume(tmp_path / "run", ResumeSettings(total_phases=2))
    assert len(tuned) == 2


@pytest.mark.slow
def test_adapter_path_continues_an_exported_adapter(tmp_path):
    before = RLHFTrainer(RLHFArgs(**BASE | LORA))
    before.learning_phase(before.rollout_phase())
    export_adapter(before.policy.base_model, "reel-nano", tmp_path / "adapter")
    after = RLHFTrainer(RLHFArgs(**BASE | {"adapter_path": str(tmp_path / "adapter")}))
    trained = {n: w for n, w in after.policy.base_model.named_parameters() if w.requires_grad}
    weights = dict(before.policy.base_model.named_parameters())
    assert trained and all(torch.allclose(w, weights[n], atol=1e-6) for n, w in trained.items())
    assert after.rollout_phase().kl.abs().max() < 1e-6 and not after.starts_as_grammar
    other = {"adapter_path": str(tmp_path / "adapter"), "base_model": "reel-nano-b"}
    with pytest.warns(UserWarning, match="trained on 'reel-nano', not on base_model='reel-nano-b'"):
        RLHFTrainer(RLHFArgs(**BASE | other))


def test_gen_len_min_samples_the_length_of_each_phase():
    args = RLHFArgs(**BASE | {"gen_len_min": 3})
    spec = SamplingSpec.from_args(args)
    lengths = [phase_spec(spec, args, phase).gen_len for phase in range(30)]
    other = dataclasses.replace(args, seed=2)
    assert set(lengths) == {3, 4, 5, 6}
    assert lengths != [phase_spec(spec, other, phase).gen_len for phase in range(30)]


def test_labels_column_subtracts_the_reward_of_the_label(tmp_path):
    """Each "was" of prompt and response minus those of prompt and label: (2 + 1) / 2 and 3."""
    path = tmp_path / "prompts.csv"
    path.write_text("prompt,label\nthe film,was was\nthe film,was\nthe script was,was was\n")
    source = BASE | RAW | {"prompts": str(path), "reward_fn": "count:was"}
    trainer = RLHFTrainer(RLHFArgs(**source | {"labels_column": "label"}))
    rollout = trainer.rollout_phase()
    labels = [3.0 if text.startswith("the script") else 1.5 for text in rollout.texts]
    assert set(labels) == {1.5, 3.0}
    assert torch.equal(rollout.rewards, rollout.raw_rewards - torch.tensor(labels))
    with pytest.raises(ConfigError, match="the plot' is not among the prompts"):
        trainer.step(["the plot"] * 4, ["was"] * 4, [0.0] * 4)
