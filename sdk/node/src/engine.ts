// Claims, leases and the ends of attempts on a store that may be slow, away, or lose its replies.
import { randomBytes } from 'node:crypto';
import { CorruptRecordError } from './response.js';
import {
  SealedError,
  type Claim,
  type ClaimReply,
  type CompletionState,
  type Grant,
  type OnAbandoned,
  type OwnerReply,
  type Store,
  StoreFullError,
  StoreSetupError,
} from './store.js';

/** The store cannot be asked, or does not answer. Nothing was executed. */
export class StoreUnavailableError extends Error {
  override readonly name = 'StoreUnavailableError';
}

/** The command was not sent. */
class NotAskedError extends StoreUnavailableError {}

export interface Policy {
  leaseMs: number;
  retentionMs: number;
  waitMs: number;
  onAbandoned: OnAbandoned;
}

/** What is claimed. */
export interface Claimed {
  id: Buffer;
  fingerprint: Buffer;
  callerTag: Buffer;
  keyTag: Buffer;
  operation: string;
}

export type ClaimResult =
  | { outcome: 'execute'; permit: Permit }
  | { outcome: 'in-progress'; leaseLeftMs: number; runningForMs: number }
  | Exclude<ClaimReply, { outcome: 'in-progress' } | { outcome: 'mismatch' | 'unknown' | 'unreplayable' | 'locked' } | Grant>
  | { outcome: 'mismatch' | 'unknown' | 'unreplayable' };

export interface EngineOptions {
  store: Store;
  /** The longest time for one command. 2 s by default. */
  storeTimeoutMs?: number;
  /** Gets warnings. They have no key, no credential and no body. */
  warn?: (message: string) => void;
}

/** The record that tells which id secret a store belongs to. */
const MARK = Buffer.from('3a75297e597197ee0ce18fc37dbf727315937c8c01ac214d7c7bbc0a3c333cac', 'hex');

const MAX_UNSETTLED = 65_536;
const MAX_WAITERS = 1000;
const MAX_DEFERRED_BYTES = 256 * 1024 * 1024;
const MAX_STRIKES = 3;
const RELEASED_LEASES = 4;

type End = { kind: 'complete'; state: CompletionState; response: Buffer | undefined } | { kind: 'release' };
export type Settled = 'done' | 'fenced' | 'not-stored';

function pause(ms: number): Promise<void> {
  return new Promise((resolve) => setTimeout(resolve, ms));
}

/** Something that the store does not know yet: a claim whose reply was lost, or the end of an attempt. */
interface Unsettled {
  /** Tries once. True if it is settled now. */
  settle: () => Promise<boolean>;
}

interface Running {
  since: number;
  ended: Promise<void>;
}

export class Engine {
  readonly store: Store;
  private readonly storeTimeoutMs: number;
  private readonly warnings: (message: string) => void;
  private readonly running = new Map<string, Running>();
  private readonly unsettled = new Map<string, Unsettled>();
  private readonly work = new Set<Promise<void>>();
  private deferredBytes = 0;
  private waiters = 0;
  private strikes = 0;
  private openUntil = 0;
  private checkedAt = -Infinity;
  private isClosed = false;
  private warnedAt = -Infinity;

  constructor(options: EngineOptions) {
    this.store = options.store;
    this.storeTimeoutMs = options.storeTimeoutMs ?? 2000;
    this.warnings = options.warn ?? ((message) => { console.warn(`oncegate: ${message}`); });
  }

  /** Reports at most one warning a second: an outage must not fill the log. */
  warn(message: string): void {
    const now = performance.now();
    if (now - this.warnedAt < 1000) return;
    this.warnedAt = now;
    this.warnings(message);
  }

  /** Sends a command, within the time that it may take. After several failures the store is left alone for a moment. */
  private async ask<T>(command: () => Promise<T>): Promise<T> {
    if (performance.now() < this.openUntil) throw new NotAskedError('the store did not answer lately');
    return this.send(command);
  }

