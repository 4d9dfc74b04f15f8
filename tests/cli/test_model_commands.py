"""The commands that make models, as processes: train-reward, sft, dpo, orpo, kto, runs, export."""

import json
import math
import re
import warnings

import pytest
import torch
from huggingface_hub.repocard import metadata_load
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf_lab.__main__ import main
from rlhf_lab.errors import ConfigError
from rlhf_lab.organism.bundled import weights_dir
from rlhf_lab.rewards import LearnedReward
from rlhf_lab.training.restore import load_policy

NOUNS = ("plot", "script", "music", "camera")
FEW = ["--steps", "8", "--n-pairs", "60", "--batch-size", "16", "--device", "cpu"]


@pytest.fixture(scope="module")
def run(warm_python):
    """Runs one command in a process of its own."""
    return lambda *arguments: warm_python.run(["-m", "rlhf_lab", *map(str, arguments)])


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def reward(place, run):
    """A reward model of few steps."""
    out = place / "reward"
    lead = ["--margin", "0.5", "--centering", "0.01"]
    return run("train-reward", "--pairs", "reel", "--out", out, *FEW, *lead), out


@pytest.fixture(scope="module")
def tuned(place, run):
    """A model of few steps on four texts with a prompt each."""
    lines = "".join(f'{{"ask": "this movie", "say": "wow , the {w}"}}\n' for w in NOUNS)
    (place / "texts.jsonl").write_text(lines)
    out = place / "tuned"
    columns = ["--column", "say", "--prompt-column", "ask", "--samples", "8", "--gen-len", "4"]
    few = ["--steps", "6", "--batch-size", "2", "--held-out", "0.5", "--learning-rate", "3e-3"]
    done = run("sft", "--texts", place / "texts.jsonl", "--out", out, *columns, *few)
    return done, out


@pytest.fixture(scope="module")
def preferred(place, run):
    """A model with adapters, of few steps of conservative DPO on Reel's pairs."""
    out = place / "preferred"
    settings = ["--beta", "0.3", "--label-smoothing", "0.1", "--lora-rank", "4", "--samples", "16"]
    rate = ["--learning-rate", "3e-3"]
    return run("dpo", "--pairs", "reel", "--out", out, *FEW, *settings, *rate), out


@pytest.fixture(scope="module")
def by_odds(place, run):
    """A model of few steps of ORPO on pairs with a prompt each, and no texts of its own."""
    pairs = "".join(
        f'{{"ask": "this movie", "chosen": " wow , the {w}", "rejected": " it was bad"}}\n'
        for w in NOUNS
    )
    (place / "asked.jsonl").write_text(pairs)
    out = place / "by_odds"
    few = ["--steps", "6", "--batch-size", "2", "--held-out", "0.5", "--learning-rate", "3e-3"]
    columns = ["--prompt-column", "ask", "--samples", "0", "--odds-weight", "0.5"]
    return run("orpo", "--pairs", place / "asked.jsonl", "--out", out, *few, *columns), out


@pytest.fixture(scope="module")
def judged(place, run):
    """A model of few steps of KTO on texts judged one by one, eight good and eight bad."""
    rows = [("good", f"wow , the {w}") for w in NOUNS] + [("bad", f"bad , the {w}") for w in NOUNS]
    lines = "".join(
        f'{{"prompt": "this movie", "completion": "{text}", "label": "{label}"}}\n'
        for label, text in rows
    )
    # of one prompt all texts would be held out together
    (place / "judged.jsonl").write_text(lines + lines.replace("this movie", "this film"))
    out = place / "judged"
    few = ["--steps", "12", "--batch-size", "4", "--held-out", "0.5", "--learning-rate", "3e-3"]
    weights = ["--good-weight", "1.5", "--samples", "8", "--gen-len", "4"]
    return run("kto", "--examples", place / "judged.jsonl", "--out", out, *few, *weights), out


