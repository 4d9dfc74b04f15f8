"""Numbers of each token: exact values and advantages, and the spelling of tokens."""

import torch

from rlhf_lab.probes.text_heatmap import spell_tokens


def test_joined_tokens_are_the_text(model, gpt2_tokenizer, reviews):
    for tokenizer, ids in ((model.tokenizer, reviews[0][0]), (gpt2_tokenizer, torch.arange(5))):
        pieces = spell_tokens(tokenizer, ids)
        assert len(pieces) == len(ids) and "".join(pieces) == tokenizer.decode(ids.tolist())


def test_exact_advantages_lead_to_the_reward(finished):
    record, tensors = finished.records("text_heatmap")[0], finished.tensors("text_heatmap", 0)
    assert tensors["advantage"].shape == (4, 26) and record["prefix_len"] == 3
    whole = tensors["truth_mask"].all(1)
    assert bool(whole.any())
    # nothing is known before the first word, so V = 1/2
    assert torch.equal(tensors["true_value"][:, 0], torch.full((4,), 0.5))
    ends = (0.5 + tensors["true_advantage"].sum(1))[whole]
    torch.testing.assert_close(ends, torch.tensor(record["rewards"])[whole], atol=2e-6, rtol=0)
    assert bool((tensors["kl"] == 0).all())
    assert bool((finished.tensors("text_heatmap", 2)["kl"] > 0).any())
