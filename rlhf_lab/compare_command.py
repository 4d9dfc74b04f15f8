"""The command compare: what training changed between two models, on a text, in tables.

What needs torch is imported within the functions, so that `--help` starts without it.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Positional, arg

from rlhf_lab.commands import Checkpoint, Device
from rlhf_lab.config.checks import AT_LEAST_1, check_range
from rlhf_lab.console import print_line
from rlhf_lab.errors import ConfigError, LoadError

PAGE_ENDINGS, JSON_ENDING = (".html", ".htm"), ".json"
REEL_WORDS = ("loved", "hated")
REVIEW_SEED = 0


@dataclass(frozen=True)
class ReadText:
    """What both models read, up to the position before the words.

    Args:
        text: A file with a text per line, or with the column --column; the eval text that a run
            has kept when not given, or Reel's reviews up to the verdict.
        column: The column of the texts.
        n_texts: How many texts are read.
        length: Tokens of each text, whose rest is cut off; as many as the shortest text has when
            not given.
        words: The logit of the first less that of the second is followed, each one token, as in
            --words " good" " bad"; loved and hated on Reel.
    """

    text: str | None = None
    column: str = "text"
    n_texts: int = 32
    length: int | None = None
    words: tuple[str, str] | None = None


def compare_command(
    base: Positional[str],
    tuned: Positional[str],
    read: ReadText,
    methods: tuple[Literal["split", "weights", "patching"], ...] = ("split", "weights", "patching"),
    ranks: tuple[int, ...] = (0, 1, 2, 4, 8),
    alphas: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0),
    base_checkpoint: Annotated[
        int | str | None,
        arg(help="Of a run as BASE; 0 where both are one run, and last elsewhere."),
    ] = None,
    checkpoint: Checkpoint = "last",
    out: Path | None = None,
    device: Device = "auto",
) -> int:
    """Say what training changed between two models: by how much it moved the logit difference of
    two words, which layers' parts did, how few directions of the change suffice, and what lies on
    the straight line between them.

    Args:
        base: The model before: a run's directory, a bundled name (reel-nano), a Hugging Face
            directory or a hub id.
        tuned: The model after, in the same way.
        methods: How parts are charged: split, by their outputs at the last position; weights, by
            derivatives along their change, which takes long on a large model; patching, by their
            outputs put into the other model.
        ranks: Directions of every matrix's change that are kept.
        alphas: Points of the line; 0 is BASE and 1 TUNED.
        out: A file for the tables (.html) or the figures (.json), which does not exist yet.
    """
    from rich.console import Console

    from rlhf_lab.diffing import compare
    from rlhf_lab.models.device import pick_device

    check_range(AT_LEAST_1, n_texts=read.n_texts)
    _refuse_wrong_place(out)
    if base_checkpoint is None:
        same = _is_run(base) and Path(base).resolve() == Path(tuned).resolve()
        base_checkpoint = 0 if same else "last"
    place = pick_device(device)
    models = _end(base, base_checkpoint, place), _end(tuned, checkpoint, place)
    tokens, source = _text(read, models[0], base, tuned)
    words = _words(read, models[0])
    print_line(f"{len(tokens)} texts of {tokens.shape[1]} tokens, {source}")
    tokens = tokens.to(place)
    with _bars() as stage:
        found = compare(*models, tokens, words, -1, methods, ranks, alphas, stage)
    console = Console()
    for table in found.tables():
        if table.row_count:
            console.print(table)
    wrong = [check for check in found.checks if not check.ok]
    holding = len(found.checks) - len(wrong)
    print_line(f"{holding} of {len(found.checks)} checks hold")
    for check in wrong:
        print_line(f"do not rely on these figures: {check.name} misses by {check.value:.3g}")
    if out is not None:
        _write(out, found, {"base": base, "tuned": tuned, "text": source})
        print_line(f"written to {out}")
    return 1 if wrong else 0


def _refuse_wrong_place(out: Path | None) -> None:
    """Raise ConfigError for a file that is there, of another kind, or in no directory."""
    if out is None:
        return
    if out.suffix.lower() not in (*PAGE_ENDINGS, JSON_ENDING):
        raise ConfigError(
            f"out={str(out)!r} is of no kind that is written; end it in .html or .json."
        )
    if out.exists() or not out.parent.is_dir():
        raise ConfigError(f"out={str(out)!r} exists, or its directory does not; name a new file.")


def _is_run(model: str) -> bool:
    return Path(model).is_dir() and not Path(model, "config.json").exists()


def _end(model: str, checkpoint: int | str, place: Any) -> Any:
    """One of the two models, as a HookedTransformer.

    Raises:
        LoadError: a reward model, or weights that are not finite.
    """
    from rlhf_lab.models import load_model
    from rlhf_lab.rewards.model import refuse_reward_model
    from rlhf_lab.training.diagnostics import broken_weight
    from rlhf_lab.training.restore import load_policy

    if _is_run(model):
        found = load_policy(model, checkpoint, place)[0].base_model
    else:
        refuse_reward_model(model)
        found = load_model(model, device=place)
    broken = broken_weight(found)
    if broken:
        raise LoadError(f"the weight {broken} of {model!r} holds nan or inf; use a whole model.")
    return found


def _text(read: ReadText, model: Any, base: str, tuned: str) -> tuple[Any, str]:
    """Tokens `[batch seq]` of one length, and where they come from.

    Raises:
        ConfigError: no text, fewer than 2, or shorter ones than asked for.
    """
    import torch

    rows, source = _rows(read, model, base, tuned)
    rows = [row for row in rows if row][: read.n_texts]
    if len(rows) < 2:
        raise ConfigError(f"there are {len(rows)} texts; give at least 2, for intervals.")
    shortest = min(map(len, rows))
    length = shortest if read.length is None else read.length
    if not 1 <= length <= shortest:
        raise ConfigError(f"length={length} is out of range; the shortest text has {shortest}.")
    if length > model.cfg.n_ctx:
        raise ConfigError(
            f"texts of {length} tokens exceed the model's context of {model.cfg.n_ctx}; give "
            "--length."
        )
    return torch.tensor([row[:length] for row in rows]), source


def _rows(read: ReadText, model: Any, base: str, tuned: str) -> tuple[list[list[int]], str]:
    """Tokens of each text, from a file, from a run, or of Reel's grammar."""
    from rlhf_lab.data_sources import read_rows
    from rlhf_lab.organism.tokenizer import speaks_reel
    from rlhf_lab.probes import ReelTruth
    from rlhf_lab.probes.store import ProbeStore
    from rlhf_lab.sampling import tokenize_prompts
    from rlhf_lab.training import RunDir

    if read.text is not None:
        texts = [row.text(read.column) for row in read_rows(read.text, "text", read.column)]
        bos = model.tokenizer.bos_token_id is not None
        return tokenize_prompts(model.tokenizer, texts, bos), f"from {read.text}"
    for run in filter(_is_run, (tuned, base)):
        kept = ProbeStore(RunDir.open(run)).kept_text()
        if kept is not None:
            rows = [row[mask].tolist() for row, mask in zip(*kept, strict=True)]
            return rows, f"the eval text of {run}"
    if speaks_reel(model.tokenizer):
        truth = ReelTruth()
        reviews, _ = truth.reviews(read.n_texts, REVIEW_SEED)
        return reviews[:, : truth.grammar.slot("VERB")].tolist(), "reviews up to the verdict"
    raise ConfigError("there is no text that both models are to read; give a file with --text.")