  private async send<T>(command: () => Promise<T>): Promise<T> {
    let timer: NodeJS.Timeout | undefined;
    try {
      const late = new Promise<never>((_, reject) => {
        timer = setTimeout(() => {
          reject(new StoreUnavailableError(`the store did not answer within ${String(this.storeTimeoutMs)} ms`));
        }, this.storeTimeoutMs);
      });
      const reply = await Promise.race([command(), late]);
      this.strikes = 0;
      return reply;
    } catch (error) {
      if (isDefinite(error)) throw error;
      this.strikes += 1;
      if (this.strikes >= MAX_STRIKES) {
        this.openUntil = performance.now() + Math.min(1000, 50 * 2 ** Math.min(this.strikes - MAX_STRIKES, 5));
        this.warn(`the store (${this.store.name}) is out of reach: ${reasonOf(error)}`);
      }
      throw error;
    } finally {
      clearTimeout(timer);
    }
  }

  /** A store that belongs to an id secret has other identifiers: with plain ones every key would be new. */
  private async checkIds(): Promise<void> {
    const now = performance.now();
    if (now - this.checkedAt < 2000) return;
    const mark = await this.ask(() => this.store.lookup(MARK));
    if (mark !== undefined) {
      throw new StoreSetupError('the store belongs to an id secret, which this library does not support yet; use another store');
    }
    this.checkedAt = now;
  }

  /**
   * Requests permission to execute. Waits for a running attempt as long as the policy says.
   *
   * @throws {StoreUnavailableError} and other errors of stores: nothing is executed
   */
  async claim(claimed: Claimed, policy: Policy): Promise<ClaimResult> {
    const key = claimed.id.toString('hex');
    const begun = performance.now();
    const deadline = begun + policy.waitMs;
    if (this.isClosed) throw new StoreUnavailableError('the process is shutting down');
    await this.checkIds();
    let waits = false;
    let nap = 25;
    try {
      for (;;) {
        const before = this.unsettled.get(key);
        if (before !== undefined && !(await before.settle())) {
          throw new StoreUnavailableError('an earlier attempt with this key has no recorded end yet');
        }
        const result = await this.claimOnce(key, claimed, policy);
        if (result.outcome !== 'in-progress') return result;
        const left = deadline - performance.now();
        if (!waits && left > 0 && this.waiters < MAX_WAITERS) {
          waits = true;
          this.waiters += 1;
        }
        if (!waits || left <= 0) return { ...result, runningForMs: this.runningFor(key, begun) };
        const local = this.running.get(key);
        const turn = pause(Math.min(left, local === undefined ? nap : left));
        await (local === undefined ? turn : Promise.race([local.ended, turn]));
        nap = Math.min(nap * 2, 500);
      }
    } finally {
      if (waits) this.waiters -= 1;
    }
  }

  private runningFor(key: string, begun: number): number {
    return performance.now() - (this.running.get(key)?.since ?? begun);
  }

  private async claimOnce(key: string, claimed: Claimed, policy: Policy): Promise<ClaimResult> {
    if (this.unsettled.size + this.running.size >= MAX_UNSETTLED) {
      throw new StoreFullError('too many attempts have no recorded end yet');
    }
    const claim: Claim = {
      attempt: randomBytes(16),
      fingerprint: claimed.fingerprint,
      leaseMs: policy.leaseMs,
      retentionMs: policy.retentionMs,
      onAbandoned: policy.onAbandoned,
      caller: claimed.callerTag,
      keyTag: claimed.keyTag,
      operation: claimed.operation,
    };
    const sent = () => this.store.claim(claimed.id, claim);
    let claimedAt = performance.now();
    let reply: ClaimReply;
    let wasLost = false;
    try {
      reply = await this.ask(sent);
    } catch (error) {
      if (isDefinite(error) || wasNotApplied(error)) throw error;
      // The same claim again: its reply tells if the first one was granted.
      wasLost = true;
      claimedAt = performance.now();
      try {
        reply = await this.send(sent);
      } catch (again) {
        this.pursue(key, claimed, claim, policy);
        throw again;
      }
      if (isUndecided(reply)) {
        this.pursue(key, claimed, claim, policy);
        if (this.store.claimsMayCommitLate) throw new StoreUnavailableError('the reply to a claim was lost');
      }
    }
    switch (reply.outcome) {
      case 'execute':
        return { outcome: 'execute', permit: this.permit(key, claimed, claim, policy, reply, claimedAt, wasLost) };
      case 'in-progress':
        return { ...reply, runningForMs: 0 };
      case 'locked':
        return { outcome: 'in-progress', leaseLeftMs: 0, runningForMs: 0 };
      case 'mismatch':
      case 'unknown':
      case 'unreplayable':
        return { outcome: reply.outcome };
      case 'replay':
        return reply;
    }
  }

