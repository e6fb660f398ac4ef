// The middleware without a framework: what becomes of a request, and of the response of its handler.
import * as cluster from 'node:cluster';
import type { Server, ServerResponse } from 'node:http';
import { Moment } from './clocks.js';
import { downstreamKey } from './identity.js';
import { Ids, type IdSecret } from './ids.js';
import { Engine, NotFreeError, reasonOf, wasReached, type Permit, type Settled } from './engine.js';
import { differsInHostOnly, isBehindSidecar, passes, sidecarRecord, readHead, readWhole, tooLarge, type KeyedRequest, type RequestHead, canonicalPath } from './request.js';
import { addedFields, refusalResponse, withFields, type Refusal, type WireResponse } from './refusal.js';
import { CorruptRecordError, decodeResponse, encodeResponse, type StoredField } from './response.js';
import { keptFields, replayedFields } from './headers.js';
import { isSealed } from './seal.js';
import { checkService, readSettings, durationMs, shown, sizeBytes, SettingsError, type Duration, type IdempotencyOptions, type Settings, type Size } from './settings.js';
import { SealedError, StoreFullError, StoreSetupError, type RecordView, type Store } from './store.js';
import { didYouMean } from './words.js';

/** What all middleware of a process shares: the store, and the limits. */
export interface OncegateOptions {
  store: Store;
  /** The name of the service. Required for a store on a server: services with different names never share keys. */
  service?: string;
  /**
   * The id secret of the store: an `IdSecret`, or the text that `oncegate id-secret new` prints. A store belongs to one for its whole
   * life, or to none, and all programs on it have the same one.
   */
  idSecret?: string | IdSecret | undefined;
  /** The longest time for one command to the store. 2 s by default. */
  storeTimeout?: Duration;
  /** The most requests with a key that run at the same time. 2048 by default. */
  maxInFlight?: number;
  /** The same for each caller. 1024 by default. */
  maxInFlightPerCaller?: number;
  /** The memory for the bodies of all requests with a key together. 256 MiB by default. */
  requestBudget?: Size;
  /** The memory for the bodies of all responses that are not sent yet. 256 MiB by default. */
  responseBudget?: Size;
  /** Gets warnings, which have no key, no credential and no body. `console.warn` by default. */
  warn?: (message: string) => void;
}

/** What a handler learns about its attempt. */
export interface Attempt {
  key: string;
  /** The identifier of the record: 64 hexadecimal digits. */
  record: string;
  /** The fencing token: a decimal number, greater than that of every earlier attempt. */
  token: string;
  /** The number of the attempt, counted from 1. */
  number: number;
  /** True if an earlier attempt was abandoned, so that its effect may have happened. */
  isAfterAbandoned: boolean;
  /** Aborted if another attempt owns the record by now. A client that leaves does not abort it. */
  signal: AbortSignal;
  /** The key for a request to another service: the same in each attempt, another one for each name. */
  downstreamKey: (name: string) => string;
}

export function attemptOfPermit(permit: Permit, key: string): Attempt {
  return {
    key,
    record: permit.id.toString('hex'),
    token: permit.token,
    number: permit.attempt,
    isAfterAbandoned: permit.isAfterAbandoned,
    signal: permit.signal,
    downstreamKey: (name) => downstreamKey(permit.id, name),
  };
}

/** The value that a body parser has made of a body, as JSON. */
export interface ParsedBody {
  parsed: Buffer;
}

/** A body, or why there is none. */
export type BodyRead = Buffer | ParsedBody | 'too-large' | 'incomplete' | 'budget';

/** Reads a whole body. `hold` reserves memory; false: it is used up. */
export type BodyReader = (limit: number, timeoutMs: number, hold: (bytes: number) => boolean) => Promise<BodyRead>;

export type Admission =
  /** Goes to the handler without protection. With fields that the response gets. */
  | { kind: 'pass'; fields: readonly StoredField[] }
  | { kind: 'respond'; response: WireResponse }
  | { kind: 'execute'; execution: Execution };

