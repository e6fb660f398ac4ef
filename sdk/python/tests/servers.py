"""PostgreSQL and Redis for tests: servers of their own, on free ports and temporary directories."""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

CONTRACT = Path(__file__).resolve().parents[3] / "crates/postgres/sql"


def free_port() -> int:
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        return int(own.getsockname()[1])


def wait_for(condition, what: str, seconds: float = 20):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return
        time.sleep(0.02)
    raise TimeoutError(what)


def is_open(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 0.5):
        return True
    return False


class Server:
    def __init__(self, process: subprocess.Popen[bytes], port: int, url: str) -> None:
        self.process, self.port, self.url = process, port, url

    def _signal(self, number: int) -> None:
        """To the server, and to the processes of its sessions."""
        own = self.process.pid
        for process in [own, *map(int, Path(f"/proc/{own}/task/{own}/children").read_text().split())]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)


def _as_user() -> dict[str, int]:
    if os.getuid() != 0:
        return {}
    user = pwd.getpwnam("postgres")
    return {"user": user.pw_uid, "group": user.pw_gid}


def postgres_bin() -> Path | None:
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    return found[-1].parent if found else None


@contextlib.contextmanager
def postgres() -> Iterator[Server]:
    binaries = postgres_bin()
    assert binaries, "PostgreSQL is not installed (Debian package: postgresql)"
    place = Path(tempfile.mkdtemp(prefix="oncegate-python-"))
    user = _as_user()
    if user:
        os.chown(place, user["user"], user["group"])
    environment = {"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8"}
    data, port = place / "data", free_port()
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    try:
        subprocess.run(
            [binaries / "initdb", "-D", data, "-U", "owner", "-A", "trust", "-E", "UTF8", "--no-sync"],
            check=True, env=environment, cwd=place, **user, **quiet,
        )
        process = subprocess.Popen(
            [binaries / "postgres", "-D", data, "-p", str(port), "-h", "127.0.0.1", "-k", place, "-F"],
            env=environment, cwd=place, **user, **quiet,
        )
        url = f"postgresql://owner@127.0.0.1:{port}/postgres"
        try:
            wait_for(lambda: is_open(port), "PostgreSQL did not start")
            _apply(url)
            yield Server(process, port, url)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGCONT)
                process.send_signal(signal.SIGQUIT)
            process.wait(20)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def schema() -> str:
    """The contract, as `oncegate schema print postgres` prints it, if the tests have no program to print it."""
    program = os.environ.get("ONCEGATE_BIN")
    if program:
        return subprocess.run([program, "schema", "print", "postgres"], check=True, capture_output=True, text=True).stdout
    source = (CONTRACT.parent / "src/schema/mod.rs").read_text()
    order = re.findall(r'include_str!\("[^"]*sql/(\w+)\.sql"\)', source)
    text = "\n".join((CONTRACT / f"{name}.sql").read_text() for name in dict.fromkeys(order))
    return f"BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE;\n{text}\nCOMMIT;"


def _apply(url: str) -> None:
    import psycopg

    deadline = time.monotonic() + 20
    while True:
        try:
            connection = psycopg.connect(url)
            break
        except psycopg.OperationalError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
    connection.autocommit = True
    with connection:
        connection.execute(schema())  # type: ignore[arg-type]


@contextlib.contextmanager
def redis() -> Iterator[Server]:
    place, port = tempfile.mkdtemp(prefix="oncegate-python-"), free_port()
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", place]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        wait_for(lambda: is_open(port), "Redis did not start")
        yield Server(process, port, f"redis://127.0.0.1:{port}/0")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGCONT)
            process.kill()
        process.wait(20)
        shutil.rmtree(place, ignore_errors=True)
