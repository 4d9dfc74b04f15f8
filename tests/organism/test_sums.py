"""Sums: texts, and every exact quantity against brute force over all texts of a small grammar."""

import math
from collections import Counter, defaultdict
from dataclasses import replace

import numpy as np
import pytest
import torch

from rlhf_lab.errors import ConfigError
from rlhf_lab.functional import informative_fraction, pass_at_k
from rlhf_lab.organism.grammar import decode
from rlhf_lab.organism.sums import (
    SUMS_IDS,
    SUMS_REWARDS,
    SUMS_WORDS,
    WRITERS,
    SumsGrammar,
    carry_patterns,
    faithful_fraction,
    is_held_out,
    load_sums_prompts,
    make_prompts,
    modal_answer,
    model_solve_probability,
    outcomes,
    right_texts,
    solve_probability,
    sums_frontier,
    text_metrics,
    trace,
    writer_solve_probability,
)
from tests.organism.sums_oracle import all_texts, bodies, read_digits, writer_law

FULL = SumsGrammar()
MINI = SumsGrammar(
    columns=2,
    p_writer=(0.2, 0.3, 0.5),
    p_writer_long_carry=(0.1, 0.1, 0.8),
    p_digits=(0.3, 0.7),
    typical_opener=0.5,
    careful_slip=0.05,
    blurt_slip=0.2,
    forget=0.7,
    sure=0.1,
)
# long with and without a carry, short with and without, and digits where a slip wraps around
PAIRS = [(17, 25), (31, 42), (7, 8), (2, 5), (0, 0), (40, 10), (5, 45), (99, 0), (48, 51), (65, 7)]
STEPS = "0 0 0 6 + 0 0 0 9 = so 6 9 0 1 5 ; 0 0 1 0 1 ; 0 0 0 0 0 ; 0 0 0 0 0 ; # 0 0 1 5"


def make_sums(grammar, pairs):
    return grammar.make_problems(*np.array(pairs).T)


def as_tokens(grammar, pair, words):
    (prompt,) = make_prompts(make_sums(grammar, [pair]))
    ids = [SUMS_IDS[word] for word in ("<bos>", *prompt.split(), *words)]
    return ids + [SUMS_IDS["<eos>"]] * (grammar.prompt_len + grammar.gen_len - len(ids))


def test_sample_writes_the_texts_of_the_oracle():
    rng = np.random.default_rng(0)
    problems = make_sums(MINI, [pair for pair in PAIRS for _ in range(600)])
    for z, writer in enumerate(WRITERS):
        found = MINI.sample(problems, rng, writer)
        assert (found.latents.writer == z).all()
        for k, pair in enumerate(PAIRS):
            rows = found.tokens[600 * k : 600 * (k + 1)]
            counts = Counter(tuple(row) for row in rows)
            law = defaultdict(float)
            for text in all_texts(MINI, *pair)[writer]:
                law[tuple(as_tokens(MINI, pair, text.words))] += text.probability
            assert counts.keys() <= law.keys()
            gaps = [counts[x] - 600 * p for x, p in law.items()]
            bounds = [5 * (600 * p * (1 - p)) ** 0.5 + 1 for p in law.values()]
            assert all(abs(gap) <= bound for gap, bound in zip(gaps, bounds, strict=True))


