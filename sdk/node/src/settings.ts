// The settings of a middleware. Their meaning is that of the sidecar's configuration (docs/reference/configuration.md); in
// JavaScript their names are in camel case: `max-request-body` is `maxRequestBody`.
import { contract } from './contract.js';
import { type FingerprintRules, pointerTokens } from './fingerprint.js';
import { isKept, isNeverKept } from './headers.js';
import type { RequestHead } from './request.js';
import type { OnAbandoned } from './store.js';
import { didYouMean } from './words.js';

/** Milliseconds, or a text such as `30s`, `250ms`, `24h` or `7d`. */
export type Duration = number | string;

/** Bytes, or a text such as `64KiB` or `2MiB`. */
export type Size = number | string;

/**
 * Returns what identifies the caller of a request, such as the number of a user. Undefined, null or an empty text: nothing does, and the
 * request is refused. It gets the request of the framework: `req` of Express and Node, `request` of Fastify, the context of Hono, or the
 * `Request` of a Web handler; and the head that the library reads. It cannot be asynchronous: find out who the caller is before.
 */
// eslint-disable-next-line @typescript-eslint/no-explicit-any -- each framework has its own, which the function may name
export type CallerFunction = (request: any, head: RequestHead) => string | number | bigint | null | undefined;

export interface IdempotencyOptions {
  /** The dialect: `ietf` (the default), `stripe`, or `classic` (what many tutorials build). */
  profile?: 'ietf' | 'stripe' | 'classic';
  /**
   * What tells callers apart, so that they never share keys: `header:NAME`, `cookie:NAME`, `required-header:NAME`,
   * `required-cookie:NAME`, `host`, several of them, `single-tenant`, or a function. By default `Authorization`; then requests with
   * another credential, such as a cookie, are refused.
   */
  scope?: string | readonly string[] | CallerFunction;
  /** The effect of the host: `compare` (the default), `scope` (hosts are tenants), or `ignore` (one service has several names). */
  authority?: 'compare' | 'scope' | 'ignore';
  /** Refuses covered requests without a key. */
  requireKey?: boolean;
  /** The header fields that may carry the key. */
  keyHeader?: string | readonly string[];
  /** JSON pointers to the members of the body from which the key is built, whatever key the client sends. */
  naturalKey?: string | readonly string[];
  keySyntax?: 'lenient' | 'strict' | 'raw';
  /** `any`, `uuid`, `ulid`, or `pattern:REGEX`. */
  keyFormat?: string;
  /** `endpoint`: a key is unique for a method and path. `caller`: the same key on another endpoint is refused. */
  keyScope?: 'endpoint' | 'caller';
  replayMarker?: string;
  /** The page that documents your rules for keys. Refusals link to it. */
  documentation?: string;
  /** The beginning of the types of problems. */
  problemBaseUrl?: string;
  /** The methods that change something, so that a key protects them. Requests with another method pass as they are. */
  methods?: string | readonly string[];
  trailingSlash?: 'ignore' | 'exact';
  /** The time for which a request owns its key without renewing it. It is renewed while the handler runs. 30 s by default. */
  lease?: Duration;
  /** The time for which a response is kept, from its completion. */
  retention?: Duration;
  /** The longest time for which a duplicate waits for the running request. 2 s by default. */
  wait?: Duration;
  /** The policy for a key whose owner crashed: `park` (the default: an operator decides), or `reexecute`. */
  onAbandoned?: OnAbandoned;
  /** The policy for responses from 500: `replay` (they are kept), or `release` (the key is free again). */
  serverErrors?: 'replay' | 'release';
  /** More statuses that free the key. */
  releaseStatuses?: number | string | readonly (number | string)[];
  /** `closed` (the default): 503 while the store is away. `open`: such requests are executed WITHOUT protection, and marked. */
  storeOutage?: 'closed' | 'open';
  /** More header fields of responses that are kept. */
  storedHeaders?: string | readonly string[];
  fingerprint?: {
    exclude?: readonly string[];
    include?: readonly string[];
    body?: 'canonical' | 'raw' | 'nothing';
    headers?: readonly string[];
  };
  /** The largest body of a request with a key. 2 MiB by default. */
  maxRequestBody?: Size;
  /** The largest body of a response that is kept. 1 MiB by default. */
  maxResponseBody?: Size;
  /** The longest time in which the body of a request must arrive. 60 s by default. */
  bodyTimeout?: Duration;
  /**
   * The longest time for which a handler may run. After it the outcome is unknown, because the handler may still have an effect.
   * 5 minutes by default.
   */
  handlerTimeout?: Duration;
}

