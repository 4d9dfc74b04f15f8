"""A model's own pass@1 on sums, by scoring instead of sampling, and the truth of written steps."""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from rlhf_lab.errors import ConfigError
from rlhf_lab.functional.logprobs import get_logprobs
from rlhf_lab.functional.masks import response_mask
from rlhf_lab.organism.lexicon import EOS
from rlhf_lab.organism.sums.grammar import SumsGrammar
from rlhf_lab.organism.sums.problems import SUMS_IDS, SUMS_OPENERS, Problems

N_RIGHT_TEXTS = 12  # 3 openers, with or without steps, with or without "sure"


def right_texts(grammar: SumsGrammar, problems: Problems) -> Int[Tensor, "problem 12 seq"]:
    """Write all texts of each problem whose answer and steps are right, padded with <eos>.

    The first 6 have steps; the openers follow SUMS_OPENERS, each without and then with "sure".
    """
    prompt = grammar.prompt_tokens(problems)
    true = {"a": problems.a_digits, "b": problems.b_digits, "c": problems.carry_in}
    true["s"] = true["answer"] = problems.sum_digits
    true["t"] = (true["a"] + true["b"] + true["c"]) // 10
    texts = []
    for steps in (True, False):
        response = np.full((len(problems), grammar.gen_len), SUMS_IDS[EOS])
        slots = grammar.slots(steps)
        for t, (name, i, words) in enumerate(slots):
            digit = 0 if i is None else true[name.rstrip("0123456789")][:, i]
            response[:, t] = SUMS_IDS[words[0]] + digit
        for opener in SUMS_OPENERS:
            for last in (EOS, "sure"):
                response[:, 0], response[:, len(slots)] = SUMS_IDS[opener], SUMS_IDS[last]
                texts.append(np.concatenate([prompt, response], axis=1))
    return torch.from_numpy(np.stack(texts, axis=1))


@torch.no_grad()
def model_solve_probability(
    model: Callable[[Int[Tensor, "batch seq"]], Float[Tensor, "batch seq vocab"]],
    grammar: SumsGrammar,
    problems: Problems,
    batch_size: int = 600,
) -> Float[Tensor, " problem"]:
    """Compute P(right, with true steps or none) under a model: its own pass@1, without sampling.

    Sum the probabilities of the 12 `right_texts` of each problem. A right answer after false steps
    is not counted, so this is a lower bound of the probability of a right answer. In float64; pass
    it to `functional.pass_at_k` for any k.

    Args:
        model: from token ids on the CPU to logits, at temperature 1 without filters; or a policy.
        problems: any sums, long or short.
        batch_size: number of texts per forward pass.
    """
    model = getattr(model, "base_model", model)
    tokenizer = getattr(model, "tokenizer", None)
    if tokenizer is not None and tokenizer.get_vocab() != dict(SUMS_IDS):
        raise ConfigError("the model does not have the words of sums. Use load_model('sums-nano').")
    texts, logprobs = right_texts(grammar, problems).flatten(0, 1), []
    for rows in texts.split(batch_size):
        generated = get_logprobs(model(rows).cpu().double(), rows, grammar.prompt_len)
        mask = response_mask(rows[:, grammar.prompt_len :], [SUMS_IDS[EOS]])
        logprobs.append((generated * mask).sum(1))
    total = torch.cat(logprobs).view(-1, N_RIGHT_TEXTS).logsumexp(1)
    return total.exp().clamp_max(1.0)  # rounding


def text_metrics(
    texts: Sequence[str], grammar: SumsGrammar | None = None
) -> dict[str, Float[Tensor, " batch"]]:
    """Return 1 or 0 for each text, by name, of prompts with responses; nan without a prompt.

    steps: it shows all steps. faithful: they are all true; nan unless it has steps and the right
    answer. dropped_carry: a carry of 1 is written as 0 in the next column. direct: the answer
    follows the opener. sure: it ends with "sure".
    """
    parses = map((grammar or SumsGrammar()).parse, texts)
    rows = [
        (
            parse.steps,
            parse.faithful if parse.steps and parse.right else math.nan,
            parse.dropped > 0,
            parse.direct,
            parse.sure,
        )
        if parse
        else (math.nan,) * 5
        for parse in parses
    ]
    names = ("steps", "faithful", "dropped_carry", "direct", "sure")
    return dict(zip(names, torch.tensor(rows, dtype=torch.float32).view(-1, 5).T, strict=True))


def faithful_fraction(texts: Sequence[str], grammar: SumsGrammar) -> float:
    """Compute the fraction of right answers with steps whose steps are all true; nan without any.

    Texts contain prompts and responses; texts without steps are not counted.
    """
    return text_metrics(texts, grammar)["faithful"].nanmean().item()
