"""The configuration in force: the file, what ``specpilot set`` has put above it, and for how long.

    default < file < set < set --for

What is said of one server goes before what is said of all. Each of these layers has the shape of the
file (a ``Document``), so one function checks what comes of them, at the start and at every change. A change is
first built in full, then tried by the caller, then committed; until then nothing has changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from specpilot.controller.config import Config, Document, ServerConfig, config_of, merged, read_document, with_policy
from specpilot.controller.errors import ConfigError
from specpilot.sglang_hooks.wire import SetRequest

HOT = ServerConfig.__struct_fields__
LOOK_SECONDS = 0.25
"""Seconds between two looks at the file. A changed file is read once it looks the same twice, so that no half-written
file is read."""

Values = dict[str, Any]
"""Values by dotted key, such as ``policy.steps``."""


class Setting(msgspec.Struct, frozen=True):
    """A key's value, and where it comes from."""

    server: str
    """Name of the server; empty for all servers that have no value of their own."""
    key: str
    """Dotted key, such as ``policy.steps``."""
    value: Any
    """The key's value in TOML's types; None where it has none."""
    origin: str
    """Where the value comes from: ``default``, ``file``, ``set``, or ``set for a time``."""
    seconds: float | None = None
    """Seconds until the value is reverted; None if it stays."""


class SetReport(msgspec.Struct, frozen=True):
    """What is in force."""

    file: str
    """Absolute path of the configuration file; empty without one."""
    error: str
    """Why the file's newest contents are not in force; empty if they are."""
    servers: list[str]
    """Names of the servers that are connected now."""
    settings: list[Setting]
    """Every value that can be changed, those of all servers first."""


@dataclass(frozen=True)
class Layers:
    """Where a configuration comes from; never changed in place."""

    file: Document
    """The configuration file as it was read."""
    lasting: dict[str, Values] = field(default_factory=dict)
    """Values that hold until the controller restarts, by server (empty: all servers)."""
    temporary: dict[str, tuple[float, Values]] = field(default_factory=dict)
    """Values that hold until a time on the controller's clock, by server; those of one ``set --for`` end together."""

    def documents(self) -> Iterator[tuple[str, Document]]:
        """Yield (origin, document), the lowest first."""
        yield "file", self.file
        yield "set", _document(self.lasting)
        yield "set for a time", _document({server: values for server, (_, values) in self.temporary.items()})

    def build(self, source: str) -> Config:
        """Return the configuration; ConfigError if it is none, with what is set for a time or once that is over."""
        file, lasting, temporary = (document for _, document in self.documents())
        config_of(below := _overlaid(file, lasting), source)
        return config_of(_overlaid(below, temporary), source)


class LiveConfig:
    """The layers in force, the file they begin with, and what is wrong with its newest contents."""

    def __init__(self, config: Config, file: Path | None) -> None:
        """``config``: what holds without a file, or that has been read from it."""
        self.file = file.absolute() if file is not None else None
        self._seen = self._read = self._stamp()
        document = read_document(self.file) if self.file is not None else _plain(config)
        self.layers = Layers(document)
        self.config = self.layers.build(self.source)
        self.error = ""
        self._looked_at = float("-inf")

    @property
    def source(self) -> str:
        """The file's path, for error texts."""
        return str(self.file) if self.file is not None else "the configuration"

    def build(self, layers: Layers) -> Config:
        """Return the configuration that ``layers`` make; ConfigError if it is wrong, or needs a restart."""
        config = layers.build(self.source if layers.file is not self.layers.file else "set")
        for section in ("controller", "trace", "prior", "web"):
            old, new = getattr(self.config, section), getattr(config, section)
            for name in old.__struct_fields__:
                if getattr(old, name) != getattr(new, name):
                    raise ConfigError(f"{self.source}: {cold(f'{section}.{name}')}")
        return config

    def commit(self, layers: Layers, config: Config) -> None:
        """Put a configuration in force that was built from ``layers``."""
        self.layers, self.config = layers, config

    # -- what may change it --

    def edited(self, now: float, at_once: bool = False) -> Layers | None:
        """Return new layers if the file was changed since it was read; ConfigError if it cannot be read."""
        if self.file is None or (now - self._looked_at < LOOK_SECONDS and not at_once):
            return None
        self._looked_at = now
        seen, self._seen = self._seen, self._stamp()
        if not at_once and (self._seen == self._read or self._seen != seen):
            return None
        self._read = self._seen
        return replace(self.layers, file=read_document(self.file))

    def asked(self, request: SetRequest, now: float) -> Layers:
        """Return new layers as a request wants them; ConfigError for a key or a value that cannot be."""
        lasting, temporary = dict(self.layers.lasting), dict(self.layers.temporary)
        if request.reset:
            for layer in (temporary,) if request.seconds else (temporary, lasting):
                for server in [request.server] if request.server else [*layer]:
                    layer.pop(server, None)
        values = {key: _value(key, text) for key, text in request.values.items()}
        for key in values:
            if key.partition(".")[0] not in HOT or key == "policy":
                raise ConfigError(_not_hot(key))
        if request.seconds and values:
            temporary[request.server] = now + request.seconds, _without_none(values)
        elif values:
            lasting[request.server] = _without_none(_put(lasting.get(request.server, {}), values))
        return replace(self.layers, lasting=lasting, temporary=temporary)

    def expired(self, now: float) -> Layers | None:
        """Return the layers without what has had its time, if there is such."""
        left = {server: bundle for server, bundle in self.layers.temporary.items() if bundle[0] > now}
        return replace(self.layers, temporary=left) if len(left) < len(self.layers.temporary) else None

    # -- what is in force --

    def changes(self, now: float) -> list[str]:
        """Return a line for all that was set since the start, by server and how long it holds."""
        changed = [(server, values, "") for server, values in self.layers.lasting.items() if values]
        for server, (until, values) in self.layers.temporary.items():
            changed.append((server, values, f", {until - now:.0f} s more"))
        return [
            " ".join(f"{key}={value}" for key, value in values.items()) + (f" for {server}" if server else "") + left
            for server, values, left in changed
        ]

    def report(self, now: float, servers: list[str]) -> SetReport:
        """Return every value that can be changed, and where it comes from."""
        settings = list(self._settings("", self.config, now))
        for name, config in self.config.servers.items():
            settings += [setting for setting in self._settings(name, config, now) if setting.server]
        return SetReport(self.source if self.file is not None else "", self.error, servers, settings)

    def _settings(self, server: str, config: ServerConfig, now: float) -> Iterator[Setting]:
        documents = list(self.layers.documents())
        base = server.rpartition("/")[0]
        places = [(name, origin, document) for name in dict.fromkeys((server, base, "")) for origin, document in
                  reversed(documents)]  # fmt: skip
        for key, value in _flat({name: msgspec.to_builtins(getattr(config, name)) for name in HOT}).items():
            owner, origin, until = "", "default", None
            for name, place, document in places:
                section = document.get("servers", {}).get(name, {}) if name else document
                flat = _flat({hot: section[hot] for hot in HOT if hot in section})
                if key in flat and flat[key] == value:
                    owner, origin = name, place
                    until = self.layers.temporary[name][0] - now if place == "set for a time" else None
                    break
            yield Setting(owner and server, key, value, origin, until)

    def _stamp(self) -> tuple[int, int, int] | None:
        if self.file is None:
            return None
        try:
            status = self.file.stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_ino, status.st_size


