"""The command compare: its numbers recomputed, and its two kinds of files."""

import dataclasses
import json

import pytest
import torch

from rlhf_lab.config import RLHFArgs
from rlhf_lab.diffing import compare
from rlhf_lab.diffing.compare import load_end
from rlhf_lab.errors import ConfigError
from rlhf_lab.identity import Check
from rlhf_lab.models import load_model
from rlhf_lab.models.tokenization import single_token
from rlhf_lab.probes import ReelTruth, RunHealth, attach
from rlhf_lab.training import RLHFTrainer
from tests.bad_input.command_outcome import accepted, rejected, run
from tests.tiny_models import tiny_llama

pytestmark = pytest.mark.slow
FEW = "--methods split --ranks 0 --alphas 0 1 --device cpu".split()
BOTH = ["reel-nano", "reel-nano-b"]


@pytest.fixture
def texts(tmp_path, monkeypatch):
    """A text file in the working directory."""
    monkeypatch.chdir(tmp_path)
    text = "this movie wow , the plot was\nthis movie wow , the plot was so\nthis movie\n"
    (tmp_path / "good.txt").write_text(text, encoding="utf-8")
    return tmp_path


def logit_shift(tokens, words=("loved", "hated")):
    """The change of the mean logit difference after the last token, between the two models."""
    means = []
    for model in map(load_model, BOTH):
        ids = [single_token(model.tokenizer, word) for word in words]
        with torch.no_grad():
            logits = model(tokens)[:, -1].double()
        means.append((logits[:, ids[0]] - logits[:, ids[1]]).mean().item())
    return means[1] - means[0]


def test_shift_matches_the_models_logits(texts):
    out = texts / "numbers.JSON"
    options = ["--text", "good.txt", "--n-texts", "2", "--words", "so", "good", "--out", out]
    done = accepted(["compare", *BOTH, *FEW, *options])
    numbers = json.loads(out.read_text(encoding="utf-8"))
    ids = load_model("reel-nano").tokenizer(
        "<bos> this movie wow , the plot was", add_special_tokens=False
    )
    expected = logit_shift(torch.tensor([ids["input_ids"]] * 2), ("so", "good"))
    assert numbers["shift"][0] == pytest.approx(expected, abs=1e-4)
    assert numbers["line"]["1.0"][0] == pytest.approx(expected, abs=1e-4)
    assert numbers["n"] == 2 and all(numbers["checks"].values())
    assert "2 texts of 8 tokens" in done.out and "by weights" not in done.out


def test_page_shows_reviews_up_to_the_verdict(texts):
    out = texts / "reviews.html"
    options = ["--n-texts", "3", "--methods", "patching", "--ranks", "--alphas", "0.5"]
    done = accepted(["compare", *BOTH, *options, "--out", out])
    page, truth = out.read_text(encoding="utf-8"), ReelTruth()
    tokens = truth.reviews(3, 0)[0][:, : truth.grammar.slot("VERB")]
    assert f"Shift of loved - hated: {logit_shift(tokens):.3g}" in done.out
    assert "3 texts of 24 tokens, reviews up to the verdict" in done.out
    assert "checks hold" in done.out and "By rank" not in done.out
    assert page.startswith("<!DOCTYPE html>") and "L1 attn" in page and "patched out" in page


def test_a_run_is_compared_with_its_start(texts):
    args = RLHFArgs(
        preset="reel", total_phases=1, batch_size=8, num_minibatches=1, warmup_steps=0, gen_len=4
    )
    trainer = RLHFTrainer(args, out=texts / "run")
    eval_text = ["this movie wow , the plot was", "this movie", "this film honestly , the plot"]
    attach(trainer, RunHealth(), eval_text=eval_text, keep_eval_text=True)
    trainer.train()
    pairs = zip(load_end("run").parameters(), trainer.policy.base_model.parameters(), strict=True)
    assert all(stored.equal(last) for stored, last in pairs)
    done = accepted(["compare", "./run", "run", *FEW, "--length", "2"])
    assert "3 texts of 2 tokens, the eval text of run" in done.out
    assert "Shift of loved - hated: 0 " not in done.out and "1 of 1 checks hold" in done.out
    done = accepted(["compare", "run", "run", *FEW, "--base-checkpoint", "last"])
    assert "3 texts of 3 tokens" in done.out and "Shift of loved - hated: 0 " in done.out


def test_words_and_texts_are_of_the_language_by_default(llama_dir):
    done = accepted(["compare", "sums-nano", "sums-nano", *FEW, "--n-texts", "3"])
    assert "3 texts of 11 tokens, prompts of 2 and 3 digits" in done.out
    assert "Shift of so - hm: 0 " in done.out and "checks hold" in done.out
    rejected(["compare", llama_dir, llama_dir, "--words", "a", "b"], "Set --text")


def test_a_failed_check_is_exit_status_1(monkeypatch):
    def with_failed_check(*arguments):
        failed = [Check.at_most("a sum", 0.5, 0.1)]
        return dataclasses.replace(compare(*arguments), checks=failed)

    monkeypatch.setattr("rlhf_lab.diffing.compare", with_failed_check)
    done = run(["compare", *BOTH, *FEW, "--n-texts", "2"])
    assert done.status == 1 and "0 of 1 checks hold" in done.out
    assert "Do not rely on these numbers: a sum is off by 0.5" in done.out


def test_compare_raises_on_other_tokens(llama_tokenizer):
    first = load_model(tiny_llama(), llama_tokenizer)
    second = load_model(tiny_llama(), llama_tokenizer)
    second.tokenizer = load_model("reel-nano").tokenizer
    with pytest.raises(ConfigError, match="tokenizers with other words"):
        compare(first, second, torch.ones(2, 3, dtype=torch.long))
