"""Checks of labels that several records have: slot names, spelled tokens, the prompt's length."""

from jaxtyping import Bool, Int
from torch import Tensor

from rlhf_lab.probes.probe import Check, Observation, Record
from tests.probes.audit.anew import misspelt


def check_slots(seen: Observation, record: Record, first: int = 0) -> Check:
    """Hold stored slot names to the grammar's.

    Args:
        first: the position that the first of them names.
    """
    slots = seen.truth.grammar.slots[first:]
    named = [name.split(" ")[0] for name in record.values["slots"]]
    apart = sum(name != slot.name for name, slot in zip(named, slots, strict=False))
    return Check.at_most("slots are those of the grammar", apart, 0)


def check_tokens(
    seen: Observation,
    record: Record,
    tokens: Int[Tensor, "rows seq"],
    mask: Bool[Tensor, "rows gen"],
    source: str,
) -> list[Check]:
    """Hold stored tokens to the ids that they spell, and the prompt's length to the columns.

    Args:
        source: where the tokens come from, in words.
    """
    rows, prefix_len = record.values["tokens"], record.values["prefix_len"]
    spelled = misspelt(seen.ctx.policy.base_model.tokenizer, rows, tokens)
    apart = sum(len(row) != prefix_len + mask.shape[1] for row in rows)
    return [
        Check.at_most(f"the stored tokens spell the {source}", spelled, 0),
        Check.at_most("prompt and columns are as long as the tokens", apart, 0),
    ]