export interface Settings {
  profile: Profile;
  scope: ScopeSettings;
  authority: 'compare' | 'scope' | 'ignore';
  requireKey: boolean;
  keyHeaders: readonly string[];
  naturalKey: readonly string[] | undefined;
  keySyntax: 'lenient' | 'strict' | 'raw';
  keyFormat: KeyFormat;
  keyScope: 'endpoint' | 'caller';
  keyScopeHeaders: readonly string[];
  replayMarker: readonly [name: string, value: string];
  echoKey: boolean;
  documentation: string | undefined;
  problemBase: string;
  methods: readonly string[];
  trailingSlash: 'ignore' | 'exact';
  leaseMs: number;
  retentionMs: number;
  waitMs: number;
  onAbandoned: OnAbandoned;
  serverErrors: 'replay' | 'release';
  releases: (status: number) => boolean;
  failsOpen: boolean;
  storedHeaders: ReadonlySet<string>;
  rules: FingerprintRules;
  comparesBody: boolean;
  fingerprintHeaders: readonly string[];
  maxRequestBody: number;
  maxResponseBody: number;
  bodyTimeoutMs: number;
  handlerTimeoutMs: number;
  /** Settings that are valid and most likely mistyped. */
  warnings: readonly string[];
}

export type KeyFormat = { kind: 'any' | 'uuid' | 'ulid' } | { kind: 'pattern'; source: string; regex: RegExp };

export interface ScopePart {
  kind: string;
  source: 'header' | 'cookie' | 'host' | 'function';
  name: string;
  identify: CallerFunction | undefined;
  required: boolean;
}

export interface ScopeSettings {
  /** Sorted by kind. A single tenant has none. */
  parts: readonly ScopePart[];
  /** False for the default scope. */
  isChosen: boolean;
}

interface RefusalWords {
  status?: number;
  kind?: string;
  code?: string;
}

/** A profile, as the shared data has it. */
export interface Profile {
  name: string;
  headers: Readonly<Record<'response' | 'kept-server-error' | 'refusal' | 'rejection', Readonly<Record<string, string>>>>;
  mediaType: string;
  body: string;
  words: (condition: string, status: number, word: 'kind' | 'code') => string | undefined;
  status: (condition: string) => number | undefined;
}

/** A setting that cannot be used. */
export class SettingsError extends Error {
  override readonly name = 'SettingsError';
}

const NAMES: ReadonlySet<string> = new Set<keyof IdempotencyOptions>([
  'profile', 'scope', 'authority', 'requireKey', 'keyHeader', 'naturalKey', 'keySyntax', 'keyFormat', 'keyScope', 'replayMarker',
  'documentation', 'problemBaseUrl', 'methods', 'trailingSlash', 'lease', 'retention', 'wait', 'onAbandoned', 'serverErrors',
  'releaseStatuses', 'storeOutage', 'storedHeaders', 'fingerprint', 'maxRequestBody', 'maxResponseBody', 'bodyTimeout',
  'handlerTimeout',
]);
const FINGERPRINT_NAMES: ReadonlySet<string> = new Set(['exclude', 'include', 'body', 'headers']);

const UNITS: Readonly<Record<string, number>> = { ms: 1, s: 1000, m: 60_000, h: 3_600_000, d: 86_400_000 };

/** Reads a duration, in milliseconds. */
export function durationMs(name: string, value: Duration, min: number, max: number): number {
  const found = typeof value === 'string' ? /^(\d+)(ms|s|m|h|d)$/.exec(value) : null;
  const read = typeof value === 'number' ? value : found === null ? NaN : Number(found[1]) * (UNITS[found[2] ?? ''] ?? NaN);
  if (!Number.isFinite(read)) {
    throw new SettingsError(`${name}: ${JSON.stringify(value)} is not a duration; write milliseconds, or a text such as "30s"`);
  }
  if (read < min || read > max) {
    throw new SettingsError(`${name}: ${JSON.stringify(value)} is not between ${String(min)} and ${String(max)} milliseconds`);
  }
  return Math.floor(read);
}

