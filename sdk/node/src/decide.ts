// The protocol as one pure function, for the store in memory: a translation of `crates/core/src/decide.rs`, which explains each
// rule. `crates/core/vectors/decisions.json` compares the two.

export type RecordState = 'in-progress' | 'unknown' | 'completed' | 'awaited' | 'tombstone' | 'released';

/** A record. Bytes that are only compared are texts. */
export interface MemoryRecord {
  fingerprint: string;
  token: number;
  attempts: number;
  state: RecordState;
  /** While the record is in progress. */
  attempt: string;
  leaseUntil: number;
  afterAbandoned: boolean;
  /** While the record is completed. */
  response: Buffer | undefined;
  caller: string;
  keyTag: string | undefined;
  operation: string;
  createdAt: number;
  changedAt: number;
  expiresAt: number;
  steps: readonly (readonly [name: string, result: Buffer])[];
  byOperator: boolean;
}

export type Command =
  | {
      command: 'claim';
      attempt: string;
      fingerprint: string;
      leaseMs: number;
      retentionMs: number;
      onAbandoned: 'park' | 'reexecute' | 'reconcile';
      caller: string;
      keyTag: string | undefined;
      operation: string;
    }
  | { command: 'renew'; token: number; leaseMs: number; retentionMs: number }
  | { command: 'step'; token: number; number: number; name: string; result: Buffer }
  | {
      command: 'complete';
      token: number;
      state: 'completed' | 'awaited' | 'tombstone' | 'unknown';
      response: Buffer | undefined;
      retentionMs: number;
    }
  | { command: 'release'; token: number; retentionMs: number }
  | {
      command: 'resolve';
      resolution: 'complete' | 'release' | 'park';
      response: Buffer | undefined;
      retentionMs: number;
      force: boolean;
      amend: boolean;
    };

export type Outcome =
  | { outcome: 'execute'; token: number; attempts: number; leaseUntil: number; afterAbandoned: boolean }
  | { outcome: 'replay'; response: Buffer }
  | { outcome: 'in-progress'; leaseLeftMs: number }
  | { outcome: 'mismatch' | 'unknown' | 'unreplayable' }
  | { outcome: 'renewed'; leaseUntil: number }
  | { outcome: 'recorded' | 'differs' | 'full' | 'completed' | 'released' | 'fenced' }
  | { outcome: 'resolved'; stateBefore: string }
  | { outcome: 'not-resolvable'; stateBefore: string | undefined };

/** The reply, and the record to write before it. */
export interface Decision {
  outcome: Outcome;
  write?: MemoryRecord;
}

const MAX_LEASE_MS = 60 * 60 * 1000;
const MAX_STEPS = 256;
const MAX_STEPS_BYTES = 1024 * 1024;

type ClaimCommand = Extract<Command, { command: 'claim' }>;
type ResolveCommand = Extract<Command, { command: 'resolve' }>;

export function decide(record: MemoryRecord | undefined, command: Command, now: number): Decision {
  // A record past its retention is absent. Only its token still counts, so that tokens keep growing.
  const live = record !== undefined && now < record.expiresAt ? record : undefined;
  switch (command.command) {
    case 'claim':
      return decideClaim(live, record?.token, command, now);
    case 'renew': {
      if (live?.token !== command.token || live.state !== 'in-progress') return { outcome: { outcome: 'fenced' } };
      const leaseUntil = now + command.leaseMs;
      return {
        outcome: { outcome: 'renewed', leaseUntil },
        write: { ...live, leaseUntil, expiresAt: leaseUntil + command.retentionMs },
      };
    }
    case 'step':
      return decideStep(live, command);
    case 'complete':
      return decideComplete(live, command, now);
    case 'release': {
      if (live?.token !== command.token) return { outcome: { outcome: 'fenced' } };
      if (live.state === 'released') return { outcome: { outcome: 'released' } };
      if (live.state !== 'in-progress' && live.state !== 'unknown') return { outcome: { outcome: 'fenced' } };
      return { outcome: { outcome: 'released' }, write: released(live, command.retentionMs, now) };
    }
    case 'resolve':
      return decideResolve(live, command, now);
  }
}

