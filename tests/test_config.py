"""RLHFArgs: defaults of the seed notebook, presets, the table of ranges, and conflicts."""

import dataclasses
import json
import random
import re
from typing import get_type_hints

import numpy as np
import pytest

from rlhf_lab.config import GROUPS, PRESETS, RLHFArgs
from rlhf_lab.config.aliases import ALIASES
from rlhf_lab.config.checks import RANGES
from rlhf_lab.errors import ConfigError

DEFAULTS = dict(  # of the seed notebook; what it does not have is off
    seed=1, wandb_project_name="rlhf_transformers", wandb_entity=None, total_phases=200,
    batch_size=32, num_minibatches=4, batches_per_learning_phase=2, base_lr=2e-5, head_lr=5e-4,
    max_grad_norm=1.0, warmup_steps=20, final_scale=0.1, clip_coef=0.2, vf_coef=0.15,
    ent_coef=0.001, base_model="gpt2-medium", gen_len=50, temperature=1.0, top_k=10,
    prefix="This is", prepend_bos=True, kl_coef=2.5, normalize_reward=True, reward_fn="sentiment",
    reward_model="lvwerra/distilbert-imdb", advantages="one_step", gamma=1.0, weight_decay=0.01,
    vf_clip=None, top_p=None, stop_at_eos=False, normalize_advantages=True, wandb_mode=None,
    device="auto", direction="pos",
)  # fmt: skip
HINTS = get_type_hints(RLHFArgs)
INVALID = {  # one value on each side of a limit, by the description of the range
    "greater than 0": [0.0, -1.0, float("nan"), float("inf")],
    "0 or greater": [-1],
    "1 or greater, an integer": [0, -4],
    "0, 1, ... or 2**63 - 1": [-1, 2**63],
    "1e-6 or greater; top_k=1 is greedy": [0.0, 1e-7, float("inf")],
    "greater than 1": [1.0, float("inf")],
    "between 0 and 1": [-0.1, 1.1],
    "greater than 0 and at most 1": [0.0, 1.01],
    "below 0": [0.0, float("-inf")],
    "a text that is not empty": ["", " "],
    "some of tensorboard, trackio; metrics.jsonl is always written": ["csv", "trackio,csv"],
    "finite numbers, and not all 0": [(), (0.0, 0.0), (1e39,), (float("nan"),)],
    "texts, comma-separated, or None": ["", "was,"],
    "tags, comma-separated, or None": ["", "one,,two"],
    "token ids, comma-separated, or None": ["", "3,", "-1", "²", "3.5"],
}
EDGES = {
    "greater than 0": 1e-9,
    "0 or greater": 0,
    "between 0 and 1": 1,
    "0, 1, ... or 2**63 - 1": 2**63 - 1,
    "greater than 0 and at most 1": 1.0,
    "1e-6 or greater; top_k=1 is greedy": 1e-6,
    "below 0": -1e-9,
}


def rejection(**fields):
    with pytest.raises(ConfigError) as caught:
        RLHFArgs(**fields)
    message = str(caught.value)
    assert "\n" not in message and message.endswith(".")
    return message


def test_the_defaults_are_those_of_the_seed_notebook():
    for name, default in DEFAULTS.items():
        value = getattr(RLHFArgs(), name)
        assert value == default and type(value) is type(default), name


@pytest.mark.parametrize("preset", PRESETS)
def test_given_fields_override_preset_and_preset_defaults(preset):
    plain, args = RLHFArgs(), RLHFArgs(preset=preset)
    for field in dataclasses.fields(RLHFArgs)[1:]:
        assert getattr(args, field.name) == PRESETS[preset].get(field.name, field.default)
    given = {name: getattr(plain, name) for name in PRESETS[preset]}
    given |= {name: getattr(plain, name) for name in ("num_minibatches", "warmup_steps")}
    given |= {"total_phases": plain.total_phases, "batch_size": plain.batch_size}
    changed = RLHFArgs(preset=preset, **given)
    assert all(getattr(changed, name) == value for name, value in given.items())


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize("preset", PRESETS)
def test_json_round_trip_keeps_all_fields(preset):
    fields = {"top_p": 0.9, "wandb_entity": "someone", "reward_weights": (1, 0.5), "kl_coef": 2.5}
    args, state = RLHFArgs(preset=preset, reward_fn="zero,length", **fields), random.getstate()
    assert RLHFArgs(**json.loads(json.dumps(args.to_dict()))) == args
    assert random.getstate() == state  # advanced if beartype checks a tuple
    assert args.reward_weights == (1.0, 0.5) and hash(args) == hash(dataclasses.replace(args))


def test_fields_are_frozen_grouped_and_checked_by_replace():
    args = RLHFArgs(preset="reel", kl_coef=0.7)
    with pytest.raises(dataclasses.FrozenInstanceError):
        args.gen_len = 5
    grouped = [field.name for group in GROUPS.values() for field in dataclasses.fields(group)]
    assert grouped == [field.name for field in dataclasses.fields(RLHFArgs)]
    assert dataclasses.replace(args, gen_len=3).to_dict() == args.to_dict() | {"gen_len": 3}
    with pytest.raises(ConfigError, match="batch_size=31"):
        dataclasses.replace(args, batch_size=31)


