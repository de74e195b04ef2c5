"""Checks of ``specpilot doctor`` on the host: versions, settings, configuration, socket, controller, disk.

Nothing is made, bound or written.
"""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path

from specpilot.controller.client.status import StatusError, fetch_status
from specpilot.controller.config import Config, GoodputPolicy, default_endpoint, load_config
from specpilot.controller.doctor.report import Area, Check
from specpilot.controller.errors import ConfigError
from specpilot.controller.serve.keys import read_authorized
from specpilot.controller.serve.report import ControllerStatus, ServerStatus
from specpilot.controller.web import Page
from specpilot.sglang_hooks.connection import (
    EndpointError,
    KeyFiles,
    check_endpoint,
    check_folder,
    check_keys_named,
    is_tcp,
    read_key_pair,
    read_keys,
    socket_path,
)
from specpilot.sglang_hooks.contract import RIG_VERSION, TESTED_VERSIONS, installed_moved
from specpilot.sglang_hooks.settings import Settings, SettingsError
from specpilot.sglang_hooks.skip_uses import SKIP
from specpilot.sglang_hooks.uses import ENTRY, HOOKS
from specpilot.sglang_hooks.wire import DecisionSource

VERSIONS = Area("versions")
CONFIGURATION = Area("configuration")
SOCKET = Area("socket")
CONTROLLER = Area("controller")
STORAGE = Area("storage")

GROUP = "sglang.srt.plugins"
PLUGIN = "specpilot"
NO_SGLANG = "SGLang is not installed here"
SILENT_SECONDS = 3.0
"""Servers speak once a second."""

TROUBLE = {
    "tables_refused": "see its log for the reason; a server restarted with other candidates takes the next table",
    "messages_refused": "run the same version of specpilot on both ends",
    "link_failures": "raise the server's limit of file descriptors (ulimit -n), or report the traceback in its log",
    "handshakes_failed": "see its log for the key or the address that was refused",
    "records_dropped": "give the controller CPU time, or raise SPECPILOT_QUEUE_RECORDS",
    "join_misses": "a few at the start are harmless; report a steady rise",
    "steps_mismatched": "SGLang did not apply what was decided: report it with the server's log",
    "rows_quarantined": "raise SPECPILOT_SKIP_RING_MB if what runs after long skips is to be learned from",
    "lease_expiries": "give the controller CPU time, or raise controller.lease_seconds",
    "fallbacks": "keep the controller running; after SPECPILOT_STALE_SECONDS without it servers go to their fallback",
    "rank_mismatches": "give all ranks and nodes the same SPECPILOT_ variables, and restart the server",
    "skips_as_verify": "see the server's log for `K=0 stays SGLang's own`; SPECPILOT_SKIP=verify if that is to be so",
    "hook_failures": "see the traceback in the server's log, and report it",
    "policy_failures": "see the traceback in the controller's log, and report it; restart the controller",
    "rivals_turned_away": "two servers have one name: set SPECPILOT_SERVER_ID for one of them",
    "trace_failures": "make trace.directory writable and give it room",
    "prior_failures": "make prior.directory writable and give it room",
}
"""Counters that tell of trouble when they are not 0, and what to do."""


# -- versions and settings --


def check_versions(environment: Mapping[str, str]) -> Iterator[Check]:
    """Check specpilot, Python, SGLang, and that SGLang will find the plugin."""
    yield VERSIONS.ok(f"specpilot {version('specpilot')}, Python {platform.python_version()}")
    try:
        installed = version("sglang")
    except PackageNotFoundError:
        yield VERSIONS.not_checked(f"{NO_SGLANG}: enough for a controller, not for a server")
        return
    yield from check_sglang(installed, environment)
    yield from check_plugin(environment)


