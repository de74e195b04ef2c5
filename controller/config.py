"""The controller's TOML file, read into frozen structs and checked before anything starts.

Every key has a default, so an empty file, or none, is a working configuration. An unknown
key, a wrong type or a value out of range is an error that names the key and the file.
"""

from __future__ import annotations

import ipaddress
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import msgspec

from specpilot.controller.errors import ConfigError
from specpilot.policies.interface import Plan, Policy
from specpilot.policies.rules.bounds import bounded
from specpilot.policies.static import Static
from specpilot.policies.threshold import Threshold
from specpilot.sglang_hooks.connection import EndpointError, check_endpoint, is_tcp
from specpilot.sglang_hooks.settings import max_steps_by_batch
from specpilot.sglang_hooks.wire import Hello

if TYPE_CHECKING:
    from specpilot.policies.goodput import Goodput

Steps = Annotated[int, msgspec.Meta(ge=0, le=64)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=86_400)]
Bytes = Annotated[int, msgspec.Meta(ge=1 << 16)]
PathText = Annotated[str, msgspec.Meta(pattern=r"^[^\0]*$", max_length=4096)]


class StaticPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="name", tag="static"):
    """``[policy] name = "static"``: one K for every step."""

    steps: Steps
    """K of every step."""

    def build(self, prior: dict[str, Any] | None = None) -> Policy:  # noqa: ARG002
        """Return a fresh policy for one server."""
        return Static(self.steps)


class ThresholdPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="name", tag="threshold"):
    """``[policy] name = "threshold"``: speculate up to ``threshold`` running requests, skip above."""

    threshold: Annotated[int, msgspec.Meta(ge=0, le=100_000)]
    """Most running requests with which the server speculates."""
    steps: Steps | None = None
    """K below the threshold; the server's largest candidate if not given."""
    band: Annotated[int, msgspec.Meta(ge=0, le=100_000)] | None = None
    """Requests around the threshold within which nothing switches; a quarter of it if not given."""

    def __post_init__(self) -> None:
        self.build()

    def build(self, prior: dict[str, Any] | None = None) -> Policy:  # noqa: ARG002
        """Return a fresh policy for one server."""
        return Threshold(self.threshold, self.steps, self.band)


class GoodputPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="name", tag="goodput"):
    """``[policy] name = "goodput"``: learn what gives the most tokens per second."""

    time_per_output_token: Seconds | None = None
    """Objective in seconds: only K that meet it are chosen or tried, as long as there is one."""
    max_steps: Steps | None = None
    """Largest K that is chosen or tried; the server's largest candidate if not given."""
    exploration_floor: Annotated[float, msgspec.Meta(ge=0, le=0.1)] = 0.0
    """Probability with which each other K is drawn in every cell, so that traces can be evaluated; 0: off."""

    def build(self, prior: dict[str, Any] | None = None) -> Policy:
        """Return a fresh policy for one server; ``prior`` as it was stored."""
        from specpilot.policies.goodput import Goodput  # and with it numpy, which ``specpilot status`` does without

        return Goodput(prior, self.time_per_output_token, self.max_steps, self.exploration_floor)

    def change(self, policy: Goodput) -> None:
        """Give a running policy these settings; it keeps what it has learned."""
        policy.configure(self.time_per_output_token, self.max_steps, self.exploration_floor)


DEFAULT_POLICY = GoodputPolicy()


class NeuralPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="name", tag="neural"):
    """``[policy] name = "neural"``: what a net fitted to traces of this server takes for best."""

    model: Annotated[PathText, msgspec.Meta(min_length=1)]
    """File that ``specpilot fit-neural`` wrote."""

    def build(self, prior: dict[str, Any] | None = None) -> Policy:  # noqa: ARG002
        """Return a fresh policy for one server; ConfigError if the file cannot be used."""
        from specpilot.controller.neural_file import load_model
        from specpilot.policies.neural import Neural

        return Neural(load_model(Path(self.model)))


class ControllerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``[controller]``: the socket and the pace."""

    endpoint: PathText = ""
    """Address: ``ipc:///path`` or ``tcp://address:port``; empty: ``controller.ipc`` in the runtime directory."""
    key: PathText = ""
    """The controller's key pair, for tcp: what ``specpilot keygen`` wrote as ``controller.key_secret``."""
    authorized_keys: PathText = ""
    """Folder of the public keys that may connect, for tcp; looked at again every two seconds."""
    lease_seconds: Seconds = 5.0
    """Seconds that a server trusts a table after the controller was last heard."""
    decide_seconds: Seconds = 0.5
    """Seconds between two decisions for a server; a table goes out only when it differs."""


class TraceConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``[trace]``: the log of every step; switched off with ``directory = ""``."""

    directory: PathText | None = None
    """Folder of the trace; None: ``trace`` in the state directory; empty: no trace is written."""
    segment_bytes: Bytes = 64 << 20
    """Size of a segment in bytes, at about which a new one begins."""
    total_bytes: Bytes = 4 << 30
    """Size in bytes that all segments together stay below: the oldest are deleted."""
    flush_seconds: Seconds = 1.0
    """Seconds between two writes: a crash of the controller loses at most the records of that time."""

    @property
    def folder(self) -> Path | None:
        """Folder that ``directory`` means; None: no trace is written. ConfigError if there is no home for it."""
        return _folder("trace.directory", self.directory, "trace")


class PriorConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``[prior]``: what was learned, kept for the next start; switched off with ``directory = ""``."""

    directory: PathText | None = None
    """Folder of the priors; None: ``prior`` in the state directory; empty: nothing is kept."""
    save_seconds: Seconds = 60.0
    """Seconds between two writes; there is one more when the controller stops."""

    @property
    def folder(self) -> Path | None:
        """Folder that ``directory`` means; None: nothing is kept. ConfigError if there is no home for it."""
        return _folder("prior.directory", self.directory, "prior")


class SwitchbackConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``[switchback]``: what the policy gains, measured against the fallback; off with ``share = 0``."""

    share: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    """Share of the time that is spent in pairs of blocks, half of it with the fallback in force."""
    block_seconds: Seconds = 60.0
    """Length of a block in seconds."""
    washout_seconds: Annotated[float, msgspec.Meta(ge=0, le=86_400)] = 5.0
    """Seconds at the start of each block that do not count."""
    retry_seconds: Seconds = 21_600.0
    """Seconds after which a policy that was losing, and so was suspended, is tried again."""

    def __post_init__(self) -> None:
        if self.washout_seconds >= self.block_seconds:
            raise ValueError(
                f"washout_seconds = {self.washout_seconds:g} must be smaller than block_seconds = "
                f"{self.block_seconds:g}"
            )


class WebConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``[web]``: the page, metrics and JSON over HTTP; switched off with ``listen = ""``."""

    listen: str = "127.0.0.1:7411"
    """Address to listen on, ``HOST:PORT``; anything but loopback needs a token. Empty: no page."""
    token_file: str = ""
    """File with the token that every reader must show; empty: none, which only loopback may have."""

    def __post_init__(self) -> None:
        if not self.listen:
            return
        host, _ = self.address
        if not self.token_file and not is_loopback(host):
            raise ValueError(
                f"web.listen = {self.listen!r} is open to the network and needs a token: write one into a file "
                "(`openssl rand -hex 32`) and name it in web.token_file, or listen on 127.0.0.1"
            )

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of ``listen``; ValueError if it is not that."""
        host, _, port = self.listen.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not host or not port.isdecimal() or int(port) > 65_535:
            raise ValueError(f"web.listen = {self.listen!r}: use HOST:PORT such as 127.0.0.1:7411, or '' for none")
        return host, int(port)


def is_loopback(host: str) -> bool:
    """Does ``host`` mean this machine alone?

    >>> [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "example.org")]
    [True, True, True, False, False]
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class BoundsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``[bounds]``: what no table goes beyond, whoever decides."""

    steps: list[Steps] = []
    """K that tables may hold; empty: every candidate of the server."""
    max_steps_by_batch: str = ""
    """Largest K by batch size: ``16:3,64:0`` is at most 3 from batch size 16 on and 0 from 64 on. Written as
    SPECPILOT_MAX_STEPS_BY_BATCH on the server."""

    def __post_init__(self) -> None:
        try:
            max_steps_by_batch(self.max_steps_by_batch)
        except ValueError as error:
            raise ValueError(f"bounds.max_steps_by_batch = {self.max_steps_by_batch!r}: {error}") from error

    def apply(self, plan: Plan, server: Hello) -> Plan:
        """Return the plan within the bounds; PolicyError if they leave this server nothing."""
        return bounded(plan, server.candidate_steps, self.steps, max_steps_by_batch(self.max_steps_by_batch))


class ServerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What can be changed while the controller runs, and can differ between servers."""

    mode: Literal["control", "shadow"] = "control"
    """``control``: tables are applied; ``shadow``: they are decided and recorded, but not applied."""
    policy: StaticPolicy | ThresholdPolicy | GoodputPolicy | NeuralPolicy = DEFAULT_POLICY
    bounds: BoundsConfig = BoundsConfig()
    switchback: SwitchbackConfig = SwitchbackConfig()


