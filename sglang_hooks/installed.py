"""What this process of SGLang has of Specpilot in it, and how a start is refused."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import NoReturn

from specpilot.sglang_hooks.agent import Agent
from specpilot.sglang_hooks.patches import Patch
from specpilot.sglang_hooks.settings import Settings
from specpilot.sglang_hooks.skip import DecodeSkip

logger = logging.getLogger(__name__)


@dataclass
class Installed:
    """The parts of Specpilot in one process; all of them empty where SPECPILOT_ENDPOINT is not set."""

    settings: Settings | None = None
    agent: Agent | None = None
    skip: DecodeSkip | None = None
    """The decode-mode skip, once its graphs are captured; None where K=0 is SGLang's width-1 verify."""
    patches: list[Patch] = field(default_factory=list)
    """Attributes of SGLang that are replaced, in the order in which they were."""

    def clear(self) -> None:
        """Forget everything; stops nothing and puts nothing back."""
        self.settings = self.agent = self.skip = None
        self.patches = []


installed = Installed()


def active_agent() -> Agent:
    """Return the agent of this process; hooks run only where the policy, and with it the agent, was built."""
    agent = installed.agent
    assert agent is not None
    return agent


def refuse(text: str) -> NoReturn:
    """End the start of this server: SGLang only logs what a plugin raises, but SystemExit passes its handler."""
    logger.error("specpilot: %s", text)
    raise SystemExit(f"specpilot: {text}")
