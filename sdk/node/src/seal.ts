// Sealed responses: encrypted before the store gets them (docs/reference/sealing.md). `crates/seal/vectors/sealed.json` has examples.
import { createCipheriv, createDecipheriv, createHmac } from 'node:crypto';
import { u64 } from './bytes.js';
import { CorruptRecordError, decodeResponse, encodeResponse } from './response.js';
import { SettingsError, shownKind } from './settings.js';
import { SealedError, type Claim, type ClaimReply, type CompletionState, type OwnerReply, type RecordView, type Store } from './store.js';

const MAGIC = Buffer.from('\0ogseal\x01', 'latin1');
const HEAD = 8 + 8 + 1 + 8 + 32;
const TAG = 16;
const PART_OF_OWNER = 1;
const PART_OF_OPERATOR = 2;

/** HKDF-Expand of RFC 5869 with SHA-256. */
function expand(key: Buffer, info: Buffer, length: number): Buffer {
  return createHmac('sha256', key).update(info).update(Buffer.of(1)).digest().subarray(0, length);
}

interface SealKey {
  id: Buffer;
  key: Buffer;
}

/** The keys that seal and open. The first seals, all open. */
export class Keyring {
  private constructor(private readonly keys: readonly SealKey[]) {}

  /**
   * Reads keys, one in each line, as `oncegate seal-key new` prints them. Lines that begin with `#` are comments.
   *
   * @throws {SettingsError} if a line is no key; the error names the line and not its text
   */
  static parse(text: string): Keyring {
    if (typeof (text as unknown) !== 'string') throw new SettingsError(`the seal keys are ${shownKind(text)} and no text: is their variable set?`);
    const keys: SealKey[] = [];
    for (const [at, line] of text.split(/[\n,]/).entries()) {
      const trimmed = line.trim();
      if (trimmed === '' || trimmed.startsWith('#')) continue;
      const found = /^ogseal1_([0-9a-f]{16})_([0-9a-f]{64})$/.exec(trimmed);
      const key = Buffer.from(found?.[2] ?? '', 'hex');
      const id = found === null ? undefined : expand(key, Buffer.from('oncegate-seal-1 id'), 8);
      if (id === undefined || id.toString('hex') !== found?.[1]) {
        throw new SettingsError(`line ${String(at + 1)} of the seal keys is no key: copy it again, as \`oncegate seal-key new\` printed it`);
      }
      keys.push({ id, key });
    }
    if (keys.length === 0) throw new SettingsError('there is no seal key: make one with `oncegate seal-key new`');
    return new Keyring(keys);
  }

  /** Seals a part of a record. */
  seal(part: number, record: Buffer, token: bigint, plaintext: Buffer, more: Buffer = Buffer.alloc(0)): Buffer {
    const [first] = this.keys;
    if (first === undefined) throw new SealedError('there is no key to seal with');
    const context = contextOf(part, record, token, more);
    const saltKey = expand(first.key, Buffer.from('oncegate-seal-1 salt'), 32);
    const salt = createHmac('sha256', saltKey).update(u64(context.length)).update(context).update(plaintext).digest();
    const cipher = createCipheriv('aes-256-gcm', dataKey(first.key, salt), Buffer.alloc(12)).setAAD(context);
    const sealed = Buffer.concat([cipher.update(plaintext), cipher.final()]);
    return Buffer.concat([MAGIC, first.id, Buffer.of(part), u64(token), salt, sealed, cipher.getAuthTag()]);
  }

  /**
   * Opens a sealed part.
   *
   * @throws {SealedError} without its key
   * @throws {CorruptRecordError} if it was changed or moved
   */
  open(sealed: Buffer, record: Buffer, more: Buffer = Buffer.alloc(0)): { part: number; token: bigint; plaintext: Buffer } {
    if (sealed.length < HEAD + TAG || !sealed.subarray(0, 8).equals(MAGIC)) throw new CorruptRecordError('a sealed part is damaged');
    const id = sealed.subarray(8, 16);
    const part = sealed.readUInt8(16);
    const token = sealed.readBigUInt64BE(17);
    const key = this.keys.find((own) => own.id.equals(id));
    if (key === undefined) throw new SealedError(`a response is sealed with the key ${id.toString('hex')}, which is missing`);
    const decipher = createDecipheriv('aes-256-gcm', dataKey(key.key, sealed.subarray(25, HEAD)), Buffer.alloc(12))
      .setAAD(contextOf(part, record, token, more))
      .setAuthTag(sealed.subarray(-TAG));
    try {
      return { part, token, plaintext: Buffer.concat([decipher.update(sealed.subarray(HEAD, -TAG)), decipher.final()]) };
    } catch {
      throw new CorruptRecordError('a sealed response was changed, or belongs to another record');
    }
  }
}

function contextOf(part: number, record: Buffer, token: bigint, more: Buffer): Buffer {
  return Buffer.concat([Buffer.from('oncegate-seal-1'), Buffer.of(part), record, u64(token), more]);
}