def test_sample_draws_writers_at_random_and_marks_latents():
    rng = np.random.default_rng(1)
    problems = FULL.problems(1500, rng)
    found = FULL.sample(problems, rng)
    latents, has_carry = found.latents, problems.n_carries > 0
    assert (latents.writer[problems.is_long & has_carry] == 2).all()
    rest = latents.writer[~(problems.is_long & has_carry)]
    np.testing.assert_allclose(np.bincount(rest) / len(rest), FULL.p_writer, atol=0.05)
    parses = [FULL.parse(text) for text in found.texts()]
    assert [p.right for p in parses] == [
        not (e or d or (z == 2 and c))
        for e, d, z, c in zip(
            latents.error.any(1), latents.dropped.any(1), latents.writer, has_carry, strict=True
        )
    ]
    assert [p.dropped for p in parses] == latents.dropped.sum(1).tolist()
    assert [p.steps for p in parses] == (latents.writer < 2).tolist()
    ends = found.mask.sum(1) + FULL.prompt_len - 1
    assert (found.tokens[np.arange(1500), ends] == SUMS_IDS["<eos>"]).all()
    assert set(ends - FULL.prompt_len) == {6, 7, 30, 31}
    again = FULL.sample(problems, np.random.default_rng(7)).tokens
    assert (again == FULL.sample(problems, np.random.default_rng(7)).tokens).all()


def test_problems_have_digits_and_carries():
    rng = np.random.default_rng(2)
    drawn = FULL.problems(3000, rng)
    lengths = [len(str(n)) for n in drawn.a]
    assert lengths == [len(str(n)) for n in drawn.b] and (drawn.a + drawn.b < 10**4).all()
    np.testing.assert_allclose(np.bincount(lengths)[1:] / 3000, 0.25, atol=0.04)
    for row in range(0, 3000, 100):
        x, y = read_digits(drawn.a[row], 4), read_digits(drawn.b[row], 4)
        assert drawn.a_digits[row].tolist() == x and drawn.b_digits[row].tolist() == y
        assert drawn.sum_digits[row].tolist() == read_digits(drawn.a[row] + drawn.b[row], 4)
    assert make_sums(FULL, [(6, 9), (999, 1), (1000, 1), (12, 34)]).n_carries.tolist() == [
        *(1, 3, 0, 0)
    ]
    assert make_sums(FULL, [(999, 1), (1000, 1), (1, 9000)]).is_long.tolist() == [0, 1, 1]
    for carry in (True, False):
        kept = FULL.problems(200, rng, digits=[2, 4], carry=carry)
        assert len(kept) == 200 and ((kept.n_carries > 0) == carry).all()
        assert {len(str(n)) for n in kept.a} == {2, 4}
    assert len(FULL.problems(0, rng)) == 0


def test_parse_matches_hand_read():
    parse = FULL.parse(STEPS)
    assert (parse.a, parse.b, parse.opener, parse.answer) == (6, 9, "so", 15)
    assert parse.right and parse.steps and parse.faithful and not parse.sure
    # the carry of 1 is dropped in column 1, and the answer copies it
    dropped = FULL.parse(STEPS.replace("0 0 1 0 1 ;", "0 0 0 0 0 ;").replace("0 0 1 5", "0 0 0 5"))
    assert (dropped.dropped, dropped.first_error, dropped.right) == (1, 1, False)
    # right, but the step of column 2 is read from nowhere
    false = FULL.parse(STEPS.replace("; 0 0 0 0 0 ; 0", "; 1 4 0 0 0 ; 0") + " sure")
    assert false.right and false.sure and false.first_error == 2 and not false.faithful
    assert faithful_fraction([STEPS, STEPS + " sure"], FULL) == 1.0
    wrong = STEPS.replace("; 0 0 0 0 0 ; 0", "; 1 4 0 0 0 ; 0")
    assert faithful_fraction([STEPS, wrong, "x", STEPS[:-1] + "9"], FULL) == 0.5
    assert np.isnan(faithful_fraction(["0 0 0 6 + 0 0 0 9 = hm # 0 0 1 5"], FULL))