function decideClaim(live: MemoryRecord | undefined, lastToken: number | undefined, claim: ClaimCommand, now: number): Decision {
  if (live === undefined) return execute(undefined, lastToken, claim, now, false);
  const isFree = live.state === 'released' && live.steps.length === 0;
  if (!isFree && live.fingerprint !== claim.fingerprint) return { outcome: { outcome: 'mismatch' } };
  switch (live.state) {
    case 'released':
      return execute(live, lastToken, claim, now, false);
    case 'in-progress':
      if (live.attempt === claim.attempt) {
        // The same claim, sent again: the same token, and the lease counts from now.
        const leaseUntil = now + claim.leaseMs;
        const { token, attempts, afterAbandoned } = live;
        return {
          outcome: { outcome: 'execute', token, attempts, leaseUntil, afterAbandoned },
          write: { ...live, leaseUntil, expiresAt: leaseUntil + claim.retentionMs },
        };
      }
      if (now < live.leaseUntil) return inProgress(live, claim, now);
      if (claim.onAbandoned !== 'park') return execute(live, lastToken, claim, now, true);
      return {
        outcome: { outcome: 'unknown' },
        write: { ...settled(live, 'unknown', now, now + claim.retentionMs), steps: live.steps, byOperator: false },
      };
    case 'unknown':
      return { outcome: { outcome: 'unknown' } };
    case 'completed':
      return { outcome: { outcome: 'replay', response: live.response ?? Buffer.alloc(0) } };
    case 'awaited':
    case 'tombstone':
      return { outcome: { outcome: 'unreplayable' } };
  }
}

/** Another attempt owns the record. A lease that was given before the clock was set back is shortened. */
function inProgress(live: MemoryRecord, claim: ClaimCommand, now: number): Decision {
  const leaseLeftMs = live.leaseUntil - now;
  const bound = Math.max(Math.max(0, live.leaseUntil - live.changedAt), claim.leaseMs);
  if (leaseLeftMs <= Math.max(MAX_LEASE_MS, bound)) return { outcome: { outcome: 'in-progress', leaseLeftMs } };
  const leaseUntil = now + bound;
  return {
    outcome: { outcome: 'in-progress', leaseLeftMs: bound },
    write: {
      ...live,
      leaseUntil,
      changedAt: now,
      expiresAt: leaseUntil + Math.max(0, live.expiresAt - live.leaseUntil),
    },
  };
}

function nextToken(last: number | undefined, now: number): number {
  return Math.max(last === undefined ? 0 : last + 1, now);
}

function execute(
  live: MemoryRecord | undefined,
  lastToken: number | undefined,
  claim: ClaimCommand,
  now: number,
  afterAbandoned: boolean,
): Decision {
  const token = nextToken(lastToken, now);
  const leaseUntil = now + claim.leaseMs;
  const attempts = (live?.attempts ?? 0) + 1;
  return {
    outcome: { outcome: 'execute', token, attempts, leaseUntil, afterAbandoned },
    write: {
      fingerprint: claim.fingerprint,
      token,
      attempts,
      state: 'in-progress',
      attempt: claim.attempt,
      leaseUntil,
      afterAbandoned,
      response: undefined,
      caller: claim.caller,
      keyTag: claim.keyTag,
      operation: claim.operation,
      createdAt: live?.createdAt ?? now,
      changedAt: now,
      expiresAt: leaseUntil + claim.retentionMs,
      steps: live?.steps ?? [],
      byOperator: false,
    },
  };
}

function decideStep(live: MemoryRecord | undefined, command: Extract<Command, { command: 'step' }>): Decision {
  if (live?.token !== command.token || live.state !== 'in-progress') return { outcome: { outcome: 'fenced' } };
  const same = live.steps[command.number];
  if (same !== undefined) {
    const isSame = same[0] === command.name && same[1].equals(command.result);
    return { outcome: { outcome: isSame ? 'recorded' : 'differs' } };
  }
  if (command.number > live.steps.length) return { outcome: { outcome: 'differs' } };
  const size = (name: string, result: Buffer) => Buffer.byteLength(name) + result.length;
  const total = live.steps.reduce((sum, [name, result]) => sum + size(name, result), 0);
  if (live.steps.length >= MAX_STEPS || total + size(command.name, command.result) > MAX_STEPS_BYTES) {
    return { outcome: { outcome: 'full' } };
  }
  return { outcome: { outcome: 'recorded' }, write: { ...live, steps: [...live.steps, [command.name, command.result]] } };
}

