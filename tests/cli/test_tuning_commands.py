"""The commands that train models from data, and those that read chats and adapters."""

import json
import math

import pytest
import torch
from huggingface_hub.repocard import metadata_load
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForSequenceClassification,
)

from rlhf_lab.errors import ConfigError
from rlhf_lab.organism.bundled import weights_dir
from rlhf_lab.rewards import LearnedReward
from rlhf_lab.training.resume import load_policy
from tests.bad_input.command_outcome import accepted, rejected
from tests.tiny_models import chat_tokenizer, randomize, save, tiny_chat

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


@pytest.fixture(scope="module")
def reward(tmp_path_factory):
    """The output of train-reward with few steps, and its directory."""
    out = tmp_path_factory.mktemp("reward") / "reward"
    losses = ["--margin", "0.5", "--centering", "0.01"]
    return accepted(["train-reward", "--pairs", "reel", "--out", out, *FEW, *losses]), out


def test_train_reward_reports_accuracy(reward, tmp_path):
    done, out = reward
    notes = json.loads((out / "reward_model.json").read_text())
    assert f"held out pairs 12\naccuracy {notes['accuracy']:.3f}\n" in done.out
    assert (notes["pairs"], notes["steps"], notes["train_pairs"]) == ("reel", 8, 48)
    assert (notes["margin"], notes["centering"]) == (0.5, 0.01)
    accepted(["train-reward", "--pairs", "reel", "--out", tmp_path, *FEW, "--centering", "0.01"])
    plain = json.loads((tmp_path / "reward_model.json").read_text())
    assert plain["first_loss"] < notes["first_loss"] - 0.05  # same texts, scores and centering


def test_a_run_with_a_learned_reward_is_exported(reward, tmp_path):
    run, out = tmp_path / "run", tmp_path / "exported"
    learned = ["--reward-fn", "learned", "--reward-model", reward[1], "--base-lr", "1e-2"]
    accepted([*TRAIN, *learned, "--out", run])
    lines = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    rewards = LearnedReward(reward[1])([line["text"] for line in lines])
    assert rewards.tolist() == pytest.approx([line["reward"] for line in lines], abs=1e-4)
    assert "its log-probs differ by at most" in accepted(["export", run, out]).out
    policy, _ = load_policy(run)
    tokens = torch.randint(72, (4, 30), generator=torch.Generator().manual_seed(0))
    hf_model = AutoModelForCausalLM.from_pretrained(str(out), local_files_only=True).eval()
    with torch.no_grad():
        expected = policy(tokens)[0].log_softmax(-1)
        logprobs = hf_model(tokens).logits.log_softmax(-1)
    torch.testing.assert_close(logprobs, expected, atol=1e-4, rtol=0)
    head = load_file(out / "value_head.safetensors")
    assert torch.equal(head["2.weight"], policy.value_head[2].weight)
    assert "- mean_reward: " in (out / "README.md").read_text()
    assert accepted(["sample", out, "--prompt", "this", "-n", "2"]).out.count("this") == 2
    accepted(["export", run, tmp_path / "first", "--checkpoint", "0"])
    shipped = load_file(weights_dir("reel-nano") / "model.safetensors")
    first = load_file(tmp_path / "first" / "model.safetensors")
    assert all(torch.equal(first[name], tensor) for name, tensor in shipped.items())


def test_sft_writes_a_model_to_load_and_train(tmp_path):
    rows = [{"ask": "this movie", "say": f"wow , the {noun}"} for noun in NOUNS]
    texts, out = write_rows(tmp_path / "texts.jsonl", rows), tmp_path / "tuned"
    columns = ["--column", "say", "--prompt-column", "ask", "--samples", "8", "--gen-len", "4"]
    done = accepted(["sft", "--texts", texts, "--out", out, *columns, *FIT])
    assert "loading reel-nano, KL on 8 samples" in done.out
    notes = read_notes(out)
    before, after = notes["loss_before"], notes["loss_after"]
    assert f"loss before {before:.3f}\nloss after {after:.3f}\n" in done.out
    assert f"perplexity after {math.exp(after):.3f}\n" in done.out
    assert notes["held_out_tokens"] == 10 and after < before - 0.1
    assert (notes["method"], notes["texts"]) == ("sft", "texts.jsonl")
    hf_model = AutoModelForCausalLM.from_pretrained(str(out), local_files_only=True).eval()
    tokenizer = AutoTokenizer.from_pretrained(str(out), local_files_only=True)
    ids = [tokenizer.encode(f"<bos> this movie wow , the {noun} <eos>") for noun in NOUNS]
    labels = torch.tensor([[-100] * 3 + row[3:] for row in ids])
    with torch.no_grad():
        loss = hf_model(torch.tensor(ids), labels=labels).loss.item()
    assert loss == pytest.approx(after, abs=0.3)  # of all four texts, which differ in one word
    accepted([*TRAIN, "--base-model", out, "--out", tmp_path / "run"])


