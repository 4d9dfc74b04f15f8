"""Tests RLHFArgs: the defaults of the seed notebook, presets, and the refusal of wrong values."""

import dataclasses
import json
import math
import re

import numpy as np
import pytest

from rlhf_lab.config import GROUPS, PRESETS, RLHFArgs
from rlhf_lab.config.names_elsewhere import FIELDS_ELSEWHERE
from rlhf_lab.errors import ConfigError

SEED_DEFAULTS = {
    "seed": 1,
    "wandb_project_name": "rlhf_transformers",
    "wandb_entity": None,
    "total_phases": 200,
    "batch_size": 32,
    "num_minibatches": 4,
    "batches_per_learning_phase": 2,
    "base_lr": 2e-5,
    "head_lr": 5e-4,
    "max_grad_norm": 1.0,
    "warmup_steps": 20,
    "final_scale": 0.1,
    "clip_coef": 0.2,
    "vf_coef": 0.15,
    "ent_coef": 0.001,
    "base_model": "gpt2-medium",
    "gen_len": 50,
    "temperature": 1.0,
    "top_k": 10,
    "prefix": "This is",
    "prepend_bos": True,
    "kl_coef": 2.5,
    "normalize_reward": True,
}
FIELDS = [field.name for field in dataclasses.fields(RLHFArgs)]
OPTIONAL = {
    "keep_checkpoints",
    "wandb_mode",
    "wandb_entity",
    "wandb_group",
    "wandb_tags",
    "wandb_notes",
    "vf_clip",
    "top_k",
    "top_p",
    "clip_coef_high",
    "dual_clip",
    "prompts",
    "prompt_words",
    "labels_column",
    "system_prompt",
    "answers_column",
    "reward_weights",
    "reset_reference_every",
    "positive_label",
    "gen_len_min",
    "micro_batch_size",
    "generation_batch_size",
    "target_kl",
    "ratio_threshold",
    "reward_clip",
    "max_log_ratio",
    "max_grad_norm",
    "stop_tokens",
    "stop_token_ids",
    "critic_from",
    "adapter_from",
    "dynamic_sampling",
}
WHOLE_NUMBERS = (
    "seed total_phases batch_size num_minibatches batches_per_learning_phase warmup_steps gen_len "
    "top_k save_every samples_per_prompt "
    "min_response_length overlong_buffer micro_batch_size generation_batch_size "
    "gen_len_min prompt_words dynamic_sampling keep_checkpoints"
).split()
NUMBERS = (
    "base_lr head_lr weight_decay max_grad_norm final_scale clip_coef vf_coef vf_clip ent_coef "
    "gamma gae_lambda temperature top_p kl_coef clip_coef_high max_log_ratio "
    "reward_clip target_kl"
).split()
OUT_OF_RANGE = [
    ("seed", -1),
    ("keep_checkpoints", -1),
    ("total_phases", 0),
    ("batch_size", 0),
    ("batch_size", -4),
    ("num_minibatches", 0),
    ("batches_per_learning_phase", 0),
    ("base_lr", -1e-5),
    ("head_lr", -1e-5),
    ("weight_decay", -0.01),
    ("max_grad_norm", 0.0),
    ("max_grad_norm", -1.0),
    ("target_kl", 0.0),
    ("ratio_threshold", 1.0),
    ("micro_batch_size", 0),
    ("generation_batch_size", 0),
    ("prompts", ""),
    ("prompts_column", ""),
    ("prompt_words", 0),
    ("labels_column", ""),
    ("system_prompt", " "),
    ("answers_column", ""),
    ("reset_reference_every", 0),
    ("reward_weights", ()),
    ("positive_label", ""),
    ("critic_from", ""),
    ("adapter_from", ""),
    ("stop_tokens", ""),
    ("stop_tokens", "was,"),
    ("stop_token_ids", ""),
    ("stop_token_ids", "3,"),
    ("stop_token_ids", "-1"),
    ("stop_token_ids", "²"),
    ("stop_token_ids", "3.5"),
    ("optimizer", "sgd"),
    ("gen_len_min", 0),
    ("warmup_steps", -1),
    ("final_scale", -0.1),
    ("final_scale", 1.1),
    ("clip_coef", 0.0),
    ("clip_coef", -0.2),
    ("clip_coef_high", 0.0),
    ("dual_clip", 1.0),
    ("max_log_ratio", 0.0),
    ("policy_loss", "trpo"),
    ("loss_aggregation", "sum"),
    ("kl_in", "value"),
    ("reward_scaling", "batch"),
    ("reward_clip", 0.0),
    ("reward_penalty", 0.0),
    ("min_response_length", -1),
    ("overlong_buffer", -1),
    ("kl_estimator", "k4"),
    ("vf_coef", -0.1),
    ("vf_clip", 0.0),
    ("vf_clip", -0.2),
    ("ent_coef", -0.001),
    ("samples_per_prompt", 0),
    ("gamma", 1.01),
    ("gamma", -0.1),
    ("gae_lambda", 1.01),
    ("gae_lambda", -0.1),
    ("gen_len", 0),
    ("temperature", 0.0),
    ("temperature", -1.0),
    ("top_k", 0),
    ("top_k", -1),
    ("top_p", 0.0),
    ("top_p", 1.1),
    ("kl_coef", -0.1),
    ("save_every", 0),
    ("base_model", ""),
    ("reward_fn", ""),
    ("reward_model", ""),
    ("wandb_project_name", ""),
    ("preset", "gpt3"),
    ("preset", ""),
    ("advantages", "vtrace"),
    ("direction", "positive"),
    ("direction", "POS"),
    ("wandb_mode", "on"),
    ("wandb_group", ""),
    ("wandb_tags", ""),
    ("wandb_tags", "one,,two"),
    ("loggers", "tensorboard,csv"),
]
WRONG_TYPE = [
    *((name, True) for name in WHOLE_NUMBERS + NUMBERS),
    *((name, 2.0) for name in WHOLE_NUMBERS),
    *((name, "1") for name in WHOLE_NUMBERS + NUMBERS),
    *((name, bad) for name in NUMBERS for bad in (math.nan, math.inf, -math.inf)),
    *((name, None) for name in FIELDS if name not in OPTIONAL),
    *((name, 1) for name in ("prepend_bos", "stop_at_eos", "normalize_reward", "penalize_no_eos")),
    *((name, 0) for name in ("normalize_advantages",)),
    *((name, 3) for name in ("base_model", "reward_model", "prefix", "device", "wandb_entity")),
    ("wandb_notes", 3),
    ("reward_fn", max),
    ("preset", ["reel"]),
]