export interface ResponseHead {
  status: number;
  headers: readonly StoredField[];
}

const TOO_MANY =
  'Nothing was executed: too many requests with a key are in progress, or too many responses wait for their clients. Send the same ' +
  'request with the same key later.';
const REQUEST_BUDGET_USED_UP =
  'Nothing was executed: the memory for the bodies of requests is used up. Send the same request with the same key later.';
const RESPONSE_BUDGET_USED_UP =
  'The first request with this key was processed. The memory for responses is used up at the moment. Send the same request with the ' +
  'same key later to get the response.';
const REUSED_MEMBERS =
  'The key of this operation is built from members of its JSON body. Another request had the same members and differed in other ' +
  'parts. Nothing was executed. A request for another operation must differ in these members.';
const SAME_RECORD =
  'Nothing was executed. A sidecar of Oncegate in front of the service and the service itself use one store and one name of the service, ' +
  'so each waits for the other. The operator of the service has to leave the protection to one of them.';
const STORE_FULL =
  'The store takes no new keys at the moment: it is full, it cannot write, or too many earlier requests have no recorded end yet. ' +
  'Requests with keys that it already has may still be answered. Nothing was executed. Send the same request with the same key later.';

const STORE_PAUSES =
  'The store takes no new keys at the moment. Nothing was executed. Send the same request with the same key later.';

const OPTIONS: ReadonlySet<string> = new Set<keyof OncegateOptions>([
  'store', 'service', 'idSecret', 'storeTimeout', 'maxInFlight', 'maxInFlightPerCaller', 'requestBudget', 'responseBudget', 'warn',
]);
const COMMANDS = ['claim', 'renew', 'complete', 'release', 'lookup'] as const;

/** The last part of a shutdown, in which results are stored also while connections are open. No request with a key begins in it. */
const DRAIN_MS = 5000;

/** Checks what a service in JavaScript may have written, and returns its store. */
function checkedStore(options: unknown): Store {
  const given = (typeof options === 'object' ? (options ?? {}) : {}) as Readonly<Record<string, unknown>>;
  for (const name of Object.keys(given)) {
    if (!OPTIONS.has(name)) throw new SettingsError(`there is no option ${JSON.stringify(name)} of Oncegate${didYouMean(name, OPTIONS)}`);
  }
  const store = (given['store'] ?? undefined) as Partial<Store> | undefined;
  if (store === undefined || COMMANDS.some((name) => typeof store[name] !== 'function')) {
    throw new SettingsError('store: give a store, such as `new PostgresStore(pool)`, `new RedisStore(client)` or `new MemoryStore()`');
  }
  return store as Store;
}

function positive(name: string, value: unknown): number {
  if (!Number.isSafeInteger(value) || (value as number) < 1) throw new SettingsError(`${name}: ${shown(value)} is not a whole number from 1`);
  return value as number;
}

/** The part that all middleware of a process shares. */
export class Oncegate {
  readonly engine: Engine;
  readonly service: string | undefined;
  /** @internal */
  readonly ids: Ids;
  private readonly maxInFlight: number;
  private readonly maxInFlightPerCaller: number;
  private readonly requestBudget: number;
  private readonly responseBudget: number;
  private readonly callers = new Map<string, number>();
  private readonly advised = new Set<string>();
  /** @internal */
  isShuttingDown = false;
  private inFlight = 0;
  private requestBytes = 0;
  private responseBytes = 0;

