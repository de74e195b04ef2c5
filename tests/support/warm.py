"""Programs that need SGLang, run in forks of one process that has imported it: an import takes a core 20 seconds.

    python -m tests.support.warm SOCKET                          the process that forks, one for a whole test run
    python -I -S tests/support/warm.py SOCKET -m MODULE ...      one program, as ``python -m MODULE ...`` would run it
    python -I -S tests/support/warm.py SOCKET -c CODE ...

The workers of pytest-xdist are such programs, too (``conftest.py`` in the repository's root).

What stands for a program passes signals on to it, ends when it ends and as it ends, and takes it along when it is
killed itself. The process that forks ends with the last that is connected to it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).parents[2]
IMPORTED = (
    "sglang.srt.managers.scheduler",
    "sglang.srt.entrypoints.engine",
    "sglang.benchmark.serving",
    "torch.distributed",
)
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

# -- the tests --

_held: list[Any] = []


def program(*arguments: str) -> list[str]:
    """Return the command line of ``python ARGUMENTS``, which begins with -m MODULE or -c CODE, for subprocess."""
    return [sys.executable, "-I", "-S", __file__, str(_address()), *arguments]


def _address() -> Path:
    """Return the socket of the process that forks, which all workers of a test run share."""
    import fcntl
    import tempfile

    folder = Path(tempfile.gettempdir()) / f"specpilot-warm-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    # Inherited by workers, and by whatever they start.
    address = Path(os.environ.setdefault("WARM_SOCKET", str(folder / str(os.getpid()))))
    if _held:
        return address
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.connect(os.fspath(address))
        except OSError:
            address.unlink(missing_ok=True)
            log = address.with_suffix(".log")
            _held.append(
                subprocess.Popen(
                    [sys.executable, "-m", "tests.support.warm", str(address)],
                    stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log.open("w"), cwd=ROOT,
                    env=_environment(os.environ), start_new_session=True,
                )
            )  # fmt: skip
            while connection.connect_ex(os.fspath(address)):
                assert _held[0].poll() is None, log.read_text()
                time.sleep(0.01)
    _held.append(connection)
    subprocess.run([sys.executable, "-I", "-S", __file__, str(address), "-c", ""], check=True)  # the import is done
    return address


def _environment(of: Mapping[str, str]) -> dict[str, str]:
    own = {name: value for name, value in of.items() if not name.startswith("SPECPILOT_")}
    # No program asks the network for a model: it waits for a minute where there is none.
    return own | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


# -- the process that forks --


def serve(address: str) -> None:
    """Import SGLang and fork, until nobody is connected any more; in a fork, run the program and return."""
    import importlib
    import selectors

    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(address)
    listener.listen(64)
    for name in IMPORTED:
        importlib.import_module(name)
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    ended, end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    selector.register(ended, selectors.EVENT_READ)
    signal.set_wakeup_fd(end)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    running: dict[int, socket.socket] = {}
    connected: set[socket.socket] = set()
    while True:
        for key, _ in selector.select():
            if key.fileobj is listener:
                connection, _ = listener.accept()
                selector.register(connection, selectors.EVENT_READ)
                connected.add(connection)
            elif key.fileobj == ended:
                os.read(ended, 1 << 16)
            else:
                connection = key.fileobj  # type: ignore[assignment]
                try:
                    message, files, _, _ = socket.recv_fds(connection, 1 << 20, 3)
                except ConnectionError:
                    message, files = b"", []
                if message:
                    pid = os.fork()
                    if not pid:
                        signal.set_wakeup_fd(-1)
                        for other in (listener, selector, *connected):
                            other.close()
                        _run(message, files)
                        return
                    for file in files:
                        os.close(file)
                    running[pid] = connection
                    connection.send(str(pid).encode())
                else:
                    for pid in [pid for pid, its in running.items() if its is connection]:
                        os.kill(pid, signal.SIGKILL)
                    selector.unregister(connection)
                    connected.discard(connection)
                    connection.close()
        while running:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            connection = running.pop(pid)
            if connection in connected:
                connection.send(str(status).encode())
        if not connected:
            for path in (Path(address), Path(address).with_suffix(".log")):
                path.unlink(missing_ok=True)
            return


def _run(message: bytes, files: list[int]) -> None:
    """Be the program from here on."""
    import runpy
    import types

    from tests.faults.shifted import end_with_parent

    end_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    asked = json.loads(message)
    os.chdir(asked["folder"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    sys.path[:0] = ["", *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    how, what, *arguments = asked["arguments"]
    sys.argv[:] = [how, *arguments]
    if how == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(what, "<string>", "exec"), main.__dict__)


# -- what stands for a program --


def stand_for(address: str, arguments: list[str]) -> NoReturn:
    """Have the program run, pass signals on, and end as it does."""
    while arguments[0] in ("-u", "-B"):
        del arguments[0]  # how the process that forks was started counts
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(address)
    asked = {"arguments": arguments, "folder": os.getcwd(), "environment": dict(os.environ)}
    socket.send_fds(connection, [json.dumps(asked).encode()], [0, 1, 2])
    pid = int(connection.recv(64))
    for number in PASSED_ON:
        signal.signal(number, lambda number, _: os.kill(pid, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    status = os.waitstatus_to_exitcode(int(connection.recv(64)))
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


if __name__ == "__main__":
    if sys.argv[2:]:
        stand_for(sys.argv[1], sys.argv[2:])
    serve(sys.argv[1])
