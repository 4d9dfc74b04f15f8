"""Command-line options of `python -m benchmarks`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class Bench:
    """Time one RLHF phase on random weights, in turn with other ways of doing the same work."""

    shape: Literal["nano", "tiny", "small", "medium"] = "tiny"
    """The model: nano as the bundled one, tiny 4 layers, small and medium as GPT-2's."""
    against: tuple[str, ...] = ("ours-residual", "ours-pattern", "naive", "trl-0.11.4", "trl-1.12")
    """Who else does the work; a peer that is not built (`make bench-peers`) is left out."""
    repeats: int = 3
    """Turns that count, after one that does not; medians are reported."""
    device: str = "auto"
    """auto, cpu, cuda or mps."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Of this package's trainer; the others always run in fp32."""
    threads: int | None = None
    """Threads of each contestant; as many as torch takes when not given."""
    batch_size: int = 32
    """Sequences per phase."""
    gen_len: int = 50
    """Tokens generated per sequence."""
    generation: bool = False
    """Also time sampling alone against Hugging Face's generate."""
    commands: bool = False
    """Also time the command line itself: --help, and the main job (train) to its end."""
    probes: bool = False
    """Also time a run with the default probes against one without (20 phases)."""
    out: Path | None = None
    """Store all figures as a line of this .jsonl file, in place of the same command's on the same
    processor.
    """
    peers: Path | None = None
    """Where the peers' environments are; RLHF_LAB_PEERS or .cache/peers when not given."""
    write_docs: tuple[Path, ...] = ()
    """Measure nothing: write the page `docs` from these stored results."""
    docs: Path = Path("docs/performance.md")
    """The page that write_docs writes."""

    @property
    def contestants(self) -> tuple[str, ...]:
        """All that do the work, this package first."""
        return tuple(dict.fromkeys(("ours", *self.against)))
