// A client that sends a request under one key until its response is definite.
import { randomUUID } from 'node:crypto';
import type { StoredField } from './response.js';
import { durationMs, type Duration } from './settings.js';
import { isReplay, judge, type Meaning, type Protection } from './verdict.js';

export interface ClientOptions {
  /** The function that sends requests. The global `fetch` by default. */
  fetch?: typeof fetch;
  /** All attempts of one intent. 6 by default. */
  maxAttempts?: number;
  /** The first pause, which doubles, and the longest one. Full jitter. 200 ms and 20 s by default. */
  backoff?: { base: Duration; cap: Duration };
  /** The longest time for one attempt, until the whole response is there. 30 s by default. */
  attemptTimeout?: Duration;
  /** The longest time for all attempts together. 2 minutes by default. */
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
  /** The key of the intent. A new UUID by default: then the intent cannot be sent again after this call. */
  key?: string;
  /** Stops waiting. What was sent may have taken effect. */
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
const NO_CONNECTION = new Set(['ECONNREFUSED', 'ENOTFOUND', 'EAI_AGAIN', 'EHOSTUNREACH', 'ENETUNREACH', 'UND_ERR_CONNECT_TIMEOUT']);
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

export class Client {
  private readonly options: Required<Omit<ClientOptions, 'fetch' | 'backoff'>> & { attemptTimeoutMs: number; deadlineMs: number; maxRetryAfterMs: number; baseMs: number; capMs: number };
  private readonly transport: typeof fetch;
  private tokens: number;

  constructor(options: ClientOptions = {}) {
    const { backoff = { base: '200ms', cap: '20s' } } = options;
    const max = 86_400_000;
    this.options = {
      maxAttempts: options.maxAttempts ?? 6,
      attemptTimeout: options.attemptTimeout ?? '30s',
      deadline: options.deadline ?? '2m',
      maxRetryAfter: options.maxRetryAfter ?? '1m',
      maxResponseBytes: options.maxResponseBytes ?? 8 * 1024 * 1024,
      serverErrors: options.serverErrors ?? 'again',
      keyHeader: options.keyHeader ?? 'Idempotency-Key',
      retryBudget: options.retryBudget ?? 500,
      attemptTimeoutMs: durationMs('attemptTimeout', options.attemptTimeout ?? '30s', 1, max),
      deadlineMs: durationMs('deadline', options.deadline ?? '2m', 1, max),
      maxRetryAfterMs: durationMs('maxRetryAfter', options.maxRetryAfter ?? '1m', 0, max),
      baseMs: durationMs('backoff.base', backoff.base, 0, max),
      capMs: durationMs('backoff.cap', backoff.cap, 0, max),
    };
    this.tokens = this.options.retryBudget;
    this.transport = options.fetch ?? ((...args) => fetch(...args));
  }

  /** Sends a request under one key until its response is definite. Never rejects because of the service or the network. */
  async send(url: string | URL, init: RequestInit = {}, { key = randomUUID(), signal, sentBefore = false }: SendOptions = {}): Promise<Outcome> {
    const { options } = this;
    const method = (init.method ?? 'GET').toUpperCase();
    const protection: Protection = SAFE.has(method) ? 'safe' : 'keyed';
    const headers = new Headers(init.headers);
    if (protection === 'keyed') headers.set(options.keyHeader, key);
    const isStream = init.body instanceof ReadableStream;
    const deadline = performance.now() + options.deadlineMs;
    let doubt = sentBefore;
    let paid = 0;
    for (let attempts = 1; ; attempts += 1) {
      let meaning: Meaning;
      let response: Response | undefined;
      let cause: unknown;
      let after: number | undefined;
      let cost = RETRY_COST;
      const open = (reason: OpenReason): OpenOutcome => ({ kind: 'open', reason, mayHaveTakenEffect: doubt, response, cause, retryAfterMs: after, attempts, key });
      const timeout = AbortSignal.timeout(Math.max(1, Math.ceil(Math.min(options.attemptTimeoutMs, deadline - performance.now()))));
      try {
        if (signal?.aborted === true) { cause = signal.reason; return { ...open('aborted'), attempts: attempts - 1 }; }
        const answer = await this.transport(url, { ...init, method, headers, redirect: 'manual', signal: signal === undefined ? timeout : AbortSignal.any([timeout, signal]) });
        after = retryAfterMs(answer.headers, Date.now());
        const body = await readBody(answer, options.maxResponseBytes);
        const hasBody = body.length > 0 && ![204, 205, 304].includes(answer.status);
        response = new Response(hasBody ? (body as unknown as BodyInit) : null, { status: answer.status, statusText: answer.statusText, headers: answer.headers });
        const fields: StoredField[] = [...answer.headers];
        meaning = judge({ protection, serverErrors: options.serverErrors, inDoubt: doubt }, answer.status, fields, body);
        const [verdict, advice] = definite(meaning);
        if (verdict !== undefined) {
          if (verdict !== 'failed') this.tokens = Math.min(options.retryBudget, this.tokens + Math.max(paid, 1));
          return { kind: 'definite', verdict, advice, response, isReplayed: protection === 'keyed' && isReplay(answer.status, fields), attempts, key };
        }
        if (meaning === 'again in-progress' || meaning === 'contested') cost = 0;
      } catch (error) {
        cause = error;
        if (error instanceof TooLargeError) { doubt = true; return open('response-too-large'); }
        const code = ((error as { cause?: { code?: unknown } }).cause ?? {}).code;
        const isUnsent = typeof code === 'string' && NO_CONNECTION.has(code);
        meaning = isUnsent ? 'again nothing' : 'again maybe';
        if (timeout.aborted) cost = TIMEOUT_COST;
        if (signal?.aborted === true) { doubt ||= !isUnsent; return open('aborted'); }
      }
      // A safe request has no effect.
      if (protection !== 'safe') doubt ||= meaning === 'again maybe' || meaning === 'again in-progress' || meaning === 'unknown';
      if (meaning === 'unknown') return open('unknown');
      if (meaning === 'turned-away in-doubt') return open('turned-away');
      if (isStream) return open(meaning === 'contested' ? 'turned-away' : 'body');
      if (attempts >= options.maxAttempts) return open(meaning === 'contested' ? 'turned-away' : 'attempts');
      if (after !== undefined && after > options.maxRetryAfterMs) return open('come-back-later');
      const pause = Math.random() * Math.min(options.capMs, options.baseMs * 2 ** (attempts - 1)) + (after ?? 0);
      if (performance.now() + pause >= deadline) return open(after === undefined ? 'deadline' : 'come-back-later');
      if (this.tokens < cost) return open('budget');
      this.tokens -= cost;
      paid = cost;
      await sleep(pause, signal);
    }
  }

  /**
   * `fetch` that sends requests with a key again. A request without one, and one that reads streams, is sent once. Rejects with an
   * {@link OpenOutcomeError} if there is no definite response.
   */
  readonly fetch = async (url: string | URL, init: RequestInit = {}): Promise<Response> => {
    const key = new Headers(init.headers).get(this.options.keyHeader);
    if (key === null) return this.transport(url, init);
    const { signal, ...rest } = init;
    const outcome = await this.send(url, rest, { key, ...(signal === null || signal === undefined ? {} : { signal }) });
    if (outcome.kind === 'open') throw new OpenOutcomeError(outcome);
    return outcome.response;
  };
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
