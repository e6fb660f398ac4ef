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
}

/** A store of records. Each method may reject with any error: then it is not known if the command was applied. */
export interface Store {
  /** The name for messages. */
  readonly name: string;
  /**
   * True if a claim whose reply was lost may still be committing when another connection asks: the reply `in-progress` to the
   * same claim, sent again, decides nothing then.
   */
  readonly claimsMayCommitLate: boolean;
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
}

/** The store has no space for new records. */
export class StoreFullError extends Error {
  override readonly name = 'StoreFullError';
}

/** The stored content is sealed, and the key to it is missing; or it must be sealed, and is not. */
export class SealedError extends Error {
  override readonly name = 'SealedError';
}

/** The store cannot be used as it is: an old schema, a missing right, another id secret. */
export class StoreSetupError extends Error {
  override readonly name = 'StoreSetupError';
}
