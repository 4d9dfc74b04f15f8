"""Tests the static decode step against the growing cache, eagerly and as a replayed tape."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rlhf_lab.models import TransformerWithCritic, decode, static_decode
from rlhf_lab.models import TransformerWithValueHead as Policy
from rlhf_lab.models.decode import Decoder
from rlhf_lab.models.static_decode import StaticStep, can_capture
from rlhf_lab.sampling import SamplingSpec, sample
from tests.models.test_paths import LLAMA, TOKENS, random_model

PROMPTS, GEN_LEN = TOKENS[:, :4], 10
DRAWN = torch.randint(20, (3, GEN_LEN), generator=torch.Generator().manual_seed(0))
EQUAL, UNEQUAL = torch.ones(2, 3, 4, dtype=torch.bool)
UNEQUAL[1, :1] = UNEQUAL[2, :2] = False
MASKS = pytest.mark.parametrize("mask", [EQUAL, UNEQUAL], ids=["equal", "unequal"])
MODELS = {
    "GPT-2": {},
    "Llama": LLAMA,
    "Gemma 2": LLAMA | {"use_normalization_before_and_after": True, "attn_scores_soft_cap": 2.0},
    "NeoX": {"parallel_attn_mlp": True, "positional_embedding_type": "rotary", "rotary_dim": 4},
}


class Tape(TorchDispatchMode):
    """Records every operation with its tensors, as a CUDA graph does, and can replay them.

    A replay writes each result to the tensor of the recording, so later operations read the new
    numbers; nothing else of the host runs again.
    """

    def __init__(self):
        super().__init__()
        self.entries = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        self.entries.append((func, args, kwargs or {}, out))
        return out

    def replay(self):
        for func, args, kwargs, out in self.entries:
            results = func(*args, **kwargs)
            is_single = isinstance(out, torch.Tensor)
            for old, new in [(out, results)] if is_single else zip(out, results, strict=True):
                if isinstance(old, torch.Tensor) and old is not new:
                    old.copy_(new)


def capture_on_tape(run, state):
    """Replace `capture`: record one run on a tape, undo it, and return the tape's replay."""
    before = [x.clone() for x in state]
    with Tape() as tape:
        outputs = run()
    assert "aten::_local_scalar_dense" not in [func.name() for func, *_ in tape.entries]
    for x, value in zip(state, before, strict=True):
        x.copy_(value)
    return lambda: tape.replay() or outputs


def static_decoder(policy, prompts, mask):
    decoder = Decoder(policy, prompts, mask, GEN_LEN)
    decoder.step = StaticStep(policy, decoder.cache, mask, GEN_LEN)
    return decoder


def decoded_states(decoder, tokens):
    states = [decoder.state]
    for token in tokens.T:
        decoder.feed(token)
        states.append(decoder.state._replace(logits=decoder.state.logits.clone()))
    return states


@MASKS
@pytest.mark.parametrize("replayed", [False, True], ids=["eager", "replayed"])
@pytest.mark.parametrize("settings", MODELS.values(), ids=MODELS.keys())
def test_static_step_matches_growing_cache(settings, mask, replayed, monkeypatch):
    monkeypatch.setattr(static_decode, "capture", capture_on_tape)
    policy = Policy(random_model(**settings))
    with torch.no_grad():
        static = static_decoder(policy, PROMPTS, mask)
        if replayed:
            static.step.captured()
        states = decoded_states(static, DRAWN)
        expected = decoded_states(Decoder(policy, PROMPTS, mask, GEN_LEN), DRAWN)
    for state, other in zip(states, expected, strict=True):  # later steps overwrite none
        torch.testing.assert_close(tuple(state), tuple(other), atol=1e-5, rtol=1e-5)


def test_sampling_with_static_step_matches_growing_cache(monkeypatch):
    policy, captured = Policy(random_model()), []

    def draw():
        prompts = [[4, 9, 13], [7], [12, 4, 19, 6], [7]]
        spec = SamplingSpec(GEN_LEN, top_k=5)
        return sample(policy, prompts, spec, torch.Generator().manual_seed(3))

    expected = draw()
    record = lambda *inputs: captured.append(inputs) or capture_on_tape(*inputs)
    monkeypatch.setattr(decode, "can_capture", lambda *inputs: True)
    monkeypatch.setattr(static_decode, "capture", record)
    found = draw()
    assert len(captured) == 1 and torch.equal(found.tokens, expected.tokens)
    for name in ("logprobs", "values", "residuals"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), atol=1e-5, rtol=0)


def test_only_unhooked_policies_on_cuda_are_captured(monkeypatch):
    policy = Policy(random_model())
    assert not can_capture(policy, 8)
    device = property(lambda self: torch.device("cuda"))
    monkeypatch.setattr(Policy, "device", device)
    assert can_capture(policy, 8) and not can_capture(policy, 7)
    with policy.hooks([("value_head.hook_in", lambda x, hook: None)]):
        assert not can_capture(policy, 8)
    window = random_model(attn_types=["local", "global"], window_size=2)
    assert not can_capture(Policy(window), 8)
    assert not can_capture(TransformerWithCritic(random_model()), 8)


@MASKS
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_graph_matches_growing_cache(mask):
    policy = Policy(random_model()).cuda()
    texts = PROMPTS.cuda(), mask.cuda()
    with torch.no_grad():
        captured, growing = (Decoder(policy, *texts, GEN_LEN) for _ in range(2))
        assert captured.step.run is not captured.step.advance
        growing.step = None
        states, expected = (decoded_states(x, DRAWN.cuda()) for x in (captured, growing))
    for state, other in zip(states, expected, strict=True):
        torch.testing.assert_close(state.logits, other.logits, atol=1e-4, rtol=1e-4)
