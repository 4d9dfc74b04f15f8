"""Numbers of each token: exact values and advantages, and the spelling of tokens."""

from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from rlhf_lab.probes.text_heatmap import spell_tokens
from rlhf_lab.samples import Samples


def rows(ids, padding=0):
    mask = torch.arange(len(ids))[None] >= padding
    return MagicMock(spec=Samples, tokens=ids[None], attention_mask=mask)


def test_joined_tokens_are_the_text(model, gpt2_tokenizer, reviews):
    for tokenizer, ids in ((model.tokenizer, reviews[0][0]), (gpt2_tokenizer, torch.arange(5))):
        (pieces,) = spell_tokens(tokenizer, rows(ids))
        assert len(pieces) == len(ids) and "".join(pieces) == tokenizer.decode(ids.tolist())


@pytest.mark.usefixtures("no_type_checks")
def test_spelled_tokens_of_one_character_lack_the_text_before():
    decode = lambda prefixes, **_: [bytes(ids).decode(errors="replace") for ids in prefixes]
    ids = torch.tensor(list("ab םו".encode()))
    (pieces,) = spell_tokens(SimpleNamespace(batch_decode=decode), rows(ids))
    assert pieces == ["a", "b", " ", "\ufffd", "ם", "\ufffd", "ו"]
    (pieces,) = spell_tokens(SimpleNamespace(batch_decode=decode), rows(ids, 1))
    assert pieces[:2] == ["", "b"]
