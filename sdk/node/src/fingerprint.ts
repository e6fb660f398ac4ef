// The fingerprint of a request, version 1: equal fingerprints mean the same request. The algorithm is the documentation of
// `oncegate_core::fingerprint`, and `crates/core/vectors/fingerprints.json` has examples.
import { bytesOf, compareBytes, lp, sha256, u64 } from './bytes.js';

/** What counts of a body. Pointers are JSON pointers (RFC 6901). */
export interface FingerprintRules {
  rawBodies: boolean;
  include: readonly string[];
  exclude: readonly string[];
}

/** A request, as its fingerprint sees it. */
export interface FingerprintInput {
  method: string;
  authority?: string;
  /** Bytes, or a text. */
  target: string | Uint8Array;
  contentType: Uint8Array;
  /** The content coding that could not be undone; normally empty. */
  contentCoding: string;
  headers: readonly (readonly [name: string, value: Uint8Array])[];
  body: Uint8Array;
}

/** The body has no canonical form, and is compared byte by byte. */
class Raw extends Error {}

const MAX_SAFE = BigInt(Number.MAX_SAFE_INTEGER);
const MAX_DEPTH = 128;
const MAX_FORM_PAIRS = 16_384;
const MAX_MULTIPART_ITEMS = 16_384;
const TOKEN = "[!#$%&'*+\\-.^_`|~0-9A-Za-z]+";

// Media types. Bytes are texts of `latin1` here.

interface MediaType {
  /** The hashed name. */
  name: string;
  kind: 'json' | 'form' | 'multipart' | 'other';
  boundary: string | undefined;
}

const ESSENCE = new RegExp(`^(${TOKEN})/(${TOKEN})[ \\t]*(?=;|$)`);
const PARAMETER = new RegExp(
  `^[ \\t]*;[ \\t]*(?:(${TOKEN})=(?:"((?:[^"\\\\]|\\\\[^])*)"|([!#-+\\--:<-\\[\\]-~]+))|(?=;|$))[ \\t]*(?=;|$)`,
);
const WHOLE_TOKEN = new RegExp(`^${TOKEN}$`);

export function mediaType(contentType: Uint8Array): MediaType {
  const field = bytesOf(contentType).toString('latin1').replace(/^[ \t]+|[ \t]+$/g, '');
  const unknown: MediaType = { name: field, kind: 'other', boundary: undefined };
  const essence = ESSENCE.exec(field);
  if (essence === null) return unknown;
  const parameters = new Map<string, string>();
  let rest = field.slice(essence[0].length);
  while (rest !== '') {
    const found = PARAMETER.exec(rest);
    if (found === null || found[0] === '') return unknown;
    rest = rest.slice(found[0].length);
    if (found[1] === undefined) continue;
    const name = lower(found[1]);
    if ((name === 'charset' || name === 'boundary') && parameters.has(name)) return unknown;
    parameters.set(name, found[3] ?? (found[2] ?? '').replace(/\\([^])/g, '$1'));
  }
  const [top, sub] = [lower(essence[1] ?? ''), lower(essence[2] ?? '')];
  const name = `${top}/${sub}`;
  const charset = parameters.get('charset');
  if (charset !== undefined) {
    if (!WHOLE_TOKEN.test(charset)) return unknown;
    if (lower(charset) !== 'utf-8' && lower(charset) !== 'utf8') {
      return { name: `${name};charset=${lower(charset)}`, kind: 'other', boundary: undefined };
    }
  }
  const kind =
    top === 'multipart'
      ? 'multipart'
      : name === 'application/x-www-form-urlencoded'
        ? 'form'
        : name === 'application/json' || /^[^]+\+json$/.test(sub)
          ? 'json'
          : 'other';
  return { name, kind, boundary: parameters.get('boundary') };
}

/** ASCII letters in lower case. */
function lower(text: string): string {
  return text.replace(/[A-Z]/g, (letter) => letter.toLowerCase());
}

// JSON

/** A number in its canonical form. */
class CanonicalNumber {
  constructor(readonly text: string) {}
}

type Json = null | boolean | string | CanonicalNumber | Json[] | Map<string, Json>;

function canonicalNumber(sign: string, digits: string, fraction: string, exponent: string): CanonicalNumber {
  const all = digits + fraction;
  const significant = all.replace(/^0+|0+$/g, '');
  if (significant === '') return new CanonicalNumber('0');
  if (exponent.replace(/^[+-]/, '').replace(/^0+/, '').length > 15) throw new Raw('exponent');
  const trailing = all.length - all.replace(/0+$/, '').length;
  const scale = Number(exponent === '' ? '0' : exponent) - fraction.length + trailing;
  if (scale >= 0) {
    if (significant.length + scale > 16) throw new Raw('magnitude');
    const value = BigInt(significant + '0'.repeat(scale));
    if (value > MAX_SAFE) throw new Raw('magnitude');
    return new CanonicalNumber(sign + String(value));
  }
  if (significant.length > 15 || significant.length - 1 + scale < -307) throw new Raw('precision');
  return new CanonicalNumber(String(Number(`${sign}${significant}e${String(scale)}`)));
}

