"""Checks of a running controller, and of the servers that it says are connected."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from importlib.metadata import version

from specpilot.controller.client.status import StatusError, fetch_status
from specpilot.controller.doctor.endpoint import Address
from specpilot.controller.doctor.report import CONTROLLER, Check
from specpilot.controller.serve.report import ControllerStatus, ServerStatus
from specpilot.sglang_hooks.connection import EndpointError, check_endpoint, is_tcp, socket_path
from specpilot.sglang_hooks.wire import DecisionSource

SILENT_SECONDS = 3.0
"""Seconds from which on a server counts as silent: servers speak once a second."""

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
"""What to do about each counter that tells of trouble when it is not 0."""


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
    return status, [*judge_controller(status), *(check for server in status.servers for check in judge_server(server))]


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
            f"{name} has halted switching",
            "its log says why; correct that and restart the server, nothing else ends it",
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