def check_sglang(installed: str, environment: Mapping[str, str]) -> Iterator[Check]:
    """Check the version of SGLang, and that its code is what the hooks know."""
    tested = f"install one of {', '.join(TESTED_VERSIONS)}"
    try:
        import sglang  # noqa: F401
    except Exception as error:  # whatever a broken installation raises
        yield VERSIONS.problem(f"SGLang {installed} cannot be imported: {error}", "repair SGLang's installation")
        return
    if installed in (*TESTED_VERSIONS, RIG_VERSION):
        yield VERSIONS.ok(f"SGLang {installed} is a tested version")
    elif environment.get("SPECPILOT_ALLOW_UNTESTED") == "1":
        yield VERSIONS.warning(f"SGLang {installed} is not a tested version, and is allowed", tested)
    else:
        yield VERSIONS.problem(
            f"SGLang {installed} is not a tested version: a server with specpilot refuses to start",
            f"{tested}, or try it with SPECPILOT_ALLOW_UNTESTED=1",
        )
    if moved := installed_moved(ENTRY + HOOKS):
        yield VERSIONS.problem(f"SGLang's code is not what the hooks know: {'; '.join(moved)}", tested)
    elif moved := installed_moved(SKIP):
        yield VERSIONS.warning(
            f"K=0 stays SGLang's own step, and a tree of drafts cannot be skipped: {'; '.join(moved)}", tested
        )
    else:
        yield VERSIONS.ok("SGLang's code is what the hooks know")


def check_plugin(environment: Mapping[str, str]) -> Iterator[Check]:
    """Check that SGLang finds the plugin and would load it."""
    found = next((point for point in entry_points(group=GROUP) if point.name == PLUGIN), None)
    if found is None:
        yield VERSIONS.problem(
            f"SGLang finds no plugin {PLUGIN} here (entry points of {GROUP})",
            "run `pip install .` in Specpilot's checkout with this environment's pip; PYTHONPATH alone is not enough",
        )
        return
    allowed = environment.get("SGLANG_PLUGINS", "")
    if allowed and PLUGIN not in [name.strip() for name in allowed.split(",")]:
        yield VERSIONS.problem(
            f"SGLANG_PLUGINS={allowed} does not name {PLUGIN}: SGLang passes the plugin over without a word",
            f"set SGLANG_PLUGINS={allowed},{PLUGIN}, or unset it",
        )
        return
    try:
        found.load()
    except Exception as error:  # SGLang only logs it
        yield VERSIONS.problem(f"the plugin {found.value} cannot be imported: {error}", "install specpilot again")
        return
    yield VERSIONS.ok(f"SGLang finds the plugin ({found.value})")


def check_settings(environment: Mapping[str, str]) -> tuple[Settings | None, list[Check]]:
    """Return the SPECPILOT_ variables, None if they cannot be used, and what is wrong with them."""
    try:
        settings = Settings.from_environment(environment)
    except SettingsError as error:
        return None, [CONFIGURATION.problem(str(error), "correct or unset it: a server with it refuses to start")]
    given = sorted(name for name in environment if name.startswith("SPECPILOT_"))
    found = [
        CONFIGURATION.ok(f"variables can be used: {', '.join(given)}" if given else "no SPECPILOT_ variable is set")
    ]
    if not settings.endpoint and _has_sglang():
        found.append(
            CONFIGURATION.warning(
                "SPECPILOT_ENDPOINT is not set: the plugin does nothing in a server that is started from here",
                "set it to the controller's endpoint, or start the server with `specpilot launch`",
            )
        )
    if settings.mode == "shadow":
        found.append(
            CONFIGURATION.warning(
                "SPECPILOT_MODE=shadow: tables are recorded, and the fallback is applied", "unset it to steer"
            )
        )
    return settings, found


def _has_sglang() -> bool:
    try:
        version("sglang")
    except PackageNotFoundError:
        return False
    return True


