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

import psycopg
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
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "env")
    python = tmp_path / "env/bin/python3"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-index", "--disable-pip-version-check", wheel)
    program = """
import asyncio, sys
import oncegate, oncegate.wsgi
ran = []
@oncegate.idempotent(name="work", key=lambda key: key, store=oncegate.MemoryStore())
def work(key):
    ran.append(key)
    return len(ran)
assert [work("k"), work("k")] == [1, 1]
others = {name.partition(".")[0] for name in sys.modules} & {"psycopg", "redis", "fastapi", "django", "httpx"}
assert not others, others
print(oncegate.__version__)
"""
    assert run(python, "-c", program, cwd=tmp_path).strip() == "0.1.0"


README = (PROJECT / "README.md").read_text()
START, STORES = README.split("## Stores")[0], README.split("## Stores")[1].split("## Frameworks")[0]
(START_PROGRAM,) = re.findall(r"```python\n(.*?)```", START, re.DOTALL)
POSTGRES_PROGRAM, ASYNCPG_PROGRAM = re.findall(r"```python\n(.*?)```", STORES, re.DOTALL)
PROGRAMS = {"start": START_PROGRAM, "psycopg": POSTGRES_PROGRAM, "asyncpg": ASYNCPG_PROGRAM}


def test_the_start_of_the_readme(tmp_path: Path) -> None:
    (command,) = re.findall(r"```sh\n(.*?)```", START, re.DOTALL)
    assert len(START_PROGRAM.strip().splitlines()) <= 10
    _, *arguments, url = shlex.split(command)
    assert arguments == ["-i", "-X", "POST", "-H", "Idempotency-Key: order-123"]
    sends_twice(START_PROGRAM, url, {"Idempotency-Key": "order-123"}, tmp_path)


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
def test_fastapi_with_postgres_as_in_the_readme(driver: str, tmp_path: Path, postgres: servers.Server) -> None:
    """Its pool, its role and the rights of its role are those of the README."""
    (grants,) = re.findall(r"```sql\n(.*?)```", STORES, re.DOTALL)
    with psycopg.connect(postgres.url, autocommit=True) as owner:
        owner.execute(f"CREATE ROLE shop_{driver} LOGIN")
        owner.execute(grants.replace("TO shop", f"TO shop_{driver}"))
    url, program = "postgresql://shop@127.0.0.1:5432/shop", PROGRAMS[driver]
    assert url in program
    program = program.replace(url, postgres.url.replace("owner@", f"shop_{driver}@"))
    fields = {"Idempotency-Key": f"order-{driver}", "X-Api-Key": "a-key-of-a-shop"}
    sends_twice(program, "http://127.0.0.1:8000/charges?amount=5", fields, tmp_path)


def test_the_programs_of_the_readme_are_typed(tmp_path: Path) -> None:
    names = [f"{name}_shop.py" for name in PROGRAMS]
    for name, program in zip(names, PROGRAMS.values(), strict=True):
        (tmp_path / name).write_text(program)
    # asyncpg itself is not typed.
    options = ["--strict", "--disable-error-code", "import-untyped", "--cache-dir", PROJECT / ".mypy_cache"]
    run(sys.executable, "-m", "mypy", *options, *names, cwd=tmp_path)


def sends_twice(program: str, url: str, fields: dict[str, str], tmp_path: Path) -> None:
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
        replies = [servers.post(url.replace(":8000", f":{port}"), headers=fields, timeout=60) for _ in range(2)]
        assert [reply.json() for reply in replies] == [{"charged": 5}] * 2
        assert replies[1].headers["idempotent-replayed"] == "true"
    finally:
        shop.send_signal(signal.SIGTERM)
        printed = shop.communicate(timeout=20)[0].decode()
    assert printed.count("charging 5") == 1