def refusal(**fields):
    with pytest.raises(ConfigError) as caught:
        RLHFArgs(**fields)
    sentence = str(caught.value)
    assert "\n" not in sentence and sentence.endswith(".")
    return sentence


@pytest.mark.parametrize(("name", "default"), SEED_DEFAULTS.items())
def test_the_defaults_are_those_of_the_seed_notebook(name, default):
    value = getattr(RLHFArgs(), name)
    assert value == default and type(value) is type(default)


def test_the_reward_is_a_name():
    assert RLHFArgs().reward_fn == "sentiment"
    assert RLHFArgs().reward_model == "lvwerra/distilbert-imdb"


def test_what_the_seed_did_not_have_is_off_or_as_it_was():
    args = RLHFArgs()
    assert (args.advantages, args.gamma, args.weight_decay) == ("one_step", 1.0, 0.01)
    assert args.vf_clip is None and args.top_p is None
    assert args.stop_at_eos is False and args.normalize_advantages is True
    assert (args.wandb_mode, args.device, args.direction) == (None, "auto", "pos")


def test_the_minibatch_size_divides_the_batch():
    assert RLHFArgs().minibatch_size == 8
    assert RLHFArgs(batch_size=30, num_minibatches=5).minibatch_size == 6


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_overrides_defaults_and_leaves_the_rest(preset):
    args = RLHFArgs(preset=preset)
    assert args.preset == preset
    for field in dataclasses.fields(RLHFArgs):
        if field.name != "preset":
            expected = PRESETS[preset].get(field.name, field.default)
            assert getattr(args, field.name) == expected, field.name


def test_the_presets_name_their_models():
    models = {preset: RLHFArgs(preset=preset).base_model for preset in PRESETS}
    assert models == {
        "reel": "reel-nano",
        "smol": "HuggingFaceTB/SmolLM2-135M-Instruct",
        "gpt2-small": "gpt2",
        "gpt2-medium": "gpt2-medium",
    }


@pytest.mark.parametrize("preset", PRESETS)
def test_a_given_field_overrides_its_preset_even_with_the_plain_default(preset):
    plain = RLHFArgs()
    for name in PRESETS[preset]:
        given = {name: getattr(plain, name)}
        if name in ("batch_size", "num_minibatches"):
            given = {"batch_size": plain.batch_size, "num_minibatches": plain.num_minibatches}
        if name in ("total_phases", "warmup_steps"):
            given = {"total_phases": plain.total_phases, "warmup_steps": plain.warmup_steps}
        assert getattr(RLHFArgs(preset=preset, **given), name) == getattr(plain, name)


def test_none_overrides_a_preset():
    assert PRESETS["reel"]["top_k"] is None and RLHFArgs(preset="reel", top_k=3).top_k == 3
    assert RLHFArgs(preset="smol", top_k=None).top_k is None


