"""The commands that train models from data, and those that read chats and adapters."""

import json

import pytest
import torch
from huggingface_hub.repocard import metadata_load
from safetensors.torch import load_file

from rlhf_lab import tuning
from rlhf_lab.config import RLHFArgs
from rlhf_lab.errors import ConfigError
from rlhf_lab.model_commands import load_run_or_model
from rlhf_lab.organism.bundled import weights_dir
from rlhf_lab.rewards import LearnedReward
from rlhf_lab.training.resume import load_policy
from tests.bad_input.command_outcome import accepted, rejected
from tests.tiny_models import tiny_chat

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_type_checks")]
NOUNS = ("plot", "script", "music", "camera")
FEW = ["--steps", "8", "--n-pairs", "60", "--batch-size", "16", "--device", "cpu"]
FIT = "--steps 6 --batch-size 2 --held-out 0.5 --learning-rate 3e-3 --device cpu".split()
TRAIN = "train --total-phases 1 --warmup-steps 0 --batch-size 8 --num-minibatches 2".split()
TRAIN += ["--gen-len", "4", "--device", "cpu"]
ASK, REPLY = {"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": "w3"}


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read_notes(out):
    return json.loads((out / "tuning.json").read_text())


def test_train_reward_writes_a_reward_of_runs(tmp_path):
    out, losses = tmp_path / "reward", ["--margin", "0.5", "--centering", "0.01"]
    done = accepted(["train-reward", "--pairs", "reel", "--out", out, *FEW, *losses])
    notes = json.loads((out / "reward_model.json").read_text())
    assert f"held out pairs 12\naccuracy {notes['accuracy']:.3f}\n" in done.out
    assert (notes["pairs"], notes["steps"], notes["train_pairs"]) == ("reel", 8, 48)
    assert (notes["margin"], notes["centering"], notes["seed"]) == (0.5, 0.01, 0)
    run = tmp_path / "run"
    accepted([*TRAIN, "--reward-fn", "learned", "--reward-model", out, "--out", run])
    lines = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    rewards = LearnedReward(out)([line["text"] for line in lines])
    assert rewards.tolist() == pytest.approx([line["reward"] for line in lines], abs=1e-4)


def test_export_writes_a_checkpoint_to_sample_from(finished, tmp_path):
    _, run = finished
    assert "its log-probs differ by at most" in accepted(["export", run, tmp_path / "last"]).out
    sample = ["sample", tmp_path / "last", "--prompt", "this", "-n", "2"]
    assert accepted(sample).out.count("this") == 2
    head = load_file(tmp_path / "last" / "value_head.safetensors")
    assert torch.equal(head["2.weight"], load_policy(run)[0].value_head[2].weight)
    accepted(["export", run, tmp_path / "first", "--checkpoint", "0"])
    assert "- learning phases: 0" in (tmp_path / "first" / "README.md").read_text()
    stored = [
        load_file(path / "model.safetensors")
        for path in (weights_dir("reel-nano"), tmp_path / "first", tmp_path / "last")
    ]
    name = "transformer.wte.weight"
    assert torch.equal(stored[0][name], stored[1][name])
    assert not torch.equal(stored[0][name], stored[2][name])
    (first, _), (again, _) = load_policy(run, 0), load_run_or_model(run, 0, "cpu")
    assert torch.equal(first.value_head[2].weight, again.value_head[2].weight)
    assert not torch.equal(first.value_head[2].weight, head["2.weight"])


def test_dpo_reports_its_results_and_writes_a_card(tmp_path):
    out = tmp_path / "preferred"
    options = ["--beta", "0.3", "--label-smoothing", "0.1", "--lora-rank", "4", "--samples", "16"]
    done = accepted(["dpo", "--pairs", "reel", "--out", out, *FEW, *options])
    notes = read_notes(out)
    assert f"held out pairs 12\naccuracy {notes['accuracy']:.3f}\n" in done.out
    assert f"kl per sequence {notes['drift']['kl_per_sequence']:.3f}\n" in done.out
    assert notes["drift"]["true_reward_after"] and notes["drift"]["kl_per_sequence"] > 0
    assert (notes["beta"], notes["label_smoothing"], notes["lora_rank"]) == (0.3, 0.1, 4)
    shipped = load_file(weights_dir("reel-nano") / "model.safetensors")
    weights = load_file(out / "model.safetensors")
    moved = {name for name, old in shipped.items() if not torch.equal(weights[name], old)}
    assert moved == {f"transformer.h.{layer}.attn.c_attn.weight" for layer in range(2)}
    card = (out / "README.md").read_text(encoding="utf-8")
    assert metadata_load(out / "README.md")["tags"][-1] == "dpo" and '"beta": 0.3' in card
    assert f"- accuracy {notes['accuracy']:.3f}" in card


@pytest.mark.parametrize("method", ["sft", "orpo", "kto"])
def test_texts_of_a_file_make_a_model_to_train(tmp_path, method):
    file, out = tmp_path / "rows.jsonl", tmp_path / "tuned"
    good, bad = [f" wow , the {noun}" for noun in NOUNS], " it was bad"
    if method == "sft":
        rows = [{"ask": "this movie", "say": text} for text in good]
        options = ["--texts", file, "--column", "say", "--samples", "8", "--gen-len", "4"]
        expected = {"texts": "rows.jsonl", "held_out_tokens": 10}
    elif method == "orpo":
        rows = [{"ask": "this movie", "chosen": text, "rejected": bad} for text in good]
        options = ["--pairs", file, "--samples", "0", "--odds-weight", "0.5"]
        expected = {"pairs": "rows.jsonl", "odds_weight": 0.5, "drift": None}
    else:
        texts = [(text, label) for x in good for text, label in ((x, "good"), (bad, "bad"))]
        rows = [{"ask": "this movie", "completion": text, "label": x} for text, x in texts]
        options = ["--examples", file, "--samples", "2", "--gen-len", "4", "--good-weight", "1.5"]
        expected = {"examples": "rows.jsonl", "good_weight": 1.5, "bad_weight": 1.0}
    write_rows(file, rows)
    done = accepted([method, *options, "--out", out, "--prompt-column", "ask", *FIT])
    notes = read_notes(out)
    assert notes.items() >= ({"method": method} | expected).items()
    assert notes["last_loss"] < notes["first_loss"]
    assert f"{len(rows)} {next(iter(expected))} from {file}; loading reel-nano" in done.out
    accepted([*TRAIN, "--base-model", out, "--out", tmp_path / "run"])


