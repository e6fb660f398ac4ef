// Claims, leases and the ends of attempts on a store that may be slow, away, or lose its replies.
import { closeSync, openSync } from 'node:fs';
import { devNull } from 'node:os';
import { attemptId } from './bytes.js';
import { LOOP, Moment } from './clocks.js';
import { IdGuard, MARK, type Ids } from './ids.js';
import { CorruptRecordError } from './response.js';
import {
  ConnectionLostError,
  DelayedError,
  SealedError,
  type Claim,
  type ClaimReply,
  type CompletionState,
  type Grant,
  type OnAbandoned,
  type OwnerReply,
  type RecordView,
  type Store,
  StoreFullError,
  StoreSetupError,
} from './store.js';

/** The store cannot be asked, or does not answer. Nothing was executed. */
export class StoreUnavailableError extends Error {
  override readonly name = 'StoreUnavailableError';
}

/**
 * An owner of the record is or was known while the request waited: this process, or another attempt by a reply of the store. Or the store
 * has refused the request.
 */
export class NotFreeError extends StoreUnavailableError {}

/** The command was not sent. */
class NotAskedError extends StoreUnavailableError {
  constructor(readonly wasReached: boolean) {
    super('the store did not answer lately');
  }
}

/** The client got no reply, because it waits until its server, which it has reached, takes commands. */
class TurnedAwayError extends StoreUnavailableError {
  constructor() {
    super('the server was reached: it loads its data, has too many connections, or refuses the client');
  }
}

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
  ids: Ids;
  /** The longest time for one command. 2 s by default. */
  storeTimeoutMs?: number;
  /** Gets warnings. They have no key, no credential and no body. */
  warn?: (message: string) => void;
}

/** The age of the last look for the mark from which a claim looks again first. */
const LOOK_AGAIN_MS = 2000;
/**
 * The age of the last look from which nothing executes without another one. It is less than the 6 s for which a process with an id
 * secret waits before it uses a new store.
 */
export const LOOK_COUNTS_MS = 4000;
/** The shortest time from the beginning of a look that got no reply to that of the next one, while either counts. */
const FAILED_LOOK_AGAIN_MS = 1000;
/** The time for which a refusal is repeated without another look. */
const REFUSED_FOR_MS = 1000;
const DAY_MS = 86_400_000;

/** The longest pause between two tries while the process ends. */
const HURRIED_PAUSE_MS = 250;
const MAX_UNSETTLED = 65_536;
const MAX_WAITERS = 1000;
const MAX_DEFERRED_BYTES = 256 * 1024 * 1024;
const MAX_STRIKES = 3;
const MAX_PARTS = 1000;
const RELEASED_LEASES = 4;
/** The time for which a claim whose reply was lost is looked for, counted from when the store answers again. */
const LOST_CLAIM_MS = 5 * 60_000;
/** The most claims that are looked for longer while the store does not answer. */
const MAX_SOUGHT_LONG = 8192;
/** The most warnings that name a record, in this time. */
const MAX_RECORD_WARNINGS = 1000;
const RECORD_WARNINGS_MS = 10_000;

type WarningKind = 'other' | 'outage' | 'claim' | 'full' | 'sealed' | 'scope' | 'sidecar' | 'response' | 'host';

type End = { kind: 'complete'; state: CompletionState; response: Buffer | undefined } | { kind: 'release' };
export type Settled = 'done' | 'fenced' | 'not-stored';

function pause(ms: number): Promise<void> {
  return new Promise((resolve) => setTimeout(resolve, ms));
}

/** Something that the store does not know yet: a claim whose reply was lost, or the end of an attempt. */
interface Unsettled {
  /** Tries once. True if it is settled now. */
  settle: () => Promise<boolean>;
  /** True if this process has executed under the record. */
  hasExecuted: boolean;
  /** The error of the last try, if it had one. */
  failure?: unknown;
  /** True if the store has answered that another attempt has the record now. */
  isElsewhere?: boolean;
}

/** An attempt of this process. */
class Running {
  readonly since = performance.now();
  private isEnded = false;
  /** Few attempts have somebody who waits. */
  private waiting: Set<() => void> | undefined;

  /** Resolves when the attempt has ended, or after this time. */
  endedWithin(ms: number): Promise<void> {
    if (this.isEnded) return Promise.resolve();
    const waiting = (this.waiting ??= new Set());
    return new Promise((resolve) => {
      const stop = (): void => {
        clearTimeout(timer);
        waiting.delete(stop);
        resolve();
      };
      const timer = setTimeout(stop, ms);
      waiting.add(stop);
    });
  }

  end(): void {
    this.isEnded = true;
    for (const stop of this.waiting ?? []) stop();
  }
}

/** The failures of a part of the store one after the other, and the time until which it is left alone. */
interface Outage {
  strikes: number;
  openUntil: number;
  /** True if the last failure was not that of a store that is away. */
  wasReached: boolean;
  /** When the last answer came, by `performance.now()`. */
  answeredAt: number;
}