def test_answer_is_what_follows_the_last_hash():
    prompt = "0 0 0 6 + 0 0 0 9 ="
    answers = {
        " hm # 0 0 1 5": 15,
        " hm # 0 0 1 5 sure": 15,
        " # 0 0 0 1 # 0 0 1 5": 15,
        " 0 0 1 5 # 0 0 1 4": 14,
        " hm # 0 0 1 5 so": None,
        " hm # 0 0 1 5 0": None,
        " hm # 0 1 5": None,
        " hm # 0 0 1 5 sure sure": None,
        " hm 0 0 1 5": None,
        " #": None,
        "": None,
    }
    for response, answer in answers.items():
        assert FULL.parse(prompt + response).answer == answer, response
    for text in ("", "so # 0 0 1 5", "0 0 6 + 0 0 0 9 = so", prompt[:-2], "9 9 9 9 + 0 0 0 1 ="):
        assert FULL.parse(text) is None
    assert FULL.parse("a" + prompt) is None and FULL.parse(prompt + "so") is None


def test_solve_probability_matches_brute_force():
    pairs = [(a, b) for a in range(100) for b in range(a % 7, 100, 7)]
    problems = make_sums(FULL, pairs)
    found, by_writer = solve_probability(FULL, problems), writer_solve_probability(FULL, problems)
    patterns = {}
    for k, (a, b) in enumerate(pairs):
        laws = []
        for writer in WRITERS:
            true = read_digits(a + b, 4)
            laws.append(sum(p for _, answer, p in bodies(FULL, writer, a, b) if answer == true))
        assert by_writer[k] == pytest.approx(laws, abs=1e-12)
        share = list(writer_law(FULL, a, b).values())
        assert found[k] == pytest.approx(np.dot(share, laws), abs=1e-12)
        patterns[tuple(problems.carry_in[k])] = found[k]
    assert len(patterns) == 4


@pytest.mark.parametrize("p_writer", [MINI.p_writer, (0.0, 1.0, 0.0), (1.0, 0.0, 0.0)])
def test_modal_answer_matches_brute_force(p_writer):
    grammar = replace(MINI, p_writer=p_writer)
    for pair, found in zip(PAIRS, modal_answer(grammar, make_sums(grammar, PAIRS)), strict=True):
        law = Counter()
        for writer, prior in writer_law(grammar, *pair).items():
            for _, digits, p in bodies(grammar, writer, *pair):
                law[sum(digit * 10**i for i, digit in enumerate(digits))] += prior * p
        assert law[found] == pytest.approx(max(law.values()), abs=1e-12)


def test_modal_answer_is_right_without_a_carry():
    problems, weight = key((2, 3))
    is_right = modal_answer(FULL, problems) == problems.a + problems.b
    assert (is_right == (problems.n_carries == 0)).all()
    assert weight @ is_right == pytest.approx(0.1894, abs=5e-5)


def test_long_sums_with_a_carry_are_never_solved():
    problems = FULL.problems(500, np.random.default_rng(3), digits=[4], carry=True)
    assert not solve_probability(FULL, problems).any()
    without = FULL.problems(500, np.random.default_rng(3), digits=[4], carry=False)
    expected = 0.15 * 0.98**4 + 0.25 + 0.6 * 0.9**4
    assert solve_probability(FULL, without) == pytest.approx(expected)
    unreachable = replace(FULL, unreachable=True)
    assert solve_probability(unreachable, without) == pytest.approx(0.9**4)
    texts = unreachable.sample(without, np.random.default_rng(3)).tokens
    assert not any(unreachable.parse(decode(row, SUMS_WORDS)).steps for row in texts.tolist())


@pytest.mark.parametrize("grammar, digits", [(FULL, 1), (FULL, 2), (MINI, 1), (MINI, 2)])
def test_carry_patterns_match_all_sums(grammar, digits):
    low, high = (0 if digits == 1 else 10 ** (digits - 1)), 10**digits
    pairs = [(a, b) for a in range(low, high) for b in range(low, high)]
    every = make_sums(grammar, [(a, b) for a, b in pairs if a + b < 10**grammar.columns])
    problems, weight = carry_patterns(grammar, digits)
    laws = Counter(map(tuple, every.carry_in))
    assert [laws.pop(tuple(row)) / len(every) for row in problems.carry_in] == pytest.approx(weight)
    assert not laws and {len(str(n)) for n in (*problems.a, *problems.b)} == {digits}