const NUMBER = /(-?)(0|[1-9][0-9]*)(?:\.([0-9]+))?(?:[eE]([+-]?[0-9]+))?/y;
 
const PLAIN_STRING = /[^"\\\u0000-\u001f]*/y;
const SPACE = /[ \t\n\r]*/y;

/** A parser of JSON by RFC 8259, which keeps numbers exact and refuses what programs read in different ways. */
class Parser {
  private at = 0;

  constructor(private readonly text: string) {}

  document(): Json {
    const value = this.value(0);
    this.space();
    if (this.at < this.text.length) throw new Raw('something after the value');
    return value;
  }

  private space(): void {
    SPACE.lastIndex = this.at;
    SPACE.test(this.text);
    this.at = SPACE.lastIndex;
  }

  private take(text: string): boolean {
    if (!this.text.startsWith(text, this.at)) return false;
    this.at += text.length;
    return true;
  }

  private value(depth: number): Json {
    this.space();
    switch (this.text[this.at]) {
      case '{':
        if (depth === MAX_DEPTH) throw new Raw('depth');
        return this.object(depth + 1);
      case '[':
        if (depth === MAX_DEPTH) throw new Raw('depth');
        return this.array(depth + 1);
      case '"':
        return this.string();
      default:
        if (this.take('true')) return true;
        if (this.take('false')) return false;
        if (this.take('null')) return null;
        return this.number();
    }
  }

  private object(depth: number): Map<string, Json> {
    const members = new Map<string, Json>();
    const folded = new Set<string>();
    this.at += 1;
    this.space();
    if (this.take('}')) return members;
    do {
      this.space();
      const name = this.string();
      const fold = withoutCase(name);
      if (folded.has(fold)) throw new Raw('two members of one name');
      folded.add(fold);
      this.space();
      if (!this.take(':')) throw new Raw('no colon');
      members.set(name, this.value(depth));
      this.space();
    } while (this.take(','));
    if (!this.take('}')) throw new Raw('no end of an object');
    return members;
  }

  private array(depth: number): Json[] {
    const items: Json[] = [];
    this.at += 1;
    this.space();
    if (this.take(']')) return items;
    do {
      items.push(this.value(depth));
      this.space();
    } while (this.take(','));
    if (!this.take(']')) throw new Raw('no end of an array');
    return items;
  }

  private string(): string {
    const start = this.at;
    if (!this.take('"')) throw new Raw('no string');
    for (;;) {
      PLAIN_STRING.lastIndex = this.at;
      PLAIN_STRING.test(this.text);
      this.at = PLAIN_STRING.lastIndex;
      if (this.take('"')) break;
      if (!this.take('\\')) throw new Raw('no end of a string');
      this.at += 1;
    }
    let string: unknown;
    try {
      string = JSON.parse(this.text.slice(start, this.at));
    } catch {
      throw new Raw('escape');
    }
    if (typeof string !== 'string' || hasHalfPair(string)) throw new Raw('half a surrogate pair');
    return string;
  }

  private number(): CanonicalNumber {
    NUMBER.lastIndex = this.at;
    const found = NUMBER.exec(this.text);
    if (found === null) throw new Raw('no value');
    this.at = NUMBER.lastIndex;
    return canonicalNumber(found[1] ?? '', found[2] ?? '', found[3] ?? '', found[4] ?? '');
  }
}

function hasHalfPair(text: string): boolean {
  return /[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/.test(text);
}

/** A name in one case, for programs that ignore case. */
function withoutCase(name: string): string {
   
  if (/^[\u0000-\u007f]*$/.test(name)) return name.toLowerCase();
  const upper = Array.from(name, (letter) => letter.toUpperCase()).join('');
  return Array.from(upper, (letter) => letter.toLowerCase()).join('');
}

function parseJson(body: Uint8Array): Json {
  let text: string;
  try {
    text = new TextDecoder('utf-8', { fatal: true, ignoreBOM: true }).decode(body);
  } catch {
    throw new Raw('not UTF-8');
  }
  return new Parser(text).document();
}

function canonicalJson(value: Json): string {
  if (value === null || typeof value === 'boolean') return String(value);
  if (typeof value === 'string') return JSON.stringify(value);
  if (value instanceof CanonicalNumber) return value.text;
  if (Array.isArray(value)) return `[${value.map(canonicalJson).join(',')}]`;
  // Texts of JavaScript are compared by their UTF-16 code units, as RFC 8785 demands.
  const members = [...value].sort(([one], [other]) => (one < other ? -1 : 1));
  return `{${members.map(([name, member]) => `${JSON.stringify(name)}:${canonicalJson(member)}`).join(',')}}`;
}

/** The canonical JSON of a value that a program has parsed. */
export function canonicalJsonOf(value: unknown): string {
  return canonicalJson(parseJson(Buffer.from(JSON.stringify(value) as string | undefined ?? 'null')));
}

type Path = readonly string[];

export function pointerTokens(pointer: string): Path {
  return pointer.split('/').slice(1).map((token) => token.replaceAll('~1', '/').replaceAll('~0', '~'));
}

function indexOf(token: string | undefined): number | undefined {
  return token !== undefined && /^(?:0|[1-9][0-9]*)$/.test(token) ? Number(token) : undefined;
}

/** The value without what the paths lead to. */
function without(value: Json, paths: readonly Path[]): Json | undefined {
  if (paths.some((path) => path.length === 0)) return undefined;
  if (paths.length === 0) return value;
  const below = (step: (token: string) => boolean) =>
    paths.filter(([token]) => token !== undefined && step(token)).map((path) => path.slice(1));
  if (Array.isArray(value)) {
    return value.map((item, at) => without(item, below((token) => indexOf(token) === at))).filter((item) => item !== undefined);
  }
  if (!(value instanceof Map)) return value;
  const kept = new Map<string, Json>();
  for (const [name, member] of value) {
    const rest = without(member, below((token) => token === name));
    if (rest !== undefined) kept.set(name, rest);
  }
  return kept;
}

/** The value that a path leads to, without what is excluded. */
function select(value: Json, path: Path, excluded: readonly Path[]): Json | undefined {
  let [current, paths]: [Json | undefined, readonly Path[]] = [value, excluded];
  for (const token of path) {
    if (paths.some((other) => other.length === 0)) return undefined;
    const at = indexOf(token);
    current = current instanceof Map ? current.get(token) : Array.isArray(current) && at !== undefined ? current[at] : undefined;
    if (current === undefined) return undefined;
    paths = paths.filter(([first]) => first === token).map((other) => other.slice(1));
  }
  return without(current, paths);
}

/** Returns true if there is a string, a number, `true` or `false` in the value. */
function hasContent(value: Json | undefined): boolean {
  if (value instanceof Map) return [...value.values()].some(hasContent);
  if (Array.isArray(value)) return value.some(hasContent);
  return value !== undefined && value !== null;
}

type Comparable = [tag: string, parts: Uint8Array[]];

function jsonBody(body: Uint8Array, rules: FingerprintRules): Comparable {
  const value = parseJson(body);
  const excluded = rules.exclude.map(pointerTokens);
  if (!rules.include.some((pointer) => hasContent(select(value, pointerTokens(pointer), excluded)))) {
    const left = without(value, excluded);
    return ['json', [lp(canonicalJson(hasContent(left) && left !== undefined ? left : value))]];
  }
  const pointers = [...new Set(rules.include)].sort(compareBytes);
  const parts: Uint8Array[] = [u64(pointers.length)];
  for (const pointer of pointers) {
    const found = select(value, pointerTokens(pointer), excluded);
    parts.push(lp(pointer), lp(found === undefined ? 'absent' : canonicalJson(found)));
  }
  return ['json-include', parts];
}

// Forms

function decodeForm(text: string): string {
  if (/%(?![0-9A-Fa-f]{2})/.test(text)) throw new Raw('percent');
  return text.replaceAll('+', ' ').replace(/%(..)/g, (_, digits: string) => String.fromCharCode(parseInt(digits, 16)));
}

function formBody(bytes: Buffer): Comparable {
  const body = bytes.toString('latin1');
  if (body.includes(';')) throw new Raw('read in different ways');
  const segments = body.split('&', MAX_FORM_PAIRS + 1);
  if (segments.length > MAX_FORM_PAIRS) throw new Raw('too long');
  const pairs = segments.map((segment) => {
    const equals = segment.indexOf('=');
    if (equals < 0) throw new Raw('no pair');
    const name = decodeForm(segment.slice(0, equals));
    return { name, value: decodeForm(segment.slice(equals + 1)), stem: lower(/[0-9A-Za-z]+/.exec(name)?.[0] ?? '') };
  });
  if (pairs.every(({ name }) => /^[ -~]*$/.test(name))) {
    pairs.sort(({ stem: one }, { stem: other }) => (one < other ? -1 : one > other ? 1 : 0));
  }
  const latin1 = (text: string) => lp(Buffer.from(text, 'latin1'));
  return ['form', [u64(pairs.length), ...pairs.flatMap(({ name, value }) => [latin1(name), latin1(value)])]];
}

// Multipart

const HEADER_LINE = new RegExp(`^(${TOKEN}):([^\\r\\n\\0]*)$`);

function multipartBody(bytes: Buffer, boundary: string | undefined): Comparable {
  if (boundary === undefined || !/^[ -~]{0,69}[!-~]$/.test(boundary)) throw new Raw('boundary');
  const delimiter = `\r\n--${boundary}`;
  let body = bytes.toString('latin1');
  // The start of the body is as good as the CRLF before a delimiter.
  if (!body.startsWith('\r\n')) body = `\r\n${body}`;
  const pieces = body.split(delimiter, MAX_MULTIPART_ITEMS + 3);
  const last = pieces.at(-1);
  if (pieces.length < 2 || pieces[0] !== '' || (last !== '--' && last !== '--\r\n')) throw new Raw('delimiters');
  const latin1 = (text: string) => lp(Buffer.from(text, 'latin1'));
  const parts: Uint8Array[] = [u64(pieces.length - 2)];
  let items = 0;
  for (const piece of pieces.slice(1, -1)) {
    if (!piece.startsWith('\r\n') || piece.startsWith(delimiter.slice(2), 2)) throw new Raw('delimiter');
    const end = piece.indexOf('\r\n\r\n');
    if (end < 0) throw new Raw('no empty line');
    const lines = piece.slice(0, end).split('\r\n').slice(1);
    items += 1 + lines.length;
    if (items > MAX_MULTIPART_ITEMS) throw new Raw('too many parts');
    const fields = lines.map((line) => {
      const field = HEADER_LINE.exec(line);
      if (field === null) throw new Raw('header line');
      return [lower(field[1] ?? ''), (field[2] ?? '').replace(/^[ \t]+|[ \t]+$/g, '')] as const;
    });
    fields.sort(([one], [other]) => (one < other ? -1 : one > other ? 1 : 0));
    parts.push(u64(fields.length), ...fields.flatMap(([name, value]) => [latin1(name), latin1(value)]));
    parts.push(latin1(piece.slice(end + 4)));
  }
  return ['multipart', parts];
}

// Fingerprints

function comparable(input: FingerprintInput, rules: FingerprintRules, type: MediaType): Comparable {
  const body = bytesOf(input.body);
  const raw: Comparable = ['raw', [lp(body)]];
  if (rules.rawBodies || input.contentCoding !== '' || body.length === 0) return raw;
  try {
    switch (type.kind) {
      case 'json':
        return jsonBody(body, rules);
      case 'form':
        return formBody(body);
      case 'multipart':
        return multipartBody(body, type.boundary);
      default:
        return raw;
    }
  } catch (error) {
    if (error instanceof Raw) return raw;
    throw error;
  }
}

/** The digest of a request, and how its body was compared. */
export function fingerprintDigest(input: FingerprintInput, rules: FingerprintRules): { tag: string; digest: Buffer } {
  const type = mediaType(input.contentType);
  const [tag, content] = comparable(input, rules, type);
  const headers = [...input.headers].sort(([one], [other]) => compareBytes(one, other));
  const digest = sha256(
    lp('oncegate-fp-1'),
    lp(input.method),
    lp(input.authority ?? ''),
    lp(input.target),
    lp(Buffer.from(type.name, 'latin1')),
    lp(tag),
    lp(lower(input.contentCoding)),
    u64(headers.length),
    ...headers.flatMap(([name, value]) => [lp(name), lp(value)]),
    ...content,
  );
  return { tag, digest };
}

/** The digest of a list of parts, for operations that are no HTTP requests. */
export function partsDigest(domain: string, parts: readonly (string | Uint8Array)[]): Buffer {
  return sha256(lp('oncegate-fp-parts-1'), lp(domain), ...parts.map(lp));
}

/** A fingerprint as stores have it: the version and the digest, 33 bytes. */
export function versioned(digest: Uint8Array): Buffer {
  return Buffer.concat([Buffer.of(1), digest]);
}

/** The reason why a body has no natural key. */
export type NoNaturalKey = { reason: 'not-json' } | { reason: 'missing'; member: string };

/** The key that is built from members of a JSON body. */
export function naturalKey(members: readonly string[], contentType: Uint8Array, body: Uint8Array): string | NoNaturalKey {
  if (mediaType(contentType).kind !== 'json') return { reason: 'not-json' };
  let value: Json;
  try {
    value = parseJson(body);
  } catch {
    return { reason: 'not-json' };
  }
  const pointers = [...new Set(members)].sort(compareBytes);
  const parts: Uint8Array[] = [];
  for (const pointer of pointers) {
    const found = select(value, pointerTokens(pointer), []);
    if (found === undefined) return { reason: 'missing', member: pointer };
    parts.push(lp(pointer), lp(canonicalJson(found)));
  }
  return `json-${sha256(lp('oncegate-natural-key-1'), u64(pointers.length), ...parts).toString('hex')}`;
}