  constructor(options: OncegateOptions) {
    const store = checkedStore(options);
    const { service } = options;
    if (service !== undefined || store.name !== 'memory') checkService(service, 'a store on a server is shared');
    this.service = service;
    this.ids = Ids.of(options.idSecret);
    this.engine = new Engine({
      store,
      ids: this.ids,
      storeTimeoutMs: durationMs('storeTimeout', options.storeTimeout ?? '2s', 10, 600_000),
      ...(options.warn === undefined ? {} : { warn: options.warn }),
    });
    if (store.name === 'memory' && (cluster as { isWorker?: boolean }).isWorker === true) {
      this.engine.advise(
        'MemoryStore in a worker of a cluster: each worker has its own records, so a key has one effect in each of them; use ' +
          'PostgresStore or RedisStore',
      );
    }
    this.maxInFlight = positive('maxInFlight', options.maxInFlight ?? 2048);
    this.maxInFlightPerCaller = positive('maxInFlightPerCaller', options.maxInFlightPerCaller ?? 1024);
    this.requestBudget = sizeBytes('requestBudget', options.requestBudget ?? '256MiB', 1024 ** 4);
    this.responseBudget = sizeBytes('responseBudget', options.responseBudget ?? '256MiB', 1024 ** 4);
  }

  /** A gate with these settings. Make one for each route that differs. */
  gate(options: IdempotencyOptions = {}): Gate {
    const settings = readSettings(options);
    for (const warning of settings.warnings) this.engine.advise(warning);
    return new Gate(this, settings);
  }

  /**
   * Ends a server of Node without a failed request: call it on SIGTERM, and then end the process. It takes no more connections, closes
   * each one after its response, and waits until all requests have ended and their ends are stored. True if all have. No request with a key
   * begins in the last 5 seconds.
   */
  async shutdown(server: Server, timeout: Duration = '30s'): Promise<boolean> {
    const timeoutMs = durationMs('shutdown', timeout, 0, 3_600_000);
    const begun = Moment.now();
    this.isShuttingDown = true;
    // A connection that is kept alive would bring requests as long as its client has some.
    server.prependListener('request', (_, response: ServerResponse) => { response.shouldKeepAlive = false; });
    const endHurry = this.engine.hurry();
    const idle = setInterval(() => { server.closeIdleConnections(); }, 50);
    const closed = new Promise<boolean>((resolve) => { server.close(() => { resolve(true); }); });
    const closedBefore = async (ms: number): Promise<boolean> => {
      let late: NodeJS.Timeout | undefined;
      const over = new Promise<boolean>((resolve) => { late = setTimeout(() => { resolve(false); }, Math.max(0, ms - begun.age())); });
      return Promise.race([closed, over]).finally(() => { clearTimeout(late); });
    };
    // A response that has no end must not take the time in which results can be stored.
    await closedBefore(timeoutMs - Math.min(DRAIN_MS, timeoutMs / 2));
    const ended = await Promise.all([this.engine.drain(Math.max(0, timeoutMs - begun.age())), closedBefore(timeoutMs)]);
    endHurry();
    clearInterval(idle);
    return ended.every(Boolean);
  }

  /** Accepts no more requests with a key, and waits for those that run. True if all have ended. See also {@link shutdown}. */
  drain(timeout: Duration = '30s'): Promise<boolean> {
    return this.engine.drain(durationMs('drain', timeout, 0, 3_600_000));
  }

  /** @internal Reports a warning about the way of requests, once. */
  adviseOnce(message: string): void {
    if (this.advised.has(message)) return;
    this.advised.add(message);
    this.engine.advise(message);
  }

  /** @internal */
  enter(caller: string | undefined): (() => void) | undefined {
    const own = caller === undefined ? 0 : (this.callers.get(caller) ?? 0);
    if (this.inFlight >= this.maxInFlight || own >= this.maxInFlightPerCaller || this.responseBytes >= this.responseBudget) {
      return undefined;
    }
    this.inFlight += 1;
    if (caller !== undefined) this.callers.set(caller, own + 1);
    let isLeft = false;
    return () => {
      if (isLeft) return;
      isLeft = true;
      this.inFlight -= 1;
      if (caller === undefined) return;
      const left = (this.callers.get(caller) ?? 1) - 1;
      if (left === 0) this.callers.delete(caller);
      else this.callers.set(caller, left);
    };
  }

