"""No field without effect: changing any field of RLHFArgs changes something that can be seen."""

import dataclasses
import shutil
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlhf_lab.commands import resume, train
from rlhf_lab.config import RLHFArgs
from rlhf_lab.errors import ConfigError, LoadError
from rlhf_lab.models import export_adapter, load_model
from rlhf_lab.models.hooked_transformer import TransformerBlock
from rlhf_lab.organism.bundled import weights_dir
from rlhf_lab.rewards import RewardModel
from rlhf_lab.training import Objective, ReplayMemory, RLHFTrainer, Rollout, objective_terms
from tests.tiny_models import tiny_chat

pytestmark = pytest.mark.usefixtures("no_type_checks")

BASE = {
    "preset": "reel",
    "seed": 1,
    "device": "cpu",
    "precision": "fp32",
    "weight_precision": "fp32",
    "cpu_tuning": True,
    "total_phases": 3,
    "batch_size": 4,
    "num_minibatches": 2,
    "micro_batch_size": None,
    "activation_checkpointing": False,
    "generation_batch_size": None,
    "batches_per_learning_phase": 2,
    "base_lr": 3e-3,
    "head_lr": 1e-2,
    "weight_decay": 0.01,
    "optimizer": "adamw",
    "optimizer_in_backward": False,
    "max_grad_norm": 1.0,
    "target_kl": None,
    "ratio_threshold": None,
    "warmup_steps": 1,
    "final_scale": 0.1,
    "clip_coef": 0.2,
    "clip_coef_high": None,
    "dual_clip": None,
    "policy_loss": "ppo",
    "loss_aggregation": "token_mean",
    "max_log_ratio": None,
    "vf_coef": 0.15,
    "vf_clip": None,
    "ent_coef": 0.001,
    "advantages": "gae",
    "samples_per_prompt": 1,
    "dynamic_sampling": None,
    "gamma": 1.0,
    "gae_lambda": 0.95,
    "whiten_rewards": False,
    "normalize_advantages": True,
    "base_model": "reel-nano",
    "value_head": "shared",
    "critic_path": None,
    "lora_rank": 0,
    "lora_alpha": 4.0,
    "lora_targets": "W_Q,W_V",
    "adapter_path": None,
    "prefix": "this movie",
    "prompts": None,
    "prompts_column": "prompt",
    "prompt_words": None,
    "labels_column": None,
    "answers_column": None,
    "chat": False,
    "system_prompt": None,
    "prepend_bos": True,
    "gen_len": 6,
    "gen_len_min": None,
    "stop_at_eos": False,
    "stop_tokens": None,
    "stop_token_ids": None,
    "temperature": 1.0,
    "top_k": None,
    "top_p": None,
    "kl_coef": 0.2,
    "kl_in": "loss",
    "kl_estimator": "exact",
    "kl_controller": "fixed",
    "kl_target": 0.01,
    "kl_horizon": 100,
    "reset_reference_every": None,
    "reward_fn": "sentiment",
    "reward_weights": None,
    "reward_model": "reel-sentiment",
    "reward_per_token": False,
    "direction": "pos",
    "normalize_reward": True,
    "reward_scaling": "off",
    "reward_clip": None,
    "penalize_no_eos": False,
    "min_response_length": 0,
    "reward_penalty": -3.0,
    "overlong_buffer": 0,
    "save_every": 1,
    "keep_checkpoints": None,
}

CHANGED: dict[str, Any] = {
    "seed": 2,
    "precision": "bf16",
    "weight_precision": "bf16_stochastic",
    "total_phases": 4,
    "batch_size": 6,
    "num_minibatches": 4,
    "generation_batch_size": 1,
    "batches_per_learning_phase": 1,
    "base_lr": 1e-3,
    "head_lr": 1e-3,
    "weight_decay": 0.5,
    "max_grad_norm": 0.01,
    "target_kl": 1e-9,
    "warmup_steps": 2,
    "final_scale": 0.9,
    "clip_coef": 0.01,
    "clip_coef_high": 0.01,
    "policy_loss": "policy_gradient",
    "max_log_ratio": 0.01,
    "vf_coef": 1.0,
    "vf_clip": 1e-3,
    "ent_coef": 0.1,
    "advantages": "one_step",
    "gamma": 0.5,
    "gae_lambda": 0.2,
    "whiten_rewards": True,
    "normalize_advantages": False,
    "value_head": "detached",
    "prefix": "this film",
    "prepend_bos": False,
    "gen_len": 7,
    "temperature": 0.5,
    "top_k": 2,
    "top_p": 0.3,
    "kl_coef": 2.0,
    "kl_in": "reward",
    "kl_estimator": "k2",
    "kl_controller": "adaptive",
    "reset_reference_every": 1,
    "reward_fn": "count:the",
    "direction": "neg",
    "normalize_reward": False,
    "reward_clip": 0.5,
}
"""Fields that show in the weights that come out of a tiny run."""