@pytest.fixture(scope="module")
def trained(reward, place, run):
    """A short run that the learned reward pays."""
    out = place / "run"
    settings = "--total-phases 1 --warmup-steps 0 --batch-size 8 --num-minibatches 2 --base-lr 1e-2"
    learned = ["--reward-fn", "learned", "--reward-model", reward[1], "--device", "cpu"]
    return run("train", *settings.split(), *learned, "--out", out), out


@pytest.fixture(scope="module")
def exported(trained, place, run):
    out = place / "exported"
    return run("export", trained[1], out), out


def test_train_reward_says_how_good_it_is(reward):
    done, out = reward
    assert done.returncode == 0, done.stderr
    notes = json.loads((out / "reward_model.json").read_text())
    assert f"accuracy {notes['accuracy']:.3f} on 12 held-out pairs" in done.stdout
    assert f"the best possible judge: {notes['bayes_accuracy']:.3f}" in done.stdout
    assert "8/8" in done.stdout and str(out) in done.stdout.replace("\n", "")
    assert (notes["pairs"], notes["steps"], notes["train_pairs"]) == ("reel", 8, 48)
    assert (notes["margin"], notes["centering"]) == (0.5, 0.01)


def test_a_run_is_paid_by_the_learned_reward(trained, reward):
    done, out = trained
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    rewards = LearnedReward(reward[1])([line["text"] for line in lines])
    assert rewards.tolist() == pytest.approx([line["reward"] for line in lines], abs=1e-4)


def test_sft_says_what_it_makes_of_held_out_texts(tuned):
    """Two texts of 4 words and EOS, of which the loss falls."""
    done, out = tuned
    assert done.returncode == 0, done.stderr
    notes = json.loads((out / "tuning.json").read_text())
    before, after = notes["loss_before"], notes["loss_after"]
    assert f"loss {before:.3f} -> {after:.3f} nats per token on 2 held-out texts" in done.stdout
    assert notes["held_out_tokens"] == 10 and after < before - 0.1
    assert f"perplexity {math.exp(before):.2f} -> {math.exp(after):.2f}" in done.stdout
    assert "6/6" in done.stdout and "on 8 texts of its own" in done.stdout
    assert (notes["method"], notes["texts"], notes["steps"]) == ("sft", "texts.jsonl", 6)


@pytest.mark.slow
def test_what_sft_wrote_is_read_by_plain_transformers_and_can_be_trained_on(tuned, place):
    """Plain transformers finds the loss that was reported on all four texts, nearly: they differ
    in one word."""
    _, out = tuned
    hf_model = AutoModelForCausalLM.from_pretrained(str(out), local_files_only=True).eval()
    tokenizer = AutoTokenizer.from_pretrained(str(out), local_files_only=True)
    ids = [tokenizer.encode(f"<bos> this movie wow , the {word} <eos>") for word in NOUNS]
    labels = torch.tensor([[-100] * 3 + row[3:] for row in ids])
    with torch.no_grad():
        loss = hf_model(torch.tensor(ids), labels=labels).loss.item()
    notes = json.loads((out / "tuning.json").read_text())
    assert loss == pytest.approx(notes["loss_after"], abs=0.3)
    small = "--total-phases 1 --warmup-steps 0 --batch-size 8 --num-minibatches 2 --gen-len 4"
    chosen = ["--base-model", str(out), "--out", str(place / "on_tuned"), "--device", "cpu"]
    assert main(["train", *small.split(), *chosen]) == 0


