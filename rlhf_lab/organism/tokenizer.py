"""The tokenizers of Reel and sums, Hugging Face tokenizers that are loaded offline."""

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerFast


def load_tokenizer(directory: Path) -> PreTrainedTokenizerFast:
    """Load a saved tokenizer from its directory only."""
    if not (Path(directory) / "tokenizer.json").is_file():
        raise ValueError(f"directory is {directory}, which has no tokenizer.json. Save one first.")
    return AutoTokenizer.from_pretrained(
        str(directory), local_files_only=True, trust_remote_code=False
    )
