"""Who gets in over tcp, and whose folder is trusted for ipc: real sockets, real processes, real key files."""

from __future__ import annotations

import ast
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import zmq

from specpilot.controller.client.status import StatusError, fetch_status
from specpilot.controller.config import Config, ControllerConfig, ThresholdPolicy, TraceConfig, load_config
from specpilot.controller.errors import ConfigError
from specpilot.controller.serve.endpoint import Endpoint
from specpilot.controller.serve.keys import Made, make_keys
from specpilot.controller.serve.router import SERVERS, STRANGERS
from specpilot.controller.serve.service import Service
from specpilot.sglang_hooks import connection
from specpilot.sglang_hooks.agent import Agent, ServerFacts
from specpilot.sglang_hooks.connection import EndpointError, KeyFiles, check_endpoint, read_key_pair, read_public_key
from specpilot.sglang_hooks.settings import Settings, SettingsError
from specpilot.sglang_hooks.table_policy import TablePolicy
from specpilot.sglang_hooks.wire import (
    MAX_MESSAGE_BYTES,
    DecisionSource,
    HookState,
    StatusRequest,
    StepBatch,
    encode,
)
from tests.support.messages import hello, record
from tests.support.ports import own_port
from tests.support.waiting import PATIENCE, until

ROOT = Path(__file__).parents[2]


def in_command(agent: Agent) -> bool:
    received: list[object] = []
    agent.pull(received)
    for update in received:
        agent.apply(update)  # type: ignore[arg-type]
    return agent.policy.source == DecisionSource.TABLE


