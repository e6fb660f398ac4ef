// Records on Redis and Valkey, by the scripts of the contract (docs/reference/store-contract-redis.md).
import { createHash } from 'node:crypto';
import { errorMonitor } from 'node:events';
import { contract } from './contract.js';
import { hadNoConnection, noteUsedUp } from './engine.js';
import { CorruptRecordError } from './response.js';
import { SettingsError, shown } from './settings.js';
import {
  ConnectionLostError,
  StoreFullError,
  StoreSetupError,
  type Claim,
  type ClaimReply,
  type CompletionState,
  type OwnerReply,
  type RecordView,
  type Store,
} from './store.js';

/**
 * The codes with which a server that was reached refuses new keys: its memory is used up, it cannot write to its disk, it has too few
 * replicas, it is a replica, or busy with a script, or a part of the Cluster is away. They may come from a script, behind other words.
 */
const TAKES_NO_KEYS = /(?:^|[\s-])(OOM|MISCONF|NOREPLICAS|READONLY|BUSY|MASTERDOWN|CLUSTERDOWN|TRYAGAIN) /;

/** Sends a command. The texts of its reply must be Buffers, because responses are bytes. */
export type RedisSend = (command: (string | Buffer)[]) => Promise<unknown>;

interface Ioredis {
  callBuffer(command: string, ...args: (string | Buffer)[]): Promise<unknown>;
}
interface IoredisCluster extends Ioredis {
  isCluster: true;
  /** The addresses of the nodes that have a slot, the primary first. */
  slots: readonly (readonly string[] | undefined)[];
  nodes(role: 'master'): readonly (Ioredis & { options: { host?: string; port?: number } })[];
}
interface ReplyOptions {
  typeMapping: Record<number, unknown>;
}
interface NodeRedis {
  isReady?: boolean;
  sendCommand(args: (string | Buffer)[], options: ReplyOptions): Promise<unknown>;
}
interface NodeRedisCluster {
  slots: readonly ({ master: { address: string } } | undefined)[];
  masters: readonly unknown[];
  sendCommand(key: string | undefined, isReadonly: boolean | undefined, args: (string | Buffer)[], options: ReplyOptions): Promise<unknown>;
}

/** A client of `ioredis`, also a `Cluster`; a client of `redis` (5), also of `createCluster`; or a function that sends a command. */
export type RedisClient = Ioredis | IoredisCluster | NodeRedis | NodeRedisCluster | RedisSend;

/** The type of texts in replies (`RESP_TYPES.BLOB_STRING`). */
const REPLY_OPTIONS: ReplyOptions = { typeMapping: { 36: Buffer } };

/** What shows the state of a client: for `ioredis`, its last connection among others. */
interface Watched {
  status?: string;
  isReady?: boolean;
  stream?: { bytesRead?: number };
  retryAttempts?: number;
  options?: { retryStrategy?: unknown };
  on?(event: string | typeof errorMonitor, listener: (error: unknown) => void): unknown;
}

/** How far a client is with its connection. */
interface Progress {
  isReady: boolean;
  /** True if this try has reached the server. */
  isMade: boolean;
  /** The end of the last try to connect; undefined if none has ended since the client had a connection. */
  last: 'refused' | 'failed' | undefined;
}
const PROGRESS = new WeakMap<object, Progress>();

function watchConnections(client: Watched): void {
  if (PROGRESS.has(client) || typeof client.on !== 'function') return;
  const own: Progress = { isReady: client.status === 'ready' || client.isReady === true, isMade: false, last: undefined };
  PROGRESS.set(client, own);
  const failed = () => { own.last = own.isMade ? 'refused' : 'failed'; };
  client.on('connect', () => { own.isMade = true; });
  client.on('ready', () => { Object.assign(own, { isReady: true, isMade: false, last: undefined }); });
  // The pauses of `redis` may be long, and an error comes before them. With Sentinels, `ioredis` says no more than that.
  client.on(errorMonitor, (error) => {
    if (own.isReady) {
      // Its connection is lost. `ioredis` says so by `close`.
      if (client.isReady === false) own.isReady = false;
      return;
    }
    if (hasReached(error)) own.isMade = true;
    failed();
  });
  if ('callBuffer' in client) {
    client.on('close', () => {
      if (own.isReady) own.isReady = false;
      else failed();
      own.isMade = false;
    });
    return;
  }
  client.on('reconnecting', () => {
    if (own.isMade) failed();
    own.isMade = false;
  });
}

