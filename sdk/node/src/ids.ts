// Identifiers under an id secret, and the guard of a store against programs with another secret, or with none
// (docs/reference/sealing.md). `crates/core/vectors/keyed_ids.json` has examples.
//
// A store belongs to one id secret for its whole life, or to none, because under another one every key is new and each retry executes
// again. It says so in a record with a constant identifier, the mark. Sidecars and programs in Rust make and renew the mark; this
// library only reads it.
import { createHmac, createSecretKey, type KeyObject } from 'node:crypto';
import { inspect } from 'node:util';
import { callerTag, keyDigest } from './identity.js';
import { SettingsError, shownKind } from './settings.js';
import { StoreSetupError, type RecordView } from './store.js';

/** The record that tells which id secret a store belongs to: SHA-256("oncegate-id-secret-1"). */
export const MARK = Buffer.from('3a75297e597197ee0ce18fc37dbf727315937c8c01ac214d7c7bbc0a3c333cac', 'hex');

const NEW_ONE = '`oncegate id-secret new` makes one for a new store';

/**
 * A secret that keys the identifiers of all records of a store, so that a reader of the store who guesses a key or a caller cannot
 * confirm the guess. Its name is public, and all that is ever shown of it.
 */
export class IdSecret {
  /** The public name, which the store and `oncegate id-secret name` show, too. */
  readonly name: string;
  readonly #key: KeyObject;

  private constructor(key: Buffer) {
    this.#key = createSecretKey(key);
    this.name = this.digest('name').subarray(0, 8).toString('hex');
  }

  /**
   * Reads a secret as `oncegate id-secret new` writes it. Lines that begin with `#` are comments.
   *
   * @throws {SettingsError} if it is none; the error does not contain the text
   */
  static parse(text: string): IdSecret {
    const lines = text.split('\n').map((line) => line.trim()).filter((line) => line !== '' && !line.startsWith('#'));
    if (lines.length === 0) throw new SettingsError(`idSecret: there is no id secret in it; ${NEW_ONE}`);
    if (lines.length > 1) throw new SettingsError('idSecret: there is more than one line; a store has one id secret, and it is never replaced');
    const found = /^ogids1_([0-9a-f]{16})_([0-9a-f]{64})$/.exec(lines[0] ?? '');
    if (found === null) {
      throw new SettingsError(
        `idSecret: an id secret has the form ogids1_, the 16 hexadecimal digits of its name, _ and 64 hexadecimal digits; ${NEW_ONE}`,
      );
    }
    const secret = new IdSecret(Buffer.from(found[2] ?? '', 'hex'));
    if (secret.name !== found[1]) {
      throw new SettingsError('idSecret: the digits of the id secret do not fit its name: it was cut, changed or put together of two secrets');
    }
    return secret;
  }

  /** @internal */
  digest(what: string, plain: Uint8Array = Buffer.alloc(0)): Buffer {
    return createHmac('sha256', this.#key).update(`oncegate-id-1 ${what}`).update(plain).digest();
  }

  /** @internal The fingerprint of the mark of a store that belongs to this secret. */
  markFingerprint(): Buffer {
    return Buffer.concat([Buffer.of(1), this.digest('check')]);
  }

  toString(): string {
    return `IdSecret(${this.name})`;
  }

  toJSON(): string {
    return this.toString();
  }

  [inspect.custom](): string {
    return this.toString();
  }
}

/** Not `instanceof`: a process may have loaded the library twice, by `import` and by `require`. */
function isSecret(value: unknown): value is IdSecret {
  return typeof (value as { markFingerprint?: unknown } | null | undefined)?.markFingerprint === 'function';
}

/** The computation of what a store gets instead of keys, callers and requests: plain hashes, or keyed ones with a secret. */
export class Ids {
  constructor(readonly secret?: IdSecret) {}

  /** The value of the setting `idSecret`. */
  static of(value: unknown): Ids {
    if (value === undefined) return new Ids();
    if (isSecret(value)) return new Ids(value);
    // The value is not shown: it may be the secret in another form.
    if (typeof value !== 'string') {
      throw new SettingsError(`idSecret: give the text that \`oncegate id-secret new\` prints, or an IdSecret, and not a value that is ${shownKind(value)}`);
    }
    return new Ids(IdSecret.parse(value));
  }

