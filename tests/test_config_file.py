"""Settings from a file, YAML 1.2 or a run's own run.json, under the options of a command."""

import json

import pytest

from rlhf_lab.__main__ import parse
from rlhf_lab.config import RLHFArgs
from rlhf_lab.errors import ConfigError

YAML = """
# what is tried this week
preset: reel
base_lr: 1e-5          # YAML 1.1 would read a text here
reward_scaling: off    # and False here
normalize_reward: false
keep_checkpoints: null
stop_tokens: "."
total_phases: 3
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(YAML, encoding="utf-8")
    return path


def trained_with(*options) -> RLHFArgs:
    """The settings that `train` would run with."""
    return parse(["train", *map(str, options)]).keywords["args"]


def test_yaml_is_read_as_version_1_2(file):
    args = RLHFArgs.from_file(file)
    assert (args.base_lr, args.reward_scaling, args.normalize_reward) == (1e-5, "off", False)
    assert args.keep_checkpoints is None and args.stop_tokens == "." and args.prefix == "this movie"


def test_options_stand_over_the_file_and_the_file_over_the_preset(file):
    args = trained_with("--config", file, "--base-lr", "0.5", "--normalize-reward", "--seed=7")
    assert (args.base_lr, args.normalize_reward, args.seed) == (0.5, True, 7)
    assert (args.total_phases, args.kl_coef) == (3, 0.3)
    assert trained_with("--config", file) == RLHFArgs.from_file(file)
    assert trained_with(f"--config={file}", "--preset", "smol") == RLHFArgs.from_file(
        file, preset="smol"
    )


@pytest.mark.parametrize("preset", ["reel", "smol", "gpt2-medium"])
def test_a_runs_own_file_gives_its_settings_back(tmp_path, preset):
    args = RLHFArgs(preset=preset, total_phases=7, top_p=0.9, kl_coef=0.123, seed=2**40)
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"status": "finished", "args": args.to_dict(), "final": {}}))
    assert RLHFArgs.from_file(path) == args == trained_with("--config", path)
    changed = trained_with("--config", path, "--total-phases", "9")
    assert changed.total_phases == 9 and changed.kl_coef == 0.123


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "sets no field"),
        ("# only a comment", "sets no field"),
        ("- a\n- b", "sets no field"),
        ("just text", "sets no field"),
        ("kl_coef: 0.1\nkl_coef: 0.2", "run.yaml, line 2 is no YAML .*duplicate key"),
        ("kl_coef: [1, 2", "is no YAML"),
        ("a: b: c", "line 1 is no YAML"),
        ("\tkl_coef: 1", "is no YAML"),
        ("kl_cof: 0.1", "run.yaml: RLHFArgs has no field 'kl_cof'"),
        ("kl_coef: high", "run.yaml: kl_coef='high' is not allowed"),
        ("kl_coef: -1", "run.yaml: kl_coef=-1.* is out of range"),
        ("preset: rel", "run.yaml: preset='rel' is unknown"),
        ("total_phases: 2\nwarmup_steps: 2", "run.yaml: warmup_steps=2 must be smaller"),
        ("seed: .nan", "run.yaml: seed=nan is not allowed"),
        ("kl_coef: !!python/object/apply:os.system ['touch hacked']", "run.yaml"),
        ("kl_coef: *nothing", "is no YAML"),
        ("1: 2", "run.yaml: RLHFArgs has no field '1'"),
        ('{"args": {}}', "run.yaml: RLHFArgs has no field 'args'|sets no field"),
    ],
)
def test_a_file_that_cannot_be_is_refused_with_its_name(tmp_path, monkeypatch, text, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=words) as refusal:
        trained_with("--config", "run.yaml")
    assert "\n" not in str(refusal.value)
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    (tmp_path / "latin").write_bytes("prefix: caf\xe9".encode("latin-1"))
    for name, words in {
        "nowhere": "cannot be read",
        "": "cannot be read",
        "latin": "utf-8",
    }.items():
        with pytest.raises(ConfigError, match=words):
            RLHFArgs.from_file(tmp_path / name)
    with pytest.raises(ConfigError, match="Missing value for argument '--config'"):
        parse(["train", "--config"])


@pytest.mark.parametrize("preset", ["reel", "smol", "gpt2-small", "gpt2-medium"])
@pytest.mark.parametrize("phases", [1, 2, 3])
def test_a_warm_up_that_nobody_asked_for_gives_way(preset, phases):
    full = RLHFArgs(preset=preset).warmup_steps
    for args in (
        RLHFArgs(preset=preset, total_phases=phases),
        trained_with("--preset", preset, "--total-phases", phases),
    ):
        assert args.warmup_steps == min(full, phases - 1)
    with pytest.raises(ConfigError, match="warmup_steps=3 must be smaller"):
        RLHFArgs(preset=preset, total_phases=phases, warmup_steps=3)
    with pytest.raises(ConfigError, match="warmup_steps=3 must be smaller"):
        trained_with("--preset", preset, "--total-phases", phases, "--warmup-steps", 3)


@pytest.mark.parametrize(("batch", "parts"), [(1, 1), (4, 4), (12, 6), (7, 7), (13, 1), (256, 8)])
def test_minibatches_that_nobody_asked_for_divide_the_batch(batch, parts):
    plain = {"normalize_reward": False}  # of one reward nothing is left
    assert RLHFArgs(preset="reel", batch_size=batch, **plain).num_minibatches == parts
    found = trained_with("--batch-size", batch, "--no-normalize-reward")
    assert found.num_minibatches == parts
    with pytest.raises(ConfigError, match="not divisible by num_minibatches=5"):
        RLHFArgs(preset="reel", batch_size=batch, num_minibatches=5, **plain)


def test_what_was_asked_for_is_refused_also_where_a_preset_says_the_same():
    with pytest.raises(ConfigError, match="warmup_steps=2 must be smaller than total_phases=2"):
        trained_with("--total-phases", 2, "--warmup-steps", 2)
    with pytest.raises(ConfigError, match="batch_size=12 is not divisible by num_minibatches=8"):
        trained_with("--batch-size", 12, "--num-minibatches=8")


@pytest.mark.parametrize("spelling", ["normalize_reward", "normalize-reward"])
@pytest.mark.parametrize(
    ("value", "expected"), [("True", True), ("False", False), ("false", False)]
)
def test_a_switch_takes_its_value_as_the_agent_of_a_sweep_writes_it(spelling, value, expected):
    args = trained_with(f"--{spelling}={value}", "--top_k=None")
    assert (args.normalize_reward, args.top_k) == (expected, None)


def test_a_value_that_is_neither_true_nor_false_is_refused():
    with pytest.raises(ConfigError, match="perhaps"):
        parse(["train", "--normalize_reward=perhaps"])
