"""Numbers of each token: exact values and advantages, and the spelling of tokens."""

import torch

from rlhf_lab.probes.text_heatmap import spell_tokens


def test_joined_tokens_are_the_text(model, gpt2_tokenizer, reviews):
    for tokenizer, ids in ((model.tokenizer, reviews[0][0]), (gpt2_tokenizer, torch.arange(5))):
        pieces = spell_tokens(tokenizer, ids)
        assert len(pieces) == len(ids) and "".join(pieces) == tokenizer.decode(ids.tolist())
