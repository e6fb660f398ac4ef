// Work without an HTTP request: functions that run once for each key, also inside of a transaction of PostgreSQL.
import { randomBytes } from 'node:crypto';
import { attemptOfPermit, type Attempt, type Oncegate } from './gate.js';
import { StoreUnavailableError, type Policy } from './engine.js';
import { fingerprintDigest, partsDigest, versioned } from './fingerprint.js';
import { callerDigest, callerTag, downstreamKey, keyTag, recordId } from './identity.js';
import { callContract, claimReply, claimValues, type Queryable } from './postgres.js';
import { decodeResponse, encodeResponse } from './response.js';
import { durationMs, type Duration, SettingsError } from './settings.js';
import type { Claim, OnAbandoned } from './store.js';

export type FunctionErrorKind =
  | 'key-reused' | 'in-progress' | 'unknown' | 'unreplayable' | 'undecodable' | 'not-json' | 'failed' | 'stale';

const EXPLANATIONS: Readonly<Record<FunctionErrorKind, string>> = {
  'key-reused': 'the key was used with another input',
  'in-progress': 'another call with this key is running: call again later with the same key',
  unknown: 'it is not known how an earlier call with this key ended, so it does not run again: find out what happened',
  unreplayable: 'it was done, and its value was not stored: look at the result another way',
  undecodable: 'it was done, and its stored value cannot be read',
  'not-json': 'the input or the value cannot be written as JSON',
  failed: 'an earlier call with this key failed, and its error was kept',
  stale: 'another attempt owns the record by now: the transaction was rolled back',
};

/** Why a call has no value. */
export class FunctionError extends Error {
  override readonly name = 'FunctionError';
  constructor(
    readonly kind: FunctionErrorKind,
    operation: string,
    /** The kept error, if the kind is `failed`. */
    readonly stored?: unknown,
  ) {
    super(`${operation}: ${EXPLANATIONS[kind]}`);
  }
}

export interface FunctionOptions<Args extends unknown[]> {
  /** The name. It is a part of the key, so it stays when the code moves. */
  name: string;
  /** The key of a call, such as the identity of an order and its version. */
  key: (...args: Args) => string;
  /** What calls with one key must have in common. All arguments by default. */
  input?: (...args: Args) => unknown;
  /** Who calls: keys of different callers never meet. */
  caller?: (...args: Args) => string;
  /**
   * What an error means. `unknown`: it may have had an effect, and an operator decides. `release`: nothing took effect, and the next
   * call runs. `keep`: later calls get the same error.
   */
  errors: 'unknown' | 'release' | 'keep' | ((error: unknown) => 'unknown' | 'release' | 'keep');
  lease?: Duration;
  retention?: Duration;
  wait?: Duration;
  onAbandoned?: OnAbandoned;
}

interface Identity {
  id: Buffer;
  fingerprint: Buffer;
  callerTag: Buffer;
  keyTag: Buffer;
  operation: string;
}

function jsonOf(value: unknown, operation: string): Buffer {
  const text = JSON.stringify(value) as string | undefined;
  if (text === undefined && value !== undefined) throw new FunctionError('not-json', operation);
  return Buffer.from(text ?? 'null');
}

function inputDigest(input: unknown, operation: string): Buffer {
  const empty = { method: '', target: '', contentCoding: '', headers: [] };
  const body = jsonOf(input, operation);
  return fingerprintDigest({ ...empty, contentType: Buffer.from('application/json'), body }, { rawBodies: false, include: [], exclude: [] }).digest;
}

function checkKey(key: string): void {
  const bytes = Buffer.byteLength(key);
  if (bytes < 1 || bytes > 255) throw new SettingsError(`a key has 1 to 255 bytes, and this one has ${String(bytes)}`);
}

function callerOf(caller: string | undefined): Buffer {
  return callerDigest(caller === undefined ? [] : [{ kind: 'caller', identity: Buffer.from(caller) }]);
}

function policyOf(options: Pick<FunctionOptions<never>, 'lease' | 'retention' | 'wait' | 'onAbandoned'>): Policy {
  return {
    leaseMs: durationMs('lease', options.lease ?? '30s', 100, 3_600_000),
    retentionMs: durationMs('retention', options.retention ?? '24h', 1000, 400 * 86_400_000),
    waitMs: durationMs('wait', options.wait ?? '2s', 0, 3_600_000),
    onAbandoned: options.onAbandoned ?? 'park',
  };
}

const JSON_FIELDS = [['content-type', 'application/json']] as const;

function encoded(status: number, value: unknown, operation: string): Buffer | undefined {
  return encodeResponse({ status, headers: JSON_FIELDS, trailers: [], body: jsonOf(value, operation) });
}