  /** @internal */
  holdRequest(bytes: number): boolean {
    if (bytes > 0 && this.requestBytes + bytes > this.requestBudget) return false;
    this.requestBytes += bytes;
    return true;
  }

  /** @internal */
  holdResponse(bytes: number): void {
    this.responseBytes += bytes;
  }

  /** @internal */
  get hasResponseBudget(): boolean {
    return this.responseBytes < this.responseBudget;
  }
}

export class Gate {
  constructor(
    readonly shared: Oncegate,
    readonly settings: Settings,
  ) {}

  /** True if a request goes to the handler as it is. */
  passes(head: RequestHead): boolean {
    return passes(this.settings, head);
  }

  async admit(head: RequestHead, readBody: BodyReader): Promise<Admission> {
    const { settings, shared } = this;
    if (passes(settings, head)) return { kind: 'pass', fields: [] };
    if (isBehindSidecar(head)) {
      shared.adviseOnce(
        'a sidecar of Oncegate is in front of this service, and its requests meet the middleware of the service, too: both keep a record ' +
          'of each. Leave the protection to one of them',
      );
    }
    const early = readHead(settings, head);
    let echo = early.echo;
    const refuse = (refusal: Refusal, record?: Buffer): Admission => {
      const response = refusalResponse(settings, refusal, record);
      const more = [...(echo === undefined ? [] : [echo]), ...forSidecar(head)];
      if (refusal.condition === 'scope-not-set') {
        shared.engine.warn(`a request was refused: ${refusal.detail ?? refusal.condition}`, 'scope');
      }
      return { kind: 'respond', response: { ...response, headers: withFields(response.headers, more) } };
    };
    const overloaded = (detail: string) => refuse({ condition: 'overloaded', detail, retryAfter: 1 });
    if (early.refusal !== undefined) return refuse(early.refusal);
    let held = 0;
    const hold = (bytes: number): boolean => {
      const fits = shared.holdRequest(bytes);
      if (fits) held += bytes;
      return fits;
    };
    let leave: (() => void) | undefined;
    let isExecuting = false;
    try {
      const body = await readBody(settings.maxRequestBody, settings.bodyTimeoutMs, hold);
      if (body === 'too-large') return refuse(tooLarge(settings.maxRequestBody));
      if (body === 'incomplete') return refuse({ condition: 'request-incomplete' });
      if (body === 'budget') return overloaded(REQUEST_BUDGET_USED_UP);
      const read = readWhole(settings, shared, head, early, body);
      echo = read.echo;
      const { request } = read;
      if (request === 'passes') return { kind: 'pass', fields: [] };
      if ('refused' in request) return refuse(request.refused);
      leave = shared.enter(settings.scope.parts.length === 0 ? undefined : request.caller.toString('latin1'));
      if (leave === undefined) return overloaded(TOO_MANY);
      if (sidecarRecord(head) === request.id.toString('hex')) {
        shared.engine.warn('a sidecar of Oncegate and this service have the same record for a request, which was refused', 'sidecar');
        return refuse({ condition: 'store-unavailable', detail: SAME_RECORD, retryAfter: 30 }, request.id);
      }
      const claimed = await this.claim(request);
      if ('condition' in claimed) return refuse(claimed, request.id);
      if ('failedOpen' in claimed) {
        const fields: StoredField[] = [['idempotency-status', 'failed-open']];
        return { kind: 'pass', fields: echo === undefined ? fields : [...fields, echo] };
      }
      if ('response' in claimed) {
        if (!shared.hasResponseBudget) return overloaded(RESPONSE_BUDGET_USED_UP);
        return { kind: 'respond', response: replay(settings, claimed.response, echo) };
      }
      isExecuting = true;
      return { kind: 'execute', execution: new Execution(this, claimed.permit, request, head, echo, leave) };
    } finally {
      if (!isExecuting) leave?.();
      shared.holdRequest(-held);
    }
  }

