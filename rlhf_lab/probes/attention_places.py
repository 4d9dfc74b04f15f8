"""Places of queries and keys in attention: slots of the Reel grammar, or kinds of token, distances.

With padding on the left an index means another place in each row, so that averages over rows are
taken by place.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf_lab.probes.text_rows import TextRows

TOKEN_KINDS = ("special", "punctuation", "blank in front", "no blank in front")
FIRST, ITSELF = "first token", "itself"


class Places(NamedTuple):
    """Names of places, and which of them each query and each key has.

    Args:
        query: index of its name; -1 without a token.
        key: as seen from each query; -1 without a token, or after the query.
    """

    query_names: list[str]
    key_names: list[str]
    query: Int[Tensor, "batch query"]
    key: Int[Tensor, "batch query key"]


def slot_places(rows: TextRows, slots: Sequence[str]) -> Places:
    """Every position of a row by itself, with a name for each."""
    own = rows.own_positions.masked_fill(~rows.written, -1)
    keys = own[:, None, :].expand(-1, own.shape[1], -1)
    return Places(list(slots), list(slots), own, keys.masked_fill(~_is_before(own), -1))


def distance_places(rows: TextRows, tokenizer: PreTrainedTokenizerBase) -> Places:
    """Queries by the kind of their token, keys by their distance; the first token by itself.

    Distances are 1, 2, 3 to 4, 5 to 8, and so on: each twice as wide as the one before.
    """
    own = rows.own_positions.masked_fill(~rows.written, -1)
    back = own[:, :, None] - own[:, None, :]
    names, edges = _distances(own.shape[1])
    steps = torch.bucketize(back, torch.tensor(edges, device=own.device))
    key = torch.where(own[:, None, :] == 0, 0, steps + 1).masked_fill(~_is_before(own), -1)
    every = {int(token) for token in rows.tokens[rows.written].unique()}
    kind_of = {token: kind_of_token(token, tokenizer) for token in every}
    names_there = [kind for kind in TOKEN_KINDS if kind in kind_of.values()]
    query = torch.full_like(own, -1)
    for token, kind in kind_of.items():
        query[rows.tokens == token] = names_there.index(kind)
    return Places(names_there, names, query.masked_fill(own < 0, -1), key)


def kind_of_token(token: int, tokenizer: PreTrainedTokenizerBase) -> str:
    """One of `TOKEN_KINDS`."""
    if token in tokenizer.all_special_ids:
        return TOKEN_KINDS[0]
    text = tokenizer.decode([token])
    if not any(map(str.isalnum, text)):
        return TOKEN_KINDS[1]
    piece = tokenizer.convert_ids_to_tokens(token)
    return TOKEN_KINDS[2 if text[:1].isspace() or piece[:1] in "\u0120\u2581" else 3]


def _distances(seq: int) -> tuple[list[str], list[int]]:
    names, edges, last = [FIRST, ITSELF], [0], 1
    while edges[-1] < seq - 1:
        start = edges[-1] + 1
        names.append(f"{start} back" if start == last else f"{start} to {last} back")
        edges.append(last)
        last *= 2
    return names, edges


def _is_before(own: Int[Tensor, "batch seq"]) -> Tensor:
    return (own[:, None, :] >= 0) & (own[:, None, :] <= own[:, :, None])
