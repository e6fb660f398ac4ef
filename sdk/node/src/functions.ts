// Work without an HTTP request: functions that run once for each key, also inside of a transaction of PostgreSQL.
import { attemptOfPermit, type Attempt, type Oncegate } from './gate.js';
import { attemptId } from './bytes.js';
import { Moment } from './clocks.js';
import { LOOK_COUNTS_MS, StoreUnavailableError, type Claimed, type Policy } from './engine.js';
import { fingerprintDigest, partsDigest, versioned } from './fingerprint.js';
import { callerDigest, downstreamKey, recordId } from './identity.js';
import { IdGuard, Ids, MARK, type IdSecret } from './ids.js';
import { callContract, claimReply, claimValues, RECORD_COLUMNS, recordView, type Queryable } from './postgres.js';
import { decodeResponse, encodeResponse } from './response.js';
import { isSealed, openResponse, sealResponse, seals, type SealOptions } from './seal.js';
import { checkNames, checkService, durationMs, shown, shownKind, type Duration, SettingsError } from './settings.js';
import { SealedError, type Claim, type OnAbandoned } from './store.js';

export type FunctionErrorKind =
  | 'key-reused' | 'in-progress' | 'unknown' | 'unreplayable' | 'undecodable' | 'not-json' | 'failed' | 'stale' | 'ended' | 'rolled-back';

const EXPLANATIONS: Readonly<Record<FunctionErrorKind, string>> = {
  'key-reused': 'the key was used with another input',
  'in-progress': 'another call with this key is running: call again later with the same key',
  unknown: 'it is not known how an earlier call with this key ended, so it does not run again: find out what happened',
  unreplayable: 'it was done, and its value was not stored: look at the result another way',
  undecodable: 'it was done, and its stored value cannot be read',
  'not-json': 'the input or the value cannot be written as JSON',
  failed: 'an earlier call with this key failed, and its error was kept',
  stale: 'another attempt took over while this one ran, and its outcome is not known: find out what happened',
  ended: 'the function ended the transaction itself (COMMIT, ROLLBACK, or a transaction of its own, also one of an ORM), so it is not known what was ' +
    'committed: find out what happened. The function must not end the transaction; use savepoints',
  'rolled-back': 'a statement failed in the transaction, and PostgreSQL rolled all of it back: nothing was done, and the next call runs. Do not ignore ' +
    'errors of statements, or put them in a savepoint, and wait for each statement',
};

const IS_FUNCTION_ERROR = Symbol.for('oncegate.function-error');

/** Why a call has no value. */
export class FunctionError extends Error {
  override readonly name = 'FunctionError';
  /** A process may have loaded the library twice, by `import` and by `require`. */
  static override [Symbol.hasInstance](value: unknown): boolean {
    if (this === FunctionError && typeof value === 'object' && value !== null && IS_FUNCTION_ERROR in value) return true;
    return Function.prototype[Symbol.hasInstance].call(this, value);
  }

  static {
    Object.defineProperty(this.prototype, IS_FUNCTION_ERROR, { value: true });
  }

  constructor(
    readonly kind: FunctionErrorKind,
    operation: string,
    /** The kept error, if the kind is `failed`. */
    readonly stored?: unknown,
    { detail, ...options }: ErrorOptions & { detail?: string } = {},
  ) {
    super(`${operation}: ${EXPLANATIONS[kind]}${detail === undefined ? '' : `. ${detail}`}`, options);
  }
}

/**
 * A caller: its kind and its value, such as `['customer', '42']`. A text alone has the kind `caller`. The kind is a part of the key, so
 * services in other languages on the same store have to name the same one.
 */
export type Caller = string | readonly [kind: string, value: string];

