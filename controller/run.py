"""``specpilot controller``: the loop (``serve``) and the page (``web``) in one process, until it is told to end."""

from __future__ import annotations

import argparse
import logging
import resource
import signal
from pathlib import Path

from rich.console import Console

from specpilot.controller.config import load_config
from specpilot.controller.serve.service import Service
from specpilot.controller.web import Page


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Declare the options of ``specpilot controller``."""
    command.add_argument("--config", type=Path, help="TOML file (default: all defaults)")


def run(options: argparse.Namespace, console: Console) -> int:  # noqa: ARG001
    """Serve until SIGTERM or SIGINT; SIGHUP reads the configuration file again. Return 0."""
    config = load_config(options.config)
    # libzmq ends a process that cannot accept a connection for want of descriptors; the usual limit is 1024.
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    page = Page(config.web)
    service = Service(config, file=options.config)
    signal.signal(signal.SIGTERM, lambda *_: service.stop())
    signal.signal(signal.SIGINT, lambda *_: service.stop())
    signal.signal(signal.SIGHUP, lambda *_: service.reload())
    logging.getLogger(__name__).info(
        "listening; start servers with SPECPILOT_ENDPOINT=%s in their environment", service.endpoint
    )
    with page.served(service.board):
        service.run()
    return 0