class Rig:
    """A controller on tcp, turned by the test, with the keys of one client."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.made = make_keys(folder / "keys")
        self.endpoint = f"tcp://127.0.0.1:{own_port()}"
        self.agents: list[Agent] = []
        self.service = self.start()

    def start(self) -> Service:
        keys = {"key": str(self.made.controller_pair), "authorized_keys": str(self.made.authorized)}
        own = ControllerConfig(
            endpoint=self.endpoint, lease_seconds=6.0, **(keys if self.endpoint.startswith("tcp") else {})
        )
        return Service(Config(controller=own, policy=ThresholdPolicy(5), trace=TraceConfig(directory="")))

    @property
    def keys(self) -> KeyFiles:
        return KeyFiles(str(self.made.client_pair), str(self.made.controller_public))

    def other(self, client: str) -> KeyFiles:
        """Keys of a further client that this controller knows."""
        return KeyFiles(str(make_keys(self.folder / "keys", client).client_pair), str(self.made.controller_public))

    def agent(self, keys: KeyFiles, server_id: str = "s") -> Agent:
        settings = Settings(
            endpoint=self.endpoint, client_key=keys.client, controller_key=keys.controller,
            min_table_interval_seconds=0.0,
        )  # fmt: skip
        agent = Agent(settings, TablePolicy(settings, [0, 1, 3], 3))
        agent.start(ServerFacts(server_id))
        self.agents.append(agent)
        return agent

    def turn_until(self, done: Callable[[], object]) -> None:
        until(done, meanwhile=self.service.turn)

    def servers(self) -> list[str]:
        return [server.server for server in self.service.status().servers]

    def stop(self) -> None:
        for agent in self.agents:
            agent.stop()
        self.end_controller()

    def end_controller(self) -> None:
        if not self.service._endpoint.socket.closed:
            self.service.stop()
            self.service.run()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    made.stop()


def said(caplog: pytest.LogCaptureFixture, text: str) -> int:
    return sum(text in record.getMessage() for record in caplog.records)


# -- tcp --


def test_steps_and_tables_travel_over_tcp_with_keys(rig: Rig) -> None:
    agent = rig.agent(rig.keys)
    rig.turn_until(lambda: in_command(agent))
    agent._queue.put(record(record_seq=0))
    rig.turn_until(lambda: rig.service.status().servers[0].records == 1)
    assert rig.service.status().handshakes_failed == 0


def strangers(rig: Rig) -> dict[str, tuple[bytes, bytes, bytes] | None]:
    """Keys (public, secret, controller's) that must not open the door; None: no CURVE."""
    public, secret = read_key_pair(rig.made.client_pair)
    unknown, unknown_secret = zmq.curve_keypair()
    controller = read_public_key(rig.made.controller_public)
    return {
        "another controller's key": (public, secret, zmq.curve_keypair()[0]),
        "a client key that is not authorized": (unknown, unknown_secret, controller),
        "another's public key without its secret": (public, unknown_secret, controller),
        "no keys": None,
    }


@pytest.mark.parametrize(
    "who",
    [
        "another controller's key",
        "a client key that is not authorized",
        "another's public key without its secret",
        "no keys",
    ],
)
def test_without_the_right_keys_nothing_is_written_or_read(
    who: str, rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    good = rig.agent(rig.keys)
    rig.turn_until(lambda: in_command(good))
    keys = strangers(rig)[who]
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        if keys is not None:
            stranger.curve_publickey, stranger.curve_secretkey, stranger.curve_serverkey = keys
        stranger.connect(rig.endpoint)
        for message in (hello(server_id="stranger"), StepBatch([record()], 0), StatusRequest()):
            stranger.send(encode(message))
        rig.turn_until(lambda: rig.service.status().handshakes_failed > 0)
        for _ in range(5):
            rig.service.turn()
        assert stranger.poll(200) == 0  # no table, no lease, no status
    status = rig.service.status()
    assert rig.servers() == ["s/0"]
    assert status.refused_messages == 0  # nothing of it came so far
    assert in_command(good)
    assert said(caplog, "(said once; counted as handshakes_failed)") == 1


@pytest.mark.parametrize(
    "greeting",
    [b"\x01\x00", b"\xff" + bytes(8) + b"\x7f\x00\x05\x00\x00", b"\xff" + bytes(8) + b"\x7f\x01\x05\x00\x00", b"GET /"],
    ids=["ZMTP 1.0", "ZMTP 2.0 (revision 0)", "ZMTP 2.0", "HTTP"],
)
def test_protocols_older_than_curve_are_no_way_in(greeting: bytes, rig: Rig) -> None:
    host, port = rig.endpoint.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port))) as old:
        old.sendall(greeting)
        frame = encode(hello(server_id="old"))
        with suppress(ConnectionError):  # it may be cut already
            old.sendall(b"\x00\xff" + len(frame).to_bytes(8, "big") + frame)
        for _ in range(5):
            rig.service.turn()
    assert rig.servers() == []
    assert rig.service.status().refused_messages == 0


