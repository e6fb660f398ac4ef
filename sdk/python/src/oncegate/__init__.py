"""One key, one effect: makes retries of requests safe.

The middleware for ASGI, WSGI and Django, the stores, functions, transactions, and the client's rules. Importing this package
needs no other package: those of a store or a framework are yours.
"""

from .asgi import IdempotencyMiddleware, attempt_of
from .engine import Attempt, drain, drain_blocking
from .errors import (
    ConfigError,
    InProgress,
    KeyReused,
    OncegateError,
    OutcomeUnknown,
    RecordCorrupt,
    ResponseSealed,
    StaleAttempt,
    StoreError,
    StoreRefused,
    StoreUnavailable,
    Undecodable,
    Unreplayable,
)
from .flow import current_attempt
from .functions import FunctionFailed, idempotent
from .identity import derived_key, downstream_key, new_key
from .ids import IdSecret
from .memory import MemoryStore
from .postgres import PostgresStore
from .redis import RedisStore
from .response import StoredResponse
from .transactions import blocking_transaction, complete, complete_blocking, sidecar_attempt, transaction

__version__ = "0.1.0"

__all__ = [
    "Attempt",
    "ConfigError",
    "FunctionFailed",
    "IdSecret",
    "IdempotencyMiddleware",
    "InProgress",
    "KeyReused",
    "MemoryStore",
    "OncegateError",
    "OutcomeUnknown",
    "PostgresStore",
    "RecordCorrupt",
    "RedisStore",
    "ResponseSealed",
    "StaleAttempt",
    "StoreError",
    "StoreRefused",
    "StoreUnavailable",
    "StoredResponse",
    "Undecodable",
    "Unreplayable",
    "attempt_of",
    "blocking_transaction",
    "complete",
    "complete_blocking",
    "current_attempt",
    "derived_key",
    "downstream_key",
    "drain",
    "drain_blocking",
    "idempotent",
    "new_key",
    "sidecar_attempt",
    "transaction",
]
