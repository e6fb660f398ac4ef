"""PostgreSQL and Redis for tests: servers of their own, on free ports and temporary directories."""

from __future__ import annotations

import contextlib
import functools
import http.server
import os
import pwd
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

CONTRACT = Path(__file__).resolve().parents[3] / "crates/postgres/sql"


# No test speaks TLS. To read the trusted certificates for each request costs more processor time than most requests do.
get, post = functools.partial(httpx.get, verify=False), functools.partial(httpx.post, verify=False)


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


@functools.cache
def schema() -> str:
    """The contract, as `oncegate schema print postgres` prints it, if the tests have no program to print it."""
    own = os.environ.get("ONCEGATE_BIN")
    if own and Path(own).exists():
        return subprocess.run([own, "schema", "print", "postgres"], check=True, capture_output=True, text=True).stdout
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


def program() -> str | None:
    """The program `oncegate`, if it was built."""
    built = Path(__file__).resolve().parents[3] / "target/debug/oncegate"
    places = [os.environ.get("ONCEGATE_BIN"), str(built)]
    return next((place for place in places if place and Path(place).exists()), None)


class Sidecar:
    """A sidecar in front of a service that counts its executions."""

    def __init__(self, url: str, id_secret: str | None, *options: str) -> None:
        own = self
        self.executions = 0

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                own.executions += 1
                self.rfile.read(int(self.headers.get("content-length", 0)))
                body = b"made by the sidecar's service"
                self.send_response(201)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self.service = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.service.serve_forever, daemon=True).start()
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        secret = {"ONCEGATE_ID_SECRET": id_secret} if id_secret else {}
        self.process = subprocess.Popen(
            [program(), "proxy", f"--listen=127.0.0.1:{self.port}", "--admin=127.0.0.1:0", f"--store={url}",
             f"--to=http://127.0.0.1:{self.service.server_port}", "--scope=single-tenant", "--authority=ignore", *options],
            env={"PATH": os.environ["PATH"], **secret},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def __enter__(self) -> Sidecar:
        wait_for(lambda: self.process.poll() is not None or is_open(self.port), "the sidecar did not start", 60)
        assert self.process.poll() is None, "the sidecar ended"
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(20)
        self.service.shutdown()
        self.service.server_close()


@contextlib.contextmanager
def redis(*options: str) -> Iterator[Server]:
    place, port = tempfile.mkdtemp(prefix="oncegate-python-"), free_port()
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", place, *options]
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


class Cluster:
    """A Redis Cluster of three nodes without replicas."""

    def __init__(self, nodes: list[Server]) -> None:
        self.nodes = nodes

    def node(self, name: str) -> Server:
        """The node whose address is this one."""
        return next(node for node in self.nodes if name.endswith(f":{node.port}"))


@contextlib.contextmanager
def redis_cluster() -> Iterator[Cluster]:
    with contextlib.ExitStack() as stack:
        options = ["--cluster-enabled", "yes", "--cluster-node-timeout", "2000", "--cluster-require-full-coverage", "no"]
        nodes = [stack.enter_context(redis(*options, "--cluster-port", str(free_port()))) for _ in range(3)]
        addresses = [f"127.0.0.1:{node.port}" for node in nodes]
        subprocess.run(
            ["redis-cli", "--cluster", "create", *addresses, "--cluster-yes"],
            check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        )

        def is_ready(node: Server) -> bool:
            asked = ["redis-cli", "-p", str(node.port), "cluster", "info"]
            told = subprocess.run(asked, capture_output=True, text=True, check=False).stdout
            return "cluster_state:ok" in told and "cluster_known_nodes:3" in told

        for node in nodes:
            wait_for(lambda own=node: is_ready(own), "the nodes do not become a Cluster", 60)
        yield Cluster(nodes)
