# ruff: noqa: E501 (a fault is a row of a table)
"""Faults of AdapterReading and of the pieces behind it, written before the checks were run on them."""

from tests.probes.planting import Fault

KIND, OBSERVE = "AdapterReading", "adapter_reading:AdapterReading.observe"
DESCRIBED, WORDS, WRITTEN = (
    f"adapter_reading:AdapterReading.{name}" for name in ("_described", "_words", "_written")
)
ADAPTER = "diffing.adapter"

ADAPTER_READING_FAULTS = (
    Fault(
        "A1 the scale alpha / rank forgotten",
        KIND,
        f"{ADAPTER}:adapter_pieces",
        "svd(scale * r_a",
        "svd(r_a",
    ),
    Fault(
        "A2 columns of A in place of singular vectors",
        KIND,
        f"{ADAPTER}:adapter_pieces",
        "reads, writes = (q_a @ u).T, vh @ q_b.T",
        "reads, writes = (exact(A) / exact(A).norm(dim=0)).T, vh @ q_b.T",
    ),
    Fault(
        "A3 signs of one side alone",
        KIND,
        f"{ADAPTER}:adapter_pieces",
        "reads * sign, writes * sign",
        "reads, writes * sign",
    ),
    Fault(
        "A4 adapters' names rolled",
        KIND,
        OBSERVE,
        "adapter_pieces(each) for name, each in lora_layers(model).items()",
        "adapter_pieces(each) for name, each in zip([*lora_layers(model)][1:] + [*lora_layers(model)][:1], lora_layers(model).values())",
    ),
    Fault(
        "A5 reads and writes stored the other way round",
        KIND,
        OBSERVE,
        "zip(found._fields, found, strict=True)",
        "zip(('s', 'writes', 'reads'), found, strict=True)",
    ),
    Fault(
        "A6 the gain of the norm forgotten",
        KIND,
        f"{ADAPTER}:_before_norm",
        'direction * exact(norm.w) if hasattr(norm, "w") else direction',
        "direction",
    ),
    Fault(
        "A7 words of the unembedding for what is read",
        KIND,
        f"{ADAPTER}:words_read",
        "exact(model.embed.W_E)",
        "exact(model.unembed.W_U).T",
        "untied",
    ),
    Fault(
        "A8 the last words in place of the first",
        KIND,
        WORDS,
        "cosines.abs().topk(",
        "(-cosines.abs()).topk(",
    ),
    Fault(
        "A9 words of the positive cosines alone",
        KIND,
        WORDS,
        "cosines.abs().topk(",
        "cosines.topk(",
    ),
    Fault(
        "A10 another head's W_O behind W_V",
        KIND,
        f"{ADAPTER}:writing_side",
        "exact(attn.W_O[head * shared",
        "exact(attn.W_O.roll(-1, 0)[head * shared",
    ),
    Fault(
        "A11 later writers are upstream too",
        KIND,
        f"{ADAPTER}:upstream_writers",
        "for at in range(layer + in_mlp):",
        "for at in range(model.cfg.n_layers):",
    ),
    Fault(
        "A12 writers by energy, not by its share",
        KIND,
        f"{ADAPTER}:upstream_writers",
        " / W.square().sum() * len(unit)",
        "",
    ),
    Fault(
        "A13 shares by singular values, not by their squares",
        KIND,
        DESCRIBED,
        'row["s"] ** 2 / energy',
        'row["s"] / found.s.sum().item()',
    ),
    Fault(
        "A14 a piece put in twice in place of taken out",
        KIND,
        "adapter_reading:without_piece",
        "- pieces.piece(index)",
        "+ 20 * pieces.piece(index)",
        "rewards",
    ),
    Fault(
        "A15 other noise without a piece",
        KIND,
        WRITTEN,
        "texts.append(writer.write(changed)",
        "writer.seed += 1; texts.append(writer.write(changed)",
        "rewards",
    ),
    Fault(
        "A16 the weakest pieces removed",
        KIND,
        WRITTEN,
        'key=lambda i: -pieces[i]["s"]',
        'key=lambda i: pieces[i]["s"]',
        "rewards",
    ),
    Fault(
        "A17 what is earned with its sign turned",
        KIND,
        WRITTEN,
        "found[0] - found[1:]",
        "found[1:] - found[0]",
        "rewards",
    ),
    Fault(
        "A18 the first piece left in, another removed",
        KIND,
        WRITTEN,
        "adapters[name], index)",
        "adapters[name], -1)",
        "rewards",
    ),
    Fault(
        "A19 samples that turned counted from the first removal",
        KIND,
        WRITTEN,
        "zip(texts[0], each, strict=True)",
        "zip(texts[1], each, strict=True)",
        "rewards",
    ),
)