  private async claim(
    request: KeyedRequest,
  ): Promise<{ permit: Permit } | { response: Buffer } | { failedOpen: true } | Refusal> {
    const { settings, shared } = this;
    try {
      const result = await shared.engine.claim(request, settings);
      switch (result.outcome) {
        case 'execute': {
          const { permit } = result;
          if (await permit.confirm()) return { permit };
          const released = await permit.release();
          return { condition: released === 'fenced' ? 'request-in-progress' : 'store-unavailable', retryAfter: 1 };
        }
        case 'replay':
          if (isSealed(result.response)) throw new SealedError('the stored response is sealed; give the store its keys: SealedStore');
          return { response: result.response };
        case 'in-progress':
          return { condition: 'request-in-progress', retryAfter: retryAfter(result.leaseLeftMs, result.runningForMs) };
        case 'mismatch':
          return await this.mismatch(request);
        case 'unknown':
          shared.engine.warnOf(request.id, 'the outcome of an earlier attempt is unknown, so a retry was refused; an operator decides');
          return { condition: 'outcome-unknown' };
        case 'unreplayable':
          return { condition: 'replay-unavailable' };
      }
    } catch (error) {
      if (error instanceof CorruptRecordError) {
        shared.engine.warnOf(request.id, 'it cannot be read');
        return { condition: 'record-corrupt' };
      }
      if (error instanceof SealedError) {
        shared.engine.warn(`a stored response cannot be opened: ${error.message}`, 'sealed');
        return { condition: 'response-sealed', retryAfter: 30 };
      }
      if (error instanceof StoreFullError) {
        if (error.isPassing) {
          shared.engine.warn(`a claim was refused, because the store takes no keys at the moment: ${error.message}`, 'full');
          return { condition: 'store-unavailable', detail: STORE_PAUSES, retryAfter: 1 };
        }
        shared.engine.warn(`a claim was refused, because the store is full: ${error.message}`, 'full');
        return { condition: 'store-unavailable', detail: STORE_FULL, retryAfter: 30 };
      }
      const isSetup = error instanceof StoreSetupError;
      shared.engine.warn(`a claim failed: ${isSetup ? error.message : reasonOf(error)}`, 'claim');
      // A store that was reached is no outage, and what this process executes or has executed is not executed again.
      if (settings.failsOpen && !isSetup && !(error instanceof NotFreeError) && !wasReached(error)) return { failedOpen: true };
      return { condition: 'store-unavailable', retryAfter: 1 };
    }
  }

  /** If only the host differs, the client may have sent one request to two addresses of the service. */
  private async mismatch(request: KeyedRequest): Promise<Refusal> {
    if (this.settings.authority === 'compare') {
      let record: RecordView | undefined;
      try {
        record = await this.shared.engine.lookup(request.id);
      } catch (error) {
        // The store has refused the request already.
        throw new NotFreeError(reasonOf(error));
      }
      if (record !== undefined && differsInHostOnly(record.fingerprint, request.fingerprint)) {
        this.shared.engine.warn(
          'a retry differs from its first request in its host only, and was refused: if these hosts are one service, set `authority` to "ignore"',
          'host',
        );
        return { condition: 'host-differs' };
      }
    }
    return this.settings.naturalKey === undefined
      ? { condition: 'key-reused' }
      : { condition: 'key-reused', detail: REUSED_MEMBERS };
  }
}

/**
 * What a sidecar in front of the service needs to know of a refusal: it is no outcome, and the key is free for a retry. The record of the
 * service decides then.
 */
function forSidecar(head: RequestHead): StoredField[] {
  return isBehindSidecar(head) ? [['idempotency-store', 'release']] : [];
}