  private permit(
    key: string,
    claimed: Claimed,
    claim: Claim,
    policy: Policy,
    grant: Grant,
    claimedAt: number,
    wasLost: boolean,
  ): Permit {
    let end = (): void => undefined;
    const ended = new Promise<void>((resolve) => { end = resolve; });
    const running = { since: claimedAt, ended };
    this.running.set(key, running);
    return new Permit(this, claimed.id, grant, policy, claimedAt, () => {
      if (this.running.get(key) === running) this.running.delete(key);
      if (wasLost) this.pursue(key, claimed, claim, policy);
      end();
    });
  }

  /** Looks for a claim whose reply was lost, and gives it back if it was granted: no process executes under it. */
  private pursue(key: string, claimed: Claimed, claim: Claim, policy: Policy): void {
    const { id } = claimed;
    const { store } = this;
    if (!store.claimsMayCommitLate) {
      // Scripts run one after the other, so the next claim sees what was granted; the first message may still be on its way.
      this.spawn(async (isLast) => {
        const until = performance.now() + 5 * 60_000;
        for (let nap = 1000; performance.now() < until && !isLast(); nap = Math.min(nap * 2, 30_000)) {
          await unrefPause(nap);
          try {
            const record = await this.send(() => store.lookup(id));
            if (record?.state === 'in-progress' && record.attempt?.equals(claim.attempt) === true) {
              await this.send(() => store.release(id, record.token, releasedRetention(policy)));
              return;
            }
          } catch {
            // Asked again.
          }
        }
      });
      return;
    }
    const settle = async (): Promise<boolean> => {
      try {
        const reply = await this.send(() => store.claim(id, claim));
        if (isUndecided(reply)) return false;
        if (reply.outcome === 'execute' && !reply.afterAbandoned) {
          const released = await this.send(() => store.release(id, reply.token, releasedRetention(policy)));
          if (released === 'locked') return false;
        }
      } catch {
        return false;
      }
      if (this.unsettled.get(key) === unsettled) this.unsettled.delete(key);
      return true;
    };
    const unsettled = { settle };
    this.unsettled.set(key, unsettled);
    this.spawn(async (isLast) => {
      const until = performance.now() + policy.retentionMs;
      for (let nap = 100; performance.now() < until; nap = Math.min(nap * 2, 30_000)) {
        await unrefPause(nap);
        if (this.unsettled.get(key) !== unsettled || (await settle()) || isLast()) return;
      }
      if (this.unsettled.get(key) === unsettled) this.unsettled.delete(key);
    });
  }

  /** @internal */
  renew(id: Buffer, token: string, policy: Policy): Promise<OwnerReply> {
    return this.send(() => this.store.renew(id, token, policy.leaseMs, policy.retentionMs));
  }

