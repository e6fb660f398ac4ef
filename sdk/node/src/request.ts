// What a request is: one that passes, one that is refused, or one with a record.
import { gunzipSync, inflateRawSync, inflateSync, type InputType, type ZlibOptions } from 'node:zlib';
import { trimmedField } from './bytes.js';
import { type FingerprintInput, fingerprintDigest, mediaType, naturalKey, partsDigest, versioned } from './fingerprint.js';
import { isOtherSpelling, isOverride } from './headers.js';
import { recordId } from './identity.js';
import type { ParsedBody } from './gate.js';
import type { Ids } from './ids.js';
import { explainKeyFault, hasOtherSpelling, keyInHeaders, type KeyFault } from './key.js';
import { conditionOf, type Refusal } from './refusal.js';
import type { StoredField } from './response.js';
import { callerOf } from './scope.js';
import type { Settings } from './settings.js';

/** The head of a request. Names of fields are in lower case; values are bytes as `latin1` texts. */
export interface RequestHead {
  method: string;
  /** As it was sent: a path and a query, or an absolute URL. Bytes as a `latin1` text. */
  target: string;
  headers: readonly StoredField[];
  /** The request of the framework, for functions that identify the caller. */
  source?: unknown;
}

/** A request that is executed at most once. */
export interface KeyedRequest {
  id: Buffer;
  key: string;
  fingerprint: Buffer;
  caller: Buffer;
  callerTag: Buffer;
  keyTag: Buffer;
  operation: string;
}

interface Target {
  authority: string | undefined;
  path: string;
  /** Path and query. */
  whole: string;
}

function targetOf(sent: string): Target {
  const target = sent.split('#', 1)[0] ?? '';
  const absolute = /^[A-Za-z][A-Za-z0-9+\-.]*:\/\/([^/?]*)([^]*)$/.exec(target);
  const authority = absolute?.[1];
  let whole = absolute === null ? target : (absolute[2] ?? '');
  if (absolute !== null && !whole.startsWith('/')) whole = `/${whole}`;
  return { authority, path: whole.split('?', 1)[0] ?? '', whole };
}

/** The host that a request is for, in lower case, without the ports 80 and 443; empty if it names none. */
export function authorityOf(head: RequestHead): string {
  const { authority: named } = targetOf(head.target);
  let authority = (named ?? Buffer.from(field(head, 'host'), 'latin1').toString()).trim().toLowerCase();
  authority = authority.slice(authority.lastIndexOf('@') + 1);
  return authority.replace(/:(?:80|443)?$/, '');
}

/** The value of a field with all its lines: it is not known which one the service reads. */
function field(head: RequestHead, name: string): string {
  return head.headers.filter(([own]) => own === name).map(([, value]) => value).join(', ');
}

/** The record under which a sidecar of Oncegate sends a request; undefined without one. A client may have written it. */
export function sidecarRecord(head: RequestHead): string | undefined {
  return head.headers.find(([name]) => name === 'oncegate-record')?.[1];
}

export function isBehindSidecar(head: RequestHead): boolean {
  return sidecarRecord(head) !== undefined;
}

/** One spelling for all spellings of a path. */
export function canonicalPath(path: string, trailingSlash: 'ignore' | 'exact'): string {
  if (!path.startsWith('/')) return path;
  const endsWithSlash = path.length > 1 && path.endsWith('/');
   
  const isSpelledOtherwise = /%|[^\u0000-\u007f]|\/[/.]/.test(path) || (endsWithSlash && trailingSlash === 'ignore');
  if (!isSpelledOtherwise) return path;
  const decoded = path.replace(/%([0-9A-Fa-f]{2})|[\u0080-\u00ff]/g, (found, digits: string | undefined) => {
    if (digits === undefined) return `%${found.charCodeAt(0).toString(16).toUpperCase()}`;
    const byte = String.fromCharCode(parseInt(digits, 16));
    return /[A-Za-z0-9\-._~]/.test(byte) ? byte : `%${digits.toUpperCase()}`;
  });
  const segments: string[] = [];
  let endedWithSlash = false;
  for (const segment of decoded.split('/').slice(1)) {
    endedWithSlash = segment === '' || segment === '.' || segment === '..';
    if (segment === '..') segments.pop();
    else if (!endedWithSlash) segments.push(segment);
  }
  const spelled = segments.map((segment) => `/${segment}`).join('');
  return spelled === '' || (endedWithSlash && trailingSlash === 'exact') ? `${spelled}/` : spelled;
}

const WITHOUT_EFFECT = new Set(['GET', 'HEAD', 'OPTIONS', 'TRACE', 'CONNECT']);

/** Returns true if a request passes without a look at its body. */
export function passes(settings: Settings, head: RequestHead): boolean {
  const method = head.method.toUpperCase();
  if (!targetOf(head.target).path.startsWith('/') && !WITHOUT_EFFECT.has(method)) return false;
  if (!settings.methods.includes(method)) return true;
  return !settings.requireKey && !mayHaveKey(settings, head);
}

