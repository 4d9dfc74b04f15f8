"""Reel's words as the two tokenizers that are shipped with the bundled models."""

import json
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from rlhf_lab.organism.lexicon import BOS, EOS, VOCABULARY, WORD_IDS

PAD, UNK = "<pad>", "<unk>"


def save_language_model_tokenizer(directory: Path, max_tokens: int = 32) -> None:
    """Write the tokenizer of the language model: the 72 words, nothing else.

    1. Split at blanks and look words up; nothing is added to the text.
    2. <eos> also pads, as in GPT-2. There is no unknown word: encoding one is an error.
    """
    core = Tokenizer(WordLevel({word: i for i, word in enumerate(VOCABULARY)}))
    core.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=EOS,
        model_max_length=max_tokens,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )
    _save(tokenizer, Path(directory))


def save_classifier_tokenizer(directory: Path, max_tokens: int = 64) -> None:
    """Write the tokenizer of the classifier: the 72 words, <pad> (72) and <unk> (73).

    1. Split at blanks; a word that Reel does not have becomes <unk>.
    2. Put <bos> before the text and <eos> behind it, as BERT does with [CLS] and [SEP].
    """
    words = (*VOCABULARY, PAD, UNK)
    core = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token=UNK))
    core.pre_tokenizer = WhitespaceSplit()
    core.post_processor = TemplateProcessing(
        single=f"{BOS} $A {EOS}",
        special_tokens=[(BOS, WORD_IDS[BOS]), (EOS, WORD_IDS[EOS])],
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        cls_token=BOS,
        sep_token=EOS,
        pad_token=PAD,
        unk_token=UNK,
        model_max_length=max_tokens,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )
    _save(tokenizer, Path(directory))


def _save(tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    """Save a tokenizer under the class name that every release of transformers knows."""
    tokenizer.save_pretrained(directory)
    path = directory / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")