def check_configuration(file: Path | None) -> tuple[Config | None, list[Check]]:
    """Return the controller's configuration, None if it cannot be used, and what is wrong with it."""
    try:
        config = load_config(file)
        for one in config.all_servers:
            one.policy.build(None)
        Page(config.web)
    except ConfigError as error:
        return None, [CONFIGURATION.problem(str(error), "correct the file: the controller does not start with it")]
    policy = type(config.policy).__struct_config__.tag
    name = str(file) if file is not None else "no --config, all defaults"
    return config, [CONFIGURATION.ok(f"{name}: policy {policy}, mode {config.mode}")]


# -- the socket and who answers there --


@dataclass(frozen=True)
class Address:
    """Where the controller is looked for, and with which keys."""

    endpoint: str
    keys: KeyFiles


def address(asked: str, keys: KeyFiles, environment: Mapping[str, str], config: Config | None) -> Address:
    """Return what ``specpilot status`` would ask, or else what the configuration file says."""
    own = config.controller.endpoint if config is not None else ""
    return Address(asked or environment.get("SPECPILOT_ENDPOINT") or own or default_endpoint(), keys)


def check_socket(at: Address, config: Config | None) -> Iterator[Check]:
    """Check the endpoint, its folder or its keys, and that server and controller mean the same one."""
    try:
        check_endpoint(at.endpoint)
    except EndpointError as error:
        yield SOCKET.problem(f"{at.endpoint}: {error}", "give such an endpoint to controller and servers")
        return
    own = config.controller.endpoint if config is not None else ""
    if own and not is_tcp(own) and own != at.endpoint and not _same(own, at.endpoint):
        yield SOCKET.warning(
            f"the configuration file has the controller at {own}, and servers look for it at {at.endpoint}",
            "give both the same endpoint (in containers: the same volume)",
        )
    if is_tcp(at.endpoint):
        yield from check_client_keys(at)
    else:
        yield check_socket_folder(socket_path(at.endpoint).parent)
    if config is not None and is_tcp(own):
        yield from check_controller_keys(config, at.keys)


def _same(one: str, other: str) -> bool:
    return not is_tcp(other) and socket_path(one).resolve() == socket_path(other).resolve()


def check_socket_folder(folder: Path) -> Check:
    """Check owner, mode and that a controller of this user could bind there."""
    change = f"chmod 700 {folder}, chown it to the controller's user, or choose another endpoint"
    try:
        check_folder(folder, any_owner=os.getuid() == 0)
    except FileNotFoundError:
        if _writable(parent := _existing(folder)):
            return SOCKET.ok(f"{folder} is not there yet; the controller makes it, with mode 0700")
        return SOCKET.problem(f"{folder} is not there, and this user may not make it in {parent}", change)
    except (EndpointError, OSError) as error:
        return SOCKET.problem(str(error), change)
    found = folder.stat()
    said = f"{folder} belongs to user {found.st_uid}, mode {found.st_mode & 0o7777:04o}"
    if not _writable(folder):
        return SOCKET.problem(f"{said}: user {os.getuid()} may not write into it", change)
    return SOCKET.ok(said)


def check_client_keys(at: Address) -> Iterator[Check]:
    """Check what a server or ``specpilot status`` needs for ``tcp://``."""
    try:
        check_keys_named(at.endpoint, at.keys)
        read_keys(at.keys)
    except EndpointError as error:
        yield SOCKET.problem(str(error), "`specpilot keygen` makes the files and says what to set where")
        return
    yield SOCKET.ok(f"the keys for {at.endpoint} can be read, by this user alone")


