// Whose key it is: the identity of the caller of a request.
import { withoutEnds } from './bytes.js';
import { callerDigest, type CallerPart } from './identity.js';
import { changesEachTime, isCredential, isNewEachTime, isOtherSpelling } from './headers.js';
import { authorityOf, type RequestHead } from './request.js';
import type { Refusal } from './refusal.js';
import { NO_PROMISE, SettingsError, type ScopePart, type Settings } from './settings.js';

/** Schemes of `Authorization`. A field with a scheme and nothing after it has no credential. */
const SCHEMES = new Set(['bearer', 'basic', 'digest', 'token', 'apikey', 'dpop', 'hmac', 'negotiate']);

function trimmed(value: string): string {
  return withoutEnds(value, ' \t\n\f\r');
}

function shown({ source, name }: ScopePart): string {
  switch (source) {
    case 'header':
      return `The header field ${name}`;
    case 'cookie':
      return `The cookie ${name}`;
    case 'host':
      return 'The host';
    case 'function':
      return 'The identity of the caller';
  }
}

/** The values of the cookies with this name (RFC 6265, section 4.2.1). */
function cookies(head: RequestHead, name: string): string[] {
  return head.headers
    .filter(([field]) => field === 'cookie')
    .flatMap(([, line]) => line.split(';'))
    .flatMap((pair) => {
      const equals = pair.indexOf('=');
      return equals >= 0 && trimmed(pair.slice(0, equals)) === name ? [trimmed(pair.slice(equals + 1))] : [];
    });
}

function identityOfFunction(identity: unknown): Buffer | undefined {
  if (identity === undefined || identity === null) return undefined;
  if (typeof identity === 'string') return Buffer.from(identity);
  if (typeof identity === 'bigint' || (typeof identity === 'number' && Number.isFinite(identity))) return Buffer.from(String(identity));
  if (typeof (identity as { then?: unknown }).then === 'function') {
    // Its rejection must not end the process.
    (identity as Promise<unknown>).then(undefined, () => undefined);
    throw new SettingsError(`scope: ${NO_PROMISE}`);
  }
  const kind = typeof identity === 'number' ? String(identity) : typeof identity;
  throw new SettingsError(`scope: the function returned ${kind}; return a text or a number, or undefined if nothing identifies the caller`);
}

/** The value of a part; undefined if it is absent or empty, null if it is there several times. */
function identityOf(part: ScopePart, head: RequestHead): Buffer | undefined | null {
  const { source, name } = part;
  let value: Buffer | undefined;
  switch (source) {
    case 'header': {
      const lines = head.headers.filter(([field]) => field === name);
      const isElsewhere = head.headers.some(([field, line]) => isOtherSpelling(field, name) && trimmed(line) !== '');
      // It is not known which line the service reads.
      if (lines.length > 1 || isElsewhere) return null;
      const text = lines[0] === undefined ? undefined : trimmed(lines[0][1]);
      const isBareScheme = name === 'authorization' && text !== undefined && SCHEMES.has(text.toLowerCase());
      value = text === undefined || isBareScheme ? undefined : Buffer.from(text, 'latin1');
      break;
    }
    case 'cookie': {
      const [first, ...others] = cookies(head, name);
      if (others.some((other) => other !== first)) return null;
      value = first === undefined ? undefined : Buffer.from(first, 'latin1');
      break;
    }
    case 'host':
      value = Buffer.from(authorityOf(head));
      break;
    case 'function': {
      value = identityOfFunction(part.identify?.(head.source, head));
    }
  }
  return value === undefined || value.length === 0 ? undefined : value;
}

/** The digest of the caller of a request, or the refusal of a request that does not identify its caller. */
export function callerOf(settings: Settings, head: RequestHead): Buffer | Refusal {
  const { parts, isChosen } = settings.scope;
  const identities: CallerPart[] = [];
  for (const part of parts) {
    const identity = identityOf(part, head);
    if (identity === null) {
      return {
        condition: 'scope-unavailable',
        detail:
          `${shown(part)} was sent more than once, or with a \`_\` instead of a \`-\` in its name, and the service tells callers apart ` +
          'by it. Nothing was executed for this request.',
      };
    }
    if (identity !== undefined) identities.push({ kind: part.kind, identity });
    else if (part.required) {
      return {
        condition: 'scope-unavailable',
        detail: `${shown(part)} is missing or empty, and the service tells callers apart by it. Nothing was executed for this request.`,
        ...(part.kind === 'header:authorization' ? { status: 401 } : {}),
      };
    }
  }
  const doubt = isChosen ? undefined : doubtOf(settings, head, identities.length > 0);
  if (doubt !== undefined) {
    return {
      condition: 'scope-not-set',
      detail:
        `The request has ${doubt}, and the service is not configured to tell callers apart by it: the setting \`scope\` is missing. ` +
        'Nothing was executed for this request.',
    };
  }
  if (identities.length === 0 && parts.length > 0) identities.push({ kind: 'anonymous', identity: Buffer.alloc(0) });
  if (settings.authority === 'scope') {
    identities.push({ kind: 'authority', identity: Buffer.from(authorityOf(head)) });
    identities.sort(({ kind: one }, { kind: other }) => (one < other ? -1 : one > other ? 1 : 0));
  }
  return callerDigest(identities);
}

/** What makes it doubtful that `Authorization` identifies the caller, while no scope is set. */
function doubtOf(settings: Settings, head: RequestHead, isAuthorized: boolean): string | undefined {
  const field = isAuthorized ? head.headers.find(([name]) => name === 'authorization') : undefined;
  const authorization = field === undefined ? undefined : trimmed(field[1]);
  if (authorization !== undefined && isNewEachTime(authorization)) {
    return 'an Authorization that is new each time, so that a retry would look like another caller';
  }
  // A site behind one shared password: its browsers send the same `Basic` for all users, and a cookie for each.
  const isSharedPassword = authorization !== undefined && /^basic /i.test(authorization);
  const found = head.headers.find(
    ([name, value]) =>
      !settings.keyHeaders.includes(name) &&
      trimmed(value) !== '' &&
      isCredential(name) &&
      (!isAuthorized ||
        (!changesEachTime(name) && ((name !== 'cookie' && name !== 'mcp-session-id') || isSharedPassword))),
  );
  if (found === undefined) return undefined;
  return isAuthorized
    ? `the header field ${found[0]} in addition to Authorization`
    : `the header field ${found[0]} and no Authorization`;
}
