import base64
import hashlib
import json
import re
import shutil
from html import unescape
from unittest.mock import MagicMock

import pytest

from rlhf_lab.config import RLHFArgs
from rlhf_lab.errors import RunError
from rlhf_lab.probes import (
    Check,
    KLByPosition,
    Probe,
    Record,
    Run,
    ValueLens,
    attach,
    default_suite,
)
from rlhf_lab.probes.store import NOTES
from rlhf_lab.training import RLHFTrainer
from rlhf_lab.views import answers, curves, heatmap
from rlhf_lab.views.answers import answer_questions
from rlhf_lab.views.interventions import default_patch
from rlhf_lab.views.pictures import Table
from rlhf_lab.views.probe_pictures import number_table
from rlhf_lab.views.report import write_report
from rlhf_lab.views.templates import WEB, formatted
from rlhf_lab.views.tokens import Strip
from tests import small_runs
from tests.views.page_blocks import Page, read_blocks, read_header

SMALL = small_runs.SMALL | {"reward_fn": "true_reward", "gen_len": 26}


class Homemade(Probe):
    name = "homemade"

    def observe(self, seen):
        check = Check.at_most("1 < 2 & so on", 0.5 if seen.ctx.phase else 3.0, 1.0)
        return Record({"answer": 42.5}, checks=[check])


def grad_norm(ctx):
    """Returned at each of 2 x 2 steps of 2 phases: 8 lines, all of which fit on the page."""
    return {"norm": ctx.grad_norm, "layers": [1, 2]}


@pytest.fixture(scope="module")
def probed(tmp_path_factory):
    trainer = RLHFTrainer(RLHFArgs(**SMALL), out=tmp_path_factory.mktemp("report") / "run")
    suite = default_suite(trainer)
    lens = ValueLens(every=2)  # for the tokens of phase 1; the suite's sees the end
    suite.probes = [lens if isinstance(probe, ValueLens) else probe for probe in suite.probes]
    attach(trainer, suite)
    attach(trainer, Homemade())
    trainer.on("after_step")(grad_norm)
    trainer.train()
    return trainer.run.path


