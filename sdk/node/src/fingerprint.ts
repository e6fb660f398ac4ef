// The fingerprint of a request, version 1: equal fingerprints mean the same request. The algorithm is the documentation of
// `oncegate_core::fingerprint`, and `crates/core/vectors/fingerprints.json` has examples.
import { isAscii, isUtf8 } from 'node:buffer';
import { bytesOf, compareBytes, digestOf, lower, remembered, trimmedField, withoutEnds, type Part } from './bytes.js';

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
  /** Bytes, or bytes as a `latin1` text. */
  contentType: string | Uint8Array;
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

export function mediaType(contentType: string | Uint8Array): MediaType {
  return mediaTypeOf(typeof contentType === 'string' ? contentType : bytesOf(contentType).toString('latin1'));
}

const mediaTypeOf = remembered((contentType): MediaType => {
  const field = trimmedField(contentType);
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
        : name === 'application/json' || (sub.length > 5 && sub.endsWith('+json'))
          ? 'json'
          : 'other';
  return { name, kind, boundary: parameters.get('boundary') };
});

// JSON

/** The canonical text of a string, a number, `true`, `false` or `null`; or what contains others. */
type Json = string | Json[] | JsonObject;

interface Member {
  name: string;
  /** The canonical text of the name. */
  text: string;
  value: Json;
}

class JsonObject {
  constructor(readonly members: Member[]) {}

  get(name: string): Json | undefined {
    return this.members.find((member) => member.name === name)?.value;
  }
}

function canonicalNumber(sign: string, digits: string, fraction: string, exponent: string): string {
  const all = digits + fraction;
  const significant = withoutEnds(all, '0');
  if (significant === '') return '0';
  if (exponent.replace(/^[+-]/, '').replace(/^0+/, '').length > 15) throw new Raw('exponent');
  let trailing = 0;
  while (all[all.length - 1 - trailing] === '0') trailing += 1;
  const scale = Number(exponent === '' ? '0' : exponent) - fraction.length + trailing;
  if (scale >= 0) {
    if (significant.length + scale > 16) throw new Raw('magnitude');
    const value = BigInt(significant + '0'.repeat(scale));
    if (value > MAX_SAFE) throw new Raw('magnitude');
    return sign + String(value);
  }
  if (significant.length > 15 || significant.length - 1 + scale < -307) throw new Raw('precision');
  return String(Number(`${sign}${significant}e${String(scale)}`));
}

const NUMBER = /(-?)(0|[1-9][0-9]*)(?:\.([0-9]+))?(?:[eE]([+-]?[0-9]+))?/y;

const QUOTE = 0x22;
const COMMA = 0x2c;
const COLON = 0x3a;
const BACKSLASH = 0x5c;