/** The calls of `claim` for a record that are under way. */
interface Contest {
  calls: number;
  /** True if an owner of the record was known at any time since the first of them began. */
  hadOwner: boolean;
}

export class Engine {
  readonly store: Store;
  private readonly storeTimeoutMs: number;
  private readonly warnings: (message: string) => void;
  private readonly running = new Map<string, Running>();
  /** By record. Concurrent claims of a key may each lose their reply, and any of them may be the one that was granted. */
  private readonly unsettled = new Map<string, Set<Unsettled>>();
  private unsettledCount = 0;
  private readonly contests = new Map<string, Contest>();
  /** Claims whose reply was lost, and which do not keep others from the record. */
  private readonly lost = new Set<Unsettled>();
  /** How many of them are of attempts that have executed. */
  private lostExecuted = 0;
  private deferredBytes = 0;
  private waiters = 0;
  /** Calls of {@link claim} that have no result yet. Any of them may still begin an execution. */
  private claims = 0;
  private readonly outages = new Map<string, Outage>();
  private readonly guard: IdGuard;
  /** When the last look for the mark began that was a success, and the last one that got no reply. */
  private lookedAt: Moment | undefined;
  private lookFailedAt: Moment | undefined;
  /** The last look that was a refusal. */
  private refused: { begun: Moment; why: StoreSetupError } | undefined;
  private isLooking = false;
  private advisedAt: Moment | undefined;
  private isClosed = false;
  /** When a warning of each kind was reported last. */
  private readonly warnedAt = new Map<string, number>();
  private recordWarnings = { since: -Infinity, reported: 0, leftOut: 0 };

  constructor(options: EngineOptions) {
    this.store = options.store;
    this.guard = new IdGuard(options.ids);
    this.storeTimeoutMs = options.storeTimeoutMs ?? 2000;
    this.store.useTimeout?.(this.storeTimeoutMs);
    const toConsole = (message: string): void => { console.warn(`oncegate: ${message}`); };
    const warn: (message: string) => unknown = options.warn ?? toConsole;
    this.store.useWarnings?.((message) => { this.advise(message); });
    // A logger that fails must neither end the process nor keep a key.
    this.warnings = (message) => { void (async () => { await warn(message); })().catch(() => { toConsole(message); }); };
  }

  /** Reports a warning about a setting, which comes once. */
  advise(message: string): void {
    this.warnings(message);
  }

  /** Reports an error of a handler, with its stack. It is the only report, because the middleware answers in place of the handler. */
  handlerFailed(error: unknown): void {
    this.warnings(`a handler failed: ${error instanceof Error ? (error.stack ?? `${error.name}: ${error.message}`) : typeof error}`);
  }

  /** Reports at most one warning of a kind a second: an outage must not fill the log. */
  warn(message: string, kind: WarningKind = 'other'): void {
    const now = performance.now();
    if (now - (this.warnedAt.get(kind) ?? -Infinity) < (kind === 'scope' ? 60_000 : 1000)) return;
    this.warnedAt.set(kind, now);
    this.warnings(message);
  }

  /** Reports a warning about one record. Each record counts, so only a flood is cut, and the log says how many lines are missing. */
  warnOf(id: Buffer, message: string): void {
    const now = performance.now();
    let own = this.recordWarnings;
    if (now - own.since >= RECORD_WARNINGS_MS) {
      if (own.leftOut > 0) this.warnings(`${String(own.leftOut)} warnings about other records were left out`);
      own = { since: now, reported: 0, leftOut: 0 };
      this.recordWarnings = own;
    }
    if (own.reported >= MAX_RECORD_WARNINGS) {
      own.leftOut += 1;
      return;
    }
    own.reported += 1;
    this.warnings(`record ${id.toString('hex')}: ${message}`);
  }

  private outageOf(id: Buffer): Outage {
    const part = this.store.partOf?.(id) ?? '';
    let own = this.outages.get(part);
    if (own === undefined) {
      // Nodes of a cluster come and go.
      if (this.outages.size >= MAX_PARTS) this.outages.clear();
      own = { strikes: 0, openUntil: 0, wasReached: false, answeredAt: -Infinity };
      this.outages.set(part, own);
    }
    return own;
  }

  /**
   * Sends a command for a record, within the time that it may take. After several failures the store, or the node of a cluster, is left
   * alone for a moment.
   */
  private async ask<T>(id: Buffer, command: () => Promise<T>): Promise<T> {
    const { openUntil, wasReached } = this.outageOf(id);
    if (performance.now() < openUntil) throw new NotAskedError(wasReached);
    return this.send(id, command);
  }