class Config(ServerConfig, frozen=True, forbid_unknown_fields=True):
    """The whole file."""

    controller: ControllerConfig = ControllerConfig()
    trace: TraceConfig = TraceConfig()
    prior: PriorConfig = PriorConfig()
    web: WebConfig = WebConfig()
    servers: dict[str, ServerConfig] = {}
    """Configuration of single servers by name, without the replica's number or with it; each is whole, the keys of all
    servers included."""

    def __post_init__(self) -> None:
        own = self.controller
        if own.endpoint:
            try:
                check_endpoint(own.endpoint)
            except EndpointError as error:
                raise ValueError(f"controller.endpoint = {own.endpoint!r}: {error}") from error
        if is_tcp(own.endpoint) and not (own.key and own.authorized_keys):
            raise ValueError(
                "controller.endpoint: tcp:// is open to the whole network, so it needs controller.key and "
                "controller.authorized_keys: make them with `specpilot keygen`"
            )
        if not is_tcp(own.endpoint) and (own.key or own.authorized_keys):
            raise ValueError("controller.key and controller.authorized_keys are for a tcp:// endpoint only")
        if self.trace.segment_bytes > self.trace.total_bytes:
            raise ValueError("trace.segment_bytes is larger than trace.total_bytes")

    def for_server(self, key: str) -> ServerConfig:
        """Return what holds for the server ``NAME/RANK``."""
        own = self.servers.get(key) or self.servers.get(key.rpartition("/")[0])
        return own or ServerConfig(**{name: getattr(self, name) for name in ServerConfig.__struct_fields__})

    @property
    def all_servers(self) -> list[ServerConfig]:
        """What holds for any server: the common part, and that of each one named."""
        return [self, *self.servers.values()]


Document = dict[str, Any]
"""A TOML file as it was parsed."""


def load_config(path: Path | None) -> Config:
    """Read ``path`` (None: all defaults); raise ConfigError naming what is wrong with it."""
    return Config() if path is None else config_of(read_document(path), str(path))


def read_document(path: Path) -> Document:
    """Return the file as tables, unchecked; ConfigError if it cannot be read or is no TOML."""
    try:
        return cast(Document, msgspec.toml.decode(path.read_bytes()))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}") from error


def config_of(document: Document, source: str) -> Config:
    """Check a document, and give each server the keys of all servers that it does not set itself."""
    common = {name: value for name, value in document.items() if name != "servers"}
    servers = document.get("servers", {})
    try:
        config = msgspec.convert(common, Config)
        if not isinstance(servers, dict):
            raise ValueError('servers: use a section for each, such as [servers."node:30000"]')
        shared = with_policy({name: common[name] for name in ServerConfig.__struct_fields__ if name in common})
        of_servers = {}
        for name, own in servers.items():
            # Of a replica first what is said of all replicas of its server.
            lower = merged(shared, servers.get(name.rpartition("/")[0], {}))
            try:
                of_servers[name] = msgspec.convert(merged(lower, own), ServerConfig)
            except (msgspec.ValidationError, ValueError) as error:
                raise ValueError(f"servers.{name}: {error}") from error
        return msgspec.structs.replace(config, servers=of_servers)
    except (msgspec.ValidationError, ValueError) as error:
        raise ConfigError(f"{source}: {error}") from error


def with_policy(document: Document) -> Document:
    """Name the default policy where none is, so that a higher layer may set its keys alone."""
    return {"policy": {"name": DEFAULT_POLICY.__struct_config__.tag}, **document}


def merged(below: Any, above: Any) -> Any:
    """Return ``below`` with what ``above`` says instead; another policy replaces the lower one with all its keys.

    >>> below = {"policy": {"name": "threshold", "threshold": 9}, "mode": "shadow"}
    >>> merged(below, {"policy": {"steps": 3}})["policy"]
    {'name': 'threshold', 'threshold': 9, 'steps': 3}
    >>> merged(below, {"policy": {"name": "static", "steps": 3}})
    {'policy': {'name': 'static', 'steps': 3}, 'mode': 'shadow'}
    """
    if not isinstance(below, dict) or not isinstance(above, dict):
        return above
    result = {**below}
    for name, value in above.items():
        lower = result.get(name)
        if name == "policy" and isinstance(lower, dict) and isinstance(value, dict):
            lower = lower if value.get("name", lower.get("name")) == lower.get("name") else None
        result[name] = merged(lower, value)
    return result


def runtime_directory() -> Path:
    """Folder for sockets: $XDG_RUNTIME_DIR/specpilot, or /tmp/specpilot-UID where that is unset."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    return Path(base) / "specpilot" if base else Path(f"/tmp/specpilot-{os.getuid()}")  # noqa: S108


def state_directory() -> Path:
    """Folder for what outlives a run: $XDG_STATE_HOME/specpilot, or ~/.local/state/specpilot where that is unset.

    A relative XDG_STATE_HOME counts as unset, as its specification says. RuntimeError for a user without a home.
    """
    base = os.environ.get("XDG_STATE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".local" / "state") / "specpilot"


def _folder(key: str, directory: str | None, name: str) -> Path | None:
    if directory is not None:
        return Path(directory) if directory else None
    try:
        return state_directory() / name
    except RuntimeError as error:
        raise ConfigError(
            f"{key} is not set, and user {os.getuid()} has no home directory for its default: set {key} to a folder "
            'or to "", or set XDG_STATE_HOME'
        ) from error


def default_endpoint() -> str:
    """The endpoint of a controller that was given none."""
    return f"ipc://{runtime_directory() / 'controller.ipc'}"