/** The most members of an object that are compared, and sorted, one by one: calls of native code cost more. */
const FEW = 8;

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
    for (;;) {
      const code = this.text.charCodeAt(this.at);
      if (code !== 0x20 && code !== 0x0a && code !== 0x0d && code !== 0x09) return;
      this.at += 1;
    }
  }

  private take(code: number): boolean {
    if (this.text.charCodeAt(this.at) !== code) return false;
    this.at += 1;
    return true;
  }

  private value(depth: number): Json {
    this.space();
    switch (this.text.charCodeAt(this.at)) {
      case 0x7b:
        if (depth === MAX_DEPTH) throw new Raw('depth');
        return this.object(depth + 1);
      case 0x5b:
        if (depth === MAX_DEPTH) throw new Raw('depth');
        return this.array(depth + 1);
      case QUOTE:
        return this.string();
      case 0x74:
        return this.word('true');
      case 0x66:
        return this.word('false');
      case 0x6e:
        return this.word('null');
      default:
        return this.number();
    }
  }

  private word(word: string): string {
    if (!this.text.startsWith(word, this.at)) throw new Raw('no value');
    this.at += word.length;
    return word;
  }

  private object(depth: number): JsonObject {
    const members: Member[] = [];
    const folded: string[] = [];
    let many: Set<string> | undefined;
    this.at += 1;
    this.space();
    if (this.take(0x7d)) return new JsonObject(members);
    do {
      this.space();
      const text = this.string();
      const name = text.includes('\\') ? (JSON.parse(text) as string) : text.slice(1, -1);
      const fold = withoutCase(name);
      if (many?.has(fold) ?? folded.includes(fold)) throw new Raw('two members of one name');
      if (folded.length < FEW) folded.push(fold);
      else many = (many ?? new Set(folded)).add(fold);
      this.space();
      if (!this.take(COLON)) throw new Raw('no colon');
      members.push({ name, text, value: this.value(depth) });
      this.space();
    } while (this.take(COMMA));
    if (!this.take(0x7d)) throw new Raw('no end of an object');
    return new JsonObject(members);
  }

  private array(depth: number): Json[] {
    const items: Json[] = [];
    this.at += 1;
    this.space();
    if (this.take(0x5d)) return items;
    do {
      items.push(this.value(depth));
      this.space();
    } while (this.take(COMMA));
    if (!this.take(0x5d)) throw new Raw('no end of an array');
    return items;
  }

  /** The canonical text of a string. Only one with escapes may differ from it, because the body is valid UTF-8. */
  private string(): string {
    const { text } = this;
    const start = this.at;
    if (!this.take(QUOTE)) throw new Raw('no string');
    let isPlain = true;
    let at = this.at;
    for (;; at += 1) {
      const code = text.charCodeAt(at);
      if (code === QUOTE) break;
      // There is no letter after the end, and no control character in a string.
      if (!(code >= 0x20)) throw new Raw('no end of a string');
      if (code !== BACKSLASH) continue;
      isPlain = false;
      at += 1;
    }
    this.at = at + 1;
    const sent = text.slice(start, this.at);
    if (isPlain) return sent;
    let string: unknown;
    try {
      string = JSON.parse(sent);
    } catch {
      throw new Raw('escape');
    }
    if (typeof string !== 'string' || hasHalfPair(string)) throw new Raw('half a surrogate pair');
    return JSON.stringify(string);
  }

  private number(): string {
    const { text } = this;
    const start = this.at;
    let at = start;
    let code = text.charCodeAt(at);
    for (; code >= 0x30 && code <= 0x39; at += 1) code = text.charCodeAt(at + 1);
    const digits = at - start;
    const point = at;
    if (code === 0x2e) for (code = text.charCodeAt((at += 1)); code >= 0x30 && code <= 0x39; at += 1) code = text.charCodeAt(at + 1);
    const isShort = at - start <= 16 && at !== point + 1 && code !== 0x65 && code !== 0x45;
    // A short whole number without a leading zero is canonical, and a short fraction is exact.
    if (isShort && digits > 0 && digits <= 15 && (digits === 1 || text.charCodeAt(start) !== 0x30)) {
      this.at = at;
      const sent = text.slice(start, at);
      return at === point ? sent : String(Number(sent));
    }
    NUMBER.lastIndex = start;
    const found = NUMBER.exec(text);
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
  let [upper, folded] = ['', ''];
  // Letter by letter: the case of some depends on their neighbours.
  for (const letter of name) upper += letter.toUpperCase();
  for (const letter of upper) folded += letter.toLowerCase();
  return folded;
}

function parseJson(body: Uint8Array): Json {
  if (!isUtf8(body)) throw new Raw('not UTF-8');
  const bytes = bytesOf(body);
  return new Parser(bytes.toString(isAscii(body) ? 'latin1' : 'utf8')).document();
}

function canonicalJson(value: Json): string {
  if (typeof value === 'string') return value;
  if (Array.isArray(value)) return `[${value.map(canonicalJson).join(',')}]`;
  let text = '{';
  for (const { text: name, value: member } of sorted(value.members)) text += `${text === '{' ? '' : ','}${name}:${canonicalJson(member)}`;
  return `${text}}`;
}

/** The members by their names. Texts of JavaScript are compared by their UTF-16 code units, as RFC 8785 demands. */
function sorted(members: readonly Member[]): readonly Member[] {
  if (members.length > FEW) return [...members].sort((one, other) => (one.name < other.name ? -1 : 1));
  const few: Member[] = [];
  for (const member of members) {
    let at = few.length;
    for (; at > 0; at -= 1) {
      const before = few[at - 1];
      if (before === undefined || before.name < member.name) break;
      few[at] = before;
    }
    few[at] = member;
  }
  return few;
}

/** The canonical JSON of a value that a program has parsed; without a canonical form, its JSON as the program would write it. */
export function canonicalJsonOf(value: unknown): string {
  const text = JSON.stringify(value) as string | undefined ?? 'null';
  try {
    return canonicalJson(parseJson(Buffer.from(text)));
  } catch (error) {
    if (error instanceof Raw) return text;
    throw error;
  }
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
  if (typeof value === 'string') return value;
  const kept: Member[] = [];
  for (const member of value.members) {
    const rest = without(member.value, below((token) => token === member.name));
    if (rest !== undefined) kept.push({ ...member, value: rest });
  }
  return new JsonObject(kept);
}

/** The value that a path leads to, without what is excluded. */
function select(value: Json, path: Path, excluded: readonly Path[]): Json | undefined {
  let [current, paths]: [Json | undefined, readonly Path[]] = [value, excluded];
  for (const token of path) {
    if (paths.some((other) => other.length === 0)) return undefined;
    const at = indexOf(token);
    current = current instanceof JsonObject ? current.get(token) : Array.isArray(current) && at !== undefined ? current[at] : undefined;
    if (current === undefined) return undefined;
    paths = paths.filter(([first]) => first === token).map((other) => other.slice(1));
  }
  return without(current, paths);
}