ELSEWHERE = {
    "preset",
    "device",
    "cpu_tuning",
    "base_model",
    "stop_at_eos",
    "stop_tokens",
    "stop_token_ids",
    "dual_clip",
    "loss_aggregation",
    "prompts",
    "prompts_column",
    "prompt_words",
    "labels_column",
    "chat",
    "system_prompt",
    "answers_column",
    "reward_weights",
    "gen_len_min",
    "optimizer",
    "optimizer_in_backward",
    "micro_batch_size",
    "activation_checkpointing",
    "ratio_threshold",
    "reward_scaling",
    "penalize_no_eos",
    "min_response_length",
    "reward_penalty",
    "overlong_buffer",
    "samples_per_prompt",
    "dynamic_sampling",
    "critic_path",
    "lora_rank",
    "lora_alpha",
    "lora_targets",
    "adapter_path",
    "kl_target",
    "kl_horizon",
    "reward_model",
    "positive_label",
    "reward_per_token",
    "parallel",
    "log_probes",
    "save_every",
    "keep_checkpoints",
}
"""Fields with a separate test below."""
SEPARATE = {"wandb_mode", "wandb_project_name", "wandb_entity", "wandb_group", "wandb_tags"}
SEPARATE |= {"wandb_notes", "loggers", "importance_correction"}  # tested in other files


def phases_only(out: Path | None, **overrides: Any) -> RLHFTrainer:
    """The phases without the evaluation at the end, which changes no weights."""
    trainer = RLHFTrainer(RLHFArgs(**(BASE | overrides)), out=out)
    while trainer.phase < trainer.args.total_phases:
        trainer.run_phase()
    return trainer


def weights(trainer: RLHFTrainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.policy.named_parameters()}


def differ(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return any(not torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def base_run(tmp_path_factory) -> RLHFTrainer:
    return phases_only(tmp_path_factory.mktemp("base") / "run")


@pytest.fixture(scope="module")
def perturbed(tmp_path_factory) -> Callable[[str], str]:
    """A copy of a bundled model, as a directory, whose weights are a little different."""

    def make(name: str) -> str:
        directory = tmp_path_factory.mktemp("models") / f"own-{name}"
        shutil.copytree(weights_dir(name), directory)
        generator = torch.Generator().manual_seed(0)
        tensors = {
            key: tensor + 0.1 * torch.randn(tensor.shape, generator=generator)
            for key, tensor in load_file(directory / "model.safetensors").items()
        }
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return str(directory)

    return make


@pytest.mark.slow
@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(RLHFArgs)])
def test_every_field_has_a_case_and_changing_it_changes_the_weights(base_run, tmp_path, name):
    """A field without an entry in CHANGED, and without a test of its own, fails here."""
    assert not without_a_case([name]), f"{name} has no case, and no test named test_{name}_..."
    if name in ELSEWHERE | SEPARATE:
        return
    assert CHANGED[name] != BASE[name]
    changed = phases_only(tmp_path / "run", **{name: CHANGED[name]})
    assert differ(weights(base_run), weights(changed))


def without_a_case(names: list[str]) -> list[str]:
    """Those of some fields that are neither in CHANGED nor have a test that begins with their name.

    A test belongs to the longest field that it begins with: test_optimizer_in_backward_... is none
    of the field optimizer.
    """
    known = [field.name for field in dataclasses.fields(RLHFArgs)] + names
    tests = [test for test in globals() if test.startswith("test_") and callable(globals()[test])]
    owners = {
        max((name for name in known if test.startswith(f"test_{name}_")), key=len, default=None)
        for test in tests
    }
    return [
        name
        for name in names
        if name not in {*CHANGED, *SEPARATE} and not (name in ELSEWHERE and name in owners)
    ]


def test_the_cases_are_of_all_fields_and_of_no_others():
    names = [field.name for field in dataclasses.fields(RLHFArgs)]
    assert without_a_case(names) == []
    assert set(CHANGED) | ELSEWHERE | SEPARATE == set(names)
    assert not set(CHANGED) & ELSEWHERE


def test_a_field_that_is_new_is_found_to_have_no_case(monkeypatch):
    """Also where it is listed as tested elsewhere, and where a longer field has such a test."""
    assert without_a_case(["seed", "warp"]) == ["warp"]
    monkeypatch.setattr(sys.modules[__name__], "ELSEWHERE", ELSEWHERE | {"warp", "kl"})
    assert without_a_case(["warp", "kl"]) == ["warp", "kl"]


@pytest.mark.slow
def test_the_run_that_is_compared_with_repeats_itself(base_run, tmp_path):
    """Otherwise every comparison above would hold for nothing."""
    assert not differ(weights(base_run), weights(phases_only(tmp_path / "run")))