export interface FunctionOptions<Args extends unknown[]> {
  /** The name. It is a part of the key, so it stays when the code moves. */
  name: string;
  /** The key of a call, such as the identity of an order and its version. */
  key: (...args: Args) => string | number | bigint;
  /** What calls with one key must have in common. All arguments by default. */
  input?: (...args: Args) => unknown;
  /** Who calls: keys of different callers never meet. */
  caller?: (...args: Args) => Caller;
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

/** True if the work behind a value may not have been done yet: an iterator, a stream, a `Response`, a promise. */
function isPending(value: unknown): boolean {
  if (typeof value !== 'object' || value === null) return false;
  if (value instanceof Response || value instanceof Request) return true;
  const { next, pipe, then, getReader } = value as Readonly<Record<string, unknown>>;
  const isIterator = Symbol.iterator in value && typeof next === 'function';
  return isIterator || Symbol.asyncIterator in value || [pipe, then, getReader].some((member) => typeof member === 'function');
}

/** Refuses what has a content that JSON does not show: it writes `{}` for each of them, so that all would be equal. */
function refuseHidden(_: string, value: unknown): unknown {
  if (typeof value === 'bigint') throw new TypeError('a bigint is not JSON: write it as a text');
  if (typeof value !== 'object' || value === null || Array.isArray(value)) return value;
  if (value instanceof Map || value instanceof Set) throw new TypeError('a Map or a Set is not JSON: give Object.fromEntries(map) or [...set]');
  const prototype: unknown = Object.getPrototypeOf(value);
  const isPlain = prototype === null || prototype === Object.prototype;
  const isWrapper = value instanceof Number || value instanceof String || value instanceof Boolean;
  if (isPending(value) || (!isPlain && !isWrapper && Object.keys(value).length === 0 && !ArrayBuffer.isView(value))) {
    const name = (value as { constructor?: { name?: unknown } }).constructor?.name;
    const shownName = typeof name === 'string' && name !== '' ? `of the class ${name}` : 'of this kind';
    throw new TypeError(`an object ${shownName} is not JSON, because its content is not in enumerable members: give plain data, or a toJSON()`);
  }
  return value;
}

/** Also takes a `FormData` whose entries are all texts, as `{"FormData": [[name, value], …]}` in their order. */
function inputJson(name: string, value: unknown): unknown {
  if (typeof value === 'bigint') throw new TypeError('a bigint is not JSON: write it as a text, or say with `input` what is compared');
  if (!(value instanceof FormData)) return refuseHidden(name, value);
  const entries = [...value];
  if (!entries.every(([, entry]) => typeof entry === 'string')) throw new TypeError('a FormData with a file is not JSON: say with `input` what is compared');
  return { FormData: entries };
}

function jsonOf(value: unknown, operation: string, replacer = refuseHidden): Buffer {
  const text = JSON.stringify(value, replacer) as string | undefined;
  if (text === undefined && value !== undefined) throw new FunctionError('not-json', operation);
  return Buffer.from(text ?? 'null');
}

function inputDigest(input: unknown, operation: string): Buffer {
  const empty = { method: '', target: '', contentCoding: '', headers: [] };
  const body = jsonOf(input, operation, inputJson);
  return fingerprintDigest({ ...empty, contentType: Buffer.from('application/json'), body }, { rawBodies: false, include: [], exclude: [] }).digest;
}

/** A key as a text: identifiers in databases are often numbers. */
function readKey(key: unknown): string {
  if (typeof key === 'bigint' || Number.isSafeInteger(key)) return String(key);
  if (typeof key !== 'string') throw new SettingsError(`a key is a text or a whole number, and this one is ${shownKind(key)}`);
  checkKey(key);
  return key;
}

function checkKey(key: string): void {
  const bytes = Buffer.byteLength(key);
  if (bytes < 1 || bytes > 255) throw new SettingsError(`a key has 1 to 255 bytes, and this one has ${String(bytes)}`);
  // As UTF-8, they would all be the same character.
  if (/\p{Cs}/u.test(key)) throw new SettingsError('a key is valid Unicode, and this one has half of a surrogate pair');
}

function callerOf(caller: unknown, isGiven: boolean): Buffer {
  if (!isGiven) return callerDigest([]);
  const pair: unknown[] = Array.isArray(caller) ? caller : ['caller', caller];
  const [kind, value] = pair;
  if (pair.length !== 2 || typeof kind !== 'string' || kind === '' || typeof value !== 'string' || value === '') {
    throw new SettingsError(
      "caller: a caller is a kind and a value, both texts that are not empty, such as ['customer', '42'], or a value alone, and this one is " +
        `${shownKind(caller)}: otherwise all such callers would share their keys`,
    );
  }
  return callerDigest([{ kind, identity: Buffer.from(value) }]);
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
  if (isSealed(response)) throw new SealedError('the stored value is sealed; give the store its keys: SealedStore');
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

/** What later calls get of an error; undefined if it cannot be written. Anything may be thrown. */
function keptError(error: unknown, operation: string): Buffer | undefined {
  try {
    const { name = 'Error', message = '' } = (typeof error === 'object' && error !== null ? error : { message: error }) as { name?: unknown; message?: unknown };
    return encoded(500, { name: String(name), message: String(message) }, operation);
  } catch {
    return undefined;
  }
}

/** A generator function returns before anything in it has run. */
function checkRun(name: string, run: unknown): void {
  if (/GeneratorFunction\]$/.test(Object.prototype.toString.call(run))) {
    throw new SettingsError(`${name}: a generator function does not run when it is called: give a function, or an async one`);
  }
}

const FATES = ['unknown', 'release', 'keep'];

const FUNCTION_OPTIONS: readonly (keyof FunctionOptions<never>)[] = ['name', 'key', 'input', 'caller', 'errors', 'lease', 'retention', 'wait', 'onAbandoned'];
const TRANSACTION_OPTIONS: readonly (keyof TransactionOptions)[] =
  ['name', 'service', 'input', 'caller', 'idSecret', 'retention', 'wait', 'sealKeys', 'opensOnly', 'required'];

function checkOptions(oncegate: unknown, options: unknown, run: unknown): void {
  if ((oncegate as Partial<Oncegate> | undefined)?.engine === undefined) throw new SettingsError('idempotent: oncegate is missing: idempotent(oncegate, { name, key, errors }, run)');
  const { name, key, errors } = ((options ?? undefined) ?? {}) as Readonly<Record<string, unknown>>;
  if (typeof name !== 'string' || name === '') throw new SettingsError('name: write the name of the function, which is a part of the key');
  if (typeof key !== 'function') throw new SettingsError('key: give a function of the arguments, such as (order) => order.id');
  if (typeof errors !== 'function' && !FATES.includes(errors as string)) {
    const given = errors === undefined ? 'it is missing' : `${shown(errors)} is none of them`;
    throw new SettingsError(`errors: write "unknown", "release" or "keep", or a function that returns one: ${given}`);
  }
  checkNames('idempotent', options, FUNCTION_OPTIONS);
  if (typeof run !== 'function') throw new SettingsError(`${name}: the function to run is missing: idempotent(oncegate, options, run)`);
  checkRun(name, run);
}

// eslint-disable-next-line @typescript-eslint/no-explicit-any -- behind the signatures that callers see
type Anything = any;

/**
 * Wraps a function so that it runs once for each key. Later calls get the stored value, which is what JSON keeps of it. The function
 * gets the attempt as its last argument. In TypeScript, give its parameters their types, so that `key` has them, too.
 *
 * ```ts
 * const charge = idempotent(oncegate, { name: 'charge', key: (order) => order.id, errors: 'unknown' }, async (order: Order) => bank.charge(order));
 * ```
 */
export function idempotent<T>(oncegate: Oncegate, options: FunctionOptions<[]>, run: (attempt: Attempt) => T | Promise<T>): () => Promise<T>;
export function idempotent<A, T>(
  oncegate: Oncegate,
  options: FunctionOptions<[A]>,
  run: (first: A, attempt: Attempt) => T | Promise<T>,
): (first: A) => Promise<T>;
export function idempotent<A, B, T>(
  oncegate: Oncegate,
  options: FunctionOptions<[A, B]>,
  run: (first: A, second: B, attempt: Attempt) => T | Promise<T>,
): (first: A, second: B) => Promise<T>;
export function idempotent<Args extends unknown[], T>(
  oncegate: Oncegate,
  options: FunctionOptions<Args>,
  run: (...args: [...Args, Attempt]) => T | Promise<T>,
): (...args: Args) => Promise<T>;
export function idempotent<T>(
  oncegate: Oncegate,
  options: FunctionOptions<Anything[]>,
  run: (...args: Anything[]) => T | Promise<T>,
): (...args: Anything[]) => Promise<T> {
  checkOptions(oncegate, options, run);
  const { name } = options;
  const policy = policyOf(options);
  const { engine, ids } = oncegate;
  const fateOf = (error: unknown): unknown => {
    if (typeof options.errors !== 'function') return options.errors;
    try {
      const fate = options.errors(error);
      if (FATES.includes(fate)) return fate;
      engine.warn(`${name}: errors() returned ${shown(fate)}, so the outcome is unknown`);
    } catch (failure) {
      engine.warn(`${name}: errors() failed (${failure instanceof Error ? failure.name : typeof failure}), so the outcome is unknown`);
    }
    return 'unknown';
  };
  return async (...args: unknown[]) => {
    const key = readKey(options.key(...args));
    // Read before the function runs, which may change its arguments.
    const digest = inputDigest(options.input === undefined ? args : options.input(...args), name);
    const caller = callerOf(options.caller?.(...args), options.caller !== undefined);
    const identity: Claimed = {
      id: ids.record(recordId(oncegate.service, caller, ['function:', name], key)),
      fingerprint: ids.fingerprint(versioned(partsDigest('oncegate-function-1', [digest]))),
      callerTag: ids.callerTag(caller),
      keyTag: ids.keyTag(key),
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
    // The outcome of an attempt that was overtaken is that of the record.
    const recorded = async (cause?: unknown): Promise<T> => {
      const record = await engine.lookup(identity.id).catch(() => undefined);
      if (record?.state !== 'completed' || record.response === undefined || !record.fingerprint.equals(identity.fingerprint)) {
        throw new FunctionError('stale', name, undefined, { cause });
      }
      return decoded(engine.store.opened?.(identity.id, record.response) ?? record.response, name) as T;
    };
    let value: T;
    try {
      value = await run(...args, attemptOfPermit(permit, key));
    } catch (error) {
      const fate = fateOf(error);
      if (fate === 'release') await permit.release();
      else if (fate === 'keep') {
        const kept = keptError(error, name);
        if ((await permit.complete(kept === undefined ? 'tombstone' : 'completed', kept)) === 'fenced') return recorded(error);
      } else if (policy.onAbandoned === 'park') await permit.complete('unknown');
      else permit.leave();
      throw error;
    }
    let mayBePending = false;
    let stored: Buffer | undefined;
    try {
      mayBePending = isPending(value);
      if (!mayBePending) stored = encoded(200, value, name);
    } catch {
      engine.warn(`${name}: its value cannot be written as JSON, so later calls do not get it`);
    }
    if (mayBePending) {
      await permit.complete('unknown');
      throw new FunctionError('not-json', name);
    }
    return (await permit.complete(stored === undefined ? 'tombstone' : 'completed', stored)) === 'fenced' ? recorded() : value;
  };
}

export interface TransactionOptions extends SealOptions {
  /** What calls with one key must have in common. */
  input?: unknown;
  /** Who calls: keys of different callers never meet. */
  caller?: Caller;
  /** The name of the operation, such as `charge`. */
  name: string;
  /** The name of the service. Services that share a database have different names. */
  service: string;
  /** The id secret of the database, if it belongs to one: an `IdSecret`, or the text that `oncegate id-secret new` prints. */
  idSecret?: string | IdSecret | undefined;
  retention?: Duration;
  /** The longest time for which a duplicate waits. 2 s by default. */
  wait?: Duration;
}

const CLAIM = 'SELECT * FROM oncegate.claim($1, $2, $3, $4, $5, $6, $7, $8, $9)';
/** What is true of a key whose function has ended the transaction. */
type KeyFate = 'parked' | 'taken' | 'not-said';
const TRUE_OF_KEY: Readonly<Record<KeyFate, string>> = {
  parked: 'It is not run again: its outcome is unknown until an operator resolves it',
  taken: 'Another attempt has its key, which was free for a while: both may have taken effect',
  'not-said': 'The database did not take that its outcome is unknown: the key may be free, so find out before you call it again',
};

/** The time at which a transaction began, in microseconds. It tells a transaction from others of its connection. */
const BEGAN = '(extract(epoch FROM now()) * 1000000)::bigint::text';
const COMPLETE = `SELECT CASE WHEN ${BEGAN} = $5 THEN oncegate.complete($1, $2, $3, $4)::text IS NOT NULL ELSE false END AS completed`;
/** The guards of the databases in which transactions of this process have looked for a mark. There are few. */
const guards = new Map<string, IdGuard>();
const MAX_GUARDS = 1000;
const LOOK = `SELECT ${BEGAN} AS began, concat_ws(' ', current_database(), inet_server_addr(), inet_server_port()) AS database, ${RECORD_COLUMNS}
  FROM (SELECT) AS one LEFT JOIN oncegate.lookup($1) ON true`;

/** Refuses a database whose records have other identifiers than this process computes. Returns when the transaction began. */
async function checkMark(client: Queryable, ids: Ids): Promise<unknown> {
  const row = (await callContract(client, LOOK, [MARK])) ?? {};
  const name = `${ids.secret?.name ?? ''} ${String(row['database'])}`;
  const guard = guards.get(name) ?? new IdGuard(ids);
  // Beyond the limit, only the mark refuses.
  if (guards.size < MAX_GUARDS) guards.set(name, guard);
  guard.judge((row['state'] ?? null) === null ? undefined : recordView(row));
  return row['began'];
}

type Row = Readonly<Record<string, unknown>>;

/** What a transaction learns about its attempt. */
export interface TransactionAttempt<Client = Queryable> {
  key: string;
  record: string;
  downstreamKey: (name: string) => string;
  /**
   * The connection of the transaction, which takes no statement after the function has ended. A statement of a helper that still runs
   * then would be committed outside of the transaction.
   */
  client: Client;
}

/** There as long as the transaction has not ended: a transaction in which a statement has failed can be told from others only by it. */
const SAVEPOINT = 'oncegate_transaction';
/** `began` tells if `BEGIN` has begun it: in an open transaction, it would only warn. The isolation level is that of the connection. */
const BEGIN = `BEGIN; SAVEPOINT ${SAVEPOINT}; SELECT now() = statement_timestamp() AS began`;

const ALONE = 'SELECT now() = statement_timestamp() AS alone';

const OPEN_ALREADY = 'client: the connection has an open transaction, which would be committed here: call transaction() outside of it, or complete a record in it';
const MUST_NOT_END = 'client: the function must not end the transaction; use savepoints';
const HAS_ENDED = 'client: the function of transaction() has ended, so this statement was not sent: wait for each statement before it returns or throws';

/** Before the first word of a statement. */
const BLANK = /^(?:[\s;]|--[^\n]*(?:\n|$)|\/\*(?:[^*]|\*(?!\/))*\*\/)*/;
const ENDS = /^(?:commit|end|abort|begin|start\s+transaction|prepare\s+transaction|rollback(?!\s+(?:(?:work|transaction)\s+)?to\b))\b/i;

/** The same behind another statement in one text, or in quotes in it. */
function mayEnd(text: string): boolean {
  const at = text.indexOf(';');
  return at >= 0 && /\b(?:commit|end|abort|begin|start|prepare|rollback)\b/i.test(text.slice(at));
}

function textOf(statement: unknown): string {
  const text = typeof statement === 'string' ? statement : (Object(statement ?? {}) as { text?: unknown }).text;
  return typeof text === 'string' ? text : '';
}

/** Returns true if a statement begins or ends a transaction. A statement behind another one in one text is not seen. */
function endsTransaction(statement: unknown): boolean {
  return ENDS.test(textOf(statement).replace(BLANK, ''));
}

/** Rejects a call of `query`, in the way in which its caller gets results. */
function refuse(args: readonly unknown[], message: string): unknown {
  const error = new SettingsError(message);
  const { callback, submit } = Object(args[0] ?? {}) as { callback?: unknown; submit?: unknown };
  const last = [args.at(-1), callback].find((one) => typeof one === 'function');
  if (last !== undefined) {
    process.nextTick(last, error);
    return undefined;
  }
  if (typeof submit === 'function') throw error;
  return Promise.reject(error);
}

type Query = (...args: unknown[]) => unknown;
interface Connection {
  query: Query;
  end?: () => unknown;
  on?: (event: string, listener: () => void) => void;
  off?: (event: string, listener: () => void) => void;
}

function refusePool(client: Queryable): void {
  if (typeof (client as Partial<Queryable> | null | undefined)?.query !== 'function') {
    throw new SettingsError('client: give one connection of `pg`, such as `await pool.connect()`');
  }
  if (['totalCount', 'idleCount'].some((name) => name in client)) {
    throw new SettingsError('client: this is a pool, which sends each statement to another connection: give one connection, `await pool.connect()`');
  }
}

/** Refuses a connection on which a statement commits by itself. */
async function refuseWithoutTransaction(client: Queryable): Promise<void> {
  const status = (client as { getTransactionStatus?: () => unknown }).getTransactionStatus?.();
  // Older versions of `pg` do not tell. Without values it is one message, so that the times differ only in a transaction that was open before.
  const isAlone = status === undefined || status === null ? ((await client.query(ALONE, [])).rows[0] as Row | undefined)?.['alone'] === true : status === 'I';
  if (isAlone) throw new SettingsError('client: the connection has no open transaction, so the completion would be committed without your rows: call it between BEGIN and COMMIT');
}

/** The connections on which a transaction() runs. */
const busy = new WeakSet();

/**
 * A connection while a transaction runs on it. Until the transaction has ended, `query` of the connection refuses statements that would
 * end it, and all statements once the function has ended.
 */
class Session {
  private phase: 'ours' | 'function' | 'ending' | 'over' = 'ours';
  private readonly connection: Connection;
  private readonly own: PropertyDescriptor | undefined;
  private readonly original: Query;
  readonly scoped: Queryable;
  /** True if a text of several statements of the function may have ended the transaction. */
  mayHaveEnded = false;

  constructor(client: Queryable) {
    refusePool(client);
    if (busy.has(client)) throw new SettingsError(OPEN_ALREADY);
    this.connection = client as unknown as Connection;
    this.own = Object.getOwnPropertyDescriptor(client, 'query');
    this.original = this.connection.query;
    const scopedQuery: Query = (...args) => (this.phase === 'over' ? refuse(args, HAS_ENDED) : this.guarded(...args));
    this.scoped = new Proxy(client, {
      get: (target, name) => {
        if (name === 'query') return scopedQuery;
        const member: unknown = Reflect.get(target, name, target);
        return typeof member === 'function' && name !== 'constructor' ? (member.bind(target) as unknown) : member;
      },
    });
    busy.add(client).add(this.scoped);
    // The statement that fails is the report. Without a listener, the process ends if PostgreSQL ends the connection meanwhile.
    this.connection.on?.('error', this.ignored);
    Object.defineProperty(client, 'query', { value: this.guarded, configurable: true, writable: true });
  }

  private readonly ignored = (): void => undefined;

  private readonly guarded: Query = (...args) => {
    if (this.phase === 'ending') return refuse(args, HAS_ENDED);
    if (this.phase === 'function') {
      if (endsTransaction(args[0])) return refuse(args, MUST_NOT_END);
      this.mayHaveEnded ||= mayEnd(textOf(args[0]));
    }
    return this.original.apply(this.connection, args);
  };

  /** Sends a statement of this library. */
  readonly query = (text: string, values: unknown[]): Promise<{ rows: unknown[] }> =>
    this.original.call(this.connection, text, values) as Promise<{ rows: unknown[] }>;

  async run<T>(work: () => T | Promise<T>): Promise<T> {
    this.phase = 'function';
    try {
      return await work();
    } finally {
      this.phase = 'ending';
    }
  }

  /** Gives the connection back as it was. */
  leave(): void {
    this.phase = 'over';
    busy.delete(this.connection);
    this.connection.off?.('error', this.ignored);
    // If another library has wrapped it meanwhile, the guard stays below, and lets everything pass.
    if (this.connection.query !== this.guarded) return;
    if (this.own !== undefined) Object.defineProperty(this.connection, 'query', this.own);
    else delete (this.connection as Partial<Connection>).query;
  }

  /** Closes a connection whose transaction may be open: what the next user writes on it would be lost. A pool removes it. */
  private close(): void {
    void (async () => { await this.connection.end?.(); })().catch(() => undefined);
  }

  /** Begins a transaction on a connection that has none. */
  async begin(): Promise<void> {
    let results: unknown;
    try {
      results = await this.query(BEGIN, []);
    } catch (error) {
      // The caller's own transaction, in which a statement has failed, stays open.
      if (codeOf(error) !== '25P02') this.close();
      throw error;
    }
    const began = (Array.isArray(results) ? (results as { rows: Row[] }[]).at(-1)?.rows[0]?.['began'] : undefined);
    if (began === true) return;
    // The transaction of the caller stays open, and nothing was done in it.
    if (began === false) {
      await this.query(`RELEASE SAVEPOINT ${SAVEPOINT}`, []).catch(() => undefined);
      throw new SettingsError(OPEN_ALREADY);
    }
    await this.rollBack();
    throw new SettingsError('client: it must answer several statements at once, as a connection of `pg` does');
  }

  /** Commits. PostgreSQL answers `ROLLBACK`, and no error, if a statement of the transaction has failed. */
  async commit(operation: string): Promise<void> {
    let result: { command?: unknown };
    try {
      result = (await this.query('COMMIT', [])) as { command?: unknown };
    } catch (error) {
      // An error of PostgreSQL ends the transaction.
      if (!isSqlState(codeOf(error))) this.close();
      throw error;
    }
    if (result.command === 'ROLLBACK') throw new FunctionError('rolled-back', operation);
  }

  /** Rolls back. False if that is not known; then the connection is closed. */
  async rollBack(): Promise<boolean> {
    try {
      await this.query('ROLLBACK', []);
      return true;
    } catch {
      this.close();
      return false;
    }
  }

  /** The state of the transaction that began then. */
  async stateOf(began: unknown): Promise<'open' | 'over' | 'not-known'> {
    try {
      const [row] = (await this.query(`SELECT ${BEGAN} AS began`, [])).rows;
      return (row as Row | undefined)?.['began'] === began ? 'open' : 'over';
    } catch (error) {
      if (codeOf(error) !== '25P02') return 'not-known';
    }
    // A statement has failed, in this transaction or in another one that the function has begun.
    try {
      await this.query(`ROLLBACK TO SAVEPOINT ${SAVEPOINT}`, []);
      return 'open';
    } catch (error) {
      return isSqlState(codeOf(error)) ? 'over' : 'not-known';
    }
  }
}

function codeOf(error: unknown): unknown {
  return (Object(error ?? {}) as { code?: unknown }).code;
}

function isSqlState(code: unknown): boolean {
  return typeof code === 'string' && /^[0-9A-Z]{5}$/.test(code) && !/^(?:08|57P)/.test(code);
}

/**
 * Writes an unknown outcome, unless another attempt has the record. It commits by itself. The same claim with a lease that ends at once
 * is enough for that, if the role may not call `complete_if_owner`.
 */
async function park(client: Queryable, id: Buffer, claim: Claim): Promise<KeyFate> {
  for (let turn = 1; ; turn += 1) {
    try {
      const { outcome, token } = { token: '', ...claimReply(await callContract(client, CLAIM, claimValues(id, { ...claim, leaseMs: 1 }))) };
      if (outcome !== 'execute') return outcome === 'unknown' ? 'parked' : 'taken';
      await callContract(client, "SELECT outcome FROM oncegate.complete_if_owner($1, $2, 'unknown', NULL, $3)", [id, token, claim.retentionMs]).catch(() => undefined);
      return 'parked';
    } catch (error) {
      if (codeOf(error) !== '40001' || turn >= MIN_CLAIMS) return 'not-said';
    }
  }
}

/** The least number of times that a claim runs which fails because of concurrent transactions. */
const MIN_CLAIMS = 4;

/**
 * Runs a function once for each key, in one transaction of PostgreSQL: its rows and the record with its value are committed together,
 * or neither is. The client must be one connection without an open transaction, such as `await pool.connect()`, and everything that the
 * function writes must go through it, or through `attempt.client`, before it returns or throws. An error rolls everything back, and the
 * key is free. What the function sends later on the client is not a part of the transaction: use `attempt.client`, which refuses it.
 *
 * The function may use savepoints, and must not end the transaction: such statements are refused. If it does so in a way that is not
 * seen before, the outcome is unknown (`ended`). The isolation level is that of the connection. If a transaction cannot be begun or
 * rolled back, the connection is closed, because its transaction may be open.
 *
 * With `sealKeys` the value is encrypted, and stored values are opened. One that cannot be opened is a `SealedError`, and the function
 * does not run again.
 */
export async function transaction<T, Client extends Queryable = Queryable>(
  client: Client,
  written: string | number | bigint,
  run: (attempt: TransactionAttempt<Client>) => T | Promise<T>,
  options: TransactionOptions,
): Promise<T> {
  const { name } = options;
  if (typeof name !== 'string' || name === '') throw new SettingsError('name: write the name of the operation, such as "pay"');
  checkNames('transaction', options, TRANSACTION_OPTIONS);
  checkService(options.service, 'a database is shared');
  checkRun(name, run);
  const key = readKey(written);
  const ids = Ids.of(options.idSecret);
  const caller = callerOf(options.caller, Object.hasOwn(options, 'caller'));
  const id = ids.record(recordId(options.service, caller, [name], key));
  const policy = policyOf(options);
  const claim: Claim = {
    attempt: attemptId(),
    fingerprint: ids.fingerprint(versioned(inputDigest(options.input ?? null, name))),
    leaseMs: 60_000,
    retentionMs: policy.retentionMs,
    onAbandoned: 'park',
    caller: ids.callerTag(caller),
    keyTag: ids.keyTag(key),
    operation: name,
  };
  const isSealing = seals(options);
  const deadline = performance.now() + policy.waitMs;
  for (let [nap, turn] = [10, 1]; ; [nap, turn] = [Math.min(nap * 2, 250), turn + 1]) {
    const session = new Session(client);
    try {
      await session.begin();
      const result = await inTransaction(session);
      if (result !== undefined) return result.value;
      if (performance.now() + nap > deadline) throw new FunctionError('in-progress', name);
    } catch (error) {
      // Nothing has run, and the next turn has a younger snapshot.
      const mayRunAgain = error instanceof NotSerializableError && (turn < MIN_CLAIMS || performance.now() + nap <= deadline);
      if (!mayRunAgain) throw error instanceof NotSerializableError ? error.cause : error;
    } finally {
      session.leave();
    }
    await new Promise((resolve) => setTimeout(resolve, nap));
  }

  /** Returns undefined if another attempt is running. */
  async function inTransaction(session: Session): Promise<{ value: T } | undefined> {
    let began: unknown;
    // A claim, and not a reservation: if the function commits, the record stays, and nothing executes again.
    let token: string | undefined;
    try {
      const lookedAt = Moment.now();
      began = await checkMark(session, ids);
      const reply = claimReply(await callContract(session, CLAIM, claimValues(id, claim)));
      // The claim may have waited for another transaction.
      if (reply.outcome === 'execute' && lookedAt.age() >= LOOK_COUNTS_MS) await checkMark(session, ids);
      if (reply.outcome !== 'execute') {
        await session.rollBack();
        if (reply.outcome === 'replay') return { value: decoded(openResponse(options, id, reply.response), name) as T };
        if (reply.outcome === 'mismatch') throw new FunctionError('key-reused', name);
        if (reply.outcome === 'unknown' || reply.outcome === 'unreplayable') throw new FunctionError(reply.outcome, name);
        return undefined;
      }
      ({ token } = reply);
    } catch (error) {
      if (error instanceof FunctionError) throw error;
      await session.rollBack();
      throw codeOf(error) === '40001' ? new NotSerializableError('the claim', { cause: error }) : error;
    }
    const ended = new Error();
    try {
      const attempt = { key, record: id.toString('hex'), downstreamKey: (step: string) => downstreamKey(id, step), client: session.scoped as Client };
      const value = await session.run(() => run(attempt));
      const response = encoded(200, value, name);
      if (response === undefined) throw new FunctionError('not-json', name);
      const stored = isSealing ? sealResponse(options.sealKeys, id, BigInt(token), response) : response;
      const row = await callContract(session, COMPLETE, [id, token, stored, claim.retentionMs, began]);
      if (row?.['completed'] !== true) throw ended;
      token = undefined;
      await session.commit(name);
      return { value };
    } catch (error) {
      // COMMIT has ended it, or the connection is closed.
      if (token === undefined) throw error;
      const state = await session.stateOf(began);
      const isRolledBack = await session.rollBack();
      if (error === ended || state === 'over' || (state === 'not-known' && session.mayHaveEnded)) {
        const fate = isRolledBack ? await park(session, id, claim) : 'not-said';
        throw new FunctionError('ended', name, undefined, { ...(error === ended ? {} : { cause: error }), detail: TRUE_OF_KEY[fate] });
      }
      if (codeOf(error) === '25P02' && isRolledBack) throw new FunctionError('rolled-back', name, undefined, { cause: error });
      throw codeOf(error) === 'OG001' ? new FunctionError('stale', name, undefined, { cause: error }) : error;
    }
  }
}

/** PostgreSQL could not serialize a claim with other transactions. Nothing has run. */
class NotSerializableError extends Error {}

/** The record and the token of a request that comes through a sidecar; undefined if it has no key. */
export interface SidecarAttempt {
  record: Buffer;
  token: string;
  attempt: number;
}

type HeaderSource = { headers: Readonly<Record<string, string | string[] | undefined>> | Headers };

/** The lines of a header field. Not every framework has names in lower case, or the global class `Headers`. */
function fieldLines(headers: HeaderSource['headers'], wanted: string): unknown[] {
  if (typeof (headers as Headers).get === 'function') {
    const value = (headers as Headers).get(wanted) as unknown;
    return value === null || value === undefined ? [] : [value];
  }
  return Object.entries(headers as Readonly<Record<string, unknown>>)
    .filter(([name, value]) => name.toLowerCase() === wanted && value !== undefined)
    .flatMap(([, value]) => value);
}

/** Reads `Oncegate-Record` and `Oncegate-Token`, which the sidecar sets, and which clients behind it cannot send. */
export function sidecarAttempt(request: HeaderSource): SidecarAttempt | undefined {
  const { headers } = request;
  if (typeof headers !== 'object' || (headers as unknown) === null || Array.isArray(headers)) {
    throw new TypeError('give a request whose headers are an object or Headers');
  }
  const records = fieldLines(headers, 'oncegate-record');
  const tokens = fieldLines(headers, 'oncegate-token');
  if (records.length === 0 && tokens.length === 0) return undefined;
  if (records.length !== 1 || tokens.length !== 1) {
    throw new TypeError('Oncegate-Record and Oncegate-Token must each be there once: does this request come from a sidecar?');
  }
  const [record, token] = [String(records[0]), String(tokens[0])];
  const [attempt = '1'] = fieldLines(headers, 'oncegate-attempt').map(String);
  const isToken = /^\d{1,19}$/.test(token) && BigInt(token) < 1n << 63n;
  if (!/^[0-9a-f]{64}$/.test(record) || !isToken || !/^\d{1,9}$/.test(attempt)) {
    throw new TypeError('Oncegate-Record or Oncegate-Token is malformed: does this request come from a sidecar?');
  }
  return { record: Buffer.from(record, 'hex'), token, attempt: Number(attempt) };
}

/** The header fields of a response as it would send them, or an error: cut to bytes, a replay would have another value. */
function completedFields(headers: Readonly<Record<string, unknown>>): [name: string, value: string][] {
  return Object.entries(headers).flatMap(([name, given]) =>
    [given].flat().map((value): [string, string] => {
      if (!/^[!#$%&'*+\-.^_`|~0-9A-Za-z]+$/.test(name)) throw new TypeError(`${shown(name)} is not the name of a header field`);
      if (typeof value !== 'string' && typeof value !== 'number') throw new TypeError(`the header field ${name} of the response has a value that is no text`);
      const text = String(value);
      if (/[^\t\x20-\x7e\x80-\xff]/.test(text)) {
        throw new TypeError(`the header field ${name} of the response has a character that HTTP does not carry; write it in ASCII, such as filename*=UTF-8''…`);
      }
      return [name.toLowerCase(), text];
    }),
  );
}

/**
 * Completes the record of a request behind a sidecar, as the last statement before `COMMIT`: `await completeInTransaction(client, req)`.
 * Give the response, so that every retry gets it. A request without a key completes nothing. If it rejects, roll back. The client is the
 * connection of an open transaction: a pool, and a connection without one, are refused.
 * If the sidecar seals, give its keys, so that the response is encrypted, too: `completeInTransaction(client, req, response, { sealKeys })`.
 */
export async function completeInTransaction(
  client: Queryable,
  request: HeaderSource,
  response?: { status: number; headers?: Readonly<Record<string, string | number | readonly string[]>>; body: string | Uint8Array },
  options: Pick<SealOptions, 'sealKeys' | 'opensOnly'> = {},
): Promise<void> {
  refusePool(client);
  const attempt = sidecarAttempt(request);
  if (attempt === undefined) return;
  let stored: Buffer | undefined;
  if (response !== undefined) {
    const { status, body } = response;
    if (typeof body !== 'string' && !(body instanceof Uint8Array)) throw new TypeError('the body of the response is neither a text nor bytes');
    const invalid = new RangeError('the response cannot be stored: its status, its size or its number of fields');
    if (!Number.isInteger(status)) throw invalid;
    stored = encodeResponse({ status, headers: completedFields(response.headers ?? {}), trailers: [], body: Buffer.from(body as string) });
    if (stored === undefined) throw invalid;
    if (seals(options)) stored = sealResponse(options.sealKeys, attempt.record, BigInt(attempt.token), stored);
  }
  await refuseWithoutTransaction(client);
  await client.query('SELECT oncegate.complete($1, $2, $3)', [attempt.record, attempt.token, stored ?? null]);
}

