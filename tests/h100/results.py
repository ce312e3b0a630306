"""Join what the processes of `ci/gpu` measured into one file: `python results.py FOLDER GPUS`."""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(folder: Path, gpus: str) -> None:
    """Write FOLDER/h200-xGPUS.json and drop the parts."""
    parts = sorted(folder.glob("*.part"))
    found = [json.loads(part.read_text()) for part in parts]
    rows = [row for part in found for row in part["rows"]]
    record = {**found[0], "command": "ci/gpu", "rows": rows}
    (folder / f"h200-x{gpus}.json").write_text(json.dumps(record, indent=1) + "\n")
    for part in parts:
        part.unlink()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