def check_controller_keys(config: Config, client: KeyFiles) -> Iterator[Check]:
    """Check the controller's own keys, and that the client's is among those that may connect."""
    own = config.controller
    try:
        read_key_pair(own.key)
        allowed, faults = read_authorized(Path(own.authorized_keys))
    except EndpointError as error:
        yield SOCKET.problem(str(error), "`specpilot keygen` makes the files and says what to set where")
        return
    for fault in faults:
        yield SOCKET.problem(fault, "mend or delete that file: the controller does not start with it")
    if not allowed:
        yield SOCKET.warning(
            f"no key is in {own.authorized_keys}: nobody can connect", "add NAME.key of each client's pair"
        )
        return
    yield SOCKET.ok(f"may connect: {', '.join(sorted(allowed.values()))}")
    try:
        public = read_key_pair(client.client)[0] if client.client else None
    except EndpointError:
        return  # said where the client's keys are checked
    if public is not None and public not in allowed:
        yield SOCKET.problem(
            f"{client.client} is not among the keys that may connect",
            f"copy its public part into {own.authorized_keys}",
        )


def check_controller(at: Address) -> tuple[ControllerStatus | None, list[Check]]:
    """Return the status of the controller, None if there is none, and what is wrong with it and its servers."""
    if "//*:" in at.endpoint or "//0.0.0.0:" in at.endpoint:
        return None, [CONTROLLER.not_checked(f"{at.endpoint} is where it listens: name its address with --endpoint")]
    try:
        check_endpoint(at.endpoint)
        # As long as there is no socket it was not started; a socket where nobody answers is something else.
        if not is_tcp(at.endpoint) and not os.path.lexists(socket_path(at.endpoint)):
            change = "start it: `specpilot controller`, or `specpilot launch` for both"
            return None, [CONTROLLER.warning(f"none at {at.endpoint}", change)]
        status = fetch_status(at.endpoint, keys=at.keys)
    except EndpointError:
        return None, [CONTROLLER.not_checked("the endpoint cannot be used, see above")]
    except StatusError as error:
        return None, [CONTROLLER.problem(str(error), "see its log; servers go on without it meanwhile")]
    return status, [*judge_controller(status), *(check for one in status.servers for check in judge_server(one))]


def judge_controller(status: ControllerStatus) -> Iterator[Check]:
    """Judge what a controller says of itself."""
    yield CONTROLLER.ok(f"specpilot {status.version} answers at {status.endpoint} (pid {status.pid})")
    if status.version != (ours := version("specpilot")):
        yield CONTROLLER.problem(
            f"the controller is specpilot {status.version}, here is {ours}", "install the same version on both sides"
        )
    for error, change in (
        (status.config_error, "correct the file: until then what was in force before stays so"),
        (status.trace_error, "make trace.directory writable and give it room"),
        (status.prior_error, "make prior.directory writable and give it room"),
    ):
        if error:
            yield CONTROLLER.problem(error, change)
    if status.page and not status.page.startswith("http"):
        yield CONTROLLER.warning(f"the web page {status.page}", "set web.listen to a free port, or to '' for no page")
    for count, what, change in (
        (status.trace_lost, "records were not written to the trace", "see the controller's log for the reason"),
        (status.refused_messages, "messages were refused", "run the same version of specpilot on both ends"),
        (status.handshakes_failed, "connections were refused", "see the controller's log for address and key"),
    ):
        if count:
            yield CONTROLLER.warning(f"{count:,} {what}", change)
    yield from _judge_counters("", status.counters)
    if not status.servers:
        yield CONTROLLER.warning(
            "no server has connected", f"start it with SPECPILOT_ENDPOINT={status.endpoint} in its environment"
        )


