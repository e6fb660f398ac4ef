// Written by sdk/generate.py. Do not edit.
export const mark = (text: string): string => text;

/**
 * Signals, each with the marks of its rules; the first that applies counts. `h`: a header field with this value, whatever its case, or with
 * any value unless the status is 409. `m`: a member of the body with this value, by its path. `n`: a name of the error. `p`: a problem. `q`: a
 * problem that counts only with the URN of Oncegate, or next to `retry: same-key`.
 */
export const SIGNALS: readonly string[][] = [
  [
    'Replayed',
    "hidempotent-replayed=true",
    "hx-idempotent-replayed=true",
    "hidempotency-replayed=true",
    "hidempotency-replay=true",
    "hx-gcs-idempotence-request-timestamp",
  ],
  [
    'Accepted',
    "hrepeatability-result=accepted",
  ],
  [
    'InProgress',
    "prequest-in-progress",
    "m.title=A request is outstanding for this Idempotency-Key",
    "nidempotency_key_in_use",
    "nidempotency_in_flight",
    "nPREVIOUS_REQUEST_IN_PROGRESS",
    "m.details[].issue=PREVIOUS_REQUEST_IN_PROGRESS",
    "m.errorCode=704",
    "m.message[].errorName=REQUEST_WITH_SAME_IDEMPOTENCY_KEY_ALREADY_IN_PROGRESS",
    "nERR_IDEMPOTENCY_KEY_IN_PROGRESS",
    "nIDEMPOTENT_REQUEST_IN_PROGRESS",
    "m.title=Idempotency-Key Concurrency Conflict",
    "nhttps://developers.sinch.com/docs/errors/registry/idempotency-conflict",
  ],
  [
    'Again',
    "htransient-error=true",
  ],
  [
    'OutcomeUnknown',
    "poutcome-unknown",
    "precord-corrupt",
    "phost-differs",
    "pkey-expired",
    "nidempotency_host_differs",
  ],
  [
    'ReplayUnavailable',
    "preplay-unavailable",
    "preplay-denied",
    "pupstream-head-too-large",
    "pupstream-unsupported",
    "nidempotency_replay_unavailable",
  ],
  [
    'KeyReused',
    "pkey-reused",
    "m.title=Idempotency-Key is already used",
    "nidempotency_error",
    "nidempotency_key_reused",
    "nidempotency_conflict",
    "nIDEMPOTENCY_CONFLICT",
    "nidempotency_key_already_used_error",
    "nDUPLICATE_REQUEST_ID",
    "m.details[].issue=DUPLICATE_REQUEST_ID",
    "nPAYPAL_REQUEST_ID_PREVIOUSLY_USED",
    "m.details[].issue=PAYPAL_REQUEST_ID_PREVIOUSLY_USED",
    "m.errors[].code=IDEMPOTENCY_KEY_REUSED",
    "m.message[].errorName=SAME_IDEMPOTENCY_KEY_WAS_ALREADY_IN_USE_WITH_PREVIOUS_DIFFERENT_REQUEST",
    "nERR_IDEMPOTENCY_KEY_REUSED",
    "m.error.errors[].reason=idempotent_creation_conflict",
    "m.error.errorId=TransactionRequestIdempotencyKeyAlreadyExists",
    "m.__type=IdempotentParameterMismatchException",
    "m.title=Idempotency-Key Reuse",
  ],
  [
    'NotExecuted',
    "qstore-unavailable",
    "qverification-unavailable",
    "qoverloaded",
    "qrate-limited",
    "qrequest-incomplete",
    "qupstream-unreachable",
  ],
  [
    'ScopeUnavailable',
    "pscope-unavailable",
    "pscope-not-set",
    "nidempotency_scope_unavailable",
    "nidempotency_scope_not_set",
  ],
];
/** The statuses of HTTP and of gRPC that a refusal has after which nothing was executed. */
export const PROBLEM_STATUSES: readonly (readonly [problem: string, ...statuses: number[]])[] = [
  ["key-missing", 400, 3],
  ["key-invalid", 400, 3],
  ["key-unsupported", 501, 12],
  ["request-too-large", 413, 3],
  ["request-incomplete", 400, 14],
  ["overloaded", 503, 14],
  ["rate-limited", 429, 8],
  ["scope-unavailable", 400, 401, 3, 16],
  ["scope-not-set", 400, 3],
  ["verification-unavailable", 503, 14],
  ["store-unavailable", 503, 14],
  ["key-reused", 400, 422, 9],
  ["upstream-unreachable", 502, 14],
  ["request-malformed", 400, 3],
  ["request-head-too-large", 431, 3],
  ["request-unsupported", 405, 501, 12],
];