def test_presets_cannot_be_changed_by_accident():
    with pytest.raises(TypeError):
        PRESETS["mine"] = {}
    given = {"preset": "reel", "gen_len": 5}
    RLHFArgs(**given)
    assert given == {"preset": "reel", "gen_len": 5}


@pytest.mark.parametrize("name", ["gen_len", "preset", "something_new"])
def test_the_arguments_are_frozen(name):
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(RLHFArgs(), name, 5)


def test_loggers_are_named_with_commas_each_once():
    assert RLHFArgs().logger_names == []
    args = RLHFArgs(loggers="trackio, tensorboard,,trackio")
    assert args.logger_names == ["trackio", "tensorboard"]
    assert "names 'csv'" in refusal(loggers="trackio,csv")


def test_equal_arguments_are_equal_and_hash_alike():
    assert RLHFArgs(gen_len=5) == RLHFArgs(gen_len=5) != RLHFArgs(gen_len=6)
    assert hash(RLHFArgs(gen_len=5)) == hash(RLHFArgs(gen_len=5))


@pytest.mark.parametrize("preset", PRESETS)
def test_arguments_survive_the_way_through_json(preset):
    args = RLHFArgs(preset=preset, gen_len=7, vf_clip=0.5, top_p=0.9, wandb_entity="someone")
    assert RLHFArgs.from_dict(json.loads(json.dumps(args.to_dict()))) == args
    assert set(args.to_dict()) == set(FIELDS)


def test_the_arguments_of_an_earlier_version_still_load():
    """penalize_no_eos was penalise_no_eos; other names are refused as ever."""
    fields = RLHFArgs(penalize_no_eos=True, stop_at_eos=True).to_dict()
    earlier = {name.replace("penalize", "penalise"): value for name, value in fields.items()}
    assert earlier.keys() != fields.keys()
    assert RLHFArgs.from_dict(earlier) == RLHFArgs.from_dict(fields)
    assert RLHFArgs.from_dict(earlier).penalize_no_eos is True
    assert "penalise_no_eos" in refusal(penalise_no_eos=True)


def test_every_field_is_in_one_group_and_in_the_order_of_the_groups():
    grouped = [field.name for group in GROUPS.values() for field in dataclasses.fields(group)]
    assert grouped == FIELDS and len(set(grouped)) == len(grouped)


def test_a_preset_does_not_creep_back_in_on_the_way_through_json():
    args = RLHFArgs(preset="reel", top_k=10, kl_coef=2.5)
    back = RLHFArgs.from_dict(args.to_dict())
    assert (back.top_k, back.kl_coef) == (10, 2.5)


def test_replace_changes_one_field_and_keeps_the_others():
    args = RLHFArgs(preset="reel", kl_coef=0.7)
    changed = dataclasses.replace(args, gen_len=3)
    assert changed.gen_len == 3 and args.gen_len != 3
    assert changed.to_dict() == args.to_dict() | {"gen_len": 3}


def test_replace_checks_like_the_constructor():
    with pytest.raises(ConfigError, match="gen_len=0"):
        dataclasses.replace(RLHFArgs(), gen_len=0)
    with pytest.raises(ConfigError, match="batch_size=31"):
        dataclasses.replace(RLHFArgs(), batch_size=31)


def test_a_reward_function_is_answered_with_where_it_goes():
    with pytest.raises(
        ConfigError, match=r"reward_fn=.* is a function.*RLHFTrainer\(args, reward_fn="
    ):
        RLHFArgs(reward_fn=lambda texts: [0.0] * len(texts))


@pytest.mark.parametrize("name", ["gen_length", "minibatch_size", "Seed"])
def test_an_unknown_field_is_refused_by_name(name):
    assert repr(name) in refusal(**{name: 3})
    with pytest.raises(ConfigError, match=name):
        RLHFArgs.from_dict({name: 3})


def test_every_field_has_a_value_that_is_refused():
    assert {name for name, _ in OUT_OF_RANGE + WRONG_TYPE} == set(FIELDS)


@pytest.mark.parametrize(("name", "value"), OUT_OF_RANGE)
def test_a_value_out_of_range_is_refused_by_name(name, value):
    assert f"{name}={value!r}" in refusal(**{name: value})


@pytest.mark.slow
@pytest.mark.parametrize(("name", "value"), WRONG_TYPE)
def test_a_value_of_the_wrong_kind_is_refused_by_name(name, value):
    assert f"{name}={value!r}" in refusal(**{name: value})


