"""A digest of what makes the stored numbers: `make test-reference` writes it, `make test` reads it.

The packages are pinned, so that their numbers are made again where one of these files has changed,
and not with every run of the tests.
"""

import hashlib
from pathlib import Path

HERE = Path(__file__).parent
WRITTEN = HERE / "digest.txt"


def digest() -> str:
    """One hash of scripts, requirements and numbers, by name, and of the pins in the Makefile."""
    hashed = hashlib.sha256()
    makefile = (HERE.parents[2] / "Makefile").read_text(encoding="utf-8").splitlines()
    hashed.update("\n".join(line for line in makefile if line.startswith("REFERENCE_")).encode())
    kinds = ("*.py", "*.json", "requirements/*.txt")
    for path in sorted(path for kind in kinds for path in HERE.glob(kind)):
        if path != Path(__file__):
            hashed.update(f"{path.relative_to(HERE).as_posix()}\n".encode() + path.read_bytes())
    return hashed.hexdigest()


if __name__ == "__main__":
    WRITTEN.write_text(digest() + "\n")