const SIZES: Readonly<Record<string, number>> = { '': 1, KIB: 1024, MIB: 1024 ** 2, GIB: 1024 ** 3, KB: 1000, MB: 1000 ** 2, GB: 1000 ** 3 };

/** Reads a size, in bytes. */
export function sizeBytes(name: string, value: Size, max: number): number {
  const found = typeof value === 'string' ? /^(\d+) ?(|[KMG]i?B)$/i.exec(value) : null;
  const read = typeof value === 'number' ? value : found === null ? NaN : Number(found[1]) * (SIZES[(found[2] ?? '').toUpperCase()] ?? NaN);
  if (!Number.isSafeInteger(read) || read < 0 || read > max) {
    throw new SettingsError(
      `${name}: ${JSON.stringify(value)} is not a size up to ${String(max)} bytes; write bytes, or a text such as "2MiB"`,
    );
  }
  return read;
}

/** A value for a message. */
export function shown(value: unknown): string {
  if (typeof value === 'function') return 'a function';
  try {
    return JSON.stringify(value) ?? String(value);
  } catch {
    return typeof value;
  }
}

/** The kind of a value for a message that must not show it. */
export function shownKind(value: unknown): string {
  if (value === undefined || value === null) return String(value);
  return typeof (value as { then?: unknown }).then === 'function' ? 'a promise' : `of the type ${typeof value}`;
}

/** Checks the name of a service. `why`: the reason why it must be there. */
export function checkService(service: unknown, why: string): asserts service is string {
  if (service === undefined || service === null) throw new SettingsError(`service: ${why}; name your service, so that others do not share its keys`);
  if (typeof service !== 'string') throw new SettingsError(`service: ${shown(service)} is not a text`);
  if (!/^[!-~]{1,100}$/.test(service)) throw new SettingsError('service: write 1 to 100 visible ASCII characters without spaces');
}

/** Refuses options that do not exist: one that is mistyped would have no effect. `of`: what they are options of. */
export function checkNames(of: string, options: unknown, names: readonly string[]): void {
  for (const name of Object.keys(options ?? {})) {
    if (!names.includes(name)) throw new SettingsError(`there is no option ${JSON.stringify(name)} of ${of}${didYouMean(name, names)}`);
  }
}

type ProfileData = (typeof contract.profiles)['ietf'] & Readonly<Record<string, unknown>>;

function oneOf<T extends string>(name: string, value: unknown, words: readonly T[]): T {
  if (words.includes(value as T)) return value as T;
  const hint = typeof value === 'string' ? didYouMean(value, words) : '';
  throw new SettingsError(`${name}: ${shown(value)} is none of ${words.map((word) => JSON.stringify(word)).join(', ')}${hint}`);
}

function list(name: string, value: unknown): readonly string[] {
  const items: readonly unknown[] = Array.isArray(value) ? value : [value];
  for (const item of items) {
    if (typeof item !== 'string' || item === '') throw new SettingsError(`${name}: write a text, or a list of texts`);
  }
  return items as readonly string[];
}

/** A list that has an effect only if something is in it. */
function notEmpty(name: string, items: readonly string[], why: string): readonly string[] {
  if (items.length === 0) throw new SettingsError(`${name}: the list is empty, ${why}`);
  return items;
}

/** The methods of the HTTP Method Registry that change something. */
const METHODS = [
  'ACL', 'BASELINE-CONTROL', 'BIND', 'CHECKIN', 'CHECKOUT', 'COPY', 'DELETE', 'LABEL', 'LINK', 'LOCK', 'MERGE', 'MKACTIVITY',
  'MKCALENDAR', 'MKCOL', 'MKREDIRECTREF', 'MKWORKSPACE', 'MOVE', 'ORDERPATCH', 'PATCH', 'POST', 'PROPPATCH', 'PUT', 'REBIND', 'UNBIND',
  'UNCHECKOUT', 'UNLINK', 'UNLOCK', 'UPDATE', 'UPDATEREDIRECTREF', 'VERSION-CONTROL',
];

