"""The tokenizers of Reel and sums, Hugging Face tokenizers that are loaded offline."""

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rlhf_lab.organism.lexicon import WORD_IDS
from rlhf_lab.organism.sums.problems import SUMS_IDS


def speaks_reel(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return True if a tokenizer has exactly the words of Reel, with the ids of Reel."""
    return tokenizer.get_vocab() == dict(WORD_IDS)


def speaks_sums(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return True if a tokenizer has exactly the words of sums, with the ids of sums."""
    return tokenizer.get_vocab() == dict(SUMS_IDS)


def load_tokenizer(directory: Path) -> PreTrainedTokenizerFast:
    """Load a saved tokenizer from its directory only."""
    if not (Path(directory) / "tokenizer.json").is_file():
        raise ValueError(f"directory is {directory}, which has no tokenizer.json. Save one first.")
    return AutoTokenizer.from_pretrained(
        str(directory), local_files_only=True, trust_remote_code=False
    )
