// A client that sends a request under one key until its response is definite.
import { randomUUID } from 'node:crypto';
import { Moment } from './clocks.js';
import { hadNoConnection } from './engine.js';
import { bytesOfRequest, checkedKey, intentBody, isRequest } from './intent.js';
import { checkNames, durationMs, SettingsError, shown, type Duration } from './settings.js';
import { isReplay, judge, type Meaning, type Protection } from './verdict.js';
import { didYouMean } from './words.js';

export interface ClientOptions {
  /** The function that sends requests. The global `fetch` by default. */
  fetch?: typeof fetch;
  /** All attempts of one intent. 6 by default. */
  maxAttempts?: number;
  /** The first pause, which doubles, and the longest one. Full jitter. 200 ms and 20 s by default. */
  backoff?: { base: Duration; cap: Duration };
  /** The longest time for one attempt, until the whole response is there. 30 s by default. */
  attemptTimeout?: Duration;
  /** The longest time for all attempts together, by the monotonic or the wall clock, whichever shows it first. 2 minutes by default. */
  deadline?: Duration;
  /** The longest `Retry-After` for which the client waits. 1 minute by default. */
  maxRetryAfter?: Duration;
  /** The largest response that is read. 8 MiB by default. */
  maxResponseBytes?: number;
  /** What other server errors mean: `again` (the default), `final`, or `unknown`. */
  serverErrors?: 'again' | 'final' | 'unknown';
  /** The header field of the key. `Idempotency-Key` by default. */
  keyHeader?: string;
  /** The tokens that all intents of this client share for retries. 500 by default. */
  retryBudget?: number;
}

export interface SendOptions {
  /**
   * The key of the intent: 1 to 255 visible ASCII characters without quote and comma, or in quotes. By default, that of the header
   * field, and if there is none, a new UUID: then the intent cannot be sent again after this call.
   */
  key?: string;
  /** Stops waiting, as `signal` of the request does. What was sent may have taken effect. */
  signal?: AbortSignal;
  /** True if this intent was sent before, in another call or process. */
  sentBefore?: boolean;
}

export type Verdict = 'done' | 'refused' | 'turned-away' | 'failed' | 'unreplayable';

/** A definite response. */
export interface DefiniteOutcome {
  kind: 'definite';
  verdict: Verdict;
  /** What to do after a refusal. */
  advice: 'fix-request' | 'new-key' | 'stop' | undefined;
  response: Response;
  /** The response of an earlier attempt. */
  isReplayed: boolean;
  attempts: number;
  key: string;
}

export type OpenReason =
  | 'unknown' | 'turned-away' | 'attempts' | 'deadline' | 'budget' | 'come-back-later' | 'body' | 'response-too-large' | 'aborted';

/** There is no definite response. */
export interface OpenOutcome {
  kind: 'open';
  reason: OpenReason;
  /** False only if it is certain that nothing took effect. */
  mayHaveTakenEffect: boolean;
  /** The last response, if there was one. */
  response: Response | undefined;
  cause: unknown;
  /** The pause after which the service wants to be asked again, in milliseconds. */
  retryAfterMs: number | undefined;
  attempts: number;
  key: string;
}

export type Outcome = DefiniteOutcome | OpenOutcome;

const SAFE = new Set(['GET', 'HEAD', 'OPTIONS', 'TRACE']);
const RETRY_COST = 5;
const TIMEOUT_COST = 10;

class TooLargeError extends Error {}

/** The pause that a response asks for, in milliseconds. A date counts from the response's own `Date`. */
export function retryAfterMs(headers: Headers, now: number): number | undefined {
  const text = headers.get('retry-after')?.trim();
  if (text === undefined || text === '') return undefined;
  if (/^\d+$/.test(text)) return Number(text) * 1000;
  const then = Date.parse(text);
  if (!/\bGMT$/.test(text) || Number.isNaN(then)) return undefined;
  const theirs = Date.parse(headers.get('date') ?? '');
  return Math.max(0, then - (Number.isNaN(theirs) ? now : theirs));
}

const OPTIONS: readonly (keyof ClientOptions)[] = [
  'fetch', 'maxAttempts', 'backoff', 'attemptTimeout', 'deadline', 'maxRetryAfter', 'maxResponseBytes', 'serverErrors', 'keyHeader', 'retryBudget',
];

const SEND_OPTIONS: readonly (keyof SendOptions)[] = ['key', 'signal', 'sentBefore'];
const SERVER_ERRORS = ['again', 'final', 'unknown'] as const;

/** Checks a setting that is a whole number. */
function whole(name: string, value: number, min: number, max: number): number {
  if (Number.isSafeInteger(value) && value >= min && value <= max) return value;
  throw new SettingsError(`${name}: ${typeof value === 'number' ? String(value) : shown(value)} is not a whole number from ${String(min)} to ${String(max)}`);
}