function mayHaveKey(settings: Settings, head: RequestHead): boolean {
  return (
    settings.naturalKey !== undefined ||
    head.headers.some(([name]) => settings.keyHeaders.includes(name)) ||
    hasOtherSpelling(settings, head.headers)
  );
}

/** What is known of a covered request before its body is read. */
export interface EarlyRequest {
  /** The field that repeats the key in the response. */
  echo: StoredField | undefined;
  refusal: Refusal | undefined;
  key: string | undefined;
  /** The digest of the caller; undefined if it is only needed for a key that is not known yet. */
  caller: Buffer | undefined;
}

export function readHead(settings: Settings, head: RequestHead): EarlyRequest {
  const early: EarlyRequest = { echo: undefined, refusal: undefined, key: undefined, caller: undefined };
  const refused = (refusal: Refusal): EarlyRequest => ({ ...early, refusal });
  if (!targetOf(head.target).path.startsWith('/')) {
    return refused({ condition: 'request-malformed', detail: 'Nothing was executed. The target of the request is not a path.' });
  }
  const found = settings.naturalKey === undefined ? keyInHeaders(settings, head.headers) : undefined;
  if (found !== undefined && 'key' in found && settings.echoKey) early.echo = found.echo;
  const caller = callerOf(settings, head);
  if (found === undefined && settings.naturalKey !== undefined) return Buffer.isBuffer(caller) ? { ...early, caller } : early;
  if (!Buffer.isBuffer(caller)) return refused(caller);
  if (found === undefined) return refused({ condition: 'key-missing' });
  if (!('key' in found)) return refused(invalidKey(settings, found));
  return { ...early, caller, key: found.key };
}

function invalidKey(settings: Settings, fault: KeyFault): Refusal {
  return { condition: 'key-invalid', detail: explainKeyFault(settings, fault) };
}

interface DecodedBody {
  bytes: Buffer;
  /** The coding that could not be undone; empty if there is none. */
  coding: string;
}

const MAX_DECODED_RATIO = 100;
const DECODED_FREE = 64 * 1024;

/** Undoes the content coding, so that the same body compressed twice is the same body. What cannot be decoded stays as it is. */
function decodeBody(head: RequestHead, body: Buffer, max: number): DecodedBody {
  const lines = head.headers.filter(([name]) => name === 'content-encoding');
  if (lines.length > 1) return { bytes: body, coding: field(head, 'content-encoding') };
  const coding = trimmedField(lines[0]?.[1] ?? '');
  const limit = Math.min(max, Math.max(body.length * MAX_DECODED_RATIO, DECODED_FREE));
  const decoders: ((body: InputType, options: ZlibOptions) => Buffer)[] = [];
  switch (coding.toLowerCase()) {
    case '':
    case 'identity':
      return { bytes: body, coding: '' };
    case 'gzip':
    case 'x-gzip':
      decoders.push(gunzipSync);
      break;
    case 'deflate':
      // zlib; some clients send bare deflate anyway.
      decoders.push(inflateSync, inflateRawSync);
  }
  for (const decode of decoders) {
    try {
      const { buffer, engine } = decode(body, { maxOutputLength: Math.max(1, limit), info: true }) as unknown as {
        buffer: Buffer;
        engine: { bytesWritten: number };
      };
      // A rest after the end of the compressed stream is a part of the request, and a service may read it.
      if (engine.bytesWritten === body.length && buffer.length <= limit) return { bytes: buffer, coding: '' };
    } catch (error) {
      if ((error as { code?: string }).code === 'ERR_BUFFER_TOO_LARGE') break;
    }
  }
  return { bytes: body, coding };
}

/** The bytes at the end of a digest that hash the host alone, if the host is compared. */
const HOST_BYTES = 10;

/** Returns true if two fingerprints differ in the host only. */
export function differsInHostOnly(one: Buffer, other: Buffer): boolean {
  const end = 33 - HOST_BYTES;
  return !one.equals(other) && one.subarray(0, end).equals(other.subarray(0, end));
}

function mayBeJson(contentType: string, body: Buffer): boolean {
  const start = body.subarray(0, 3).equals(Buffer.of(0xef, 0xbb, 0xbf)) ? body.subarray(3) : body;
  const first = start.find((byte) => byte > 0x20 && byte !== 0xfe && byte !== 0xff);
  return (/json/i.test(contentType) && body.length > 0) || first === 0x7b || first === 0x5b;
}

/** The outcome of reading a whole request. */
export type ReadRequest = KeyedRequest | { refused: Refusal; echo?: StoredField } | 'passes';