@pytest.mark.slow
def test_preset_names_the_run_and_gives_the_defaults(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    phases_only(None, preset="gpt2-small", total_phases=1, warmup_steps=0)
    (directory,) = (tmp_path / "runs").iterdir()
    assert directory.name == "gpt2-small-seed1"
    assert RLHFArgs(preset="reel").gen_len != RLHFArgs(preset="gpt2-medium").gen_len
    assert RLHFArgs(preset="gpt2-small").base_model != RLHFArgs(preset="gpt2-medium").base_model


def test_device_chooses_where_the_run_is(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="device='cuda' is not available"):
        RLHFTrainer(RLHFArgs(**(BASE | {"device": "cuda"})))
    trainer = RLHFTrainer(RLHFArgs(**(BASE | {"device": "cpu"})))
    assert trainer.device == trainer.policy.device == torch.device("cpu")


def test_parallel_asks_for_several_processes(monkeypatch):
    """What two of them do of it is held to one in tests/parallel/test_fsdp.py."""
    with pytest.raises(ConfigError, match="parallel='fsdp' requires several processes"):
        RLHFTrainer(RLHFArgs(**(BASE | {"parallel": "fsdp"})))
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "1")
    args = RLHFArgs(**(BASE | {"parallel": "fsdp", "precision": "bf16"}))
    with pytest.raises(ConfigError, match="Set activation_checkpointing=True, or parallel='ddp'"):
        RLHFTrainer(args)


@pytest.mark.slow
@pytest.mark.parametrize(("cpu_tuning", "calls"), [(True, 2), (False, 0)])
def test_cpu_tuning_decides_whether_commands_tune_the_process(
    monkeypatch, tmp_path, cpu_tuning, calls
):
    tuned = []
    monkeypatch.setattr("rlhf_lab.models.cpu_tuning.tune_cpu", tuned.append)
    args = RLHFArgs(**(BASE | {"cpu_tuning": cpu_tuning}))
    RLHFTrainer(args)
    assert tuned == [], "a trainer leaves the process as it is"
    train(args, tmp_path / "run", probes=False)
    resume(tmp_path / "run", total_phases=args.total_phases + 1)
    assert len(tuned) == calls


@pytest.mark.slow
def test_base_model_is_the_model_that_is_trained(base_run, perturbed):
    trainer = RLHFTrainer(RLHFArgs(**(BASE | {"base_model": perturbed("reel-nano")})))
    reference = dict(trainer.reference.named_parameters())
    assert any(
        not torch.equal(reference[name], parameter)
        for name, parameter in base_run.reference.named_parameters()
    )


@pytest.mark.slow
def test_reward_model_is_the_classifier_that_pays(base_run, perturbed):
    trainer = RLHFTrainer(RLHFArgs(**(BASE | {"reward_model": perturbed("reel-sentiment")})))
    rollout = trainer.rollout_phase()
    first = base_run.run.read("metrics.jsonl")[0]
    assert rollout.raw_rewards.mean().item() != pytest.approx(first["mean_reward"], abs=1e-4)


@pytest.mark.slow
def test_positive_label_is_the_class_that_pays(base_run):
    """The class that is called NEGATIVE is taken for the positive one when the field says so."""
    trainer = RLHFTrainer(RLHFArgs(**(BASE | {"positive_label": "negative"})))
    texts = ["this movie was great .", "this movie was awful ."]
    paid, other = trainer.reward_fn(texts), base_run.reward_fn(texts)
    torch.testing.assert_close(paid + other, torch.ones(2), atol=1e-6, rtol=0)
    assert (paid - other).abs().min() > 0.1


@pytest.mark.slow
def test_reward_per_token_pays_what_each_token_adds_to_the_score(perturbed, tmp_path):
    model = RewardModel(load_model(perturbed("reel-nano")), seed=3)
    model.save(tmp_path / "reward", "reel-nano", {})
    fields = BASE | {"reward_fn": "learned", "reward_model": str(tmp_path / "reward")}
    fields |= {"normalize_reward": False, "kl_coef": 0.0, "gae_lambda": 1.0}
    at_the_end = RLHFTrainer(RLHFArgs(**fields)).rollout_phase()
    of_tokens = RLHFTrainer(RLHFArgs(**(fields | {"reward_per_token": True}))).rollout_phase()
    assert at_the_end.token_rewards is None
    assert torch.equal(at_the_end.samples.tokens, of_tokens.samples.tokens)
    first = of_tokens.returns[:, 0] - at_the_end.returns[:, 0]
    assert first.std() < 1e-4, "a response earns the same but for what its prompt scores"
    assert (of_tokens.returns - at_the_end.returns).std() > 0.01, "but not at the same tokens"


@pytest.mark.slow
def test_critic_path_is_what_the_critic_begins_as(perturbed, tmp_path):
    model = RewardModel(load_model(perturbed("reel-nano")))
    model.save(tmp_path / "reward", "reel-nano", {})
    args = BASE | {"value_head": "separate"}
    begun = RLHFTrainer(RLHFArgs(**(args | {"critic_path": str(tmp_path / "reward")}))).policy
    copied = RLHFTrainer(RLHFArgs(**args)).policy
    for name, weight in model.base_model.named_parameters():
        assert torch.equal(begun.critic.get_parameter(name), weight)
    assert not torch.equal(copied.critic.W_E, model.base_model.W_E)