/**
 * Returns true if the error of a client that could not connect is not that of a server which is away: the server resets the connection, its
 * TLS is refused, or this process cannot connect.
 */
function hasReached(error: unknown): boolean {
  noteUsedUp(error);
  const own = (error ?? {}) as { code?: unknown };
  return typeof own.code === 'string' && !hadNoConnection(own);
}

const wasRefused = (client: object): boolean => PROGRESS.get(client)?.last === 'refused';

/** What clients say if they keep no commands while they have no connection, and those of `redis` that the program has closed. */
const KEEPS_NOTHING = /enableOfflineQueue options is false|max retries per request|client is (?:offline|closed)/;

/** Returns true if the program has closed a client of `ioredis`: one that gives up has tried again, or is not to try. */
function wasQuit({ status, retryAttempts, options }: Watched): boolean {
  return status === 'end' && retryAttempts === 0 && typeof options?.retryStrategy === 'function';
}

/**
 * Sends a command by a single client. One that has lost its connection, and has not failed to make another one, says nothing of its
 * server, and neither does one that was closed.
 */
async function sendWatched(client: Watched, send: () => Promise<unknown>): Promise<unknown> {
  try {
    return await send();
  } catch (error) {
    const own = PROGRESS.get(client);
    const isLost = own !== undefined && own.last === undefined && KEEPS_NOTHING.test(messageOf(error));
    throw isLost || (wasQuit(client) && messageOf(error) === 'Connection is closed.') ? new ConnectionLostError(messageOf(error)) : error;
  }
}

/**
 * Returns true if a client of `ioredis` keeps its commands although it has reached its server: it waits for the end of LOADING (status
 * `connect`), or the server breaks each connection, such as one with too many. One that takes connections and answers nothing is away.
 * In other states, `stream` may be the connection before.
 */
function isIoredisTurnedAway(client: Watched): boolean {
  const { status, stream } = client;
  if (typeof status !== 'string' || status === 'ready' || status === 'wait') return false;
  return (status === 'connect' && (stream?.bytesRead ?? 0) > 0) || wasRefused(client);
}

/** Where commands go. */
interface Connection {
  /** Sends a command to the node that has the key. */
  send(command: (string | Buffer)[], key: string): Promise<unknown>;
  /** The address of the node that has the key; empty for a single server. */
  nodeOf(key: string): string;
  /** True if the client has reached the node that has the key, and sends it nothing. */
  isTurnedAway?(key: string): boolean;
}

function connectionOf(client: RedisClient): Connection {
  const nodeOf = () => '';
  if (typeof client === 'function') return { send: (command) => client(command), nodeOf };
  const { callBuffer, sendCommand } = ((client) ?? {}) as Partial<Record<'callBuffer' | 'sendCommand', unknown>>;
  if (typeof callBuffer !== 'function' && typeof sendCommand !== 'function') {
    throw new SettingsError('RedisStore: give a client of `ioredis` or of `redis` 5, or a function that sends a command');
  }
  if ('callBuffer' in client) {
    refusePrefix(client);
    const call = (node: Ioredis, [name = '', ...args]: (string | Buffer)[]) => node.callBuffer(String(name), ...args);
    if (!isIoredisCluster(client)) {
      watchConnections(client as Watched);
      return {
        send: (command) => sendWatched(client as Watched, () => call(client, command)),
        nodeOf,
        isTurnedAway: () => isIoredisTurnedAway(client as Watched),
      };
    }
    const addressOf = (key: string) => client.slots[slotOf(key)]?.[0] ?? '';
    const masterAt = (address: string) => client.nodes('master').find(({ options: { host, port } }) => `${String(host)}:${String(port)}` === address);
    return {
      send: (command, key) => {
        // It knows where the keys of a command are, and this one has none.
        const address = addressOf(key);
        const own = command[0] !== 'CONFIG' ? client : masterAt(address);
        return call(own ?? client, command);
      },
      nodeOf: addressOf,
      isTurnedAway: (key) => isIoredisTurnedAway((masterAt(addressOf(key)) ?? {}) as Watched),
    };
  }
  if ('masters' in client) {
    return {
      send: (command, key) => client.sendCommand(key, false, command, REPLY_OPTIONS),
      nodeOf: (key) => client.slots[slotOf(key)]?.master.address ?? '',
    };
  }
  watchConnections(client);
  return {
    send: (command) => sendWatched(client, () => client.sendCommand(command, REPLY_OPTIONS)),
    nodeOf,
    isTurnedAway: () => client.isReady === false && wasRefused(client),
  };
}

