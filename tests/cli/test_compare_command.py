"""The command compare: its figures by another way, its two kinds of files, and what it refuses."""

import dataclasses
import json
import warnings

import pytest
import torch

from rlhf_lab.__main__ import main
from rlhf_lab.config import RLHFArgs
from rlhf_lab.diffing import compare
from rlhf_lab.errors import ConfigError
from rlhf_lab.identity import Check
from rlhf_lab.models import load_model
from rlhf_lab.models.residual_parts import single_token
from rlhf_lab.probes import ReelTruth, RunHealth, attach
from rlhf_lab.training import RLHFTrainer

pytestmark = pytest.mark.slow
FEW = "--methods split --ranks 0 --alphas 0 1 --device cpu".split()
BOTH = ["reel-nano", "reel-nano-b"]


@pytest.fixture(autouse=True)
def warnings_as_they_were(monkeypatch):
    """The command line shows warnings in its own way from then on."""
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Texts of several kinds."""
    found = tmp_path_factory.mktemp("compare")
    lines = {
        "good.txt": "this movie wow , the plot was\nthis movie wow , the plot was so\n",
        "empty.txt": "\n \n",
        "one.txt": "this movie\n",
        "zebra.txt": "a zebra\nthis movie\n",
        "long.txt": ("this movie " * 40 + "\n") * 3,
        "column.jsonl": '{"review": "this movie"}\n' * 3,
    }
    for name, text in lines.items():
        (found / name).write_text(text, encoding="utf-8")
    return found


@pytest.fixture(scope="module")
def run(place):
    """A run of one phase that has kept its eval text, of unequal lengths."""
    args = RLHFArgs(
        preset="reel", total_phases=1, batch_size=8, num_minibatches=1, warmup_steps=0, gen_len=4
    )
    trainer = RLHFTrainer(args, out=place / "run")
    texts = ["this movie wow , the plot was", "this movie", "this film honestly , the plot"]
    attach(trainer, RunHealth(), eval_text=texts, keep_eval_text=True)
    trainer.train()
    return trainer.run.path


def difference(model, tokens, words=("loved", "hated")):
    """The logit difference behind the last token, as a mean over texts."""
    ids = [single_token(model.tokenizer, word) for word in words]
    with torch.no_grad():
        logits = model(tokens)[:, -1].double()
    return (logits[:, ids[0]] - logits[:, ids[1]]).mean().item()


def test_the_shift_is_that_of_the_models_own_logits_on_a_file(place, capsys):
    """The longer text is cut to the length of the shorter."""
    out = place / "figures.json"
    text = ["--text", str(place / "good.txt"), "--words", "so", "good", "--out", str(out)]
    assert main(["compare", *BOTH, *FEW, *text]) == 0
    shown, found = capsys.readouterr().out, json.loads(out.read_text(encoding="utf-8"))
    before, after = map(load_model, BOTH)
    ids = before.tokenizer("<bos> this movie wow , the plot was", add_special_tokens=False)
    tokens = torch.tensor([ids["input_ids"]] * 2)
    moved = [difference(model, tokens, ("so", "good")) for model in (before, after)]
    assert found["shift"][0] == pytest.approx(moved[1] - moved[0], abs=1e-4)
    assert found["line"]["1.0"][0] == pytest.approx(moved[1] - moved[0], abs=1e-4)
    assert found["n"] == 2 and all(found["checks"].values())
    assert (found["base"], found["tuned"]) == tuple(BOTH)
    assert "2 texts of 8 tokens" in shown and "own weights" in shown and "by weights" not in shown


def test_reviews_up_to_the_verdict_are_read_where_there_is_no_other_text(place, capsys):
    out = place / "reviews.html"
    asked = ["--n-texts", "3", "--methods", "patching", "--ranks", "--alphas", "0.5"]
    assert main(["compare", *BOTH, *asked, "--out", str(out)]) == 0
    shown, page = capsys.readouterr().out, out.read_text(encoding="utf-8")
    truth = ReelTruth()
    tokens = truth.reviews(3, 0)[0][:, : truth.grammar.slot("VERB")]
    moved = [difference(model, tokens) for model in map(load_model, BOTH)]
    assert f"Shift of loved - hated: {moved[1] - moved[0]:.3g}" in shown
    assert "3 texts of 24 tokens, reviews up to the verdict" in shown
    assert "checks hold" in shown and "patched in" in shown and "By rank" not in shown
    assert page.startswith("<!DOCTYPE html>") and "L1 attn" in page and "patched out" in page
    assert "reel-nano-b" in page and "n = 3" in page


def test_a_run_is_compared_with_its_own_start_on_the_text_that_it_kept(run, capsys):
    assert main(["compare", str(run), str(run), *FEW, "--length", "2"]) == 0
    shown = capsys.readouterr().out
    assert f"3 texts of 2 tokens, the eval text of {run}" in shown
    assert "Shift of loved - hated: 0 " not in shown and "3 of 3 checks hold" in shown
    alike = ["--base-checkpoint", "last"]
    assert main(["compare", str(run), str(run), *FEW, *alike]) == 0
    shown = capsys.readouterr().out
    assert "3 texts of 3 tokens" in shown and "Shift of loved - hated: 0 " in shown


def test_a_check_that_does_not_hold_is_told_and_is_the_status(monkeypatch, capsys):
    def with_a_miss(*given):
        found = compare(*given)
        return dataclasses.replace(found, checks=[Check.at_most("a sum", 0.5, 0.1)])

    monkeypatch.setattr("rlhf_lab.diffing.compare", with_a_miss)
    assert main(["compare", *BOTH, *FEW, "--n-texts", "2"]) == 1
    shown = capsys.readouterr().out
    assert "0 of 1 checks hold" in shown
    assert "do not rely on these figures: a sum misses by 0.5" in shown


CASES = {
    "missing": (["none", "reel-nano"], "Cannot load the language model 'none'"),
    "no_run": (["reel-nano", "PLACE"], "holds no run.json"),
    "one_model": (["reel-nano"], "Missing"),
    "other_shape": (["reel-nano", "LLAMA"], "the same weights"),
    "no_text": ([*BOTH, "--text", "PLACE/none.txt"], "No such file"),
    "empty": ([*BOTH, "--text", "PLACE/empty.txt"], "0 texts"),
    "one_text": ([*BOTH, "--text", "PLACE/one.txt"], "1 texts"),
    "unknown": ([*BOTH, "--text", "PLACE/zebra.txt"], "outside the model's vocabulary"),
    "too_long": ([*BOTH, "--text", "PLACE/long.txt"], "exceed the model's context"),
    "column": ([*BOTH, "--text", "PLACE/column.jsonl"], "only 'review'"),
    "same_word": ([*BOTH, "--words", "loved", "loved"], "are one token"),
    "two_tokens": ([*BOTH, "--words", "loved it", "hated"], "not one token"),
    "length": ([*BOTH, "--length", "99"], "length=99"),
    "rank": ([*BOTH, "--ranks", "-1"], "ranks=[-1]"),
    "rank_twice": ([*BOTH, "--ranks", "1", "1"], "has a number twice"),
    "alpha": ([*BOTH, "--alphas", "nan"], "alphas=[nan]"),
    "alpha_far": ([*BOTH, "--alphas", "1e300"], "alphas=[1e+300]"),
    "method": ([*BOTH, "--methods", "magic"], "invalid choice"),
    "method_twice": ([*BOTH, "--methods", "split", "split"], "each once"),
    "out_there": ([*BOTH, "--out", "PLACE/good.txt"], "end it in .html or .json"),
    "out_taken": ([*BOTH, "--out", "PLACE/column.json"], "exists"),
    "no_words": (["LLAMA", "LLAMA", "--text", "PLACE/llama.txt"], "words are not given"),
    "nothing_to_read": (["LLAMA", "LLAMA", "--words", "a", "b"], "give a file with --text"),
}


@pytest.fixture(scope="module")
def llama(place, make_tiny_llama, llama_tokenizer):
    """A model of another family, without a text of its own."""
    directory = place / "llama"
    make_tiny_llama().save_pretrained(directory)
    llama_tokenizer.save_pretrained(directory)
    word = llama_tokenizer.convert_ids_to_tokens(5)
    (place / "llama.txt").write_text(f"{word}\n{word}\n", encoding="utf-8")
    (place / "column.json").write_text("{}")
    return directory


@pytest.mark.parametrize("case", CASES)
def test_what_cannot_be_is_refused_in_one_sentence(case, place, llama, capsys):
    arguments, words = CASES[case]
    filled = [a.replace("PLACE", str(place)).replace("LLAMA", str(llama)) for a in arguments]
    assert main(["compare", *filled]) == 2
    lines = [x for x in capsys.readouterr().err.splitlines() if not x.startswith("Loading")]
    assert len(lines) == 1 and lines[0].startswith("rlhf_lab: "), lines
    assert words in lines[0]


def test_models_that_read_other_tokens_are_refused(make_tiny_llama, llama_tokenizer):
    """A text is not the same to both."""
    first = load_model(make_tiny_llama(), llama_tokenizer)
    second = load_model(make_tiny_llama(), llama_tokenizer)
    second.tokenizer = load_model("reel-nano").tokenizer
    with pytest.raises(ConfigError, match="tokenizers with other words"):
        compare(first, second, torch.ones(2, 3, dtype=torch.long))
