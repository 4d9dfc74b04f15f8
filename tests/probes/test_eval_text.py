"""Eval text: texts of unequal length reach every probe, and a run keeps the text that it reads."""

import pytest
import torch
from torch import Tensor

from rlhf_lab.models.tokenization import single_token
from rlhf_lab.probes import Check, EvalText, Probe, Record, attach, default_suite
from rlhf_lab.probes.eval_text import FEWEST_TEXTS, MOST_TEXTS, _within_budget, text_of_the_run
from rlhf_lab.training import RLHFTrainer
from tests.probes.looking import train_soundly

LENGTHS = (29, 12, 20, 17, 29, 12, 15, 23, 12, 13, 29, 18)


def cut_reviews(reviews: tuple[Tensor, Tensor], side: str) -> tuple[Tensor, Tensor]:
    """Reviews of unequal length, with words in the place of padding, and their mask."""
    tokens = reviews[0].clone()
    mask = torch.arange(tokens.shape[1]) < torch.tensor(LENGTHS)[:, None]
    tokens[~mask] = 5
    if side == "right":
        return tokens, mask
    turned = [row.roll(-int(n)) for row, n in zip(tokens, LENGTHS, strict=True)]
    return torch.stack(turned), mask.flip(1)


def test_positions_by_hand():
    tokens = torch.tensor([[0, 0, 7, 8], [1, 2, 3, 4]])
    mask = torch.tensor([[False, False, True, True], [True] * 4])
    text = EvalText.of(tokens, mask)
    assert text.tokens.tolist() == [[7, 8, 0, 0], [1, 2, 3, 4]]
    assert text.lengths.tolist() == [2, 4]
    assert text.tokens[[0, 1], text.columns(-1)].tolist() == [8, 4]
    assert text.tokens[[0, 1], text.columns(0)].tolist() == [7, 1]
    assert text.columns(-2).tolist() == [0, 2]
    assert text.common().tokens.tolist() == [[7, 8], [1, 2]]
    assert text.first(1).tokens.tolist() == [[7, 8, 0, 0]]


class Keeping(Probe):
    """Keeps what it is shown of one site."""

    text = "eval"
    sites = ("blocks.1.hook_resid_post", "values", "logits")
    events = ("after_score",)

    def __init__(self, name: str, pos: int | None, n: int | None) -> None:
        super().__init__(name=name)
        self.pos, self.n = pos, n

    def observe(self, seen):
        self.seen = seen
        return Record(checks=[Check.at_most("fine", 0, 0)])


def unequal(n: int) -> list[str]:
    return [" ".join(f"w{1 + (i + j) % 7}" for j in range(1 + i % 4)) for i in range(n)]


def test_the_prompts_are_the_text_where_there_are_several(elsewhere_with):
    trainer = elsewhere_with(prompts=unequal(40))
    tokens, mask = text_of_the_run(trainer)
    rows = {tuple(row[real].tolist()) for row, real in zip(tokens, mask, strict=True)}
    assert rows <= set(map(tuple, trainer.prompts.tokens))
    assert FEWEST_TEXTS <= len(rows) == len(tokens) <= MOST_TEXTS
    assert len(_within_budget([[0] * 300, *[[0]] * 30])) == FEWEST_TEXTS  # 300 columns each
    assert len(set(mask.sum(1).tolist())) > 1


@pytest.mark.slow
def test_texts_are_sampled_after_one_prompt(elsewhere_with, make_trainer):
    trainer = elsewhere_with()
    tokens, mask = text_of_the_run(trainer)
    again, _ = text_of_the_run(elsewhere_with("again"))
    other, _ = text_of_the_run(elsewhere_with("other", seed=2))
    assert tokens.equal(again) and not tokens.equal(other)
    assert tokens.shape == (MOST_TEXTS, len(trainer.prompt) + 5)
    assert tokens[:, : len(trainer.prompt)].eq(tokens.new_tensor(trainer.prompt)).all()
    assert set((mask.sum(1) - len(trainer.prompt)).tolist()) == {1, 2, 3, 4, 5}
    stopping = make_trainer(stop_tokens="and", gen_len=12)
    tokens, mask = text_of_the_run(stopping)
    is_stop = tokens.eq(single_token(stopping.policy.base_model.tokenizer, "and")) & mask
    assert is_stop.any() and not is_stop[:, :-1][mask[:, 1:]].any()


@pytest.mark.slow
def test_a_resumed_run_reads_the_text_that_it_began_with(elsewhere_with, monkeypatch):
    """Also where the reference has been reset since, and the text could not be made again."""
    trainer = elsewhere_with(reset_reference_every=1)
    attach(trainer, default_suite(trainer))
    trainer.run_phase(), trainer.run_phase()
    began = default_suite(trainer)
    resumed = RLHFTrainer.resume(trainer.run.path)
    monkeypatch.setattr("rlhf_lab.probes.defaults.text_of_the_run", None)  # not made again
    suite = default_suite(resumed)
    assert suite.eval_tokens.equal(began.eval_tokens)
    assert suite.eval_mask.equal(began.eval_mask)
    attach(resumed, suite)
    train_soundly(resumed)


@pytest.mark.slow
@pytest.mark.parametrize("side", ["left", "right"])
def test_activations_are_those_of_each_text_alone(make_trainer, reviews, side):
    trainer = make_trainer(reset_reference_every=1, base_lr=1e-2, warmup_steps=0)
    probes = [Keeping("whole", None, None), Keeping("third", 3, 5), Keeping("last", -1, None)]
    tokens, mask = cut_reviews(reviews, side)
    attach(trainer, probes, eval_tokens=tokens, eval_mask=mask)
    trainer.run_phase(), trainer.run_phase()
    for probe in probes:
        acts, n = probe.seen.reference_acts["logits"], probe.n or len(LENGTHS)
        assert len(acts) == len(probe.seen.acts["values"]) == n
        for row, length in enumerate(LENGTHS[:n]):
            with torch.no_grad():
                logits = probe.seen.ctx.reference(reviews[0][row, :length][None])[0]
            expected = logits if probe.pos is None else logits[probe.pos]
            cut = probe.seen.text.attention_mask[row]
            found = acts[row][cut] if probe.pos is None else acts[row]
            torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)
