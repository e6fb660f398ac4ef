// Records on PostgreSQL, by the functions of the contract (docs/reference/store-contract-postgres.md).
import { CorruptRecordError } from './response.js';
import { SettingsError } from './settings.js';
import {
  DelayedError,
  StoreFullError,
  StoreSetupError,
  type Claim,
  type ClaimReply,
  type CompletionState,
  type OwnerReply,
  type RecordView,
  type Store,
} from './store.js';

/** A connection or a pool of `pg`, or anything with this method. */
export interface Queryable {
  query(text: string, values: unknown[]): Promise<{ rows: unknown[] }>;
}

type Row = Readonly<Record<string, unknown>>;

interface Pool extends Queryable {
  totalCount: number;
  idleCount: number;
  waitingCount: number;
  options: { max: number };
}

/**
 * Runs one statement on a pool of `pg`, which closes the connection of a statement that fails, also because its time is over.
 *
 * @throws {DelayedError} if the time is over, and all connections of the pool were in use at the beginning
 */
function timedQuery(pool: Pool, text: string, values: unknown[], ms: number): Promise<{ rows: unknown[] }> {
  const waits = pool.waitingCount > 0 || (pool.idleCount === 0 && pool.totalCount >= pool.options.max);
  const { query } = pool as unknown as { query: (config: object) => Promise<{ rows: unknown[] }> };
  const reply = query.call(pool, { text, values, query_timeout: ms });
  if (!waits) return reply;
  let timer: NodeJS.Timeout | undefined;
  const late = new Promise<never>((_, reject) => {
    timer = setTimeout(() => { reject(new DelayedError('no connection of the pool was free in time')); }, ms);
  });
  return Promise.race([reply, late]).finally(() => { clearTimeout(timer); });
}

/** Runs one call of the contract, and gives its row. */
export async function callContract(client: Queryable, text: string, values: unknown[]): Promise<Row | undefined> {
  try {
    return (await client.query(text, values)).rows[0] as Row | undefined;
  } catch (error) {
    throw translated(error);
  }
}

const GRANTS = '; see "Grants" in docs/reference/store-contract-postgres.md for what the role of the service needs';

function translated(error: unknown): unknown {
  const { code } = error as { code?: unknown };
  switch (code) {
    case 'OG003':
      return new CorruptRecordError('the record has a state or a fingerprint that this version of the contract does not know');
    case '53100':
      return new StoreFullError('the disk of PostgreSQL is full');
    case '53200':
      return new StoreFullError('PostgreSQL has no memory', true);
    case '25006':
      return new StoreFullError('PostgreSQL is a standby, or only reads', true);
    case '42883':
    case '3F000':
      return new StoreSetupError(
        'the database does not have the contract that this library needs: run `oncegate schema apply postgres --url …` as the owner of the database',
      );
    case '42501':
      return new StoreSetupError(`the role lacks a right (${String((error as { message?: unknown }).message)})${GRANTS}`);
    default:
      return error;
  }
}

function bytes(value: unknown): Buffer {
  if (value instanceof Uint8Array) return Buffer.from(value.buffer, value.byteOffset, value.byteLength);
  throw new CorruptRecordError('PostgreSQL returned a value that is no bytea');
}

/** A `bigint` column: a text with `pg`, unless a parser was set. */
function decimal(value: unknown): string {
  return typeof value === 'string' ? value : String(value);
}

/** Reads the reply of `claim` and `reserve_or_claim`. */
export function claimReply(row: Row | undefined): ClaimReply {
  switch (row?.['outcome']) {
    case 'execute':
      return {
        outcome: 'execute',
        token: decimal(row['token']),
        attempts: Number(row['attempts']),
        afterAbandoned: row['after_abandoned'] === true,
      };
    case 'replay':
      return { outcome: 'replay', response: bytes(row['response']) };
    case 'in-progress':
      return { outcome: 'in-progress', leaseLeftMs: Number(row['lease_left_ms']) };
    case 'mismatch':
    case 'unknown':
    case 'unreplayable':
    case 'locked':
      return { outcome: row['outcome'] };
    default:
      throw new StoreSetupError('the database gave a reply that this library does not know; upgrade it');
  }
}

/** The version of the contract, and the functions of a store that the role may not call; null if there is none. */
const STATE = `SELECT oncegate.contract_version() AS version,
  EXISTS (SELECT FROM pg_proc AS p JOIN pg_namespace AS n ON n.oid = p.pronamespace WHERE n.nspname = 'oncegate'
    AND p.proname = 'purge' AND has_function_privilege(p.oid, 'EXECUTE')) AS may_purge, (SELECT string_agg(DISTINCT 'oncegate.' || p.proname::text, ', ')
  FROM pg_proc AS p JOIN pg_namespace AS n ON n.oid = p.pronamespace WHERE n.nspname = 'oncegate'
  AND p.proname IN ('claim', 'renew', 'complete_if_owner', 'release', 'lookup')
  AND NOT has_function_privilege(p.oid, 'EXECUTE')) AS missing`;

/** The rows that one statement removes at most, and the pauses after one that removed fewer, and one that found more than it may. */
const PURGE_ROWS = 500;
const PURGE_EVERY_MS = 10_000;
const PURGE_SOON_MS = 250;

/**
 * Keeps records in PostgreSQL 14 or later. Apply the contract first: `oncegate schema apply postgres`. While it is used, it removes
 * records whose retention is over, of all programs on the database, if its role may call `purge`.
 */