def cold(key: str) -> str:
    """Return why a key cannot be changed now, and what to do."""
    return (
        f"{key} cannot be changed while the controller runs, and nothing was: write it into the file and restart "
        "the controller, which costs the servers nothing"
    )


def _not_hot(key: str) -> str:
    section, _, name = key.partition(".")
    if key == "policy":
        return "policy is a section: name a key of it, such as policy.name=goodput"
    if section == "servers":
        return f"{key}: name the server with --server, and its keys as for all servers"
    struct = getattr(Config(), section, None)
    if isinstance(struct, msgspec.Struct) and name in struct.__struct_fields__:
        return cold(key)
    return f"{key} is no key that can be set; there are mode, policy.KEY, bounds.KEY and switchback.KEY"


def _value(key: str, text: str) -> Any:
    """Return a TOML value; a word without quotes is a string, and nothing is None.

    >>> [_value("policy.name", text) for text in ("goodput", '"goodput"', "3", "0.5", "")]
    ['goodput', 'goodput', 3, 0.5, None]
    """
    if not text:
        return None
    try:
        document: Document = msgspec.toml.decode(f"value = {text}".encode())
    except msgspec.DecodeError:
        return text
    if list(document) != ["value"]:
        raise ConfigError(f"{key}={text!r}: use one value")
    return document["value"]


def _put(below: Values, values: Values) -> Values:
    """Return ``below`` with new values; another policy leaves none of the former one's keys behind."""
    name = values.get("policy.name")
    if name is not None and name != below.get("policy.name"):
        below = {key: value for key, value in below.items() if not key.startswith("policy.")}
    return {**below, **values}


def _without_none(values: Values) -> Values:
    return {key: value for key, value in values.items() if value is not None}


def _document(layer: dict[str, Values]) -> Document:
    """Return values by server and dotted key in the shape of the file."""
    document: Document = {}
    for server, values in layer.items():
        section = document.setdefault("servers", {}).setdefault(server, {}) if server else document
        for key, value in values.items():
            *parents, name = key.split(".")
            place = section
            for parent in parents:
                place = place.setdefault(parent, {})
            place[name] = value
    return document


def _overlaid(below: Document, above: Document) -> Document:
    """Return a document with another one's values instead, each server's section merged on its own."""
    common = {name: value for name, value in above.items() if name != "servers"}
    document: Document = merged(with_policy(below) if "policy" in common else below, common)
    servers = dict(document.get("servers", {}))
    for server, values in above.get("servers", {}).items():
        servers[server] = merged(servers.get(server, {}), values)
    return {**document, "servers": servers} if servers else document


def _flat(document: Document, prefix: str = "") -> Values:
    flat: Values = {}
    for name, value in document.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def _plain(config: Config) -> Document:
    """Return a document that makes ``config``; what is None is left out, as TOML has no such value."""
    plain = msgspec.to_builtins(config)
    return {
        name: {key: value for key, value in section.items() if value is not None}
        if isinstance(section, dict) else section
        for name, section in plain.items()
    }  # fmt: skip