  private async tryEnd(id: Buffer, token: string, end: End, policy: Policy): Promise<OwnerReply> {
    const { store } = this;
    for (let turn = 0; ; turn += 1) {
      const reply = await this.send(() =>
        end.kind === 'release'
          ? store.release(id, token, releasedRetention(policy))
          : store.complete(id, token, end.state, end.response, policy.retentionMs),
      );
      // Another transaction decides now.
      if (reply !== 'locked' || turn >= 8) return reply;
      await pause(20);
    }
  }

  /** @internal Ends an attempt. What the store does not take is tried again in the background until the retention ends. */
  async settle(id: Buffer, token: string, end: End, policy: Policy): Promise<Settled> {
    let last: unknown = new StoreUnavailableError('another transaction holds the record');
    for (let turn = 0; turn < 2; turn += 1) {
      try {
        const reply = await this.tryEnd(id, token, end, policy);
        if (reply !== 'locked') return reply;
      } catch (error) {
        last = error;
        if (isDefinite(error)) break;
        await pause(25);
      }
    }
    this.warn(`the end of an attempt at record ${id.toString('hex')} is not stored yet: ${reasonOf(last)}`);
    this.defer(id, token, end, policy);
    return 'not-stored';
  }

  private defer(id: Buffer, token: string, whole: End, policy: Policy): void {
    const key = id.toString('hex');
    let end = whole;
    let bytes = end.kind === 'complete' ? (end.response?.length ?? 0) : 0;
    if (this.deferredBytes + bytes > MAX_DEFERRED_BYTES) {
      end = { kind: 'complete', state: 'tombstone', response: undefined };
      bytes = 0;
    }
    this.deferredBytes += bytes;
    const settle = async (): Promise<boolean> => {
      try {
        if ((await this.tryEnd(id, token, end, policy)) === 'locked') return false;
      } catch {
        return false;
      }
      if (this.unsettled.get(key) === unsettled) this.unsettled.delete(key);
      return true;
    };
    const unsettled = { settle };
    this.unsettled.set(key, unsettled);
    this.spawn(async (isLast) => {
      const until = performance.now() + policy.retentionMs;
      for (let nap = 50; performance.now() < until; nap = Math.min(nap * 2, 5000)) {
        await unrefPause(nap);
        if (this.unsettled.get(key) !== unsettled || (await settle()) || isLast()) break;
      }
      if (this.unsettled.get(key) === unsettled) this.unsettled.delete(key);
      this.deferredBytes -= bytes;
    });
  }

  private spawn(work: (isLast: () => boolean) => Promise<void>): void {
    const task: Promise<void> = work(() => this.isClosed).finally(() => { this.work.delete(task); });
    this.work.add(task);
  }

  /** Accepts no more claims, and waits until the running attempts have ended and their ends are stored. True if all have. */
  async drain(timeoutMs = 30_000): Promise<boolean> {
    this.isClosed = true;
    const until = performance.now() + timeoutMs;
    while (performance.now() < until) {
      if (this.running.size === 0) {
        const open = [...this.unsettled.values()];
        if ((await Promise.all(open.map(({ settle }) => settle()))).every(Boolean)) return true;
      }
      await pause(20);
    }
    return false;
  }
}

/** A pause that does not keep the process alive. */
function unrefPause(ms: number): Promise<void> {
  return new Promise((resolve) => setTimeout(resolve, ms).unref());
}

function releasedRetention(policy: Policy): number {
  return Math.max(1000, Math.min(policy.leaseMs * RELEASED_LEASES, policy.retentionMs));
}

/** Errors after which it is certain that the command had no effect, and that it would fail again. */
function isDefinite(error: unknown): boolean {
  return (
    error instanceof CorruptRecordError ||
    error instanceof SealedError ||
    error instanceof StoreFullError ||
    error instanceof StoreSetupError
  );
}

const NO_CONNECTION = new Set(['ECONNREFUSED', 'ENOTFOUND', 'EAI_AGAIN', 'EHOSTUNREACH', 'ENETUNREACH', 'ETIMEDOUT']);