@pytest.mark.parametrize("name", NUMBERS)
def test_a_whole_number_will_do_for_a_number(name):
    assert getattr(RLHFArgs(**{name: 1}), name) == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"base_lr": 0.0, "head_lr": 0.0, "weight_decay": 0.0},
        {"vf_coef": 0.0, "ent_coef": 0.0, "kl_coef": 0.0},
        {"final_scale": 0.0, "gamma": 0.0, "gae_lambda": 0.0},
        {"final_scale": 1.0, "gamma": 1.0, "gae_lambda": 1.0, "top_p": 1.0},
        {"top_k": None, "top_p": None, "vf_clip": None, "wandb_entity": None},
        {"total_phases": 1, "warmup_steps": 0},
        {"seed": 0, "gen_len": 1, "top_k": 1, "save_every": 1},
        {"batch_size": 1, "num_minibatches": 1, "normalize_reward": False},
        {"batch_size": 4, "num_minibatches": 4},
        {"prefix": ""},
        {"reward_fn": "count:great"},
    ],
    ids=str,
)
def test_the_edges_of_what_is_allowed_are_allowed(fields):
    args = RLHFArgs(**fields)
    assert {name: getattr(args, name) for name in fields} == fields


@pytest.mark.parametrize(
    ("name", "here"),
    [
        ("learning_rate", "base_lr and head_lr"),
        ("init_kl_coef", "kl_coef"),
        ("cliprange", "clip_coef"),
        ("forward_batch_size", "generation_batch_size"),
        ("gen_length", "gen_len"),
        ("normalise_reward", "normalize_reward"),
    ],
)
def test_a_name_of_another_package_or_a_slip_is_answered_with_the_name_here(name, here):
    with pytest.raises(ConfigError, match=f"no field '{name}'; here it is {here}"):
        RLHFArgs(**{name: 1})


def test_a_name_that_nothing_comes_near_is_left_to_the_help():
    with pytest.raises(ConfigError, match=r"no field 'warp'; see `help\(RLHFArgs\)`"):
        RLHFArgs(warp=1)


def test_the_names_of_other_packages_are_no_fields_and_what_stands_for_them_is():
    fields = {field.name for field in dataclasses.fields(RLHFArgs)}
    assert not set(FIELDS_ELSEWHERE) & fields
    for here in FIELDS_ELSEWHERE.values():
        words = set(re.findall(r"[a-z_]+", here)) - {"and", "their", "number"}
        assert words and words <= fields, here


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"batch_size": 30, "num_minibatches": 4}, ["batch_size=30", "num_minibatches=4"]),
        ({"num_minibatches": 33}, ["batch_size=32", "num_minibatches=33"]),
        ({"warmup_steps": 200}, ["warmup_steps=200", "total_phases=200"]),
        ({"total_phases": 10, "warmup_steps": 20}, ["warmup_steps=20", "total_phases=10"]),
        ({"batch_size": 1, "num_minibatches": 1}, ["normalize_reward=True", "batch_size=1"]),
        ({"reward_fn": "count:"}, ["reward_fn='count:'"]),
        ({"reward_per_token": True}, ["reward_per_token=True", "reward_fn='sentiment'"]),
        (
            {"reward_per_token": True, "reward_fn": "learned"},
            ["normalize_reward=True is for one reward per text", "normalize_reward=False"],
        ),
        (
            {"advantages": "remax", "normalize_reward": False, "whiten_rewards": True},
            ["advantages='remax'", "whiten_rewards=True"],
        ),
        ({"gen_len_min": 51}, ["gen_len_min=51", "gen_len=50"]),
        ({"micro_batch_size": 3}, ["micro_batch_size=3", "8 sequences"]),
        ({"reward_scaling": "scale"}, ["reward_scaling='scale'", "normalize_reward=True"]),
        ({"penalize_no_eos": True}, ["penalize_no_eos=True", "stop_at_eos=False"]),
        ({"overlong_buffer": 4}, ["overlong_buffer=4", "stop_at_eos=False"]),
        ({"min_response_length": 51, "stop_at_eos": True}, ["=51", "gen_len=50"]),
        ({"clip_coef_high": 0.3, "policy_loss": "policy_gradient"}, ["clip_coef_high=0.3"]),
        ({"dual_clip": 3.0, "policy_loss": "gspo"}, ["dual_clip=3.0", "policy_loss='gspo'"]),
        ({"max_log_ratio": 3.0, "policy_loss": "cispo"}, ["max_log_ratio=3.0", "'cispo'"]),
    ],
    ids=str,
)
def test_values_that_do_not_go_together_are_refused_with_both_names(fields, named):
    sentence = refusal(**fields)
    assert all(name in sentence for name in named)


def test_no_prompt_and_no_bos_is_refused_before_a_model_is_loaded():
    sentence = refusal(prefix="", prepend_bos=False)
    assert "prefix" in sentence and "prepend_bos" in sentence


def test_numbers_from_numpy_are_refused_or_survive_json():
    try:
        args = RLHFArgs(gen_len=np.int64(5), kl_coef=np.float64(0.5))
    except ConfigError:
        return
    assert RLHFArgs.from_dict(json.loads(json.dumps(args.to_dict()))) == args