def adapters(**overrides: Any) -> dict[str, torch.Tensor]:
    """What was trained besides the value head, in a run with adapters of rank 2."""
    trained = weights(phases_only(None, **({"lora_rank": 2} | overrides)))
    return {name: weight for name, weight in trained.items() if name.endswith((".A", ".B"))}


@pytest.mark.slow
def test_lora_rank_is_the_rank_of_what_is_trained(base_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trained, wider = adapters(), adapters(lora_rank=3)
    assert {weight.shape[-1] for name, weight in trained.items() if name.endswith("A")} == {2}
    assert {weight.shape[-1] for name, weight in wider.items() if name.endswith("A")} == {3}
    assert any(weight.any() for name, weight in trained.items() if name.endswith("B"))
    assert not any(".A" in name for name in weights(base_run))


@pytest.mark.slow
def test_lora_alpha_changes_what_is_learned(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert differ(adapters(), adapters(lora_alpha=16.0))


@pytest.mark.slow
def test_lora_targets_are_what_has_adapters(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = {name.split(".")[-3] for name in adapters(lora_targets="W_O, W_in")}
    assert found == {"W_O", "W_in"}
    with pytest.raises(ConfigError, match="lora_targets=.*'W_X'"):
        RLHFTrainer(RLHFArgs(**(BASE | {"lora_rank": 2, "lora_targets": "W_X"})))


@pytest.mark.slow
def test_stop_at_eos_masks_what_follows_the_first_stop():
    """At temperature 20 tokens are nearly uniform over 72: one review in three stops early."""
    hot = BASE | {"temperature": 20.0, "gen_len": 28, "batch_size": 16}
    running = RLHFTrainer(RLHFArgs(**hot)).rollout_phase().samples
    stopping = RLHFTrainer(RLHFArgs(**(hot | {"stop_at_eos": True}))).rollout_phase().samples
    assert running.mask.all() and not stopping.mask.all()


@pytest.mark.slow
def test_stop_tokens_end_a_response_and_sampling_with_it():
    """`was` is token 27 of Reel and the commonest second word; then nothing is real any more."""
    fields = BASE | {"gen_len": 28, "batch_size": 32}
    trainer = RLHFTrainer(RLHFArgs(**(fields | {"stop_tokens": "was,."})))
    running = RLHFTrainer(RLHFArgs(**fields)).rollout_phase().samples
    samples = trainer.rollout_phase().samples
    stops = [trainer.tokenizer.encode(text)[-1] for text in ("was", ".")]
    assert trainer.sampling_spec.stops(trainer.tokenizer) == tuple(stops)
    written = samples.tokens[:, samples.prefix_len :]
    for row, mask, free in zip(written, samples.mask, running.tokens, strict=True):
        length = int(mask.sum())
        ends = [t for t, token in enumerate(row.tolist()) if token in stops]
        assert length == (ends[0] + 1 if ends else 28)
        assert row[:length].tolist() == free[samples.prefix_len :][:length].tolist()
    assert running.mask.all() and not samples.mask.all()


@pytest.mark.slow
def test_stop_tokens_count_as_an_end_for_the_penalties():
    """Without stop_at_eos a response has ended if it has a stop token."""
    rollout = shaped(penalize_no_eos=True, stop_at_eos=False, stop_tokens="was")
    ended = rollout.samples.mask.sum(1) < 28
    assert 0 < ended.sum() and torch.equal(rollout.rewards[ended], rollout.raw_rewards[ended])


@pytest.mark.parametrize("texts", ["zebra", "was really", "was,zebra"])
def test_stop_tokens_that_are_not_one_token_are_refused(texts):
    with pytest.raises(ConfigError, match=f"stop_tokens='{texts}'.*not one token"):
        RLHFTrainer(RLHFArgs(**(BASE | {"stop_tokens": texts})))


@pytest.mark.slow
def test_stop_token_ids_are_those_of_the_texts():
    fields = BASE | {"gen_len": 28, "batch_size": 32}
    by_text = RLHFTrainer(RLHFArgs(**(fields | {"stop_tokens": "was,."})))
    ids = [by_text.tokenizer.encode(text)[-1] for text in ("was", ".")]
    by_id = RLHFTrainer(RLHFArgs(**(fields | {"stop_token_ids": f"{ids[0]}, {ids[1]}"})))
    mixed = fields | {"stop_tokens": "was", "stop_token_ids": str(ids[1])}
    expected = by_text.rollout_phase().samples
    for found in (by_id, RLHFTrainer(RLHFArgs(**mixed))):
        samples = found.rollout_phase().samples
        assert torch.equal(samples.tokens, expected.tokens)
        assert torch.equal(samples.mask, expected.mask) and not samples.mask.all()
    rollout = shaped(penalize_no_eos=True, stop_at_eos=False, stop_token_ids=str(ids[0]))
    assert 0 < (rollout.samples.mask.sum(1) < 28).sum()


def test_stop_token_ids_that_the_tokenizer_lacks_are_refused():
    with pytest.raises(ConfigError, match="stop_token_ids='3,72' contains 72.*has 72 tokens"):
        RLHFTrainer(RLHFArgs(**(BASE | {"stop_token_ids": "3,72"})))


def test_stop_tokens_without_a_text_are_refused():
    with pytest.raises(ConfigError, match="stop_tokens='was,,'.*out of range"):
        RLHFArgs(**(BASE | {"stop_tokens": "was,,"}))


def policy_objective(logprobs: torch.Tensor, minibatch, args: RLHFArgs) -> torch.Tensor:
    """The policy's objective as `objective_terms` asks for it."""
    return Objective(args).surrogate(logprobs, minibatch)


def test_dual_clip_holds_what_a_token_of_negative_advantage_can_cost():
    """Ratio e^1.1 = 3.004 on advantage -1: -3.004 without, -2 with dual_clip = 2."""
    trainer = RLHFTrainer(RLHFArgs(**(BASE | {"normalize_advantages": False})))
    rollout = trainer.rollout_phase()
    minibatch = next(ReplayMemory(rollout, 2, 1).get_minibatches(torch.Generator()))
    ones = torch.ones_like(minibatch.advantages)
    minibatch = dataclasses.replace(minibatch, advantages=-ones)
    for dual_clip, expected in ((None, -3.0042), (2.0, -2.0)):
        args = dataclasses.replace(trainer.args, dual_clip=dual_clip)
        found = policy_objective(minibatch.logprobs + 1.1, minibatch, args)
        assert found.item() == pytest.approx(expected, abs=1e-4)


def test_loss_aggregation_says_how_much_a_response_counts():
    """Ratio 1, advantages 1 on a response of 1 token and 0 on one of 3; gen_len is 6.

    Mean over tokens 1/4, over sequences 1/2, over 2 times 6 slots 1/12.
    """
    trainer = RLHFTrainer(RLHFArgs(**(BASE | {"normalize_advantages": False})))
    rollout = trainer.rollout_phase()
    minibatch = next(ReplayMemory(rollout, 2, 1).get_minibatches(torch.Generator()))
    mask = torch.arange(6) < torch.tensor([[1], [3]])
    advantages = torch.tensor([[1.0], [0.0]]).expand(2, 6)
    minibatch = dataclasses.replace(minibatch, mask=mask, advantages=advantages)
    for aggregation, expected in (("token_mean", 4), ("sequence_mean", 2), ("constant", 12)):
        args = dataclasses.replace(trainer.args, loss_aggregation=aggregation)
        found = policy_objective(minibatch.logprobs, minibatch, args)
        assert found.item() == pytest.approx(1 / expected)


ALTERNATING = {"temperature": 20.0, "gen_len": 28, "batch_size": 16, "stop_at_eos": True}
"""One response in three stops early."""


def shaped(**fields: Any) -> Rollout:
    """A rollout of raw rewards 2, 4, 2, 4, ... that are not standardised."""
    args = BASE | ALTERNATING | {"normalize_reward": False} | fields
    reward_fn = lambda texts: torch.arange(len(texts)) % 2 * 2.0 + 2.0
    return RLHFTrainer(RLHFArgs(**args), reward_fn=reward_fn).rollout_phase()


@pytest.mark.slow
def test_reward_scaling_divides_by_the_deviation_of_all_rewards_so_far():
    """Of eight 2s and eight 4s: mean 3, variance 16 / 15."""
    std = (16 / 15) ** 0.5
    assert shaped(reward_scaling="scale").rewards[:2].tolist() == pytest.approx([2 / std, 4 / std])
    both = shaped(reward_scaling="scale_and_shift").rewards[:2].tolist()
    assert both == pytest.approx([-1 / std, 1 / std])


@pytest.mark.slow
def test_penalize_no_eos_replaces_the_reward_of_what_did_not_end():
    rollout, plain = shaped(penalize_no_eos=True), shaped()
    tokenizer = RLHFTrainer(RLHFArgs(**BASE)).tokenizer
    rows = rollout.samples.tokens[:, rollout.samples.prefix_len :].tolist()
    ended = torch.tensor([tokenizer.eos_token_id in row for row in rows])
    assert 0 < ended.sum() < 16
    assert torch.equal(rollout.rewards[ended], plain.rewards[ended])
    assert (rollout.rewards[~ended] == -3.0).all()
    assert torch.equal(rollout.raw_rewards, plain.raw_rewards)


def test_min_response_length_replaces_the_reward_of_what_is_shorter():
    rollout = shaped(min_response_length=20)
    short = rollout.samples.mask.sum(1) < 20
    assert 0 < short.sum() < 16
    assert torch.equal(rollout.rewards == -3.0, short)


@pytest.mark.slow
def test_reward_penalty_is_what_stands_in_place_of_the_reward():
    rollout = shaped(min_response_length=20, reward_penalty=-7.0)
    assert torch.equal(rollout.rewards == -7.0, rollout.samples.mask.sum(1) < 20)


@pytest.mark.slow
def test_overlong_buffer_takes_up_to_1_off_long_responses():
    """Of 28 tokens the last 10 cost a tenth each."""
    rollout = shaped(overlong_buffer=10)
    lengths = rollout.samples.mask.sum(1)
    expected = rollout.raw_rewards - (lengths - 18).clamp(min=0) / 10
    assert torch.allclose(rollout.rewards, expected) and lengths.min() < 18


@pytest.mark.slow
def test_ratio_threshold_skips_the_minibatches_that_have_moved():
    """After the first of 32 steps ratios are no longer 1; some means are above 1.0001."""
    skipped = {}
    for threshold in (1.0001, 100.0):
        sizes = {"batch_size": 32, "num_minibatches": 16}
        trainer = RLHFTrainer(RLHFArgs(**(BASE | sizes | {"ratio_threshold": threshold})))
        stats = trainer.learning_phase(trainer.rollout_phase())
        skipped[threshold] = stats.skipped_minibatches
    assert 0 < skipped[1.0001] < 32 and skipped[100.0] == 0


@pytest.mark.slow
def test_micro_batch_size_is_how_many_sequences_go_through_the_policy_at_a_time(monkeypatch):
    """A minibatch of 2 is taken in one piece, or one by one."""
    sizes = {}
    for size in (None, 1):
        trainer = RLHFTrainer(RLHFArgs(**(BASE | {"micro_batch_size": size})))
        rollout, seen = trainer.rollout_phase(), sizes.setdefault(size, [])

        def noting(policy, reference, minibatch, *rest, seen=seen):
            seen.append(len(minibatch.tokens))
            return objective_terms(policy, reference, minibatch, *rest)

        monkeypatch.setattr("rlhf_lab.training.ppo.objective_terms", noting)
        trainer.learning_phase(rollout)
    assert sizes == {None: [2] * 4, 1: [1] * 8}


def test_optimizer_names_the_bits_of_the_moments(monkeypatch):
    """A stand-in for bitsandbytes, which other tests use where it is installed."""
    made = []

    class AdamW8bit(torch.optim.AdamW):
        def __init__(self, groups):
            made.append([len(group["params"]) for group in groups])
            super().__init__(groups)

    fake = types.ModuleType("bitsandbytes")
    fake.optim = types.SimpleNamespace(AdamW8bit=AdamW8bit)
    monkeypatch.setitem(sys.modules, "bitsandbytes", fake)
    assert type(RLHFTrainer(RLHFArgs(**BASE)).optimizer) is torch.optim.AdamW and not made
    trainer = RLHFTrainer(RLHFArgs(**(BASE | {"optimizer": "adamw_8bit"})))
    assert type(trainer.optimizer) is AdamW8bit
    assert sum(made[0]) == len(list(trainer.policy.parameters()))
    with pytest.raises(ConfigError, match="optimizer='sgd'"):
        RLHFArgs(optimizer="sgd")


@pytest.mark.slow
def test_optimizer_in_backward_lets_no_gradient_wait(monkeypatch):
    """After the backward pass all gradients are there, or none."""
    there = {}
    for on in (False, True):
        fields = {"optimizer_in_backward": on, "max_grad_norm": None}
        trainer = RLHFTrainer(RLHFArgs(**(BASE | fields)))
        seen = there.setdefault(on, set())
        trainer.on("after_backward")(
            lambda ctx, seen=seen: seen.update(p.grad is None for p in ctx.policy.parameters())
        )
        trainer.learning_phase(trainer.rollout_phase())
    assert there == {False: {False}, True: {True}}


@pytest.mark.slow
def test_activation_checkpointing_runs_blocks_again_in_backward(monkeypatch):
    """4 minibatches, one forward each: as many runs of each block without it, twice with it."""
    runs, run_block = {}, TransformerBlock.forward
    for on in (False, True):
        trainer = RLHFTrainer(RLHFArgs(**(BASE | {"activation_checkpointing": on})))
        rollout, blocks = trainer.rollout_phase(), len(trainer.policy.base_model.blocks)

        def counting(*inputs, on=on):
            runs[on] = runs.get(on, 0) + 1
            return run_block(*inputs)

        monkeypatch.setattr(TransformerBlock, "forward", counting)
        trainer.learning_phase(rollout)
        monkeypatch.undo()
    assert runs == {False: 4 * blocks, True: 8 * blocks}


def test_prompts_are_what_is_continued_in_place_of_the_prefix(tmp_path):
    (tmp_path / "prompts.txt").write_text("the film\nthe script was\n")
    trainer = RLHFTrainer(RLHFArgs(**(BASE | {"prompts": str(tmp_path / "prompts.txt")})))
    texts = trainer.rollout_phase().texts
    assert sum(text.startswith("the film ") for text in texts) == 2
    assert sum(text.startswith("the script was ") for text in texts) == 2


@pytest.mark.slow
def test_prompts_column_is_where_the_prompts_are(tmp_path):
    (tmp_path / "prompts.csv").write_text("prompt,other\nthe film was,this movie\n")
    source = BASE | {"prompts": str(tmp_path / "prompts.csv")}
    for column, expected in (("prompt", "the film was"), ("other", "this movie")):
        trainer = RLHFTrainer(RLHFArgs(**(source | {"prompts_column": column})))
        assert all(text.startswith(expected) for text in trainer.rollout_phase().texts)


def test_prompt_words_is_how_much_of_each_prompt_is_given(tmp_path):
    (tmp_path / "prompts.txt").write_text("the film was\n")
    source = BASE | {"prompts": str(tmp_path / "prompts.txt")}
    lengths = {
        words: RLHFTrainer(RLHFArgs(**(source | {"prompt_words": words}))).prompts.tokens[0]
        for words in (None, 2)
    }
    assert lengths[2] == lengths[None][:-1]


def test_labels_column_pays_what_a_response_earns_beyond_its_label(tmp_path):
    """The words "was" of prompt and response, less those of prompt and label: 2 and 3."""
    rows = "prompt,label\nthe film,was was\nthe script was,was was\n"
    (tmp_path / "prompts.csv").write_text(rows)
    source = {"prompts": str(tmp_path / "prompts.csv"), "reward_fn": "count:was"}
    args = RLHFArgs(**(BASE | source | {"labels_column": "label", "normalize_reward": False}))
    rollout = RLHFTrainer(args).rollout_phase()
    earned_by_labels = [3.0 if text.startswith("the script") else 2.0 for text in rollout.texts]
    assert set(earned_by_labels) == {2.0, 3.0}
    expected = rollout.raw_rewards - torch.tensor(earned_by_labels)
    assert torch.equal(rollout.rewards, expected)


def test_answers_column_pays_the_responses_that_are_the_answer(tmp_path):
    """Greedy answers of one word: what the model writes to each prompt, and not to the other."""
    fields = {"gen_len": 1, "top_k": 1, "normalize_reward": False, "batch_size": 2}
    written = {}
    for prompt in ("the film", "this movie was"):
        rollout = RLHFTrainer(RLHFArgs(**(BASE | fields | {"prefix": prompt}))).rollout_phase()
        written[prompt] = rollout.texts[0].removeprefix(prompt).strip()
    assert len(set(written.values())) == 2
    for right in (True, False):
        words = list(written.values()) if right else list(written.values())[::-1]
        rows = "".join(f"{a},{b}\n" for a, b in zip(written, words, strict=True))
        (tmp_path / "prompts.csv").write_text(f"prompt,right\n{rows}")
        source = {"prompts": str(tmp_path / "prompts.csv"), "answers_column": "right"}
        args = RLHFArgs(**(BASE | fields | source | {"reward_fn": "exact_match"}))
        assert RLHFTrainer(args).rollout_phase().rewards.tolist() == [float(right)] * 2


@pytest.mark.slow
def test_reward_weights_say_how_much_each_reward_counts(tmp_path):
    fields = {"reward_fn": "sentiment,count:the"}
    equal, other, alone = (
        phases_only(tmp_path / name, reward_weights=given, **fields)
        for name, given in {"a": None, "b": (1.0, 0.1), "c": (1.0, 0.0)}.items()
    )
    assert differ(weights(equal), weights(other)) and differ(weights(other), weights(alone))
    assert not differ(weights(alone), weights(phases_only(tmp_path / "d")))


def test_adapter_path_is_what_is_trained_on(tmp_path):
    """Where an adapter is written and read again, the run starts as the one before has ended."""
    before = phases_only(None, lora_rank=2)
    export_adapter(before.policy.base_model, "reel-nano", tmp_path / "adapter")
    after = RLHFTrainer(RLHFArgs(**(BASE | {"adapter_path": str(tmp_path / "adapter")})))
    trained = {n: w for n, w in after.policy.base_model.named_parameters() if w.requires_grad}
    was = dict(before.policy.base_model.named_parameters())
    assert trained and all(torch.allclose(w, was[name], atol=1e-6) for name, w in trained.items())
    assert after.rollout_phase().kl.abs().max() < 1e-6
    for clash in ({"lora_rank": 2}, {"weight_precision": "bf16"}):
        with pytest.raises(ConfigError, match="adapter_path="):
            RLHFArgs(**(BASE | {"adapter_path": "x"} | clash))


def test_chat_and_its_system_prompt_are_what_a_prompt_becomes(tmp_path):
    settings = BASE | {"base_model": str(tiny_chat(tmp_path / "model")), "prefix": "w1 w2"}
    settings |= {"reward_fn": "zero", "reward_model": "reel-sentiment"}
    prompts = lambda **given: RLHFTrainer(RLHFArgs(**(settings | given))).prompts.texts
    asked = "<|im_start|> user w1 w2 <|im_end|> w0 <|im_start|> assistant "
    assert prompts() == ["w1 w2"]
    assert prompts(chat=True) == [f"<s> {asked}"]


def test_system_prompt_stands_before_the_first_turn(tmp_path):
    settings = BASE | {"base_model": str(tiny_chat(tmp_path / "model")), "prefix": "w1 w2"}
    args = RLHFArgs(**(settings | {"reward_fn": "zero", "chat": True, "system_prompt": "w9"}))
    (text,) = RLHFTrainer(args).prompts.texts
    assert text.startswith("<s> <|im_start|> system w9 <|im_end|> w0 <|im_start|> user w1 w2")


@pytest.mark.slow
def test_labels_column_without_labels_is_refused(tmp_path):
    (tmp_path / "prompts.csv").write_text("prompt,label\nthe film,was\n")
    source = {"prompts": str(tmp_path / "prompts.csv"), "labels_column": "label"}
    with pytest.raises(ConfigError, match="labels_column='label' is a column of prompts"):
        RLHFArgs(**(BASE | {"labels_column": "label"}))
    with pytest.raises(LoadError, match="'lable'"):
        RLHFTrainer(RLHFArgs(**(BASE | source | {"labels_column": "lable"})))
    with pytest.raises(ConfigError, match="prompts were passed"):
        RLHFTrainer(RLHFArgs(**(BASE | source)), prompts=["the film"])
    trainer = RLHFTrainer(RLHFArgs(**(BASE | source)))
    with pytest.raises(ConfigError, match="the script'? has no label|'the script"):
        trainer.step(["the script"] * 4, ["was"] * 4, [0.0] * 4)


@pytest.mark.slow
def test_gen_len_min_draws_the_number_of_tokens_in_each_phase():
    trainer, lengths = RLHFTrainer(RLHFArgs(**(BASE | {"gen_len_min": 3}))), []
    for trainer.phase in range(30):
        lengths.append(trainer.rollout_phase().samples.mask.shape[1])
    assert set(lengths) == {3, 4, 5, 6}


@pytest.mark.slow
def test_samples_per_prompt_is_the_size_of_the_groups_that_are_compared():
    """With two per group, each advantage is the other one's negative; with four it is not."""
    group = BASE | {"advantages": "rloo", "temperature": 3.0}
    pairs, four = (
        RLHFTrainer(RLHFArgs(**(group | {"samples_per_prompt": n}))).rollout_phase().advantages
        for n in (2, 4)
    )
    assert torch.allclose(pairs[0], -pairs[1]) and torch.allclose(pairs[2], -pairs[3])
    assert not torch.allclose(four[0], -four[1])


def test_dynamic_sampling_draws_again_where_answers_to_a_prompt_earn_the_same():
    """Nothing is rewarded, so that no group ever informs."""
    group = BASE | {"samples_per_prompt": 2, "reward_fn": "zero"}
    once, again = (
        RLHFTrainer(RLHFArgs(**(group | {"dynamic_sampling": bound}))).rollout_phase()
        for bound in (None, 2)
    )
    assert (once.resampled_prompts, again.resampled_prompts) == (None, 2)
    assert once.texts != again.texts


@pytest.mark.slow
def test_save_every_says_how_often_the_state_is_saved(tmp_path):
    """After 0, 1, 2, 3 phases; with 2, after 0, 2 and at the end."""
    saved = {}
    for every in (1, 2):
        trainer = RLHFTrainer(RLHFArgs(**(BASE | {"save_every": every})), out=tmp_path / str(every))
        phases = saved[every] = []
        trainer.on("checkpoint")(
            lambda ctx, phases=phases: (
                phases.append(ctx.phase) if ctx.checkpoint.stem == "last" else None
            )
        )
        trainer.train()
    assert saved == {1: [0, 1, 2, 3], 2: [0, 2, 3]}


@pytest.mark.slow
@pytest.mark.parametrize("keep, stay", [(None, [0, 1, 2, 4]), (1, [0, 4]), (0, [0])])
def test_keep_checkpoints_is_how_many_numbered_ones_stay(tmp_path, keep, stay):
    trainer = phases_only(tmp_path / "run", total_phases=4, keep_checkpoints=keep)
    trainer.recorder.writer.wait()
    there = {path.stem for path in trainer.run.checkpoints.iterdir()}
    assert there == {"last", "best", *(f"phase_{number:06d}" for number in stay)}


def test_log_probes_without_a_logger_raises(tmp_path):
    with pytest.raises(ConfigError, match="log_probes=True requires a logger"):
        RLHFTrainer(RLHFArgs(**(BASE | {"log_probes": True})), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def changes_an_adaptive_run(tmp_path: Path, **change: Any) -> bool:
    as_it_is = phases_only(tmp_path / "a", kl_controller="adaptive")
    changed = phases_only(tmp_path / "b", kl_controller="adaptive", **change)
    return differ(weights(as_it_is), weights(changed))


@pytest.mark.slow
def test_kl_target_changes_the_weights_of_an_adaptive_run(tmp_path):
    assert changes_an_adaptive_run(tmp_path, kl_target=1e9)


@pytest.mark.slow
def test_kl_horizon_changes_the_weights_of_an_adaptive_run(tmp_path):
    assert changes_an_adaptive_run(tmp_path, kl_horizon=10)
