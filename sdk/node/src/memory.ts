// A store in this process: for tests, and for services of one process that may forget all keys at a restart.
import { decide, type MemoryRecord, type Outcome, type Command } from './decide.js';
import { StoreFullError, type Claim, type ClaimReply, type CompletionState, type OwnerReply, type RecordView, type Store } from './store.js';

export interface MemoryStoreOptions {
  /** The most records, expired ones included. Beyond it, new keys are refused. 1 000 000 by default. */
  maxRecords?: number;
  /** The most bytes of stored responses. Beyond it, new keys are refused. 256 MiB by default. */
  maxBytes?: number;
  /** The time in milliseconds since 1970; it never goes back. For tests. */
  now?: () => number;
}

/** Keeps records in memory. Two processes, or two workers of a cluster, do not see each other's records. */
export class MemoryStore implements Store {
  readonly name = 'memory';
  readonly claimsMayCommitLate = false;
  private readonly records = new Map<string, MemoryRecord>();
  private readonly maxRecords: number;
  private readonly maxBytes: number;
  private readonly now: () => number;
  private bytes = 0;
  private sweep: Iterator<[string, MemoryRecord]> | undefined;

  constructor(options: MemoryStoreOptions = {}) {
    this.maxRecords = options.maxRecords ?? 1_000_000;
    this.maxBytes = options.maxBytes ?? 256 * 1024 * 1024;
    // Monotonic: a clock that is set must not end leases.
    this.now = options.now ?? (() => Math.floor(performance.timeOrigin + performance.now()));
  }

  /** The number of records, expired ones included. */
  get size(): number {
    return this.records.size;
  }

  claim(id: Buffer, claim: Claim): Promise<ClaimReply> {
    return this.run(() => {
      const key = id.toString('latin1');
      this.purgeSome();
      if (!this.records.has(key) && (this.records.size >= this.maxRecords || this.bytes >= this.maxBytes)) {
        throw new StoreFullError('the store in memory has no space for new keys; raise maxRecords or maxBytes');
      }
      const outcome = this.apply(key, {
        command: 'claim',
        attempt: claim.attempt.toString('latin1'),
        fingerprint: claim.fingerprint.toString('latin1'),
        leaseMs: claim.leaseMs,
        retentionMs: claim.retentionMs,
        onAbandoned: claim.onAbandoned,
        caller: claim.caller.toString('latin1'),
        keyTag: claim.keyTag.toString('latin1'),
        operation: claim.operation,
      });
      switch (outcome.outcome) {
        case 'execute': {
          const { attempts, afterAbandoned } = outcome;
          return { outcome: 'execute', token: String(outcome.token), attempts, afterAbandoned };
        }
        case 'replay':
        case 'in-progress':
        case 'mismatch':
        case 'unknown':
        case 'unreplayable':
          return outcome;
        default:
          throw new Error(`the store in memory answered a claim with ${outcome.outcome}`);
      }
    });
  }

  renew(id: Buffer, token: string, leaseMs: number, retentionMs: number): Promise<OwnerReply> {
    return this.own(id, { command: 'renew', token: Number(token), leaseMs, retentionMs });
  }

  complete(
    id: Buffer,
    token: string,
    state: CompletionState,
    response: Buffer | undefined,
    retentionMs: number,
  ): Promise<OwnerReply> {
    return this.own(id, { command: 'complete', token: Number(token), state, response, retentionMs });
  }

  release(id: Buffer, token: string, retentionMs: number): Promise<OwnerReply> {
    return this.own(id, { command: 'release', token: Number(token), retentionMs });
  }

  lookup(id: Buffer): Promise<RecordView | undefined> {
    return this.run(() => {
      const record = this.records.get(id.toString('latin1'));
      if (record === undefined || record.expiresAt <= this.now()) return undefined;
      return {
        state: record.state,
        fingerprint: Buffer.from(record.fingerprint, 'latin1'),
        token: String(record.token),
        attempt: record.attempt === '' ? undefined : Buffer.from(record.attempt, 'latin1'),
        byOperator: record.byOperator,
        response: record.response,
        operation: record.operation,
        leaseUntil: record.state === 'in-progress' ? record.leaseUntil : undefined,
        expiresAt: record.expiresAt,
      };
    });
  }

  private own(id: Buffer, command: Command): Promise<OwnerReply> {
    return this.run(() => (this.apply(id.toString('latin1'), command).outcome === 'fenced' ? 'fenced' : 'done'));
  }

  private run<T>(work: () => T): Promise<T> {
    try {
      return Promise.resolve(work());
    } catch (error) {
      return Promise.reject(error instanceof Error ? error : new Error(String(error)));
    }
  }

  private apply(key: string, command: Command): Outcome {
    const before = this.records.get(key);
    const { outcome, write } = decide(before, command, this.now());
    if (write !== undefined) {
      this.bytes += (write.response?.length ?? 0) - (before?.response?.length ?? 0);
      this.records.set(key, write);
    }
    return outcome;
  }

  /** Removes some records past their retention. Each claim pays for a few, so that the store needs no timer. */
  private purgeSome(): void {
    const now = this.now();
    for (let turn = 0; turn < 4; turn += 1) {
      this.sweep ??= this.records.entries();
      const next = this.sweep.next();
      if (next.done === true) {
        this.sweep = undefined;
        return;
      }
      const [key, record] = next.value;
      if (record.expiresAt > now) continue;
      this.bytes -= record.response?.length ?? 0;
      this.records.delete(key);
    }
  }
}