def _words(read: ReadText, model: Any) -> tuple[str, str]:
    """The two words; those of Reel's verdict where none are given.

    Raises:
        ConfigError: none are given for another language.
    """
    from rlhf_lab.organism.tokenizer import speaks_reel

    if read.words is not None:
        return read.words
    if not speaks_reel(model.tokenizer):
        raise ConfigError('words are not given; name two, such as --words " good" " bad".')
    return REEL_WORDS


@contextmanager
def _bars() -> Iterator[Any]:
    """Bars with the steps and the time that is left of each stage, drawn on a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = "{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    on_terminal = Console().is_terminal
    with Progress(*columns, transient=True, disable=not on_terminal) as progress:

        @contextmanager
        def stage(name: str, steps: int) -> Iterator[Any]:
            task = progress.add_task(name, total=steps)
            yield lambda: progress.advance(task)

        yield stage


def _write(out: Path, found: Any, notes: dict[str, str]) -> None:
    """Write the tables as a page, or all figures as JSON."""
    from rlhf_lab.training.run_dir import replacing

    content = json.dumps(notes | found.to_dict(), indent=2) + "\n"
    if out.suffix.lower() in PAGE_ENDINGS:
        content = _page(found, notes)
    with replacing(out) as partial:
        partial.write_text(content, encoding="utf-8")


def _page(found: Any, notes: dict[str, str]) -> str:
    """The tables, and under them the checks, as one document."""
    from html import escape

    from rlhf_lab.views import html

    said = f"{notes['base']} and {notes['tuned']}, on {found.n} texts: {notes['text']}"
    body = [f"<h1>What training changed</h1><p>{escape(said)}</p>"]
    for table in found.tables():
        columns = [[*column.cells] for column in table.columns]
        rows = [list(row) for row in zip(*columns, strict=True)]
        names = [str(column.header) for column in table.columns]
        body.append(f"<h2>{escape(str(table.title))}</h2>{html.table(names, rows)}")
    checks = [[check.name, check.ok] for check in found.checks]
    body.append(f"<h2>Checks</h2>{html.table(['check', 'holds'], checks)}")
    return html.page("rlhf_lab: two models", "\n".join(body))
