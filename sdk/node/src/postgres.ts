// Records on PostgreSQL, by the functions of the contract (docs/reference/store-contract-postgres.md).
import { CorruptRecordError } from './response.js';
import {
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

/** Runs one call of the contract, and gives its row. */
export async function callContract(client: Queryable, text: string, values: unknown[]): Promise<Row | undefined> {
  try {
    return (await client.query(text, values)).rows[0] as Row | undefined;
  } catch (error) {
    throw translated(error);
  }
}

function translated(error: unknown): unknown {
  const { code } = error as { code?: unknown };
  switch (code) {
    case 'OG003':
      return new CorruptRecordError('the record has a state or a fingerprint that this version of the contract does not know');
    case '53100':
      return new StoreFullError('the disk of PostgreSQL is full');
    case '42883':
    case '3F000':
      return new StoreSetupError(
        'the database does not have the contract that this library needs: run `oncegate schema apply postgres --url …` as the owner of the database',
      );
    case '42501':
      return new StoreSetupError(
        "the role lacks a right: GRANT USAGE ON SCHEMA oncegate, and GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA oncegate, to the service's role",
      );
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

/** Keeps records in PostgreSQL 14 or later. Apply the contract first: `oncegate schema apply postgres`. */
export class PostgresStore implements Store {
  readonly name = 'postgres';
  readonly claimsMayCommitLate = true;
  private checked: Promise<void> | undefined;

  /** @param pool a `Pool` of `pg`. Give it `connectionTimeoutMillis`, so that a pool without free connections is noticed */
  constructor(private readonly pool: Queryable) {}

  /** Checks the version of the contract. The first claim does so, too. */
  check(): Promise<void> {
    this.checked ??= (async () => {
      const row = await callContract(this.pool, 'SELECT oncegate.contract_version() AS version', []);
      if (Number(row?.['version']) !== 1) {
        throw new StoreSetupError(
          `the database has version ${String(row?.['version'])} of the contract, and this library needs version 1: run \`oncegate schema apply postgres\`, or upgrade the library`,
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
    return claimReply(await callContract(this.pool, 'SELECT * FROM oncegate.claim($1, $2, $3, $4, $5, $6, $7, $8, $9)', claimValues(id, claim)));
  }

  async renew(id: Buffer, token: string, leaseMs: number, retentionMs: number): Promise<OwnerReply> {
    return ownerReply(await callContract(this.pool, 'SELECT outcome FROM oncegate.renew($1, $2, $3, $4)', [id, token, leaseMs, retentionMs]));
  }

  async complete(
    id: Buffer,
    token: string,
    state: CompletionState,
    response: Buffer | undefined,
    retentionMs: number,
  ): Promise<OwnerReply> {
    const values = [id, token, state, response ?? null, retentionMs];
    return ownerReply(await callContract(this.pool, 'SELECT outcome FROM oncegate.complete_if_owner($1, $2, $3, $4, $5)', values));
  }

  async release(id: Buffer, token: string, retentionMs: number): Promise<OwnerReply> {
    return ownerReply(await callContract(this.pool, 'SELECT outcome FROM oncegate.release($1, $2, $3)', [id, token, retentionMs]));
  }

  async lookup(id: Buffer): Promise<RecordView | undefined> {
    const row = await callContract(this.pool, 'SELECT state, fingerprint, token, attempt, by_operator, response FROM oncegate.lookup($1)', [id]);
    if (row === undefined) return undefined;
    return {
      state: String(row['state']),
      fingerprint: bytes(row['fingerprint']),
      token: decimal(row['token']),
      attempt: row['attempt'] === null ? undefined : bytes(row['attempt']),
      byOperator: row['by_operator'] === true,
      response: row['response'] === null ? undefined : bytes(row['response']),
    };
  }
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