  private async send<T>(id: Buffer, command: () => Promise<T>): Promise<T> {
    const outage = this.outageOf(id);
    const begun = performance.now();
    LOOP.watch(begun);
    try {
      const reply = await this.inTime(command(), outage);
      outage.strikes = 0;
      outage.openUntil = 0;
      return reply;
    } catch (failure) {
      noteUsedUp(failure);
      if (isDefinite(failure)) throw failure;
      const error = await this.judged(id, outage, begun, failure);
      outage.strikes += 1;
      outage.wasReached = wasReached(error);
      if (outage.strikes >= MAX_STRIKES) {
        outage.openUntil = performance.now() + Math.min(1000, 50 * 2 ** Math.min(outage.strikes - MAX_STRIKES, 5));
        this.warn(`the store (${this.store.name}) ${outage.wasReached ? 'takes no commands' : 'is out of reach'}: ${reasonOf(error)}`, 'outage');
      }
      throw error;
    }
  }

  /** The failure of a command, or an error that says why it is none of a store that is away. */
  private async judged(id: Buffer, outage: Outage, begun: number, failure: unknown): Promise<unknown> {
    if (wasReached(failure)) return failure;
    if (this.store.isTurnedAway?.(id) === true) return new TurnedAwayError();
    if (!isTimeOut(failure)) return failure;
    // What has come meanwhile is read first.
    await nextTurn();
    if (outage.answeredAt > begun) return new DelayedError(`${reasonOf(failure)}, and it answers other commands`);
    return LOOP.wasBlocked(performance.now()) ? new DelayedError(`${reasonOf(failure)}, and the event loop was blocked`) : failure;
  }

  /**
   * Sends a command again whose connection was broken: a pool may hold several such connections. A store that breaks all of them must not
   * hold requests for long.
   */
  private async sendAgain<T>(id: Buffer, command: () => Promise<T>): Promise<T> {
    const until = performance.now() + Math.min(this.storeTimeoutMs, 250);
    for (let nap = 2; ; nap = Math.min(nap * 2, 50)) {
      try {
        return await this.send(id, command);
      } catch (error) {
        if (!wasBroken(error) || performance.now() + nap >= until) throw error;
      }
      await pause(nap);
    }
  }

  private inTime<T>(reply: Promise<T>, outage: Outage): Promise<T> {
    return new Promise<T>((resolve, reject) => {
      const timer = setTimeout(() => {
        // A reply that is there, and was not read while the event loop was blocked, comes first.
        void nextTurn().then(() => { reject(new StoreUnavailableError(`the store did not answer within ${String(this.storeTimeoutMs)} ms`)); });
      }, this.storeTimeoutMs);
      // Replies that come late show that the store answers, too.
      reply.then(
        (value) => { clearTimeout(timer); outage.answeredAt = performance.now(); resolve(value); },
        (error: unknown) => {
          clearTimeout(timer);
          if (isAnswer(error)) outage.answeredAt = performance.now();
          // eslint-disable-next-line @typescript-eslint/prefer-promise-reject-errors -- the error of the store, as it is
          reject(error);
        },
      );
    });
  }

  /** Returns true if {@link checkIds} has nothing to do. */
  private hasLooked(maxAge: number): boolean {
    return this.lookedAt !== undefined && this.lookedAt.age() < maxAge;
  }

  /**
   * Looks for the mark of an id secret, unless the last look began less than `maxAge` ago. If the store does not answer, a process with
   * a successful look before goes on: on a cluster, the mark may be on another node than the record.
   */
  private async checkIds(maxAge: number): Promise<void> {
    const now = Moment.now();
    if (this.lookedAt !== undefined) {
      const age = this.lookedAt.age(now);
      const failedAge = this.lookFailedAt?.age(now) ?? Infinity;
      if (age < maxAge) return;
      // While a look counts, one claim looks again, and the others go on. One that failed counts no longer than one that succeeded.
      if (Math.min(age, failedAge) < LOOK_COUNTS_MS && (this.isLooking || failedAge < FAILED_LOOK_AGAIN_MS)) return;
    } else if (this.refused !== undefined && this.refused.begun.age(now) < REFUSED_FOR_MS) {
      throw this.refused.why;
    }
    this.isLooking = true;
    let mark: RecordView | undefined;
    try {
      const look = () => this.store.lookup(MARK);
      mark = await this.ask(MARK, look).catch((error: unknown) => {
        if (this.lookedAt === undefined && wasBroken(error)) return this.sendAgain(MARK, look);
        throw error;
      });
    } catch (error) {
      // There is a mark, or there may be one: that is no outage. A server that takes no keys says nothing of a mark.
      if (isDefinite(error) && !(error instanceof StoreFullError)) throw new StoreSetupError(`it cannot be read if the store belongs to an id secret: ${reasonOf(error)}`);
      // A store that is away is still that of another secret.
      this.guard.refuseForeign();
      this.lookFailedAt = now;
      if (this.lookedAt === undefined) throw error;
      return;
    } finally {
      this.isLooking = false;
    }
    try {
      this.guard.judge(mark, this.store.name === 'memory');
    } catch (error) {
      this.lookedAt = undefined;
      this.refused = { begun: now, why: error as StoreSetupError };
      throw error;
    }
    // A look that began later has refused since, and this one was only slow.
    if (this.refused?.begun.isAfter(now) === true) throw this.refused.why;
    this.lookedAt = now;
    this.lookFailedAt = undefined;
    this.refused = undefined;
    const days = this.guard.daysLeft(mark);
    if (days !== undefined && (this.advisedAt?.age(now) ?? Infinity) >= DAY_MS) {
      this.advisedAt = now;
      this.advise(
        `the mark of the id secret of the store ends in ${String(days)} days, and then nothing is executed: start a sidecar with this ` +
          'secret on the store, which renews it',
      );
    }
  }