  /** The identifier of the record with this plain identifier. */
  record(plain: Buffer): Buffer {
    return this.secret === undefined ? plain : this.secret.digest('record', plain);
  }

  /** The mark of a caller, by which operators find its records: 8 bytes; zeros for a single tenant. */
  callerTag(caller: Buffer): Buffer {
    const isSingle = caller.every((byte) => byte === 0);
    return callerTag(this.secret === undefined || isSingle ? caller : this.secret.digest('caller', caller));
  }

  /** The mark of a key, by which operators find its records: 8 bytes. */
  keyTag(key: string | Uint8Array): Buffer {
    const plain = keyDigest(key);
    return (this.secret === undefined ? plain : this.secret.digest('key', plain)).subarray(0, 8);
  }

  /** The fingerprint to store for this plain one. */
  fingerprint(plain: Buffer): Buffer {
    return this.secret === undefined ? plain : Buffer.concat([plain.subarray(0, 1), this.secret.digest('compare', plain)]);
  }
}

/** A mark on trial lives for 90 s after its lease, and one that is there for good for 400 days. */
const TRIAL_MS = 180_000;
/** A mark that ends sooner than this was not renewed for most of a year. */
const ENDS_SOON_MS = 60 * 86_400_000;

function isForGood({ state, leaseUntil, expiresAt }: RecordView): boolean {
  return state !== 'in-progress' || (leaseUntil !== undefined && expiresAt - leaseUntil > TRIAL_MS);
}

function nameIn({ operation }: RecordView): string {
  return /^id secret ([0-9a-f]{16}) of this store \(not a request\)$/.exec(operation)?.[1] ?? 'of another program';
}

const NEW_KEYS = 'every key would be new, and retries would execute again';

/**
 * Judges the mark of a store, for a process with these identifiers. A process that has found the mark of another secret stays refused
 * until it is started again, even if that mark is gone later: the store may have lost it and kept the records.
 */
export class IdGuard {
  private foreign: string | undefined;

  constructor(readonly ids: Ids) {}

  /**
   * @param mark the record as the store has it
   * @param isPrivate true for a store in the memory of this process, which needs no mark
   * @throws {StoreSetupError} unless the records of the store have the identifiers that this process computes
   */
  judge(mark: RecordView | undefined, isPrivate = false): void {
    // A program may have released the mark. Then any claim is granted.
    const refusal = this.refusal(mark?.state === 'released' ? undefined : mark, isPrivate);
    if (refusal !== undefined) throw new StoreSetupError(refusal);
  }

  /** @throws {StoreSetupError} if the last mark was that of another secret */
  refuseForeign(): void {
    if (this.foreign !== undefined) throw new StoreSetupError(this.foreign);
  }

  /** The days after which the mark ends, if they are few. */
  daysLeft(mark: RecordView | undefined): number | undefined {
    const left = mark === undefined || this.ids.secret === undefined ? Infinity : mark.expiresAt - Date.now();
    return left < ENDS_SOON_MS ? Math.max(0, Math.floor(left / 86_400_000)) : undefined;
  }

  private refusal(mark: RecordView | undefined, isPrivate: boolean): string | undefined {
    const { secret } = this.ids;
    if (mark === undefined) {
      if (this.foreign !== undefined || secret === undefined || isPrivate) return this.foreign;
      return (
        `the store does not have the mark of the id secret ${secret.name}, and this library does not make it: start a sidecar with this ` +
        'secret on it once. If the store has records of this secret and lost its mark, `oncegate id-secret restore` puts it back. Never ' +
        'remove the secret'
      );
    }
    if (secret !== undefined && mark.fingerprint.equals(secret.markFingerprint())) {
      this.foreign = undefined;
      if (isForGood(mark)) return undefined;
      return (
        `the store is new to the id secret ${secret.name}, and a program with it waits until all others have noticed: this process uses ` +
        'the store when that has ended'
      );
    }
    const refusal =
      secret === undefined
        ? `the store belongs to the id secret ${nameIn(mark)}, and this process has none: without it ${NEW_KEYS}. Configure that id secret, ` +
          'or use another store, and start this process again'
        : `the store belongs to the id secret ${nameIn(mark)}, and this process has ${secret.name}: with it ${NEW_KEYS}. Configure the id ` +
          'secret of the store, or use another store, and start this process again';
    // A mark on trial may lapse.
    if (isForGood(mark)) this.foreign = refusal;
    return refusal;
  }
}