function decoded(response: Buffer, operation: string): unknown {
  const { status, body } = decodeResponse(response);
  let value: unknown;
  try {
    value = JSON.parse(body.toString()) as unknown;
  } catch {
    throw new FunctionError('undecodable', operation);
  }
  if (status >= 200 && status <= 299) return value;
  throw new FunctionError('failed', operation, value);
}

/**
 * Wraps a function so that it runs once for each key. Later calls get the stored value, which is what JSON keeps of it. The function
 * gets the attempt as its last argument.
 *
 * ```ts
 * const charge = idempotent(oncegate, { name: 'charge', key: (order) => order.id, errors: 'unknown' }, async (order: Order) => bank.charge(order));
 * ```
 */
export function idempotent<Args extends unknown[], T>(
  oncegate: Oncegate,
  options: FunctionOptions<Args>,
  run: (...args: [...Args, Attempt]) => T | Promise<T>,
): (...args: Args) => Promise<T> {
  const { name } = options;
  const policy = policyOf(options);
  const { engine } = oncegate;
  return async (...args) => {
    const key = options.key(...args);
    checkKey(key);
    // Read before the function runs, which may change its arguments.
    const digest = inputDigest(options.input === undefined ? args : options.input(...args), name);
    const caller = callerOf(options.caller?.(...args));
    const identity: Identity = {
      id: recordId(oncegate.service, caller, ['function:', name], key),
      fingerprint: versioned(partsDigest('oncegate-function-1', [digest])),
      callerTag: callerTag(caller),
      keyTag: keyTag(key),
      operation: name,
    };
    const result = await engine.claim(identity, policy);
    switch (result.outcome) {
      case 'replay':
        return decoded(result.response, name) as T;
      case 'mismatch':
        throw new FunctionError('key-reused', name);
      case 'in-progress':
      case 'unknown':
      case 'unreplayable':
        throw new FunctionError(result.outcome, name);
      case 'execute':
    }
    const { permit } = result;
    if (!(await permit.confirm())) {
      await permit.release();
      throw new StoreUnavailableError('the lease could not be confirmed; nothing was executed');
    }
    let value: T;
    try {
      value = await run(...args, attemptOfPermit(permit, key));
    } catch (error) {
      const fate = typeof options.errors === 'function' ? options.errors(error) : options.errors;
      if (fate === 'release') await permit.release();
      else if (fate === 'keep') {
        const { name: kind = 'Error', message = '' } = error as { name?: string; message?: string };
        const kept = encoded(500, { name: kind, message }, name);
        await permit.complete(kept === undefined ? 'tombstone' : 'completed', kept);
      } else if (policy.onAbandoned === 'park') await permit.complete('unknown');
      else permit.leave();
      throw error;
    }
    let stored: Buffer | undefined;
    try {
      stored = encoded(200, value, name);
    } catch {
      engine.warn(`${name}: its value cannot be written as JSON, so later calls do not get it`);
    }
    await permit.complete(stored === undefined ? 'tombstone' : 'completed', stored);
    return value;
  };
}

export interface TransactionOptions {
  /** What calls with one key must have in common. */
  input?: unknown;
  /** Who calls. */
  caller?: string;
  /** The name of the operation, such as `charge`. */
  name: string;
  /** The name of the service. Services that share a database have different names. */
  service?: string;
  retention?: Duration;
  /** The longest time for which a duplicate waits. 2 s by default. */
  wait?: Duration;
}

/** What a transaction learns about its attempt. */
export interface TransactionAttempt {
  key: string;
  record: string;
  downstreamKey: (name: string) => string;
}

/**
 * Runs a function once for each key, in one transaction of PostgreSQL: its rows and the record with its value are committed together,
 * or neither is. The client must be one connection without an open transaction, such as `await pool.connect()`, and everything that the
 * function writes must go through it. An error rolls everything back, and the key is free.
 */