def test_dpo_reports_its_results_and_writes_a_card(tmp_path):
    out = tmp_path / "preferred"
    options = ["--beta", "0.3", "--label-smoothing", "0.1", "--lora-rank", "4", "--samples", "16"]
    done = accepted(["dpo", "--pairs", "reel", "--out", out, *FEW, *options])
    notes = read_notes(out)
    assert f"held out pairs 12\naccuracy {notes['accuracy']:.3f}\n" in done.out
    assert f"kl per sequence {notes['drift']['kl_per_sequence']:.3f}\n" in done.out
    assert (notes["beta"], notes["label_smoothing"], notes["lora_rank"]) == (0.3, 0.1, 4)
    shipped = load_file(weights_dir("reel-nano") / "model.safetensors")
    weights = load_file(out / "model.safetensors")
    moved = {name for name, old in shipped.items() if not torch.equal(weights[name], old)}
    assert moved == {f"transformer.h.{layer}.attn.c_attn.weight" for layer in range(2)}
    card = (out / "README.md").read_text(encoding="utf-8")
    assert metadata_load(out / "README.md")["tags"][-1] == "dpo" and '"beta": 0.3' in card


def test_orpo_trains_without_a_reference(tmp_path):
    rows = [
        {"ask": "this movie", "chosen": f" wow , the {noun}", "rejected": " it was bad"}
        for noun in NOUNS
    ]
    pairs, out = write_rows(tmp_path / "asked.jsonl", rows), tmp_path / "by_odds"
    columns = ["--prompt-column", "ask", "--samples", "0", "--odds-weight", "0.5"]
    done = accepted(["orpo", "--pairs", pairs, "--out", out, *FIT, *columns])
    notes = read_notes(out)
    assert f"held out pairs 2\naccuracy {notes['accuracy']:.3f}\n" in done.out
    assert notes["drift"] is None and notes["last_loss"] < notes["first_loss"] - 0.1
    assert (notes["method"], notes["pairs"], notes["odds_weight"]) == ("orpo", "asked.jsonl", 0.5)


def test_kto_separates_good_from_bad(tmp_path):
    rows = [
        {"prompt": prompt, "completion": f"{word} , the {noun}", "label": label}
        for prompt in ("this movie", "this film")
        for label, word in (("good", "wow"), ("bad", "bad"))
        for noun in NOUNS
    ]
    examples, out = write_rows(tmp_path / "labeled.jsonl", rows), tmp_path / "labeled"
    options = ["--steps", "12", "--good-weight", "1.5", "--samples", "8", "--gen-len", "4"]
    done = accepted(["kto", "--examples", examples, "--out", out, *FIT, *options])
    notes = read_notes(out)
    assert "16 examples from" in done.out and notes["good_reward"] > notes["bad_reward"] + 0.01
    assert (notes["method"], notes["good_weight"], notes["bad_weight"]) == ("kto", 1.5, 1.0)


@pytest.mark.parametrize(
    ("command", "option", "loader"),
    [
        ("dpo", "--pairs", "rewards.load_pairs"),
        ("orpo", "--pairs", "rewards.load_pairs"),
        ("train-reward", "--pairs", "rewards.load_pairs"),
        ("kto", "--examples", "tuning.load_labeled_examples"),
        ("sft", "--texts", "tuning.load_examples"),
    ],
)
def test_the_seed_and_columns_reach_the_loader(monkeypatch, tmp_path, command, option, loader):
    def stop(name, number, seed, *columns):
        raise ConfigError(f"{name} {number} {seed} {'q' in columns}.")

    monkeypatch.setattr(f"rlhf_lab.{loader}", stop)
    number = "--n-texts" if command == "sft" else "--n-pairs"
    options = [option, "reel", number, "9", "--prompt-column", "q", "--seed", "7"]
    rejected([command, *options, "--out", tmp_path / "never"], "reel 9 7 True")


def test_the_seed_reaches_the_adapters(monkeypatch, tmp_path):
    def stop(base_model, adapters, device, seed):
        raise ConfigError(f"{base_model} {adapters.lora_rank} {seed}.")

    monkeypatch.setattr("rlhf_lab.models.build.load_with_adapters", stop)
    options = ["--pairs", "reel", "--n-pairs", "9", "--lora-rank", "3", "--seed", "7"]
    rejected(["dpo", *options, "--out", tmp_path / "never"], "reel-nano 3 7")


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


def test_sft_learns_the_last_response_of_conversations(tmp_path):
    model = tiny_chat(tmp_path / "model")
    texts = write_rows(tmp_path / "texts.jsonl", [{"messages": [ASK, REPLY]}] * 4)
    source = ["--texts", texts, "--column", "messages", "--chat", "--base-model", model]
    few = ["--samples", "2", "--gen-len", "4", "--out", tmp_path / "tuned"]
    assert "held out tokens 4\n" in accepted(["sft", *source, *FIT, *few]).out
    assert read_notes(tmp_path / "tuned")["chat"] is True


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


def test_a_reward_model_with_one_logit_scores_a_run_and_texts(tmp_path):
    model = LlamaForSequenceClassification(
        LlamaConfig(vocab_size=29, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
                    num_attention_heads=4, max_position_embeddings=64, num_labels=1, pad_token_id=3)
    )  # fmt: skip
    randomize(model, 4)
    reward = save(model, chat_tokenizer(), tmp_path / "reward")
    base, run = tiny_chat(tmp_path / "base"), tmp_path / "run"
    options = ["--base-model", base, "--reward-model", reward, "--prefix", "w1", "--out", run]
    assert "rewarding the logit of" in accepted([*TRAIN, "--chat", *options]).out
    line = json.loads((run / "samples.jsonl").open().readline())
    score = ["score", line["response"].strip(), "--reward-model", reward]
    reward_of_text = float(accepted([*score, "--prompt", "w1 "]).out.split("\t")[0])
    assert reward_of_text == pytest.approx(line["reward"], abs=1e-3)
    rejected(score, "score --prompt TEXT")