def test_dpo_says_how_it_judges_held_out_pairs_and_what_it_writes(preferred):
    done, out = preferred
    assert done.returncode == 0, done.stderr
    notes = json.loads((out / "tuning.json").read_text())
    drift = notes["drift"]
    lines = [
        f"accuracy {notes['accuracy']:.3f} by implicit reward on 12 held-out pairs",
        f"the best possible judge: {notes['bayes_accuracy']:.3f} on average",
        f"margin {notes['margin']:.3f}",
        f"{drift['kl_per_sequence']:.3f} per sequence, on 16 texts of its own",
        f"their gold reward {drift['gold_before']:.3f} -> {drift['gold_after']:.3f}",
    ]
    assert all(line in done.stdout for line in lines), done.stdout
    assert notes["margin"] == pytest.approx(notes["chosen_reward"] - notes["rejected_reward"])
    assert (notes["method"], notes["pairs"], notes["kind"]) == ("dpo", "reel", "sigmoid")
    assert (notes["beta"], notes["label_smoothing"], notes["lora_rank"]) == (0.3, 0.1, 4)


def test_the_card_beside_a_tuned_model_says_what_was_printed_and_how_to_load_it(
    preferred, warm_python
):
    done, out = preferred
    card = (out / "README.md").read_text(encoding="utf-8")
    assert metadata_load(out / "README.md")["tags"][-1] == "dpo"
    assert "made from `reel-nano`" in card and "on pairs from `reel`" in card
    section = card.split("## Figures")[1]
    figures = [line[2:] for line in section.splitlines() if line.startswith("- ")]
    assert len(figures) >= 5 and all(line in done.stdout for line in figures)
    assert "| beta | 0.3 |" in card and "| lora_rank | 4 |" in card and "MIT" in card
    (program,) = re.findall(r"```python\n(.*?)```", card, flags=re.DOTALL)
    loaded = warm_python.run(["-c", program], cwd=out)
    assert loaded.returncode == 0, loaded.stderr


def test_orpo_says_how_it_judges_held_out_pairs_and_what_it_writes(by_odds):
    done, out = by_odds
    assert done.returncode == 0, done.stderr
    notes = json.loads((out / "tuning.json").read_text())
    assert f"accuracy {notes['accuracy']:.3f} by log odds per token on 2 held" in done.stdout
    assert f"margin {notes['margin']:.3f}" in done.stdout and "6/6" in done.stdout
    assert "of its own" not in done.stdout and notes["drift"] is None
    assert (notes["method"], notes["pairs"], notes["odds_weight"]) == ("orpo", "asked.jsonl", 0.5)
    assert notes["last_loss"] < notes["first_loss"] - 0.1
    card = (out / "README.md").read_text(encoding="utf-8")
    assert "odds ratio preference optimization on pairs from `asked.jsonl`" in card
    assert "| odds_weight | 0.5 |" in card and "\n- orpo\n" in card


def test_kto_says_how_it_judges_held_out_texts_and_what_it_writes(judged):
    done, out = judged
    assert done.returncode == 0, done.stderr
    assert "16 examples from" in done.stdout
    notes = json.loads((out / "tuning.json").read_text())
    good, bad = notes["good_reward"], notes["bad_reward"]
    counts = "on 4 good and 4 bad held-out texts"
    line = f"accuracy {notes['accuracy']:.3f} by implicit reward {counts}, {good:+.3f} good"
    assert line in done.stdout and good > bad + 0.01 and notes["accuracy"] > 0.7
    assert (notes["train_good"], notes["train_bad"]) == (4, 4)
    assert "on 8 texts of its own" in done.stdout
    assert (notes["method"], notes["examples"]) == ("kto", "judged.jsonl")
    assert (notes["beta"], notes["good_weight"], notes["bad_weight"]) == (0.1, 1.5, 1.0)
    card = (out / "README.md").read_text(encoding="utf-8")
    assert "Kahneman-Tversky optimization on judged texts from `judged.jsonl`" in card
    assert "| good_weight | 1.5 |" in card and "| bad_weight | 1.0 |" in card