def test_a_server_says_why_it_is_not_let_in_and_is_once_its_key_is_there(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    keys = rig.other("late")
    public = rig.made.authorized / "late.key"
    kept = public.read_bytes()
    public.unlink()
    agent = rig.agent(keys)
    rig.turn_until(lambda: agent.state().counters["handshakes_failed"] >= 2)  # it tries again
    assert said(caplog, "refuses this client's key: put NAME.key") == 1
    assert said(caplog, f"its public key {read_key_pair(keys.client)[0].decode()} is not in") == 1
    assert not in_command(agent)
    public.write_bytes(kept)
    rig.turn_until(lambda: in_command(agent))


@pytest.fixture
def quiet_stdin() -> Iterator[None]:
    """A standard input with nothing to read, as on a terminal: pytest's is at its end, and so readable at all times."""
    before = os.dup(0)
    reading, writing = os.pipe()
    os.dup2(reading, 0)
    yield
    os.dup2(before, 0)
    for descriptor in (before, reading, writing):
        os.close(descriptor)


def test_a_withdrawn_key_ends_the_connection_and_the_others_are_back_at_once(
    rig: Rig, caplog: pytest.LogCaptureFixture, quiet_stdin: None
) -> None:
    kept, withdrawn = rig.agent(rig.keys, "kept"), rig.agent(rig.other("withdrawn"), "withdrawn")
    rig.turn_until(lambda: in_command(kept) and in_command(withdrawn))
    (rig.made.authorized / "withdrawn.key").unlink()
    rig.turn_until(lambda: said(caplog, "withdrawn: withdrawn"))
    kept._queue.put(record(record_seq=0))
    rig.turn_until(lambda: {s.server: s.records for s in rig.service.status().servers}["kept/0"] == 1)
    withdrawn._queue.put(record(record_seq=0))
    rig.turn_until(lambda: withdrawn.state().counters["handshakes_failed"] > 0)
    for _ in range(10):
        rig.service.turn()
    assert {s.server: s.records for s in rig.service.status().servers}["withdrawn/0"] == 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_authentication_that_dies_lets_nobody_in_and_is_started_anew(
    rig: Rig, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    authenticator = rig.service._endpoint._authenticator
    assert authenticator is not None
    monkeypatch.setattr(authenticator, "allowed", None)  # the next question raises
    agent = rig.agent(rig.keys)
    until(lambda: not authenticator.is_alive())
    assert rig.service._endpoint.socket.poll(300) == 0
    rig.turn_until(lambda: in_command(agent))
    assert said(caplog, "the authentication of clients has failed") == 1


def test_a_server_with_keys_tells_nothing_to_a_controller_without(
    rig: Rig, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor to one that has another secret: whoever holds the address cannot read the steps or send a table."""
    _, secret = zmq.curve_keypair()
    for curve in (False, True):
        endpoint = rig.endpoint = f"tcp://127.0.0.1:{own_port()}"
        with zmq.Context() as context, context.socket(zmq.ROUTER) as impostor:
            impostor.linger = 0
            if curve:
                impostor.curve_server = True
                impostor.curve_secretkey = secret
            impostor.bind(endpoint)
            agent = rig.agent(rig.keys)
            until(lambda agent=agent: agent.state().counters["handshakes_failed"] > 0)
            assert impostor.poll(200) == 0
    assert said(caplog, "no connection to the controller at") >= 2


def test_a_key_file_that_goes_bad_is_said_and_the_thread_goes_on(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    keys = rig.other("careless")
    agent = rig.agent(keys)
    rig.turn_until(lambda: in_command(agent))
    Path(keys.client).chmod(0o644)
    rig.end_controller()
    until(lambda: said(caplog, "others may read key file"))
    Path(keys.client).chmod(0o600)
    rig.service = rig.start()
    rig.turn_until(lambda: in_command(agent))
    assert said(caplog, "others may read key file") == 1


def test_status_over_tcp(rig: Rig) -> None:
    config = rig.folder / "controller.toml"
    rig.end_controller()
    config.write_text(
        f'[controller]\nendpoint = "{rig.endpoint}"\nkey = "{rig.made.controller_pair}"\n'
        f'authorized_keys = "{rig.made.authorized}"\n[trace]\ndirectory = ""\n[prior]\ndirectory = ""\n'
    )
    command = [sys.executable, "-m", "specpilot.controller.cli"]
    with subprocess.Popen([*command, "controller", "--config", str(config)], stderr=subprocess.DEVNULL) as process:
        try:

            def answers() -> bool:
                try:
                    return fetch_status(rig.endpoint, 1.0, rig.keys).endpoint == rig.endpoint
                except StatusError:
                    return False

            until(answers)
            environment = {**os.environ, "SPECPILOT_CLIENT_KEY": rig.keys.client, "SPECPILOT_ENDPOINT": rig.endpoint}
            run = subprocess.run([*command, "status"], env=environment, capture_output=True, text=True)
            assert run.returncode == 1
            assert "tcp:// needs SPECPILOT_CLIENT_KEY and SPECPILOT_CONTROLLER_KEY" in run.stderr
            asked = [*command, "status", "--controller-key", rig.keys.controller]
            until(lambda: subprocess.run(asked, env=environment, capture_output=True).returncode == 0)
            wrong = rig.keys._replace(controller=str(make_keys(rig.folder / "others").controller_public))
            with pytest.raises(StatusError, match="is another controller's"):
                fetch_status(rig.endpoint, PATIENCE, wrong)
            stranger = rig.keys._replace(client=str(make_keys(rig.folder / "more").client_pair))
            with pytest.raises(StatusError, match="refuses this client's key"):
                fetch_status(rig.endpoint, PATIENCE, stranger)
        finally:
            process.terminate()


def test_a_second_controller_on_the_port_is_refused(rig: Rig) -> None:
    with pytest.raises(ConfigError, match="cannot be bound: Address already in use"):
        rig.start()


# -- key files --


def keygen(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "specpilot.controller.cli", "keygen", *arguments],
        capture_output=True,
        text=True,
        umask=0,
    )


def test_keygen_writes_private_files_says_what_to_set_and_overwrites_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "keys"
    first = keygen(str(folder))
    assert first.returncode == 0
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
    pair = ["client.key_secret", "controller.key", "controller.key_secret"]
    assert names == ["authorized", "authorized/client.key", *pair]
    assert {path.stat().st_mode & 0o777 for path in folder.rglob("*.key*")} == {0o600}
    assert {path.stat().st_mode & 0o777 for path in (folder, folder / "authorized")} == {0o700}
    held = {path: path.read_bytes() for path in folder.rglob("*.key*")}
    again = keygen(str(folder))
    assert (again.returncode, "is there already" in again.stderr) == (2, True)
    assert keygen(str(folder), "--client", "gpu-7").returncode == 0
    assert all(path.read_bytes() == content for path, content in held.items())
    for name in ("../x", "controller", "", "a/b", ".", "-x"):
        assert keygen(str(folder), f"--client={name}").returncode == 2
    # What it prints works as it stands.
    lines = [line.strip() for line in first.stdout.splitlines()]
    config = tmp_path / "c.toml"
    config.write_text("\n".join(lines[lines.index("[controller]") : lines.index("[controller]") + 4]))
    assert load_config(config).controller.key == str(folder / "controller.key_secret")
    environment = dict(line.split("=", 1) for line in lines if line.startswith("SPECPILOT_"))
    environment["SPECPILOT_ENDPOINT"] = environment["SPECPILOT_ENDPOINT"].replace("ADDRESS", "10.0.0.7")
    read_key_pair(Settings.from_environment(environment).client_key)
    read_public_key(Settings.from_environment(environment).controller_key)


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return make_keys(tmp_path / "keys")


@pytest.mark.parametrize(
    ("mode", "says"), [(0o604, "others may read"), (0o640, "others may read"), (0o602, "others may read")]
)
def test_a_secret_that_others_can_read_is_refused(mode: int, says: str, made: Made) -> None:
    made.client_pair.chmod(mode)
    with pytest.raises(EndpointError, match=says):
        read_key_pair(made.client_pair)
    made.controller_pair.chmod(mode)
    with pytest.raises(ConfigError, match=says):
        Endpoint("tcp://127.0.0.1:1", str(made.controller_pair), str(made.authorized))


def test_public_keys_may_be_read_but_not_written_by_others(made: Made) -> None:
    made.controller_public.chmod(0o644)
    read_public_key(made.controller_public)
    made.controller_public.chmod(0o666)
    with pytest.raises(EndpointError, match="others may write"):
        read_public_key(made.controller_public)
    made.authorized.chmod(0o777)
    with pytest.raises(ConfigError, match="let themselves in"):
        Endpoint("tcp://127.0.0.1:1", str(made.controller_pair), str(made.authorized))


def test_a_key_file_of_another_user_is_refused(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root's may be read by its group: Kubernetes mounts secrets so."""
    monkeypatch.setattr(os, "getuid", lambda: 1234)
    if made.client_pair.stat().st_uid == 0:
        read_key_pair(made.client_pair)
        made.client_pair.chmod(0o440)
        read_key_pair(made.client_pair)
        made.client_pair.chmod(0o444)
        with pytest.raises(EndpointError, match="others may read"):
            read_key_pair(made.client_pair)
        os.chown(made.client_pair, 77, 77)
    with pytest.raises(EndpointError, match="belongs to user"):
        read_key_pair(made.client_pair)


def test_what_is_no_key_file_is_refused_without_reading_on(made: Made, tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo, 0o600)
    public, secret = read_key_pair(made.client_pair)
    swapped = tmp_path / "swapped"
    swapped.touch(0o600)
    swapped.write_text(f'curve\n public-key = "{secret.decode()}"\n secret-key = "{public.decode()}"\n')
    for path in (fifo, Path("/dev/zero"), tmp_path, tmp_path / "none", swapped, made.controller_public):
        with pytest.raises(EndpointError):
            read_key_pair(path)


def test_keys_are_for_tcp_and_tcp_is_for_keys(tmp_path: Path) -> None:
    for environment in (
        {"SPECPILOT_ENDPOINT": "tcp://10.0.0.1:5757"},
        {"SPECPILOT_ENDPOINT": "tcp://10.0.0.1:5757", "SPECPILOT_CLIENT_KEY": "x"},
        {"SPECPILOT_ENDPOINT": "ipc:///run/c.ipc", "SPECPILOT_CLIENT_KEY": "x"},
        {"SPECPILOT_ENDPOINT": "tcp://*:5757", "SPECPILOT_CLIENT_KEY": "x", "SPECPILOT_CONTROLLER_KEY": "y"},
    ):
        with pytest.raises(SettingsError, match="SPECPILOT_ENDPOINT="):
            Settings.from_environment(environment)
    path = tmp_path / "c.toml"
    for text in ('endpoint = "tcp://*:5757"', 'endpoint = "tcp://*:5757"\nkey = "x"', 'key = "x"'):
        path.write_text(f"[controller]\n{text}\n")
        with pytest.raises(ConfigError, match=r"controller\.key"):
            load_config(path)


def test_missing_keys_end_the_start_on_rank_0_only(tmp_path: Path) -> None:
    settings = Settings(endpoint="tcp://10.0.0.1:5757", client_key=str(tmp_path / "x"), controller_key="y")
    with pytest.raises(EndpointError, match="No such file"):
        Agent(settings, TablePolicy(settings, [0, 1], 1)).start(ServerFacts("s", tp_size=2))
    Agent(settings, TablePolicy(settings, [0, 1], 1)).start(ServerFacts("s", rank=1, tp_size=2))


# -- ipc --


@pytest.mark.parametrize(
    "endpoint",
    ["", "ipc://@name", "ipc://", "ipc:///", "ipc:///run/", "ipc:///a\0b", "ipc://*", "ipc:///" + "x" * 107,
     "inproc://x", "udp://127.0.0.1:1", "tcp://:1", "tcp://h:0", "tcp://h:65536", "tcp://h:*", "tcp://h;x:1",
     "tcp://h:1\n", "TCP://h:1", "tcp://h:1:1", "pgm://x"],
)  # fmt: skip
def test_endpoints_that_nobody_guards_are_refused(endpoint: str) -> None:
    with pytest.raises(EndpointError):
        check_endpoint(endpoint)


def test_a_folder_that_others_write_into_is_not_connected_to(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    settings = Settings(endpoint=f"ipc://{folder}/c.ipc", min_table_interval_seconds=0.0)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as squatter:
        squatter.linger = 0
        squatter.bind(settings.endpoint)
        agent = Agent(settings, TablePolicy(settings, [0, 1], 1))
        agent.start(ServerFacts("s"))
        until(lambda: said(caplog, "others may write into the socket's folder"))
        assert squatter.poll(200) == 0
        with pytest.raises(StatusError, match="others may write"):
            fetch_status(settings.endpoint, 0.5)
    folder.chmod(0o700)
    own = ControllerConfig(endpoint=settings.endpoint)
    service = Service(Config(controller=own, policy=ThresholdPolicy(5), trace=TraceConfig(directory="")))
    until(lambda: service.turn() or in_command(agent))
    agent.stop()
    service.stop()
    service.run()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_a_folder_or_a_link_of_another_user_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    theirs.mkdir(mode=0o700)
    ours.mkdir(mode=0o700)
    os.chown(theirs, 77, 77)
    own_link, their_link = tmp_path / "own", tmp_path / "their"
    own_link.symlink_to(ours)
    their_link.symlink_to(ours)
    os.chown(their_link, 77, 77, follow_symlinks=False)
    Endpoint(f"ipc://{own_link}/c.ipc").close()
    for folder in (theirs, their_link):
        with pytest.raises(ConfigError, match="user 77"):
            Endpoint(f"ipc://{folder}/c.ipc")
    connection.check_folder(theirs, any_owner=True)  # a server that runs as root, beside a controller that does not
    monkeypatch.setattr(os, "getuid", lambda: 1234)
    for folder in (theirs, their_link):
        with pytest.raises(EndpointError, match="user 77"):
            connection.check_folder(folder)


def test_what_is_no_socket_is_not_removed(tmp_path: Path) -> None:
    """ZMQ would: it unlinks whatever lies at the path."""
    precious = tmp_path / "notes.txt"
    precious.write_text("x")
    (tmp_path / "link.ipc").symlink_to(precious)
    for name in ("notes.txt", "link.ipc"):
        with pytest.raises(ConfigError, match="is no socket"):
            Endpoint(f"ipc://{tmp_path}/{name}")
    assert precious.read_text() == "x"
    (tmp_path / "c.ipc.lock").symlink_to(precious)
    with pytest.raises(ConfigError, match=r"c\.ipc\.lock cannot be opened"):
        Endpoint(f"ipc://{tmp_path}/c.ipc")
    assert precious.read_text() == "x"


# -- floods --


@pytest.mark.slow
@pytest.mark.parametrize("over", ["ipc", "tcp"])
def test_a_flood_from_one_peer_starves_nobody_and_fills_no_memory(over: str, rig: Rig) -> None:
    """It sends the largest messages there are, as fast as they go; another server's lease is renewed throughout."""
    if over == "ipc":
        rig.end_controller()
        rig.endpoint = f"ipc://{rig.folder}/c.ipc"
        rig.service = rig.start()
    good = rig.agent(rig.keys if over == "tcp" else KeyFiles())
    rig.turn_until(lambda: in_command(good))
    largest = encode(StepBatch([record(accepted_drafts=[3] * 4000, batch_size=4000)] * 200, 0))
    assert len(largest) > 0.7 * MAX_MESSAGE_BYTES
    process = psutil.Process()
    with zmq.Context() as context, context.socket(zmq.DEALER) as flooder:
        flooder.linger = 0
        flooder.sndhwm = 64
        if over == "tcp":
            flooder.curve_publickey, flooder.curve_secretkey = read_key_pair(rig.other("flooder").client)
            flooder.curve_serverkey = read_public_key(rig.made.controller_public)
            rig.turn_until(lambda: "flooder" in rig.service._endpoint._allowed.values())
        flooder.connect(rig.endpoint)
        flooder.send(encode(hello(server_id="flooder")))
        rig.turn_until(lambda: len(rig.servers()) == 2)
        done = threading.Event()
        sent = []

        def flood() -> None:
            while not done.is_set():
                try:
                    flooder.send(largest, zmq.NOBLOCK)
                    sent.append(1)
                except zmq.Again:
                    time.sleep(0.001)

        thread = threading.Thread(target=flood)
        before, seen = process.memory_info().rss, 0
        assert good._source is not None
        mailbox = good._source._mailbox
        renewals = {mailbox.lease}
        thread.start()
        try:
            while len(sent) <= 100 or len(renewals) < 3:
                renewals.add(mailbox.lease)
                good._queue.put(record(record_seq=seen))
                seen += 1
                rig.service.turn()
                in_command(good)
                assert process.memory_info().rss - before < 256 << 20
        finally:
            done.set()
            thread.join()
    assert good.policy.lease_expiries == 0
    rig.turn_until(lambda: next(s.records for s in rig.service.status().servers if s.server == "s/0") == seen)


@pytest.mark.slow
def test_invented_names_and_silent_peers_are_bounded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    own = ControllerConfig(endpoint=f"ipc://{tmp_path}/c.ipc")
    service = Service(Config(controller=own, policy=ThresholdPolicy(5), trace=TraceConfig(directory="")))
    big = encode(StepBatch([record(accepted_drafts=[3] * 4000)] * 100, 0))
    state = HookState("i", DecisionSource.TABLE, 1, 1, 1, 3, 1, {}, "")
    for peer in range(SERVERS + 50):
        address = peer.to_bytes(4, "big")
        for frame in (*[big] * (3 if peer > SERVERS - 80 else 0), *[encode(state)] * 100):
            service._receive([b"x" + address, frame])
        service._receive([address, encode(hello(server_id=f"s{peer}"))])
        service._receive([b"y" + address, encode(hello(server_id="s0", instance=f"rival {peer}"))])
    assert len(service._sessions) == SERVERS
    assert len(service._router.strangers) <= STRANGERS
    assert sum(stranger.held_bytes for stranger in service._router.strangers.values()) <= STRANGERS << 20
    assert service.status().refused_messages == 50
    assert said(caplog, "one server too many") == 1
    service.stop()
    service.run()


def test_a_storm_of_bad_handshakes_leaves_the_controller_as_it_was(rig: Rig) -> None:
    agent = rig.agent(rig.keys)
    rig.turn_until(lambda: in_command(agent))
    process = psutil.Process()
    descriptors = process.num_fds()
    host, port = rig.endpoint.removeprefix("tcp://").split(":")
    for _ in range(40):
        for _ in range(25):
            with socket.create_connection((host, int(port))) as probe:
                probe.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48))
        rig.service.turn()
    rig.turn_until(lambda: process.num_fds() <= descriptors + 2)
    assert rig.service.status().handshakes_failed >= 900
    assert in_command(agent)
    assert agent.policy.lease_expiries == 0


# -- code --

FORBIDDEN = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "jsonpickle"}


def test_nothing_is_unpickled_or_evaluated() -> None:
    found = []
    for path in (
        path for folder in ("controller", "policies", "sglang_hooks") for path in (ROOT / folder).rglob("*.py")
    ):
        for node in ast.walk(ast.parse(path.read_text())):
            where = f"{path.name}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = {getattr(node, "module", "") or "", *(alias.name for alias in node.names)}
                found += [where for name in names if name.split(".")[0] in FORBIDDEN]
            elif isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                keywords = {word.arg: ast.unparse(word.value) for word in node.keywords}
                bad = (
                    called in ("eval", "exec", "compile", "__import__", "yaml.load", "os.system")
                    or called.endswith((".recv_pyobj", ".send_pyobj"))
                    or (called == "torch.load" and keywords.get("weights_only") != "True")
                    or (called == "np.load" and keywords.get("allow_pickle") != "False")
                    or keywords.get("shell") == "True"
                )
                found += [f"{where} {called}"] * bad
    assert found == []