def test_derived_properties():
    args = RLHFArgs(loggers="trackio, tensorboard,,trackio", batch_size=30, num_minibatches=5)
    assert args.rows_at_once == 6 and RLHFArgs(micro_batch_size=2).rows_at_once == 2
    assert RLHFArgs().rounding == "fp32" and RLHFArgs(weight_precision="bf16").rounding == "bf16"


def test_wrong_type_raises_with_field_and_value():
    wrong = {
        "seed": [True, 2.0, "1", None, np.int64(7)],
        "kl_coef": [True, "1", None, np.float32(0.25)],
        "prefix": [3, None, ("reel",)],
        "chat": [1, None],
        "kl_in": ["both", 3, None],
        "top_k": [2.5, True],
        "vf_clip": ["1", True],
        "reward_weights": [("1",), (True,), (1.0, "a"), 1.0],
    }
    for name, values in wrong.items():
        for value in values:
            problem = (
                "is unknown. Choose one of: 'loss'" if name == "kl_in" else "has the wrong type"
            )
            assert f"{name}={value!r} {problem}" in rejection(**{name: value})


def test_integers_and_lists_become_floats_and_tuples():
    args = RLHFArgs(base_lr=1, kl_coef=0, reward_fn="true_reward,length", reward_weights=[2, 0.5])
    assert (args.base_lr, type(args.kl_coef)) == (1.0, float)
    assert args.reward_weights == (2.0, 0.5)
    assert "base_lr=inf is out of range" in rejection(base_lr=10**400)


@pytest.mark.parametrize(
    ("of", "name"), [(of, name) for of, names in RANGES.items() for name in names.split()]
)
def test_value_out_of_range_raises(of, name):
    for value in INVALID[of.remedy]:
        if HINTS[name] in (float, float | None):
            value = float(value)
        if HINTS[name] not in (int, int | None) or isinstance(value, int):
            message = rejection(**{name: value})
            finite = "finite and " if value in (float("inf"), -float("inf")) else ""
            assert f"{name}={value!r} is out of range. It must be {finite}{of.remedy}." == message
    if of.remedy in EDGES:
        assert of.holds(EDGES[of.remedy])