  /** The error of a look that no look before makes up for. If only the part with the mark is away, other processes still use that with the record. */
  private ofMark(id: Buffer, error: unknown): unknown {
    const isElsewhere = this.store.partOf !== undefined && this.store.partOf(MARK) !== this.store.partOf(id);
    return isElsewhere && !isDefinite(error) ? new NotFreeError(reasonOf(error), { cause: error }) : error;
  }

  /** The record as the store has it. */
  lookup(id: Buffer): Promise<RecordView | undefined> {
    return this.ask(id, () => this.store.lookup(id));
  }

  /**
   * Requests permission to execute. Waits for a running attempt as long as the policy says.
   *
   * @throws {StoreUnavailableError} and other errors of stores: nothing is executed
   */
  async claim(claimed: Claimed, policy: Policy): Promise<ClaimResult> {
    if (this.isClosed) throw new NotFreeError('the process is shutting down');
    const key = claimed.id.toString('latin1');
    const contest = this.contests.get(key) ?? { calls: 0, hadOwner: this.running.has(key) || this.hasExecuted(key) };
    contest.calls += 1;
    this.contests.set(key, contest);
    try {
      return await this.waitFor(key, contest, claimed, policy);
    } catch (error) {
      // A store that is away by now does not make the key free.
      throw contest.hadOwner && !isDefinite(error) ? new NotFreeError(reasonOf(error), { cause: error }) : error;
    } finally {
      contest.calls -= 1;
      if (contest.calls === 0) this.contests.delete(key);
    }
  }

  /** Returns true if the end of an attempt of this process is not stored yet. */
  private hasExecuted(key: string): boolean {
    for (const { hasExecuted } of this.unsettled.get(key) ?? []) if (hasExecuted) return true;
    return false;
  }

  /** Notes that the record has an owner, for the requests that wait. */
  private noteOwner(key: string): void {
    const contest = this.contests.get(key);
    if (contest !== undefined) contest.hadOwner = true;
  }

  private async waitFor(key: string, contest: Contest, claimed: Claimed, policy: Policy): Promise<ClaimResult> {
    const begun = performance.now();
    const deadline = begun + policy.waitMs;
    let waits = false;
    let nap = 25;
    this.claims += 1;
    try {
      if (!this.hasLooked(LOOK_AGAIN_MS)) await this.checkIds(LOOK_AGAIN_MS).catch((error: unknown) => { throw this.ofMark(claimed.id, error); });
      for (;;) {
        for (const before of this.unsettled.get(key) ?? []) {
          const isSettled = await before.settle();
          if (before.isElsewhere === true) contest.hadOwner = true;
          if (isSettled || before.isElsewhere === true) continue;
          const reason = 'an earlier attempt with this key has no recorded end yet';
          // A lost claim has executed nothing, so it does not keep a request from failing open while the store is away.
          const isAway = before.failure !== undefined && !wasReached(before.failure);
          throw isAway ? new StoreUnavailableError(reason) : new NotFreeError(reason);
        }
        if (!this.hasLooked(LOOK_AGAIN_MS)) await this.checkIds(LOOK_AGAIN_MS).catch((error: unknown) => { throw this.ofMark(claimed.id, error); });
        const result = this.running.has(key) ? await this.ownRecord(claimed, policy) : await this.claimOnce(key, claimed, policy);
        if (result.outcome === 'execute' && !this.hasLooked(LOOK_COUNTS_MS)) {
          // A claim that was under way for long may have been granted after another process began to use the store with an id secret.
          try {
            await this.checkIds(LOOK_COUNTS_MS);
          } catch (error) {
            await result.permit.release();
            throw error;
          }
        }
        if (result.outcome !== 'in-progress') return result;
        contest.hadOwner = true;
        const left = deadline - performance.now();
        if (!waits && left > 0 && this.waiters < MAX_WAITERS) {
          waits = true;
          this.waiters += 1;
        }
        if (!waits || left <= 0) return { ...result, runningForMs: this.runningFor(key, begun) };
        const local = this.running.get(key);
        await (local === undefined ? pause(Math.min(left, nap)) : local.endedWithin(left));
        nap = Math.min(nap * 2, 500);
      }
    } finally {
      this.claims -= 1;
      if (waits) this.waiters -= 1;
    }
  }

