"""What is in an offline run's .wandb file, as W&B's own terminal viewer tells it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any


def history_of(file: Path) -> list[dict[str, Any]]:
    """The rows, in order; what is no number in JSON is told as a word there and comes back as a float."""
    command = [str(Path(sys.executable).with_name("wandb")), "leet", "inspect", "--json", str(file)]
    told = subprocess.run(command, check=True, capture_output=True, text=True)
    records = [json.loads(line) for line in told.stdout.splitlines()]
    rows = [record["history"]["item"] for record in records if record["type"] == "history"]
    return [{name: float(value) for name, value in row.items()} for row in rows]