function decideComplete(
  live: MemoryRecord | undefined,
  command: Extract<Command, { command: 'complete' }>,
  now: number,
): Decision {
  const fenced: Decision = { outcome: { outcome: 'fenced' } };
  if (live?.token !== command.token) return fenced;
  const { state } = command;
  const response = state === 'completed' ? command.response : undefined;
  const mayEnd =
    live.state === 'in-progress' ||
    // An unknown outcome became known after all.
    (live.state === 'unknown' && state !== 'unknown') ||
    // The owner adds the response that its own transaction left out.
    (live.state === 'awaited' && (state === 'completed' || state === 'tombstone'));
  if (!mayEnd) {
    const isSame =
      live.state === state && (state !== 'completed' || (live.response !== undefined && response?.equals(live.response)));
    return isSame === true ? { outcome: { outcome: 'completed' } } : fenced;
  }
  // After an unknown outcome, a later attempt may have to continue after the steps.
  const steps = state === 'unknown' ? live.steps : [];
  const record = { ...settled(live, state, now, now + command.retentionMs), response, steps, byOperator: false };
  return { outcome: { outcome: 'completed' }, write: record };
}

function stateName(record: MemoryRecord, now: number): string {
  if (record.state === 'in-progress') return now >= record.leaseUntil ? 'abandoned' : 'in-progress';
  return record.state === 'awaited' ? 'tombstone' : record.state;
}

function decideResolve(live: MemoryRecord | undefined, command: ResolveCommand, now: number): Decision {
  if (live === undefined) return { outcome: { outcome: 'not-resolvable', stateBefore: undefined } };
  const stateBefore = stateName(live, now);
  if (!mayResolve(live, stateBefore, command)) return { outcome: { outcome: 'not-resolvable', stateBefore } };
  const expiresAt = now + command.retentionMs;
  let record: MemoryRecord;
  switch (command.resolution) {
    case 'complete': {
      const state = command.response === undefined ? 'tombstone' : 'completed';
      record = { ...settled(live, state, now, expiresAt), response: command.response };
      break;
    }
    case 'release':
      record = released(live, command.retentionMs, now);
      break;
    case 'park':
      // A new token that no attempt owns. The record must not expire earlier than before.
      record = {
        ...settled(live, 'unknown', now, Math.max(expiresAt, live.expiresAt)),
        token: nextToken(live.token, now),
      };
  }
  return { outcome: { outcome: 'resolved', stateBefore }, write: { ...record, byOperator: true } };
}

function mayResolve(live: MemoryRecord, from: string, { resolution, amend, force }: ResolveCommand): boolean {
  const isAmendment = amend && live.byOperator;
  if (resolution === 'park') {
    return from === 'released' || ((from === 'completed' || from === 'tombstone') && live.byOperator);
  }
  switch (from) {
    case 'unknown':
    case 'abandoned':
      return !amend;
    case 'in-progress':
      return resolution === 'release' && force && !amend;
    case 'completed':
    case 'tombstone':
      return isAmendment;
    case 'released':
      return resolution === 'complete' && (isAmendment || (!amend && live.steps.length > 0));
    default:
      return false;
  }
}

/** The record in another state than in progress. */
function settled(live: MemoryRecord, state: RecordState, now: number, expiresAt: number): MemoryRecord {
  return { ...live, state, attempt: '', leaseUntil: 0, afterAbandoned: false, response: undefined, changedAt: now, expiresAt };
}

/** A released record is kept for its token only; one with steps keeps its earlier expiry if that is later. */
function released(live: MemoryRecord, retentionMs: number, now: number): MemoryRecord {
  const expiresAt = live.steps.length === 0 ? now + retentionMs : Math.max(now + retentionMs, live.expiresAt);
  return { ...settled(live, 'released', now, expiresAt), byOperator: false };
}
