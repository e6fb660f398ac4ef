// What a response means to a client that sends a request again under one key: `judge` of crates/client/src/verdict.rs. The signals
// are shared data; `crates/client/vectors/meanings.json` has examples. sdk/generate.py copies this file into sdk/browser, where each
// byte counts.
import { mark, PROBLEM_STATUSES, SIGNALS } from './signals.js';

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

type Json = Readonly<Record<string, unknown>>;

const MAX_PROBLEM_BYTES = 64 * 1024;
const NAMES = ['.type', '.code', '.name', '.error.code', '.error.type'];
const MCP_TYPE = '.error.data.type';
const CODES = ['.code', '.error.code', '.errorCode', '.__type', '.details[].issue', '.errors[].code', MCP_TYPE];
const CODED = ['outcome-unknown', 'record-corrupt', 'host-differs', 'replay-unavailable'];

/** A JSON object, and no list. */
const table = (value: unknown): Json | undefined =>
  typeof value === 'object' && value !== null && !Array.isArray(value) ? (value as Json) : undefined;

/** The texts and numbers in a value with their paths, down to where no path of a rule goes. `[]` stands for each element of a list. */
function leaves(value: unknown, path = ''): [path: string, text: string][] {
  if (typeof value === 'string' || typeof value === 'number') return [[path, String(value)]];
  if (typeof value !== 'object' || value === null || path.length > 99) return [];
  return Object.entries(value).flatMap(([name, member]) => leaves(member, Array.isArray(value) ? `${path}[]` : `${path}.${name.replace(/[.[]/g, '!')}`));
}

