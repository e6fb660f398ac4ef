export { Oncegate, type Attempt, type OncegateOptions } from './gate.js';
export { express, fastify, hono, node, withIdempotency } from './middleware.js';
export { attemptOf, BodyReadEarlyError } from './node.js';
export { MemoryStore, type MemoryStoreOptions } from './memory.js';
export {
  optionsFromNames,
  SettingsError,
  UnknownSettingError,
  type CallerFunction,
  type Duration,
  type IdempotencyOptions,
  type Size,
} from './settings.js';
export type { RequestHead } from './request.js';
export {
  SealedError,
  StoreFullError,
  StoreSetupError,
  type Claim,
  type ClaimReply,
  type CompletionState,
  type OnAbandoned,
  type OwnerReply,
  type RecordView,
  type Store,
} from './store.js';
export { CorruptRecordError, decodeResponse, encodeResponse, type StoredField, type StoredResponse } from './response.js';
export { StoreUnavailableError } from './engine.js';
export { IdSecret } from './ids.js';
export { derivedKey, downstreamKey } from './identity.js';
export { PostgresStore, type Queryable } from './postgres.js';
export { RedisStore, type RedisClient, type RedisSend, type RedisStoreOptions } from './redis.js';
export { Keyring, SealedStore, type SealedStoreOptions, type SealOptions } from './seal.js';
export {
  Client,
  OpenOutcomeError,
  type ClientOptions,
  type DefiniteOutcome,
  type OpenOutcome,
  type OpenReason,
  type Outcome,
  type SendOptions,
  type Verdict,
} from './client.js';
export {
  completeInTransaction,
  FunctionError,
  idempotent,
  sidecarAttempt,
  transaction,
  type Caller,
  type FunctionErrorKind,
  type FunctionOptions,
  type SidecarAttempt,
  type TransactionAttempt,
  type TransactionOptions,
} from './functions.js';