function dataKey(key: Buffer, salt: Buffer): Buffer {
  return expand(key, Buffer.concat([Buffer.from('oncegate-seal-1 data'), salt]), 32);
}

/** The sealed form of an encoded response: a stored response itself. */
export function sealResponse(keys: Keyring, record: Buffer, token: bigint, encoded: Buffer): Buffer {
  const body = keys.seal(PART_OF_OWNER, record, token, encoded);
  const sealed = encodeResponse({ status: 500, headers: [['oncegate-sealed', '1']], trailers: [], body });
  if (sealed === undefined) throw new Error('the response is too large to be sealed');
  return sealed;
}

/** True if an encoded response is sealed. */
export function isSealed(encoded: Buffer): boolean {
  const { status, headers } = decodeResponse(encoded);
  return status === 500 && headers.length === 1 && headers[0]?.[0] === 'oncegate-sealed';
}

export interface SealedStoreOptions {
  /** Refuses stored responses that are not sealed. */
  required?: boolean;
  /** Seals nothing, and opens what was sealed. */
  opensOnly?: boolean;
}

/** The keys of a program that completes records itself, in a transaction of its own, and how it uses them. */
export interface SealOptions extends SealedStoreOptions {
  /** The keys of the sidecar, or of the other programs on the database. Without keys, nothing is sealed, and what is sealed is refused. */
  sealKeys?: Keyring;
}

/** Keys that were read from a variable that is not set must not mean that nothing is sealed. */
function checkKeys(name: string, keys: unknown): void {
  if (keys instanceof Keyring) return;
  throw new SettingsError(`${name}: give a Keyring, such as Keyring.parse(process.env.SEAL_KEYS); this one is ${shownKind(keys)}`);
}

/** True if these options seal. */
export function seals(options: SealOptions): options is SealOptions & { sealKeys: Keyring } {
  if (Object.hasOwn(options, 'sealKeys')) checkKeys('sealKeys', options.sealKeys);
  else if (options.required === true) throw new SettingsError('sealKeys: it is missing, and `required` refuses what is not sealed');
  return options.sealKeys !== undefined && options.opensOnly !== true;
}

/**
 * Opens an encoded response. One in clear is returned as it is.
 *
 * @throws {SealedError} without its key, or if it must be sealed and is not
 * @throws {CorruptRecordError} if it was changed or moved
 */
export function openResponse(options: SealOptions, record: Buffer, encoded: Buffer): Buffer {
  if (!isSealed(encoded)) {
    if (options.required === true) throw new SealedError('a stored response is not sealed, and must be');
    return encoded;
  }
  if (options.sealKeys === undefined) throw new SealedError('a stored response is sealed, and this program has no seal keys');
  const { part, plaintext } = options.sealKeys.open(decodeResponse(encoded).body, record);
  if (part !== PART_OF_OWNER && part !== PART_OF_OPERATOR) throw new CorruptRecordError('a sealed part is not a response');
  return plaintext;
}

/** Encrypts responses before the store gets them. */
export class SealedStore implements Store {
  readonly name: string;
  readonly claimsMayCommitLate: boolean;

  constructor(
    private readonly store: Store,
    private readonly keys: Keyring,
    private readonly options: SealedStoreOptions = {},
  ) {
    checkKeys('SealedStore', keys);
    this.name = store.name;
    this.claimsMayCommitLate = store.claimsMayCommitLate;
  }

  opened(id: Buffer, encoded: Buffer): Buffer {
    return openResponse({ ...this.options, sealKeys: this.keys }, id, encoded);
  }

  useWarnings(warn: (message: string) => void): void {
    this.store.useWarnings?.(warn);
  }

  useTimeout(ms: number): void {
    this.store.useTimeout?.(ms);
  }

  partOf(id: Buffer): string {
    return this.store.partOf?.(id) ?? '';
  }

  isTurnedAway(id: Buffer): boolean {
    return this.store.isTurnedAway?.(id) ?? false;
  }

  async claim(id: Buffer, claim: Claim): Promise<ClaimReply> {
    const reply = await this.store.claim(id, claim);
    return reply.outcome === 'replay' ? { ...reply, response: this.opened(id, reply.response) } : reply;
  }

  complete(
    id: Buffer,
    token: string,
    state: CompletionState,
    response: Buffer | undefined,
    retentionMs: number,
  ): Promise<OwnerReply> {
    const sealed = response === undefined || this.options.opensOnly === true ? response : sealResponse(this.keys, id, BigInt(token), response);
    return this.store.complete(id, token, state, sealed, retentionMs);
  }

  renew(id: Buffer, token: string, leaseMs: number, retentionMs: number): Promise<OwnerReply> {
    return this.store.renew(id, token, leaseMs, retentionMs);
  }

  release(id: Buffer, token: string, retentionMs: number): Promise<OwnerReply> {
    return this.store.release(id, token, retentionMs);
  }

  /** The record as the store has it: its response may be sealed. */
  lookup(id: Buffer): Promise<RecordView | undefined> {
    return this.store.lookup(id);
  }
}