/** Nearly every request ends within a second, and one that has been running for some time will most likely run as long again. */
function retryAfter(leaseLeftMs: number, runningForMs: number): number {
  return Math.max(1, Math.min(Math.floor(runningForMs / 1000), 5, Math.ceil(leaseLeftMs / 1000)));
}

function replay(settings: Settings, encoded: Buffer, echo: StoredField | undefined): WireResponse {
  const stored = decodeResponse(encoded);
  let headers = replayedFields(stored.headers);
  headers = withFields(headers, addedFields(settings.profile.headers.response, headers, false));
  headers = withFields(headers, [settings.replayMarker, ...(echo === undefined ? [] : [echo])]);
  return { status: stored.status, headers, body: stored.body };
}

type Fate = 'replay' | 'release' | 'tombstone' | 'unknown';
const DIRECTIVES: ReadonlySet<string> = new Set<Fate>(['replay', 'release', 'tombstone', 'unknown']);

/** One execution of a handler under a key. It ends once. */
export class Execution {
  private readonly settings: Settings;
  private shownAttempt: Attempt | undefined;
  private isEnded = false;

  /** @internal */
  constructor(
    private readonly gate: Gate,
    private readonly permit: Permit,
    private readonly request: KeyedRequest,
    private readonly head: RequestHead,
    private readonly echo: StoredField | undefined,
    private readonly leave: () => void,
  ) {
    this.settings = gate.settings;
  }

  get attempt(): Attempt {
    this.shownAttempt ??= attemptOfPermit(this.permit, this.request.key);
    return this.shownAttempt;
  }

  get owner(): Oncegate {
    return this.gate.shared;
  }

  get maxResponseBody(): number {
    return this.settings.maxResponseBody;
  }

  get handlerTimeoutMs(): number {
    return this.settings.handlerTimeoutMs;
  }

  holdResponse(bytes: number): void {
    this.gate.shared.holdResponse(bytes);
  }

  get isLastOfConnection(): boolean {
    return this.gate.shared.isShuttingDown;
  }

  warn(message: string): void {
    this.gate.shared.engine.warn(message, 'response');
  }

  /** True if the body of such a response has no end that could be waited for. */
  isEndless({ status, headers }: ResponseHead): boolean {
    const essence = (headers.find(([name]) => name === 'content-type')?.[1] ?? '').split(';', 1)[0]?.trim().toLowerCase() ?? '';
    return (
      status === 101 ||
      essence === 'text/event-stream' ||
      essence === 'multipart/x-mixed-replace' ||
      essence.startsWith('application/grpc')
    );
  }

  /** Stores the response, and returns what the client gets. Without a body: it is streamed, and cannot be replayed. */
  finish(response: ResponseHead, body: Buffer | undefined): Promise<WireResponse> {
    return this.end(response, body, body);
  }

  /** The end of a handler whose response has another length than it announced: it is done, and its response is not replayed. */
  finishIncomplete(response: ResponseHead, body: Buffer, declared: number): Promise<WireResponse> {
    this.gate.shared.engine.warnOf(
      this.request.id,
      `its response announced ${String(declared)} bytes and has ${String(body.length)}, so it is not replayed`,
    );
    return this.end(response, undefined, body);
  }

