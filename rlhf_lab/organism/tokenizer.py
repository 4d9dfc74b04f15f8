"""The Reel tokenizer, a Hugging Face tokenizer that is loaded offline."""

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rlhf_lab.organism.lexicon import WORD_IDS


def speaks_reel(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a tokenizer has the words of Reel, and no others, under Reel's own ids."""
    return tokenizer.get_vocab() == dict(WORD_IDS)


def load_tokenizer(directory: Path) -> PreTrainedTokenizerFast:
    """Load a saved tokenizer from its own files only.

    A tokenizer that was never saved has no name or path, and TransformerLens stops at it with a
    KeyError; one loaded here has both.
    """
    if not (Path(directory) / "tokenizer.json").is_file():
        raise ValueError(f"directory is {directory}, which has no tokenizer.json; save one first.")
    return AutoTokenizer.from_pretrained(
        str(directory), local_files_only=True, trust_remote_code=False
    )