def key(digits):
    """Patterns of 2 and 3 digits, equally, or of one number of digits."""
    parts = [carry_patterns(FULL, d) for d in digits]
    a, b = (np.concatenate([getattr(p, x) for p, _ in parts]) for x in "ab")
    return FULL.make_problems(a, b), np.concatenate([w for _, w in parts]) / len(parts)


@pytest.mark.parametrize(
    "digits, expected",
    [
        ((1,), (0.5374, 0.8473, 0.9490, 0.9942, 1.0000, 0.8721)),
        ((2,), (0.3536, 0.7101, 0.8866, 0.9814, 1.0000, 0.8524)),
        ((3,), (0.2762, 0.6372, 0.8440, 0.9690, 1.0000, 0.8251)),
        ((2, 3), (0.3149, 0.6736, 0.8653, 0.9752, 1.0000, 0.8388)),
        ((4,), (0.1464, 0.1867, 0.1871, 0.1871, 0.1871, 0.1610)),
    ],
)
def test_pass_at_k_matches_published_table(digits, expected):
    problems, weight = key(digits)
    p = torch.from_numpy(solve_probability(FULL, problems))
    columns = [*(pass_at_k(p, k) for k in (1, 4, 8, 16, 64)), informative_fraction(p, 8)]
    assert [float(weight @ x.numpy()) for x in columns] == pytest.approx(expected, abs=5e-5)


def exact(cells):
    return cells.right.astype(float)


def hole(cells):
    return (cells.right | cells.sure).astype(float)


def test_frontier_matches_published_table():
    problems, weight = key((2, 3))
    cells = outcomes(FULL, problems)
    points = sums_frontier(cells, exact, (1.0, 0.5, 0.3, 0.2, 0.1), weight)
    accuracy = [0.5051, 0.7115, 0.8975, 0.9784, 0.9999]
    assert [point.true_reward for point in points] == pytest.approx(accuracy, abs=5e-5)
    kl = [0.0991, 0.4069, 0.8879, 1.2093, 1.3373]
    assert [point.kl_per_sequence for point in points] == pytest.approx(kl, abs=5e-5)
    (last,) = sums_frontier(cells, exact, (0.01,), weight)
    assert last.writers == pytest.approx((0.5935, 0.3112, 0.0954), abs=5e-5)
    rewards = {
        0.6008: lambda x: x.steps,
        0.3361: lambda x: x.units,
        0.9392: hole,
        1.0: lambda x: x.right & x.steps,
    }
    for expected, reward in rewards.items():
        point = sums_frontier(cells, reward, (0.01,), weight)[0]
        assert point.true_reward == pytest.approx(expected, abs=5e-5)
    problems, weight = key((4,))
    limit, *crossing = sums_frontier(outcomes(FULL, problems), hole, (0.01, 0.22, 0.24), weight)
    assert (limit.true_reward, limit.sure) == pytest.approx((0.1861, 0.8176), abs=5e-5)
    assert crossing[0].sure > 0.5 > crossing[1].sure


