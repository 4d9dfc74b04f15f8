"""NeuronRank: sums on runs of every kind, a planted neuron by name."""

import copy
import re

import pytest
import torch

from rlhf_lab.errors import ConfigError
from rlhf_lab.models import load_model
from rlhf_lab.models.hooked_model import is_centered
from rlhf_lab.models.tokenization import single_token
from rlhf_lab.probes import NeuronRank
from rlhf_lab.probes.neuron_rank import NeuronEnd, neuron_shift
from tests.probes.looking import Trained, sound
from tests.tiny_families import tiny_of

pytestmark = pytest.mark.usefixtures("no_type_checks")


def probe_of(kind: str) -> NeuronRank:
    words = ("w1", "w2") if kind == "grouped" else ("loved", "hated")
    return NeuronRank(*words, pos=-3, n=16)


def test_a_shift_is_split_by_hand():
    end = lambda a, w, b, s: NeuronEnd(
        *(torch.tensor(x, dtype=torch.float64) for x in ([[a]], [w], [b], [s]))
    )
    # (3 * 2 - 1 * 1) and (-1 * 0.5 * 2 - 2 * 0.5), with the scale 1 before and 1/2 after
    before, after = end([1.0, 2.0], [1.0, 0.5], 0.5, 1.0), end([3.0, -1.0], [1.0, 0.5], 1.0, 2.0)
    by_neuron, by_activation, b_out = neuron_shift(before, after)
    assert by_neuron.tolist() == [[[5.0, -2.0]]] and b_out.tolist() == [[1.5]]
    assert by_activation.tolist() == [[[2 * 1.5, -3 * 0.75]]]


@torch.no_grad()
def check(kind: str, run: Trained) -> None:
    """Compare the first neuron's columns with single texts, and sums with the MLP's rows."""
    probe = probe_of(kind)
    record = sound(run, probe)
    values, stored, model = record.values, record.tensors, run.ctx.reference
    text = run.seen().text.first(16)
    alone = [
        tokens[real][None] for tokens, real in zip(text.tokens, text.attention_mask, strict=True)
    ]
    layer, index = map(int, re.fullmatch(r"L(\d+)N(\d+)", values["neurons"][0]).groups())
    order = stored["neuron_contribution"].abs().flatten().argsort(descending=True)
    places = [divmod(i, model.cfg.d_mlp) for i in order[: len(values["neurons"])].tolist()]
    assert values["neurons"] == [f"L{at}N{number}" for at, number in places]
    site, a, e = f"blocks.{layer}.mlp.hook_post", [], []
    for model in (run.ctx.reference, run.ctx.policy.base_model):
        ids = [single_token(model.tokenizer, word) for word in (probe.word, probe.other)]
        u = (model.unembed.W_U[:, ids[0]] - model.unembed.W_U[:, ids[1]]) * model.ln_final.w
        u = u - u.mean() if is_centered(model.ln_final) else u
        caches = [model.run_with_cache(tokens)[1] for tokens in alone]
        a.append(torch.stack([cache[site][0, -3, index] for cache in caches]))
        scales = torch.stack([cache["ln_final.hook_scale"][0, -3, 0] for cache in caches])
        e.append(model.blocks[layer].mlp.W_out[index] @ u / scales)
    rows, moved = a[1] * e[1] - a[0] * e[0], a[1] - a[0]
    expected = {
        "contribution": rows,
        "by_activation": moved * (e[0] + e[1]) / 2,
        "activation": a[0],
        "activation_shift": moved,
        "write": (e[0] + e[1]) / 2,
    }
    for name, column in expected.items():
        assert values[name][0] == pytest.approx(column.mean().item(), abs=1e-4, rel=1e-3), name
    writes = torch.stack([x.mean() for x in e])
    torch.testing.assert_close(stored["neuron_write"][:, layer, index], writes)
    for row, (at, number) in enumerate(places):
        site = f"blocks.{at}.mlp.hook_post"
        activations = torch.cat([cache[site][0, :, number] for cache in caches])
        best = activations.max().item()
        assert values["token_activations"][row][0] == pytest.approx(best, abs=1e-4)
        token = torch.cat(alone, 1)[0, activations.argmax()].item()
        assert values["tokens"][row][0] == model.tokenizer.decode([token])
    sums = stored["neuron_contribution"].sum(1) + torch.tensor(values["b_out"])
    assert values["mlp"] == pytest.approx(sums.tolist(), abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["adapted", "padded", "grouped"])
def test_the_first_neuron_is_that_of_single_texts(kind, trained_runs):
    check(kind, trained_runs(kind))


@pytest.mark.slow
def test_a_planted_neuron_ranks_first(trained_runs):
    """One neuron that writes the difference of the words where it is active, and nothing else."""
    run = trained_runs("padded")
    seen = run.seen()
    model = copy.deepcopy(seen.ctx.reference)
    words = [single_token(model.tokenizer, word) for word in ("loved", "hated")]
    with torch.no_grad():
        u = model.unembed.W_U[:, words[0]] - model.unembed.W_U[:, words[1]]
        model.blocks[0].mlp.W_out[37] = 0
        model.blocks[1].mlp.W_out[11] += 3 * u / u.norm()
        model.blocks[1].mlp.b_in[11] += 2
    policy = copy.copy(seen.ctx.policy)
    policy.__dict__ = {**policy.__dict__, "_modules": {**policy._modules, "base_model": model}}
    ctx = copy.copy(seen.ctx)
    object.__setattr__(ctx, "policy", policy)
    values = NeuronRank(n=4).observe(seen.__class__(**{**vars(seen), "ctx": ctx})).values
    assert values["neurons"][0] == "L1N11" and values["contribution"][0] > 0


def test_models_without_single_neurons_are_refused(llama_tokenizer):
    model = load_model(tiny_of("Olmo2ForCausalLM"), llama_tokenizer)
    with pytest.raises(ConfigError, match="Remove neuron_rank, and look at the residual"):
        NeuronRank().check_model(model)