def judge_server(server: ServerStatus) -> Iterator[Check]:
    """Judge what a controller says of one server."""
    name = server.server
    if server.silent_seconds > SILENT_SECONDS:
        yield CONTROLLER.problem(
            f"{name} has been silent for {server.silent_seconds:.0f} s", "see its log: has it ended, or does it hang?"
        )
        return
    if server.source == DecisionSource.HALTED.name:
        yield CONTROLLER.problem(
            f"{name} has halted switching", "its log says why; mend that and restart the server, nothing else ends it"
        )
    elif server.source == DecisionSource.STALE.name:
        yield CONTROLLER.warning(f"{name} runs on a table whose lease ran out", "give the controller CPU time")
    elif server.source == DecisionSource.FALLBACK.name and server.mode != "shadow":
        yield CONTROLLER.warning(
            f"{name} runs on its own fallback (K={server.steps})",
            "wait a second after its start; else the note in `specpilot status` says why no table is in force",
        )
    else:
        yield CONTROLLER.ok(f"{name} is steered: K={server.steps} of {server.candidate_steps}, mode {server.mode}")
    if 0 not in server.candidate_steps:
        yield CONTROLLER.problem(
            f"{name} can never skip: its candidates are {server.candidate_steps}",
            "add 0 to the file of --speculative-adaptive-config",
        )
    if server.note:
        yield CONTROLLER.warning(f"{name}: {server.note}", "see `specpilot status`")
    if server.records_lost:
        yield CONTROLLER.warning(
            f"{name}: {server.records_lost:,} of its records were lost", "give the controller CPU time and disk"
        )
    yield from _judge_counters(f"{name}: ", server.counters)


def _judge_counters(prefix: str, counters: Mapping[str, int]) -> Iterator[Check]:
    for name, change in TROUBLE.items():
        if count := counters.get(name, 0):
            yield CONTROLLER.warning(f"{prefix}{name} {count:,}", change)


# -- disk --


def check_storage(config: Config) -> Iterator[Check]:
    """Check the folders of trace and prior as this user sees them from here."""
    learns = any(isinstance(one.policy, GoodputPolicy) or one.switchback.share for one in config.all_servers)
    try:
        trace, prior = config.trace.folder, config.prior.folder if learns else None
    except ConfigError as error:
        yield STORAGE.problem(str(error), "set trace.directory and prior.directory, or XDG_STATE_HOME")
        return
    if trace is not None:
        yield from check_written_folder("trace.directory", trace)
        yield from check_room(trace, config.trace.total_bytes)
    else:
        yield STORAGE.warning(
            "no trace is written (trace.directory is empty)", "name a folder: `fit`, `evaluate` and `replay` read it"
        )
    if prior is not None:
        yield from check_written_folder("prior.directory", prior)
    elif learns:
        yield STORAGE.warning(
            "what is learned is not kept (prior.directory is empty)", "name a folder, or each start learns anew"
        )


def check_written_folder(key: str, folder: Path) -> Iterator[Check]:
    """Check that a folder can be written into, or made."""
    whole = folder.absolute()
    place = _existing(whole)
    if not place.is_dir():
        yield STORAGE.problem(f"{key}: {place} is no folder", f"name another {key}")
    elif not _writable(place):
        yield STORAGE.problem(
            f"{key} {whole}: user {os.getuid()} may not write into {place}", f"chown {place}, or name another {key}"
        )
    else:
        yield STORAGE.ok(f"{key} {whole} " + ("can be written into" if place == whole else f"can be made in {place}"))


def check_room(folder: Path, total_bytes: int) -> Iterator[Check]:
    """Check that the trace can grow to its bound."""
    place = _existing(folder.absolute())
    try:
        free = shutil.disk_usage(place).free
        used = sum(file.stat().st_size for file in place.rglob("*.arrows")) if place == folder.absolute() else 0
    except OSError as error:
        yield STORAGE.not_checked(f"free room in {place}: {error.strerror}")
        return
    said = (
        f"{free / 1e9:.1f} GB are free in {place}; the trace has {used / 1e9:.1f} of at most {total_bytes / 1e9:.1f} GB"
    )
    if free + used < total_bytes:
        yield STORAGE.warning(said, "lower trace.total_bytes, or name a folder on another disk")
    else:
        yield STORAGE.ok(said)


def _existing(path: Path) -> Path:
    """Return ``path`` or the nearest of its parents that is there."""
    return next(place for place in (path, *path.parents) if os.path.lexists(place))


def _writable(folder: Path) -> bool:
    return os.access(folder, os.W_OK | os.X_OK)
