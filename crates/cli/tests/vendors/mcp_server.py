"""An MCP server whose tools count their effects in a file. Arguments: its port, and the directory with the file and the gate."""

import pathlib
import sys
from typing import Annotated

import anyio
from mcp.server.mcpserver import Context, Elicit, MCPServer, Resolve
from pydantic import BaseModel

PORT, DIRECTORY = int(sys.argv[1]), pathlib.Path(sys.argv[2])
EFFECTS, GATE = DIRECTORY / "effects", DIRECTORY / "gate"
server = MCPServer("shop", log_level="ERROR")


def effect(name: str) -> str:
    with EFFECTS.open("a") as effects:
        effects.write(name + "\n")
    return f"{name} {len(EFFECTS.read_text().splitlines())}"


async def wait_at_gate() -> None:
    while GATE.exists():
        await anyio.sleep(0.01)


@server.tool()
async def pay(amount: int, context: Context) -> str:
    """Pays, and reports its progress, so that the response is a stream of events."""
    await context.report_progress(1, 2, "begun")
    receipt = effect("paid")
    await wait_at_gate()
    await context.report_progress(2, 2, "done")
    return receipt


@server.tool()
async def order(item: str, count: int = 1) -> dict[str, str]:
    """Orders. Its response is one message, unless it takes long."""
    receipt = effect("ordered")
    await wait_at_gate()
    return {"receipt": receipt, "item": item}


@server.tool()
async def fail(amount: int) -> str:
    """Fails after an effect."""
    effect("failed")
    raise ValueError("the bank is closed")


@server.tool()
async def get_orders() -> str:
    """Reads."""
    return effect("read")


class Consent(BaseModel):
    agreed: bool


async def ask(amount: int) -> Elicit[Consent]:
    return Elicit(f"Pay {amount}?", Consent)


@server.tool()
async def pay_with_consent(amount: int, consent: Annotated[Consent, Resolve(ask)]) -> str:
    """Pays after a question to the user."""
    return effect("paid with consent") if consent.agreed else "not paid"


@server.tool()
async def pay_then_ask(amount: int, context: Context) -> str:
    """Asks after its effect. If the client cannot answer, the call ends with an error of the protocol."""
    receipt = effect("paid, then asked")
    await context.elicit("Was it right?", Consent)
    return receipt


server.run("streamable-http", port=PORT)