@pytest.fixture(scope="module")
def page(probed):
    return write_report(probed).read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_page_loads_nothing_and_allows_one_script(page):
    found = Page(page)
    assert found.open == [] and page.count("<script>") == 1
    assert page.count("<svg") >= 6 and "<title>mean reward, phase 1: " in page
    assert len(found.links) >= 8 and all(f'id="{link}"' in page for link in found.links)
    assert "url(" not in page and "@import" not in page and not re.search("<[^>]* style=", page)
    policy = re.search('Security-Policy" content="(.*?)"', page)[1]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy and "connect-src" not in policy
    for tag in ("script", "style"):
        (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    blocks = read_blocks(page)
    assert not [b for b in blocks.values() if " style=" in str(b) or "<style" in str(b)]


@pytest.mark.slow
def test_blocks_have_all_records_and_samples(probed, page):
    run, blocks, header = Run(probed), read_blocks(page), read_header(page)
    assert header["phases"] == [0, 1, 2] and len(blocks["s"]) == len(run.samples()) == 3 * 8
    phases = {"kl_by_position": [0, 1], "words_moved": [0, 1, 2], "text_heatmap": [0, 1]}
    for name, found in phases.items():
        recorded = [record["phase"] for record in run.records(name)]
        assert header["runs"][0]["records"][name] == found == recorded
        for phase in found[name == "words_moved" :]:  # no words have moved before learning
            assert f"phase {phase}: " in blocks[f"r0-p{phase}"][name]
    assert page.count('class="failed">Failed check: 1 &lt; 2 &amp; so on') == 0
    assert "Failed check: 1 &lt; 2 &amp; so on" in blocks["r0-p0"]["homemade"]
    assert blocks["r0-p1"]["homemade"] == "" == blocks["r0-p2"]["homemade"]


def test_failed_checks_come_first_and_ten_questions_are_answered(probed, page):
    assert 0 < page.index("Failed checks") < page.index("Ten questions") < page.index(">Curves<")
    assert f'<p class="note">Caveat: {KLByPosition.caveat}</p>' in page
    assert "Phase 2 follows the last learning phase" in page and "<b>Patched out</b>" in page
    up, _, length = default_patch(Run(probed))
    assert f'"job-up" value="{up}"' in page and f'"all" value="{length or ""}"' in page
    assert f"{len(Run(probed).info['args'])} arguments</summary>" in page
    held = [check.ok for check in Run(probed).checks()]
    assert f'href="#failed">{sum(held)} of {len(held)} checks hold</a>' in page and not all(held)
    failed = page.split('id="failed"')[1].split("</section>")[0]
    assert "<td>0</td>" in failed and "so on</td><td>3</td><td>1</td>" in failed
    for question, _, place in answer_questions(Run(probed)):
        assert (f'<a href="#{place}">{question}</a>' in page) == (f'id="{place}"' in page)
    found = {question: answer for question, answer, _ in answer_questions(Run(probed))}
    assert len(found) == 10 == page.split("Ten questions")[1].split("</ol>")[0].count("<li id")
    assert "press Patch" in found["Is it causal?"]
    assert "rlhf_lab compare " in page.split('id="interventions"')[1].split("</section>")[0]


def metric_lines(**columns):
    rows = zip(*columns.values(), strict=True)
    return [{"phase": i} | dict(zip(columns, row, strict=True)) for i, row in enumerate(rows)]


def test_answers_about_metrics_match_hand_computed():
    kl = [0.0, 9.0004, 0.2, 0.001]
    stalled = metric_lines(mean_reward=[0.5, 0.6, 0.8, 1.0], kl_per_sequence=kl)
    answer = answers.answer_learning(stalled)
    changed = "from 0.500 (phase 0) to 1.000 (phase 3); half of the gain by phase 2"
    assert changed in answer and "hardly" in answer
    frozen = [line | {"base_lr": 0.0} for line in stalled]  # on purpose: the value head only
    assert "hardly" not in answers.answer_learning(frozen)
    one = metric_lines(mean_reward=[0.5], true_reward=[None])
    assert "before learning, the mean reward is 0.500" in answers.answer_learning(one)
    best = dict(optimal_reward=[0.7, 0.9, None], optimal_kl_per_sequence=[1.0, 2.4996, 4.0])
    health = metric_lines(**best, beta_eff=[0.25, 0.2, 0.125])
    cost = answers.answer_cost(health, stalled)
    assert cost.startswith("0.001 nats of KL per sequence in phase 3; with the KL penalty of ")
    assert cost.endswith(
        "phase 1 (beta_eff), the best possible policy has a reward of 0.900 at 2.500 nats (this "
        "run has 6.500 nats more); beta_eff went from 0.25 (phase 0) to 0.125 (phase 2)."
    )
    cost = answers.answer_cost([{"phase": 1, "best_reward_at_kl": 0.7}], stalled)
    assert cost.endswith("; in phase 1 the best policy with this KL has a reward of 0.700.")
    fields = {"clip_fraction": [0.1, 0.3, 0.2], "ratio_first_minibatch": [1.0, 0.99999, 1.0]}
    lines = metric_lines(**fields, grad_norm=[2.0, 0.5, 1.0])
    assert answers.answer_optimizer(lines) == (
        "Largest clip fraction 0.3 (phase 1); largest gradient norm 2 (phase 0); "
        "ratio before the first step differs by -1.0e-05 from 1 (phase 1)."
    )
    line = {"phase": 1, "explained_variance": 0.5}
    values = "Values explain 50% of the variance of the returns in phase 1"
    assert answers.answer_critic(line, {"advantages": "gae"}) == f"{values}."
    assert "vf_coef=0" in answers.answer_critic(line, {"vf_coef": 0})
    for args, size in (({}, "0.4"), ({"normalize_reward": True}, "0.12")):
        lossy = line | {"value_loss": 0.04, "reward_std": 0.3}
        error = f"; their root mean square error is {size} in units of the reward."
        assert answers.answer_critic(lossy, args | {"vf_coef": 0.5}) == values + error
    health = [{"phase": 1, "explained_variance_low": 0.25, "explained_variance_high": 0.75}]
    assert "explain 50% [25%, 75%] of" in answers.answer_critic(line, {}, health)
    assert answers.answer_critic(line | {"phase": 2}, {}, health) == f"{values[:-1]}2."
    lens = {"phase": 2, "slots": ["A", "B", "C"], "head_correlation": [0.9, None, -0.3]}
    lens |= {"r2_against": "exact values"}
    exact = " In phase 2 they correlate with exact values by -0.30 (C) to 0.90 (A)."
    assert answers.answer_critic(line, {}, (), [lens]) == f"{values}.{exact}"
    pairs = ((0, 0.9), (1, 0.8), (1, 0.3))
    samples = [{"phase": p, "reward": r, "true_reward": 0.2} for p, r in pairs]
    hacked = answers.answer_hacking(samples)
    assert hacked.startswith("1 of 2 samples of phase 1")
    assert hacked.endswith("; 2 of 3 of all phases, most in phase 0 (1).")
    none = [samples[0], samples[1] | {"true_reward": 0.0}]
    assert "(1 with a true reward of 0: ungrammatical or wrong" in answers.answer_hacking(none)
    mixed = [{"phase": 0, "reward": 1.0, "true_reward": None}, *samples[1:]]
    assert "1 of 2 samples of phase 1" in answers.answer_hacking(mixed)
    assert "not known" in answers.answer_hacking(mixed[:1])


def test_answers_about_records_match_hand_computed():
    record = {"phase": 3, "kl": [0.1, 0.6, 0.0, 0.6], "slots": ["A", "B", "C", "D"]}
    record |= {"tokens_at": [8, 8, 4, 4], "sequences": {"exact": 8}}
    kl = "B 60%, D 30% of 1.000 nats per sequence in phase 3."
    assert answers.answer_kl([record]) == kl
    contrast = {"at": "COP 1", "component": "unembedding", "part": 2.4}
    contrast |= {"weights": {"was": 1.0, "wasn't": -1.0}}
    adjectives = {"good": 0.1, "fine": 0.2, "fun": 0.3, "great": 0.4, "bad": -1.0}
    small = contrast | {"shift": 1, "fraction": 0.1, "weights": adjectives, "at": "ADJ 2"}
    large = contrast | {"shift": 3, "fraction": 0.6}
    masses = [(0, 0.0, []), (1, 0.4, [small]), (2, 0.6, [large]), (5, 1.0, [small, large])]
    records = [{"phase": p, "moved_mass": m, "contrasts": c} for p, m, c in masses]
    which, when = answers.answer_words(records)
    assert which == (
        "was instead of wasn't at COP 1, 60% of the moved probability, unembedding +2.400 of "
        "+3.000 logits; great, fun, fine, ... instead of bad at ADJ 2, 10% of the moved "
        "probability, unembedding +2.400 of +1.000 logits; in phase 5."
    )
    by = "Half of the moved probability by phase 2, fastest from phase 0 to 1"
    assert when == f"{by}; recorded in phases 0, 1, 2, 5."
    none = "No word has moved beyond noise; recorded in phases 0."
    assert answers.answer_words(records[:1]) == (none, none)
    records[-1] |= {"slots": ["OPEN", "ADJ 2", "COP 1"]}
    for prefix, patch in ((3, ("was", "wasn't", 5)), (23, ("loved", "hated", None))):
        found = {"WordsMoved": records, "TextHeatmap": [{"prefix_len": prefix}]}
        options = {"find_probe": str, "info": {"args": {"base_model": "reel-nano"}}}
        assert default_patch(MagicMock(spec=Run, records=found.get, **options)) == patch
    large = {"words": ["was", "is"], "shift": [-0.5], "parts": ["L0 mlp", "embed"]}
    large |= {"effects": {"own weights": [[0.2], [-0.3]], "patched in": [[0.1], [-0.4]]}}
    assert answers.answer_causes([large | {"shift": [0.3]}, large]) == (
        "largest of 2: was - is: embed patched in brings -0.400 of -0.500 logits. It is also the "
        "largest by own weights."
    )


@pytest.mark.slow
def test_report_names_the_missing_file_of_a_record(probed, tmp_path):
    run = shutil.copytree(probed, tmp_path / "run")
    for name in ("text_heatmap", "step_ledger"):
        missing = min(run.glob(f"probes/tensors/{name}/*"))
        missing.rename(tmp_path / "kept")
        with pytest.raises(RunError, match=f"^{re.escape(str(missing))}.* is missing"):
            write_report(run)
        (tmp_path / "kept").rename(missing)


def test_the_page_shows_worst_checks_and_returned_numbers(probed, page):
    row = re.search(r"<tr><td class=\"words\">homemade</td>(.*?)</tr>", page).group(1)
    assert "1 &lt; 2 &amp; so on" in row and ">3<" in row and ">no<" in row
    worst = {}
    for check in Run(probed).checks():
        key = f'{check.probe}</td><td class="words">{check.name}</td><td>'
        worst[key] = max(worst.get(key, 0.0), check.value)
    assert len(worst) > 5
    text = unescape(page)
    assert all(f"{key}{formatted(value)}<" in text for key, value in worst.items())

    section = page.split("Returned by functions on events")[1].split("</section>")[0]
    assert "<h3>grad_norm</h3>" in section and section.count("<tr>") == 1 + 8
    for record in Run(probed).returned("grad_norm"):
        assert f">{record['norm']:.4g}<" in section
    assert "layers" not in section


def test_long_records_are_cut_and_the_page_says_so():
    rows = [{"phase": phase, "counts": {"a": 1}, "slots": ["A"]} for phase in range(30)]
    text = number_table(rows).fragment
    assert "counts" not in text and "slots" not in text
    assert "<p>The last 20 of 30.</p>" in text and text.count("<tr>") == 21
    assert ">10<" in text and ">9<" not in text
    assert "recorded nothing" in number_table([]).fragment


def test_a_map_of_zeros_is_put_in_words(probed, page):
    zero = "<p>kl is 0 on every token of these samples.</p>"
    assert zero in read_blocks(page)["r0-p0"]["text_heatmap"]
    unknown = Strip([("text", ["a"], [None])], "t", "kl", "sequential").fragment
    assert "<p>kl is not defined for any token" in unknown
    zeros = curves({"a": ([0, 1], [0.0, None])}, "phase 0: KL")
    assert zeros.fragment == "<p>phase 0: KL: 0 everywhere.</p>"
    unknown = heatmap([[None, None]], ["a"], ["x", "y"], "R2")
    assert unknown.fragment == "<p>R2: not defined.</p>"


@pytest.mark.slow
def test_a_run_without_probes_says_how_to_get_some(tmp_path):
    args = RLHFArgs(**SMALL | {"total_phases": 1, "warmup_steps": 0})
    trainer = RLHFTrainer(args, out=tmp_path / "run")
    trainer.train()
    (trainer.run.path / NOTES).parent.mkdir(exist_ok=True)
    (trainer.run.path / NOTES).write_text('{"phase": 0, "probe": "lens", "note": "is slow"}\n')
    diagnostics = {"diagnostics": {"high": {"phase": 0, "text": "beta is high"}}}
    (trainer.run.path / "run.json").write_text(json.dumps(trainer.run.read_info() | diagnostics))
    for path in trainer.run.path.glob("checkpoints/*[!0].safetensors"):
        path.unlink()
    page = write_report(trainer.run.path).read_text(encoding="utf-8")
    assert "<p>The run has fewer than two checkpoints.</p>" in page
    assert "To look at</h2><ul><li>since phase 0: beta is high</li></ul>" in page
    assert "switched off</h3><ul><li>phase 0: lens: is slow</li></ul>" in page
    assert "This run had no probes. Train with <code>--probes</code>" in page
    assert "None ran." in page and "Returned by" not in page


def test_tables_escape_and_align_numbers():
    table = Table(["name", "x"], [["<a>", 0.123456], ["b", None], ["c", True]]).fragment
    assert "&lt;a&gt;" in table and ">0.1235<" in table and ">–<" in table and ">yes<" in table
    assert table.count('class="words"') == 4 and '<td class="words">b<' in table
    table = Table(["a", "b"], [["status", 1.0], ["-0.5 [-1, 0]", "–"]]).fragment
    assert table.count('<td class="words">') == 2
    assert formatted(-0.0, -0.0, 1e-6) == "0 [0, 1e-06]" and formatted(0.42, None, 0.5) == "0.42"


def test_templates_escape_everything_but_our_own_markup():
    safe = "|".join(path.read_text("utf-8") for path in WEB.glob("*.html"))
    ours = {"style", "script", "digests.style", "digests.script", "key", "tiles"}
    assert set(re.findall(r"([\w.]+|'[^']*')\|safe", safe)) == ours | {"'id=\"%s\"'"}
