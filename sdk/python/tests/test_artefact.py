"""The built artefact, in an empty project; and the start of the README, taken literally."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import httpx
import pytest

import servers

PROJECT = Path(__file__).resolve().parents[1]


def run(*command: str | Path, **options: object) -> str:
    done = subprocess.run(command, capture_output=True, text=True, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stdout + done.stderr
    return str(done.stdout)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, PROJECT)
    (built,) = out.glob("*.whl")
    assert len(list(out.glob("*.tar.gz"))) == 1
    return built


def test_the_artefact_in_an_empty_project(wheel: Path, tmp_path: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {"oncegate/py.typed", "oncegate/contract.json", "oncegate/asgi.py"} <= set(names)
    assert not any("tests" in name or "cases" in name for name in names)
    run(sys.executable, "-m", "venv", tmp_path / "env")
    python = tmp_path / "env/bin/python3"
    run(python, "-m", "pip", "install", "--quiet", "--no-index", "--disable-pip-version-check", wheel)
    program = """
import asyncio, sys
import oncegate, oncegate.wsgi
ran = []
@oncegate.idempotent(key=lambda key: key, store=oncegate.MemoryStore())
def work(key):
    ran.append(key)
    return len(ran)
assert [work("k"), work("k")] == [1, 1]
others = {name.partition(".")[0] for name in sys.modules} & {"psycopg", "redis", "fastapi", "django", "httpx"}
assert not others, others
print(oncegate.__version__)
"""
    assert run(python, "-c", program, cwd=tmp_path).strip() == "0.1.0"


def test_the_start_of_the_readme(tmp_path: Path) -> None:
    start = (PROJECT / "README.md").read_text().split("## Stores")[0]
    (program,) = re.findall(r"```python\n(.*?)```", start, re.DOTALL)
    (command,) = re.findall(r"```sh\n(.*?)```", start, re.DOTALL)
    assert len(program.strip().splitlines()) <= 10
    (tmp_path / "shop.py").write_text(program)
    port = servers.free_port()
    shop = subprocess.Popen(
        [sys.executable, "-u", "-m", "uvicorn", "shop:app", "--port", str(port)],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    try:
        servers.wait_for(lambda: servers.is_open(port), "the shop of the README did not start")
        _, *arguments, url = shlex.split(command.replace(":8000", f":{port}"))
        assert arguments == ["-i", "-X", "POST", "-H", "Idempotency-Key: order-123"]
        replies = [httpx.post(url, headers={"Idempotency-Key": "order-123"}) for _ in range(2)]
        assert [reply.json() for reply in replies] == [{"charged": 5}] * 2
        assert replies[1].headers["idempotent-replayed"] == "true"
    finally:
        shop.send_signal(signal.SIGTERM)
        printed = shop.communicate(timeout=20)[0].decode()
    assert printed.count("charging 5") == 1
