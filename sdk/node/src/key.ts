// Reads the key of a request from its header field.
import { trimmedField } from './bytes.js';
import { isOtherSpelling } from './headers.js';
import type { StoredField } from './response.js';
import type { Settings } from './settings.js';

/** Why a field has no valid key. The text is for the client, and repeats nothing of the field. */
export type KeyFault =
  | { fault: 'several' | 'differing' | 'empty' | 'bad-string' | 'bad-byte' | 'comma' | 'not-quoted' | 'unreadable' | 'spelling' }
  | { fault: 'too-long'; bytes: number }
  | { fault: 'format'; format: string };

/** A valid key, and the field in which responses repeat it. */
export interface FoundKey {
  key: string;
  echo: StoredField;
}

const MAX_KEY_BYTES = 255;

const SF_STRING = '"(?:[ !#-\\[\\]-~]|\\\\["\\\\])*"';
const SF_BARE_ITEM = [
  '-?\\d{1,12}\\.\\d{1,3}',
  '-?\\d{1,15}',
  SF_STRING,
  "[A-Za-z*][!#$%&'*+\\-.^_`|~0-9A-Za-z:/]*",
  ':[A-Za-z0-9+/=]*:',
  '\\?[01]',
  '@-?\\d{1,15}',
  '%"(?:[ !#$&-~]|%[0-9a-f]{2})*"',
].join('|');
const SF_STRING_ITEM = new RegExp(`^(${SF_STRING})(?:; *[a-z*][a-z0-9_\\-.*]*(?:=(?:${SF_BARE_ITEM}))?)*$`);

/** Reads the value of a field; values are bytes as a `latin1` text. */
export function parseKey(settings: Settings, value: string): string | KeyFault {
  const field = trimmedField(value);
  if (field === '') return { fault: 'empty' };
  if (settings.keySyntax === 'raw') {
    let text: string;
    try {
      text = new TextDecoder('utf-8', { fatal: true, ignoreBOM: true }).decode(Buffer.from(field, 'latin1'));
    } catch {
      return { fault: 'bad-byte' };
    }
     
    return /[\u0000-\u001f\u007f-\u009f]/.test(text) ? { fault: 'bad-byte' } : keyOf(settings, text);
  }
  if (field.startsWith('"')) {
    const item = SF_STRING_ITEM.exec(field);
    if (item === null) return { fault: 'bad-string' };
    return keyOf(settings, (item[1] ?? '').slice(1, -1).replace(/\\(.)/g, '$1'));
  }
  if (settings.keySyntax === 'strict') return { fault: 'not-quoted' };
  for (const letter of field) {
    if (letter === ',') return { fault: 'comma' };
    if (!/[!#-~]/.test(letter)) return { fault: 'bad-byte' };
  }
  return keyOf(settings, field);
}

/** The key in a text that needs no syntax. */
function keyOf(settings: Settings, text: string): string | KeyFault {
  if (/^ *$/.test(text)) return { fault: 'empty' };
  const bytes = Buffer.byteLength(text);
  if (bytes > MAX_KEY_BYTES) return { fault: 'too-long', bytes };
  const format = settings.keyFormat;
  switch (format.kind) {
    case 'any':
      return text;
    case 'uuid':
      if (/^[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}$/i.test(text)) return text.toLowerCase();
      return { fault: 'format', format: 'a UUID' };
    case 'ulid':
      if (/^[0-7][0-9a-hjkmnp-tv-z]{25}$/i.test(text)) return text.toUpperCase();
      return { fault: 'format', format: 'a ULID' };
    case 'pattern':
      return format.regex.test(text) ? text : { fault: 'format', format: 'of the published format' };
  }
}

/** The key in the header fields of a request; undefined if there is none. */
export function keyInHeaders(settings: Settings, headers: readonly StoredField[]): FoundKey | KeyFault | undefined {
  const own = settings.keyHeaders;
  if (hasOtherSpelling(settings, headers)) return { fault: 'spelling' };
  const lines = own.map((name) => headers.filter(([field]) => field === name)).filter((found) => found.length > 0);
  if (lines.some((found) => found.length > 1)) return { fault: 'several' };
  let first: FoundKey | undefined;
  for (const [line] of lines) {
    if (line === undefined) continue;
    const key = parseKey(settings, line[1]);
    if (typeof key !== 'string') return key;
    if (first !== undefined && first.key !== key) return { fault: 'differing' };
    first ??= { key, echo: line };
  }
  return first;
}

/** Returns true if a request has a field of the key with `_` for `-`, or the reverse: many services read it. */
export function hasOtherSpelling(settings: Settings, headers: readonly StoredField[]): boolean {
  const own = settings.keyHeaders;
  return headers.some(([name]) => !own.includes(name) && own.some((key) => isOtherSpelling(name, key)));
}

/** The fault, and what to send instead. */
export function explainKeyFault(settings: Settings, fault: KeyFault): string {
  const format = settings.keyFormat;
  const advice = () => {
    switch (format.kind) {
      case 'any':
        return 'send 1 to 255 characters, such as a UUID';
      case 'uuid':
        return 'send a UUID of 36 characters';
      case 'ulid':
        return 'send a ULID of 26 characters';
      case 'pattern':
        return `send one that the regular expression ${format.source} matches from end to end`;
    }
  };
  switch (fault.fault) {
    case 'several':
      return 'the key was sent more than once; send one key';
    case 'differing':
      return 'two places have different keys; send one key';
    case 'empty':
      return `the key is empty; ${advice()}`;
    case 'bad-string':
      return 'the key starts with a quote but is not a string of RFC 9651; send "key" or the key without quotes';
    case 'bad-byte':
      return settings.keySyntax === 'raw'
        ? 'the key has a character that is not allowed; send text in UTF-8 without control characters'
        : 'the key has a character that is not allowed; send visible ASCII characters without quote and comma, or put the key in quotes';
    case 'comma':
      return 'the key has a comma; send one key, or put it in quotes';
    case 'not-quoted':
      return 'the key must be in double quotes';
    case 'unreadable':
      return (
        'the body is no JSON that every program reads alike, or its content coding cannot be undone, so a key in it may be overlooked; ' +
        'send JSON in UTF-8, as it is or in gzip'
      );
    case 'spelling':
      return 'the name of the field was sent with `_` for `-`, or the reverse; send it as it is written here';
    case 'too-long':
      return `the key has ${String(fault.bytes)} characters; at most ${String(MAX_KEY_BYTES)} are allowed`;
    case 'format':
      return `the key is not ${fault.format}; ${advice()}`;
  }
}
