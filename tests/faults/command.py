"""What the harness and the ranks have in common, without SGLang."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

DECISION = struct.Struct("<qqqbb")
"""One decision of one rank: receiving pass, forward pass, epoch, source, K."""
STATS_BYTES = 8192
"""Of ``stats.json``, which is padded with spaces and written over in place."""


@dataclass(frozen=True)
class Command:
    """What the harness asks all ranks to do: a method ``do_<name>`` of ``RankServer`` and its argument."""

    name: str
    value: Any = None