IN_BACKWARD = dict(optimizer_in_backward=True, max_grad_norm=None)
REMAX = dict(advantages="remax", normalize_reward=False)
GROUPS_OF_2 = dict(dynamic_sampling=2, samples_per_prompt=2)
TOKENS = dict(reward_per_token=True, reward_fn="learned", normalize_reward=False)
CONFLICTS = [
    (dict(batch_size=30, num_minibatches=4), "batch_size=30 is not divisible by num_minibatches=4"),
    (dict(samples_per_prompt=5), "batch_size=32 is not divisible by samples_per_prompt=5"),
    (dict(warmup_steps=200), "warmup_steps=200 must be below total_phases=200"),
    (dict(method="gkd", reset_reference_every=2), "reset_reference_every=2 discards the teacher"),
    (dict(reference_model="m", reset_reference_every=2), "reset_reference_every=2 discards the"),
    (dict(reset_reference_every=200), "reset_reference_every=200 must be below total_phases=200"),
    (dict(advantages="rloo"), "advantages='rloo' compares .* samples_per_prompt=1"),
    (dict(advantages="remax"), "normalize_reward=True .*advantages='remax'"),
    (REMAX | dict(whiten_rewards=True), "whiten_rewards=True"),
    (dict(optimizer_in_backward=True), "max_grad_norm=1.0 .* optimizer_in_backward=True"),
    (IN_BACKWARD | dict(micro_batch_size=4), "micro_batch_size=4 cannot be combined"),
    (dict(lora_rank=2, adapter_path="x"), "lora_rank=2 conflicts with adapter_path='x'"),
    (dict(lora_rank=2, weight_precision="bf16"), "lora_rank=2 conflicts with weight_pre"),
    (dict(adapter_path="x", weight_precision="bf16"), "adapter_path='x' conflicts with"),
    (dict(optimizer="adamw_8bit", weight_precision="bf16"), "optimizer='adamw_8bit' conflicts"),
    (dict(precision="bf16", weight_precision="bf16"), "precision='bf16' conflicts with"),
    (dict(critic_path="x"), "critic_path='x' has no effect .*set value_head to separate"),
    (dict(kl_controller="adaptive", kl_horizon=31), "batch_size=32 exceeds kl_horizon=31"),
    (dict(gen_len_min=51), "gen_len_min=51 exceeds gen_len=50"),
    (dict(min_response_length=51, stop_at_eos=True), "min_response_length=51 exceeds gen_len=50"),
    (dict(system_prompt="Kind"), "system_prompt='Kind' has no effect with chat=False"),
    (dict(prompts_column="text"), "prompts_column='text' has no effect with prompts=None"),
    (dict(kl_target=3.0), "kl_target=3.0 has no effect with kl_controller='fixed'.*set kl_cont"),
    (dict(kl_controller="adaptive", kl_coef=0.0), "kl_coef=0.0 stays 0 with kl_controller='adap"),
    (dict(clip_coef_high=0.3, policy_loss="policy_gradient"), "clip_coef_high=0.3 has no effect"),
    (dict(dual_clip=3.0, policy_loss="gspo"), "dual_clip=3.0 has no effect .*'gspo'"),
    (dict(max_log_ratio=3.0, policy_loss="cispo"), "max_log_ratio=3.0 has no effect .*'cispo'"),
    (dict(vf_clip=0.2, vf_coef=0.0), "vf_clip=0.2 has no effect with vf_coef=0"),
    (dict(reward_penalty=-5.0), "reward_penalty=-5.0 has no effect without penalize_no_eos"),
    (dict(gae_lambda=0.9, advantages="one_step"), "gae_lambda=0.9 has no effect"),
    (dict(gamma=0.9, advantages="remax"), "gamma=0.9 has no effect with advantages='remax'"),
    (dict(batch_size=1), "normalize_reward=True with batch_size=1"),
    (dict(reward_scaling="scale"), "reward_scaling='scale' is undone by normalize_reward=True"),
    (dict(penalize_no_eos=True), "penalize_no_eos=True requires .* stop_at_eos=False"),
    (dict(overlong_buffer=4), "overlong_buffer=4 requires .* stop_at_eos=False"),
    (dict(reward_fn="true_reward,true_reward"), "has 'true_reward' twice"),
    (dict(reward_fn="true_reward,regex:"), "has no value after 'regex:'"),
    (dict(reward_fn="exact_match"), "reward_fn='exact_match' requires .*answers_column"),
    (dict(direction="neg", reward_fn="learned,zero"), "direction='neg' has no effect .*'learned,z"),
    (dict(positive_label="good", reward_fn="zero"), "positive_label='good' has no effect"),
    (dict(reward_per_token=True), "reward_per_token=True requires reward_fn='learned'"),
    (dict(reward_per_token=True, reward_fn="learned"), "normalize_reward=True is for one"),
    (TOKENS | GROUPS_OF_2, "dynamic_sampling=2 is for one"),
    (dict(reward_fn="diversity:2", **REMAX), "advantages='remax' scores"),
    (dict(reward_fn="diversity:2", **GROUPS_OF_2), "dynamic_sampling=2 scores"),
    (dict(reward_fn=len), r"is a function.*RLHFTrainer\(args, reward_fn="),
    (dict(preset="gpt3"), "Unknown preset='gpt3'"),
]
VALID = [  # next to a conflict
    dict(batch_size=30, num_minibatches=5, samples_per_prompt=6),
    dict(direction="neg", reward_fn="zero,sentiment"),
    dict(preset="smol", reward_fn="zero"),  # the preset's direction is neg
    IN_BACKWARD,
    dict(kl_controller="adaptive", kl_horizon=32),
    dict(gen_len_min=50, min_response_length=50, stop_tokens="."),
    dict(overlong_buffer=4, stop_token_ids="5"),
    dict(overlong_buffer=4, chat=True),
    dict(clip_coef_high=0.3, policy_loss="cispo"),
    dict(max_log_ratio=3.0, policy_loss="gspo"),
    dict(gamma=0.9, advantages="reinforce++"),
    dict(warmup_steps=199, reset_reference_every=199),
    dict(batch_size=1, normalize_reward=False, reward_scaling="scale"),
]


@pytest.mark.parametrize("fields", VALID, ids=str)
def test_neighboring_values_are_valid(fields):
    RLHFArgs(**fields)


@pytest.mark.parametrize(("fields", "words"), CONFLICTS, ids=str)
def test_conflicting_values_raise_with_both_names(fields, words):
    assert re.search(words, message := rejection(**fields)), message


@pytest.mark.parametrize(
    ("name", "here"),
    [
        ("learning_rate", "Use base_lr and head_lr"),
        ("num_steps", r"Use total_phases \(torchtune's; torchrl's window"),
        ("steps", "Use total_phases"),  # not warmup_steps
        ("phases", "Use total_phases"),
        ("warp", r"See `help\(RLHFArgs\)`"),
    ],
)
def test_unknown_field_raises_with_suggestion(name, here):
    assert re.match(rf"RLHFArgs has no field '{name}'\. {here}", rejection(**{name: 1}))


def test_aliases_are_not_fields_and_lead_to_fields():
    assert not set(ALIASES) & set(HINTS)
    for here in ALIASES.values():
        assert set(re.findall(r"\w+_\w+|prompts|chat|loggers", here)) <= set(HINTS), here