/** The last part of a URI. */
const end = (uri: string): string => uri.replace(/.*[:/#]/s, '');
const plain = (text: string): string => end(text).replace(/[-_]/g, '').toLowerCase();

/** True if a refusal of Oncegate with this problem has this status, of HTTP or of gRPC. */
const isUsual = (problem: string, status: number): boolean => PROBLEM_STATUSES.some(([name, ...statuses]) => name === problem && statuses.includes(status));

/** What header fields say, in the form of `SIGNALS`. */
const facts = (status: number, headers: Headers): string[] =>
  [...headers].flatMap(([name, value]) => [`h${name}=${value.toLowerCase()}`, status === 409 ? '' : `h${name}`]);

/** True if the response is marked as a replay. */
export const isReplay = (status: number, headers: Headers): boolean =>
  facts(status, headers).some((fact) => SIGNALS[0]?.includes(mark(fact)));

/** The meaning of a response. */
export function judge({ protection, serverErrors, inDoubt }: AttemptContext, status: number, headers: Headers, bytes: Uint8Array): Meaning {
  const first = (name: string): string => headers.get(name) ?? '';
  const keyed = protection === 'keyed';
  const isDoubtful = inDoubt && protection !== 'safe';
  /** A refusal before the operation, and one by the operation. */
  const before = (meaning: Meaning): Meaning => (isDoubtful ? 'turned-away in-doubt' : meaning);
  const refused = (meaning: Meaning): Meaning => (isDoubtful && keyed ? 'contested' : before(meaning));

  const type = first('content-type');
  let body: Json | undefined;
  if (/^\s*(application\/(json|x-amz-json-[^;]*)|[^;]*\+json)\s*(;|$)/i.test(type) && bytes.length <= MAX_PROBLEM_BYTES) {
    try {
      body = table(JSON.parse(new TextDecoder('utf-8', { fatal: true }).decode(bytes)));
    } catch {
      // Not JSON: it says nothing.
    }
  }
  const found = leaves(body);
  const texts = (...paths: string[]): string[] => found.filter(([path]) => paths.includes(path)).map(([, text]) => text);
  // The condition of a refusal of Oncegate, in its header field. A comma is between two fields.
  const field = first('idempotency-status');
  const parts = field.split(';').map((part) => part.trim());
  const parameter = (name: string): string => parts.find((part) => part.startsWith(name))?.slice(name.length) ?? '';
  const problem = parts[0] === 'refused' && !field.includes(',') ? parameter('problem=') : '';
  // The form of the response, compared with that of this refusal.
  let isOwn = false;
  let code = status;
  if (problem !== '') {
    if (status > 299) isOwn = isUsual(problem, status);
    else {
      let isCall: boolean;
      if (/^application\/grpc/i.test(type)) {
        const grpc = Number(first('grpc-status'));
        isCall = Number.isInteger(grpc) && grpc !== 0;
        isOwn = grpc < 100 && isUsual(problem, grpc);
      } else {
        const names = texts('.result._meta.oncegate/problem.type', MCP_TYPE);
        isCall = body?.['jsonrpc'] !== undefined && (table(body['result'])?.['isError'] === true || table(body['error']) !== undefined);
        isOwn = isCall && names[0] !== undefined && end(names[0]) === problem;
      }
      if (isCall) code = 502;
    }
  }
  if (code <= 299 || code === 303) return 'done';
  if (code === 301 || code === 302 || code === 304) return protection === 'safe' ? 'done' : 'unknown';
  if (code <= 399) return before('turned-away');

  const names = texts(...NAMES);
  const retry = problem === '' ? body?.['retry'] : parameter('retry=');
  // What the response says, in the form of `SIGNALS`.
  const said = [`p${problem}`, `q${problem}`];
  if (problem === '') {
    said.push(
      ...facts(status, headers),
      ...names.flatMap((name) => [`n${name}`, `n${end(name)}`]),
      ...[...names, ...texts(MCP_TYPE)].flatMap((name) => [`p${end(name)}`, retry === 'same-key' ? `q${end(name)}` : '']),
      ...texts('.type').map((name) => name.replace('urn:oncegate:problem:', 'q')),
      ...texts(...CODES).flatMap((text) => CODED.filter((name) => plain(name) === plain(text)).map((name) => `p${name}`)),
      ...found.map(([path, text]) => `m${path}=${text}`),
    );
  }
  const marks = said.map((each) => mark(each));
  let at = -1;
  const signal = SIGNALS.find(([, ...rules]) => rules.some((rule) => (at = marks.indexOf(rule)) >= 0))?.[0];
  const isSurelyNothing = signal === 'NotExecuted' && (isOwn || (keyed && problem === '' && isUsual(said[at]?.slice(1) ?? '', status)));
  const again: Meaning =
    signal === 'InProgress' ? 'again in-progress' : isSurelyNothing || code === 425 || code === 429 ? 'again nothing' : 'again maybe';
  // About the path to the operation: credentials, routes, gateways, versions, limits.
  const isAboutTheWay = [401, 403, 404, 405, 407, 411, 413, 417, 421, 426, 431, 501, 505, 511].includes(code);
  const isSure = code < 500 || isOwn;

  if (keyed && signal === 'Replayed') return code < 500 ? 'refused fix-request' : 'failed';
  if (keyed && signal === 'Accepted' && code < 500) return 'refused fix-request';
  if (retry === 'same-key') return again;
  if (retry === 'new-key' || retry === 'fix-request' || retry === 'stop') {
    if (signal === 'ScopeUnavailable' && isSure) return before('turned-away');
    if (retry === 'stop') {
      if (signal === 'ReplayUnavailable') return 'unreplayable';
      return signal === 'OutcomeUnknown' || code >= 500 ? 'unknown' : before('refused stop');
    }
    if (isAboutTheWay) return before('turned-away');
    if (isSure) return before(`refused ${retry}`);
  }
  if (keyed) {
    if (signal === 'InProgress' || signal === 'Again') return again;
    if (signal === 'ReplayUnavailable') return 'unreplayable';
    if (signal === 'KeyReused' && code < 500) return before('refused new-key');
    if (signal === 'ScopeUnavailable' && code < 500) return before('turned-away');
  }
  if (signal === 'OutcomeUnknown') return 'unknown';
  const shouldRetry = first('stripe-should-retry');
  if (shouldRetry === 'true') return again;
  if (shouldRetry === 'false') {
    if (isAboutTheWay) return before('turned-away');
    return code < 500 ? refused('refused stop') : serverErrors === 'final' ? 'failed' : 'unknown';
  }
  if (code === 408) return 'again maybe';
  if ((code === 409 || code === 423) && keyed && problem === '' && !names.some((name) => name !== '' && name !== 'about:blank')) {
    return 'again in-progress';
  }
  if (code === 425 || code === 429) return 'again nothing';
  if (isAboutTheWay) return before('turned-away');
  if (code === 414 || code === 415) return before('refused fix-request');
  if (code < 500) return refused('refused fix-request');
  if (code >= 502 && code <= 504) return again;
  if (serverErrors === 'final') return 'failed';
  return protection === 'once' || serverErrors === 'unknown' ? 'unknown' : again;
}