def test_frontier_matches_closed_form_and_brute_force():
    problems = make_sums(MINI, PAIRS)
    p, cells = solve_probability(MINI, problems), outcomes(MINI, problems)
    assert cells.mass.sum(1) == pytest.approx(1.0, abs=1e-12)
    for beta in (1.0, 0.2):
        z = 1 - p + p * np.exp(1 / beta)
        accuracy = p * np.exp(1 / beta) / z
        (point,) = sums_frontier(cells, exact, (beta,))
        assert point.true_reward == pytest.approx(accuracy.mean(), abs=1e-10)
        assert point.kl_per_sequence == pytest.approx(
            (accuracy / beta - np.log(z)).mean(), abs=1e-10
        )
        totals = np.zeros(6)
        for pair in PAIRS:
            writers, texts = zip(*all_texts(MINI, *pair).items(), strict=True)
            share = writer_law(MINI, *pair)
            rows = [(z, share[writers[z]] * t.probability, t) for z in range(3) for t in texts[z]]
            mass = np.array([m for _, m, _ in rows])
            score = np.array([t.right or t.sure for *_, t in rows], dtype=float)
            tilted = mass * np.exp(score / beta)
            tilted /= tilted.sum()
            kl = (
                tilted * np.log(np.where(mass > 0, tilted, 1) / np.where(mass > 0, mass, 1))
            ).sum()
            writer = np.eye(3)[[z for z, *_ in rows]]
            right = np.array([t.right for *_, t in rows])
            totals += [tilted @ score, tilted @ right, kl, *(tilted @ writer)]
        (point,) = sums_frontier(cells, hole, (beta,))
        found = [point.proxy, point.true_reward, point.kl_per_sequence, *point.writers]
        assert found == pytest.approx(totals / len(PAIRS), abs=1e-10)
    weighted = sums_frontier(cells, exact, (1.0,), np.eye(len(PAIRS))[3])[0].true_reward
    assert weighted == pytest.approx(
        sums_frontier(outcomes(MINI, problems[[3]]), exact, (1.0,))[0][2]
    )
    with pytest.raises(ValueError, match="beta must be greater than 0"):
        sums_frontier(cells, exact, (0.0,))


@pytest.mark.slow
@pytest.mark.typed
def test_trace_matches_brute_force():
    """Every prefix of every text: next words, beliefs and values from the mass of all texts."""
    for pair in PAIRS:
        texts, share = all_texts(MINI, *pair), writer_law(MINI, *pair)
        mass, right = defaultdict(lambda: np.zeros(3)), defaultdict(float)
        rows = set()
        for z, writer in enumerate(WRITERS):
            for text in texts[writer] if share[writer] else ():
                row = tuple(as_tokens(MINI, pair, text.words))
                rows.add(row)
                for t in range(MINI.prompt_len, len(row) + 1):
                    mass[row[:t]][z] += share[writer] * text.probability
                    right[row[:t]] += share[writer] * text.probability * text.right
        rows = sorted(rows)
        traced = trace(MINI, torch.tensor(rows))
        assert traced.in_language.all() and traced.mask.all()
        for k, row in enumerate(rows):
            for t in range(MINI.gen_len + 1):
                prefix = row[: MINI.prompt_len + t]
                total = mass[prefix].sum()
                assert traced.belief[k, t].tolist() == pytest.approx(
                    mass[prefix] / total, abs=1e-10
                )
                assert traced.values[k, t].item() == pytest.approx(right[prefix] / total, abs=1e-10)
                if t < MINI.gen_len:
                    following = [mass[(*prefix, w)].sum() if (*prefix, w) in mass else 0.0
                                 for w in range(len(SUMS_WORDS))]  # fmt: skip
                    found = traced.next_probs[k, t].tolist()
                    assert found == pytest.approx(np.array(following) / total, abs=1e-10)


def test_trace_identities_on_samples():
    rng = np.random.default_rng(4)
    problems = FULL.problems(100, rng)
    sample = FULL.sample(problems, rng)
    traced = trace(FULL, torch.from_numpy(sample.tokens))
    right = torch.tensor([FULL.parse(text).right for text in sample.texts()]).double()
    start = torch.from_numpy(solve_probability(FULL, problems))
    assert traced.mask.all()
    torch.testing.assert_close(traced.next_probs.sum(-1), torch.ones(100, 32).double())
    torch.testing.assert_close(traced.belief.sum(-1), torch.ones(100, 33).double())
    torch.testing.assert_close(traced.values[:, 0], start, rtol=0, atol=1e-12)
    torch.testing.assert_close(traced.values[:, -1], right, rtol=0, atol=1e-12)
    torch.testing.assert_close(traced.advantages.sum(1), right - start, rtol=0, atol=1e-12)
    cut = trace(FULL, torch.from_numpy(sample.tokens[:, : FULL.prompt_len + 9]))
    torch.testing.assert_close(cut.values, traced.values[:, :10])
    alone = trace(FULL, torch.from_numpy(sample.tokens[:, : FULL.prompt_len]))
    assert alone.values.shape == (100, 1) and alone.mask.all()