/** Checks the settings that are of another kind. */
function checkOptions(options: ClientOptions): void {
  if (typeof options !== 'object' || (options as unknown) === null) throw new SettingsError(`the options of Client are ${shown(options)}; write an object`);
  checkNames('Client', options, OPTIONS);
  const { fetch, backoff, keyHeader = 'Idempotency-Key', serverErrors = 'again' } = options;
  if (fetch !== undefined && typeof fetch !== 'function') throw new SettingsError(`fetch: ${shown(fetch)} is not a function`);
  if (backoff !== undefined) {
    if (typeof backoff !== 'object' || (backoff as unknown) === null) throw new SettingsError(`backoff: ${shown(backoff)} is not an object with base and cap`);
    checkNames('backoff', backoff, ['base', 'cap']);
  }
  if (typeof keyHeader !== 'string' || !/^[!#$%&'*+\-.^_`|~0-9A-Za-z]+$/.test(keyHeader)) {
    throw new SettingsError(`keyHeader: ${shown(keyHeader)} is not the name of a header field`);
  }
  if (!SERVER_ERRORS.includes(serverErrors)) {
    const hint = typeof serverErrors === 'string' ? didYouMean(serverErrors, SERVER_ERRORS) : '';
    throw new SettingsError(`serverErrors: ${shown(serverErrors)} is none of ${SERVER_ERRORS.map((word) => JSON.stringify(word)).join(', ')}${hint}`);
  }
}

/** Checks the options of one intent: one that is mistyped would give it a new key. */
function checkSendOptions(options: SendOptions): void {
  if (typeof options !== 'object' || (options as unknown) === null) throw new SettingsError('the options of send are no object; write { key }');
  checkNames('send', options, SEND_OPTIONS);
  if ('key' in options && options.key === undefined) throw new TypeError('the key is undefined; leave it out for a new one, or give the key of the intent; nothing was sent');
  if (options.sentBefore !== undefined && typeof options.sentBefore !== 'boolean') throw new SettingsError(`sentBefore: ${shown(options.sentBefore)} is neither true nor false`);
}

/** A request as it is sent in each attempt. */
interface Prepared {
  url: string | URL;
  init: RequestInit;
  headers: Headers;
  protection: Protection;
  key: string;
  isRepeatable: boolean;
}

export class Client {
  private readonly options: Required<Omit<ClientOptions, 'fetch' | 'backoff'>> & { attemptTimeoutMs: number; deadlineMs: number; maxRetryAfterMs: number; baseMs: number; capMs: number };
  private readonly transport: typeof fetch;
  private readonly sendsHttp: boolean;
  private tokens: number;

  constructor(options: ClientOptions = {}) {
    checkOptions(options);
    const { backoff = { base: '200ms', cap: '20s' } } = options;
    const max = 86_400_000;
    this.options = {
      maxAttempts: whole('maxAttempts', options.maxAttempts ?? 6, 1, 1000),
      attemptTimeout: options.attemptTimeout ?? '30s',
      deadline: options.deadline ?? '2m',
      maxRetryAfter: options.maxRetryAfter ?? '1m',
      maxResponseBytes: whole('maxResponseBytes', options.maxResponseBytes ?? 8 * 1024 * 1024, 0, Number.MAX_SAFE_INTEGER),
      serverErrors: options.serverErrors ?? 'again',
      keyHeader: options.keyHeader ?? 'Idempotency-Key',
      retryBudget: whole('retryBudget', options.retryBudget ?? 500, 0, Number.MAX_SAFE_INTEGER),
      attemptTimeoutMs: durationMs('attemptTimeout', options.attemptTimeout ?? '30s', 1, max),
      deadlineMs: durationMs('deadline', options.deadline ?? '2m', 1, max),
      maxRetryAfterMs: durationMs('maxRetryAfter', options.maxRetryAfter ?? '1m', 0, max),
      baseMs: durationMs('backoff.base', backoff.base, 0, max),
      capMs: durationMs('backoff.cap', backoff.cap, 0, max),
    };
    this.tokens = this.options.retryBudget;
    this.sendsHttp = options.fetch === undefined;
    this.transport = options.fetch ?? ((...args) => fetch(...args));
  }

  /**
   * Sends a request under one key until its response is definite. Never rejects because of the service or the network. Throws, before
   * anything is sent, if the request or the key is invalid.
   */
  async send(input: string | URL | Request, init: RequestInit = {}, sendOptions: SendOptions = {}): Promise<Outcome> {
    checkSendOptions(sendOptions);
    const { options } = this;
    const { sentBefore = false } = sendOptions;
    const signals = [sendOptions.signal, init.signal ?? (isRequest(input) ? input.signal : undefined)].filter((one) => one !== undefined && one !== null);
    const signal = signals.length > 1 ? AbortSignal.any(signals) : signals[0];
    const { url, init: rest, headers, protection, key, isRepeatable } = await this.prepare(input, init, sendOptions.key);
    const begun = Moment.now();
    const left = () => options.deadlineMs - begun.age();
    let doubt = sentBefore;
    let paid = 0;
    for (let attempts = 1; ; attempts += 1) {
      let meaning: Meaning;
      let response: Response | undefined;
      let cause: unknown;
      let after: number | undefined;
      let cost = RETRY_COST;
      const open = (reason: OpenReason): OpenOutcome => ({ kind: 'open', reason, mayHaveTakenEffect: doubt, response, cause, retryAfterMs: after, attempts, key });
      // `AbortSignal.any` would leave something on the signal of the caller, which may live as long as the process.
      const ends = new AbortController();
      let isTimedOut = false;
      const timer = setTimeout(() => {
        isTimedOut = true;
        ends.abort(new DOMException('The operation was aborted due to timeout', 'TimeoutError'));
      }, Math.max(1, Math.ceil(Math.min(options.attemptTimeoutMs, left()))));
      const abort = (): void => { ends.abort(signal?.reason); };
      signal?.addEventListener('abort', abort);
      try {
        if (signal?.aborted === true) { cause = signal.reason; return { ...open('aborted'), attempts: attempts - 1 }; }
        const answer = await this.transport(url, { ...rest, headers: new Headers(headers), redirect: 'manual', signal: ends.signal });
        after = retryAfterMs(answer.headers, Date.now());
        if (answer.redirected && protection !== 'safe') {
          await answer.body?.cancel().catch(() => undefined);
          doubt = true;
          cause = new TypeError('the function `fetch` followed a redirect, so this is not the response to the request: obey redirect "manual"');
          return open('unknown');
        }
        if (answer.status > 599) {
          await answer.body?.cancel().catch(() => undefined);
          doubt ||= protection !== 'safe';
          cause = new RangeError(`the response has the status ${String(answer.status)}, which HTTP does not have`);
          return open('unknown');
        }
        const body = await readBody(answer, options.maxResponseBytes);
        const hasBody = body.length > 0 && ![204, 205, 304].includes(answer.status);
        response = new Response(hasBody ? (body as unknown as BodyInit) : null, { status: answer.status, statusText: answer.statusText, headers: answer.headers });
        meaning = judge({ protection, serverErrors: options.serverErrors, inDoubt: doubt }, answer.status, answer.headers, body);
        const [verdict, advice] = definite(meaning);
        if (verdict !== undefined) {
          if (verdict !== 'failed') this.tokens = Math.min(options.retryBudget, this.tokens + Math.max(paid, 1));
          return { kind: 'definite', verdict, advice, response, isReplayed: protection === 'keyed' && isReplay(answer.status, answer.headers), attempts, key };
        }
        if (meaning === 'again in-progress' || meaning === 'contested') cost = 0;
      } catch (error) {
        cause = error;
        if (error instanceof TooLargeError) { doubt ||= protection !== 'safe'; return open('response-too-large'); }
        const reason = (error as { cause?: { code?: unknown } }).cause ?? {};
        const isUnsent = hadNoConnection(reason) || reason.code === 'UND_ERR_CONNECT_TIMEOUT';
        meaning = isUnsent ? 'again nothing' : 'again maybe';
        if (isTimedOut) cost = TIMEOUT_COST;
        if (signal?.aborted === true) { doubt ||= !isUnsent && protection !== 'safe'; return open('aborted'); }
      } finally {
        clearTimeout(timer);
        signal?.removeEventListener('abort', abort);
      }
      // A safe request has no effect.
      if (protection !== 'safe') doubt ||= meaning === 'again maybe' || meaning === 'again in-progress' || meaning === 'unknown';
      if (meaning === 'unknown') return open('unknown');
      if (meaning === 'turned-away in-doubt') return open('turned-away');
      if (!isRepeatable) return open(meaning === 'contested' ? 'turned-away' : 'body');
      if (attempts >= options.maxAttempts) return open(meaning === 'contested' ? 'turned-away' : 'attempts');
      if (after !== undefined && after > options.maxRetryAfterMs) return open('come-back-later');
      const pause = Math.random() * Math.min(options.capMs, options.baseMs * 2 ** (attempts - 1)) + (after ?? 0);
      if (pause >= left()) return open(after === undefined ? 'deadline' : 'come-back-later');
      if (this.tokens < cost) return open('budget');
      this.tokens -= cost;
      paid = cost;
      await sleep(pause, signal);
      // The machine may have been suspended: the service may have forgotten the key since.
      if (left() <= 0) return open('deadline');
    }
  }

  private async prepare(input: string | URL | Request, init: RequestInit, given: string | undefined): Promise<Prepared> {
    const request = isRequest(input) ? input : undefined;
    const url = isRequest(input) ? input.url : input.toString();
    const method = (init.method ?? request?.method ?? 'GET').toUpperCase();
    const protection: Protection = SAFE.has(method) ? 'safe' : 'keyed';
    const headers = new Headers(init.headers ?? request?.headers);
    const written = headers.get(this.options.keyHeader);
    if (given !== undefined && written !== null && checkedKey(given) !== checkedKey(written)) throw new TypeError('two places have different keys; give one key; nothing was sent');
    const key = checkedKey(given === undefined ? (written ?? randomUUID()) : given);
    if (protection === 'keyed') headers.set(this.options.keyHeader, key);
    const { mode, credentials, cache, referrer, referrerPolicy, integrity, keepalive } = request ?? ({} as Partial<Request>);
    const rest: RequestInit = { ...(request === undefined ? {} : { mode, credentials, cache, referrer, referrerPolicy, integrity, keepalive }), ...init, method };
    delete rest.signal;
    if (this.sendsHttp) checkRequest(url, rest, headers);
    const { body, contentType, isRepeatable } = await intentBody(init.body ?? (request === undefined ? undefined : await bytesOfRequest(request)), this.sendsHttp);
    if (contentType !== undefined && !headers.has('content-type')) headers.set('content-type', contentType);
    delete rest.body;
    if (body !== undefined) rest.body = body;
    return { url, init: rest, headers, protection, key, isRepeatable };
  }

  /**
   * `fetch` that sends requests with a key again. A request without one, and one whose body is a stream, is sent once. Rejects with an
   * {@link OpenOutcomeError} if there is no definite response, and with a `TypeError` if the key is invalid.
   */
  readonly fetch = async (input: string | URL | Request, init: RequestInit = {}): Promise<Response> => {
    const key = new Headers(init.headers ?? (isRequest(input) ? input.headers : undefined)).get(this.options.keyHeader);
    if (key === null) return this.transport(input, init);
    const outcome = await this.send(input, init, { key });
    if (outcome.kind === 'open') throw new OpenOutcomeError(outcome);
    return outcome.response;
  };
}

/** Throws if `fetch` would not send the request at all: that is no reason to send it again. */
function checkRequest(url: string, init: RequestInit, headers: Headers): void {
  if (!isHttp(url)) throw new TypeError('the URL does not begin with http:// or https://; nothing was sent');
  const { username, password } = new URL(url);
  if (username !== '' || password !== '') throw new TypeError('the URL has credentials; send them in Authorization; nothing was sent');
  try {
    new Request(url, { ...init, headers, body: init.body === null || init.body === undefined ? undefined : '' } as RequestInit);
  } catch (cause) {
    throw new TypeError('the request is invalid; nothing was sent', { cause });
  }
}

function isHttp(url: string): boolean {
  try {
    return /^https?:$/.test(new URL(url).protocol);
  } catch {
    return false;
  }
}

/** There is no definite response: `outcome.mayHaveTakenEffect` says if the request may have taken effect. */
export class OpenOutcomeError extends Error {
  override readonly name = 'OpenOutcomeError';
  constructor(readonly outcome: OpenOutcome) {
    const effect = outcome.mayHaveTakenEffect ? 'it may have taken effect: send it again with the same key, or find out' : 'nothing took effect';
    super(`no definite response after ${String(outcome.attempts)} attempts (${outcome.reason}); ${effect}`, { cause: outcome.cause });
  }
}

function definite(meaning: Meaning): [Verdict | undefined, DefiniteOutcome['advice']] {
  switch (meaning) {
    case 'done':
    case 'turned-away':
    case 'failed':
    case 'unreplayable':
      return [meaning, undefined];
    case 'refused fix-request':
      return ['refused', 'fix-request'];
    case 'refused new-key':
      return ['refused', 'new-key'];
    case 'refused stop':
      return ['refused', 'stop'];
    default:
      return [undefined, undefined];
  }
}

async function readBody(response: Response, max: number): Promise<Buffer> {
  if (response.body === null) return Buffer.alloc(0);
  const reader = (response.body as ReadableStream<Uint8Array>).getReader();
  const chunks: Uint8Array[] = [];
  let size = 0;
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return Buffer.concat(chunks);
    size += value.length;
    if (size > max) {
      await reader.cancel().catch(() => undefined);
      throw new TooLargeError(`the response has more than ${String(max)} bytes`);
    }
    chunks.push(value);
  }
}

function sleep(ms: number, signal: AbortSignal | undefined): Promise<void> {
  return new Promise((resolve) => {
    const end = (): void => {
      clearTimeout(timer);
      signal?.removeEventListener('abort', end);
      resolve();
    };
    const timer = setTimeout(end, ms);
    signal?.addEventListener('abort', end);
  });
}
