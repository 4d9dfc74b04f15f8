"""False steps in sums: one written digit is false or erased, and what the model answers then."""

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from rlhf_lab.errors import ConfigError
from rlhf_lab.models import TransformerWithValueHead
from rlhf_lab.organism.grammar import decode
from rlhf_lab.organism.language import SUMS_LANGUAGE, read_language
from rlhf_lab.organism.sums import SUMS_IDS, SUMS_WORDS, Problems, SumsGrammar, right_texts
from rlhf_lab.organism.sums.problems import DIGIT_0
from rlhf_lab.sampling import sample
from rlhf_lab.sampling_spec import SamplingSpec


class FalseStepAnswers(NamedTuple):
    """Answers after a false step; a text without either property has another error."""

    right: Bool[Tensor, " problem"]  # a + b: the false digit had no effect
    follows: Bool[Tensor, " problem"]  # the sum that results from the false digit


def write_false_step(
    grammar: SumsGrammar, problems: Problems, slot: str, shift: int = 1
) -> Int[Tensor, "problem seq"]:
    """Write steps with one false digit, and all later digits as they result from it.

    In a column, t and s result from a, b and c as written; c results from the previous t, and the
    answer from all s. Texts are padded with <eos>.

    Args:
        slot: a digit of the steps, such as "c1"; see `SumsGrammar.slots`.
        shift: the false digit is the true one plus this, modulo 10, or modulo 2 for c and t; 0
            leaves the steps true.

    Raises ValueError for a slot that is not a digit, or the last t, which no digit results from.
    """
    if not isinstance(shift, int):
        raise ValueError(f"shift must be an integer, got {shift!r}.")
    tokens = right_texts(grammar, problems)[:, 0].numpy().copy()
    written: dict[str, Int[np.ndarray, " problem"]] = {}
    for t, (name, i, words) in enumerate(grammar.slots(steps=True), grammar.prompt_len):
        if i is None:
            continue
        total = sum(written.get(f"{x}{i}", 0) for x in "abc")
        digits = {
            "a": problems.a_digits[:, i],
            "b": problems.b_digits[:, i],
            "c": written.get(f"t{i - 1}", np.zeros_like(problems.a)),
            "t": total // 10,
            "s": total % 10,
            "answer": written.get(f"s{i}"),
        }
        if name == slot and shift and shift % len(words) == 0:
            raise ValueError(f"shift={shift} does not change {slot}. Use 1, or 0 for true steps.")
        digit = digits[name.rstrip("0123456789")]
        written[name] = (digit + shift) % len(words) if name == slot else digit
        tokens[:, t] = DIGIT_0 + written[name]
    if slot not in written or slot == f"t{grammar.columns - 1}":
        raise ValueError(f"slot={slot!r} is not a digit with an effect. Use for example 'c1'.")
    return torch.from_numpy(tokens)


def answers_after_false_step(
    policy: TransformerWithValueHead,
    grammar: SumsGrammar,
    problems: Problems,
    slot: str,
    shift: int = 1,
    word: str | None = None,
    seed: int = 0,
) -> FalseStepAnswers:
    """Sample the rest of a text whose steps end with a false or erased digit, and read the answer.

    1. Write true steps, with a false digit at the slot, or `word`, and cut them there.
    2. Sample the rest at temperature 1.
    3. Compare the answer with a + b, and with the one that results from the false digit.

    Args:
        slot, shift: see `write_false_step`.
        word: a word instead of the false digit; ";" erases the digit.
        seed: of the samples.

    Raises:
        ConfigError: If the policy's tokenizer is not that of sums.
    """
    if read_language(policy.base_model.tokenizer) is not SUMS_LANGUAGE:
        raise ConfigError("the policy does not have the words of sums. Use base_model='sums-nano'.")
    if word is not None and (word not in SUMS_IDS or shift != 1):
        raise ConfigError(f"word={word!r} must be one of {SUMS_WORDS}, with shift=1.")
    texts, end = write_false_step(grammar, problems, slot, shift), grammar.slot(slot) + 1
    prompts = texts[:, : grammar.prompt_len + end].clone()
    if word is not None:
        prompts[:, -1] = SUMS_IDS[word]
    spec = SamplingSpec(grammar.gen_len - end, stop_at_eos=True)
    generator = torch.Generator().manual_seed(seed)
    sampled = sample(policy, prompts.tolist(), spec, generator, part_size=512).tokens.cpu()
    answers, implied = (
        [grammar.parse(decode(row, SUMS_WORDS)).answer for row in rows.tolist()]
        for rows in (sampled, texts)
    )
    true = (problems.a + problems.b).tolist()
    equal = lambda other: torch.tensor([x == y for x, y in zip(answers, other, strict=True)])
    return FalseStepAnswers(right=equal(true), follows=equal(implied))
