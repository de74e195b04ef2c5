"""The options of every command that asks a running controller: where it is, and with which keys."""

from __future__ import annotations

import argparse
import os

from specpilot.controller.config import default_endpoint
from specpilot.sglang_hooks.connection import KeyFiles


def add_controller(command: argparse.ArgumentParser) -> None:
    """Declare where the controller is that a command asks, and with which keys."""
    command.add_argument(
        "--endpoint", default="", help="address of the controller (default: $SPECPILOT_ENDPOINT, or its default)"
    )
    command.add_argument("--client-key", default="", help="key pair for tcp:// (default: $SPECPILOT_CLIENT_KEY)")
    command.add_argument(
        "--controller-key", default="", help="the controller's public key (default: $SPECPILOT_CONTROLLER_KEY)"
    )


def endpoint_and_keys(options: argparse.Namespace) -> tuple[str, KeyFiles]:
    """Return the controller's endpoint and the key files, from the options, the environment or the defaults."""
    keys = KeyFiles(
        options.client_key or os.environ.get("SPECPILOT_CLIENT_KEY", ""),
        options.controller_key or os.environ.get("SPECPILOT_CONTROLLER_KEY", ""),
    )
    return options.endpoint or os.environ.get("SPECPILOT_ENDPOINT") or default_endpoint(), keys


def server_url(text: str) -> str:
    """Return the address of an SGLang server without a slash at its end; for ``type=`` of an option.

    >>> server_url("http://127.0.0.1:30000/")
    'http://127.0.0.1:30000'
    """
    if not text.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError("use http://HOST:PORT or https://HOST:PORT")
    return text.rstrip("/")
