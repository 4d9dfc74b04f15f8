"""Settings from a YAML 1.2 file or run.json, below the options of a command."""

import json

import pytest

from rlhf_lab.__main__ import parse
from rlhf_lab.config import RLHFArgs
from rlhf_lab.errors import ConfigError

YAML = """
# a comment
preset: reel
base_lr: 1e-5          # a text in YAML 1.1
reward_scaling: off    # False in YAML 1.1
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


def train_args(*options) -> RLHFArgs:
    """Return the settings of a `train` command."""
    return parse(["train", *map(str, options)]).keywords["args"]


def test_options_override_file_and_file_overrides_preset(file):
    args = RLHFArgs.from_file(file)
    assert (args.base_lr, args.reward_scaling, args.normalize_reward) == (1e-5, "off", False)
    assert args.keep_checkpoints is None and args.stop_tokens == "." and args.prefix == "this movie"
    assert train_args("--config", file) == args
    args = train_args("--config", file, "--base-lr", "0.5", "--normalize-reward", "--seed=7")
    assert (args.base_lr, args.normalize_reward, args.seed) == (0.5, True, 7)
    assert (args.total_phases, args.kl_coef) == (3, 0.3)
    smol = train_args(f"--config={file}", "--preset", "smol")
    assert smol == RLHFArgs.from_file(file, preset="smol")
    file.write_text("save_every: 7\nkeep_checkpoints: 2\n")  # all that preset gpt2-medium sets
    assert train_args("--config", file).save_every == 7


@pytest.mark.parametrize("preset", ["reel", "gpt2-medium"])
def test_a_runs_own_file_gives_its_settings_back(tmp_path, preset):
    args = RLHFArgs(preset=preset, total_phases=7, top_p=0.9, kl_coef=0.123, seed=2**40)
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"status": "finished", "args": args.to_dict(), "final": {}}))
    assert RLHFArgs.from_file(path) == args == train_args("--config", path)
    assert train_args("--config", path, "--total-phases", "9").total_phases == 9
    with pytest.raises(ConfigError, match="preset='sums' has no effect, because .*run.json sets"):
        train_args("--config", path, "--preset", "sums")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no fields"),
        ("kl_coef: 0.1\nkl_coef: 0.2", "run.yaml is not valid YAML .*duplicate key.*line 2"),
        ("kl_cof: 0.1", "run.yaml: RLHFArgs has no field 'kl_cof'"),
        ("kl_coef: high", "run.yaml: kl_coef='high' has the wrong type"),
        ("kl_coef: !!python/object/apply:os.system ['touch hacked']", "run.yaml"),
        ("1: 2", "run.yaml: RLHFArgs has no field '1'"),
    ],
)
def test_invalid_file_raises_with_its_name(tmp_path, monkeypatch, text, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=words) as caught:
        train_args("--config", "run.yaml")
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]


def test_unreadable_file_raises(tmp_path):
    (tmp_path / "latin").write_bytes("prefix: caf\xe9".encode("latin-1"))
    for name, words in {"nowhere": "cannot be read", "latin": "utf-8.*Use a file in UTF-8"}.items():
        with pytest.raises(ConfigError, match=words):
            RLHFArgs.from_file(tmp_path / name)


@pytest.mark.parametrize("phases", [1, 2, 3])
def test_default_warm_up_ends_before_last_phase(phases):
    assert RLHFArgs(preset="smol", total_phases=phases).warmup_steps == min(2, phases - 1)
    assert train_args("--total-phases", phases).warmup_steps == min(2, phases - 1)
    with pytest.raises(ConfigError, match="warmup_steps=3 must be below"):
        RLHFArgs(preset="reel", total_phases=phases, warmup_steps=3)


@pytest.mark.slow
@pytest.mark.typed
@pytest.mark.parametrize(("batch", "parts"), [(1, 1), (12, 6), (13, 1), (256, 8)])
def test_default_number_of_minibatches_divides_batch(batch, parts):
    args = train_args("--batch-size", batch, "--no-normalize-reward")
    assert args.num_minibatches == parts
    with pytest.raises(ConfigError, match="not divisible by num_minibatches=5"):
        RLHFArgs(preset="reel", batch_size=batch, num_minibatches=5)


def test_flags_take_values_of_wandb_sweep_agents():
    for value, expected in {"True": True, "False": False, "false": False}.items():
        args = train_args(f"--normalize_reward={value}", "--top_k=None")
        assert (args.normalize_reward, args.top_k) == (expected, None)
    with pytest.raises(SystemExit):
        parse(["train", "--normalize_reward=perhaps"])