def test_what_dpo_wrote_has_the_adapters_in_its_weights(preferred):
    """Of all matrices only queries and values have moved."""
    shipped = load_file(weights_dir("reel-nano") / "model.safetensors")
    written = load_file(preferred[1] / "model.safetensors")
    moved = {name for name, old in shipped.items() if not torch.equal(written[name], old)}
    assert moved == {f"transformer.h.{layer}.attn.c_attn.weight" for layer in range(2)}
    d_model = shipped["transformer.wte.weight"].shape[1]
    keys = slice(d_model, 2 * d_model)
    for name in moved:
        assert torch.equal(written[name][:, keys], shipped[name][:, keys])


def test_export_writes_a_model_that_plain_transformers_reads(exported, trained):
    done, out = exported
    assert done.returncode == 0, done.stderr
    assert "reloaded with transformers, its log-probs differ by at most" in done.stdout
    policy, _ = load_policy(trained[1])
    tokens = torch.randint(72, (4, 30), generator=torch.Generator().manual_seed(0))
    hf_model = AutoModelForCausalLM.from_pretrained(str(out), local_files_only=True).eval()
    with torch.no_grad():
        expected = policy(tokens)[0].log_softmax(-1)
        found = hf_model(tokens).logits.log_softmax(-1)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    head = load_file(out / "value_head.safetensors")
    assert torch.equal(head["2.weight"], policy.value_head[2].weight)


def test_an_exported_policy_says_what_it_is(exported):
    text = (exported[1] / "README.md").read_text(encoding="utf-8")
    assert "A policy after 1 learning phase of" in text and "the reward model `reward`" in text
    assert "| figure | phase 0 | after training |" in text


def test_the_first_checkpoint_can_be_asked_for(trained, place):
    """It is the bundled policy, bit for bit."""
    assert main(["export", str(trained[1]), str(place / "first"), "--checkpoint", "0"]) == 0
    shipped = load_file(weights_dir("reel-nano") / "model.safetensors")
    written = load_file(place / "first" / "model.safetensors")
    assert all(torch.equal(written[name], tensor) for name, tensor in shipped.items())


def test_an_exported_policy_can_be_sampled(exported, capsys):
    assert main(["sample", str(exported[1]), "--prompt", "this movie", "-n", "2"]) == 0
    assert capsys.readouterr().out.count("this movie") == 2


@pytest.fixture(autouse=True)
def warnings_as_they_were(monkeypatch):
    """The command line shows warnings in its own way from then on."""
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture
def refusal(capsys):
    """The one sentence that a command answers with, in this process."""

    def ask(*arguments):
        assert main([str(argument) for argument in arguments]) == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1 and lines[0].startswith("rlhf_lab: "), lines
        return lines[0]

    return ask


@pytest.mark.parametrize(
    ("command", "option", "loader"),
    [
        ("dpo", "--pairs", "rewards.load_pairs"),
        ("orpo", "--pairs", "rewards.load_pairs"),
        ("kto", "--examples", "tuning.load_judged"),
        ("sft", "--texts", "tuning.load_examples"),
    ],
)
def test_the_seed_chooses_the_data(refusal, monkeypatch, place, command, option, loader):
    def stop(name, number, seed, *columns):
        raise ConfigError(f"{name} {number} {seed} {columns[-1]}")

    monkeypatch.setattr(f"rlhf_lab.{loader}", stop)
    number = "--n-texts" if command == "sft" else "--n-pairs"
    asked = [option, "reel", number, "9", "--prompt-column", "q", "--seed", "7"]
    assert refusal(command, *asked, "--out", place / "never") == "rlhf_lab: reel 9 7 q"