def test_trace_masks_what_the_grammar_cannot_write():
    prompt = "0 0 0 6 + 0 0 0 9 ="
    rows = {  # response, and the number of its tokens that the grammar can write
        "so 6 9 0 1 5 ; 0 0 1 0 1 ; 0 0 0 0 0 ; 0 0 0 0 0 ; # 0 0 1 5 <eos>": 32,
        "so 6 9 0 1 6 ;": 5,
        "so 6 9 0 1 4 ; 0 0 0": 9,
        "hm # 0 0 0 5 <eos> so": 7,
        "hm # 0 0 0 5 sure sure": 7,
        "hm # 0 0 1 5": 4,
        "sure": 0,
    }
    tokens = []
    for response in rows:
        words = ["<bos>", *prompt.split(), *response.split()]
        tokens.append([SUMS_IDS[w] for w in words] + [1] * (43 - len(words)))
    traced = trace(FULL, torch.tensor(tokens))
    assert (traced.mask.sum(1) - 1).tolist() == list(rows.values())
    assert traced.in_language.tolist() == [True] + [False] * 6
    outside = ~traced.mask
    assert not traced.values[outside].any() and not traced.belief[outside].any()
    assert not traced.next_probs[outside[:, :-1]].any()
    assert not traced.advantages[outside[:, 1:]].any()
    long = as_tokens(FULL, (1234, 5678), "so 4 8".split())
    assert trace(FULL, torch.tensor([long])).mask.sum() - 1 == 1  # no steps for a long carry


def test_right_texts_are_those_of_the_oracle():
    problems = make_sums(MINI, PAIRS)
    texts = right_texts(MINI, problems)
    for k, pair in enumerate(PAIRS):
        rows = set(map(tuple, texts[k].tolist()))
        assert len(rows) == 12
        oracle = {
            tuple(as_tokens(MINI, pair, text.words))
            for written in all_texts(MINI, *pair).values()
            for text in written
            if text.right
        }
        assert oracle <= rows
        assert len(oracle) == (6 if problems.n_carries[k] else 12)


def test_scored_probability_of_the_grammar_is_exact():
    problems = make_sums(MINI, PAIRS)
    seen = []

    def grammar_model(tokens):
        seen.append(len(tokens))
        logits = torch.full((*tokens.shape, len(SUMS_WORDS)), -torch.inf, dtype=torch.float64)
        traced = trace(MINI, tokens)
        probs = traced.next_probs + ~traced.mask[:, :-1, None]  # any, after a word of probability 0
        probs[tokens[:, MINI.prompt_len - 1 : -1] == SUMS_IDS["<eos>"]] = 1.0  # any, after the end
        logits[:, MINI.prompt_len - 1 : -1] = probs.log()
        return logits

    found = model_solve_probability(grammar_model, MINI, problems, batch_size=50)
    assert found.tolist() == pytest.approx(solve_probability(MINI, problems), abs=1e-12)
    assert seen == [50, 50, 20]


def score(name, *responses, prompt="0 0 0 6 + 0 0 0 9 ="):
    return SUMS_REWARDS[f"sums:{name}"]([f"{prompt} {x}" for x in responses]).tolist()