function readMethods(value: unknown, warnings: string[]): readonly string[] {
  const written = notEmpty('methods', list('methods', value), 'so nothing would be protected');
  return written.map((method) => {
    const upper = method.toUpperCase();
    if (!HEADER_NAME.test(method)) {
      const several = upper.split(/[\s,;|]+/).filter((part) => HEADER_NAME.test(part));
      const hint = several.length > 1 ? `; write a list: ${JSON.stringify(several)}` : '';
      throw new SettingsError(`methods: ${JSON.stringify(method)} is not a method${hint}`);
    }
    if (method !== upper) throw new SettingsError(`methods: ${JSON.stringify(method)} is not a method; did you mean ${JSON.stringify(upper)}?`);
    if (['GET', 'HEAD', 'OPTIONS', 'TRACE', 'CONNECT'].includes(method)) {
      throw new SettingsError(`methods: ${method} has no effect that a key could protect`);
    }
    if (!METHODS.includes(method)) {
      warnings.push(`methods: no registered method is called ${JSON.stringify(method)}${didYouMean(method, METHODS)}`);
    }
    return method;
  });
}

function textOf(name: string, value: unknown): string {
  if (typeof value !== 'string') throw new SettingsError(`${name}: ${shown(value)} is not a text`);
  return value;
}

function flag(name: string, value: unknown): boolean {
  if (typeof value !== 'boolean') throw new SettingsError(`${name}: ${shown(value)} is neither true nor false`);
  return value;
}