/** The record of a request whose body was read. */
export function readWhole(
  settings: Settings,
  { service, ids }: { service: string | undefined; ids: Ids },
  head: RequestHead,
  early: EarlyRequest,
  body: Buffer | ParsedBody,
): { request: ReadRequest; echo: StoredField | undefined } {
  const isParsed = 'parsed' in body;
  const decoded = isParsed ? { bytes: body.parsed, coding: '' } : decodeBody(head, body, settings.maxRequestBody);
  let { key, caller, echo } = early;
  if (key === undefined) {
    const built = builtKey(settings, head, decoded, isParsed);
    if ('refusal' in built) {
      const isNeeded = settings.requireKey || built.refusal.condition !== 'key-missing';
      return { request: isNeeded ? { refused: built.refusal } : 'passes', echo };
    }
    key = built.key;
    const [name] = settings.keyHeaders;
    if (name !== undefined) echo = [name, `"${key}"`];
  }
  if (caller === undefined) {
    const found = callerOf(settings, head);
    if (!Buffer.isBuffer(found)) return { request: { refused: found }, echo };
    caller = found;
  }
  const method = head.method.toUpperCase();
  const target = targetOf(head.target);
  const path = canonicalPath(target.path, settings.trailingSlash);
  const endpoint = settings.keyScope === 'endpoint' ? [method, path] : [];
  const scoped = settings.keyScopeHeaders.flatMap((name) => [name, Buffer.from(fieldInAnySpelling(head, name), 'latin1')]);
  return {
    request: {
      id: ids.record(recordId(service, caller, [...endpoint, ...scoped], key)),
      key,
      fingerprint: fingerprintOf(settings, ids, head, target, path, decoded, isParsed),
      caller,
      callerTag: ids.callerTag(caller),
      keyTag: ids.keyTag(key),
      operation: cut(`${method} ${path}`),
    },
    echo,
  };
}

const MAX_OPERATION_BYTES = 256;

function cut(operation: string): string {
  const bytes = Buffer.from(operation);
  return bytes.length <= MAX_OPERATION_BYTES
    ? operation
    : new TextDecoder().decode(bytes.subarray(0, MAX_OPERATION_BYTES), { stream: true });
}

function fieldInAnySpelling(head: RequestHead, name: string): string {
  return head.headers.filter(([own]) => own === name || isOtherSpelling(own, name)).map(([, value]) => value).join(', ');
}

function builtKey(settings: Settings, head: RequestHead, decoded: DecodedBody, isParsed: boolean): { key: string } | { refusal: Refusal } {
  const members = settings.naturalKey ?? [];
  const unreadable = { refusal: invalidKey(settings, { fault: 'unreadable' }) };
  const missing = (why: string): { refusal: Refusal } => ({
    refusal: {
      condition: 'key-missing',
      detail: `The key of this operation is built from members of its JSON body (${[...new Set(members)].sort().join(', ')}), and ${why}. Nothing was executed.`,
    },
  });
  if (decoded.coding !== '' && decoded.bytes.length > 0) return unreadable;
  const contentType = field(head, 'content-type');
  // A parser makes members of the fields of a form.
  const isForm = isParsed && /^\s*(?:application\/x-www-form-urlencoded|multipart\/form-data)\b/i.test(contentType);
  if (isForm || !mayBeJson(contentType, decoded.bytes)) return missing('the body is no JSON that every program reads alike');
  // It is read whatever its type, unless the type names another charset.
  const semicolon = contentType.indexOf(';');
  const type = `application/json${semicolon < 0 ? '' : contentType.slice(semicolon)}`;
  const key = naturalKey(members, Buffer.from(type, 'latin1'), decoded.bytes);
  if (typeof key === 'string') return { key };
  return key.reason === 'not-json' ? unreadable : missing(`the body has no member ${key.member}`);
}

function fingerprintOf(
  settings: Settings,
  ids: Ids,
  head: RequestHead,
  target: Target,
  path: string,
  decoded: DecodedBody,
  isParsed: boolean,
): Buffer {
  const values = (isOwn: (name: string) => boolean) =>
    head.headers.filter(([name]) => isOwn(name)).map(([name, value]) => [name, Buffer.from(value, 'latin1')] as const);
  const query = target.whole.slice(target.path.length);
  const input: FingerprintInput = {
    method: head.method.toUpperCase(),
    target: Buffer.from(path + query, 'latin1'),
    headers: [...settings.fingerprintHeaders.flatMap((own) => values((name) => name === own)), ...values(isOverride)],
    contentType: Buffer.alloc(0),
    contentCoding: '',
    body: Buffer.alloc(0),
  };
  let { rules } = settings;
  if (settings.comparesBody) {
    input.contentType = Buffer.from(field(head, 'content-type'), 'latin1');
    input.contentCoding = decoded.coding;
    input.body = decoded.bytes;
    // It is JSON, whatever the type of the body was: decoded a second time as a form, different values would look alike.
    if (isParsed && mediaType(input.contentType).kind !== 'json') rules = { ...rules, rawBodies: true };
  }
  const fingerprint = ids.fingerprint(versioned(fingerprintDigest(input, rules).digest));
  if (settings.authority === 'compare') {
    const host = ids.fingerprint(versioned(partsDigest('host', [authorityOf(head)])));
    const start = host.length - HOST_BYTES;
    host.copy(fingerprint, start, start);
  }
  return fingerprint;
}

/** The detail of the refusal of a body that is too large. */
export function tooLarge(limit: number): Refusal {
  return {
    condition: 'request-too-large',
    detail: `${conditionOf('request-too-large').detail} At most ${String(limit)} bytes are accepted.`,
  };
}