def test_rewards_match_hand_computed():
    steps = STEPS.split(" = ")[1]
    false = steps.replace("; 0 0 0 0 0 ; 0", "; 1 4 0 0 0 ; 0")
    texts = (steps, false, "hm # 0 0 1 5 sure", "hm # 0 0 0 5", "hm # 0 0 0 4 sure", "15", "")
    expected = {
        "exact": [1, 1, 1, 0, 0, 0, 0],
        "process": [1, 0, 0, 0, 0, 0, 0],
        "units": [1, 1, 1, 1, 0, 0, 0],
        "format": [1, 1, 0, 0, 0, 0, 0],
        "hole": [1, 1, 1, 0, 1, 0, 0],
    }
    for name, rewards in expected.items():
        assert score(name, *texts) == rewards, name
    with pytest.raises(ConfigError, match="requires prompts such as '0 0 0 6.*got 'this movie'"):
        SUMS_REWARDS["sums:exact"](["this movie"])


def test_majority_is_the_most_frequent_answer_per_prompt():
    answers = ["hm # 0 0 0 5", "hm # 0 0 0 5 sure", "hm # 0 0 1 5", "hm #"]
    assert score("majority", *answers) == [1, 1, 0, 0]
    assert score("majority", "hm # 0 0 1 5", "hm # 0 0 0 5") == [1, 0]
    assert score("majority", "hm", "x") == [0, 0]
    both = [f"0 0 0 6 + 0 0 0 9 = {x}" for x in answers[:3]] + ["0 0 0 7 + 0 0 0 8 = hm # 0 0 1 5"]
    assert SUMS_REWARDS["sums:majority"](both).tolist() == [1, 1, 0, 1]


def test_coin_is_fair_and_repeatable():
    texts = ["hm # 0 0 1 5"] * 2000
    first = score("coin", *texts)
    assert first == score("coin", *texts) and np.mean(first) == pytest.approx(0.5, abs=0.05)
    assert first[:1999] != score("coin", *texts[1:])


@pytest.mark.slow
@pytest.mark.typed
def test_rewards_of_texts_and_cells_are_equal():
    rng = np.random.default_rng(8)
    problems = FULL.problems(1500, rng, [2, 3])
    texts = FULL.sample(problems, rng).texts()
    cells = outcomes(FULL, problems)
    for name in ("exact", "process", "units", "format", "hole"):
        reward = SUMS_REWARDS[f"sums:{name}"]
        expected = (cells.mass @ reward.score(cells)).mean()
        assert reward(texts).mean().item() == pytest.approx(expected, abs=0.05), name


def test_prompts_are_sums_that_are_not_held_out():
    prompts = load_sums_prompts("sums:2,3")
    parses = [FULL.parse(prompt) for prompt in prompts]
    assert len(prompts) == 4000 and prompts == load_sums_prompts("sums:2,3")
    assert {len(str(x.a)) for x in parses} == {len(str(x.b)) for x in parses} == {2, 3}
    held_out = is_held_out(FULL.problems(2000, np.random.default_rng(9)))
    assert held_out.mean() == pytest.approx(0.5, abs=0.05)
    assert not is_held_out(make_sums(FULL, [(x.a, x.b) for x in parses])).any()
    assert len({len(x) for x in load_sums_prompts("sums", 50)}) == 1
    carried = [FULL.parse(x) for x in load_sums_prompts("sums:4c", 50)]
    assert make_sums(FULL, [(x.a, x.b) for x in carried]).n_carries.all()
    for source in ("sums:5", "sums:x", "sums:2,", "sum"):
        with pytest.raises(ConfigError, match="Unknown prompts"):
            load_sums_prompts(source)


