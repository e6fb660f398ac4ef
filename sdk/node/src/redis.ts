// Records on Redis and Valkey, by the scripts of the contract (docs/reference/store-contract-redis.md).
import { createHash } from 'node:crypto';
import { contract } from './contract.js';
import { CorruptRecordError } from './response.js';
import {
  StoreFullError,
  StoreSetupError,
  type Claim,
  type ClaimReply,
  type CompletionState,
  type OwnerReply,
  type RecordView,
  type Store,
} from './store.js';

/** Sends a command. The texts of its reply must be Buffers, because responses are bytes. */
export type RedisSend = (command: (string | Buffer)[]) => Promise<unknown>;

interface Ioredis {
  callBuffer(command: string, ...args: (string | Buffer)[]): Promise<unknown>;
}
interface NodeRedis {
  sendCommand(args: (string | Buffer)[], options: { typeMapping: Record<number, unknown> }): Promise<unknown>;
}

/** A client of `ioredis`, a client of `redis` (5), or a function that sends a command. */
export type RedisClient = Ioredis | NodeRedis | RedisSend;

/** The type of texts in replies (`RESP_TYPES.BLOB_STRING`). */
const BLOB_STRING = 36;

function sender(client: RedisClient): RedisSend {
  if (typeof client === 'function') return client;
  if ('callBuffer' in client) return ([name = '', ...args]) => client.callBuffer(String(name), ...args);
  return (args) => client.sendCommand(args, { typeMapping: { [BLOB_STRING]: Buffer } });
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
  private readonly send: RedisSend;
  private checked: Promise<void> | undefined;

  constructor(
    client: RedisClient,
    private readonly options: RedisStoreOptions = {},
  ) {
    this.send = sender(client);
  }

  /** Checks that the server removes no records. The first claim does so, too. */
  check(): Promise<void> {
    this.checked ??= (async () => {
      let reply: unknown;
      try {
        reply = await this.send(['CONFIG', 'GET', 'maxmemory-policy']);
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
    })().catch((error: unknown) => {
      this.checked = undefined;
      throw error;
    });
    return this.checked;
  }

  private async call(name: ScriptName, id: Buffer, ...args: (string | number | Buffer)[]): Promise<unknown[]> {
    const { sha1, text } = contract.redis[name];
    const rest = ['1', `oncegate:{${id.toString('hex')}}`, ...args.map((arg) => (typeof arg === 'number' ? String(arg) : arg))];
    try {
      try {
        return (await this.send(['EVALSHA', sha1, ...rest])) as unknown[];
      } catch (error) {
        if (!messageOf(error).startsWith('NOSCRIPT')) throw error;
        return (await this.send(['EVAL', text, ...rest])) as unknown[];
      }
    } catch (error) {
      const message = messageOf(error);
      if (message.startsWith('CORRUPT')) throw new CorruptRecordError('the record in Redis cannot be read');
      if (/(?:^|\s)OOM /.test(message)) throw new StoreFullError('the memory of Redis is used up');
      if (/^(?:ERR )?NOPERM/.test(message)) throw new StoreSetupError('the user of Redis lacks a right; docs/reference/store-contract-redis.md lists them');
      throw error;
    }
  }

  async claim(id: Buffer, claim: Claim): Promise<ClaimReply> {
    await this.check();
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