/** Returns true if it is certain that the command had no effect: it was not sent, or the server answered with an error. */
function wasNotApplied(error: unknown): boolean {
  if (error instanceof NotAskedError) return true;
  const { code, message, syscall } = error as { code?: unknown; message?: unknown; syscall?: unknown };
  if (typeof code === 'string') {
    if (NO_CONNECTION.has(code)) return code !== 'ETIMEDOUT' || syscall === 'connect';
    // An error of PostgreSQL undoes its statement, unless the session was ended, perhaps while it committed.
    if (/^[0-9A-Z]{5}$/.test(code)) return !/^(?:08|57P)/.test(code);
  }
  return typeof message === 'string' && /exceeded when trying to connect/.test(message);
}

function isUndecided({ outcome }: ClaimReply): boolean {
  return outcome === 'in-progress' || outcome === 'locked' || outcome === 'mismatch';
}

/** The reason of an error for the log: only its code or its message, never a query with its values. */
function reasonOf(error: unknown): string {
  const { code, message } = error as { code?: unknown; message?: unknown };
  return typeof code === 'string' && code !== '' ? code : typeof message === 'string' ? message : 'unknown error';
}

/** The ownership of a record. The lease is renewed until the attempt ends. */
export class Permit {
  private readonly controller = new AbortController();
  private timer: NodeJS.Timeout | undefined;
  private isEnded = false;

  /** @internal */
  constructor(
    private readonly engine: Engine,
    readonly id: Buffer,
    private readonly grant: Grant,
    private readonly policy: Policy,
    private readonly claimedAt: number,
    private readonly onEnd: () => void,
  ) {
    this.schedule(policy.leaseMs / 3);
  }

  get token(): string {
    return this.grant.token;
  }

  /** The number of the attempt, counted from 1. */
  get attempt(): number {
    return this.grant.attempts;
  }

  get isAfterAbandoned(): boolean {
    return this.grant.afterAbandoned;
  }

  /** Aborted if another attempt owns the record: stop. */
  get signal(): AbortSignal {
    return this.controller.signal;
  }

  private schedule(ms: number): void {
    this.timer = setTimeout(() => {
      void this.renewOnce();
    }, ms);
    this.timer.unref();
  }

  private async renewOnce(): Promise<void> {
    let next = this.policy.leaseMs / 3;
    try {
      if ((await this.engine.renew(this.id, this.token, this.policy)) === 'fenced' && !this.isEnded) {
        this.controller.abort(new Error('another attempt owns the record by now: stop'));
        return;
      }
    } catch {
      next = this.policy.leaseMs / 10;
    }
    if (!this.isEnded) this.schedule(next);
  }

  /** Confirms the lease if the process may have been paused since the claim. False: nothing may be executed. */
  async confirm(): Promise<boolean> {
    if (performance.now() - this.claimedAt < this.policy.leaseMs / 2) return true;
    try {
      return (await this.engine.renew(this.id, this.token, this.policy)) === 'done';
    } catch {
      return false;
    }
  }

  complete(state: CompletionState, response?: Buffer): Promise<Settled> {
    return this.end({ kind: 'complete', state, response });
  }

  /** Frees the key, because nothing was decided. After an abandoned attempt the record is left to its lease. */
  release(): Promise<Settled> {
    return this.isAfterAbandoned ? Promise.resolve(this.leave()) : this.end({ kind: 'release' });
  }

  /** Leaves the record to its lease, as after a crash. */
  leave(): 'done' {
    this.stop();
    this.onEnd();
    return 'done';
  }

  private stop(): void {
    this.isEnded = true;
    clearTimeout(this.timer);
  }

  private async end(end: End): Promise<Settled> {
    this.stop();
    try {
      const settled = await this.engine.settle(this.id, this.token, end, this.policy);
      if (settled === 'fenced' && end.kind === 'complete') {
        this.engine.warn(`record ${this.id.toString('hex')}: another attempt took over while the handler ran; there may be a second effect`);
      }
      return settled;
    } finally {
      this.onEnd();
    }
  }
}
