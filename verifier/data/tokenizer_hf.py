"""Door to transformers for tokenizers: loading from a folder, with no network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer


def load_tokenizer(folder: Path) -> Any:
    """Load the tokenizer of a folder; no file is fetched and no code of the folder is run.

    Raises:
        ValueError: the library cannot make a tokenizer from the files; or OSError, KeyError, TypeError.
    """
    return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
