"""`tools.reel`: tokenizers, training and checks of the bundled models, and its command line."""

import itertools
import re

import numpy as np
import pytest
import torch
from transformers import GPT2LMHeadModel

from rlhf_lab.organism import BUNDLED, VOCABULARY, Grammar, weights_dir
from rlhf_lab.organism.bundled import LANGUAGE_MODELS, SUMS_MODELS
from rlhf_lab.organism.language import REEL_LANGUAGE, SUMS_LANGUAGE, find_language, read_language
from rlhf_lab.organism.sums import SUMS_WORDS, SumsGrammar
from rlhf_lab.organism.tokenizer import load_tokenizer
from tools.reel import __main__ as commands
from tools.reel.train import sums_loss


@pytest.fixture(scope="module")
def reviews():
    return Grammar().sample(300, np.random.default_rng(5))


@pytest.fixture(scope="module")
def sums():
    rng = np.random.default_rng(6)
    return SumsGrammar().sample(SumsGrammar().problems(40, rng), rng)


@pytest.mark.parametrize(
    ("name", "words", "language"),
    [("reel-nano", VOCABULARY, REEL_LANGUAGE), ("sums-nano", SUMS_WORDS, SUMS_LANGUAGE)],
)
def test_language_model_tokenizer_has_ids_of_the_grammar(reviews, sums, name, words, language):
    tokenizer, texts = load_tokenizer(weights_dir(name)), {"reel-nano": reviews}.get(name, sums)
    assert tokenizer.convert_tokens_to_ids(list(words)) == list(range(len(words)))
    assert read_language(tokenizer) is language
    path = weights_dir(name)
    assert find_language(str(path)) is find_language(name) is language
    assert find_language(f"weights/{path.name}", str(path.parents[1])) is language
    special = (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token)
    assert special == ("<bos>", "<eos>", "<eos>", None)
    assert tokenizer.batch_decode(texts.tokens, skip_special_tokens=True) == texts.texts()
    expected = [[token for token in row[1:] if token != 1] for row in texts.tokens.tolist()]
    assert tokenizer(texts.texts())["input_ids"] == expected
    with pytest.raises(Exception, match="UNK"):
        tokenizer("this movie rocks")


def test_classifier_tokenizer_frames_pads_and_truncates(reviews):
    tokenizer = load_tokenizer(weights_dir("reel-sentiment"))
    encoded = tokenizer(["this movie", "this rocks wow"], padding=True, return_tensors="pt")
    # <bos> this movie <eos> <pad>; <bos> this <unk> wow <eos>
    assert encoded["input_ids"].tolist() == [[0, 2, 8, 1, 72], [0, 2, 73, 13, 1]]
    assert encoded["attention_mask"].tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert len(tokenizer("good " * 200, truncation=True)["input_ids"]) == 64
    assert tokenizer(reviews.texts())["input_ids"] == reviews.tokens.tolist()
    assert read_language(tokenizer) is None


def test_bundled_models_are_small_distinct_and_without_pickle(tmp_path):
    files = [path for name in BUNDLED for path in weights_dir(name).iterdir()]
    assert sum(path.stat().st_size for path in files) < 3.6e6
    assert {path.suffix for path in files} == {".json", ".safetensors"}
    load = lambda name: GPT2LMHeadModel.from_pretrained(weights_dir(name), local_files_only=True)
    for names in (LANGUAGE_MODELS, SUMS_MODELS):
        weights = [load(name).transformer.wte.weight for name in names]
        assert all((a - b).abs().max() > 0.1 for a, b in itertools.combinations(weights, 2))
    assert SUMS_LANGUAGE.models == ("sums-nano", "sums-nano-b", "sums-nano-c")  # one grammar
    with pytest.raises(ValueError, match="'reel-huge'"):
        weights_dir("reel-huge")
    with pytest.raises(ValueError, match="no tokenizer.json"):
        load_tokenizer(tmp_path / "nowhere")
    (tmp_path / "tokenizer.json").write_text("version https://git-lfs")
    assert find_language(str(tmp_path)) is REEL_LANGUAGE


def test_sums_loss_is_the_mean_over_response_tokens(sums):
    model = GPT2LMHeadModel.from_pretrained(weights_dir("sums-nano"), local_files_only=True)
    tokens, mask = torch.from_numpy(sums.tokens), torch.from_numpy(sums.mask)
    with torch.no_grad():
        logprobs = model(tokens[:, :-1]).logits.log_softmax(-1)
        nll = -logprobs.gather(-1, tokens[:, 1:, None])[..., 0][mask[:, 1:]].mean()
        loss = sums_loss(model, SumsGrammar(), 40, np.random.default_rng(6))
    assert loss.item() == pytest.approx(nll.item(), rel=1e-5)


@pytest.mark.slow
def test_bundled_models_pass_every_check(capsys):
    assert commands.main(["check", "--reviews", "600"]) == 0
    output = capsys.readouterr().out
    assert len(re.findall(r" yes ", output)) == 35 and " NO " not in output
