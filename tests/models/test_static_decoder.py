"""Tests the static decoder against the packed one, eagerly and by a replayed tape of operations."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rlhf_lab.models import TransformerWithValueHead
from rlhf_lab.models import outputs as model_outputs
from rlhf_lab.models.fast import PackedDecoder
from rlhf_lab.models.fast.static_decoder import StaticDecoder, cuda_graph
from rlhf_lab.sampling import SamplingSpec, sample
from tests.models.test_packed import MASK, SHAPES, TOKENS, random_model

EQUAL = torch.ones(3, 4, dtype=torch.bool)
UNEQUAL = MASK[:, 1:5].clone()
UNEQUAL[2, 3] = True
GEN_LEN = 10


class Tape(TorchDispatchMode):
    """Keeps each operation with its tensors, as a CUDA graph does, and can run them again.

    What an operation makes is written to where it was made at first, so that a later operation
    that still holds the old tensor sees the new numbers; nothing else of the host runs again.
    """

    def __init__(self):
        super().__init__()
        self.entries = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        self.entries.append((func, args, kwargs or {}, out))
        return out

    def names(self):
        return [func.name() for func, *_ in self.entries]

    def replay(self):
        for func, args, kwargs, out in self.entries:
            again = func(*args, **kwargs)
            pairs = (
                [(out, again)] if isinstance(out, torch.Tensor) else zip(out, again, strict=True)
            )
            for old, new in pairs:
                if isinstance(old, torch.Tensor) and old is not new:
                    old.copy_(new)


TAPES = []


def on_tape(step, moved):
    """`cuda_graph` with a tape for the graph: the first run is undone, and only the tape stays."""
    before = [x.clone() for x in moved]
    with Tape() as tape:
        state = step()
    for x, value in zip(moved, before, strict=True):
        x.copy_(value)
    TAPES.append(tape)

    def replay():
        tape.replay()
        return state

    return replay


def decoded(make, prompts, mask, tokens):
    """The states before each of these tokens and behind the last."""
    with torch.no_grad():
        decoder = make(prompts, mask)
        states = [decoder.state]
        for token in tokens.T:
            decoder.feed(token)
            states.append(decoder.state._replace(logits=decoder.state.logits.clone()))
    return states


@pytest.mark.parametrize("capture", [None, on_tape], ids=["eager", "replayed"])
@pytest.mark.parametrize("mask", [EQUAL, UNEQUAL], ids=["equal", "unequal"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_static_cache_gives_the_states_of_a_growing_one(shape, mask, capture):
    policy = TransformerWithValueHead(random_model(**SHAPES[shape]))
    tokens = torch.randint(20, (3, GEN_LEN), generator=torch.Generator().manual_seed(0))
    prompts = TOKENS[:, 1:5]

    def static(prompts, mask):
        return StaticDecoder(policy, prompts, mask, GEN_LEN, capture=capture)

    def growing(prompts, mask):
        return PackedDecoder(policy, prompts, mask, GEN_LEN)

    found, expected = (decoded(make, prompts, mask, tokens) for make in (static, growing))
    assert len(found) == len(expected) == GEN_LEN + 1
    for one, other in zip(found, expected, strict=True):
        for name in ("logits", "value", "residual"):
            torch.testing.assert_close(
                getattr(one, name), getattr(other, name), atol=1e-5, rtol=1e-5
            )
    # what was kept of an early step is not what a later step wrote over it
    assert not torch.equal(found[1].residual, found[2].residual)


def test_every_step_is_the_same_operations_on_the_same_tensors():
    """What a graph would replay: no number of the host's, no shape that grows, no host read."""
    policy = TransformerWithValueHead(random_model(**SHAPES["grouped heads"]))
    tapes = []
    with torch.no_grad():
        decoder = StaticDecoder(policy, TOKENS[:, 1:5], UNEQUAL, GEN_LEN)
        for token in TOKENS[:, :3].T:
            decoder.token.copy_(token)
            with Tape() as tape:
                decoder._advance()
            tapes.append(tape)
    for tape in tapes[1:]:
        assert tape.names() == tapes[0].names()
        for (_, args, kwargs, _), (_, first, first_kwargs, _) in zip(
            tape.entries, tapes[0].entries, strict=True
        ):
            of_both = zip(plain((args, kwargs)), plain((first, first_kwargs)), strict=True)
            assert all(one == other for one, other in of_both)
    reads = [name for name in tapes[0].names() if "_local_scalar_dense" in name or "item" in name]
    assert reads == []


def plain(arguments):
    """Numbers and shapes among arguments, tensors by their shape."""
    leaves = torch.utils._pytree.tree_leaves(arguments)
    return [x.shape if isinstance(x, torch.Tensor) else x for x in leaves]


def test_a_growing_cache_is_not_the_same_operations():
    """The test above can fail."""
    policy = TransformerWithValueHead(random_model())
    with torch.no_grad():
        decoder = PackedDecoder(policy, TOKENS[:, 1:5], EQUAL, GEN_LEN)
        tapes = []
        for token in TOKENS[:, :2].T:
            with Tape() as tape:
                decoder.feed(token)
            tapes.append([plain(entry[1:3]) for entry in tape.entries])
    assert tapes[0] != tapes[1]


def test_samples_of_a_run_on_cuda_are_those_of_the_packed_decoder(monkeypatch):
    """`sample`, with the decoder that CUDA takes, and a tape in place of the graph."""
    policy = TransformerWithValueHead(random_model())
    spec = SamplingSpec(GEN_LEN, top_k=5)
    prompts = [[4, 9, 13], [7], [12, 4, 19, 6], [7]]

    def draw():
        return sample(policy, prompts, spec, torch.Generator().manual_seed(3))

    expected = draw()
    static = []

    def start(policy, *texts):
        static.append(StaticDecoder(policy, *texts, capture=on_tape))
        return static[-1]

    monkeypatch.setattr(model_outputs, "PackedDecoder", start)
    found = draw()
    assert len(static) == 1 and torch.equal(found.tokens, expected.tokens)
    for name in ("logprobs", "values", "residuals"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), atol=1e-5, rtol=0)


def test_short_answers_and_hooked_models_are_not_captured():
    policy = TransformerWithValueHead(random_model())

    def captures(gen_len):
        TAPES.clear()
        StaticDecoder(policy, TOKENS[:, 1:5], EQUAL, gen_len, capture=on_tape)
        return bool(TAPES)

    with torch.no_grad():
        assert captures(8) and not captures(7)
        heard = []
        policy.base_model.add_hook("blocks.0.hook_resid_pre", lambda x, hook: heard.append(1))
        assert not captures(8)
        decoder = StaticDecoder(policy, TOKENS[:, 1:5], EQUAL, 8, capture=on_tape)
        heard.clear()
        decoder.feed(TOKENS[:, 0])
        decoder.feed(TOKENS[:, 0])
    assert len(heard) == 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("mask", [EQUAL, UNEQUAL], ids=["equal", "unequal"])
def test_a_cuda_graph_gives_the_states_of_a_growing_cache(mask):
    policy = TransformerWithValueHead(random_model()).cuda()
    tokens = torch.randint(20, (3, GEN_LEN), generator=torch.Generator().manual_seed(0)).cuda()
    texts = TOKENS[:, 1:5].cuda(), mask.cuda()
    found, expected = (
        decoded(make, *texts, tokens)
        for make in (
            lambda *texts: StaticDecoder(policy, *texts, GEN_LEN, capture=cuda_graph),
            lambda *texts: PackedDecoder(policy, *texts, GEN_LEN),
        )
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.logits, other.logits, atol=1e-4, rtol=1e-4)
