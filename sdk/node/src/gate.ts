// The middleware without a framework: what becomes of a request, and of the response of its handler.
import { downstreamKey } from './identity.js';
import { Engine, type Permit, type Settled } from './engine.js';
import { differsInHostOnly, passes, readHead, readWhole, tooLarge, type KeyedRequest, type RequestHead, canonicalPath } from './request.js';
import { addedFields, refusalResponse, withFields, type Refusal, type WireResponse } from './refusal.js';
import { CorruptRecordError, decodeResponse, encodeResponse, type StoredField } from './response.js';
import { keptFields, replayedFields } from './headers.js';
import { isSealed } from './seal.js';
import { readSettings, durationMs, sizeBytes, SettingsError, type Duration, type IdempotencyOptions, type Settings, type Size } from './settings.js';
import { SealedError, StoreFullError, type Store } from './store.js';

/** What all middleware of a process shares: the store, and the limits. */
export interface OncegateOptions {
  store: Store;
  /** The name of the service. Required for a store on a server: services with different names never share keys. */
  service?: string;
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

/** A body, or why there is none. */
export type BodyRead = Buffer | 'too-large' | 'incomplete' | 'budget';

/** Reads a whole body. `hold` reserves memory; false: it is used up. */
export type BodyReader = (limit: number, timeoutMs: number, hold: (bytes: number) => boolean) => Promise<BodyRead>;

export type Admission =
  /** Goes to the handler without protection. With fields that the response gets. */
  | { kind: 'pass'; fields: readonly StoredField[] }
  | { kind: 'respond'; response: WireResponse }
  | { kind: 'execute'; execution: Execution; body: Buffer };

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
const STORE_FULL =
  'The store takes no new keys at the moment: it is full, it cannot write, or too many earlier requests have no recorded end yet. ' +
  'Requests with keys that it already has may still be answered. Nothing was executed. Send the same request with the same key later.';

/** The part that all middleware of a process shares. */
export class Oncegate {
  readonly engine: Engine;
  readonly service: string | undefined;
  private readonly maxInFlight: number;
  private readonly maxInFlightPerCaller: number;
  private readonly requestBudget: number;
  private readonly responseBudget: number;
  private readonly callers = new Map<string, number>();
  private inFlight = 0;
  private requestBytes = 0;
  private responseBytes = 0;

  constructor(options: OncegateOptions) {
    const { store, service } = options;
    if (service === undefined && store.name !== 'memory') {
      throw new SettingsError('service: a store on a server is shared; name your service, so that others do not share its keys');
    }
    if (service !== undefined && !/^[!-~]{1,100}$/.test(service)) {
      throw new SettingsError('service: write 1 to 100 visible ASCII characters without spaces');
    }
    this.service = service;
    this.engine = new Engine({
      store,
      storeTimeoutMs: durationMs('storeTimeout', options.storeTimeout ?? '2s', 10, 600_000),
      ...(options.warn === undefined ? {} : { warn: options.warn }),
    });
    this.maxInFlight = options.maxInFlight ?? 2048;
    this.maxInFlightPerCaller = options.maxInFlightPerCaller ?? 1024;
    this.requestBudget = sizeBytes('requestBudget', options.requestBudget ?? '256MiB', 1024 ** 4);
    this.responseBudget = sizeBytes('responseBudget', options.responseBudget ?? '256MiB', 1024 ** 4);
  }

  /** A gate with these settings. Make one for each route that differs. */
  gate(options: IdempotencyOptions = {}): Gate {
    return new Gate(this, readSettings(options));
  }

  /** Accepts no more requests with a key, and waits for those that run: call it on SIGTERM. True if all have ended. */
  drain(timeout: Duration = '30s'): Promise<boolean> {
    return this.engine.drain(durationMs('drain', timeout, 0, 3_600_000));
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

  /** True if requests with this method are covered. */
  covers(method: string): boolean {
    return this.settings.methods.includes(method.toUpperCase());
  }

  async admit(head: RequestHead, readBody: BodyReader): Promise<Admission> {
    const { settings, shared } = this;
    if (passes(settings, head)) return { kind: 'pass', fields: [] };
    const early = readHead(settings, head);
    let echo = early.echo;
    const refuse = (refusal: Refusal, record?: Buffer): Admission => {
      const response = refusalResponse(settings, refusal, record);
      return { kind: 'respond', response: { ...response, headers: withFields(response.headers, echo === undefined ? [] : [echo]) } };
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
      const read = readWhole(settings, shared.service, head, early, body);
      echo = read.echo;
      const { request } = read;
      if (request === 'passes') return { kind: 'pass', fields: [] };
      if ('refused' in request) return refuse(request.refused);
      leave = shared.enter(settings.scope.parts.length === 0 ? undefined : request.caller.toString('latin1'));
      if (leave === undefined) return overloaded(TOO_MANY);
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
      return { kind: 'execute', execution: new Execution(this, claimed.permit, request, head, echo, leave), body };
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
          return { condition: 'outcome-unknown' };
        case 'unreplayable':
          return { condition: 'replay-unavailable' };
      }
    } catch (error) {
      if (error instanceof CorruptRecordError) return { condition: 'record-corrupt' };
      if (error instanceof SealedError) return { condition: 'response-sealed', retryAfter: 30 };
      if (error instanceof StoreFullError) return { condition: 'store-unavailable', detail: STORE_FULL, retryAfter: 30 };
      shared.engine.warn(`a claim failed: ${(error as Error).name}`);
      if (settings.failsOpen && (error as Error).name !== 'StoreSetupError') return { failedOpen: true };
      return { condition: 'store-unavailable', retryAfter: 1 };
    }
  }

  /** If only the host differs, the client may have sent one request to two addresses of the service. */
  private async mismatch(request: KeyedRequest): Promise<Refusal> {
    if (this.settings.authority === 'compare') {
      const record = await this.shared.engine.store.lookup(request.id);
      if (record !== undefined && differsInHostOnly(record.fingerprint, request.fingerprint)) return { condition: 'host-differs' };
    }
    return this.settings.naturalKey === undefined
      ? { condition: 'key-reused' }
      : { condition: 'key-reused', detail: REUSED_MEMBERS };
  }
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
  readonly attempt: Attempt;
  private readonly settings: Settings;
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
    this.attempt = attemptOfPermit(permit, request.key);
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
  async finish(response: ResponseHead, body: Buffer | undefined): Promise<WireResponse> {
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
    return { status, headers: withFields(headers, marks), body: body ?? Buffer.alloc(0) };
  }

  /** The end of a handler without a response: the outcome is unknown, or the key is free, as the settings say. */
  async fail(mayStillRun = false): Promise<WireResponse> {
    const releases = this.settings.serverErrors === 'release' && !mayStillRun;
    await this.settle(releases ? 'release' : 'unknown', undefined);
    const { headers, ...response } = refusalResponse(
      this.settings,
      { condition: releases ? 'handler-failed' : 'outcome-unknown' },
      this.request.id,
    );
    return { ...response, headers: withFields(headers, this.echo === undefined ? [] : [this.echo]) };
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

