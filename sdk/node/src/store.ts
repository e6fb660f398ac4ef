// What the library needs of a store. PostgreSQL and Redis decide by their own functions and scripts; only the store in memory
// has the rules in this language.

/** What a claim does if an earlier owner's lease has run out. */
export type OnAbandoned = 'park' | 'reexecute';

/** A claim. Sent again with the same attempt, it is the same claim. */
export interface Claim {
  /** 16 random bytes. */
  attempt: Buffer;
  /** 33 bytes: the version and the digest. */
  fingerprint: Buffer;
  leaseMs: number;
  retentionMs: number;
  onAbandoned: OnAbandoned;
  /** The mark of the caller, 8 bytes. */
  caller: Buffer;
  /** The mark of the key, 8 bytes. */
  keyTag: Buffer;
  /** The operation for people, such as `POST /payments`. At most 256 bytes. */
  operation: string;
}

/** The ownership of a record. The token is a decimal number, which grows with each claim. */
export interface Grant {
  outcome: 'execute';
  token: string;
  attempts: number;
  afterAbandoned: boolean;
}

export type ClaimReply =
  | Grant
  | { outcome: 'replay'; response: Buffer }
  | { outcome: 'in-progress'; leaseLeftMs: number }
  | { outcome: 'mismatch' | 'unknown' | 'unreplayable' | 'locked' };

/** The reply to an owner's command. `locked`: another transaction decides now, ask again. */
export type OwnerReply = 'done' | 'fenced' | 'locked';

/** How an attempt ended. */
export type CompletionState = 'completed' | 'awaited' | 'tombstone' | 'unknown';

/** The part of a record that the library looks at. */
export interface RecordView {
  state: string;
  fingerprint: Buffer;
  token: string;
  attempt: Buffer | undefined;
  byOperator: boolean;
  response: Buffer | undefined;
  operation: string;
  /** The end of the lease in milliseconds since 1970, by the clock of the store; undefined unless the record is in progress. */
  leaseUntil: number | undefined;
  /** The end of the retention, by the same clock. */
  expiresAt: number;
}

/**
 * A store of records. Each method may reject with any error: then it is not known if the command was applied. Errors of connections as Node
 * makes them, and a `StoreUnavailableError`, say that the store is away; others do not, so that `storeOutage: 'open'` executes nothing.
 */
export interface Store {
  /** The name for messages. */
  readonly name: string;
  /**
   * True if a claim whose reply was lost may still be committing when another connection asks: the reply `in-progress` to the
   * same claim, sent again, decides nothing then.
   */
  readonly claimsMayCommitLate: boolean;
  /** Tells the store the longest time for one command, after which it gives its connection up. The longest one of several counts. */
  useTimeout?(ms: number): void;
  /** Gives the store a function for its warnings. */
  useWarnings?(warn: (message: string) => void): void;
  /**
   * True if the client of the store has reached the server of a record, got an answer, and sends it no commands: the server loads its
   * data, or has too many connections. It is asked after a command without a reply.
   */
  isTurnedAway?(id: Buffer): boolean;
  /** The name of the part of the store with a record, if parts can be away by themselves, such as nodes of a Cluster. */
  partOf?(id: Buffer): string;
  claim(id: Buffer, claim: Claim, signal?: AbortSignal): Promise<ClaimReply>;
  renew(id: Buffer, token: string, leaseMs: number, retentionMs: number): Promise<OwnerReply>;
  complete(
    id: Buffer,
    token: string,
    state: CompletionState,
    response: Buffer | undefined,
    retentionMs: number,
  ): Promise<OwnerReply>;
  release(id: Buffer, token: string, retentionMs: number): Promise<OwnerReply>;
  lookup(id: Buffer): Promise<RecordView | undefined>;
  /** Opens the response of a record that `lookup` returned, if the store seals responses. */
  opened?(id: Buffer, response: Buffer): Buffer;
}

/** The client has no connection at the moment, and has not failed to make one. */
export class ConnectionLostError extends Error {
  override readonly name = 'ConnectionLostError';
}

/**
 * A command had no answer in time, for a reason of this process: it waited for a connection of a pool, or the event loop was blocked. Or the
 * store answers other commands. It says nothing of the store.
 */
export class DelayedError extends Error {
  override readonly name = 'DelayedError';
}

/** The store has no space for new records. */
export class StoreFullError extends Error {
  override readonly name = 'StoreFullError';

  /** `isPassing`: the store is not full. It was reached, and takes no keys for a moment, such as a replica. */
  constructor(message?: string, readonly isPassing = false) {
    super(message);
  }
}

/** The stored content is sealed, and the key to it is missing; or it must be sealed, and is not. */
export class SealedError extends Error {
  override readonly name = 'SealedError';
}

/** The store cannot be used as it is: an old schema, a missing right, another id secret. */
export class StoreSetupError extends Error {
  override readonly name = 'StoreSetupError';
}