const HEADER_NAME = /^[!#$%&'*+\-.^_`|~0-9A-Za-z]+$/;

function headerNames(name: string, value: unknown): readonly string[] {
  return list(name, value).map((header) => {
    if (!HEADER_NAME.test(header)) {
      const several = header.split(/[\s,;]+/).filter((part) => HEADER_NAME.test(part));
      const hint = several.length > 1 ? `; write a list: ${JSON.stringify(several)}` : '';
      throw new SettingsError(`${name}: ${JSON.stringify(header)} is not the name of a header field${hint}`);
    }
    return header.toLowerCase();
  });
}

/** Fields that requests use for another purpose. In the least harmful case, all requests of a caller would have the same key. */
const OTHER_FIELDS = new Set([
  'accept', 'authorization', 'baggage', 'cache-control', 'connection', 'cookie', 'date', 'depth', 'destination', 'digest', 'dnt', 'dpop',
  'expect', 'forwarded', 'from', 'host', 'http2-settings', 'keep-alive', 'link', 'location', 'max-forwards', 'origin', 'overwrite',
  'pragma', 'prefer', 'priority', 'range', 'referer', 'save-data', 'set-cookie', 'te', 'timeout', 'traceparent', 'tracestate', 'trailer',
  'transfer-encoding', 'upgrade', 'user-agent', 'via', 'x-http-method-override', 'x-real-ip', 'x-requested-with',
]);
const OTHER_PREFIXES = /^(accept-|access-control-|content-|if-|oncegate-|proxy-|sec-|upgrade-|x-forwarded-)/;

function readKeyHeaders(value: unknown): readonly string[] {
  const names = notEmpty('keyHeader', headerNames('keyHeader', value), 'so no request would have a key');
  for (const [at, name] of names.entries()) {
    if (names.indexOf(name) < at) throw new SettingsError(`keyHeader: the header field ${name} is there twice`);
    if (OTHER_FIELDS.has(name) || OTHER_PREFIXES.test(name)) {
      throw new SettingsError(
        `keyHeader: the header field ${name} has another purpose, and many requests have the same value there; name a field that carries only keys`,
      );
    }
  }
  return names;
}

function readMarker(value: unknown): string {
  const names = headerNames('replayMarker', value);
  const [name = ''] = names;
  if (names.length !== 1 || isKept(name) || isNeverKept(name)) {
    throw new SettingsError(`replayMarker: ${shown(value)} is not one field without another purpose; write one such as "Idempotent-Replayed"`);
  }
  return name;
}

function pointers(name: string, value: unknown): readonly string[] {
  return list(name, value).map((pointer) => {
    if (!pointer.startsWith('/') || /~(?![01])/.test(pointer)) {
      throw new SettingsError(`${name}: ${JSON.stringify(pointer)} is not a JSON pointer; write one such as "/customer/id"`);
    }
    pointerTokens(pointer);
    return pointer;
  });
}

function readProfile(name: string, data: ProfileData): Profile {
  const table = (value: unknown) => (value ?? {}) as Readonly<Record<string, unknown>>;
  const refusal = table(data.refusal);
  const headers = table(data['headers']) as Readonly<Record<string, Readonly<Record<string, string>> | undefined>>;
  const row = (of: string) => table(refusal[of]) as RefusalWords;
  return {
    name,
    headers: {
      response: headers['response'] ?? {},
      'kept-server-error': headers['kept-server-error'] ?? {},
      refusal: headers['refusal'] ?? {},
      rejection: headers['rejection'] ?? {},
    },
    mediaType: String(refusal['media-type']),
    body: String(refusal['body']),
    words: (condition, status, word) =>
      row(condition)[word] ?? row(status < 500 ? '4xx' : '5xx')[word] ?? (refusal as RefusalWords)[word],
    status: (condition) => row(condition).status ?? (refusal as RefusalWords).status,
  };
}

/** Statuses that decide nothing about the operation. */
const UNDECIDED = new Set([401, 403, 407, 408, 421, 425, 429]);

function releases(value: IdempotencyOptions['releaseStatuses']): (status: number) => boolean {
  const statuses: readonly unknown[] = Array.isArray(value) ? value : [value];
  const single = new Set<number>();
  const classes = new Set<number>();
  for (const status of statuses) {
    const text = String(status);
    if (/^[45]xx$/.test(text)) classes.add(Number(text[0]));
    else if (/^[45]\d\d$/.test(text)) single.add(Number(text));
    else throw new SettingsError(`releaseStatuses: ${shown(status)} is not a status that can free the key; write one from 400 to 599 such as 422, "4xx" or "5xx"`);
  }
  return (status) => UNDECIDED.has(status) || single.has(status) || classes.has(Math.floor(status / 100));
}

function readScope(scope: IdempotencyOptions['scope']): ScopeSettings {
  if (scope === undefined) return { parts: [scopePart('header:authorization')], isChosen: false };
  if (typeof scope === 'function') {
    if (scope.constructor.name === 'AsyncFunction') throw new SettingsError(`scope: ${NO_PROMISE}`);
    return { parts: [{ kind: 'function', source: 'function', name: '', identify: scope, required: true }], isChosen: true };
  }
  const texts = list('scope', scope);
  if (texts.length === 0) throw new SettingsError('scope: the list is empty; write "single-tenant" if there is only one caller');
  if (texts.includes('single-tenant')) {
    if (texts.length > 1) throw new SettingsError('scope: "single-tenant" means that there is one caller; it stands alone');
    return { parts: [], isChosen: true };
  }
  const kinds = new Set<string>();
  const parts = texts.map((text) => {
    const part = scopePart(text);
    if (kinds.has(part.kind)) throw new SettingsError(`scope: ${JSON.stringify(text)} was given twice`);
    kinds.add(part.kind);
    return part;
  });
  const sorted = parts.sort(({ kind: one }, { kind: other }) => (one < other ? -1 : 1));
  return { parts: sorted, isChosen: true };
}

/** A function of the scope that is asynchronous. */
export const NO_PROMISE =
  'an asynchronous function cannot tell who the caller is; find it out in middleware before this one, and return what that has stored';

const SCOPE_WORDS = ['header', 'required-header', 'cookie', 'required-cookie', 'host', 'single-tenant'];

function scopePart(text: string): ScopePart {
  const [word = '', ...rest] = text.split(':');
  const name = rest.join(':');
  const required = word === 'host' || word.startsWith('required-');
  const source = word.replace(/^required-/, '');
  if (word === 'host' && rest.length === 0) return { kind: 'host', source: 'host', name: '', identify: undefined, required };
  if ((source === 'header' || source === 'cookie') && HEADER_NAME.test(name)) {
    const own = source === 'header' ? name.toLowerCase() : name;
    return { kind: `${source}:${own}`, source, name: own, identify: undefined, required };
  }
  const near = didYouMean(word, SCOPE_WORDS);
  throw new SettingsError(
    `scope: ${JSON.stringify(text)} is none of "header:NAME", "required-header:NAME", "cookie:NAME", "required-cookie:NAME", "host" ` +
      'and "single-tenant"; for anything else, such as a verified token, give a function' +
      (rest.length > 0 && SCOPE_WORDS.includes(word) ? '' : near),
  );
}

function readFormat(format: string): KeyFormat {
  if (format === 'any' || format === 'uuid' || format === 'ulid') return { kind: format };
  if (!format.startsWith('pattern:')) {
    throw new SettingsError(`keyFormat: ${JSON.stringify(format)} is none of "any", "uuid", "ulid" and "pattern:REGEX"`);
  }
  const source = format.slice('pattern:'.length);
  try {
    return { kind: 'pattern', source, regex: new RegExp(`^(?:${source})$`, 'u') };
  } catch (error) {
    throw new SettingsError(`keyFormat: ${JSON.stringify(source)} is not a regular expression: ${(error as Error).message}`);
  }
}

const DAY_MS = 86_400_000;

/** Reads settings, and checks each of them. */
export function readSettings(options: IdempotencyOptions = {}): Settings {
  if (typeof options !== 'object' || (options as unknown) === null) throw new SettingsError(`the options are an object, not ${shown(options)}`);
  const warnings: string[] = [];
  for (const [name, value] of Object.entries(options)) {
    if (!NAMES.has(name)) throw new UnknownSettingError(name);
    if (name === 'fingerprint' && value !== undefined) {
      if (typeof value !== 'object' || value === null) throw new SettingsError(`fingerprint: ${shown(value)} is not an object such as { exclude: ["/sent_at"] }`);
      for (const inner of Object.keys(value as object)) {
        if (!FINGERPRINT_NAMES.has(inner)) throw new UnknownSettingError(`fingerprint.${inner}`);
      }
    }
  }
  const name = oneOf('profile', options.profile ?? 'ietf', ['ietf', 'stripe', 'classic']);
  const data = contract.profiles[name] as unknown as ProfileData;
  const profile = readProfile(name, data);
  const [markerName = '', markerValue = ''] = data['replay-marker'].split(': ');
  const keyHeaders = readKeyHeaders(options.keyHeader ?? data['key-header']);
  const methods = readMethods(options.methods ?? data.methods, warnings);
  const stored = headerNames('storedHeaders', options.storedHeaders ?? []);
  for (const header of stored) {
    if (isNeverKept(header)) throw new SettingsError(`storedHeaders: ${header} must not be stored and replayed`);
  }
  const own = [...Object.keys(profile.headers.response), ...Object.keys(profile.headers['kept-server-error'])];
  const { fingerprint = {} } = options;
  const body = oneOf('fingerprint.body', fingerprint.body ?? data.fingerprint.body, ['canonical', 'raw', 'nothing']);
  const problemBase = textOf('problemBaseUrl', options.problemBaseUrl ?? 'urn:oncegate:problem:');
  if (!/[/#:]$/.test(problemBase)) throw new SettingsError('problemBaseUrl: write a URL that ends with a slash or "#"');
  if (options.documentation !== undefined && !/^(https?:\/\/|\/)[!-;=?-~]*$/.test(options.documentation)) {
    throw new SettingsError('documentation: write a URL such as "https://developer.example.com/idempotency", or a path');
  }
  const naturalKey = options.naturalKey === undefined ? undefined : notEmpty('naturalKey', pointers('naturalKey', options.naturalKey), 'so no request would have a key');
  const scope = readScope(options.scope);
  if (naturalKey !== undefined && scope.parts.length > 0 && !scope.parts.some((part) => part.required && part.source !== 'host')) {
    throw new SettingsError('naturalKey: such keys are easy to guess; set scope to something required, or to "single-tenant"');
  }
  const leaseMs = durationMs('lease', options.lease ?? '30s', 100, 3_600_000);
  return {
    profile,
    scope,
    authority: oneOf('authority', options.authority ?? 'compare', ['compare', 'scope', 'ignore']),
    requireKey: flag('requireKey', options.requireKey ?? data['require-key']),
    keyHeaders,
    naturalKey,
    keySyntax: oneOf('keySyntax', options.keySyntax ?? data['key-syntax'], ['lenient', 'strict', 'raw']),
    keyFormat: readFormat(textOf('keyFormat', options.keyFormat ?? data['key-format'])),
    keyScope: oneOf('keyScope', options.keyScope ?? data['key-scope'], ['endpoint', 'caller']),
    keyScopeHeaders: headerNames('key-scope-header', (data['key-scope-header']) ?? []),
    replayMarker:
      options.replayMarker === undefined
        ? [markerName.toLowerCase(), markerValue]
        : [readMarker(options.replayMarker), markerValue],
    echoKey: data['echo-key'],
    documentation: options.documentation,
    problemBase,
    methods,
    trailingSlash: oneOf('trailingSlash', options.trailingSlash ?? 'ignore', ['ignore', 'exact']),
    leaseMs,
    retentionMs: durationMs('retention', options.retention ?? data.retention, 1000, 400 * DAY_MS),
    waitMs: durationMs('wait', options.wait ?? '2s', 0, 3_600_000),
    onAbandoned: oneOf('onAbandoned', options.onAbandoned ?? 'park', ['park', 'reexecute']),
    serverErrors: oneOf('serverErrors', options.serverErrors ?? data['server-errors'], ['replay', 'release']),
    releases: releases(options.releaseStatuses ?? data['release-statuses']),
    failsOpen: oneOf('storeOutage', options.storeOutage ?? 'closed', ['closed', 'open']) === 'open',
    storedHeaders: new Set([...stored, ...own.map((header) => header.toLowerCase())]),
    rules: {
      rawBodies: body === 'raw',
      include: pointers('fingerprint.include', fingerprint.include ?? data.fingerprint.include),
      exclude: pointers('fingerprint.exclude', fingerprint.exclude ?? data.fingerprint.exclude),
    },
    comparesBody: body !== 'nothing',
    fingerprintHeaders: headerNames('fingerprint.headers', fingerprint.headers ?? []),
    maxRequestBody: sizeBytes('maxRequestBody', options.maxRequestBody ?? '2MiB', 1024 ** 3),
    maxResponseBody: sizeBytes('maxResponseBody', options.maxResponseBody ?? '1MiB', 64 * 1024 ** 2 - 1024 ** 2),
    bodyTimeoutMs: durationMs('bodyTimeout', options.bodyTimeout ?? '60s', 1, 3_600_000),
    handlerTimeoutMs: durationMs('handlerTimeout', options.handlerTimeout ?? '5m', 1, DAY_MS),
    warnings,
  };
}

/** A setting that this library does not have. */
export class UnknownSettingError extends SettingsError {
  constructor(readonly setting: string) {
    const [outer = '', inner] = setting.split('.');
    const hint = inner === undefined ? didYouMean(outer, NAMES) : didYouMean(inner, FINGERPRINT_NAMES);
    const names = [...(inner === undefined ? NAMES : FINGERPRINT_NAMES)].join(', ');
    super(`there is no setting ${JSON.stringify(setting)}${hint === '' ? `; the settings are ${names}` : hint}`);
  }
}

/** Settings by the names of the sidecar's configuration, such as `max-request-body` and `fingerprint.exclude`. */
export function optionsFromNames(named: Readonly<Record<string, unknown>>): IdempotencyOptions {
  const options: Record<string, unknown> = {};
  for (const [name, value] of Object.entries(named)) {
    const [outer = '', inner] = name.split('.');
    const camel = outer.replace(/-([a-z])/g, (_, letter: string) => letter.toUpperCase());
    if (camel !== outer && NAMES.has(outer)) throw new UnknownSettingError(name);
    if (!NAMES.has(camel) || (inner !== undefined) !== (camel === 'fingerprint')) throw new UnknownSettingError(name);
    if (inner === undefined) options[camel] = value;
    else options['fingerprint'] = { ...(options['fingerprint'] as object | undefined), [inner]: value };
  }
  return options;
}
