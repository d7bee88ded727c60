"""The gates' fingerprint, stored with each run at launch, so that gates changed after the runs are seen."""

import hashlib
import json
from typing import Any


def gates_hash(gates: dict[str, Any]) -> str:
    """SHA-256 (hexadecimal) of the gates as canonical JSON: keys sorted, no spaces, UTF-8.

    Raises TypeError or ValueError for what canonical JSON cannot hold (an object, NaN).
    """
    canonical = json.dumps(gates, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()
