// Written by sdk/generate.py. Do not edit.
export const contract = {
 "notice": "Written by sdk/generate.py. Do not edit.",
 "postgres_version": 1,
 "redis_version": 1,
 "profiles": {
  "ietf": {
   "title": "draft-ietf-httpapi-idempotency-key-header-07, with errors by RFC 9457",
   "sources": [
    "https://datatracker.ietf.org/doc/draft-ietf-httpapi-idempotency-key-header/",
    "https://www.rfc-editor.org/rfc/rfc9457"
   ],
   "deviations": [
    "The draft demands quotes around the key. Bare keys are accepted, too, because most clients send them.",
    "A field that cannot be parsed is refused even if keys are optional. By RFC 8941 it could be ignored, and the request would run unprotected.",
    "Responses that decide nothing about the operation (401, 403, 407, 408, 421, 425 and 429) free the key."
   ],
   "key-header": [
    "Idempotency-Key"
   ],
   "key-syntax": "lenient",
   "key-format": "any",
   "key-scope": "endpoint",
   "require-key": false,
   "methods": [
    "POST",
    "PATCH"
   ],
   "uncovered-methods": "pass",
   "retention": "24h",
   "server-errors": "replay",
   "release-statuses": [],
   "replay-marker": "Idempotent-Replayed: true",
   "echo-key": true,
   "fingerprint": {
    "body": "canonical",
    "include": [],
    "exclude": []
   },
   "refusal": {
    "media-type": "application/problem+json",
    "body": "{\"type\":\"{type}\",\"title\":\"{title}\",\"status\":{status},\"detail\":\"{detail}\",\"retry\":\"{retry}\"{instance}}"
   }
  },
  "stripe": {
   "title": "Stripe API v1",
   "sources": [
    "https://docs.stripe.com/api/idempotent_requests",
    "https://docs.stripe.com/error-low-level",
    "https://github.com/stripe/stripe-node"
   ],
   "deviations": [
    "Stripe keeps no 409 of its own. Here a 409 of the service is kept as its other errors, because it may come after an effect.",
    "Stripe keeps a 400 of an operation that had begun, and no 400 of a failed validation. Oncegate cannot tell them apart, and keeps none.",
    "An unknown outcome is refused with 500 and `Stripe-Should-Retry: false`. Stripe has no such state."
   ],
   "key-header": [
    "Idempotency-Key"
   ],
   "key-syntax": "raw",
   "key-format": "any",
   "key-scope": "caller",
   "require-key": false,
   "methods": [
    "POST"
   ],
   "uncovered-methods": "pass",
   "retention": "24h",
   "server-errors": "replay",
   "release-statuses": [
    "400"
   ],
   "replay-marker": "Idempotent-Replayed: true",
   "echo-key": true,
   "fingerprint": {
    "body": "canonical",
    "include": [],
    "exclude": []
   },
   "refusal": {
    "media-type": "application/json",
    "body": "{\"error\":{\"type\":\"{kind}\",\"code\":\"{code}\",\"message\":\"{detail}\"}}",
    "kind": "api_error",
    "4xx": {
     "kind": "invalid_request_error"
    },
    "key-missing": {
     "code": "idempotency_key_missing"
    },
    "key-invalid": {
     "code": "idempotency_key_invalid"
    },
    "scope-unavailable": {
     "code": "idempotency_scope_unavailable"
    },
    "scope-not-set": {
     "code": "idempotency_scope_not_set"
    },
    "key-reused": {
     "status": 400,
     "kind": "idempotency_error",
     "code": "idempotency_key_reused"
    },
    "host-differs": {
     "status": 400,
     "kind": "idempotency_error",
     "code": "idempotency_host_differs"
    },
    "rate-limited": {
     "code": "rate_limit"
    },
    "request-in-progress": {
     "code": "idempotency_key_in_use"
    },
    "replay-unavailable": {
     "status": 400,
     "kind": "idempotency_error",
     "code": "idempotency_replay_unavailable"
    }
   },
   "key-scope-header": [
    "Stripe-Account",
    "Stripe-Context"
   ],
   "headers": {
    "response": {
     "Original-Request": "{response:request-id}"
    },
    "kept-server-error": {
     "Stripe-Should-Retry": "false"
    },
    "refusal": {
     "Stripe-Should-Retry": "{retryable}"
    }
   }
  },
  "classic": {
   "title": "The middleware of most tutorials",
   "sources": [
    "https://brandur.org/idempotency-keys"
   ],
   "deviations": [
    "Most such middleware executes a request again whose record has expired or whose store is away. Oncegate does not."
   ],
   "key-header": [
    "Idempotency-Key"
   ],
   "key-syntax": "lenient",
   "key-format": "any",
   "key-scope": "endpoint",
   "require-key": false,
   "methods": [
    "POST",
    "PUT",
    "PATCH"
   ],
   "uncovered-methods": "pass",
   "retention": "24h",
   "server-errors": "release",
   "release-statuses": [],
   "replay-marker": "X-Idempotent-Replayed: true",
   "echo-key": true,
   "fingerprint": {
    "body": "canonical",
    "include": [],
    "exclude": []
   },
   "refusal": {
    "media-type": "application/json",
    "body": "{\"error\":\"{reason}\",\"message\":\"{detail}\",\"type\":\"{type}\",\"retry\":\"{retry}\"}"
   }
  }
 },
 "header_fields": {
  "kept": [
   "content-type",
   "content-encoding",
   "content-language",
   "content-disposition",
   "content-location",
   "location",
   "etag",
   "last-modified",
   "link",
   "cache-control",
   "vary",
   "content-range",
   "accept-patch",
   "preference-applied",
   "deprecation",
   "sunset"
  ],
  "never": [
   "connection",
   "keep-alive",
   "proxy-connection",
   "te",
   "trailer",
   "transfer-encoding",
   "upgrade",
   "content-length",
   "date",
   "age",
   "expires",
   "set-cookie",
   "set-cookie2",
   "authorization",
   "www-authenticate",
   "authentication-info",
   "authentication-control",
   "optional-www-authenticate",
   "proxy-authenticate",
   "proxy-authentication-info",
   "proxy-authorization",
   "clear-site-data",
   "strict-transport-security",
   "alt-svc",
   "via",
   "server",
   "traceparent",
   "tracestate",
   "baggage",
   "b3",
   "x-request-id",
   "request-id",
   "x-correlation-id",
   "x-trace-id",
   "server-timing",
   "retry-after",
   "idempotency-key",
   "idempotency-store",
   "idempotency-status",
   "traceresponse",
   "grpc-trace-bin",
   "uber-trace-id",
   "sentry-trace",
   "newrelic",
   "elastic-apm-traceparent",
   "x-ot-span-context",
   "x-cloud-trace-context",
   "x-guploader-uploadid",
   "x-amzn-trace-id",
   "x-amzn-requestid",
   "x-amzn-request-id",
   "x-amz-request-id",
   "x-amz-id-2",
   "x-amz-apigw-id",
   "apigw-requestid",
   "x-ms-request-id",
   "x-ms-client-request-id",
   "x-ms-correlation-request-id",
   "x-ms-routing-request-id",
   "x-msedge-ref",
   "x-azure-ref",
   "request-context",
   "x-correlationid",
   "correlation-id",
   "x-oss-request-id",
   "eagleeye-traceid",
   "cf-ray",
   "cf-request-id",
   "fly-request-id",
   "x-vercel-id",
   "x-nf-request-id",
   "x-akamai-request-id",
   "x-served-by",
   "x-timer",
   "x-github-request-id",
   "x-gitlab-meta",
   "paypal-debug-id",
   "x-shopify-request-id",
   "x-runtime"
  ],
  "never_prefixes": [
   "access-control-",
   "oncegate-",
   "ratelimit",
   "x-ratelimit-",
   "x-b3-",
   "x-datadog-",
   "x-instana-",
   "x-envoy-",
   "x-amz-cf-",
   "x-newrelic-"
  ],
  "usual": [
   "accept",
   "accept-encoding",
   "accept-language",
   "connection",
   "content-encoding",
   "content-length",
   "content-type",
   "forwarded",
   "host",
   "idempotency-key",
   "origin",
   "referer",
   "traceparent",
   "user-agent",
   "via",
   "x-forwarded-for",
   "x-forwarded-host",
   "x-forwarded-proto",
   "x-request-id"
  ],
  "callers": [
   "cookie",
   "cookie2",
   "remote-user",
   "x-remote-user",
   "x-forwarded-user",
   "x-forwarded-email",
   "x-auth-request-user",
   "x-consumer-id"
  ],
  "caller_parts": [
   "api-key",
   "apikey",
   "access-key",
   "accesskey",
   "app-key",
   "appkey",
   "assertion",
   "bearer",
   "credential",
   "client-cert",
   "clientcert",
   "client-dn",
   "client-s-dn",
   "client-key",
   "dpop",
   "functions-key",
   "hmac",
   "identity",
   "jwt",
   "license-key",
   "master-key",
   "oidc",
   "password",
   "passwd",
   "passphrase",
   "principal",
   "private-key",
   "saml",
   "secret",
   "session",
   "signature",
   "subscription-key",
   "token",
   "user-id",
   "userid",
   "user-name",
   "username",
   "user-email",
   "user-login"
  ],
  "no_caller_parts": [
   "csrf",
   "xsrf",
   "antiforgery",
   "anti-forgery",
   "verificationtoken",
   "captcha",
   "idempoten"
  ]
 },
 "conditions": [
  {
   "detail": "This operation requires a key in {place}. Make one per intent, such as a UUID, and send it with every retry.",
   "name": "key-missing",
   "retry": "fix-request",
   "status": 400,
   "title": "Idempotency-Key is missing"
  },
  {
   "detail": "The key is malformed.",
   "name": "key-invalid",
   "retry": "fix-request",
   "status": 400,
   "title": "Idempotency-Key is invalid"
  },
  {
   "detail": "Nothing was executed now. The request was sent first so long ago that its key may have been forgotten, so it may have taken effect then. Find out what happened before you send a new request.",
   "name": "key-expired",
   "retry": "stop",
   "status": 412,
   "title": "The request is too old for its Idempotency-Key"
  },
  {
   "detail": "Nothing was executed. Requests with this method are not protected by a key; send it without a key if it may take effect twice.",
   "name": "key-unsupported",
   "retry": "fix-request",
   "status": 501,
   "title": "The operation does not support an Idempotency-Key"
  },
  {
   "detail": "Nothing was executed. Send a smaller body.",
   "name": "request-too-large",
   "retry": "fix-request",
   "status": 413,
   "title": "The request is too large to be protected by an Idempotency-Key"
  },
  {
   "detail": "Nothing was executed. Send the request again.",
   "name": "request-incomplete",
   "retry": "same-key",
   "status": 400,
   "title": "The request ended before its body was complete"
  },
  {
   "detail": "Nothing was executed: a limit of the server is reached at the moment. Send the same request with the same key later.",
   "name": "overloaded",
   "retry": "same-key",
   "status": 503,
   "title": "The service is at its limit at the moment"
  },
  {
   "detail": "Nothing was executed for this request: a rate limit is exceeded. Send the same request with the same key later.",
   "name": "rate-limited",
   "retry": "same-key",
   "status": 429,
   "title": "Too many requests"
  },
  {
   "detail": "The request lacks the field that identifies its caller, or has it twice. Nothing was executed for this request.",
   "name": "scope-unavailable",
   "retry": "fix-request",
   "status": 400,
   "title": "The request does not identify its caller"
  },
  {
   "detail": "Nothing was executed for this request: the keys that verify tokens are not available. Send the same request with the same key later.",
   "name": "verification-unavailable",
   "retry": "same-key",
   "status": 503,
   "title": "The caller of the request cannot be verified at the moment"
  },
  {
   "detail": "The request has a credential, and the service is not configured to tell callers apart by it. Nothing was executed for this request.",
   "name": "scope-not-set",
   "retry": "fix-request",
   "status": 400,
   "title": "The service is not configured to tell the callers of this request apart"
  },
  {
   "detail": "Nothing was executed. Send the same request with the same key later.",
   "name": "store-unavailable",
   "retry": "same-key",
   "status": 503,
   "title": "The store of the Idempotency-Keys is not available at the moment"
  },
  {
   "detail": "The key was used for a different request: another body, query or other part. Nothing was executed. Send a new request with a new key.",
   "name": "key-reused",
   "retry": "new-key",
   "status": 422,
   "title": "Idempotency-Key is already used"
  },
  {
   "detail": "The key was used for the same request to another host (the name or port in Host). It may have taken effect there, and nothing was executed here. Send it again to the host that it was sent to first. With a new key it may take effect twice.",
   "name": "host-differs",
   "retry": "stop",
   "status": 422,
   "title": "The request with this Idempotency-Key was sent to another host"
  },
  {
   "detail": "The first request with this key is still being processed. Send it again with the same key later to get its response.",
   "name": "request-in-progress",
   "retry": "same-key",
   "status": 409,
   "title": "A request is outstanding for this Idempotency-Key"
  },
  {
   "detail": "The first request with this key was processed and is not processed again. Its response was too large, was streamed, was lost, or must not be kept.",
   "name": "replay-unavailable",
   "retry": "stop",
   "status": 422,
   "title": "The request was completed, but its response cannot be given again"
  },
  {
   "detail": "The first request with this key was processed and is not processed again. The service did not allow this caller to get its response: send the same request with the same key and with credentials that are valid now.",
   "name": "replay-denied",
   "retry": "stop",
   "status": 403,
   "title": "The request was completed, and its response is not given to this caller"
  },
  {
   "detail": "The first request with this key was processed and is not processed again. The service could not be asked if this caller may get its response. Send the same request with the same key later to get it.",
   "name": "authorization-unavailable",
   "retry": "same-key",
   "status": 503,
   "title": "The request was completed, and its response cannot be given at the moment"
  },
  {
   "detail": "The first request with this key was processed and is not processed again. Its response is not available at the moment. Send the same request with the same key later to get it.",
   "name": "response-awaited",
   "retry": "same-key",
   "status": 503,
   "title": "The request was completed, and its response is not available yet"
  },
  {
   "detail": "The first request with this key was processed and is not processed again. Its response is stored in encrypted form, and the key to it is missing. Send the same request with the same key later to get it.",
   "name": "response-sealed",
   "retry": "same-key",
   "status": 503,
   "title": "The request was completed, and its response cannot be opened at the moment"
  },
  {
   "detail": "It is not known how the first request with this key ended. It may have taken effect, so it is not processed again. Find out what happened before you send a new request.",
   "name": "outcome-unknown",
   "retry": "stop",
   "status": 500,
   "title": "It is not known whether the request took effect"
  },
  {
   "detail": "Nothing was executed for this request. An earlier request with this key may have taken effect: its record cannot be read, and the operator of the service has to look at it. With a new key it may take effect twice.",
   "name": "record-corrupt",
   "retry": "stop",
   "status": 500,
   "title": "The record of this Idempotency-Key cannot be read"
  },
  {
   "detail": "The service did not complete the request. The key is free to be used again for it.",
   "name": "handler-failed",
   "retry": "same-key",
   "status": 500,
   "title": "The service failed without a response"
  },
  {
   "detail": "The request did not reach the service. Send it again, with the same key if it has one.",
   "name": "upstream-unreachable",
   "retry": "same-key",
   "status": 502,
   "title": "The service is unreachable"
  },
  {
   "detail": "The request was sent to the service, and no complete response came back. It may have taken effect.",
   "name": "upstream-unanswered",
   "retry": "unprotected",
   "status": 502,
   "title": "The service gave no response"
  },
  {
   "detail": "The request was processed. The head of the service's response has more than 1000 field lines or more than 128 KiB, so that it cannot be passed on.",
   "name": "upstream-head-too-large",
   "retry": "stop",
   "status": 502,
   "title": "The head of the service's response is too large"
  },
  {
   "detail": "The request was processed. The service's response has a transfer coding other than chunked, so that it cannot be passed on.",
   "name": "upstream-unsupported",
   "retry": "stop",
   "status": 502,
   "title": "The service's response is in a form that this proxy does not pass on"
  },
  {
   "detail": "Nothing was executed. The request cannot be passed on.",
   "name": "request-malformed",
   "retry": "fix-request",
   "status": 400,
   "title": "The request is malformed"
  },
  {
   "detail": "Nothing was executed. The head of the request has more than 1000 field lines or more than 128 KiB.",
   "name": "request-head-too-large",
   "retry": "fix-request",
   "status": 431,
   "title": "The head of the request is too large"
  },
  {
   "detail": "Nothing was executed.",
   "name": "request-unsupported",
   "retry": "fix-request",
   "status": 501,
   "title": "The request asks for something that this proxy does not do"
  }
 ],
 "redis": {
  "claim": {
   "sha1": "9bd5593690f0bc6512a6a4ee9c830d653c2dff1e",
   "text": "#!lua\n-- Oncegate: contract version 1 for Redis and Valkey. A change of this text is another version.\n-- The reference is docs/reference/store-contract-redis.md.\n--\n-- claim: requests permission to execute.\n-- KEYS  1 oncegate:{<record>}\n-- ARGV  1 attempt (16 random bytes)   2 fingerprint (33 bytes: its version and the digest)   3 lease, ms   4 retention, ms\n--       5 park | reexecute | reconcile   6 caller (8 bytes)   7 operation (at most 256 bytes)\n--       8 tag of the key (8 bytes; empty or left out: operators cannot find the record by its key)\n-- Reply\n--       execute, now, token, attempts, lease until, after abandoned (0 | 1)\n--       replay, now, response\n--       in-progress, now, rest of the lease in ms\n--       mismatch | unknown | unreplayable, now\n\n-- The server's time in milliseconds since 1970.\nlocal time = redis.call('TIME')\nlocal now = time[1] * 1000 + math.floor(time[2] / 1000)\n\nlocal MAX_LEASE, MAX_RETENTION = 3600000, 34560000000\n\n-- A duration in milliseconds, from 1 to `most`: decimal digits without leading zeros.\nlocal function duration(digits, most)\n  local value = digits and string.find(digits, '^[1-9]%d*$') and tonumber(digits)\n  return value and value <= most and value or nil\nend\n\nlocal key = KEYS[1]\n\n-- Lua numbers are exact below 2^53 only, and `tostring` rounds earlier.\nlocal MAX_NUMBER = 9007199254740992\n\nlocal function text(number)\n  return string.format('%d', number)\nend\n\n-- The parts of the record: the head, the steps, and the response to the end. The reference has the table. A script changes these\n-- variables and writes the whole record with one command. They are not in a table, and no function uses them: either would take\n-- the server some microseconds more at each call.\nlocal HEAD = '>BI4Bc0BBI8I8I8c16I8I4I8c33c8Bc0I2c0I2c0'\nlocal RESOLUTION = '>I8Bc0Bc0I2c0I2c0'\nlocal version, response_size, state, by_operator, after_abandoned, changed_at, expires_at, lease_until, attempt, token,\n  attempts, created_at, fingerprint, caller, key_tag, operation, resolution, steps_at\nlocal steps, number_of_steps = '', 0\nlocal value, without_response\n\n-- Returns the name and the result of the step at this position, and the position of the next one.\nlocal function step_at(bytes, at)\n  return struct.unpack('>I2c0I4c0', bytes, at)\nend\n\nvalue = redis.pcall('GET', key)\n\n-- Reads the record from `value`, which is false if there is none. A damaged record is never treated as absent.\nif type(value) == 'table' then\n  -- An error, such as that the user has no right, is no damage.\n  return string.find(value.err, '^WRONGTYPE') and redis.error_reply('CORRUPT the key holds no record') or value\nend\nlocal damage\nif value then\n  local is_whole\n  is_whole, version, response_size, state, by_operator, after_abandoned, changed_at, expires_at, lease_until, attempt, token,\n    attempts, created_at, fingerprint, caller, key_tag, operation, resolution, steps_at = pcall(struct.unpack, HEAD, value)\n  if string.byte(value) ~= 1 then\n    damage = 'the record has an unknown version'\n  elseif not (is_whole and by_operator < 2 and after_abandoned < 2 and changed_at < MAX_NUMBER and expires_at < MAX_NUMBER\n    and lease_until < MAX_NUMBER and token > 0 and token < MAX_NUMBER and attempts > 0 and created_at < MAX_NUMBER\n    and (#key_tag == 0 or #key_tag == 8) and #operation <= 256) then\n    damage = 'a part of the record is missing or out of range'\n  elseif state == 'in-progress' and (lease_until == 0 or response_size > 0)\n    or state == 'completed' and (lease_until > 0 or response_size < 7)\n    or state ~= 'in-progress' and state ~= 'completed' and (lease_until > 0 or response_size > 0\n      or state ~= 'unknown' and state ~= 'awaited' and state ~= 'tombstone' and state ~= 'released') then\n    damage = 'the state of the record is unknown or does not fit its other parts'\n  else\n    -- The steps are between the head and the response, which a lookup may leave out.\n    local steps_end = #value - (without_response and 0 or response_size)\n    if steps_at > steps_end + 1 then\n      damage = 'the end of the record is missing'\n    elseif steps_at <= steps_end then\n      steps = string.sub(value, steps_at, steps_end)\n      local at = 1\n      while not damage and at <= #steps do\n        local is_step, name, _, next_at = pcall(step_at, steps, at)\n        number_of_steps, at = number_of_steps + 1, next_at\n        if not is_step or name == '' or number_of_steps > 256 then\n          damage = 'the steps of the record cannot be read'\n        end\n      end\n    end\n  end\nend\nif damage then\n  return redis.error_reply('CORRUPT ' .. damage)\nend\n-- A record past its retention counts as absent; only its token still matters.\nlocal live = value and now < expires_at\n\nlocal claimed_attempt, claimed_fingerprint, on_abandoned = ARGV[1], ARGV[2], ARGV[5]\nlocal lease, retention = duration(ARGV[3], MAX_LEASE), duration(ARGV[4], MAX_RETENTION)\nlocal claimed_caller, claimed_operation, claimed_tag = ARGV[6], ARGV[7], ARGV[8] or ''\n\nif not (lease and retention and #claimed_attempt == 16 and #claimed_fingerprint == 33\n  and (on_abandoned == 'park' or on_abandoned == 'reexecute' or on_abandoned == 'reconcile')\n  and claimed_operation and #claimed_caller == 8 and #claimed_operation <= 256\n  and (claimed_tag == '' or #claimed_tag == 8)) then\n  return redis.error_reply('INVALID an argument is missing or out of range')\nend\n\n-- 0 if the claim is granted, 1 if it is granted after an abandoned attempt.\nlocal grant\nlocal ended_as, operator, response, reply = nil, 0, '', nil\nif not live or state == 'released' and number_of_steps == 0 then\n  grant = 0\nelseif fingerprint ~= claimed_fingerprint then\n  if string.byte(fingerprint) ~= string.byte(claimed_fingerprint) then\n    return redis.error_reply('CORRUPT the fingerprint of the record has another version and cannot be compared')\n  end\n  return {'mismatch', now}\nelseif state == 'released' then\n  grant = 0\nelseif state == 'in-progress' then\n  if attempt == claimed_attempt then\n    -- The same claim, sent again because its reply was lost.\n    lease_until, expires_at = now + lease, now + lease + retention\n    reply = {'execute', now, token, attempts, lease_until, after_abandoned}\n  elseif now < lease_until then\n    local left, bound = lease_until - now, math.max(lease_until - changed_at, lease)\n    if left <= MAX_LEASE or left <= bound then\n      return {'in-progress', now, left}\n    end\n    -- The lease was granted before the server's clock was set back, so it would last far too long. The owner keeps the record\n    -- for the longest time that its lease can have had, counted from now.\n    lease_until, changed_at, expires_at = now + bound, now, expires_at - left + bound\n    reply = {'in-progress', now, bound}\n  elseif on_abandoned == 'park' then\n    ended_as, reply = 'unknown', {'unknown', now}\n  else\n    grant = 1\n  end\nelseif state == 'unknown' then\n  return {'unknown', now}\nelseif state == 'completed' then\n  return {'replay', now, string.sub(value, -response_size)}\nelse\n  return {'unreplayable', now}\nend\n\nif grant then\n  -- The token is greater than all earlier ones.\n  token = value and token >= now and token + 1 or now\n  if token >= MAX_NUMBER then\n    return redis.error_reply('CORRUPT the token of the record cannot grow')\n  end\n  if live then\n    attempts = math.min(attempts + 1, 4294967295)\n  else\n    attempts, created_at, resolution, steps = 1, now, '', ''\n  end\n  state, by_operator, after_abandoned, changed_at = 'in-progress', 0, grant, now\n  attempt, lease_until, expires_at = claimed_attempt, now + lease, now + lease + retention\n  fingerprint, caller, operation, key_tag = claimed_fingerprint, claimed_caller, claimed_operation, claimed_tag\n  reply = {'execute', now, token, attempts, lease_until, after_abandoned}\nend\n\n-- Ends the attempt in this state.\nif ended_as then\n  local expired_at = expires_at\n  state, changed_at, expires_at, by_operator = ended_as, now, now + retention, operator\n  attempt, lease_until, after_abandoned = '\\0\\0\\0\\0\\0\\0\\0\\0\\0\\0\\0\\0\\0\\0\\0\\0', 0, 0\n  if number_of_steps > 0 or operator == 1 then\n    -- Finished steps keep their retention, and parking a record never shortens its retention.\n    if state == 'released' and number_of_steps > 0 or state == 'unknown' and operator == 1 then\n      expires_at = math.max(expires_at, expired_at)\n    end\n    -- An operator's resolution keeps the steps: it may be taken back, and the next attempt must not repeat finished steps.\n    if state ~= 'unknown' and state ~= 'released' and operator == 0 then\n      steps = ''\n    end\n  end\nend\n\n-- Writes the whole record with one command. Redis keeps it for ten minutes after its retention: if the server's clock is set\n-- back, the next token is still greater.\nredis.call('SET', key, struct.pack(HEAD, 1, #response, #state, state, by_operator, after_abandoned, changed_at, expires_at,\n  lease_until, attempt, token, attempts, created_at, fingerprint, caller, #key_tag, key_tag, #operation, operation,\n  #resolution, resolution) .. steps .. response, 'PXAT', text(expires_at + 600000))\n\nif ended_as then\n-- Notifies the watchers. The channel has the name of the key, so it is in the same slot. A user who may not publish still ends the\n-- attempt.\nredis.pcall('SPUBLISH', key, state .. ' ' .. text(token))\nend\nreturn reply\n"
  },
  "renew": {
   "sha1": "586c4076f7b4cb1398de1b902d02b4cb9cfa4f7f",
   "text": "#!lua flags=allow-oom\n-- Oncegate: contract version 1 for Redis and Valkey. A change of this text is another version.\n-- The reference is docs/reference/store-contract-redis.md.\n--\n-- renew: extends the lease. It also runs when the server is out of memory, because it makes no record larger.\n-- KEYS  1 oncegate:{<record>}\n-- ARGV  1 token   2 lease, ms   3 retention, ms\n-- Reply\n--       renewed, now, lease until\n--       fenced, now\n\n-- The server's time in milliseconds since 1970.\nlocal time = redis.call('TIME')\nlocal now = time[1] * 1000 + math.floor(time[2] / 1000)\n\nlocal MAX_LEASE, MAX_RETENTION = 3600000, 34560000000\n\n-- A duration in milliseconds, from 1 to `most`: decimal digits without leading zeros.\nlocal function duration(digits, most)\n  local value = digits and string.find(digits, '^[1-9]%d*$') and tonumber(digits)\n  return value and value <= most and value or nil\nend\n\nlocal key = KEYS[1]\n\n-- Lua numbers are exact below 2^53 only, and `tostring` rounds earlier.\nlocal MAX_NUMBER = 9007199254740992\n\nlocal function text(number)\n  return string.format('%d', number)\nend\n\n-- The parts of the record: the head, the steps, and the response to the end. The reference has the table. A script changes these\n-- variables and writes the whole record with one command. They are not in a table, and no function uses them: either would take\n-- the server some microseconds more at each call.\nlocal HEAD = '>BI4Bc0BBI8I8I8c16I8I4I8c33c8Bc0I2c0I2c0'\nlocal RESOLUTION = '>I8Bc0Bc0I2c0I2c0'\nlocal version, response_size, state, by_operator, after_abandoned, changed_at, expires_at, lease_until, attempt, token,\n  attempts, created_at, fingerprint, caller, key_tag, operation, resolution, steps_at\nlocal steps, number_of_steps = '', 0\nlocal value, without_response\n\n-- Returns the name and the result of the step at this position, and the position of the next one.\nlocal function step_at(bytes, at)\n  return struct.unpack('>I2c0I4c0', bytes, at)\nend\n\nvalue = redis.pcall('GET', key)\n\n-- Reads the record from `value`, which is false if there is none. A damaged record is never treated as absent.\nif type(value) == 'table' then\n  -- An error, such as that the user has no right, is no damage.\n  return string.find(value.err, '^WRONGTYPE') and redis.error_reply('CORRUPT the key holds no record') or value\nend\nlocal damage\nif value then\n  local is_whole\n  is_whole, version, response_size, state, by_operator, after_abandoned, changed_at, expires_at, lease_until, attempt, token,\n    attempts, created_at, fingerprint, caller, key_tag, operation, resolution, steps_at = pcall(struct.unpack, HEAD, value)\n  if string.byte(value) ~= 1 then\n    damage = 'the record has an unknown version'\n  elseif not (is_whole and by_operator < 2 and after_abandoned < 2 and changed_at < MAX_NUMBER and expires_at < MAX_NUMBER\n    and lease_until < MAX_NUMBER and token > 0 and token < MAX_NUMBER and attempts > 0 and created_at < MAX_NUMBER\n    and (#key_tag == 0 or #key_tag == 8) and #operation <= 256) then\n    damage = 'a part of the record is missing or out of range'\n  elseif state == 'in-progress' and (lease_until == 0 or response_size > 0)\n    or state == 'completed' and (lease_until > 0 or response_size < 7)\n    or state ~= 'in-progress' and state ~= 'completed' and (lease_until > 0 or response_size > 0\n      or state ~= 'unknown' and state ~= 'awaited' and state ~= 'tombstone' and state ~= 'released') then\n    damage = 'the state of the record is unknown or does not fit its other parts'\n  else\n    -- The steps are between the head and the response, which a lookup may leave out.\n    local steps_end = #value - (without_response and 0 or response_size)\n    if steps_at > steps_end + 1 then\n      damage = 'the end of the record is missing'\n    elseif steps_at <= steps_end then\n      steps = string.sub(value, steps_at, steps_end)\n      local at = 1\n      while not damage and at <= #steps do\n        local is_step, name, _, next_at = pcall(step_at, steps, at)\n        number_of_steps, at = number_of_steps + 1, next_at\n        if not is_step or name == '' or number_of_steps > 256 then\n          damage = 'the steps of the record cannot be read'\n        end\n      end\n    end\n  end\nend\nif damage then\n  return redis.error_reply('CORRUPT ' .. damage)\nend\n-- A record past its retention counts as absent; only its token still matters.\nlocal live = value and now < expires_at\n\nlocal owner, lease, retention = ARGV[1], duration(ARGV[2], MAX_LEASE), duration(ARGV[3], MAX_RETENTION)\nlocal response = ''\n\nif not (lease and retention) then\n  return redis.error_reply('INVALID an argument is missing or out of range')\nend\n\nif not live or text(token) ~= owner or state ~= 'in-progress' then\n  return {'fenced', now}\nend\nlease_until, expires_at = now + lease, now + lease + retention\n\n-- Writes the whole record with one command. Redis keeps it for ten minutes after its retention: if the server's clock is set\n-- back, the next token is still greater.\nredis.call('SET', key, struct.pack(HEAD, 1, #response, #state, state, by_operator, after_abandoned, changed_at, expires_at,\n  lease_until, attempt, token, attempts, created_at, fingerprint, caller, #key_tag, key_tag, #operation, operation,\n  #resolution, resolution) .. steps .. response, 'PXAT', text(expires_at + 600000))\n\nreturn {'renewed', now, lease_until}\n"
  },
  "step": {
   "sha1": "7f689fdf5f441285f252f7e98e37606a0100436a",
   "text": "#!lua\n-- Oncegate: contract version 1 for Redis and Valkey. A change of this text is another version.\n-- The reference is docs/reference/store-contract-redis.md.\n--\n-- step: records a finished step of an attempt, with its result.\n-- KEYS  1 oncegate:{<record>}\n-- ARGV  1 token   2 number of the step, from 0   3 name (1 to 255 bytes)   4 result (bytes)\n-- Reply\n--       recorded | differs | full | fenced, now\n\n-- The server's time in milliseconds since 1970.\nlocal time = redis.call('TIME')\nlocal now = time[1] * 1000 + math.floor(time[2] / 1000)\n\nlocal key = KEYS[1]\n\n-- Lua numbers are exact below 2^53 only, and `tostring` rounds earlier.\nlocal MAX_NUMBER = 9007199254740992\n\nlocal function text(number)\n  return string.format('%d', number)\nend\n\n-- The parts of the record: the head, the steps, and the response to the end. The reference has the table. A script changes these\n-- variables and writes the whole record with one command. They are not in a table, and no function uses them: either would take\n-- the server some microseconds more at each call.\nlocal HEAD = '>BI4Bc0BBI8I8I8c16I8I4I8c33c8Bc0I2c0I2c0'\nlocal RESOLUTION = '>I8Bc0Bc0I2c0I2c0'\nlocal version, response_size, state, by_operator, after_abandoned, changed_at, expires_at, lease_until, attempt, token,\n  attempts, created_at, fingerprint, caller, key_tag, operation, resolution, steps_at\nlocal steps, number_of_steps = '', 0\nlocal value, without_response\n\n-- Returns the name and the result of the step at this position, and the position of the next one.\nlocal function step_at(bytes, at)\n  return struct.unpack('>I2c0I4c0', bytes, at)\nend\n\nvalue = redis.pcall('GET', key)\n\n-- Reads the record from `value`, which is false if there is none. A damaged record is never treated as absent.\nif type(value) == 'table' then\n  -- An error, such as that the user has no right, is no damage.\n  return string.find(value.err, '^WRONGTYPE') and redis.error_reply('CORRUPT the key holds no record') or value\nend\nlocal damage\nif value then\n  local is_whole\n  is_whole, version, response_size, state, by_operator, after_abandoned, changed_at, expires_at, lease_until, attempt, token,\n    attempts, created_at, fingerprint, caller, key_tag, operation, resolution, steps_at = pcall(struct.unpack, HEAD, value)\n  if string.byte(value) ~= 1 then\n    damage = 'the record has an unknown version'\n  elseif not (is_whole and by_operator < 2 and after_abandoned < 2 and changed_at < MAX_NUMBER and expires_at < MAX_NUMBER\n    and lease_until < MAX_NUMBER and token > 0 and token < MAX_NUMBER and attempts > 0 and created_at < MAX_NUMBER\n    and (#key_tag == 0 or #key_tag == 8) and #operation <= 256) then\n    damage = 'a part of the record is missing or out of range'\n  elseif state == 'in-progress' and (lease_until == 0 or response_size > 0)\n    or state == 'completed' and (lease_until > 0 or response_size < 7)\n    or state ~= 'in-progress' and state ~= 'completed' and (lease_until > 0 or response_size > 0\n      or state ~= 'unknown' and state ~= 'awaited' and state ~= 'tombstone' and state ~= 'released') then\n    damage = 'the state of the record is unknown or does not fit its other parts'\n  else\n    -- The steps are between the head and the response, which a lookup may leave out.\n    local steps_end = #value - (without_response and 0 or response_size)\n    if steps_at > steps_end + 1 then\n      damage = 'the end of the record is missing'\n    elseif steps_at <= steps_end then\n      steps = string.sub(value, steps_at, steps_end)\n      local at = 1\n      while not damage and at <= #steps do\n        local is_step, name, _, next_at = pcall(step_at, steps, at)\n        number_of_steps, at = number_of_steps + 1, next_at\n        if not is_step or name == '' or number_of_steps > 256 then\n          damage = 'the steps of the record cannot be read'\n        end\n      end\n    end\n  end\nend\nif damage then\n  return redis.error_reply('CORRUPT ' .. damage)\nend\n-- A record past its retention counts as absent; only its token still matters.\nlocal live = value and now < expires_at\n\nlocal owner, digits, name, result = ARGV[1], ARGV[2] or '', ARGV[3] or '', ARGV[4]\nlocal number = (digits == '0' or string.find(digits, '^[1-9]%d*$')) and tonumber(digits)\n\nif not (number and #name >= 1 and #name <= 255 and result) then\n  return redis.error_reply('INVALID an argument is missing or out of range')\nend\n\nif not live or text(token) ~= owner or state ~= 'in-progress' then\n  return {'fenced', now}\nelseif number > number_of_steps then\n  return {'differs', now}\nend\nlocal bytes, at, step_name, step_result = #name + #result, 1\nfor before = 0, number_of_steps - 1 do\n  step_name, step_result, at = step_at(steps, at)\n  if before == number then\n    return {step_name == name and step_result == result and 'recorded' or 'differs', now}\n  end\n  bytes = bytes + #step_name + #step_result\nend\nif number_of_steps >= 256 or bytes > 1048576 then\n  return {'full', now}\nend\n-- A record in progress has no response, so its steps are at its end.\nredis.call('APPEND', key, struct.pack('>I2c0I4c0', #name, name, #result, result))\nreturn {'recorded', now}\n"
  },
  "complete": {
   "sha1": "228f01d893d413e8b7140bef5fe031179e2dfebb",
   "text": "#!lua\n-- Oncegate: contract version 1 for Redis and Valkey. A change of this text is another version.\n-- The reference is docs/reference/store-contract-redis.md.\n--\n-- complete: ends an attempt with its outcome.\n-- KEYS  1 oncegate:{<record>}\n-- ARGV  1 token   2 completed | awaited | tombstone | unknown   3 retention, ms\n--       4 response, in the published encoding (with completed)\n-- Reply\n--       completed | fenced, now\n\n-- The server's time in milliseconds since 1970.\nlocal time = redis.call('TIME')\nlocal now = time[1] * 1000 + math.floor(time[2] / 1000)\n\nlocal MAX_LEASE, MAX_RETENTION = 3600000, 34560000000\n\n-- A duration in milliseconds, from 1 to `most`: decimal digits without leading zeros.\nlocal function duration(digits, most)\n  local value = digits and string.find(digits, '^[1-9]%d*$') and tonumber(digits)\n  return value and value <= most and value or nil\nend\n\n-- Returns true if a store can read the bytes as a response in the published encoding: a final status, and complete fields with\n-- names in ASCII.\nlocal function is_response(bytes)\n  if #bytes < 7 or #bytes > 67108864 then\n    return false\n  end\n  local version, s1, s2, h1, h2, t1, t2 = string.byte(bytes, 1, 7)\n  local status, fields = s1 * 256 + s2, (h1 + t1) * 256 + h2 + t2\n  if version ~= 1 or status < 200 or status > 999 or fields > 256 then\n    return false\n  end\n  -- The start of the next field.\n  local at = 8\n  for _ = 1, fields do\n    local n1, n2, v1, v2, v3, v4 = string.byte(bytes, at, at + 5)\n    if not v4 then\n      return false\n    end\n    local name_at = at + 6\n    local value_at = name_at + n1 * 256 + n2\n    at = value_at + ((v1 * 256 + v2) * 256 + v3) * 256 + v4\n    if at > #bytes + 1 or string.find(string.sub(bytes, name_at, value_at - 1), '[\\128-\\255]') then\n      return false\n    end\n  end\n  return true\nend\n\nlocal key = KEYS[1]\n\n-- Lua numbers are exact below 2^53 only, and `tostring` rounds earlier.\nlocal MAX_NUMBER = 9007199254740992\n\nlocal function text(number)\n  return string.format('%d', number)\nend\n\n-- The parts of the record: the head, the steps, and the response to the end. The reference has the table. A script changes these\n-- variables and writes the whole record with one command. They are not in a table, and no function uses them: either would take\n-- the server some microseconds more at each call.\nlocal HEAD = '>BI4Bc0BBI8I8I8c16I8I4I8c33c8Bc0I2c0I2c0'\nlocal RESOLUTION = '>I8Bc0Bc0I2c0I2c0'\nlocal version, response_size, state, by_operator, after_abandoned, changed_at, expires_at, lease_until, attempt, token,\n  attempts, created_at, fingerprint, caller, key_tag, operation, resolution, steps_at\nlocal steps, number_of_steps = '', 0\nlocal value, without_response\n\n-- Returns the name and the result of the step at this position, and the position of the next one.\nlocal function step_at(bytes, at)\n  return struct.unpack('>I2c0I4c0', bytes, at)\nend\n\nvalue = redis.pcall('GET', key)\n\n-- Reads the record from `value`, which is false if there is none. A damaged record is never treated as absent.\nif type(value) == 'table' then\n  -- An error, such as that the user has no right, is no damage.\n  return string.find(value.err, '^WRONGTYPE') and redis.error_reply('CORRUPT the key holds no record') or value\nend\nlocal damage\nif value then\n  local is_whole\n  is_whole, version, response_size, state, by_operator, after_abandoned, changed_at, expires_at, lease_until, attempt, token,\n    attempts, created_at, fingerprint, caller, key_tag, operation, resolution, steps_at = pcall(struct.unpack, HEAD, value)\n  if string.byte(value) ~= 1 then\n    damage = 'the record has an unknown version'\n  elseif not (is_whole and by_operator < 2 and after_abandoned < 2 and changed_at < MAX_NUMBER and expires_at < MAX_NUMBER\n    and lease_until < MAX_NUMBER and token > 0 and token < MAX_NUMBER and attempts > 0 and created_at < MAX_NUMBER\n    and (#key_tag == 0 or #key_tag == 8) and #operation <= 256) then\n    damage = 'a part of the record is missing or out of range'\n  elseif state == 'in-progress' and (lease_until == 0 or response_size > 0)\n    or state == 'completed' and (lease_until > 0 or response_size < 7)\n    or state ~= 'in-progress' and state ~= 'completed' and (lease_until > 0 or response_size > 0\n      or state ~= 'unknown' and state ~= 'awaited' and state ~= 'tombstone' and state ~= 'released') then\n    damage = 'the state of the record is unknown or does not fit its other parts'\n  else\n    -- The steps are between the head and the response, which a lookup may leave out.\n    local steps_end = #value - (without_response and 0 or response_size)\n    if steps_at > steps_end + 1 then\n      damage = 'the end of the record is missing'\n    elseif steps_at <= steps_end then\n      steps = string.sub(value, steps_at, steps_end)\n      local at = 1\n      while not damage and at <= #steps do\n        local is_step, name, _, next_at = pcall(step_at, steps, at)\n        number_of_steps, at = number_of_steps + 1, next_at\n        if not is_step or name == '' or number_of_steps > 256 then\n          damage = 'the steps of the record cannot be read'\n        end\n      end\n    end\n  end\nend\nif damage then\n  return redis.error_reply('CORRUPT ' .. damage)\nend\n-- A record past its retention counts as absent; only its token still matters.\nlocal live = value and now < expires_at\n\nlocal owner, ended_as, retention, response = ARGV[1], ARGV[2], duration(ARGV[3], MAX_RETENTION), ''\nlocal operator = 0\n\nif ended_as == 'completed' then\n  response = ARGV[4] or ''\nend\nif not (retention and (ended_as == 'completed' and is_response(response)\n  or ended_as == 'awaited' or ended_as == 'tombstone' or ended_as == 'unknown')) then\n  return redis.error_reply('INVALID an argument is missing or out of range')\nend\n\nif not live or text(token) ~= owner then\n  return {'fenced', now}\nelseif not (state == 'in-progress'\n  -- The owner of an unknown outcome reports it after all.\n  or state == 'unknown' and ended_as ~= 'unknown'\n  -- The owner's own transaction left the response out; it is added once.\n  or state == 'awaited' and (ended_as == 'completed' or ended_as == 'tombstone')) then\n  -- The same completion may have been sent again because its reply was lost.\n  local is_same = state == ended_as and (state ~= 'completed' or string.sub(value, -response_size) == response)\n  return {is_same and 'completed' or 'fenced', now}\nend\n\n-- Ends the attempt in this state.\nif ended_as then\n  local expired_at = expires_at\n  state, changed_at, expires_at, by_operator = ended_as, now, now + retention, operator\n  attempt, lease_until, after_abandoned = '\\0\\0\\0\\0\\0\\0\\0\\0\\0\\0\\0\\0\\0\\0\\0\\0', 0, 0\n  if number_of_steps > 0 or operator == 1 then\n    -- Finished steps keep their retention, and parking a record never shortens its retention.\n    if state == 'released' and number_of_steps > 0 or state == 'unknown' and operator == 1 then\n      expires_at = math.max(expires_at, expired_at)\n    end\n    -- An operator's resolution keeps the steps: it may be taken back, and the next attempt must not repeat finished steps.\n    if state ~= 'unknown' and state ~= 'released' and operator == 0 then\n      steps = ''\n    end\n  end\nend\n\n-- Writes the whole record with one command. Redis keeps it for ten minutes after its retention: if the server's clock is set\n-- back, the next token is still greater.\nredis.call('SET', key, struct.pack(HEAD, 1, #response, #state, state, by_operator, after_abandoned, changed_at, expires_at,\n  lease_until, attempt, token, attempts, created_at, fingerprint, caller, #key_tag, key_tag, #operation, operation,\n  #resolution, resolution) .. steps .. response, 'PXAT', text(expires_at + 600000))\n\n-- Notifies the watchers. The channel has the name of the key, so it is in the same slot. A user who may not publish still ends the\n-- attempt.\nredis.pcall('SPUBLISH', key, state .. ' ' .. text(token))\n\nreturn {'completed', now}\n"
  },
  "release": {
   "sha1": "13b22efe3a71e8b2130cb7eb981de38b83228f40",
   "text": "#!lua flags=allow-oom\n-- Oncegate: contract version 1 for Redis and Valkey. A change of this text is another version.\n-- The reference is docs/reference/store-contract-redis.md.\n--\n-- release: ends an attempt without an outcome and frees the key. It also runs when the server is out of memory.\n-- KEYS  1 oncegate:{<record>}\n-- ARGV  1 token   2 retention, ms\n-- Reply\n--       released | fenced, now\n\n-- The server's time in milliseconds since 1970.\nlocal time = redis.call('TIME')\nlocal now = time[1] * 1000 + math.floor(time[2] / 1000)\n\nlocal MAX_LEASE, MAX_RETENTION = 3600000, 34560000000\n\n-- A duration in milliseconds, from 1 to `most`: decimal digits without leading zeros.\nlocal function duration(digits, most)\n  local value = digits and string.find(digits, '^[1-9]%d*$') and tonumber(digits)\n  return value and value <= most and value or nil\nend\n\nlocal key = KEYS[1]\n\n-- Lua numbers are exact below 2^53 only, and `tostring` rounds earlier.\nlocal MAX_NUMBER = 9007199254740992\n\nlocal function text(number)\n  return string.format('%d', number)\nend\n\n-- The parts of the record: the head, the steps, and the response to the end. The reference has the table. A script changes these\n-- variables and writes the whole record with one command. They are not in a table, and no function uses them: either would take\n-- the server some microseconds more at each call.\nlocal HEAD = '>BI4Bc0BBI8I8I8c16I8I4I8c33c8Bc0I2c0I2c0'\nlocal RESOLUTION = '>I8Bc0Bc0I2c0I2c0'\nlocal version, response_size, state, by_operator, after_abandoned, changed_at, expires_at, lease_until, attempt, token,\n  attempts, created_at, fingerprint, caller, key_tag, operation, resolution, steps_at\nlocal steps, number_of_steps = '', 0\nlocal value, without_response\n\n-- Returns the name and the result of the step at this position, and the position of the next one.\nlocal function step_at(bytes, at)\n  return struct.unpack('>I2c0I4c0', bytes, at)\nend\n\nvalue = redis.pcall('GET', key)\n\n-- Reads the record from `value`, which is false if there is none. A damaged record is never treated as absent.\nif type(value) == 'table' then\n  -- An error, such as that the user has no right, is no damage.\n  return string.find(value.err, '^WRONGTYPE') and redis.error_reply('CORRUPT the key holds no record') or value\nend\nlocal damage\nif value then\n  local is_whole\n  is_whole, version, response_size, state, by_operator, after_abandoned, changed_at, expires_at, lease_until, attempt, token,\n    attempts, created_at, fingerprint, caller, key_tag, operation, resolution, steps_at = pcall(struct.unpack, HEAD, value)\n  if string.byte(value) ~= 1 then\n    damage = 'the record has an unknown version'\n  elseif not (is_whole and by_operator < 2 and after_abandoned < 2 and changed_at < MAX_NUMBER and expires_at < MAX_NUMBER\n    and lease_until < MAX_NUMBER and token > 0 and token < MAX_NUMBER and attempts > 0 and created_at < MAX_NUMBER\n    and (#key_tag == 0 or #key_tag == 8) and #operation <= 256) then\n    damage = 'a part of the record is missing or out of range'\n  elseif state == 'in-progress' and (lease_until == 0 or response_size > 0)\n    or state == 'completed' and (lease_until > 0 or response_size < 7)\n    or state ~= 'in-progress' and state ~= 'completed' and (lease_until > 0 or response_size > 0\n      or state ~= 'unknown' and state ~= 'awaited' and state ~= 'tombstone' and state ~= 'released') then\n    damage = 'the state of the record is unknown or does not fit its other parts'\n  else\n    -- The steps are between the head and the response, which a lookup may leave out.\n    local steps_end = #value - (without_response and 0 or response_size)\n    if steps_at > steps_end + 1 then\n      damage = 'the end of the record is missing'\n    elseif steps_at <= steps_end then\n      steps = string.sub(value, steps_at, steps_end)\n      local at = 1\n      while not damage and at <= #steps do\n        local is_step, name, _, next_at = pcall(step_at, steps, at)\n        number_of_steps, at = number_of_steps + 1, next_at\n        if not is_step or name == '' or number_of_steps > 256 then\n          damage = 'the steps of the record cannot be read'\n        end\n      end\n    end\n  end\nend\nif damage then\n  return redis.error_reply('CORRUPT ' .. damage)\nend\n-- A record past its retention counts as absent; only its token still matters.\nlocal live = value and now < expires_at\n\nlocal owner, retention = ARGV[1], duration(ARGV[2], MAX_RETENTION)\nlocal ended_as, operator, response = 'released', 0, ''\n\nif not retention then\n  return redis.error_reply('INVALID an argument is missing or out of range')\nend\n\nif not live or text(token) ~= owner then\n  return {'fenced', now}\nelseif state ~= 'in-progress' and state ~= 'unknown' then\n  return {state == 'released' and 'released' or 'fenced', now}\nend\n\n-- Ends the attempt in this state.\nif ended_as then\n  local expired_at = expires_at\n  state, changed_at, expires_at, by_operator = ended_as, now, now + retention, operator\n  attempt, lease_until, after_abandoned = '\\0\\0\\0\\0\\0\\0\\0\\0\\0\\0\\0\\0\\0\\0\\0\\0', 0, 0\n  if number_of_steps > 0 or operator == 1 then\n    -- Finished steps keep their retention, and parking a record never shortens its retention.\n    if state == 'released' and number_of_steps > 0 or state == 'unknown' and operator == 1 then\n      expires_at = math.max(expires_at, expired_at)\n    end\n    -- An operator's resolution keeps the steps: it may be taken back, and the next attempt must not repeat finished steps.\n    if state ~= 'unknown' and state ~= 'released' and operator == 0 then\n      steps = ''\n    end\n  end\nend\n\n-- Writes the whole record with one command. Redis keeps it for ten minutes after its retention: if the server's clock is set\n-- back, the next token is still greater.\nredis.call('SET', key, struct.pack(HEAD, 1, #response, #state, state, by_operator, after_abandoned, changed_at, expires_at,\n  lease_until, attempt, token, attempts, created_at, fingerprint, caller, #key_tag, key_tag, #operation, operation,\n  #resolution, resolution) .. steps .. response, 'PXAT', text(expires_at + 600000))\n\n-- Notifies the watchers. The channel has the name of the key, so it is in the same slot. A user who may not publish still ends the\n-- attempt.\nredis.pcall('SPUBLISH', key, state .. ' ' .. text(token))\n\nreturn {'released', now}\n"
  },
  "resolve": {
   "sha1": "ef775e95570d0a04e6ea3c8774b442459ece2889",
   "text": "#!lua\n-- Oncegate: contract version 1 for Redis and Valkey. A change of this text is another version.\n-- The reference is docs/reference/store-contract-redis.md.\n--\n-- resolve: an operator decides the outcome of an attempt, or takes back an earlier decision of an operator.\n-- KEYS  1 oncegate:{<record>}\n--       2 oncegate:{audit}, the audit trail; left out on a Cluster, because it is in another slot\n-- ARGV  1 complete | release | park   2 retention, ms   3 force: 1 to release even if the lease still runs, or 0\n--       4 amend: 1 to replace only what an operator decided before, or 0   5 actor   6 reason\n--       7 response, in the published encoding (with complete); empty or left out: there is no response to replay\n-- Reply\n--       resolved, now, state before, state after\n--       not-resolvable, now, state (empty: there is no record)\n\n-- The server's time in milliseconds since 1970.\nlocal time = redis.call('TIME')\nlocal now = time[1] * 1000 + math.floor(time[2] / 1000)\n\nlocal MAX_LEASE, MAX_RETENTION = 3600000, 34560000000\n\n-- A duration in milliseconds, from 1 to `most`: decimal digits without leading zeros.\nlocal function duration(digits, most)\n  local value = digits and string.find(digits, '^[1-9]%d*$') and tonumber(digits)\n  return value and value <= most and value or nil\nend\n\n-- Returns true if a store can read the bytes as a response in the published encoding: a final status, and complete fields with\n-- names in ASCII.\nlocal function is_response(bytes)\n  if #bytes < 7 or #bytes > 67108864 then\n    return false\n  end\n  local version, s1, s2, h1, h2, t1, t2 = string.byte(bytes, 1, 7)\n  local status, fields = s1 * 256 + s2, (h1 + t1) * 256 + h2 + t2\n  if version ~= 1 or status < 200 or status > 999 or fields > 256 then\n    return false\n  end\n  -- The start of the next field.\n  local at = 8\n  for _ = 1, fields do\n    local n1, n2, v1, v2, v3, v4 = string.byte(bytes, at, at + 5)\n    if not v4 then\n      return false\n    end\n    local name_at = at + 6\n    local value_at = name_at + n1 * 256 + n2\n    at = value_at + ((v1 * 256 + v2) * 256 + v3) * 256 + v4\n    if at > #bytes + 1 or string.find(string.sub(bytes, name_at, value_at - 1), '[\\128-\\255]') then\n      return false\n    end\n  end\n  return true\nend\n\n-- The audit trail is a stream of the newest entries, numbered from 1.\nlocal AUDIT_MAX = 100000\n\nlocal function add_audit(trail, at, id, state_before, state_after, actor, reason, ...)\n  local last = redis.call('XREVRANGE', trail, '+', '-', 'COUNT', 1)[1]\n  local next_number = last and tonumber(string.match(last[1], '^%d+')) + 1 or 1\n  redis.call('XADD', trail, 'MAXLEN', AUDIT_MAX, string.format('%.0f-0', next_number),\n    'at', at, 'record', id, 'state_before', state_before, 'state_after', state_after, 'actor', actor, 'reason', reason, ...)\n  return next_number\nend\n\nlocal key = KEYS[1]\n\n-- Lua numbers are exact below 2^53 only, and `tostring` rounds earlier.\nlocal MAX_NUMBER = 9007199254740992\n\nlocal function text(number)\n  return string.format('%d', number)\nend\n\n-- The parts of the record: the head, the steps, and the response to the end. The reference has the table. A script changes these\n-- variables and writes the whole record with one command. They are not in a table, and no function uses them: either would take\n-- the server some microseconds more at each call.\nlocal HEAD = '>BI4Bc0BBI8I8I8c16I8I4I8c33c8Bc0I2c0I2c0'\nlocal RESOLUTION = '>I8Bc0Bc0I2c0I2c0'\nlocal version, response_size, state, by_operator, after_abandoned, changed_at, expires_at, lease_until, attempt, token,\n  attempts, created_at, fingerprint, caller, key_tag, operation, resolution, steps_at\nlocal steps, number_of_steps = '', 0\nlocal value, without_response\n\n-- Returns the name and the result of the step at this position, and the position of the next one.\nlocal function step_at(bytes, at)\n  return struct.unpack('>I2c0I4c0', bytes, at)\nend\n\nvalue = redis.pcall('GET', key)\n\n-- Reads the record from `value`, which is false if there is none. A damaged record is never treated as absent.\nif type(value) == 'table' then\n  -- An error, such as that the user has no right, is no damage.\n  return string.find(value.err, '^WRONGTYPE') and redis.error_reply('CORRUPT the key holds no record') or value\nend\nlocal damage\nif value then\n  local is_whole\n  is_whole, version, response_size, state, by_operator, after_abandoned, changed_at, expires_at, lease_until, attempt, token,\n    attempts, created_at, fingerprint, caller, key_tag, operation, resolution, steps_at = pcall(struct.unpack, HEAD, value)\n  if string.byte(value) ~= 1 then\n    damage = 'the record has an unknown version'\n  elseif not (is_whole and by_operator < 2 and after_abandoned < 2 and changed_at < MAX_NUMBER and expires_at < MAX_NUMBER\n    and lease_until < MAX_NUMBER and token > 0 and token < MAX_NUMBER and attempts > 0 and created_at < MAX_NUMBER\n    and (#key_tag == 0 or #key_tag == 8) and #operation <= 256) then\n    damage = 'a part of the record is missing or out of range'\n  elseif state == 'in-progress' and (lease_until == 0 or response_size > 0)\n    or state == 'completed' and (lease_until > 0 or response_size < 7)\n    or state ~= 'in-progress' and state ~= 'completed' and (lease_until > 0 or response_size > 0\n      or state ~= 'unknown' and state ~= 'awaited' and state ~= 'tombstone' and state ~= 'released') then\n    damage = 'the state of the record is unknown or does not fit its other parts'\n  else\n    -- The steps are between the head and the response, which a lookup may leave out.\n    local steps_end = #value - (without_response and 0 or response_size)\n    if steps_at > steps_end + 1 then\n      damage = 'the end of the record is missing'\n    elseif steps_at <= steps_end then\n      steps = string.sub(value, steps_at, steps_end)\n      local at = 1\n      while not damage and at <= #steps do\n        local is_step, name, _, next_at = pcall(step_at, steps, at)\n        number_of_steps, at = number_of_steps + 1, next_at\n        if not is_step or name == '' or number_of_steps > 256 then\n          damage = 'the steps of the record cannot be read'\n        end\n      end\n    end\n  end\nend\nif damage then\n  return redis.error_reply('CORRUPT ' .. damage)\nend\n-- A record past its retention counts as absent; only its token still matters.\nlocal live = value and now < expires_at\n\nlocal decision, retention, force, amend = ARGV[1], duration(ARGV[2], MAX_RETENTION), ARGV[3], ARGV[4]\nlocal actor, reason, response = ARGV[5], ARGV[6], ARGV[7] or ''\n\nif not ((decision == 'complete' or decision == 'release' or decision == 'park') and retention\n  and (force == '0' or force == '1') and (amend == '0' or amend == '1')\n  and actor and reason and #actor <= 1000 and #reason <= 1000\n  and (response == '' or decision == 'complete' and is_response(response))) then\n  return redis.error_reply('INVALID an argument is missing or out of range')\nend\n\nif not live then\n  return {'not-resolvable', now, ''}\nend\nlocal state_before = state\nif state == 'in-progress' and now >= lease_until then\n  state_before = 'abandoned'\nelseif state == 'awaited' then\n  state_before = 'tombstone'\nend\nlocal is_completed = state_before == 'completed' or state_before == 'tombstone'\nlocal is_amendable = by_operator == 1\nlocal may\nif decision == 'park' then\n  -- A completion by the owner is final.\n  may = state_before == 'released' or is_completed and is_amendable\nelseif amend == '1' then\n  may = is_amendable and (is_completed or state_before == 'released' and decision == 'complete')\nelse\n  may = state_before == 'unknown' or state_before == 'abandoned'\n    or state_before == 'in-progress' and force == '1' and decision == 'release'\n    -- Released after some of its steps: its outcome is still open.\n    or state_before == 'released' and number_of_steps > 0 and decision == 'complete'\nend\nif not may then\n  return {'not-resolvable', now, state_before}\nend\nlocal state_after = 'released'\nif decision == 'complete' then\n  state_after = response == '' and 'tombstone' or 'completed'\nelseif decision == 'park' then\n  state_after = 'unknown'\n  -- A new token without an owner: an owner that an operator fenced stays fenced.\n  token = math.max(token + 1, now)\n  if token >= MAX_NUMBER then\n    return redis.error_reply('CORRUPT the token of the record cannot grow')\n  end\nend\n-- The entry comes first because it can fail.\nif KEYS[2] then\n  local id = string.match(key, '{(%x+)}') or key\n  add_audit(KEYS[2], text(now), id, state_before, state_after, actor, reason)\nend\nresolution = struct.pack(RESOLUTION, now, #state_before, state_before, #state_after, state_after, #actor, actor,\n  #reason, reason)\nlocal ended_as, operator = state_after, 1\n\n-- Ends the attempt in this state.\nif ended_as then\n  local expired_at = expires_at\n  state, changed_at, expires_at, by_operator = ended_as, now, now + retention, operator\n  attempt, lease_until, after_abandoned = '\\0\\0\\0\\0\\0\\0\\0\\0\\0\\0\\0\\0\\0\\0\\0\\0', 0, 0\n  if number_of_steps > 0 or operator == 1 then\n    -- Finished steps keep their retention, and parking a record never shortens its retention.\n    if state == 'released' and number_of_steps > 0 or state == 'unknown' and operator == 1 then\n      expires_at = math.max(expires_at, expired_at)\n    end\n    -- An operator's resolution keeps the steps: it may be taken back, and the next attempt must not repeat finished steps.\n    if state ~= 'unknown' and state ~= 'released' and operator == 0 then\n      steps = ''\n    end\n  end\nend\n\n-- Writes the whole record with one command. Redis keeps it for ten minutes after its retention: if the server's clock is set\n-- back, the next token is still greater.\nredis.call('SET', key, struct.pack(HEAD, 1, #response, #state, state, by_operator, after_abandoned, changed_at, expires_at,\n  lease_until, attempt, token, attempts, created_at, fingerprint, caller, #key_tag, key_tag, #operation, operation,\n  #resolution, resolution) .. steps .. response, 'PXAT', text(expires_at + 600000))\n\n-- Notifies the watchers. The channel has the name of the key, so it is in the same slot. A user who may not publish still ends the\n-- attempt.\nredis.pcall('SPUBLISH', key, state .. ' ' .. text(token))\n\nreturn {'resolved', now, state_before, state_after}\n"
  },
  "rewrite": {
   "sha1": "a7de201380036c8e431e5582281b9f68b9c22d4a",
   "text": "#!lua\n-- Oncegate: contract version 1 for Redis and Valkey. A change of this text is another version.\n-- The reference is docs/reference/store-contract-redis.md.\n--\n-- rewrite: replaces the content of a record by another form of it: its response, and the results of its steps. A record that has\n-- another token or another content than expected is left alone. Nothing else of the record changes.\n-- KEYS  1 oncegate:{<record>}\n-- ARGV  1 token   2 the response that the record has (empty: none)   3 the new response (empty: none)   4 number of steps\n--       then the results that the steps have, in their order, and then the new results\n-- Reply\n--       rewritten, now                also if the record has the new content already\n--       not-rewritten, now, state     (empty: there is no record)\n\n-- The server's time in milliseconds since 1970.\nlocal time = redis.call('TIME')\nlocal now = time[1] * 1000 + math.floor(time[2] / 1000)\n\n-- Returns true if a store can read the bytes as a response in the published encoding: a final status, and complete fields with\n-- names in ASCII.\nlocal function is_response(bytes)\n  if #bytes < 7 or #bytes > 67108864 then\n    return false\n  end\n  local version, s1, s2, h1, h2, t1, t2 = string.byte(bytes, 1, 7)\n  local status, fields = s1 * 256 + s2, (h1 + t1) * 256 + h2 + t2\n  if version ~= 1 or status < 200 or status > 999 or fields > 256 then\n    return false\n  end\n  -- The start of the next field.\n  local at = 8\n  for _ = 1, fields do\n    local n1, n2, v1, v2, v3, v4 = string.byte(bytes, at, at + 5)\n    if not v4 then\n      return false\n    end\n    local name_at = at + 6\n    local value_at = name_at + n1 * 256 + n2\n    at = value_at + ((v1 * 256 + v2) * 256 + v3) * 256 + v4\n    if at > #bytes + 1 or string.find(string.sub(bytes, name_at, value_at - 1), '[\\128-\\255]') then\n      return false\n    end\n  end\n  return true\nend\n\nlocal key = KEYS[1]\n\n-- Lua numbers are exact below 2^53 only, and `tostring` rounds earlier.\nlocal MAX_NUMBER = 9007199254740992\n\nlocal function text(number)\n  return string.format('%d', number)\nend\n\n-- The parts of the record: the head, the steps, and the response to the end. The reference has the table. A script changes these\n-- variables and writes the whole record with one command. They are not in a table, and no function uses them: either would take\n-- the server some microseconds more at each call.\nlocal HEAD = '>BI4Bc0BBI8I8I8c16I8I4I8c33c8Bc0I2c0I2c0'\nlocal RESOLUTION = '>I8Bc0Bc0I2c0I2c0'\nlocal version, response_size, state, by_operator, after_abandoned, changed_at, expires_at, lease_until, attempt, token,\n  attempts, created_at, fingerprint, caller, key_tag, operation, resolution, steps_at\nlocal steps, number_of_steps = '', 0\nlocal value, without_response\n\n-- Returns the name and the result of the step at this position, and the position of the next one.\nlocal function step_at(bytes, at)\n  return struct.unpack('>I2c0I4c0', bytes, at)\nend\n\nvalue = redis.pcall('GET', key)\n\n-- Reads the record from `value`, which is false if there is none. A damaged record is never treated as absent.\nif type(value) == 'table' then\n  -- An error, such as that the user has no right, is no damage.\n  return string.find(value.err, '^WRONGTYPE') and redis.error_reply('CORRUPT the key holds no record') or value\nend\nlocal damage\nif value then\n  local is_whole\n  is_whole, version, response_size, state, by_operator, after_abandoned, changed_at, expires_at, lease_until, attempt, token,\n    attempts, created_at, fingerprint, caller, key_tag, operation, resolution, steps_at = pcall(struct.unpack, HEAD, value)\n  if string.byte(value) ~= 1 then\n    damage = 'the record has an unknown version'\n  elseif not (is_whole and by_operator < 2 and after_abandoned < 2 and changed_at < MAX_NUMBER and expires_at < MAX_NUMBER\n    and lease_until < MAX_NUMBER and token > 0 and token < MAX_NUMBER and attempts > 0 and created_at < MAX_NUMBER\n    and (#key_tag == 0 or #key_tag == 8) and #operation <= 256) then\n    damage = 'a part of the record is missing or out of range'\n  elseif state == 'in-progress' and (lease_until == 0 or response_size > 0)\n    or state == 'completed' and (lease_until > 0 or response_size < 7)\n    or state ~= 'in-progress' and state ~= 'completed' and (lease_until > 0 or response_size > 0\n      or state ~= 'unknown' and state ~= 'awaited' and state ~= 'tombstone' and state ~= 'released') then\n    damage = 'the state of the record is unknown or does not fit its other parts'\n  else\n    -- The steps are between the head and the response, which a lookup may leave out.\n    local steps_end = #value - (without_response and 0 or response_size)\n    if steps_at > steps_end + 1 then\n      damage = 'the end of the record is missing'\n    elseif steps_at <= steps_end then\n      steps = string.sub(value, steps_at, steps_end)\n      local at = 1\n      while not damage and at <= #steps do\n        local is_step, name, _, next_at = pcall(step_at, steps, at)\n        number_of_steps, at = number_of_steps + 1, next_at\n        if not is_step or name == '' or number_of_steps > 256 then\n          damage = 'the steps of the record cannot be read'\n        end\n      end\n    end\n  end\nend\nif damage then\n  return redis.error_reply('CORRUPT ' .. damage)\nend\n-- A record past its retention counts as absent; only its token still matters.\nlocal live = value and now < expires_at\n\nlocal owner, old_response, response, digits = ARGV[1], ARGV[2], ARGV[3], ARGV[4] or ''\nlocal count = (digits == '0' or string.find(digits, '^[1-9]%d*$')) and tonumber(digits)\n\nif not (count and #ARGV == 4 + 2 * count and (old_response == '') == (response == '')\n  and (response == '' or is_response(response))) then\n  return redis.error_reply('INVALID an argument is missing or out of range')\nend\n\nif not live then\n  return {'not-rewritten', now, ''}\nend\nlocal state_before = state\nif state == 'in-progress' and now >= lease_until then\n  state_before = 'abandoned'\nelseif state == 'awaited' then\n  state_before = 'tombstone'\nend\nif text(token) ~= owner or count ~= number_of_steps then\n  return {'not-rewritten', now, state_before}\nend\nlocal kept = state == 'completed' and string.sub(value, -response_size) or ''\nlocal is_old, is_new, bytes, at = kept == old_response, kept == response, 0, 1\nlocal name, result\nlocal rewritten = {}\nfor number = 1, count do\n  name, result, at = step_at(steps, at)\n  local new_result = ARGV[4 + count + number]\n  is_old = is_old and result == ARGV[4 + number]\n  is_new = is_new and result == new_result\n  bytes = bytes + #name + #new_result\n  rewritten[number] = struct.pack('>I2c0I4c0', #name, name, #new_result, new_result)\nend\nif is_new then\n  return {'rewritten', now}\nelseif not is_old or bytes > 1048576 then\n  return {'not-rewritten', now, state_before}\nend\nsteps = table.concat(rewritten)\n\n-- Writes the whole record with one command. Redis keeps it for ten minutes after its retention: if the server's clock is set\n-- back, the next token is still greater.\nredis.call('SET', key, struct.pack(HEAD, 1, #response, #state, state, by_operator, after_abandoned, changed_at, expires_at,\n  lease_until, attempt, token, attempts, created_at, fingerprint, caller, #key_tag, key_tag, #operation, operation,\n  #resolution, resolution) .. steps .. response, 'PXAT', text(expires_at + 600000))\n\nreturn {'rewritten', now}\n"
  },
  "forget": {
   "sha1": "e50a49f056b99c88b2b1dc476cf117787878fa0f",
   "text": "#!lua flags=allow-oom\n-- Oncegate: contract version 1 for Redis and Valkey. A change of this text is another version.\n-- The reference is docs/reference/store-contract-redis.md.\n--\n-- forget: removes the content of a completed record, its response and its steps, and keeps its protection. It also runs when the\n-- server is out of memory, because it makes the record smaller.\n-- KEYS  1 oncegate:{<record>}\n--       2 oncegate:{audit}, the audit trail; left out on a Cluster, because it is in another slot\n-- ARGV  1 actor   2 reason\n-- Reply\n--       forgotten, now, state before, state after\n--       not-forgotten, now, state (empty: there is no record)\n\n-- The server's time in milliseconds since 1970.\nlocal time = redis.call('TIME')\nlocal now = time[1] * 1000 + math.floor(time[2] / 1000)\n\n-- The audit trail is a stream of the newest entries, numbered from 1.\nlocal AUDIT_MAX = 100000\n\nlocal function add_audit(trail, at, id, state_before, state_after, actor, reason, ...)\n  local last = redis.call('XREVRANGE', trail, '+', '-', 'COUNT', 1)[1]\n  local next_number = last and tonumber(string.match(last[1], '^%d+')) + 1 or 1\n  redis.call('XADD', trail, 'MAXLEN', AUDIT_MAX, string.format('%.0f-0', next_number),\n    'at', at, 'record', id, 'state_before', state_before, 'state_after', state_after, 'actor', actor, 'reason', reason, ...)\n  return next_number\nend\n\nlocal key = KEYS[1]\n\n-- Lua numbers are exact below 2^53 only, and `tostring` rounds earlier.\nlocal MAX_NUMBER = 9007199254740992\n\nlocal function text(number)\n  return string.format('%d', number)\nend\n\n-- The parts of the record: the head, the steps, and the response to the end. The reference has the table. A script changes these\n-- variables and writes the whole record with one command. They are not in a table, and no function uses them: either would take\n-- the server some microseconds more at each call.\nlocal HEAD = '>BI4Bc0BBI8I8I8c16I8I4I8c33c8Bc0I2c0I2c0'\nlocal RESOLUTION = '>I8Bc0Bc0I2c0I2c0'\nlocal version, response_size, state, by_operator, after_abandoned, changed_at, expires_at, lease_until, attempt, token,\n  attempts, created_at, fingerprint, caller, key_tag, operation, resolution, steps_at\nlocal steps, number_of_steps = '', 0\nlocal value, without_response\n\n-- Returns the name and the result of the step at this position, and the position of the next one.\nlocal function step_at(bytes, at)\n  return struct.unpack('>I2c0I4c0', bytes, at)\nend\n\nvalue = redis.pcall('GET', key)\n\n-- Reads the record from `value`, which is false if there is none. A damaged record is never treated as absent.\nif type(value) == 'table' then\n  -- An error, such as that the user has no right, is no damage.\n  return string.find(value.err, '^WRONGTYPE') and redis.error_reply('CORRUPT the key holds no record') or value\nend\nlocal damage\nif value then\n  local is_whole\n  is_whole, version, response_size, state, by_operator, after_abandoned, changed_at, expires_at, lease_until, attempt, token,\n    attempts, created_at, fingerprint, caller, key_tag, operation, resolution, steps_at = pcall(struct.unpack, HEAD, value)\n  if string.byte(value) ~= 1 then\n    damage = 'the record has an unknown version'\n  elseif not (is_whole and by_operator < 2 and after_abandoned < 2 and changed_at < MAX_NUMBER and expires_at < MAX_NUMBER\n    and lease_until < MAX_NUMBER and token > 0 and token < MAX_NUMBER and attempts > 0 and created_at < MAX_NUMBER\n    and (#key_tag == 0 or #key_tag == 8) and #operation <= 256) then\n    damage = 'a part of the record is missing or out of range'\n  elseif state == 'in-progress' and (lease_until == 0 or response_size > 0)\n    or state == 'completed' and (lease_until > 0 or response_size < 7)\n    or state ~= 'in-progress' and state ~= 'completed' and (lease_until > 0 or response_size > 0\n      or state ~= 'unknown' and state ~= 'awaited' and state ~= 'tombstone' and state ~= 'released') then\n    damage = 'the state of the record is unknown or does not fit its other parts'\n  else\n    -- The steps are between the head and the response, which a lookup may leave out.\n    local steps_end = #value - (without_response and 0 or response_size)\n    if steps_at > steps_end + 1 then\n      damage = 'the end of the record is missing'\n    elseif steps_at <= steps_end then\n      steps = string.sub(value, steps_at, steps_end)\n      local at = 1\n      while not damage and at <= #steps do\n        local is_step, name, _, next_at = pcall(step_at, steps, at)\n        number_of_steps, at = number_of_steps + 1, next_at\n        if not is_step or name == '' or number_of_steps > 256 then\n          damage = 'the steps of the record cannot be read'\n        end\n      end\n    end\n  end\nend\nif damage then\n  return redis.error_reply('CORRUPT ' .. damage)\nend\n-- A record past its retention counts as absent; only its token still matters.\nlocal live = value and now < expires_at\n\nlocal actor, reason, response = ARGV[1], ARGV[2], ''\n\nif not (actor and reason and #actor <= 1000 and #reason <= 1000) then\n  return redis.error_reply('INVALID an argument is missing or out of range')\nend\n\nif not live then\n  return {'not-forgotten', now, ''}\nend\nlocal state_before = state\nif state == 'in-progress' and now >= lease_until then\n  state_before = 'abandoned'\nelseif state == 'awaited' then\n  state_before = 'tombstone'\nend\nif not (state == 'completed' or state == 'awaited' or state == 'tombstone' and number_of_steps > 0) then\n  return {'not-forgotten', now, state_before}\nend\n-- The entry comes first because it can fail.\nif KEYS[2] then\n  local id = string.match(key, '{(%x+)}') or key\n  add_audit(KEYS[2], text(now), id, state_before, 'tombstone', actor, reason)\nend\nresolution = struct.pack(RESOLUTION, now, #state_before, state_before, 9, 'tombstone', #actor, actor, #reason, reason)\n-- An operator's completion with steps becomes final: if it were taken back, the next attempt would repeat the steps.\nif number_of_steps > 0 then\n  by_operator = 0\nend\nstate, changed_at, steps = 'tombstone', now, ''\n\n-- Writes the whole record with one command. Redis keeps it for ten minutes after its retention: if the server's clock is set\n-- back, the next token is still greater.\nredis.call('SET', key, struct.pack(HEAD, 1, #response, #state, state, by_operator, after_abandoned, changed_at, expires_at,\n  lease_until, attempt, token, attempts, created_at, fingerprint, caller, #key_tag, key_tag, #operation, operation,\n  #resolution, resolution) .. steps .. response, 'PXAT', text(expires_at + 600000))\n\nreturn {'forgotten', now, state_before, 'tombstone'}\n"
  },
  "audit": {
   "sha1": "93aa831912cb0a9ab622f159e623508a77e51eac",
   "text": "#!lua\n-- Oncegate: contract version 1 for Redis and Valkey. A change of this text is another version.\n-- The reference is docs/reference/store-contract-redis.md.\n--\n-- audit: adds an entry to the audit trail. Only a Cluster needs it, after `resolve`. Sent again, it adds nothing.\n-- KEYS  1 oncegate:{audit}\n-- ARGV  1 time, ms   2 record (64 hexadecimal digits)   3 state before   4 state after   5 actor   6 reason\n--       7 resolution (random text that identifies this resolution; the same if the call is sent again)\n-- Reply\n--       added, number of the entry\n\n-- The audit trail is a stream of the newest entries, numbered from 1.\nlocal AUDIT_MAX = 100000\n\nlocal function add_audit(trail, at, id, state_before, state_after, actor, reason, ...)\n  local last = redis.call('XREVRANGE', trail, '+', '-', 'COUNT', 1)[1]\n  local next_number = last and tonumber(string.match(last[1], '^%d+')) + 1 or 1\n  redis.call('XADD', trail, 'MAXLEN', AUDIT_MAX, string.format('%.0f-0', next_number),\n    'at', at, 'record', id, 'state_before', state_before, 'state_after', state_after, 'actor', actor, 'reason', reason, ...)\n  return next_number\nend\n\nif #ARGV < 7 or ARGV[7] == '' then\n  return redis.error_reply('INVALID an argument is missing or out of range')\nend\nfor _, entry in ipairs(redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 100)) do\n  -- The resolution is the last field of an entry of this script.\n  if entry[2][#entry[2] - 1] == 'resolution' and entry[2][#entry[2]] == ARGV[7] then\n    return {'added', tonumber((string.match(entry[1], '^%d+')))}\n  end\nend\nreturn {'added', add_audit(KEYS[1], ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6], 'resolution', ARGV[7])}\n"
  },
  "lookup": {
   "sha1": "061de7eb5340213f6ecf8f766f36239646c98ab8",
   "text": "#!lua flags=allow-oom\n-- Oncegate: contract version 1 for Redis and Valkey. A change of this text is another version.\n-- The reference is docs/reference/store-contract-redis.md.\n--\n-- lookup: reads a record. It writes nothing, but it never runs on a replica, which may be behind.\n-- KEYS  1 oncegate:{<record>}\n-- ARGV  1 head, to leave out the response (optional)\n-- Reply\n--       absent, now\n--       found, now, name of a field, its value, …\n\n-- The server's time in milliseconds since 1970.\nlocal time = redis.call('TIME')\nlocal now = time[1] * 1000 + math.floor(time[2] / 1000)\n\nlocal key = KEYS[1]\n\n-- Lua numbers are exact below 2^53 only, and `tostring` rounds earlier.\nlocal MAX_NUMBER = 9007199254740992\n\nlocal function text(number)\n  return string.format('%d', number)\nend\n\n-- The parts of the record: the head, the steps, and the response to the end. The reference has the table. A script changes these\n-- variables and writes the whole record with one command. They are not in a table, and no function uses them: either would take\n-- the server some microseconds more at each call.\nlocal HEAD = '>BI4Bc0BBI8I8I8c16I8I4I8c33c8Bc0I2c0I2c0'\nlocal RESOLUTION = '>I8Bc0Bc0I2c0I2c0'\nlocal version, response_size, state, by_operator, after_abandoned, changed_at, expires_at, lease_until, attempt, token,\n  attempts, created_at, fingerprint, caller, key_tag, operation, resolution, steps_at\nlocal steps, number_of_steps = '', 0\nlocal value, without_response\n\n-- Returns the name and the result of the step at this position, and the position of the next one.\nlocal function step_at(bytes, at)\n  return struct.unpack('>I2c0I4c0', bytes, at)\nend\n\nif ARGV[1] == 'head' then\n  -- The size of the response, which is at the end, is in the first five bytes.\n  local start = redis.pcall('GETRANGE', key, 0, 4)\n  if #start == 5 then\n    without_response = true\n    value = redis.pcall('GETRANGE', key, 0, -1 - struct.unpack('>I4', start, 2))\n  end\nend\nif not without_response then\nvalue = redis.pcall('GET', key)\nend\n\n-- Reads the record from `value`, which is false if there is none. A damaged record is never treated as absent.\nif type(value) == 'table' then\n  -- An error, such as that the user has no right, is no damage.\n  return string.find(value.err, '^WRONGTYPE') and redis.error_reply('CORRUPT the key holds no record') or value\nend\nlocal damage\nif value then\n  local is_whole\n  is_whole, version, response_size, state, by_operator, after_abandoned, changed_at, expires_at, lease_until, attempt, token,\n    attempts, created_at, fingerprint, caller, key_tag, operation, resolution, steps_at = pcall(struct.unpack, HEAD, value)\n  if string.byte(value) ~= 1 then\n    damage = 'the record has an unknown version'\n  elseif not (is_whole and by_operator < 2 and after_abandoned < 2 and changed_at < MAX_NUMBER and expires_at < MAX_NUMBER\n    and lease_until < MAX_NUMBER and token > 0 and token < MAX_NUMBER and attempts > 0 and created_at < MAX_NUMBER\n    and (#key_tag == 0 or #key_tag == 8) and #operation <= 256) then\n    damage = 'a part of the record is missing or out of range'\n  elseif state == 'in-progress' and (lease_until == 0 or response_size > 0)\n    or state == 'completed' and (lease_until > 0 or response_size < 7)\n    or state ~= 'in-progress' and state ~= 'completed' and (lease_until > 0 or response_size > 0\n      or state ~= 'unknown' and state ~= 'awaited' and state ~= 'tombstone' and state ~= 'released') then\n    damage = 'the state of the record is unknown or does not fit its other parts'\n  else\n    -- The steps are between the head and the response, which a lookup may leave out.\n    local steps_end = #value - (without_response and 0 or response_size)\n    if steps_at > steps_end + 1 then\n      damage = 'the end of the record is missing'\n    elseif steps_at <= steps_end then\n      steps = string.sub(value, steps_at, steps_end)\n      local at = 1\n      while not damage and at <= #steps do\n        local is_step, name, _, next_at = pcall(step_at, steps, at)\n        number_of_steps, at = number_of_steps + 1, next_at\n        if not is_step or name == '' or number_of_steps > 256 then\n          damage = 'the steps of the record cannot be read'\n        end\n      end\n    end\n  end\nend\nif damage then\n  return redis.error_reply('CORRUPT ' .. damage)\nend\n-- A record past its retention counts as absent; only its token still matters.\nlocal live = value and now < expires_at\n\nif not live then\n  return {'absent', now}\nend\nlocal reply = {'found', now, 'version', version, 'state', state, 'fingerprint', fingerprint, 'token', token,\n  'attempts', attempts, 'created_at', created_at, 'changed_at', changed_at, 'expires_at', expires_at, 'caller', caller,\n  'operation', operation, 'by_operator', by_operator}\n\nlocal function add(name, field)\n  table.insert(reply, name)\n  table.insert(reply, field)\nend\n\nif key_tag ~= '' then\n  add('key_tag', key_tag)\nend\nif state == 'in-progress' then\n  add('attempt', attempt)\n  add('lease_until', lease_until)\n  add('after_abandoned', after_abandoned)\nend\nif resolution ~= '' then\n  local is_resolution, at, from, to, actor, reason = pcall(struct.unpack, RESOLUTION, resolution)\n  if not is_resolution then\n    return redis.error_reply('CORRUPT the resolution of the record cannot be read')\n  end\n  add('resolved_at', at)\n  add('resolved_from', from)\n  add('resolved_to', to)\n  add('resolved_by', actor)\n  add('resolved_reason', reason)\nend\nif number_of_steps > 0 then\n  add('steps', number_of_steps)\n  local at, name, result = 1\n  for number = 0, number_of_steps - 1 do\n    name, result, at = step_at(steps, at)\n    add('step:' .. number, name)\n    add('result:' .. number, result)\n  end\nend\nif state == 'completed' and not without_response then\n  add('response', string.sub(value, -response_size))\nend\nreturn reply\n"
  }
 }
} as const;