  private async end(response: ResponseHead, body: Buffer | undefined, sent: Buffer | undefined): Promise<WireResponse> {
    const { settings } = this;
    const { profile } = settings;
    const { status } = response;
    const directives = response.headers.filter(([name]) => name === 'idempotency-store').map(([, value]) => value.trim().toLowerCase());
    const [first] = directives;
    const directive = first !== undefined && DIRECTIVES.has(first) && directives.every((own) => own === first) ? (first as Fate) : undefined;
    let headers = response.headers.filter(([name]) => name !== 'idempotency-store' && name !== 'idempotency-status');
    headers = withFields(headers, addedFields(profile.headers.response, headers, false));
    let fate = directive ?? this.fate(status, headers);
    const isKeptServerError = fate === 'replay' && status >= 500;
    if (isKeptServerError) headers = withFields(headers, addedFields(profile.headers['kept-server-error'], headers, false));
    let stored: Buffer | undefined;
    if (fate === 'replay') {
      if (body !== undefined && body.length <= settings.maxResponseBody && !this.isEndless(response)) {
        stored = encodeResponse({ status, headers: keptFields(headers, settings.storedHeaders), trailers: [], body });
      }
      if (stored === undefined) fate = 'tombstone';
    }
    const settled = await this.settle(fate, stored);
    headers = headers.filter(([name]) => name !== settings.replayMarker[0]);
    const marks: StoredField[] = settled === 'done' ? [] : [['idempotency-status', settled]];
    if (this.echo !== undefined) marks.push(this.echo);
    // What the handler says of its response is for the sidecar, too.
    if (directive !== undefined && isBehindSidecar(this.head)) marks.push(['idempotency-store', directive]);
    return { status, headers: withFields(headers, marks), body: sent ?? Buffer.alloc(0) };
  }

  /** Frees the key of a handler that did not begin. */
  async release(): Promise<void> {
    await this.settle('release', undefined);
  }

  /** The end of a handler without a response: the outcome is unknown, or the key is free, as the settings say. */
  async fail(why: string, mayStillRun = false): Promise<WireResponse> {
    const releases = this.settings.serverErrors === 'release' && !mayStillRun;
    if (!releases && !this.isEnded) this.gate.shared.engine.warnOf(this.request.id, `the outcome is unknown: ${why}`);
    await this.settle(releases ? 'release' : 'unknown', undefined);
    const { headers, ...response } = refusalResponse(
      this.settings,
      { condition: releases ? 'handler-failed' : 'outcome-unknown' },
      this.request.id,
    );
    return { ...response, headers: withFields(headers, [...(this.echo === undefined ? [] : [this.echo]), ...forSidecar(this.head)]) };
  }

  private async settle(fate: Fate, stored: Buffer | undefined): Promise<Settled> {
    if (this.isEnded) {
      // The outcome of a handler that ran for too long became known after all.
      if (fate !== 'replay' && fate !== 'tombstone') return 'done';
      return this.gate.shared.engine.settle(
        this.permit.id,
        this.permit.token,
        { kind: 'complete', state: fate === 'replay' ? 'completed' : 'tombstone', response: stored },
        this.settings,
      );
    }
    this.isEnded = true;
    try {
      switch (fate) {
        case 'replay':
          return await this.permit.complete('completed', stored);
        case 'tombstone':
          return await this.permit.complete('tombstone');
        case 'unknown':
          return await this.permit.complete('unknown');
        case 'release':
          return await this.permit.release();
      }
    } finally {
      this.leave();
    }
  }

  private fate(status: number, headers: readonly StoredField[]): Fate {
    if (this.redirectsToItself(status, headers) || this.settings.releases(status)) return 'release';
    return status >= 500 && this.settings.serverErrors === 'release' ? 'release' : 'replay';
  }

  /** Redirects to another spelling of the same path, or to another host, are not the outcome of the operation. */
  private redirectsToItself(status: number, headers: readonly StoredField[]): boolean {
    const keepsMethod = status === 307 || status === 308;
    const location = headers.find(([name]) => name === 'location')?.[1];
    if ((!keepsMethod && status !== 301) || location === undefined) return false;
    const pathOf = (target: string) => target.replace(/^[A-Za-z][A-Za-z0-9+\-.]*:\/\/[^/?#]*/, '').split(/[?#]/, 1)[0] ?? '';
    const canonical = (path: string) => canonicalPath(path === '' ? '/' : path, this.settings.trailingSlash);
    const [from, to] = [pathOf(this.head.target), pathOf(location)];
    return to.startsWith('/') && canonical(from) === canonical(to) && (keepsMethod || from !== to);
  }
}

