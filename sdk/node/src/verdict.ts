// What a response means to a client that sends a request again under one key: `judge` of crates/client/src/verdict.rs. The signals
// are shared data; `crates/client/vectors/meanings.json` has examples.
import { contract } from './contract.js';
import type { StoredField } from './response.js';

/** How a request that is sent more than once is protected. */
export type Protection = 'keyed' | 'safe' | 'repeatable' | 'once';

export interface AttemptContext {
  protection: Protection;
  /** What other server errors mean. */
  serverErrors: 'again' | 'final' | 'unknown';
  /** An earlier attempt may have taken effect. */
  inDoubt: boolean;
}

export type Meaning =
  | 'done'
  | 'refused fix-request'
  | 'refused new-key'
  | 'refused stop'
  | 'turned-away'
  | 'failed'
  | 'unreplayable'
  | 'turned-away in-doubt'
  | 'contested'
  | 'again nothing'
  | 'again maybe'
  | 'again in-progress'
  | 'unknown';

type Advice = 'fix-request' | 'new-key' | 'stop';
type Json = Readonly<Record<string, unknown>>;

interface SignalRule {
  signal: string;
  at: { header?: string; value?: string; unless_status?: number; member?: string; name?: string; problem?: string };
}
const SIGNALS: readonly SignalRule[] = contract.signals;
const STATUSES: readonly { problem: string; http: readonly number[]; grpc: readonly number[] }[] = contract.problem_statuses;

const MAX_PROBLEM_BYTES = 64 * 1024;
const NAMES = ['type', 'code', 'name', 'error.code', 'error.type'];
const MCP_TYPE = 'error.data.type';
const CODES = ['code', 'error.code', 'errorCode', '__type', 'details[].issue', 'errors[].code', MCP_TYPE];
const CODED = ['outcome-unknown', 'record-corrupt', 'host-differs', 'replay-unavailable'];

/** A response, as the rules look at it. */
class Seen {
  readonly body: Json | undefined;

  constructor(
    readonly status: number,
    readonly headers: readonly StoredField[],
    body: Uint8Array,
  ) {
    this.body = this.json(body);
  }

  all(name: string): string[] {
    return this.headers.filter(([own]) => own === name).map(([, value]) => value);
  }

  first(name: string): string | undefined {
    return this.all(name)[0];
  }

  private json(body: Uint8Array): Json | undefined {
    const essence = (this.first('content-type') ?? '').split(';', 1)[0]?.trim().toLowerCase() ?? '';
    const isJson = essence === 'application/json' || essence.endsWith('+json') || essence.startsWith('application/x-amz-json-');
    if (!isJson || body.length > MAX_PROBLEM_BYTES) return undefined;
    try {
      const value: unknown = JSON.parse(new TextDecoder('utf-8', { fatal: true }).decode(body));
      return typeof value === 'object' && value !== null && !Array.isArray(value) ? (value as Json) : undefined;
    } catch {
      return undefined;
    }
  }
}

/** True if a text or a number at this path passes. `[]` after a name stands for each element of a list. */
function any(value: unknown, path: string, passes: (text: string) => boolean): boolean {
  if (path === '') {
    return typeof value === 'string' ? passes(value) : typeof value === 'number' && passes(String(value));
  }
  const dot = path.indexOf('.');
  const [first, rest] = dot < 0 ? [path, ''] : [path.slice(0, dot), path.slice(dot + 1)];
  const member = (name: string): unknown =>
    typeof value === 'object' && value !== null && !Array.isArray(value) && Object.hasOwn(value, name) ? (value as Json)[name] : undefined;
  if (!first.endsWith('[]')) return any(member(first), rest, passes);
  const elements = member(first.slice(0, -2));
  return Array.isArray(elements) && elements.some((element) => any(element, rest, passes));
}