@pytest.mark.slow
def test_bad_input_is_answered_in_one_sentence(refusal, trained, place):
    run_dir, never = trained[1], place / "never"
    (place / "bad.jsonl").write_text('{"chosen": "this"}\n')
    (place / "zebra.jsonl").write_text('{"chosen": "a zebra", "rejected": "this"}\n' * 4)
    to_never = ["--out", never, "--device", "cpu"]
    cases = [
        (["train-reward", *to_never], "--pairs"),
        (["train-reward", "--pairs", place / "none.jsonl", *to_never], "No such file"),
        (["train-reward", "--pairs", place / "bad.jsonl", *to_never], "'rejected'"),
        (["train-reward", "--pairs", place / "zebra.jsonl", *to_never], "zebra"),
        (["train-reward", "--pairs", "reel", "--out", run_dir], "already exists"),
        (["train-reward", "--pairs", "reel", "--steps", "0", *to_never], "steps=0"),
        (["train-reward", "--pairs", "reel", "--held-out", "1", *to_never], "held_out=1.0"),
        (["train-reward", "--pairs", "reel", "--n-pairs", "1", *to_never], "n_pairs=1"),
        (["train-reward", "--pairs", "reel", "--learning-rate", "0", *to_never], "learning_rate=0"),
        (["train-reward", "--pairs", "reel", "--base-model", "./none", *to_never], "./none"),
        (["train-reward", "--pairs", "some/data", *to_never], "hub:NAME:SPLIT"),
        (["train-reward", "--pairs", "reel", "--margin", "-1", *to_never], "margin=-1.0"),
        (
            ["train-reward", "--pairs", place / "zebra.jsonl", "--margin", "1", *to_never],
            "'margin'",
        ),
        (["sft", *to_never], "--texts"),
        (["sft", "--texts", place / "none.txt", *to_never], "No such file"),
        (["sft", "--texts", place / "bad.jsonl", *to_never], "'text'"),
        (["sft", "--texts", place / "zebra.jsonl", "--column", "chosen", *to_never], "zebra"),
        (["sft", "--texts", "reel", "--out", run_dir], "already exists"),
        (["sft", "--texts", "reel", "--steps", "0", *to_never], "steps=0"),
        (["sft", "--texts", "reel", "--n-texts", "0", *to_never], "n_texts=0"),
        (["sft", "--texts", "reel", "--max-tokens", "1", *to_never], "max_tokens=1"),
        (["sft", "--texts", "reel", "--samples", "-1", *to_never], "samples=-1"),
        (["sft", "--texts", "reel", "--base-model", "./none", *to_never], "./none"),
        (["dpo", *to_never], "--pairs"),
        (["dpo", "--pairs", place / "bad.jsonl", *to_never], "'rejected'"),
        (["dpo", "--pairs", "reel", "--beta", "0", *to_never], "beta is 0.0"),
        (["dpo", "--pairs", "reel", "--label-smoothing", "0.5", *to_never], "label_smoothing is"),
        (["dpo", "--pairs", "reel", "--kind", "kto", *to_never], "--kind"),
        (["dpo", "--pairs", "reel", "--out", run_dir], "already exists"),
        (["orpo", "--pairs", "reel", "--odds-weight", "-1", *to_never], "odds_weight is -1.0"),
        (["orpo", "--pairs", "reel", "--beta", "1", *to_never], "--beta"),
        (["orpo", "--pairs", "reel", "--out", run_dir], "already exists"),
        (["kto", *to_never], "--examples"),
        (["kto", "--examples", place / "bad.jsonl", *to_never], "'rejected'"),
        (["kto", "--examples", "reel", "--bad-weight", "-1", *to_never], "bad_weight is -1.0"),
        (["kto", "--examples", "reel", "--batch-size", "1", *to_never], "batch_size=1"),
        (["kto", "--examples", "reel", "--out", run_dir], "already exists"),
        (["train", "--reward-fn", "learned", "--out", never], "no reward model"),
        (["export", place / "none", never], "there is no directory"),
        (["export", run_dir, never, "--checkpoint", "7"], "phase_000007"),
        (["export", run_dir, run_dir], "already exists"),
    ]
    for arguments, word in cases:
        assert word in refusal(*arguments), arguments
    assert not never.exists()
    assert not [path for path in place.iterdir() if path.name.endswith(".partial")]
