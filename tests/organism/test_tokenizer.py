"""Tests that Reel's tokenizers survive saving, loading and TransformerLens."""

import json

import numpy as np
import pytest
from transformers import AutoTokenizer

from rlhf_lab.organism import VOCABULARY, Grammar, weights_dir
from rlhf_lab.organism.tokenizer import load_tokenizer, speaks_reel


@pytest.fixture(scope="module")
def writer():
    return load_tokenizer(weights_dir("reel-nano"))


@pytest.fixture(scope="module")
def reader():
    return load_tokenizer(weights_dir("reel-sentiment"))


@pytest.fixture(scope="module")
def reviews():
    return Grammar().sample(300, np.random.default_rng(5))


def test_writer_has_the_words_and_ids_of_the_grammar(writer):
    assert len(writer) == 72
    assert writer.convert_tokens_to_ids(list(VOCABULARY)) == list(range(72))
    assert (writer.bos_token, writer.eos_token, writer.pad_token) == ("<bos>", "<eos>", "<eos>")
    assert writer.unk_token is None


def test_writer_round_trips_every_review(writer, reviews):
    texts = reviews.texts()
    assert any("wasn't" in text for text in texts)
    assert writer.batch_decode(reviews.tokens, skip_special_tokens=True) == texts
    assert writer(texts)["input_ids"] == reviews.tokens[:, 1:-1].tolist()


def test_writer_refuses_a_word_that_reel_does_not_have(writer):
    with pytest.raises(Exception, match="UNK"):
        writer("this movie rocks")


def test_reader_frames_pads_truncates_and_masks(reader):
    encoded = reader(["this movie", "this rocks wow"], padding=True, return_tensors="pt")
    # <bos> this movie <eos> <pad>; <bos> this <unk> wow <eos>
    assert encoded["input_ids"].tolist() == [[0, 2, 8, 1, 72], [0, 2, 73, 13, 1]]
    assert encoded["attention_mask"].tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert set(encoded) == {"input_ids", "attention_mask"}
    assert len(reader("good " * 200, truncation=True)["input_ids"]) == 64


def test_reader_decodes_back_to_the_text(reader, reviews):
    texts = reviews.texts()
    ids = reader(texts)["input_ids"]
    assert ids == reviews.tokens.tolist()
    assert reader.batch_decode(ids, skip_special_tokens=True) == texts


def test_a_second_save_and_load_changes_nothing(writer, tmp_path):
    writer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(str(tmp_path), local_files_only=True)
    text = "this film wow , the plot wasn't so good"
    assert again(text)["input_ids"] == writer(text)["input_ids"]
    assert again.decode(again(text)["input_ids"]) == text


def test_shipped_settings_name_a_class_of_every_release():
    settings = json.loads((weights_dir("reel-nano") / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert settings["clean_up_tokenization_spaces"] is False


def test_load_refuses_an_empty_directory(tmp_path):
    with pytest.raises(ValueError, match="no tokenizer.json"):
        load_tokenizer(tmp_path)


def test_writer_works_inside_a_hooked_transformer(writer):
    from rlhf_lab.models import HookedTransformer, ModelConfig

    sizes = {"d_model": 8, "n_heads": 1, "d_head": 8, "n_ctx": 32, "d_vocab": 72}
    model = HookedTransformer(ModelConfig(n_layers=1, act_fn="gelu_new", **sizes), writer)
    text = "this movie wow , the plot wasn't so good"
    tokens = model.to_tokens(text)
    assert tokens.tolist() == [[0, *(VOCABULARY.index(word) for word in text.split(" "))]]
    assert model.to_string(tokens[0, 1:]) == text
    assert model.to_str_tokens("this movie") == ["<bos>", "this", "movie"]
    assert model.to_tokens("this movie", prepend_bos=False).tolist() == [[2, 8]]


def test_reel_is_known_by_its_words_and_their_ids(writer, reader):
    assert speaks_reel(writer)
    assert not speaks_reel(reader)  # it has two words more