function end(uri: string): string {
  return /[^:/#]*$/.exec(uri)?.[0] ?? '';
}

function applies({ signal, at }: SignalRule, seen: Seen): boolean {
  const { body } = seen;
  if (at.header !== undefined) {
    const field = seen.first(at.header);
    if (at.unless_status !== undefined) return seen.status !== at.unless_status && field !== undefined;
    return field?.toLowerCase() === at.value?.toLowerCase() && field !== undefined;
  }
  if (body === undefined) return false;
  if (at.member !== undefined) return any(body, at.member, (text) => text === at.value);
  if (at.name !== undefined) return NAMES.some((path) => any(body, path, (text) => text === at.name || end(text) === at.name));
  const problem = at.problem ?? '';
  const isSurelyOurs = any(body, 'type', (uri) => uri === `urn:oncegate:problem:${problem}`);
  const isNamed = () =>
    [...NAMES, MCP_TYPE].some((path) => any(body, path, (text) => end(text) === problem)) &&
    (signal !== 'NotExecuted' || body['retry'] === 'same-key');
  const plain = (text: string) => text.replace(/[-_]/g, '').toLowerCase();
  const hasCode = () =>
    CODED.includes(problem) && CODES.some((path) => any(body, path, (text) => plain(end(text)) === plain(problem)));
  return isSurelyOurs || isNamed() || hasCode();
}

function adviceOf(word: unknown): 'again' | Advice | undefined {
  switch (word) {
    case 'same-key':
      return 'again';
    case 'new-key':
    case 'fix-request':
    case 'stop':
      return word;
    default:
      return undefined;
  }
}

interface OwnRefusal {
  problem: string;
  retry: 'again' | Advice | undefined;
}

/** The condition of a refusal of Oncegate, in its header field. */
function ownRefusal(seen: Seen): OwnRefusal | undefined {
  const [value, ...others] = seen.all('idempotency-status');
  if (value === undefined || others.length > 0 || value.includes(',')) return undefined;
  const parts = value.split(';').map((part) => part.trim());
  if (parts[0] !== 'refused') return undefined;
  const valueOf = (name: string) => parts.find((part) => part.startsWith(`${name}=`))?.slice(name.length + 1) ?? '';
  const problem = valueOf('problem');
  return problem === '' ? undefined : { problem, retry: adviceOf(valueOf('retry')) };
}

function isUsualStatus(problem: string, status: number): boolean {
  return STATUSES.some((row) => row.problem === problem && row.http.includes(status));
}

/** The form of a response, compared with that of the refusal in its header. */
function formOf(seen: Seen): 'none' | 'other' | 'other-call' | 'own' {
  const refusal = ownRefusal(seen);
  if (refusal === undefined) return 'none';
  const { problem } = refusal;
  if (seen.status < 200 || seen.status > 299) return isUsualStatus(problem, seen.status) ? 'own' : 'other';
  let isOwn: boolean;
  if (/^application\/grpc/i.test(seen.first('content-type') ?? '')) {
    const code = Number(seen.first('grpc-status') ?? '0');
    if (!Number.isInteger(code) || code === 0) return 'other';
    isOwn = STATUSES.some((row) => row.problem === problem && row.grpc.includes(code));
  } else {
    const table = (value: unknown) => (typeof value === 'object' && value !== null ? (value as Json) : undefined);
    const message = seen.body;
    const result = table(message?.['result']);
    const error = table(message?.['error']);
    const isFailed = message?.['jsonrpc'] !== undefined && (result?.['isError'] === true || (error !== undefined && !Array.isArray(error)));
    if (!isFailed) return 'other';
    const named = table(table(result?.['_meta'])?.['oncegate/problem'])?.['type'] ?? table(error?.['data'])?.['type'];
    isOwn = typeof named === 'string' && end(named) === problem;
  }
  return isOwn ? 'own' : 'other-call';
}

/** Statuses about the path to the operation: credentials, routes, gateways, versions, limits. */
const ABOUT_THE_WAY = new Set([401, 403, 404, 405, 407, 411, 413, 417, 421, 426, 431, 501, 505, 511]);

/** True if the response is marked as a replay. */
export function isReplay(status: number, headers: readonly StoredField[]): boolean {
  const seen = new Seen(status, headers, new Uint8Array());
  return SIGNALS.some((rule) => rule.signal === 'Replayed' && applies(rule, seen));
}

/** `plain`: it does not depend on earlier attempts. `refused`: by the operation. `before`: before the operation. */
type Reading = ['plain' | 'refused' | 'before', Meaning];

/** The meaning of a response. */
export function judge(asked: AttemptContext, status: number, headers: readonly StoredField[], body: Uint8Array): Meaning {
  const inDoubt = asked.inDoubt && asked.protection !== 'safe';
  const [reading, meaning] = read(asked, new Seen(status, headers, body));
  if (reading === 'plain' || !inDoubt) return meaning;
  return reading === 'refused' && asked.protection === 'keyed' ? 'contested' : 'turned-away in-doubt';
}

function read({ protection, serverErrors }: AttemptContext, seen: Seen): Reading {
  const { status } = seen;
  const form = formOf(seen);
  const isOwn = form === 'own';
  const code = status <= 299 && (isOwn || form === 'other-call') ? 502 : status;
  const keyed = protection === 'keyed';
  if (code <= 299 || code === 303) return ['plain', 'done'];
  if (code === 301 || code === 302 || code === 304) return ['plain', protection === 'safe' ? 'done' : 'unknown'];
  if (code <= 399) return ['before', 'turned-away'];
  const own = ownRefusal(seen);
  const rule =
    own === undefined ? SIGNALS.find((each) => applies(each, seen)) : SIGNALS.find(({ at }) => at.problem === own.problem);
  const signal = rule?.signal;
  const retry = own === undefined ? adviceOf(seen.body?.['retry']) : own.retry;
  const isNamed =
    own !== undefined || NAMES.some((path) => any(seen.body, path, (name) => name !== '' && name !== 'about:blank'));
  const hasUsualStatus = own === undefined && rule?.at.problem !== undefined && isUsualStatus(rule.at.problem, status);
  if (signal === 'Replayed' && keyed) return ['plain', code >= 500 ? 'failed' : 'refused fix-request'];
  if (signal === 'Accepted' && keyed && code < 500) return ['plain', 'refused fix-request'];
  const again: Meaning =
    signal === 'InProgress'
      ? 'again in-progress'
      : (signal === 'NotExecuted' && (isOwn || (keyed && hasUsualStatus))) || code === 425 || code === 429
        ? 'again nothing'
        : 'again maybe';
  const isAboutTheWay = ABOUT_THE_WAY.has(code);
  if (retry === 'again') return ['plain', again];
  if (retry !== undefined && signal === 'ScopeUnavailable' && (code < 500 || isOwn)) return ['before', 'turned-away'];
  if (retry === 'stop') {
    if (signal === 'ReplayUnavailable') return ['plain', 'unreplayable'];
    if (signal === 'OutcomeUnknown' || code >= 500) return ['plain', 'unknown'];
    return ['before', 'refused stop'];
  }
  if (retry !== undefined && isAboutTheWay) return ['before', 'turned-away'];
  if (retry !== undefined && (code < 500 || isOwn)) return ['before', `refused ${retry}`];
  if ((signal === 'InProgress' || signal === 'Again') && keyed) return ['plain', again];
  if (signal === 'ReplayUnavailable' && keyed) return ['plain', 'unreplayable'];
  if (signal === 'KeyReused' && keyed && code < 500) return ['before', 'refused new-key'];
  if (signal === 'ScopeUnavailable' && keyed && code < 500) return ['before', 'turned-away'];
  if (signal === 'OutcomeUnknown') return ['plain', 'unknown'];
  switch (seen.first('stripe-should-retry')) {
    case 'true':
      return ['plain', again];
    case 'false':
      if (isAboutTheWay) return ['before', 'turned-away'];
      if (code < 500) return ['refused', 'refused stop'];
      return ['plain', serverErrors === 'final' ? 'failed' : 'unknown'];
  }
  if (code === 408) return ['plain', 'again maybe'];
  if ((code === 409 || code === 423) && keyed && !isNamed) return ['plain', 'again in-progress'];
  if (code === 425 || code === 429) return ['plain', 'again nothing'];
  if (isAboutTheWay) return ['before', 'turned-away'];
  if (code === 414 || code === 415) return ['before', 'refused fix-request'];
  if (code <= 499) return ['refused', 'refused fix-request'];
  if (code >= 502 && code <= 504) return ['plain', again];
  if (serverErrors === 'final') return ['plain', 'failed'];
  return ['plain', protection === 'once' || serverErrors === 'unknown' ? 'unknown' : again];
}