  /**
   * The reply to a claim of a record under which this process executes. It is not claimed: if its lease has ended meanwhile, a claim would
   * make its outcome unknown, or execute a second time, although the handler is alive. Only the store can say if this is another request.
   */
  private async ownRecord({ id, fingerprint }: Claimed, { leaseMs }: Policy): Promise<ClaimResult> {
    let record: RecordView | undefined;
    try {
      record = await this.lookup(id);
    } catch (error) {
      if (isDefinite(error)) throw error;
      throw new NotFreeError(reasonOf(error));
    }
    const isOther = record !== undefined && record.state !== 'released' && !record.fingerprint.equals(fingerprint);
    return isOther ? { outcome: 'mismatch' } : { outcome: 'in-progress', leaseLeftMs: leaseMs, runningForMs: 0 };
  }

  private runningFor(key: string, begun: number): number {
    return performance.now() - (this.running.get(key)?.since ?? begun);
  }

  private async claimOnce(key: string, claimed: Claimed, policy: Policy): Promise<ClaimResult> {
    if (this.unsettledCount + this.lostExecuted + this.running.size >= MAX_UNSETTLED) {
      throw new StoreFullError('too many attempts have no recorded end yet');
    }
    const claim: Claim = {
      attempt: attemptId(),
      fingerprint: claimed.fingerprint,
      leaseMs: policy.leaseMs,
      retentionMs: policy.retentionMs,
      onAbandoned: policy.onAbandoned,
      caller: claimed.callerTag,
      keyTag: claimed.keyTag,
      operation: claimed.operation,
    };
    const sent = () => this.store.claim(claimed.id, claim);
    let claimedAt = Moment.now();
    let reply: ClaimReply;
    let wasLost = false;
    try {
      reply = await this.ask(claimed.id, sent);
    } catch (error) {
      if (error instanceof StoreFullError) return this.recorded(key, claimed, claim, policy, error);
      if (isDefinite(error) || wasNotApplied(error)) throw error;
      // The same claim again: its reply tells if the first one was granted.
      wasLost = true;
      claimedAt = Moment.now();
      try {
        reply = await this.sendAgain(claimed.id, sent);
      } catch (again) {
        this.pursue(key, claimed, claim, policy);
        throw again;
      }
      if (isUndecided(reply)) {
        this.pursue(key, claimed, claim, policy);
        if (this.store.claimsMayCommitLate) throw new NotFreeError('the reply to a claim was lost');
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

  /** The reply of a store that is full to a claim of a record that it has: it still reads. */
  private async recorded(key: string, claimed: Claimed, claim: Claim, policy: Policy, full: StoreFullError): Promise<ClaimResult> {
    const { id, fingerprint } = claimed;
    let record: RecordView | undefined;
    try {
      record = await this.lookup(id);
    } catch (error) {
      // A client may have sent the claim before, to a server that granted it. A statement that was refused is undone.
      const isSought = error instanceof StoreFullError || !isDefinite(error);
      if (isSought && !this.store.claimsMayCommitLate && this.lost.size < MAX_SOUGHT_LONG) this.pursue(key, claimed, claim, policy);
      throw isDefinite(error) ? error : full;
    }
    if (record?.state === 'in-progress' && record.attempt?.equals(claim.attempt) === true) this.pursue(key, claimed, claim, policy);
    if (record === undefined || record.state === 'released') throw full;
    if (!record.fingerprint.equals(fingerprint)) return { outcome: 'mismatch' };
    switch (record.state) {
      case 'completed':
        if (record.response === undefined) throw full;
        return { outcome: 'replay', response: this.store.opened?.(id, record.response) ?? record.response };
      case 'unknown':
        return { outcome: 'unknown' };
      case 'tombstone':
      case 'awaited':
        return { outcome: 'unreplayable' };
      default:
        throw full;
    }
  }

  private permit(
    key: string,
    claimed: Claimed,
    claim: Claim,
    policy: Policy,
    grant: Grant,
    claimedAt: Moment,
    wasLost: boolean,
  ): Permit {
    const running = new Running();
    this.running.set(key, running);
    this.noteOwner(key);
    return new Permit(this, claimed.id, grant, policy, claimedAt, (isRelease) => {
      if (this.running.get(key) === running) this.running.delete(key);
      // Once the end is stored or under way, the record is that of this attempt. Only a release leaves it to a claim that comes late.
      if (wasLost && isRelease) this.pursue(key, claimed, claim, policy, true);
      running.end();
    });
  }

  /** Looks for a claim whose reply was lost, and gives it back if it was granted: no process executes under it. */
  private pursue(key: string, claimed: Claimed, claim: Claim, policy: Policy, hasExecuted = false): void {
    const { id } = claimed;
    const { store } = this;
    if (!store.claimsMayCommitLate) {
      // Scripts run one after the other, so the next claim sees what was granted; the first message may still be on its way.
      let isReleased = false;
      const settle = async (): Promise<boolean> => {
        try {
          const record = await this.ask(id, () => store.lookup(id));
          if (record?.state === 'in-progress' && record.attempt?.equals(claim.attempt) === true) {
            await this.send(id, () => store.release(id, record.token, releasedRetention(policy)));
            isReleased = true;
          }
          return true;
        } catch {
          return false;
        }
      };
      // Without bound, an outage would use up the memory. What is not looked for is left to its lease.
      if (this.lost.size >= MAX_UNSETTLED) return;
      const lost = { settle, hasExecuted };
      this.lost.add(lost);
      if (hasExecuted) this.lostExecuted += 1;
      void (async () => {
        const begun = performance.now();
        // A server that stood still carries out what was sent to it before, and then its answer comes, too.
        let until = begun + LOST_CLAIM_MS;
        const most = Math.max(1000, Math.min(policy.leaseMs / 3, 30_000));
        for (let nap = 1000; performance.now() < Math.min(until, begun + policy.retentionMs) && !this.isClosed; nap = Math.min(nap * 2, most)) {
          await unrefPause(nap);
          // A process that ends asks by itself.
          if (this.isClosed) break;
          if (!(await settle()) && this.lost.size < MAX_SOUGHT_LONG) until = performance.now() + LOST_CLAIM_MS;
          if (isReleased) break;
        }
        if (this.isClosed) return;
        this.lost.delete(lost);
        if (hasExecuted) this.lostExecuted -= 1;
      })();
      return;
    }
    const settle = async (): Promise<boolean> => {
      try {
        const reply = await this.send(id, () => store.claim(id, claim));
        unsettled.failure = undefined;
        unsettled.isElsewhere = isUndecided(reply);
        if (unsettled.isElsewhere) return false;
        if (reply.outcome === 'execute' && !reply.afterAbandoned) {
          const released = await this.send(id, () => store.release(id, reply.token, releasedRetention(policy)));
          if (released === 'locked') return false;
        }
      } catch (error) {
        unsettled.isElsewhere = false;
        unsettled.failure = error;
        if (!(error instanceof CorruptRecordError || error instanceof SealedError)) return false;
      }
      this.forget(key, unsettled);
      return true;
    };
    const unsettled: Unsettled = { settle, hasExecuted };
    this.remember(key, unsettled);
    this.settleLater(key, unsettled, policy, 100, 30_000);
  }

  /** @internal */
  renew(id: Buffer, token: string, policy: Policy): Promise<OwnerReply> {
    return this.send(id, () => this.store.renew(id, token, policy.leaseMs, policy.retentionMs));
  }

  private async tryEnd(id: Buffer, token: string, end: End, policy: Policy): Promise<OwnerReply> {
    const { store } = this;
    for (let turn = 0; ; turn += 1) {
      const reply = await this.send(id, () =>
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
    this.noteOwner(id.toString('latin1'));
    // No error is made in advance: its stack costs as much as a hash of the request.
    let last: unknown;
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
    this.warnOf(id, `the end of an attempt is not stored yet: ${last === undefined ? 'another transaction holds the record' : reasonOf(last)}`);
    this.defer(id, token, end, policy);
    return 'not-stored';
  }

  private defer(id: Buffer, token: string, whole: End, policy: Policy): void {
    const key = id.toString('latin1');
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
      this.forget(key, unsettled);
      return true;
    };
    const unsettled = { settle, hasExecuted: true };
    this.remember(key, unsettled);
    this.settleLater(key, unsettled, policy, 50, 5000, () => { this.deferredBytes -= bytes; });
  }

  private remember(key: string, unsettled: Unsettled): void {
    if (unsettled.hasExecuted) this.noteOwner(key);
    const ofRecord = this.unsettled.get(key);
    if (ofRecord === undefined) this.unsettled.set(key, new Set([unsettled]));
    else ofRecord.add(unsettled);
    this.unsettledCount += 1;
  }

  private forget(key: string, unsettled: Unsettled): void {
    const ofRecord = this.unsettled.get(key);
    if (ofRecord?.delete(unsettled) !== true) return;
    this.unsettledCount -= 1;
    if (ofRecord.size === 0) this.unsettled.delete(key);
  }

  /** Tries again in the background until the retention ends. A process that ends does so in `drain`, which reports what is left. */
  private settleLater(key: string, unsettled: Unsettled, policy: Policy, first: number, most: number, onEnd?: () => void): void {
    void (async () => {
      const until = performance.now() + policy.retentionMs;
      for (let nap = first; performance.now() < until && !this.isClosed; nap = Math.min(nap * 2, most)) {
        await unrefPause(nap);
        if (this.unsettled.get(key)?.has(unsettled) !== true || (await unsettled.settle())) break;
      }
      if (!this.isClosed) this.forget(key, unsettled);
      onEnd?.();
    })();
  }

  /** Tries once to settle what the store does not know yet, and looks for lost claims if asked to. True if nothing is left. */
  private async settleAll(seeksLost: boolean): Promise<boolean> {
    const open = [...[...this.unsettled.values()].flatMap((ofRecord) => [...ofRecord]), ...(seeksLost ? this.lost : [])];
    return (await Promise.all(open.map(({ settle }) => settle()))).every(Boolean);
  }

  /** Tries to settle the ends of attempts again, with short pauses, until the function that it returns is called. */
  hurry(): () => void {
    let isOver = false;
    void (async () => {
      while (!isOver) {
        await this.settleAll(false);
        await unrefPause(HURRIED_PAUSE_MS);
      }
    })();
    return () => { isOver = true; };
  }

  /**
   * Accepts no more claims, and waits until the claims under way have a result, the running attempts have ended, and their ends are
   * stored. What is known is sent to the store at least once, also without any time. True if all is stored.
   */
  async drain(timeoutMs = 30_000): Promise<boolean> {
    this.isClosed = true;
    const until = performance.now() + timeoutMs;
    for (let nap = 20; ; nap = Math.min(nap * 2, HURRIED_PAUSE_MS)) {
      const hasEnded = this.running.size === 0 && this.claims === 0;
      if ((await this.settleAll(hasEnded || nap === 20)) && hasEnded) return true;
      const left = until - performance.now();
      if (left <= 0) return false;
      await pause(Math.min(nap, left));
    }
  }
}

/** Resolves when the event loop has read what is there. */
function nextTurn(): Promise<void> {
  return new Promise((resolve) => { setImmediate(resolve); });
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

const NO_CONNECTION = new Set(['ECONNREFUSED', 'ENOTFOUND', 'EAI_AGAIN', 'EAI_NODATA', 'EAI_NONAME']);
/** An open connection fails with these, too. `ENOENT`: there is no socket file. */
const PERHAPS_NO_CONNECTION = new Set(['EHOSTUNREACH', 'ENETUNREACH', 'EHOSTDOWN', 'ETIMEDOUT', 'ENOENT']);

/**
 * Returns true if an error of Node says that there was no connection, so that nothing was sent. Every other error of connecting, such as
 * `EADDRNOTAVAIL` or `EACCES`, is one of this process.
 */
export function hadNoConnection({ code, syscall, errors }: { code?: unknown; syscall?: unknown; errors?: unknown }): boolean {
  if (typeof code !== 'string') return false;
  // That of all addresses of a host.
  if (Array.isArray(errors) && errors.length > 0) return (errors as object[]).every(hadNoConnection);
  return NO_CONNECTION.has(code) || (PERHAPS_NO_CONNECTION.has(code) && (syscall === 'connect' || (syscall === undefined && Array.isArray(errors))));
}

/** Each has a digit, in contrast to `EPIPE`. */
const SQLSTATE = /^(?=.*[0-9])[0-9A-Z]{5}$/;

/** What clients say of a connection that was made, and then broken: `pg`, `redis` and `ioredis`. */
const BROKEN = new Set([
  'Connection terminated unexpectedly', 'Connection terminated', 'Client has encountered a connection error and is not queryable',
  'Socket closed unexpectedly', 'Command aborted due to connection close',
]);

/** Returns true if an error says that a connection that was made was broken, also by its server (57P01, 57P02 and 57P05). */
function wasBroken(error: unknown): boolean {
  if (error instanceof ConnectionLostError) return true;
  const { code, syscall, message } = (error ?? {}) as { code?: unknown; syscall?: unknown; message?: unknown };
  if (typeof code !== 'string') return typeof message === 'string' && BROKEN.has(message);
  if (code === 'ECONNRESET' || code === 'EPIPE' || code === 'ECONNABORTED') return true;
  return /^57P0[125]$/.test(code) || (PERHAPS_NO_CONNECTION.has(code) && (syscall === 'read' || syscall === 'write'));
}

/** What clients say if no connection can be made, or if no answer comes in time: `pg`, `redis` and `ioredis`, also of their clusters. */
const AWAY = new RegExp(
  'tim(?:ed ?|e)-?out|Connection is closed|client is (?:closed|offline)|enableOfflineQueue|max retries per request|slots cache|' +
    'startup nodes|root nodes|sentinels|is disconnect',
  'i',
);

/** What a pool of `pg` says if none of its connections was free in time. If a connection cannot be made in time, it says something else. */
const NO_FREE_CONNECTION = /exceeded when trying to connect/;

/** Returns true if an error says that there was no answer in time. */
function isTimeOut(error: unknown): boolean {
  const { code, message } = (error ?? {}) as { code?: unknown; message?: unknown };
  return typeof code === 'string' ? /TIMED?_?OUT/.test(code) : /tim(?:ed ?|e)-?out|did not answer/i.test(String(message));
}

/** Returns true if the server has sent an error. */
function isAnswer(error: unknown): boolean {
  return isDefinite(error) || (wasReached(error) && !wasBroken(error) && !(error instanceof DelayedError));
}

/**
 * Returns false if an error says that the store is away: a connection cannot be made, or there is no answer in time. Every other error is
 * no outage: that of a server, of a connection that was made and then broken, of a certificate, or of this process, such as of a pool that
 * was ended.
 */
export function wasReached(error: unknown): boolean {
  if (error instanceof NotAskedError) return error.wasReached;
  return !isOutage(error) || isUsedUp();
}

/** A driver may raise class 08 for a connection that cannot be made; an error of a server has a severity. */
function isOutage(error: unknown): boolean {
  if (error instanceof StoreUnavailableError) return !(error instanceof TurnedAwayError);
  if (wasBroken(error) || error instanceof DelayedError) return false;
  const { name, code, syscall, message, severity, errors } = (error ?? {}) as Readonly<Record<string, unknown>>;
  if (name === 'ReplyError') return false;
  if (typeof code === 'string') {
    if (SQLSTATE.test(code)) return severity === undefined && code.startsWith('08');
    return hadNoConnection(error as object) || (code !== 'ETIMEDOUT' && /TIMED?_?OUT/.test(code)) || (code === 'ETIMEDOUT' && syscall === undefined && errors === undefined);
  }
  return typeof message === 'string' && !/^[A-Z][A-Z0-9]+(?: |$)/.test(message) && AWAY.test(message) && !NO_FREE_CONNECTION.test(message);
}

/** The time for which an error that names used-up descriptors keeps others from counting: one may be free for a moment. */
const USED_UP_MS = 10_000;
let usedUpAt = -Infinity;

/** Notes if an error says that the process or the machine has no file descriptors left. */
export function noteUsedUp(error: unknown): void {
  const { code, errors, cause } = (error ?? {}) as { code?: unknown; errors?: unknown; cause?: unknown };
  const all = [code, ...[...(Array.isArray(errors) ? (errors as unknown[]) : []), cause].map((own) => (own as { code?: unknown } | null | undefined)?.code)];
  if (all.includes('EMFILE') || all.includes('ENFILE')) usedUpAt = performance.now();
}

/**
 * Returns true if this process can open nothing, as when clients hold all of its file descriptors, or could not a moment ago. Then no error
 * says that a server is away: it cannot be connected to, and its name is not found.
 */
function isUsedUp(): boolean {
  if (performance.now() - usedUpAt < USED_UP_MS) return true;
  try {
    closeSync(openSync(devNull, 'r'));
    return false;
  } catch (error) {
    noteUsedUp(error);
    return true;
  }
}

/** Returns true if it is certain that the command had no effect: it was not sent, or the server answered with an error. */
function wasNotApplied(error: unknown): boolean {
  if (error instanceof NotAskedError) return true;
  if (hadNoConnection(error as { code?: unknown })) return true;
  const { code, message } = error as { code?: unknown; message?: unknown };
  if (typeof code === 'string') {
    // An error of PostgreSQL undoes its statement, unless the session was ended, perhaps while it committed.
    if (SQLSTATE.test(code)) return !/^(?:08|57P)/.test(code);
  }
  return typeof message === 'string' && NO_FREE_CONNECTION.test(message);
}

function isUndecided({ outcome }: ClaimReply): boolean {
  return outcome === 'in-progress' || outcome === 'locked' || outcome === 'mismatch';
}

/** The reason of an error for the log: only its code or its message, never a query with its values. */
export function reasonOf(error: unknown): string {
  const { code, message } = error as { code?: unknown; message?: unknown };
  return typeof code === 'string' && code !== '' ? code : typeof message === 'string' ? message : 'unknown error';
}

function lostReason(): Error {
  return new Error('another attempt owns the record by now: stop');
}

/** The ownership of a record. The lease is renewed until the attempt ends. */
export class Permit {
  /** Made when it is asked for: it costs as much as ten hashes. */
  private controller: AbortController | undefined;
  private isLost = false;
  private timer: NodeJS.Timeout | undefined;
  private isEnded = false;

  /** @internal */
  constructor(
    private readonly engine: Engine,
    readonly id: Buffer,
    private readonly grant: Grant,
    private readonly policy: Policy,
    private leasedAt: Moment,
    private readonly onEnd: (isRelease: boolean) => void,
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
    if (this.controller === undefined) {
      this.controller = new AbortController();
      if (this.isLost) this.controller.abort(lostReason());
    }
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
      if ((await this.engine.renew(this.id, this.token, this.policy)) === 'fenced') {
        // After the lease, a retry that is not executed makes the outcome unknown: then no other attempt has the record.
        const record = await this.engine.lookup(this.id);
        if (record !== undefined && record.token !== this.token && !this.isEnded) {
          this.isLost = true;
          this.controller?.abort(lostReason());
          return;
        }
      }
    } catch {
      next = this.policy.leaseMs / 10;
    }
    if (!this.isEnded) this.schedule(next);
  }

  /**
   * Confirms the lease if the process may have been paused since the claim, or the machine suspended. False: nothing may be executed.
   */
  async confirm(): Promise<boolean> {
    const { leaseMs } = this.policy;
    if (this.leasedAt.age() < leaseMs / 2) return true;
    const asked = Moment.now();
    try {
      if ((await this.engine.renew(this.id, this.token, this.policy)) !== 'done' || asked.age() >= leaseMs) return false;
    } catch {
      return false;
    }
    this.leasedAt = asked;
    return true;
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
    this.onEnd(false);
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
        this.engine.warnOf(this.id, 'another attempt took over while the handler ran; there may be a second effect');
      }
      return settled;
    } finally {
      this.onEnd(end.kind === 'release');
    }
  }
}