interface PrefixOptions {
  keyPrefix?: unknown;
  redisOptions?: PrefixOptions;
}

/** Other programs would have other keys, and the mark of an id secret would not be found. */
function refusePrefix(client: object): void {
  const { options } = client as { options?: PrefixOptions };
  const prefix = [options?.keyPrefix, options?.redisOptions?.keyPrefix].find((own) => own !== undefined && own !== '');
  if (prefix === undefined) return;
  throw new SettingsError(
    `RedisStore: the client has the keyPrefix ${shown(prefix)}, so that its keys are not those of other programs: give a client without one`,
  );
}

/** A single client of `ioredis` has the property, too. */
function isIoredisCluster(client: Ioredis | IoredisCluster): client is IoredisCluster {
  return (client as { isCluster?: unknown }).isCluster === true;
}

/** The slot of a key on a Cluster: CRC16 (XMODEM) of its hash tag. */
function slotOf(key: string): number {
  const tag = /\{([^}]+)\}/.exec(key)?.[1] ?? key;
  let crc = 0;
  for (const byte of Buffer.from(tag)) {
    crc ^= byte << 8;
    for (let bit = 0; bit < 8; bit += 1) crc = ((crc & 0x8000) === 0 ? crc << 1 : (crc << 1) ^ 0x1021) & 0xffff;
  }
  return crc % 16_384;
}

function keyOf(id: Buffer): string {
  return `oncegate:{${id.toString('hex')}}`;
}

type ScriptName = keyof typeof contract.redis;

for (const [name, { sha1, text }] of Object.entries(contract.redis)) {
  if (createHash('sha1').update(text).digest('hex') !== sha1) throw new Error(`the script ${name} is damaged: install oncegate again`);
}

export interface RedisStoreOptions {
  /** Accepts an eviction policy other than `noeviction`: then records, and with them protection, may be lost. */
  allowEviction?: boolean;
}

/** Keeps records on Redis 7.0 or Valkey 7.2, or later. */
export class RedisStore implements Store {
  readonly name = 'redis';
  readonly claimsMayCommitLate = false;
  private readonly connection: Connection;
  /** The checks of servers, by their address. */
  private readonly checked = new Map<string, Promise<void>>();

  constructor(
    client: RedisClient,
    private readonly options: RedisStoreOptions = {},
  ) {
    this.connection = connectionOf(client);
  }

  /** The address of the node of a Cluster that has a record; empty for a single server. */
  partOf(id: Buffer): string {
    return this.connection.nodeOf(keyOf(id));
  }

  isTurnedAway(id: Buffer): boolean {
    return this.connection.isTurnedAway?.(keyOf(id)) ?? false;
  }

  /** Checks that the server with a record removes none. The first claim on each server does so, too. */
  check(id: Buffer = Buffer.alloc(32)): Promise<void> {
    const part = this.partOf(id);
    const before = this.checked.get(part);
    if (before !== undefined) return before;
    // Nodes of a Cluster come and go.
    if (this.checked.size >= 1000) this.checked.clear();
    const check = this.checkEviction(id).catch((error: unknown) => {
      this.checked.delete(part);
      throw error;
    });
    this.checked.set(part, check);
    return check;
  }

  private async checkEviction(id: Buffer): Promise<void> {
    let reply: unknown;
    try {
      reply = await this.connection.send(['CONFIG', 'GET', 'maxmemory-policy'], keyOf(id));
    } catch (error) {
      // The user may not ask.
      if (/NOPERM|unknown command/i.test((error as Error).message)) return;
      throw error;
    }
    const parts = Array.isArray(reply) ? reply : Object.entries(reply as object).flat();
    const policy = String(parts[1]);
    if (policy !== 'noeviction' && policy !== 'undefined' && this.options.allowEviction !== true) {
      throw new StoreSetupError(
        `the eviction policy of Redis is ${policy}, which removes records when memory is used up: set maxmemory-policy noeviction, or allowEviction`,
      );
    }
  }