export async function transaction<T>(
  client: Queryable,
  key: string,
  run: (attempt: TransactionAttempt) => T | Promise<T>,
  options: TransactionOptions,
): Promise<T> {
  const { name } = options;
  checkKey(key);
  const caller = callerOf(options.caller);
  const id = recordId(options.service, caller, [name], key);
  const policy = policyOf(options);
  const claim: Claim = {
    attempt: randomBytes(16),
    fingerprint: versioned(inputDigest(options.input ?? null, name)),
    leaseMs: 60_000,
    retentionMs: policy.retentionMs,
    onAbandoned: 'park',
    caller: callerTag(caller),
    keyTag: keyTag(key),
    operation: name,
  };
  const deadline = performance.now() + policy.waitMs;
  for (let nap = 10; ; nap = Math.min(nap * 2, 250)) {
    await client.query('BEGIN ISOLATION LEVEL READ COMMITTED', []);
    let isOpen = true;
    try {
      const row = await callContract(client, 'SELECT * FROM oncegate.reserve_or_claim($1, $2, $3, $4, $5, $6, $7, $8, $9)', claimValues(id, claim));
      const reserved = row?.['transaction'];
      const isReserved = reserved !== undefined && reserved !== null;
      const reply = isReserved ? undefined : claimReply(row);
      if (reply !== undefined && reply.outcome !== 'execute') {
        isOpen = false;
        await client.query('ROLLBACK', []);
        if (reply.outcome === 'replay') return decoded(reply.response, name) as T;
        if (reply.outcome === 'mismatch') throw new FunctionError('key-reused', name);
        if (reply.outcome === 'unknown' || reply.outcome === 'unreplayable') throw new FunctionError(reply.outcome, name);
        if (performance.now() + nap > deadline) throw new FunctionError('in-progress', name);
        await new Promise((resolve) => setTimeout(resolve, nap));
        continue;
      }
      const value = await run({ key, record: id.toString('hex'), downstreamKey: (step) => downstreamKey(id, step) });
      const response = encoded(200, value, name);
      if (response === undefined) throw new FunctionError('not-json', name);
      if (reply === undefined) {
        const values = [id, reserved, claim.fingerprint, response, claim.retentionMs, claim.caller, name, claim.keyTag];
        const ended = await callContract(client, 'SELECT oncegate.complete_reserved($1, $2, $3, $4, $5, $6, $7, $8) AS token', values);
        if (ended?.['token'] === null) {
          isOpen = false;
          await client.query('COMMIT', []);
          throw new FunctionError('unknown', name);
        }
      } else {
        await callContract(client, 'SELECT oncegate.complete($1, $2, $3, $4)', [id, reply.token, response, claim.retentionMs]);
      }
      isOpen = false;
      await client.query('COMMIT', []);
      return value;
    } catch (error) {
      // The connection itself may be broken.
      if (isOpen) await client.query('ROLLBACK', []).catch(() => undefined);
      if ((error as { code?: unknown }).code === 'OG001') throw new FunctionError('stale', name);
      throw error;
    }
  }
}

/** The record and the token of a request that comes through a sidecar; undefined if it has no key. */
export interface SidecarAttempt {
  record: Buffer;
  token: string;
  attempt: number;
}

type HeaderSource = { headers: Readonly<Record<string, string | string[] | undefined>> | Headers };

/** Reads `Oncegate-Record` and `Oncegate-Token`, which the sidecar sets, and which clients behind it cannot send. */
export function sidecarAttempt(request: HeaderSource): SidecarAttempt | undefined {
  const { headers } = request;
  const field = (name: string): string | undefined => {
    const value = headers instanceof Headers ? headers.get(name) : headers[name];
    return typeof value === 'string' ? value : undefined;
  };
  const record = field('oncegate-record');
  const token = field('oncegate-token');
  if (record === undefined || token === undefined) return undefined;
  if (!/^[0-9a-f]{64}$/.test(record) || !/^\d{1,19}$/.test(token)) {
    throw new TypeError('Oncegate-Record or Oncegate-Token is malformed: does this request come from a sidecar?');
  }
  return { record: Buffer.from(record, 'hex'), token, attempt: Number(field('oncegate-attempt') ?? '1') };
}

/**
 * Completes the record of a request behind a sidecar, as the last statement before `COMMIT`: `await completeInTransaction(client, req)`.
 * Give the response, so that every retry gets it. A request without a key completes nothing. If it rejects, roll back.
 */
export async function completeInTransaction(
  client: Queryable,
  request: HeaderSource,
  response?: { status: number; headers?: Readonly<Record<string, string>>; body: string | Uint8Array },
): Promise<void> {
  const attempt = sidecarAttempt(request);
  if (attempt === undefined) return;
  let stored: Buffer | undefined;
  if (response !== undefined) {
    const headers = Object.entries(response.headers ?? {}).map(([name, value]) => [name.toLowerCase(), value] as const);
    stored = encodeResponse({ status: response.status, headers, trailers: [], body: Buffer.from(response.body as string) });
    if (stored === undefined) throw new RangeError('the response cannot be stored: its status, its size or its number of fields');
  }
  await client.query('SELECT oncegate.complete($1, $2, $3)', [attempt.record, attempt.token, stored ?? null]);
}

