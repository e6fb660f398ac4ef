// One key for each intent of a user, kept until the outcome is definite, and requests that are sent again under it.
import { mark } from './hash.js';
import { isReplay, judge, type Meaning } from './verdict.js';

export { judge, type Meaning } from './verdict.js';

/** Where intents are kept: `sessionStorage`, `localStorage`, or something like them. */
export type IntentStorage = Pick<Storage, 'getItem' | 'setItem' | 'removeItem'>;

export interface IntentOptions {
  /** Method (`POST` by default), header fields, credentials and so on. `init.body` replaces the content as JSON. */
  init?: RequestInit;
  /**
   * Where intents are kept. `sessionStorage` by default: a reload keeps them, and closing the tab forgets them. `localStorage` keeps
   * them, and the tabs of a site share them.
   */
  storage?: IntentStorage;
  /** A key that the service gave out, for example with the cart. A random UUID by default. */
  key?: string;
  /** How long the service knows a key, in milliseconds. What may have been sent is not sent under an older key. 24 hours by default. */
  keyLifetime?: number;
  /** The function that sends requests. The global `fetch` by default. */
  fetch?: typeof fetch;
  /** All attempts of one `send`. 6 by default. */
  maxAttempts?: number;
  /** The longest time for one attempt in milliseconds, until the whole response is there. 30 000 by default. */
  attemptTimeout?: number;
  /** The longest time for all attempts of one `send` together, in milliseconds. 120 000 by default. */
  deadline?: number;
  /** The longest `Retry-After` for which it waits, in milliseconds. 60 000 by default. */
  maxRetryAfter?: number;
  /** False while nothing can be sent, and then nothing is. `navigator.onLine` by default. */
  isOnline?: () => boolean;
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
  | 'unknown' | 'turned-away' | 'attempts' | 'deadline' | 'budget' | 'come-back-later' | 'offline' | 'aborted' | 'key-lifetime' | 'earlier-intent';

/** There is no definite response. */
export interface OpenOutcome {
  kind: 'open';
  reason: OpenReason;
  /** False only if it is certain that nothing took effect. */
  mayHaveTakenEffect: boolean;
  /** The last response, if there was one. */
  response: Response | undefined;
  cause: unknown;
  /** The pause after which the service wants to be asked again, in milliseconds. 0 if it does not say. */
  retryAfter: number;
  attempts: number;
  key: string;
}

export type Outcome = DefiniteOutcome | OpenOutcome;

/** An outcome in the words of a page. */
export type OutcomeState = 'done' | 'refused' | 'failed' | 'unknown' | 'not-done';

/** What one user wants to be done once. */
export interface Intent {
  /** The key that the next `send` has. A person who asks for support can name it. */
  readonly key: string;
  /** False if the storage of the page does not work: then a reload forgets the key. Known when `send` was called. */
  readonly isKept: boolean;
  /**
   * Sends the intent under its key until the response is definite. `signal` stops that: what was sent may have taken effect. While this
   * intent is being sent on this page, it returns the outcome of that. Throws if the request is invalid, and never because of the service
   * or the network.
   */
  send(signal?: AbortSignal): Promise<Outcome>;
}

/** Nothing took effect; something may have; a definite outcome that is not a refusal. */
type State = 0 | 1 | 2;
const UNSENT = 0;
const IN_DOUBT = 1;
const DONE = 2;
/** What is kept of an intent. The content is kept as a digest only. */
type Entry = [key: string, digest: string, state: State, created: number, place?: string | null];

const PREFIX = 'oncegate:';
const BACKOFF_BASE = 200;
const BACKOFF_CAP = 20_000;
const RETRY_COST = 5;
const TIMEOUT_COST = 10;
const MAX_TOKENS = 500;

/** What all intents of the page have for retries. A retry takes 5 tokens, after a time-out 10; a response gives them back. */
let tokens = MAX_TOKENS;
/** Entries of a page whose storage throws. They do not outlive it. */
const memory = new Map<string, string>();
const sendings = new Map<string, readonly [digest: string, outcome: Promise<Outcome>]>();

/** Throws where there is no document: on a server, one storage would mix the intents of all users. */
const home = (storage: IntentStorage | undefined): { sessionStorage: IntentStorage } => (storage ? { sessionStorage: storage } : document.defaultView) as Window;

const load = (id: string, storage: IntentStorage | undefined): Entry | null => {
  const place = home(storage);
  try {
    return JSON.parse(memory.get(id) ?? place.sessionStorage.getItem(id) ?? '') as Entry;
  } catch {
    return null;
  }
};

const save = (id: string, storage: IntentStorage | undefined, entry?: Entry): void => {
  const text = JSON.stringify(entry);
  memory.delete(id);
  try {
    const place = home(storage).sessionStorage;
    if (entry) place.setItem(id, text);
    else place.removeItem(id);
  } catch {
    if (entry) memory.set(id, text);
  }
};

/** A UUID of version 4. `crypto.randomUUID` is missing on pages without TLS. */
const uuid = (): string =>
  '10000000-1000-4000-8000-100000000000'.replace(/[018]/g, (digit) =>
    (Number(digit) ^ ((crypto.getRandomValues(new Uint8Array(1))[0] ?? 0) & (15 >> (Number(digit) / 4)))).toString(16),
  );

const isForm = (content: unknown): content is FormData | URLSearchParams => content instanceof FormData || content instanceof URLSearchParams;

/** Tells two requests apart. It need not be certain: the service compares them, too. */
const digestOf = (parts: readonly unknown[]): string =>
  mark(
    JSON.stringify(parts, (_, value: unknown) =>
      isForm(value) ? [...value] : value instanceof File ? [value.name, value.size, value.lastModified] : value,
    ),
  );

/** The place in the history of the tab: a purchase again from there is the same one. Null in browsers that do not tell. */
const placeNow = (): string | null => (globalThis as { navigation?: { currentEntry?: { key: string } } }).navigation?.currentEntry?.key ?? null;

const wait = (ms: number, ...events: [target: EventTarget | undefined, type: string][]): Promise<unknown> =>
  new Promise((resolve) => {
    setTimeout(resolve, ms);
    for (const [target, type] of events) target?.addEventListener?.(type, resolve, { once: true });
  });

/** Sends a request under one key until its response is definite. With a reason it sends nothing. */
async function attempt(
  send: (signal: AbortSignal) => Promise<Response>,
  key: string,
  doubt: boolean,
  { maxAttempts = 6, attemptTimeout = 30_000, deadline = 120_000, maxRetryAfter = 60_000, isOnline = () => (globalThis.navigator?.onLine as boolean | undefined) !== false }: IntentOptions,
  signal: AbortSignal | undefined,
  reason?: OpenReason,
): Promise<Outcome> {
  const began = performance.now();
  const left = (): number => began + deadline - performance.now();
  let paid = 1;
  for (let attempts = 0; ; ) {
    let response: Response | undefined;
    let cause: unknown;
    let retryAfter = 0;
    let cost = RETRY_COST;
    let meaning: Meaning = 'again maybe';
    if (reason === undefined && !isOnline()) await wait(left(), [signal, 'abort'], [globalThis, 'online']);
    reason ??= signal?.aborted ? 'aborted' : isOnline() ? undefined : 'offline';
    if (reason === undefined) {
      attempts += 1;
      const timeout = AbortSignal.timeout(Math.ceil(Math.max(1, Math.min(attemptTimeout, left()))));
      try {
        const answer = await send(AbortSignal.any(signal ? [timeout, signal] : [timeout]));
        const { headers } = answer;
        const after = headers.get('retry-after') ?? '';
        retryAfter = Math.max(0, (/^\d+$/.test(after) ? Number(after) * 1000 : Date.parse(after) - Date.parse(headers.get('date') ?? '')) || 0);
        const body = new Uint8Array(await answer.clone().arrayBuffer());
        response = answer;
        // Scripts do not see the status of a redirection. It may lead to a page to sign in, so it counts as a 302.
        const status = answer.status || 302;
        meaning = judge(doubt, status, headers, body);
        if (!/again|con|unk|doubt/.test(meaning)) {
          const [verdict, advice] = meaning.split(' ') as [Verdict, DefiniteOutcome['advice']];
          if (verdict !== 'failed') tokens = Math.min(MAX_TOKENS, tokens + paid);
          return { kind: 'definite', verdict, advice, response, isReplayed: isReplay(status, headers), attempts, key };
        }
      } catch (error) {
        // Scripts are not told if a request was sent.
        cause = error;
        if (timeout.aborted) cost = TIMEOUT_COST;
      }
      if (/pro|con/.test(meaning)) cost = 0;
      doubt ||= /may|pro|unk/.test(meaning);
    }
    const pause = Math.random() * Math.min(BACKOFF_CAP, BACKOFF_BASE * 2 ** (attempts - 1)) + retryAfter;
    const isLast = attempts >= maxAttempts;
    reason ??= signal?.aborted
      ? 'aborted'
      : meaning === 'unknown'
        ? meaning
        : /doubt/.test(meaning) || (isLast && meaning === 'contested')
          ? 'turned-away'
          : isLast
            ? 'attempts'
            : retryAfter > maxRetryAfter || (retryAfter && pause >= left())
              ? 'come-back-later'
              : pause >= left()
                ? 'deadline'
                : tokens < cost
                  ? 'budget'
                  : undefined;
    if (reason !== undefined) return { kind: 'open', reason, mayHaveTakenEffect: doubt, response, cause, retryAfter, attempts, key };
    tokens -= cost;
    paid = cost || 1;
    await wait(pause, [signal, 'abort']);
  }
}

/**
 * The intent of this name to send this content to this address, as JSON or as a form. The same intent has the same key until its outcome
 * is definite, also after a reload. After it was done it still has, at the same place of the tab's history. An intent with another
 * content or address is a new one, which is not sent while the outcome of the one before is unknown.
 */
export function intent(name: string, url: string | URL, content: unknown, options: IntentOptions = {}): Intent {
  const { key, init = {}, keyLifetime = 86_400_000, storage } = options;
  const id = PREFIX + name;
  const method = init.method ?? 'POST';
  const digest = digestOf([key, method, url, content]);
  let own: Entry | undefined;
  const isOld = ([, , , created]: Entry): boolean => Math.abs(Date.now() - created) > keyLifetime;
  const current = (): Entry => {
    const kept = load(id, storage);
    const isSame = kept?.[1] === digest && (kept[2] ? kept[2] === IN_DOUBT || kept[4] === placeNow() : !isOld(kept));
    return isSame ? kept : (own ??= [key ?? uuid(), digest, UNSENT, Date.now()]);
  };
  return {
    get key() {
      return current()[0];
    },
    get isKept() {
      return !memory.has(id);
    },
    send(signal) {
      const [sent, outcome] = sendings.get(id) ?? [];
      if (outcome && sent === digest) return outcome;
      const kept = load(id, storage);
      const entry = current();
      const [itsKey, , state, created] = entry;
      const headers = new Headers(init.headers);
      headers.set('Idempotency-Key', itsKey);
      if (!isForm(content) && !headers.has('content-type')) headers.set('content-type', 'application/json');
      const request: RequestInit = { body: isForm(content) ? content : JSON.stringify(content), ...init, method, headers, redirect: 'manual' };
      // Throws if the request is invalid: nothing was sent then.
      new Request(url, request);
      const isEarlier = outcome ?? (kept?.[2] === IN_DOUBT && kept[1] !== digest);
      const reason = isEarlier ? 'earlier-intent' : state && isOld(entry) ? 'key-lifetime' : undefined;
      if (!reason) {
        own = undefined;
        // Before it is sent, so that a reload in the middle knows.
        save(id, storage, [itsKey, digest, state || IN_DOUBT, created, placeNow()]);
      }
      const sending = attempt((its) => (options.fetch ?? fetch)(url, { ...request, signal: its }), isEarlier && kept ? kept[0] : itsKey, !!reason || state > 0, options, signal, reason);
      if (reason) return sending;
      const end = sending.then((result) => {
        sendings.delete(id);
        const now = load(id, storage);
        // It may have been forgotten meanwhile.
        if (now?.[0] === itsKey && state !== DONE) {
          now[2] = result.kind === 'open' ? (result.mayHaveTakenEffect ? IN_DOUBT : UNSENT) : result.verdict === 'turned-away' ? UNSENT : DONE;
          save(id, storage, result.kind === 'definite' && result.verdict === 'refused' ? undefined : now);
        }
        return result;
      });
      sendings.set(id, [digest, end]);
      return end;
    },
  };
}

/** The outcome of the intent of this name that is being sent on this page. */
export const sendingOf = (name: string): Promise<Outcome> | undefined => sendings.get(PREFIX + name)?.[1];

/** True if an intent of this name may have taken effect, and its outcome is not definite: for example after a reload in the middle. */
export const isUnsettled = (name: string, { storage }: IntentOptions = {}): boolean => load(PREFIX + name, storage)?.[2] === IN_DOUBT;

/**
 * Forgets the intent of this name, so that the next one has a new key. For a new purchase of the same, and for an intent in doubt if a
 * person found out what became of it: otherwise it may take effect twice.
 */
export const forget = (name: string, { storage }: IntentOptions = {}): void => {
  save(PREFIX + name, storage);
};

/** The outcome in one word. `unknown`: it may have been done. Do not start it anew; trying again is safe. */
export const stateOf = (outcome: Outcome): OutcomeState => {
  if (outcome.kind === 'open') return outcome.mayHaveTakenEffect ? 'unknown' : 'not-done';
  return outcome.verdict === 'unreplayable' ? 'done' : outcome.verdict === 'turned-away' ? 'refused' : outcome.verdict;
};