/** Returns true if there is a string, a number, `true` or `false` in the value. */
function hasContent(value: Json | undefined): boolean {
  if (value === undefined || typeof value === 'string') return value !== undefined && value !== 'null';
  return Array.isArray(value) ? value.some(hasContent) : value.members.some((member) => hasContent(member.value));
}

type Comparable = [tag: string, parts: Part[]];

function jsonBody(body: Uint8Array, rules: FingerprintRules): Comparable {
  const value = parseJson(body);
  if (rules.include.length === 0 && rules.exclude.length === 0) return ['json', [canonicalJson(value)]];
  const excluded = rules.exclude.map(pointerTokens);
  if (!rules.include.some((pointer) => hasContent(select(value, pointerTokens(pointer), excluded)))) {
    const left = without(value, excluded);
    return ['json', [canonicalJson(hasContent(left) && left !== undefined ? left : value)]];
  }
  const pointers = [...new Set(rules.include)].sort(compareBytes);
  const parts: Part[] = [pointers.length];
  for (const pointer of pointers) {
    const found = select(value, pointerTokens(pointer), excluded);
    parts.push(pointer, found === undefined ? 'absent' : canonicalJson(found));
  }
  return ['json-include', parts];
}

// Forms

function decodeForm(text: string): string {
  if (/%(?![0-9A-Fa-f]{2})/.test(text)) throw new Raw('percent');
  if (!/[%+]/.test(text)) return text;
  const bytes = Buffer.from(text, 'latin1');
  let end = 0;
  for (let at = 0; at < bytes.length; at += 1) {
    const byte = bytes[at] ?? 0;
    if (byte === 0x25) {
      bytes[end] = 16 * hexDigit(bytes[at + 1] ?? 0) + hexDigit(bytes[at + 2] ?? 0);
      at += 2;
    } else {
      bytes[end] = byte === 0x2b ? 0x20 : byte;
    }
    end += 1;
  }
  return bytes.toString('latin1', 0, end);
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
  const latin1 = (text: string) => Buffer.from(text, 'latin1');
  return ['form', [pairs.length, ...pairs.flatMap(({ name, value }) => [latin1(name), latin1(value)])]];
}

function hexDigit(code: number): number {
  return code <= 0x39 ? code - 0x30 : (code | 0x20) - 0x57;
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
  const latin1 = (text: string) => Buffer.from(text, 'latin1');
  const parts: Part[] = [pieces.length - 2];
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
      return [lower(field[1] ?? ''), trimmedField(field[2] ?? '')] as const;
    });
    fields.sort(([one], [other]) => (one < other ? -1 : one > other ? 1 : 0));
    parts.push(fields.length, ...fields.flatMap(([name, value]) => [latin1(name), latin1(value)]));
    parts.push(latin1(piece.slice(end + 4)));
  }
  return ['multipart', parts];
}

// Fingerprints

function comparable(input: FingerprintInput, rules: FingerprintRules, type: MediaType): Comparable {
  const body = bytesOf(input.body);
  const raw: Comparable = ['raw', [body]];
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
  const digest = digestOf([
    'oncegate-fp-1',
    input.method,
    input.authority ?? '',
    input.target,
    Buffer.from(type.name, 'latin1'),
    tag,
    lower(input.contentCoding),
    headers.length,
    ...headers.flat(),
    ...content,
  ]);
  return { tag, digest };
}

/** The digest of a list of parts, for operations that are no HTTP requests. */
export function partsDigest(domain: string, parts: readonly (string | Uint8Array)[]): Buffer {
  return digestOf(['oncegate-fp-parts-1', domain, ...parts]);
}

/** A fingerprint as stores have it: the version and the digest, 33 bytes. */
export function versioned(digest: Uint8Array): Buffer {
  const fingerprint = Buffer.allocUnsafe(1 + digest.length);
  fingerprint[0] = 1;
  fingerprint.set(digest, 1);
  return fingerprint;
}

/** The reason why a body has no natural key. */
export type NoNaturalKey = { reason: 'not-json' } | { reason: 'missing'; member: string };

/** The key that is built from members of a JSON body. */
export function naturalKey(members: readonly string[], contentType: string | Uint8Array, body: Uint8Array): string | NoNaturalKey {
  if (mediaType(contentType).kind !== 'json') return { reason: 'not-json' };
  let value: Json;
  try {
    value = parseJson(body);
  } catch {
    return { reason: 'not-json' };
  }
  const pointers = [...new Set(members)].sort(compareBytes);
  const parts: Part[] = [];
  for (const pointer of pointers) {
    const found = select(value, pointerTokens(pointer), []);
    if (found === undefined) return { reason: 'missing', member: pointer };
    parts.push(pointer, canonicalJson(found));
  }
  return `json-${digestOf(['oncegate-natural-key-1', pointers.length, ...parts]).toString('hex')}`;
}