@pytest.mark.parametrize(
    ("command", "option", "loader"),
    [
        ("dpo", "--pairs", "rewards.load_pairs"),
        ("train-reward", "--pairs", "rewards.load_pairs"),
        ("kto", "--examples", "tuning.load_labeled_examples"),
        ("sft", "--texts", "tuning.load_examples"),
    ],
)
def test_the_seed_and_columns_reach_the_loader(monkeypatch, tmp_path, command, option, loader):
    def stop(name, number, seed, *columns):
        raise ConfigError(f"{name} {number} {seed} {columns}.")

    monkeypatch.setattr(f"rlhf_lab.{loader}", stop)
    number = "--n-texts" if command == "sft" else "--n-pairs"
    options = [option, "reel", number, "9", "--prompt-column", "q", "--seed", "7"]
    rejected([command, *options, "--out", tmp_path / "never"], "reel 9 7", "'q'")


def test_the_seed_reaches_the_adapters(monkeypatch, tmp_path):
    def stop(base_model, adapters, device, seed):
        raise ConfigError(f"{base_model} {adapters.lora_rank} {seed}.")

    monkeypatch.setattr("rlhf_lab.models.build.load_with_adapters", stop)
    options = ["--pairs", "reel", "--n-pairs", "9", "--lora-rank", "3", "--seed", "7"]
    rejected(["dpo", *options, "--out", tmp_path / "never"], "reel-nano 3 7")


def test_export_writes_the_critic_as_the_model_it_came_from(monkeypatch, finished, tmp_path):
    def stop(policy, base_model, out, critic_path):
        raise ConfigError(f"{base_model} {critic_path}.")

    args = RLHFArgs(preset="reel", value_head="separate", critic_path="a-reward")
    monkeypatch.setattr("rlhf_lab.training.resume.load_policy", lambda *_: (None, args))
    monkeypatch.setattr("rlhf_lab.models.export_policy", stop)
    rejected(["export", finished[1], tmp_path / "never"], "reel-nano a-reward")


def test_train_and_sample_render_a_chat(tmp_path):
    model = tiny_chat(tmp_path / "model")
    rows = [{"prompt": [ASK]}, {"prompt": "w4"}, {"prompt": [ASK, REPLY, ASK]}]
    prompts = write_rows(tmp_path / "asked.jsonl", rows)
    options = ["--base-model", model, "--prompts", prompts, "--reward-fn", "count:w5"]
    options += ["--system-prompt", "w9", "--gen-len", "12", "--out", tmp_path / "run"]
    rejected([*TRAIN, *options], "has no effect with chat=False")
    accepted([*TRAIN, *options, "--chat"])
    lines = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").open()]
    assert lines and all(line["prompt"].startswith("system w9 w0 user w") for line in lines)
    assert all(line["reward"] == line["response"].split().count("w5") for line in lines)
    done = accepted(["sample", tmp_path / "run", "-n", "2", "--prompt", "w1"])
    assert done.out.count("w9 w0 user") == 2
    command = ["sample", model, "--prompt", "w1", "--gen-len", "4", "--chat"]
    done = accepted([*command, "--system-prompt", "w9"])
    assert done.out.count("system w9 w0 user w1 w0 assistant") == 5


def test_sft_learns_the_last_response_of_conversations(monkeypatch, tmp_path):
    read, prompts = tuning.read_conversations, []
    spy = lambda *args: prompts.append(args[-1]) or read(*args)
    monkeypatch.setattr(tuning, "read_conversations", spy)
    model = tiny_chat(tmp_path / "model")
    texts = write_rows(tmp_path / "texts.jsonl", [{"messages": [ASK, REPLY]}] * 4)
    source = ["--texts", texts, "--column", "messages", "--chat", "--base-model", model]
    few = ["--samples", "2", "--gen-len", "4", "--system-prompt", "w9", "--out", tmp_path / "tuned"]
    assert "held out tokens 4\n" in accepted(["sft", *source, *FIT, *few]).out
    assert read_notes(tmp_path / "tuned")["chat"] is True and prompts == ["w9"]


def test_an_adapter_is_exported_and_trained_on(tmp_path):
    first, second, out = tmp_path / "first", tmp_path / "second", tmp_path / "adapter"
    accepted([*TRAIN, "--lora-rank", "2", "--out", first])
    assert "in PEFT's format for reel-nano" in accepted(["export", first, out, "--adapter"]).out
    files = {path.name for path in out.iterdir()}
    assert files == {"adapter_config.json", "adapter_model.safetensors"}
    config = json.loads((out / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["peft_type"]) == ("reel-nano", "LORA")
    accepted([*TRAIN, "--adapter-path", out, "--out", second])
    accepted(["export", second, tmp_path / "again", "--adapter"])
    never = ["--out", tmp_path / "never"]
    rejected([*TRAIN, "--adapter-path", first, *never], "is not a PEFT adapter")