export class PostgresStore implements Store {
  readonly name = 'postgres';
  readonly claimsMayCommitLate = true;
  private checked: Promise<void> | undefined;
  private purgesAt = -Infinity;
  private readonly client: Queryable;
  private timeoutMs: number | undefined;
  private warn: (message: string) => void = () => undefined;

  /**
   * @param pool a `Pool` of `pg`. Give it `connectionTimeoutMillis`, so that a pool without free connections is noticed. A connection of
   *   the pool on which a command has no reply in time is closed, because a connection that was cut may stay silent for ever
   */
  constructor(pool: Queryable) {
    if (typeof (pool as Partial<Queryable> | undefined)?.query !== 'function') {
      throw new SettingsError('PostgresStore: give a pool of `pg`: new PostgresStore(new pg.Pool({ connectionString }))');
    }
    this.client = 'totalCount' in pool ? { query: (text, values) => timedQuery(pool as Pool, text, values, this.timeoutMs ?? 2000) } : pool;
  }

  useWarnings(warn: (message: string) => void): void {
    this.warn = warn;
  }

  useTimeout(ms: number): void {
    this.timeoutMs = Math.max(this.timeoutMs ?? 0, ms);
  }

  /** Checks the version of the contract. The first claim does so, too. */
  check(): Promise<void> {
    this.checked ??= (async () => {
      const row = await callContract(this.client, STATE, []);
      if (Number(row?.['version']) !== 1) {
        throw new StoreSetupError(
          `the database has version ${String(row?.['version'])} of the contract, and this library needs version 1: run \`oncegate schema apply postgres\`, or upgrade the library`,
        );
      }
      // Found after the first effect, a missing right would leave its outcome unknown.
      if ((row?.['missing'] ?? null) !== null) {
        throw new StoreSetupError(`the role may not call ${String(row?.['missing'])}${GRANTS}`);
      }
      if (row?.['may_purge'] !== true) {
        this.purgesAt = Infinity;
        this.warn(
          'records are not removed after their retention, because the role may not call oncegate.purge: a sidecar on the database does so, or ' +
            '`SELECT oncegate.purge(1000)` in a job',
        );
      }
    })().catch((error: unknown) => {
      this.checked = undefined;
      throw error;
    });
    return this.checked;
  }

  async claim(id: Buffer, claim: Claim): Promise<ClaimReply> {
    await this.check();
    this.purge();
    return claimReply(await callContract(this.client, 'SELECT * FROM oncegate.claim($1, $2, $3, $4, $5, $6, $7, $8, $9)', claimValues(id, claim)));
  }

  /** Removes some records whose retention is over, in the background. */
  private purge(): void {
    const now = performance.now();
    if (now < this.purgesAt) return;
    this.purgesAt = now + PURGE_EVERY_MS;
    callContract(this.client, 'SELECT oncegate.purge($1) AS purged', [PURGE_ROWS]).then(
      (row) => { if (Number(row?.['purged']) >= PURGE_ROWS) this.purgesAt = performance.now() + PURGE_SOON_MS; },
      // The database is away, or busy: the next one removes them.
      () => undefined,
    );
  }

  async renew(id: Buffer, token: string, leaseMs: number, retentionMs: number): Promise<OwnerReply> {
    return ownerReply(await callContract(this.client, 'SELECT outcome FROM oncegate.renew($1, $2, $3, $4)', [id, token, leaseMs, retentionMs]));
  }

  async complete(
    id: Buffer,
    token: string,
    state: CompletionState,
    response: Buffer | undefined,
    retentionMs: number,
  ): Promise<OwnerReply> {
    const values = [id, token, state, response ?? null, retentionMs];
    return ownerReply(await callContract(this.client, 'SELECT outcome FROM oncegate.complete_if_owner($1, $2, $3, $4, $5)', values));
  }

  async release(id: Buffer, token: string, retentionMs: number): Promise<OwnerReply> {
    return ownerReply(await callContract(this.client, 'SELECT outcome FROM oncegate.release($1, $2, $3)', [id, token, retentionMs]));
  }

  async lookup(id: Buffer): Promise<RecordView | undefined> {
    const row = await callContract(this.client, `SELECT ${RECORD_COLUMNS} FROM oncegate.lookup($1)`, [id]);
    return row === undefined ? undefined : recordView(row);
  }
}

/** The columns that {@link recordView} reads. */
export const RECORD_COLUMNS = 'state, fingerprint, token, attempt, by_operator, response, operation, lease_until, expires_at';

/** Reads a record. */
export function recordView(row: Row): RecordView {
  return {
    state: String(row['state']),
    fingerprint: bytes(row['fingerprint']),
    token: decimal(row['token']),
    attempt: row['attempt'] === null ? undefined : bytes(row['attempt']),
    byOperator: row['by_operator'] === true,
    response: row['response'] === null ? undefined : bytes(row['response']),
    operation: String(row['operation']),
    leaseUntil: row['lease_until'] === null ? undefined : Number(row['lease_until']),
    expiresAt: Number(row['expires_at']),
  };
}

export function claimValues(id: Buffer, claim: Claim): unknown[] {
  const { attempt, fingerprint, leaseMs, retentionMs, onAbandoned, caller, operation, keyTag } = claim;
  return [id, attempt, fingerprint, leaseMs, retentionMs, onAbandoned, caller, operation, keyTag];
}

function ownerReply(row: Row | undefined): OwnerReply {
  switch (row?.['outcome']) {
    case 'fenced':
    case 'locked':
      return row['outcome'];
    case 'renewed':
    case 'completed':
    case 'released':
      return 'done';
    default:
      throw new StoreSetupError('the database gave a reply that this library does not know; upgrade it');
  }
}