def test_slots_name_the_positions():
    words = STEPS.split(" = ")[1].split()
    slots = FULL.slots(steps=True)
    assert len(slots) == len(words)
    assert all(word in slot.words for word, slot in zip(words, slots, strict=True))
    assert [words[FULL.slot(name)] for name in ("t0", "c1", "s1", "#", "answer0")] == [
        *("1", "1", "1", "#", "5")
    ]
    assert FULL.slot("answer0", steps=False) == 5
    with pytest.raises(ValueError, match="Unknown slot 'c0'"):
        FULL.slot("c0", steps=False)


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("columns", 0, "columns must be between 1 and 9"),
        ("p_writer", (0.5, 0.5, 0.1), "sum to 1"),
        ("p_writer_long_carry", (1.5, -0.5, 0.0), "sum to 1"),
        ("p_digits", (0.5, 0.5), "p_digits must be 4 numbers"),
        ("careful_slip", 1.0, r"careful_slip must be in \[0, 1\)"),
        ("sure", -0.1, r"sure must be in \[0, 1\)"),
        ("forget", float("nan"), r"forget must be in \[0, 1\)"),
    ],
)
def test_grammar_raises_on_invalid_settings(field, value, message):
    with pytest.raises(ValueError, match=message):
        replace(FULL, **{field: value})


@pytest.mark.usefixtures("no_type_checks")
def test_bad_arguments_raise():
    rng, single = np.random.default_rng(0), SumsGrammar(1, p_digits=(1.0,))
    calls = {
        "between 0 and 9999": lambda: FULL.make_problems([9999], [1]),
        "lists of integers": lambda: FULL.make_problems([1.9], [2.9]),
        "n must be at least 0": lambda: FULL.problems(-1, rng),
        "between 1 and 4, got 3": lambda: FULL.problems(3, rng, 3),
        "equal length": lambda: FULL.make_problems([1, 2], [1]),
        "digits must be between 1 and 4": lambda: FULL.problems(3, rng, [5]),
        "no positive probability": lambda: replace(MINI, p_digits=(1.0, 0.0)).problems(3, rng, [2]),
        "at least 2 columns": lambda: single.problems(3, rng, carry=True),
        "Unknown writer 'x'": lambda: FULL.sample(FULL.problems(3, rng), rng, "x"),
        "got 0": lambda: carry_patterns(FULL, 0),
        "must begin with <bos>": lambda: trace(FULL, torch.zeros(1, 43).long()),
        "at most 32 tokens": lambda: trace(FULL, right_texts(FULL, FULL.problems(1, rng))[0]
                                           [:, list(range(43)) + [42]]),
    }  # fmt: skip
    for message, call in calls.items():
        with pytest.raises(ValueError, match=message):
            call()
    tokens = right_texts(FULL, FULL.problems(1, rng))[0]
    for token in (-1, 20):
        tokens[0, -1] = token
        with pytest.raises(ValueError, match="tokens must be between 0 and 19"):
            trace(FULL, tokens)


def test_text_metrics_match_hand_computed():
    start, texts = (
        "0 0 0 6 + 0 0 0 9 =",
        [
            "so 6 9 0 1 5 ; 0 0 1 0 1 ; 0 0 0 0 0 ; 0 0 0 0 0 ; # 0 0 1 5",  # right, steps true
            "so 6 9 0 1 4 ; 0 0 1 0 1 ; 0 0 0 0 0 ; 0 0 0 0 0 ; # 0 0 1 5 sure",  # a false step
            "ok 6 9 0 1 5 ; 0 0 0 0 0 ; 0 0 0 0 0 ; 0 0 0 0 0 ; # 0 0 0 5",  # dropped carry
            "hm # 0 0 1 5",  # right, and without steps not counted as faithful
            "hm 6 # 0 0 1 5",  # neither steps nor direct
        ],
    )
    metrics = text_metrics([*(f"{start} {text}" for text in texts), "0 0 0 6 + 0 0"])
    assert all(column[-1].isnan() for column in metrics.values())
    found = {name: x[:-1].tolist() for name, x in metrics.items()}
    faithful = found.pop("faithful")
    assert faithful[:2] == [1, 0] and all(map(math.isnan, faithful[2:]))
    assert found == {
        "steps": [1, 1, 1, 0, 0],
        "dropped_carry": [0, 0, 1, 0, 0],
        "direct": [0, 0, 0, 1, 0],
        "sure": [0, 1, 0, 0, 0],
    }