  private async call(name: ScriptName, id: Buffer, ...args: (string | number | Buffer)[]): Promise<unknown[]> {
    const { sha1, text } = contract.redis[name];
    const key = keyOf(id);
    const rest = ['1', key, ...args.map((arg) => (typeof arg === 'number' ? String(arg) : arg))];
    try {
      try {
        return (await this.connection.send(['EVALSHA', sha1, ...rest], key)) as unknown[];
      } catch (error) {
        if (!messageOf(error).startsWith('NOSCRIPT')) throw error;
        return (await this.connection.send(['EVAL', text, ...rest], key)) as unknown[];
      }
    } catch (error) {
      const message = messageOf(error);
      if (/^(?:ERR )?(?:CORRUPT|WRONGTYPE)/.test(message)) throw new CorruptRecordError('the record in Redis cannot be read');
      const refused = TAKES_NO_KEYS.exec(message)?.[1];
      if (refused !== undefined) throw new StoreFullError(`Redis takes no new keys (${refused})`, refused !== 'OOM' && refused !== 'MISCONF');
      if (/^(?:ERR )?NOPERM/.test(message)) throw new StoreSetupError('the user of Redis lacks a right; docs/reference/store-contract-redis.md lists them');
      throw error;
    }
  }

  async claim(id: Buffer, claim: Claim): Promise<ClaimReply> {
    await this.check(id);
    const { attempt, fingerprint, leaseMs, retentionMs, onAbandoned, caller, operation, keyTag } = claim;
    const reply = await this.call('claim', id, attempt, fingerprint, leaseMs, retentionMs, onAbandoned, caller, operation, keyTag);
    const outcome = String(reply[0]);
    switch (outcome) {
      case 'execute':
        return { outcome, token: String(reply[2]), attempts: Number(reply[3]), afterAbandoned: Number(reply[5]) === 1 };
      case 'replay':
        if (!Buffer.isBuffer(reply[2])) throw new StoreSetupError('the client of Redis returned a text for bytes: let it return Buffers');
        return { outcome, response: reply[2] };
      case 'in-progress':
        return { outcome, leaseLeftMs: Number(reply[2]) };
      case 'mismatch':
      case 'unknown':
      case 'unreplayable':
        return { outcome };
      default:
        throw new StoreSetupError('Redis gave a reply that this library does not know; upgrade it');
    }
  }

  async renew(id: Buffer, token: string, leaseMs: number, retentionMs: number): Promise<OwnerReply> {
    return ownerReply(await this.call('renew', id, token, leaseMs, retentionMs));
  }

  async complete(
    id: Buffer,
    token: string,
    state: CompletionState,
    response: Buffer | undefined,
    retentionMs: number,
  ): Promise<OwnerReply> {
    return ownerReply(await this.call('complete', id, token, state, retentionMs, ...(response === undefined ? [] : [response])));
  }

  async release(id: Buffer, token: string, retentionMs: number): Promise<OwnerReply> {
    return ownerReply(await this.call('release', id, token, retentionMs));
  }

  async lookup(id: Buffer): Promise<RecordView | undefined> {
    const [word, , ...parts] = await this.call('lookup', id);
    if (String(word) !== 'found') return undefined;
    const found = new Map<string, unknown>();
    for (let at = 0; at + 1 < parts.length; at += 2) found.set(String(parts[at]), parts[at + 1]);
    return {
      state: String(found.get('state')),
      fingerprint: found.get('fingerprint') as Buffer,
      token: String(found.get('token')),
      attempt: found.get('attempt') as Buffer | undefined,
      byOperator: Number(found.get('by_operator')) === 1,
      response: found.get('response') as Buffer | undefined,
      operation: String(found.get('operation')),
      leaseUntil: found.has('lease_until') ? Number(found.get('lease_until')) : undefined,
      expiresAt: Number(found.get('expires_at')),
    };
  }
}

function messageOf(error: unknown): string {
  const { message } = error as { message?: unknown };
  return typeof message === 'string' ? message : '';
}

function ownerReply(reply: unknown[]): OwnerReply {
  return String(reply[0]) === 'fenced' ? 'fenced' : 'done';
}
