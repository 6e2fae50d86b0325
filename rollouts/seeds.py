"""Seeds of single draws, derived so that a resumed run repeats the same stream and no two trajectories share one."""

from __future__ import annotations

import hashlib
import json


def derive_seed(run_seed: int, *parts: str | int) -> int:
    """Seed of one draw: the first 31 bits of the SHA-256 of the run's seed and of what the draw belongs to.

    Depends on nothing but its arguments: not on the process, the order of requests, or how many were made before.

    Args:
        run_seed: Seed of the run (and of the update, if draws shall differ between updates).
        parts: What the draw is for, for example dialogue id, trajectory and segment. `1` and `"1"` are different parts,
            and `("ab", "c")` is not `("a", "bc")`.

    Returns:
        An integer in [0, 2**31).

    Source: specification §3 (on-policy trajectories); fault 18.

    Example:
        >>> derive_seed(42, "chat-1", 0, 0)
        662494738
        >>> derive_seed(42, "chat-1", 1, 0)
        639731099
    """
    digest = hashlib.sha256(json.dumps([run_seed, *parts]).encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1
